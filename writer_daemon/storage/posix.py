"""A POSIX run directory: O_DIRECT if supported, publication by link, fsync throughout.

All operations use a descriptor of the run directory (``openat`` etc.), so that neither a renamed
parent nor a symbolic link planted in the directory can redirect them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import os
import secrets
import stat
from collections.abc import Callable, Generator
from typing import Final

from sidesave.errors import NoSpaceError, WriteError, write_error
from sidesave.stager.system_calls import REFUSED
from sidesave.writer_daemon.storage import locks
from sidesave.writer_daemon.storage.base import InputFile, OutputFile, Storage
from sidesave.writer_daemon.storage.descriptor import DIRECTORY, Descriptor
from sidesave.writer_daemon.storage.posix_file import (
    NO_DIRECT,
    NO_SPACE,
    PosixInput,
    PosixOutput,
    entry_identity,
    file_nbytes,
    storage_error,
    takes_direct_writes,
)

logger = logging.getLogger(__name__)

RENAME_NOREPLACE: Final = 1
_NO_PREALLOCATION: Final = (*REFUSED, errno.EINVAL)
_NO_LINKS: Final = (*REFUSED, errno.EMLINK)
_NOT_LINKED: Final = (
    *_NO_LINKS,
    errno.EXDEV,
    errno.EACCES,
    errno.EEXIST,
    errno.ENOENT,
    errno.ENOTDIR,
)
# O_NONBLOCK: never wait for a FIFO
_READING: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_UNKNOWN_NBYTES: Final = 1 << 62
"""Free bytes if the file system does not report them."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def make_run_directory(path: str) -> None:
    """Create a directory and its parents durably; raises plain ``OSError``.

    Calls no ``mkdir`` for an existing directory: on hanging storage, it could block in the kernel.
    """
    path = os.path.abspath(path)  # so that the loop ends at "/"
    missing: list[str] = []
    # if not a directory, mkdir fails
    while not os.path.isdir(path) and not (missing and os.path.lexists(path)):
        missing.append(path)
        path = os.path.dirname(path)
    for each in reversed(missing):
        try:
            os.mkdir(each)
        except FileExistsError:
            if not os.path.isdir(each):
                raise
        parent = os.path.dirname(each)
        # A parent without read permission cannot be synced.
        with contextlib.suppress(PermissionError), Descriptor(parent, DIRECTORY) as directory:
            os.fsync(directory.fileno())


class PosixStorage(Storage):
    """The existing run directory ``root``. Raises ``WriteError`` if it cannot be opened."""

    def __init__(self, root: str) -> None:
        self.root = root
        try:
            self._directory = Descriptor(root, DIRECTORY)
        except OSError as error:
            raise write_error(error, "cannot open the run directory", root) from error
        self._held, self._held_directory = "", self._directory
        self._unshare: Callable[[], None] | None = None
        self._direct: bool | None = None  # unknown until the first file

    def close(self) -> None:
        unshare, self._unshare = self._unshare, None
        if unshare is not None:
            unshare()
        self._held_directory.close()
        self._directory.close()

    @property
    def descriptor(self) -> int:
        """The open run directory; -1 once closed."""
        return self._directory.fileno()

    def check_root(self) -> None:
        with self._doing("cannot examine the run directory", ""):
            ours = os.fstat(self.descriptor)
            try:
                if os.path.samestat(os.stat(self.root), ours):
                    return
                replacement = "another directory"
            except (FileNotFoundError, NotADirectoryError):
                replacement = "nothing"
            current_path = os.readlink(f"/proc/self/fd/{self.descriptor}")
        is_removed = ours.st_nlink == 0 or current_path.endswith(" (deleted)")
        change = "was removed" if is_removed else f"was moved to {current_path}"
        text = f"the open run directory {change}, and its path leads to {replacement}"
        raise WriteError(errno.ENOENT, f"{text}: put it back, or restart", self.root)

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    @contextlib.contextmanager
    def _doing(self, what: str, path: str, call: str = "") -> Generator[None]:
        """Turn ``OSError`` into ``WriteError``; ``call`` is a system call to explain if refused."""
        try:
            yield
        except OSError as error:
            raise storage_error(error, what, self._full(path), self.descriptor, call) from error

    def hold(self, name: str, marker: str) -> None:
        """Keep a directory open, so that it stays readable after the rename that begins a deletion.

        Also shares the lock of its file ``marker``, if possible: then deletion removes no files.
        """
        with self._doing("cannot open", name):
            self._held_directory = Descriptor(name, DIRECTORY, directory=self.descriptor)
        self._held = name
        with contextlib.suppress(WriteError):
            self._unshare = self.share(f"{name}/{marker}")

    def open_descriptor(self, path: str, flags: int) -> Descriptor:
        """Open a path in this run directory; raises plain ``OSError`` with the full path."""
        head, _, rest = path.partition("/")
        try:
            if self._held and head == self._held:
                return Descriptor(rest or ".", flags, directory=self._held_directory.fileno())
            return Descriptor(path, flags, directory=self.descriptor)
        except OSError as error:
            error.filename = self._full(path)
            raise

    # Reading --------------------------------------------------------------------------------------

    def free_nbytes(self) -> int:
        with self._doing("cannot determine the free space", ""):
            try:
                facts = os.fstatvfs(self.descriptor)
            except OSError as error:
                if error.errno not in REFUSED:
                    raise
                return _UNKNOWN_NBYTES
        return facts.f_bavail * facts.f_frsize if facts.f_blocks else _UNKNOWN_NBYTES

    def list_directory(self, name: str) -> list[str]:
        with self._doing("cannot list", name):
            try:
                directory = self.open_descriptor(name or ".", DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:
                return []
            with directory:
                return os.listdir(directory.fileno())

    def entries(self) -> dict[str, object]:
        doing = self._doing("cannot list", "")
        with doing, self.open_descriptor(".", DIRECTORY | os.O_NOFOLLOW) as directory:
            descriptor = directory.fileno()
            # Not scandir, which an interrupt leaves open; it would ask for each status too.
            return {name: entry_identity(name, descriptor) for name in os.listdir(descriptor)}

    def read(self, path: str, max_nbytes: int) -> bytes | None:
        with self._doing("cannot read", path):
            try:
                file = self.open_descriptor(path, _READING)
            except (FileNotFoundError, NotADirectoryError):
                return None
            with file:
                nbytes = file_nbytes(file.fileno())
                if nbytes > max_nbytes:
                    raise OSError(errno.EFBIG, "over the limit")
                parts: list[bytes] = []
                try:
                    while part := os.read(file.fileno(), nbytes + 1):  # may raise MemoryError
                        parts.append(part)
                    return b"".join(parts)
                except MemoryError as error:
                    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error

    @contextlib.contextmanager
    def open(self, path: str) -> Generator[InputFile]:
        with self._doing("cannot read", path, "preadv"):
            try:
                file = self.open_descriptor(path, _READING | os.O_DIRECT)
            except OSError as error:
                if error.errno not in NO_DIRECT:
                    raise
                file = self.open_descriptor(path, _READING)
            with file:
                yield PosixInput(file.fileno())

    # Writing --------------------------------------------------------------------------------------

    def make_directory(self, name: str, mode: int) -> bool:
        with self._doing("cannot create", name, "mkdirat"):
            try:
                os.mkdir(name, mode, dir_fd=self.descriptor)
            except FileExistsError:
                if not stat.S_ISDIR(os.lstat(name, dir_fd=self.descriptor).st_mode):
                    raise
                return False
            return True

    def create(self, path: str, nbytes: int, final: str | None = None) -> OutputFile:
        with self._doing(f"cannot create a file of {nbytes:,} bytes", path, "pwrite64"):
            if self._direct is None:
                probe = f"{path}.probe"
                self._direct = takes_direct_writes(probe, self.descriptor, self.root, self.remove)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            flags |= os.O_DIRECT if self._direct else 0
            fd = os.open(path, flags, 0o666, dir_fd=self.descriptor)
        file = PosixOutput(fd, self._full(path), direct=self._direct)
        try:
            self._preallocate(fd, path, nbytes)
        except WriteError:
            file.close()
            with contextlib.suppress(WriteError):  # report the first error
                self.remove(path)
            raise
        return file

    def _preallocate(self, fd: int, path: str, nbytes: int) -> None:
        """Reserve space, to detect a full disk before the first byte; 10-20 % faster on ext4."""
        if not nbytes:
            return
        free = self.free_nbytes()
        while _libc.fallocate(fd, 0, 0, nbytes):
            code = ctypes.get_errno()
            if code == errno.EINTR:
                continue
            if code in NO_SPACE or (code in _NO_PREALLOCATION and nbytes > free):
                code = code if code in NO_SPACE else errno.ENOSPC
                message = f"{nbytes:,} bytes are needed, {free:,} are free: {os.strerror(code)}"
                raise NoSpaceError(code, message, self._full(path))
            if code not in _NO_PREALLOCATION:
                error = OSError(code, os.strerror(code))
                raise write_error(error, f"cannot reserve {nbytes:,} bytes", self._full(path))
            return

    def publish(self, temporary: str, final: str) -> bool:
        with self._doing("cannot publish", final, "linkat"):
            try:
                self._link(temporary, final)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return self._rename_noreplace(temporary, final)
        self.remove(temporary)
        return True

    def link(self, old: str, new: str) -> bool:
        with self._doing(f"cannot link {old} as", new, "linkat"):
            try:
                if not stat.S_ISREG(os.lstat(old, dir_fd=self.descriptor).st_mode):
                    return False
                self._link(old, new)
            except OSError as error:
                if error.errno not in _NOT_LINKED:
                    raise
                logger.debug("%s is not linked as %s: %s", self._full(old), new, error.strerror)
                return False
        return True

    def _link(self, old: str, new: str) -> None:
        fd = self.descriptor
        os.link(old, new, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)

    def _rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def _rename_noreplace(self, source: str, target: str) -> bool:
        code = renameat2(self.descriptor, source, target, RENAME_NOREPLACE)
        if code == errno.EEXIST:
            return False
        if code:
            code = errno.EOPNOTSUPP if code == errno.EINVAL else code  # the flag is not supported
            raise OSError(code, os.strerror(code))
        return True

    def replace(self, path: str, data: bytes) -> None:
        draft = f"{path}.{secrets.token_hex(4)}"
        with self._doing("cannot replace", path):
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                with Descriptor(draft, flags, directory=self.descriptor) as file:
                    left = memoryview(data)
                    while left:
                        left = left[os.write(file.fileno(), left) :]
                    os.fsync(file.fileno())
                self._rename(draft, path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(draft, dir_fd=self.descriptor)
                raise
        self.sync_directory(path.rpartition("/")[0])

    def rename_directory(self, source: str, target: str) -> None:
        with self._doing("cannot rename to", target, "renameat"):
            # rename(2) silently replaces an empty directory, so check the name first; the lease
            # excludes other processes until the rename.
            with contextlib.suppress(FileNotFoundError):
                os.lstat(target, dir_fd=self.descriptor)
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            before = os.lstat(source, dir_fd=self.descriptor)
            try:
                self._rename(source, target)
            except OSError:
                # A network file system that repeats a lost request reports an error though the
                # first succeeded.
                if not self._is_at(target, before):
                    raise

    def _is_at(self, name: str, facts: os.stat_result) -> bool:
        try:
            return os.path.samestat(os.lstat(name, dir_fd=self.descriptor), facts)
        except OSError:
            return False

    def open_to_readers(self, name: str) -> None:
        with self._doing("cannot change the mode of", name):
            mode = stat.S_IMODE(os.stat(name, dir_fd=self.descriptor).st_mode)
            wanted = 0o777 & ~_umask() | mode & stat.S_ISGID
            try:
                os.chmod(name, wanted, dir_fd=self.descriptor)
            except OSError as error:
                if error.errno not in REFUSED:
                    raise
                if mode != wanted:
                    text = f"{self._full(name)} stays readable only by this user"
                    reason = f"its mode cannot be changed: {error.strerror}"
                    logger.warning("%s, since %s", text, reason)

    def sync_directory(self, name: str) -> None:
        doing = self._doing("cannot sync", name, "fsync")
        with doing, Descriptor(name or ".", DIRECTORY, directory=self.descriptor) as directory:
            os.fsync(directory.fileno())

    # Locks ----------------------------------------------------------------------------------------

    def lock(self, path: str) -> Callable[[], None] | None:
        with self._doing("cannot lock", path):
            return self._flock(path, fcntl.LOCK_EX) if self._has_locks else None

    def is_locked(self, path: str) -> bool | None:
        # Tested by a shared lock, so that two tests do not conflict.
        return self._refuses(path, fcntl.LOCK_SH) if self._has_locks else None

    def share(self, path: str) -> Callable[[], None] | None:
        with self._doing("cannot lock", path):
            opening = functools.partial(self.open_descriptor, path, _READING)
            return locks.share(opening) if self._has_locks else None

    def is_shared(self, path: str) -> bool | None:
        if not self._has_locks:
            return None
        return self._refuses(path, fcntl.LOCK_EX) and not self._refuses(path, fcntl.LOCK_SH)

    def _refuses(self, path: str, kind: int) -> bool:
        """Whether another process's lock prevents one of this kind."""
        with self._doing("cannot test the lock of", path):
            try:
                self._flock(path, kind)()
            except FileNotFoundError:
                return False
            except BlockingIOError:
                return True
            return False

    def _flock(self, path: str, kind: int) -> Callable[[], None]:
        return locks.take(self.open_descriptor(path, _READING), kind)

    @functools.cached_property
    def _has_locks(self) -> bool:
        return locks.exclude_all_others(self.descriptor, self.root)

    # Removing -------------------------------------------------------------------------------------

    def remove(self, path: str) -> None:
        with self._doing("cannot remove", path, "unlinkat"), contextlib.suppress(FileNotFoundError):
            os.unlink(path, dir_fd=self.descriptor)

    def remove_tree(self, name: str) -> None:
        left = [name]
        while left:
            directory = left.pop()
            try:
                entries = self.list_directory(directory)
            except WriteError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
                self.remove(directory)  # a link or a file
                continue
            deeper: list[str] = []
            for path in (f"{directory}/{entry}" for entry in entries):
                try:
                    self.remove(path)
                except WriteError as error:
                    if error.errno not in (errno.EISDIR, errno.EPERM):
                        raise
                    deeper.append(path if directory == name else self._lift(path, name))
            if deeper and directory == name:
                left.append(name)  # again, after the nested directories are removed
            else:
                doing = self._doing("cannot remove", directory, "unlinkat")
                with doing, contextlib.suppress(FileNotFoundError):
                    os.rmdir(directory, dir_fd=self.descriptor)
            left += deeper

    def _lift(self, path: str, into: str) -> str:
        """Move a nested directory up, to limit the length of paths; return its new path."""
        lifted = f"{into}/.{secrets.token_hex(8)}"
        with self._doing("cannot move a directory to remove it", path):
            self._rename(path, lifted)
        return lifted


def _umask() -> int:
    """Return the process's umask without setting it: another thread may be creating a file."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), 0o077)


def renameat2(directory_fd: int, source: str, target: str, flags: int) -> int:
    """Call ``renameat2(2)`` within one directory; return 0 or the errno."""
    failed = _libc.renameat2(
        directory_fd, os.fsencode(source), directory_fd, os.fsencode(target), flags
    )
    return ctypes.get_errno() if failed else 0
