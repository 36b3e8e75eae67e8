"""Managers of ranks whose run is in an object store or has a mirror in one: pins, clocks, signals,
retention.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from commands import output
from managed_ranks import ManagedRank
from manager_trainer import ManagedTrainer
from object_server import ObjectServer, Request
from rank_checks import Start, left, read, visible
from rank_trainers import Ranks, same_tensors
from trainers import DEADLINE_S, Traces, await_end, end, pidfd_of

pytestmark = pytest.mark.slow
S3 = "s3://bucket/run"
TERMINATED = 128 + signal.SIGTERM
Train = Callable[..., list[ManagedTrainer]]


def save(ranks: Ranks, step: int) -> None:
    assert ranks.do("step", step) == ["saved"] * len(ranks)
    ranks.do("committed", step)


# What is kept -------------------------------------------------------------------------------------


def test_what_is_pinned_stays_for_any_number_of_ranks(
    start: Start, server: ObjectServer, traces: Traces
):
    ranks = start(3, kind=ManagedRank)
    ranks.do("build", "fsdp")
    ranks.do("manage", S3, "[EverySteps(1)]", "[KeepLatest(1)]")
    save(ranks, 1)
    ranks.do("pin", 1)
    for step in (2, 3):
        save(ranks, step)
    ranks[0].do("pin", 3)
    save(ranks, 4)
    assert ranks.do("pinned") == [[1, 3]] * 3
    ranks.do("leave")
    assert visible(S3) == [1, 3, 4]
    ranks = start(2, kind=ManagedRank)
    ranks.do("build", "fsdp")
    assert ranks.do("manage", S3, "[EverySteps(1)]", "[KeepLatest(1)]") == [5] * 2
    ranks[1].do("unpin", 3)  # which is rank 0's to do
    save(ranks, 5)
    ranks.do("unpin", 1)
    save(ranks, 6)
    ranks.do("leave")
    assert visible(S3) == [3, 6]
    assert left(S3) == [".sidesave.pins"]
    traces.check()


def test_minutes_are_those_of_one_clock(start: Start, server: ObjectServer, traces: Traces):
    ranks = start(2, kind=ManagedRank)
    ranks.do("build", "small")
    ranks.do("manage", S3, "[EverySteps(1)]", "[KeepEveryMinutes(10)]")
    ranks[1].do("put_clock_forward", -3600)
    for step in range(6):
        save(ranks, step)
        ranks.do("put_clock_forward", 300)
    ranks.do("leave")
    assert visible(S3) == [0, 2, 4, 5]
    traces.check()


# When ---------------------------------------------------------------------------------------------


@pytest.fixture
def train(traces: Traces, tmp_path: Path) -> Iterator[Train]:
    """Starts a training script as several ranks, whose steps nobody paces."""
    with contextlib.ExitStack() as opened:

        def train(size: int, run: str, **options: object) -> list[ManagedTrainer]:
            about = {
                "size": size,
                "meeting": str(tmp_path / f"group-{secrets.token_hex(8)}"),
                "paced": False,
            }
            about |= {"total": 10**6, "rest_s": 0.01, "quiet": True, **options}
            ranks = [ManagedTrainer(traces, run, rank=rank, **about) for rank in range(size)]
            return [opened.enter_context(rank) for rank in ranks]

        yield train


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_leave_before_the_commit_have_it_made_by_their_daemons(
    train: Train, server: ObjectServer, traces: Traces, late: int
):
    arrived, gate = threading.Event(), threading.Event()

    def hold(request: Request, number: int) -> None:
        if request.method == "PUT-NEW" and request.key.endswith(f"/rank-{late:05d}.json"):
            arrived.set()
            assert gate.wait(DEADLINE_S)

    ranks = train(2, S3, save="[OnSignal(deadline_s=1)]")
    daemons = [int(trainer.expect("ready")[0]) for trainer in ranks]
    for trainer in ranks:
        trainer.expect("restored")
    server.fault = hold
    with pidfd_of(daemons[0]) as first, pidfd_of(daemons[1]) as second:
        ranks[1 - late].signal(signal.SIGTERM)
        for trainer in ranks:
            trainer.leaves(TERMINATED)
        assert arrived.wait(DEADLINE_S)  # their daemons go on, at their pace
        assert visible(S3) == []
        gate.set()
        await_end(first)
        await_end(second)
    [step] = visible(S3)
    read(S3, step)
    assert left(S3) == []
    traces.check()


def test_ranks_agree_when_the_time_has_come(train: Train, server: ObjectServer, traces: Traces):
    policies = (
        "[EverySeconds(1.5), Ephemeral(EverySeconds(0.5)), OnSignal(signal.SIGTERM, "
        "signal.SIGUSR1)]"
    )
    ranks = train(2, S3, save=policies, keep="[KeepLatest(1)]")
    for number in range(4):
        if number == 3:
            ranks[1].signal(signal.SIGUSR1)
        first, other = [trainer.expect("saved") for trainer in ranks]
        assert first == other
    ranks[0].signal(signal.SIGTERM)
    for trainer in ranks:
        trainer.leaves(TERMINATED)
    assert len(visible(S3)) == 1
    assert left(S3) == []
    traces.check()


# A mirror -----------------------------------------------------------------------------------------


def test_a_mirror_of_ranks_goes_on_through_deaths_and_other_numbers_of_ranks_begin_there(
    start: Start, run: Path, server: ObjectServer, traces: Traces, tmp_path: Path
):
    ranks = start(3, kind=ManagedRank)
    ranks.do("build", "fsdp")
    ranks.do("manage", str(run), "[EverySteps(1)]", "[KeepLatest(1)]", mirror=S3)
    for step in (1, 2, 3):
        ranks.do("train")
        save(ranks, step)
        for rank in ranks if step == 2 else ():
            end(rank.do("daemon"))
    ranks.do("truth", str(tmp_path / "truth"))
    ranks[0].do("mirrored", 3)
    ranks.do("leave")
    assert (visible(S3), visible(run)) == ([1, 2, 3], [3])
    assert "s3://bucket/other" in output("mirror", run, "s3://bucket/other")
    assert visible("s3://bucket/other") == [3]
    shutil.rmtree(run)
    for place in (S3, "s3://bucket/other"):
        ranks = start(2, kind=ManagedRank)
        ranks.do("build", "fsdp")
        assert (
            ranks.do("manage", f"{run}-{ranks[0].pid}", "[EverySteps(1)]", mirror=place) == [4] * 2
        )
        ranks.do("truth", str(tmp_path / "loaded"))
        same_tensors(torch.load(tmp_path / "loaded"), torch.load(tmp_path / "truth"))
        save(ranks, 4)
        ranks[0].do("mirrored", 4)
        ranks.do("leave")
        read(place, 4)
    assert visible(S3) == [1, 2, 3, 4]
    traces.check()
