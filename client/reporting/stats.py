"""The cost of saves: totals over a run, from the records that observers of a checkpointer get.

Totals are kept for the whole run, single records for the last thousand saves.
"""

from __future__ import annotations

import bisect
import collections
import logging
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Final

from sidesave.client.messages import format_bytes, format_seconds
from sidesave.client.saving.mirroring import MirrorStatus
from sidesave.writer_daemon.save_record import PHASES, Outcome, SaveRecord

logger = logging.getLogger(__name__)

_MAX_RECORDS: Final = 1000
"""Ended saves that are remembered one by one."""

BOUNDS_S: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    25,
    50,
    100,
    250,
    500,
    1000,
)
"""Upper bounds of the classes into which durations are counted, in seconds."""

OUTCOMES: Final[tuple[Outcome, ...]] = ("committed", "failed", "skipped", "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Durations in seconds: count, sum and maximum over the whole run.

    ``median_s`` is over the last thousand saves. ``classes`` counts, over the whole run, the
    durations up to each of :data:`BOUNDS_S`, and last the longer ones, each once.
    """

    count: int
    total_s: float
    max_s: float
    median_s: float
    classes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSummary:
    """Totals of all saves of a run until now.

    Attributes:
        counts: Saves that have ended, by their outcomes.
        under_way: Saves without an outcome yet.
        nbytes: Bytes that this rank has written, of committed saves.
        staging_nbytes: Host memory of this rank's staging slots at the last save.
        wall_s: Seconds since the statistics were created, or since the first call if that was
            earlier.
        stall: Durations of ``save()`` calls.
        staged: Durations from the call until all was in staging memory.
        written: Durations from the call until this rank's bytes were durable.
        committed: Durations from the call until the checkpoint was committed.
        stall_share: The share of ``wall_s`` that ``save()`` blocked training, 0.0 to 1.0.
        bandwidth: Median, over the last thousand saves, of this rank's bytes per second from the
            call until durable.
        last_committed_step: The step that was committed last.
        last_commit_s: Time of that commit in seconds since the epoch.
        mirror: The state of the mirror; None without one.
    """

    counts: dict[Outcome, int]
    under_way: int
    nbytes: int
    staging_nbytes: int | None
    wall_s: float
    stall: Spread
    staged: Spread
    written: Spread
    committed: Spread
    stall_share: float
    bandwidth: float | None
    last_committed_step: int | None
    last_commit_s: float | None
    mirror: MirrorStatus | None = None

    @property
    def stall_s(self) -> float:
        """Total seconds that ``save()`` blocked training."""
        return self.stall.total_s

    def spread(self, phase: str) -> Spread:
        """The durations up to the end of one of :data:`PHASES`."""
        return getattr(self, phase)

    def __str__(self) -> str:
        counts = [f"{count:,} {outcome}" for outcome, count in self.counts.items() if count]
        text = f"{', '.join(counts) or 'no saves'}; {format_bytes(self.nbytes)}"
        if self.staging_nbytes:
            text += f", {format_bytes(self.staging_nbytes)} of staging memory"
        text += (
            f", stall {format_seconds(self.stall_s)} ({self.stall_share:.2%} of "
            f"{format_seconds(self.wall_s)})"
        )
        return text + (f", {format_bytes(round(self.bandwidth))}/s" if self.bandwidth else "")


class SaveStats:
    """Statistics over the saves of one rank: an observer of its checkpointer. Thread-safe.

    Each save that ends is logged, at INFO level if committed or skipped, else at WARNING level.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come in where this thread holds it
        self._began = time.monotonic()
        self._records: collections.deque[SaveRecord] = collections.deque(maxlen=_MAX_RECORDS)
        self._counts: collections.Counter[Outcome] = collections.Counter()
        self._durations = {phase: _Durations() for phase in PHASES}
        self._under_way: set[tuple[str, int | None]] = set()
        self._nbytes = 0
        self._last: tuple[int, float] | None = None

    def __call__(self, record: SaveRecord) -> None:
        """Add a save that begins or has ended."""
        save = record.session, record.save_id
        if record.outcome == "saving":
            self._under_way.add(save)
            return
        with self._lock:
            self._under_way.discard(save)
            if record.called is not None:
                self._began = min(self._began, record.called)
            self._records.append(record)
            self._counts[record.outcome] += 1
            for phase in PHASES:
                seconds = record.seconds(phase)
                if seconds is not None:
                    self._durations[phase].add(seconds)
            if record.committed_s is not None and record.called_s is not None:
                self._nbytes += record.rank_nbytes or 0
                committed = (record.step, record.called_s + record.committed_s)
                self._last = (
                    committed
                    if self._last is None
                    else max(self._last, committed, key=lambda last: last[1])
                )
        level = logging.INFO if record.outcome in ("committed", "skipped") else logging.WARNING
        logger.log(level, "%s", describe(record))

    def records(self) -> list[SaveRecord]:
        """The last thousand saves that have ended, in that order."""
        with self._lock:
            return list(self._records)

    def summary(self, mirror: MirrorStatus | None = None) -> SaveSummary:
        """Return the totals of all saves until now, with the mirror's state if it is given."""
        with self._lock:
            records, wall_s = list(self._records), time.monotonic() - self._began
            measured = {phase: [each.seconds(phase) for each in records] for phase in PHASES}
            spreads = {phase: self._durations[phase].spread(measured[phase]) for phase in PHASES}
            rates = [
                record.rank_nbytes / record.written_s
                for record in records
                if record.written_s and record.rank_nbytes
            ]
            return SaveSummary(
                counts={outcome: self._counts[outcome] for outcome in OUTCOMES},
                under_way=len(self._under_way),
                nbytes=self._nbytes,
                staging_nbytes=next(
                    (each.staging_nbytes for each in reversed(records) if each.staging_nbytes), None
                ),
                wall_s=wall_s,
                stall=spreads["stall"],
                staged=spreads["staged"],
                written=spreads["written"],
                committed=spreads["committed"],
                stall_share=min(1.0, spreads["stall"].total_s / wall_s) if wall_s > 0 else 0.0,
                bandwidth=statistics.median(rates) if rates else None,
                last_committed_step=None if self._last is None else self._last[0],
                last_commit_s=None if self._last is None else self._last[1],
                mirror=mirror,
            )


class _Durations:
    """Durations of one kind, over the whole run."""

    def __init__(self) -> None:
        self._classes = [0] * (len(BOUNDS_S) + 1)
        self._total_s = self._max_s = 0.0

    def add(self, seconds: float) -> None:
        """Add a duration."""
        self._classes[bisect.bisect_left(BOUNDS_S, seconds)] += 1
        self._total_s += seconds
        self._max_s = max(self._max_s, seconds)

    def spread(self, recent: list[float | None]) -> Spread:
        """Return all of them, with the median of the ``recent`` ones; None was not measured."""
        measured = [seconds for seconds in recent if seconds is not None]
        median_s = statistics.median(measured) if measured else 0.0
        return Spread(
            count=sum(self._classes),
            total_s=self._total_s,
            max_s=self._max_s,
            median_s=median_s,
            classes=tuple(self._classes),
        )


def describe(record: SaveRecord) -> str:
    """Return a line for people: ``step 10 committed: 403 MB, stall 30.1 ms, ...``."""
    nbytes = record.rank_nbytes if record.nbytes is None else record.nbytes
    facts = (
        ["all slots were busy"]
        if record.outcome == "skipped"
        else [format_bytes(nbytes)]
        if nbytes
        else []
    )
    for phase in PHASES:
        seconds = record.seconds(phase)
        if seconds is not None:
            facts.append(f"{phase} {format_seconds(seconds)}")
    text = f"step {record.step} {record.outcome}: {', '.join(facts)}"
    return text if record.error is None else f"{text}; {record.error}: {record.message}"
