"""Who may write to a run directory: one session at a time, on local and on network file systems.

The lease is the file with the highest number, its epoch, in ``.sidesave.lease/``. It is taken by linking a finished
record to the next number, which one process can do, and given up by saying so in one's own file. No name ever comes to
mean another lease, so nobody can break a newer one by mistake: docs/decisions/0002.

Where file locks can be trusted, the lock on that file tells whether its holder lives. Elsewhere a process of this
system is looked up by its pid, and of any other a counter has to advance, which the holder writes once a period.
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
from dataclasses import dataclass, replace
from typing import Final

from sidesave.errors import DirectoryInUseError, NoSpaceError, WriteError
from sidesave.writer_daemon.format.names import LEASE_DIRECTORY
from sidesave.writer_daemon.lease.record import PERIOD_S, RECORD_NBYTES, LeaseRecord
from sidesave.writer_daemon.storage import OutputFile, Storage

CLOSED: Final = "closed"
"""``closed.<session>.<rank>``: the daemon of that rank has left, and no further record comes from it."""
STILL_PERIODS: Final = 3
"""For so many periods a counter must stand still before its holder counts as dead."""
_POLL_S: Final = 0.05
_SLOW_POLL_S: Final = 1.0
_KILL_TIMEOUT_S: Final = 10.0
_RELEASE_TIMEOUT_S: Final = 10.0
_TAKEOVER_SHARE: Final = 0.8
"""Of the time until it is fenced a daemon is asked to use this much, so that it can leave by itself."""
_REREAD_S: Final = (0.0, 0.01, 0.1)
_SPARE: Final = ".spare"
_OWN: Final = (
    "that is another Checkpointer or CheckpointManager of this very process: go on with that one, or close() it first"
)
_NO_RECORD: Final = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EFBIG)
"""What reading says of a link, a directory, a device and a large file: no lease was ever one of them."""

logger = logging.getLogger(__name__)


def _path(epoch: int) -> str:
    return f"{LEASE_DIRECTORY}/{epoch}"


def _epochs(storage: Storage) -> dict[str, int]:
    """The names in the lease directory, read from storage, with their epochs."""
    numbers = {name: name.partition(".")[0] for name in storage.list_directory(LEASE_DIRECTORY)}
    return {name: int(number) for name, number in numbers.items() if number.isascii() and number.isdigit()}


def _newest(storage: Storage) -> int:
    return max((epoch for name, epoch in _epochs(storage).items() if name == str(epoch)), default=0)


def _read(storage: Storage, epoch: int) -> bytes | None:
    """A record, read from storage, and again while it looks torn; None if there is none."""
    data = None
    for delay_s in _REREAD_S:
        time.sleep(delay_s)
        data = storage.read(_path(epoch), RECORD_NBYTES)
        if data is None or LeaseRecord.from_bytes(data) is not None:
            break
    return data


def current_holder(storage: Storage) -> LeaseRecord | None:
    """The record of the newest lease; None if there is none, or it is empty."""
    looked = 0
    while (epoch := _newest(storage)) != looked:
        data = _read(storage, epoch)
        if data is not None:
            return LeaseRecord.from_bytes(data)
        looked = epoch  # it is gone: taken over, and tidied away, between the two looks
    return None


def closed_ranks(storage: Storage, session: str) -> frozenset[int]:
    """The ranks of a session whose daemons have left."""
    prefix = f"{CLOSED}.{session}."
    names = (name.removeprefix(prefix) for name in storage.list_directory(LEASE_DIRECTORY) if name.startswith(prefix))
    return frozenset(int(name) for name in names if name.isascii() and name.isdigit())


@dataclass(frozen=True, slots=True)
class View:
    """The newest lease; ``holder`` is None if its file names none, ``alive`` is None while that is unknown."""

    epoch: int
    holder: LeaseRecord | None = None
    alive: bool | None = None
    evidence: str = ""


class Observer:
    """Judges the newest lease of a directory; some need several looks, a period apart."""

    def __init__(self, storage: Storage, period_s: float = PERIOD_S) -> None:
        """Watch ``storage`` without changing it; ``period_s`` is for holders that do not tell theirs."""
        self._storage = storage
        self._period_s = period_s
        self.known = 0
        """An epoch that is taken, whatever a listing says, which may be an old one."""
        self.local = True
        """Whether locks told, when last looked."""
        self._seen: tuple[int, bytes | None] = (0, None)
        self._still_s = 0.0
        self._looked = 0.0

    def look(self) -> View:
        """The current lease; raises ``WriteError``."""
        epoch = max(self.known, _newest(self._storage))
        if epoch == 0:
            return View(0, alive=False)
        try:
            data = _read(self._storage, epoch)
            locked = self._storage.is_locked(_path(epoch))
        except WriteError as error:
            if error.errno not in _NO_RECORD:
                raise
            return View(epoch, alive=False)
        holder = LeaseRecord.from_bytes(data or b"")
        period_s = self._period_s if holder is None else min(10 * PERIOD_S, max(0.01, holder.period_s))
        before, self._seen = self._seen, (epoch, data)
        # A gap between two looks counts as one period at most: storage that hung has hung for the holder, too.
        gap_s, self._looked = min(time.monotonic() - self._looked, period_s), time.monotonic()
        self._still_s = self._still_s + gap_s if before == self._seen else 0.0
        if holder is not None and holder.released:
            return View(epoch, holder, alive=False)
        self.local = locked is not None
        if locked is not None:
            return View(epoch, holder, locked, "it holds the lock")
        lives = None if holder is None else holder.lives()
        if lives is not None:
            return View(epoch, holder, lives, "its process runs")
        if before[0] == epoch and before[1] not in (None, data):
            return View(epoch, holder, True, "its counter advances")
        return View(epoch, holder, False if self._still_s > STILL_PERIODS * period_s else None)


class Lease:
    """The right to write to a run directory, held until :meth:`release` or the end of the process."""

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
        """Take the lease of ``storage``; blocking.

        Where the present holder's trainer is dead, its daemon is finishing what was staged: it is asked to leave
        within ``takeover_timeout_s`` and waited for, while ``keep_waiting()``. Then it is killed or, where that cannot
        be done from here or this ``kills`` nobody, left behind without the lease. An earlier daemon of the same session
        is not waited for. A holder on another system that may be dead is watched for up to three of its periods. With
        ``resumes`` a daemon of the same session has held it before.

        Raises:
            DirectoryInUseError: The holder and its trainer live; the message names them, and how that was judged.
            WriteError: Storage refused; or this session ``resumes``, and another one was here last.
        """
        self._storage = storage
        self._record = replace(holder, token=secrets.token_hex(8), period_s=float(period_s))
        self.session: Final = holder.session
        self.epoch = 0
        self.end_by = math.inf
        """When to give up what is unfinished, by the monotonic clock: the trainer is gone and a successor waits."""
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
        """Whether another holder has been found, by :meth:`check` or by storage that keeps earlier ones out itself."""
        return self._lost or self._storage.has_passed_on()

    def check(self, *, ask: bool = False) -> None:
        """Raise ``WriteError`` unless this lease is still the newest; to be called right before every commit.

        Where storage keeps earlier holders out itself nothing is asked, for its next change tells, and so does the
        thread that renews the lease: what is known by then counts, unless the caller has it ``ask``.
        """
        path = f"{self._storage.root}/{_path(self.epoch)}"
        if self._storage.fences and not self.lost and not ask:
            return
        try:
            epoch = max(self.epoch, _newest(self._storage))
            holder = LeaseRecord.from_bytes(_read(self._storage, epoch) or b"")
        except WriteError as error:
            raise WriteError(error.errno, f"the lease cannot be read: {error.strerror}", path) from error
        if holder is None or holder.token != self._record.token or holder.released:
            self._lost = True
            lost = f"has passed to {holder or 'another session'}" if epoch > self.epoch else "file is not ours any more"
            raise WriteError(errno.ESTALE, f"the lease {lost}", path)
        if self.lost:
            raise WriteError(errno.ESTALE, "the lease has passed to another session", path)

    def tell_trainer_gone(self) -> None:
        """Tell others that only staged saves are being finished; returns at once."""
        self._record = replace(self._record, trainer_gone=True)
        self._wake.set()

    def release(self, *, final: bool = True) -> None:
        """Let the next session in; idempotent, bounded, and without effect in a forked child.

        ``final`` tells other ranks that this session will not take the lease again.
        """
        if self._record.pid == os.getpid():
            self._record = replace(self._record, released=True, trainer_gone=final or self._record.trainer_gone)
            self._wake.set()
            self._thread.join(_RELEASE_TIMEOUT_S)

    # Taking ----------------------------------------------------------------------------------------------------

    def _take(self, takeover_timeout_s: float, keep_waiting: Callable[[], bool], *, resumes: bool) -> None:
        self._storage.make_directory(LEASE_DIRECTORY, 0o770)  # to lock a file takes the right to read it
        observer = Observer(self._storage, self._record.period_s)
        asked, fence_at, killed = 0, math.inf, False
        while True:
            view, now = observer.look(), time.monotonic()
            holder, free = view.holder, view.alive is False
            if resumes and holder is not None and holder.session != self.session:  # nor is its daemon asked to leave
                text = f"{holder} has had this directory since, or it is not the one that the run began in"
                raise WriteError(errno.ESTALE, f"{text}: put that back, or restart", self._storage.root)
            if holder is not None and not free and (holder.session == self.session or holder.trainer_is_gone()):
                if asked != view.epoch:
                    patience_s = 0.0 if holder.session == self.session else takeover_timeout_s
                    asked, fence_at, killed = view.epoch, now + patience_s, False
                    self._ask_to_leave(view.epoch, patience_s * _TAKEOVER_SHARE)
                if now >= fence_at and not killed and self._kills and holder.kill():
                    logger.warning("daemon %d has not left %s in time: killed it", holder.pid, self._storage.root)
                    killed, fence_at = True, now + _KILL_TIMEOUT_S
                free = now >= fence_at
            elif view.alive:
                own = holder is not None and holder.serves_trainer_of(self._record)
                raise self._in_use(view, "is using it", _OWN if own else "use another directory, or stop that run")
            if free and self._claim(view.epoch + 1, observer):
                return
            if not keep_waiting():
                raise self._in_use(view, "has not let go of it yet", "wait for it, or stop it")
            time.sleep(_POLL_S if observer.local else random.uniform(0.5, 1) * min(1.0, self._record.period_s))

    def _in_use(self, view: View, state: str, hint: str) -> DirectoryInUseError:
        evidence = f" ({view.evidence})" if view.evidence else ""
        message = f"{view.holder or 'another session'} {state}{evidence}; {hint}"
        return DirectoryInUseError(errno.EBUSY, message, self._storage.root)

    def _ask_to_leave(self, epoch: int, within_s: float) -> None:
        """Ask the holder to leave. This may fail: a lease that is not given up in time is taken."""
        request = {"session": self.session, "host": self._record.host, "pid": self._record.pid, "within_s": within_s}
        name = f"{_path(epoch)}.takeover"
        temporary = f"{name}.{self._record.token}"
        try:
            with self._storage.creating(temporary, RECORD_NBYTES, name) as output:
                self._write(output, json.dumps(request).encode())
                output.finish(RECORD_NBYTES)
            if not self._storage.publish(temporary, name):
                self._storage.remove(temporary)
        except WriteError as error:
            logger.warning("cannot ask the present holder to leave: %s", error)

    def _claim(self, epoch: int, observer: Observer) -> bool:
        """Try to take ``epoch``; false if somebody else has."""
        temporary = f"{_path(epoch)}.{self._record.token}"
        self._record = replace(self._record, epoch=epoch)
        with contextlib.ExitStack() as held:
            held.callback(self._discard, temporary)
            output = self._create(temporary, _path(epoch))
            held.callback(output.close)
            self._write(output, self._record.to_bytes())
            output.finish(RECORD_NBYTES)
            try:
                unlock = self._storage.lock(temporary)
            except WriteError as error:
                if error.errno == errno.ENOENT:  # a later holder has tidied up
                    return False
                raise
            if unlock is not None:
                held.callback(unlock)
            winner = self._link(temporary, epoch)
            if winner is not None:
                observer.known = epoch
            if winner != self._record.token:
                return False
            if _newest(self._storage) != epoch:  # a number from the past: free again, as its lease is history
                self._discard(_path(epoch))
                return False
            self._storage.sync_directory(LEASE_DIRECTORY)
            self.epoch, self._output, self._has_lock = epoch, output, unlock is not None
            self._held = held.pop_all()
        return True

    def _create(self, temporary: str, final: str) -> OutputFile:
        try:
            return self._storage.create(temporary, RECORD_NBYTES, final)
        except NoSpaceError:
            for name in _epochs(self._storage):
                if name.endswith(_SPARE):
                    self._discard(f"{LEASE_DIRECTORY}/{name}")
            return self._storage.create(temporary, RECORD_NBYTES, final)

    def _link(self, temporary: str, epoch: int) -> str | None:
        """Link the record to its number; returns the token of who has that number now, None when nobody has.

        What is there decides, not what was reported: a network file system that repeats a lost request reports the
        success of the first one as a failure, and may show it late.
        """
        failure: WriteError | None = None
        for delay_s in _REREAD_S:
            time.sleep(delay_s)
            try:
                if self._storage.publish(temporary, _path(epoch)):
                    return self._record.token
                failure = None
            except WriteError as error:
                failure = error
            if str(epoch) in self._storage.list_directory(LEASE_DIRECTORY):
                holder = LeaseRecord.from_bytes(_read(self._storage, epoch) or b"")
                return holder.token if holder is not None else ""
            if failure is not None and failure.errno == errno.ENOENT:
                return None  # tidied up, as above
        if failure is not None:
            raise failure
        return ""

    def _tidy(self) -> None:
        """Remove what earlier leases have left, and keep back the space that the next one takes on a full disk."""
        for name, epoch in _epochs(self._storage).items():
            if epoch < self.epoch:
                self._discard(f"{LEASE_DIRECTORY}/{name}")
        for name in self._storage.list_directory(LEASE_DIRECTORY):
            if name.startswith(f"{CLOSED}.") and f".{self.session}." not in name:
                self._discard(f"{LEASE_DIRECTORY}/{name}")
        with contextlib.suppress(WriteError):
            self._storage.create(f"{_path(self.epoch)}{_SPARE}", RECORD_NBYTES).close()

    def _discard(self, path: str) -> None:
        with contextlib.suppress(WriteError):  # the next holder tries again
            self._storage.remove(path)

    # Holding ---------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Renew the lease in a thread of its own: storage that hangs delays nobody else."""
        period_s = self._record.period_s  # with a lock as well: who watches may not be allowed to ask for it
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
                logger.warning("cannot keep the lease up to date: %s", error)
            if record.released:
                self._held.close()
                return

    def _is_superseded(self) -> bool:
        """Whether a store has a later lease: then this one's number, which has been removed, must not come back."""
        if self._storage.fences and not self.lost:
            self._lost = _newest(self._storage) > self.epoch
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
        return time.monotonic() + within_s if within_s >= 0 else math.inf  # which NaN is not

    def _write(self, output: OutputFile, data: bytes) -> None:
        self._page[:] = data.ljust(RECORD_NBYTES)
        with memoryview(self._page) as view:
            output.write_at(view, 0)
