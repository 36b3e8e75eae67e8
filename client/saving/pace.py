"""How fast the daemon writes: as fast as it can, unless this run's own steps show that a slower write costs them less.

A write that is spread out slows each step less, and more steps. Where training has nothing to spare, that comes to the
same; where it waits for data that the write keeps from it, a slower write can cost nothing. So it is tried: what a save
costs is the time of the steps beside its write, less that of as many quiet ones. A slower write is kept where its saves
cost clearly less.
"""

from __future__ import annotations

import collections
import logging
import os
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Final

from sidesave.stager.memory.arena import Arena
from sidesave.stager.state import ownership

logger = logging.getLogger(__name__)

FACTOR: Final = 4
LEAST_FACTOR: Final = 2
"""A slow write takes so many times as long as one at full speed; where saves leave too little time, none is tried."""
SAVES: Final = 3
"""The median of so many saves counts, of each kind."""
WORTH: Final = 0.01
"""Nothing is tried while a save costs less than this part of the time between saves."""
GAIN: Final = 0.75
"""Slow writes are kept if saves cost at most this part of what they cost at full speed."""
REST_SAVES: Final = 100
"""After so many saves it is tried anew: the loop or the disk may have changed."""
PART: Final = 0.5
"""A write is to take this part of the time between saves at most."""
LEAST: Final = 64 << 20
"""Bytes per second below which no write is slowed."""
_PAUSE: Final = 20
_PAUSE_S: Final = 5.0
"""What takes this many times as long as a step, and so many seconds, is none: training did something else."""
_STEPS: Final = 5
_STEPS_S: Final = 1.0
"""A pace that so many steps' time and these seconds have not renewed lapses."""
_QUIET: Final = 8
"""So many quiet steps are needed to say what is usual; the last 64 count."""


@dataclass(slots=True)
class _Window:
    """The steps beside one write."""

    interval_s: float
    called_s: float
    ended_s: float = 0.0
    steps: int = 0
    steps_s: float = 0.0
    counts: bool = True


class PaceSearch:
    """Finds the pace: events with their times come in, :attr:`pace` comes out. No I/O, no clock, no threads."""

    def __init__(self) -> None:
        """Nothing is known: full speed."""
        self.pace = 0
        """Most bytes per second of the writes under way; 0 is no limit."""
        self.slow = False
        """Whether slow writes are tried or kept now."""
        self._writes: set[int] = set()
        self._window: _Window | None = None
        self._quiet: collections.deque[float] = collections.deque(maxlen=64)
        self._clock: int | None = None
        self._stepped_s: float | None = None
        self._called_s: float | None = None
        self._away_s = 0.0
        self._beside = False
        self._may_change_clock = True
        self._tried: list[tuple[float, float]] = []
        self._full_s = self._cost_s = 0.0
        self._rest = 0

    @property
    def usual_s(self) -> float | None:
        """Seconds of a step without a write beside it; None until enough were seen."""
        return statistics.fmean(self._quiet) if len(self._quiet) >= _QUIET else None

    def stepped(self, clock: int, now_s: float) -> None:
        """An optimizer steps. The first one that does after a save is the clock; others are ignored."""
        if clock != self._clock:
            if not self._may_change_clock:
                return
            self._clock, self._stepped_s = clock, None
            self._quiet.clear()
            self._spoil()
        self._may_change_clock = False
        before_s, self._stepped_s = self._stepped_s, now_s
        away_s, self._away_s = self._away_s, 0.0
        beside, self._beside = self._beside, bool(self._writes)
        if before_s is None:
            return
        step_s, window, usual_s = now_s - before_s - away_s, self._window, self.usual_s
        if usual_s is not None and step_s > max(_PAUSE * usual_s, _PAUSE_S):
            self._spoil()
        elif window is not None:
            window.steps += 1
            window.steps_s += step_s
        elif not beside:
            self._quiet.append(step_s)
        if window is not None and not self._writes:
            self._close()

    def began(self, save: int, called_s: float, nbytes: int) -> None:
        """A save of ``nbytes`` is being staged, called at ``called_s``; from here on it may be written."""
        before_s, self._called_s = self._called_s, called_s
        if self._writes:
            self.lift()  # saves come sooner than expected
        self._close()
        self._writes.add(save)
        self._beside = self._may_change_clock = True
        if before_s is None or len(self._writes) > 1:
            return
        interval_s = called_s - before_s
        self._window = _Window(interval_s, called_s)
        if self.slow:
            # To begin and to end takes time as well, at any pace.
            seconds = min(FACTOR * self._full_s, PART * interval_s) - self._full_s
            self.pace = max(LEAST, int(nbytes / seconds)) if seconds > 0 else 0

    def called(self, called_s: float, now_s: float) -> None:
        """The ``save()`` called at ``called_s`` returns: its time counts for no step."""
        self._away_s += now_s - called_s

    def ended(self, save: int, now_s: float) -> None:
        """The save's write has ended, with or without an error."""
        self._writes.discard(save)
        if not self._writes:
            self.pace = 0
            if self._window is not None:
                self._window.ended_s = now_s

    def lift(self) -> None:
        """Somebody waits for the writes under way."""
        self.pace = 0
        self._spoil()

    def _spoil(self) -> None:
        if self._window is not None:
            self._window.counts = False

    def _close(self) -> None:
        window, self._window, usual_s = self._window, None, self.usual_s
        if window is None or not window.counts or not window.steps or usual_s is None or not window.ended_s:
            return
        if self._rest:
            self._rest -= 1
            self.slow &= bool(self._rest)
            return
        self._tried.append((window.steps_s - usual_s * window.steps, window.ended_s - window.called_s))
        if len(self._tried) == SAVES:
            cost_s, write_s = (statistics.median(column) for column in zip(*self._tried, strict=True))
            self._tried.clear()
            self._judge(cost_s, write_s, window.interval_s)

    def _judge(self, cost_s: float, write_s: float, interval_s: float) -> None:
        """Try slow writes, or settle on what costs less."""
        if not self.slow:
            self._full_s, self._cost_s = write_s, cost_s
            self.slow = cost_s > WORTH * interval_s and PART * interval_s >= LEAST_FACTOR * write_s
            self._rest = 0 if self.slow else REST_SAVES
            return
        self.slow, self._rest = cost_s <= GAIN * self._cost_s, REST_SAVES
        text = "a save costs training's steps %.0f ms when it is written in %.2f s, and %.0f ms in %.2f s: %s is kept"
        costs = 1e3 * self._cost_s, self._full_s, 1e3 * cost_s, write_s
        logger.info(text, *costs, "the latter" if self.slow else "the former")


class Pacer:
    """Watches the steps and saves of a checkpointer and tells its daemon the pace. Thread-safe.

    The pace stands in the memory that is being written, where each step renews it. So it lapses where training waits,
    does something else or is dead, and a daemon's successor finds it.
    """

    def __init__(self) -> None:
        """Watch every optimizer of this process, until this object is collected."""
        self.search = PaceSearch()
        self._lock = threading.RLock()  # a signal handler may come in where this thread holds it
        self._arenas: dict[int, Arena] = {}
        self._announced_pace = 0
        self._pid = os.getpid()
        ownership.watch_steps(self)

    def stepped(self, optimizer: object) -> None:
        """An optimizer is about to step."""
        if self._pid == os.getpid():  # in a forked child the lock may be held for good, and the memory is not there
            with self._lock:
                self.search.stepped(id(optimizer), time.monotonic())
                self._tell()

    def began(self, sequence: int, called_s: float, nbytes: int, arena: Arena) -> None:
        """What is staged in ``arena`` may be written from now on, until :meth:`ended`."""
        with self._lock:
            self._arenas[sequence] = arena
            self.search.began(sequence, called_s, nbytes)
            self._tell()

    def called(self, called_s: float) -> None:
        """The ``save()`` called at ``called_s``, by ``time.monotonic()``, returns."""
        with self._lock:
            self.search.called(called_s, time.monotonic())

    def ended(self, sequence: int) -> None:
        """The save's memory is no longer needed and may go when this returns. Idempotent."""
        with self._lock:
            if self._arenas.pop(sequence, None) is not None:
                self.search.ended(sequence, time.monotonic())

    def lift(self) -> None:
        """Let the writes under way run at full speed: somebody waits for them."""
        if self._pid == os.getpid():
            with self._lock:
                self.search.lift()
                self._tell()

    def _tell(self) -> None:
        pace = self.search.pace
        if pace or self._announced_pace:
            self._announced_pace = pace
            for arena in self._arenas.values():
                arena.set_pace(pace, _STEPS_S + _STEPS * (self.search.usual_s or 0.0))
