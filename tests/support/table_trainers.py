"""Ranks that train one table together, each its own rows, and the table of a single process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import rank_trainers
from rank_trainers import Actor, Rank

if TYPE_CHECKING:
    from row_tables import GrowingTable


COUNT = 400


def ids_of(step: int) -> list[int]:
    """The ids that a step trains: at first many, then a few, of which some are new."""
    return [*range(-10, COUNT)] if step == 1 else [*range(3 * step, 5 * step), 10**12 + 7 * step]


def gone_in(step: int) -> list[int]:
    """The ids that a step removes."""
    return [3 * step - 3, 10**12 + 7 * step - 7]


class TableRank(Rank):
    """A rank that is a :class:`TableActor`."""

    script = __file__


def train_to(table: GrowingTable, step: int, first: int = 1, rank: int = 0, size: int = 1) -> None:
    """Train this rank's rows from one step to another, both included."""
    for number in range(first, step + 1):
        if ids := _own(ids_of(number), rank, size):
            table.train(ids)
        if ids := [each for each in _own(gone_in(number), rank, size) if each in table.places]:
            table.remove(ids)


def _own(ids: Sequence[int], rank: int, size: int) -> list[int]:
    import torch

    import sidesave

    owners = sidesave.owner_of(torch.tensor(ids, dtype=torch.int64), size).tolist()
    return [each for each, owner in zip(ids, owners, strict=True) if owner == rank]


# In a process -------------------------------------------------------------------------------------


class TableActor(Actor):
    """What such a rank can be told to do."""

    def make(self) -> None:
        """Begin with an empty table, and with dense parameters that all ranks hold alike."""
        from row_tables import GrowingTable

        import sidesave

        self.table = GrowingTable()
        self.state = {
            "tables": {"users": self.table},
            "dense": sidesave.Replicated(rank_trainers._model()),
            "step": 0,
        }

    def train_to(self, step: int) -> None:
        train_to(self.table, step, int(self.state["step"]) + 1, self.rank, self.size)
        self.state["step"] = step

    def own(self, ids: list[int]) -> None:
        """Have these rows, and no others, whoever else has them."""
        self.table.clear()
        self.table.train(ids)

    def rows(self) -> list[list[Any]]:
        return [[each, *row] for each, row in self.table.values().items()]


def a_table(step: int = 0) -> GrowingTable:
    from row_tables import GrowingTable

    table = GrowingTable()
    table.train(range(COUNT))
    for number in range(step):
        change(table, number + 1)
    return table


def change(table: GrowingTable, step: int) -> None:
    """What a step changes: a few rows, some of which are new, and one that goes."""
    table.train([step, step + 1, 10**6 + step])
    table.remove([COUNT - step])


if __name__ == "__main__":
    rank_trainers.obey(TableActor, *sys.argv[1:])
