"""The contents of two checkpoints and their differences: tensors by value, plain data by encoding.

Memory stays bounded. Tensors with equal digests are read and verified in pieces. Others are read in
batches of 64 MiB, larger ones alone, and measured piece by piece. Pickled values are compared by
digest and never unpickled.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch

from sidesave.client.reading.checkpoint_reader import CheckpointReader
from sidesave.client.reading.stored import built, own_name, without_rank
from sidesave.client.runs import finding
from sidesave.errors import UnsupportedValueError
from sidesave.stager.dtypes import CARRIERS, dtype_name
from sidesave.stager.state import tree
from sidesave.stager.state.tags import container_like
from sidesave.stager.state.tensor_nodes import TensorRef
from sidesave.writer_daemon.format import tensor_file
from sidesave.writer_daemon.format.layout import Box
from sidesave.writer_daemon.format.tensor_file import DIGEST_NBYTES

_BATCH_NBYTES: Final = 64 << 20
_PIECE_ELEMENTS: Final = 64 << 10
"""Elements of a piece, which fits into the CPU's cache in double precision."""
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRIMITIVES: Final = (type(None), bool, int, float, str, bytes)


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor's place in the nest.

    ``fqn`` is that of the tensor it is tied to, or made of, and ``kind`` says how.
    """

    fqn: str
    kind: str = ""
    encoded: bytes = b""

    def __repr__(self) -> str:
        return f"<{self.kind or 'tensor'} {self.fqn}>"


@dataclass(frozen=True, slots=True)
class PickledLeaf:
    """A pickled value, which is not unpickled."""

    nbytes: int
    xxh3_128: str

    def __repr__(self) -> str:
        return f"<pickled, {self.nbytes:,} bytes>"


class Absent:
    """Stands for a plain value that one of two checkpoints lacks."""

    def __repr__(self) -> str:
        return "<absent>"


ABSENT: Final = Absent()


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A tensor as its user knows it; ``item`` is the name at the top of the state."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    item: str

    @property
    def dtype_name(self) -> str:
        """``float32``."""
        return dtype_name(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype_name} {list(self.shape)}"


class Contents:
    """A checkpoint opened for looking into it: its manifest and its contents; a context manager.

    Attributes:
        tensors: Facts by name, in the order of the state; tensors of other ranks come last.

    Raises like ``CheckpointReader``.
    """

    def __init__(self, path: str) -> None:
        self.reader = finding.attempts(path).read(CheckpointReader)
        self.manifest = self.reader.manifest
        self._items = set(self.reader.treespec.keys())
        self._carried: dict[str, torch.dtype] = {}
        self._places: dict[str, None] = {}
        try:
            self.nest()
            stored_names = dict.fromkeys(self.reader.names())
            names = [*(name for name in self._places if name in stored_names), *stored_names]
            stored = {name: self.reader.entry(name) for name in names}
        except BaseException:  # an interrupt leaves no descriptor either
            self.close()
            raise
        self.tensors: dict[str, TensorFacts] = {}
        for name, entry in stored.items():
            fqn = without_rank(name)
            dtype, shape = self._carried.get(name, self._carried.get(fqn)), entry.shape
            if dtype is not None and CARRIERS[dtype].pair:
                shape = shape[:-1]
            item = fqn
            while item and item not in self._items:
                item = item.rpartition(".")[0]
            self.tensors[name] = TensorFacts(dtype or entry.dtype, shape, entry.nbytes, item or fqn)

    def nest(self, only: Callable[[str], bool] = lambda fqn: True) -> dict[str, Any]:
        """Rank 0's state, with a leaf for each tensor."""
        return built(self.reader.treespec, self._leaf, _pickled_leaf, only)

    def plain(self) -> dict[str, Any]:
        """Plain data by FQN; that of other ranks, where it differs from rank 0's, with the rank."""
        leaves = dict(_plain_leaves(self.nest(), ""))
        for rank in range(1, self.manifest.world_size):
            nest = self.reader.read_treespec(rank).build(self._leaf, unpickle=_pickled_leaf)
            for fqn, value in _plain_leaves(nest, ""):
                if fqn not in leaves or _encoded(value) != _encoded(leaves[fqn]):
                    leaves[own_name(fqn, rank)] = value
        return leaves

    def stand_in(self, fqn: str) -> TensorLeaf | Absent:
        """What is shown of an FQN that has no plain data."""
        return TensorLeaf(fqn) if fqn in self.tensors else ABSENT

    def _leaf(self, ref: TensorRef) -> TensorLeaf:
        name = self.reader.name_of(ref)
        self._places.setdefault(name)
        if ref.dtype is not None:
            self._carried[name] = ref.dtype
        if ref.whole is not None:
            return TensorLeaf(name, ref.whole.kind, ref.whole.encoded)
        return TensorLeaf(name, "array" if ref.array else "")

    def close(self) -> None:
        """Release the directory; idempotent."""
        self.reader.close()

    def __enter__(self) -> Contents:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pickled_leaf(data: bytes) -> PickledLeaf:
    return PickledLeaf(len(data), tensor_file.digest(data).hex())


# Plain data ---------------------------------------------------------------------------------------


def children(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return keys and values of a node of the nest; None for a leaf.

    A list that contains only plain values is a leaf, too.
    """
    if isinstance(value, dict):
        return cast("dict[Any, Any]", value).items() or None
    if isinstance(value, (list, tuple, collections.deque)):
        items = cast("list[Any]", value)
        return (
            enumerate(items) if any(not isinstance(item, _PRIMITIVES) for item in items) else None
        )
    return None


def _plain_leaves(value: Any, fqn: str) -> Iterator[tuple[str, Any]]:
    """The leaves that are no tensors of their own, each with its FQN."""
    below = children(value)
    if below is not None:
        for key, item in below:
            yield from _plain_leaves(item, f"{fqn}.{key}" if fqn else str(key))
    elif not (
        isinstance(value, TensorLeaf)
        and not value.kind
        and fqn in (value.fqn, without_rank(value.fqn))
    ):
        yield fqn, value


def _containers(value: Any, fqn: str) -> Iterator[tuple[str, Any]]:
    """The containers that are no leaves, each with its FQN."""
    below = children(value)
    if below is not None:
        yield fqn, value
        for key, item in below:
            yield from _containers(item, f"{fqn}.{key}" if fqn else str(key))


def _forms(one: Any, other: Any) -> tuple[Any, Any]:
    """Two containers without values, and with the keys that both have; sorted unless ordered."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return container_like(one, (), ()), container_like(other, (), ())
    ours, theirs = cast("dict[Any, Any]", one), cast("dict[Any, Any]", other)
    common = {str(key) for key in ours} & {str(key) for key in theirs}
    ordered = isinstance(one, collections.OrderedDict)

    def form(like: dict[Any, Any]) -> Any:
        keys = [key for key in like if str(key) in common]
        keys = keys if ordered else sorted(keys, key=str)
        return container_like(like, keys, [None] * len(keys))

    return form(ours), form(theirs)


def _encoded(value: Any) -> Any:
    """Return a value encoded for comparison: NaN equals NaN, and 1 differs from 1.0."""
    try:
        return tree.flatten({"value": value}).objects
    except UnsupportedValueError:
        return value


# Comparing ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorChange:
    """How the values of a tensor have changed.

    Attributes:
        changed: Elements that differ in any bit.
        elements: All elements.
        max_abs: Largest absolute difference; like the next one, None for a dtype without
            arithmetic.
        relative_l2: L2 norm of the difference relative to the first tensor's, without NaN and
            infinite elements.
        nans: NaNs in the first and in the second.
    """

    fqn: str
    changed: int
    elements: int
    max_abs: float | None = None
    relative_l2: float | None = None
    nans: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class DiffReport:
    """The differences of two checkpoints.

    ``plain`` and ``mismatched`` map FQNs to what each checkpoint has. A container of another type,
    or with keys of another type or order, is in ``plain`` without its values.
    """

    equal: list[str] = field(default_factory=list[str])
    changed: list[TensorChange] = field(default_factory=list[TensorChange])
    mismatched: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    only_first: list[str] = field(default_factory=list[str])
    only_second: list[str] = field(default_factory=list[str])
    plain: dict[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (
            self.changed or self.mismatched or self.only_first or self.only_second or self.plain
        )


def common_nbytes(first: Contents, second: Contents) -> int:
    """The bytes that :func:`compare` reads of each."""
    return sum(first.tensors[fqn].nbytes for fqn in _comparable(first, second))


def _comparable(first: Contents, second: Contents) -> list[str]:
    kinds = {fqn: (facts.dtype, facts.shape) for fqn, facts in second.tensors.items()}
    return [
        fqn for fqn, facts in first.tensors.items() if kinds.get(fqn) == (facts.dtype, facts.shape)
    ]


def compare(
    first: Contents, second: Contents, on_bytes: Callable[[int], None] = lambda nbytes: None
) -> DiffReport:
    """Compare two checkpoints; blocking, reads every tensor that both have, verified.

    Args:
        first: The one that changes are relative to.
        second: The other.
        on_bytes: Called with the number of bytes compared, of one checkpoint, since its last call.

    Raises:
        IntegrityError: A block that was read does not match its digest.
        HostMemoryError: A tensor and its counterpart do not fit in memory.
    """
    comparable = _comparable(first, second)
    equal_kind = set(comparable)
    report = DiffReport(
        only_first=[fqn for fqn in first.tensors if fqn not in second.tensors],
        only_second=[fqn for fqn in second.tensors if fqn not in first.tensors],
    )
    for fqn in first.tensors:
        if fqn in second.tensors and fqn not in equal_kind:
            report.mismatched[fqn] = (str(first.tensors[fqn]), str(second.tensors[fqn]))
    for batch in _batches(comparable, first):
        equal = {
            fqn
            for fqn in batch
            if _fingerprint(first.reader, fqn) == _fingerprint(second.reader, fqn)
        }
        first.reader.check(equal)  # the digests are those of what was written, not of what is there
        second.reader.check(equal)
        others = [fqn for fqn in batch if fqn not in equal]
        before, after = first.reader.read(others), second.reader.read(others)
        for fqn in batch:
            dtype = first.tensors[fqn].dtype
            change = None if fqn in equal else _change(fqn, before.pop(fqn), after.pop(fqn), dtype)
            if change is None:
                report.equal.append(fqn)
            else:
                report.changed.append(change)
            on_bytes(first.tensors[fqn].nbytes)
    old, new = first.plain(), second.plain()
    for fqn in dict.fromkeys([*old, *new]):
        pair = old.get(fqn, first.stand_in(fqn)), new.get(fqn, second.stand_in(fqn))
        if _encoded(pair[0]) != _encoded(pair[1]):
            report.plain[fqn] = pair
    others = dict(_containers(second.nest(), ""))
    for fqn, container in _containers(first.nest(), ""):
        if fqn in others:
            forms = _forms(container, others[fqn])
            if _encoded(forms[0]) != _encoded(forms[1]):
                report.plain[fqn] = forms
    return report


def _fingerprint(reader: CheckpointReader, name: str) -> list[tuple[Box, int, bytes]]:
    """Return a key that tensors of one dtype and shape share only if their bytes are equal.

    Equal tensors may have two keys. A key is made of stored digests, and describes the bytes once
    ``reader.check`` has verified them.
    """
    parts: list[tuple[Box, int, bytes]] = []
    for cell, file, entry in reader.cells(name):
        first, last = file.blocks(entry.offset, entry.offset + entry.nbytes)
        digests = file.digests[first * DIGEST_NBYTES : (last + 1) * DIGEST_NBYTES]
        parts.append((cell, entry.offset - file.borders[first], digests))
    return parts


def _batches(fqns: list[str], contents: Contents) -> Iterator[list[str]]:
    batch: list[str] = []
    room = _BATCH_NBYTES
    for fqn in fqns:
        nbytes = contents.tensors[fqn].nbytes
        if batch and nbytes > room:
            yield batch
            batch, room = [], _BATCH_NBYTES
        batch.append(fqn)
        room -= nbytes
    if batch:
        yield batch


def _change(
    fqn: str, before: torch.Tensor, after: torch.Tensor, dtype: torch.dtype
) -> TensorChange | None:
    carrier = CARRIERS.get(dtype)
    width = 2 if carrier is not None and carrier.pair else 1
    before, after = before.reshape(-1), after.reshape(-1)
    bits = _BITS[before.dtype.itemsize]
    if torch.equal(before.view(bits), after.view(bits)):
        return None
    changed, largest, squares, reference, nans = 0, 0.0, 0.0, 0.0, [0, 0]
    arithmetic = True
    for start in range(0, before.numel(), _PIECE_ELEMENTS):
        pieces = [side[start : start + _PIECE_ELEMENTS] for side in (before, after)]
        differs = pieces[0].view(bits) != pieces[1].view(bits)
        if width > 1:
            differs = differs.view(-1, width).any(1)
        changed += int(differs.count_nonzero())
        try:
            old, new = (_wide(piece, dtype, width) for piece in pieces)
        except NotImplementedError:
            arithmetic = False
            continue
        delta, size = (new - old).abs(), old.abs()
        more = float(delta.dot(delta)), float(size.dot(size))
        if math.isfinite(sum(more)):  # then all elements are finite
            largest = max(largest, float(delta.max()))
        else:
            nans = [
                count + int(values.isnan().sum())
                for count, values in zip(nans, (old, new), strict=True)
            ]
            delta = delta.masked_fill_(~differs, 0.0).nan_to_num_(nan=0.0, posinf=math.inf)
            largest = max(largest, float(delta.max()))
            more = _finite_squares(delta), _finite_squares(size)
        squares += more[0]
        reference += more[1]
    elements = before.numel() // width
    if not arithmetic:
        return TensorChange(fqn, changed, elements)
    relative = math.sqrt(squares / reference) if reference else (math.inf if squares else 0.0)
    return TensorChange(fqn, changed, elements, largest, relative, (nans[0], nans[1]))


def _finite_squares(values: torch.Tensor) -> float:
    finite = values.nan_to_num_(nan=0.0, posinf=0.0)
    return float(finite.dot(finite))


def _wide(piece: torch.Tensor, dtype: torch.dtype, width: int) -> torch.Tensor:
    """Return a piece of stored values in double precision.

    Raises ``NotImplementedError`` if torch cannot convert its dtype.
    """
    if width == 2:
        return torch.view_as_complex(piece.to(torch.float64).view(-1, 2))
    return piece.view(dtype).to(torch.complex128 if dtype.is_complex else torch.float64)
