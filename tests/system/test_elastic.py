"""Sharded training under torchrun whose processes are killed: it goes on from the newest
checkpoint, bit for bit.
"""

import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import campaigns
import psutil
import pytest
from campaigns import Share
from elastic_trainer import Job, Story
from trainers import Traces, pidfd_of


class Campaign:
    """Jobs that train on one run directory, one after the other, and what befalls them."""

    def __init__(self, folder: Path, traces: Traces, chance: random.Random) -> None:
        self.story = Story(folder, folder / "run")
        self.blows: Counter[str] = Counter()
        self._folder, self._traces, self._chance = folder, traces, chance

    def train(self, size: int, *blows: str, until: int = 0) -> None:
        """A job without a process group if it is to end at a step; one that has one ends two
        commits after the last of these blows, each of which falls at a random moment, or with it if
        that is the preemption of the job.
        """
        left, commits, restarts = list(reversed(blows)), 0, 0
        workers: dict[int, int] = {}
        countdown = self._draw()
        options = ["--without-group", "--until", until] if until else []
        self.story.go_on()
        with Job(
            self._folder,
            self._traces,
            size,
            self._folder / "run",
            *options,
            restarts=len(blows),
            forked=True,
        ) as job:
            for event in self.story.hear(job):
                assert event["restart"] <= restarts, f"a worker ended by itself\n{job.complaints()}"
                if event["restart"] < restarts:
                    continue  # the last words of one that is gone
                if event["what"] == "started":
                    workers[event["rank"]] = event["pid"]
                countdown -= len(workers) == size
                if left and countdown < 0:
                    # at any moment, not only when something was told
                    time.sleep(self._chance.uniform(0, 0.05))
                    what, _, rank = left[-1].partition(" of ")
                    if what != "daemon":
                        self.story.tell_death(restarts)
                    if what == "job":
                        job.preempt()
                        left.pop()
                    elif self._strike(
                        what, workers[int(rank) if rank else self._chance.choice([0, *range(size)])]
                    ):
                        left.pop()
                        countdown = self._draw()
                        if what != "daemon":
                            restarts += 1
                            workers.clear()
                elif not left and (event["what"], event["rank"]) == ("committed", 0):
                    commits += 1
                    if commits == 2:
                        self.story.stop()
            assert (job.end() != 0) == ("job" in blows), job.complaints()
        assert not left

    def train_undisturbed(self, size: int, until: int) -> None:
        """A job that begins anew, saves nothing and ends at that step: what the others are compared
        with.

        There is nothing of ours in it. A worker of it was seen to end all the same, by an abort in
        torch's own threads ("terminate called without an active exception"); then there is another.
        """
        complaints = ""
        for _ in range(3):
            self.story.go_on()
            with Job(
                self._folder,
                self._traces,
                size,
                "",
                "--until",
                until,
                "--save-every",
                0,
                forked=True,
            ) as job:
                for _ in self.story.hear(job):
                    pass
                if job.end() == 0:
                    return
                complaints = job.complaints()
            assert "terminate called without an active exception" in complaints, complaints
        raise AssertionError(complaints)

    def _draw(self) -> int:
        """How much more is told, once all workers are there, before a blow falls; little, and they
        have not resumed.
        """
        return self._chance.randrange(self._chance.choice([20, 150]))

    def _strike(self, blow: str, pid: int) -> bool:
        """SIGKILL to a worker, its daemon, or both; whether it could be."""
        daemon = _daemon_of(pid)
        if blow != "worker":
            if daemon is None:
                return False
            _kill(daemon)
        if blow != "daemon":
            _kill(pid)
        self.blows[blow] += 1
        return True


def _daemon_of(pid: int) -> int | None:
    """The daemon that serves a worker at this moment."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            if "sidesave.writer_daemon" in child.cmdline():
                return child.pid
    return None


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError), pidfd_of(pid) as pidfd:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


@pytest.fixture
def campaign(tmp_path: Path, traces: Traces, seed: int) -> Iterator[Campaign]:
    campaign = Campaign(tmp_path, traces, random.Random(seed))
    yield campaign
    campaign.story.close()


@pytest.mark.slow
def test_killed_workers_and_daemons_are_resumed_bit_for_bit_by_fewer_ranks_too(
    campaign: Campaign, traces: Traces
):
    campaign.train(4, "worker", "daemon of 0")
    campaign.train(3, "job")
    campaign.train(2)
    campaign.story.check(traces)


@pytest.mark.slow(minutes=1)
def test_ranks_without_a_process_group_meet_again_after_each_death(
    campaign: Campaign, traces: Traces
):
    campaign.train(3, "worker", "daemon", "both", until=300)
    campaign.train(2, until=310)
    campaign.train(4, until=320)
    campaign.story.check(traces, divided=False)


@pytest.mark.slow(minutes=2)
@pytest.mark.timeout(1500)
def test_kills_lose_no_acknowledged_step_and_change_no_bit(
    campaign: Campaign, traces: Traces, share: Share, seed: int, capsys: pytest.CaptureFixture[str]
):
    chance = random.Random(seed)

    def blows(count: int) -> list[str]:
        return chance.choices(["worker", "daemon", "both"], weights=[3, 4, 1], k=count)

    began = time.monotonic()
    for _ in share.rounds(3):
        campaign.train(4, *blows(12))
    campaign.train_undisturbed(4, max(event["step"] for event in campaign.story.events))
    for size in (3, 2, 4):
        campaign.train(size, *blows(5))
    campaign.story.check(traces)
    assert campaign.blows.total() >= 50 or not campaigns.WHOLE
    told = Counter(event["what"] for event in campaign.story.events)
    with capsys.disabled():
        print(
            f"\n{campaign.blows.total()} kills, of "
            f"{', '.join(f'{what} {n}' for what, n in campaign.blows.items())}; "
            f"{told['committed']} commits acknowledged, none lost; {told['resumed']} ranks resumed "
            f"bit for bit; seed {seed}; {time.monotonic() - began:.0f} s"
        )
