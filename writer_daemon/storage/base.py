"""The storage of a run directory as readers and the writer see it: few operations, each with its durability stated.

Paths are relative to the run directory: ``name`` or ``directory/name``. Every operation raises ``WriteError`` (or a
subclass) with errno and the full path, and may be repeated after a crash of the caller.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager

from sidesave.errors import WriteError
from sidesave.stager.memory.arena import page_up


class OutputFile(ABC):
    """A new file under an attempt name: written by several threads, then finished once."""

    @abstractmethod
    def write_at(self, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``, both multiples of 4096, from page-aligned memory.

        Thread-safe. May block until all before ``offset`` has been written, so each thread goes upwards.
        """

    @abstractmethod
    def finish(self, nbytes: int) -> None:
        """Cut the file to ``nbytes`` and make it durable. After an error, give the file up."""

    def write_all(self, data: bytes) -> None:
        """The content of a small file: :meth:`write_at` and :meth:`finish`."""
        view = memoryview(mmap.mmap(-1, max(page_up(len(data)), page_up(1))))  # not closed: an upload may still hold it
        view[: len(data)] = data
        self.write_at(view, 0)
        self.finish(len(data))

    @abstractmethod
    def close(self) -> None:
        """Release the descriptor; idempotent. Without :meth:`finish` before, the content means nothing."""


class InputFile(ABC):
    """A file being read; closed by its ``with`` block."""

    nbytes: int
    """The file's length when it was opened."""
    ahead = 1
    """How many pieces are worth asking for before the one that is waited for has come."""

    @abstractmethod
    def read_at(self, offset: int, nbytes: int) -> memoryview:
        """The bytes ``[offset, offset + nbytes)``, fewer where the file ends; valid until the next call. Blocking."""

    @abstractmethod
    def read_into(self, offset: int, window: memoryview) -> int:
        """Fill memory from ``offset`` on, both page-aligned; how many bytes there were, fewer where the file ends.

        Blocking. Several threads may do so at a time, and none may call :meth:`read_at` meanwhile.
        """

    def read_each(self, spans: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
        """:meth:`read_at` of each (offset, length), in their order; what is slow to answer is asked ahead."""
        return (self.read_at(*span) for span in spans)


class ReadStorage(ABC):
    """One run directory, for who only reads."""

    root: str
    """Full path or URL of the run directory, for messages."""
    can_list = True
    """Whether :meth:`list_directory` can tell; where it cannot it raises ``InvalidArgumentError``."""

    @abstractmethod
    def list_directory(self, name: str) -> list[str]:
        """Names in a directory, read afresh; empty when there is no such directory."""

    @abstractmethod
    def read(self, path: str, max_nbytes: int) -> bytes | None:
        """A small file's content, None when there is none; longer than ``max_nbytes`` is an error."""

    @abstractmethod
    def open(self, path: str) -> AbstractContextManager[InputFile]:
        """Open a file for reading from the medium, past the page cache where that can be had."""

    def location_of(self, name: str) -> str:
        """Where the files of a directory lie, for other tools: its full path or URL."""
        return f"{self.root}/{name}"

    def hold(self, name: str, marker: str) -> None:
        """Keep a directory readable while it is deleted or replaced, as far as that is possible here."""
        return

    @abstractmethod
    def close(self) -> None:
        """Release the run directory; idempotent."""


class Storage(ReadStorage):
    """One run directory, for who writes."""

    round_trip_s = 0.0
    """About how long an answer takes, where each is a request that has its price; 0 where it is a system call."""
    fences = False
    """Whether :meth:`take_over` keeps out who has taken over before, so that no look at a lease has to."""

    def has_passed_on(self) -> bool:
        """Whether somebody else is known to have taken over since :meth:`take_over`. Asks nothing."""
        return False

    def take_over(self, session: str) -> None:
        """Keep out who has taken over before: from here on it can rename nothing. To be called with the lease.

        Nothing on a file system, where a recovery renames what an earlier session might finish.
        """
        return

    def settle(self, *, alone: bool = True) -> None:
        """What other sessions have left and is not here under a new name by now counts as removed.

        Where this process is not ``alone`` others of its session make directories, too.
        """
        return

    def check_root(self) -> None:
        """Raise ``WriteError`` if :attr:`root` no longer leads to the opened directory, saying what happened."""
        return

    @abstractmethod
    def free_nbytes(self) -> int:
        """Bytes that an unprivileged user can still write, as far as the system tells."""

    @abstractmethod
    def make_directory(self, name: str, mode: int) -> bool:
        """Create a directory; False when it is there. Durable after :meth:`sync_directory` of its parent."""

    @abstractmethod
    def create(self, path: str, nbytes: int, final: str | None = None) -> OutputFile:
        """Make a new file and reserve ``nbytes`` for it where the system can; never replaces an existing one.

        ``final`` is the name that :meth:`publish` will give it, if any: a store that cannot rename writes there.
        """

    @abstractmethod
    def publish(self, temporary: str, final: str) -> bool:
        """Give a finished file its name, once: False when the name is taken (nothing is replaced).

        The temporary name is gone afterwards in the first case. Durable after :meth:`sync_directory`.
        """

    def link(self, old: str, new: str) -> bool:
        """Give a finished file, which nobody changes any more, a further name; of an object, have the store copy it.

        False, and nothing is done, where there is no ``old``, ``new`` is taken, or that cannot be done here: then the
        bytes have to be written. Durable after :meth:`sync_directory`.
        """
        return False

    @abstractmethod
    def replace(self, path: str, data: bytes) -> None:
        """Give a small file new content, at once and durably; the file need not be there."""

    @abstractmethod
    def rename_directory(self, source: str, target: str) -> None:
        """Rename a directory onto a name that must be free. Durable after :meth:`sync_directory` of the parent."""

    def exchange_directory(self, source: str, target: str, aside: str) -> None:
        """Rename ``target`` to ``aside``, which must be free, and ``source`` to ``target``; durable as a rename is.

        Here in two steps, the first of which is taken back where the second fails: readers, and the next start, find
        the old directory under its new name as well.
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
        """Remove a file; no error when it is not there."""

    @abstractmethod
    def remove_tree(self, name: str) -> None:
        """Remove a directory of ours and all in it, following no link; no error when it is not there."""

    def lock(self, path: str) -> Callable[[], None] | None:
        """Lock a file until the function that comes back is called or this process ends, however it does.

        None, and no lock, where that would not keep out everybody who can write here: on network file systems.
        """
        return None

    def is_locked(self, path: str) -> bool | None:
        """Whether somebody's :meth:`lock` is on a file; None where locks do not tell."""
        return None

    def share(self, path: str) -> Callable[[], None] | None:
        """Keep a file from being locked until the function that comes back is called or this process ends.

        Many may do so at a time, also who may only read. None, and nothing is kept, where :meth:`lock` gives None, or
        the system has no locks. Where somebody has locked the file for more than a moment that is an error, EAGAIN.
        """
        return None

    def is_shared(self, path: str) -> bool | None:
        """Whether somebody has a :meth:`share` in a file; None where locks do not tell."""
        return None

    @contextlib.contextmanager
    def creating(self, path: str, nbytes: int, final: str | None = None) -> Generator[OutputFile]:
        """:meth:`create`, closed at the end of the block."""
        file = self.create(path, nbytes, final)
        try:
            yield file
        finally:
            file.close()

    def publish_bytes(self, directory: str, name: str, data: bytes, attempt: str) -> None:
        """Give a directory a small file, once and whole; doing it twice does no harm.

        ``attempt`` tells the temporary names of different writers apart. Raises ``WriteError`` (EEXIST) where the name
        is taken by another content.
        """
        parent = f"{directory}/" if directory else ""
        temporary, final = f"{parent}.{name}.{attempt}", f"{parent}{name}"
        with self.creating(temporary, len(data), final) as output:
            output.write_all(data)
        if not self.publish(temporary, final):
            self.remove(temporary)
            if self.read(final, len(data) + 1) != data:
                raise WriteError(errno.EEXIST, "another file has this name, with other content", f"{self.root}/{final}")
