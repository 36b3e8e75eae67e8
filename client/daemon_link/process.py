"""The life of one daemon process, shaped like ``Popen``: start, pid, poll, kill, close, last words.

It is a plain subprocess in a session of its own: no fork of a CUDA process, no re-import of the
user's script, and nothing inherited but one end of a socket pair.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Final

import sidesave
from sidesave.errors import DaemonStartError
from sidesave.stager.memory.arena import forget_in_child
from sidesave.stager.system_calls import REFUSED, needs

logger = logging.getLogger(__name__)

_STDERR_TAIL_NBYTES: Final = 4000
_DESCRIPTORS: Final = 24
"""Descriptors needed for a moment: sockets, pidfds, ZeroMQ's, and a directory being removed."""


class DaemonProcess:
    """A running writer daemon."""

    def __init__(self) -> None:
        """Start it, without waiting; raises ``DaemonStartError`` if the system refuses."""
        with contextlib.ExitStack() as stack:
            try:
                with needs("socketpair"):
                    self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                stack.callback(self.control.close)
                with theirs:
                    # Anonymous memory: a pipe would block readers of the trainer's stderr, a file
                    # would be left behind.
                    with needs("memfd_create"):
                        self._stderr = os.memfd_create("sidesave-daemon-stderr", os.MFD_CLOEXEC)
                    stack.callback(os.close, self._stderr)
                    with needs("pidfd_open"):  # before there is a process that could not be watched
                        os.close(os.pidfd_open(os.getpid()))
                    self._process = _start(theirs.fileno(), self._stderr)
                self.pidfd = os.pidfd_open(self._process.pid)
            except OSError as error:
                raise DaemonStartError(f"the writer daemon cannot be started: {error}") from error
            stack.pop_all()
        self._relayed_nbytes = 0
        forget_in_child(self)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status once it has ended, or None after ``timeout_s``."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Send SIGKILL; does nothing if the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    def relay(self) -> None:
        """Log its stderr since the last call, such as warnings, where the user sees it."""
        begin, self._relayed_nbytes = self._relayed_nbytes, os.fstat(self._stderr).st_size
        if words := self._words_from(begin):
            logger.warning("%s", words)

    def last_words(self) -> str:
        """Its exit status and the end of its stderr."""
        status = self.poll()
        end = (
            "still runs"
            if status is None
            else f"ended by signal {-status}"
            if status < 0
            else f"exit status {status}"
        )
        words = self._words_from(0)
        return f"{end}; it said: {words}" if words else end

    def _words_from(self, begin: int) -> str:
        """Return its stderr from ``begin`` on; only the end of a long text."""
        begin = max(begin, os.fstat(self._stderr).st_size - _STDERR_TAIL_NBYTES)
        return os.pread(self._stderr, _STDERR_TAIL_NBYTES, begin).decode(errors="replace").strip()

    def close(self) -> threading.Thread | None:
        """Close this process's ends; the returned thread reaps a daemon that is still running."""
        reaper = None
        if self.poll() is None:
            reaper = threading.Thread(
                target=self._process.wait, name="sidesave-reaper", daemon=True
            )
            reaper.start()
        self._forget()
        return reaper

    def _forget(self) -> None:
        self.control.close()
        for fd in (self._stderr, self.pidfd):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._stderr = self.pidfd = -1


def require_descriptors() -> None:
    """Raise ``DaemonStartError`` if descriptors are short: ZeroMQ would abort the process."""
    spare: list[int] = []
    try:
        with needs("eventfd2"):
            while len(spare) < _DESCRIPTORS:
                spare.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        if error.errno in REFUSED:
            raise DaemonStartError(f"the writer daemon cannot be reached: {error}") from error
        raise DaemonStartError(
            f"no {_DESCRIPTORS} file descriptors are left: {error}; raise `ulimit -n`"
        ) from error
    finally:
        for fd in spare:
            os.close(fd)


def _start(control: int, stderr: int) -> subprocess.Popen[bytes]:
    """Start the process in a session of its own; if that is refused, in a process group.

    Without either, a signal to the trainer's group reaches the daemon too, which then finishes its
    work and is replaced.
    """

    def start(*, session: bool = False, group: int | None = None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "sidesave.writer_daemon", str(control)],
            pass_fds=[control],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=session,
            process_group=group,
            env=_environment(),
        )

    try:
        return start(session=True)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
    try:
        return start(group=0)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
    return start()


def _environment() -> dict[str, str]:
    """Return the trainer's environment, without GPUs.

    Adds the path of this package if only ``sys.path`` has it.
    """
    environment = dict(os.environ)
    environment["CUDA_VISIBLE_DEVICES"] = ""
    assert sidesave.__file__ is not None
    root = str(Path(sidesave.__file__).parent.parent)
    installed = {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        site.getusersitepackages(),
    }
    # An empty entry would be the working directory, where any user's msgpack.py may lie; it is
    # rarely intended.
    entries = [
        str(Path(entry).absolute())
        for entry in environment.pop("PYTHONPATH", "").split(os.pathsep)
        if entry
    ]
    if root not in installed:
        entries.append(root)
    if entries:
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(entries))
    return environment
