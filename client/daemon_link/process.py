"""The life of one daemon process, shaped like ``Popen``: start, pid, poll, kill, close, and its last words.

It is a plain subprocess in a session of its own: no fork of a CUDA process, no re-import of the user's script, and
nothing inherited but one end of a socket pair.
"""

from __future__ import annotations

import contextlib
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

_STDERR_TAIL_NBYTES: Final = 4000


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
                    # Anonymous memory: a pipe would block whoever waits for the trainer's, a file would stay behind.
                    with needs("memfd_create"):
                        self._stderr = os.memfd_create("sidesave-daemon-stderr", os.MFD_CLOEXEC)
                    stack.callback(os.close, self._stderr)
                    with needs("pidfd_open"):  # before there is a process that nobody could watch
                        os.close(os.pidfd_open(os.getpid()))
                    self._process = _start(theirs.fileno(), self._stderr)
                self.pidfd = os.pidfd_open(self._process.pid)
            except OSError as error:
                raise DaemonStartError(f"the writer daemon cannot be started: {error}") from error
            stack.pop_all()
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

    def last_words(self) -> str:
        """Its exit status and the end of its stderr."""
        status = self.poll()
        end = (
            "still runs" if status is None else f"ended by signal {-status}" if status < 0 else f"exit status {status}"
        )
        size = os.fstat(self._stderr).st_size
        text = os.pread(self._stderr, _STDERR_TAIL_NBYTES, max(0, size - _STDERR_TAIL_NBYTES)).decode(errors="replace")
        return f"{end}; it said: {text.strip()}" if text.strip() else end

    def close(self) -> threading.Thread | None:
        """Close our ends. A running process may finish, and is then reaped by the returned thread."""
        reaper = None
        if self.poll() is None:
            reaper = threading.Thread(target=self._process.wait, name="sidesave-reaper", daemon=True)
            reaper.start()
        self._forget()
        return reaper

    def _forget(self) -> None:
        self.control.close()
        for fd in (self._stderr, self.pidfd):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._stderr = self.pidfd = -1


def _start(control: int, stderr: int) -> subprocess.Popen[bytes]:
    """Start the process in a session of its own; if ``setsid`` is refused, in a process group of its own.

    Without either, a signal to the trainer's group reaches the daemon too, which then finishes its work and is
    replaced.
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
    """The trainer's environment, without GPUs, and with the path of this package if only ``sys.path`` has it."""
    environment = dict(os.environ)
    environment["CUDA_VISIBLE_DEVICES"] = ""
    assert sidesave.__file__ is not None
    root = str(Path(sidesave.__file__).parent.parent)
    installed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()}
    # An empty entry would be the working directory, where anybody's msgpack.py may lie; it is hardly ever meant.
    entries = [str(Path(entry).absolute()) for entry in environment.pop("PYTHONPATH", "").split(os.pathsep) if entry]
    if root not in installed:
        entries.append(root)
    if entries:
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(entries))
    return environment
