"""How far a mirror is behind, by the futures of the saves of one session."""

from __future__ import annotations

import collections
import statistics
import threading
from dataclasses import dataclass

from sidesave.client.saving.handle import SaveHandle
from sidesave.errors import CommitUnknownError, InvalidArgumentError

_RECENT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorSummary:
    """What has become of this session's checkpoints in the mirror. Of several ranks rank 0 knows it.

    Attributes:
        mirrored: Checkpoints that are in the mirror.
        failed: Checkpoints that will not be, as they were deleted before their turn, or the mirror was given up.
        backlog: Committed checkpoints that are still to be copied.
        backlog_nbytes: Their bytes, of all ranks.
        bandwidth: Median bytes per second over the last hundred copies, each from its commit, or from the end of the
            copy before it, to its own end; None before the first.
        last_mirrored_step: The step that was mirrored last.
    """

    mirrored: int
    failed: int
    backlog: int
    backlog_nbytes: int
    bandwidth: float | None
    last_mirrored_step: int | None

    def __str__(self) -> str:
        text = f"{self.mirrored:,} there, {self.backlog:,} to be copied"
        return text + (f", {self.failed:,} failed" if self.failed else "")


class MirrorStats:
    """Statistics over the ``mirrored`` futures of one rank. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come in where this thread holds it
        self._backlog: dict[int, int] = {}
        self._rates: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._mirrored = self._failed = 0
        self._last: tuple[int, float] | None = None
        self._seen = False

    def committed(self, handle: SaveHandle) -> None:
        """Take in a save that has been committed; one without a mirror does not count."""
        if handle.mirrored.done() and isinstance(handle.mirrored.peek(), InvalidArgumentError):
            return
        with self._lock:
            self._seen = True
            self._backlog[id(handle)] = handle.committed.result().nbytes
        handle.mirrored.add_done_callback(lambda _: self._end(handle))

    def _end(self, handle: SaveHandle) -> None:
        error, ended, committed = handle.mirrored.peek(), handle.mirrored.reached, handle.committed.reached
        with self._lock:
            nbytes = self._backlog.pop(id(handle))
            if error is not None:
                self._failed += not isinstance(error, CommitUnknownError)  # which the daemon goes on with
                return
            self._mirrored += 1
            if ended is not None and committed is not None:
                seconds = ended - max(committed, committed if self._last is None else self._last[1])
                if seconds > 0:
                    self._rates.append(nbytes / seconds)
                self._last = handle.step, ended

    def summary(self) -> MirrorSummary | None:
        """The totals so far; None where no checkpoint of this rank goes to a mirror."""
        with self._lock:
            if not self._seen:
                return None
            return MirrorSummary(
                mirrored=self._mirrored,
                failed=self._failed,
                backlog=len(self._backlog),
                backlog_nbytes=sum(self._backlog.values()),
                bandwidth=statistics.median(self._rates) if self._rates else None,
                last_mirrored_step=None if self._last is None else self._last[0],
            )
