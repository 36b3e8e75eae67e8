"""The directory where trainer and daemon meet: private, with a short path, removed afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Final

from sidesave.errors import DaemonStartError

logger = logging.getLogger(__name__)

_PATH_LIMIT: Final = 107
_PREFIX: Final = "sidesave-socket-"


@contextlib.contextmanager
def locked_socket_directory() -> Generator[str]:
    """A :func:`socket_directory` that is locked, and removed at the end.

    A trainer that is killed before its daemon has connected leaves its directory behind. The lock
    ends with its holder, so the next start of any checkpointer recognises abandoned directories,
    and removes them.
    """
    lock = -1
    while True:
        directory = socket_directory()
        try:
            lock = _lock_directory(directory)
        except (FileNotFoundError, BlockingIOError):  # removed as abandoned before it was locked
            continue
        except OSError as error:  # no locks here: no other process can treat it as abandoned either
            logger.debug("%s cannot be locked: %s", directory, error)
        break
    try:
        _remove_abandoned(os.path.dirname(directory))
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def _lock_directory(path: str) -> int:
    """Lock a directory until the returned descriptor is closed; may raise ``OSError``."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _remove_abandoned(base: str) -> None:
    """Remove this user's socket directories that no process has locked.

    Only sockets are removed from them.
    """
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(base) if name.startswith(_PREFIX)]
    for name in names:
        path = os.path.join(base, name)
        with contextlib.suppress(OSError):
            if os.lstat(path).st_uid != os.geteuid():
                continue
            lock = _lock_directory(path)
            try:
                for entry in os.listdir(lock):
                    if stat.S_ISSOCK(os.lstat(entry, dir_fd=lock).st_mode):
                        os.unlink(entry, dir_fd=lock)
                os.rmdir(path)
            finally:
                os.close(lock)


def socket_directory() -> str:
    """A private directory with a path short enough for a socket's name."""
    for base in (os.environ.get("TMPDIR"), "/tmp", os.environ.get("XDG_RUNTIME_DIR"), "/dev/shm"):
        if (
            base
            and len(base) + 32 < _PATH_LIMIT
            and os.access(base, os.W_OK | os.X_OK)
            and _keeps_names(base)
        ):
            with contextlib.suppress(OSError):  # it is full, for instance
                return tempfile.mkdtemp(prefix=_PREFIX, dir=base)
    raise DaemonStartError(
        "no writable temporary directory with a short path for a socket, where others cannot "
        "rename it: set TMPDIR"
    )


def _keeps_names(directory: str) -> bool:
    """Whether names in ``directory`` stay ours: it is not world-writable, or has a sticky bit."""
    try:
        mode = Path(directory).stat().st_mode
    except OSError:
        return False
    return stat.S_ISDIR(mode) and (not mode & stat.S_IWOTH or bool(mode & stat.S_ISVTX))
