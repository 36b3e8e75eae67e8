"""What this rank stages of a state that several ranks share, and what its record will say of it.

All ranks compute the same from what each of them knows (:mod:`sidesave.stager.sharding`). What none of them can know is
whether the plain tensors of modules and optimizers are the same everywhere: pipeline stages and experts look the same
from inside. The first save of a structure therefore stages all of them, the writers compare digests through storage,
and write the rest only where ranks differ; the saves after it do as the first one found.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import xxhash

from sidesave.client.world import NodeWorld, World
from sidesave.errors import UnsupportedValueError
from sidesave.stager import sharding
from sidesave.stager.dtypes import NAMES
from sidesave.stager.image import Plan, Structure, make_plan, structure_of
from sidesave.stager.sharding import Box, Grid, Share
from sidesave.stager.tree import FlatState
from sidesave.writer_daemon import layout
from sidesave.writer_daemon.layout import ELSEWHERE, Layout, Part, Table, TensorInfo

MORE: Final = "@more"
"""Behind the name of a container: the file of what is written only where ranks differ."""
_OF_RANK = re.compile(r"@rank-\d{5,}\Z")
_MAX_PLACEMENTS: Final = 8
_WINDOW_NBYTES: Final = 256
_CUDA_EVERY: Final = 20
"""Saves after which tensors on a device are compared again: looking at them makes the host wait for the device."""


class Alike(enum.Enum):
    """What is known of the plain tensors that ranks are taken to hold alike."""

    UNKNOWN = "unknown"
    YES = "yes"
    NO = "no"


@dataclass(frozen=True, slots=True)
class Placed:
    """A flat state cut down to what this rank stages.

    Attributes:
        flat: The pieces, under the keys that they have in the files.
        plan: Where they go.
        spare: The containers at the end of the plan that are written only where ranks differ.
        table: What the rank's record says; ``spare_table`` is for that case, and empty where it is not open.
        claim: A digest of what this rank holds of the plain tensors that are taken to be alike.
    """

    flat: FlatState
    plan: Plan
    spare: tuple[str, ...]
    table: bytes
    spare_table: bytes
    claim: str
    key: Any


@dataclass(frozen=True, slots=True)
class _Piece:
    container: str
    fqn: str
    target: str
    key: str
    slices: tuple[slice, ...] | None


@dataclass(slots=True)
class _Layout:
    """All of a placement that depends on structure alone."""

    grids: tuple[Grid, ...]  # kept: their ids are the key
    pieces: list[_Piece]
    plan: Plan
    spare: tuple[str, ...]
    table: Part
    spare_table: Part
    assumed: list[tuple[str, str, str | None]]
    """Container and FQN of each, and what is compared of its structure; None where its content is not."""


class Placements:
    """The placements of one checkpointer, and what it has learned about its structures."""

    def __init__(self, world: World) -> None:
        """Place for this rank of ``world``."""
        self._rank = world.rank
        self._size = world.size
        self._index = {rank: number for number, rank in enumerate(world.ranks)}
        self._me = world.ranks[world.rank]
        self._ranks = world.ranks
        self._part_of = isinstance(world, NodeWorld)
        self._layouts: dict[Any, _Layout] = {}
        self._alike: dict[Structure, Alike] = {}

    def place(self, flat: FlatState, sequence: int = 0) -> Placed:
        """What this rank stages of ``flat`` in the save of that place.

        Raises:
            UnsupportedValueError: A part of a tensor is held by ranks only that do not save along.
        """
        structure = structure_of(flat.containers)
        open_to_doubt = flat.assumed and self._size > 1
        alike = self._alike.get(structure, Alike.UNKNOWN) if open_to_doubt else Alike.YES
        key = (structure, tuple(flat.grids), tuple(map(id, flat.grids.values())), tuple(flat.assumed), alike)
        found = self._layouts.get(key)
        if found is None:
            found = self._lay_out(flat, structure, alike)
            while len(self._layouts) >= _MAX_PLACEMENTS:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[key] = found
        containers: dict[str, dict[str, torch.Tensor]] = {name: {} for name, _, _ in found.plan.structure}
        for piece in found.pieces:
            tensor = flat.containers[piece.container][piece.fqn]
            containers[piece.target][piece.key] = tensor if piece.slices is None else tensor[piece.slices]
        claim, apart = self._sample(flat, found, alike, sequence)
        facts = {"skeleton": flat.shared_digest, "replicas": "" if alike is Alike.NO else claim}
        told = dataclasses.replace(found.table, **facts, apart=apart if alike is Alike.NO else {})
        spare = dataclasses.replace(found.spare_table, **(facts | {"replicas": ""}), apart=apart)
        return Placed(
            flat=dataclasses.replace(flat, containers=containers),
            plan=found.plan,
            spare=found.spare,
            table=_encode(told),
            spare_table=_encode(spare) if alike is Alike.UNKNOWN else b"",
            claim=claim,
            key=structure,
        )

    def learn(self, key: Structure, alike: Alike) -> None:
        """What a save of this structure has found out."""
        self._alike[key] = alike

    def _lay_out(self, flat: FlatState, structure: Structure, alike: Alike) -> _Layout:
        where = {fqn: (name, tensor) for name, tensors in flat.containers.items() for fqn, tensor in tensors.items()}
        taken = next(filter(_OF_RANK.search, where), None)
        if taken is not None:
            raise UnsupportedValueError(f"{taken}: names that end like @rank-00001 are those of a rank's own tensors")
        here: dict[int, Grid] = {}  # one object for each still: see sharding.assign
        for fqn, grid in flat.grids.items():
            if id(grid) not in here:
                here[id(grid)] = self._here(grid, fqn)
        known = {fqn: (here[id(grid)], where[fqn][1].element_size()) for fqn, grid in flat.grids.items()}
        shares = self._assign(known)
        shapes = {tuple(where[fqn][1].shape) for fqn in flat.assumed}
        wholes = {shape: sharding.whole(shape, self._ranks) for shape in shapes}
        everyone = {fqn: (wholes[tuple(where[fqn][1].shape)], where[fqn][1].element_size()) for fqn in flat.assumed}
        assumed = sharding.assign(everyone, self._me)
        pieces: list[_Piece] = []
        offsets: dict[str, dict[str, tuple[int, ...]]] = {}
        own: dict[str, TensorInfo] = {}
        more: list[str] = []
        for fqn, (container, tensor) in where.items():
            info = TensorInfo(NAMES[tensor.dtype], tuple(tensor.shape), container)
            share = shares.get(fqn) or (None if alike is Alike.NO else assumed.get(fqn))
            if share is not None:
                if share.box is not None:
                    grid = (known.get(fqn) or everyone[fqn])[0]
                    pieces.append(_Piece(container, fqn, container, fqn, _slices(grid, share.box, self._me)))
                    offsets.setdefault(container, {})[fqn] = share.box[0]
                if fqn in assumed and not (share.box is not None and share.box[1] == tuple(tensor.shape)):
                    more.append(fqn)
                continue
            key = fqn if self._rank == 0 or fqn in assumed else f"{fqn}@rank-{self._rank:05d}"
            own[key] = info
            pieces.append(_Piece(container, fqn, container, key, None))
        spare: tuple[str, ...] = ()
        spare_own = dict(own)
        if alike is Alike.UNKNOWN and assumed:
            for fqn in flat.assumed:
                container, tensor = where[fqn]
                place = container + MORE if fqn in more else container
                spare_own[fqn] = TensorInfo(NAMES[tensor.dtype], tuple(tensor.shape), place)
            pieces += [_Piece(where[fqn][0], fqn, where[fqn][0] + MORE, fqn, None) for fqn in more]
            spare = tuple(dict.fromkeys(where[fqn][0] + MORE for fqn in more))
        targets: dict[str, dict[str, torch.Tensor]] = {}
        for piece in pieces:
            tensor = where[piece.fqn][1]
            view = tensor if piece.slices is None else tensor[piece.slices]
            targets.setdefault(piece.target, {})[piece.key] = view
        infos = {fqn: (where[fqn][0], where[fqn][1].dtype) for fqn in where}
        without = self._table(infos, known, shares)
        whole = layout.merge([without, self._table(infos, everyone, {} if alike is Alike.NO else assumed)])
        return _Layout(
            grids=tuple(flat.grids.values()),
            pieces=pieces,
            plan=make_plan(structure_of(targets), offsets),
            spare=spare,
            table=self._part(whole, own, flat.grids),
            spare_table=self._part(without, spare_own, flat.grids),
            assumed=[
                (where[fqn][0], fqn, f"{where[fqn][1].dtype}{tuple(where[fqn][1].shape)}" if compared else None)
                for fqn, compared in sorted(flat.assumed.items())
            ],
        )

    def _assign(self, known: dict[str, tuple[Grid, int]]) -> dict[str, Share]:
        """Who writes what; of a tensor only a part of which is on this node the first holder of each cell."""
        shares = sharding.assign({fqn: one for fqn, one in known.items() if _is_even(one[0])}, self._me)
        for fqn, (grid, _) in known.items():
            if fqn not in shares:
                owners = tuple(holders[0] if holders else ELSEWHERE for holders in grid.holders)
                box = sharding.local_box(grid, self._me) if self._me in owners else None
                shares[fqn] = Share(sharding.Layout(grid.cuts, owners), box)
        return {fqn: shares[fqn] for fqn in known}

    def _here(self, grid: Grid, fqn: str) -> Grid:
        """What the ranks that save together hold of a tensor; of one with replicas others may hold the same."""
        strangers = [rank for rank in grid.ranks if rank not in self._index]
        if not strangers:
            return grid
        holders = tuple(tuple(rank for rank in cell if rank in self._index) for cell in grid.holders)
        if not (self._part_of or all(holders)):
            raise UnsupportedValueError(
                f"{fqn}: it is divided among ranks that do not save along, {strangers[:8]}; "
                "pass a process_group that has all of them"
            )
        ranks = tuple(rank for rank in grid.ranks if rank in self._index)
        return dataclasses.replace(grid, holders=holders, ranks=ranks)

    def _table(
        self,
        infos: Mapping[str, tuple[str, torch.dtype]],
        grids: Mapping[str, tuple[Grid, int]],
        shares: Mapping[str, Share],
    ) -> Table:
        numbers: dict[sharding.Layout, int] = {}
        tensors: dict[str, TensorInfo] = {}
        for fqn, share in shares.items():
            container, dtype = infos[fqn]
            number = numbers.setdefault(share.layout, len(numbers))
            tensors[fqn] = TensorInfo(NAMES[dtype], grids[fqn][0].shape, container, number)
        owners = [tuple(self._index.get(rank, ELSEWHERE) for rank in one.owners) for one in numbers]
        return Table(tensors, tuple(Layout(own, one.cuts) for own, one in zip(owners, numbers, strict=True)))

    def _part(self, table: Table, own: dict[str, TensorInfo], grids: Mapping[str, Grid]) -> Part:
        mine: list[str] = []
        for fqn in table.tensors:
            describer = table.layout(fqn).first_owner
            if describer == ELSEWHERE:  # all ranks of this node have empty shards
                describer = min(self._index[rank] for rank in grids[fqn].ranks if rank in self._index)
            if describer == self._rank:
                mine.append(fqn)
        return Part(table.only(mine), layout.whole(own, self._rank), table.sums().get(self._rank, 0))

    def _sample(self, flat: FlatState, found: _Layout, alike: Alike, sequence: int) -> tuple[str, dict[str, str]]:
        """A digest of the plain tensors that ranks are taken to hold alike; and one of each, unless they do."""
        look = alike is not Alike.YES or sequence % _CUDA_EVERY == 0
        everything = xxhash.xxh3_128(repr([row[1:] for row in found.assumed]).encode("utf-8", "surrogatepass"))
        each: dict[str, str] = {}
        for container, fqn, compared in found.assumed:
            tensor = flat.containers[container][fqn]
            windows = _windows(tensor) if compared and (tensor.is_cpu or look) else ()
            for window in windows:
                everything.update(window)
            if alike is not Alike.YES:
                each[fqn] = f"{compared}{xxhash.xxh3_64_hexdigest(b''.join(windows))}"
        return everything.hexdigest(), each


def _is_even(grid: Grid) -> bool:
    """Whether all of a tensor is held here, each cell by as many ranks."""
    return bool(grid.holders[0]) and len({len(holders) for holders in grid.holders}) == 1


def _slices(grid: Grid, box: Box, rank: int) -> tuple[slice, ...] | None:
    held = sharding.local_box(grid, rank)
    assert held is not None
    if held == box:
        return None
    spans = zip(*box, held[0], strict=True)
    return tuple(slice(offset - start, offset - start + extent) for offset, extent, start in spans)


def _encode(part: Part) -> bytes:
    return json.dumps(part.to_json(), separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def _windows(tensor: torch.Tensor) -> tuple[bytes | memoryview, ...]:
    """A tensor's first, middle and last bytes."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return ()
    if not (tensor.is_cpu and tensor.is_contiguous()):
        flat = tensor.detach().reshape(-1)
        count = max(1, _WINDOW_NBYTES // tensor.element_size())
        middle = flat.numel() // 2
        found = torch.cat([flat[:count], flat[middle : middle + count], flat[-count:]]).cpu()
        return (bytes(cast("list[int]", found.view(torch.uint8).tolist())),)
    data = memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr()))
    if nbytes <= 3 * _WINDOW_NBYTES:
        return (data,)
    middle = nbytes // 2
    return data[:_WINDOW_NBYTES], data[middle : middle + _WINDOW_NBYTES], data[-_WINDOW_NBYTES:]
