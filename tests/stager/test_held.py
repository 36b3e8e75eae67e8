"""A slot that holds a frozen tensor is not filled with it again, and never holds another one in its place."""

from __future__ import annotations

import gc
import itertools
import tempfile
import weakref
from pathlib import Path
from typing import Any

import campaigns
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from torch import nn
from trainers import DEADLINE_S, wait_until

import sidesave
from sidesave import Frozen
from sidesave.errors import UnsupportedValueError
from sidesave.stager.copy import held
from sidesave.stager.copy.memcopy import Pieces

SIZES: tuple[tuple[int, ...], ...] = ((3,), (8, 8), (300, 300), (5, 0), (64, 64))
NUMBERS = st.integers(0, len(SIZES) - 1)


def a_base() -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.rand(size), requires_grad=False) for size in SIZES])


class Saves(RuleBasedStateMachine):
    """Whatever torch is asked to do with what was declared frozen."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._ckpt = sidesave.Checkpointer(self._folder.name, slots=2)
        self._base: Any = a_base()
        self._extra: dict[str, torch.Tensor] = {}
        self._declared = True
        self._step = 0

    def teardown(self) -> None:
        self._ckpt.close()
        self._folder.cleanup()

    @property
    def _state(self) -> dict[str, Any]:
        base = Frozen(self._base) if self._declared else self._base
        return {"base": base, "extra": self._extra, "head": torch.rand(3)}

    @rule(again=st.integers(1, 4))
    def save(self, again: int) -> None:
        for _ in range(again):
            self._step += 1
            expected = [parameter.detach().clone() for parameter in self._base]
            self._ckpt.save(self._step, self._state).committed.result(DEADLINE_S)
            loaded = sidesave.load(f"{self._folder.name}/step-{self._step:08d}")["base"]
            assert all(map(torch.equal, expected, loaded.values()))

    @rule()
    def fail_to_save(self) -> None:
        self._step += 1
        with pytest.raises(UnsupportedValueError):
            self._ckpt.save(self._step, {**self._state, "odd": object()})

    @rule(number=NUMBERS)
    def change(self, number: int) -> None:
        with torch.no_grad():
            self._base[number].add_(1)

    @rule(number=NUMBERS)
    def change_what_all_slots_hold(self, number: int) -> None:
        self._declared = True
        self.save(2)
        self.change(number)
        self.save(2)

    @rule(number=NUMBERS)
    def give_other_memory(self, number: int) -> None:
        self._base[number].data = torch.rand(SIZES[number])  # often where the memory was that goes with this

    @rule(number=NUMBERS)
    def look_otherwise_at_it(self, number: int) -> None:
        if self._base[number].dim() == 2 and len({*SIZES[number]}) == 1:
            self._base[number].data = self._base[number].data.t()

    @rule(number=NUMBERS)
    def replace(self, number: int) -> None:
        self._base[number] = nn.Parameter(torch.rand(SIZES[number]), requires_grad=False)

    @rule()
    def replace_all(self) -> None:
        self._base = None
        gc.collect()
        self._base = a_base()

    @rule()
    def load_an_earlier_one(self) -> None:
        if steps := self._ckpt.steps():
            self._ckpt.load(steps[0], into={"base": Frozen(self._base)}, strict=False)

    @rule(declared=st.booleans())
    def declare(self, declared: bool) -> None:
        self._declared = declared

    @rule(number=NUMBERS)
    def have_another_plan(self, number: int) -> None:
        self._extra = {f"e{number}": torch.rand(number + 1)}


TestSaves = Saves.TestCase
TestSaves.settings = settings(
    max_examples=campaigns.examples(20),
    stateful_step_count=12,
)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each save has copied."""
    copied: list[int] = []
    make = Pieces.__init__

    def count(self: Pieces, *arguments: Any) -> None:
        make(self, *arguments)
        copied.append(self.nbytes)

    monkeypatch.setattr(Pieces, "__init__", count)
    return copied


@pytest.mark.parametrize("slots", [1, 2])
def test_what_a_slot_holds_is_copied_again_at_each_twentieth_save(tmp_path: Path, copied: list[int], slots: int):
    base, head = torch.rand(1000), torch.rand(10)
    with sidesave.Checkpointer(tmp_path, slots=slots) as ckpt:
        for step in range(2 * held.EVERY + slots):
            ckpt.save(step, {"base": Frozen(base), "head": head}).committed.result(DEADLINE_S)
    everything = base.nbytes + head.nbytes
    whole = [step for step, nbytes in enumerate(copied) if nbytes == everything]
    if slots == 1:
        assert whole == [0, held.EVERY, 2 * held.EVERY]
    assert set(copied) == {everything, head.nbytes}
    assert len(whole) == len({*whole}) <= 3 * slots


@pytest.mark.parametrize("slots", [1, 2])
def test_what_torch_does_to_it_is_in_the_next_save(tmp_path: Path, slots: int):
    base = torch.zeros(1000)
    with sidesave.Checkpointer(tmp_path, slots=slots) as ckpt:
        for step in range(9):
            base += step % 3 == 2  # in between each slot has held it
            ckpt.save(step, {"base": Frozen(base)}).committed.result(DEADLINE_S)
            assert torch.equal(ckpt.load(step)["base"], base)


def test_what_is_written_past_torch_is_in_the_next_save_of_everything(tmp_path: Path):
    base = torch.zeros(1000)
    with sidesave.Checkpointer(tmp_path, slots=1) as ckpt:
        for step in range(held.EVERY + 1):
            ckpt.save(step, {"base": Frozen(base)}).committed.result(DEADLINE_S)
            base.numpy()[0] = 1
        assert ckpt.load(held.EVERY - 1)["base"][0] == 0
        assert ckpt.load(held.EVERY)["base"][0] == 1


def test_what_is_not_declared_is_copied_at_each_save(tmp_path: Path):
    base = nn.ParameterList([nn.Parameter(torch.zeros(1000), requires_grad=False)])
    with sidesave.Checkpointer(tmp_path, slots=1) as ckpt:
        for step in range(3):
            base[0].data.numpy()[0] = step
            ckpt.save(step, {"base": base}).committed.result(DEADLINE_S)
            assert ckpt.load(step)["base"]["0"][0] == step


@pytest.mark.parametrize("kind", ["array", "inference", "conjugated", "sparse"])
def test_what_has_no_counter_or_no_memory_of_its_own_is_copied_at_each_save(tmp_path: Path, kind: str):
    with torch.inference_mode():
        inference = torch.ones(5)
    numbers = {
        "array": np.ones(5, dtype=np.float32),
        "inference": inference,
        "conjugated": torch.ones(5, dtype=torch.complex128).conj(),
        "sparse": torch.eye(3).to_sparse(),
    }[kind]
    with sidesave.Checkpointer(tmp_path, slots=1) as ckpt:
        for step in range(3):
            ckpt.save(step, {"base": Frozen({"numbers": numbers})}).committed.result(DEADLINE_S)
            loaded = torch.as_tensor(ckpt.load(step)["base"]["numbers"])
            assert torch.equal(loaded.to_dense(), torch.as_tensor(numbers).to_dense().resolve_conj())
            with torch.inference_mode():
                numbers *= 2


def test_no_memory_is_kept(tmp_path: Path):
    array = np.ones(1000, dtype=np.float32)
    memory, state = weakref.ref(array), {"base": Frozen(torch.from_numpy(array))}
    with sidesave.Checkpointer(tmp_path) as ckpt:
        for step in range(4):
            ckpt.save(step, state).committed.result(DEADLINE_S)
        del array, state
        wait_until(lambda: gc.collect() >= 0 and memory() is None, "the thread that has copied it lets go of it")


def test_a_copy_that_was_cut_off_is_not_taken_for_what_it_was_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    base = [torch.zeros(1000), torch.zeros(1000)]
    state = {"base": Frozen(dict(zip("ab", base, strict=True)))}
    steps = itertools.count()
    with sidesave.Checkpointer(tmp_path, slots=1) as ckpt:
        ckpt.save(next(steps), state).committed.result(DEADLINE_S)
        for tensor in base:
            tensor.add_(1)

        def cut_off(self: Pieces) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Pieces, "work", cut_off)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(next(steps), state)
        step = next(steps)
        ckpt.save(step, state).committed.result(DEADLINE_S)
        assert all(tensor.eq(1).all() for tensor in ckpt.load(step)["base"].values())
