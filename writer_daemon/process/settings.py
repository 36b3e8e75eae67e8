"""The settings of the daemon's process: signals, limits, priority and cores."""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import socket
from typing import Final

import psutil

from sidesave.writer_daemon.options import DaemonOptions

logger = logging.getLogger(__name__)

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def catch_signals() -> socket.socket:
    """Catch the signals that end a process; return a socket that has a byte for each one."""
    signals, writer = socket.socketpair()
    signals.setblocking(False)
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, _ignore)  # the wakeup descriptor wakes the loop
    return signals


def _ignore(number: int, frame: object) -> None:
    """Do nothing; without a handler the signal would end the process."""


def allow_many_files() -> None:
    """Raise the limit of open files to the maximum: a save keeps one file open per container."""
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def leave_no_core() -> None:
    """Keep keys out of core dumps: a limit of 1 byte writes no file and runs no dump program."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    limit = 1 if hard == resource.RLIM_INFINITY else min(1, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))


def lower_priority(options: DaemonOptions) -> None:
    """Apply niceness and cores; an error of the system is logged."""
    me = psutil.Process()
    try:
        if options.nice:
            me.nice(options.nice)
        if options.cpus:
            me.cpu_affinity(list(options.cpus))
    except (psutil.Error, OSError, ValueError) as error:
        logger.warning("cannot set the daemon's priority or cores: %s", error)
