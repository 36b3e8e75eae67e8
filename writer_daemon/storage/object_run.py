"""A run directory in an object store, for who writes: a key for each file, and a log for the names of directories.

What a file system does by renaming the log does by an entry: a save's prefix becomes ``step-XXXXXXXX``, a deleted step
leads nowhere. So the order of a commit, its recovery and its fencing are those of any storage.
"""

from __future__ import annotations

import contextlib
import errno
import re
import threading
from collections.abc import Generator, Mapping
from typing import Any, Final

from sidesave.errors import WriteError
from sidesave.writer_daemon.storage.base import InputFile, OutputFile, Storage
from sidesave.writer_daemon.storage.remote import ObjectStorage
from sidesave.writer_daemon.storage.run_log import LOG, Names, RunLog
from sidesave.writer_daemon.storage.upload import BUFFERED_NBYTES, BufferedOutput, StreamedOutput

MARK: Final = ".directory"
"""The object that stands for a directory as such; a prefix without objects is nothing."""
_PARTIAL: Final = re.compile(r"\.(step-\d+\.[^/]+)\.partial")
_PREFIX: Final = re.compile(r"step-\d+\.[^/]+")
_PLENTY_NBYTES: Final = 1 << 62


class NamedObjects(ObjectStorage):
    """A prefix in an object store whose directories have their names from a log, where there is one."""

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        super().__init__(root, options)
        self.log = RunLog(self.bucket)
        self._names = Names()

    def list_directory(self, name: str) -> list[str]:
        if name:
            return [each for each in super().list_directory(name) if each != MARK]
        levels, objects = self.bucket.list_level("")
        if LOG not in levels and not self.log.holds:
            return [*levels, *objects]
        names = self._look()
        led_to = {*names.prefixes.values(), *names.dropped}
        others = [each for each in levels if each not in led_to and each != LOG]
        saves = [f".{each}.partial" for each in others if _PREFIX.fullmatch(each) and names.counts(each)]
        return [*names.prefixes, *saves, *(each for each in others if not _PREFIX.fullmatch(each)), *objects]

    def read(self, path: str, max_nbytes: int) -> bytes | None:
        data = super().read(path, max_nbytes)
        return super().read(path, max_nbytes) if data is None and self._has_moved(path) else data

    @contextlib.contextmanager
    def open(self, path: str) -> Generator[InputFile]:
        with contextlib.ExitStack() as opened:
            try:
                file = opened.enter_context(super().open(path))
            except WriteError as error:
                if error.errno != errno.ENOENT or not self._has_moved(path):
                    raise
                file = opened.enter_context(super().open(path))
            yield file

    def key_of(self, path: str) -> str:
        name, slash, rest = path.partition("/")
        return self.prefix_of(name) + slash + rest

    def prefix_of(self, name: str) -> str:
        """Where a directory's objects lie, as far as that is known."""
        return self._names.prefixes.get(name) or _native(name)

    def _look(self) -> Names:
        self._names = self.log.look()
        return self._names

    def _has_moved(self, path: str) -> bool:
        """Whether a directory, in which a file was not found, lies elsewhere by what the log says now."""
        if not self.can_list or "/" not in path:
            return False
        before = self.key_of(path)
        self._look()
        return self.key_of(path) != before


class ObjectRun(NamedObjects, Storage):
    """The same, for who writes. Names are changed by who has taken over, and by nobody else."""

    fences = True

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        super().__init__(root, options)
        self._unpublished: dict[str, BufferedOutput | StreamedOutput] = {}
        self._known: set[str] = set()
        """Prefixes that are there as directories."""
        self._lock = threading.Lock()
        self._taken_over = False

    def take_over(self, session: str) -> None:
        self.log.take_over(session)
        self._taken_over = True
        self._look()

    def has_passed_on(self) -> bool:
        return self._taken_over and not self.log.holds

    def settle(self) -> None:
        self.log.settle()
        self._look()

    def free_nbytes(self) -> int:
        return _PLENTY_NBYTES

    def list_directory(self, name: str) -> list[str]:
        with self._lock:
            parents = [path.rpartition("/") for path in self._unpublished]
        return [*super().list_directory(name), *(entry for parent, _, entry in parents if parent == name)]

    # Directories -----------------------------------------------------------------------------------------------

    def make_directory(self, name: str, mode: int) -> bool:
        names = self._look()
        if name in names.prefixes:
            return False
        prefix = _native(name)
        if prefix in names.prefixes.values() or prefix in names.dropped:  # of what had this name before
            prefix = f"{prefix}.{names.number + 1}"
            self.log.change({name: prefix})
            self._look()
        self._known.add(prefix)
        return self.bucket.create(f"{prefix}/{MARK}", b"")

    def rename_directory(self, source: str, target: str) -> None:
        names = self._look()
        prefix = self.prefix_of(source)
        if target in names.prefixes or self._is_taken(target, names):
            raise WriteError(errno.EEXIST, "cannot rename to a name that is taken", self.bucket.full(target))
        if source not in names.prefixes and not self.bucket.has_any(prefix):
            raise WriteError(errno.ENOENT, "cannot rename: there is no such directory", self.bucket.full(source))
        self.log.change({source: None, target: prefix})
        self._look()

    def _is_taken(self, name: str, names: Names) -> bool:
        """Whether a name leads somewhere without the log."""
        prefix = _native(name)
        if prefix in names.prefixes.values() or prefix in names.dropped:
            return False
        return self.bucket.has_any(prefix)

    def open_to_readers(self, name: str) -> None:
        return  # who may read is said of the bucket

    def sync_directory(self, name: str) -> None:
        if name and not self._is_directory(name):
            raise WriteError(errno.ENOENT, "cannot sync: there is no such directory", self.bucket.full(name))

    def remove_tree(self, name: str) -> None:
        names = self._look()
        prefix = self.prefix_of(name)
        self.bucket.remove([*self.bucket.list_all(prefix), name])
        self._known.discard(prefix)
        if name in names.prefixes:
            self.log.change({name: None}, [prefix])
            self._look()

    def _is_directory(self, name: str) -> bool:
        prefix = self.prefix_of(name)
        if prefix not in self._known and self.bucket.has_any(prefix):
            self._known.add(prefix)
        return prefix in self._known

    # Files -----------------------------------------------------------------------------------------------------

    def create(self, path: str, nbytes: int, final: str | None = None) -> OutputFile:
        directory = path.rpartition("/")[0]
        if directory and not self._is_directory(directory):
            text = f"cannot create a file of {nbytes:,} bytes: there is no such directory"
            raise WriteError(errno.ENOENT, text, self.bucket.full(path))
        key = self.key_of(final or path)
        if nbytes > BUFFERED_NBYTES:
            output = StreamedOutput(self.bucket, key, nbytes)
        else:
            output = BufferedOutput(self.bucket, key, published=final is None)
        if final is not None:
            with self._lock:
                self._unpublished[path] = output
        return output

    def publish(self, temporary: str, final: str) -> bool:
        with self._lock:
            output = self._unpublished.get(temporary)
        if output is None:
            raise WriteError(errno.ENOENT, "cannot publish what is not there", self.bucket.full(temporary))
        if not output.publish():
            return False
        with self._lock:
            self._unpublished.pop(temporary, None)
        return True

    def replace(self, path: str, data: bytes) -> None:
        self.bucket.put(self.key_of(path), data)

    def remove(self, path: str) -> None:
        with self._lock:
            unpublished = self._unpublished.pop(path, None)
        if unpublished is None:
            self.bucket.remove([self.key_of(path)])


def _native(name: str) -> str:
    """The prefix of a directory that the log says nothing of."""
    match = _PARTIAL.fullmatch(name)
    return match[1] if match else name
