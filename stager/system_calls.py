"""System calls that sidesave uses: their purpose, the fallback without them, how to allow them.

Containers forbid calls, old kernels lack them, and file systems refuse them. Error messages quote
this list, ``sidesave doctor`` tries each call, and the tests deny each.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REFUSED: Final = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)
"""Error numbers of a kernel, seccomp profile or file system that lacks or forbids a call."""
_PROFILE: Final = "use a newer kernel or, in a container, a seccomp profile that allows it"
_STORAGE: Final = (
    "put the run directory on another file system; in a container, use a seccomp profile that "
    "allows it"
)
_OVERLAY: Final = (
    "on an overlay file system, which cannot rename a directory of the image, put it on a volume"
)


@dataclass(frozen=True, slots=True)
class SystemCall:
    """One call. If ``without``, the fallback, is empty, sidesave does not work without the call."""

    name: str
    purpose: str
    without: str
    remedy: str


CALLS: Final = {
    call.name: call
    for call in (
        SystemCall("memfd_create", "holds staging memory, shared with the daemon", "", _PROFILE),
        SystemCall("pidfd_open", "lets trainer and daemon notice each other's end", "", _PROFILE),
        SystemCall("eventfd2", "wakes threads, those of ZeroMQ as well", "", _PROFILE),
        SystemCall("socketpair", "passes staging memory to the daemon", "", _PROFILE),
        SystemCall(
            "pidfd_send_signal",
            "ends the daemon of a dead trainer that does not exit in time",
            "it is left running without its lease",
            _PROFILE,
        ),
        SystemCall(
            "setsid",
            "keeps signals to the trainer's group from the daemon",
            "the daemon has its own group",
            _PROFILE,
        ),
        SystemCall(
            "madvise",
            "allocates staging memory in huge pages",
            "it is touched page by page",
            _PROFILE,
        ),
        SystemCall(
            "sched_getaffinity", "counts the cores to copy with", "all cores count", _PROFILE
        ),
        SystemCall(
            "sched_setaffinity",
            "keeps the daemon on `cpus`, or near the GPU",
            "it may use all cores",
            _PROFILE,
        ),
        SystemCall("setpriority", "makes the daemon `nice`", "its niceness stays", _PROFILE),
        SystemCall(
            "prlimit64", "raises the daemon's limit of open files", "the limit stays", _PROFILE
        ),
        SystemCall(
            "flock",
            "detects whether the holder of a directory, or a reader, is alive",
            "pids and a counter are used",
            _STORAGE,
        ),
        SystemCall(
            "fstatfs", "detects a full disk before a save", "it is noticed while writing", _STORAGE
        ),
        SystemCall(
            "fallocate",
            "reserves space before the first byte",
            "a full disk is noticed later",
            _STORAGE,
        ),
        SystemCall("linkat", "names a finished file", "renameat2 does", _STORAGE),
        SystemCall("renameat2", "names a finished file if linkat cannot", "linkat does", _STORAGE),
        SystemCall(
            "fchmodat",
            "opens a committed checkpoint to other users",
            "only this user can read it",
            _STORAGE,
        ),
        SystemCall("fsync", "makes a checkpoint durable", "", _STORAGE),
        SystemCall("ftruncate", "sets the length of memory and files", "", _STORAGE),
        SystemCall("pwrite64", "writes a checkpoint", "", _STORAGE),
        SystemCall("preadv", "reads a checkpoint", "", _STORAGE),
        SystemCall("mkdirat", "creates the directory of a checkpoint", "", _STORAGE),
        SystemCall("unlinkat", "removes temporary and abandoned files", "", _STORAGE),
        SystemCall("renameat", "commits a checkpoint", "", f"{_STORAGE}; {_OVERLAY}"),
    )
}


def hint(name: str, error: OSError) -> str:
    """Return a refused call's purpose and the remedy; empty for other errors and unlisted calls."""
    call = CALLS.get(name)
    if call is None or (
        error.errno not in REFUSED and (name, error.errno) != ("renameat", errno.EXDEV)
    ):
        return ""
    return f"{call.name} {call.purpose}; {call.remedy}"


@contextlib.contextmanager
def needs(name: str) -> Generator[None]:
    """Add the purpose and remedy of a refused call to its ``OSError``."""
    try:
        yield
    except OSError as error:
        why = hint(name, error)
        if not why:
            raise
        raise OSError(error.errno, f"{error.strerror}: {why}") from error


def boot_id() -> str:
    """Return the ID of this machine since its last boot; containers of a machine share it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def usable_cpus() -> frozenset[int]:
    """Return the cores that this process may use."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except OSError:
        return frozenset(range(os.cpu_count() or 1))
