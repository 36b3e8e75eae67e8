"""Several ranks make one checkpoint: what is written once, and by whom, how they start, and who
tells whom.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_checks import Start, errors, finish, read, visible
from rank_trainers import plain, same_tensors
from safetensors import safe_open
from trainers import Traces, wait_until

import sidesave
from sidesave.client.ranks.meeting import RENDEZVOUS
from sidesave.client.runs.finding import catalog_of

# What is written, and by whom ---------------------------------------------------------------------


@pytest.mark.parametrize("declared", [False, True], ids=["compared", "Replicated"])
def test_plain_state_is_written_once_by_all_ranks_together(
    start: Start, run: Path, traces: Traces, declared: bool
):
    ranks = start(4)
    ranks.do("build", "plain", 40, declared)
    ranks.do("truth", str(run.parent / "truth"))
    ranks.open(run, staging={"slots": 1})
    expected = torch.load(run.parent / "truth")
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    assert nbytes > 40 << 20
    for step in (1, 2):
        ranks.save(step)
        found = read(run, step)
        same_tensors(found.tensors, expected)
        shares = [found.nbytes(rank) for rank in range(4)]
        assert sum(shares) == nbytes
        assert max(shares) < 1.1 * nbytes / 4
    staged = max(ranks.do("staging_nbytes")) / nbytes
    assert staged < 0.3 if declared else 1.2 < staged < 1.3, (
        "what is compared is staged whole, and the share of it"
    )
    finish(ranks, run, traces)


@pytest.mark.parametrize("declared", [False, True], ids=["compared", "Replicated"])
def test_ranks_divide_the_staging_memory_of_their_node(
    start: Start, run: Path, traces: Traces, declared: bool
):
    ranks = start(2)
    ranks.do("build", "plain", 40, declared)
    ranks.open(run, staging={"node_memory_bytes": 80 << 20})
    if declared:
        ranks.save(1)
        assert max(ranks.do("staging_nbytes")) < 40 << 20
    else:
        for told in ranks.attempt("save", 1):
            assert told.error == "HostMemoryError"
            assert "allows this rank 40 MiB (83,886,080 bytes / 2 on this node)" in told.message
            assert "wrap equal ones in sidesave.Replicated" in told.message
    finish(ranks, run, traces)


@pytest.mark.parametrize("declared", [False, True], ids=["compared", "Replicated"])
def test_ranks_take_the_memory_that_was_planned(
    start: Start, run: Path, traces: Traces, declared: bool
):
    cost = sidesave.plan(plain(0, 2, 40, declared), run, world_size=2)
    ranks = start(2)
    ranks.do("build", "plain", 40, declared)
    ranks.open(run)
    ranks.save(1)
    first, second = ranks.do("staging_nbytes")
    assert first == pytest.approx(cost.slot_nbytes, abs=64 << 10), "it is that of the first rank"
    assert second == pytest.approx(cost.slot_nbytes, rel=0.02)
    finish(ranks, run, traces)


def test_what_is_to_be_whole_is_written_by_the_first_rank_and_the_others_write_the_more(
    start: Start, run: Path, traces: Traces
):
    ranks = start(2)
    ranks.do("build", "whole", 8)
    ranks.do("truth", str(run.parent / "truth"))
    ranks.open(run)
    ranks.save(1)
    expected = torch.load(run.parent / "truth")
    found = read(run, 1)
    same_tensors(found.tensors, expected)
    model = {name for name in expected if name.startswith("model.")}
    with safe_open(run / "step-00000001" / "model.rank-00000.safetensors", "pt") as file:
        assert {*file.keys()} == model
        assert all(torch.equal(file.get_tensor(name), expected[name]) for name in model)
    assert not (run / "step-00000001" / "model.rank-00001.safetensors").exists()
    assert abs(found.nbytes(0) - found.nbytes(1)) < 0.1 * found.nbytes(0)
    ranks.do("zero")
    ranks.do("load", 1)
    ranks.do("mine", str(run.parent / "loaded-{rank}"))
    for rank in range(2):
        same_tensors(torch.load(run.parent / f"loaded-{rank}"), expected)
    finish(ranks, run, traces)


@pytest.mark.parametrize("alike", [False, True], ids=["compared", "Replicated"])
def test_rows_that_one_rank_alone_has_trained_come_back_to_it_and_it_is_said_once_how_to_do_without(
    start: Start, run: Path, traces: Traces, alike: bool
):
    ranks = start(2)
    ranks.do("listen")
    ranks.do("build", "rows", alike)
    ranks.do("mine", str(run.parent / "mine-{rank}"))
    ranks.open(run)
    for step in (1, 2):
        ranks.save(step)
    told, others = ranks.do("heard")
    assert others == []
    assert [
        line.count("model.weight is one") * line.count("sidesave.Replicated") for line in told
    ] == [1] * (not alike)
    for step in (1, 2):
        assert sidesave.verify(run / f"step-{step:08d}").ok
        ranks.do("zero")
        ranks.do("load", step)
        ranks.do("mine", str(run.parent / "loaded-{rank}"))
        for rank in range(2):
            same_tensors(
                torch.load(run.parent / f"loaded-{rank}"), torch.load(run.parent / f"mine-{rank}")
            )
    finish(ranks, run, traces)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("name", "options", "apart"),
    [
        ("ddp_apart", {}, {"model.2.weight", "optimizer.state.4.momentum_buffer"}),
        (
            "ddp_apart",
            {"broadcast_buffers": False},
            {"model.2.weight", "optimizer.state.4.momentum_buffer", "model.1.running_mean"},
        ),
        (
            "fsdp_apart",
            {},
            {
                "model.expert.weight",
                "model.norm.running_mean",
                *(f"optimizer.state.{n}.scale" for n in range(6)),
            },
        ),
    ],
    ids=["DDP", "DDP without broadcast_buffers", "FSDP2"],
)
def test_what_a_parallel_model_does_not_keep_equal_is_compared(
    start: Start, run: Path, traces: Traces, name: str, options: dict[str, Any], apart: set[str]
):
    ranks = start(2)
    ranks.do("build", name, **options)
    ranks.do("mine", str(run.parent / "mine-{rank}"))
    ranks.open(run)
    ranks.save(1)
    assert set(read(run, 1).manifest.diverged) == apart
    ranks.do("zero")
    ranks.do("load", 1)
    ranks.do("mine", str(run.parent / "loaded-{rank}"))
    for rank in range(2):
        expected = torch.load(run.parent / f"mine-{rank}")
        if (
            "model.1.running_mean" in expected.keys() - apart
        ):  # the first rank's is what DDP gives to all
            expected["model.1.running_mean"].zero_()
        same_tensors(torch.load(run.parent / f"loaded-{rank}"), expected)
    finish(ranks, run, traces)


@pytest.mark.drawn
@pytest.mark.parametrize(("name", "count"), [("fsdp", 3), ("hsdp", 4), ("tp_fsdp", 4), ("ddp", 2)])
def test_state_of_a_parallel_model_is_whole_and_there_once(
    start: Start, run: Path, traces: Traces, name: str, count: int
):
    ranks = start(count).begin(name, run)
    for step in (1, 2, 3):
        truth = run.parent / f"truth-{step}"
        ranks.do("truth", str(truth))
        ranks.save(step)
        ranks.do("train")
        expected = torch.load(truth)
        found = read(run, step)
        same_tensors(found.tensors, expected)
        total = sum(tensor.nbytes for tensor in expected.values())
        assert sum(found.nbytes(rank) for rank in range(count)) == total, (
            "each byte is written once"
        )
    finish(ranks, run, traces)


def test_stages_of_a_pipeline_are_all_there_under_their_own_names(
    start: Start, run: Path, traces: Traces
):
    ranks = start(3).begin("pipeline", run)
    for step in (1, 2):
        ranks.do("mine", str(run.parent / "mine-{rank}"))
        ranks.save(step)
        found = read(run, step)
        assert {fqn.split(".")[1] for fqn in found.tensors if fqn.startswith("model.")} == {
            "layer0",
            "layer1",
            "layer2",
        }
        for rank in range(3):
            same_tensors(found.of_rank(rank), torch.load(run.parent / f"mine-{rank}"))
        ranks.do("train")
    finish(ranks, run, traces)


def test_experts_of_one_name_and_different_content_are_not_merged(
    start: Start, run: Path, traces: Traces
):
    ranks = start(3).begin("experts", run)
    ranks.do("mine", str(run.parent / "mine-{rank}"))
    for step in (1, 2):
        ranks.save(step)
        found = read(run, step)
        experts = {fqn for fqn in found.tensors if fqn.startswith("model.expert.")}
        assert found.manifest.diverged == dict.fromkeys(experts, (0, 1, 2))
        for rank in range(3):
            same_tensors(found.of_rank(rank), torch.load(run.parent / f"mine-{rank}"))
    finish(ranks, run, traces)


def test_experts_are_written_once_while_equal_and_all_from_the_save_on_that_finds_them_different(
    start: Start, run: Path, traces: Traces
):
    ranks = start(3)
    ranks.do("build", "experts", alike=True)
    ranks.open(run)
    for step, number in enumerate((None, 5.0, 6.0, None)):
        ranks[2].do("change", "model.expert.2.weight", number or 7.0)
        if not number:
            ranks.do("change", "model.expert.2.weight", 7.0)
        ranks.do("mine", str(run.parent / "mine-{rank}"))
        ranks.save(step)
        found = read(run, step)
        assert list(found.manifest.diverged) == ["model.expert.2.weight"] * bool(number)
        mine = [torch.load(run.parent / f"mine-{rank}") for rank in range(3)]
        whole = sum(tensor.nbytes for tensor in mine[0].values())
        written = sum(found.nbytes(rank) for rank in range(3))
        assert written >= 3 * whole if number else written == whole
        for rank in range(3):
            same_tensors(found.of_rank(rank) if number else found.tensors, mine[rank])
    finish(ranks, run, traces)


def test_buffers_that_differ_come_back_to_their_rank_and_another_number_of_ranks_gets_the_first_one(
    start: Start, run: Path, traces: Traces
):
    ranks = start(3).begin("batchnorm", run)
    for step in (1, 2):
        ranks.save(step)
        assert read(run, step).manifest.diverged == {"model.1.running_mean": (0, 1, 2)}
    ranks.do("zero")
    ranks.do("load", 2)
    assert ranks.do("number", "model.1.running_mean") == [0.0, 1.0, 2.0]
    finish(ranks, run, traces)
    for count in (2, 4):
        ranks = start(count)
        ranks.do("listen")
        ranks.do("build", "batchnorm")
        ranks.open(run)
        ranks.do("load", 2)
        assert ranks.do("number", "model.1.running_mean") == [0.0] * count
        for (told,) in ranks.do("heard"):
            assert (
                "model.1.running_mean differs between ranks 0, 1, 2" in told
                and "the first rank's" in told
            )
        finish(ranks, run, traces)


def test_parameters_that_differ_are_not_loaded_by_another_number_of_ranks(
    start: Start, run: Path, traces: Traces
):
    ranks = start(3).begin("experts", run)
    ranks.save(1)
    finish(ranks, run, traces)
    ranks = start(2).begin("experts", run)
    for answer in ranks.attempt("load", 1):
        assert answer.error == "StateMismatchError"
        assert "model.expert.0.weight differs between ranks 0, 1, 2" in answer.message
    finish(ranks, run, traces)


def save_positions(start: Start, run: Path, traces: Traces, count: int, **options: Any) -> None:
    ranks = start(count)
    ranks.do("build", "positions", **options)
    ranks.open(run)
    ranks.save(1)
    ranks.do("load", 1)
    assert [data.get("pos", data.get("order")) for data in ranks.do("data")] == [
        7 if options.get("same") else [at] * 3 if options.get("where") == "tensor" else at
        for at in range(10, 10 * count + 1, 10)
    ]
    finish(ranks, run, traces)


@pytest.mark.drawn
@pytest.mark.parametrize("where", ["per rank", "object", "tensor"])
def test_what_each_rank_had_is_not_loaded_by_another_number_of_ranks_that_do_not_say_how(
    start: Start, run: Path, traces: Traces, where: str
):
    save_positions(start, run, traces, 3, where=where)
    for count in (2, 4):
        ranks = start(count)
        ranks.do("build", "positions", where=where)
        ranks.open(run)
        before = ranks.do("data")
        for answer in ranks.attempt("load", 1):
            assert answer.error == "StateMismatchError"
            assert (
                f"data differs between the 3 ranks that have saved it, and {count} load"
                in answer.message.replace("data.order", "data")
            )
            assert (
                "PerRank(x, when_resized='first')" in answer.message
                and "f(values)" in answer.message
            )
        assert ranks.do("data") == before
        finish(ranks, run, traces)


@pytest.mark.parametrize("count", [2, 4])
def test_user_says_what_another_number_of_ranks_gets(
    start: Start, run: Path, traces: Traces, count: int
):
    save_positions(start, run, traces, 3)
    ranks = start(count)
    ranks.open(run)
    ranks.do("build", "positions", when="first")
    ranks.do("load", 1)
    assert ranks.do("data") == [{"pos": 10, "order": [10] * 3}] * count
    ranks.do("build", "positions", when="all")
    ranks.do("load", 1)
    chosen = [10, 20, 20, 20][:count]
    assert ranks.do("data") == [
        {"pos": pos, "order": [pos] * 3, "of": [10, 20, 30]} for pos in chosen
    ]
    finish(ranks, run, traces)


def test_what_all_ranks_had_alike_is_given_to_all_and_of_plain_numbers_rank_0s_with_a_warning(
    start: Start, run: Path, traces: Traces
):
    save_positions(start, run, traces, 3, same=True)
    for count in (2, 4):
        ranks = start(count)
        ranks.do("listen")
        ranks.do("build", "positions")
        ranks.open(run)
        ranks.do("load", 1)
        assert ranks.do("data") == [{"pos": 7, "order": [7] * 3}] * count
        assert ranks.do("heard") == [[]] * count
        finish(ranks, run, traces)
    save_positions(start, run.parent / "numbers", traces, 3, where="number")
    for count in (2, 4):
        ranks = start(count)
        ranks.do("listen")
        ranks.do("build", "positions", where="number")
        ranks.open(run.parent / "numbers")
        ranks.do("load", 1)
        assert ranks.do("data") == [{"pos": 10}] * count
        for (told,) in ranks.do("heard"):
            assert (
                f"data.pos differs between the 3 ranks that have saved it, and {count} load" in told
            )
        finish(ranks, run.parent / "numbers", traces)


def test_sum_that_is_not_yet_reduced_is_refused_by_name(start: Start, run: Path, traces: Traces):
    ranks = start(2)
    ranks.open(run)
    ranks.do("build", "partial")
    for told in ranks.attempt("save", 1):
        assert (
            told.error == "UnsupportedValueError"
            and "sum.of_all" in told.message
            and "Partial" in told.message
        )
    assert visible(run) == []
    ranks.do("build", "small")
    ranks.save(2)
    finish(ranks, run, traces)


def test_user_says_what_is_shared_and_what_is_not(start: Start, run: Path, traces: Traces):
    ranks = start(3)
    ranks.do("build", "marks")
    ranks.do("mine", str(run.parent / "mine-{rank}"))
    ranks.open(run)
    for step in (1, 2):
        ranks.save(step)
        found = read(run, step)
        assert found.manifest.diverged == {}
        for rank in range(3):
            mine = torch.load(run.parent / f"mine-{rank}")
            ema = {fqn: tensor for fqn, tensor in mine.items() if fqn.startswith("ema.")}
            suffix = f"@rank-{rank:05d}" if rank else ""
            own = {fqn + suffix: tensor for fqn, tensor in mine.items() if fqn not in ema}
            same_tensors({fqn: tensor for fqn, tensor in found.tensors.items() if fqn in ema}, ema)
            of_rank = found.of_rank(rank)
            same_tensors({fqn: of_rank[fqn] for fqn in of_rank if not fqn.startswith("ema.")}, own)
        assert sum(found.nbytes(rank) for rank in range(3)) < 1.1 * 400_000 * 4, (
            "the shared item is there once"
        )
    finish(ranks, run, traces)


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["fsdp", "experts", "small", "batchnorm"])
def test_ranks_get_back_what_they_have_saved_or_all_learn_why_not(
    start: Start, run: Path, traces: Traces, name: str
):
    ranks = start(3)
    ranks.do("build", name)
    ranks.do("mine", str(run.parent / "before-{rank}"))
    ranks.open(run)
    ranks.save(1)
    ranks.save(2)
    for step in (1, 2, None):
        ranks.do("zero")
        ranks.do("load", step)
        ranks.do("mine", str(run.parent / "after-{rank}"))
        for rank in range(3):
            after = torch.load(run.parent / f"after-{rank}")
            before = torch.load(run.parent / f"before-{rank}")
            same_tensors(after, before)
    assert errors(ranks.attempt("load", 5)) == ["CheckpointNotFoundError"] * 3
    damaged = next((run / "step-00000002").glob("*.rank-00000.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert errors(ranks.attempt("load", 2)) == ["IntegrityError"] * 3
    ranks.save(3)
    finish(ranks, run, traces)


def test_a_save_that_takes_too_much_memory_says_how_to_take_less(
    start: Start, run: Path, traces: Traces
):
    ranks = start(2)
    ranks.do("build", "plain", 20)
    ranks.open(run)
    ranks.do("set", "sidesave.stager.memory.host_memory:_RESERVE_NBYTES", 1 << 60)
    for answer in ranks.attempt("save", 1):
        assert answer.error == "HostMemoryError"
        assert "save less" in answer.message and "Replicated" in answer.message
    ranks.do("set", "sidesave.stager.memory.host_memory:_RESERVE_NBYTES", 0)
    ranks.do("build", "small")
    ranks.save(1)
    finish(ranks, run, traces)


def test_names_that_ranks_need_for_themselves_are_refused(start: Start, run: Path, traces: Traces):
    name = "rng@rank-00001"
    ranks = start(2).begin("small", run)
    ranks.do("name_tensor", name)
    for answer in ranks.attempt("save", 1):
        assert answer.error == "UnsupportedValueError" and name in answer.message
    ranks.do("put", name, None)
    ranks.save(2)
    finish(ranks, run, traces)


def test_metadata_are_those_of_rank_0(start: Start, run: Path, traces: Traces):
    ranks = start(2).begin("small", run)
    for number, rank in enumerate(ranks):
        rank.do("save", 1, metadata={"metrics": {"rank": number}, "long": "x" * 10_000})
    ranks.do("committed", 1)
    (info,) = catalog_of(str(run)).all()
    assert info.metadata["metrics"] == {"rank": 0}
    finish(ranks, run, traces)


# Nobody talks -------------------------------------------------------------------------------------


def test_ranks_do_not_talk_to_save(start: Start, run: Path, traces: Traces):
    ranks = start(3).begin("fsdp", run)
    ranks.do("forbid_talking")
    assert errors(ranks.attempt("talk")) == ["AssertionError"] * 3
    ranks.save(1)
    ranks.do("train")
    ranks.save(2)
    ranks.save(2, overwrite=True)
    ranks.do("build", "small")
    ranks.save(3)
    ranks.do("delete", 1)
    ranks.do("history")
    finish(ranks, run, traces)


def test_ranks_without_process_group_meet_in_storage_in_spite_of_what_others_have_left_there(
    start: Start, run: Path, traces: Traces
):
    before = start(2, group=False)
    before[1].tell("open", str(run))  # rank 0 never comes
    wait_until(lambda: list((run / RENDEZVOUS).glob("join.1.*")))
    before.kill()
    meeting = run / RENDEZVOUS
    for name in (
        "join.2.0123456789abcdef",
        "met.1.0123456789abcdef.fedcba9876543210",
        "fedcba9876543210.0.1",
        ".x.y",
    ):
        (meeting / name).write_text('"of another attempt"')
    sessions: set[str] = set()
    for step in (1, 2):
        ranks = start(3, group=False)
        ranks.do("build", "small")
        opened = ranks.open(run)
        assert len({each["session"] for each in opened}) == 1
        sessions.add(opened[0]["session"])
        assert all(each["latest"] == (step - 1 or None) for each in opened)
        ranks.save(step)
        read(run, step)
        names = [path.name for path in meeting.iterdir()]
        assert not [
            name
            for name in names
            if name.startswith(("join", "met", ".")) or "fedcba9876543210" in name
        ]
        finish(ranks, run, traces)
    assert len(sessions) == 2


def test_ranks_that_close_leave_nothing_where_they_met(start: Start, run: Path, traces: Traces):
    ranks = start(3, group=False).begin("small", run)
    ranks.save(1)
    finish(ranks, run, traces)
    assert list((run / RENDEZVOUS).iterdir()) == []


# The start ----------------------------------------------------------------------------------------


def test_rank_that_cannot_start_is_named_by_all_of_them(start: Start, run: Path, traces: Traces):
    ranks = start(3)
    run.mkdir()
    (run / "file").write_text("")
    for culprit in (0, 1):
        for number, rank in enumerate(ranks):
            rank.tell("open", str(run / "file" / "run" if number == culprit else run))
        for number, told in enumerate(ranks.answers()):
            assert told.error == "WriteError"
            assert number == culprit or f"rank {culprit} " in told.message
    for refused in (
        {"staging": {"slots": 0}},
        {"staging": {"on_busy": "skip"}},
        {"failures": {"fallback_directory": f"{run}-2"}},
    ):
        assert errors(ranks.attempt("open", str(run), **refused)) == ["InvalidArgumentError"] * 3
        ranks[1].tell("open", str(run), **refused)
        ranks[0].tell("open", str(run))
        ranks[2].tell("open", str(run))
        assert errors(ranks.answers()) == ["InvalidArgumentError"] * 3
    (run / "file").unlink()
    ranks.do("build", "small")
    ranks.open(run)
    ranks.save(1)
    finish(ranks, run, traces)


@pytest.mark.parametrize("group", [True, False], ids=["process group", "no process group"])
def test_directories_that_are_not_one_are_refused_by_all_ranks(
    start: Start, run: Path, traces: Traces, group: bool
):
    ranks = start(2, group=group)
    for name in ("_VISIBLE_WITHIN_S", "AGREE_TIMEOUT_S"):
        ranks.do("set", f"sidesave.client.ranks.meeting:{name}", 1.0)
    for told in ranks.attempt("open", str(run) + "-{rank}"):
        assert told.error == ("InvalidArgumentError" if group else "DaemonStartError")
        assert "rank 1" in told.message or not group
        assert "shared" in told.message or "share one directory" in told.message
    traces.check()


@pytest.mark.parametrize("group", [True, False], ids=["process group", "no process group"])
def test_rank_that_waits_for_others_says_whom_it_misses_and_how_to_save_alone(
    start: Start, run: Path, traces: Traces, tmp_path: Path, group: bool
):
    ranks = start(3, group=group)
    for present in (0, 1):
        log = tmp_path / f"log-{present}"
        ranks[present].do("listen", str(log))
        for module in ("group", "meeting"):
            ranks.do("set", f"sidesave.client.ranks.{module}:TOLD_AFTER_S", 0.1)
        ranks[present].tell("open", str(run))
        wait_until(lambda log=log: log.exists() and log.read_text().endswith("\n"))
        (told,) = log.read_text().splitlines()
        assert "distributed=False" in told
        assert ("all 3 ranks" if group else ("ranks 1, 2 of 3", "ranks 0 of 3")[present]) in told
        for number, rank in enumerate(ranks):
            if number != present:
                rank.tell("open", str(run))
        assert errors(ranks.answers()) == [None] * 3
        ranks.do("close")
    traces.check()


# What ranks tell ----------------------------------------------------------------------------------


def test_all_ranks_tell_the_same_of_steps_and_saves(start: Start, run: Path, traces: Traces):
    ranks = start(3).begin("small", run)
    for step in (1, 2, 3):
        ranks.save(step)
    ranks.do("delete", 2)
    assert ranks.do("steps") == [[[1, 3], 3]] * 3
    ranks[1].do("spoil")
    ranks.attempt("save", 4)
    for rank in (ranks[0], ranks[2]):
        rank.tell("committed", 4)
        assert rank.answer().error == "UnsupportedValueError"
    ranks[1].do("put", "spoilt", None)
    for step in (5, 6, 7):
        ranks.save(step)
    expected = [[step, "committed", None] for step in (1, 2, 3, 5, 6, 7)]
    expected.insert(3, [4, "failed", "UnsupportedValueError"])
    for told in ranks.do("history"):
        assert told == expected
    ranks[0].tell("delete", 7)
    assert ranks[0].answer().error == "InvalidArgumentError"
    finish(ranks, run, traces)
