"""The lease of a run directory: one session may write at a time, on local and network file systems.

The lease is the file with the highest number, its epoch, in ``.sidesave.lease/``. A process takes
it by linking a finished record to the next number, which succeeds for only one process, and
releases it by a note in its own file. A name never stands for another lease later, so a process
cannot break a newer lease by mistake: docs/decisions/0002.

:mod:`sidesave.writer_daemon.lease.observer` finds out who holds it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import mmap
import os
import random
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from sidesave.errors import DirectoryInUseError, NoSpaceError, WriteError
from sidesave.writer_daemon.format.names import LEASE_DIRECTORY
from sidesave.writer_daemon.lease.observer import (
    CLOSED,
    REREAD_S,
    Observer,
    View,
    epochs,
    newest_epoch,
    path_of,
    read_lease,
)
from sidesave.writer_daemon.lease.record import PERIOD_S, RECORD_NBYTES, LeaseRecord
from sidesave.writer_daemon.storage import OutputFile, Storage

_POLL_S: Final = 0.05
_SLOW_POLL_S: Final = 1.0
_KILL_TIMEOUT_S: Final = 10.0
_RELEASE_TIMEOUT_S: Final = 10.0
_TAKEOVER_SHARE: Final = 0.8
"""Share of the time before a daemon is fenced that it is given to exit by itself."""
_SPARE: Final = ".spare"
_OWN: Final = (
    "it is another Checkpointer or CheckpointManager of this process: use that one, or close() it "
    "first"
)

logger = logging.getLogger(__name__)


class Lease:
    """The right to write to a run directory, until :meth:`release` or the process ends."""

    def __init__(
        self,
        storage: Storage,
        holder: LeaseRecord,
        takeover_timeout_s: float,
        keep_waiting: Callable[[], bool],
        period_s: float = PERIOD_S,
        *,
        resumes: bool = False,
        kills: bool = True,
    ) -> None:
        """Take the lease of ``storage``; blocks until then.

        A holder without a trainer is finishing staged saves: it is asked to exit within
        ``takeover_timeout_s``, and this waits while ``keep_waiting()``. After that it is killed or,
        if that fails or ``kills`` is false, left running without the lease. An earlier daemon of
        this session is not waited for. A holder on another system that may be dead is observed for
        up to three of its periods. ``resumes``: a daemon of this session has held the lease.

        Raises:
            DirectoryInUseError: The holder and its trainer are alive.
            WriteError: Storage failed; or this session ``resumes`` after another session.
        """
        self._storage = storage
        self._record = replace(holder, token=secrets.token_hex(8), period_s=float(period_s))
        self.session: Final = holder.session
        self.epoch = 0
        self.end_by = math.inf
        """Monotonic time at which to abandon unfinished saves: no trainer, a successor waits."""
        self._lost = False
        self._kills = kills
        self._page = mmap.mmap(-1, RECORD_NBYTES)
        self._take(takeover_timeout_s, keep_waiting, resumes=resumes)
        self._tidy()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="sidesave-lease", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether :meth:`check` or storage (by fencing earlier holders) found another holder."""
        return self._lost or self._storage.has_passed_on()

    def check(self, *, ask: bool = False) -> None:
        """Raise ``WriteError`` unless this lease is the newest; call right before every commit.

        If storage fences earlier holders, this sends no request unless ``ask``: a commit without
        the lease fails anyway, and the thread that renews the lease notices its loss.
        """
        path = f"{self._storage.root}/{path_of(self.epoch)}"
        if self._storage.fences and not self.lost and not ask:
            return
        try:
            epoch = max(self.epoch, newest_epoch(self._storage))
            holder = LeaseRecord.from_bytes(read_lease(self._storage, epoch) or b"")
        except WriteError as error:
            raise WriteError(
                error.errno, f"cannot read the lease: {error.strerror}", path
            ) from error
        if holder is None or holder.token != self._record.token or holder.released:
            self._lost = True
            taken = epoch > self.epoch
            text = (
                f"{holder or 'another session'} has taken the lease"
                if taken
                else "the lease file was changed"
            )
            raise WriteError(errno.ESTALE, text, path)
        if self.lost:
            raise WriteError(errno.ESTALE, "another session has taken the lease", path)

    def tell_trainer_gone(self) -> None:
        """Record that the trainer has ended and staged saves are being finished; does not block."""
        self._record = replace(self._record, trainer_gone=True)
        self._wake.set()

    def release(self, *, final: bool = True) -> None:
        """Release the lease, waiting up to 10 s; idempotent, and without effect in a forked child.

        ``final`` means that this session will not take the lease again.
        """
        if self._record.pid == os.getpid():
            self._record = replace(
                self._record, released=True, trainer_gone=final or self._record.trainer_gone
            )
            self._wake.set()
            self._thread.join(_RELEASE_TIMEOUT_S)

    # Taking ---------------------------------------------------------------------------------------

    def _take(
        self, takeover_timeout_s: float, keep_waiting: Callable[[], bool], *, resumes: bool
    ) -> None:
        # Users without read permission cannot lock files.
        self._storage.make_directory(LEASE_DIRECTORY, 0o770)
        observer = Observer(self._storage, self._record.period_s)
        asked, fence_at, killed = 0, math.inf, False
        while True:
            view, now = observer.look(), time.monotonic()
            holder, free = view.holder, view.alive is False
            if resumes and holder is not None and holder.session != self.session:
                # Do not ask it to exit.
                text = (
                    f"{holder} has used this directory since, or it is not the directory that the "
                    "run began in"
                )
                raise WriteError(
                    errno.ESTALE, f"{text}: put that back, or restart", self._storage.root
                )
            if (
                holder is not None
                and not free
                and (holder.session == self.session or holder.trainer_is_gone())
            ):
                if asked != view.epoch:
                    patience_s = 0.0 if holder.session == self.session else takeover_timeout_s
                    asked, fence_at, killed = view.epoch, now + patience_s, False
                    self._ask_to_leave(view.epoch, patience_s * _TAKEOVER_SHARE)
                if now >= fence_at and not killed and self._kills and holder.kill():
                    logger.warning(
                        "killed daemon %d, which did not leave %s in time",
                        holder.pid,
                        self._storage.root,
                    )
                    killed, fence_at = True, now + _KILL_TIMEOUT_S
                free = now >= fence_at
            elif view.alive:
                own = holder is not None and holder.serves_trainer_of(self._record)
                raise self._in_use(
                    view, "is using it", _OWN if own else "use another directory, or stop that run"
                )
            if free and self._claim(view.epoch + 1, observer):
                return
            if not keep_waiting():
                raise self._in_use(view, "has not released it yet", "wait for it, or stop it")
            time.sleep(
                _POLL_S
                if observer.local
                else random.uniform(0.5, 1) * min(1.0, self._record.period_s)
            )

    def _in_use(self, view: View, state: str, hint: str) -> DirectoryInUseError:
        evidence = f" ({view.evidence})" if view.evidence else ""
        message = f"{view.holder or 'another session'} {state}{evidence}; {hint}"
        return DirectoryInUseError(errno.EBUSY, message, self._storage.root)

    def _ask_to_leave(self, epoch: int, within_s: float) -> None:
        """Ask the holder to exit.

        A failure is only logged: the lease is taken anyway after the timeout.
        """
        request = {
            "session": self.session,
            "host": self._record.host,
            "pid": self._record.pid,
            "within_s": within_s,
        }
        name = f"{path_of(epoch)}.takeover"
        temporary = f"{name}.{self._record.token}"
        try:
            with self._storage.creating(temporary, RECORD_NBYTES, name) as output:
                self._write(output, json.dumps(request).encode())
                output.finish(RECORD_NBYTES)
            if not self._storage.publish(temporary, name):
                self._storage.remove(temporary)
        except WriteError as error:
            logger.warning("cannot ask the current holder to exit: %s", error)

    def _claim(self, epoch: int, observer: Observer) -> bool:
        """Try to take ``epoch``; return False if another process has it."""
        temporary = f"{path_of(epoch)}.{self._record.token}"
        self._record = replace(self._record, epoch=epoch)
        with contextlib.ExitStack() as held:
            held.callback(self._discard, temporary)
            output = self._create(temporary, path_of(epoch))
            held.callback(output.close)
            self._write(output, self._record.to_bytes())
            output.finish(RECORD_NBYTES)
            try:
                unlock = self._storage.lock(temporary)
            except WriteError as error:
                if error.errno == errno.ENOENT:  # a later holder has removed it
                    return False
                raise
            if unlock is not None:
                held.callback(unlock)
            winner = self._link(temporary, epoch)
            if winner is not None:
                observer.known = epoch
            if winner != self._record.token:
                return False
            if newest_epoch(self._storage) != epoch:  # an old number, freed by a later holder
                self._discard(path_of(epoch))
                return False
            self._storage.sync_directory(LEASE_DIRECTORY)
            self.epoch, self._output, self._has_lock = epoch, output, unlock is not None
            self._held = held.pop_all()
        return True

    def _create(self, temporary: str, final: str) -> OutputFile:
        try:
            return self._storage.create(temporary, RECORD_NBYTES, final)
        except NoSpaceError:
            for name in epochs(self._storage):
                if name.endswith(_SPARE):
                    self._discard(f"{LEASE_DIRECTORY}/{name}")
            return self._storage.create(temporary, RECORD_NBYTES, final)

    def _link(self, temporary: str, epoch: int) -> str | None:
        """Link the record to its number; return the token of the number's holder, or None.

        Reads the holder instead of trusting the result of the link: a network file system that
        repeats a lost request reports the first one's success as a failure, and may show its result
        late.
        """
        failure: WriteError | None = None
        for delay_s in REREAD_S:
            time.sleep(delay_s)
            try:
                if self._storage.publish(temporary, path_of(epoch)):
                    return self._record.token
                failure = None
            except WriteError as error:
                failure = error
            if str(epoch) in self._storage.list_directory(LEASE_DIRECTORY):
                holder = LeaseRecord.from_bytes(read_lease(self._storage, epoch) or b"")
                return holder.token if holder is not None else ""
            if failure is not None and failure.errno == errno.ENOENT:
                return None  # a later holder has removed it
        if failure is not None:
            raise failure
        return ""

    def _tidy(self) -> None:
        """Remove files of earlier leases.

        Also reserves the space that the next lease needs on a full disk.
        """
        for name, epoch in epochs(self._storage).items():
            if epoch < self.epoch:
                self._discard(f"{LEASE_DIRECTORY}/{name}")
        for name in self._storage.list_directory(LEASE_DIRECTORY):
            if name.startswith(f"{CLOSED}.") and f".{self.session}." not in name:
                self._discard(f"{LEASE_DIRECTORY}/{name}")
        with contextlib.suppress(WriteError):
            self._storage.create(f"{path_of(self.epoch)}{_SPARE}", RECORD_NBYTES).close()

    def _discard(self, path: str) -> None:
        with contextlib.suppress(WriteError):  # the next holder tries again
            self._storage.remove(path)

    # Holding --------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Renew the lease in a separate thread, so that hanging storage delays nothing else."""
        period_s = self._record.period_s  # also with a lock, which an observer may not test
        counter = 0
        while True:
            leaving = self._record.trainer_gone
            self._wake.wait(min(_SLOW_POLL_S, period_s) if leaving else period_s)
            self._wake.clear()
            record = self._record
            counter += 1
            try:
                if not self._is_superseded():
                    self._write(self._output, replace(record, counter=counter).to_bytes())
                    if not self._has_lock:
                        self._output.finish(RECORD_NBYTES)
                if record.trainer_gone and self.end_by == math.inf:
                    self.end_by = self._read_request()
            except WriteError as error:
                logger.warning("cannot renew the lease: %s", error)
            if record.released:
                self._held.close()
                return

    def _is_superseded(self) -> bool:
        """Whether an object store has a later lease.

        Then this lease's removed file must not be written again.
        """
        if self._storage.fences and not self.lost:
            self._lost = newest_epoch(self._storage) > self.epoch
        return self._storage.fences and self.lost

    def _read_request(self) -> float:
        name = f"{self.epoch}.takeover"
        if name not in self._storage.list_directory(LEASE_DIRECTORY):
            return math.inf
        data = self._storage.read(f"{LEASE_DIRECTORY}/{name}", RECORD_NBYTES)
        try:
            within_s = float(json.loads(data or b"")["within_s"])
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            return math.inf
        return time.monotonic() + within_s if within_s >= 0 else math.inf  # also for NaN

    def _write(self, output: OutputFile, data: bytes) -> None:
        self._page[:] = data.ljust(RECORD_NBYTES)
        with memoryview(self._page) as view:
            output.write_at(view, 0)
