"""An open file on a POSIX file system, read or written in pieces, with O_DIRECT if possible."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import stat
from collections.abc import Callable
from typing import Final

from sidesave.errors import WriteError, write_error
from sidesave.stager import system_calls
from sidesave.writer_daemon.storage.base import InputFile, OutputFile

logger = logging.getLogger(__name__)

ALIGNMENT: Final = 4096
NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
NO_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)
"""Errors of a file system that does not support O_DIRECT."""
_TRIES: Final = 4
"""Attempts of a call that makes no progress (less than a block) before it is an error."""


class PosixInput(InputFile):
    """An open file to read from, O_DIRECT or not."""

    def __init__(self, fd: int) -> None:
        """Read from ``fd``, which the caller closes."""
        self._fd = fd
        self._buffer = mmap.mmap(-1, ALIGNMENT)
        self.nbytes = file_nbytes(fd)

    def read_at(self, offset: int, nbytes: int) -> memoryview:
        start = offset // ALIGNMENT * ALIGNMENT
        need = min(offset + nbytes, self.nbytes) - start
        room = -(-need // ALIGNMENT) * ALIGNMENT
        if need <= offset - start:
            return memoryview(b"")
        if room > len(self._buffer):
            self._buffer = mmap.mmap(-1, room)
        window = memoryview(self._buffer)[:room]
        done = self._fill(window, start, need)
        return window[offset - start : max(offset - start, min(done, need))]

    def read_into(self, offset: int, window: memoryview) -> int:
        assert offset % ALIGNMENT == 0 and len(window) % ALIGNMENT == 0
        need = max(0, min(len(window), self.nbytes - offset))
        return min(self._fill(window, offset, need), need)

    def _fill(self, window: memoryview, start: int, need: int) -> int:
        """Read at least ``need`` bytes from ``start``, fewer at the file's end; return how many."""
        done, tries = 0, _TRIES
        while done < need:
            count = os.preadv(self._fd, [window[done:]], start + done)
            if count == 0:
                break  # the file has become shorter
            done += count
            if done < need:  # continue at an offset that a direct read accepts
                tries = _TRIES if count >= ALIGNMENT else tries - 1
                done -= done % ALIGNMENT
                if not tries:
                    raise OSError(errno.EIO, "")
        return done


class PosixOutput(OutputFile):
    """An open file for writing; ``direct`` if it is open with O_DIRECT."""

    def __init__(self, fd: int, path: str, *, direct: bool) -> None:
        """Write to ``fd``, which :meth:`close` closes; ``path`` is used in errors."""
        self._fd = fd
        self._path = path
        self._direct = direct

    def write_at(self, data: memoryview, offset: int) -> None:
        assert not self._direct or (offset % ALIGNMENT == 0 and len(data) % ALIGNMENT == 0)
        tries = _TRIES
        try:
            while data:
                count = os.pwrite(self._fd, data, offset)
                if self._direct and count < len(data):
                    count -= count % ALIGNMENT  # continue at an offset that a direct write accepts
                tries = _TRIES if count else tries - 1
                if not tries:
                    raise OSError(errno.EIO, "")
                data = data[count:]
                offset += count
        except OSError as error:
            doing = f"cannot write {len(data):,} bytes at byte {offset:,}"
            raise storage_error(error, doing, self._path, self._fd, "pwrite64") from error

    def finish(self, nbytes: int) -> None:
        call = "ftruncate"
        try:
            os.ftruncate(self._fd, nbytes)
            call = "fsync"
            os.fsync(self._fd)
        except OSError as error:
            # Never fsync this file again: the kernel reports the error only once, then counts the
            # lost pages as clean.
            raise storage_error(
                error, f"cannot make {nbytes:,} bytes durable", self._path, self._fd, call
            ) from error

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_descriptor(fd)


def takes_direct_writes(
    probe: str, directory: int, path: str, remove: Callable[[str], object]
) -> bool:
    """Test O_DIRECT with an aligned write: some file systems accept only the flag.

    ``probe`` is the file to write, and ``path`` the path of its directory. Raises ``OSError`` if
    the write fails for another reason, and what ``remove`` raises when it removes the file.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT
        fd = os.open(probe, flags, 0o600, dir_fd=directory)
        try:
            with mmap.mmap(-1, ALIGNMENT) as page:
                os.pwrite(fd, page, 0)
        finally:
            close_descriptor(fd)
    except OSError as error:
        if error.errno not in NO_DIRECT:
            raise
        text = "%s does not support O_DIRECT (%s): writing through the page cache"
        logger.warning(text, path, error.strerror)
        return False
    finally:
        remove(probe)
    return True


def close_descriptor(fd: int) -> None:
    """Close a descriptor and ignore errors: fsync has reported those that matter."""
    with contextlib.suppress(OSError):
        os.close(fd)


def file_nbytes(fd: int) -> int:
    """Return the length of an open file; raises ``OSError`` if it is not a regular file."""
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EISDIR if stat.S_ISDIR(facts.st_mode) else errno.ENXIO, "not a file")
    return facts.st_size


def storage_error(error: OSError, doing: str, path: str, fd: int, call: str) -> WriteError:
    """Return :func:`write_error`, if relevant with the free space or the refused call's purpose."""
    hint = system_calls.hint(call, error)
    doing += f" ({hint})" if hint else ""
    if error.errno in NO_SPACE:
        with contextlib.suppress(OSError):
            facts = os.fstatvfs(fd)
            free = [f"{facts.f_bavail * facts.f_frsize:,} bytes"] if facts.f_blocks else []
            free += [f"{facts.f_favail:,} files"] if facts.f_files else []
            doing += f" ({' and '.join(free)} are free)" if free else ""
    return write_error(error, doing, path)


def entry_identity(name: str, directory: int) -> tuple[int, int] | None:
    """Return what distinguishes a directory from others of its name; None if not accessible."""
    try:
        status = os.stat(name, dir_fd=directory)
    except OSError:  # removed since it was listed; or a read of it will say what is wrong
        return None
    return status.st_ino, status.st_mtime_ns
