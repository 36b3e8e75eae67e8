"""A table that grows: an embedding of a row for each id that it has met, with the slot of its
AdaGrad and a counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

import sidesave

_WEIGHT, _SUM, _COUNT = "weight", "sum", "count"


class GrowingTable:
    """Rows by id in tensors that are doubled when they are full; trained by AdaGrad, row by row.

    It can tell what has changed: each row knows the tick in which it was last written, each removed
    id that of its end.
    """

    def __init__(self, width: int = 4, device: str = "cpu", seed: int = 0) -> None:
        self.width, self.device, self.seed = width, device, seed
        self.tick = 0
        self.clear()

    def clear(self) -> None:
        self.places: dict[int, int] = {}
        self.free: list[int] = []
        self.ids = torch.zeros(8, dtype=torch.int64, device=self.device)
        self.weight = torch.zeros(8, self.width, device=self.device)
        self.sum = torch.zeros(8, self.width, device=self.device)
        self.count = torch.zeros(8, dtype=torch.int32, device=self.device)
        self.touched = torch.zeros(8, dtype=torch.int64, device=self.device)
        self.gone: dict[int, int] = {}
        self.tick += 1
        self.cleared = self.tick

    # What training does ---------------------------------------------------------------------------

    def places_of(self, ids: Sequence[int]) -> torch.Tensor:
        """Where the rows of these ids are; new ones are made."""
        new = [each for each in ids if each not in self.places]
        if new:
            for each in new:
                self.places[each] = self.free.pop() if self.free else len(self.places)
                self.gone.pop(each, None)
            self._reserve(len(self.places) + len(self.free))
            at = self._at([self.places[each] for each in new])
            numbers = self._at(new)
            self.ids[at], self.sum[at], self.count[at] = numbers, 0.0, 0
            mixed = (
                numbers[:, None] * 2654435761
                + torch.arange(self.width, device=self.device) * 40503
                + self.seed
            )
            self.weight[at] = (mixed % 1000003) / 1000003
        return self._at([self.places[each] for each in ids])

    def _at(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def train(self, ids: Sequence[int], rate: float = 0.1) -> None:
        """One step of AdaGrad of a loss that pulls the rows of these ids to a vector of their
        own.
        """
        self.tick += 1
        places = self.places_of(ids)
        gradient = self.weight[places] - (self._at([*ids]) % 17)[:, None]
        self.sum[places] += gradient**2
        self.weight[places] -= rate * gradient / (self.sum[places].sqrt() + 1e-8)
        self.count[places] += 1
        self.touched[places] = self.tick

    def remove(self, ids: Iterable[int]) -> None:
        self.tick += 1
        for each in ids:
            self.free.append(self.places.pop(each))
            self.gone[each] = self.tick

    def values(self) -> dict[int, tuple[list[float], list[float], int]]:
        """All rows, to be compared."""
        at = self._at([*self.places.values()])
        rows = zip(
            self.weight[at].tolist(), self.sum[at].tolist(), self.count[at].tolist(), strict=True
        )
        return dict(zip(self.places, rows, strict=True))

    def _reserve(self, count: int) -> None:
        while count > len(self.ids):
            for name in ("ids", "weight", "sum", "count", "touched"):
                now = getattr(self, name)
                setattr(self, name, torch.cat([now, torch.zeros_like(now)]))

    # What sidesave asks ---------------------------------------------------------------------------

    def columns(self) -> dict[str, sidesave.Column]:
        row = (self.width,)
        return {
            _WEIGHT: sidesave.Column(torch.float32, row),
            _SUM: sidesave.Column(torch.float32, row),
            _COUNT: sidesave.Column(torch.int32),
        }

    def num_rows(self) -> int:
        return len(self.places)

    def rows(self, chunk_rows: int, columns: Sequence[str]) -> Iterable[sidesave_rows]:
        return self._rows([*self.places.values()], chunk_rows, columns)

    def _rows(
        self, places: list[int], chunk_rows: int, columns: Sequence[str]
    ) -> Iterable[sidesave_rows]:
        for begin in range(0, len(places), chunk_rows):
            at = self._at(places[begin : begin + chunk_rows])
            yield self.ids[at], {name: getattr(self, name)[at] for name in columns}

    def insert(self, ids: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> None:
        self.tick += 1
        places = self.places_of(ids.tolist())
        for name, values in columns.items():
            getattr(self, name)[places] = values.to(self.device)
        self.touched[places] = self.tick

    def change_token(self) -> int:
        return self.tick

    def changed_since(self, token: object) -> sidesave.RowChanges | None:
        assert isinstance(token, int)
        if token < self.cleared:
            return None
        every = self._at([*self.places.values()])
        places = every[self.touched[every] > token].tolist()
        gone = [each for each, tick in self.gone.items() if tick > token]
        return sidesave.RowChanges(
            num_rows=len(places),
            rows=lambda chunk_rows, columns: self._rows(places, chunk_rows, columns),
            removed=torch.tensor(gone, dtype=torch.int64),
        )


sidesave_rows = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
