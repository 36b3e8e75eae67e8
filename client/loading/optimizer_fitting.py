"""Compares an optimizer's state with the live optimizer before anything is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import torch

from sidesave.client.loading.fitting import shape_of, spread
from sidesave.client.loading.tensors import TensorLoad
from sidesave.client.reading.stored import SEQUENCES, children, fqn_of
from sidesave.client.targets.live_map import ORDINARY, Slot
from sidesave.client.targets.objects import has_saved_keys, is_of_torchs_form
from sidesave.client.targets.shards import Shard
from sidesave.errors import UnsupportedValueError
from sidesave.stager import sharding
from sidesave.stager.data_parallel import held_elsewhere, is_divided, states_of
from sidesave.stager.ownership import is_torchs_own
from sidesave.stager.sharding import is_dtensor
from sidesave.stager.state.treespec import Path

_LIKE_PARAMETERS: Final = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
)
"""States that have the shape of their parameter in the optimizers of torch."""


def compare(slot: Slot, saved: Any) -> tuple[list[str], list[int], set[int]]:
    """Return problems of an optimizer's nest, its parameter numbers, and those other ranks hold.

    Assigns shards to tensors whose targets are ``DTensor``.
    """
    target, fqn = cast("torch.optim.Optimizer", slot.target), slot.fqn
    parameters = [parameter for group in target.param_groups for parameter in group["params"]]
    body = cast("dict[str, Any]", saved if isinstance(saved, dict) else {})
    sharded = next(
        (each for each in parameters if type(each) not in ORDINARY and is_dtensor(each)), None
    )
    is_own, problems = not has_saved_keys(target), list[str]()
    has_form = is_of_torchs_form(body)
    if sharded is not None and is_own:
        live: Any = {}
        with contextlib.suppress(Exception):  # it may have none before its first step
            live = _besides_states(target.state_dict())
        shapes = () if has_form else {shape_of(each, slot) for each in parameters}
        problems += _place_all(_besides_states(saved), live, sharded, slot, fqn, shapes)
    if is_own and not has_form:  # its load_state_dict checks it
        return problems, [], set()
    if problem := _form_problem(body, target, has_form=has_form):
        return [f"{fqn}: {problem}"], [], set()
    groups, states = (
        cast("list[dict[str, Any]]", saved["param_groups"]),
        cast("dict[Any, Any]", saved["state"]),
    )
    numbers = [number for group in groups for number in group["params"]]
    is_zero = is_divided(target)
    elsewhere = {numbers[at] for at in held_elsewhere(target)} if is_zero else set[int]()
    held = states_of(target) if is_zero else target.state
    problems += [*_options(target, groups, fqn), *_parameter_names(target, groups, fqn)]
    for number, parameter in zip(numbers, parameters, strict=True):
        current, state = held.get(parameter, {}), states.get(number, {})
        lacking, other = current.keys() - state.keys(), state.keys() - current.keys()
        if lacking and other and has_saved_keys(target):
            keys = (
                f"it has {', '.join(sorted(map(str, other)))} and no "
                f"{', '.join(sorted(map(str, lacking)))}"
            )
            problems.append(f"{fqn}.state.{number}: the state of another kind of optimizer: {keys}")
            break
        if parameter.is_meta and state:
            problems.append(
                f"{fqn}.state.{number}: its parameter is a meta tensor; materialize it with "
                "to_empty()"
            )
            continue
        for path, load, have in _tensors(state, current, ()):
            if wrong := _place(path, load, have, parameter, slot):
                problems.append(f"{fqn}.state.{number}.{fqn_of(path)}: {wrong}")
    if sharded is not None:
        for key in {*states} - {*numbers}:  # of no parameter
            problems += _place_all(
                states[key], target.state.get(key), sharded, slot, f"{fqn}.state.{key}"
            )
    return problems, numbers, elsewhere


def _besides_states(saved: Any) -> Any:
    """Return a saved state without the states of numbered parameters."""
    return (
        {key: saved[key] for key in saved if key != "state"} if is_of_torchs_form(saved) else saved
    )


def _form_problem(saved: dict[str, Any], target: torch.optim.Optimizer, *, has_form: bool) -> str:
    """The problem if the groups and states of a nest are malformed, or groups differ in size."""
    if not isinstance(saved.get("param_groups"), list) or saved.get("state") is None:
        return "the checkpoint holds no optimizer state here"
    if not has_form:
        return "the checkpoint holds malformed optimizer state here"
    sizes, own_sizes = (
        [len(group["params"]) for group in each]
        for each in (saved["param_groups"], target.param_groups)
    )
    if sizes != own_sizes:
        return f"parameter groups of {sizes} in the checkpoint, {own_sizes} in the target"
    return ""


def _tensors(saved: Any, live: Any, path: Path) -> Iterator[tuple[Path, TensorLoad, Any]]:
    """The tensors in a saved state, with their paths, and the live values in their places."""
    for key, item in children(saved):
        if isinstance(live, Mapping):
            have = cast("Mapping[Any, Any]", live).get(key)
        else:
            have = live[key] if type(live) in SEQUENCES and key < len(live) else None
        if isinstance(item, TensorLoad) and not item.ref.array:
            yield (*path, key), item, have
        else:
            yield from _tensors(item, have, (*path, key))


def _place(path: Path, load: TensorLoad, have: Any, parameter: torch.Tensor, slot: Slot) -> str:
    """Shard a tensor as the live one is; return the problem.

    In a new optimizer, it is sharded as it was saved, or as its parameter is.
    """
    if isinstance(have, torch.Tensor):
        shape = tuple(have.shape) if type(have) in ORDINARY else shape_of(have, slot)
        if shape != load.shape and not _is_drawn(load, have, parameter, slot):
            return f"shape {list(load.shape)} in the checkpoint, {list(shape)} in the target"
        return "" if type(have) in ORDINARY else spread(load, have, slot)
    if load.ref.placed is not None and is_dtensor(parameter) and not slot.alone:
        return _place_as_saved(load, load.ref.placed, cast("Any", parameter))
    if shape_of(parameter, slot) == load.shape and path[-1] != "step":
        return spread(load, parameter, slot)
    if len(path) == 1 and path[0] in _LIKE_PARAMETERS and is_torchs_own(slot.target):
        return (
            f"shape {list(load.shape)} in the checkpoint, its parameter has "
            f"{list(shape_of(parameter, slot))}"
        )
    return ""


def _is_drawn(load: TensorLoad, have: torch.Tensor, parameter: torch.Tensor, slot: Slot) -> bool:
    """Whether a state is a row of any length (drawn elements), not of the parameter's shape."""
    taken, is_own = (
        (1, *shape_of(parameter, slot)),
        not is_torchs_own(slot.target) and not is_dtensor(have),
    )
    return is_own and all(
        len(shape) == 1 and shape[0] not in taken for shape in ((*have.shape,), load.shape)
    )


def _place_all(
    saved: Any, live: Any, parameter: torch.Tensor, slot: Slot, fqn: str, shapes: Any = ()
) -> list[str]:
    """Shard tensors of no certain parameter as the live ones are, or as they were saved.

    Those sharded as saved use the mesh of ``parameter``. Returns the problems. If nothing says how
    to shard those of the parameters' ``shapes``, that is one.
    """
    problems: list[str] = []
    found = [*_tensors(saved, live, ())]
    shapes = () if any(load.ref.placed for _, load, _ in found) else shapes
    for path, load, have in found:
        problem = ""
        if is_dtensor(have) or load.ref.placed is not None:
            problem = _place(path, load, have if is_dtensor(have) else None, parameter, slot)
        elif have is None and load.shape in shapes:
            problem = (
                "the checkpoint does not say how to divide it among ranks; let the optimizer take "
                "a step before"
            )
        problems += [f"{fqn}.{fqn_of(path)}: {problem}"] if problem else []
    return problems


def _place_as_saved(load: TensorLoad, placed: tuple[bool, str], parameter: Any) -> str:
    """Shard a tensor on the mesh of its parameter, with the placements it had; returns the problem.

    If it was placed as its parameter was, it follows that one to other placements.
    """
    as_parameter, text = placed
    placements, mesh = sharding.placements_of(text), parameter.device_mesh
    if as_parameter and (load.shape == parameter.shape or len(placements) != mesh.ndim):
        placements = parameter.placements
    elif all(placement.is_replicate() for placement in placements):
        placements = placements[:1] * mesh.ndim
    elif len(placements) != mesh.ndim:
        return (
            f"it was placed as {text} on a mesh of {len(placements)} dimensions, and the mesh of "
            f"its parameter has {mesh.ndim}; load it into a model on a mesh of {len(placements)} "
            "dimensions"
        )
    try:
        load.shard = Shard.of(sharding.placed(load.shape, mesh, placements), load.ref.fqn)
    except UnsupportedValueError as error:
        return str(error).removeprefix(f"{load.ref.fqn}: ")
    return ""


def _options(target: torch.optim.Optimizer, groups: list[dict[str, Any]], fqn: str) -> list[str]:
    """The problem if groups are of another kind of optimizer: they lack a number that it needs.

    Switches are not compared: newer versions of torch add some.
    """
    numbers = [key for key, value in target.defaults.items() if _is_number(value)]
    lacking = [key for key in numbers if any(key not in group for group in groups)]
    if not lacking:
        return []
    return [
        f"{fqn}: the checkpoint holds the state of another kind of optimizer than "
        f"{type(target).__name__}: it has no {', '.join(lacking)}; to keep what the optimizer has, "
        f"exclude {fqn}.param_groups.*.{lacking[0]}"
    ]


def _parameter_names(
    target: torch.optim.Optimizer, groups: list[dict[str, Any]], fqn: str
) -> list[str]:
    """The problems if both sides keep parameter names that differ, as states go by position."""
    problems: list[str] = []
    for at, (group, saved) in enumerate(zip(target.param_groups, groups, strict=True)):
        names: Any = group.get("param_names"), saved.get("param_names")
        if not all(isinstance(each, list) for each in names) or names[0] == names[1]:
            continue
        odd = [
            f"{other} where {own} is here"
            for own, other in zip(*names, strict=False)
            if own != other
        ]
        shown = f"{', '.join(odd[:5])}{', ...' if len(odd) > 5 else ''}"
        problems.append(
            f"{fqn}.param_groups.{at}: the checkpoint has the states of other parameters, or in "
            f"another order: {shown}; if only names have changed, exclude "
            f"{fqn}.param_groups.{at}.param_names"
        )
    return problems


def _is_number(value: Any) -> bool:
    """Whether an option of an optimizer is a number, or several, and no switch."""
    if isinstance(value, tuple) and value:
        return all(map(_is_number, cast("tuple[Any, ...]", value)))
    return isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool)
