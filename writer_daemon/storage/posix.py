"""A run directory on a POSIX file system: O_DIRECT where the file system takes it, publish by link, fsync throughout.

All operations go through a descriptor of the run directory (``openat`` and friends), so that renaming a parent in the
middle of a run, or a symbolic link planted in it, leads nowhere else.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import stat
from collections.abc import Generator
from typing import Final

from sidesave.errors import NoSpaceError, WriteError, write_error
from sidesave.writer_daemon.storage.base import InputFile, OutputFile, Storage

logger = logging.getLogger(__name__)

_ALIGNMENT: Final = 4096
_RENAME_NOREPLACE: Final = 1
_NO_PREALLOCATION: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_NO_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class PosixStorage(Storage):
    """The run directory ``root``, which must exist. Raises ``WriteError`` when it cannot be opened."""

    def __init__(self, root: str) -> None:
        """Open ``root``."""
        self.root = root
        try:
            self._fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise write_error(error, "cannot open the run directory", root) from error
        self._direct: bool | None = None  # unknown until the first file

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    @contextlib.contextmanager
    def _doing(self, what: str, path: str) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(error, what, self._full(path)) from error

    # Reading ---------------------------------------------------------------------------------------------------

    def free_nbytes(self) -> int:
        with self._doing("cannot ask for free space", ""):
            facts = os.fstatvfs(self._fd)
        return facts.f_bavail * facts.f_frsize if facts.f_blocks else 1 << 62  # some file systems do not say

    def list_directory(self, name: str) -> list[str]:
        with self._doing("cannot list", name):
            try:
                fd = os.open(name or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
            except FileNotFoundError:
                return []
            try:
                return os.listdir(fd)
            finally:
                os.close(fd)

    def read(self, path: str, max_nbytes: int) -> bytes | None:
        with self._doing("cannot read", path):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
            except FileNotFoundError:
                return None
            with os.fdopen(fd, "rb") as file:
                if os.fstat(fd).st_size > max_nbytes:
                    raise OSError(errno.EFBIG, "over the limit")
                return file.read()

    @contextlib.contextmanager
    def open(self, path: str) -> Generator[InputFile]:
        with self._doing("cannot read", path):
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                fd = os.open(path, flags | os.O_DIRECT, dir_fd=self._fd)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
                fd = os.open(path, flags, dir_fd=self._fd)
            file = _PosixInput(fd)
            try:
                yield file
            finally:
                file.close()

    # Writing ---------------------------------------------------------------------------------------------------

    def make_directory(self, name: str, mode: int) -> bool:
        with self._doing("cannot create", name):
            try:
                os.mkdir(name, mode, dir_fd=self._fd)
            except FileExistsError:
                if not stat.S_ISDIR(os.lstat(name, dir_fd=self._fd).st_mode):
                    raise
                return False
            return True

    def create(self, path: str, nbytes: int) -> OutputFile:
        with self._doing("cannot create", path):
            fd = self._open_new(path)
        file = _PosixFile(fd, self._full(path), direct=bool(self._direct))
        try:
            self._preallocate(fd, path, nbytes)
        except WriteError:
            file.close()
            self.remove(path)
            raise
        return file

    def _open_new(self, path: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        if self._direct is None:
            self._direct = self._probe_direct(path)
        return os.open(path, flags | (os.O_DIRECT if self._direct else 0), 0o666, dir_fd=self._fd)

    def _probe_direct(self, path: str) -> bool:
        """Find out by a real aligned write: what a file system announces and what it takes are two things."""
        probe = f"{path}.probe"
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT
            fd = os.open(probe, flags, 0o600, dir_fd=self._fd)
            try:
                with mmap.mmap(-1, _ALIGNMENT) as page:
                    os.pwrite(fd, page, 0)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            logger.warning("%s does not take O_DIRECT (%s): writing through the page cache", self.root, error.strerror)
            return False
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(probe, dir_fd=self._fd)
        return True

    def _preallocate(self, fd: int, path: str, nbytes: int) -> None:
        """Reserve space, so that a full disk is found before the first byte; also 10-20 % faster on ext4."""
        if not nbytes:
            return
        free = self.free_nbytes()
        while _libc.fallocate(fd, 0, 0, nbytes):
            code = ctypes.get_errno()
            if code == errno.EINTR:
                continue
            if code == errno.ENOSPC or (code in _NO_PREALLOCATION and nbytes > free):
                message = f"{nbytes:,} bytes are needed, {free:,} are free"
                raise NoSpaceError(errno.ENOSPC, message, self._full(path))
            if code not in _NO_PREALLOCATION:
                error = OSError(code, os.strerror(code))
                raise write_error(error, f"cannot reserve {nbytes:,} bytes", self._full(path))
            return

    def publish(self, temporary: str, final: str) -> bool:
        with self._doing("cannot publish", final):
            try:
                os.link(temporary, final, src_dir_fd=self._fd, dst_dir_fd=self._fd, follow_symlinks=False)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return self._rename_noreplace(temporary, final)
            os.unlink(temporary, dir_fd=self._fd)
            return True

    def _rename_noreplace(self, source: str, target: str) -> bool:
        code = _renameat2(self._fd, source, target, _RENAME_NOREPLACE)
        if code == errno.EEXIST:
            return False
        if code:
            raise OSError(code, os.strerror(code))
        return True

    def rename_directory(self, source: str, target: str) -> None:
        with self._doing("cannot rename to", target):
            # rename(2) replaces an empty directory without a word, so the name is checked first; the lease keeps
            # others from taking it in between.
            with contextlib.suppress(FileNotFoundError):
                os.lstat(target, dir_fd=self._fd)
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            os.rename(source, target, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def open_to_readers(self, name: str) -> None:
        with self._doing("cannot change the mode of", name):
            shared = os.stat(name, dir_fd=self._fd).st_mode & stat.S_ISGID
            os.chmod(name, 0o777 & ~_umask() | shared, dir_fd=self._fd)

    def sync_directory(self, name: str) -> None:
        with self._doing("cannot sync", name):
            fd = os.open(name or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def sync_file(self, path: str) -> None:
        with self._doing("cannot sync", path):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def remove(self, path: str) -> None:
        with self._doing("cannot remove", path), contextlib.suppress(FileNotFoundError):
            os.unlink(path, dir_fd=self._fd)

    def remove_tree(self, name: str) -> None:
        try:
            entries = self.list_directory(name)
        except WriteError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            self.remove(name)  # a link or a file in a directory's place
            return
        for entry in entries:
            path = f"{name}/{entry}"
            try:
                self.remove(path)
            except WriteError as error:
                if error.errno not in (errno.EISDIR, errno.EPERM):
                    raise
                self.remove_tree(path)
        with self._doing("cannot remove", name), contextlib.suppress(FileNotFoundError):
            os.rmdir(name, dir_fd=self._fd)


class _PosixInput(InputFile):
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = mmap.mmap(-1, _ALIGNMENT)
        self.nbytes = os.fstat(fd).st_size

    def read_at(self, offset: int, nbytes: int) -> memoryview:
        start = offset // _ALIGNMENT * _ALIGNMENT
        need = min(offset + nbytes, self.nbytes) - start
        room = -(-need // _ALIGNMENT) * _ALIGNMENT
        if need <= offset - start:
            return memoryview(b"")
        if room > len(self._buffer):
            self._buffer = mmap.mmap(-1, room)
        window, done = memoryview(self._buffer)[:room], 0
        while done < need:
            count = os.preadv(self._fd, [window[done:]], start + done)
            done += count
            if count == 0 or done % _ALIGNMENT:
                break
        return window[offset - start : max(offset - start, min(done, need))]

    def close(self) -> None:
        os.close(self._fd)


class _PosixFile(OutputFile):
    def __init__(self, fd: int, path: str, *, direct: bool) -> None:
        self._fd = fd
        self._path = path
        self._direct = direct

    def write_at(self, data: memoryview, offset: int) -> None:
        assert not self._direct or (offset % _ALIGNMENT == 0 and len(data) % _ALIGNMENT == 0)
        while data:
            try:
                count = os.pwrite(self._fd, data, offset)
            except OSError as error:
                raise write_error(error, f"cannot write at byte {offset:,}", self._path) from error
            if count == 0:
                raise write_error(OSError(errno.EIO, ""), f"nothing was written at byte {offset:,}", self._path)
            if self._direct and count < len(data):
                count -= count % _ALIGNMENT  # go on from where the next direct write may start
                if count == 0:
                    raise write_error(OSError(errno.ENOSPC, ""), f"a short write at byte {offset:,}", self._path)
            data = data[count:]
            offset += count

    def finish(self, nbytes: int) -> None:
        try:
            os.ftruncate(self._fd, nbytes)
            os.fsync(self._fd)
        except OSError as error:
            # Never fsync this file again: the error is reported once, and the lost pages look clean afterwards.
            raise write_error(error, "cannot make durable", self._path) from error

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _umask() -> int:
    """The process's umask, read and not set: another thread may be creating a file at this moment."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), 0o077)


def _renameat2(directory_fd: int, source: str, target: str, flags: int) -> int:
    failed = _libc.renameat2(directory_fd, os.fsencode(source), directory_fd, os.fsencode(target), flags)
    return ctypes.get_errno() if failed else 0
