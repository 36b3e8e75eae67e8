"""What a save of a table of rows costs: all of it, and what has changed beside a link to the last
full save.

    python -m scripts.bench.tables --rows 10000000 --rounds 5

One table of rows of width 16 with the slot of a row-wise AdaGrad, 76 bytes in each row, and one
checkpointer for each way to save. "plain tensors" are those that the table consists of, as a dict,
which no other number of ranks can load. Between saves the same share of the rows is trained, so
that a save of changes holds that share of the last full one. Loading is by one rank of one, and by
one of four.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import sidesave
from scripts.bench.common import arguments, rotated, workspace
from scripts.bench.frozen import Way
from scripts.bench.report import Report, machine, median, spread
from sidesave.client.loading.load import LoadRequest

WIDTH = 16
Rows = tuple[torch.Tensor, dict[str, torch.Tensor]]


class ArrayTable:
    """Rows in tensors, in the order in which they came; it cannot tell what changes."""

    def __init__(self, rows: int, changing: float) -> None:
        self.count = rows
        self.store = {"ids": torch.arange(rows, dtype=torch.int64) * 7_919 + 11}
        self.store |= {"weight": torch.rand(rows, WIDTH), "sum": torch.zeros(rows)}
        self.hot = torch.randperm(rows)[: max(1, int(rows * changing))]

    def train(self) -> None:
        """Change the rows that are in use."""
        self.store["weight"][self.hot] += 0.01
        self.store["sum"][self.hot] += 1

    def columns(self) -> Mapping[str, sidesave.Column]:
        """An embedding, and its slot."""
        return {
            "weight": sidesave.Column(torch.float32, (WIDTH,)),
            "sum": sidesave.Column(torch.float32),
        }

    def num_rows(self) -> int:
        """How many rows there are."""
        return self.count

    def rows(self, chunk_rows: int, columns: Sequence[str], /) -> Iterable[Rows]:
        """Views of them."""
        for begin in range(0, self.count, chunk_rows):
            some = slice(begin, min(begin + chunk_rows, self.count))
            yield self.store["ids"][some], {name: self.store[name][some] for name in columns}

    def insert(self, ids: torch.Tensor, columns: Mapping[str, torch.Tensor], /) -> None:
        """Append rows; there is room for as many again whenever there is not enough."""
        begin, end = self.count, self.count + len(ids)
        for name, values in (("ids", ids), *columns.items()):
            if end > len(self.store[name]):
                self.store[name] = torch.cat(
                    [self.store[name], values.new_empty((end, *values.shape[1:]))]
                )
            self.store[name][begin:end] = values
        self.count = end

    def clear(self) -> None:
        """Have none."""
        self.count = 0


class TrackedTable(ArrayTable):
    """The same table, which can tell what has changed."""

    def change_token(self) -> object:
        """Anything: what trains are always the same rows."""
        return 0

    def changed_since(self, token: object, /) -> sidesave.RowChanges:
        """The rows that are in use."""

        def rows(chunk_rows: int, columns: Sequence[str]) -> Iterable[Rows]:
            for some in self.hot.split(chunk_rows):
                yield self.store["ids"][some], {name: self.store[name][some] for name in columns}

        return sidesave.RowChanges(len(self.hot), rows, torch.empty(0, dtype=torch.int64))


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__, rounds=5, peers=False)
    parser.add_argument("--rows", type=int, default=1_000_000)
    args = parser.parse_args()
    torch.manual_seed(0)
    table = ArrayTable(args.rows, 0.01)
    few, more = TrackedTable(0, 1), TrackedTable(0, 1)
    for each, share in ((few, 0.01), (more, 0.1)):
        each.store, each.count = table.store, table.count
        each.hot = torch.randperm(args.rows)[: int(args.rows * share)]
    report = Report("Tables of rows")
    with workspace(args.dir) as folder, contextlib.ExitStack() as opened:

        def way(name: str, state: Callable[[], dict[str, Any]], trained: ArrayTable) -> Way:
            place = folder / name.replace(" ", "-").replace("%", "percent")
            return Way(
                name,
                state,
                trained.train,
                opened.enter_context(
                    sidesave.Checkpointer(place, staging=sidesave.StagingOptions(slots=1))
                ),
            )

        ways = [
            way("plain tensors", lambda: {"t": table.store}, table),
            way("a table, all rows", lambda: {"t": table}, table),
            way("a table, 1 % changed", lambda: {"t": few}, few),
            way("a table, 10 % changed", lambda: {"t": more}, more),
        ]
        # the first save of each is a full one, the second a warm-up
        for step in range(args.rounds + 2):
            for each in rotated(ways, step):
                each.save(step, counts=step > 1)
        loads = [
            (name, *_loaded(folder / name, size))
            for name in ("a-table,-all-rows", "a-table,-1-percent-changed")
            for size in (1, 4)
        ]
        report.note(
            f"{args.rows:,} rows, {args.rounds} saves of each, one slot. Minimum / median / "
            f"maximum. {machine(folder)}."
        )
        report.table(
            ("", "MB written", "call, ms", "durable, s"),
            [
                (
                    each.name,
                    median(each.written_nbytes, 1e-6, 1),
                    spread(each.call_s, 1e3, 1),
                    spread(each.durable_s, 1, 3),
                )
                for each in ways
            ],
        )
        report.table(
            ("loaded", "ranks", "MB read by one", "s"),
            [(name, str(size), f"{read / 1e6:.1f}", f"{s:.2f}") for name, size, read, s in loads],
        )
        report.publish(args.markdown, None)


def _loaded(run: Path, size: int) -> tuple[int, int, float]:
    """The number of ranks, and what one of them has read in how many seconds."""
    start = time.perf_counter()
    loaded = LoadRequest(into={"t": ArrayTable(0, 1)}, rank=0, size=size).read(run)
    loaded.apply()
    return size, loaded.nbytes_read, time.perf_counter() - start


if __name__ == "__main__":
    main()
