"""Notes where saves come faster than an object store takes them, and says once how often it would."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger(__name__)


class Congestion:
    """The calls of ``save()`` that had to wait for a staging slot. Thread-safe."""

    def __init__(self, directory: str, *, tells: bool) -> None:
        """Nobody has waited yet; ``tells`` has the first wait logged."""
        self._directory = directory
        self._tells = tells
        self._lock = threading.Lock()
        self._last: tuple[int, float] | None = None
        self.waits = 0
        self.waited_s = 0.0

    def wrote(self, nbytes: int, seconds: float) -> None:
        """So much was durable after so many seconds of writing."""
        with self._lock:
            self._last = nbytes, seconds

    def waited(self, step: int, seconds: float) -> None:
        """The save of a step has got a slot after so long."""
        with self._lock:
            self.waits += 1
            self.waited_s += seconds
            last = self._last
            tells, self._tells = self._tells and last is not None, self._tells and last is None
        if tells and last is not None:
            nbytes, took_s = last
            logger.warning(
                "step %d has waited %.1f s for a staging slot, so saves come faster than %s takes them: "
                "%.3g MB took %.1f s (%.3g MB/s), so one save every %.0f s can be sustained; save less often, or less",
                step,
                seconds,
                self._directory,
                nbytes / 1e6,
                took_s,
                nbytes / 1e6 / max(took_s, 1e-6),
                max(1.0, took_s),
            )

    def close(self) -> None:
        """Say how often saves have waited in all."""
        if self.waits > 1:
            logger.info("%d saves have waited for a staging slot, %.1f s in all", self.waits, self.waited_s)
