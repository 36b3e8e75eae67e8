"""The lease's record: identifies a daemon and its trainer, never a later process or a copy."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import select
import signal
import socket
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, cast

from sidesave.stager.system_calls import boot_id

RECORD_NBYTES: Final = 4096
PERIOD_S: Final = 60.0
"""Seconds between two updates of a holder's counter.

A network file system may show an update as late.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """The content of a lease's file.

    ``token`` is unique for each time the lease is taken, also within a session. ``trainer_gone``
    means that the trainer has ended or, if the lease is released, that it has closed the run.
    """

    epoch: int = 0
    session: str
    token: str = ""
    host: str
    boot_id: str
    pid_namespace: int
    pid: int
    started: int
    trainer_pid: int
    trainer_started: int
    trainer_program: str
    period_s: float = PERIOD_S
    trainer_gone: bool = False
    released: bool = False
    counter: int = 0

    @classmethod
    def current(cls, session: str, trainer_pid: int) -> LeaseRecord:
        """Return the record of this daemon, whose trainer is ``trainer_pid``."""
        return cls(
            session=session,
            host=socket.gethostname(),
            boot_id=boot_id(),
            pid_namespace=_pid_namespace(),
            pid=os.getpid(),
            started=_started(os.getpid()),
            trainer_pid=trainer_pid,
            trainer_started=_started(trainer_pid),
            trainer_program=_program(trainer_pid),
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> LeaseRecord | None:
        """Parse a record; return None if it is incomplete or not a record."""
        try:
            body = cast("dict[str, Any]", json.loads(data))
            kinds = {name: type(value).__name__ for name, value in body.items()}
        except (ValueError, AttributeError, RecursionError):
            return None
        if kinds != {field.name: field.type for field in fields(cls)}:
            return None
        return (
            cls(**body)
            if all(value.isprintable() for value in body.values() if isinstance(value, str))
            else None
        )

    def to_bytes(self) -> bytes:
        """Return the file's content, always of the same length.

        So overwriting it works on a full disk.
        """
        return json.dumps(asdict(self)).encode().ljust(RECORD_NBYTES - 1) + b"\n"

    def __str__(self) -> str:
        return (
            f"session {self.session} (trainer {self.trainer_pid}, daemon {self.pid} on {self.host})"
        )

    def serves_trainer_of(self, other: LeaseRecord) -> bool:
        """Whether both serve the same process."""
        own, theirs = (
            (it.boot_id, it.pid_namespace, it.trainer_pid, it.trainer_started)
            for it in (self, other)
        )
        return own == theirs

    def lives(self) -> bool | None:
        """Whether the holding daemon is alive; None if that is unknown on this machine."""
        return _lives(self.pid, self.started) if self._is_of_this_system() else None

    def trainer_is_gone(self) -> bool:
        """Whether the trainer has certainly ended, or its daemon has recorded so.

        False if unknown.
        """
        if self.trainer_gone or not self._is_of_this_system():
            return self.trainer_gone
        now = _program(self.trainer_pid)
        replaced = bool(now and self.trainer_program) and now != self.trainer_program
        return replaced or _lives(self.trainer_pid, self.trainer_started) is False

    def kill(self) -> bool:
        """Send SIGKILL to the holding daemon.

        Returns False if its pid now belongs to another process.
        """
        if self.pid == os.getpid():
            return False
        try:
            pidfd = os.pidfd_open(self.pid)
        except (OSError, OverflowError):
            return False
        try:
            # Checked after pidfd_open, so that the descriptor is that process's. A forged record
            # could name any pid.
            if not self.lives() or not _is_daemon(self.pid):
                return False
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except OSError:
            return False
        finally:
            os.close(pidfd)
        return True

    def _is_of_this_system(self) -> bool:
        """Whether the record's pids refer to this system; host names are not unique."""
        return (self.boot_id, self.pid_namespace) == (boot_id(), _pid_namespace())


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _started(pid: int) -> int:
    """Return a process's start time in clock ticks since boot; 0 if unknown."""
    try:
        _, _, rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")
    except OSError:
        return 0
    return int(rest.split()[19])


def _program(pid: int) -> str:
    """Return a value that changes when a process calls ``exec``; "" if unknown.

    ``exec`` keeps pid and start time.
    """
    try:  # auxv has addresses that are chosen at random at each exec
        return hashlib.sha256(Path(f"/proc/{pid}/auxv").read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def _is_daemon(pid: int) -> bool:
    try:
        return b"sidesave.writer_daemon" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _lives(pid: int, started: int) -> bool | None:
    try:
        pidfd = os.pidfd_open(pid)
    except OverflowError:
        return False
    except OSError as error:
        return False if error.errno in (errno.ESRCH, errno.ENOENT, errno.EINVAL) else None
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        now = _started(pid)
        if poller.poll(0):  # after reading the start time, which a process that has ended lacks
            return False
        return now == started if now else None
    finally:
        os.close(pidfd)
