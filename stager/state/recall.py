"""Remembers which parts of a state are unchanged since the last save: their tensors need not be collected again.

What a module, an optimizer or a dict of tensors gave is reused while nothing that its state is made of has changed:
the modules, names and tensors are the very same, with the same memory, shape, strides, dtype and device, and every
state dict is torch's own.
Nothing is kept alive: modules are held by weak references, tensors by their ids.
"""

from __future__ import annotations

import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import nn

from sidesave.stager import torch_private
from sidesave.stager.state.sharding import Grid
from sidesave.stager.state.tags import Packed

_STOCK: Final = {name: getattr(nn.Module, name) for name in ("state_dict", "_save_to_state_dict", "get_extra_state")}
"""Torch's own way from a module to its state dict; :func:`_are_torchs_own` tells whether another package was first."""
_OVERRIDES: Final = frozenset((*_STOCK, "_version"))
"""What an instance may have in the place of what its class has."""
_NEEDED: Final = frozenset(
    ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks")
)
"""What an instance has that its state dict is made of."""
_version_of: Final = operator.attrgetter("_version")
_requires_grad: Final = operator.attrgetter("requires_grad")
"""By which it is told what is not expected to change; asked for apart, as not every way to compare looks has it."""
KINDS: Final = frozenset({torch.Tensor, nn.Parameter})
"""Classes of the tensors that may be remembered."""
_MAX_TABLES: Final = 1000
"""Of more dicts that are no object's nothing is remembered: the state has others at each save."""
_MAX_MISSES: Final = 3
"""What has changed in so many saves one after the other is not remembered any more."""
Place = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """The result of flattening one part of a state. Two are equal only if they are the same object.

    Attributes:
        node: Of the treespec.
        fqns: The names of the tensors that are stored, in order, with their places in it.
        changing: How many of them come first, before those that are not expected to change.
        picks: For each of them which one of the witness's tensors it is.
        addresses: Which of ``fqns`` lie at each address.
        grids: Of those that other ranks share, by FQN.
        undeclared: Those of which nobody has said whether they do.
    """

    node: Packed
    fqns: dict[str, int]
    changing: int
    picks: tuple[int, ...]
    addresses: dict[int, tuple[int, ...]]
    grids: dict[str, Grid]
    undeclared: dict[str, None]


class Recall:
    """Remembers what each module, optimizer and dict of tensors last gave at its place in the state.

    Nobody can have a weak reference to a dict, so its place alone stands for it, and its source is None.
    """

    def __init__(self) -> None:
        """Begin without a memory."""
        self._memories: dict[int, _Memory] = {}  # by id: what is remembered may compare equal to others
        self._tables: dict[Place, _Memory] = {}
        self.sequence: list[Taken] = []
        """What was taken again at the last :meth:`mark`; no two of these share memory or names."""
        self._mark: tuple[list[Any]] | None = None

    def mark(self, sequence: list[Taken], origins: list[Any]) -> object:
        """Note where the parts of a state came from, in order: remembered ones, and the names of those collected anew.

        Returns the same object as the last time if that is the same.
        """
        self.sequence = sequence
        if self._mark is None or self._mark[0] != origins:
            self._mark = (origins,)
        return self._mark

    def names(self, optimizer: torch.optim.Optimizer) -> Packed | None:
        """The names given to :meth:`note_names`, if the state has the same origins and the parameters are the same."""
        memory = self._memory_of(optimizer, ())
        known = None if memory is None else memory.names
        same = known is not None and known[0] == self.sequence and known[1] == _ids(optimizer)
        return known[2] if known is not None and same else None

    def note_names(self, optimizer: torch.optim.Optimizer, names: Packed) -> None:
        """Remember the names of an optimizer's parameters, all of which are tensors of :attr:`sequence`."""
        memory = self._memory_of(optimizer, ())
        if memory is not None:
            memory.names = self.sequence, _ids(optimizer), names

    def again(self, source: Any, what: Any, place: Place) -> tuple[Taken, list[torch.Tensor]] | None:
        """What ``what`` of ``source`` last gave at ``place``, and its tensors; None if anything has changed."""
        memory = self._memory_of(source, place)
        if memory is None or memory.place != place or memory.taken is None:
            return None
        tensors = memory.witness.tensors(what)
        if tensors is None:
            memory.taken = None
            memory.misses += 1
            return None
        memory.misses = 0
        return memory.taken, [tensors[index] for index in memory.taken.picks]

    def note(
        self, source: Any, what: Any, place: Place, taken: Callable[[Sequence[torch.Tensor]], Taken | None]
    ) -> None:
        """Remember a result, if a later change to it can be detected; see :meth:`again`."""
        memory = self._memory_of(source, place)
        misses = 0 if memory is None else memory.misses
        if misses >= _MAX_MISSES:
            return
        witness = _observe(what)
        if witness is None:
            return
        tensors = witness.tensors(what)
        given = None if tensors is None else taken(tensors)
        if given is not None and source is None:
            if len(self._tables) < _MAX_TABLES or place in self._tables:
                self._tables[place] = _Memory(_nothing, place, witness, given, misses)
        elif given is not None:
            key, memories = id(source), self._memories

            def forget(gone: Any) -> None:
                if key in memories and memories[key].source is gone:
                    del memories[key]

            memories[key] = _Memory(weakref.ref(source, forget), place, witness, given, misses)

    def _memory_of(self, source: Any, place: Place) -> _Memory | None:
        if source is None:
            return self._tables.get(place)
        memory = self._memories.get(id(source))
        return memory if memory is not None and memory.source() is source else None


@dataclass(slots=True)
class _Memory:
    source: Callable[[], Any]
    place: Place
    witness: _ModuleWitness | _TableWitness
    taken: Taken | None
    misses: int
    names: tuple[list[Taken], list[list[int]], Packed] | None = None


def _nothing() -> None:
    return None


def _ids(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[*map(id, group["params"])] for group in optimizer.param_groups]


class _Tensors:
    """Tells whether tensors are the same ones, in the same memory, and look at it as they did.

    They are known by their ids: a tensor that somebody has a weak reference to cannot be swapped
    (``torch.utils.swap_tensors``). Another one that has got an id, the memory and the looks will do as well.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self._ids = list(map(id, tensors))
        first = {id(tensor): index for index, tensor in reversed([*enumerate(tensors)]) if tensor is not None}
        self._distinct = sorted(first.values())
        there = self._there(tensors)
        self._addresses = list(map(torch.Tensor.data_ptr, there))
        self._look_alike = torch_private.tensor_guard(there)
        self._with_grad = list(map(_requires_grad, there))

    def are(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        if list(map(id, tensors)) != self._ids:
            return False
        there = self._there(tensors)
        try:
            lie_there = list(map(torch.Tensor.data_ptr, there)) == self._addresses
            return lie_there and self._look_alike(there) and list(map(_requires_grad, there)) == self._with_grad
        except RuntimeError:  # one has no memory any more that could be asked for
            return False

    def _there(self, tensors: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor]:
        """Each tensor once, as a guard expects them."""
        every = cast("Sequence[torch.Tensor]", tensors)
        return every if len(self._distinct) == len(every) else [every[index] for index in self._distinct]


@dataclass(slots=True)
class _Known:
    """What the state dict of one module is made of, except the values."""

    module: weakref.ref[nn.Module]
    kind: Any
    version: Any
    parameters: list[str]
    buffers: list[str]
    transient: set[str]
    modules: list[str]


class _ModuleWitness:
    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._known = [_known(each) for each in modules]
        self._kinds = {known.kind for known in self._known}
        current = self._look()
        assert current is not None
        values, children = current
        self._children = [_nothing if child is None else weakref.ref(child) for child in children]
        self._tensors = _Tensors(values)

    def tensors(self, what: object) -> list[Any] | None:
        """The tensors of its state dict, each once for each of its names; None where anything has changed."""
        current = self._look()
        if current is None or not all(map(_is_stock, self._kinds)):
            return None
        values, children = current
        if not all(map(operator.is_, children, [known() for known in self._children])):
            return None
        return values if self._tensors.are(values) else None

    def _look(self) -> tuple[list[Any], list[Any]] | None:
        values: list[Any] = []
        children: list[Any] = []
        for known in self._known:
            module = known.module()
            if module is None or module.__class__ is not known.kind:
                return None
            own = module.__dict__
            if not _is_usual_instance(own):
                return None
            parameters, buffers, modules = own["_parameters"], own["_buffers"], own["_modules"]
            transient = own["_non_persistent_buffers_set"]
            if (
                [*parameters] != known.parameters
                or [*buffers] != known.buffers
                or [*modules] != known.modules
                or transient != known.transient
                or _version_of(known.kind) is not known.version
            ):
                return None
            values += parameters.values()
            values += [buffer for name, buffer in buffers.items() if name not in transient]
            children += modules.values()
        return values, children


def _all(module: nn.Module) -> list[nn.Module] | None:
    """A module and those below it, each once (``modules()`` takes what compares equal for one); None if one is unusual.

    Scripted modules keep elsewhere what others have in ``__dict__``.
    """
    modules: dict[int, nn.Module] = {}
    left = [module]
    while left:
        each = left.pop()
        if id(each) not in modules:
            if not _is_usual(each):
                return None
            modules[id(each)] = each
            left += [child for child in each.__dict__["_modules"].values() if child is not None]
    return [*modules.values()]


def _is_usual(module: nn.Module) -> bool:
    """Whether torch's own methods make a module's state dict, and only from what is compared here."""
    kind: Any = type(module)
    if not issubclass(kind, nn.Module) or module.__class__ is not kind:  # a proxy, for instance
        return False
    own = module.__dict__
    if not _is_stock(kind) or not _is_usual_instance(own) or type(_version_of(kind)) not in (int, str, type(None)):
        return False
    values = (*own["_parameters"].values(), *own["_buffers"].values())
    return all(value is None or _is_known_kind(value) for value in values)


def _is_usual_instance(own: dict[str, Any]) -> bool:
    return (
        own.keys() >= _NEEDED
        and own.keys().isdisjoint(_OVERRIDES)
        and not (own["_state_dict_hooks"] or own["_state_dict_pre_hooks"])
        and type(own["_parameters"]) is type(own["_buffers"]) is type(own["_modules"]) is dict
    )


def _known(module: nn.Module) -> _Known:
    own = module.__dict__
    kind: Any = type(module)
    return _Known(
        weakref.ref(module),
        kind,
        _version_of(kind),
        [*own["_parameters"]],
        [*own["_buffers"]],
        set(own["_non_persistent_buffers_set"]),
        [*own["_modules"]],
    )


def _is_stock(kind: Any) -> bool:
    """Whether instances of a class of modules get their state dicts from torch's own methods."""
    return (
        _ARE_TORCHS_OWN
        and all(getattr(kind, name) is method for name, method in _STOCK.items())
        and kind.__getattribute__ is object.__getattribute__
        and not any(hasattr(kind, name) for name in _NEEDED)
    )


def _are_torchs_own() -> bool:
    file = sys.modules[nn.Module.__module__].__file__
    return all(method.__code__.co_filename == file for method in _STOCK.values())


_ARE_TORCHS_OWN: Final = _are_torchs_own()
"""Else nothing is remembered."""


class _TableWitness:
    """Of dicts of tensors in a dict, as the state of an optimizer is."""

    def __init__(self, table: dict[Any, dict[str, torch.Tensor]]) -> None:
        self._keys, self._kinds = [*table], [*map(type, table)]
        self._lengths, self._names = [*map(len, table.values())], _names(table.values())
        self._tensors = _Tensors([*_values(table.values())])

    def tensors(self, what: Any) -> list[Any] | None:
        """All tensors; None where anything has changed."""
        rows = [*what.values()]
        if [*what] != self._keys or [*map(type, what)] != self._kinds or not {dict}.issuperset(map(type, rows)):
            return None
        names = _names(rows)
        if names != self._names or not {str}.issuperset(map(type, names)) or [*map(len, rows)] != self._lengths:
            return None
        values = [*_values(rows)]
        return values if self._tensors.are(values) else None


def _names(rows: Iterable[dict[str, Any]]) -> list[str]:
    return [*itertools.chain.from_iterable(rows)]


def _values(rows: Iterable[dict[str, Any]]) -> Iterable[Any]:
    return itertools.chain.from_iterable(map(_values_of, rows))


_values_of: Final = cast("Callable[[dict[str, Any]], Iterable[Any]]", cast("Any", dict).values)


def _observe(what: Any) -> _ModuleWitness | _TableWitness | None:
    """A witness that detects whether ``what`` changes; None where changes cannot be detected."""
    if not isinstance(what, nn.Module):
        rows = [*what.values()]
        plain = {int, str}.issuperset(map(type, what)) and {dict}.issuperset(map(type, rows))
        plain = plain and {str}.issuperset(map(type, _names(rows)))
        return _TableWitness(what) if plain and all(map(_is_known_kind, _values(rows))) else None
    modules = _all(what)
    return None if modules is None else _ModuleWitness(modules)


def _is_known_kind(value: Any) -> bool:
    """Whether a tensor is one piece of memory, described by its address, shape and strides."""
    return type(value) in KINDS and value.layout is torch.strided and not value.is_nested
