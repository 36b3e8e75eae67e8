"""Plans what this rank stages of a state that several ranks share, and what its record says of it.

All ranks compute the same from what each of them knows (:mod:`sidesave.stager.shares`).
What none of them can know is whether the plain tensors of modules and optimizers are the same
everywhere: pipeline stages and experts look the same from inside. Where nobody has said so, a save
stages all of them, the writers compare all their bytes through storage, and write the rest only
where ranks differ.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from sidesave.client import increments
from sidesave.client.increments import TableShare
from sidesave.client.ranks.group import NodeWorld, World
from sidesave.errors import UnsupportedValueError
from sidesave.stager import sharding
from sidesave.stager.dtypes import DTYPES, NAMES
from sidesave.stager.plan import (
    Plan,
    SignatureCache,
    StateSignature,
    extend,
    make_plan,
    structure_of,
)
from sidesave.stager.sharding import Box, Grid
from sidesave.stager.shares import Partition, Share, assign_shares
from sidesave.stager.state.flat_state import FlatState
from sidesave.writer_daemon.format import layout
from sidesave.writer_daemon.format.layout import (
    ELSEWHERE,
    UNSHARED,
    GroupSum,
    Layout,
    Part,
    Table,
    TensorInfo,
)

_OF_RANK = re.compile(r"@rank-\d{5,}\Z")
_MAX_LAYOUTS: Final = 8
_TOLD_FROM_NBYTES: Final = 1 << 20
"""What it costs to compare less is not worth a word."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """A flat state cut down to what this rank stages.

    Attributes:
        flat: The pieces, under the keys that they have in the files.
        plan: Where they go.
        unshared: The containers at the end of the plan that are written only where ranks differ.
        table: What the rank's record says; ``unshared_table`` is for that case, and empty where
            nothing is compared.
        tables: What it stages of tables of rows, behind all else.
    """

    flat: FlatState
    plan: Plan
    unshared: tuple[str, ...]
    table: bytes
    unshared_table: bytes
    tables: tuple[TableShare, ...] = ()


@dataclass(frozen=True, slots=True)
class _Piece:
    container: str
    fqn: str
    target: str
    key: str
    slices: tuple[slice, ...] | None


@dataclass(slots=True)
class _Layout:
    """All of a shard plan that depends on structure alone."""

    grids: tuple[Grid, ...]  # kept: their ids are the key
    pieces: list[_Piece]
    plan: Plan
    unshared: tuple[str, ...]
    table: Part
    unshared_table: Part | None


@dataclass(frozen=True, slots=True, eq=False)
class _Last:
    """The previous save's layout and its key; grids are known by id, and kept by the layout."""

    of: tuple[StateSignature, Hashable, tuple[str, ...]]
    layout: _Layout


class ShardPlanner:
    """The shard plans of one checkpointer."""

    def __init__(self, world: World, file_nbytes: int | None = None) -> None:
        """Plan for this rank of ``world``; see :func:`make_plan` for ``file_nbytes``."""
        self._file_nbytes = file_nbytes
        self._rank = world.rank
        self._size = world.size
        self._index = {rank: number for number, rank in enumerate(world.ranks)}
        self._me = world.ranks[world.rank]
        self._ranks = world.ranks
        self._part_of = isinstance(world, NodeWorld)
        self._looks = SignatureCache()
        self._last: _Last | None = None
        self._layouts: dict[Hashable, _Layout] = {}
        self._has_warned = False

    def plan(self, flat: FlatState, tables: list[TableShare]) -> ShardPlan:
        """What this rank stages of ``flat``, and of its tables.

        Raises:
            UnsupportedValueError: A part of a tensor is held by ranks only that do not save along.
        """
        if tables and self._part_of:
            raise UnsupportedValueError(
                f"{tables[0].fqn}: the rows of a table go to any rank, and nodes with disks of "
                "their own keep theirs"
            )
        grids = tuple(flat.grids), tuple(map(id, flat.grids.values()))
        looks, undeclared = self._looks.of(flat), tuple(flat.undeclared)
        last = self._last
        if last is None or last.of != (looks, grids, undeclared):
            state_layout = self._find(flat, (looks.structure, grids, undeclared))
            last = self._last = _Last((looks, grids, undeclared), state_layout)
        state_layout = last.layout
        containers: dict[str, dict[str, torch.Tensor]] = {
            name: {} for name, _, _ in state_layout.plan.structure
        }
        for piece in state_layout.pieces:
            tensor = flat.containers[piece.container][piece.fqn]
            containers[piece.target][piece.key] = (
                tensor if piece.slices is None else tensor[piece.slices]
            )
        frozen = (
            {piece.key: None for piece in state_layout.pieces if piece.fqn in flat.frozen}
            if flat.frozen
            else {}
        )
        unshared = state_layout.unshared_table
        facts = {"treespec": flat.shared_digest, "per_rank": tuple(flat.per_rank)}
        tables_own = self._rows_of(tables)
        return ShardPlan(
            flat=dataclasses.replace(
                flat, containers=containers, frozen=frozen, origin=None, looks=last
            ),
            plan=with_tables(state_layout.plan, tables, self._suffix, self._file_nbytes),
            unshared=state_layout.unshared,
            table=_encode(self._with(state_layout.table, tables_own), facts),
            unshared_table=b""
            if unshared is None
            else _encode(self._with(unshared, tables_own), facts),
            tables=tuple(tables),
        )

    @property
    def _suffix(self) -> str:
        """What the keys of this rank's own tensors end with."""
        return f"@rank-{self._rank:05d}" if self._rank else ""

    def _rows_of(self, tables: list[TableShare]) -> dict[str, TensorInfo]:
        """The tensors of tables, also those in files that are linked."""
        return {
            name + self._suffix: TensorInfo(NAMES[dtype], tuple(shape), container)
            for share in tables
            for container, kinds in share.containers()
            for name, (dtype, shape) in kinds.items()
        }

    def _with(self, part: Part, own: dict[str, TensorInfo]) -> Part:
        if not own:
            return part
        return dataclasses.replace(part, own=layout.whole(part.own.tensors | own, self._rank))

    def _find(self, flat: FlatState, key: Hashable) -> _Layout:
        state_layout = self._layouts.get(key)
        if state_layout is None:
            state_layout = self._lay_out(flat)
            while len(self._layouts) >= _MAX_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[key] = state_layout
            self._tell(state_layout)
        return state_layout

    def _tell(self, state_layout: _Layout) -> None:
        """Warn once, on one rank, of tensors that are compared although that could be avoided."""
        if state_layout.unshared_table is None or self._rank or self._has_warned:
            return
        own, undeclared = (
            state_layout.unshared_table.own.tensors,
            list(state_layout.unshared_table.compared),
        )
        nbytes = sum(
            math.prod(own[fqn].shape) * DTYPES[own[fqn].dtype].itemsize for fqn in undeclared
        )
        if nbytes < _TOLD_FROM_NBYTES:
            return
        self._has_warned = True
        items = ", ".join(list(dict.fromkeys(fqn.partition(".")[0] for fqn in undeclared))[:8])
        logger.warning(
            "%d plain tensors in %s (%s is one), %.1f MB, may be equal on all ranks or not: every "
            "save stages all of them on every rank and compares all bytes. Wrap what ranks hold "
            "alike in sidesave.Replicated, and what is each rank's own in sidesave.PerRank",
            len(undeclared),
            items,
            undeclared[0],
            nbytes / 1e6,
        )

    def _lay_out(self, flat: FlatState) -> _Layout:
        where = {
            fqn: (name, tensor)
            for name, tensors in flat.containers.items()
            for fqn, tensor in tensors.items()
        }
        taken = next(filter(_OF_RANK.search, where), None)
        if taken is not None:
            raise UnsupportedValueError(
                f"{taken}: names that end like @rank-00001 are those of a rank's own tensors"
            )
        restricted: dict[int, Grid] = {}  # one object for each still: see assign_shares
        for fqn, grid in flat.grids.items():
            if id(grid) not in restricted:
                restricted[id(grid)] = self._restrict(grid, fqn)
        known = {
            fqn: (restricted[id(grid)], where[fqn][1].element_size())
            for fqn, grid in flat.grids.items()
        }
        shares = self._assign(known)
        shapes = {tuple(where[fqn][1].shape) for fqn in flat.undeclared}
        wholes = {shape: sharding.whole(shape, self._ranks) for shape in shapes}
        everyone = {
            fqn: (wholes[tuple(where[fqn][1].shape)], where[fqn][1].element_size())
            for fqn in flat.undeclared
        }
        compared = assign_shares(everyone, self._me)
        pieces: list[_Piece] = []
        offsets: dict[str, dict[str, tuple[int, ...]]] = {}
        own: dict[str, TensorInfo] = {}
        more: list[str] = []
        for fqn, (container, tensor) in where.items():
            info = TensorInfo(NAMES[tensor.dtype], tuple(tensor.shape), container)
            share = shares.get(fqn) or compared.get(fqn)
            if share is not None:
                if share.box is not None:
                    grid = (known.get(fqn) or everyone[fqn])[0]
                    pieces.append(
                        _Piece(container, fqn, container, fqn, _slices(grid, share.box, self._me))
                    )
                    offsets.setdefault(container, {})[fqn] = share.box[0]
                if fqn in compared and not (
                    share.box is not None and share.box[1] == tuple(tensor.shape)
                ):
                    more.append(fqn)
                continue
            key = fqn + self._suffix
            own[key] = info
            pieces.append(_Piece(container, fqn, container, key, None))
        unshared: tuple[str, ...] = ()
        unshared_own = dict(own)
        to_compare = compared if self._size > 1 else {}
        if to_compare:
            for fqn in compared:
                container, tensor = where[fqn]
                place = container + UNSHARED if fqn in more else container
                unshared_own[fqn] = TensorInfo(NAMES[tensor.dtype], tuple(tensor.shape), place)
            pieces += [
                _Piece(where[fqn][0], fqn, where[fqn][0] + UNSHARED, fqn, None) for fqn in more
            ]
            unshared = tuple(dict.fromkeys(where[fqn][0] + UNSHARED for fqn in more))
        targets: dict[str, dict[str, torch.Tensor]] = {}
        for piece in pieces:
            tensor = where[piece.fqn][1]
            view = tensor if piece.slices is None else tensor[piece.slices]
            targets.setdefault(piece.target, {})[piece.key] = view
        infos = {fqn: (where[fqn][0], where[fqn][1].dtype) for fqn in where}
        without = self._table(infos, known, shares)
        whole = layout.merge([without, self._table(infos, everyone, compared)])
        groups = self._groups(without, restricted, flat.grids)
        unshared_table = None
        if to_compare:
            part = self._part(without, unshared_own, flat.grids, groups)
            unshared_table = dataclasses.replace(part, compared=dict.fromkeys(to_compare, ""))
        return _Layout(
            grids=tuple(flat.grids.values()),
            pieces=pieces,
            plan=make_plan(structure_of(targets), offsets, self._file_nbytes),
            unshared=unshared,
            table=self._part(whole, own, flat.grids, groups),
            unshared_table=unshared_table,
        )

    def _assign(self, known: dict[str, tuple[Grid, int]]) -> dict[str, Share]:
        """Assign writers; of a tensor partly on this node, each cell goes to its first holder."""
        shares = assign_shares(
            {fqn: one for fqn, one in known.items() if _is_even(one[0])}, self._me
        )
        for fqn, (grid, _) in known.items():
            if fqn not in shares:
                owners = tuple(holders[0] if holders else ELSEWHERE for holders in grid.holders)
                box = sharding.local_box(grid, self._me) if self._me in owners else None
                shares[fqn] = Share(Partition(grid.cuts, owners), box)
        return {fqn: shares[fqn] for fqn in known}

    def _restrict(self, grid: Grid, fqn: str) -> Grid:
        """The part of a tensor's grid that the saving ranks hold; others may hold replicas."""
        strangers = [rank for rank in grid.ranks if rank not in self._index]
        if not strangers:
            return grid
        holders = tuple(
            tuple(rank for rank in cell if rank in self._index) for cell in grid.holders
        )
        if not (self._part_of or all(holders)):
            raise UnsupportedValueError(
                f"{fqn}: it is divided among ranks that do not save along, {strangers[:8]}; pass a "
                "process_group that has all of them"
            )
        ranks = tuple(rank for rank in grid.ranks if rank in self._index)
        return dataclasses.replace(grid, holders=holders, ranks=ranks)

    def _table(
        self,
        infos: Mapping[str, tuple[str, torch.dtype]],
        grids: Mapping[str, tuple[Grid, int]],
        shares: Mapping[str, Share],
    ) -> Table:
        numbers: dict[Partition, int] = {}
        tensors: dict[str, TensorInfo] = {}
        for fqn, share in shares.items():
            container, dtype = infos[fqn]
            number = numbers.setdefault(share.layout, len(numbers))
            tensors[fqn] = TensorInfo(NAMES[dtype], grids[fqn][0].shape, container, number)
        owners = [tuple(self._index.get(rank, ELSEWHERE) for rank in one.owners) for one in numbers]
        return Table(
            tensors, tuple(Layout(own, one.cuts) for own, one in zip(owners, numbers, strict=True))
        )

    def _groups(
        self, table: Table, restricted: Mapping[int, Grid], grids: Mapping[str, Grid]
    ) -> dict[str, GroupSum]:
        """Sums of the tensors this rank shares with each group; a group's ranks must agree on them.

        A tensor that only some of them know might be given to one that does not have it.
        """
        by_grid: dict[int, list[str]] = {}
        for fqn, grid in grids.items():
            by_grid.setdefault(id(grid), []).append(fqn)
        by_ranks: dict[tuple[int, ...], list[str]] = {}
        for number, fqns in by_grid.items():
            by_ranks.setdefault(restricted[number].ranks, []).extend(fqns)
        return {
            layout.group_key(self._index[rank] for rank in ranks): GroupSum(
                len(ranks), table.only(fqns).total()
            )
            for ranks, fqns in by_ranks.items()
            if self._me in ranks and len(ranks) > 1
        }

    def _part(
        self,
        table: Table,
        own: dict[str, TensorInfo],
        grids: Mapping[str, Grid],
        groups: dict[str, GroupSum],
    ) -> Part:
        described: list[str] = []
        for fqn in table.tensors:
            describer = table.layout(fqn).first_owner
            if describer == ELSEWHERE:  # all ranks of this node have empty shards
                describer = min(
                    self._index[rank] for rank in grids[fqn].ranks if rank in self._index
                )
            if describer == self._rank:
                described.append(fqn)
        cells = table.sums().get(self._rank, 0)
        return Part(table.only(described), layout.whole(own, self._rank), cells, groups=groups)


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


def with_tables(plan: Plan, tables: list[TableShare], suffix: str, file_nbytes: int | None) -> Plan:
    """A plan with what is staged of tables behind it, under names that end so.

    Raises ``UnsupportedValueError`` where a tensor of the state has the name of one of theirs.
    """
    if not tables:
        return plan
    more = increments.structure_of(tables, suffix)
    names = {name for _, fqns, _ in more for name in fqns}
    taken = next((fqn for _, fqns, _ in plan.structure for fqn in fqns if fqn in names), None)
    if taken is not None:
        raise UnsupportedValueError(
            f"{taken}: a tensor and a part of a table have this name; rename one"
        )
    return extend(plan, more, sum(share.room_nbytes for share in tables), file_nbytes)


def _encode(part: Part, facts: Mapping[str, Any]) -> bytes:
    return json.dumps(
        dataclasses.replace(part, **facts).to_json(), separators=(",", ":"), ensure_ascii=False
    ).encode("utf-8", "surrogatepass")
