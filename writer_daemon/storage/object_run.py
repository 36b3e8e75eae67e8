"""A run directory in an object store, for who writes: a key for each file, and a log for the names of directories.

What a file system does by renaming the log does by an entry: a save's prefix becomes ``step-XXXXXXXX``, a deleted step
leads nowhere. So the order of a commit, its recovery and its fencing are those of any storage. A name whose prefix has
been given to another one, or was dropped, leads nowhere: who has been away finds nothing there to spoil.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import threading
from collections.abc import Generator, Iterable, Mapping
from typing import Any, Final

from sidesave.errors import IntegrityError, WriteError
from sidesave.writer_daemon.storage.base import InputFile, OutputFile, Storage
from sidesave.writer_daemon.storage.remote import ObjectStorage
from sidesave.writer_daemon.storage.run_log import LOG, Names, RunLog, session_of
from sidesave.writer_daemon.storage.upload import BUFFERED_NBYTES, BufferedOutput, StreamedOutput

logger = logging.getLogger(__name__)

MARK: Final = ".directory"
"""The object that stands for a directory as such; a prefix without objects is nothing."""
_MANIFEST: Final = "manifest.json"
"""What makes a checkpoint of a directory's files."""
_PARTIAL: Final = re.compile(r"\.(step-\d+\.[^/]+)\.partial")
_PREFIX: Final = re.compile(r"step-\d+\.[^/]+")
_NAMED: Final = re.compile(r"\.?step-\d+(\.[^/]+)?")
"""Directories that a log may lead elsewhere."""
_NOWHERE: Final = f"{LOG}/nowhere"
"""There is never an object below this."""
_PLENTY_NBYTES: Final = 1 << 62


class NamedObjects(ObjectStorage):
    """A prefix in an object store whose directories have their names from a log, where there is one."""

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        super().__init__(root, options)
        self.log = RunLog(self.bucket)
        self._names = Names()

    def list_directory(self, name: str) -> list[str]:
        if name or not self.can_list:  # which is refused there
            entries = super().list_directory(name)
            entries = super().list_directory(name) if not entries and self._has_moved(name) else entries
            return [each for each in entries if each != MARK]
        levels, objects = self.bucket.list_level("")
        has_log = LOG in levels or self.log.holds
        names = self._look() if has_log else Names()
        if not names.number:
            self._require_log(levels)
        return [*(_told(names, levels) if has_log else levels), *objects]

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

    def location_of(self, name: str) -> str:
        return self.bucket.full(self.key_of(name))

    def key_of(self, path: str) -> str:
        name, slash, rest = path.partition("/")
        return self._prefix_of(name) + slash + rest

    def _prefix_of(self, name: str) -> str:
        """Where a directory's objects lie, as far as that is known."""
        names = self._names
        if name in names.prefixes:
            return names.prefixes[name]
        if _PREFIX.fullmatch(name):  # it is meant as such
            return name
        prefix = _native(name)
        gone = names.lead_to(prefix) or prefix in names.dropped or (prefix != name and not names.counts(prefix))
        return _NOWHERE if gone else prefix

    def _look(self) -> Names:
        self._names = self.log.look()
        return self._names

    def _require_log(self, levels: Iterable[str]) -> None:
        """Raise ``IntegrityError`` where there is no log, and a whole checkpoint that one must have named."""
        for prefix in filter(session_of, levels):
            if self.bucket.nbytes_of(f"{prefix}/{_MANIFEST}") is not None and not self._look().number:
                text = (
                    f"{self.bucket.full(LOG)}: the log of this run is missing, without which {prefix}, which is whole,"
                )
                hint = "is no checkpoint: put the log back as it was, or choose another place; nothing was changed"
                raise IntegrityError(f"{text} {hint}")

    def _has_moved(self, path: str) -> bool:
        """Whether a directory, in which something was not found, lies elsewhere by what the log says now."""
        if not self.can_list or not _NAMED.fullmatch(path.partition("/")[0]):
            return False
        before = self.key_of(path)
        self._look()
        return self.key_of(path) != before


class ObjectRun(NamedObjects, Storage):
    """The same, for who writes. Names are changed by who has taken over, and by nobody else.

    Daemons of other ranks do not take over: they make the directories of their own session's saves, put their files
    there, and see in the log what rank 0's daemon has made of them.
    """

    round_trip_s = 0.05
    fences = True

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        super().__init__(root, options)
        self._unpublished: dict[str, BufferedOutput | StreamedOutput] = {}
        self._known: set[str] = set()
        """Prefixes that are there as directories."""
        self._levels: set[str] | None = None
        """The prefixes that there were when this run was settled: from then on nobody but this session makes one that
        counts."""
        self._alone = False
        self._garbage: set[str] = set()
        """Prefixes that lead nowhere and whose objects could not be removed."""
        self._lock = threading.Lock()
        self._taken_over = False

    def take_over(self, session: str) -> None:
        self.log.take_over(session, lambda: self._require_log(self.bucket.list_level("")[0]))
        self._taken_over = True
        self._look()

    def has_passed_on(self) -> bool:
        return self._taken_over and not self.log.holds

    def settle(self, *, alone: bool = True) -> None:
        self._alone = alone
        judged = self.log.settle()
        names = self._look()
        levels, _ = self.bucket.list_level("")
        self._levels = {*levels}
        over = {each for each in levels if session_of(each) in judged or each in names.dropped}
        self._garbage |= {each for each in over if not names.lead_to(each)}
        try:
            self._remove_garbage()
        except WriteError as error:
            logger.warning("left for the next time: %s", error)

    def free_nbytes(self) -> int:
        return _PLENTY_NBYTES

    def list_directory(self, name: str) -> list[str]:
        """Names in a directory; once all is settled those of the run are its directories alone, without a request.

        One request where other ranks make some as well.
        """
        if name and self._is_absent(name):
            return []
        if not name and self._levels is not None:
            names = self._look()
            if self.log.holds:
                if not self._alone:
                    self._levels = {*self.bucket.list_level("")[0]}
                return _told(names, {*self._levels, *self._known})
        with self._lock:
            parents = [path.rpartition("/") for path in self._unpublished]
        return [*super().list_directory(name), *(entry for parent, _, entry in parents if parent == name)]

    # Directories -----------------------------------------------------------------------------------------------

    def make_directory(self, name: str, mode: int) -> bool:
        names = self._look()
        if name in names.prefixes and self._is_directory(name):
            return False
        prefix = self.key_of(name)  # also one that got its name, and whose mark the store then refused
        if prefix == _NOWHERE and not self._taken_over:
            text = "this save was given up: its rank 0 has told so, or another session has the run"
            raise WriteError(errno.ECONNABORTED, text, self.bucket.full(name))
        if prefix == _NOWHERE:  # of what had this name before
            prefix = f"{_native(name)}.{names.number + 1}"
            self.log.change({name: prefix})
            self._look()
        is_new = self.bucket.create(f"{prefix}/{MARK}", b"")
        self._known.add(prefix)
        return is_new

    def rename_directory(self, source: str, target: str) -> None:
        self._look()
        self._require_free(target)
        self._rename({source: None, target: self._require_directory(source, "rename")})

    def exchange_directory(self, source: str, target: str, aside: str) -> None:
        self._look()
        self._require_free(aside)
        old, new = self._require_directory(target, "rename"), self._require_directory(source, "rename")
        self._rename({source: None, aside: old, target: new})

    def _rename(self, changes: Mapping[str, str | None]) -> None:
        self.log.change(changes)
        self._look()
        with self._lock:  # files that nobody will give a name any more
            for path in [path for path in self._unpublished if changes.get(path.rpartition("/")[0], "") is None]:
                del self._unpublished[path]

    def _require_free(self, name: str) -> None:
        prefix = self.key_of(name)
        there = prefix != _NOWHERE and not self._is_absent(name) and self.bucket.has_any(prefix)
        if name in self._names.prefixes or there:
            raise WriteError(errno.EEXIST, "cannot rename to a name that is taken", self.bucket.full(name))

    def _require_directory(self, name: str, doing: str) -> str:
        """Its prefix; where it has none, ``WriteError``."""
        if name not in self._names.prefixes and not self._is_directory(name):
            raise WriteError(errno.ENOENT, f"cannot {doing}: there is no such directory", self.bucket.full(name))
        return self.key_of(name)

    def open_to_readers(self, name: str) -> None:
        return  # who may read is said of the bucket

    def sync_directory(self, name: str) -> None:
        if name:
            self._require_directory(name, "sync")

    def remove_tree(self, name: str) -> None:
        names = self._look()
        prefix = self.key_of(name)
        if prefix not in self._garbage and self._is_absent(name):
            return
        if not self.log.holds and not (self._taken_over and names.counts(_native(name))):
            # What another rank removes lacks its record, and what has been away counts no more: it becomes nothing.
            prefix = _native(name)
            if name in names.prefixes or names.lead_to(prefix):
                return
        elif name in names.prefixes or (_PREFIX.fullmatch(prefix) and self._is_directory(name)):
            # Before its objects go: who has been away may mean what is another's checkpoint by now.
            self.log.change({name: None}, [prefix])
            self._look()
        with self._lock:
            for path in [path for path in self._unpublished if path.startswith(f"{name}/")]:
                del self._unpublished[path]
        if prefix == _NOWHERE:
            return
        self._known.discard(prefix)
        self._garbage.add(prefix)
        self._remove_garbage()

    def _remove_garbage(self) -> None:
        for prefix in list(self._garbage):
            self.bucket.remove(self.bucket.list_all(prefix))
            self._garbage.discard(prefix)
            if self._levels is not None:
                self._levels.discard(prefix)

    def _is_absent(self, name: str) -> bool:
        """Whether a directory is known not to be there; false also where that would have to be asked."""
        if self._levels is None:
            return False
        led_to = self._look().prefixes.values()
        return self.log.holds and self.key_of(name) not in {*led_to, *self._levels, *self._known}

    def _is_directory(self, name: str) -> bool:
        prefix = self.key_of(name)
        if prefix not in self._known and prefix != _NOWHERE and self.bucket.has_any(prefix):
            self._known.add(prefix)
        return prefix in self._known

    # Files -----------------------------------------------------------------------------------------------------

    def create(self, path: str, nbytes: int, final: str | None = None) -> OutputFile:
        directory = path.rpartition("/")[0]
        key = self.key_of(final or path)
        # Asked afterwards: what another thread has seen renamed meanwhile is no directory any more.
        if directory and not self._is_directory(directory):
            text = f"cannot create a file of {nbytes:,} bytes: there is no such directory"
            raise WriteError(errno.ENOENT, text, self.bucket.full(path))
        if final is None and self.bucket.nbytes_of(key) is not None:
            raise WriteError(errno.EEXIST, "cannot create: there is such a file", self.bucket.full(path))
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

    def link(self, old: str, new: str) -> bool:
        target = self.key_of(new)
        if self.bucket.nbytes_of(target) is not None:
            return False
        return self.bucket.copy(self.key_of(old), target)

    def replace(self, path: str, data: bytes) -> None:
        self.bucket.put(self.key_of(path), data)

    def remove(self, path: str) -> None:
        with self._lock:
            unpublished = self._unpublished.pop(path, None)
        if unpublished is None:
            self.bucket.remove([self.key_of(path)])


def _told(names: Names, levels: Iterable[str]) -> list[str]:
    """The directories of a run whose log says ``names``, and which has these prefixes."""
    led_to = {*names.prefixes.values(), *names.dropped, LOG}
    others = [each for each in levels if each not in led_to]
    saves = [f".{each}.partial" for each in others if _PREFIX.fullmatch(each) and names.counts(each)]
    return [*names.prefixes, *saves, *(each for each in others if not _PREFIX.fullmatch(each))]


def _native(name: str) -> str:
    """The prefix of a directory that the log says nothing of."""
    match = _PARTIAL.fullmatch(name)
    return match[1] if match else name
