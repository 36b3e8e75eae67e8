"""An open file on a POSIX file system, read or written in pieces, with O_DIRECT if possible."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from typing import Final

from sidesave.errors import WriteError, write_error
from sidesave.stager import system_calls
from sidesave.writer_daemon.storage.base import InputFile, OutputFile

ALIGNMENT: Final = 4096
NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
_TRIES: Final = 4
"""How often a call that moved less than a block, and so got nowhere, is made again before that counts as an error."""


class PosixInput(InputFile):
    """An open file to read from, O_DIRECT or not."""

    def __init__(self, fd: int) -> None:
        """Read from ``fd``, which stays the caller's."""
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
        """Read at least ``need`` bytes from ``start`` on, or what is there of them."""
        done, tries = 0, _TRIES
        while done < need:
            count = os.preadv(self._fd, [window[done:]], start + done)
            if count == 0:
                break  # the file has become shorter
            done += count
            if done < need:  # go on from where the next direct read may start
                tries = _TRIES if count >= ALIGNMENT else tries - 1
                done -= done % ALIGNMENT
                if not tries:
                    raise OSError(errno.EIO, "")
        return done


class PosixOutput(OutputFile):
    """A file that is being written; ``direct`` if it is open with O_DIRECT."""

    def __init__(self, fd: int, path: str, *, direct: bool) -> None:
        """Write to ``fd``, and close it at the end; errors are told with ``path``."""
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
                    count -= count % ALIGNMENT  # go on from where the next direct write may start
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
            # Never fsync this file again: the error is reported once, and the lost pages look clean afterwards.
            raise storage_error(error, f"cannot make {nbytes:,} bytes durable", self._path, self._fd, call) from error

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_descriptor(fd)


def close_descriptor(fd: int) -> None:
    """Close a descriptor. An error of close comes too late: what counts is fsync."""
    with contextlib.suppress(OSError):
        os.close(fd)


def file_nbytes(fd: int) -> int:
    """The length of an open file; ``OSError`` if something else has its name."""
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EISDIR if stat.S_ISDIR(facts.st_mode) else errno.ENXIO, "not a file")
    return facts.st_size


def storage_error(error: OSError, doing: str, path: str, fd: int, call: str) -> WriteError:
    """:func:`write_error`, with the free space, or what the refused ``call`` is needed for, if that matters."""
    hint = system_calls.hint(call, error)
    doing += f" ({hint})" if hint else ""
    if error.errno in NO_SPACE:
        with contextlib.suppress(OSError):
            facts = os.fstatvfs(fd)
            free = [f"{facts.f_bavail * facts.f_frsize:,} bytes"] if facts.f_blocks else []
            free += [f"{facts.f_favail:,} files"] if facts.f_files else []
            doing += f" ({' and '.join(free)} are free)" if free else ""
    return write_error(error, doing, path)
