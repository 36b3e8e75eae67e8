"""Flat maps: turns a nest, saved or live, into ``{path: leaf}`` and back. No other module walks over a state."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import nn

from sidesave.client.loading.tensors import unpickled
from sidesave.stager.state.annotations import ANNOTATIONS, PerRank
from sidesave.stager.state.tags import PLAIN
from sidesave.stager.state.tree import Stateful
from sidesave.stager.state.treespec import with_metadata
from sidesave.stager.tables import IDS, Column, RowTable, is_table
from sidesave.stager.wrappers import WrapperNames, two_of_one_name

DICTS: Final = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
SEQUENCES: Final = (list, tuple, collections.deque)

Path = tuple[Any, ...]
"""The keys that lead to a node; list items have numbers. A module's state is one dict of dotted keys."""


def fqn_of(path: Path) -> str:
    """The dotted name of a path."""
    return ".".join(map(str, path))


def prefixes(path: Path) -> list[Path]:
    """The nodes that lead to a path, outermost first, the path itself last."""
    return [path[:end] for end in range(1, len(path) + 1)]


def children(node: Any) -> Iterable[tuple[Any, Any]]:
    """Keys and values of a container; nothing for a leaf."""
    if type(node) in DICTS:
        return cast("dict[Any, Any]", node).items()
    return enumerate(cast("list[Any]", node)) if type(node) in SEQUENCES else ()


def is_plain(node: Any) -> bool:
    """Whether a value is plain data, with all that it contains."""
    if type(node) in DICTS:
        items = cast("dict[Any, Any]", node)
        return PLAIN.issuperset(map(type, items)) and is_plain([*items.values()])
    if type(node) not in SEQUENCES:
        return type(node) in PLAIN
    items = cast("list[Any]", node)
    return PLAIN.issuperset(map(type, items)) or all(map(is_plain, items))


@dataclass(slots=True)
class FlatMap:
    """A nest, flattened.

    Attributes:
        leaves: By path, in the order of the nest: values that are no container, empty containers, and plain data that
            stays whole.
        containers: By path, an example of the kind of each non-empty container.
    """

    leaves: dict[Path, Any] = field(default_factory=dict[Path, Any])
    containers: dict[Path, Any] = field(default_factory=dict[Path, Any])

    @classmethod
    def of(cls, nest: Any, path: Path = (), is_whole: Callable[[Path], bool] = lambda path: False) -> FlatMap:
        """Flatten ``nest``, which is at ``path``; plain data for which ``is_whole`` is true stays one leaf."""
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
        """The part at and below ``path``."""
        end = len(path)
        return FlatMap({at: leaf for at, leaf in self.leaves.items() if at[:end] == path}, self.containers)

    def nodes(self) -> dict[Path, None]:
        """The paths of all leaves and of their containers."""
        return {node: None for path in self.leaves for node in prefixes(path)}

    def nest(self, path: Path = ()) -> Any:
        """The nest at ``path``, in new containers. A sequence with missing items closes up."""
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
        make = cast("Any", type(like))
        if make in SEQUENCES and all(type(index) is int for index in made):  # a new name may be none
            ordered = [made[index] for index in sorted(made)]
            return type(like)(ordered, like.maxlen) if make is collections.deque else type(like)(ordered)
        if make is collections.defaultdict:
            return collections.defaultdict(like.default_factory, made)
        metadata = getattr(like, "_metadata", None)
        if metadata is not None:
            return with_metadata(made, metadata)
        return type(like)(made) if type(like) in DICTS else made


class _Items(dict[Any, Any]):
    """A container in the making."""


# What is live ------------------------------------------------------------------------------------------------------


def unwrap(target: Any) -> Any:
    """The value inside ``Replicated``, ``PerRank`` or ``Frozen``; anything else as it is."""
    return unwrap(target.value) if isinstance(target, ANNOTATIONS) else target


def is_stateful(target: object) -> bool:
    """Whether a target takes its state whole, as optimizers, schedulers and data loaders do."""
    # The protocol comes last: checking it is slow, and most targets are tensors.
    return not isinstance(target, (torch.Tensor, type, nn.Module)) and isinstance(target, Stateful)


def is_live(target: Any) -> bool:
    """Whether a target takes its state in place, or contains something that does; all else is plain data."""
    target = unwrap(target)
    return not is_plain(target) and (
        any(is_live(item) for _, item in children(target))
        or isinstance(target, (nn.Module, torch.Tensor))
        or is_table(target)
        or is_stateful(target)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A leaf of a live state: a tensor, an object that takes its state whole, or plain data whatever its size.

    Attributes:
        path: Its path.
        target: The object, without ``PerRank``, ``Replicated`` or ``Frozen`` around it.
        module: The module that owns the tensor or extra state; of a column the table.
        is_plain: Whether it is plain data, which is replaced.
        alone: Whether it is in ``PerRank``, where the local shard of a ``DTensor`` is saved as a tensor of its own.
    """

    path: Path
    target: Any
    module: nn.Module | RowTable | None = None
    alone: bool = False
    is_plain: bool = True

    @property
    def fqn(self) -> str:
        """Its dotted name."""
        return fqn_of(self.path)

    @property
    def is_extra(self) -> bool:
        """Whether it is a module's extra state, which only the module can check."""
        return self.module is not None and str(self.path[-1]).endswith("_extra_state")

    @property
    def is_whole(self) -> bool:
        """Whether it takes all of its state at once, so that what is left out must be filled in."""
        return self.module is None and not isinstance(self.target, torch.Tensor)

    def state(self) -> FlatMap:
        """Its current state, at its path."""
        return FlatMap.of(self.target.state_dict() if is_stateful(self.target) else self.target, self.path)


@dataclass(frozen=True, slots=True)
class Wrapped:
    """How a module with wrappers in it names its state: by its own names of tensors, and of modules, those without."""

    names: dict[str, str]
    modules: dict[str, str]

    def state(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict for the module itself, of one with names without wrappers."""
        own = {key: state[name] for key, name in self.names.items() if name in state}
        metadata = getattr(state, "_metadata", None)
        if metadata is None:
            return own
        return with_metadata(own, {key: metadata[name] for key, name in self.modules.items() if name in metadata})


class LiveMap:
    """A live state as a flat map.

    Attributes:
        into: The state.
        slots: Its leaves by path.
        containers: The dicts, modules and sequences of live objects that hold them, by path.
        marks: The ``PerRank`` annotations, by path.
        wrapped: Of modules with wrappers in them their own names, by path; slots have those without.
    """

    def __init__(self, into: dict[str, Any]) -> None:
        """Walk over ``into``, without asking any object for its state."""
        self.into = into
        self.slots: dict[Path, Slot] = {}
        self.containers: dict[Path, Any] = {}
        self.marks: dict[Path, PerRank] = {}
        self.wrapped: dict[Path, Wrapped] = {}
        self._names: dict[str, Path] = {}
        self._within: dict[Path, dict[str, Path]] = {}
        for name, target in into.items():
            self._visit(target, (name,), alone=False)

    def _visit(self, target: Any, path: Path, *, alone: bool) -> None:
        while isinstance(target, ANNOTATIONS):
            if isinstance(target, PerRank) and not alone:
                self.marks[path], alone = target, True
            target = target.value
        if is_table(target):
            self.containers[path] = target
            for name, column in ((IDS, Column(torch.int64)), *target.columns().items()):
                self.slots[*path, name] = Slot((*path, name), column, target, alone, is_plain=False)
        elif isinstance(target, nn.Module):
            self.containers[path] = target
            state = target.state_dict(keep_vars=True)
            names: dict[str, str] = {}
            if wrappers := WrapperNames(target):
                names = wrappers.keys(state)
                if two_of_one_name(names):  # an older version has saved both as they are
                    names = {}
            if names:
                modules = {key: wrappers.module(key) for key in getattr(state, "_metadata", ())}
                self.wrapped[path] = Wrapped(names, modules)
            for key, value in state.items():
                at = (*path, names.get(key, key))
                self.slots[at] = Slot(at, value, target, alone, is_plain=False)
        elif children(target) and is_live(target):
            self.containers[path] = target
            for key, item in children(target):
                self._visit(item, (*path, key), alone=alone)
        else:
            self.slots[path] = Slot(path, target, None, alone, is_plain=not is_live(target))

    def nodes(self) -> dict[Path, None]:
        """All paths, each after its parents."""
        return {node: None for path in (*self.containers, *self.slots) for node in prefixes(path)}

    def slot(self, path: Path) -> Slot | None:
        """The leaf at or above ``path``."""
        slot = self.slots.get(path)
        return slot or next((self.slots[node] for node in prefixes(path) if node in self.slots), None)

    def everything(self) -> Iterator[Path]:
        """The paths of everything, also inside the state of objects and in plain data."""
        for slot in self.slots.values():
            yield from slot.state().leaves if slot.is_whole else [slot.path]

    def guide(self, name: str) -> Path:
        """The path of ``name`` as far as it is known, also inside the state of objects."""
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
    """The path of the longest ``known`` name that ``name`` equals or is below."""
    end = len(name)
    while end > 0:
        if name[:end] in known:
            return known[name[:end]]
        end = name.rfind(".", 0, end)
    return ()
