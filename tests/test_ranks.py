"""Several ranks make one checkpoint: what is written once, what happens when one of them fails, and who tells whom."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_trainers import Answer, Ranks, RankZygote, Stored, leftovers, orders_to, same_tensors, stored
from trainers import DEADLINE_S, Orders, Traces, await_end, pidfd_of

from sidesave.client import catalog
from sidesave.client.world import RENDEZVOUS
from sidesave.writer_daemon.lease import LEASE_DIRECTORY

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


def test_plain_state_is_written_once_by_all_ranks_together(start: Start, run: Path, traces: Traces):
    ranks = start(4)
    ranks.do("build", "plain", 40)
    ranks.do("truth", str(run.parent / "truth"))
    ranks.open(run, slots=1)
    ranks.save(1)
    whole = ranks[0].do("staging_nbytes")
    ranks.save(2)
    expected = torch.load(run.parent / "truth")
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    assert nbytes > 40 << 20
    for step in (1, 2):
        found = read(run, step)
        same_tensors(found.tensors, expected)
        shares = [found.nbytes(rank) for rank in range(4)]
        assert sum(shares) == nbytes
        assert max(shares) < 1.1 * nbytes / 4
    assert max(ranks.do("staging_nbytes")) < 0.3 * whole, "only the share is staged once the ranks are known to agree"
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


def test_experts_that_become_different_later_fail_one_save_and_the_next_has_them_all(
    start: Start, run: Path, traces: Traces
):
    ranks = start(3)
    ranks.do("build", "experts", alike=True)
    ranks.open(run)
    ranks.save(1)
    assert read(run, 1).manifest.apart == {}
    ranks[2].do("change", "model.expert.2.weight", 5.0)
    ranks.do("save", 2)
    for told in ranks.fail(2):
        assert told.error == "StateMismatchError" and "plain tensors" in told.message
    assert visible(run) == [1]
    is_clean(run)
    ranks.do("mine", str(run.parent / "mine-{rank}"))
    for step in (3, 4):
        ranks.save(step)
        found = read(run, step)
        assert list(found.manifest.apart) == ["model.expert.2.weight"]
        for rank in range(3):
            same_tensors(found.of_rank(rank), torch.load(run.parent / f"mine-{rank}"))
    finish(ranks, run, traces)


def test_buffers_that_differ_between_ranks_disturb_nobody(start: Start, run: Path, traces: Traces):
    ranks = start(2)
    ranks.do("build", "batchnorm")
    ranks.open(run)
    for step in (1, 2):
        ranks.save(step)
        found = read(run, step)
        assert found.manifest.apart == {}
        assert sum(name.endswith("running_mean") for name in found.tensors) == 1
    finish(ranks, run, traces)


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
    ranks.do("save", 2)  # of this structure the ranks know whether they agree
    ranks.do("committed", 2)
    for step in (1, 2, None):
        ranks.do("zero")
        ranks.do("load", step)
        ranks.do("mine", str(run.parent / "after-{rank}"))
        for rank in range(3):
            after = torch.load(run.parent / f"after-{rank}")
            before = torch.load(run.parent / f"before-{0 if name == 'batchnorm' else rank}")
            same_tensors(after, before)
    assert errors(ranks.attempt("load", 5)) == ["CheckpointNotFoundError"] * 3
    damaged = next((run / "step-00000002").glob("*.rank-00000.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert errors(ranks.attempt("load", 2)) == ["IntegrityError"] * 3
    ranks.save(3)
    finish(ranks, run, traces)


def test_a_first_save_that_takes_too_much_memory_says_how_to_take_less(start: Start, run: Path, traces: Traces):
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
        ranks.do("set", f"sidesave.client.world:{name}", 1.0)
    for told in ranks.attempt("open", str(run) + "-{rank}"):
        assert told.error == ("InvalidArgumentError" if group else "DaemonStartError")
        assert "rank 1" in told.message or not group
        assert "shared" in told.message or "share one directory" in told.message
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
    for step in (10, 20):  # the first save of a structure takes another way than those after it
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


def test_failure_is_raised_once_on_each_rank_and_saves_go_on(start: Start, run: Path, traces: Traces):
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
    told = ranks.attempt("save", 3)
    assert errors(told) == ["UnsupportedValueError", None, "UnsupportedValueError"]
    assert "spoilt" in told[0].message
    for step in (4, 5):
        ranks[1].do("outcome", step - 1)
        ranks.do("save", step)
        for rank in (ranks[0], ranks[2]):
            rank.do("outcome", step)
    ranks.do("wait")
    assert visible(run) == [1, 4, 5]
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
@pytest.mark.timeout(600)
@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_failing_disk_of_one_rank_at_any_operation(
    start: Start, run: Path, traces: Traces, ordered: tuple[Orders, dict[str, str]], culprit: int, error: str
):
    fail_operations(start, run, traces, ordered, culprit, range(60), error)


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
    after = 9
    for step in range(1, 60):
        orders.give("hold", after=after)
        after += 1
        ranks.do("save", step)
        _, where = orders.obeyed()
        if not list(run.glob(f".step-{step:08d}.*.partial/rank-00001.json")):
            orders.release()
            ranks.do("committed", step)
            continue
        ranks[0].do("committed", step)
        orders.release()
        ranks[1].do("committed", step)
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
    ranks.do("build", "small")
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
@pytest.mark.timeout(600)
@pytest.mark.parametrize("culprit", [0, 1])
def test_daemon_killed_at_any_operation_is_replaced_and_the_save_commits(
    start: Start, run: Path, traces: Traces, ordered: tuple[Orders, dict[str, str]], culprit: int
):
    kill_daemons(start, run, traces, ordered, culprit, range(60))


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
@pytest.mark.timeout(600)
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
    for attempt in range(12):
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
@pytest.mark.timeout(600)
def test_ranks_killed_in_the_midst_of_saves_many_times(start: Start, run: Path, traces: Traces):
    kill_and_restart(start, run, traces, rounds=25, seed=random.randrange(1 << 32))


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
    ranks.do("build", "small")
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
