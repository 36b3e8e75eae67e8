"""Several ranks make one checkpoint: what is written once, what happens when one of them fails, and who tells whom."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import campaigns
import pytest
import torch
from rank_trainers import Answer, Ranks, RankZygote, Stored, leftovers, orders_to, same_tensors, stored
from trainers import DEADLINE_S, Orders, Traces, await_end, pidfd_of

import sidesave
from sidesave.client.ranks.group import RENDEZVOUS
from sidesave.client.runs import catalog
from sidesave.writer_daemon.format.names import LEASE_DIRECTORY

Start = Callable[..., Ranks]


@pytest.fixture(scope="module")
def zygote() -> Iterator[RankZygote]:
    with contextlib.closing(Traces()) as traces, RankZygote(traces) as zygote:
        yield zygote


@pytest.fixture
def start(zygote: RankZygote, traces: Traces, tmp_path: Path) -> Iterator[Start]:
    """Starts the ranks of a job; see :meth:`RankZygote.start`."""
    folder = tmp_path / "groups"
    folder.mkdir()
    with contextlib.ExitStack() as jobs:
        yield lambda count, **options: jobs.enter_context(zygote.start(count, folder, traces, **options))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def ordered(tmp_path: Path) -> Iterator[tuple[Orders, dict[str, str]]]:
    """Orders to the daemons of one rank, and its environment."""
    with orders_to(tmp_path / "orders") as ordered:
        yield ordered


def visible(run: Path) -> list[int]:
    """The steps that there are, in the order of their commits."""
    return [info.step for info in catalog.scan(str(run))]


def read(run: Path, step: int) -> Stored:
    return stored(run / f"step-{step:08d}")


def is_clean(run: Path) -> None:
    """Of what was given up nothing is left but the reason, once rank 0 has tidied up."""
    wait_until(lambda: all(name.endswith(".aborted") for name in leftovers(run)))
    wait_until(lambda: {path.name for path in run.glob(".step-*.aborted/*")} <= {"abort.json"})


def finish(ranks: Iterable[Any], run: Path, traces: Traces) -> None:
    """All ranks close, and leave nothing behind."""
    ranks = list(ranks)
    for rank in ranks:
        rank.tell("close")
    for rank in ranks:
        rank.answer().get()
    assert leftovers(run) == []
    traces.check()


def errors(answers: Iterable[Answer]) -> list[str | None]:
    return [answer.error for answer in answers]


# What is written, and by whom ------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [False, True], ids=["compared", "Replicated"])
def test_plain_state_is_written_once_by_all_ranks_together(start: Start, run: Path, traces: Traces, declared: bool):
    ranks = start(4)
    ranks.do("build", "plain", 40, declared)
    ranks.do("truth", str(run.parent / "truth"))
    ranks.open(run, slots=1)
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
    assert staged < 0.3 if declared else 1.2 < staged < 1.3, "what is compared is staged whole, and the share of it"
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
    assert [line.count("model.weight is one") * line.count("sidesave.Replicated") for line in told] == [1] * (not alike)
    for step in (1, 2):
        assert sidesave.verify(run / f"step-{step:08d}").ok
        ranks.do("zero")
        ranks.do("load", step)
        ranks.do("mine", str(run.parent / "loaded-{rank}"))
        for rank in range(2):
            same_tensors(torch.load(run.parent / f"loaded-{rank}"), torch.load(run.parent / f"mine-{rank}"))
    finish(ranks, run, traces)


@pytest.mark.parametrize(
    ("name", "options", "apart"),
    [
        ("ddp_apart", {}, {"model.module.2.weight", "optimizer.state.4.momentum_buffer"}),
        (
            "ddp_apart",
            {"broadcast_buffers": False},
            {"model.module.2.weight", "optimizer.state.4.momentum_buffer", "model.module.1.running_mean"},
        ),
        (
            "fsdp_apart",
            {},
            {"model.expert.weight", "model.norm.running_mean", *(f"optimizer.state.{n}.scale" for n in range(6))},
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
    assert set(read(run, 1).manifest.apart) == apart
    ranks.do("zero")
    ranks.do("load", 1)
    ranks.do("mine", str(run.parent / "loaded-{rank}"))
    for rank in range(2):
        expected = torch.load(run.parent / f"mine-{rank}")
        if "model.module.1.running_mean" in expected.keys() - apart:  # the first rank's is what DDP gives to all
            expected["model.module.1.running_mean"].zero_()
        same_tensors(torch.load(run.parent / f"loaded-{rank}"), expected)
    finish(ranks, run, traces)


@pytest.mark.parametrize(("name", "count"), [("fsdp", 3), ("hsdp", 4), ("tp_fsdp", 4), ("ddp", 2)])
def test_state_of_a_parallel_model_is_whole_and_there_once(
    start: Start, run: Path, traces: Traces, name: str, count: int
):
    ranks = start(count)
    ranks.do("build", name)
    ranks.open(run)
    for step in (1, 2, 3):
        truth = run.parent / f"truth-{step}"
        ranks.do("truth", str(truth))
        ranks.save(step)
        ranks.do("train")
        expected = torch.load(truth)
        found = read(run, step)
        same_tensors(found.tensors, expected)
        total = sum(tensor.nbytes for tensor in expected.values())
        assert sum(found.nbytes(rank) for rank in range(count)) == total, "each byte is written once"
    finish(ranks, run, traces)


def test_stages_of_a_pipeline_are_all_there_under_their_own_names(start: Start, run: Path, traces: Traces):
    ranks = start(3)
    ranks.do("build", "pipeline")
    ranks.open(run)
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


def test_experts_of_one_name_and_different_content_are_not_merged(start: Start, run: Path, traces: Traces):
    ranks = start(3)
    ranks.do("build", "experts")
    ranks.open(run)
    ranks.do("mine", str(run.parent / "mine-{rank}"))
    for step in (1, 2):
        ranks.save(step)
        found = read(run, step)
        experts = {fqn for fqn in found.tensors if fqn.startswith("model.expert.")}
        assert found.manifest.apart == dict.fromkeys(experts, (0, 1, 2))
        for rank in range(3):
            same_tensors(found.of_rank(rank), torch.load(run.parent / f"mine-{rank}"))
    finish(ranks, run, traces)


def test_experts_are_written_once_while_they_are_equal_and_all_from_the_save_on_that_finds_them_different(
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
        assert list(found.manifest.apart) == ["model.expert.2.weight"] * bool(number)
        mine = [torch.load(run.parent / f"mine-{rank}") for rank in range(3)]
        whole = sum(tensor.nbytes for tensor in mine[0].values())
        written = sum(found.nbytes(rank) for rank in range(3))
        assert written >= 3 * whole if number else written == whole
        for rank in range(3):
            same_tensors(found.of_rank(rank) if number else found.tensors, mine[rank])
    finish(ranks, run, traces)


def test_buffers_that_differ_come_back_to_their_rank_and_of_another_number_of_ranks_all_get_the_first_one(
    start: Start, run: Path, traces: Traces
):
    ranks = start(3)
    ranks.do("build", "batchnorm")
    ranks.open(run)
    for step in (1, 2):
        ranks.save(step)
        assert read(run, step).manifest.apart == {"model.1.running_mean": (0, 1, 2)}
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
            assert "model.1.running_mean differs between ranks 0, 1, 2" in told and "the first rank's" in told
        finish(ranks, run, traces)


def test_parameters_that_differ_are_not_loaded_by_another_number_of_ranks(start: Start, run: Path, traces: Traces):
    ranks = start(3)
    ranks.do("build", "experts")
    ranks.open(run)
    ranks.save(1)
    finish(ranks, run, traces)
    ranks = start(2)
    ranks.do("build", "experts")
    ranks.open(run)
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
            assert f"data differs between the 3 ranks that have saved it, and {count} load" in answer.message.replace(
                "data.order", "data"
            )
            assert "PerRank(x, when_resized='first')" in answer.message and "f(values)" in answer.message
        assert ranks.do("data") == before
        finish(ranks, run, traces)


@pytest.mark.parametrize("count", [2, 4])
def test_user_says_what_another_number_of_ranks_gets(start: Start, run: Path, traces: Traces, count: int):
    save_positions(start, run, traces, 3)
    ranks = start(count)
    ranks.open(run)
    ranks.do("build", "positions", when="first")
    ranks.do("load", 1)
    assert ranks.do("data") == [{"pos": 10, "order": [10] * 3}] * count
    ranks.do("build", "positions", when="all")
    ranks.do("load", 1)
    chosen = [10, 20, 20, 20][:count]
    assert ranks.do("data") == [{"pos": pos, "order": [pos] * 3, "of": [10, 20, 30]} for pos in chosen]
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
            assert f"data.pos differs between the 3 ranks that have saved it, and {count} load" in told
        finish(ranks, run.parent / "numbers", traces)


def test_sum_that_is_not_yet_reduced_is_refused_by_name(start: Start, run: Path, traces: Traces):
    ranks = start(2)
    ranks.open(run)
    ranks.do("build", "partial")
    for told in ranks.attempt("save", 1):
        assert told.error == "UnsupportedValueError" and "sum.of_all" in told.message and "Partial" in told.message
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
        assert found.manifest.apart == {}
        for rank in range(3):
            mine = torch.load(run.parent / f"mine-{rank}")
            ema = {fqn: tensor for fqn, tensor in mine.items() if fqn.startswith("ema.")}
            suffix = f"@rank-{rank:05d}" if rank else ""
            own = {fqn + suffix: tensor for fqn, tensor in mine.items() if fqn not in ema}
            same_tensors({fqn: tensor for fqn, tensor in found.tensors.items() if fqn in ema}, ema)
            of_rank = found.of_rank(rank)
            same_tensors({fqn: of_rank[fqn] for fqn in of_rank if not fqn.startswith("ema.")}, own)
        assert sum(found.nbytes(rank) for rank in range(3)) < 1.1 * 400_000 * 4, "the shared item is there once"
    finish(ranks, run, traces)


@pytest.mark.parametrize("name", ["fsdp", "experts", "small", "batchnorm"])
def test_ranks_get_back_what_they_have_saved_or_all_learn_why_not(start: Start, run: Path, traces: Traces, name: str):
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


def test_a_save_that_takes_too_much_memory_says_how_to_take_less(start: Start, run: Path, traces: Traces):
    ranks = start(2)
    ranks.do("build", "plain", 20)
    ranks.open(run, max_host_memory_bytes=15 << 20)
    for answer in ranks.attempt("save", 1):
        assert answer.error == "HostMemoryError"
        assert "max_host_memory_bytes" in answer.message and "Replicated" in answer.message
    ranks.do("build", "small")
    ranks.save(1)
    finish(ranks, run, traces)


def test_names_that_ranks_need_for_themselves_are_refused(start: Start, run: Path, traces: Traces):
    name = "rng@rank-00001"
    ranks = start(2)
    ranks.do("build", "small")
    ranks.open(run)
    ranks.do("name_tensor", name)
    for answer in ranks.attempt("save", 1):
        assert answer.error == "UnsupportedValueError" and name in answer.message
    ranks.do("put", name, None)
    ranks.save(2)
    finish(ranks, run, traces)


def test_metadata_are_those_of_rank_0(start: Start, run: Path, traces: Traces):
    ranks = start(2)
    ranks.do("build", "small")
    ranks.open(run)
    for number, rank in enumerate(ranks):
        rank.do("save", 1, metadata={"metrics": {"rank": number}, "long": "x" * 10_000})
    ranks.do("committed", 1)
    (info,) = catalog.scan(str(run))
    assert info.metadata["metrics"] == {"rank": 0}
    finish(ranks, run, traces)


# Nobody talks ----------------------------------------------------------------------------------------------------


def test_ranks_do_not_talk_to_save(start: Start, run: Path, traces: Traces):
    ranks = start(3)
    ranks.do("build", "fsdp")
    ranks.open(run)
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
    for name in ("join.2.0123456789abcdef", "met.1.0123456789abcdef.fedcba9876543210", "fedcba9876543210.0.1", ".x.y"):
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
        assert not [name for name in names if name.startswith(("join", "met", ".")) or "fedcba9876543210" in name]
        finish(ranks, run, traces)
    assert len(sessions) == 2


def test_ranks_that_close_leave_nothing_where_they_met(start: Start, run: Path, traces: Traces):
    ranks = start(3, group=False)
    ranks.do("build", "small")
    ranks.open(run)
    ranks.save(1)
    finish(ranks, run, traces)
    assert list((run / RENDEZVOUS).iterdir()) == []


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# The start -------------------------------------------------------------------------------------------------------


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
    for refused in ({"on_busy": "skip"}, {"fallback_directory": str(run) + "-2"}):
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
def test_directories_that_are_not_one_are_refused_by_all_ranks(start: Start, run: Path, traces: Traces, group: bool):
    ranks = start(2, group=group)
    for name in ("_VISIBLE_WITHIN_S", "AGREE_TIMEOUT_S"):
        ranks.do("set", f"sidesave.client.ranks.group:{name}", 1.0)
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
        ranks.do("set", "sidesave.client.ranks.group:TOLD_AFTER_S", 0.1)
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


# A rank that fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1])
def test_rank_that_cannot_save_fails_the_save_of_all_and_the_next_is_whole(
    start: Start, run: Path, traces: Traces, culprit: int
):
    ranks = start(3)
    ranks.do("build", "small")
    ranks.open(run)
    ranks[culprit].do("spoil")
    for step in (10, 20):
        for number, answer in enumerate(ranks.attempt("save", step)):
            assert answer.error == ("UnsupportedValueError" if number == culprit else None)
        for number, rank in enumerate(ranks):
            if number != culprit:
                rank.tell("committed", step)
        for number, rank in enumerate(ranks):
            if number != culprit:
                told = rank.answer()
                assert told.error == "UnsupportedValueError" and "spoilt" in told.message
        assert step not in visible(run)
        is_clean(run)
        ranks[culprit].do("put", "spoilt", None)
        ranks.save(step + 1)
        ranks[culprit].do("spoil")
    for step in (-1, 1 << 70):
        ranks[culprit].do("put", "spoilt", None)
        for number, rank in enumerate(ranks):
            rank.tell("save", step if number == culprit else 30)
        assert errors(ranks.answers()).count("InvalidArgumentError") == 1
        for number, rank in enumerate(ranks):
            if number != culprit:
                rank.tell("committed", 30)
                assert rank.answer().error == "InvalidArgumentError"
        is_clean(run)
        ranks.save(31 + (step > 0))
    finish(ranks, run, traces)


def test_refusal_that_names_a_key_which_is_no_text_fails_that_save_alone(start: Start, run: Path, traces: Traces):
    ranks = start(2)
    ranks.do("build", "small")
    ranks.open(run)
    ranks[1].do("spoil", "odd\udcff")  # as os.fsdecode() makes it of a file name
    assert errors(ranks.attempt("save", 1)) == [None, "UnsupportedValueError"]
    ranks[0].tell("committed", 1)
    told = ranks[0].answer()
    assert told.error == "UnsupportedValueError" and r"odd\udcff" in told.message
    ranks[1].do("put", "odd\udcff", None)
    ranks.save(2)
    finish(ranks, run, traces)


def test_failure_is_raised_once_on_each_rank_and_by_no_save_of_another_step(start: Start, run: Path, traces: Traces):
    ranks = start(3)
    ranks.do("build", "small")
    ranks.open(run)
    ranks.save(1)
    ranks[1].do("spoil")
    assert errors(ranks.attempt("save", 2)) == [None, "UnsupportedValueError", None]
    ranks[1].do("put", "spoilt", None)
    wait_until(lambda: list(run.glob(".step-00000002.*.aborted")))
    for rank in (ranks[0], ranks[2]):
        rank.do("outcome", 2)
    ranks[0].tell("committed", 2)
    assert ranks[0].answer().error == "UnsupportedValueError"
    ranks.save(3)  # whatever was read where
    told = ranks.attempt("wait")
    assert errors(told) == [None, None, "UnsupportedValueError"]
    assert "spoilt" in told[2].message
    ranks.do("wait")
    ranks.save(4)
    assert visible(run) == [1, 3, 4]
    finish(ranks, run, traces)


def test_ranks_that_save_different_steps_are_told_both(start: Start, run: Path, traces: Traces):
    ranks = start(3)
    ranks.do("build", "small")
    ranks.open(run)
    for first in (10, 20):
        steps = (first, first + 1, first)
        for rank, step in zip(ranks, steps, strict=True):
            rank.do("save", step)
        for rank, step in zip(ranks, steps, strict=True):
            rank.tell("committed", step)
        for told in ranks.answers():
            assert told.error == "StateMismatchError"
            assert f"step {first}" in told.message and f"step {first + 1}" in told.message
        is_clean(run)
        ranks.save(first + 5)
    finish(ranks, run, traces)


def test_rank_that_misses_a_save_and_comes_after_it_was_given_up_costs_no_further_waiting(
    start: Start, run: Path, traces: Traces
):
    ranks = start(2)
    ranks.do("build", "small")
    ranks.open(run, commit_timeout_s=2.0)
    ranks.save(10)
    ranks[0].do("save", 20)
    ranks[0].tell("committed", 20)
    assert ranks[0].answer().error == "WriteStalledError"
    for step in (30, 40):
        ranks[1].do("save", step)
        ranks[1].tell("committed", step)
        told = ranks[1].answer()
        assert told.error == "StateMismatchError"
        assert f"step {step}" in told.message and f"step {step - 10}" in told.message
        if step == 30:
            ranks[0].do("save", 30)
            ranks[0].tell("committed", 30)
            assert ranks[0].answer().error == "WriteStalledError"
    ranks[0].do("save", 40)
    ranks[0].tell("committed", 40)
    assert "rank 1 has missed a call of save() before step 30" in ranks[0].answer().message
    ranks.save(50)
    assert visible(run) == [10, 50]
    finish(ranks, run, traces)


@pytest.mark.parametrize("late", [0, 1])
def test_rank_that_misses_a_save_is_told_at_once_and_catches_up(start: Start, run: Path, traces: Traces, late: int):
    ranks = start(3)
    ranks.do("build", "small")
    ranks.open(run)
    ranks.save(10)
    others = [rank for number, rank in enumerate(ranks) if number != late]

    def fails(rank: Any, step: int) -> str:
        rank.tell("committed", step)
        told = rank.answer()
        assert told.error == "StateMismatchError"
        return told.message

    for rank in others:
        rank.do("save", 20)
    for step in (30, 40):
        ranks.do("save", step)
        messages = [fails(ranks[late], step), *(fails(rank, step - 10) for rank in others)]
        assert all(f"step {step}" in message and f"step {step - 10}" in message for message in messages)
    for rank in others:  # where it catches up
        assert f"rank {late} has missed a call of save() before step 30" in fails(rank, 40)
    for step in (50, 60):
        ranks.save(step)
    assert visible(run) == [10, 50, 60]
    finish(ranks, run, traces)


def test_rank_that_saves_once_less_fails_the_last_save_of_the_others_when_it_leaves(
    start: Start, run: Path, traces: Traces
):
    ranks = start(3)
    ranks.do("build", "small")
    ranks.open(run)
    ranks.save(1)
    for rank in (ranks[0], ranks[2]):
        rank.do("save", 2)
    ranks[1].do("close")
    for rank in (ranks[0], ranks[2]):
        rank.tell("committed", 2)
        told = rank.answer()
        assert told.error == "DaemonDiedError" and "rank 1" in told.message
    assert visible(run) == [1]
    finish(ranks, run, traces)


def test_rank_that_looks_late_learns_of_a_step_that_was_replaced_or_deleted_meanwhile(
    start: Start, run: Path, traces: Traces
):
    ranks = start(3)
    ranks.do("build", "small")
    ranks.open(run)
    for _ in range(6):
        ranks.do("save", 1, overwrite=True)
    ranks.do("wait")
    for step in range(2, 6):
        ranks.do("save", step)
        ranks[0].do("committed", step)
        ranks[0].do("delete", step - 1)
    ranks.do("wait")
    assert ranks.do("steps") == [[[5], 5]] * 3
    finish(ranks, run, traces)


# Storage that fails ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1])
def test_failing_disk_of_one_rank_fails_the_save_of_all_or_of_none(
    start: Start, run: Path, traces: Traces, ordered: tuple[Orders, dict[str, str]], culprit: int
):
    fail_operations(start, run, traces, ordered, culprit, range(0, 30, 2), "ENOSPC")


@pytest.mark.slow
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_failing_disk_of_one_rank_at_any_operation(
    start: Start, run: Path, traces: Traces, ordered: tuple[Orders, dict[str, str]], culprit: int, error: str
):
    fail_operations(start, run, traces, ordered, culprit, campaigns.some(range(60)), error)


def fail_operations(
    start: Start,
    run: Path,
    traces: Traces,
    ordered: tuple[Orders, dict[str, str]],
    culprit: int,
    points: Iterable[int],
    error: str,
) -> None:
    orders, environment = ordered
    ranks = start(3, environments={culprit: environment})
    ranks.do("build", "small")
    ranks.open(run, retries=0)
    ranks.save(0)
    step, failed = 0, 0
    for after, is_known in itertools.product(points, (True, False)):
        ranks.do("restructure", None if is_known else step)
        orders.give(error, after=after)
        is_over = False
        while not is_over:
            step += 1
            ranks.do("save", step)
            told = set(errors(ranks.attempt("committed", step)))
            if step in visible(run):
                assert told <= {None, "CommitUnknownError"}
                read(run, step)
            else:
                failed += 1
                assert None not in told and told <= {"NoSpaceError", "CommitUnknownError", "WriteError"}
            is_clean(run)
            is_over = orders.was_obeyed() or orders.withdraw()  # else it is the next save that comes to that operation
        if orders.was_obeyed():
            orders.obeyed()
    assert failed > 5
    ranks.save(step + 1)
    read(run, step + 1)
    finish(ranks, run, traces)


def test_passing_error_of_one_rank_is_tried_again(
    start: Start, run: Path, traces: Traces, ordered: tuple[Orders, dict[str, str]]
):
    orders, environment = ordered
    ranks = start(2, environments={1: environment})
    ranks.do("build", "small")
    ranks.open(run)
    for step in (1, 2):
        orders.give("EIO", after=5)
        ranks.save(step)
        orders.obeyed()
        read(run, step)
    finish(ranks, run, traces)


def test_rank_that_is_slow_once_its_record_is_there_does_not_mind_that_rank_0_has_committed(
    start: Start, run: Path, traces: Traces, ordered: tuple[Orders, dict[str, str]]
):
    orders, environment = ordered
    ranks = start(2, environments={1: environment})
    ranks.do("build", "small")
    ranks.open(run)
    ranks.save(0)
    overtaken: set[str] = set()
    answers: list[Answer] = []
    after, is_ordered = 9, False
    for step in range(1, 60):
        if not is_ordered:
            orders.give("hold", after=after)
            after += 1
        ranks.do("save", step)
        ranks.tell("committed", step)
        answering = threading.Thread(target=lambda: answers.append(ranks[1].answer()))
        answering.start()
        wait_until(lambda thread=answering: orders.was_obeyed() or not thread.is_alive())
        is_ordered = not orders.was_obeyed()
        if is_ordered:  # it had fewer operations than the one before: the next save comes there
            after = 9
        where = "" if is_ordered else orders.obeyed()[1]
        has_record = not is_ordered and bool(list(run.glob(f".step-{step:08d}.*.partial/rank-00001.json")))
        if has_record:
            ranks[0].answer().get()
        if not is_ordered:
            orders.release()
        if not has_record:
            ranks[0].answer().get()
        answering.join()
        answers.pop().get()
        if not has_record:
            continue
        read(run, step)
        is_late = where.startswith("open .")
        overtaken.add("sync" if is_late else "name")
        if len(overtaken) == 2:
            break
        after -= 3 * is_late  # the moment before it was passed by: saves differ by an operation or two
    assert overtaken == {"name", "sync"}, "both before the temporary name goes and before the directory is synced"
    finish(ranks, run, traces)


def test_rank_deletes_a_step_and_saves_it_again_before_rank_0_has_deleted_it(start: Start, run: Path, traces: Traces):
    ranks = start(2)
    ranks.do("build", "plain", 0.1, True)  # of which each rank writes its part without asking
    ranks.open(run)
    ranks.save(1)
    ranks.save(2)
    ranks[1].do("delete", 1)
    ranks[1].do("save", 1)
    ranks[1].do("staged", 1)
    wait_until(lambda: list(run.glob(".step-00000001.*.partial/rank-00001.json")))
    ranks[0].do("delete", 1)
    ranks[0].do("save", 1)
    ranks.do("committed", 1)
    assert visible(run) == [2, 1]
    finish(ranks, run, traces)


# Processes that die ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1])
def test_daemon_killed_at_some_operations_is_replaced_and_the_save_commits(
    start: Start, run: Path, traces: Traces, ordered: tuple[Orders, dict[str, str]], culprit: int
):
    kill_daemons(start, run, traces, ordered, culprit, range(0, 40, 8))


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
def test_daemon_killed_at_any_operation_is_replaced_and_the_save_commits(
    start: Start, run: Path, traces: Traces, ordered: tuple[Orders, dict[str, str]], culprit: int
):
    kill_daemons(start, run, traces, ordered, culprit, campaigns.some(range(60)))


def kill_daemons(
    start: Start,
    run: Path,
    traces: Traces,
    ordered: tuple[Orders, dict[str, str]],
    culprit: int,
    points: Iterable[int],
) -> None:
    orders, environment = ordered
    ranks = start(3, environments={culprit: environment})
    ranks.do("build", "small")
    ranks.open(run)
    step = 0
    for after in points:
        for number in (None, after):  # the structure is known, and new: the ranks still have to find out
            ranks.do("restructure", number)
            step += 1
            orders.give("kill", after=after)
            ranks.save(step)
            read(run, step)
            is_clean(run)
            orders.withdraw()
            if orders.was_obeyed():  # else it may die in the next save
                orders.obeyed()
    finish(ranks, run, traces)


def test_daemons_that_a_signal_has_ended_are_replaced_and_nobody_takes_their_ranks_for_gone(
    start: Start, run: Path, traces: Traces
):
    ranks = start(3)
    ranks.do("build", "small")
    ranks.open(run)
    for step in (1, 2):
        daemons = ranks.do("daemon")
        with contextlib.ExitStack() as stack:
            ends = [stack.enter_context(pidfd_of(daemon)) for daemon in daemons]
            for daemon in daemons:
                os.kill(daemon, signal.SIGTERM)
            for end in ends:
                await_end(end)
        assert not list((run / LEASE_DIRECTORY).glob("closed.*"))
        ranks.save(step)
    finish(ranks, run, traces)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_daemons_that_end_at_any_moment_of_overlapping_saves_lose_none(
    start: Start, run: Path, traces: Traces, number: signal.Signals
):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    ranks = start(3)
    ranks.do("build", "small")
    ranks.open(run)
    step = 0
    for attempt in range(campaigns.length(12)):
        ranks.do("restructure", attempt // 2)
        steps = range(step + 1, step + 1 + chance.randrange(2, 5))
        for step in steps:
            ranks.tell("save", step)
        time.sleep(chance.random() * 0.1)
        for rank in chance.sample(list(ranks), chance.randrange(1, 4)):
            for daemon in children(rank.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(daemon, number)
        for _ in steps:
            for answer in ranks.answers():
                answer.get()
        for step in steps:
            ranks.do("committed", step)
            read(run, step)
    finish(ranks, run, traces)


def children(pid: int) -> list[int]:
    lists = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for text in lists for child in text.split()]


def test_trainer_killed_before_it_staged_fails_the_save_of_the_others_at_once(start: Start, run: Path, traces: Traces):
    for before in (0, 1):  # saves before that one
        ranks = start(3)
        ranks.do("build", "small")
        ranks.open(run)
        if before:
            ranks.save(1)
        ranks[1].kill()
        began = time.monotonic()
        for rank in (ranks[0], ranks[2]):
            rank.do("save", 2)
        for rank in (ranks[0], ranks[2]):
            rank.tell("committed", 2)
            told = rank.answer()
            assert told.error == "DaemonDiedError" and "rank 1 has ended" in told.message
        assert time.monotonic() - began < DEADLINE_S / 2
        assert visible(run) == [1] * before
        is_clean(run)
        finish([ranks[0], ranks[2]], run, traces)


@pytest.mark.parametrize("culprit", [0, 1])
def test_trainer_killed_once_it_has_staged_changes_nothing_for_this_save(
    start: Start, run: Path, traces: Traces, culprit: int
):
    ranks = start(3)
    ranks.do("build", "small")
    ranks.open(run)
    ranks[culprit].do("save", 1)
    ranks[culprit].do("staged", 1)
    ranks[culprit].kill()
    others = [rank for number, rank in enumerate(ranks) if number != culprit]
    for rank in others:
        rank.do("save", 1)
    for rank in others:
        rank.do("committed", 1)
    read(run, 1)
    for rank in others:
        rank.do("save", 2)
    for rank in others:
        rank.tell("committed", 2)
        assert rank.answer().error in ("DaemonDiedError", "WriteError")
    assert visible(run) == [1]
    for rank in others:
        rank.do("close")
    traces.check()


def test_rank_0_that_dies_before_it_staged_fails_the_save_of_the_others(start: Start, run: Path, traces: Traces):
    ranks = start(3)
    ranks.do("build", "small")
    ranks.open(run)
    ranks[0].kill()
    for rank in (ranks[1], ranks[2]):
        rank.do("save", 1)
    for rank in (ranks[1], ranks[2]):
        rank.tell("committed", 1)
        told = rank.answer()
        assert told.error == "WriteError" and "rank 0 has closed this run, or has ended" in told.message
    for rank in (ranks[1], ranks[2]):
        rank.do("close")
    traces.check()
    ranks = start(2)
    ranks.open(run)
    assert visible(run) == []
    finish(ranks, run, traces)


@pytest.mark.parametrize("where", ["os.mkdir", "os.link"])
@pytest.mark.parametrize("known", [False, True])
def test_rank_that_was_stopped_for_too_long_finds_its_save_given_up(
    start: Start, run: Path, traces: Traces, ordered: tuple[Orders, dict[str, str]], where: str, known: bool
):
    orders, environment = ordered
    ranks = start(3, environments={1: environment})
    ranks.do("build", "small")
    ranks.open(run, commit_timeout_s=2.0)
    if known:
        ranks.save(1)
    orders.give("stop", starting_at=where)
    ranks.do("save", 2)
    pid, _ = orders.obeyed()
    ranks[1].signal(signal.SIGSTOP)
    for rank in (ranks[0], ranks[2]):
        rank.tell("committed", 2)
    told = ranks[0].answer()
    assert told.error == "WriteStalledError" and "ranks [1] " in told.message
    assert ranks[2].answer().error == "WriteStalledError"
    assert visible(run) == [1] * known
    os.kill(pid, signal.SIGCONT)
    ranks[1].signal(signal.SIGCONT)
    ranks[1].tell("committed", 2)
    assert ranks[1].answer().error == "WriteStalledError"
    assert visible(run) == [1] * known
    is_clean(run)
    ranks.save(3)
    finish(ranks, run, traces)


# The next attempt ------------------------------------------------------------------------------------------------


def test_daemon_that_comes_to_a_save_when_the_run_has_passed_on_leaves_nothing_there(
    start: Start, run: Path, traces: Traces, ordered: tuple[Orders, dict[str, str]]
):
    orders, environment = ordered
    ranks = start(3, environments={2: environment})
    ranks.do("build", "small")
    ranks.open(run)
    ranks.save(1)
    orders.give("stop", starting_at="os.mkdir")
    ranks.do("save", 2)
    late, _ = orders.obeyed()
    ranks.kill()
    with pidfd_of(late) as pidfd:
        following = start(2)
        following.do("build", "small")
        following.open(run, takeover_timeout_s=1.0)
        assert visible(run) == [1]
        os.kill(late, signal.SIGCONT)
        await_end(pidfd)
    assert leftovers(run) == []
    following.save(3)
    finish(following, run, traces)


def test_ranks_killed_in_the_midst_of_saves_are_followed_by_whole_steps_of_one_attempt_each(
    start: Start, run: Path, traces: Traces
):
    kill_and_restart(start, run, traces, rounds=4, seed=random.randrange(1 << 32))


@pytest.mark.slow
def test_ranks_killed_in_the_midst_of_saves_many_times(start: Start, run: Path, traces: Traces):
    kill_and_restart(start, run, traces, rounds=campaigns.length(25), seed=random.randrange(1 << 32))


def kill_and_restart(start: Start, run: Path, traces: Traces, rounds: int, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    staged: set[int] = set()
    possible: dict[int, int] = {}  # the attempt that each step was saved by
    checked: set[int] = set()
    step = 0
    for attempt in range(rounds):
        ranks = start(3, group=attempt % 2 == 0)
        ranks.do("build", "small", mark=attempt)
        [latest] = {each["latest"] for each in ranks.open(run)}
        assert staged <= set(visible(run)) <= possible.keys(), "what all had staged is there, and nothing unheard of"
        for found in set(visible(run)) - checked:
            of = read(run, found)
            for rank in range(3):
                [own] = [tensor for fqn, tensor in of.of_rank(rank).items() if fqn.startswith("rng")]
                assert own.tolist() == [10 * possible[found] + rank] * 3, "it is of another attempt"
            checked.add(found)
        assert leftovers(run) == []
        assert latest == (visible(run) or [None])[-1]
        told: list[int] = []
        for _ in range(chance.randrange(1, 4)):
            step += 1
            possible[step] = attempt
            ranks.tell("save", step)
            told.append(step)
            if chance.random() < 0.6:
                for answer in ranks.answers():
                    answer.get()
                staged.add(told.pop(0))
            else:
                time.sleep(chance.random() * 0.03)
        for rank in chance.sample(list(ranks), 3):
            rank.kill()
    ranks = start(3)
    ranks.open(run)
    assert staged <= set(visible(run))
    finish(ranks, run, traces)


@pytest.mark.parametrize("missing", [False, True], ids=["all records are there", "one is missing"])
def test_what_is_left_when_all_processes_die_before_the_commit(
    start: Start, run: Path, traces: Traces, ordered: tuple[Orders, dict[str, str]], missing: bool
):
    orders, environment = ordered
    ranks = start(3, environments={missing: environment})
    ranks.do("build", "plain", 0.1, True)  # of which each rank writes its part without asking
    ranks.open(run)
    ranks.save(1)
    # Rank 0's daemon opens the directory to readers right before it commits; rank 1's gives its first file its name.
    orders.give("hold", starting_at="os.link" if missing else "os.chmod")
    ranks.do("save", 2)
    orders.obeyed()
    partial = next(run.glob(".step-00000002.*.partial"))
    wait_until(lambda: len(list(partial.glob("rank-*.json"))) == 3 - missing)
    ranks.kill()
    for pid in ranks.daemons:
        os.kill(pid, signal.SIGKILL)
    traces.await_ends()
    ranks = start(2)  # also for a world of another size
    opened = ranks.open(run)
    if missing:
        assert opened[0]["removed"] == [partial.name]
        assert visible(run) == [1]
    else:
        assert opened[0]["recovered"] == ["step-00000002"]
        read(run, 2)
    assert [each["latest"] for each in opened] == [2 - missing] * 2
    finish(ranks, run, traces)


# What ranks tell -------------------------------------------------------------------------------------------------


def test_all_ranks_tell_the_same_of_steps_and_saves(start: Start, run: Path, traces: Traces):
    ranks = start(3)
    ranks.do("build", "small")
    ranks.open(run)
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
