"""Nested state to a flat map of tensors plus a skeleton (:mod:`sidesave.stager.skeleton`).

Tensors are collected as they are, without a copy. One memory region is collected once: tied weights become a second
reference to the first FQN.
"""

from __future__ import annotations

import collections
import datetime
import enum
import functools
import io
import math
import operator
import pathlib
import pickle
import re
import sys
import zoneinfo
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, cast, runtime_checkable

import msgpack
import torch
import xxhash
from torch import nn

from sidesave.errors import InvalidArgumentError, UnsupportedValueError
from sidesave.stager import sharding
from sidesave.stager.dtypes import CARRIERS, NAMES, dtype_name
from sidesave.stager.marks import PerRank, Replicated
from sidesave.stager.sharding import Grid
from sidesave.stager.skeleton import FACTORIES, MAX_DEPTH, PRIMITIVES, SPARSE_PARTS, Tag

TENSORS: Final = "tensors"
"""The container of bare tensors at the top level."""
OBJECTS: Final = "objects"
"""The stem of the file that holds the skeleton."""
_MAX_STEM: Final = 150


@runtime_checkable
class Stateful(Protocol):
    """Anything that gives and takes its state: schedulers, data loaders, samplers, scalers."""

    def state_dict(self) -> dict[str, Any]:
        """The state as a nest of savable values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take such a nest back."""
        ...


@dataclass(slots=True)
class FlatState:
    """A state taken apart.

    Attributes:
        containers: FQN to tensor, per container (one file each), in the order of the state. The tensors are dense and
            of a dtype that safetensors knows; their memory is the caller's.
        objects: The encoded skeleton with all plain data.
        pickled: Whether a value had to be pickled.
        optimizers: Every optimizer met, for the ownership rules.
        modules: Every module met.
        grids: Of tensors that are known to be shared with other ranks, which of them hold what.
        assumed: Plain tensors of modules and optimizers, which all ranks are taken to hold alike; whether that is to be
            compared. Buffers are not: the running statistics of each rank are its own, and those of one are saved.
        shared_digest: Of what the skeleton says of modules, optimizers and all else that ranks share.
    """

    containers: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict[str, dict[str, torch.Tensor]])
    objects: bytes = b""
    pickled: bool = False
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list[torch.optim.Optimizer])
    modules: list[nn.Module] = field(default_factory=list[nn.Module])
    grids: dict[str, Grid] = field(default_factory=dict[str, Grid])
    assumed: dict[str, bool] = field(default_factory=dict[str, bool])
    shared_digest: str = ""


def flatten(state: Mapping[str, Any], *, allow_pickle: bool = False, ranks: tuple[int, ...] | None = None) -> FlatState:
    """Take a state apart, without copying a tensor. ``ranks`` are those that save together, None for one alone.

    Raises:
        InvalidArgumentError: The state is no mapping with string keys.
        UnsupportedValueError: A value that cannot be saved, or two values with one FQN; the message names the FQN.
    """
    if not isinstance(cast("object", state), Mapping):
        raise InvalidArgumentError(f"state must be a dict of named items, not {type(state).__name__}")
    flattener = _Flattener(allow_pickle, ranks)
    skeleton: dict[str, Any] = {}
    with torch.no_grad():
        for key, value in state.items():
            if not isinstance(cast("object", key), str) or not key:
                raise InvalidArgumentError(f"state keys must be non-empty strings, not {key!r}")
            flattener.container = TENSORS if isinstance(value, torch.Tensor) else container_name(key)
            skeleton[key] = flattener.encode(value, key, 0)
    flat = flattener.flat
    flat.objects = _pack(skeleton)
    flat.shared_digest = flattener.shared.hexdigest()
    return flat


def container_name(key: str) -> str:
    """The file stem for a top-level key: letters, digits, ``_`` and ``-`` stand, all else is percent-encoded."""
    stem = re.sub(
        r"[^A-Za-z0-9_-]",
        lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogatepass")),
        key,
    )
    if stem in (TENSORS, OBJECTS, "rank", "manifest"):
        stem = f"%{ord(stem[0]):02X}{stem[1:]}"
    if len(stem) > _MAX_STEM:
        stem = f"{stem[:_MAX_STEM]}-{xxhash.xxh3_64_hexdigest(stem.encode())}"
    return stem


def _pack(skeleton: Any) -> bytes:
    return cast("bytes", msgpack.packb(skeleton, use_bin_type=True, unicode_errors="surrogatepass"))


@dataclass(frozen=True, slots=True)
class _Scope:
    """What is known of the plain tensors of an item: that ``ranks`` hold them alike; None where it is only assumed.

    Then ``compared`` tells that even those are compared that are no parameters.
    """

    ranks: tuple[int, ...] | None
    compared: bool = False


class _Flattener:
    def __init__(self, allow_pickle: bool, ranks: tuple[int, ...] | None) -> None:
        self.flat = FlatState()
        self.container = ""
        self.shared = xxhash.xxh3_128()
        self._ranks = ranks
        self._scope: _Scope | None = None  # a plain tensor belongs to its rank
        self._pinned = False  # inside PerRank, where nothing is shared
        self._held_by: dict[int, tuple[int, ...]] = {}  # an optimizer's plain tensors, by id
        self._replicas: dict[int, tuple[int, ...]] = {}  # parameters of DistributedDataParallel, by id
        self._allow_pickle = allow_pickle
        self._fqns: set[str] = set()
        self._by_address: dict[int, list[tuple[torch.Tensor, Grid | None, Any]]] = {}

    def encode(self, value: Any, fqn: str, depth: int) -> Any:
        kind = value.__class__
        if kind is torch.Tensor or kind is nn.Parameter:
            return self._tensor(value, fqn)
        if kind in PRIMITIVES:
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 64 else [Tag.INT, hex(value)]
        if depth > MAX_DEPTH:
            raise UnsupportedValueError(f"{fqn}: nested deeper than {MAX_DEPTH} levels, or in a cycle")
        handler = _HANDLERS.get(kind)
        if handler is not None:
            return handler(self, value, fqn, depth)
        return self._encode_by_ancestry(value, fqn, depth)

    def _encode_by_ancestry(self, value: Any, fqn: str, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor_subclass(value, fqn)
        if isinstance(value, nn.Module):
            self.flat.modules.append(value)
            state = value.state_dict(keep_vars=True)
            return self._shared(lambda: self._dict(state, fqn, depth), fqn, lambda: self._scope_of(value, state))
        if isinstance(value, torch.optim.Optimizer):
            self.flat.optimizers.append(value)
            if self._ranks is not None:
                self._held_by.update(self._ranks_of_states(value))
            scope = _Scope(None, compared=True)
            return self._shared(lambda: self._dict(value.state_dict(), fqn, depth), fqn, lambda: scope)
        if isinstance(value, Replicated):
            return self._shared(lambda: self.encode(value.value, fqn, depth), fqn, lambda: _Scope(self._ranks))
        if isinstance(value, PerRank):
            before, self._scope, self._pinned = (self._scope, self._pinned), None, True
            try:
                return self.encode(value.value, fqn, depth)
            finally:
                self._scope, self._pinned = before
        if isinstance(value, enum.Enum):
            return self.encode(value.value, fqn, depth + 1)
        if isinstance(value, pathlib.PosixPath):
            return [Tag.PATH, str(value)]
        numpy = sys.modules.get("numpy")
        if numpy is not None and _is_numpy_scalar(value):
            if value.dtype.fields or not value.dtype.itemsize:
                return [Tag.NUMPY_SCALAR, "", _to_npy(value)]
            return [Tag.NUMPY_SCALAR, value.dtype.str, value.tobytes()]
        if numpy is not None and type(value) in (numpy.ndarray, numpy.memmap) and not value.dtype.hasobject:
            return self._array(value, fqn)
        if isinstance(value, Stateful) and not isinstance(value, type):
            return self.encode(value.state_dict(), fqn, depth + 1)
        if self._allow_pickle:
            self.flat.pickled = True
            try:
                return [Tag.PICKLE, pickle.dumps(value, protocol=5)]
            except Exception as error:
                raise UnsupportedValueError(
                    f"{fqn}: a {type(value).__qualname__} cannot be pickled: {error}"
                ) from error
        raise UnsupportedValueError(
            f"{fqn}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved; give it state_dict() and "
            "load_state_dict(), turn it into plain data, or pass allow_pickle=True"
        )

    def _shared(self, encode: Callable[[], Any], fqn: str, scope: Callable[[], _Scope]) -> Any:
        """Encode an item that ranks share; ``scope`` tells what is known of that."""
        if self._ranks is None or self._pinned:
            return encode()
        before = self._scope
        if before is None or before.ranks is None:  # what is around it may have said so already
            self._scope = scope()
        try:
            node = encode()
        finally:
            self._scope = before
        if before is None:
            self.shared.update(_pack([fqn, node]))
        return node

    # Containers ------------------------------------------------------------------------------------------------

    def _dict(self, value: dict[Any, Any], fqn: str, depth: int) -> Any:
        encode, prefix, below = self.encode, fqn + ".", depth + 1
        if all(type(key) is str for key in value):
            return [Tag.DICT, {key: encode(item, prefix + key, below) for key, item in value.items()}]
        return [Tag.ITEMS, self._items(value, fqn, depth)]

    def _items(self, value: dict[Any, Any], fqn: str, depth: int) -> list[Any]:
        return [
            [self._key(key, fqn, depth), self.encode(item, f"{fqn}.{key}", depth + 1)] for key, item in value.items()
        ]

    def _key(self, key: Any, fqn: str, depth: int) -> Any:
        if isinstance(key, torch.Tensor):
            raise UnsupportedValueError(f"{fqn}: a tensor cannot be a key")
        return self.encode(key, f"{fqn}.<key>", depth + 1)

    def _sequence(self, value: Any, fqn: str, depth: int) -> list[Any]:
        if PRIMITIVES.issuperset(map(type, value)):
            return list(value)
        return [self.encode(item, f"{fqn}.{index}", depth + 1) for index, item in enumerate(value)]

    # Tensors ---------------------------------------------------------------------------------------------------

    def _tensor_subclass(self, value: torch.Tensor, fqn: str) -> Any:
        if nn.parameter.is_lazy(value):
            raise UnsupportedValueError(f"{fqn}: a lazy parameter has no values; run a forward pass first")
        if isinstance(value, (nn.Parameter, nn.Buffer)):
            plain = value.detach()
            if type(plain) is torch.Tensor:
                return self._tensor(plain, fqn, is_parameter=isinstance(value, nn.Parameter))
        if is_dtensor(value):
            return self._dtensor(value, fqn)
        raise UnsupportedValueError(
            f"{fqn}: a {type(value).__module__}.{type(value).__qualname__} is not a plain tensor; save its local "
            "part or its dequantized value"
        )

    def _dtensor(self, value: torch.Tensor, fqn: str) -> Any:
        local = cast("Any", value).to_local()
        if self._ranks is None:
            if local.shape != value.shape:
                raise UnsupportedValueError(
                    f"{fqn}: it is divided among ranks, and this process saves alone; let all ranks save together"
                )
            return self._tensor(local, fqn)
        if self._pinned:
            return self._tensor(local, fqn)
        self.shared.update(fqn.encode("utf-8", "surrogatepass"))
        return self._tensor(local, fqn, grid=sharding.describe(value, fqn))

    def _tensor(self, value: torch.Tensor, fqn: str, *, grid: Grid | None = None, is_parameter: bool = False) -> Any:
        if value.layout is not torch.strided:
            return self._sparse(value, fqn)
        dtype = value.dtype
        if value.is_meta:
            raise UnsupportedValueError(f"{fqn}: a meta tensor has no values; materialize it first")
        if value.is_nested or (dtype not in NAMES and dtype not in CARRIERS):
            kind = "a nested tensor" if value.is_nested else dtype
            raise UnsupportedValueError(f"{fqn}: {kind} cannot be saved")
        address = value.data_ptr() or (0 if grid is None else _address_of_empty(value, grid))
        others = self._by_address.get(address) if address else None
        if others is not None:
            for other, other_grid, node in others:
                if _same_region(value, other) and grid == other_grid:  # else a tensor and this rank's part of it
                    return node
        node: list[Any] = [Tag.TENSOR, fqn]
        stored = value
        if self._ranks is not None and not self._pinned:
            self._share(value, fqn, grid, is_parameter=type(value) is nn.Parameter or is_parameter)
        carrier = CARRIERS.get(dtype)
        if carrier is not None:
            node.append(dtype_name(dtype))
            stored = value.detach().resolve_conj().resolve_neg()
            stored = torch.view_as_real(stored) if carrier.pair else stored.view(carrier.dtype)
            if carrier.pair and fqn in self.flat.grids:
                self.flat.grids[fqn] = _paired(self.flat.grids[fqn])
        self._add(fqn, stored)
        if others is not None:
            others.append((value, grid, node))
        elif address:
            self._by_address[address] = [(value, grid, node)]
        return node

    def _scope_of(self, module: nn.Module, state: Mapping[str, Any]) -> _Scope:
        """Who holds the plain tensors of a module: all of its ``DistributedDataParallel``, or of its largest mesh."""
        parallel = sys.modules.get("torch.nn.parallel")
        if parallel is not None and isinstance(module, parallel.DistributedDataParallel):
            ranks = tuple(sorted(torch.distributed.get_process_group_ranks(cast("Any", module.process_group))))
            self._replicas.update((id(parameter), ranks) for parameter in module.parameters())
            return _Scope(ranks)
        meshes = [_ranks_of(value) for value in state.values() if is_dtensor(value)]
        return _Scope(max(meshes, key=len, default=None))

    def _ranks_of_states(self, optimizer: torch.optim.Optimizer) -> dict[int, tuple[int, ...]]:
        """Who holds the plain tensors that an optimizer keeps: all that hold the parameter, where that is known."""
        found: dict[int, tuple[int, ...]] = {}
        for parameter, state in optimizer.state.items():
            ranks = _ranks_of(parameter) if is_dtensor(parameter) else self._replicas.get(id(parameter))
            if ranks is not None:
                tensors = (value for value in state.values() if isinstance(value, torch.Tensor))
                found.update((id(value), ranks) for value in tensors if not is_dtensor(value))
        return found

    def _share(self, value: torch.Tensor, fqn: str, grid: Grid | None, *, is_parameter: bool) -> None:
        """Note which ranks hold a tensor, where it is not this rank's own."""
        ranks = self._held_by.get(id(value)) if grid is None else None
        if grid is None and ranks is None and self._scope is not None:
            ranks = self._scope.ranks
        if grid is None and ranks is not None:
            grid = sharding.whole(tuple(value.shape), ranks)
        if grid is not None:
            self.flat.grids[fqn] = grid
        elif self._scope is not None:
            self.flat.assumed[fqn] = is_parameter or self._scope.compared

    def _add(self, fqn: str, tensor: torch.Tensor) -> None:
        if fqn in self._fqns or fqn == "__metadata__":
            raise UnsupportedValueError(
                f"{fqn}: two tensors of the state have this name, or it is reserved; rename one"
            )
        self._fqns.add(fqn)
        try:
            self.flat.containers[self.container][fqn] = tensor
        except KeyError:
            self.flat.containers[self.container] = {fqn: tensor}

    def _sparse(self, value: torch.Tensor, fqn: str) -> Any:
        parts = SPARSE_PARTS.get(value.layout)
        if parts is None or value.is_meta:
            raise UnsupportedValueError(f"{fqn}: tensors of layout {value.layout} on {value.device} cannot be saved")
        value = value.detach()
        nodes = {part.strip("_"): self._tensor(getattr(value, part)(), f"{fqn}.{part.strip('_')}") for part in parts}
        coalesced = value.is_coalesced() if value.layout is torch.sparse_coo else None
        return [Tag.SPARSE, str(value.layout).removeprefix("torch."), list(value.shape), coalesced, nodes]

    def _array(self, value: Any, fqn: str) -> Any:
        import numpy as np

        array = np.ascontiguousarray(value).reshape(value.shape)  # ascontiguousarray makes 0-dim arrays 1-dim
        if not array.flags.writeable:
            array = array.copy()
        try:
            return [Tag.NUMPY_ARRAY, self._tensor(torch.from_numpy(array), fqn)]
        except (TypeError, ValueError):  # no such dtype; foreign byte order
            return [Tag.NUMPY_FILE, _to_npy(array)]


@functools.lru_cache(maxsize=256)
def _paired(grid: Grid) -> Grid:
    """The grid of complex numbers that are stored as pairs; one object for each, as plans are found by it."""
    return replace(grid, shape=(*grid.shape, 2), cuts=(*grid.cuts, (0, 2)))


def is_dtensor(value: object) -> bool:
    """Whether a value is a ``DTensor``; without importing what it comes from, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _address_of_empty(shard: torch.Tensor, grid: Grid) -> int:
    """What tells an empty shard from others, for tied tensors have to be tied on all ranks; 0 where nothing does.

    It has no address. But memory of its own, of the size that a shard has elsewhere, is that of no other tensor.
    """
    storage = shard.untyped_storage()
    most = math.prod(max(map(operator.sub, borders[1:], borders)) for borders in grid.cuts) * shard.element_size()
    return -storage._cdata if storage.nbytes() <= most else 0


def _ranks_of(tensor: Any) -> tuple[int, ...]:
    return tuple(sorted(tensor.device_mesh.mesh.flatten().tolist()))


def _is_numpy_scalar(value: Any) -> bool:
    import numpy as np

    return isinstance(value, np.generic) and not isinstance(value, np.record) and not value.dtype.hasobject


def _to_npy(value: Any) -> bytes:
    import numpy as np

    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(value), allow_pickle=False)
    return file.getvalue()


def _same_region(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.device == b.device
        and a.is_conj() == b.is_conj()
        and a.is_neg() == b.is_neg()
    )


def _zone(value: datetime.datetime | datetime.time, fqn: str) -> str | None:
    if value.tzinfo is None or isinstance(value.tzinfo, datetime.timezone):
        return None  # the ISO text carries a fixed offset
    if isinstance(value.tzinfo, zoneinfo.ZoneInfo) and value.tzinfo.key:
        return value.tzinfo.key
    raise UnsupportedValueError(f"{fqn}: a time zone of type {type(value.tzinfo).__qualname__} cannot be saved")


def _naive_iso(value: datetime.datetime | datetime.time, fqn: str) -> list[Any]:
    zone = _zone(value, fqn)
    text = value.isoformat() if zone is None else value.replace(tzinfo=None).isoformat()
    return [text, value.fold, zone]


def _default_dict(flattener: _Flattener, value: Any, fqn: str, depth: int) -> Any:
    if value.default_factory not in FACTORIES:
        raise UnsupportedValueError(f"{fqn}: a defaultdict with factory {value.default_factory!r}; turn it into a dict")
    return [Tag.DEFAULT_DICT, FACTORIES[value.default_factory], flattener._items(value, fqn, depth)]


_Handler = Callable[[_Flattener, Any, str, int], Any]

_HANDLERS: Final[dict[type, _Handler]] = {
    dict: lambda f, v, q, d: f._dict(v, q, d),
    list: lambda f, v, q, d: [Tag.LIST, *f._sequence(v, q, d)],
    tuple: lambda f, v, q, d: [Tag.TUPLE, *f._sequence(v, q, d)],
    set: lambda f, v, q, d: [Tag.SET, *f._sequence(sorted(v, key=repr), q, d)],
    frozenset: lambda f, v, q, d: [Tag.FROZENSET, *f._sequence(sorted(v, key=repr), q, d)],
    collections.OrderedDict: lambda f, v, q, d: [Tag.ORDERED_DICT, f._items(v, q, d)],
    collections.Counter: lambda f, v, q, d: [Tag.COUNTER, f._items(v, q, d)],
    collections.defaultdict: _default_dict,
    collections.deque: lambda f, v, q, d: [Tag.DEQUE, v.maxlen, *f._sequence(v, q, d)],
    complex: lambda f, v, q, d: [Tag.COMPLEX, v.real, v.imag],
    bytearray: lambda f, v, q, d: [Tag.BYTEARRAY, bytes(v)],
    io.BytesIO: lambda f, v, q, d: [Tag.BYTES_IO, v.getvalue(), v.tell()],
    torch.Size: lambda f, v, q, d: [Tag.SIZE, *v],
    torch.dtype: lambda f, v, q, d: [Tag.DTYPE, dtype_name(v)],
    torch.device: lambda f, v, q, d: [Tag.DEVICE, str(v)],
    datetime.datetime: lambda f, v, q, d: [Tag.DATETIME, *_naive_iso(v, q)],
    datetime.date: lambda f, v, q, d: [Tag.DATE, v.isoformat()],
    datetime.time: lambda f, v, q, d: [Tag.TIME, *_naive_iso(v, q)],
    datetime.timedelta: lambda f, v, q, d: [Tag.TIMEDELTA, v.days, v.seconds, v.microseconds],
    pathlib.PurePosixPath: lambda f, v, q, d: [Tag.PURE_PATH, str(v)],
}
