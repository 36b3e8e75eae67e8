"""How a sharded tensor is cut, and which ranks hold each part.

A DTensor describes itself: mesh and placements cut the global tensor into the cells of a
:class:`Grid` and say which ranks hold each cell. Nothing here communicates, and nothing has state
but the caches of pure functions. :mod:`sidesave.stager.shares` divides the cells among writers.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import operator
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from sidesave.errors import UnsupportedValueError

if TYPE_CHECKING:  # half a second to import; who holds a DTensor has paid for it
    import torch
    from torch.distributed.device_mesh import DeviceMesh

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape, counted in the global tensor."""
Cuts = tuple[tuple[int, ...], ...]
Holders = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """How a tensor is cut, as known by every rank that holds a part.

    Attributes:
        shape: The global shape.
        cuts: Per dimension the ascending borders of its intervals, from 0 to the extent. Only a
            tensor without elements has an empty interval, and it is not cut.
        holders: Per cell, row-major, the global ranks that hold it, ascending; as many for each
            cell.
        ranks: All ranks of the tensor's mesh, also those with an empty shard, ascending.
    """

    shape: tuple[int, ...]
    cuts: Cuts
    holders: Holders
    ranks: tuple[int, ...]

    @property
    def largest_cell(self) -> list[int]:
        """The longest interval of each dimension."""
        return [max(map(operator.sub, borders[1:], borders)) for borders in self.cuts]


@lru_cache(maxsize=1024)
def whole(
    shape: tuple[int, ...], holders: tuple[int, ...], ranks: tuple[int, ...] | None = None
) -> Grid:
    """The grid of a tensor that all ``holders`` hold whole: one cached object for all of its kind.

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
    """The cell of a rank; None for an empty shard. An empty tensor counts as held whole by all."""
    return next(
        (box_of(grid.cuts, cell) for cell, holders in enumerate(grid.holders) if rank in holders),
        None,
    )


def box_of(cuts: Cuts, cell: int) -> Box:
    """The box of a cell, by its row-major number."""
    intervals: list[tuple[int, int]] = []
    for borders in reversed(cuts):
        cell, index = divmod(cell, len(borders) - 1)
        intervals.append((borders[index], borders[index + 1] - borders[index]))
    intervals.reverse()
    return tuple(offset for offset, _ in intervals), tuple(extent for _, extent in intervals)


def placements_text(tensor: torch.Tensor) -> str:
    """A DTensor's placements, one per mesh dimension: ``R``, ``S0``, or ``S0/2`` if strided."""
    texts: list[str] = []
    for placement in getattr(tensor, "_spec").placements:  # noqa: B009 (unknown to torch's stubs)
        if hasattr(placement, "dim"):
            factor = getattr(placement, "split_factor", 1)
            texts.append(
                f"S{placement.dim % max(tensor.ndim, 1)}" + (f"/{factor}" if factor != 1 else "")
            )
        else:
            texts.append("R")
    return " ".join(texts)


def placements_of(text: str) -> list[Any]:
    """The placements that :func:`placements_text` has written."""
    from torch.distributed.tensor.placement_types import (
        Replicate,
        Shard,
        _StridedShard,  # pyright: ignore[reportPrivateUsage]
    )

    placements: list[Any] = []
    for each in text.split():
        dim, _, factor = each[1:].partition("/")
        if each == "R":
            placements.append(Replicate())
        else:
            placements.append(
                _StridedShard(int(dim), split_factor=int(factor)) if factor else Shard(int(dim))
            )
    return placements


def placed(shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Any]) -> torch.Tensor:
    """A DTensor without memory; ``UnsupportedValueError`` if the placements do not fit."""
    import torch
    from torch.distributed.tensor import distribute_tensor

    try:
        return distribute_tensor(
            torch.empty(shape, device="meta"), mesh, placements, src_data_rank=None
        )
    except Exception as error:
        raise UnsupportedValueError(
            f"of shape {shape}, it cannot be placed as {placements}: {error}"
        ) from error


def describe(tensor: torch.Tensor, fqn: str) -> Grid:
    """The grid of a DTensor: computed once per mesh, placements and shape, then looked up (2 us).

    Dimensions are cut as by ``torch.chunk``, in the order of the cuts by tensor parallelism and
    FSDP, which may differ from the mesh's order. (For uneven cuts, torch's own
    ``compute_local_shape_and_global_offset`` returns boxes that no rank holds.) If a tensor was
    made by reading strided placements from left to right instead, and the result differs, the local
    tensor of at least one rank has another shape, and that rank rejects it.

    Raises:
        UnsupportedValueError: It is not a DTensor; this rank is not in its mesh; a placement is
            ``Partial``, unknown, or leaves ranks with more than one box; or the local tensor does
            not have the shape of its box.
    """
    spec: Any = getattr(tensor, "_spec", None)
    if spec is None:
        raise UnsupportedValueError(
            f"{fqn}: a {type(tensor).__name__} does not say how it is sharded; use a DTensor"
        )
    mesh: DeviceMesh = spec.mesh
    if mesh.get_coordinate() is None:
        raise UnsupportedValueError(f"{fqn}: this rank is not in the mesh of the tensor, {mesh}")
    order = getattr(spec, "shard_order", None)
    literal = getattr(spec, "use_strided_shard_as_shard_order", None) is False
    shape = tuple(tensor.shape)
    try:
        # The rank is part of the key: slices of one mesh are equal though each has ranks of its
        # own.
        grid, box = _derive(mesh, mesh.get_rank(), spec.placements, order, literal, shape)
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"{fqn}: {error}") from None
    local: tuple[int, ...] = tuple(getattr(tensor, "_local_tensor").shape)  # noqa: B009 (unknown to torch's stubs)
    if (math.prod(local) != 0) if box is None else (local != box[1]):
        raise UnsupportedValueError(
            f"{fqn}: of shape {shape}, placed as {spec.placements} on a mesh of "
            f"{tuple(mesh.shape)}, this rank should hold {'nothing' if box is None else box[1]}, "
            f"but the local tensor has shape {local}"
        )
    return grid


@lru_cache(maxsize=1024)
def _derive(
    mesh: DeviceMesh,
    rank: int,
    placements: tuple[Any, ...],
    order: Any,
    literal: bool,
    shape: tuple[int, ...],
) -> tuple[Grid, Box | None]:
    ranks: list[int] = mesh.mesh.flatten().tolist()  # pyright: ignore[reportUnknownVariableType]
    sizes = tuple(mesh.mesh.shape)
    cutters = _cutters(placements, sizes, order, literal, shape)
    if 0 in shape:
        return whole(shape, tuple(ranks)), None
    cuts: list[tuple[int, ...]] = []
    # of each dimension: the cutters' coordinates -> which interval
    intervals: list[dict[tuple[int, ...], int]] = []
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
    grid = Grid(
        shape,
        tuple(cuts),
        tuple(tuple(sorted(cells[cell])) for cell in sorted(cells)),
        tuple(sorted(ranks)),
    )
    return grid, local_box(grid, rank)


def _chunks(begin: int, end: int, count: int) -> Iterable[tuple[int, int]]:
    """The intervals of ``torch.chunk``, and the empty ones that it leaves out."""
    step = -(-(end - begin) // count)
    return itertools.pairwise(min(begin + index * step, end) for index in range(count + 1))


def _cutters(
    placements: tuple[Any, ...],
    sizes: Sequence[int],
    order: Any,
    literal: bool,
    shape: tuple[int, ...],
) -> list[list[int]]:
    """For each tensor dimension, the mesh dimensions that cut it, in the order of the cuts."""
    from torch.distributed.tensor.placement_types import (
        Replicate,
        Shard,
        _StridedShard,  # pyright: ignore[reportPrivateUsage] - not with the others, which take torch to import
    )

    # of each dimension: mesh dimension -> split factor
    factors: list[dict[int, int]] = [{} for _ in shape]
    for mesh_dim, placement in enumerate(placements):
        if type(placement) is Replicate:
            continue
        if type(placement) not in (Shard, _StridedShard):
            raise UnsupportedValueError(
                f"a tensor placed as {placement!r} cannot be saved; redistribute it first"
            )
        if not -len(shape) <= placement.dim < len(shape):
            raise UnsupportedValueError(f"{placement!r} does not fit a tensor of shape {shape}")
        factors[placement.dim][mesh_dim] = getattr(placement, "split_factor", 1)
    stated_orders = {entry.tensor_dim: list(entry.mesh_dims) for entry in order or ()}
    cutters: list[list[int]] = []
    for dim, (extent, split) in enumerate(zip(shape, factors, strict=True)):
        mesh_dims = _decode(split, sizes)
        even = extent % math.prod(sizes[mesh_dim] for mesh_dim in split) == 0
        # Results of views mean such placements literally, from left to right; it comes to the same
        # where all is even.
        if mesh_dims is None or (literal and not even and mesh_dims != list(split)):
            raise UnsupportedValueError(
                f"placed as {placements}, a rank holds several intervals, which is no box"
            )
        if dim in stated_orders and sorted(stated_orders[dim]) == mesh_dims == list(split):
            mesh_dims = stated_orders[dim]
        cutters.append(mesh_dims)
    return cutters


def _decode(factors: dict[int, int], sizes: Sequence[int]) -> list[int] | None:
    """The order of cuts by mesh dimension: a split factor counts the pieces of later dimensions."""
    order: list[int] = []
    for mesh_dim, factor in reversed(factors.items()):
        pieces = list(
            itertools.accumulate((sizes[later] for later in order), operator.mul, initial=1)
        )
        if factor not in pieces:
            return None
        order.insert(pieces.index(factor), mesh_dim)
    return order


@lru_cache(maxsize=256)
def paired(grid: Grid) -> Grid:
    """Return the grid of complex numbers stored as pairs: one object, as plans are found by it."""
    return dataclasses.replace(grid, shape=(*grid.shape, 2), cuts=(*grid.cuts, (0, 2)))


def is_dtensor(value: object) -> bool:
    """Whether a value is a ``DTensor``; avoids importing its module, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def placements_of_states(
    optimizer: torch.optim.Optimizer, saved: Any, is_numbered: bool
) -> dict[int, tuple[bool, str]]:
    """DTensor placements in an optimizer's ``state_dict()`` that do not follow from a parameter.

    Those follow that are directly in its numbered state, and have its shape and placements. By id,
    whether a value is placed as its parameter (as the first sharded one, where no number tells
    which is its own), and its placements.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    placed: dict[int, tuple[bool, str]] = {}

    def note(value: Any, parameter: Any, *, follows: bool = False) -> None:
        if is_dtensor(value):
            text = placements_text(value)
            as_parameter = is_dtensor(parameter) and (value.device_mesh, text) == (
                parameter.device_mesh,
                placements_text(parameter),
            )
            if not (follows and as_parameter and value.shape == parameter.shape):
                placed[id(value)] = as_parameter, text
        elif isinstance(value, (dict, list, tuple, collections.deque)):
            items = cast("Any", value)
            for item in items.values() if isinstance(value, dict) else items:
                note(item, parameter)

    states: Any = saved.get("state") if is_numbered else None
    if isinstance(states, dict):
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        own = {
            key: one
            for key, one in zip(numbers, parameters, strict=True)
            if isinstance(key, (int, str))
        }
        for key, state in cast("dict[Any, Any]", states).items():
            for value in (
                cast("dict[Any, Any]", state).values() if isinstance(state, dict) else [state]
            ):
                note(value, own.get(key), follows=True)
        saved = {key: value for key, value in saved.items() if key != "state"}
    note(saved, next(filter(is_dtensor, parameters), None))
    return placed
