"""The tensors of a checkpoint, how each is sharded, and which rank has written which shard.

A sharded tensor is a grid: borders in each dimension, and an owner for each cell. Each distinct
layout is stored once, so a manifest's table grows with the number of FQNs and with ranks times
distinct layouts, not with ranks times FQNs. For the same reason a rank describes only the tensors
whose first cell it owns. One number for each rank shows that all ranks describe the same table: see
:meth:`Table.sums`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, cast

import xxhash

from sidesave.errors import IntegrityError
from sidesave.writer_daemon.storage.sealed_json import are_whole, get

ELSEWHERE: Final = -1
FROZEN: Final = "@frozen"
"""Suffix of a container with frozen tensors (``flat_state.FROZEN``)."""
ROWS: Final = "@rows"
"""Suffix, after a table's name, of the container with all its rows."""
CHANGED: Final = "@changed"
"""Suffix of the container with a table's changed rows; the other container is then linked."""
UNSHARED: Final = "@more"
"""Suffix of a container that is written only if ranks differ."""
_SUM: Final = re.compile(r"[0-9a-f]{32}")
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape of a part of a tensor."""


def container_of(stem: str) -> str:
    """Return the container of a tensor file, given the file's name without suffixes."""
    return stem.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is sharded.

    Attributes:
        owners: The ranks that wrote the cells, in row-major order; ``ELSEWHERE`` for another
            node's.
        cuts: For each dimension the ascending borders from 0 to its size; None for a whole tensor.
    """

    owners: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...] | None = None

    @property
    def first_owner(self) -> int:
        """The rank that describes tensors with this layout."""
        return next((owner for owner in self.owners if owner != ELSEWHERE), ELSEWHERE)

    def boxes(self, shape: tuple[int, ...]) -> Iterator[tuple[int, Box]]:
        """Yield owner, offsets and shape of each cell."""
        if self.cuts is None:
            yield self.owners[0], ((0,) * len(shape), shape)
            return
        intervals = [list(itertools.pairwise(borders)) for borders in self.cuts]
        for owner, cell in zip(self.owners, itertools.product(*intervals), strict=True):
            yield (
                owner,
                (tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell)),
            )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        body: dict[str, Any] = {
            "owners": [None if owner == ELSEWHERE else owner for owner in self.owners]
        }
        if self.cuts is not None:
            body["cuts"] = [list(borders) for borders in self.cuts]
        return body

    @classmethod
    def from_json(cls, body: Any, world_size: int, path: str) -> Layout:
        """Parse the JSON form; ``IntegrityError`` if it is not a grid or names an invalid rank."""
        fields = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
        listed, cuts = cast("Any", fields.get("owners")), fields.get("cuts")
        named = (
            [owner for owner in cast("list[Any]", listed) if owner is not None]
            if isinstance(listed, list)
            else []
        )
        if not isinstance(listed, list) or not listed or not are_whole(named):
            raise IntegrityError(f"{path}: a layout must name its owners")
        owners = [
            ELSEWHERE if owner is None else cast("int", owner)
            for owner in cast("list[Any]", listed)
        ]
        if max(owners) >= world_size:
            raise IntegrityError(f"{path}: a layout names rank {max(owners)} of {world_size}")
        if cuts is None:
            if len(owners) != 1:
                raise IntegrityError(f"{path}: a whole tensor has one owner, not {len(owners)}")
            return cls(tuple(owners))
        rows = cast("list[list[int]]", cuts) if isinstance(cuts, list) else []
        cells = math.prod(len(row) - 1 for row in rows) if all(map(_are_borders, rows)) else 0
        if cells != len(owners):
            raise IntegrityError(
                f"{path}: the cuts of a layout are malformed, or do not fit its {len(owners)} "
                "owners"
            )
        return cls(tuple(owners), tuple(map(tuple, rows)))


def _are_borders(row: Any) -> bool:
    if (
        not isinstance(row, list)
        or len(cast("list[Any]", row)) < 2
        or not are_whole(cast("list[Any]", row))
    ):
        return False
    borders = cast("list[int]", row)
    return borders[0] == 0 and all(low < high for low, high in itertools.pairwise(borders))


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor: safetensors dtype name, global shape, container and its layout's index.

    The container's files hold the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    container: str
    layout: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """Tensors by FQN, and their distinct layouts."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict[str, TensorInfo])
    layouts: tuple[Layout, ...] = ()

    def layout(self, fqn: str) -> Layout:
        """Return the layout of a tensor."""
        return self.layouts[self.tensors[fqn].layout]

    def boxes(self, fqn: str) -> Iterator[tuple[int, Box]]:
        """Yield owner, offsets and shape of each cell of a tensor."""
        return self.layout(fqn).boxes(self.tensors[fqn].shape)

    def only(self, fqns: Iterable[str]) -> Table:
        """Return the table of these FQNs, without unneeded layouts."""
        return merge([Table({fqn: self.tensors[fqn] for fqn in fqns}, self.layouts)])

    def sums(self) -> dict[int, int]:
        """Return, by rank, the sum of 128-bit hashes of the tensors it has written.

        The hashes include the tensors' layouts. Sums do not depend on the order, and need no loop
        over ranks for each tensor.
        """
        sums: dict[int, int] = {}
        for layout, number in zip(self.layouts, self._sums_by_layout(), strict=True):
            for rank in set(layout.owners) - {ELSEWHERE} if number else ():
                sums[rank] = (sums.get(rank, 0) + number) % (1 << 128)
        return sums

    def total(self) -> int:
        """Return the sum of these hashes over all tensors."""
        return sum(self._sums_by_layout()) % (1 << 128)

    def _sums_by_layout(self) -> list[int]:
        by_layout = [0] * len(self.layouts)
        seeds = [_seed(layout) for layout in self.layouts]
        for fqn, tensor in self.tensors.items():
            text = f"{fqn}\0{tensor.dtype}\0{tensor.shape}\0{tensor.container}".encode(
                "utf-8", "surrogatepass"
            )
            by_layout[tensor.layout] += xxhash.xxh3_128_intdigest(text, seeds[tensor.layout])
        return by_layout

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form: for each FQN container, dtype, shape and layout.

        Container and layout are given by index.
        """
        containers = list(dict.fromkeys(tensor.container for tensor in self.tensors.values()))
        index = {container: number for number, container in enumerate(containers)}
        rows = {
            fqn: [index[one.container], one.dtype, list(one.shape), one.layout]
            for fqn, one in self.tensors.items()
        }
        layouts = [layout.to_json() for layout in self.layouts]
        return {"layouts": layouts, "containers": containers, "tensors": rows}

    @classmethod
    def from_json(cls, body: dict[str, Any], world_size: int, path: str) -> Table:
        """Parse the JSON form; raises ``IntegrityError``."""
        layouts = tuple(
            Layout.from_json(layout, world_size, path)
            for layout in get(body, "layouts", list, path)
        )
        containers = cast("list[Any]", get(body, "containers", list, path))
        if not all(isinstance(container, str) for container in containers):
            raise IntegrityError(f"{path}: the name of a container is malformed")
        tensors: dict[str, TensorInfo] = {}
        checked: dict[Any, TensorInfo] = {}  # most rows are like others
        for fqn, row in cast("dict[str, Any]", get(body, "tensors", dict, path)).items():
            try:
                container, dtype, shape, layout = row
                # With the types, as true, 1 and 1.0 are equal.
                key = (
                    container,
                    dtype,
                    layout,
                    *shape,
                    *map(type, (container, layout, shape, *shape)),
                )
                info = checked.get(key)
                if info is None:
                    whole = isinstance(shape, list) and are_whole(
                        [container, layout, *cast("list[Any]", shape)]
                    )
                    info = TensorInfo(
                        dtype, tuple(cast("list[int]", shape)), containers[container], layout
                    )
                    if not (
                        whole and isinstance(dtype, str) and _fits(layouts[info.layout], info.shape)
                    ):
                        raise ValueError(row)
                    checked[key] = info
                tensors[fqn] = info
            except (TypeError, ValueError, IndexError) as error:
                raise IntegrityError(f"{path}: tensor entry {fqn!r} is malformed") from error
        return cls(tensors, layouts)


def _fits(layout: Layout, shape: tuple[int, ...]) -> bool:
    return layout.cuts is None or tuple(borders[-1] for borders in layout.cuts) == shape


def _seed(layout: Layout) -> int:
    return xxhash.xxh3_64_intdigest(repr((layout.cuts, layout.owners)).encode())


def whole(tensors: dict[str, TensorInfo], rank: int) -> Table:
    """Return the table of tensors that one rank holds whole."""
    return Table(tensors, (Layout((rank,)),) if tensors else ())


def merge(tables: Iterable[Table]) -> Table:
    """Merge tables without common FQNs, each distinct layout once.

    Raises ``ValueError`` with the FQN if two have one in common.
    """
    tensors: dict[str, TensorInfo] = {}
    numbers: dict[Layout, int] = {}
    for table in tables:
        own = [-1] * len(table.layouts)
        for fqn, tensor in table.tensors.items():
            if fqn in tensors:
                raise ValueError(fqn)
            if own[tensor.layout] < 0:
                own[tensor.layout] = numbers.setdefault(table.layouts[tensor.layout], len(numbers))
            tensors[fqn] = TensorInfo(
                tensor.dtype, tensor.shape, tensor.container, own[tensor.layout]
            )
    return Table(tensors, tuple(numbers))


@dataclass(frozen=True, slots=True)
class GroupSum:
    """The tensors that a rank shares with the other ranks of a group, as a sum.

    Attributes:
        size: The number of ranks in the group, each of which must have the same sum.
        total: The value of :meth:`Table.total` for these tensors.
    """

    size: int
    total: int


@dataclass(frozen=True, slots=True)
class Part:
    """The description of tensors in one rank's record.

    Attributes:
        table: The tensors whose first cell this rank has written, described for all ranks.
        own: Tensors that only this rank has, by their keys in its files.
        cells: This rank's value of :meth:`Table.sums`, over all tensors that it knows.
        treespec: The digest of the treespec of shared items.
        replica_digest: The digest of all compared plain tensors, if they are equal on all ranks.
        compared: If they are not equal: these tensors, all in ``own``, each with its digest.
        per_rank: The FQNs of per-rank items, except plain numbers.
        groups: The tensors shared with groups of ranks, by :func:`group_key`.
    """

    table: Table = Table()
    own: Table = Table()
    cells: int = 0
    treespec: str = ""
    replica_digest: str = ""
    compared: dict[str, str] = field(default_factory=dict[str, str])
    per_rank: tuple[str, ...] = ()
    groups: dict[str, GroupSum] = field(default_factory=dict[str, GroupSum])

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        groups = {key: [group.size, f"{group.total:032x}"] for key, group in self.groups.items()}
        return {
            **self.table.to_json(),
            "own": self.own.to_json(),
            "cells": f"{self.cells:032x}",
            "treespec": self.treespec,
            "replica_digest": self.replica_digest,
            "compared": self.compared,
            **({"per_rank": list(self.per_rank)} if self.per_rank else {}),
            **({"groups": groups} if groups else {}),
        }

    @classmethod
    def from_json(cls, body: dict[str, Any], rank: int, world_size: int, path: str) -> Part:
        """Parse the JSON form; raises ``IntegrityError``."""
        table = Table.from_json(body, world_size, path)
        own = Table.from_json(get(body, "own", dict, path), world_size, path)
        if any(
            layout.first_owner not in (rank, ELSEWHERE) for layout in table.layouts
        ) or own.layouts not in (
            (),
            (Layout((rank,)),),
        ):
            raise IntegrityError(f"{path}: the record describes tensors of other ranks")
        cells = get(body, "cells", str, path)
        groups = _groups_from_json(get(body, "groups", dict, path, {}))
        if _SUM.fullmatch(cells) is None or groups is None:
            raise IntegrityError(f"{path}: the sum is malformed")
        compared = cast("dict[str, Any]", get(body, "compared", dict, path))
        if not (
            compared.keys() <= own.tensors.keys()
            and all(isinstance(each, str) for each in compared.values())
        ):
            raise IntegrityError(
                f"{path}: the list of tensors that differ between ranks is malformed"
            )
        per_rank = cast("list[Any]", get(body, "per_rank", list, path, []))
        if not all(isinstance(fqn, str) for fqn in per_rank):
            raise IntegrityError(f"{path}: the list of per-rank items is malformed")
        treespec, replica_digest = (
            get(body, "treespec", str, path),
            get(body, "replica_digest", str, path),
        )
        return cls(
            table, own, int(cells, 16), treespec, replica_digest, compared, tuple(per_rank), groups
        )


def group_key(ranks: Iterable[int]) -> str:
    """Return a short name of a group of ranks.

    Records contain it instead of a list of thousands of ranks.
    """
    return xxhash.xxh3_128_hexdigest(repr(tuple(ranks)).encode())


def _groups_from_json(body: Any) -> dict[str, GroupSum] | None:
    groups: dict[str, GroupSum] = {}
    for key, pair in cast("dict[str, Any]", body).items():
        size, total = (
            cast("list[Any]", pair)
            if isinstance(pair, list) and len(cast("Any", pair)) == 2
            else (None, "")
        )
        if type(size) is not int or not isinstance(total, str) or _SUM.fullmatch(total) is None:
            return None
        groups[key] = GroupSum(size, int(total, 16))
    return groups
