"""A run directory on a POSIX file system: O_DIRECT where the file system takes it, publish by link, fsync throughout.

All operations go through a descriptor of the run directory (``openat`` and friends), so that renaming a parent in the
middle of a run, or a symbolic link planted in it, leads nowhere else.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import os
import secrets
import stat
import time
from collections.abc import Callable, Generator
from typing import Final

from sidesave.errors import NoSpaceError, WriteError, write_error
from sidesave.stager.system_calls import REFUSED
from sidesave.writer_daemon.storage import locks
from sidesave.writer_daemon.storage.base import InputFile, OutputFile, Storage
from sidesave.writer_daemon.storage.descriptor import DIRECTORY, Descriptor
from sidesave.writer_daemon.storage.posix_file import (
    ALIGNMENT,
    NO_SPACE,
    PosixInput,
    PosixOutput,
    close_descriptor,
    file_nbytes,
    storage_error,
)

logger = logging.getLogger(__name__)

RENAME_NOREPLACE: Final = 1
_NO_PREALLOCATION: Final = (*REFUSED, errno.EINVAL)
_NO_DIRECT: Final = (errno.EINVAL, errno.EOPNOTSUPP)
_NO_LINKS: Final = (*REFUSED, errno.EMLINK)
_NOT_LINKED: Final = (*_NO_LINKS, errno.EXDEV, errno.EACCES, errno.EEXIST, errno.ENOENT, errno.ENOTDIR)
_LOCAL: Final = frozenset(
    {
        *("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "jfs", "nilfs2", "reiserfs"),
        *("tmpfs", "ramfs", "rootfs", "overlay", "vfat", "exfat", "ntfs3"),
    }
)
"""File systems that one kernel alone writes to, so that its locks keep out everybody. Any other may be shared."""
_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_READING: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO in a file's place blocks nobody
_PATIENCE_S: Final = 0.1
"""For a lock that only asks whether there is another, or that covers a deletion: each is gone in less."""
_LOCK_POLL_S: Final = 0.002
_UNKNOWN_NBYTES: Final = 1 << 62
"""What is free where the file system does not say."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def make_run_directory(path: str) -> None:
    """Make a directory and what leads to it, durably; plain ``OSError``. Nothing is asked of one that is there.

    That matters: ``mkdir`` of a directory that exists would wait in the kernel for storage that hangs.
    """
    path = os.path.abspath(path)  # which leads to "/", and so to an end
    missing: list[str] = []
    while not os.path.isdir(path) and not (missing and os.path.lexists(path)):  # mkdir says what is in the way
        missing.append(path)
        path = os.path.dirname(path)
    for each in reversed(missing):
        try:
            os.mkdir(each)
        except FileExistsError:
            if not os.path.isdir(each):
                raise
        # One that may be passed through and not be read cannot be synced.
        with contextlib.suppress(PermissionError), Descriptor(os.path.dirname(each), DIRECTORY) as parent:
            os.fsync(parent.fileno())


class PosixStorage(Storage):
    """The run directory ``root``, which must exist. Raises ``WriteError`` when it cannot be opened."""

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
        with self._doing("cannot look at the run directory", ""):
            ours = os.fstat(self.descriptor)
            try:
                if os.path.samestat(os.stat(self.root), ours):
                    return
                there = "another directory"
            except (FileNotFoundError, NotADirectoryError):
                there = "nothing"
            now = os.readlink(f"/proc/self/fd/{self.descriptor}")
        became = "was removed" if ours.st_nlink == 0 or now.endswith(" (deleted)") else f"is {now} now"
        text = f"the run directory opened here {became}, and its path leads to {there}: put it back, or restart"
        raise WriteError(errno.ENOENT, text, self.root)

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    @contextlib.contextmanager
    def _doing(self, what: str, path: str, call: str = "") -> Generator[None]:
        """Make a ``WriteError`` of what fails; ``call`` is the one that ``system_calls`` has something to say of."""
        try:
            yield
        except OSError as error:
            raise storage_error(error, what, self._full(path), self.descriptor, call) from error

    def hold(self, name: str, marker: str) -> None:
        """Keep a directory open, so that reading in it goes on when it is renamed: deletion begins with that.

        Whoever deletes it leaves its files where they are as long as ``marker``, one of them, is shared, as far as that
        is possible here.
        """
        with self._doing("cannot open", name):
            self._held_directory = Descriptor(name, DIRECTORY, directory=self.descriptor)
        self._held = name
        with contextlib.suppress(WriteError):
            self._unshare = self.share(f"{name}/{marker}")

    def open_descriptor(self, path: str, flags: int) -> Descriptor:
        """``open(2)`` of a path in this run directory, for reading; raises plain ``OSError`` with the full path."""
        head, _, rest = path.partition("/")
        try:
            if self._held and head == self._held:
                return Descriptor(rest or ".", flags, directory=self._held_directory.fileno())
            return Descriptor(path, flags, directory=self.descriptor)
        except OSError as error:
            error.filename = self._full(path)
            raise

    # Reading ---------------------------------------------------------------------------------------------------

    def free_nbytes(self) -> int:
        with self._doing("cannot ask for free space", ""):
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
                    while part := os.read(file.fileno(), nbytes + 1):  # memory is taken for so much at once
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
                if error.errno not in _NO_DIRECT:
                    raise
                file = self.open_descriptor(path, _READING)
            with file:
                yield PosixInput(file.fileno())

    # Writing ---------------------------------------------------------------------------------------------------

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
            fd = self._open_new(path)
        file = PosixOutput(fd, self._full(path), direct=bool(self._direct))
        try:
            self._preallocate(fd, path, nbytes)
        except WriteError:
            file.close()
            with contextlib.suppress(WriteError):  # the reason to tell is why it could not be made
                self.remove(path)
            raise
        return file

    def _open_new(self, path: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        if self._direct is None:
            self._direct = self._probe_direct(path)
        return os.open(path, flags | (os.O_DIRECT if self._direct else 0), 0o666, dir_fd=self.descriptor)

    def _probe_direct(self, path: str) -> bool:
        """Find out by a real aligned write: file systems announce more than they take."""
        probe = f"{path}.probe"
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT
            fd = os.open(probe, flags, 0o600, dir_fd=self.descriptor)
            try:
                with mmap.mmap(-1, ALIGNMENT) as page:
                    os.pwrite(fd, page, 0)
            finally:
                close_descriptor(fd)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            logger.warning("%s does not take O_DIRECT (%s): writing through the page cache", self.root, error.strerror)
            return False
        finally:
            self.remove(probe)
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
                os.link(temporary, final, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor, follow_symlinks=False)
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
                os.link(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _NOT_LINKED:
                    raise
                logger.debug("%s is not linked as %s: %s", self._full(old), new, error.strerror)
                return False
        return True

    def _rename_noreplace(self, source: str, target: str) -> bool:
        code = renameat2(self.descriptor, source, target, RENAME_NOREPLACE)
        if code == errno.EEXIST:
            return False
        if code:
            code = errno.EOPNOTSUPP if code == errno.EINVAL else code  # it does not know the flag
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
                os.rename(draft, path, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(draft, dir_fd=self.descriptor)
                raise
        self.sync_directory(path.rpartition("/")[0])

    def rename_directory(self, source: str, target: str) -> None:
        with self._doing("cannot rename to", target, "renameat"):
            # rename(2) replaces an empty directory without a word, so the name is checked first; the lease keeps
            # others from taking it in between.
            with contextlib.suppress(FileNotFoundError):
                os.lstat(target, dir_fd=self.descriptor)
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            before = os.lstat(source, dir_fd=self.descriptor)
            try:
                os.rename(source, target, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
            except OSError:
                # A network file system that repeats a lost request fails though the first one had succeeded.
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
                    text = "%s stays readable by this user alone, as its mode cannot be changed: %s"
                    logger.warning(text, self._full(name), error.strerror)

    def sync_directory(self, name: str) -> None:
        doing = self._doing("cannot sync", name, "fsync")
        with doing, Descriptor(name or ".", DIRECTORY, directory=self.descriptor) as directory:
            os.fsync(directory.fileno())

    # Locks -----------------------------------------------------------------------------------------------------

    def lock(self, path: str) -> Callable[[], None] | None:
        if not self._has_locks:
            return None
        with self._doing("cannot lock", path):
            return self._flock(path, fcntl.LOCK_EX)

    def is_locked(self, path: str) -> bool | None:
        if not self._has_locks:
            return None
        return self._refuses(path, fcntl.LOCK_SH)  # shared: two that ask do not see each other

    def share(self, path: str) -> Callable[[], None] | None:
        if not self._has_locks:
            return None
        deadline = time.monotonic() + _PATIENCE_S
        with self._doing("cannot lock", path):
            while True:
                try:
                    return self._flock(path, fcntl.LOCK_SH)
                except OSError as error:
                    if error.errno in _NO_LOCKS:
                        return None
                    if error.errno != errno.EAGAIN or time.monotonic() >= deadline:
                        raise
                time.sleep(_LOCK_POLL_S)

    def is_shared(self, path: str) -> bool | None:
        if not self._has_locks:
            return None
        return self._refuses(path, fcntl.LOCK_EX) and not self._refuses(path, fcntl.LOCK_SH)

    def _refuses(self, path: str, kind: int) -> bool:
        """Whether somebody's lock prevents one of this kind."""
        with self._doing("cannot ask for the lock of", path):
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
        if _file_system(self.descriptor) not in _LOCAL:
            return False
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)  # which has no lock, and gives none back
        except OSError as error:
            logger.warning("%s: without file locks pids and counters tell who uses it: %s", self.root, error.strerror)
            return False
        return True

    # Removing --------------------------------------------------------------------------------------------------

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
                self.remove(directory)  # a link or a file in a directory's place
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
                left.append(name)  # once more, when they are gone
            else:
                with self._doing("cannot remove", directory, "unlinkat"), contextlib.suppress(FileNotFoundError):
                    os.rmdir(directory, dir_fd=self.descriptor)
            left += deeper

    def _lift(self, path: str, into: str) -> str:
        """Move a nested directory up, so that neither paths nor a stack grow with the depth; returns its new path."""
        lifted = f"{into}/.{secrets.token_hex(8)}"
        with self._doing("cannot move up, to remove it,", path):
            os.rename(path, lifted, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        return lifted


def _file_system(fd: int) -> str:
    """The kernel's name for the file system of an open file; empty if /proc does not tell."""
    with contextlib.suppress(OSError, ValueError):
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
            (mount,) = (line.split()[1] for line in file if line.startswith("mnt_id:"))
        with open("/proc/self/mountinfo", encoding="ascii", errors="replace") as file:
            (kind,) = (line.rpartition(" - ")[2].split()[0] for line in file if line.split(" ", 1)[0] == mount)
        return kind
    return ""


def _umask() -> int:
    """The process's umask, read without setting it: another thread may be creating a file."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), 0o077)


def renameat2(directory_fd: int, source: str, target: str, flags: int) -> int:
    """``renameat2(2)`` within one directory; returns 0 or the errno."""
    failed = _libc.renameat2(directory_fd, os.fsencode(source), directory_fd, os.fsencode(target), flags)
    return ctypes.get_errno() if failed else 0
