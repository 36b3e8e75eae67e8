"""Looks for the files by which other processes ask a run for a save (``save_policies.request_save`` makes them)."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Final

from sidesave.client.save_policies import STOP, TRIGGER

logger = logging.getLogger(__name__)

_PERIOD_S: Final = 1.0


class TriggerWatch:
    """A thread that removes a file when it is there, once a second, and tells of it."""

    def __init__(self, directory: str, on_save: Callable[[], None], on_stop: Callable[[], None]) -> None:
        """Start to look for requests for a save, and for such as are to be the last."""
        self._answers = {os.path.join(directory, TRIGGER): on_save, os.path.join(directory, STOP): on_stop}
        self._complained = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sidesave-trigger", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while True:
            for path, answer in self._answers.items():
                self._look(path, answer)
            if self._end.wait(_PERIOD_S):
                return

    def _look(self, path: str, answer: Callable[[], None]) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            if not self._complained:
                logger.warning("requests for a save are not seen: %s", error)
            self._complained = True
            return
        logger.info("a save was asked for by %s", path)
        answer()

    def close(self) -> None:
        """Stop looking; idempotent."""
        self._end.set()
        self._thread.join(2 * _PERIOD_S)
