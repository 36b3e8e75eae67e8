"""``flock(2)`` on an open file, without waiting; the process that took the lock releases it.

The lock belongs to the open file, not to a process: a forked child has it too and keeps it until it
exits, unless the lock is released explicitly.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Final

from sidesave.writer_daemon.storage.descriptor import Descriptor

logger = logging.getLogger(__name__)

_LOCAL: Final = frozenset(
    {
        *(
            "ext2",
            "ext3",
            "ext4",
            "xfs",
            "btrfs",
            "f2fs",
            "zfs",
            "bcachefs",
            "jfs",
            "nilfs2",
            "reiserfs",
        ),
        *("tmpfs", "ramfs", "rootfs", "overlay", "vfat", "exfat", "ntfs3"),
    }
)
"""File systems that only one kernel writes to, so that its locks exclude all other writers."""
_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_PATIENCE_S: Final = 0.1
"""Wait for a conflicting lock; one that tests for other locks or covers a deletion ends sooner."""
_LOCK_POLL_S: Final = 0.002


def take(file: Descriptor, kind: int) -> Callable[[], None]:
    """Lock the file; return a function that unlocks and closes it. An error closes the file.

    Raises ``BlockingIOError`` if another process holds a conflicting lock, otherwise ``OSError``.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BaseException:  # also on Ctrl-C no descriptor is left
        file.close()
        raise
    return functools.partial(_give_back, file, os.getpid())


def _give_back(file: Descriptor, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError, ValueError):
            fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


def share(open_file: Callable[[], Descriptor]) -> Callable[[], None] | None:
    """Take a shared lock, waiting briefly for a conflicting one; None if there are no locks here.

    Raises as :func:`take`, and as ``open_file``, which is called for each attempt.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return take(open_file(), fcntl.LOCK_SH)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            if error.errno != errno.EAGAIN or time.monotonic() >= deadline:
                raise
        time.sleep(_LOCK_POLL_S)


def exclude_all_others(directory_fd: int, path: str) -> bool:
    """Whether locks in this directory exclude all other processes: it is local, and has locks."""
    if _file_system(directory_fd) not in _LOCAL:
        return False
    try:
        fcntl.flock(directory_fd, fcntl.LOCK_UN)  # no effect, since it is not locked
    except OSError as error:
        text = "%s: no file locks, so pids and counters detect other processes: %s"
        logger.warning(text, path, error.strerror)
        return False
    return True


def _file_system(fd: int) -> str:
    """Return the kernel's name for the file system of an open file; empty if unknown."""
    with contextlib.suppress(OSError, ValueError):
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
            (mount,) = (line.split()[1] for line in file if line.startswith("mnt_id:"))
        with open("/proc/self/mountinfo", encoding="ascii", errors="replace") as file:
            (kind,) = (
                line.rpartition(" - ")[2].split()[0]
                for line in file
                if line.split(" ", 1)[0] == mount
            )
        return kind
    return ""
