"""Every optimizer that the differential zoo saves: found by inspection of what is installed, and
some of its own.

An optimizer is named by its package and class, with flags behind: ``torch.AdamW amsgrad fused``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

PACKAGES = {
    "torch": "torch.optim",
    "torchao": "torchao.optim",
    "bitsandbytes": "bitsandbytes.optim",
    "pytorch_optimizer": "pytorch_optimizer",
}
FLAGS = (
    "amsgrad",
    "capturable",
    "centered",
    "foreach",
    "fused",
    "initial_accumulator_value",
    "maximize",
    "nesterov",
)
_VALUES: dict[str, dict[str, Any]] = {
    "nesterov": {"nesterov": True, "momentum": 0.9},
    "initial_accumulator_value": {"initial_accumulator_value": 0.5},
}
Make = Callable[[nn.Module], torch.optim.Optimizer]


class _Own(torch.optim.Optimizer):
    """A gradient step, and a state that few optimizers have."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self.keep(number, parameter, self.state[parameter])
                    parameter.add_(parameter.grad, alpha=-group["lr"])
        return loss

    def keep(self, number: int, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError


class OwnedByOneRank(_Own):
    """The momentum of a parameter is on one rank only, as in distributed Muon and Dion."""

    def keep(self, number: int, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        if number % ranks == rank:
            state["momentum"] = state.get("momentum", 0) * 0.9 + parameter.grad


class DifferentOnEachRank(_Own):
    """A rank keeps what it left over, as with the error feedback of a compressed gradient."""

    def keep(self, number: int, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        state["left_over"] = torch.full_like(parameter, 100.0 * rank + number)


class Nested(_Own):
    """Factors and codes in lists, tuples and dicts, whatever the parameter's dtype, as in SOAP and
    Shampoo.
    """

    def keep(self, number: int, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        third, codes = torch.full((2, 2), 1 / 3), torch.tensor([2**24 + 1, 300])
        state |= {"flat": third.clone(), "factors": [third.clone(), [third.clone()]]}
        state["quantised"] = {"codes": codes, "scale": (third.clone(),), "bits": 8}


class NestedHistory(_Own):
    """Tensors like the parameter, shards among them, in a list and in a dict."""

    def keep(self, number: int, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        old = state.get("past", [torch.zeros_like(parameter)])[0]
        state |= {
            "flat": old + parameter,
            "past": [old + parameter],
            "by_name": {"sum": old + parameter},
        }


class SavesOtherKeys(_Own):
    """Saves its state under keys that the live state lacks, as bitsandbytes does; torch casts it at
    a load.
    """

    def keep(self, number: int, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        state["codes"] = state.get("codes", 0) + torch.ones_like(parameter, dtype=torch.uint8)

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        return saved | {
            "state": {key: {"wrapped": dict(state)} for key, state in saved["state"].items()}
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = {key: each["wrapped"] for key, each in state_dict["state"].items()}
        super().load_state_dict(state_dict | {"state": state})


class SmallMoments(_Own):
    """Keeps moments of another shape than the parameter's, under the names that torch uses."""

    def keep(self, number: int, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        state["exp_avg"] = state.get("exp_avg", 0) + parameter.detach().flatten()[:1]


class DrawnSizes(_Own):
    """Keeps state of a size that it draws at the first step, as SaRA's moments of the elements that
    it trains.
    """

    def keep(self, number: int, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        if not state:
            state["drawn"] = torch.zeros(int(torch.randint(101, 130, ())))
        state["drawn"] = state["drawn"] + 1


class Transposed(_Own):
    """Keeps matrices whose columns lie together in memory, as ``eigh`` makes them; kernels round by
    such things.
    """

    def keep(self, number: int, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        flat = parameter.detach().reshape(parameter.shape[0], -1).float()
        state["sum"] = state.get("sum", 0) + (state["basis"].stride(0) if "basis" in state else 0)
        state["basis"] = torch.linalg.eigh(flat @ flat.T)[1]


class Addresses(_Own):
    """Sums the addresses of its state: kernels on a CPU round differently at other addresses."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)

    def keep(self, number: int, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        state["odd"] = state.get("odd", 0) + (state["sum"].data_ptr() % 64 if "sum" in state else 0)
        state["sum"] = state.get("sum", 0) + parameter.detach().flatten()[:1].repeat(3)


class OwnForm(_Own):
    """Wraps another optimizer, and saves a state that has no groups, as Lookahead does."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "slow": [dict(state) for state in self.state.values()],
            "base": super().state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["base"])

    def keep(self, number: int, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        state["slow"] = state.get("slow", 0) + parameter.detach()


OWN = (
    OwnedByOneRank,
    DifferentOnEachRank,
    Nested,
    NestedHistory,
    SavesOtherKeys,
    SmallMoments,
    DrawnSizes,
    Transposed,
    Addresses,
    OwnForm,
)


def optimizers() -> dict[str, Make]:
    """By name, how each optimizer is made of a model."""
    made: dict[str, Make] = {
        f"zoo.{kind.__name__}": functools.partial(_make, kind, {}) for kind in OWN
    }
    for package, module in PACKAGES.items():
        for name, kind, options in _kinds(package, module):
            made[" ".join([f"{package}.{name}", *options])] = functools.partial(
                _make, kind, options
            )
    return made


def _kinds(
    package: str, module: str
) -> Iterator[tuple[str, type[torch.optim.Optimizer], dict[str, Any]]]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = vars(importlib.import_module(module))
    except ImportError:
        return
    for name, kind in sorted(found.items()):
        if name.startswith("_") or not (
            inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
        ):
            continue
        if kind is torch.optim.Optimizer or inspect.isabstract(kind):
            continue
        yield name, kind, {}
        if package == "torch":
            parameters = inspect.signature(kind).parameters
            for flag in FLAGS:
                if flag in parameters:
                    yield name, kind, _VALUES.get(flag, {flag: True})


def _make(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], model: nn.Module
) -> torch.optim.Optimizer:
    """Make one in the first of some usual ways that works: packages differ in what they want."""
    make = cast("Any", kind)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ways: list[Callable[[], Any]] = [
        lambda: make(trained, lr=0.01, **options),
        lambda: make(trained, **options),
        lambda: make(trained, base_optimizer=torch.optim.AdamW, **options),
        lambda: make(torch.optim.AdamW(trained), **options),
        lambda: make(model, lr=0.01, **options),
        lambda: make(trained, model=model, **options),
    ]
    errors: list[Exception] = []
    for way in ways:
        try:
            return way()
        except Exception as error:  # noqa: BLE001 - the next way may work
            errors.append(error)
    raise errors[0]
