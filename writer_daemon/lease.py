"""Who may write to a run directory: one session at a time.

The lease is an advisory lock on ``.sidesave.lease``, which the kernel drops with its holder however that ends, plus a
description of the holder inside, for messages. The file stays; a lock on it is what counts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import psutil

from sidesave.errors import DirectoryInUseError, WriteError, write_error

LEASE_FILE: Final = ".sidesave.lease"
_POLL_S: Final = 0.05
_KILL_TIMEOUT_S: Final = 10.0
_DESCRIPTION_NBYTES: Final = 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A session as its lease describes it; a start time tells a process from a later one with the same pid."""

    session: str
    host: str
    boot_id: str
    pid_namespace: int
    pid: int
    started_s: float
    trainer_pid: int
    trainer_started_s: float
    trainer_gone: bool = False

    @classmethod
    def current(cls, session: str, trainer_pid: int) -> Holder:
        """This daemon, serving ``trainer_pid``."""
        return cls(
            session=session,
            host=socket.gethostname(),
            boot_id=_boot_id(),
            pid_namespace=_pid_namespace(),
            pid=os.getpid(),
            started_s=_started_s(os.getpid()) or 0.0,
            trainer_pid=trainer_pid,
            trainer_started_s=_started_s(trainer_pid) or 0.0,
        )

    def trainer_is_gone(self) -> bool:
        """Whether the trainer has certainly ended, or so its daemon says; False when that cannot be told from here."""
        if self.trainer_gone:
            return True
        return self._is_of_this_system() and _started_s(self.trainer_pid) != self.trainer_started_s

    def _is_of_this_system(self) -> bool:
        return (self.boot_id, self.pid_namespace) == (_boot_id(), _pid_namespace())

    def kill(self) -> None:
        """SIGKILL the holding daemon, if it still is that process."""
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(self.pid)
            try:
                if self._is_of_this_system() and _started_s(self.pid) == self.started_s:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _started_s(pid: int) -> float | None:
    """When a live process started; None when there is none, or only its zombie."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


class Lease:
    """The right to write to a run directory, held until :meth:`release` or the end of the process."""

    def __init__(self, root: str, holder: Holder, takeover_timeout_s: float, keep_waiting: Callable[[], bool]) -> None:
        """Take the lease of ``root``.

        Where the present holder's trainer is dead, its daemon is finishing what was staged: that is waited for, up to
        ``takeover_timeout_s`` and while ``keep_waiting()``; then the daemon is killed, which fences it. Raises
        ``DirectoryInUseError`` naming the holder when that lives, or cannot be killed.
        """
        self._path = f"{root}/{LEASE_FILE}"
        self.session: Final = holder.session
        deadline = time.monotonic() + takeover_timeout_s
        killed = False
        while True:
            fd = self._open()
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                other = _describe(fd)
                os.close(fd)
                finishing = other is not None and other.trainer_is_gone()
                if other is not None and finishing and not killed and time.monotonic() > deadline:
                    logger.warning("daemon %d of a dead trainer has not finished in time: killing it", other.pid)
                    other.kill()
                    killed, deadline = True, time.monotonic() + _KILL_TIMEOUT_S
                elif not finishing or time.monotonic() > deadline or not keep_waiting():
                    raise _in_use(root, other, finishing) from None
                time.sleep(_POLL_S)
                continue
            except OSError as error:
                os.close(fd)
                raise write_error(error, "cannot lock", self._path) from error
            break
        self._fd = fd
        self._holder = holder
        try:
            self._write(holder)
        except OSError as error:
            self.release()
            raise write_error(error, "cannot write the lease", self._path) from error

    def tell_trainer_gone(self) -> None:
        """Let who waits for the directory know that only what was staged is being finished.

        A trainer that calls ``exec`` keeps its pid and start time, so its end cannot be seen from elsewhere.
        """
        with contextlib.suppress(OSError):
            self._write(replace(self._holder, trainer_gone=True))

    def _write(self, holder: Holder) -> None:
        # Always of one length and in place: nobody reads half of it, and a full disk has room for it.
        os.pwrite(self._fd, json.dumps(asdict(holder)).encode().ljust(_DESCRIPTION_NBYTES), 0)

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise write_error(error, "cannot open the lease", self._path) from error

    def check(self) -> None:
        """Raise ``WriteError`` unless the lease is still this session's: called right before every commit."""
        try:
            held, named = os.fstat(self._fd), os.stat(self._path, follow_symlinks=False)
        except OSError as error:
            raise write_error(error, "the lease is lost", self._path) from error
        holder = _describe(self._fd)
        if (held.st_dev, held.st_ino) != (named.st_dev, named.st_ino) or not holder or holder.session != self.session:
            raise WriteError(errno.ESTALE, "the lease has passed to another session", self._path)

    def release(self) -> None:
        """Let the next session in; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _describe(fd: int) -> Holder | None:
    try:
        body = json.loads(os.pread(fd, 65536, 0))
        return Holder(**cast("dict[str, Any]", body))
    except (OSError, ValueError, TypeError):
        return None


def _in_use(root: str, holder: Holder | None, finishing: bool) -> DirectoryInUseError:
    if holder is None:
        who = "another session"
    else:
        who = f"session {holder.session} (trainer {holder.trainer_pid}, daemon {holder.pid} on {holder.host})"
    state = "is still writing what its dead trainer had staged" if finishing else "is using it"
    hint = "wait for it, or stop it" if finishing else "use another directory, or stop that run"
    return DirectoryInUseError(errno.EBUSY, f"{who} {state}; {hint}", root)
