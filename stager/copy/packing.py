"""The layout of what is captured in a device's scratch memory: runs of the image, packed by one launch for a dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from sidesave.stager import torch_private

ALIGNMENT: Final = 16
_COPIED_AS_THEY_ARE: Final = frozenset(
    {torch.float32, torch.float64, torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By element size, for other dtypes: the fused copy refuses some, and takes half precision through float32, which may
change the bits of a NaN."""


@dataclass(slots=True)
class Run:
    """Consecutive bytes of the image that lie consecutively in scratch."""

    scratch_offset: int
    image_offset: int
    nbytes: int


_Layout = tuple[int, torch.Size, tuple[int, ...]]
"""Of a packed tensor: where it begins in scratch, in bytes, its shape and its strides."""


class Views:
    """Views of a half in which tensors were packed, kept because the next save mostly packs the same."""

    def __init__(self) -> None:
        self._known: dict[torch.dtype, tuple[list[_Layout], list[torch.Tensor]]] = {}

    def of(self, memory: torch.Tensor, dtype: torch.dtype, group: Group) -> list[torch.Tensor]:
        """One view for each of a group's sources; always of the same ``memory``."""
        known, views = self._known.get(dtype, ([], []))
        if known != group.layouts:
            flat, size = memory.view(group.word), group.word.itemsize
            views = [flat.as_strided(shape, stride, begin // size) for begin, shape, stride in group.layouts]
            self._known[dtype] = group.layouts, views  # both at once, or neither where this is interrupted
        return views


@dataclass(slots=True)
class Group:
    """Sources of one dtype that one launch packs, by their indices; ``word`` is what they are packed as."""

    word: torch.dtype
    indices: list[int] = field(default_factory=list[int])
    layouts: list[_Layout] = field(default_factory=list[_Layout])


@dataclass(slots=True)
class Batch:
    """Where sources lie in a half of the scratch, and where that goes. Keeps no tensor."""

    runs: list[Run] = field(default_factory=list[Run])
    groups: dict[torch.dtype, Group] = field(default_factory=dict[torch.dtype, Group])
    strided: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """What is not contiguous, or lazily conjugated: by itself, for in a fused launch it would slow down all others."""


def lay_out(room: int, captured: list[tuple[int, int]], pool: list[torch.Tensor]) -> Batch:
    """Find a place in ``room`` bytes for sources from the end of ``captured``, until it is full.

    They are given by their indices in ``pool`` and their offsets in the image. What does not fit stays, cut where it
    must be; the pieces are added to the pool.
    """
    batch = Batch()
    last: Run | None = None
    position = 0
    while captured:
        index, offset = captured.pop()
        source = pool[index]
        nbytes = source.nbytes
        follows = last is not None and last.image_offset + last.nbytes == offset
        # With the image's remainder every view of the scratch is as well aligned as its tensor in the image.
        begin = position if follows else position + (offset - position) % ALIGNMENT
        if nbytes > room - begin:
            head, rest = _cut(source, offset, room - begin, whole=not batch.runs)
            for piece, at in reversed(rest):
                pool.append(piece)
                captured.append((len(pool) - 1, at))
            if head is None and batch.runs:
                break
            if head is None:
                continue
            pool.append(head)
            index, source, nbytes = len(pool) - 1, head, head.nbytes
        if last is not None and follows:
            last.nbytes += nbytes
        else:
            last = Run(begin, offset, nbytes)
            batch.runs.append(last)
        position = begin + nbytes
        if not is_plain(source):
            batch.strided.append((index, begin))
            continue
        dtype = source.dtype
        if dtype not in batch.groups:
            batch.groups[dtype] = Group(dtype if dtype in _COPIED_AS_THEY_ARE else _INTEGERS[dtype.itemsize])
        group = batch.groups[dtype]
        group.indices.append(index)
        group.layouts.append((begin, source.shape, source.stride()))
    return batch


def pack(memory: torch.Tensor, batch: Batch, pool: Sequence[torch.Tensor], views: Views) -> None:
    """Copy the sources of a batch into ``memory``, on the current stream."""
    for index, begin in batch.strided:
        source = pool[index]
        memory[begin : begin + source.nbytes].view(source.dtype).view(source.shape).copy_(source)
    for dtype, group in batch.groups.items():
        sources = [pool[index] for index in group.indices]
        if dtype is not group.word:
            sources = [source.view(group.word) for source in sources]
        torch_private.foreach_copy(views.of(memory, dtype, group), sources)


def _cut(
    source: torch.Tensor, offset: int, room: int, *, whole: bool
) -> tuple[torch.Tensor | None, list[tuple[torch.Tensor, int]]]:
    """The head of a tensor that fits into ``room`` bytes, and the rest, with offsets in the image.

    Where not even one row fits there is no head; the rest are then the rows, if the room is a ``whole`` half.
    """
    rows = source.view(-1) if is_plain(source) else source.squeeze()
    rows = rows if rows.dim() else rows.reshape(1)
    row_nbytes = rows.nbytes // rows.shape[0]
    count = max(0, room) // row_nbytes
    if count:
        return rows[:count], [(rows[count:], offset + count * row_nbytes)]
    if not whole:
        return None, [(source, offset)]
    return None, [(row, offset + number * row_nbytes) for number, row in enumerate(rows.unbind())]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes in memory, one after another, are those to be saved."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
