"""How often to save: the interval that loses least time to saves and failures.

A save stops training for C seconds. A failure, one in M seconds on average, loses what was trained
since the last checkpoint. So rare saves lose time to failures, and frequent ones to saving.

J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
Generation Computer Systems 22(3), 2006.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

from sidesave.errors import InvalidArgumentError, brief
from sidesave.writer_daemon.save_record import SaveRecord

_SAMPLES: Final = 15
"""The number of latest saves that count; their median ignores the first, which allocate memory."""


def daly(cost_s: float, mtbf_s: float) -> float:
    """Daly's seconds of training between saves, for saves of C seconds and an MTBF of M seconds.

    The result is sqrt(2CM) [1 + sqrt(C/2M)/3 + (C/2M)/9] - C for C < 2M, else M.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommended save interval and its cost.

    Attributes:
        mtbf_s: The assumed seconds between failures.
        stall_s: Measured seconds that a save stops training.
        commit_s: Measured seconds from the call to the commit.
        interval_s: Seconds of training between saves: Daly's interval, but at least ``commit_s``,
            since saves that overtake each other only wait.
        lost: The fraction of time that is lost: to stalls, and with each failure half an interval
            plus ``commit_s``.
    """

    mtbf_s: float
    stall_s: float
    commit_s: float
    interval_s: float
    lost: float

    @classmethod
    def of(cls, stall_s: float, commit_s: float, mtbf_s: float) -> Advice:
        """The advice for measured costs."""
        interval_s = max(daly(stall_s, mtbf_s), commit_s)
        lost = (
            min(1.0, stall_s / (interval_s + stall_s) + (interval_s / 2 + commit_s) / mtbf_s)
            if interval_s
            else 1.0
        )
        return cls(mtbf_s, stall_s, commit_s, interval_s, lost)


class SaveCost:
    """The measured cost of a run's saves; an observer of them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stalls: deque[float] = deque(maxlen=_SAMPLES)
        self._commits: deque[float] = deque(maxlen=_SAMPLES)
        self._known: tuple[float, float] | None = None

    def __call__(self, record: SaveRecord) -> None:
        """Add the cost of a save that was committed."""
        if record.stall_s is None or record.committed_s is None:
            return
        with self._lock:
            self._stalls.append(record.stall_s)
            self._commits.append(record.committed_s)
            self._known = statistics.median(self._stalls), statistics.median(self._commits)

    @property
    def known(self) -> tuple[float, float] | None:
        """Median stall and time to commit, in seconds; None before the first commit."""
        return self._known

    def advise(self, mtbf_s: float) -> Advice:
        """The interval for one failure in ``mtbf_s`` seconds.

        Raises:
            InvalidArgumentError: ``mtbf_s`` is no positive number, or no save has been committed
                yet.
        """
        check_mtbf(mtbf_s)
        if self._known is None:
            raise InvalidArgumentError(
                "no save has been committed yet, so what one costs is not known: ask later"
            )
        return Advice.of(*self._known, mtbf_s)


def check_mtbf(mtbf_s: float) -> None:
    """The mean time between failures is a positive, finite number of seconds."""
    if type(mtbf_s) not in (int, float) or not 0 < mtbf_s < math.inf:
        raise InvalidArgumentError(
            f"mtbf_s must be the seconds between two failures of the job, not {brief(mtbf_s)}"
        )
