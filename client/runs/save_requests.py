"""The files by which other processes ask a run for a save, and the thread that looks for them.

A session that listens says so, by a file with its name. Requests end with the session that they were made for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sidesave.client.runs import finding
from sidesave.errors import WriteError
from sidesave.writer_daemon.storage.atomic import replace_file

logger = logging.getLogger(__name__)

TRIGGER: Final = ".sidesave.trigger"
STOP: Final = ".sidesave.stop"
LISTENING: Final = ".sidesave.listening"
_SEEN: Final = ".seen"
_PERIOD_S: Final = 1.0


def request_save(directory: str | os.PathLike[str], *, stop: bool = False, session: str = "") -> str:
    """Ask the run in ``directory`` for a save at its next step, from any process; returns the request's file.

    With ``stop`` the loop is asked to end there as well (``manager.stopping``). A run with the policy
    :class:`OnRequest` removes the file when it has seen it, within about a second. The request ends with the session
    that is there now, or is made for ``session`` alone; :class:`~sidesave.client.cli.trigger.SaveRequest` finds out
    first whether there is one that listens.

    Raises:
        CheckpointNotFoundError: There is no such directory.
        InvalidArgumentError: It is one checkpoint.
        WriteError: The file cannot be made.
    """
    path = os.path.join(finding.locate_run(directory), STOP if stop else TRIGGER)
    replace_file(path, session.encode(), "cannot ask for a save")
    return path


def listen(directory: str, session: str) -> None:
    """Announce that a session listens to requests; raises ``WriteError``."""
    replace_file(os.path.join(directory, LISTENING), session.encode(), "cannot say that requests are listened to")


def listens(directory: str, session: str) -> bool:
    """Whether a session listens to requests."""
    try:
        return (Path(directory) / LISTENING).read_bytes() == session.encode()
    except OSError:
        return False


def forget_requests(directory: str) -> None:
    """Remove requests to earlier sessions; for the holder of the directory."""
    for name in (LISTENING, TRIGGER, STOP, TRIGGER + _SEEN, STOP + _SEEN):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(directory, name))


class TriggerWatch:
    """A thread that looks for request files once a second, removes them and reports them."""

    def __init__(self, directory: str, session: str, on_save: Callable[[], None], on_stop: Callable[[], None]) -> None:
        """Start to look for requests to ``session``: for a save, and for a last one."""
        self._directory, self._session = directory, session
        self._answers = {os.path.join(directory, TRIGGER): on_save, os.path.join(directory, STOP): on_stop}
        self._complained = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sidesave-trigger", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            listen(self._directory, self._session)
        except WriteError as error:
            logger.warning("%s; sidesave trigger will be refused", error)
        while True:
            for path, answer in self._answers.items():
                self._look(path, answer)
            if self._end.wait(_PERIOD_S):
                return

    def _look(self, path: str, answer: Callable[[], None]) -> None:
        try:
            os.rename(path, path + _SEEN)  # first: another request may come in its place at any moment
            asked = Path(path + _SEEN).read_bytes()
            os.unlink(path + _SEEN)
        except FileNotFoundError:
            return
        except OSError as error:
            if not self._complained:
                logger.warning("requests for a save are not seen: %s", error)
            self._complained = True
            return
        if asked not in (b"", self._session.encode()):
            logger.info("%s was a request to an earlier session, which has ended", path)
            return
        logger.info("a save was asked for by %s", path)
        answer()

    def close(self) -> None:
        """Stop, and withdraw the announcement; idempotent."""
        self._end.set()
        self._thread.join(2 * _PERIOD_S)
        forget_requests(self._directory)
