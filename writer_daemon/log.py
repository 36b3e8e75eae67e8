"""The outcome of every save: a small log in the run directory, one line per event.

Lines are appended without fsync, and a line that cannot be written fails no save. Only the daemon
writes the log, in its storage thread, under the lease. Each line begins with its own digest, so
that a torn or damaged one is left out and the others still count.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Final

from sidesave.errors import CheckpointNotFoundError, ProtocolError, SidesaveError, WriteError
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo, read_checkpoint
from sidesave.writer_daemon.format.names import parse_hidden_directory, step_directory
from sidesave.writer_daemon.protocol import Committed, Failed, Message, Note, Save, Written
from sidesave.writer_daemon.save_record import (
    SaveRecord,
    combine,
    failure,
    is_valid,
    shortened,
    wall_clock_s,
)
from sidesave.writer_daemon.storage import Descriptor, PosixStorage, Storage

logger = logging.getLogger(__name__)

HISTORY_FILE: Final = ".sidesave.history"
MAX_NBYTES: Final = 1 << 20
"""Size above which the older half is dropped.

A save takes some 700 bytes, and 300 once its lines have been merged.
"""
LOST: Final = "its session ended before it was committed"
_MAX_PENDING: Final = 1000


def read_history(root: str) -> list[SaveRecord]:
    """Return the records in the log of a run directory, by :func:`combine`.

    Returns an empty list if there is no readable log.
    """
    return _read(f"{root}/{HISTORY_FILE}")


def _read(path: str, directory: int | None = None) -> list[SaveRecord]:
    try:
        data = _read_tail(path, directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("cannot read %s: %s", path, error.strerror)
        return []
    return records_in(data, path)


def records_in(data: bytes, path: str) -> list[SaveRecord]:
    """Return the records in the content of a log, by :func:`combine`.

    Torn and damaged lines are left out.
    """
    records: list[SaveRecord] = []
    damaged = 0
    for line in filter(None, data.split(b"\n")):
        try:
            records.append(SaveRecord.from_line(line))
        except (ValueError, RecursionError):
            damaged += 1
    if damaged:
        logger.info("%s: %d lines are torn or damaged", path, damaged)
    return combine(records)


def _read_tail(path: str, directory: int | None) -> bytes:
    with (
        _open_regular(path, os.O_RDONLY, directory) as regular,
        open(regular.fileno(), "rb", closefd=False) as file,
    ):
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4 * MAX_NBYTES))
        return file.read(4 * MAX_NBYTES)


def _open_regular(path: str, flags: int, directory: int | None) -> Descriptor:
    """Open a regular file only: a pipe or a link must neither block nor lead elsewhere."""
    file = Descriptor(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, directory=directory)
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    raise OSError(errno.EINVAL, "it is no regular file", path)


class HistoryLog:
    """The log of a run directory, for its only writer."""

    def __init__(self, storage: PosixStorage) -> None:
        """Prepare a log; the first line opens it.

        It is opened at the place of ``storage`` by then, wherever that has been moved to.
        """
        self._storage = storage
        self._file: Descriptor | None = None
        self._pending: collections.deque[SaveRecord] = collections.deque(maxlen=_MAX_PENDING)
        self._limit = MAX_NBYTES
        self._complained = False

    def append(self, record: SaveRecord) -> None:
        """Add a line, with those that could not be written before; never raises ``OSError``."""
        self._pending.append(record)
        try:
            fd = self._open()
            while self._pending:
                line = self._pending[0].to_line()
                if os.write(fd, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._pending.popleft()
            if os.fstat(fd).st_size > self._limit:
                self._drop_older_half()
        except OSError as error:
            level = logging.DEBUG if self._complained else logging.WARNING
            self._complained = True
            path, why = f"{self._storage.root}/{HISTORY_FILE}", error.strerror
            logger.log(level, "%s cannot be kept, which does no harm to saves: %s", path, why)

    def records(self) -> list[SaveRecord]:
        """Its records, by :func:`combine`."""
        return _read(HISTORY_FILE, self._storage.descriptor)

    def _open(self) -> int:
        if self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0:
            # Another program has removed the file.
            self.close()
        if self._file is None:
            self._file = _open_regular(
                HISTORY_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, self._storage.descriptor
            )
        return self._file.fileno()

    def _drop_older_half(self) -> None:
        lines = [record.to_line() for record in self.records()]
        kept, room = len(lines), MAX_NBYTES // 2
        while kept and room >= len(lines[kept - 1]):
            kept -= 1
            room -= len(lines[kept])
        temporary, directory = f"{HISTORY_FILE}.new", self._storage.descriptor
        self._limit = 2 * MAX_NBYTES  # not with every line again where this fails
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)  # of a daemon that was killed
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with (
            _open_regular(temporary, flags, directory) as regular,
            open(regular.fileno(), "wb", closefd=False) as file,
        ):
            file.write(b"".join(lines[kept:]))
            file.flush()
            os.fsync(file.fileno())  # else a power failure may leave the new name without content
        os.rename(temporary, HISTORY_FILE, src_dir_fd=directory, dst_dir_fd=directory)
        self._limit = MAX_NBYTES
        self.close()

    def close(self) -> None:
        """Release the file; idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Recorder:
    """Turns events of saves into lines of the log.

    The daemon's loop calls it; it never touches storage.
    """

    def __init__(self, session: str, append: Callable[[SaveRecord], None]) -> None:
        """Record for ``session``.

        ``append`` takes a line and makes another thread write it.
        """
        self._session = session
        self._append = append
        self._open: dict[int, SaveRecord] = {}

    def note(self, note: Note) -> None:
        """Note what the trainer tells: a save begins, is staged, or failed on its side."""
        values = {field.name: getattr(note, field.name) for field in fields(note)}
        known = {
            name: value for name, value in values.items() if name != "attempt" and value is not None
        }
        for name, value in known.items():
            if not is_valid(name, value):
                raise ProtocolError(f"NOTE.{name} is {value!r:.80}")
        record = SaveRecord(session=self._session, **known)
        if record.outcome == "saving":
            self._begin(note.save_id, record)
        else:
            self._open.pop(note.save_id, None)
            self._append(record)

    def accepted(self, save: Save) -> None:
        """Note that a save arrived; a later daemon has not had its note."""
        self._begin(save.save_id, _record_of(save))

    def started(self, save: Save) -> None:
        """Note that a save is being written."""
        self._append(replace(_record_of(save), tries=1))

    def reported(self, message: Message) -> None:
        """Note a message to the trainer about a save."""
        save_id = getattr(message, "save_id", None)
        record = self._open.get(save_id) if isinstance(save_id, int) else None
        if record is None:
            return
        assert record.save_id is not None
        seconds = (
            None
            if record.called_s is None
            else max(0.0, round(wall_clock_s() - record.called_s, 6))
        )
        match message:
            case Written(nbytes=nbytes):
                self._open[record.save_id] = replace(record, written_s=seconds, nbytes=nbytes)
            case Committed(name=name, nbytes=nbytes):
                path = name if "/" in name else None
                self._end(
                    replace(
                        record, outcome="committed", committed_s=seconds, nbytes=nbytes, path=path
                    )
                )
            case Failed(error=error, message=text, errno=number, path=path):
                self._end(failure(record, error, shortened(text, path), number))
            case _:
                pass

    def _begin(self, save_id: int, record: SaveRecord) -> None:
        earlier = self._open.get(save_id)
        self._open[save_id] = record if earlier is None else earlier.corrected_by(record)
        if earlier is None:
            self._append(record)

    def _end(self, record: SaveRecord) -> None:
        assert record.save_id is not None
        del self._open[record.save_id]
        self._append(record)


def log_recovery(
    log: HistoryLog,
    storage: Storage,
    session: str,
    committed: Iterable[str],
    removed: Iterable[str],
    fallback_directory: str = "",
) -> None:
    """Log the directories that the start of ``session`` finished and removed; blocking.

    Then log the outcomes of saves that no process was left to record: storage shows them now, but
    perhaps no longer once steps have been deleted or replaced.
    """
    try:
        for record in _found_by_recovery(storage, committed, removed):
            log.append(record)
        for record in _found_out_since(log, storage, session, fallback_directory):
            log.append(record)
    except WriteError as error:
        logger.warning("the history lacks what was recovered: %s", error)


def _found_by_recovery(
    storage: Storage, committed: Iterable[str], removed: Iterable[str]
) -> Iterator[SaveRecord]:
    for name in committed:
        info = _find_checkpoint(storage, name)
        if info is not None:
            record = SaveRecord(
                step=info.step, session=info.session, outcome="recovered", sequence=info.sequence
            )
            yield replace(record, nbytes=info.nbytes, called_s=info.created_s)
    for name in removed:
        parsed = parse_hidden_directory(name)
        if parsed is not None and parsed[2] == "partial":
            yield SaveRecord(step=parsed[0], session=parsed[1].partition("-")[0], outcome="removed")


def _found_out_since(
    log: HistoryLog, storage: Storage, session: str, fallback_directory: str
) -> Iterator[SaveRecord]:
    names = storage.list_directory("")
    hidden = filter(None, map(parse_hidden_directory, names))
    left = {(step, attempt.partition("-")[0]) for step, attempt, _ in hidden}
    for record in log.records():
        is_open = record.outcome in ("saving", "unknown") and record.sequence is not None
        if not is_open or record.session == session or (record.step, record.session) in left:
            continue
        target = step_directory(record.step)
        info = _find_checkpoint(storage, target)
        if info is not None and info.key == (record.session, record.sequence):
            record = replace(record, outcome="committed", nbytes=info.nbytes)
            yield replace(record, error=None, message=None, errno=None, tries=0)
        elif fallback_directory and os.path.lexists(os.path.join(fallback_directory, target)):
            continue  # perhaps it is that one
        elif info is not None or target not in names:
            yield replace(record, outcome="failed", message=record.message or LOST, tries=0)


def _find_checkpoint(storage: Storage, directory: str) -> CheckpointInfo | None:
    try:
        return read_checkpoint(storage, directory)
    except CheckpointNotFoundError:
        return None
    except (SidesaveError, OSError) as error:
        logger.warning("not in the history: %s", error)
        return None


def _record_of(save: Save) -> SaveRecord:
    return SaveRecord(
        step=save.step,
        session=save.session,
        outcome="saving",
        save_id=save.save_id,
        sequence=save.sequence,
        called_s=save.created_s,
    )
