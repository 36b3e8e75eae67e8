"""A slot that holds a frozen tensor is not filled with it again, and never holds another one in its
place.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
import weakref
from collections.abc import Callable
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
from sidesave.stager import ownership
from sidesave.stager.copy import fingerprint, held
from sidesave.stager.copy.copier import Copier
from sidesave.stager.copy.memcopy import Pieces

SIZES: tuple[tuple[int, ...], ...] = ((3,), (8, 8), (300, 300), (5, 0), (256, 256))
NUMBERS = st.integers(0, len(SIZES) - 1)
LARGE = 1 << 17
"""Tensors of this many floats are held; smaller ones are copied at each save."""


def a_base() -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.rand(size), requires_grad=False) for size in SIZES])


class Saves(RuleBasedStateMachine):
    """Whatever torch is asked to do with what was declared frozen."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._ckpt = sidesave.Checkpointer(
            self._folder.name, staging=sidesave.StagingOptions(slots=2)
        )
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
    def change_without_a_trace(self, number: int) -> None:
        self._base[number].untyped_storage().copy_(torch.rand(SIZES[number]).untyped_storage())

    @rule(number=NUMBERS)
    def step_a_fused_optimizer(self, number: int) -> None:
        self._base[number].requires_grad_().grad = torch.rand(SIZES[number])
        torch.optim.AdamW([self._base[number]], fused=True).step()
        self._base[number].requires_grad_(False).grad = None

    @rule(number=NUMBERS)
    def change_what_all_slots_hold(self, number: int) -> None:
        self._declared = True
        self.save(2)
        self.change(number)
        self.save(2)

    @rule(number=NUMBERS)
    def give_other_memory(self, number: int) -> None:
        # often where the memory was that goes with this
        self._base[number].data = torch.rand(SIZES[number])

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
    """How many bytes each save has copied, or compared."""
    copied: list[int] = []
    copy = Copier.copy

    def counting(self: Copier, *arguments: Any, **options: Any) -> bool:
        copied.append(0)
        return copy(self, *arguments, **options)

    make = Pieces.__init__

    def count(self: Pieces, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        copied[-1] += self.nbytes

    monkeypatch.setattr(Copier, "copy", counting)
    monkeypatch.setattr(Pieces, "__init__", count)
    return copied


@pytest.mark.parametrize("slots", [1, 2])
def test_what_a_slot_holds_is_looked_at_in_full_at_each_twentieth_save(
    tmp_path: Path, copied: list[int], slots: int
):
    base, head = torch.rand(LARGE), torch.rand(10)
    with sidesave.Checkpointer(tmp_path, staging=sidesave.StagingOptions(slots=slots)) as ckpt:
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
    base = torch.zeros(LARGE)
    with sidesave.Checkpointer(tmp_path, staging=sidesave.StagingOptions(slots=slots)) as ckpt:
        for step in range(9):
            base += step % 3 == 2  # in between each slot has held it
            ckpt.save(step, {"base": Frozen(base)}).committed.result(DEADLINE_S)
            assert torch.equal(ckpt.load(step)["base"], base)


def unscale(tensor: torch.Tensor) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_([tensor], torch.zeros(1), torch.tensor([2.0]))


def fill_storage(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().copy_(torch.full_like(tensor, 3.0).untyped_storage())


def fill_data(tensor: torch.Tensor) -> None:
    tensor.data.fill_(3.0)


def fill_array(tensor: torch.Tensor) -> None:
    tensor.numpy()[:] = 3.0


@pytest.mark.parametrize("write", [unscale, fill_storage, fill_data, fill_array])
def test_a_write_of_all_of_it_that_torch_does_not_count_is_in_the_next_save_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, copied: list[int], write: Any
):
    base, version = torch.rand(LARGE), torch.zeros(LARGE)._version
    with sidesave.Checkpointer(tmp_path, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        for step in range(10):
            if step == 5:
                write(base)
                assert base._version == version
            ckpt.save(step, {"base": Frozen({"w": base})}).committed.result(DEADLINE_S)
            assert torch.equal(ckpt.load(step)["base"]["w"], base)
    assert copied == [base.nbytes, 0, 0, 0, 0] + [base.nbytes] * 5, "it is not trusted any more"
    [record] = [record for record in caplog.records if record.name == Copier.__module__]
    assert "base.w (copied at each save from now on" in record.getMessage()


def test_a_write_of_little_of_it_is_in_the_next_save_that_looks_at_all_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    base, other = torch.zeros(LARGE), torch.zeros(LARGE)
    with sidesave.Checkpointer(tmp_path, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        for step in range(held.EVERY + 2):
            ckpt.save(step, {"base": Frozen({"w": base, "other": other})}).committed.result(
                DEADLINE_S
            )
            base.numpy()[1000] = step
        assert ckpt.load(held.EVERY - 1)["base"]["w"][1000] == 0
        [record] = [record for record in caplog.records if record.name == Copier.__module__]
        for step in (held.EVERY, held.EVERY + 1):
            assert ckpt.load(step)["base"]["w"][1000] == step - 1
    assert "base.w (copied at each save from now on" in record.getMessage()
    assert "base.other" not in record.getMessage()


@pytest.fixture
def unsampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have samples see nothing, so that the other ways have to."""
    monkeypatch.setattr(fingerprint, "samples_match", lambda *_: True)


def save_and_compare(
    run: Path, state: dict[str, Any], live: Callable[[], dict[str, torch.Tensor]], change: Any
) -> None:
    """Six saves of a state, which is changed before the last three; each holds what there was."""
    with sidesave.Checkpointer(run, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        for step in range(6):
            if step >= 3:
                change()
            ckpt.save(step, state, blocking=True)
            loaded = ckpt.load(step)
            for name, tensor in live().items():
                saved: Any = loaded
                for key in name.split("/"):
                    saved = saved[int(key) if key.isdigit() else key]
                assert torch.equal(saved, tensor), (step, name)


@pytest.mark.usefixtures("unsampled")
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("detached", [False, True])
def test_buffers_are_never_held(tmp_path: Path, *, inference: bool, detached: bool):
    norm = nn.BatchNorm1d(LARGE).requires_grad_(False).train()
    state: dict[str, Any] = {"norm": Frozen(norm)}
    if detached:
        state = {"norm": norm, "copy": Frozen(norm.state_dict())}

    def forward() -> None:
        with torch.inference_mode(inference):
            norm(torch.randn(4, LARGE) * 5)

    def live() -> dict[str, torch.Tensor]:
        assert norm.running_mean is not None
        return {f"{[*state][-1]}/running_mean": norm.running_mean}

    save_and_compare(tmp_path, state, live, forward)


def parameters_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {f"state/model/{name}": tensor.detach() for name, tensor in module.named_parameters()}


FUSED = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, fused=True),
}


@pytest.mark.usefixtures("unsampled")
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("kind", FUSED)
def test_what_an_optimizer_steps_is_not_held_nor_is_its_state(
    tmp_path: Path, kind: str, *, closure: bool
):
    model = nn.Linear(300, 300)
    optimizer = FUSED[kind](model.parameters())

    def backward() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 300)).square().mean()
        loss.backward()
        return loss

    def step() -> None:
        if closure:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()
        optimizer.zero_grad()

    step()  # so that there is a state

    def live() -> dict[str, torch.Tensor]:
        states = optimizer.state[model.weight]
        return parameters_of(model) | {
            f"state/optimizer/state/0/{name}": each for name, each in states.items()
        }

    save_and_compare(
        tmp_path, {"state": Frozen({"model": model, "optimizer": optimizer})}, live, step
    )


@pytest.mark.usefixtures("unsampled")
def test_what_an_optimizer_that_is_not_in_the_state_steps_is_not_held(tmp_path: Path):
    model, other = nn.Linear(300, 300), nn.Linear(300, 300)
    optimizer = FUSED["AdamW"](other.parameters())

    def step() -> None:
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [*model.parameters()]})  # while a slot holds them
        model(other(torch.randn(4, 300))).square().mean().backward()
        optimizer.step()

    other(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    save_and_compare(
        tmp_path, {"state": Frozen({"model": model})}, lambda: parameters_of(model), step
    )


def test_what_an_optimizer_has_but_does_not_train_is_held(tmp_path: Path, copied: list[int]):
    model = nn.Sequential(nn.Linear(300, 300).requires_grad_(False), nn.Linear(300, 3))
    optimizer = FUSED["AdamW"](model.parameters())
    with sidesave.Checkpointer(tmp_path, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        for step in range(3):
            model(torch.randn(4, 300)).sum().backward()
            optimizer.step()
            ckpt.save(step, {"base": Frozen(model[0])}, blocking=True)
    assert copied == [361_200, 1200, 1200]


@pytest.mark.usefixtures("unsampled")
def test_after_a_guard_nothing_is_held(tmp_path: Path):
    model = nn.Linear(300, 300).requires_grad_(False)

    def write() -> None:
        with ownership.guard():
            model.weight.data.add_(1)

    save_and_compare(
        tmp_path, {"state": Frozen({"model": model})}, lambda: parameters_of(model), write
    )


def test_what_is_not_declared_is_copied_at_each_save(tmp_path: Path):
    base = nn.ParameterList([nn.Parameter(torch.zeros(LARGE), requires_grad=False)])
    with sidesave.Checkpointer(tmp_path, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        for step in range(3):
            base[0].data.numpy()[0] = step
            ckpt.save(step, {"base": base}).committed.result(DEADLINE_S)
            assert ckpt.load(step)["base"]["0"][0] == step


@pytest.mark.parametrize("kind", ["array", "inference", "conjugated", "sparse"])
def test_what_has_no_counter_or_no_memory_of_its_own_is_copied_at_each_save(
    tmp_path: Path, kind: str
):
    with torch.inference_mode():
        inference = torch.ones(LARGE)
    numbers = {
        "array": np.ones(LARGE, dtype=np.float32),
        "inference": inference,
        "conjugated": torch.ones(LARGE, dtype=torch.complex128).conj(),
        "sparse": torch.eye(300).to_sparse(),
    }[kind]
    with sidesave.Checkpointer(tmp_path, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        for step in range(3):
            ckpt.save(step, {"base": Frozen({"numbers": numbers})}).committed.result(DEADLINE_S)
            loaded = torch.as_tensor(ckpt.load(step)["base"]["numbers"])
            assert torch.equal(
                loaded.to_dense(), torch.as_tensor(numbers).to_dense().resolve_conj()
            )
            with torch.inference_mode():
                numbers *= 2


def test_no_memory_is_kept(tmp_path: Path):
    array = np.ones(LARGE, dtype=np.float32)
    memory, state = weakref.ref(array), {"base": Frozen(torch.from_numpy(array))}
    with sidesave.Checkpointer(tmp_path) as ckpt:
        for step in range(4):
            ckpt.save(step, state).committed.result(DEADLINE_S)
        del array, state
        wait_until(
            lambda: gc.collect() >= 0 and memory() is None,
            "the thread that has copied it lets go of it",
        )


def test_a_slot_forgets_frozen_tensors_that_a_save_without_any_has_overwritten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    one, other = (
        nn.Parameter(torch.full((LARGE,), value), requires_grad=False) for value in (1.0, 2.0)
    )
    with sidesave.Checkpointer(tmp_path, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        states = [
            {"base": Frozen({"w": one})},
            {"base": {"w": other}},
            {"base": Frozen({"w": one})},
        ]
        for step, state in enumerate(states):
            ckpt.save(step, state).committed.result(DEADLINE_S)
        assert [ckpt.load(step)["base"]["w"].unique().item() for step in range(3)] == [
            1.0,
            2.0,
            1.0,
        ]
    assert "Frozen" not in caplog.text, "it was copied because the slot did not hold it"


def test_a_copy_that_was_cut_off_is_not_taken_for_what_it_was_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    base = [torch.zeros(LARGE), torch.zeros(LARGE)]
    state = {"base": Frozen(dict(zip("ab", base, strict=True)))}
    steps = itertools.count()
    with sidesave.Checkpointer(tmp_path, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        ckpt.save(next(steps), state).committed.result(DEADLINE_S)
        for tensor in base:
            tensor.add_(1)

        def cut_off(self: Pieces, arena: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Pieces, "work", cut_off)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(next(steps), state)
        step = next(steps)
        ckpt.save(step, state).committed.result(DEADLINE_S)
        assert all(tensor.eq(1).all() for tensor in ckpt.load(step)["base"].values())
