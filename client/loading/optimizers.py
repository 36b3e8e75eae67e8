"""Whether the state of an optimizer in a checkpoint is one for the optimizer here, parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch

from sidesave.client.loading.flat import Slot
from sidesave.client.loading.tensors import TensorLoad

_LIKE_PARAMETERS: Final = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")
"""States of an optimizer that have the shape of their parameter."""


def compare(
    slot: Slot,
    saved: Any,
    spread: Callable[[TensorLoad, torch.Tensor, Slot], str],
    shape: Callable[[torch.Tensor, Slot], tuple[int, ...]],
) -> tuple[list[str], list[int]]:
    """What does not fit, and the numbers of the parameters that there are; what is spread here is marked so.

    Args:
        slot: The optimizer.
        saved: The nest that there is for it.
        spread: Has a tensor come in the shards of another one; returns what is in the way.
        shape: What is saved of a tensor has this shape.
    """
    target, fqn = cast("torch.optim.Optimizer", slot.target), slot.fqn
    body = cast("dict[str, Any]", saved if isinstance(saved, dict) else {})
    groups, states = cast("Any", body.get("param_groups")), cast("Any", body.get("state"))
    if not isinstance(groups, list) or states is None:
        return [f"{fqn}: the checkpoint holds no optimizer state here"], []
    groups = cast("list[Any]", groups)
    if not all(map(_is_group, groups)):
        return [f"{fqn}: the checkpoint holds malformed optimizer state here"], []
    sizes, here = ([len(group["params"]) for group in each] for each in (groups, target.param_groups))
    if sizes != here:
        return [f"{fqn}: parameter groups of {sizes} in the checkpoint, {here} in the target"], []
    if not isinstance(states, dict) or not all(
        isinstance(one, dict) for one in cast("dict[Any, Any]", states).values()
    ):
        return [f"{fqn}: the checkpoint holds malformed optimizer state here"], []
    problems = [*_options(target, groups, fqn), *_parameter_names(target, groups, fqn)]
    parameters = [parameter for group in target.param_groups for parameter in group["params"]]
    numbers = [number for group in groups for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        current, state = target.state.get(parameter, {}), cast("dict[Any, Any]", states).get(number, {})
        lacking, other = current.keys() - state.keys(), state.keys() - current.keys()
        if lacking and other and current:
            told = f"it has {', '.join(sorted(map(str, other)))} and no {', '.join(sorted(map(str, lacking)))}"
            problems.append(f"{fqn}.state.{number}: the state of another kind of optimizer: {told}")
            break
        for key, load in state.items():
            if not isinstance(load, TensorLoad):
                continue
            name, have = f"{fqn}.state.{number}.{key}", current.get(key)
            if isinstance(have, torch.Tensor):
                wrong = (
                    f"shape {list(load.shape)} in the checkpoint, {list(shape(have, slot))} in the target"
                    if shape(have, slot) != load.shape
                    else spread(load, have, slot)
                )
            elif tuple(parameter.shape) == load.shape and key != "step":  # a new optimizer's
                wrong = spread(load, parameter, slot)
            elif key in _LIKE_PARAMETERS:
                wrong = f"shape {list(load.shape)} in the checkpoint, its parameter has {list(shape(parameter, slot))}"
            else:
                wrong = ""
            if wrong:
                problems.append(f"{name}: {wrong}")
    return problems, numbers


def _options(target: torch.optim.Optimizer, groups: list[dict[str, Any]], fqn: str) -> list[str]:
    """Numbers that every step takes from a group: one that the checkpoint lacks is of another kind of optimizer.

    What newer versions of torch have added are switches.
    """
    numbers = [key for key, value in target.defaults.items() if _is_number(value)]
    lacking = [key for key in numbers if any(key not in group for group in groups)]
    if not lacking:
        return []
    return [
        f"{fqn}: the checkpoint holds the state of another kind of optimizer than {type(target).__name__}: it "
        f"has no {', '.join(lacking)}; to keep what the optimizer has, exclude {fqn}.param_groups.*.{lacking[0]}"
    ]


def _parameter_names(target: torch.optim.Optimizer, groups: list[dict[str, Any]], fqn: str) -> list[str]:
    """States go by position: where both sides know the names of their parameters, these must be the same."""
    problems: list[str] = []
    for at, (group, saved) in enumerate(zip(target.param_groups, groups, strict=True)):
        names: Any = group.get("param_names"), saved.get("param_names")
        if not all(isinstance(each, list) for each in names) or names[0] == names[1]:
            continue
        odd = [f"{there} where {here} is here" for here, there in zip(*names, strict=False) if here != there]
        told = f"{', '.join(odd[:5])}{', ...' if len(odd) > 5 else ''}"
        problems.append(
            f"{fqn}.param_groups.{at}: the checkpoint has the states of other parameters, or in another order: "
            f"{told}; if only names have changed, exclude {fqn}.param_groups.{at}.param_names"
        )
    return problems


def _is_number(value: Any) -> bool:
    """Whether an option of an optimizer is a number, or several, and no switch."""
    if isinstance(value, tuple) and value:
        return all(map(_is_number, cast("tuple[Any, ...]", value)))
    return isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool)


def _is_group(group: Any) -> bool:
    numbers = cast("dict[str, Any]", group).get("params") if isinstance(group, dict) else None
    return isinstance(numbers, list) and all(type(number) is int for number in cast("list[Any]", numbers))
