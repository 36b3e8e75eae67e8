"""A run directory in an object store: one key for each file, a log for the names of directories.

An entry of the log replaces a file system's rename: it gives a save's prefix the name
``step-XXXXXXXX``, or removes the name of a deleted step. So commit, recovery and fencing work as on
other storage. A name whose prefix was given to another name, or was dropped, has no objects: a
process that was suspended cannot change another session's files through it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import threading
from collections.abc import Generator, Iterable, Mapping
from typing import Any, Final

from sidesave.errors import CheckpointReplacedError, IntegrityError, WriteError
from sidesave.writer_daemon.storage.base import InputFile, OutputFile, Storage
from sidesave.writer_daemon.storage.log_entry import LogState, session_of
from sidesave.writer_daemon.storage.remote import ObjectStorage
from sidesave.writer_daemon.storage.run_log import LOG, RunLog
from sidesave.writer_daemon.storage.upload import BUFFERED_NBYTES, BufferedOutput, StreamedOutput

logger = logging.getLogger(__name__)

MARK: Final = ".directory"
"""The object that makes an empty directory exist; a prefix without objects does not."""
_MANIFEST: Final = "manifest.json"
"""The file that makes a directory a complete checkpoint."""
_PARTIAL: Final = re.compile(r"\.(step-\d+\.[^/]+)\.partial")
_PREFIX: Final = re.compile(r"step-\d+\.[^/]+")
_NAMED: Final = re.compile(r"\.?step-\d+(\.[^/]+)?")
"""Names of directories that a log may map to another prefix."""
_NOWHERE: Final = f"{LOG}/nowhere"
"""A prefix without objects, for names that have none."""
_PLENTY_NBYTES: Final = 1 << 62
_MAX_MOVES: Final = 20
"""Number of times that a reader follows a directory that is replaced while it is read."""


class NamedObjects(ObjectStorage):
    """A prefix in an object store; its log, if any, maps names of directories to prefixes."""

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        super().__init__(root, options)
        self.log = RunLog(self.bucket)
        self._held: set[str] = set()
        self._pinned: dict[str, str] = {}
        """Prefixes of held directories since their first read, so that two saves are not mixed."""

    def hold(self, name: str, marker: str) -> None:
        self._held.add(name)

    def list_directory(self, name: str) -> list[str]:
        if name or not self.can_list:  # in which case the base class raises
            entries = super().list_directory(name)
            if (
                not entries
                and name not in self._pinned
                and self._has_moved(name, self.key_of(name))
            ):
                entries = super().list_directory(name)
            return [each for each in entries if each != MARK]
        levels, objects = self.bucket.list_level("")
        has_log = LOG in levels or self.log.holds
        names = self.log.look() if has_log else LogState()
        if not names.number:
            self._require_log(levels)
        return [*(_directories(names, levels) if has_log else levels), *objects]

    def entries(self) -> dict[str, object]:
        names = self.list_directory("")
        prefixes = self.log.state.prefixes  # each of one save
        return {name: prefixes.get(name) for name in names}

    def read(self, path: str, max_nbytes: int) -> bytes | None:
        name, tries = path.partition("/")[0], 0
        while True:
            prefix = self._prefix_of(name)
            key = prefix + path.removeprefix(name)
            data = self.bucket.read(key, max_nbytes)
            tries += 1
            if data is not None or tries == _MAX_MOVES or not self._has_moved(path, key):
                break
            self._refuse_replaced(path)
        if data is not None and name in self._held:
            self._pinned.setdefault(name, prefix)
        return data

    @contextlib.contextmanager
    def open(self, path: str) -> Generator[InputFile]:
        with contextlib.ExitStack() as opened:
            key = self.key_of(path)
            try:
                file = opened.enter_context(super().open(path))
            except WriteError as error:
                if error.errno != errno.ENOENT or not self._has_moved(path, key):
                    raise
                self._refuse_replaced(path)
                file = opened.enter_context(super().open(path))
            yield file

    def read_into(self, path: str, offset: int, window: memoryview) -> int:
        key = self.key_of(path)
        try:
            return self.bucket.read_into(key, offset, window)[0]
        except WriteError as error:
            if error.errno == errno.ENOENT and self._has_moved(path, key):
                self._refuse_replaced(path)
            raise

    def location_of(self, name: str) -> str:
        return self.bucket.full(self.key_of(name))

    def key_of(self, path: str) -> str:
        name, slash, rest = path.partition("/")
        return self._prefix_of(name) + slash + rest

    def _prefix_of(self, name: str) -> str:
        """Return a directory's prefix by the last read log; a held directory keeps its prefix."""
        return self._pinned.get(name) or self._prefix_in_log(name)

    def _prefix_in_log(self, name: str) -> str:
        names = self.log.state
        if name in names.prefixes:
            return names.prefixes[name]
        if _PREFIX.fullmatch(name):  # the name is a prefix itself
            return name
        prefix = _native(name)
        gone = (
            names.lead_to(prefix)
            or prefix in names.dropped
            or (prefix != name and not names.counts(prefix))
        )
        return _NOWHERE if gone else prefix

    def _require_log(self, levels: Iterable[str]) -> None:
        """Raise ``IntegrityError`` if there is no log but a complete checkpoint that needed one."""
        for prefix in filter(session_of, levels):
            if (
                self.bucket.nbytes_of(f"{prefix}/{_MANIFEST}") is not None
                and not self.log.look().number
            ):
                text = f"the log of this run is missing, but {prefix} holds a complete save"
                hint = "restore the log, or use another run directory; nothing was changed"
                raise IntegrityError(f"{self.bucket.full(LOG)}: {text}: {hint}")

    def _has_moved(self, path: str, key: str) -> bool:
        """Return whether, by the current log, the missing ``key`` is no longer that of ``path``."""
        name = path.partition("/")[0]
        if not self.can_list or not _NAMED.fullmatch(name):
            return False
        self.log.look()
        return self._prefix_in_log(name) + path.removeprefix(name) != key

    def _refuse_replaced(self, path: str) -> None:
        if path.partition("/")[0] in self._pinned:
            text = "the checkpoint was replaced or deleted while it was being read: read it again"
            raise CheckpointReplacedError(errno.ESTALE, text, f"{self.root}/{path}")


class ObjectRun(NamedObjects, Storage):
    """A run directory in an object store, for writing.

    Only the daemon that has taken over changes names. Daemons of other ranks do not take over: they
    create the directories of their own session's saves, write their files there, and learn from the
    log which of them rank 0's daemon has renamed.
    """

    round_trip_s = 0.05
    fences = True

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        super().__init__(root, options)
        self._unpublished: dict[str, BufferedOutput | StreamedOutput] = {}
        self._known: set[str] = set()
        """Prefixes of existing directories."""
        self._levels: set[str] | None = None
        """The prefixes when this run was settled; later only this session's new prefixes count."""
        self._alone = False
        self._garbage: set[str] = set()
        """Prefixes without a name whose objects are not removed yet."""
        self._lock = threading.Lock()
        self._taken_over = False

    def take_over(self, session: str) -> None:
        self.log.take_over(session, lambda: self._require_log(self.bucket.list_level("")[0]))
        self._taken_over = True

    def has_passed_on(self) -> bool:
        return self._taken_over and not self.log.holds

    def settle(self, *, alone: bool = True) -> None:
        self._alone = alone
        judged = self.log.settle()
        names = self.log.look()
        levels, _ = self.bucket.list_level("")
        self._levels = {*levels}
        over = {each for each in levels if session_of(each) in judged or each in names.dropped}
        self._garbage |= {each for each in over if not names.lead_to(each)}
        try:
            self._remove_garbage()
        except WriteError as error:
            logger.warning(
                "cannot remove unfinished saves; the next session tries again: %s", error
            )

    def free_nbytes(self) -> int:
        return _PLENTY_NBYTES

    def list_directory(self, name: str) -> list[str]:
        """Return the names in a directory.

        After :meth:`settle` the run's own listing has only directories, and needs no request, or
        one if other ranks create directories too.
        """
        if name and self._is_absent(name.partition("/")[0]):
            return []
        if not name and self._levels is not None:
            names = self.log.look()
            if self.log.holds:
                if not self._alone:
                    self._levels = {*self.bucket.list_level("")[0]}
                return _directories(names, {*self._levels, *self._known})
        with self._lock:
            parents = [path.rpartition("/") for path in self._unpublished]
        return [
            *super().list_directory(name),
            *(entry for parent, _, entry in parents if parent == name),
        ]

    # Directories ----------------------------------------------------------------------------------

    def make_directory(self, name: str, mode: int) -> bool:
        if "/" in name:  # folders are only part of the files' keys
            return False
        names = self.log.look()
        if name in names.prefixes and self._is_directory(name):
            return False
        prefix = self.key_of(name)  # may have a name already, if creating its mark failed
        if prefix == _NOWHERE and not self._taken_over:
            text = (
                "this save was aborted: by rank 0, or because another session has taken over the "
                "run"
            )
            raise WriteError(errno.ECONNABORTED, text, self.bucket.full(name))
        if prefix == _NOWHERE:  # an earlier directory had this name
            prefix = f"{_native(name)}.{names.number + 1}"
            self.log.change({name: prefix})
        is_new = self.bucket.create(f"{prefix}/{MARK}", b"")
        self._known.add(prefix)
        return is_new

    def rename_directory(self, source: str, target: str) -> None:
        self.log.look()
        self._require_free(target)
        self._rename({source: None, target: self._require_directory(source, "rename")})

    def rename_directories(self, names: Mapping[str, str]) -> None:
        self.log.look()
        changes: dict[str, str | None] = {}
        for source, target in names.items():
            self._require_free(target)
            changes |= {source: None, target: self._require_directory(source, "rename")}
        self._rename(changes)

    def exchange_directory(self, source: str, target: str, aside: str) -> None:
        self.log.look()
        self._require_free(aside)
        old, new = (
            self._require_directory(target, "rename"),
            self._require_directory(source, "rename"),
        )
        self._rename({source: None, aside: old, target: new})

    def _rename(self, changes: Mapping[str, str | None]) -> None:
        self.log.change(changes)
        with self._lock:  # these files can no longer be published
            for path in [
                path
                for path in self._unpublished
                if changes.get(path.rpartition("/")[0], "") is None
            ]:
                del self._unpublished[path]

    def _require_free(self, name: str) -> None:
        prefix = self.key_of(name)
        exists = prefix != _NOWHERE and not self._is_absent(name) and self.bucket.has_any(prefix)
        if name in self.log.state.prefixes or exists:
            raise WriteError(
                errno.EEXIST, "cannot rename to a name that is taken", self.bucket.full(name)
            )

    def _require_directory(self, name: str, doing: str) -> str:
        """Return a directory's prefix; raises ``WriteError`` if it does not exist."""
        if name not in self.log.state.prefixes and not self._is_directory(name):
            raise WriteError(
                errno.ENOENT, f"cannot {doing}: no such directory", self.bucket.full(name)
            )
        return self.key_of(name)

    def open_to_readers(self, name: str) -> None:
        return  # permissions are set for the whole bucket

    def sync_directory(self, name: str) -> None:
        if name:
            self._require_directory(name.partition("/")[0], "sync")

    def remove_tree(self, name: str) -> None:
        names = self.log.look()
        prefix = self.key_of(name)
        if prefix not in self._garbage and self._is_absent(name):
            return
        if not self.log.holds and not (self._taken_over and names.counts(_native(name))):
            # Another rank's daemon removes only saves that lack its record, and one that was
            # suspended removes only prefixes that no longer count.
            prefix = _native(name)
            if name in names.prefixes or names.lead_to(prefix):
                return
        elif name in names.prefixes or (_PREFIX.fullmatch(prefix) and self._is_directory(name)):
            # Before its objects are removed: if this process was suspended, the name may now belong
            # to another session's checkpoint.
            self.log.change({name: None}, [prefix])
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
        """Whether a directory is known not to exist; false if that would need a request."""
        if self._levels is None:
            return False
        led_to = self.log.look().prefixes.values()
        return self.log.holds and self.key_of(name) not in {*led_to, *self._levels, *self._known}

    def _is_directory(self, name: str) -> bool:
        prefix = self.key_of(name)
        if prefix not in self._known and prefix != _NOWHERE and self.bucket.has_any(prefix):
            self._known.add(prefix)
        return prefix in self._known

    # Files ----------------------------------------------------------------------------------------

    def create(self, path: str, nbytes: int, final: str | None = None) -> OutputFile:
        directory = path.partition("/")[0] if "/" in path else ""
        key = self.key_of(final or path)
        # Checked after `key_of`: another thread may have noticed that the directory was renamed.
        if directory and not self._is_directory(directory):
            text = f"cannot create a file of {nbytes:,} bytes: no such directory"
            raise WriteError(errno.ENOENT, text, self.bucket.full(path))
        if final is None and self.bucket.nbytes_of(key) is not None:
            raise WriteError(errno.EEXIST, "cannot create: the file exists", self.bucket.full(path))
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
            raise WriteError(
                errno.ENOENT, "cannot publish: no such file", self.bucket.full(temporary)
            )
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


def _directories(state: LogState, levels: Iterable[str]) -> list[str]:
    """Return the directories of a run, given the state of its log and its prefixes."""
    mapped = {*state.prefixes.values(), *state.dropped, LOG}
    unmapped = [each for each in levels if each not in mapped]
    saves = [
        f".{each}.partial" for each in unmapped if _PREFIX.fullmatch(each) and state.counts(each)
    ]
    return [*state.prefixes, *saves, *(each for each in unmapped if not _PREFIX.fullmatch(each))]


def _native(name: str) -> str:
    """Return the default prefix of a directory, which it has if the log does not mention it."""
    match = _PARTIAL.fullmatch(name)
    return match[1] if match else name
