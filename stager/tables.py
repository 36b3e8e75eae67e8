"""Tables of rows by 64-bit id, which grow: what such an object offers, and how its rows become tensors of a file.

In a file the rows of a table are sorted by bucket, ``hash(id) mod 1024``, so that any number of ranks can take what is
theirs by reading ranges. Rows are put where they go chunk by chunk: beside the staging memory a table takes one chunk.
That is done by NumPy: torch divides such operations among cores, and where these have other work the one that waits
for all of them was seen to take ten times as long.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeGuard, cast, runtime_checkable

import torch

from sidesave.errors import StagingError, UnsupportedValueError

if TYPE_CHECKING:
    import numpy as np

BUCKETS: Final = 1024
IDS: Final = "ids"
OFFSETS: Final = "offsets"
CHANGED: Final = "changed"
REMOVED: Final = "removed"
RESERVED: Final = frozenset({IDS, OFFSETS, CHANGED, REMOVED})
"""Names that no column can have."""
CHUNK_NBYTES: Final = 32 << 20
"""So many bytes of rows are asked of a table at once, and given to it."""
_MAX_CHUNK_ROWS: Final = 1 << 18
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIERS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

_METHODS: Final = ("columns", "num_rows", "rows", "insert", "clear")

Rows = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""Ids, int64 ``[n]``, and columns by name, ``[n, *shape]`` each."""


@dataclass(frozen=True, slots=True)
class Column:
    """What a table has in each row under one name: an embedding, a slot of an optimizer, a counter.

    Attributes:
        dtype: Of the numbers.
        shape: Of one row: ``(16,)`` for an embedding of width 16, ``()`` for a counter.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in a row."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@runtime_checkable
class RowTable(Protocol):
    """An object that holds rows by 64-bit id, such as a dynamic embedding: each rank has those of some ids.

    No id may be on two ranks. Between ``save()`` being called and its return a table must not change.
    """

    def columns(self) -> Mapping[str, Column]:
        """What is in each row, by name."""
        ...

    def num_rows(self) -> int:
        """How many rows there are here."""
        ...

    def rows(self, chunk_rows: int, columns: Sequence[str], /) -> Iterable[Rows]:
        """All rows, once each, in any order, at most so many at a time; of the columns these alone, on any device."""
        ...

    def insert(self, ids: torch.Tensor, columns: Mapping[str, torch.Tensor], /) -> object:
        """Take rows of ids that are not here yet; tensors are in host memory, and may be kept.

        Columns that are not given get what a new row has.
        """
        ...

    def clear(self) -> object:
        """Forget all rows."""
        ...


@dataclass(frozen=True, slots=True)
class RowChanges:
    """What has changed in a table since some moment.

    Attributes:
        num_rows: How many rows are new, or may have other values.
        rows: Gives these as :meth:`RowTable.rows` does.
        removed: The ids of rows that are gone, int64 ``[n]``; ids that were not there then do no harm.
    """

    num_rows: int
    rows: Callable[[int, Sequence[str]], Iterable[Rows]]
    removed: torch.Tensor


@runtime_checkable
class ChangeTracking(RowTable, Protocol):
    """A table that can tell what has changed: most saves then hold that alone, beside a link to all its rows."""

    def change_token(self) -> object:
        """Stands for this moment; anything but None."""
        ...

    def changed_since(self, token: object, /) -> RowChanges | None:
        """What has changed since then; None where that is not known any more."""
        ...


def is_table(value: object) -> TypeGuard[RowTable]:
    """Whether a value is a table; of most the class alone tells that it is none."""
    return hasattr(type(value), "num_rows") and isinstance(value, RowTable)


def may_be_meant_as_table(value: object) -> bool:
    """Whether a value is a table, or lacks one method of one: saved as what else it is, its rows would be lost."""
    return hasattr(type(value), "num_rows") and len(_lacking(value)) <= 1


def _lacking(value: object) -> list[str]:
    return [name for name in _METHODS if not callable(getattr(type(value), name, None))]


def bucket_of(ids: torch.Tensor) -> torch.Tensor:
    """The bucket of each id, int64: the finalizer of splitmix64 on its 64 bits, mod 1024; on the device of the ids."""
    first, second = (
        number - (1 << 64) for number in _MULTIPLIERS
    )  # as torch knows no numbers of 64 bits without a sign
    mixed = _shifted(ids, 30).bitwise_xor_(ids).mul_(first)
    mixed.bitwise_xor_(_shifted(mixed, 27)).mul_(second)
    return mixed.bitwise_xor_(_shifted(mixed, 31)).bitwise_and_(BUCKETS - 1)


def owner_of(ids: torch.Tensor, world_size: int) -> torch.Tensor:
    """The rank of so many that is given the rows of these ids when it loads them, int64; on the device of the ids.

    A table whose rows are divided among ranks by this rule has after a load what belongs to it.
    """
    return bucket_of(ids) % world_size


def _shifted(ids: torch.Tensor, bits: int) -> torch.Tensor:
    return (ids >> bits).bitwise_and_((1 << (64 - bits)) - 1)  # as of numbers without a sign


def buckets_on_host(ids: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The same, as :func:`on_host` has them."""
    import numpy as np

    mixed = on_host(ids).view(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
    return ((mixed ^ (mixed >> np.uint64(31))) & np.uint64(BUCKETS - 1)).astype(np.uint16)


def on_host(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A tensor as integers of the same size, of which NumPy knows each; its own memory where that is on the host."""
    bits = _BITS[tensor.dtype.itemsize]
    return cast("Any", tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(bits).numpy())


def chunk_rows(columns: Iterable[Column]) -> int:
    """How many rows are one chunk."""
    return max(1, min(_MAX_CHUNK_ROWS, CHUNK_NBYTES // (8 + sum(column.nbytes for column in columns))))


@dataclass(frozen=True, slots=True, eq=False)
class RowImage:
    """Rows that will be tensors of a file: ``ids``, ``offsets`` and the columns, under names that begin alike.

    Attributes:
        prefix: The beginning of the names, with its dot.
        count: How many rows.
        columns: What is in them.
        rows: Gives them as :meth:`RowTable.rows` does.
    """

    prefix: str
    count: int
    columns: Mapping[str, Column]
    rows: Callable[[int, Sequence[str]], Iterable[Rows]]

    def kinds(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Dtype and shape of each tensor, by its whole name."""
        kinds = {IDS: (torch.int64, torch.Size([self.count])), OFFSETS: (torch.int64, torch.Size([BUCKETS + 1]))}
        kinds |= {name: (each.dtype, torch.Size([self.count, *each.shape])) for name, each in self.columns.items()}
        return {self.prefix + name: kind for name, kind in kinds.items()}

    def fill(self, views: Mapping[str, torch.Tensor]) -> None:
        """Put the rows into these tensors, by their whole names; blocks until they are there.

        Raises:
            StagingError: There are more rows, or fewer, than the table has said, or they are of another kind.
        """
        import numpy as np

        targets = {name: on_host(views[self.prefix + name]) for name in (IDS, OFFSETS, *self.columns)}
        offsets, names = targets[OFFSETS], tuple(self.columns)
        offsets[:] = 0
        for ids, _ in self.rows(_MAX_CHUNK_ROWS, ()):
            self._check(ids, {}, ())
            offsets[1:] += np.bincount(buckets_on_host(ids), minlength=BUCKETS)
        np.cumsum(offsets, out=offsets)
        if int(offsets[-1]) != self.count:
            raise self._changed(f"has {int(offsets[-1]):,} rows and not {self.count:,}")
        next_row = offsets[:-1].copy()
        for ids, columns in self.rows(chunk_rows(self.columns.values()), names):
            self._check(ids, columns, names)
            bucket = buckets_on_host(ids)
            here = np.bincount(bucket, minlength=BUCKETS)
            rows = np.empty(len(bucket), np.int64)
            begins = np.repeat(next_row - here.cumsum() + here, here)
            rows[np.argsort(bucket, kind="stable")] = begins + np.arange(len(rows))
            next_row += here
            if (next_row > offsets[1:]).any():
                raise self._changed("gives other rows")
            for name, values in ((IDS, ids), *((name, columns[name]) for name in names)):
                targets[name][rows] = on_host(values)
        if not np.array_equal(next_row, offsets[1:]):
            raise self._changed("gives fewer rows")

    def _check(self, ids: torch.Tensor, columns: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise self._changed(f"gives ids of {ids.dtype}{list(ids.shape)}, which must be int64 and one after another")
        for name in names:
            column, values = self.columns[name], columns.get(name)
            shape = (len(ids), *column.shape)
            if values is None or values.dtype != column.dtype or tuple(values.shape) != shape:
                found = "nothing" if values is None else f"{values.dtype}{list(values.shape)}"
                raise self._changed(f"gives {found} for {name}, which is {column.dtype}{list(shape)}")

    def _changed(self, how: str) -> StagingError:
        table = self.prefix.removesuffix(".").removesuffix(f".{CHANGED}").removesuffix(f".{REMOVED}")
        return StagingError(f"{table}: the table {how}; it must not change during save(), and rows must be as it says")


def require_numpy(fqn: str) -> None:
    """Raise ``UnsupportedValueError`` where NumPy, which torch does without, is not there."""
    if importlib.util.find_spec("numpy") is None:
        raise UnsupportedValueError(f"{fqn}: tables of rows need NumPy: pip install numpy")


def checked_columns(table: RowTable, fqn: str, known: Iterable[torch.dtype]) -> dict[str, Column]:
    """A table's columns; raises ``UnsupportedValueError`` for names and dtypes that no file can have."""
    require_numpy(fqn)
    if lacking := _lacking(table):
        text = f"{fqn}: a {type(table).__qualname__} lacks {lacking[0]}(), and has all else of a sidesave.RowTable"
        raise UnsupportedValueError(f"{text}: add it, or rename the others")
    columns = dict(table.columns())
    dtypes = frozenset(known)
    for name, column in columns.items():
        if name in RESERVED or not name or "." in name or name.endswith("_extra_state"):
            raise UnsupportedValueError(f"{fqn}: a column cannot be called {name!r}; rename it")
        if column.dtype not in dtypes:
            raise UnsupportedValueError(f"{fqn}.{name}: a column of {column.dtype} cannot be saved")
    if not columns:
        raise UnsupportedValueError(f"{fqn}: a table without columns cannot be saved")
    return columns


def all_rows(table: RowTable, fqn: str, columns: Mapping[str, Column]) -> list[RowImage]:
    """All rows of a table."""
    return [RowImage(f"{fqn}.", table.num_rows(), columns, table.rows)]


def changes(changed: RowChanges, fqn: str, columns: Mapping[str, Column]) -> list[RowImage]:
    """What has changed in a table, and what is gone."""
    removed = changed.removed

    def gone(chunk_rows: int, columns: Sequence[str]) -> Iterable[Rows]:
        return [(removed[at : at + chunk_rows], {}) for at in range(0, len(removed), chunk_rows)]

    return [
        RowImage(f"{fqn}.{CHANGED}.", changed.num_rows, columns, changed.rows),
        RowImage(f"{fqn}.{REMOVED}.", len(removed), {}, gone),
    ]
