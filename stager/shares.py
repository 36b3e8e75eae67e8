"""Which rank writes which piece of a sharded tensor.

From grids and sizes alone, every rank computes the same owners for all cells. Nothing here
communicates, and nothing has state.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sidesave.stager.sharding import Box, Cuts, Grid, Holders, box_of

Pieces = tuple[tuple[int, int], ...]
"""For each piece of a cell: its end row, and its writer's position among the cell's holders."""

MIN_PIECE_NBYTES: Final = 256 << 10
_SLACK_DIVISOR: Final = 50
"""Balancing cuts off no piece below one digest grid block, nor below 2 % of a rank's bytes."""


@dataclass(frozen=True, slots=True)
class Partition:
    """How a tensor is stored: borders (None if one rank writes it whole) and each cell's writer."""

    cuts: Cuts | None
    owners: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a tensor that a rank writes: ``box``, or None if it writes none of it."""

    layout: Partition
    box: Box | None


def assign_shares(tensors: Mapping[str, tuple[Grid, int]], rank: int) -> dict[str, Share]:
    """The piece of each tensor (FQN -> grid, bytes per element) for ``rank`` to write; at most one.

    All ranks of a tensor compute the same layout, as it depends on its group alone: the tensors
    with equal ``ranks``. In a group, tensors with equal ``holders`` form a class; classes with
    fewer holders of a cell go first. The tensors of a class, laid end to end, form a line. It is
    cut into one stretch for each holder of a cell, so that all holders have the same number of
    bytes in total, earlier classes included. So a class has at most two layouts for each stretch,
    and one for each shape if it is sharded, whatever its number of tensors. If a stretch ends
    within a tensor, its cells are cut in rows, along the first dimension with more than one index:
    pieces are contiguous in memory.

    Guaranteed: of tensors that all ranks of a group hold whole, no rank writes more than the mean,
    plus two rows, plus four times 256 KiB or, if that is more, 2 % of the mean. The same holds in
    each other class, with a holder's part of the largest cells for the mean. Tensors of less than
    512 KiB are never cut. One without elements is written whole.
    """
    kinds: dict[Grid, list[tuple[str, int]]] = {}
    # by identity: hashing a large grid once per tensor would take long
    alike: dict[int, list[tuple[str, int]]] = {}
    for fqn, (grid, itemsize) in tensors.items():
        if id(grid) not in alike:
            alike[id(grid)] = kinds.setdefault(grid, [])
        alike[id(grid)].append((fqn, itemsize))
    groups: defaultdict[tuple[int, ...], defaultdict[Holders, list[Grid]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for grid in kinds:
        groups[grid.ranks][grid.holders].append(grid)
    shares: dict[str, Share] = {}
    for ranks, classes in groups.items():
        loads = dict.fromkeys(ranks, 0)
        for holders in sorted(classes, key=lambda holders: (len(holders[0]), holders)):
            line = [(grid, *tensor) for grid in classes[holders] for tensor in kinds[grid]]
            # Sharded tensors of one shape share layouts where they are neighbours; whole ones do in
            # any order.
            line.sort(key=lambda tensor: (tensor[0].cuts if len(holders) > 1 else (), tensor[1]))
            shares |= _share(line, holders, loads, rank)
    return shares


def _share(
    line: list[tuple[Grid, str, int]], holders: Holders, loads: dict[int, int], rank: int
) -> dict[str, Share]:
    """The shares of one class; ``loads``, the bytes of each rank, grow by them."""
    rows = {id(grid): _rows(grid) for grid, _, _ in line}
    sizes = [(rows[id(grid)][1], rows[id(grid)][2] * itemsize) for grid, _, itemsize in line]
    stretches = _cut_line(
        sizes,
        [max(loads[holder] for holder in position) for position in zip(*holders, strict=True)],
    )
    shares: dict[str, Share] = {}
    distinct: dict[tuple[int, Pieces], tuple[Cuts, Share]] = {}
    itemsizes = Counter[tuple[int, Pieces]]()
    for (grid, fqn, itemsize), pieces in zip(line, stretches, strict=True):
        key = id(grid), pieces
        if key not in distinct:
            cuts, owners = _refine(grid, rows[id(grid)][0], pieces)
            box = box_of(cuts, owners.index(rank)) if rank in owners else None
            distinct[key] = cuts, Share(Partition(cuts if len(owners) > 1 else None, owners), box)
        itemsizes[key] += itemsize
        shares[fqn] = distinct[key][1]
    for key, (cuts, share) in distinct.items():
        cells = itertools.product(
            *([end - begin for begin, end in itertools.pairwise(borders)] for borders in cuts)
        )
        for owner, cell in zip(share.layout.owners, cells, strict=True):
            loads[owner] += math.prod(cell) * itemsizes[key]
    return shares


def _rows(grid: Grid) -> tuple[int, int, int]:
    """Rows the largest cell can be cut into: along which dimension, how many, elements of each."""
    largest = grid.largest_cell
    dim, count = next(((dim, extent) for dim, extent in enumerate(largest) if extent >= 2), (0, 1))
    return dim, count, math.prod(largest) // count


def _cut_line(line: Sequence[tuple[int, int]], loads: Sequence[int]) -> list[Pieces]:
    """Cut tensors (rows, row bytes) end to end into a stretch per holder, given prior ``loads``."""
    total = sum(rows * nbytes for rows, nbytes in line)
    slack = max(MIN_PIECE_NBYTES, _level(loads, total) // _SLACK_DIVISOR)
    # A few small tensors go to the ranks that have least, and are not scattered over all.
    takers = sorted(range(len(loads)), key=loads.__getitem__)[: max(1, total // slack)]
    level = _level([loads[position] for position in takers], total)
    lengths = [0] * len(loads)
    for position in takers:
        lengths[position] = max(level - loads[position], 0)
    ends = list(itertools.accumulate(lengths))
    stretches: list[Pieces] = []
    position = begin = 0
    for rows, nbytes in line:
        pieces: list[tuple[int, int]] = []
        row = 0
        while nbytes and row < rows and ends[position] < begin + rows * nbytes:
            ideal = (2 * (ends[position] - begin) + nbytes) // (2 * nbytes)
            cut = _nearest_cut(ideal, row, rows, -(-slack // nbytes))
            if cut > row:
                pieces.append((cut, position))
            row = cut
            position += 1
        if row < rows:
            pieces.append((rows, position))
        stretches.append(tuple(pieces))
        begin += rows * nbytes
    return stretches


def _level(loads: Iterable[int], total: int) -> int:
    """How high ``total`` bytes stand when they are poured over these loads."""
    return min(
        -(-(total + below) // count)
        for count, below in enumerate(itertools.accumulate(sorted(loads)), 1)
    )


def _nearest_cut(ideal: int, begin: int, end: int, least: int) -> int:
    """The cut nearest to ``ideal`` between rows ``begin`` and ``end``.

    It leaves at least ``least`` rows on each side, or none on one.
    """
    rows = [begin, end]
    if end - begin >= 2 * least:
        rows.append(min(max(ideal, begin + least), end - least))
    return min(rows, key=lambda row: abs(row - ideal))


def _refine(grid: Grid, dim: int, pieces: Pieces) -> tuple[Cuts, tuple[int, ...]]:
    """Cut every cell of a grid into pieces; return the borders and the owner of each new cell."""
    if len(pieces) == 1:
        return grid.cuts, tuple(cell[pieces[0][1]] for cell in grid.holders)
    borders = [0]
    # of each new interval: which old one it is in, and the position of its owner
    parts: list[tuple[int, int]] = []
    for interval, (begin, end) in enumerate(itertools.pairwise(grid.cuts[dim])):
        for row, position in pieces:
            if borders[-1] < min(begin + row, end):
                borders.append(min(begin + row, end))
                parts.append((interval, position))
    counts = [len(intervals) - 1 for intervals in grid.cuts]
    inner = math.prod(counts[dim + 1 :])
    owners = tuple(
        grid.holders[(outer * counts[dim] + interval) * inner + cell][position]
        for outer in range(math.prod(counts[:dim]))
        for interval, position in parts
        for cell in range(inner)
    )
    return (*grid.cuts[:dim], tuple(borders), *grid.cuts[dim + 1 :]), owners
