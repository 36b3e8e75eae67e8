"""Growing tables of rows by 64-bit ID: their interface, and their conversion to tensors of a file.

In a file the rows of a table are sorted by bucket, ``hash(id) mod 1024``, so that any number of
ranks can load their rows by reading ranges. Rows are copied chunk by chunk, so a table needs memory
for only one chunk besides the staging memory. NumPy does this: torch divides such operations among
cores and waits for all of them, which took ten times as long on a busy machine.
"""

from __future__ import annotations

import importlib.util
import itertools
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
"""Bytes of rows that are requested from a table, or passed to it, at once."""
_MAX_CHUNK_ROWS: Final = 1 << 18
_SORTED_ROWS: Final = 1 << 14
"""Approximate number of IDs sorted at once; they fit into a core's cache."""
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIERS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

_METHODS: Final = ("columns", "num_rows", "rows", "insert", "clear")

Rows = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""IDs, int64 ``[n]``, and columns by name, ``[n, *shape]`` each."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: an embedding, an optimizer slot, a counter.

    Attributes:
        dtype: The column's dtype.
        shape: The shape of one row: ``(16,)`` for an embedding of width 16, ``()`` for a counter.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@runtime_checkable
class RowTable(Protocol):
    """An object with rows by 64-bit ID, such as a dynamic embedding; each rank holds some IDs.

    An ID must not be on two ranks. The table must not change while ``save()`` runs.
    """

    def columns(self) -> Mapping[str, Column]:
        """Return the columns by name."""
        ...

    def num_rows(self) -> int:
        """Return the number of rows on this rank."""
        ...

    def rows(self, chunk_rows: int, columns: Sequence[str], /) -> Iterable[Rows]:
        """Yield all rows of this rank, each once, in any order.

        Args:
            chunk_rows: The maximum number of rows in one item.
            columns: The columns to yield. Tensors may be on any device.
        """
        ...

    def insert(self, ids: torch.Tensor, columns: Mapping[str, torch.Tensor], /) -> object:
        """Add rows with new IDs. The tensors are on the CPU and may be kept.

        Columns that are not passed get the values of a new row.
        """
        ...

    def clear(self) -> object:
        """Remove all rows."""
        ...


@dataclass(frozen=True, slots=True)
class RowChanges:
    """The changes of a table since a change token was taken.

    Attributes:
        num_rows: The number of rows that are new or may have changed.
        rows: Yields these rows as :meth:`RowTable.rows` does.
        removed: IDs of removed rows, int64 ``[n]``; IDs that were absent at the token are allowed.
    """

    num_rows: int
    rows: Callable[[int, Sequence[str]], Iterable[Rows]]
    removed: torch.Tensor


@runtime_checkable
class ChangeTracking(RowTable, Protocol):
    """A table that tracks changes; most saves write only these and link the file with all rows."""

    def change_token(self) -> object:
        """Return a token for the current content; must not be None."""
        ...

    def changed_since(self, token: object, /) -> RowChanges | None:
        """Return the changes since a token was taken; None if they are no longer known."""
        ...


def is_table(value: object) -> TypeGuard[RowTable]:
    """Whether a value is a table."""
    return hasattr(type(value), "num_rows") and isinstance(value, RowTable)


def may_be_meant_as_table(value: object) -> bool:
    """Whether a value is a table or lacks just one method; saving it otherwise would lose rows."""
    return hasattr(type(value), "num_rows") and len(_lacking(value)) <= 1


def _lacking(value: object) -> list[str]:
    return [name for name in _METHODS if not callable(getattr(type(value), name, None))]


def bucket_of(ids: torch.Tensor) -> torch.Tensor:
    """Return each ID's bucket, int64, on the device of ``ids``: splitmix64's finalizer mod 1024."""
    # torch lacks arithmetic for uint64
    first, second = (number - (1 << 64) for number in _MULTIPLIERS)
    mixed = _shifted(ids, 30).bitwise_xor_(ids).mul_(first)
    mixed.bitwise_xor_(_shifted(mixed, 27)).mul_(second)
    return mixed.bitwise_xor_(_shifted(mixed, 31)).bitwise_and_(BUCKETS - 1)


def owner_of(ids: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return the rank, of ``world_size``, that loads each ID, as int64 on the device of ``ids``.

    A table that distributes its rows over ranks by this rule has the right rows after a load.
    """
    return bucket_of(ids) % world_size


def _shifted(ids: torch.Tensor, bits: int) -> torch.Tensor:
    return (ids >> bits).bitwise_and_((1 << (64 - bits)) - 1)  # a logical shift, as for uint64


def buckets_on_host(ids: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Return the bucket of each ID, as :func:`bucket_of` does, in a NumPy array."""
    import numpy as np

    mixed = on_host(ids).view(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
    return ((mixed ^ (mixed >> np.uint64(31))) & np.uint64(BUCKETS - 1)).astype(np.uint16)


def on_host(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's bits as a NumPy integer array; shares a CPU tensor's memory if possible."""
    bits = _BITS[tensor.dtype.itemsize]
    return cast(
        "Any", tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(bits).numpy()
    )


def chunk_rows(columns: Iterable[Column]) -> int:
    """Return the number of rows in one chunk."""
    return max(
        1, min(_MAX_CHUNK_ROWS, CHUNK_NBYTES // (8 + sum(column.nbytes for column in columns)))
    )


@dataclass(frozen=True, slots=True, eq=False)
class RowImage:
    """Rows to write as tensors of a file: ``ids``, ``offsets`` and columns, with a common prefix.

    Attributes:
        prefix: The common prefix of the tensors' names, with its dot.
        count: The number of rows.
        columns: The columns by name.
        rows: Yields the rows as :meth:`RowTable.rows` does.
    """

    prefix: str
    count: int
    columns: Mapping[str, Column]
    rows: Callable[[int, Sequence[str]], Iterable[Rows]]

    def kinds(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return dtype and shape of each tensor, by its full name."""
        kinds = {
            IDS: (torch.int64, torch.Size([self.count])),
            OFFSETS: (torch.int64, torch.Size([BUCKETS + 1])),
        }
        kinds |= {
            name: (each.dtype, torch.Size([self.count, *each.shape]))
            for name, each in self.columns.items()
        }
        return {self.prefix + name: kind for name, kind in kinds.items()}

    def fill(self, views: Mapping[str, torch.Tensor]) -> None:
        """Copy the rows into ``views``, tensors by their full names; blocks until done.

        Raises:
            StagingError: The number, dtype or shape of the rows is not what the table has stated.
            UnsupportedValueError: An ID occurs twice. (Lists of removed IDs may repeat IDs.)
        """
        import numpy as np

        targets = {
            name: on_host(views[self.prefix + name]) for name in (IDS, OFFSETS, *self.columns)
        }
        offsets, names = targets[OFFSETS], tuple(self.columns)
        offsets[:] = 0
        for ids, _ in self.rows(_MAX_CHUNK_ROWS, ()):
            self._check(ids, {}, ())
            offsets[1:] += np.bincount(buckets_on_host(ids), minlength=BUCKETS)
        np.cumsum(offsets, out=offsets)
        if int(offsets[-1]) != self.count:
            raise self._changed(f"yielded {int(offsets[-1]):,} rows instead of {self.count:,}")
        next_row = offsets[:-1].copy()
        for ids, columns in self.rows(chunk_rows(self.columns.values()), names):
            self._check(ids, columns, names)
            bucket = buckets_on_host(ids)
            counts = np.bincount(bucket, minlength=BUCKETS)
            rows = np.empty(len(bucket), np.int64)
            begins = np.repeat(next_row - counts.cumsum() + counts, counts)
            rows[np.argsort(bucket, kind="stable")] = begins + np.arange(len(rows))
            next_row += counts
            if (next_row > offsets[1:]).any():
                raise self._changed("yielded other rows the second time")
            for name, values in ((IDS, ids), *((name, columns[name]) for name in names)):
                targets[name][rows] = on_host(values)
        if not np.array_equal(next_row, offsets[1:]):
            raise self._changed("yielded fewer rows the second time")
        if self.columns and len(repeated := _repeated(targets[IDS], offsets)):
            ids = ", ".join(map(str, repeated[:5].tolist())) + (
                ", ..." if len(repeated) > 5 else ""
            )
            raise UnsupportedValueError(
                f"{self._table}: the table yields {len(repeated):,} ids more than once: {ids}; "
                "each id must have one row"
            )

    def _check(
        self, ids: torch.Tensor, columns: Mapping[str, torch.Tensor], names: Sequence[str]
    ) -> None:
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise self._changed(
                f"yielded ids of {ids.dtype}{list(ids.shape)}, which must be one-dimensional int64"
            )
        for name in names:
            column, values = self.columns[name], columns.get(name)
            shape = (len(ids), *column.shape)
            if values is None or values.dtype != column.dtype or tuple(values.shape) != shape:
                kind = "nothing" if values is None else f"{values.dtype}{list(values.shape)}"
                raise self._changed(
                    f"yielded {kind} for {name}, which must be {column.dtype}{list(shape)}"
                )

    @property
    def _table(self) -> str:
        return self.prefix.removesuffix(".").removesuffix(f".{CHANGED}").removesuffix(f".{REMOVED}")

    def _changed(self, how: str) -> StagingError:
        text = (
            f"{self._table}: the table {how}; it must not change during save(), and rows must "
            "match columns()"
        )
        return StagingError(text)


def _repeated(ids: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return repeated IDs, each once; ``ids`` are sorted by bucket, see ``offsets``."""
    import numpy as np

    # sorted together: equal ids are in one bucket
    buckets = max(1, BUCKETS * _SORTED_ROWS // max(1, len(ids)))
    borders = [*offsets[:-1:buckets].tolist(), len(ids)]
    groups = (np.sort(ids[begin:end]) for begin, end in itertools.pairwise(borders))
    return np.unique(np.concatenate([group[1:][group[1:] == group[:-1]] for group in groups]))


def require_numpy(fqn: str) -> None:
    """Raise ``UnsupportedValueError`` if NumPy, which torch does not require, is not installed."""
    if importlib.util.find_spec("numpy") is None:
        raise UnsupportedValueError(f"{fqn}: tables of rows need NumPy: pip install numpy")


def checked_columns(table: RowTable, fqn: str, known: Iterable[torch.dtype]) -> dict[str, Column]:
    """Return a table's columns; ``UnsupportedValueError`` for names or dtypes files cannot hold."""
    require_numpy(fqn)
    if lacking := _lacking(table):
        text = (
            f"{fqn}: a {type(table).__qualname__} lacks {lacking[0]}(), but has the other methods "
            "of a"
        )
        raise UnsupportedValueError(f"{text} sidesave.RowTable: add it, or rename the others")
    columns = dict(table.columns())
    dtypes = frozenset(known)
    for name, column in columns.items():
        if name in RESERVED or not name or "." in name or name.endswith("_extra_state"):
            raise UnsupportedValueError(
                f"{fqn}: {name!r} is not a valid name of a column; rename it"
            )
        if column.dtype not in dtypes:
            raise UnsupportedValueError(f"{fqn}.{name}: a column of {column.dtype} cannot be saved")
    if not columns:
        raise UnsupportedValueError(f"{fqn}: a table without columns cannot be saved")
    return columns


def all_rows(table: RowTable, fqn: str, columns: Mapping[str, Column]) -> list[RowImage]:
    """Return the image of all rows of a table."""
    return [RowImage(f"{fqn}.", table.num_rows(), columns, table.rows)]


def changes(changed: RowChanges, fqn: str, columns: Mapping[str, Column]) -> list[RowImage]:
    """Return the images of a table's changed rows and of its removed IDs."""
    removed = changed.removed

    def removed_rows(chunk_rows: int, columns: Sequence[str]) -> Iterable[Rows]:
        return [(removed[at : at + chunk_rows], {}) for at in range(0, len(removed), chunk_rows)]

    return [
        RowImage(f"{fqn}.{CHANGED}.", changed.num_rows, columns, changed.rows),
        RowImage(f"{fqn}.{REMOVED}.", len(removed), {}, removed_rows),
    ]
