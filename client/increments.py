"""What a save holds of tables: all rows, or those that have changed beside a link to the last full save.

Every save that holds changes alone is linked to one that is committed and holds all, never to another one of its kind:
there is no chain, and each step is complete.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from sidesave.client.runs.info import CheckpointInfo
from sidesave.stager.plan import FileImage, Structure
from sidesave.stager.state.flat_state import FlatState, TableItem
from sidesave.stager.tables import ChangeTracking, Column, RowChanges, RowImage, RowTable, all_rows, changes
from sidesave.writer_daemon.format.layout import CHANGED, ROWS

MOST_CHANGED: Final = 0.3
"""Of the rows of the last full save: where more have changed since all are saved."""
EVERY: Final = 20
"""Of so many saves one holds all rows: a damaged file must not be in every checkpoint."""
_MAX_SAVES: Final = 8
"""So many saves are remembered in which the files of the last full one are."""
_MAX_STEPS: Final = 1000
"""Of so many steps it is known which save was the last one of them."""

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
        table: The object, if it is still there.
        token: Its moment.
        columns: What was in its rows.
        num_rows: How many there were.
        container: The one with the rows.
        kinds: Its tensors.
        names: How the names of its files begin.
        saves: Those that have its files, or will have them once they are committed.
        links: How many of these only link them.
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
        """What they take."""
        return _nbytes(self.kinds)


@dataclass(frozen=True, slots=True, eq=False)
class TableShare:
    """What one save stages of a table in a container of its own; with a ``base`` what has changed since then."""

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
        """All tensors that the save has of the table, by container: also those that are linked."""
        linked = [] if self.base is None else [(self.base.container, self.base.kinds)]
        return [(self.container, self.kinds()), *linked]

    @property
    def room_nbytes(self) -> int:
        """What the slot should have room for, so that it stays the same when all rows are saved again."""
        nbytes = _nbytes(self.kinds())
        return nbytes if self.base is None else max(nbytes, self.base.nbytes)


def structure_of(shares: list[TableShare], suffix: str = "") -> Structure:
    """The containers of tables, with a suffix behind the names of their tensors."""
    every = [(share.container, share.kinds()) for share in shares]
    return tuple(
        (container, tuple(name + suffix for name in kinds), tuple(kinds.values())) for container, kinds in every
    )


class Increments:
    """Which tables have a committed full save in this session. Thread-safe: saves are committed in another thread."""

    def __init__(self, *, links: bool = True) -> None:
        """Nothing has been saved. Where nothing ``links`` to earlier saves, each holds all rows."""
        self._links = links
        self._bases: dict[str, Base] = {}
        self._latest: dict[int, int] = {}

    def shares(self, flat: FlatState) -> list[TableShare]:
        """What the next save holds of each table."""
        return [self._share(fqn, table) for fqn, table in flat.tables.items()]

    def _share(self, fqn: str, table: TableItem) -> TableShare:
        value, base = table.value, self._bases.get(fqn)
        if base is not None and isinstance(value, ChangeTracking) and self._stays(base):
            changed = _changed(base, value, table.columns)
            if changed is not None:
                images = changes(changed, fqn, table.columns)
                return TableShare(fqn, table, table.stem + CHANGED, images, None, base)
        token = value.change_token() if isinstance(value, ChangeTracking) and self._links else None
        return TableShare(fqn, table, table.stem + ROWS, all_rows(value, fqn, table.columns), token, None)

    def _stays(self, base: Base) -> bool:
        """Whether a save that is called next finds the files: no other one that is under way replaces them all."""
        return any(self._latest.get(step, sequence) == sequence for step, sequence in base.saves)

    def follow(
        self, shares: Sequence[TableShare], files: tuple[FileImage, ...], saved: SavedAs
    ) -> Callable[[CheckpointInfo | None], None]:
        """A save is under way. What is returned is to be told how it ends: its checkpoint, or None where it has failed.

        Saves are called for while earlier ones are under way, and written in that order.
        """
        bases, latest = self._bases, self._latest
        if shares or latest:
            latest.pop(saved.step, None)
            latest[saved.step] = saved.sequence
            if len(latest) > _MAX_STEPS:
                del latest[next(iter(latest))]
        for share in shares:
            if share.base is not None:
                share.base.saves = [saved, *share.base.saves][:_MAX_SAVES]
                share.base.links += 1

        def ended(info: CheckpointInfo | None) -> None:
            for share in shares:
                if info is None:
                    if share.base is not None and bases.get(share.fqn) is share.base:
                        del bases[share.fqn]
                elif share.base is None and (base := _base(share, files, saved)) is not None:
                    bases[share.fqn] = base

        return ended


def _changed(base: Base, table: ChangeTracking, columns: Mapping[str, Column]) -> RowChanges | None:
    """What has changed since a full save; None where all rows are to be saved again."""
    if base.table() is not table or base.columns != columns or base.links >= EVERY - 1:
        return None
    changed = table.changed_since(base.token)
    if changed is None or changed.num_rows + len(changed.removed) > MOST_CHANGED * base.num_rows:
        return None
    return changed


def _base(share: TableShare, files: tuple[FileImage, ...], saved: SavedAs) -> Base | None:
    """What the later saves of a table may link, if it can tell what changes."""
    if share.token is None:
        return None
    try:
        table = weakref.ref(share.table.value)
    except TypeError:  # who keeps no references to itself is not to be confused with another one
        return None
    names = tuple(file.name for file in files if file.container == share.container)
    (image,) = share.images
    return Base(table, share.token, share.table.columns, image.count, share.container, share.kinds(), names, [saved])


def _nbytes(kinds: Kinds) -> int:
    return sum(dtype.itemsize * shape.numel() for dtype, shape in kinds.values())
