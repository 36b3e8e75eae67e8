"""Matches an optimizer's saved state with the live optimizer, parameter by parameter, by name.

Torch numbers the parameters of an optimizer: the first receives the first's state, whichever
parameter that was, and a group of another size is rejected. So sidesave saves the parameters' names
with their numbers, and reorders the state.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

import torch

from sidesave.client.loading.keeping import KEEP_CURRENT
from sidesave.client.loading.tensors import EnumLoad, TensorLoad
from sidesave.client.reading.stored import FlatMap, fqn_of
from sidesave.client.targets.live_map import LiveMap, Slot
from sidesave.stager.state.treespec import Path
from sidesave.stager.wrappers import PARTS


@dataclasses.dataclass(frozen=True, slots=True)
class Arranged:
    """The state of an optimizer in the order of the live parameters.

    Attributes:
        flat: The state.
        missing: Names of live parameters without a saved state.
        unexpected: Names of saved parameters that the live optimizer lacks.
        problems: Messages about problems that prevent it.
    """

    flat: FlatMap
    missing: list[str] = dataclasses.field(default_factory=list[str])
    unexpected: list[str] = dataclasses.field(default_factory=list[str])
    problems: list[str] = dataclasses.field(default_factory=list[str])


def arrange(
    slot: Slot,
    saved: FlatMap,
    fqns: Sequence[Sequence[str | None]],
    live: LiveMap,
    partial: Collection[str],
) -> Arranged | None:
    """Order an optimizer's state by its live parameters; None if names do not define the order.

    A group takes the options of the group that its parameters were in; of several groups, the
    options they agree on.

    Args:
        slot: The optimizer.
        saved: The state; no tensor of it is read yet.
        fqns: The saved names of each group's parameters, as the target calls them; None for those
            to leave out. If empty, the names that the optimizer itself keeps are used.
        live: The target.
        partial: The FQNs of values that only other ranks saved.
    """
    target = cast("torch.optim.Optimizer", slot.target)
    state = _State(slot.path, saved)
    if not state.numbers:
        return None
    for saved_names, own_names in (
        (fqns, _names_here(live, target)),
        (state.own_names(), _own_names(target)),
    ):
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
            saved,
            problems=[
                f"{slot.fqn}: {kind} keeps one state for all its parameters, and these have changed"
            ],
        )
    missing = [
        min(names) for names, origin in zip(own_names, origins, strict=True) if origin is None
    ]
    every = enumerate(itertools.chain(*saved_names))
    unexpected = [name for at, name in every if name is not None and at not in origins]
    flat, problems = state.arranged(target, origins, partial)
    return Arranged(flat, missing, unexpected, problems)


def is_ambiguous(slot: Slot, saved: FlatMap) -> bool:
    """Whether parameters share a shape, so that loading by position may mix up states unnoticed."""
    state = (*slot.path, "state")
    if not any(
        path[: len(state)] == state and isinstance(leaf, TensorLoad)
        for path, leaf in saved.leaves.items()
    ):
        return False
    shapes = [tuple(one.shape) for group in slot.target.param_groups for one in group["params"]]
    return len(set(shapes)) < len(shapes)


def is_state(container: Any) -> bool:
    """Whether a dict is optimizer state, torch's or flattened by torch.distributed.checkpoint."""
    if not isinstance(container, dict):
        return False
    keys = cast("dict[Any, Any]", container).keys()
    if {"state", "param_groups"} <= keys:
        return True
    begins = {key.partition(".")[0] for key in keys if isinstance(key, str) and "." in key}
    return {"state", "param_groups"} <= begins


class _State:
    """The state of an optimizer, flattened.

    Attributes:
        numbers: The parameter numbers of each group; empty if the state has not torch's form.
    """

    def __init__(self, path: Path, flat: FlatMap) -> None:
        self._path, self._flat = path, flat
        self._state, self._groups = (*path, "state"), (*path, "param_groups")
        # by group and key, each taken apart
        self._options: dict[Any, dict[Any, dict[Path, Any]]] = {}
        self._within: dict[Any, dict[Path, Any]] = {}  # the containers in each group
        end = len(self._groups)
        for at, leaf in flat.leaves.items():
            if at[:end] == self._groups and len(at) > end + 1:
                self._options.setdefault(at[end], {}).setdefault(at[end + 1], {})[at[end + 2 :]] = (
                    leaf
                )
        for at, like in flat.containers.items():
            if at[:end] == self._groups and len(at) > end + 1:
                self._within.setdefault(at[end], {})[at[end + 1 :]] = like
        params = {at: options.get("params", {}) for at, options in self._options.items()}
        is_list = set(params) == {*range(len(params))}
        numbers = (
            [[leaf for rest, leaf in params[at].items() if rest] for at in range(len(params))]
            if is_list
            else []
        )
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
        return (
            by_group
            if len({name for group in by_group for name in group}) == sum(map(len, by_group))
            else []
        )

    def with_names_of(self, target: torch.optim.Optimizer) -> FlatMap:
        """The state in saved order, with the target's parameter names if both sides keep some."""
        if not self.own_names() or not _own_names(target):
            return self._flat
        flat = FlatMap(dict(self._flat.leaves), dict(self._flat.containers))
        for at, group in enumerate(target.param_groups):
            _put_list(flat, (*self._groups, at, "param_names"), group["param_names"])
        return flat

    def is_joint(self) -> bool:
        """Whether a parameter has more than numbers and tensors, or no state by its number.

        So it is where one state serves all parameters, and where an optimizer saves a form of its
        own.
        """
        own, end = {number for group in self.numbers for number in group}, len(self._state)
        if not any(at[:end] == self._state for at in (*self._flat.leaves, *self._flat.containers)):
            return True
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
        for source, moved in (
            (self._flat.leaves, flat.leaves),
            (self._flat.containers, flat.containers),
        ):
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
            sources = sorted(
                {group_of[origin] for each in members if (origin := origins[each]) is not None}
            )
            problems += self._take_group((*self._groups, at), sources, group, flat)
            _put_list(flat, (*self._groups, at, "params"), members)
            if "param_names" in group:
                _put_list(flat, (*self._groups, at, "param_names"), group["param_names"])
        return flat, problems

    def _take_group(
        self, place: Path, sources: Sequence[int], group: dict[str, Any], flat: FlatMap
    ) -> list[str]:
        """Give a group the options on which its saved ``sources`` agree; without any, its own."""
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
                    f"{fqn_of((*place, key))}: its parameters were in groups "
                    f"{', '.join(map(str, sources))}, where it is not the same; to keep what the "
                    f"optimizer has, exclude {fqn_of(self._groups)}.*.{key}"
                )
            for rest, leaf in values[0].items():
                flat.leaves[*place, key, *rest] = leaf
        flat.containers.update(
            {(*place, *rest): like for rest, like in self._within.get(sources[0], {}).items()}
        )
        return problems


def _put_list(flat: FlatMap, place: Path, items: Iterable[Any]) -> None:
    """Put a list into a flat map."""
    flat.containers[place] = []
    leaves = {(*place, at): item for at, item in enumerate(items)}
    flat.leaves.update(leaves or {place: []})


def _is_same(some: dict[Path, Any], others: dict[Path, Any]) -> bool:
    """Whether an option has the same value in two groups; tensors are compared by name, unread."""

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, TensorLoad) and isinstance(other, TensorLoad):
            return one.name == other.name
        if isinstance(one, EnumLoad) and isinstance(other, EnumLoad):
            return (one.kind, one.name) == (other.kind, other.name)
        return one is other or (type(one) is type(other) and bool(one == other))

    return some.keys() == others.keys() and all(same(leaf, others[at]) for at, leaf in some.items())


def _names_here(live: LiveMap, optimizer: torch.optim.Optimizer) -> list[set[str]]:
    """The target's names of each parameter of an optimizer; empty if one is not in the target."""
    names = [live.names_of(one) for group in optimizer.param_groups for one in group["params"]]
    return names if all(names) else []


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
    """The saved position of each live parameter, by its own names; wrappers are ignored."""
    best: list[int | None] = [None] * len(own)
    for form in (str, _without_wrappers):
        known = {form(name): at for at, name in enumerate(saved) if name is not None}
        places = [{form(name) for name in names} for names in own]
        is_unique = len(known) == sum(name is not None for name in saved) and len(
            set[str]().union(*places)
        ) == sum(map(len, places))
        if is_unique:
            origins = [
                next((known[name] for name in sorted(names) if name in known), None)
                for names in places
            ]
            best = min(best, origins, key=lambda each: each.count(None))
        if None not in best:
            break
    return best


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in PARTS)
