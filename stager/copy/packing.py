"""Packs captured tensors into a device's scratch memory, with one kernel launch for each dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from sidesave.stager import torch_private

ALIGNMENT: Final = 16
HALF_NBYTES: Final = (4 << 20, 32 << 20, 128 << 20)
"""Bytes of a scratch half: the smallest size that fits the captured tensors, else the largest."""
_COPIED_AS_THEY_ARE: Final = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    }
)
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by element size, used in place of other dtypes.

The fused copy refuses some of those, and converts half precision through float32, which may change
the bits of a NaN.
"""


@dataclass(slots=True)
class ScratchRun:
    """A range of bytes that is contiguous both in scratch memory and in the image."""

    scratch_offset: int
    image_offset: int
    nbytes: int


_Layout = tuple[int, torch.Size, tuple[int, ...]]
"""A packed tensor's offset in scratch in bytes, its shape and its strides."""


class Views:
    """Cached views of packed tensors in a scratch half; the next save usually reuses them."""

    def __init__(self) -> None:
        self._by_dtype: dict[torch.dtype, tuple[list[_Layout], list[torch.Tensor]]] = {}

    def of(self, memory: torch.Tensor, dtype: torch.dtype, group: Group) -> list[torch.Tensor]:
        """Return a view for each source of a group; ``memory`` must be the same at each call."""
        layouts, views = self._by_dtype.get(dtype, ([], []))
        if layouts != group.layouts:
            flat, size = memory.view(group.word), group.word.itemsize
            views = [
                flat.as_strided(shape, stride, begin // size)
                for begin, shape, stride in group.layouts
            ]
            self._by_dtype[dtype] = group.layouts, views  # one store, in case of an interrupt
        return views


@dataclass(slots=True)
class Group:
    """Sources of one dtype, by index, that one launch packs as dtype ``word``."""

    word: torch.dtype
    indices: list[int] = field(default_factory=list[int])
    layouts: list[_Layout] = field(default_factory=list[_Layout])


@dataclass(slots=True)
class Batch:
    """The layout of sources in a scratch half, and their image offsets; holds no tensors."""

    runs: list[ScratchRun] = field(default_factory=list[ScratchRun])
    groups: dict[torch.dtype, Group] = field(default_factory=dict[torch.dtype, Group])
    strided: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Index and scratch offset of sources that are strided, or lazily conjugated or negated.

    Each is copied by a launch of its own: one such tensor slows down a fused launch.
    """


def lay_out(room: int, captured: list[tuple[int, int]], pool: list[torch.Tensor]) -> Batch:
    """Lay out sources, taken from the end of ``captured``, in ``room`` bytes until these are full.

    Args:
        room: Size of a half of the scratch, in bytes.
        captured: Index in ``pool`` and offset in the image of each source. Sources that do not fit
            remain in it; a source that fits in part is cut, and its rest is added to both lists.
        pool: The tensors that ``captured`` refers to.
    """
    batch = Batch()
    last: ScratchRun | None = None
    position = 0
    while captured:
        index, offset = captured.pop()
        source = pool[index]
        nbytes = source.nbytes
        follows = last is not None and last.image_offset + last.nbytes == offset
        # Keep the image offset's remainder, so that views of scratch are aligned as in the image.
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
            last = ScratchRun(begin, offset, nbytes)
            batch.runs.append(last)
        position = begin + nbytes
        if not is_plain(source):
            batch.strided.append((index, begin))
            continue
        dtype = source.dtype
        if dtype not in batch.groups:
            batch.groups[dtype] = Group(
                dtype if dtype in _COPIED_AS_THEY_ARE else _INTEGERS[dtype.itemsize]
            )
        group = batch.groups[dtype]
        group.indices.append(index)
        group.layouts.append((begin, source.shape, source.stride()))
    return batch


def pack(memory: torch.Tensor, batch: Batch, pool: Sequence[torch.Tensor], views: Views) -> None:
    """Copy the sources of a batch into ``memory``, on the current stream."""
    for index, begin in batch.strided:
        source = pool[index]
        torch_private.copy_bits(
            memory[begin : begin + source.nbytes].view(source.dtype).view(source.shape), source
        )
    for dtype, group in batch.groups.items():
        sources = [pool[index] for index in group.indices]
        if dtype is not group.word:
            sources = [source.view(group.word) for source in sources]
        torch_private.foreach_copy(views.of(memory, dtype, group), sources)


def _cut(
    source: torch.Tensor, offset: int, room: int, *, whole: bool
) -> tuple[torch.Tensor | None, list[tuple[torch.Tensor, int]]]:
    """Return a tensor's first rows that fit into ``room`` bytes, and the rest with image offsets.

    If no row fits, there is no head; if moreover ``room`` is a ``whole`` half, the rest is one
    tensor for each row.
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
    """Whether the tensor's bytes in memory are the bytes to save, in order."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
