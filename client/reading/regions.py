"""Boxes of row-major tensors: the cells of a grid that a box meets, and the bytes that hold it.

Arithmetic only.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from sidesave.writer_daemon.format.layout import Box, Layout

Shape = tuple[int, ...]


def whole(shape: Shape) -> Box:
    """The box of a whole tensor."""
    return (0,) * len(shape), shape


def contains(shape: Shape, box: Box) -> bool:
    """Whether ``box`` lies in a tensor of this shape."""
    offsets, extents = box
    return len(shape) == len(offsets) == len(extents) and all(
        offset >= 0 <= extent and offset + extent <= limit
        for offset, extent, limit in zip(offsets, extents, shape, strict=True)
    )


def intersect(first: Box, second: Box) -> Box | None:
    """The intersection of two boxes; None if empty."""
    starts = tuple(map(max, first[0], second[0]))
    extents = tuple(
        min(a + length, b + other) - start
        for a, length, b, other, start in zip(*first, *second, starts, strict=True)
    )
    return (starts, extents) if all(extent > 0 for extent in extents) else None


def within(box: Box, origin: Shape) -> Box:
    """A box relative to ``origin``."""
    return tuple(offset - start for offset, start in zip(box[0], origin, strict=True)), box[1]


def slices(box: Box) -> tuple[slice, ...]:
    """A box as slices."""
    return tuple(slice(offset, offset + extent) for offset, extent in zip(*box, strict=True))


def cells(layout: Layout, shape: Shape, box: Box) -> Iterator[tuple[int, Box]]:
    """Yield owner, offsets and shape of each cell that meets a non-empty box.

    Does not look at the other cells.
    """
    if layout.cuts is None:
        yield layout.owners[0], whole(shape)
        return
    hit = [
        range(bisect_right(borders, offset) - 1, bisect_left(borders, offset + extent))
        for borders, offset, extent in zip(layout.cuts, *box, strict=True)
    ]
    for place in itertools.product(*hit):
        number = 0
        for index, borders in zip(place, layout.cuts, strict=True):
            number = number * (len(borders) - 1) + index
        starts = tuple(borders[index] for index, borders in zip(place, layout.cuts, strict=True))
        stops = (borders[index + 1] for index, borders in zip(place, layout.cuts, strict=True))
        yield (
            layout.owners[number],
            (starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True))),
        )


def spans(shape: Shape, itemsize: int, box: Box, gap_nbytes: int) -> list[tuple[int, int]]:
    """The byte ranges of a non-empty box, ascending; gaps below ``gap_nbytes`` are bridged."""
    ranges = [(0, itemsize)]
    stride = itemsize  # bytes from one index of a dimension to the next
    for extent, offset, count in zip(
        reversed(shape), reversed(box[0]), reversed(box[1]), strict=True
    ):
        start, base = ranges[0][0], offset * stride
        if len(ranges) == 1 and start + stride - ranges[0][1] < gap_nbytes:
            ranges = [(base + start, base + (count - 1) * stride + ranges[0][1])]
        else:
            merged: list[tuple[int, int]] = []
            for index, (begin, end) in itertools.product(range(count), ranges):
                begin, end = base + index * stride + begin, base + index * stride + end
                if merged and begin - merged[-1][1] < gap_nbytes:
                    begin = merged.pop()[0]
                merged.append((begin, end))
            ranges = merged
        stride *= extent
    return ranges


def is_contiguous(shape: Shape, box: Box) -> bool:
    """Whether the bytes of a non-empty box are contiguous.

    They are if it spans each dimension after the first it cuts.
    """
    behind = itertools.dropwhile(lambda pair: pair[1] == 1, zip(shape, box[1], strict=True))
    return all(extent == count for extent, count in itertools.islice(behind, 1, None))


def between(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Elements ``start`` to ``stop`` of a tensor, as boxes in order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = shape[1:]
    size = math.prod(inner)
    row, last = start // size, (stop - 1) // size
    while row <= last:
        begin, end = max(start - row * size, 0), min(stop - row * size, size)
        rows = 1
        if (begin, end) == (0, size):  # whole rows go together
            rows = stop // size - row
            yield (row, *(0,) * len(inner)), (rows, *inner)
        else:
            for offsets, extents in between(inner, begin, end):
                yield (row, *offsets), (1, *extents)
        row += rows


def slabs(shape: Shape, limit: int) -> Iterator[Box]:
    """A tensor cut into contiguous boxes of at most ``limit`` elements, in order."""
    inner = shape[1:]
    size = math.prod(inner)
    if not shape or size * shape[0] <= limit:
        yield whole(shape)
    elif size <= limit:
        rows = limit // size
        for row in range(0, shape[0], rows):
            yield (row, *(0,) * len(inner)), (min(rows, shape[0] - row), *inner)
    else:
        for row, (offsets, extents) in itertools.product(
            range(shape[0]), list(slabs(inner, limit))
        ):
            yield (row, *offsets), (1, *extents)
