"""The rollbacks of a run, so that checkpoints that it has abandoned never become its latest again.

Each rollback is recorded as two sequence numbers: that of the commit that the run went back to, and
the last one assigned by then. The next commit descends from the first and has a number after the
second. So the sequence numbers show which commits the run descends from. A save gets its number
when ``save()`` is called, also if it is committed late or recovered. See docs/format.md,
docs/decisions/0016.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from sidesave.errors import IntegrityError
from sidesave.writer_daemon.storage import ReadStorage, sealed_json, urls
from sidesave.writer_daemon.storage.sealed_json import FactFile


@dataclass(frozen=True, slots=True)
class Rollbacks:
    """Pairs of sequence numbers: (commit that the run went back to, last number then assigned)."""

    pairs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, pairs: Iterable[Sequence[int]]) -> Rollbacks:
        """Return the rollbacks that :attr:`pairs` tell of, as they come from JSON."""
        return cls(tuple((target, last) for target, last in pairs))

    @property
    def line(self) -> list[tuple[int, float]]:
        """Ranges (first - 1, last) of numbers that the run descends from, newest first."""
        ranges: list[tuple[int, float]] = []
        upto: float = math.inf
        for target, last in reversed(self.pairs):
            if last < upto:  # otherwise a later rollback went back behind this one
                ranges.append((last, upto))
                upto = target
        return [*ranges, (0, upto)]

    def order(self, sequence: int) -> tuple[bool, int]:
        """Return a sort key; the latest commit sorts last.

        The key is whether the run descends from the commit, then its sequence number.
        """
        return any(low < sequence <= high for low, high in self.line), sequence

    @property
    def last(self) -> int:
        """The last sequence number assigned before the latest rollback; 0 without rollbacks."""
        return self.pairs[-1][1] if self.pairs else 0

    def before(self, sequence: int) -> Rollbacks:
        """Return the rollbacks before commit ``sequence``; their :attr:`line` has its ancestors."""
        return Rollbacks(tuple(pair for pair in self.pairs if pair[1] < sequence))

    def going_back(self, sequence: int, last: int) -> Rollbacks:
        """Return these rollbacks and one to ``sequence``; ``last`` is the last number assigned."""
        # A pair without commits after it is obsolete.
        before = tuple(pair for pair in self.pairs if pair[1] < last)
        return Rollbacks((*before, (sequence, last)) if sequence < last else before)


def _parse(body: dict[str, Any], path: str) -> Rollbacks:
    pairs = [
        tuple(cast("list[int]", pair)) for pair in sealed_json.get(body, "rollbacks", list, path)
    ]
    order = [last for _, last in pairs]
    if not all(
        sealed_json.are_whole([*pair]) and pair[0] < pair[1] for pair in pairs
    ) or order != sorted(order):
        raise IntegrityError(f"{path}: {pairs!r:.80} are not pairs of sequence numbers")
    return Rollbacks.of(pairs)


ROLLBACK_FILE: Final = FactFile(
    ".sidesave.rollback",
    "sidesave-rollback",
    _parse,
    lambda rollbacks: {"rollbacks": rollbacks.pairs},
    hint=(
        "so the latest checkpoint is unknown; remove it, and load the step to resume from by its "
        "number"
    ),
)


def read(storage: ReadStorage) -> Rollbacks:
    """Return the rollbacks of a run directory, empty if it has none.

    Raises like :meth:`FactFile.read`.
    """
    return ROLLBACK_FILE.read(storage) or Rollbacks()


def write_in(root: str, rollbacks: Rollbacks) -> None:
    """Write the rollbacks to the run directory ``root``, a path or URL; raises ``WriteError``."""
    with contextlib.closing(urls.open_for_writing(root)) as storage:
        ROLLBACK_FILE.write(storage, rollbacks)
