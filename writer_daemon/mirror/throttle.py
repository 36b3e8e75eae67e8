"""Limits copies to a number of bytes per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_LOOK_S: Final = 0.1


class Throttle:
    """A token bucket without depth: no burst follows a pause."""

    def __init__(self, nbytes_per_s: int, halt: Callable[[], None]) -> None:
        """Limit to ``nbytes_per_s`` (0: no limit); ``halt`` is called often, and raises to stop."""
        self._rate = nbytes_per_s
        self._halt = halt
        self._free_at = 0.0

    def take(self, nbytes: int) -> None:
        """Block until the next ``nbytes`` bytes may be sent."""
        self._halt()
        if not self._rate:
            return
        while (left := self._free_at - time.monotonic()) > 0:
            time.sleep(min(_LOOK_S, left))
            self._halt()
        self._free_at = time.monotonic() + nbytes / self._rate
