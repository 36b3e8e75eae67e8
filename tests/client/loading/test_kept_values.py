"""Values that live objects keep as they are given: whole objects, and tensors that several names
share.
"""

import collections
import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from states import difference
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

import sidesave
from sidesave import Checkpointer
from sidesave.errors import StateMismatchError

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")


def save(run: Path, state: dict[str, Any]) -> str:
    with Checkpointer(run) as checkpointer:
        return checkpointer.save(1, state).committed.result().path


# Objects in the state of an object ----------------------------------------------------------------


class Warmup(LRScheduler):
    """A schedule that hands over to another one, an attribute, which torch takes into the state."""

    def __init__(self, optimizer: torch.optim.Optimizer, after: LRScheduler):
        self.after = after
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return (
            self.after.get_last_lr()
            if self.last_epoch > 2
            else [0.1 * self.last_epoch for _ in self.base_lrs]
        )

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch > 2:
            self.after.step()
        super().step()


def schedule() -> tuple[torch.optim.Optimizer, Warmup]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    with warnings.catch_warnings(action="ignore"):
        return optimizer, Warmup(optimizer, CosineAnnealingLR(optimizer, 20))


def rates(optimizer: torch.optim.Optimizer, warmup: Warmup) -> list[float]:
    made: list[float] = []
    for _ in range(4):
        optimizer.step()
        warmup.step()
        made.append(optimizer.param_groups[0]["lr"])
    return made


def test_a_schedule_in_the_state_of_another_stays_an_object(tmp_path: Path):
    optimizer, warmup = schedule()
    rates(optimizer, warmup)
    path = save(tmp_path, {"optimizer": optimizer, "lr": warmup})
    resumed, other = schedule()
    after = other.after
    sidesave.load(path, into={"optimizer": resumed, "lr": other})
    assert other.after is after
    assert rates(resumed, other) == rates(optimizer, warmup)


class Attributes:
    """An object whose state is all of its attributes, as many schedules and averages have it."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32):
        torch.manual_seed(seed)
        self.model = nn.Linear(3, 2, dtype=dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.parts: list[Any] = [nn.Linear(2, 2), {"count": seed}]
        self.model(torch.ones(3, dtype=dtype)).sum().backward()
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def values(self) -> Any:
        return [
            self.model.state_dict(),
            self.optimizer.state_dict(),
            self.parts[0].state_dict(),
            self.parts[1],
        ]


class Delegates(Attributes):
    """An object that gives the objects in its state their states itself."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.parts[0].load_state_dict(state["parts"][0])
        self.parts[1] = state["parts"][1]


class OfAModule(nn.Module):
    """A module that has an object with live objects in it in its extra state."""

    def __init__(self, seed: int):
        super().__init__()
        self.held = Attributes(seed)
        self.weight = nn.Parameter(torch.full((2,), float(seed)))

    def get_extra_state(self) -> Any:
        return self.held.state_dict()

    def set_extra_state(self, state: Any) -> None:
        self.held.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        if name in ("model", "optimizer"):
            return getattr(self.held, name)
        return super().__getattr__(name)

    def values(self) -> Any:
        return [self.held.values(), self.weight.detach().clone()]


class OfAnOptimizer(torch.optim.SGD):
    """An optimizer whose state, in a form of its own, has an object with live objects in it."""

    def __init__(self, seed: int):
        super().__init__([nn.Parameter(torch.ones(2))], lr=seed)
        self.held = Attributes(seed)

    def state_dict(self) -> dict[str, Any]:
        return {"own": super().state_dict(), "held": self.held.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["own"])
        self.held.load_state_dict(state_dict["held"])

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["held"], name)

    def values(self) -> Any:
        return [self.held.values(), super().state_dict()]


HOLDERS = [Attributes, Delegates, OfAModule, OfAnOptimizer]


@pytest.mark.parametrize("kind", HOLDERS)
def test_modules_and_optimizers_in_the_state_of_an_object_take_their_states(
    tmp_path: Path, kind: Any
):
    saved, live = kind(1), kind(2)
    model, optimizer = live.model, live.optimizer
    sidesave.load(save(tmp_path, {"all": saved}), into={"all": live})
    assert live.model is model
    assert live.optimizer is optimizer
    assert not difference(live.values(), saved.values())


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_load_that_fails_puts_back_the_objects_in_the_state_of_another(tmp_path: Path, kind: Any):
    class Refuses(nn.Module):  # modules with code of their own come after objects and optimizers
        def __init__(self, number: int):
            super().__init__()
            self.number = number

        def get_extra_state(self) -> Any:
            return self.number

        def set_extra_state(self, state: Any) -> None:
            if state != self.number:
                raise RuntimeError("not now")

    path, live = save(tmp_path, {"all": kind(1), "last": Refuses(1)}), kind(2)
    model, before = live.model, copy.deepcopy(live.values())
    with pytest.raises(
        StateMismatchError, match=r"last: this Refuses raised .* nothing was loaded"
    ):
        sidesave.load(path, into={"all": live, "last": Refuses(2)})
    assert live.model is model
    assert not difference(live.values(), before)


def test_a_module_in_the_state_of_an_object_is_not_cast(tmp_path: Path):
    path, live = save(tmp_path, {"all": Attributes(1, torch.float64)}), Attributes(2)
    before = Attributes(2).values()
    with pytest.raises(StateMismatchError, match=r"weight is torch.float64 in the checkpoint"):
        sidesave.load(path, into={"all": live})
    assert not difference(live.values(), before)


class Counts:
    def __init__(self, number: float):
        self.state: dict[str, Any] = {
            "number": number,
            "values": torch.full((3,), number),
            "a": np.full(3, number),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def optimizer_of(rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=rate)


@pytest.mark.parametrize("make", [Counts, optimizer_of])
def test_an_object_with_two_names_does_not_take_the_later_of_two_states(tmp_path: Path, make: Any):
    path, live = save(tmp_path, {"a": make(1.0), "b": make(2.0)}), make(3.0)
    with pytest.raises(
        StateMismatchError, match=r"a and b are one object in the target, but have different states"
    ):
        sidesave.load(path, into={"a": live, "b": live})
    assert not difference(live.state_dict(), make(3.0).state_dict())


@pytest.mark.parametrize("make", [Counts, optimizer_of])
def test_an_object_with_two_names_takes_a_state_that_is_the_same_under_both(
    tmp_path: Path, make: Any
):
    same, live = make(float("nan") if make is Counts else 0.5), make(3.0)
    sidesave.load(save(tmp_path, {"a": same, "b": same}), into={"a": live, "b": live})
    assert not difference(live.state_dict(), same.state_dict())


# Tensors that are kept ----------------------------------------------------------------------------


class SharesState(torch.optim.Optimizer):
    """Keeps one tensor in the state of all parameters, behind one that moves it off the alignment
    of torch.
    """

    def __init__(self, parameters: Any):
        super().__init__(parameters, {"lr": 0.1})
        shared = torch.zeros(3)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"momentum": torch.zeros_like(parameter), "shared": shared}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter, state in self.state.items():
            state["shared"].add_(1)
            parameter.sub_(state["momentum"].add_(parameter.grad) * state["shared"].sum())


def test_a_tensor_that_states_of_parameters_share_is_still_one_after_a_load(tmp_path: Path):
    def made(seed: int) -> tuple[nn.Module, SharesState]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 1)
        return model, SharesState(model.parameters())

    def train(model: nn.Module, optimizer: SharesState) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    model, optimizer = made(1)
    train(model, optimizer)
    resumed, other = made(2)
    path = save(tmp_path, {"model": model, "optimizer": optimizer})
    sidesave.load(path, into={"model": resumed, "optimizer": other})
    assert len({id(state["shared"]) for state in other.state.values()}) == 1
    train(model, optimizer)
    train(resumed, other)
    assert not difference(resumed.state_dict(), model.state_dict())


class Average:
    """Keeps the tensors and arrays that it is given."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


class KeepsExtra(nn.Module):
    """Keeps the tensors that it is given as its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: dict[str, Any] = {}

    def get_extra_state(self) -> dict[str, Any]:
        return self.extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


def test_tensors_that_objects_keep_are_aligned_as_torch_aligns_them(tmp_path: Path):
    """At other addresses kernels round differently, so training would not continue bit for bit."""
    saved, module = Average(), KeepsExtra()
    saved.values = {f"t{size}": torch.randn(size) for size in (1, 5, 7)} | {
        "a": np.arange(3),
        "b": np.ones(5),
    }
    saved.values["tied"] = saved.values["t7"]
    module.extra = {"a": torch.randn(3), "b": torch.randn(5)}
    live, other = Average(), KeepsExtra()
    sidesave.load(save(tmp_path, {"o": saved, "m": module}), into={"o": live, "m": other})
    assert not difference([live.values, other.extra], [saved.values, module.extra])
    tensors = [*live.values.values(), *other.extra.values()]
    addresses = [
        each.data_ptr() if isinstance(each, torch.Tensor) else each.ctypes.data for each in tensors
    ]
    assert [address % 64 for address in addresses] == [0] * len(addresses)
    assert live.values["tied"] is live.values["t7"]


# Plain data ---------------------------------------------------------------------------------------


def test_a_defaultdict_comes_back_with_the_factory_it_was_saved_with(tmp_path: Path):
    path = save(
        tmp_path, {"seen": collections.defaultdict(list, {1: [2]}), "model": nn.Linear(1, 1)}
    )
    state: dict[str, Any] = {"seen": collections.defaultdict(int), "model": nn.Linear(1, 1)}
    sidesave.load(path, into=state)
    assert state["seen"] == {1: [2]}
    assert state["seen"][3] == []
