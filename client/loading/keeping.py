"""What stays of objects that take their state whole, where only a part of a checkpoint is loaded into them.

An optimizer or a scheduler is given one state, and what is not in it is lost. So what patterns leave out of it, such as
a learning rate, is put there as the object has it now. Nothing is read here, and nothing live is touched.
"""

from __future__ import annotations

import collections
import copy
import enum
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeGuard, cast

import torch
from torch import nn

from sidesave.client.loading.plan import DICTS, SEQUENCES, is_live, names_of, unwrap
from sidesave.stager.state.tree import Stateful


class Stays(enum.Enum):
    """Stands in a nest for what is to be as the target has it."""

    AS_IT_IS = 0


class _Nothing(enum.Enum):
    """Stands for what a target has not."""

    HERE = 0


_STRUCTURE: Final = re.compile(r"\.param_groups\.\d+\.params(\.\d+)?")
"""Which parameters the state of an optimizer is of: no state without it."""

_Merge = Callable[[Any, Any, str], Any]
"""Gives what there is to be for a value of a nest, what the target has in its place, and its name."""


def whole_targets(into: Mapping[str, Any] | None) -> dict[str, Any]:
    """The objects that take their state whole, by name: wherever they are in dicts and in sequences of live objects."""
    return {
        name: target
        for name, target in _targets(into)
        if isinstance(target, torch.optim.Optimizer) or _is_stateful(target)
    }


def _targets(into: Mapping[str, Any] | None) -> Iterator[tuple[str, Any]]:
    """All that is in dicts and in sequences of live objects, by name, and these sequences themselves."""

    def visit(target: Any, name: str) -> Iterator[tuple[str, Any]]:
        target = unwrap(target)
        if type(target) in DICTS:
            for key, item in cast("dict[Any, Any]", target).items():
                yield from visit(item, f"{name}.{key}")
            return
        yield name, target
        if _is_live_sequence(target):
            for index, item in enumerate(target):
                yield from visit(item, f"{name}.{index}")

    for name, target in (into or {}).items():
        yield from visit(target, name)


def _is_live_sequence(target: Any) -> bool:
    return type(target) in SEQUENCES and is_live(target)


def given(names: Iterable[str], wholes: Mapping[str, Any]) -> set[str]:
    """Of the objects that take their state whole, those to which some of ``names`` belong."""
    return {whole for name in names if (whole := _above(name, wholes)) is not None} if wholes else set()


def broken_lists(into: Mapping[str, Any] | None, there: Iterable[str], chosen: Iterable[str]) -> list[str]:
    """The sequences of which some items are chosen and not all that are ``there``.

    What is left of a sequence closes up, and would come to stand in the wrong places.
    """
    lists = {name: target for name, target in _targets(into) if type(target) in SEQUENCES}

    def items(names: Iterable[str]) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for name in names if lists else ():
            above = _above(name.rpartition(".")[0], lists)
            while above is not None:  # and those around it
                found.setdefault(above, set()).add(name[len(above) + 1 :].partition(".")[0])
                above = _above(above.rpartition(".")[0], lists)
        return found

    all_there = items(there)
    return [name for name, some in items(chosen).items() if some != all_there.get(name)]


def left_out(fqns: Iterable[str], chosen: Mapping[str, str], wholes: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names that are not chosen, and belong to a state of which something is; and what the target calls them.

    Args:
        fqns: All the names of a checkpoint.
        chosen: Those that are, and what the target calls them.
        wholes: Objects that take their state whole, by the names of the target.
    """
    origins: dict[str, str] = {}
    for fqn, name in chosen.items() if wholes else ():
        whole = _above(name, wholes)
        if whole is not None and fqn.endswith(name[len(whole) :]):
            origins[fqn[: len(fqn) - len(name) + len(whole)]] = whole
    taken = set(chosen.values()) if origins else set[str]()
    for fqn in fqns if origins else ():
        origin = _above(fqn, origins) if fqn not in chosen else None
        if origin is not None:
            name = origins[origin] + fqn[len(origin) :]
            if name not in taken:
                taken.add(name)
                yield fqn, name


def is_structure(name: str, wholes: Mapping[str, Any]) -> bool:
    """Whether a state makes no sense without this value, which is not the target's to keep."""
    whole = _above(name, wholes)
    return (
        whole is not None
        and isinstance(wholes[whole], torch.optim.Optimizer)
        and _STRUCTURE.fullmatch(name, len(whole)) is not None
    )


def keep(into: Mapping[str, Any], nest: dict[str, Any], is_left_out: Callable[[str], bool]) -> list[str]:
    """Put what the targets have in the place of what :class:`Stays` in a nest; return what stands in the way.

    ``is_left_out`` tells so of names of the target: what only the target has stays too, if it is.
    """
    keeping = _Keeping(is_left_out)
    for name, target in into.items():
        if name in nest:
            nest[name] = keeping.any(target, nest[name], name)
    return keeping.problems


class _Keeping:
    def __init__(self, is_left_out: Callable[[str], bool]) -> None:
        self.problems: list[str] = []
        self._is_left_out = is_left_out

    def any(self, target: Any, saved: Any, fqn: str) -> Any:
        """What a target is to be given, in the place of what is saved for it."""
        target = unwrap(target)
        kind = cast("type[Any]", type(target))
        if kind in DICTS and type(saved) in DICTS:
            for key, item in cast("dict[Any, Any]", target).items():
                if key in saved:
                    saved[key] = self.any(item, saved[key], f"{fqn}.{key}")
        elif kind in SEQUENCES and type(saved) in SEQUENCES and len(saved) == len(target):
            return _alike(saved, [self.any(item, saved[at], f"{fqn}.{at}") for at, item in enumerate(target)])
        elif isinstance(target, torch.optim.Optimizer):
            self._optimizer(target.state_dict(), saved, fqn)
        elif _is_stateful(target) and (_is_in(saved) or any(map(self._is_left_out, names_of(target, fqn)))):
            return self._merged(saved, target.state_dict(), fqn)
        return saved

    def _optimizer(self, live: dict[str, Any], saved: Any, fqn: str) -> None:
        here, there = _numbers(live), _numbers(saved)
        if not there or [*map(len, here)] != [*map(len, there)]:
            return  # for others to tell
        numbers = dict(zip(itertools.chain(*here), itertools.chain(*there), strict=True))
        states = {numbers.get(key, key): state for key, state in live["state"].items()}

        needed = {f"{fqn}.state.{number}" for number in numbers.values()}  # others are of another stage of a pipeline

        def state(saved: Any, live: Any, name: str) -> Any:
            return (self._state if name in needed else self._merged)(saved, live, name)

        def part(saved: Any, live: Any, name: str) -> Any:
            is_state = name == f"{fqn}.state" and type(saved) in DICTS and not _is_all(saved)
            return self._dict(saved, live, name, state) if is_state else self._merged(saved, live, name)

        self._dict(saved, {**live, "state": states}, fqn, part)

    def _state(self, saved: Any, live: Any, fqn: str) -> Any:
        """The state of one parameter: nothing, or complete."""

        def needed(saved: Any, live: Any, name: str) -> Any:
            found = self._merged(saved, live, name)
            if found is _Nothing.HERE:
                self.problems.append(
                    f"{name}: it is left out, and the optimizer has none that could stay; leave out all of {fqn}"
                )
            return found

        if type(saved) in DICTS and not _is_all(saved):
            return self._dict(saved, live, fqn, needed)
        return self._merged(saved, live, fqn)

    def _merged(self, saved: Any, live: Any, fqn: str) -> Any:
        if _is_all(saved):
            return _own(live)
        if type(saved) in DICTS:
            return self._dict(saved, live, fqn, self._merged)
        return self._sequence(saved, live, fqn) if type(saved) in SEQUENCES else saved

    def _dict(self, saved: dict[Any, Any], live: Any, fqn: str, merge: _Merge) -> dict[Any, Any]:
        here = cast("Mapping[Any, Any]", live) if isinstance(live, Mapping) else dict[Any, Any]()
        alone = {key: value for key, value in here.items() if key not in saved}
        for key, item in list(saved.items()):
            found = merge(item, here.get(key, _Nothing.HERE), f"{fqn}.{key}")
            if found is _Nothing.HERE:
                del saved[key]
            else:
                saved[key] = found
        for key, value in alone.items():
            name = f"{fqn}.{key}"
            is_container = type(value) in DICTS or type(value) in SEQUENCES
            if self._is_left_out(name) or (is_container and self._is_left_out(f"{name}.*")):
                saved[key] = _own(value)
        return saved

    def _sequence(self, saved: Any, live: Any, fqn: str) -> Any:
        here: list[Any] = list(live) if type(live) in SEQUENCES else []
        items = [
            self._merged(item, here[at] if at < len(here) else _Nothing.HERE, f"{fqn}.{at}")
            for at, item in enumerate(saved)
        ]
        self.problems += [
            f"{fqn}.{at}: it is left out, and the target has nothing there that could stay"
            for at, item in enumerate(items)
            if item is _Nothing.HERE
        ]
        return _alike(saved, items)


def _alike(sequence: Any, items: list[Any]) -> Any:
    """Items in a sequence like another one."""
    return collections.deque(items, sequence.maxlen) if type(sequence) is collections.deque else type(sequence)(items)


def _is_stateful(target: object) -> TypeGuard[Stateful]:
    return isinstance(target, Stateful) and not isinstance(target, (type, nn.Module))


def _numbers(state: Any) -> list[list[int]]:
    """The numbers of the parameters in each group of an optimizer's state; none, where it is no such state."""
    groups = cast("dict[str, Any]", state).get("param_groups") if isinstance(state, dict) else None
    parts = cast("list[Any]", groups) if isinstance(groups, list) else []
    found = [cast("dict[str, Any]", group).get("params") if isinstance(group, dict) else None for group in parts]
    is_sound = all(type(each) is list and all(type(number) is int for number in each) for each in found)
    return cast("list[list[int]]", found) if is_sound else []


def _is_all(value: Any) -> bool:
    """Whether there is nothing but what stays."""
    parts = _parts(value)
    return value is Stays.AS_IT_IS if parts is None else bool(parts) and all(map(_is_all, parts))


def _is_in(value: Any) -> bool:
    """Whether something of it stays."""
    parts = _parts(value)
    return value is Stays.AS_IT_IS if parts is None else any(map(_is_in, parts))


def _parts(value: Any) -> Collection[Any] | None:
    if type(value) in DICTS:
        return cast("dict[Any, Any]", value).values()
    return cast("Sequence[Any]", value) if type(value) in SEQUENCES else None


def _own(value: Any) -> Any:
    """A value in containers of its own: they will be filled, and those of the target are not to be touched."""
    if isinstance(value, torch.Tensor):
        return value
    if type(value) in (dict, collections.OrderedDict):
        return type(value)((key, _own(item)) for key, item in cast("dict[Any, Any]", value).items())
    if type(value) in (list, tuple):
        return type(value)(map(_own, cast("list[Any]", value)))
    return copy.deepcopy(value)


def _above(name: str, known: Mapping[str, Any]) -> str | None:
    """The name among those known that ``name`` is or is below."""
    end = len(name)
    while end > 0:
        if name[:end] in known:
            return name[:end]
        end = name.rfind(".", 0, end)
    return None
