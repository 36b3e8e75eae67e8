"""The cost of saves: each one's way from its call to its outcome, seen through its handle, and their totals.

It only watches. Totals are kept for the whole run, single saves for the last thousand. Callbacks get a
:class:`SaveEvent` for each save that has ended.
"""

from __future__ import annotations

import bisect
import collections
import logging
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from sidesave.client.saving.handle import SaveHandle
from sidesave.client.saving.mirroring import MirrorStatus
from sidesave.errors import CommitUnknownError, DaemonDiedError
from sidesave.writer_daemon.log import describe_error, wall_clock_s

logger = logging.getLogger(__name__)

_MAX_EVENTS: Final = 1000
"""Ended saves that are remembered one by one."""

PHASES: Final = ("stall", "staged", "written", "committed")
BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
"""Upper bounds of the classes into which durations are counted, in seconds."""

SaveOutcome = Literal["committed", "failed", "skipped", "unknown"]
OUTCOMES: Final[tuple[SaveOutcome, ...]] = ("committed", "failed", "skipped", "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEvent:
    """A save that has ended; None is what has not happened.

    Attributes:
        step: The step it was to be saved as.
        outcome: ``"committed"``, ``"failed"``, ``"skipped"``, or ``"unknown"``: durable on this rank, and nobody was
            left to tell of the commit.
        error: Name and text of what it failed with; not the exception, whose traceback would hold the state.
        nbytes: Bytes that this rank had to write.
        checkpoint_nbytes: Bytes of the checkpoint, over all ranks.
        called: When ``save()`` was called, by ``time.monotonic()``.
        called_s: The same in seconds since the epoch.
        stall_s: Seconds that ``save()`` took: so long training stood still.
        staged_s: Seconds from the call until everything was in staging memory.
        written_s: Seconds from the call until this rank's bytes were durable.
        committed_s: Seconds from the call until the checkpoint was.
        ended_s: Seconds from the call until the outcome was known.
    """

    step: int
    outcome: SaveOutcome
    error: str | None
    nbytes: int
    checkpoint_nbytes: int | None
    called: float
    called_s: float
    stall_s: float
    staged_s: float | None
    written_s: float | None
    committed_s: float | None
    ended_s: float

    def __str__(self) -> str:
        nbytes = self.nbytes if self.checkpoint_nbytes is None else self.checkpoint_nbytes
        facts = ["all slots were busy"] if self.outcome == "skipped" else [format_bytes(nbytes)] if nbytes else []
        for phase in PHASES:
            seconds = seconds_of(self, phase)
            if seconds is not None:
                facts.append(f"{phase} {format_seconds(seconds)}")
        return f"step {self.step} {self.outcome}: {', '.join(facts)}" + (f"; {self.error}" if self.error else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Durations in seconds: count, sum and maximum over the whole run.

    ``median_s`` is over the last thousand saves. ``classes`` counts, over the whole run, the durations up to each of
    :data:`BOUNDS_S`, and last the longer ones, each once.
    """

    count: int
    total_s: float
    max_s: float
    median_s: float
    classes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSummary:
    """What all saves of a run so far come to.

    Attributes:
        counts: Saves that have ended, by their outcomes.
        under_way: Saves without an outcome yet.
        nbytes: Bytes that this rank has written, of committed saves.
        wall_s: Seconds since these statistics were begun, or since the first call where that was earlier.
        stall: How long the calls of ``save()`` took.
        staged: From the call until all was in staging memory.
        written: From the call until this rank's bytes were durable.
        committed: From the call until the checkpoint was.
        stall_share: The part of ``wall_s`` that training stood still in ``save()``, 0.0 to 1.0.
        bandwidth: Median, over the last thousand saves, of this rank's bytes per second from the call until durable.
        last_committed_step: The step that was committed last.
        last_commit_s: When that was, in seconds since the epoch.
        mirror: How the mirror stands, where there is one.
    """

    counts: dict[SaveOutcome, int]
    under_way: int
    nbytes: int
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
        """Seconds that training stood still in ``save()``, in all."""
        return self.stall.total_s

    def spread(self, phase: str) -> Spread:
        """The durations up to the end of one of :data:`PHASES`."""
        return getattr(self, phase)

    def __str__(self) -> str:
        counts = [f"{count:,} {outcome}" for outcome, count in self.counts.items() if count]
        text = f"{', '.join(counts) or 'no saves'}; {format_bytes(self.nbytes)}"
        text += f", stall {format_seconds(self.stall_s)} ({self.stall_share:.2%} of {format_seconds(self.wall_s)})"
        return text + (f", {format_bytes(round(self.bandwidth))}/s" if self.bandwidth else "")


class SaveStats:
    """Statistics over the saves of one rank. Thread-safe.

    A save that ends is logged, at INFO level if committed or skipped, else at WARNING level, and then passed to the
    ``callbacks`` in turn. They run in the thread that learns of the outcome, never in the training loop, and must not
    hold it up. What they raise is logged.
    """

    def __init__(self, callbacks: Sequence[Callable[[SaveEvent], object]] = ()) -> None:
        self.mirror_status: Callable[[], MirrorStatus | None] = lambda: None
        """Asked for how the mirror stands; set it to ``Checkpointer.mirror_status``, as a manager does by itself."""
        self.callbacks: list[Callable[[SaveEvent], object]] = list(callbacks)
        self._lock = threading.RLock()  # a signal handler may come in where this thread holds it
        self._began = time.monotonic()
        self._events: collections.deque[SaveEvent] = collections.deque(maxlen=_MAX_EVENTS)
        self._counts: collections.Counter[SaveOutcome] = collections.Counter()
        self._durations = {phase: _Durations() for phase in PHASES}
        self._under_way = 0
        self._nbytes = 0
        self._last: tuple[int, float] | None = None

    def watch(self, handle: SaveHandle, called: float, returned: float) -> None:
        """Take in a save whose call has just returned; never blocks, and never raises for what becomes of the save.

        Args:
            handle: What ``save()`` has returned.
            called: When it was called, by ``time.monotonic()``.
            returned: When it returned.
        """
        if handle.skipped:
            self._end(_event(handle, "skipped", None, called, returned))
            return
        with self._lock:
            self._under_way += 1

        def ended(_: object) -> None:
            with self._lock:
                self._under_way -= 1
            error = handle.committed.peek()
            # A daemon that died may have made it durable before it did.
            unknown = isinstance(error, (CommitUnknownError, DaemonDiedError))
            outcome = "committed" if error is None else "unknown" if unknown else "failed"
            self._end(_event(handle, outcome, error, called, returned))

        # What is written while it is copied may be committed a moment before it is known that all of it is staged.
        handle.staged.add_done_callback(lambda _: handle.committed.add_done_callback(ended))

    def refused(self, step: int, error: BaseException, called: float, returned: float) -> None:
        """Add a call of ``save()`` that raised ``error``: a failed save that took time all the same."""
        self._end(_event(SaveHandle(step, skipped=True), "failed", error, called, returned))

    def events(self) -> list[SaveEvent]:
        """The last thousand saves that have ended, in that order."""
        with self._lock:
            return list(self._events)

    def summary(self) -> SaveSummary:
        """The totals of all saves so far."""
        with self._lock:
            events, wall_s = list(self._events), time.monotonic() - self._began
            measured = {phase: [s for e in events if (s := seconds_of(e, phase)) is not None] for phase in PHASES}
            spreads = {phase: self._durations[phase].spread(measured[phase]) for phase in PHASES}
            rates = [event.nbytes / event.written_s for event in events if event.written_s and event.nbytes]
            return SaveSummary(
                counts={outcome: self._counts[outcome] for outcome in OUTCOMES},
                under_way=self._under_way,
                nbytes=self._nbytes,
                wall_s=wall_s,
                stall=spreads["stall"],
                staged=spreads["staged"],
                written=spreads["written"],
                committed=spreads["committed"],
                stall_share=min(1.0, spreads["stall"].total_s / wall_s) if wall_s > 0 else 0.0,
                bandwidth=statistics.median(rates) if rates else None,
                last_committed_step=None if self._last is None else self._last[0],
                last_commit_s=None if self._last is None else self._last[1],
                mirror=self.mirror_status(),
            )

    def _end(self, event: SaveEvent) -> None:
        with self._lock:
            self._began = min(self._began, event.called)
            self._events.append(event)
            self._counts[event.outcome] += 1
            for phase in PHASES:
                seconds = seconds_of(event, phase)
                if seconds is not None:
                    self._durations[phase].add(seconds)
            if event.committed_s is not None:
                self._nbytes += event.nbytes
                committed = (event.step, event.called_s + event.committed_s)
                self._last = committed if self._last is None else max(self._last, committed, key=lambda last: last[1])
        level = logging.INFO if event.outcome in ("committed", "skipped") else logging.WARNING
        logger.log(level, "%s", event)
        for callback in self.callbacks:
            try:
                callback(event)
            except Exception:  # whatever it is, it is no failure of the save
                logger.exception("a callback failed that was told of step %d", event.step)


def _event(
    handle: SaveHandle, outcome: SaveOutcome, error: BaseException | None, called: float, returned: float
) -> SaveEvent:
    """The event of a save that has ended."""
    now = time.monotonic()
    staged_s, written_s, committed_s = (
        None if future.reached is None else max(0.0, future.reached - called)
        for future in (handle.staged, handle.written, handle.committed)
    )
    return SaveEvent(
        step=handle.step,
        outcome=outcome,
        error=None if error is None else ": ".join(describe_error(error)[:2]),
        nbytes=handle.nbytes,
        checkpoint_nbytes=handle.committed.result().nbytes if outcome == "committed" else None,
        called=called,
        called_s=wall_clock_s() - (now - called),
        stall_s=max(0.0, returned - called),
        staged_s=staged_s,
        written_s=written_s,
        committed_s=committed_s,
        ended_s=max(0.0, (returned if handle.skipped else now) - called) if committed_s is None else committed_s,
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

    def spread(self, recent: list[float]) -> Spread:
        """All of them, with the median of the ``recent`` ones."""
        median_s = statistics.median(recent) if recent else 0.0
        return Spread(
            count=sum(self._classes),
            total_s=self._total_s,
            max_s=self._max_s,
            median_s=median_s,
            classes=tuple(self._classes),
        )


def seconds_of(event: SaveEvent, phase: str) -> float | None:
    """The seconds from a save's call to the end of one of :data:`PHASES`."""
    return getattr(event, f"{phase}_s")


def format_bytes(nbytes: int) -> str:
    """``1.42 GB``."""
    power = min(5, (len(str(nbytes)) - 1) // 3)
    count = nbytes / 1000**power
    return (
        f"{count:.{max(0, 3 - len(str(int(count))))}f} {('kB', 'MB', 'GB', 'TB', 'PB')[power - 1]}"
        if power
        else f"{nbytes} B"
    )


def format_seconds(seconds: float) -> str:
    """``21 ms``, ``0.52 s``."""
    return f"{seconds * 1000:.3g} ms" if seconds < 0.1 else f"{seconds:.2f} s"
