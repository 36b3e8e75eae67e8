"""The system calls that sidesave needs: what for, what is done without them, and how to have them allowed.

Containers forbid calls, old kernels lack them, and file systems refuse them. The one list is here: errors are worded by
it, ``sidesave doctor`` tries it out, and the tests take each entry away.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

REFUSED: Final = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)
"""How a kernel, a seccomp profile or a file system says that it does not know a call, or does not allow it."""
_PROFILE: Final = "use a newer kernel or, in a container, a seccomp profile that allows it"
_STORAGE: Final = "put the run directory on another file system; in a container, use a seccomp profile that allows it"
_OVERLAY: Final = "on an overlay file system, which cannot rename a directory of the image, put it on a volume"


@dataclass(frozen=True, slots=True)
class SystemCall:
    """One call. If ``without`` is empty, sidesave does not work where the call is refused."""

    name: str
    purpose: str
    without: str
    remedy: str


CALLS: Final = {
    call.name: call
    for call in (
        SystemCall("memfd_create", "holds staging memory, shared with the daemon", "", _PROFILE),
        SystemCall("pidfd_open", "tells trainer and daemon of each other's end", "", _PROFILE),
        SystemCall("eventfd2", "wakes threads, those of ZeroMQ as well", "", _PROFILE),
        SystemCall("socketpair", "hands staging memory to the daemon", "", _PROFILE),
        SystemCall(
            "pidfd_send_signal",
            "ends the daemon of a dead trainer that does not leave in time",
            "it is left behind without its lease",
            _PROFILE,
        ),
        SystemCall(
            "setsid", "keeps signals to the trainer's group from the daemon", "the daemon has its own group", _PROFILE
        ),
        SystemCall("madvise", "makes staging memory of huge pages, ahead", "it is touched page by page", _PROFILE),
        SystemCall("sched_getaffinity", "counts the cores to copy with", "all cores count", _PROFILE),
        SystemCall(
            "sched_setaffinity", "keeps the daemon on `cpus`, or near the GPU", "it may use all cores", _PROFILE
        ),
        SystemCall("setpriority", "makes the daemon `nice`", "its niceness stays", _PROFILE),
        SystemCall("ioprio_set", "gives the daemon its `io_class`", "its class stays", _PROFILE),
        SystemCall("prlimit64", "raises the daemon's limit of open files", "the limit stays", _PROFILE),
        SystemCall(
            "flock", "tells whether the holder of a directory, or a reader, lives", "pids and a counter tell", _STORAGE
        ),
        SystemCall("fstatfs", "tells a full disk before a save", "it shows while writing", _STORAGE),
        SystemCall("fallocate", "reserves space before the first byte", "a full disk shows while writing", _STORAGE),
        SystemCall("linkat", "gives a finished file its name", "renameat2 does", _STORAGE),
        SystemCall("renameat2", "gives a finished file its name where linkat does not", "linkat does", _STORAGE),
        SystemCall("fchmodat", "opens a committed checkpoint to other users", "it stays this user's alone", _STORAGE),
        SystemCall("fsync", "makes a checkpoint durable", "", _STORAGE),
        SystemCall("ftruncate", "gives memory and files their length", "", _STORAGE),
        SystemCall("pwrite64", "writes a checkpoint", "", _STORAGE),
        SystemCall("preadv", "reads a checkpoint", "", _STORAGE),
        SystemCall("mkdirat", "makes the directory of a checkpoint", "", _STORAGE),
        SystemCall("unlinkat", "removes what is temporary or was given up", "", _STORAGE),
        SystemCall("renameat", "commits a checkpoint", "", f"{_STORAGE}; {_OVERLAY}"),
    )
}


def hint(name: str, error: OSError) -> str:
    """What a refused call is needed for and what to do; empty for other errors and for calls not in the list."""
    call = CALLS.get(name)
    if call is None or (error.errno not in REFUSED and (name, error.errno) != ("renameat", errno.EXDEV)):
        return ""
    return f"{call.name} {call.purpose}; {call.remedy}"


@contextlib.contextmanager
def needs(name: str) -> Generator[None]:
    """Word the ``OSError`` of a refused call by the list."""
    try:
        yield
    except OSError as error:
        why = hint(name, error)
        if not why:
            raise
        raise OSError(error.errno, f"{error.strerror}: {why}") from error


def usable_cpus() -> frozenset[int]:
    """The cores that this process may use."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except OSError:
        return frozenset(range(os.cpu_count() or 1))
