"""What a sharded tensor is, and which rank writes what of it.

A DTensor describes itself: mesh and placements cut the global tensor into the cells of a :class:`Grid` and say which ranks
hold each cell. From the grids and sizes of the tensors every rank computes the same owners of all cells. Nothing here
communicates, and nothing has state but a cache of a pure function.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from sidesave.errors import UnsupportedValueError

if TYPE_CHECKING:  # takes half a second to import; who holds a DTensor has paid for it
    import torch
    from torch.distributed.tensor import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape, counted in the global tensor."""
Cuts = tuple[tuple[int, ...], ...]
Holders = tuple[tuple[int, ...], ...]
Pieces = tuple[tuple[int, int], ...]
"""Where along a cell each of its pieces ends, and which of the cell's holders writes it."""

MIN_PIECE_NBYTES: Final = 256 << 10
"""No smaller piece is cut off for the sake of balance: one block of the digest grid."""
_SLACK_DIVISOR: Final = 50
"""Nor a smaller part of a rank's bytes than this: 2 % are not worth another cut."""


@dataclass(frozen=True, slots=True)
class Grid:
    """How a tensor is cut, as known by every rank that holds a part.

    Attributes:
        shape: The global shape.
        cuts: Per dimension the ascending borders of its intervals, from 0 to the extent. Only a tensor without elements
            has an empty interval, and it is not cut.
        holders: Per cell, row-major, the global ranks that hold it, ascending; as many for each cell.
        ranks: All ranks of the tensor's mesh, also those with an empty shard, ascending.
    """

    shape: tuple[int, ...]
    cuts: Cuts
    holders: Holders
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """What goes on disk: borders as in a grid, or None where one rank writes all; and for each cell the rank that does."""

    cuts: Cuts | None
    owners: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank does with one tensor: ``box`` is the piece that it writes, None when it writes nothing of it."""

    layout: Layout
    box: Box | None


def whole(shape: Sequence[int], ranks: Iterable[int]) -> Grid:
    """The grid of a tensor that each of ``ranks`` holds whole."""
    ranks = tuple(sorted(ranks))
    return Grid(tuple(shape), tuple((0, extent) for extent in shape), (ranks,), ranks)


def local_box(grid: Grid, rank: int) -> Box | None:
    """The cell that a rank holds; None for an empty shard. A tensor without elements is held whole by every rank."""
    return next((_box(grid.cuts, cell) for cell, holders in enumerate(grid.holders) if rank in holders), None)


def _box(cuts: Sequence[Sequence[int]], cell: int) -> Box:
    intervals: list[tuple[int, int]] = []
    for borders in reversed(cuts):
        cell, index = divmod(cell, len(borders) - 1)
        intervals.append((borders[index], borders[index + 1] - borders[index]))
    intervals.reverse()
    return tuple(offset for offset, _ in intervals), tuple(extent for _, extent in intervals)


def describe(tensor: torch.Tensor, fqn: str) -> Grid:
    """The grid of a DTensor: derived once for a mesh, placements and shape, from then on a look-up.

    Each dimension is cut as ``torch.chunk`` does it, in the order in which FSDP and tensor parallelism did it, which need
    not be the order of the mesh. (torch's ``compute_local_shape_and_global_offset`` names boxes that nobody holds where
    FSDP2 over tensor parallelism is uneven.) A tensor laid out in another order has another local shape on at least one
    rank, and is refused there.

    Raises:
        UnsupportedValueError: It is no DTensor; this rank is not in its mesh; a placement is ``Partial``, unknown, or
            leaves ranks with something else than a box; or the local tensor has not the shape of its box.
    """
    spec: Any = getattr(tensor, "_spec", None)
    if spec is None:
        raise UnsupportedValueError(
            f"{fqn}: a {type(tensor).__name__} does not tell how it is sharded, a DTensor would"
        )
    mesh: DeviceMesh = spec.mesh
    if mesh.get_coordinate() is None:
        raise UnsupportedValueError(f"{fqn}: this rank is not part of the tensor's mesh, {mesh}")
    # The rank is part of the key: slices of one mesh compare equal though each has ranks of its own.
    key = mesh, mesh.get_rank(), spec.placements, getattr(spec, "shard_order", None)
    literal = getattr(spec, "use_strided_shard_as_shard_order", None) is False
    shape: tuple[int, ...] = tuple(tensor.shape)
    try:
        grid, box = _derive(*key, literal, shape)
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{fqn}: {error}") from None
    local: tuple[int, ...] = tuple(getattr(tensor, "_local_tensor").shape)  # noqa: B009 (torch's stubs lack it)
    if local != box[1] if box else math.prod(local):
        raise UnsupportedValueError(
            f"{fqn}: the local tensor has shape {local}, but of {shape} placed as {spec.placements} on a mesh of "
            f"{tuple(mesh.shape)} this rank should hold {box[1] if box else 'nothing'}"
        )
    return grid


@lru_cache(maxsize=1024)
def _derive(
    mesh: DeviceMesh, rank: int, placements: tuple[Placement, ...], order: Any, literal: bool, shape: tuple[int, ...]
) -> tuple[Grid, Box | None]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    sizes = tuple(mesh.mesh.shape)
    cutters = _cutters(placements, sizes, order, literal, shape)
    if 0 in shape:
        return whole(shape, ranks), None
    cuts: list[tuple[int, ...]] = []
    intervals: list[dict[int, int]] = []  # per dimension: the interval of each shard that is not empty
    for extent, mesh_dims in zip(shape, cutters, strict=True):
        spans = [(0, extent)]
        for mesh_dim in mesh_dims:
            spans = [chunk for span in spans for chunk in _chunks(*span, sizes[mesh_dim])]
        filled = [shard for shard, (begin, end) in enumerate(spans) if begin < end]
        cuts.append((0, *(spans[shard][1] for shard in filled)))
        intervals.append({shard: interval for interval, shard in enumerate(filled)})
    holders: list[list[int]] = [[] for _ in range(math.prod(map(len, intervals)))]
    for holder, coordinate in zip(ranks, itertools.product(*map(range, sizes)), strict=True):
        cell = 0
        for mesh_dims, numbers in zip(cutters, intervals, strict=True):
            shard = 0
            for mesh_dim in mesh_dims:
                shard = shard * sizes[mesh_dim] + coordinate[mesh_dim]
            if shard not in numbers:
                break
            cell = cell * len(numbers) + numbers[shard]
        else:
            holders[cell].append(holder)
    grid = Grid(shape, tuple(cuts), tuple(tuple(sorted(cell)) for cell in holders), tuple(sorted(ranks)))
    return grid, local_box(grid, rank)


def _chunks(begin: int, end: int, number: int) -> Iterator[tuple[int, int]]:
    """The intervals of ``torch.chunk``, with the empty ones that it leaves out."""
    step = -(-(end - begin) // number)
    return itertools.pairwise(min(begin + index * step, end) for index in range(number + 1))


def _cutters(
    placements: Sequence[Placement], sizes: Sequence[int], order: Any, literal: bool, shape: Sequence[int]
) -> list[list[int]]:
    """For each dimension of the tensor the mesh dimensions that cut it, in the order in which they did."""
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    factors: list[dict[int, int]] = [{} for _ in shape]  # of each dimension: mesh dimension -> split factor
    for mesh_dim, placement in enumerate(placements):
        if type(placement) is Replicate:
            continue
        if type(placement) not in (Shard, _StridedShard):
            raise UnsupportedValueError(f"a tensor placed as {placement!r} cannot be saved; redistribute it first")
        if not -len(shape) <= placement.dim < len(shape):
            raise UnsupportedValueError(f"{placement!r} does not fit the shape {tuple(shape)}")
        factors[placement.dim][mesh_dim] = getattr(placement, "split_factor", 1)
    told = {entry.tensor_dim: list(entry.mesh_dims) for entry in order or ()}
    cutters: list[list[int]] = []
    for dim, found in enumerate(factors):
        mesh_dims = list(found)
        if any(factor != 1 for factor in found.values()):
            mesh_dims = _decode(found, sizes)
            # Such placements can also be meant literally, from left to right. It is the same if nothing is uneven.
            even = mesh_dims and shape[dim] % math.prod(sizes[mesh_dim] for mesh_dim in mesh_dims) == 0
            if not mesh_dims or (literal and not even):
                raise UnsupportedValueError(f"{tuple(placements)} leaves ranks with several intervals, which is no box")
        elif sorted(told.get(dim, ())) == mesh_dims:
            mesh_dims = told.get(dim, mesh_dims)
        cutters.append(mesh_dims)
    return cutters


def _decode(factors: Mapping[int, int], sizes: Sequence[int]) -> list[int]:
    """The order that split factors stand for: into how many pieces later mesh dimensions had cut a dimension before."""
    order: list[int] = []
    for mesh_dim, factor in reversed(factors.items()):
        pieces = list(itertools.accumulate((sizes[later] for later in order), operator.mul, initial=1))
        if factor not in pieces:
            return []
        order.insert(pieces.index(factor), mesh_dim)
    return order


def assign(tensors: Mapping[str, tuple[Grid, int]], rank: int) -> dict[str, Share]:
    """Which piece of each tensor (FQN -> grid, bytes per element) ``rank`` writes.

    Every rank of a tensor's ``ranks`` comes to the same layout alone, for the layout depends only on the tensors with the
    same ``ranks``, their group; each rank writes at most one piece of a tensor.

    Tensors with equal holders form a class, and within a group the classes with the fewest holders come first. A class is
    laid out as one line, which is cut into as many stretches as its cells have holders, so long that all holders come to
    the same number of bytes, counting those of earlier classes. Hence at most one tensor per stretch is cut further, along
    the first dimension that has an extent, and a group of any number of tensors has few layouts: at most two per holder, and
    one more for each shape of sharded tensors. Tensors below 512 KiB are never cut.

    What is guaranteed: let the level be the bytes per rank if the holders of the largest cells of a class could share them
    without end. No rank writes more than the level, or what it had before, and four times the slack, which is 256 KiB or 2 %
    of the level, and three rows (a row is one index along the dimension that is cut). Where all ranks hold all tensors,
    the level is the mean.
    """
    kinds: dict[Grid, list[tuple[str, int]]] = {}
    found: dict[int, list[tuple[str, int]]] = {}  # by identity: to hash a large grid for each tensor takes too long
    for fqn, (grid, itemsize) in tensors.items():
        if id(grid) not in found:
            found[id(grid)] = kinds.setdefault(grid, [])
        found[id(grid)].append((fqn, itemsize))
    groups: defaultdict[tuple[int, ...], defaultdict[Holders, list[Grid]]] = defaultdict(lambda: defaultdict(list))
    for grid in kinds:
        groups[grid.ranks][grid.holders].append(grid)
    shares: dict[str, Share] = {}
    for ranks, classes in groups.items():
        loads = dict.fromkeys(ranks, 0)
        for holders in sorted(classes, key=lambda holders: (len(holders[0]), holders)):
            line = [(grid, *tensor) for grid in classes[holders] for tensor in kinds[grid]]
            # Side by side, tensors cut in the same way are of few layouts; whole ones are of few in any order.
            line.sort(key=lambda tensor: (tensor[0].cuts if len(holders) > 1 else (), tensor[1]))
            shares |= _share_out(line, holders, loads, rank)
    return {fqn: shares[fqn] for fqn in tensors}


def _share_out(
    line: Sequence[tuple[Grid, str, int]], holders: Holders, loads: dict[int, int], rank: int
) -> dict[str, Share]:
    """The shares of one class; adds to ``loads`` what each rank has to write."""
    rows = {id(grid): _rows(grid) for grid, _, _ in line}
    stretches = _cut_line(
        [(rows[id(grid)][0], rows[id(grid)][1] * itemsize) for grid, _, itemsize in line],
        [max(loads[cell[position]] for cell in holders) for position in range(len(holders[0]))],
    )
    shares: dict[str, Share] = {}
    distinct: dict[tuple[int, Pieces], tuple[Cuts, Share]] = {}
    itemsizes = Counter[tuple[int, Pieces]]()
    for (grid, fqn, itemsize), pieces in zip(line, stretches, strict=True):
        key = id(grid), pieces
        if key not in distinct:
            cuts, owners = _refine(grid, pieces)
            box = _box(cuts, owners.index(rank)) if rank in owners else None
            distinct[key] = cuts, Share(Layout(cuts if len(owners) > 1 else None, owners), box)
        itemsizes[key] += itemsize
        shares[fqn] = distinct[key][1]
    for key, (cuts, share) in distinct.items():
        cells = itertools.product(*([end - begin for begin, end in itertools.pairwise(borders)] for borders in cuts))
        for owner, cell in zip(share.layout.owners, cells, strict=True):
            loads[owner] += math.prod(cell) * itemsizes[key]
    return shares


def _rows(grid: Grid) -> tuple[int, int]:
    """How many rows the largest cell has along the dimension to cut, and elements per row."""
    largest = [max(map(operator.sub, borders[1:], borders)) for borders in grid.cuts]
    rows = next((extent for extent in largest if extent >= 2), 1)
    return rows, math.prod(largest) // rows


def _cut_line(line: Sequence[tuple[int, int]], loads: Sequence[int]) -> list[Pieces]:
    """Cut tensors (rows, bytes per row), one after the other, into a stretch for each holder, given what it has already."""
    total = sum(rows * nbytes for rows, nbytes in line)
    slack = max(MIN_PIECE_NBYTES, _level(loads, total) // _SLACK_DIVISOR)
    # A few small tensors are not scattered over all: no stretch is shorter than the slack.
    by_load = sorted(range(len(loads)), key=lambda position: (loads[position], position))
    used = set(by_load[: max(1, total // slack)])
    level = _level([loads[position] for position in used], total)
    ends = list(
        itertools.accumulate(max(level - load, 0) if position in used else 0 for position, load in enumerate(loads))
    )
    stretches: list[Pieces] = []
    position = 0
    begin = 0
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
    """How high ``total`` bytes stand that are poured over these loads."""
    level = below = 0
    for count, load in enumerate(sorted(loads)):
        if count and level <= load:
            break
        below += load
        level = -(-(total + below) // (count + 1))
    return level


def _nearest_cut(ideal: int, begin: int, end: int, least: int) -> int:
    """The row nearest to ``ideal`` where a tensor can be cut so that no piece of it has less than ``least`` rows."""
    rows = [begin, end]
    if end - begin >= 2 * least:
        rows.append(min(max(ideal, begin + least), end - least))
    return min(rows, key=lambda row: abs(row - ideal))


def _refine(grid: Grid, pieces: Pieces) -> tuple[Cuts, tuple[int, ...]]:
    """Cut every cell of a grid into pieces: the borders, and each cell's owner."""
    if len(pieces) == 1:
        return grid.cuts, tuple(cell[pieces[0][1]] for cell in grid.holders)
    counts = [len(borders) - 1 for borders in grid.cuts]
    dim = next(dim for dim, borders in enumerate(grid.cuts) if max(map(operator.sub, borders[1:], borders)) >= 2)
    borders = [0]
    parts: list[tuple[int, int]] = []  # of each interval from now on: in which one it was, and whose it is
    for interval, (begin, end) in enumerate(itertools.pairwise(grid.cuts[dim])):
        for row, position in pieces:
            if borders[-1] < min(begin + row, end):
                borders.append(min(begin + row, end))
                parts.append((interval, position))
    inner = math.prod(counts[dim + 1 :])
    owners = tuple(
        grid.holders[(outer * counts[dim] + interval) * inner + cell][position]
        for outer in range(math.prod(counts[:dim]))
        for interval, position in parts
        for cell in range(inner)
    )
    return (*grid.cuts[:dim], tuple(borders), *grid.cuts[dim + 1 :]), owners
