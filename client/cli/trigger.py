"""A request from outside: the trainer that has a run directory open is to save at its next step.

The request is a file in the run directory, which the trainer's manager removes once it has seen it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import Final

from sidesave.client.runs import catalog
from sidesave.client.runs.history import is_live
from sidesave.client.runs.info import CheckpointInfo
from sidesave.client.runs.save_requests import listens, request_save
from sidesave.errors import ClosedError, WriteError, WriteStalledError
from sidesave.writer_daemon.lease.lease import Observer
from sidesave.writer_daemon.log import read_history, wall_clock_s
from sidesave.writer_daemon.storage import PosixStorage

_POLL_S: Final = 0.5
_BEGINNING_S: Final = 2.0


class SaveRequest:
    """A request to save, left in a run directory when it is made; it can be awaited."""

    def __init__(self, run: str | os.PathLike[str], *, stop: bool = False) -> None:
        """Ask the trainer of ``run``; a request that is there already stands for this one as well.

        With ``stop`` its loop is asked to end there.

        Raises:
            ClosedError: No session that lives has the directory open, or it does not listen, so nobody would obey.
            WriteError: The request cannot be left there.
        """
        self._run = os.fspath(run)
        with contextlib.closing(PosixStorage(self._run)) as storage:
            view = Observer(storage).look()
        holder = view.holder
        if view.alive is False or (holder is not None and holder.trainer_is_gone()):
            raise ClosedError(f"no live session has {self._run} open, so nobody would save")
        self.is_sure: Final = view.alive is True
        """False where it cannot be told from this machine whether the session lives."""
        self._session = "" if holder is None else holder.session
        self._clock_is_ours = holder is not None and holder.lives() is not None
        self._before = max(self._sequences(), default=0)
        self._asked_s = wall_clock_s()
        deadline = time.monotonic() + _BEGINNING_S  # a session that has just begun does not listen yet
        while self._session and not listens(self._run, self._session):
            if time.monotonic() >= deadline:
                raise ClosedError(
                    f"the session that has {self._run} open does not listen to requests: its CheckpointManager needs "
                    "the policy OnRequest()"
                )
            time.sleep(_POLL_S / 10)
        self._path = request_save(self._run, stop=stop, session=self._session)

    def wait(self, timeout_s: float) -> CheckpointInfo:
        """Block until a checkpoint is committed whose save was called after the request.

        Raises:
            WriteStalledError: There was none within ``timeout_s``; a request that nobody has seen stays.
            WriteError: The save failed.
            ClosedError: The session ended first; a request that it has not seen is taken back.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            live = is_live(self._run, self._session)  # before the look that has to find what it did last
            info = self._newer()
            if info is not None:
                return info
            if live is False:
                with contextlib.suppress(OSError):
                    os.unlink(self._path)
                raise ClosedError(f"the session that had {self._run} open has ended without such a save")
            if time.monotonic() >= deadline:
                state = "has not seen" if os.path.lexists(self._path) else "has seen"
                message = f"nothing was committed within {timeout_s:g} s; the trainer {state} the request"
                raise WriteStalledError(errno.ETIMEDOUT, message, self._run)
            time.sleep(_POLL_S)

    def _sequences(self) -> list[int]:
        """The places in the order of commits of all known saves."""
        sequences = [info.sequence for info in catalog.scan(self._run)]
        return sequences + [record.sequence for record in read_history(self._run) if record.sequence is not None]

    def _newer(self) -> CheckpointInfo | None:
        for info in catalog.scan(self._run):
            if self._is_newer(info.sequence, info.created_s):
                return info
        for record in read_history(self._run):
            if record.sequence is None or not self._is_newer(record.sequence, record.called_s):
                continue
            if record.outcome == "committed" and record.path is not None:  # in the fallback directory
                return catalog.read_info(record.path)
            if record.outcome == "failed":
                reason = f"the save of step {record.step} failed: {record.error}: {record.message}"
                raise WriteError(record.errno or errno.EIO, reason)
        return None

    def _is_newer(self, sequence: int, called_s: float | None) -> bool:
        """Whether a save was called after the request.

        One that was called before, and waits for its turn, is not known of by its place; of a trainer with the same
        clock it is known by its time.
        """
        return sequence > self._before and (not self._clock_is_ours or called_s is None or called_s >= self._asked_s)
