"""How a sharded tensor is cut, and which rank writes which piece of it.

A DTensor describes itself: mesh and placements cut the global tensor into the cells of a :class:`Grid` and say which
ranks hold each cell. From grids and sizes alone, every rank computes the same owners for all cells. Nothing here
communicates, and nothing has state but the caches of two pure functions.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from sidesave.errors import UnsupportedValueError

if TYPE_CHECKING:  # half a second to import; who holds a DTensor has paid for it
    import torch
    from torch.distributed.device_mesh import DeviceMesh

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape, counted in the global tensor."""
Cuts = tuple[tuple[int, ...], ...]
Holders = tuple[tuple[int, ...], ...]
Pieces = tuple[tuple[int, int], ...]
"""Of each piece of a cell: the row where it ends, and which of the cell's holders writes it."""

MIN_PIECE_NBYTES: Final = 256 << 10
_SLACK_DIVISOR: Final = 50
"""For the sake of balance no piece is cut off below one block of the digest grid, nor below 2 % of a rank's bytes."""


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
    """What goes on disk: the borders, None where one rank writes all, and for each cell the rank that writes it."""

    cuts: Cuts | None
    owners: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank does with one tensor: ``box`` is the piece that it writes, None when it writes nothing of it."""

    layout: Layout
    box: Box | None


@lru_cache(maxsize=1024)
def whole(shape: tuple[int, ...], holders: tuple[int, ...], ranks: tuple[int, ...] | None = None) -> Grid:
    """The grid of a tensor that each of ``holders`` holds whole: one object, as of a DTensor, for all of its kind.

    ``ranks`` are those among which the bytes are divided, with other tensors; None for ``holders``.
    """
    holders = tuple(sorted(holders))
    return Grid(
        tuple(shape),
        tuple((0, extent) for extent in shape),
        (holders,),
        holders if ranks is None else tuple(sorted(ranks)),
    )


def local_box(grid: Grid, rank: int) -> Box | None:
    """The cell that a rank holds; None for an empty shard. A tensor without elements counts as held whole by all."""
    return next((_box(grid.cuts, cell) for cell, holders in enumerate(grid.holders) if rank in holders), None)


def _box(cuts: Cuts, cell: int) -> Box:
    intervals: list[tuple[int, int]] = []
    for borders in reversed(cuts):
        cell, index = divmod(cell, len(borders) - 1)
        intervals.append((borders[index], borders[index + 1] - borders[index]))
    intervals.reverse()
    return tuple(offset for offset, _ in intervals), tuple(extent for _, extent in intervals)


def describe(tensor: torch.Tensor, fqn: str) -> Grid:
    """The grid of a DTensor: derived once for each mesh, placements and shape, then looked up (2 us).

    Dimensions are cut as ``torch.chunk`` does it, in the order in which tensor parallelism and FSDP did it, which need
    not be that of the mesh. (Where that is uneven, torch's own ``compute_local_shape_and_global_offset`` tells of boxes
    that nobody holds.) Where a tensor has come about by reading strided placements from left to right instead, and it
    makes a difference, the local tensor of at least one rank has another shape, and that rank refuses it.

    Raises:
        UnsupportedValueError: It is no DTensor; this rank is not in its mesh; a placement is ``Partial``, unknown, or
            leaves ranks with more than one box; or the local tensor does not have the shape of its box.
    """
    spec: Any = getattr(tensor, "_spec", None)
    if spec is None:
        raise UnsupportedValueError(f"{fqn}: a {type(tensor).__name__} does not tell how it is sharded; use a DTensor")
    mesh: DeviceMesh = spec.mesh
    if mesh.get_coordinate() is None:
        raise UnsupportedValueError(f"{fqn}: this rank is not in the mesh of the tensor, {mesh}")
    order = getattr(spec, "shard_order", None)
    literal = getattr(spec, "use_strided_shard_as_shard_order", None) is False
    shape = tuple(tensor.shape)
    try:
        # The rank is part of the key: slices of one mesh are equal though each has ranks of its own.
        grid, box = _derive(mesh, mesh.get_rank(), spec.placements, order, literal, shape)
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{fqn}: {error}") from None
    local: tuple[int, ...] = tuple(getattr(tensor, "_local_tensor").shape)  # noqa: B009 (unknown to torch's stubs)
    if (math.prod(local) != 0) if box is None else (local != box[1]):
        raise UnsupportedValueError(
            f"{fqn}: of shape {shape}, placed as {spec.placements} on a mesh of {tuple(mesh.shape)}, this rank should "
            f"hold {'nothing' if box is None else box[1]}, but the local tensor has shape {local}"
        )
    return grid


@lru_cache(maxsize=1024)
def _derive(
    mesh: DeviceMesh, rank: int, placements: tuple[Any, ...], order: Any, literal: bool, shape: tuple[int, ...]
) -> tuple[Grid, Box | None]:
    ranks: list[int] = mesh.mesh.flatten().tolist()  # pyright: ignore[reportUnknownVariableType]
    sizes = tuple(mesh.mesh.shape)
    cutters = _cutters(placements, sizes, order, literal, shape)
    if 0 in shape:
        return whole(shape, tuple(ranks)), None
    cuts: list[tuple[int, ...]] = []
    intervals: list[dict[tuple[int, ...], int]] = []  # of each dimension: the cutters' coordinates -> which interval
    for extent, mesh_dims in zip(shape, cutters, strict=True):
        spans = [(0, extent)]
        for mesh_dim in mesh_dims:
            spans = [chunk for span in spans for chunk in _chunks(*span, sizes[mesh_dim])]
        coordinates = itertools.product(*(range(sizes[mesh_dim]) for mesh_dim in mesh_dims))
        filled = [at for at, (begin, end) in zip(coordinates, spans, strict=True) if begin < end]
        cuts.append((0, *(end for begin, end in spans if begin < end)))
        intervals.append({at: interval for interval, at in enumerate(filled)})
    cells: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for holder, coordinate in zip(ranks, itertools.product(*map(range, sizes)), strict=True):
        cell = tuple(
            places.get(tuple(coordinate[mesh_dim] for mesh_dim in mesh_dims), -1)
            for places, mesh_dims in zip(intervals, cutters, strict=True)
        )
        if -1 not in cell:
            cells[cell].append(holder)
    grid = Grid(shape, tuple(cuts), tuple(tuple(sorted(cells[cell])) for cell in sorted(cells)), tuple(sorted(ranks)))
    return grid, local_box(grid, rank)


def _chunks(begin: int, end: int, count: int) -> Iterable[tuple[int, int]]:
    """The intervals of ``torch.chunk``, and the empty ones that it leaves out."""
    step = -(-(end - begin) // count)
    return itertools.pairwise(min(begin + index * step, end) for index in range(count + 1))


def _cutters(
    placements: tuple[Any, ...], sizes: Sequence[int], order: Any, literal: bool, shape: tuple[int, ...]
) -> list[list[int]]:
    """For each dimension of the tensor, the mesh dimensions that cut it, in the order in which they did."""
    from torch.distributed.tensor.placement_types import (
        Replicate,
        Shard,
        _StridedShard,  # pyright: ignore[reportPrivateUsage] - not with the others, which take torch to import
    )

    factors: list[dict[int, int]] = [{} for _ in shape]  # of each dimension: mesh dimension -> split factor
    for mesh_dim, placement in enumerate(placements):
        if type(placement) is Replicate:
            continue
        if type(placement) not in (Shard, _StridedShard):
            raise UnsupportedValueError(f"a tensor placed as {placement!r} cannot be saved; redistribute it first")
        if not -len(shape) <= placement.dim < len(shape):
            raise UnsupportedValueError(f"{placement!r} does not fit a tensor of shape {shape}")
        factors[placement.dim][mesh_dim] = getattr(placement, "split_factor", 1)
    stated_orders = {entry.tensor_dim: list(entry.mesh_dims) for entry in order or ()}
    cutters: list[list[int]] = []
    for dim, (extent, split) in enumerate(zip(shape, factors, strict=True)):
        mesh_dims = _decode(split, sizes)
        even = extent % math.prod(sizes[mesh_dim] for mesh_dim in split) == 0
        # Results of views mean such placements literally, from left to right; it comes to the same where all is even.
        if mesh_dims is None or (literal and not even and mesh_dims != list(split)):
            raise UnsupportedValueError(f"placed as {placements}, a rank holds several intervals, which is no box")
        if dim in stated_orders and sorted(stated_orders[dim]) == mesh_dims == list(split):
            mesh_dims = stated_orders[dim]
        cutters.append(mesh_dims)
    return cutters


def _decode(factors: dict[int, int], sizes: Sequence[int]) -> list[int] | None:
    """The order in which mesh dimensions cut: a split factor is how many pieces those after it had made before it."""
    order: list[int] = []
    for mesh_dim, factor in reversed(factors.items()):
        pieces = list(itertools.accumulate((sizes[later] for later in order), operator.mul, initial=1))
        if factor not in pieces:
            return None
        order.insert(pieces.index(factor), mesh_dim)
    return order


def assign(tensors: Mapping[str, tuple[Grid, int]], rank: int) -> dict[str, Share]:
    """Which piece of each tensor (FQN -> grid, bytes per element) ``rank`` writes: at most one of each.

    All ranks of a tensor come to the same layout, for it depends on its group alone: the tensors with equal ``ranks``.
    In a group, tensors with equal ``holders`` form a class; classes of which fewer ranks hold a cell go first. Laid end
    to end, the tensors of a class are a line. It is cut into one stretch for each holder of a cell, so long that, with
    what earlier classes gave them, all come to the same number of bytes. So a class has at most two layouts for each
    stretch, and one for each shape if it is sharded, however many tensors it has. Where a stretch ends within a tensor,
    its cells are cut in rows, along the first dimension with more than one index: pieces are contiguous in memory.

    Guaranteed: of tensors that all ranks of a group hold whole, no rank writes more than the mean, plus two rows, plus
    four times 256 KiB or, if that is more, 2 % of the mean. The same holds in each other class, with a holder's part of
    the largest cells for the mean. Tensors of less than 512 KiB are never cut. One without elements is written whole.
    """
    kinds: dict[Grid, list[tuple[str, int]]] = {}
    alike: dict[int, list[tuple[str, int]]] = {}  # by identity: hashing a large grid once per tensor would take long
    for fqn, (grid, itemsize) in tensors.items():
        if id(grid) not in alike:
            alike[id(grid)] = kinds.setdefault(grid, [])
        alike[id(grid)].append((fqn, itemsize))
    groups: defaultdict[tuple[int, ...], defaultdict[Holders, list[Grid]]] = defaultdict(lambda: defaultdict(list))
    for grid in kinds:
        groups[grid.ranks][grid.holders].append(grid)
    shares: dict[str, Share] = {}
    for ranks, classes in groups.items():
        loads = dict.fromkeys(ranks, 0)
        for holders in sorted(classes, key=lambda holders: (len(holders[0]), holders)):
            line = [(grid, *tensor) for grid in classes[holders] for tensor in kinds[grid]]
            # Sharded tensors of one shape share layouts where they are neighbours; whole ones do in any order.
            line.sort(key=lambda tensor: (tensor[0].cuts if len(holders) > 1 else (), tensor[1]))
            shares |= _share(line, holders, loads, rank)
    return shares


def _share(line: list[tuple[Grid, str, int]], holders: Holders, loads: dict[int, int], rank: int) -> dict[str, Share]:
    """The shares of one class; ``loads``, the bytes of each rank, grow by them."""
    rows = {id(grid): _rows(grid) for grid, _, _ in line}
    sizes = [(rows[id(grid)][1], rows[id(grid)][2] * itemsize) for grid, _, itemsize in line]
    stretches = _cut_line(sizes, [max(loads[holder] for holder in position) for position in zip(*holders, strict=True)])
    shares: dict[str, Share] = {}
    distinct: dict[tuple[int, Pieces], tuple[Cuts, Share]] = {}
    itemsizes = Counter[tuple[int, Pieces]]()
    for (grid, fqn, itemsize), pieces in zip(line, stretches, strict=True):
        key = id(grid), pieces
        if key not in distinct:
            cuts, owners = _refine(grid, rows[id(grid)][0], pieces)
            box = _box(cuts, owners.index(rank)) if rank in owners else None
            distinct[key] = cuts, Share(Layout(cuts if len(owners) > 1 else None, owners), box)
        itemsizes[key] += itemsize
        shares[fqn] = distinct[key][1]
    for key, (cuts, share) in distinct.items():
        cells = itertools.product(*([end - begin for begin, end in itertools.pairwise(borders)] for borders in cuts))
        for owner, cell in zip(share.layout.owners, cells, strict=True):
            loads[owner] += math.prod(cell) * itemsizes[key]
    return shares


def _rows(grid: Grid) -> tuple[int, int, int]:
    """The rows into which the largest cell can be cut: along which dimension, how many, elements of each."""
    largest = [max(map(operator.sub, borders[1:], borders)) for borders in grid.cuts]
    dim, count = next(((dim, extent) for dim, extent in enumerate(largest) if extent >= 2), (0, 1))
    return dim, count, math.prod(largest) // count


def _cut_line(line: Sequence[tuple[int, int]], loads: Sequence[int]) -> list[Pieces]:
    """Cut tensors (rows, bytes per row), end to end, into a stretch for each holder, who has ``loads`` already."""
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
    return min(-(-(total + below) // count) for count, below in enumerate(itertools.accumulate(sorted(loads)), 1))


def _nearest_cut(ideal: int, begin: int, end: int, least: int) -> int:
    """Where to cut rows ``begin`` to ``end``, if at all, so that no piece has less than ``least`` of them."""
    rows = [begin, end]
    if end - begin >= 2 * least:
        rows.append(min(max(ideal, begin + least), end - least))
    return min(rows, key=lambda row: abs(row - ideal))


def _refine(grid: Grid, dim: int, pieces: Pieces) -> tuple[Cuts, tuple[int, ...]]:
    """Cut every cell of a grid into pieces: the borders, and who owns each of the cells that result."""
    if len(pieces) == 1:
        return grid.cuts, tuple(cell[pieces[0][1]] for cell in grid.holders)
    borders = [0]
    parts: list[tuple[int, int]] = []  # of each new interval: which old one it is in, and the position of its owner
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
