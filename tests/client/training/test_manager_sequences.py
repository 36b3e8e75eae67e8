"""A manager through any sequence of its calls: what is wanted is kept, nothing else is, and each
resume is exact.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from campaigns import Share
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from trainers import DEADLINE_S, await_end, pidfd_of

import sidesave
from sidesave import EverySteps, KeepBest, KeepEverySteps, KeepLatest
from sidesave.client.runs.finding import catalog_of
from sidesave.client.training.keep_policies import to_delete

PLACES = st.integers(0, 1 << 20)
KEPT = [KeepLatest(2), KeepBest(1, metric="loss")]
KEPT_FAR = [KeepLatest(3), KeepEverySteps(5)]
Truth = tuple[torch.Tensor, int, torch.Tensor]


class Sequences(RuleBasedStateMachine):
    """One run, whose trainer always restores what it goes on from."""

    scheme = ""
    mirrored = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(
            0
        )  # so that the losses, and with them what is kept, are those of a run to be reproduced
        self.folder = tempfile.TemporaryDirectory()
        self.place = Path(self.folder.name, "run")
        self.mirror = f"{self.folder.name}/mirror" if self.mirrored else None
        self.truths: dict[int, Truth] = {}
        self.pins: set[int] = set()
        self.stirred = False
        """Whether something else than a commit has changed what is wanted, which is looked at with
        the next one.
        """
        self.begin()

    def begin(self) -> None:
        self.state: dict[str, Any] = {"w": torch.zeros(3), "n": 0}
        self.manager = sidesave.CheckpointManager(
            f"{self.scheme}{self.place}",
            self.state,
            save=EverySteps(3),
            keep=KEPT,
            mirror=self.mirror,
            mirror_keep=KEPT_FAR if self.mirror else (),
            random_state=True,
        )
        self.resume()

    def truth(self) -> Truth:
        return self.state["w"].clone(), self.state["n"], torch.get_rng_state()

    def check_state(self, step: int) -> None:
        w, n, generator = self.truths[step]
        assert torch.equal(self.state["w"], w)
        assert self.state["n"] == n
        assert torch.equal(torch.get_rng_state(), generator)

    def quiet(self) -> None:
        """All is committed, and retention has looked at it."""
        self.manager.wait(DEADLINE_S)
        retention = self.manager._background.retention
        assert retention is not None
        with retention.reading(None):
            pass

    def staying(self) -> list[int]:
        """The steps that are here to stay, for now: what is not wanted may go at any moment, once
        it is mirrored.
        """
        self.quiet()
        here = catalog_of(f"{self.scheme}{self.place}").all()
        return sorted({info.step for info in here} - {*to_delete(here, KEPT, self.pins)})

    # What training does ---------------------------------------------------------------------------

    def one_step(self) -> dict[str, float]:
        self.step = self.last + 1
        self.last = self.step
        self.state["w"] += torch.rand(3)
        self.state["n"] += 1
        return {"loss": float(self.state["w"][0]) % 0.1}

    @rule(count=st.integers(1, 7), asks=st.booleans())
    def train(self, count: int, asks: bool) -> None:
        if asks:
            self.manager.request_save()
        for _ in range(count):
            metrics, truth = self.one_step(), self.truth()
            if self.manager.step(self.step, metrics) is not None:
                self.truths[self.step], self.stirred = truth, False

    @rule(blocking=st.booleans())
    def save(self, blocking: bool) -> None:
        metrics = self.one_step()
        self.truths[self.step], self.stirred = self.truth(), False
        self.manager.save(self.step, metrics, blocking=blocking)

    @rule()
    def kill_the_daemon(self) -> None:
        if pid := self.manager.checkpointer.daemon_pid:
            with contextlib.suppress(ProcessLookupError):  # it has been killed just before
                os.kill(pid, signal.SIGKILL)

    @rule(which=PLACES)
    def pin(self, which: int) -> None:
        if steps := self.staying():
            self.manager.pin(steps[which % len(steps)])
            self.pins.add(steps[which % len(steps)])

    @precondition(lambda self: self.pins)
    @rule(which=PLACES)
    def unpin(self, which: int) -> None:
        pinned = sorted(self.pins)[which % len(self.pins)]
        self.manager.unpin(pinned)
        self.pins.discard(pinned)
        self.stirred = True

    # Going back and going on ----------------------------------------------------------------------

    @rule()
    def resume(self) -> None:
        latest = self.manager.latest
        if latest is not None:
            self.manager.wait(DEADLINE_S)
            latest = self.manager.latest
            assert latest is not None
        self.last = self.manager.restore() - 1
        if latest is None:
            latest = self.manager.latest  # a save was under way
        assert self.last == (-1 if latest is None else latest.step)
        if latest is not None:
            self.check_state(latest.step)

    @rule(which=PLACES)
    def roll_back(self, which: int) -> None:
        if steps := self.staying():
            step = steps[which % len(steps)]
            self.stirred = True
            assert self.manager.rollback(step) == step + 1
            self.check_state(step)
            self.last = step
            latest = self.manager.latest
            assert latest is not None
            assert latest.step == step

    @rule()
    def begin_anew(self) -> None:
        self.close()
        self.check_kept()
        self.begin()

    @precondition(lambda self: self.mirror)
    @rule()
    def lose_the_run(self) -> None:
        self.manager.wait(DEADLINE_S)
        self.manager.checkpointer.wait(DEADLINE_S, mirrored=True)
        self.close()
        shutil.rmtree(self.place)
        self.pins.clear()  # which are written down in the run
        self.begin()

    # What holds -----------------------------------------------------------------------------------

    def check_kept(self) -> None:
        infos = catalog_of(f"{self.scheme}{self.place}").all() if self.truths else []
        steps = {info.step for info in infos}
        assert self.stirred or not to_delete(infos, KEPT, self.pins)
        assert self.pins <= steps
        for info in infos:
            assert sidesave.verify(info.path).ok
            loaded = sidesave.load(info.path)
            w, n, _ = self.truths[info.step]
            assert torch.equal(loaded["w"], w)
            assert loaded["n"] == n

    def close(self) -> None:
        if pid := self.manager.checkpointer.daemon_pid:
            with contextlib.suppress(ProcessLookupError), pidfd_of(pid) as daemon:
                self.manager.close()
                await_end(daemon)  # which goes on with the mirror
        self.manager.close()

    def teardown(self) -> None:
        try:
            # so that the daemon is one that was not killed just now, and its end is seen
            if self.mirror:
                self.manager.checkpointer.wait(DEADLINE_S, mirrored=True)
            self.close()
            self.check_kept()
        finally:
            self.manager.close()
            self.folder.cleanup()


class InAStore(Sequences):
    scheme = "file://"


class WithAMirror(Sequences):
    mirrored = True

    def check_kept(self) -> None:
        """What is on its way to the mirror stays."""


def run_sequences(machine: type[Sequences], count: int, length: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    chosen = settings(
        max_examples=count, stateful_step_count=length, deadline=None, suppress_health_check=checks
    )
    run_state_machine_as_test(machine, settings=chosen)  # type: ignore[no-untyped-call]


@pytest.mark.drawn
@pytest.mark.parametrize("machine", [Sequences, InAStore, WithAMirror])
def test_whatever_is_called_of_a_manager_resumes_are_exact(machine: type[Sequences]):
    run_sequences(machine, 4, 20)


@pytest.mark.slow(minutes=1)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("machine", [Sequences, InAStore, WithAMirror])
def test_whatever_is_called_of_a_manager_for_long_resumes_are_exact(
    machine: type[Sequences], share: Share
):
    for _ in share.rounds(9):
        run_sequences(seed(share.chance.randrange(1 << 32))(machine), 5, 40)
