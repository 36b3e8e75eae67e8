"""How writing gives way to training: by a pace that the trainer has put into the memory that is being written.

The trainer renews its pace with each step. Where it does not, as it waits for the save, does something else, or is
dead, the pace lapses by itself and writing goes on as fast as storage takes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from sidesave.stager.memory.arena import Arena

MAX_WAIT_S: Final = 0.25
"""Between two pieces, whatever the pace: no deadline for storage that has stalled is near that."""
_LOOK_S: Final = 0.005
"""A pace that has changed is noticed within this."""


class Turns:
    """Hands out turns to move bytes of one arena, as far apart as its pace says. Thread-safe."""

    def __init__(self, arena: Arena, is_over: Callable[[], bool]) -> None:
        """Nothing has been moved; who waits for a turn when it ``is_over`` gets it at once."""
        self._arena = arena
        self._is_over = is_over
        self._lock = threading.Lock()
        self._last_s, self._last_nbytes = 0.0, 0

    def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` may be moved; those of the turn before have had their time then."""
        with self._lock:
            while (pace := self._arena.pace()) and not self._is_over():
                due_s = self._last_s + min(self._last_nbytes / pace, MAX_WAIT_S)
                left_s = due_s - time.monotonic()
                if left_s <= 0:
                    break
                time.sleep(min(left_s, _LOOK_S))
            self._last_s, self._last_nbytes = time.monotonic(), nbytes
