"""Looks for the file by which other processes ask a run for a save (``save_policies.request_save`` makes it)."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Final

from sidesave.client.save_policies import TRIGGER

logger = logging.getLogger(__name__)

_PERIOD_S: Final = 1.0


class TriggerWatch:
    """A thread that removes the file when it is there, once a second, and tells of it."""

    def __init__(self, directory: str, on_request: Callable[[], None]) -> None:
        """Start to look."""
        self._path = os.path.join(directory, TRIGGER)
        self._on_request = on_request
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sidesave-trigger", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        complained = False
        while True:
            try:
                os.unlink(self._path)
            except FileNotFoundError:
                pass
            except OSError as error:
                if not complained:
                    logger.warning("requests for a save are not seen: %s", error)
                complained = True
            else:
                logger.info("a save was asked for by %s", self._path)
                self._on_request()
            if self._end.wait(_PERIOD_S):
                return

    def close(self) -> None:
        """Stop looking; idempotent."""
        self._end.set()
        self._thread.join(2 * _PERIOD_S)
