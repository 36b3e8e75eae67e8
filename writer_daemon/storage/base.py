"""The storage of a run directory: few operations, each with a stated durability.

Paths are relative to the run directory: ``name`` or ``directory/name``. Every operation raises
``WriteError`` (or a subclass) with errno and the full path, and can be repeated after a crash.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Final

from sidesave.errors import WriteError
from sidesave.stager.memory.arena import page_up


class OutputFile(ABC):
    """A new file under a temporary name: written by several threads, then finished once."""

    @abstractmethod
    def write_at(self, data: memoryview, offset: int) -> None:
        """Write all of ``data``, page-aligned, at ``offset``; both are multiples of 4096 bytes.

        Thread-safe. May block until all bytes before ``offset`` are written, so each thread must
        write in ascending order.
        """

    @abstractmethod
    def finish(self, nbytes: int) -> None:
        """Truncate the file to ``nbytes`` and make it durable; after an error it is unusable."""

    def write_all(self, data: bytes) -> None:
        """Write a small file with :meth:`write_at` and :meth:`finish`."""
        # not closed: an upload may still hold it
        view = memoryview(mmap.mmap(-1, max(page_up(len(data)), page_up(1))))
        view[: len(data)] = data
        self.write_at(view, 0)
        self.finish(len(data))

    @abstractmethod
    def close(self) -> None:
        """Release the descriptor; idempotent. Without :meth:`finish` the content is undefined."""


class InputFile(ABC):
    """An open file for reading; closed by its ``with`` block."""

    nbytes: int
    """The file's length when it was opened."""

    @abstractmethod
    def read_at(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes ``[offset, offset + nbytes)``, fewer at the end of the file; blocks.

        The result is valid until the next call.
        """

    @abstractmethod
    def read_into(self, offset: int, window: memoryview) -> int:
        """Fill ``window`` from ``offset`` on, both page-aligned; return the bytes read.

        Reads fewer bytes at the file's end. Blocks. Several threads may call it at a time, but not
        together with :meth:`read_at`.
        """

    def read_each(self, spans: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """Yield :meth:`read_at` of each (offset, length), in order; slow storage reads ahead."""
        return (self.read_at(*span) for span in spans)


class ReadStorage(ABC):
    """One run directory, opened for reading."""

    root: str
    """Full path or URL of the run directory, for messages."""
    can_list = True
    """Whether :meth:`list_directory` works; if not, it raises ``InvalidArgumentError``."""

    @abstractmethod
    def list_directory(self, name: str) -> list[str]:
        """Return the names in a directory, uncached; empty if the directory does not exist."""

    def entries(self) -> dict[str, object]:
        """Return the names in the run directory, read afresh, each with its identity.

        Another directory of the same name has another identity; None means that it has none.
        """
        return {name: None for name in self.list_directory("")}  # noqa: C420 - typed so

    @abstractmethod
    def read(self, path: str, max_nbytes: int) -> bytes | None:
        """Return a small file's content, None if missing; raise if it exceeds ``max_nbytes``."""

    @abstractmethod
    def open(self, path: str) -> AbstractContextManager[InputFile]:
        """Open a file for reading, without the page cache if possible."""

    def location_of(self, name: str) -> str:
        """Return the full path or URL of a directory's files, for other tools."""
        return f"{self.root}/{name}"

    def hold(self, name: str, marker: str) -> None:
        """Keep a directory readable while it is deleted or replaced, if the storage can do that."""
        return

    @abstractmethod
    def close(self) -> None:
        """Release the run directory; idempotent."""


class Storage(ReadStorage):
    """One run directory, opened for writing."""

    round_trip_s = 0.0
    """Approximate latency of a request, which also costs money; 0 if operations are syscalls."""
    fences = False
    """Whether :meth:`take_over` fences earlier holders; then the lease needs no check for that."""

    def has_passed_on(self) -> bool:
        """Whether another session is known to have taken over since :meth:`take_over`.

        Sends no request.
        """
        return False

    def take_over(self, session: str) -> None:
        """Fence earlier holders: from now on they cannot rename. The caller must hold the lease.

        Does nothing on a file system, where recovery renames the directories that an earlier
        session might still finish.
        """
        return

    def settle(self, *, alone: bool = True) -> None:
        """Treat everything that earlier sessions left, and that was not renamed by now, as removed.

        Pass ``alone=False`` if other processes of this session create directories too.
        """
        return

    def check_root(self) -> None:
        """Raise ``WriteError`` with the reason if :attr:`root` no longer is the open directory."""
        return

    @abstractmethod
    def free_nbytes(self) -> int:
        """Return the bytes that an unprivileged user can still write; huge if unknown."""

    @abstractmethod
    def make_directory(self, name: str, mode: int) -> bool:
        """Create a directory or a folder in it (``directory/folder``); return False if it exists.

        Durable after :meth:`sync_directory` of its parent. Object stores ignore folders.
        """

    @abstractmethod
    def create(self, path: str, nbytes: int, final: str | None = None) -> OutputFile:
        """Create a new file, with ``nbytes`` reserved if possible; never replaces an existing file.

        ``final`` is the name that :meth:`publish` will give it: object stores write there directly.
        """

    @abstractmethod
    def publish(self, temporary: str, final: str) -> bool:
        """Give a finished file its final name; if that is taken, change nothing and return False.

        Durable after :meth:`sync_directory`.
        """

    def link(self, old: str, new: str) -> bool:
        """Give a finished, immutable file a second name; an object store copies the object instead.

        Returns False, without a change, if ``old`` does not exist, ``new`` is taken, or the storage
        cannot link: then the caller writes the bytes. Durable after :meth:`sync_directory`.
        """
        return False

    @abstractmethod
    def replace(self, path: str, data: bytes) -> None:
        """Replace a small file's content atomically and durably; the file need not exist."""

    @abstractmethod
    def rename_directory(self, source: str, target: str) -> None:
        """Rename a directory; ``target`` must not exist.

        Durable after :meth:`sync_directory` of the parent.
        """

    def rename_directories(self, names: Mapping[str, str]) -> None:
        """Rename each key to its value, like :meth:`rename_directory`; in a store all at once."""
        for source, target in names.items():
            self.rename_directory(source, target)

    def exchange_directory(self, source: str, target: str, aside: str) -> None:
        """Rename ``target`` to ``aside``, which must not exist, and ``source`` to ``target``.

        Durable as a rename is. This implementation takes two steps and undoes the first if the
        second fails. Readers and the next start find the old directory under ``aside`` as well.
        """
        self.rename_directory(target, aside)
        try:
            self.rename_directory(source, target)
        except WriteError:
            with contextlib.suppress(WriteError):
                self.rename_directory(aside, target)
            raise

    @abstractmethod
    def open_to_readers(self, name: str) -> None:
        """Give a private directory the mode that the umask allows."""

    @abstractmethod
    def sync_directory(self, name: str) -> None:
        """Make the entries of a directory durable; ``""`` is the run directory itself."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file; no error if it does not exist."""

    @abstractmethod
    def remove_tree(self, name: str) -> None:
        """Remove one of our directories with its content, if it exists; follows no links."""

    def lock(self, path: str) -> Callable[[], None] | None:
        """Lock a file exclusively; return a function that unlocks it.

        The end of this process unlocks it too. Returns None, without locking, if a lock would not
        exclude all other writers, as on network file systems.
        """
        return None

    def is_locked(self, path: str) -> bool | None:
        """Whether a process holds :meth:`lock` on a file; None if locks are not reliable here."""
        return None

    def share(self, path: str) -> Callable[[], None] | None:
        """Lock a file for sharing, which prevents :meth:`lock`; return a function that unlocks it.

        Several processes may do so at a time, also with read permission only. The end of this
        process unlocks too. Returns None, without locking, if :meth:`lock` does so or the system
        has no locks. Raises EAGAIN if the file stays locked for more than a moment.
        """
        return None

    def is_shared(self, path: str) -> bool | None:
        """Whether a process holds :meth:`share` on a file; None if locks are not reliable here."""
        return None

    @contextlib.contextmanager
    def creating(self, path: str, nbytes: int, final: str | None = None) -> Generator[OutputFile]:
        """Call :meth:`create`; the file is closed at the end of the ``with`` block."""
        file = self.create(path, nbytes, final)
        try:
            yield file
        finally:
            file.close()

    def publish_bytes(self, directory: str, name: str, data: bytes, attempt: str) -> None:
        """Write a small file atomically; idempotent.

        ``attempt`` distinguishes the temporary names of different writers. Raises ``WriteError``
        (EEXIST) if the name is taken by a file with other content.
        """
        parent = f"{directory}/" if directory else ""
        temporary, final = f"{parent}.{temporary_part(name)}.{attempt}", f"{parent}{name}"
        folder = final.rpartition("/")[0]
        if folder != directory:
            self.make_directory(folder, FOLDER_MODE)
        with self.creating(temporary, len(data), final) as output:
            output.write_all(data)
        if not self.publish(temporary, final):
            self.remove(temporary)
            if self.read(final, len(data) + 1) != data:
                raise WriteError(
                    errno.EEXIST,
                    "another file has this name, with other content",
                    f"{self.root}/{final}",
                )
        if folder != directory:
            self.sync_directory(folder)


FOLDER_MODE: Final = 0o777
"""Mode before the umask of folders in a checkpoint's directory, itself private until the commit."""


def temporary_part(name: str) -> str:
    """Return a file's name for use in a temporary name, without folders."""
    return name.replace("/", "~")  # no file name contains "~"
