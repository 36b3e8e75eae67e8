"""How a mirror stands, for the trainer, and for whoever looks at the daemon from outside."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from typing import Final

from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.mirror.uploader import Step

MEMORY: Final = "mirror-sidesave"
"""The name of a memory file in which the daemon keeps its mirror's state as JSON; it is found in ``/proc``."""
MEMORY_NBYTES: Final = 4096
EVERY_S: Final = 1.0
"""While it copies, the state is told this often."""


class Progress:
    """Counts what goes to the mirror; for one thread."""

    def __init__(self) -> None:
        """Nothing has been copied yet."""
        self.last_step: int | None = None
        self._nbytes = 0
        self._since = self._told = time.monotonic()
        self._memory = os.memfd_create(MEMORY, os.MFD_CLOEXEC)

    def add(self, nbytes: int) -> bool:
        """So many bytes go there now, perhaps for the second time; whether the state should be told."""
        if time.monotonic() - self._told > 2 * EVERY_S:  # it was idle, or has waited: that is no part of the rate
            self._nbytes, self._since = 0, time.monotonic()
            self._told = self._since
        self._nbytes += nbytes
        return time.monotonic() - self._told >= EVERY_S

    def state(
        self, attempt: int, steps: Sequence[Step], *, compared: bool, error: protocol.Failed | None
    ) -> protocol.Mirror:
        """The message that tells the trainer; what can be seen from outside is the same from here on."""
        now = time.monotonic()
        rate = self._nbytes / (now - self._since) if steps and error is None and now > self._since else 0.0
        if now - self._told >= EVERY_S:
            self._nbytes, self._since, self._told = 0, now, now
        message = protocol.Mirror(
            attempt=attempt,
            missing=tuple(step.sequence for step in steps),
            compared=compared,
            nbytes=sum(step.nbytes for step in steps),
            nbytes_per_s=rate,
            last_step=self.last_step,
            error=error,
        )
        self.show(message)
        return message

    def show(self, state: protocol.Mirror) -> None:
        """Let it be seen from outside."""
        body = {
            "compared": state.compared,
            "checkpoints": len(state.missing),
            "nbytes": state.nbytes,
            "nbytes_per_s": state.nbytes_per_s,
            "last_step": state.last_step,
            "error": None if state.error is None else f"{state.error.error}: {state.error.message}"[:500],
        }
        with contextlib.suppress(OSError):  # no memory: then it is not seen
            os.pwrite(self._memory, json.dumps(body).encode().ljust(MEMORY_NBYTES), 0)
