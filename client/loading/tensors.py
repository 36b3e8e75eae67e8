"""Placeholders for values to read (tensors, this rank's shards, pickles), and reading them."""

from __future__ import annotations

import enum
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from sidesave.client.reading.checkpoint_reader import CheckpointReader
from sidesave.client.reading.stored import Pickled, Reader, Wanted
from sidesave.client.reading.table_rows import SavedTable
from sidesave.client.targets import tensor_memory
from sidesave.client.targets.shards import Local, Shard, in_order
from sidesave.client.targets.tensor_memory import inner_tensors
from sidesave.errors import IntegrityError, StateMismatchError, UnsupportedValueError
from sidesave.stager import torch_private
from sidesave.stager.dtypes import CARRIERS
from sidesave.stager.sharding import is_dtensor
from sidesave.stager.state import subclasses, tree
from sidesave.stager.state.subclasses import kind_name
from sidesave.stager.state.tensor_nodes import CompositeSpec, TensorRef
from sidesave.stager.state.treespec import TreeSpec, Unbuilt


@dataclass(slots=True, eq=False)
class TensorLoad:
    """A tensor that will be loaded; whole, unless its target takes a shard.

    A tensor made of inner tensors is put together from its ``parts``, as the live tensor ``like``
    is, or by a class of ``classes`` by name, which live objects hold. ``is_buffer`` if its target
    is a buffer of a module. For a column of a table the shape is that of one row.
    """

    ref: TensorRef
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    cast_to: torch.dtype | None = None
    shard: Shard | None = None
    is_buffer: bool = False
    leaf: Unbuilt | None = None
    parts: Sequence[TensorLoad] = ()
    like: Any = None
    classes: Mapping[str, type] | None = None
    unpickle: Callable[[bytes], Any] | None = None

    def look_up(self, reader: Reader) -> None:
        """Take shape and dtype from the manifest or a record; raises like the reader."""
        if self.ref.table:
            self._look_up_column(reader)
            return
        self.name = reader.name_of(self.ref)
        stored = reader.entry(self.name)
        self.dtype, self.shape = stored.dtype, stored.shape
        if self.ref.dtype is not None:
            carrier = CARRIERS[self.ref.dtype]
            if stored.dtype != carrier.dtype or (carrier.pair and stored.shape[-1:] != (2,)):
                text = (
                    f"{self.name} is stored as {stored.dtype}{stored.shape}, which is no "
                    f"{self.ref.dtype}"
                )
                raise IntegrityError(f"{reader.path}: {text}")
            self.shape = stored.shape[:-1] if carrier.pair else stored.shape
            self.dtype = self.ref.dtype
        if self.leaf is not None and self.ref.whole is not None:
            self._look_up_parts(reader)

    def _look_up_parts(self, reader: Reader) -> None:
        """Look up its inner tensors."""
        whole = self.ref.whole
        assert whole is not None
        self.parts = [TensorLoad(ref) for ref in _refs(self.leaf) if ref.whole is None]
        for part in self.parts:
            part.look_up(reader)
        values = next(part for part in self.parts if part.name == self.name)
        self.dtype = whole.dtype or values.dtype
        self.shape = values.shape if whole.is_renamed else whole.shape

    def cast(self, dtype: torch.dtype) -> None:
        """Cast it to ``dtype`` when read, if floating-point; inner tensors of others are not."""
        whole = self.ref.whole
        if whole is not None and whole.kind != "sparse" and not whole.is_renamed:
            return
        for load in (self, *self.parts):
            if load.dtype.is_floating_point and not load.ref.array:
                load.dtype = load.cast_to = dtype

    def refuse_class(self, where: str) -> None:
        """Raise ``UnsupportedValueError`` before reading if the tensor's class may not be used."""
        if self.ref.whole is None or self.leaf is None:
            return
        known = self.known_classes
        for whole in (
            ref.whole for ref in _refs(self.leaf) if ref.whole is not None and ref.whole.is_class
        ):
            try:
                if whole.kind not in known or self.like is None:
                    subclasses.wrapper_class(whole.kind, known)
                    assert whole.context is not None
                    whole.context()
            except UnsupportedValueError as error:
                raise UnsupportedValueError(f"{where}: {self.leaf.fqn}: {error}") from error

    def lost_class(self, value: Any) -> str:
        """Its class's name if ``value``, made without a live tensor, is a plain one; else ""."""
        if self.ref.whole is None or not self.ref.whole.is_renamed or self.like is not None:
            return ""
        return self.ref.whole.kind.replace(":", ".") if type(value) is torch.Tensor else ""

    @property
    def known_classes(self) -> Mapping[str, type]:
        """The classes already known: those of the live tensor, and of its inner tensors."""
        return {**(self.classes or {}), **_classes_of(self.like)}

    def put_together(self, parts: Mapping[TensorRef, Any]) -> Any:
        """Build the tensor from ``parts``; ``StateMismatchError`` if it does not fit the target."""
        assert self.leaf is not None
        built = self.leaf.build(parts.__getitem__, self.unpickle)
        try:
            value = subclasses.made(built, self.like, self.known_classes)
        except UnsupportedValueError:
            raise
        except Exception as error:
            kind = self.ref.whole.kind.replace(":", ".") if self.ref.whole is not None else "tensor"
            raise UnsupportedValueError(
                f"{self.leaf.fqn}: the saved parts do not make a {kind} of this version: "
                f"{error!r:.200}"
            ) from error
        if self.like is not None and not _same_lengths(self.like, value):
            raise StateMismatchError(
                f"the checkpoint does not fit, and nothing was loaded:\n  {self.leaf.fqn}: the "
                "rows of the nested tensor have other lengths in the target; load it without a "
                "target"
            )
        return value

    @property
    def column(self) -> str:
        """Its name in its table."""
        return self.ref.fqn.removeprefix(f"{self.ref.table}.")

    def _look_up_column(self, reader: Reader) -> None:
        if not isinstance(reader, CheckpointReader):
            raise IntegrityError(f"{reader.path}: there are no tables in it")
        stored = SavedTable(reader, self.ref.table).column(self.column)
        self.name, self.dtype, self.shape = self.ref.fqn, stored.dtype, stored.shape[1:]

    @property
    def wanted(self) -> Wanted | None:
        """The box to read; None if nothing is to be read."""
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
    """Stands for an enum member until it is known whether the target has one of its class."""

    fqn: str
    kind: str
    name: str
    value: Any

    def member(self, kind: type[enum.Enum]) -> enum.Enum:
        """The member of ``kind``: by name if saved from it, else by value."""
        is_own = self.kind == kind_name(kind) and self.name in kind.__members__
        return kind[self.name] if is_own else kind(self.value)


def read_tensors(
    reader: Reader,
    leaves: Collection[Any],
    device: torch.device | None,
    *,
    verify: bool,
    fresh: bool = False,
) -> dict[TensorLoad | Pickled, Any]:
    """The values of those ``leaves`` that must be read; a shard of a tensor is a :class:`Local`.

    Values that the caller keeps (``fresh``) are aligned, and so are arrays; others are only copied
    from.
    """
    loads = [leaf for leaf in leaves if isinstance(leaf, TensorLoad)]
    for load in loads:
        load.refuse_class(reader.path)
    dense = [part for load in loads if not load.ref.table for part in (load.parts or [load])]
    stored = reader.read_boxes([load.wanted for load in dense if load.wanted], verify=verify)
    made: dict[Any, torch.Tensor] = {}

    def tensor(load: TensorLoad) -> Any:
        wanted, shard = load.wanted, load.shard
        if wanted is None:
            assert shard is not None
            return Local(shard, shard.empty(load.dtype), load.ref.order)
        key = wanted, load.ref.array, load.ref.order, load.cast_to
        if key not in made:  # tied weights come back tied
            whole = finished(stored[wanted], load.ref, device, load.cast_to)
            made[key] = tensor_memory.aligned(whole) if fresh or load.ref.array else whole
        if shard is not None:
            return Local(shard, made[key], load.ref.order)
        return made[key].numpy() if load.ref.array else made[key]

    def value(load: TensorLoad) -> Any:
        if load.leaf is None or not load.parts:
            return tensor(load)
        key = load.ref.whole, id(load.like), *((part.name, part.ref.dtype) for part in load.parts)
        if key not in made:
            parts = {part.ref: tensor(part) for part in load.parts}
            made[key] = load.put_together(
                {
                    ref: part.tensor if isinstance(part, Local) else part
                    for ref, part in parts.items()
                }
            )
        return made[key] if load.shard is None else Local(load.shard, made[key])

    values: dict[TensorLoad | Pickled, Any] = {
        load: value(load) for load in loads if not load.ref.table
    }
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
        columns = SavedTable(reader, table).read(
            [load.column for load in own], reader.rank, size, verify=verify
        )
        values.update(
            {load: finished(columns[load.column], load.ref, device, load.cast_to) for load in own}
        )
    return values


def finished(
    tensor: torch.Tensor, ref: TensorRef, device: torch.device | None, dtype: torch.dtype | None
) -> torch.Tensor:
    """A stored tensor in the dtype and memory format it was saved from, or cast."""
    if ref.dtype is not None and ref.dtype.is_complex:
        # torch copies 16 bytes at a time
        tensor = torch.view_as_complex(tensor_memory.aligned(tensor))
    if ref.order is not None:
        tensor = in_order(tensor, ref.fqn, ref.order)
    if ref.array:
        return tensor
    if device is not None:
        tensor = tensor.to(device)
    if ref.dtype is not None and not ref.dtype.is_complex:
        tensor = tensor.view(ref.dtype)
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


# Tensors that are made of others ------------------------------------------------------------------


def _refs(leaf: Unbuilt | None) -> list[TensorRef]:
    """References to all parts of a tensor; those of composite parts come after their own parts."""
    refs: list[TensorRef] = []
    assert leaf is not None
    leaf.build(refs.append, Pickled)
    return refs


def _classes_of(tensor: Any) -> dict[str, type]:
    """The classes of a live tensor and of its inner tensors, by name."""
    classes = (
        {kind_name(type(tensor)): cast("type", type(tensor))}
        if isinstance(tensor, torch.Tensor)
        else {}
    )
    for part in inner_tensors(tensor):
        classes |= _classes_of(part)
    return classes


def note_classes(leaves: Mapping[Any, Any], live: Mapping[Any, Any]) -> None:
    """Note the tensor classes in ``live``, an object's state, for leaves made of inner tensors."""
    loads = {
        path: leaf for path, leaf in leaves.items() if isinstance(leaf, TensorLoad) and leaf.parts
    }
    classes = {
        name: kind
        for value in live.values()
        if inner_tensors(value)
        for name, kind in _classes_of(value).items()
    }
    for path, load in loads.items():
        like, load.classes = live.get(path), classes
        is_of_class = load.ref.whole is not None and load.ref.whole.is_class
        if (
            is_of_class
            and isinstance(like, torch.Tensor)
            and not (is_dtensor(like) or composite_problem(load, like))
        ):
            load.like = like


def _same_lengths(live: Any, value: Any) -> bool:
    if live.layout is torch.jagged:
        (_, own), (_, saved) = torch_private.jagged_parts(live), torch_private.jagged_parts(value)
        return all(
            torch.equal(own[name].cpu(), saved[name])
            for name in ("offsets", "lengths")
            if name in own
        )
    return all(
        _same_lengths(*pair)
        for pair in zip(inner_tensors(live), inner_tensors(value), strict=False)
    )


def composite_problem(saved: TensorLoad, target: torch.Tensor) -> str:
    """The reason why a live tensor cannot receive a saved one; "" if it can.

    At least one of them is made of inner tensors.
    """
    ranks = tuple(range(torch.distributed.get_world_size())) if is_dtensor(target) else None
    try:
        flat = tree.flatten({"x": target}, allow_pickle=True, ranks=ranks)
    except UnsupportedValueError as error:
        return str(error).removeprefix("x: ")
    leaf = TreeSpec(flat.objects, "the target").leaves(unpickle=Pickled).leaves["x",]
    every = {fqn: tensor for tensors in flat.containers.values() for fqn, tensor in tensors.items()}
    own = [ref for ref in _refs(leaf) if ref.whole is None or not ref.whole.is_renamed]
    refs = [ref for ref in _refs(saved.leaf) if ref.whole is None or not ref.whole.is_renamed]
    loads = {part.ref: part for part in (saved.parts or [saved])}
    kinds = [_kind(each[-1]) for each in (refs, own)]
    if kinds[0] != kinds[1]:
        return f"the checkpoint holds {kinds[0]}, the target is {kinds[1]}"
    for ref, here in zip(refs, own, strict=False):
        if ref.whole is not None and here.whole is not None:
            if ref.whole != here.whole:
                return (
                    f"it is another {_kind(ref)[2:]} in the checkpoint: "
                    f"{_differing(ref.whole, here.whole)} differ"
                )
            continue
        if ref.whole is not None or here.whole is not None:
            return "its inner tensors are of other kinds in the checkpoint"
        size = (
            flat.grids[here.fqn].shape if here.fqn in flat.grids else tuple(every[here.fqn].shape)
        )
        stored, name = (
            every[here.fqn],
            ref.fqn.removeprefix(f"{saved.leaf.fqn}." if saved.leaf else ""),
        )
        shape = size[:-1] if here.dtype is not None and CARRIERS[here.dtype].pair else size
        pair = (loads[ref].dtype, loads[ref].shape), (here.dtype or stored.dtype, shape)
        if pair[0] != pair[1]:
            saved_as, held_as = (f"{dtype} {list(each)}" for dtype, each in pair)
            return f"{name} is {saved_as} in the checkpoint, {held_as} in the target"
    return "" if len(refs) == len(own) else "it has other inner tensors in the checkpoint"


def _kind(ref: TensorRef) -> str:
    return "a plain tensor" if ref.whole is None else f"a {ref.whole.kind.replace(':', '.')} tensor"


def _differing(one: CompositeSpec, other: CompositeSpec) -> str:
    fields = {"shape": "shapes", "dtype": "dtypes", "about": "contexts or strides"}
    return " and ".join(
        text for field, text in fields.items() if getattr(one, field) != getattr(other, field)
    )
