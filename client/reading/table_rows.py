"""Reads one rank's share of a table's rows, whatever number of ranks saved it.

Rank r of W has the buckets r, r + W, r + 2 W and so on, of the files of all ranks; in a save of
changes alone, these replace rows of the last full save. Rows are read in ranges, and each is
checked to be in its bucket, and only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from sidesave.client.reading.checkpoint_reader import CheckpointReader
from sidesave.client.reading.stored import StoredTensor, Wanted, without_rank
from sidesave.errors import IntegrityError
from sidesave.stager.tables import (
    BUCKETS,
    CHANGED,
    IDS,
    OFFSETS,
    REMOVED,
    buckets_on_host,
    on_host,
    require_numpy,
)
from sidesave.writer_daemon.format.layout import ROWS, TensorInfo
from sidesave.writer_daemon.format.tensor_file import BLOCK_NBYTES

if TYPE_CHECKING:
    import numpy as np

_TOGETHER_NBYTES: Final = 64 << 20
"""Columns up to this size are read together, as they share blocks; larger ones one at a time."""
_Ranges = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows in a file of one rank: all, those that have changed, or the ids of removed ones."""

    rank: int
    prefix: str
    suffix: str

    def name(self, column: str) -> str:
        return f"{self.prefix}{column}{self.suffix}"


@dataclass(frozen=True, slots=True)
class _Part:
    """The files of a table that one rank saved."""

    rows: _Rows
    changed: _Rows | None = None
    removed: _Rows | None = None

    def all(self) -> list[_Rows]:
        return [each for each in (self.rows, self.changed, self.removed) if each is not None]


@dataclass(slots=True)
class _Share:
    """This rank's share of some rows: their ranges, and which of them to keep, None for all."""

    rows: _Rows
    ranges: _Ranges
    kept: torch.Tensor | None = None


def tables_in(reader: CheckpointReader) -> dict[str, str]:
    """The tables of a checkpoint, each with a container that holds rows of it."""
    end = f".{OFFSETS}"
    found: dict[str, str] = {}
    for rank in range(reader.manifest.world_size):
        for name, info in _tensors(reader, rank).items():
            if info.container.endswith(ROWS) and without_rank(name).endswith(end):
                found.setdefault(without_rank(name).removesuffix(end), info.container)
    return found


def _tensors(reader: CheckpointReader, rank: int) -> dict[str, TensorInfo]:
    """The tensors saved by a rank that include those of tables."""
    return (
        reader.record(rank).part.own.tensors
        if reader.manifest.world_size > 1
        else reader.manifest.table.tensors
    )


class SavedTable:
    """A table in a checkpoint."""

    def __init__(self, reader: CheckpointReader, fqn: str) -> None:
        """Find its parts; raises ``IntegrityError`` if it has none, and the reader's errors.

        Raises ``UnsupportedValueError`` without NumPy.
        """
        require_numpy(fqn)
        self.fqn = fqn
        self._reader = reader
        reader.open_all()
        self._parts = [
            part
            for rank in range(reader.manifest.world_size)
            if (part := self._part(rank)) is not None
        ]
        if not self._parts:
            raise IntegrityError(f"{reader.path}: the table {fqn} is missing")

    def _part(self, rank: int) -> _Part | None:
        suffix = f"@rank-{rank:05d}" if rank else ""
        there = self._tensors(rank)
        prefixes = {kind: f"{self.fqn}.{kind}" for kind in ("", f"{CHANGED}.", f"{REMOVED}.")}
        rows, changed, removed = (
            _Rows(rank, prefix, suffix) if f"{prefix}{OFFSETS}{suffix}" in there else None
            for prefix in prefixes.values()
        )
        if (changed is None) != (removed is None) or (changed is not None and rows is None):
            raise IntegrityError(
                f"{self._reader.path}: of the table {self.fqn} rank {rank} has only changes, or a "
                "part"
            )
        return None if rows is None else _Part(rows, changed, removed)

    def _tensors(self, rank: int) -> dict[str, TensorInfo]:
        return _tensors(self._reader, rank)

    def check(self) -> None:
        """Read all ids; raises like :meth:`read` for all ranks together."""
        shares, _ = self._own_rows(0, 1, verify=True)
        for share in shares:
            own = [self._reader.entry(name) for name in self._columns(share.rows)]
            if any(
                stored.shape[:1] != self._reader.entry(share.rows.name(IDS)).shape for stored in own
            ):
                raise IntegrityError(
                    f"{self._reader.path}: {self.fqn} has columns with other numbers of rows than "
                    "ids"
                )

    def _columns(self, rows: _Rows) -> list[str]:
        return [
            name
            for name in self._tensors(rows.rank)
            if name.endswith(rows.suffix) and self._is_column(name, rows)
        ]

    def _is_column(self, name: str, rows: _Rows) -> bool:
        column = name.removeprefix(rows.prefix).removesuffix(rows.suffix)
        return name.startswith(rows.prefix) and "." not in column and column not in (IDS, OFFSETS)

    def column(self, name: str) -> StoredTensor:
        """A column, or the ids, as stored by one rank; ``IntegrityError`` if it is missing."""
        return self._reader.entry(self._parts[0].rows.name(name))

    def read(
        self, columns: Iterable[str], rank: int, size: int, *, verify: bool = True
    ) -> dict[str, torch.Tensor]:
        """Return the ids of the rows of ``rank`` of ``size`` and these columns; blocking.

        Ids and columns are in one order, in fresh host memory.

        Raises:
            IntegrityError: A row is in the wrong bucket, an id occurs twice, columns and ids differ
                in length, or a block does not match its digest.
            HostMemoryError: There is not enough memory.
        """
        shares, ids = self._own_rows(rank, size, verify=verify)
        loaded, group, nbytes = {IDS: ids}, list[str](), 0
        names = [name for name in dict.fromkeys(columns) if name != IDS]
        for name in names:
            group.append(name)
            nbytes += sum(self._reader.entry(share.rows.name(name)).nbytes for share in shares)
            if nbytes >= _TOGETHER_NBYTES or name == names[-1]:
                every = [(each, share) for each in group for share in shares]
                values = self._values(
                    [share.rows.name(each) for each, share in every], [s for _, s in every], verify
                )
                kept = [
                    _kept(some, share.kept) for some, (_, share) in zip(values, every, strict=True)
                ]
                for number, each in enumerate(group):
                    loaded[each] = _cat(kept[number * len(shares) : (number + 1) * len(shares)])
                group, nbytes = [], 0
        return loaded

    def _own_rows(self, rank: int, size: int, *, verify: bool) -> tuple[list[_Share], torch.Tensor]:
        """The places of a rank's rows, and their ids."""
        import numpy as np

        every = [rows for part in self._parts for rows in part.all()]
        names = {rows: rows.name(OFFSETS) for rows in every}
        offsets = self._reader.read(names.values(), verify=verify)
        shares = {
            rows: _Share(rows, self._ranges(offsets[name], rows, rank, size))
            for rows, name in names.items()
        }
        wanted = [rows.name(IDS) for rows in every]
        ids = dict(
            zip(every, self._values(wanted, [shares[rows] for rows in every], verify), strict=True)
        )
        for rows, share in shares.items():
            counts = [stop - start for start, stop in share.ranges]
            if not np.array_equal(
                buckets_on_host(ids[rows]), np.repeat(np.arange(rank, BUCKETS, size), counts)
            ):
                raise IntegrityError(
                    f"{self._reader.path}: {rows.name(IDS)} has rows in the wrong bucket"
                )
        chosen: list[_Share] = []
        for part in self._parts:
            if part.changed is not None and part.removed is not None:
                others = np.sort(on_host(torch.cat([ids[part.changed], ids[part.removed]])))
                shares[part.rows].kept = torch.from_numpy(
                    _are_elsewhere(on_host(ids[part.rows]), others)
                )
            chosen += [shares[rows] for rows in (part.rows, part.changed) if rows is not None]
        own = [_kept(ids[share.rows], share.kept) for share in chosen]
        self._refuse_twice(own, chosen)
        return chosen, _cat(own)

    def _ranges(self, offsets: torch.Tensor, rows: _Rows, rank: int, size: int) -> _Ranges:
        count = self._reader.entry(rows.name(IDS)).shape
        good = offsets.dtype == torch.int64 and offsets.shape == (BUCKETS + 1,) and len(count) == 1
        if (
            not good
            or int(offsets[0])
            or (int(offsets[-1]),) != count
            or bool((offsets.diff() < 0).any())
        ):
            raise IntegrityError(
                f"{self._reader.path}: {rows.name(OFFSETS)} does not say where the rows are"
            )
        borders = cast("list[int]", offsets.tolist())
        return [(borders[bucket], borders[bucket + 1]) for bucket in range(rank, BUCKETS, size)]

    def _values(
        self, names: Sequence[str], shares: Sequence[_Share], verify: bool
    ) -> list[torch.Tensor]:
        """The rows of these shares, of one tensor each."""
        plans: list[tuple[StoredTensor, _Ranges, list[Wanted]]] = []
        for name, share in zip(names, shares, strict=True):
            stored = self._reader.entry(name)
            like = self.column(name.removeprefix(share.rows.prefix).removesuffix(share.rows.suffix))
            count = self._reader.entry(share.rows.name(IDS)).shape[0]
            if (stored.dtype, stored.shape[1:], stored.shape[:1]) != (
                like.dtype,
                like.shape[1:],
                (count,),
            ):
                what = f"{stored.dtype}{list(stored.shape)}"
                raise IntegrityError(
                    f"{self._reader.path}: {name} is {what}, which fits neither its ids nor other "
                    "ranks"
                )
            spans = list(_spans(share.ranges, stored.nbytes // max(1, count)))
            zeros = (0,) * (len(stored.shape) - 1)
            boxes: list[Wanted] = [
                (name, ((start, *zeros), (stop - start, *stored.shape[1:])))
                for start, stop in spans
            ]
            plans.append((stored, spans, boxes))
        read = self._reader.read_boxes((box for *_, boxes in plans for box in boxes), verify=verify)
        values: list[torch.Tensor] = []
        for (stored, spans, boxes), share in zip(plans, shares, strict=True):
            pieces = list(_cut(share.ranges, spans, [read[box] for box in boxes]))
            values.append(
                _cat(pieces)
                if pieces
                else torch.empty((0, *stored.shape[1:]), dtype=stored.dtype, device="cpu")
            )
        return values

    def _refuse_twice(self, ids: Sequence[torch.Tensor], shares: Sequence[_Share]) -> None:
        import numpy as np

        every = _cat(ids)
        ordered = np.sort(on_host(every))
        if not (ordered[1:] == ordered[:-1]).any():
            return
        ordered, order = torch.sort(every, stable=True)
        twice = torch.nonzero(ordered[1:] == ordered[:-1]).flatten()
        ends = torch.tensor([len(each) for each in ids], device="cpu").cumsum(0)
        at = int(twice[0])
        ranks = [
            shares[int(torch.searchsorted(ends, order[place], right=True))].rows.rank
            for place in (at, at + 1)
        ]
        raise IntegrityError(
            f"{self._reader.path}: of the table {self.fqn} the id {int(ordered[at])} is twice "
            f"there, saved by rank {ranks[0]} and by rank {ranks[1]}, and so are "
            f"{len(twice) - 1:,} more; each id must be on one rank"
        )


def _are_elsewhere(ids: np.ndarray[Any, Any], others: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a mask of the ids that are not in ``others``, which is sorted."""
    import numpy as np

    if not len(others):
        return np.ones(len(ids), bool)
    return others[np.minimum(np.searchsorted(others, ids), len(others) - 1)] != ids


def _spans(ranges: _Ranges, row_nbytes: int) -> Iterator[tuple[int, int]]:
    """Ranges to read: gaps of up to a block between wanted ranges are read, too."""
    start = stop = -1
    for first, last in ranges:
        if first == last:
            continue
        if start >= 0 and (first - stop) * row_nbytes <= BLOCK_NBYTES:
            stop = last
            continue
        if start >= 0:
            yield start, stop
        start, stop = first, last
    if start >= 0:
        yield start, stop


def _cut(
    ranges: _Ranges, spans: _Ranges, tensors: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Cut the wanted ranges out of the tensors read; adjacent ranges give one piece."""
    left = iter(zip(spans, tensors, strict=True))
    span, tensor = (0, 0), torch.empty(0, device="cpu")
    start = stop = -1
    for first, last in ranges:
        if first == last:
            continue
        if first >= span[1]:
            if start >= 0:
                yield tensor[start - span[0] : stop - span[0]]
            span, tensor = next(left)
            start = first
        elif first != stop:
            yield tensor[start - span[0] : stop - span[0]]
            start = first
        stop = last
    if start >= 0:
        yield tensor[start - span[0] : stop - span[0]]


def _kept(values: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    return values if kept is None else values[kept]


def _cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
