"""Matches an optimizer's saved state with the live optimizer, parameter by parameter, by name.

Torch numbers the parameters of an optimizer: the first takes the state of the first, whichever that is, and a group of
another size takes nothing. So sidesave saves the parameters' names beside their numbers, and reorders the state.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, cast

import torch

from sidesave.client.loading.flat import FlatMap, LiveMap, Path, Slot, fqn_of
from sidesave.client.loading.keeping import KEEP_CURRENT
from sidesave.client.loading.tensors import EnumLoad, TensorLoad
from sidesave.stager.state.tensor_collector import is_dtensor
from sidesave.stager.wrappers import without_parts

_LIKE_PARAMETERS: Final = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")
"""Optimizer states that have the shape of their parameter."""


# By name -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Arranged:
    """The state of an optimizer in the order of the live parameters.

    Attributes:
        flat: The state.
        missing: Names of live parameters that it has no state for.
        unexpected: Names of parameters that the live optimizer has not.
        problems: Messages about what prevents it.
    """

    flat: FlatMap
    missing: list[str] = dataclasses.field(default_factory=list[str])
    unexpected: list[str] = dataclasses.field(default_factory=list[str])
    problems: list[str] = dataclasses.field(default_factory=list[str])


def arrange(
    slot: Slot, saved: FlatMap, fqns: Sequence[Sequence[str | None]], live: LiveMap, partial: Collection[str]
) -> Arranged | None:
    """Put the state of an optimizer into the order of its live parameters; None if names do not tell the order.

    A group takes the options of the group that its parameters were in; of several groups, the options they agree on.

    Args:
        slot: The optimizer.
        saved: The state; no tensor of it is read yet.
        fqns: The saved names of each group's parameters, as the target calls them; None for those to leave out. If
            empty, the names that the optimizer itself keeps are used.
        live: The target.
        partial: The FQNs of what only other ranks saved.
    """
    target = cast("torch.optim.Optimizer", slot.target)
    state = _State(slot.path, saved)
    if not state.numbers:
        return None
    for saved_names, own_names in ((fqns, _names_here(live, target)), (state.own_names(), _own_names(target))):
        if own_names and [*map(len, saved_names)] == [*map(len, state.numbers)]:
            origins = _match([name for group in saved_names for name in group], own_names)
            if any(origin is not None for origin in origins):
                break
    else:
        return None
    sizes = [len(group["params"]) for group in target.param_groups]
    if origins == [*range(sum(sizes))] and sizes == [*map(len, state.numbers)]:
        return Arranged(state.with_names_of(target))
    if state.is_joint():
        kind = type(target).__name__
        return Arranged(
            saved, problems=[f"{slot.fqn}: {kind} keeps one state for all its parameters, and these have changed"]
        )
    missing = [min(names) for names, origin in zip(own_names, origins, strict=True) if origin is None]
    every = enumerate(itertools.chain(*saved_names))
    unexpected = [name for at, name in every if name is not None and at not in origins]
    flat, problems = state.arranged(target, origins, partial)
    return Arranged(flat, missing, unexpected, problems)


def is_ambiguous(slot: Slot, saved: FlatMap) -> bool:
    """Whether several parameters have one shape, so that loading by position may mix up their states unnoticed."""
    state = (*slot.path, "state")
    if not any(path[: len(state)] == state and isinstance(leaf, TensorLoad) for path, leaf in saved.leaves.items()):
        return False
    shapes = [tuple(one.shape) for group in slot.target.param_groups for one in group["params"]]
    return len(set(shapes)) < len(shapes)


class _State:
    """The state of an optimizer, flattened.

    Attributes:
        numbers: The parameter numbers of each group; empty if the state has not torch's form.
    """

    def __init__(self, path: Path, flat: FlatMap) -> None:
        self._path, self._flat = path, flat
        self._state, self._groups = (*path, "state"), (*path, "param_groups")
        self._options: dict[Any, dict[Any, dict[Path, Any]]] = {}  # by group and key, each taken apart
        self._within: dict[Any, dict[Path, Any]] = {}  # the containers in each group
        end = len(self._groups)
        for at, leaf in flat.leaves.items():
            if at[:end] == self._groups and len(at) > end + 1:
                self._options.setdefault(at[end], {}).setdefault(at[end + 1], {})[at[end + 2 :]] = leaf
        for at, like in flat.containers.items():
            if at[:end] == self._groups and len(at) > end + 1:
                self._within.setdefault(at[end], {})[at[end + 1 :]] = like
        params = {at: options.get("params", {}) for at, options in self._options.items()}
        is_list = set(params) == {*range(len(params))}
        numbers = [[leaf for rest, leaf in params[at].items() if rest] for at in range(len(params))] if is_list else []
        every = [number for group in numbers for number in group]
        is_sound = all(type(number) is int for number in every) and len({*every}) == len(every)
        self.numbers: list[list[int]] = numbers if is_sound else []

    def own_names(self) -> list[list[str | None]]:
        """The parameter names that the optimizer itself saved, by group; empty if it saved none."""
        by_group: list[list[str | None]] = []
        for at, group in enumerate(self.numbers):
            names = list(self._options[at].get("param_names", {}).values())
            if len(names) != len(group) or not all(isinstance(name, str) for name in names):
                return []
            by_group.append(names)
        return by_group if len({name for group in by_group for name in group}) == sum(map(len, by_group)) else []

    def is_joint(self) -> bool:
        """Whether a parameter has more than numbers and tensors, as where one state serves all parameters."""
        own, end = {number for group in self.numbers for number in group}, len(self._state)
        return any(
            at[:end] == self._state
            and at[end : end + 1]
            and at[end] in own
            and (len(at) > end + 2 or isinstance(leaf, (list, dict)))
            for at, leaf in self._flat.leaves.items()
        )

    def arranged(
        self, target: torch.optim.Optimizer, origins: Sequence[int | None], partial: Collection[str]
    ) -> tuple[FlatMap, list[str]]:
        """The state for parameters that were at ``origins``, and the problems."""
        order = [number for group in self.numbers for number in group]
        group_of = [at for at, group in enumerate(self.numbers) for _ in group]
        places = {order[origin]: at for at, origin in enumerate(origins) if origin is not None}
        gone = set(order) - places.keys()
        flat = FlatMap({}, {self._state: {}, self._groups: []})
        end = len(self._state)
        for source, moved in ((self._flat.leaves, flat.leaves), (self._flat.containers, flat.containers)):
            for at, value in source.items():
                if at[:end] == self._state and len(at) > end:
                    number = at[end]
                    if number not in gone and fqn_of(at[: end + 1]) not in partial:
                        moved[*self._state, places.get(number, number), *at[end + 1 :]] = value
                elif at[: end - 1] == self._path and at[:end] not in (self._state, self._groups):
                    moved[at] = value
        for at, origin in enumerate(origins):
            if origin is None:
                flat.leaves[*self._state, at] = KEEP_CURRENT
        if not any(at[:end] == self._state for at in flat.leaves):
            flat.leaves[self._state] = {}
        problems: list[str] = []
        first = 0
        for at, group in enumerate(target.param_groups):
            members = range(first, first + len(group["params"]))
            first = members.stop
            sources = sorted({group_of[origin] for each in members if (origin := origins[each]) is not None})
            problems += self._take_group((*self._groups, at), sources, group, flat)
            _put_list(flat, (*self._groups, at, "params"), members)
            if "param_names" in group:
                _put_list(flat, (*self._groups, at, "param_names"), group["param_names"])
        return flat, problems

    def with_names_of(self, target: torch.optim.Optimizer) -> FlatMap:
        """The state, with the names that the target keeps for its parameters: what is saved may tell of wrappers."""
        flat = FlatMap({**self._flat.leaves}, {**self._flat.containers})
        for at, group in enumerate(target.param_groups):
            place = (*self._groups, at, "param_names")
            if "param_names" in group and any(path[: len(place)] == place for path in self._flat.leaves):
                flat.leaves = {path: leaf for path, leaf in flat.leaves.items() if path[: len(place)] != place}
                _put_list(flat, place, group["param_names"])
        return flat

    def _take_group(self, place: Path, sources: Sequence[int], group: dict[str, Any], flat: FlatMap) -> list[str]:
        """Give a group the options on which all its ``sources`` in the checkpoint agree; without sources, its own."""
        flat.containers[place] = {}
        given = {"params", "param_names"}
        if not sources:
            flat.leaves.update({(*place, key): KEEP_CURRENT for key in group if key not in given})
            return []
        options = [self._options[at] for at in sources]
        problems: list[str] = []
        for key in dict.fromkeys(key for each in options for key in each if key not in given):
            values = [each.get(key, {}) for each in options]
            if any(not _is_same(value, values[0]) for value in values[1:]):
                problems.append(
                    f"{fqn_of((*place, key))}: its parameters were in groups {', '.join(map(str, sources))}, where it "
                    f"is not the same; to keep what the optimizer has, exclude {fqn_of(self._groups)}.*.{key}"
                )
            for rest, leaf in values[0].items():
                flat.leaves[*place, key, *rest] = leaf
        flat.containers.update({(*place, *rest): like for rest, like in self._within.get(sources[0], {}).items()})
        return problems


def _put_list(flat: FlatMap, place: Path, items: Iterable[Any]) -> None:
    """Put a list into a flat map."""
    flat.containers[place] = []
    leaves = {(*place, at): item for at, item in enumerate(items)}
    flat.leaves.update(leaves or {place: []})


def _is_same(some: dict[Path, Any], others: dict[Path, Any]) -> bool:
    """Whether two groups have the same value for an option. Tensors are not read: the same name is the same value."""

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, TensorLoad) and isinstance(other, TensorLoad):
            return one.name == other.name
        if isinstance(one, EnumLoad) and isinstance(other, EnumLoad):
            return (one.kind, one.name) == (other.kind, other.name)
        return one is other or (type(one) is type(other) and bool(one == other))

    return some.keys() == others.keys() and all(same(leaf, others[at]) for at, leaf in some.items())


def _names_here(live: LiveMap, optimizer: torch.optim.Optimizer) -> list[set[str]]:
    """The names of each parameter of an optimizer in the target; empty if one of them is not in it."""
    known: dict[Any, set[str]] = {}
    for slot in live.slots.values():
        if isinstance(slot.target, torch.Tensor):
            for key in _keys(slot.target):
                known.setdefault(key, set()).add(slot.fqn)
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    names = [set[str]().union(*(known.get(key, ()) for key in _keys(one))) for one in parameters]
    return names if all(names) else []


def _keys(tensor: torch.Tensor) -> list[Any]:
    """What identifies a parameter and a tensor of its state dict as the same."""
    keys: list[Any] = [id(tensor)]
    if tensor.layout is torch.strided and type(tensor.detach()) is torch.Tensor and not is_dtensor(tensor):
        address = tensor.data_ptr()
        keys += [(address, tensor.dtype, tensor.shape, tensor.stride())] if address else []
    return keys


def _own_names(optimizer: torch.optim.Optimizer) -> list[set[str]]:
    """The name that an optimizer itself has for each of its parameters; empty if it has none."""
    by_parameter: list[set[str]] = []
    for group in optimizer.param_groups:
        names: Any = group.get("param_names")
        if not isinstance(names, list) or len(cast("list[Any]", names)) != len(group["params"]):
            return []
        by_parameter += [{name} for name in cast("list[str]", names)]
    return by_parameter


def _match(saved: Sequence[str | None], own: Sequence[set[str]]) -> list[int | None]:
    """The position in the checkpoint of each live parameter, by its own names; wrappers are ignored."""
    best: list[int | None] = [None] * len(own)
    for form in (str, without_parts):
        known = {form(name): at for at, name in enumerate(saved) if name is not None}
        places = [{form(name) for name in names} for names in own]
        is_unique = len(known) == sum(name is not None for name in saved) and len(set[str]().union(*places)) == sum(
            map(len, places)
        )
        if is_unique:
            origins = [next((known[name] for name in sorted(names) if name in known), None) for names in places]
            best = min(best, origins, key=lambda each: each.count(None))
    return best


# What does not fit -------------------------------------------------------------------------------------------------


def compare(
    slot: Slot,
    saved: Any,
    spread: Callable[[TensorLoad, torch.Tensor, Slot], str],
    shape: Callable[[torch.Tensor, Slot], tuple[int, ...]],
) -> tuple[list[str], list[int]]:
    """The problems, and the saved parameter numbers. Assigns shards to tensors whose targets are ``DTensor``.

    Args:
        slot: The optimizer.
        saved: The nest for it.
        spread: Shards a tensor as another one is; returns the problem.
        shape: The shape in which a tensor is saved.
    """
    target, fqn = cast("torch.optim.Optimizer", slot.target), slot.fqn
    body = cast("dict[str, Any]", saved if isinstance(saved, dict) else {})
    groups, states = cast("Any", body.get("param_groups")), cast("Any", body.get("state"))
    if not isinstance(groups, list) or states is None:
        return [f"{fqn}: the checkpoint holds no optimizer state here"], []
    groups = cast("list[Any]", groups)
    if not all(map(_is_group, groups)):
        return [f"{fqn}: the checkpoint holds malformed optimizer state here"], []
    sizes, own_sizes = ([len(group["params"]) for group in each] for each in (groups, target.param_groups))
    if sizes != own_sizes:
        return [f"{fqn}: parameter groups of {sizes} in the checkpoint, {own_sizes} in the target"], []
    numbers = [number for group in groups for number in group["params"]]
    if not isinstance(states, dict) or not all(
        isinstance(cast("dict[Any, Any]", states).get(number, {}), dict) for number in numbers
    ):
        return [f"{fqn}: the checkpoint holds malformed optimizer state here"], []
    problems = [*_options(target, groups, fqn), *_parameter_names(target, groups, fqn)]
    parameters = [parameter for group in target.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        current, state = target.state.get(parameter, {}), cast("dict[Any, Any]", states).get(number, {})
        lacking, other = current.keys() - state.keys(), state.keys() - current.keys()
        if lacking and other and current:
            keys = f"it has {', '.join(sorted(map(str, other)))} and no {', '.join(sorted(map(str, lacking)))}"
            problems.append(f"{fqn}.state.{number}: the state of another kind of optimizer: {keys}")
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
    """The problem if groups lack a number that the optimizer needs: then they are of another kind of optimizer.

    Switches are not compared: newer versions of torch add some.
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
    """The problems if both sides keep parameter names and these differ: here states go by position."""
    problems: list[str] = []
    for at, (group, saved) in enumerate(zip(target.param_groups, groups, strict=True)):
        names: Any = group.get("param_names"), saved.get("param_names")
        if not all(isinstance(each, list) for each in names) or names[0] == names[1]:
            continue
        odd = [f"{other} where {own} is here" for own, other in zip(*names, strict=False) if own != other]
        shown = f"{', '.join(odd[:5])}{', ...' if len(odd) > 5 else ''}"
        problems.append(
            f"{fqn}.param_groups.{at}: the checkpoint has the states of other parameters, or in another order: "
            f"{shown}; if only names have changed, exclude {fqn}.param_groups.{at}.param_names"
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
