"""Where a run has gone back, so that what it has gone back behind is never its latest checkpoint again.

Each time, the place of the commit that it went back to is written down, and the last place that had been given away by
then: the next commit descends from the one, and has a place behind the other. With that, the order of commits alone
says which of them the run descends from. What is committed late, or recovered, has its place from when it was called.
docs/format.md, docs/decisions/0016.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, cast

from sidesave.errors import IntegrityError
from sidesave.writer_daemon.storage import ReadStorage, sealed_json
from sidesave.writer_daemon.storage.atomic import replace_file

ROLLBACK_FILE: Final = ".sidesave.rollback"
_FORMAT: Final = "sidesave-rollback"
_MAX_NBYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Rollbacks:
    """Pairs of places in the order of commits: (went back to, last place given away by then)."""

    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def line(self) -> list[tuple[int, float]]:
        """The ranges of places, each (first - 1, last), that the run descends from, newest first."""
        stretches: list[tuple[int, float]] = []
        upto: float = math.inf
        for target, last in reversed(self.pairs):
            if last < upto:  # else it is not from here that the run came to ``upto``
                stretches.append((last, upto))
                upto = target
        return [*stretches, (0, upto)]

    def order(self, sequence: int) -> tuple[bool, int]:
        """The key to sort commits by: whether the run descends from it, and its place. The latest comes last."""
        return any(low < sequence <= high for low, high in self.line), sequence

    @property
    def last(self) -> int:
        """The highest place given away when the run last went back, 0 if it never did."""
        return self.pairs[-1][1] if self.pairs else 0

    def going_back(self, sequence: int, last: int) -> Rollbacks:
        """These rollbacks and one more: to the commit at ``sequence``, with ``last`` the last place given away."""
        before = tuple(pair for pair in self.pairs if pair[1] < last)  # nothing came between, so the others are void
        return Rollbacks((*before, (sequence, last)) if sequence < last else before)


def read(storage: ReadStorage) -> Rollbacks:
    """What a run directory says; nothing where it has never gone back.

    Raises:
        IntegrityError: The file is damaged, so it is not known which checkpoint is the latest.
        FormatVersionError: It was written by a newer version.
        WriteError: It cannot be read.
    """
    data = storage.read(ROLLBACK_FILE, _MAX_NBYTES)
    if data is None:
        return Rollbacks()
    path = f"{storage.root}/{ROLLBACK_FILE}"
    try:
        sealed_json.check_digest(data, path)
        body = sealed_json.load_json(data, path)
        sealed_json.check_version(body, _FORMAT, path)
        pairs = [tuple(cast("list[int]", pair)) for pair in sealed_json.get(body, "rollbacks", list, path)]
        order = [last for _, last in pairs]
        if not all(sealed_json.are_whole([*pair]) and pair[0] < pair[1] for pair in pairs) or order != sorted(order):
            raise IntegrityError(f"{path}: {pairs!r:.80} are no places in the order of commits")
    except (IntegrityError, TypeError, ValueError) as error:
        hint = "remove it, and load the step to go on from by its number"
        raise IntegrityError(f"{error}, so it is not known which checkpoint is the latest; {hint}") from error
    return Rollbacks(tuple((target, last) for target, last in pairs))


def write(root: str, rollbacks: Rollbacks) -> None:
    """Write it in the run directory ``root``, durably; raises ``WriteError``."""
    body = {"format": _FORMAT, "version": sealed_json.FORMAT_VERSION, "rollbacks": rollbacks.pairs}
    replace_file(f"{root}/{ROLLBACK_FILE}", sealed_json.seal(body), "cannot write down that the run has gone back")
