"""Flat maps: a nest as ``{path: leaf}``, and back. All that walks over a state, saved or live, does so here."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import nn

from sidesave.client.loading.tensors import unpickled
from sidesave.stager.state.annotations import PerRank, Replicated
from sidesave.stager.state.tags import PLAIN
from sidesave.stager.state.tree import Stateful
from sidesave.stager.state.treespec import with_metadata

DICTS: Final = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
SEQUENCES: Final = (list, tuple, collections.deque)

Path = tuple[Any, ...]
"""The keys on the way to a node; those of a list are numbers. A module's state is one dict of dotted keys."""


def fqn_of(path: Path) -> str:
    """What a path is called."""
    return ".".join(map(str, path))


def prefixes(path: Path) -> list[Path]:
    """The nodes on the way to a path, from its item on, itself last."""
    return [path[:end] for end in range(1, len(path) + 1)]


def children(node: Any) -> Iterable[tuple[Any, Any]]:
    """Keys and values of a container; nothing for a leaf."""
    if type(node) in DICTS:
        return cast("dict[Any, Any]", node).items()
    return enumerate(cast("list[Any]", node)) if type(node) in SEQUENCES else ()


def is_plain(node: Any) -> bool:
    """Whether there is nothing but plain values in a container, and in those that it holds."""
    if type(node) in DICTS:
        items = cast("dict[Any, Any]", node)
        return PLAIN.issuperset(map(type, items)) and is_plain([*items.values()])
    if type(node) not in SEQUENCES:
        return type(node) in PLAIN
    items = cast("list[Any]", node)
    return PLAIN.issuperset(map(type, items)) or all(map(is_plain, items))


@dataclass(slots=True)
class FlatMap:
    """A nest taken apart.

    Attributes:
        leaves: What is no container, or has nothing in it, or is plain data that is not taken apart, by its path, in
            the order of the nest.
        containers: By the path of each container with something in it one of its kind.
    """

    leaves: dict[Path, Any] = field(default_factory=dict[Path, Any])
    containers: dict[Path, Any] = field(default_factory=dict[Path, Any])

    @classmethod
    def of(cls, nest: Any, path: Path = (), is_whole: Callable[[Path], bool] = lambda path: False) -> FlatMap:
        """Take ``nest`` apart, which is at ``path``; plain data for which ``is_whole`` is true stays one leaf."""
        flat = cls()
        flat._add(nest, path, is_whole)
        return flat

    def _add(self, node: Any, path: Path, is_whole: Callable[[Path], bool]) -> None:
        below = children(node)
        if not below or not node or (is_whole(path) and is_plain(node)):
            self.leaves[path] = node
            return
        self.containers[path] = node
        for key, item in below:
            self._add(item, (*path, key), is_whole)

    def below(self, path: Path) -> FlatMap:
        """The part that is at ``path``."""
        end = len(path)
        return FlatMap({at: leaf for at, leaf in self.leaves.items() if at[:end] == path}, self.containers)

    def nodes(self) -> dict[Path, None]:
        """The paths of all leaves, and of what they are in."""
        return {node: None for path in self.leaves for node in prefixes(path)}

    def nest(self, path: Path = ()) -> Any:
        """The nest at ``path``, of new containers; where items of a sequence are missing, the rest closes up."""
        if path in self.leaves:
            return self.leaves[path]
        root: dict[Any, Any] = _Items()
        for at, leaf in self.leaves.items():
            if at[: len(path)] == path:
                node = root
                for key in at[len(path) : -1]:
                    node = node.setdefault(key, _Items())
                node[at[-1]] = leaf
        return self._made(root, path)

    def _made(self, items: dict[Any, Any], path: Path) -> Any:
        made: dict[Any, Any] = {}
        for key, item in items.items():
            value = self._made(item, (*path, key)) if type(item) is _Items else item
            made[key if type(key) in (str, int) else unpickled(key)] = value
        like: Any = self.containers.get(path)
        make = _maker(like)
        if make in SEQUENCES and all(type(index) is int for index in made):  # a new name may be none
            ordered = [made[index] for index in sorted(made)]
            return type(like)(ordered, like.maxlen) if make is collections.deque else type(like)(ordered)
        if make is collections.defaultdict:
            return make(like.default_factory, made)
        metadata = getattr(like, "_metadata", None)
        if metadata is not None:
            return with_metadata(made, metadata)
        return _maker(like)(made) if type(like) in DICTS else made


def _maker(container: Any) -> Callable[..., Any]:
    return cast("Any", type(container))


class _Items(dict[Any, Any]):
    """A container in the making."""


# What is live ------------------------------------------------------------------------------------------------------


def unwrap(target: Any) -> Any:
    """What ``Replicated`` or ``PerRank`` say something of; anything else as it is."""
    return unwrap(target.value) if isinstance(target, (Replicated, PerRank)) else target


def is_stateful(target: object) -> bool:
    """Whether it takes its state whole, as optimizers, schedulers and data loaders do."""
    # The protocol comes last: to ask for it takes long, and most that is asked about is a tensor.
    return not isinstance(target, (torch.Tensor, type, nn.Module)) and isinstance(target, Stateful)


def is_live(target: Any) -> bool:
    """Whether a target takes its state in place, or has something in it that does; all else is plain data."""
    target = unwrap(target)
    return not is_plain(target) and (
        any(is_live(item) for _, item in children(target))
        or isinstance(target, (nn.Module, torch.Tensor))
        or is_stateful(target)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A leaf of a live state: a tensor, an object that takes its state whole, or plain data whatever its size.

    Attributes:
        path: Where it is.
        target: What it is, without what is said of it.
        module: The module that a tensor, or an extra state, is of.
        is_plain: Whether it is data that is replaced.
        alone: Whether it is in ``PerRank``, where the local part of a ``DTensor`` is saved as a tensor of its own.
    """

    path: Path
    target: Any
    module: nn.Module | None = None
    alone: bool = False
    is_plain: bool = True

    @property
    def fqn(self) -> str:
        """What it is called."""
        return fqn_of(self.path)

    @property
    def is_extra(self) -> bool:
        """Whether it is of a module's own making, and for it to judge."""
        return self.module is not None and str(self.path[-1]).endswith("_extra_state")

    @property
    def is_whole(self) -> bool:
        """Whether it takes all of its state at once, so that what is left out of that has to be put there."""
        return self.module is None and not isinstance(self.target, torch.Tensor)

    def state(self) -> FlatMap:
        """What it has now, at its path."""
        return FlatMap.of(self.target.state_dict() if is_stateful(self.target) else self.target, self.path)


class LiveMap:
    """A live state as a flat map.

    Attributes:
        into: The state.
        slots: Its leaves by their paths.
        containers: The dicts, the modules, and the sequences of live objects that they are in.
        marks: What is said to be each rank's own.
    """

    def __init__(self, into: dict[str, Any]) -> None:
        """Walk over ``into``; of objects that take their state whole none is asked for it."""
        self.into = into
        self.slots: dict[Path, Slot] = {}
        self.containers: dict[Path, Any] = {}
        self.marks: dict[Path, PerRank] = {}
        self._names: dict[str, Path] = {}
        self._within: dict[Path, dict[str, Path]] = {}
        for name, target in into.items():
            self._visit(target, (name,), alone=False)

    def _visit(self, target: Any, path: Path, *, alone: bool) -> None:
        while isinstance(target, (PerRank, Replicated)):
            if isinstance(target, PerRank) and not alone:
                self.marks[path], alone = target, True
            target = target.value
        if isinstance(target, nn.Module):
            self.containers[path] = target
            for key, value in target.state_dict(keep_vars=True).items():
                self.slots[*path, key] = Slot((*path, key), value, target, alone, is_plain=False)
        elif children(target) and is_live(target):
            self.containers[path] = target
            for key, item in children(target):
                self._visit(item, (*path, key), alone=alone)
        else:
            self.slots[path] = Slot(path, target, None, alone, is_plain=not is_live(target))

    def nodes(self) -> dict[Path, None]:
        """All paths that there are, each behind those that it is below."""
        return {node: None for path in (*self.containers, *self.slots) for node in prefixes(path)}

    def slot(self, path: Path) -> Slot | None:
        """The leaf that ``path`` is, or is below."""
        slot = self.slots.get(path)
        return slot or next((self.slots[node] for node in prefixes(path) if node in self.slots), None)

    def everything(self) -> Iterator[Path]:
        """The paths of all that there is, also in the state of objects and in plain data."""
        for slot in self.slots.values():
            yield from slot.state().leaves if slot.is_whole else [slot.path]

    def guide(self, name: str) -> Path:
        """The way to what is called ``name``, as far as it is known; in the state of objects too."""
        if not self._names:
            self._names.update({fqn_of(path): path for path in (*self.containers, *self.slots)})
        path = _longest(name, self._names)
        slot = self.slots.get(path)
        if slot is None or not (slot.is_whole or slot.is_extra) or slot.fqn == name:
            return path
        if path not in self._within:
            self._within[path] = {fqn_of(node): node for node in slot.state().nodes()}
        return _longest(name, self._within[path]) or path


def _longest(name: str, known: Mapping[str, Path]) -> Path:
    """The path of the longest name among those ``known`` that ``name`` is, or is below."""
    end = len(name)
    while end > 0:
        if name[:end] in known:
            return known[name[:end]]
        end = name.rfind(".", 0, end)
    return ()
