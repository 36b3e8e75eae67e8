"""A slot that is filled again is filled as if for the first time, whatever became of the tensors
between two saves.
"""

from __future__ import annotations

import gc
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
from states import difference, frozen
from torch import nn
from trainers import DEADLINE_S, wait_until

import sidesave
from sidesave.errors import UnsupportedValueError
from sidesave.stager.copy import copy_list
from sidesave.stager.copy.copy_list import CopyList

SIZES = ((3,), (8, 8), (300, 300), (1,), (64, 64), (5, 0), (700, 700))
NUMBERS = st.integers(0, len(SIZES) - 1)


class Saves(RuleBasedStateMachine):
    """A model, its optimizer and some tensors, of which a few are others at each save."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._ckpt = sidesave.Checkpointer(
            self._folder.name, staging=sidesave.StagingOptions(slots=2)
        )
        model = nn.ParameterList([nn.Parameter(torch.rand(size)) for size in SIZES])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        self._model: Any = model
        self._plain: Any = {
            "complex": torch.rand(50, dtype=torch.complex64),
            "loss": torch.rand(()),
        }
        self._state = {"model": model, "optimizer": optimizer, "plain": self._plain}
        self._step = 0

    def teardown(self) -> None:
        self._ckpt.close()
        self._folder.cleanup()

    @rule(inside=st.booleans(), again=st.integers(1, 4))
    def save(self, inside: bool, again: int) -> None:
        for _ in range(again):
            self._step += 1
            expected = frozen(self._state)
            if inside:
                with self._ckpt.guard():
                    handle = self._ckpt.save(self._step, self._state)
            else:
                handle = self._ckpt.save(self._step, self._state)
            self._write()
            handle.committed.result(DEADLINE_S)
            loaded = sidesave.load(f"{self._folder.name}/step-{self._step:08d}")
            assert difference(expected, loaded) == ""

    def _write(self) -> None:
        with torch.no_grad():
            for parameter in self._model:
                parameter.add_(1)
            self._plain["loss"] = torch.rand(())

    @rule(number=NUMBERS)
    def move(self, number: int) -> None:
        self._model[number].data = self._model[number].data.clone()

    @rule()
    def move_all(self) -> None:
        for parameter in self._model:
            parameter.data = parameter.data.clone()

    @rule(number=NUMBERS)
    def another(self, number: int) -> None:
        self._plain[f"other{number}"] = torch.rand(SIZES[number])

    @rule(number=NUMBERS)
    def transpose(self, number: int) -> None:
        parameter = self._model[number]
        if parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]:
            parameter.data = parameter.data.t()

    @rule(number=NUMBERS, dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    def cast(self, number: int, dtype: torch.dtype) -> None:
        self._model[number].data = self._model[number].data.to(dtype)

    @rule()
    def conjugate(self) -> None:
        self._plain["complex"] = self._plain["complex"].conj()

    @rule()
    def move_what_is_no_parameter(self) -> None:
        self._plain["complex"] = self._plain["complex"].clone()

    @rule(number=NUMBERS)
    def part_of_a_larger_one(self, number: int) -> None:
        self._model[number].data = torch.rand(3, *SIZES[number])[1]

    @rule(number=NUMBERS)
    def free_for_a_save(self, number: int) -> None:
        storage = self._model[number].untyped_storage()
        nbytes, values = storage.nbytes(), self._model[number].data.clone()
        if values.numel():
            storage.resize_(0)
            self._step += 1
            with pytest.raises(UnsupportedValueError, match="has no memory"):
                self._ckpt.save(self._step, self._state)
            storage.resize_(nbytes)
            self._model[number].data.copy_(values)


TestSaves = Saves.TestCase
TestSaves.settings = settings(
    max_examples=campaigns.examples(15),
    stateful_step_count=12,
)


@pytest.mark.parametrize(
    "change", [torch.Tensor.t, torch.Tensor.conj, lambda tensor: tensor.conj().t()]
)
def test_what_lies_where_it_lay_and_looks_otherwise_is_saved_as_it_looks(
    tmp_path: Path, change: Any
):
    weight = nn.Parameter(torch.rand(50, 50, dtype=torch.complex64))
    with sidesave.Checkpointer(tmp_path, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        for step in range(4):
            ckpt.save(step, {"model": nn.ParameterList([weight])}).committed.result(DEADLINE_S)
            assert torch.equal(ckpt.load(step)["model"]["0"], weight)
            weight.data = change(weight.data)


@pytest.mark.parametrize(
    "make", [torch.Tensor.clone, lambda tensor: tensor.double(), lambda tensor: tensor[:50]]
)
def test_a_tensor_of_no_module_is_saved_from_where_it_is_and_as_it_looks(tmp_path: Path, make: Any):
    model = nn.ParameterList([nn.Parameter(torch.rand(100)) for _ in range(20)])
    state: dict[str, Any] = {"model": model, "average": torch.rand(100)}
    with sidesave.Checkpointer(tmp_path, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        for step in range(3):
            ckpt.save(step, state).committed.result(DEADLINE_S)
        before, state["average"] = state["average"], make(state["average"]).clone()
        before.zero_()
        ckpt.save(3, state).committed.result(DEADLINE_S)
        assert torch.equal(ckpt.load(3)["average"], state["average"])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors were looked at for each list that was made."""
    made: list[int] = []
    make = CopyList.__init__

    def count(self: CopyList, indices: Any, *arguments: Any, **options: Any) -> None:
        made.append(len(indices))
        make(self, indices, *arguments, **options)

    monkeypatch.setattr(copy_list.CopyList, "__init__", count)
    return made


def test_a_slot_that_is_filled_again_looks_only_at_what_lies_elsewhere(
    tmp_path: Path, made: list[int]
):
    model = nn.ParameterList([nn.Parameter(torch.rand(100)) for _ in range(50)])
    kept: list[Any] = []  # else its memory is taken again
    with sidesave.Checkpointer(tmp_path, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        for step in range(6):
            kept.append({"model": model, "loss": torch.rand(4)})
            ckpt.save(step, kept[-1]).committed.result(DEADLINE_S)
    assert made == [51, 50, 1, 1, 1, 1, 1]


def test_a_state_that_always_lies_elsewhere_is_not_remembered(tmp_path: Path, made: list[int]):
    kept: list[Any] = []
    with sidesave.Checkpointer(tmp_path, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        for step in range(8):
            kept.append({"plain": [torch.rand(4) for _ in range(10)]})
            ckpt.save(step, kept[-1]).committed.result(DEADLINE_S)
    assert made == [10, 10, 10, 0, 10, 10, 10, 10, 10]


def test_what_is_remembered_keeps_no_memory(tmp_path: Path):
    arrays = [np.random.default_rng(0).random(1000, dtype=np.float32) for _ in range(5)]
    memory = [weakref.ref(array) for array in arrays]
    model = nn.ParameterList([nn.Parameter(torch.from_numpy(array)) for array in arrays])
    with sidesave.Checkpointer(tmp_path) as ckpt:
        for step in range(4):
            ckpt.save(step, {"model": model}).committed.result(DEADLINE_S)
        del model
        arrays.clear()
        let_go = "the thread that has copied it lets go of it"
        wait_until(
            lambda: gc.collect() >= 0 and not any(each() is not None for each in memory), let_go
        )
