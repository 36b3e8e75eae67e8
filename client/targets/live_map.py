"""The live state that a checkpoint is loaded into; the kind of each object is decided once."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import DataLoader

from sidesave.client.reading.stored import FlatMap, children, fqn_of, is_plain
from sidesave.stager.data_parallel import state_dict_of
from sidesave.stager.sharding import is_dtensor
from sidesave.stager.state.annotations import ANNOTATIONS, PerRank
from sidesave.stager.state.tree import Stateful
from sidesave.stager.state.treespec import Path
from sidesave.stager.tables import IDS, Column, RowTable, is_table
from sidesave.stager.torch_private import with_metadata
from sidesave.stager.wrappers import WrapperNames, two_of_one_name

ORDINARY: Final = (torch.Tensor, nn.Parameter)
"""Types of tensors that are made of no others, and are whole on this rank."""


def unwrap(target: Any) -> Any:
    """The value inside ``Replicated``, ``PerRank`` or ``Frozen``; anything else as it is."""
    return unwrap(target.value) if isinstance(target, ANNOTATIONS) else target


def is_stateful(target: object) -> bool:
    """Whether a target takes its state whole, as optimizers, schedulers and data loaders do."""
    # The protocol comes last: checking it is slow, and most targets are tensors.
    return not isinstance(target, (torch.Tensor, type, nn.Module)) and isinstance(target, Stateful)


def _kind_of(target: object) -> Kind:
    """The kind of a target that is not a module, a table, or a container of live objects."""
    if isinstance(target, torch.Tensor):
        return Kind.TENSOR
    if isinstance(target, torch.optim.Optimizer):
        return Kind.OPTIMIZER
    if is_plain(target) or not is_stateful(target):
        return Kind.PLAIN
    # Data loaders may start workers when they are asked for their state.
    stateful = getattr(
        sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", DataLoader
    )
    return Kind.LOADER if isinstance(target, (DataLoader, stateful)) else Kind.OBJECT


def is_live(target: Any) -> bool:
    """Whether a target, or something in it, takes its state in place; all else is plain data."""
    target = unwrap(target)
    return not is_plain(target) and (
        any(is_live(item) for _, item in children(target))
        or isinstance(target, (nn.Module, torch.Tensor))
        or is_table(target)
        or is_stateful(target)
    )


class Kind(enum.IntEnum):
    """The kind of a target, which decides how it is checked, completed and assigned."""

    PLAIN = 0
    """Plain data of any size, which is replaced."""
    TENSOR = 1
    EXTRA = 2
    """Extra state of a module, which only the module can check."""
    VALUE = 3
    """Any other value in the state of a module."""
    COLUMN = 4
    """A column of a table."""
    OPTIMIZER = 5
    OBJECT = 6
    """An object with ``load_state_dict``."""
    LOADER = 7
    """A data loader with ``load_state_dict``."""
    MODULE = 8
    TABLE = 9


Undo = list[Callable[[], object]]
"""What puts changed targets back as they were, in the order of the changes."""


WHOLE: Final = frozenset({Kind.PLAIN, Kind.OPTIMIZER, Kind.OBJECT, Kind.LOADER})
"""Kinds that take their state as a whole, so that parts left out must be filled in."""
OBJECTS: Final = WHOLE - {Kind.PLAIN}


@dataclass(slots=True, eq=False)
class Slot:
    """A leaf of a live state: a tensor, an object loaded as a whole, or plain data of any size.

    Attributes:
        path: Its path.
        fqn: Its dotted name.
        target: The object, without ``PerRank``, ``Replicated`` or ``Frozen`` around it.
        kind: Its kind.
        owner: The module or the table that it is a part of.
        alone: Whether it is in ``PerRank``, where the local shard of a ``DTensor`` is saved as a
            tensor of its own.
    """

    path: Path
    fqn: str
    target: Any
    kind: Kind = Kind.PLAIN
    owner: nn.Module | RowTable | None = None
    alone: bool = False

    def state(self) -> FlatMap:
        """Its current state, at its path."""
        if self.kind is Kind.OPTIMIZER:
            return FlatMap.of(state_dict_of(self.target), self.path)
        takes_state = self.kind in (Kind.OBJECT, Kind.LOADER)
        return FlatMap.of(self.target.state_dict() if takes_state else self.target, self.path)


@dataclass(frozen=True, slots=True)
class Wrapped:
    """Maps a module's own names of tensors and modules to those without wrappers."""

    names: dict[str, str]
    modules: dict[str, str]

    def state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Turn a state dict with names without wrappers into one for the module itself."""
        own = {key: state[name] for key, name in self.names.items() if name in state}
        metadata = getattr(state, "_metadata", None)
        if metadata is None:
            return own
        return with_metadata(
            own, {key: metadata[name] for key, name in self.modules.items() if name in metadata}
        )


class LiveMap:
    """A live state as a flat map.

    Attributes:
        into: The state.
        slots: Its leaves by path.
        containers: The dicts, modules and sequences of live objects that hold them, by path.
        tables: The paths of tables.
        marks: The ``PerRank`` annotations, by path.
        wrapped: Of modules with wrappers in them their own names, by path; slots have those
            without.
    """

    def __init__(self, into: dict[str, Any]) -> None:
        """Walk over ``into``; of objects, only modules are asked for their state."""
        self.into = into
        self.slots: dict[Path, Slot] = {}
        self.containers: dict[Path, Any] = {}
        self.tables: set[Path] = set()
        self.marks: dict[Path, PerRank] = {}
        self.wrapped: dict[Path, Wrapped] = {}
        self._above: dict[Path, Slot | None] = {}
        self._by_object: dict[int, list[Slot]] | None = None
        self._by_address: dict[int, list[Slot]] = {}
        self._names: dict[str, Path] = {}
        self._within: dict[Path, dict[str, Path]] = {}
        for name, target in into.items():
            self._visit(target, (name,), str(name), alone=False)

    def _visit(self, target: Any, path: Path, fqn: str, *, alone: bool) -> None:
        while isinstance(target, ANNOTATIONS):
            if isinstance(target, PerRank) and not alone:
                self.marks[path], alone = target, True
            target = target.value
        if is_table(target):
            self.containers[path] = target
            self.tables.add(path)
            for name, column in ((IDS, Column(torch.int64)), *target.columns().items()):
                at = (*path, name)
                self.slots[at] = Slot(at, f"{fqn}.{name}", column, Kind.COLUMN, target, alone)
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
                name = names.get(key, key)
                at = (*path, name)
                if str(name).endswith("_extra_state"):
                    kind = Kind.EXTRA
                else:
                    kind = Kind.TENSOR if isinstance(value, torch.Tensor) else Kind.VALUE
                self.slots[at] = Slot(at, f"{fqn}.{name}", value, kind, target, alone)
        elif children(target) and is_live(target):
            self.containers[path] = target
            for key, item in children(target):
                self._visit(item, (*path, key), f"{fqn}.{key}", alone=alone)
        else:
            self.slots[path] = Slot(path, fqn, target, _kind_of(target), None, alone)

    def slot(self, path: Path) -> Slot | None:
        """The leaf at or above ``path``."""
        slot = self.slots.get(path)
        if slot is not None or not path:
            return slot
        parent = path[:-1]
        if parent not in self._above:
            self._above[parent] = self.slot(parent)
        return self._above[parent]

    def names_of(self, tensor: torch.Tensor) -> set[str]:
        """The names of live tensors that are ``tensor``, or the same view of the same memory."""
        if self._by_object is None:
            self._by_object = {}
            for slot in self.slots.values():
                if isinstance(slot.target, torch.Tensor):
                    self._by_object.setdefault(id(slot.target), []).append(slot)
                    self._by_address.setdefault(_address(slot.target), []).append(slot)
        names = {slot.fqn for slot in self._by_object.get(id(tensor), ())}
        address = _address(tensor)
        others = self._by_address.get(address, ()) if address else ()
        names.update(
            slot.fqn
            for slot in others
            if slot.target is not tensor and _view(slot.target) == _view(tensor)
        )
        return names

    def everything(self) -> Iterator[Path]:
        """The paths of everything, including the state of objects and plain data."""
        for slot in self.slots.values():
            yield from slot.state().leaves if slot.kind in WHOLE else [slot.path]

    def guide(self, name: str) -> Path:
        """The path of ``name`` as far as it is known, also inside the state of objects."""
        if not self._names:
            self._names.update({fqn_of(path): path for path in (*self.containers, *self.slots)})
        path = _longest(name, self._names)
        slot = self.slots.get(path)
        if slot is None or not (slot.kind in WHOLE or slot.kind is Kind.EXTRA) or slot.fqn == name:
            return path
        if path not in self._within:
            self._within[path] = {fqn_of(node): node for node in slot.state().nodes()}
        return _longest(name, self._within[path]) or path


def _address(tensor: torch.Tensor) -> int:
    """The address of an ordinary tensor; 0 for any other, and for one without memory."""
    if nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
        return 0
    if type(tensor) not in ORDINARY and (
        is_dtensor(tensor) or type(tensor.detach()) is not torch.Tensor
    ):
        return 0
    return tensor.data_ptr()


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _longest(name: str, known: Mapping[str, Path]) -> Path:
    """The path of the longest ``known`` name that ``name`` equals or is below."""
    end = len(name)
    while end > 0:
        if name[:end] in known:
            return known[name[:end]]
        end = name.rfind(".", 0, end)
    return ()
