"""Frozen weights, tables, keys and a mirror: whatever is called in any order, each step holds what
it was given.
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
from commands import output
from encrypted import KEY, OTHER
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from row_tables import GrowingTable
from torch import nn
from trainers import DEADLINE_S

import sidesave
from sidesave import Frozen
from sidesave.client.runs.finding import catalog_of
from sidesave.errors import IntegrityError, InvalidArgumentError
from sidesave.writer_daemon.sealing.keys import RUN_KEYS

IDS = st.lists(st.integers(-40, 40), min_size=1, max_size=30, unique=True)
PLACES = st.integers(0, 1 << 20)
Truth = tuple[dict[str, torch.Tensor], dict[int, Any], int]


def a_model() -> nn.ModuleDict:
    base = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 3)).requires_grad_(False)
    return nn.ModuleDict({"base": base, "head": nn.Linear(3, 3)})


class Sequences(RuleBasedStateMachine):
    """A run, what training does to its state, and what each step has to hold."""

    scheme = ""
    mirrored = False
    encrypted = False

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.place = Path(self.folder.name, "run")
        self.mirror = f"{self.folder.name}/mirror" if self.mirrored else None
        self.model, self.table, self.step = a_model(), GrowingTable(), 0
        self.declared = True
        self.truths: dict[int, Truth] = {}
        self.line: tuple[int, ...] = ()  # the steps that training has come by
        self.lines: dict[int, tuple[int, ...]] = {}
        self.handles: list[sidesave.SaveHandle] = []
        self.keys = [KEY, OTHER]
        self.begin()

    @property
    def encryption(self) -> sidesave.Encryption | None:
        return sidesave.Encryption(key=self.keys[0]) if self.encrypted else None

    def begin(self) -> None:
        run = f"{self.scheme}{self.place}"
        self.ckpt = sidesave.Checkpointer(
            run,
            staging=sidesave.StagingOptions(slots=2),
            mirror=self.mirror,
            encryption=self.encryption,
        )

    def state(self) -> dict[str, Any]:
        base, head = self.model["base"], self.model["head"]
        return {
            "base": Frozen(base) if self.declared else base,
            "head": head,
            "users": self.table,
            "n": [self.step],
        }

    def truth(self) -> Truth:
        return (
            {k: v.clone() for k, v in self.model.state_dict().items()},
            self.table.values(),
            self.step,
        )

    def settle(self) -> None:
        for handle in self.handles:
            handle.committed.result(DEADLINE_S)
        self.handles.clear()

    # What training does ---------------------------------------------------------------------------

    @rule(ids=IDS)
    def train(self, ids: list[int]) -> None:
        self.table.train(ids)
        with torch.no_grad():
            self.model["head"].weight.add_(1)  # type: ignore[union-attr]

    @rule(ids=IDS)
    def remove_rows(self, ids: list[int]) -> None:
        self.table.remove({*ids} & self.table.places.keys())

    @rule()
    def forget_rows(self) -> None:
        self.table.clear()

    @rule(layer=st.integers(0, 1))
    def change_the_base(self, layer: int) -> None:
        with torch.no_grad():
            self.model["base"][layer].weight.mul_(1.5)  # type: ignore[index]

    @rule(trains=st.booleans(), declared=st.booleans())
    def thaw_or_freeze(self, trains: bool, declared: bool) -> None:
        self.model["base"][0].requires_grad_(trains)  # type: ignore[index]
        self.declared = declared

    # What is called -------------------------------------------------------------------------------

    @rule(times=st.integers(1, 3), waits=st.booleans())
    def save(self, times: int, waits: bool) -> None:
        for _ in range(times):
            self.step += 1
            self.saves(self.step, self.truth())
            self.handles.append(self.ckpt.save(self.step, self.state(), blocking=waits))

    @precondition(lambda self: self.truths)
    @rule()
    def save_a_step_anew(self) -> None:
        self.settle()
        step = max(self.truths)
        if step not in self.ckpt.steps():
            return
        self.saves(step, (*self.truth()[:2], self.step))
        self.handles.append(self.ckpt.save(step, self.state(), overwrite=True))

    def saves(self, step: int, truth: Truth) -> None:
        self.truths[step] = truth
        self.line = self.lines[step] = (*(each for each in self.line if each != step), step)

    @rule()
    def kill_the_daemon(self) -> None:
        if pid := self.ckpt.daemon_pid:
            with contextlib.suppress(ProcessLookupError):  # it has been killed just before
                os.kill(pid, signal.SIGKILL)

    @rule(which=PLACES)
    def delete(self, which: int) -> None:
        self.settle()
        here = catalog_of(f"{self.scheme}{self.place}").all() if self.truths else []
        older = {info.step for info in sorted(here, key=lambda info: info.order)[:-1]}
        if steps := sorted(older - {self.ckpt.latest_step()}):  # which may be in the mirror alone
            step = steps[which % len(steps)]
            error = self.ckpt.delete(step).exception(DEADLINE_S)
            if error is None:
                self.gone(step)
            else:
                assert (
                    self.mirror
                    and isinstance(error, InvalidArgumentError)
                    and "wait(mirrored=True)" in str(error)
                )

    def gone(self, step: int) -> None:
        """It is nowhere but in the mirror, if there."""
        if not self.mirror:
            del self.truths[step]

    @rule(which=PLACES)
    def go_back(self, which: int) -> None:
        self.settle()
        if steps := self.ckpt.steps():
            step = steps[which % len(steps)]
            self.ckpt.load(step, into=self.state_to_load())
            self.compare(self.truths[step], self.loaded)
            self.line = self.lines[step]

    @rule()
    def resume(self) -> None:
        self.settle()
        if (step := self.ckpt.latest_step()) is None:
            return
        if not {*self.line} & {*self.truths}:  # all that is there was given up
            with pytest.raises(IntegrityError, match="went back to no longer exists"):
                self.ckpt.load(into=self.state_to_load())
            return
        self.ckpt.load(into=self.state_to_load())
        self.compare(self.truths[step], self.loaded)

    def state_to_load(self) -> dict[str, Any]:
        self.loaded = {**self.state(), "n": [0]}
        return self.loaded

    def compare(self, truth: Truth, loaded: dict[str, Any]) -> None:
        tensors, rows, number = truth
        assert all(
            torch.equal(tensor, self.model.state_dict()[name]) for name, tensor in tensors.items()
        )
        assert self.table.values() == rows
        assert loaded["n"] == [number]

    @rule()
    def begin_anew(self) -> None:
        self.ckpt.close()
        self.settle()
        self.begin()

    @precondition(lambda self: not self.scheme)
    @rule(which=PLACES)
    def lose_a_step(self, which: int) -> None:
        """By hand, while no session is open."""
        self.end()
        if steps := [*self.place.glob("step-*")]:
            lost = sorted(steps)[which % len(steps)]
            shutil.rmtree(lost)
            self.gone(int(lost.name.removeprefix("step-")))
        self.begin()

    @precondition(lambda self: self.encrypted)
    @rule()
    def exchange_keys(self) -> None:
        self.end()
        places = [f"{self.scheme}{self.place}"]
        # perhaps those of a lost run that had no checkpoint
        if self.mirror and Path(self.mirror, RUN_KEYS).exists():
            places.append(self.mirror)
        for place in places:
            with pytest.MonkeyPatch.context() as environment:
                for name, key in zip(("OLD", "NEW"), self.keys, strict=True):
                    environment.setenv(name, key.hex())
                output("rekey", place, "--key-env", "OLD", "--new-key-env", "NEW")
        self.keys.reverse()
        self.begin()

    @precondition(lambda self: self.mirror)
    @rule()
    def lose_the_run(self) -> None:
        """The node is gone, and what was mirrored is not."""
        self.end()
        shutil.rmtree(self.place)
        self.begin()

    @precondition(lambda self: self.mirror)
    @rule()
    def wait_for_the_mirror(self) -> None:
        self.ckpt.wait(DEADLINE_S, mirrored=True)

    def end(self) -> None:
        self.settle()
        if self.mirror:
            self.wait_for_the_mirror()
        self.ckpt.close()

    # What holds -----------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            self.end()
            found = self.check_all(f"{self.scheme}{self.place}")
            if self.mirror:
                found |= self.check_all(self.mirror)
            else:
                assert found == {*self.truths}
        finally:
            self.ckpt.close()
            self.folder.cleanup()

    def check_all(self, run: str) -> set[int]:
        if not self.truths:
            return set()
        infos = catalog_of(run).all()
        for info in infos:
            report = sidesave.verify(info.path)
            assert report.ok, report.faults
            sidesave.load(info.path, into=self.state_to_load(), encryption=self.encryption)
            self.compare(self.truths[info.step], self.loaded)
        return {info.step for info in infos}


class ToAStore(Sequences):
    scheme = "file://"


class WithAMirror(Sequences):
    mirrored = True


class Encrypted(Sequences):
    encrypted = True


class EncryptedInAStore(Encrypted):
    scheme = "file://"


class EncryptedWithAMirror(Encrypted):
    mirrored = True


MACHINES = [Sequences, ToAStore, WithAMirror, Encrypted, EncryptedInAStore, EncryptedWithAMirror]


def run_sequences(machine: type[Sequences], count: int, length: int) -> None:
    chosen = settings(
        max_examples=count,
        stateful_step_count=length,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    run_state_machine_as_test(machine, settings=chosen)  # type: ignore[no-untyped-call]


@pytest.mark.drawn
@pytest.mark.parametrize("machine", MACHINES)
def test_whatever_is_called_each_step_holds_what_it_was_given(machine: type[Sequences]):
    run_sequences(machine, 4, 20)


@pytest.mark.slow(minutes=1)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("machine", MACHINES)
def test_whatever_is_called_for_long_each_step_holds_what_it_was_given(
    machine: type[Sequences], share: Share
):
    for _ in share.rounds(6):
        run_sequences(seed(share.chance.randrange(1 << 32))(machine), 5, 40)
