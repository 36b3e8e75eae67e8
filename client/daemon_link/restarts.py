"""The daemons that died in a row, and how long to wait before the next one."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final

_HEALTHY_S: Final = 60.0
"""A daemon that lived this long was well: the one after it starts without a pause."""
_FIRST_PAUSE_S: Final = 0.05
_MAX_PAUSE_S: Final = 2.0
_MAX_IDLE_PAUSE_S: Final = 10.0
"""The longest pause while there are no requests; the first one ends it."""


@dataclass(slots=True)
class Restarts:
    """Counts deaths that no commit and no long life came between."""

    in_a_row: int = 0
    ready_at: float = math.inf
    """Monotonic time at which the last daemon was ready."""

    def daemon_died(self) -> None:
        """Count a death."""
        was_healthy = time.monotonic() - self.ready_at > _HEALTHY_S
        self.in_a_row = 1 if was_healthy else self.in_a_row + 1

    def pause_s(self, *, idle: bool) -> float:
        """Return the seconds to wait; ``idle`` means that no request waits for a daemon."""
        longest = _MAX_IDLE_PAUSE_S if idle else _MAX_PAUSE_S
        return min(longest, _FIRST_PAUSE_S * 2.0 ** min(16, self.in_a_row - 1))
