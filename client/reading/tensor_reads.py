"""Gathers boxes of tensors from the cells that hold them: the blocks to read, their destinations.

Contiguous bytes of one cell are read into their final memory. Everything else is assembled in
separate memory: large cells while they are read, piece by piece; small ones, which share blocks
with others, once all is read.
"""

from __future__ import annotations

import functools
import math
import operator
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from sidesave.client.reading import block_file, block_io, regions
from sidesave.client.reading.block_file import BlockFile
from sidesave.client.reading.block_io import ReadRequest
from sidesave.client.reading.stored import Wanted
from sidesave.stager.memory import host_memory
from sidesave.writer_daemon.format.layout import Box
from sidesave.writer_daemon.format.tensor_file import BLOCK_NBYTES, TensorEntry

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_HUGE_NBYTES: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class CellRead:
    """The wanted ``box`` of one cell, relative to the cell, and its ``offsets`` in the result."""

    file: BlockFile
    entry: TensorEntry
    box: Box
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, file: BlockFile, entry: TensorEntry, cell: Box, box: Box) -> CellRead:
        """The part of a cell that is in ``box``; both are boxes of the tensor."""
        common = regions.intersect(cell, box)
        assert common is not None
        within = regions.within(common, cell[0])
        return cls(file, entry, within, regions.within(common, box[0])[0])

    @property
    def is_small(self) -> bool:
        """Whether its blocks hold other tensors too."""
        return self.entry.nbytes < BLOCK_NBYTES

    @property
    def _is_whole(self) -> bool:
        return self.box[1] == self.entry.shape

    def span(self, itemsize: int) -> tuple[int, int]:
        """The offsets in the file of its first byte and its end."""
        if self._is_whole:
            return self.entry.offset, self.entry.offset + self.entry.nbytes
        ((start, stop),) = regions.spans(self.entry.shape, itemsize, self.box, 1 << 63)
        return self.entry.offset + start, self.entry.offset + stop

    def block_ranges(self, itemsize: int) -> list[tuple[int, int]]:
        """First and last block of each range that holds it."""
        if self._is_whole:
            return [self.file.blocks(*self.span(itemsize))]
        spans = regions.spans(self.entry.shape, itemsize, self.box, BLOCK_NBYTES)
        ranges = (
            self.file.blocks(self.entry.offset + start, self.entry.offset + stop)
            for start, stop in spans
        )
        return list(block_io.join(ranges))


@dataclass(slots=True)
class TensorRead:
    """A box of a tensor with all its parts; an empty box has none."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[CellRead]
    _target: torch.Tensor | None = None

    @property
    def stays(self) -> bool:
        """Whether the tensor stays in the memory that it is read into."""
        return len(self.parts) == 1 and regions.is_contiguous(
            self.parts[0].entry.shape, self.parts[0].box
        )

    @property
    def nbytes(self) -> int:
        """The size of the box."""
        return math.prod(self.shape) * self.dtype.itemsize

    def allocate(self) -> None:
        """Allocate memory to assemble it in."""
        if self.nbytes >= _HUGE_NBYTES:
            self._target = torch.frombuffer(block_file.allocate(self.nbytes), dtype=torch.uint8)
        else:
            self._target = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")

    def put(self, part: CellRead, memory: memoryview, begin: int, start: int, stop: int) -> None:
        """Copy the wanted part of bytes ``start`` to ``stop`` of a file.

        ``memory`` begins with byte ``begin``. Elements do not cross these borders: in a large
        tensor these are borders of blocks, which begin with it.
        """
        assert self._target is not None
        entry, itemsize = part.entry, self.dtype.itemsize
        start, stop = max(start - entry.offset, 0), min(stop - entry.offset, entry.nbytes)
        bits, count = _BITS[itemsize], (stop - start) // itemsize
        values = torch.frombuffer(
            memory, dtype=bits, count=count, offset=entry.offset + start - begin
        )
        target = self._target.view(bits).view(self.shape)
        position = 0
        for box in regions.between(entry.shape, start // itemsize, stop // itemsize):
            size = math.prod(box[1])
            common = regions.intersect(box, part.box)
            if common is not None:
                source = values[position : position + size].view(box[1])[
                    regions.slices(regions.within(common, box[0]))
                ]
                offsets, shape = regions.within(common, part.box[0])
                goal = tuple(map(operator.add, offsets, part.offsets)), shape
                target[regions.slices(goal)].copy_(source)
            position += size

    def finished(self) -> torch.Tensor:
        """Return the assembled box."""
        assert self._target is not None
        return self._target.view(self.dtype).view(self.shape)


class WholeRead(NamedTuple):
    """A tensor whose bytes are all in one place; it stays in the memory that they are read into."""

    dtype: torch.dtype
    file: BlockFile
    entry: TensorEntry


class Gathering:
    """Boxes and whole tensors that are read together.

    :attr:`requests` are the reads, :meth:`tensors` the results. Each block is read once for all
    tensors with bytes in it.
    """

    def __init__(
        self, boxes: Mapping[Wanted, TensorRead], wholes: Mapping[Wanted, WholeRead], purpose: str
    ) -> None:
        """Allocate memory.

        Raises ``HostMemoryError``, which names the ``purpose``, if there is not enough.
        """
        ranges: dict[BlockFile, list[tuple[int, int]]] = {}
        away: list[ReadRequest] = []
        self._wholes: dict[BlockFile, list[tuple[Wanted, WholeRead]]] = {}
        for wanted, whole in wholes.items():
            self._wholes.setdefault(whole.file, []).append((wanted, whole))
        for file, pairs in self._wholes.items():
            pairs.sort(key=lambda pair: pair[1].entry.offset)
            ranges[file] = [
                file.blocks(*span) for span in _spans(whole.entry for _, whole in pairs)
            ]
        stays = [box.stays for box in boxes.values()]
        for box, it_stays in zip(boxes.values(), stays, strict=True):
            for part in box.parts:
                blocks = part.block_ranges(box.dtype.itemsize)
                if it_stays or part.is_small:
                    ranges.setdefault(part.file, []).extend(blocks)
                else:
                    put = functools.partial(box.put, part)
                    away += (
                        ReadRequest(part.file, first, last, sink=put) for first, last in blocks
                    )
        self._boxes = boxes
        self._homes = {
            file: [ReadRequest(file, *blocks) for blocks in block_io.join(each)]
            for file, each in ranges.items()
        }
        staying = [request for requests in self._homes.values() for request in requests]
        self._stays = stays
        self._together = [
            box
            for box, it_stays in zip(boxes.values(), stays, strict=True)
            if box.parts and not it_stays
        ]
        host_memory.require(sum(each.nbytes for each in [*staying, *self._together]), purpose)
        for request in staying:
            request.memory = block_file.allocate(request.nbytes)
        for box in self._together:
            box.allocate()
        self.requests: Final = [*staying, *away]

    def tensors(self) -> dict[Wanted, torch.Tensor]:
        """The tensors, once all requests have been read."""
        for box in self._together:
            for part in filter(lambda part: part.is_small, box.parts):
                span = part.span(box.dtype.itemsize)
                home = _home(self._homes[part.file], span[0])
                box.put(part, home.content, home.base, *span)
        tensors = {
            wanted: self._view(box) if it_stays or not box.parts else box.finished()
            for (wanted, box), it_stays in zip(self._boxes.items(), self._stays, strict=True)
        }
        for file, pairs in self._wholes.items():
            homes, end = iter(self._homes[file]), 0
            memory, base = memoryview(b""), 0
            for wanted, (dtype, _, entry) in pairs:
                while entry.offset >= end:
                    home = next(homes)
                    memory, base, end = home.content, home.base, file.borders[home.last + 1]
                count = entry.nbytes // dtype.itemsize
                flat = torch.frombuffer(
                    memory, dtype=dtype, count=count, offset=entry.offset - base
                )
                tensors[wanted] = flat if len(entry.shape) == 1 else flat.view(entry.shape)
        return tensors

    def _view(self, box: TensorRead) -> torch.Tensor:
        if not box.parts:
            return torch.empty(box.shape, dtype=box.dtype, device="cpu")
        (part,) = box.parts
        start, _ = part.span(box.dtype.itemsize)
        home = _home(self._homes[part.file], start)
        flat = torch.frombuffer(
            home.content, dtype=box.dtype, count=math.prod(box.shape), offset=start - home.base
        )
        return flat.view(box.shape)


def _spans(entries: Iterable[TensorEntry]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the bytes of tensors in the order of their offsets.

    Those next to each other are joined.
    """
    start = stop = -1
    for entry in entries:
        if entry.offset > stop >= 0:
            yield start, stop
            start = -1
        start = entry.offset if start < 0 else start
        stop = max(stop, entry.offset + entry.nbytes)
    yield start, stop


def _home(requests: list[ReadRequest], offset: int) -> ReadRequest:
    """The request that holds a byte, from a file's ordered requests."""
    return requests[
        bisect_right(requests, offset, key=lambda request: request.file.borders[request.first]) - 1
    ]
