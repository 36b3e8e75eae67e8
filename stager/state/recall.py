"""Caches the parts of a state unchanged since the last save, to avoid collecting tensors again.

The part of a module, an optimizer or a dict of tensors is reused while nothing that its state is
made of has changed: the modules, names and tensors are the very same, with the same memory, shape,
strides, dtype and device, and every state dict is torch's own. Nothing is kept alive: modules are
held by weak references, tensors by their ids.
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
from sidesave.stager.sharding import Grid
from sidesave.stager.state.tags import Packed

_STOCK: Final = {
    name: getattr(nn.Module, name)
    for name in ("state_dict", "_save_to_state_dict", "get_extra_state")
}
"""Torch's state dict methods; :func:`_are_torchs_own` checks that no package replaced them."""
_OVERRIDES: Final = frozenset((*_STOCK, "_version"))
"""Names that an instance may override its class with."""
_NEEDED: Final = frozenset(
    (
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
    )
)
"""Attributes of an instance from which its state dict is made."""
_version_of: Final = operator.attrgetter("_version")
_requires_grad: Final = operator.attrgetter("requires_grad")
"""Marks tensors not expected to change; compared apart, as metadata comparisons may omit it."""
_MAX_TABLES: Final = 1000
"""Limit of remembered dicts without an owning object: states with more have new ones each save."""
_MAX_MISSES: Final = 3
"""Stop remembering an item after it has changed in this many saves in a row."""
Place = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CachedPart:
    """The result of flattening one part of a state. Two are equal only if they are the same object.

    Attributes:
        node: Its node of the treespec.
        fqns: The names of the tensors that are stored, in order, with their indices.
        changing: The number of tensors, at the begin, that are expected to change.
        picks: For each of ``fqns`` the index of the witness's tensor.
        addresses: The indices of ``fqns`` at each address.
        grids: The grids of tensors that other ranks share, by FQN.
        undeclared: Tensors that no annotation covers; see ``FlatState``.
    """

    node: Packed
    fqns: dict[str, int]
    changing: int
    picks: tuple[int, ...]
    addresses: dict[int, tuple[int, ...]]
    grids: dict[str, Grid]
    undeclared: dict[str, None]

    @classmethod
    def of(
        cls,
        node: Any,
        changing: list[tuple[str, torch.Tensor]],
        frozen: list[tuple[str, torch.Tensor]],
        tensors: Sequence[torch.Tensor],
        grids: dict[str, Grid],
        undeclared: dict[str, None],
    ) -> CachedPart | None:
        """Return a part of named tensors; None unless the witness's ``tensors`` include all."""
        items = changing + frozen
        indices = {id(tensor): index for index, tensor in enumerate(tensors)}
        picks = tuple(indices.get(id(tensor), -1) for _, tensor in items)
        if -1 in picks:
            return None
        addresses: dict[int, tuple[int, ...]] = {}
        for number, (_, tensor) in enumerate(items):
            addresses[tensor.data_ptr()] = (*addresses.get(tensor.data_ptr(), ()), number)
        fqns = {fqn: number for number, (fqn, _) in enumerate(items)}
        return cls(Packed(node), fqns, len(changing), picks, addresses, grids, undeclared)

    def is_disjoint_from(self, other: CachedPart) -> bool:
        """Whether the parts share neither names nor memory."""
        return self.fqns.keys().isdisjoint(other.fqns) and self.addresses.keys().isdisjoint(
            other.addresses
        )


@dataclass(slots=True, eq=False)
class Encoding:
    """An item of the state while it is encoded.

    Attributes:
        node: Its node of the treespec, which the encoder sets; given if nothing has changed.
    """

    node: Any = None


class Recall:
    """Caches the part of each module, optimizer and dict of tensors by its place in the state.

    A dict cannot be referenced weakly, so it is identified by its place alone, and its source is
    None.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._memories: dict[int, _Memory] = {}  # by id, as different sources may compare equal
        self._tables: dict[Place, _Memory] = {}
        self.sequence: list[CachedPart] = []
        """The parts reused up to the last :meth:`mark`; no two of these share memory or names."""
        self._mark: tuple[list[Any]] | None = None

    def mark(self, sequence: list[CachedPart], origins: list[Any]) -> object:
        """Record tensors' origins, in order: reused parts, and names of those collected again.

        Returns the same object as the last call if the origins are equal.
        """
        self.sequence = sequence
        if self._mark is None or self._mark[0] != origins:
            self._mark = (origins,)
        return self._mark

    def names(self, optimizer: torch.optim.Optimizer) -> Packed | None:
        """Names given to :meth:`remember_names`, if parameters and state origins are the same."""
        memory = self._memory_of(optimizer, ())
        known = None if memory is None else memory.names
        same = known is not None and known[0] == self.sequence and known[1] == _ids(optimizer)
        return known[2] if known is not None and same else None

    def remember_names(self, optimizer: torch.optim.Optimizer, names: Packed) -> None:
        """Remember names of an optimizer's parameters, which must all be in :attr:`sequence`."""
        memory = self._memory_of(optimizer, ())
        if memory is not None:
            memory.names = self.sequence, _ids(optimizer), names

    def cached(
        self, source: Any, what: Any, place: Place
    ) -> tuple[CachedPart, list[torch.Tensor]] | None:
        """The last part for ``what`` of ``source`` at ``place``, with tensors; None if changed."""
        memory = self._memory_of(source, place)
        if memory is None or memory.place != place or memory.part is None:
            return None
        tensors = memory.witness.tensors(what)
        if tensors is None:
            memory.part = None
            memory.misses += 1
            return None
        memory.misses = 0
        return memory.part, [tensors[index] for index in memory.part.picks]

    def witness(self, source: Any, what: Any, place: Place) -> Witness | None:
        """A witness of ``what``; None if changes cannot be detected, or have come too often."""
        return _observe(what) if self._misses(source, place) < _MAX_MISSES else None

    def remember(self, source: Any, place: Place, witness: Witness, part: CachedPart) -> None:
        """Cache a part until its witness detects a change; see :meth:`cached`."""
        misses = self._misses(source, place)
        if source is None:
            if len(self._tables) < _MAX_TABLES or place in self._tables:
                self._tables[place] = _Memory(_nothing, place, witness, part, misses)
            return
        key, memories = id(source), self._memories

        def forget(gone: Any) -> None:
            if key in memories and memories[key].source is gone:
                del memories[key]

        memories[key] = _Memory(weakref.ref(source, forget), place, witness, part, misses)

    def _misses(self, source: Any, place: Place) -> int:
        memory = self._memory_of(source, place)
        return 0 if memory is None else memory.misses

    def _memory_of(self, source: Any, place: Place) -> _Memory | None:
        if source is None:
            return self._tables.get(place)
        memory = self._memories.get(id(source))
        return memory if memory is not None and memory.source() is source else None


@dataclass(slots=True)
class _Memory:
    source: Callable[[], Any]
    place: Place
    witness: Witness
    part: CachedPart | None
    misses: int
    names: tuple[list[CachedPart], list[list[int]], Packed] | None = None


def _nothing() -> None:
    return None


def _ids(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[*map(id, group["params"])] for group in optimizer.param_groups]


class _Tensors:
    """Checks that tensors have the same identity, memory and metadata as before.

    They are identified by their ids: a tensor with a weak reference cannot be swapped
    (``torch.utils.swap_tensors``). A different tensor with the same id, memory and metadata is
    equivalent.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self._ids = list(map(id, tensors))
        first = {
            id(tensor): index
            for index, tensor in reversed([*enumerate(tensors)])
            if tensor is not None
        }
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
            return (
                lie_there
                and self._look_alike(there)
                and list(map(_requires_grad, there)) == self._with_grad
            )
        except RuntimeError:  # one has no memory any more that could be asked for
            return False

    def _there(self, tensors: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor]:
        """Each tensor once, as a guard expects them."""
        every = cast("Sequence[torch.Tensor]", tensors)
        return (
            every
            if len(self._distinct) == len(every)
            else [every[index] for index in self._distinct]
        )


@dataclass(slots=True)
class _Known:
    """Everything that the state dict of one module is made of, except the values."""

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
        """The tensors of its state dict, once per name; None if anything has changed."""
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
    """A module and those below it, each once; None if one is unusual.

    Scripted modules keep elsewhere what others have in ``__dict__``.
    """
    modules: list[nn.Module] = []
    for each in torch_private.all_modules([module]):
        if not _is_usual(each):
            return None
        modules.append(each)
    return modules


def _is_usual(module: nn.Module) -> bool:
    """Whether only torch's methods make a module's state dict, from attributes compared here."""
    kind: Any = type(module)
    if not issubclass(kind, nn.Module) or module.__class__ is not kind:  # a proxy, for instance
        return False
    own = module.__dict__
    if (
        not _is_stock(kind)
        or not _is_usual_instance(own)
        or type(_version_of(kind)) not in (int, str, type(None))
    ):
        return False
    values = (*own["_parameters"].values(), *own["_buffers"].values())
    return all(value is None or torch_private.is_ordinary(value) for value in values)


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
"""If false, nothing is remembered."""


class _TableWitness:
    """Witness of a dict of dicts of tensors, such as an optimizer's state."""

    def __init__(self, table: dict[Any, dict[str, torch.Tensor]]) -> None:
        self._keys, self._kinds = [*table], [*map(type, table)]
        self._lengths, self._names = [*map(len, table.values())], _names(table.values())
        self._tensors = _Tensors([*_values(table.values())])

    def tensors(self, what: Any) -> list[Any] | None:
        """All tensors; None if anything has changed."""
        rows = [*what.values()]
        if (
            [*what] != self._keys
            or [*map(type, what)] != self._kinds
            or not {dict}.issuperset(map(type, rows))
        ):
            return None
        names = _names(rows)
        if (
            names != self._names
            or not {str}.issuperset(map(type, names))
            or [*map(len, rows)] != self._lengths
        ):
            return None
        values = [*_values(rows)]
        return values if self._tensors.are(values) else None


def _names(rows: Iterable[dict[str, Any]]) -> list[str]:
    return [*itertools.chain.from_iterable(rows)]


def _values(rows: Iterable[dict[str, Any]]) -> Iterable[Any]:
    return itertools.chain.from_iterable(map(_values_of, rows))


_values_of: Final = cast("Callable[[dict[str, Any]], Iterable[Any]]", cast("Any", dict).values)


Witness = _ModuleWitness | _TableWitness
"""Detects changes: its ``tensors()`` are None once anything has changed."""


def _observe(what: Any) -> Witness | None:
    """A witness that detects whether ``what`` changes; None if changes cannot be detected."""
    if not isinstance(what, nn.Module):
        rows = [*what.values()]
        plain = {int, str}.issuperset(map(type, what)) and {dict}.issuperset(map(type, rows))
        plain = plain and {str}.issuperset(map(type, _names(rows)))
        return (
            _TableWitness(what)
            if plain and all(map(torch_private.is_ordinary, _values(rows)))
            else None
        )
    modules = _all(what)
    return None if modules is None else _ModuleWitness(modules)
