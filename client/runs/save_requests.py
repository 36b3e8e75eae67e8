"""Requests from other processes that a run save: files, and the thread that looks for them.

A session that listens announces this by a file with its name. Requests end with the session that
they were made for.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sidesave.client.runs import finding
from sidesave.client.runs.history import is_live
from sidesave.errors import ClosedError, WriteError, WriteStalledError
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.lease.observer import Observer
from sidesave.writer_daemon.log import read_history
from sidesave.writer_daemon.save_record import wall_clock_s
from sidesave.writer_daemon.storage import PosixStorage

logger = logging.getLogger(__name__)

TRIGGER: Final = ".sidesave.trigger"
STOP: Final = ".sidesave.stop"
LISTENING: Final = ".sidesave.listening"
_SEEN: Final = ".seen"
_PERIOD_S: Final = 1.0
_POLL_S: Final = 0.5
_BEGINNING_S: Final = 2.0


def request_save(
    directory: str | os.PathLike[str], *, stop: bool = False, session: str = ""
) -> str:
    """Ask a run, from any process, to save at its next step; return the request's file.

    With ``stop`` the loop is also asked to end there (``manager.stopping``). A run with the policy
    :class:`OnRequest` removes the file when it has seen it, within about a second. The request ends
    with the session that is running, or is made for ``session`` alone; :class:`SaveRequest` checks
    first whether a session listens.

    Raises:
        CheckpointNotFoundError: There is no such directory.
        InvalidArgumentError: It is one checkpoint.
        WriteError: The file cannot be created.
    """
    run, name = finding.locate_run(directory), STOP if stop else TRIGGER
    _write(run, name, session)
    return os.path.join(run, name)


def listen(directory: str, session: str) -> None:
    """Announce that a session listens to requests; raises ``WriteError``."""
    _write(directory, LISTENING, session)


def _write(directory: str, name: str, session: str) -> None:
    with contextlib.closing(PosixStorage(directory)) as storage:
        storage.replace(name, session.encode())


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


class SaveRequest:
    """A save request, written to a run at construction; :meth:`wait` waits for the checkpoint."""

    def __init__(self, run: str | os.PathLike[str], *, stop: bool = False) -> None:
        """Ask the trainer of ``run`` to save; an existing request is shared.

        With ``stop``, also ask its training loop to end at that step.

        Raises:
            ClosedError: No live session has the directory open, or the session does not listen to
                requests.
            WriteError: The request cannot be written.
        """
        self._run = os.fspath(run)
        self._catalog = finding.catalog_of(self._run)
        with contextlib.closing(PosixStorage(self._run)) as storage:
            view = Observer(storage).look()
        holder = view.holder
        if view.alive is False or (holder is not None and holder.trainer_is_gone()):
            raise ClosedError(
                f"no live session has {self._run} open, so the request would not be answered"
            )
        self.is_sure: Final = view.alive is True
        """Whether this machine can see that the session is alive."""
        self._session = "" if holder is None else holder.session
        self._clock_is_ours = holder is not None and holder.lives() is not None
        self._before = max(self._sequences(), default=0)
        self._asked_s = wall_clock_s()
        # a session that has just begun does not listen yet
        deadline = time.monotonic() + _BEGINNING_S
        while self._session and not listens(self._run, self._session):
            if time.monotonic() >= deadline:
                raise ClosedError(
                    f"the session that has {self._run} open does not listen to requests: its "
                    "CheckpointManager needs the policy OnRequest()"
                )
            time.sleep(_POLL_S / 10)
        self._path = request_save(self._run, stop=stop, session=self._session)

    def wait(self, timeout_s: float) -> CheckpointInfo:
        """Block until a checkpoint is committed whose save was called after the request.

        Raises:
            WriteStalledError: No such checkpoint was committed within ``timeout_s``; an unseen
                request stays.
            WriteError: The save failed.
            ClosedError: The session ended first; a request that it has not seen is removed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            live = is_live(self._run, self._session)  # before looking: its last commit is found
            info = self._newer()
            if info is not None:
                return info
            if live is False:
                with contextlib.suppress(OSError):
                    os.unlink(self._path)
                raise ClosedError(
                    f"the session that had {self._run} open has ended without such a save"
                )
            if time.monotonic() >= deadline:
                state = "has not seen" if os.path.lexists(self._path) else "has seen"
                message = (
                    f"nothing was committed within {timeout_s:g} s; the trainer {state} the request"
                )
                raise WriteStalledError(errno.ETIMEDOUT, message, self._run)
            time.sleep(_POLL_S)

    def _sequences(self) -> list[int]:
        """Return the sequence numbers of all known saves."""
        sequences = [info.sequence for info in self._catalog.all()]
        return sequences + [
            record.sequence for record in read_history(self._run) if record.sequence is not None
        ]

    def _newer(self) -> CheckpointInfo | None:
        for info in self._catalog.all():
            if self._is_newer(info.sequence, info.created_s):
                return info
        for record in read_history(self._run):
            if record.sequence is None or not self._is_newer(record.sequence, record.called_s):
                continue
            # in the fallback directory
            if record.outcome == "committed" and record.path is not None:
                return finding.read_info(record.path)
            if record.outcome == "failed":
                reason = f"the save of step {record.step} failed: {record.error}: {record.message}"
                raise WriteError(record.errno or errno.EIO, reason)
        return None

    def _is_newer(self, sequence: int, called_s: float | None) -> bool:
        """Whether a save was called after the request.

        The sequence number does not show that a save was called before the request and waited for
        its turn. If the trainer has the same clock, the time of the call shows it.
        """
        return sequence > self._before and (
            not self._clock_is_ours or called_s is None or called_s >= self._asked_s
        )


class TriggerWatch:
    """A thread that looks for request files once a second, removes and reports them."""

    def __init__(
        self, directory: str, session: str, on_save: Callable[[], None], on_stop: Callable[[], None]
    ) -> None:
        """Start to look for requests to ``session``: for a save, and for a last one."""
        self._directory, self._session = directory, session
        self._answers = {
            os.path.join(directory, TRIGGER): on_save,
            os.path.join(directory, STOP): on_stop,
        }
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
            os.rename(path, path + _SEEN)  # first: another request may replace it at any moment
            asked = Path(path + _SEEN).read_bytes()
            os.unlink(path + _SEEN)
        except FileNotFoundError:
            return
        except OSError as error:
            if not self._complained:
                logger.warning("cannot look for requests for a save: %s", error)
            self._complained = True
            return
        if asked not in (b"", self._session.encode()):
            logger.info("%s was a request to an earlier session, which has ended", path)
            return
        logger.info("%s requested a save", path)
        answer()

    def close(self) -> None:
        """Stop, and withdraw the announcement; idempotent."""
        self._end.set()
        self._thread.join(2 * _PERIOD_S)
        forget_requests(self._directory)
