"""Placeholders for what must be read (tensors, this rank's shards, pickled values), and reading them."""

from __future__ import annotations

import enum
import math
import pickle
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch

from sidesave.client.reading.checkpoint_reader import CheckpointReader, Reader, Wanted
from sidesave.client.reading.table_rows import SavedTable
from sidesave.errors import IntegrityError
from sidesave.stager.state import sharding
from sidesave.stager.state.dtypes import CARRIERS
from sidesave.stager.state.treespec import TensorRef, Unbuilt
from sidesave.writer_daemon.format.layout import Box

_PRECISE: Final = re.compile(r"\.step\Z|\.param_groups\.\d+\.")


def may_be_spread() -> bool:
    """Whether there can be a ``DTensor`` in this process."""
    return "torch.distributed.tensor" in sys.modules and torch.distributed.is_initialized()


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """This rank's box of a tensor that is sharded as ``like`` is; None if the rank holds nothing of it."""

    like: Any
    box: Box | None

    @classmethod
    def of(cls, like: Any, fqn: str) -> Shard:
        """The shard of a ``DTensor``; raises ``UnsupportedValueError`` if a rank's part is no box."""
        if like.device_mesh.get_coordinate() is None:
            return cls(like, None)
        box = sharding.local_box(sharding.describe(like, fqn), torch.distributed.get_rank())
        return cls(like, box if box is not None and math.prod(box[1]) else None)

    @classmethod
    def alone(cls, like: Any) -> Shard:
        """The local tensor of a ``DTensor`` in ``PerRank``, where each rank saves it as a whole tensor."""
        shape = tuple(like.to_local().shape)
        return cls(like, ((0,) * len(shape), shape))

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """The local tensor of a rank that holds nothing; no box describes its shape."""
        return torch.empty(self.like.to_local().shape, dtype=dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """A local tensor in host memory, and its shard."""

    shard: Shard
    tensor: torch.Tensor

    def give(self) -> None:
        """Copy it into the live ``DTensor``."""
        if self.shard.box is not None:
            self.shard.like.to_local().copy_(self.tensor)

    def spread(self) -> Any:
        """A ``DTensor`` with it as the local shard; ranks do not communicate."""
        from torch.distributed.tensor import DTensor

        like = self.shard.like
        placements, shape, stride = like.placements, like.shape, like.stride()
        return DTensor.from_local(
            self.tensor, like.device_mesh, placements, run_check=False, shape=shape, stride=stride
        )


@dataclass(slots=True, eq=False)
class TensorLoad:
    """A tensor that will be loaded; whole, unless its target takes a shard.

    A sparse one is rebuilt from its ``parts``. ``is_buffer`` if its target is a buffer of a module. Of a column of a
    table the shape is that of one row.
    """

    ref: TensorRef
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    cast_to: torch.dtype | None = None
    shard: Shard | None = None
    is_buffer: bool = False
    leaf: Unbuilt | None = None
    parts: list[TensorLoad] = field(default_factory=list["TensorLoad"])

    def look_up(self, reader: Reader, cast_to: torch.dtype | None) -> None:
        """Take shape and dtype, after the cast, from the manifest or a record; raises like the reader."""
        if self.ref.table:
            self._look_up_column(reader, cast_to)
            return
        self.name = reader.name_of(self.ref)
        stored = reader.entry(self.name)
        self.dtype, self.shape = stored.dtype, stored.shape
        if self.ref.dtype is not None:
            carrier = CARRIERS[self.ref.dtype]
            if stored.dtype != carrier.dtype or (carrier.pair and stored.shape[-1:] != (2,)):
                text = f"{self.name} is stored as {stored.dtype}{stored.shape}, which is no {self.ref.dtype}"
                raise IntegrityError(f"{reader.path}: {text}")
            self.shape = stored.shape[:-1] if carrier.pair else stored.shape
            self.dtype = self.ref.dtype
        if self.ref.sparse_shape is not None:
            self.shape = self.ref.sparse_shape
        # An optimizer's steps and rates: a cast would lose count, or train at another rate.
        precise = not self.shape and _PRECISE.search(self.ref.fqn) is not None
        if cast_to is not None and self.dtype.is_floating_point and not precise:
            self.dtype = self.cast_to = cast_to
        if self.leaf is not None and self.ref.sparse_shape is not None:
            refs: list[TensorRef] = []
            self.leaf.build(refs.append)
            self.parts = [TensorLoad(ref) for ref in refs if ref.sparse_shape is None]
            for part in self.parts:
                part.look_up(reader, cast_to)

    @property
    def column(self) -> str:
        """Its name in its table."""
        return self.ref.fqn.removeprefix(f"{self.ref.table}.")

    def _look_up_column(self, reader: Reader, cast_to: torch.dtype | None) -> None:
        if not isinstance(reader, CheckpointReader):
            raise IntegrityError(f"{reader.path}: there are no tables in it")
        stored = SavedTable(reader, self.ref.table).column(self.column)
        self.name, self.dtype, self.shape = self.ref.fqn, stored.dtype, stored.shape[1:]
        if cast_to is not None and self.dtype.is_floating_point:
            self.dtype = self.cast_to = cast_to

    @property
    def wanted(self) -> Wanted | None:
        """The box to read; None for nothing."""
        if self.shard is None:
            return self.name, None
        if self.shard.box is None:
            return None
        offsets, shape = self.shard.box
        if self.ref.dtype is not None and CARRIERS[self.ref.dtype].pair:
            offsets, shape = (*offsets, 0), (*shape, 2)
        return self.name, (offsets, shape)


@dataclass(frozen=True, slots=True, eq=False)
class EnumLoad:
    """Stands for an enum member until it is known whether the target holds one of its class."""

    fqn: str
    kind: str
    name: str
    value: Any

    def member(self, kind: type[enum.Enum] | None) -> Any:
        """The member of ``kind``, by name if it was saved from that class, else by value; the value for None."""
        if kind is not None and self.kind == kind_name(kind) and self.name in kind.__members__:
            return kind[self.name]
        return self.value if kind is None else kind(self.value)


def kind_name(kind: type) -> str:
    """The name of a class in a checkpoint."""
    return f"{kind.__module__}:{kind.__qualname__}"


class Pickled:
    """Stands for a pickled value while only names and shapes matter."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __repr__(self) -> str:
        return "<pickled>"


def read_tensors(
    reader: Reader, leaves: Collection[Any], device: torch.device | None, *, verify: bool
) -> dict[TensorLoad | Pickled, Any]:
    """The values of those ``leaves`` that must be read; a shard of a tensor is a :class:`Local`."""
    loads = [leaf for leaf in leaves if isinstance(leaf, TensorLoad)]
    dense = [part for load in loads if not load.ref.table for part in (load.parts or [load])]
    stored = reader.read_boxes([load.wanted for load in dense if load.wanted], verify=verify)
    made: dict[tuple[Wanted, bool, torch.dtype | None], torch.Tensor] = {}

    def tensor(load: TensorLoad) -> Any:
        wanted, shard = load.wanted, load.shard
        if wanted is None:
            assert shard is not None
            return Local(shard, shard.empty(load.dtype))
        key = wanted, load.ref.array, load.cast_to
        if key not in made:  # tied weights come back tied
            made[key] = finished(stored[wanted], load.ref, device, load.cast_to)
        if shard is not None:
            return Local(shard, made[key])
        return made[key].numpy() if load.ref.array else made[key]

    def value(load: TensorLoad) -> Any:
        if load.leaf is None or not load.parts:
            return tensor(load)
        parts = {part.ref: part for part in load.parts}
        return load.leaf.build(lambda ref: tensor(parts[ref]))

    values: dict[TensorLoad | Pickled, Any] = {load: value(load) for load in loads if not load.ref.table}
    columns = [load for load in loads if load.ref.table]
    values |= _read_columns(reader, columns, device, verify=verify)
    # Only now, when everything else has been verified, code from the checkpoint may run.
    values.update({leaf: pickle.loads(leaf.data) for leaf in leaves if isinstance(leaf, Pickled)})
    return values


def _read_columns(
    reader: Reader, loads: Collection[TensorLoad], device: torch.device | None, *, verify: bool
) -> dict[TensorLoad | Pickled, Any]:
    """The columns of tables that are wanted, of this rank's rows."""
    values: dict[TensorLoad | Pickled, Any] = {}
    for table in dict.fromkeys(load.ref.table for load in loads):
        own = [load for load in loads if load.ref.table == table]
        assert isinstance(reader, CheckpointReader)
        size = reader.manifest.world_size if reader.size is None else reader.size
        columns = SavedTable(reader, table).read([load.column for load in own], reader.rank, size, verify=verify)
        values.update({load: finished(columns[load.column], load.ref, device, load.cast_to) for load in own})
    return values


def unpickled(value: Any) -> Any:
    """A key or a set with its pickled values unpickled."""
    if type(value) is Pickled:
        return pickle.loads(value.data)
    if type(value) in (tuple, set, frozenset):
        parts = cast("tuple[Any, ...]", value)
        return type(parts)(map(unpickled, parts))
    return value


def finished(
    tensor: torch.Tensor, ref: TensorRef, device: torch.device | None, dtype: torch.dtype | None
) -> torch.Tensor:
    """A stored tensor in the dtype it was saved from, or cast."""
    if ref.dtype is not None:
        tensor = torch.view_as_complex(tensor) if ref.dtype.is_complex else tensor.view(ref.dtype)
    if ref.array:
        return tensor
    if device is not None:
        tensor = tensor.to(device)
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
