"""Decides if a save holds all rows of a table, or changed rows and a link to the last full save.

Every save of changes alone is linked to a committed save that holds all rows, never to another save
of changes: there is no chain, and each step is complete.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from sidesave.stager.plan import FileImage, Structure
from sidesave.stager.state.flat_state import FlatState, TableItem
from sidesave.stager.tables import (
    ChangeTracking,
    Column,
    RowChanges,
    RowImage,
    RowTable,
    all_rows,
    changes,
)
from sidesave.writer_daemon.format.layout import CHANGED, ROWS

MOST_CHANGED: Final = 0.3
"""Fraction of the last full save's rows; if more have changed, all are saved."""
EVERY: Final = 20
"""One of this many saves holds all rows: a damaged file must not be in every checkpoint."""
_MAX_SAVES: Final = 8
"""Number of saves remembered that have the files of the last full one."""
_MAX_STEPS: Final = 1000
"""Number of steps for which the last save is remembered."""

Kinds = dict[str, tuple[torch.dtype, torch.Size]]
"""Dtype and shape by name."""


class SavedAs(NamedTuple):
    """A save of this session."""

    step: int
    sequence: int


@dataclass(slots=True, eq=False)
class Base:
    """A committed save that holds all rows of a table.

    Attributes:
        table: The object, if it still exists.
        token: Its change token at the save.
        columns: The columns of its rows.
        num_rows: Number of rows.
        container: The container with the rows.
        kinds: Dtype and shape of its tensors.
        names: Stems of its files' names.
        saves: The saves that have its files, or will have them once they are committed.
        links: The number of these that only link them.
    """

    table: Callable[[], RowTable | None]
    token: object
    columns: dict[str, Column]
    num_rows: int
    container: str
    kinds: Kinds
    names: tuple[str, ...]
    saves: list[SavedAs]
    links: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return _nbytes(self.kinds)


@dataclass(frozen=True, slots=True, eq=False)
class TableShare:
    """The part of a table that one save stages in its own container.

    With a ``base``, it has only the changes since then.
    """

    fqn: str
    table: TableItem
    container: str
    images: list[RowImage]
    token: object
    base: Base | None

    def kinds(self) -> Kinds:
        """The tensors that are staged."""
        return {name: kind for image in self.images for name, kind in image.kinds().items()}

    def containers(self) -> list[tuple[str, Kinds]]:
        """All tensors that the save has of the table, by container: also linked ones."""
        linked = [] if self.base is None else [(self.base.container, self.base.kinds)]
        return [(self.container, self.kinds()), *linked]

    @property
    def room_nbytes(self) -> int:
        """Bytes that the slot needs to keep its size when all rows are saved again."""
        nbytes = _nbytes(self.kinds())
        return nbytes if self.base is None else max(nbytes, self.base.nbytes)


def structure_of(shares: list[TableShare], suffix: str = "") -> Structure:
    """The containers of tables, with a suffix after the names of their tensors."""
    every = [(share.container, share.kinds()) for share in shares]
    return tuple(
        (container, tuple(name + suffix for name in kinds), tuple(kinds.values()))
        for container, kinds in every
    )


class Increments:
    """Tracks which tables have a committed full save in this session.

    Thread-safe: saves are committed in another thread.
    """

    def __init__(self, *, links: bool = True) -> None:
        """Start empty. Without ``links``, saves cannot link to earlier ones, and hold all rows."""
        self._links = links
        self._bases: dict[str, Base] = {}
        self._latest: dict[int, int] = {}
        self._under_way: dict[int, tuple[Sequence[TableShare], tuple[FileImage, ...], SavedAs]] = {}

    def shares(self, flat: FlatState) -> list[TableShare]:
        """Choose what the next save holds of each table."""
        return [self._share(fqn, table) for fqn, table in flat.tables.items()]

    def _share(self, fqn: str, table: TableItem) -> TableShare:
        value, base = table.value, self._bases.get(fqn)
        if base is not None and isinstance(value, ChangeTracking) and self._stays(base):
            changed = _changed(base, value, table.columns)
            if changed is not None:
                images = changes(changed, fqn, table.columns)
                return TableShare(fqn, table, table.stem + CHANGED, images, None, base)
        token = value.change_token() if isinstance(value, ChangeTracking) and self._links else None
        return TableShare(
            fqn, table, table.stem + ROWS, all_rows(value, fqn, table.columns), token, None
        )

    def _stays(self, base: Base) -> bool:
        """Whether the next save will find the base's files: no save under way replaces them all."""
        return any(self._latest.get(step, sequence) == sequence for step, sequence in base.saves)

    def began(
        self, saved: SavedAs, shares: Sequence[TableShare], files: tuple[FileImage, ...]
    ) -> None:
        """Add a save under way, even without tables: it may replace a step that others link to.

        Saves are requested while earlier ones are under way, and written in that order.
        """
        latest = self._latest
        if shares or latest:
            latest.pop(saved.step, None)
            latest[saved.step] = saved.sequence
            if len(latest) > _MAX_STEPS:
                del latest[next(iter(latest))]
        for share in shares:
            if share.base is not None:
                share.base.saves = [saved, *share.base.saves][:_MAX_SAVES]
                share.base.links += 1
        if shares:
            self._under_way[saved.sequence] = shares, files, saved

    def ended(self, sequence: int, *, committed: bool) -> None:
        """Note the outcome of a save."""
        under_way = self._under_way.pop(sequence, None)
        if under_way is None:
            return
        shares, files, saved = under_way
        for share in shares:
            if not committed:
                if share.base is not None and self._bases.get(share.fqn) is share.base:
                    del self._bases[share.fqn]
            elif share.base is None and (base := _base(share, files, saved)) is not None:
                self._bases[share.fqn] = base


def _changed(base: Base, table: ChangeTracking, columns: Mapping[str, Column]) -> RowChanges | None:
    """The changes since a full save; None if all rows must be saved again."""
    if base.table() is not table or base.columns != columns or base.links >= EVERY - 1:
        return None
    changed = table.changed_since(base.token)
    if changed is None or changed.num_rows + len(changed.removed) > MOST_CHANGED * base.num_rows:
        return None
    return changed


def _base(share: TableShare, files: tuple[FileImage, ...], saved: SavedAs) -> Base | None:
    """The base to which later saves of a table may link; None if the table tracks no changes."""
    if share.token is None:
        return None
    try:
        table = weakref.ref(share.table.value)
    except TypeError:  # without weak references the object could be confused with a later one
        return None
    names = tuple(file.name for file in files if file.container == share.container)
    (image,) = share.images
    return Base(
        table,
        share.token,
        share.table.columns,
        image.count,
        share.container,
        share.kinds(),
        names,
        [saved],
    )


def _nbytes(kinds: Kinds) -> int:
    return sum(dtype.itemsize * shape.numel() for dtype, shape in kinds.values())
