"""Trainers and daemons of single ranks that die, and what the next attempt finds."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from campaigns import Share
from rank_checks import Place, Start, finish, is_clean, left, read, visible
from rank_trainers import leftovers, same_tensors
from trainers import DEADLINE_S, Orders, Traces, await_end, pidfd_of, wait_until

from sidesave.writer_daemon.format.names import LEASE_DIRECTORY

STATES = ["small", "ddp", "fsdp"]
"""The same on all ranks with a tensor of each rank's own, data-parallel, and sharded."""

# Processes that die -------------------------------------------------------------------------------


@pytest.mark.drawn
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("culprit", [0, 1])
def test_daemon_killed_at_some_operations_is_replaced_and_the_save_commits(
    start: Start,
    run: Path,
    traces: Traces,
    ordered: tuple[Orders, dict[str, str]],
    culprit: int,
    state: str,
):
    kill_daemons(start, run, traces, ordered, culprit, state, range(0, 40, 8))


@pytest.mark.slow(minutes=1 / 6)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("culprit", [0, 1])
def test_daemon_killed_at_any_operation_is_replaced_and_the_save_commits(
    start: Start,
    run: Path,
    traces: Traces,
    ordered: tuple[Orders, dict[str, str]],
    culprit: int,
    state: str,
    share: Share,
):
    kill_daemons(start, run, traces, ordered, culprit, state, share.points(range(60)))


def kill_daemons(
    start: Start,
    run: Path,
    traces: Traces,
    ordered: tuple[Orders, dict[str, str]],
    culprit: int,
    state: str,
    points: Iterable[int],
) -> None:
    orders, environment = ordered
    ranks = start(3, environments={culprit: environment}).begin(state, run)
    truth = run.with_name("truth")
    step = 0
    for after in points:
        # the structure is known, and new: the ranks still have to find out
        for number in (None, after):
            ranks.do("restructure", number)
            if state != "small":
                ranks.do("train")
                ranks.do("truth", str(truth))
            step += 1
            orders.give("kill", after=after)
            ranks.save(step)
            saved = read(run, step).tensors
            if state != "small":
                of_all = {
                    fqn: tensor
                    for fqn, tensor in torch.load(truth).items()
                    if not fqn.startswith("more")
                }
                same_tensors({fqn: saved[fqn] for fqn in of_all}, of_all)
            is_clean(run)
            orders.withdraw()
            if orders.was_obeyed():  # else it may die in the next save
                orders.obeyed()
    finish(ranks, run, traces)


def test_daemons_that_a_signal_has_ended_are_replaced_and_nobody_takes_their_ranks_for_gone(
    start: Start, run: Path, traces: Traces
):
    ranks = start(3).begin("small", run)
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


def test_daemons_that_end_at_some_moments_of_overlapping_saves_lose_none(
    start: Start, place: Place, traces: Traces
):
    end_daemons(start, place, traces, signal.SIGKILL, range(3))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_daemons_that_end_at_any_moment_of_overlapping_saves_lose_none(
    start: Start, place: Place, traces: Traces, number: signal.Signals, share: Share
):
    end_daemons(start, place, traces, number, share.rounds(12))


def end_daemons(
    start: Start, place: Place, traces: Traces, number: signal.Signals, attempts: Iterable[int]
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    ranks = start(3).begin("small", place)
    step = 0
    for attempt in attempts:
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
            read(place, step)
    finish(ranks, place, traces)


def children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread may have ended
            found += map(int, path.read_text().split())
    return found


def test_trainer_killed_before_it_staged_fails_the_save_of_the_others_at_once(
    start: Start, place: Place, traces: Traces
):
    for before in (0, 1):  # saves before that one
        ranks = start(3).begin("small", place)
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
        assert visible(place) == [1] * before
        is_clean(place)
        finish([ranks[0], ranks[2]], place, traces)


@pytest.mark.parametrize("culprit", [0, 1])
def test_trainer_killed_once_it_has_staged_changes_nothing_for_this_save(
    start: Start, place: Place, traces: Traces, culprit: int
):
    ranks = start(3).begin("small", place)
    ranks[culprit].do("save", 1)
    ranks[culprit].do("staged", 1)
    ranks[culprit].kill()
    others = [rank for number, rank in enumerate(ranks) if number != culprit]
    for rank in others:
        rank.do("save", 1)
    for rank in others:
        rank.do("committed", 1)
    read(place, 1)
    for rank in others:
        rank.do("save", 2)
    for rank in others:
        rank.tell("committed", 2)
        assert rank.answer().error in ("DaemonDiedError", "WriteError")
    assert visible(place) == [1]
    for rank in others:
        rank.do("close")
    traces.check()


def test_rank_0_that_dies_before_it_staged_fails_the_save_of_the_others(
    start: Start, place: Place, traces: Traces
):
    ranks = start(3).begin("small", place)
    ranks[0].kill()
    for rank in (ranks[1], ranks[2]):
        rank.do("save", 1)
    for rank in (ranks[1], ranks[2]):
        rank.tell("committed", 1)
        told = rank.answer()
        assert (
            told.error == "WriteError"
            and "rank 0 has closed this run, or has ended" in told.message
        )
    for rank in (ranks[1], ranks[2]):
        rank.do("close")
    traces.check()
    ranks = start(2)
    ranks.open(place)
    assert visible(place) == []
    finish(ranks, place, traces)


@pytest.mark.parametrize(
    ("where", "known"),
    [
        ("os.mkdir", True),
        ("os.link", False),
        pytest.param("os.mkdir", False, marks=pytest.mark.slow),
        pytest.param("os.link", True, marks=pytest.mark.slow),
    ],
)
def test_rank_that_was_stopped_for_too_long_finds_its_save_given_up(
    start: Start,
    run: Path,
    traces: Traces,
    ordered: tuple[Orders, dict[str, str]],
    where: str,
    known: bool,
):
    orders, environment = ordered
    ranks = start(3, environments={1: environment}).begin(
        "small", run, daemon={"commit_timeout_s": 5.0}
    )
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


# The next attempt ---------------------------------------------------------------------------------


def test_daemon_that_comes_to_a_save_when_the_run_has_passed_on_leaves_nothing_there(
    start: Start, run: Path, traces: Traces, ordered: tuple[Orders, dict[str, str]]
):
    orders, environment = ordered
    ranks = start(3, environments={2: environment}).begin("small", run)
    ranks.save(1)
    orders.give("stop")
    ranks.do("save", 2)
    late, _ = orders.obeyed()
    ranks.kill()
    with pidfd_of(late) as pidfd:
        following = start(2).begin("small", run, daemon={"takeover_timeout_s": 1.0})
        assert visible(run) == [1]
        os.kill(late, signal.SIGCONT)
        await_end(pidfd)
    assert leftovers(run) == []
    following.save(3)
    finish(following, run, traces)


@pytest.mark.slow
def test_ranks_killed_in_the_midst_of_saves_are_followed_by_whole_steps_of_one_attempt_each(
    start: Start, place: Place, traces: Traces
):
    kill_and_restart(start, place, traces, range(4), random.randrange(1 << 32))


@pytest.mark.slow
def test_ranks_killed_in_the_midst_of_saves_many_times(
    start: Start, place: Place, traces: Traces, share: Share
):
    kill_and_restart(start, place, traces, share.rounds(25), random.randrange(1 << 32))


def kill_and_restart(
    start: Start, place: Place, traces: Traces, attempts: Iterable[int], seed: int
) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    staged: set[int] = set()
    possible: dict[int, int] = {}  # the attempt that each step was saved by
    checked: set[int] = set()
    step = 0
    for attempt in attempts:
        ranks = start(3, group=attempt % 2 == 0)
        ranks.do("build", "small", mark=attempt)
        [latest] = {each["latest"] for each in ranks.open(place)}
        assert staged <= set(visible(place)) <= possible.keys(), (
            "what all had staged is there, and nothing unheard of"
        )
        for found in set(visible(place)) - checked:
            of = read(place, found)
            for rank in range(3):
                [own] = [
                    tensor for fqn, tensor in of.of_rank(rank).items() if fqn.startswith("rng")
                ]
                assert own.tolist() == [10 * possible[found] + rank] * 3, "it is of another attempt"
            checked.add(found)
        assert left(place) == []
        assert latest == (visible(place) or [None])[-1]
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
    ranks.open(place)
    assert staged <= set(visible(place))
    finish(ranks, place, traces)


@pytest.mark.parametrize("missing", [False, True], ids=["all records are there", "one is missing"])
def test_what_is_left_when_all_processes_die_before_the_commit(
    start: Start, run: Path, traces: Traces, ordered: tuple[Orders, dict[str, str]], missing: bool
):
    orders, environment = ordered
    ranks = start(3, environments={missing: environment})
    ranks.do("build", "plain", 0.1, True)  # of which each rank writes its part without asking
    ranks.open(run)
    ranks.save(1)
    # Rank 0's daemon opens the directory to readers right before it commits; rank 1's gives its
    # first file its name.
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
