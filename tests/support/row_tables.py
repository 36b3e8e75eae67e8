"""A table that grows: an embedding of a row for each id that it has met, with the slot of its AdaGrad and a counter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

import sidesave

_WEIGHT, _SUM, _COUNT = "weight", "sum", "count"


class GrowingTable:
    """Rows by id in tensors that are doubled when they are full; trained by AdaGrad, row by row.

    It can tell what has changed: each row knows the tick in which it was last written, each removed id that of its end.
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

    # What training does ----------------------------------------------------------------------------------------

    def places_of(self, ids: Sequence[int]) -> torch.Tensor:
        """Where the rows of these ids are; new ones are made."""
        for each in ids:
            if each not in self.places:
                place = self.free.pop() if self.free else len(self.places)
                self._reserve(place + 1)
                self.places[each] = place
                self.ids[place], self.sum[place], self.count[place] = each, 0.0, 0
                generator = torch.Generator().manual_seed((each ^ self.seed) & ((1 << 63) - 1))
                self.weight[place] = torch.randn(self.width, generator=generator).to(self.device)
                self.gone.pop(each, None)
        return torch.tensor([self.places[each] for each in ids], dtype=torch.int64, device=self.device)

    def train(self, ids: Sequence[int], rate: float = 0.1) -> None:
        """One step of AdaGrad of a loss that pulls the rows of these ids to a vector of their own."""
        self.tick += 1
        places = self.places_of(ids)
        goal = torch.stack([torch.full((self.width,), float(each % 17)) for each in ids]).to(self.device)
        gradient = self.weight[places] - goal
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
        return {
            each: (self.weight[at].tolist(), self.sum[at].tolist(), int(self.count[at]))
            for each, at in self.places.items()
        }

    def _reserve(self, count: int) -> None:
        while count > len(self.ids):
            for name in ("ids", "weight", "sum", "count", "touched"):
                now = getattr(self, name)
                setattr(self, name, torch.cat([now, torch.zeros_like(now)]))

    # What sidesave asks ----------------------------------------------------------------------------------------

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

    def _rows(self, places: list[int], chunk_rows: int, columns: Sequence[str]) -> Iterable[sidesave_rows]:
        for begin in range(0, len(places), chunk_rows):
            at = torch.tensor(places[begin : begin + chunk_rows], dtype=torch.int64, device=self.device)
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
        places = [at for at in self.places.values() if int(self.touched[at]) > token]
        gone = [each for each, tick in self.gone.items() if tick > token]
        return sidesave.RowChanges(
            num_rows=len(places),
            rows=lambda chunk_rows, columns: self._rows(places, chunk_rows, columns),
            removed=torch.tensor(gone, dtype=torch.int64),
        )


sidesave_rows = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
