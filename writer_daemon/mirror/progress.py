"""The state of a mirror, for the trainer and for other processes that inspect the daemon."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from typing import Final

from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo

MEMORY: Final = "mirror-sidesave"
"""Name of the memory file with the mirror's state (JSON); other processes find it in ``/proc``."""
MEMORY_NBYTES: Final = 4096
EVERY_S: Final = 1.0
"""Interval of reports during a copy."""


class MirrorProgress:
    """Counts the bytes copied to the mirror. Not thread-safe."""

    def __init__(self) -> None:
        """Start without copied bytes."""
        self.last_step: int | None = None
        self._nbytes = 0
        self._since = self._told = time.monotonic()
        self._memory = os.memfd_create(MEMORY, os.MFD_CLOEXEC)

    def add(self, nbytes: int) -> bool:
        """Count bytes about to be copied, perhaps again; return whether a report is due."""
        # it was idle or waited: leave that time out of the rate
        if time.monotonic() - self._told > 2 * EVERY_S:
            self._nbytes, self._since = 0, time.monotonic()
            self._told = self._since
        self._nbytes += nbytes
        return time.monotonic() - self._told >= EVERY_S

    def state(
        self,
        attempt: int,
        steps: Sequence[CheckpointInfo],
        *,
        compared: bool,
        error: protocol.Failed | None,
    ) -> protocol.MirrorState:
        """Return the message for the trainer, and publish the same state for other processes."""
        now = time.monotonic()
        rate = (
            self._nbytes / (now - self._since)
            if steps and error is None and now > self._since
            else 0.0
        )
        if now - self._told >= EVERY_S:
            self._nbytes, self._since, self._told = 0, now, now
        message = protocol.MirrorState(
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

    def show(self, state: protocol.MirrorState) -> None:
        """Publish the state for other processes."""
        body = {
            "compared": state.compared,
            "checkpoints": len(state.missing),
            "nbytes": state.nbytes,
            "nbytes_per_s": state.nbytes_per_s,
            "last_step": state.last_step,
            "error": None
            if state.error is None
            else f"{state.error.error}: {state.error.message}"[:500],
        }
        with contextlib.suppress(OSError):  # without memory it is not published
            os.pwrite(self._memory, json.dumps(body).encode().ljust(MEMORY_NBYTES), 0)
