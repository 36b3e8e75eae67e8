"""The outcome of every save: a small log in the run directory, one line per event.

Lines are appended without fsync, and a line that cannot be written fails no save. Only the daemon writes the log, in
its storage thread, under the lease. Each line begins with its own digest, so that a torn or damaged one is left out and
the others still count.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Literal, cast, get_args

import xxhash

from sidesave.errors import ProtocolError, SidesaveError, WriteError
from sidesave.writer_daemon.format import manifest
from sidesave.writer_daemon.protocol import Committed, Failed, Message, Note, Save, Written
from sidesave.writer_daemon.storage import Descriptor, PosixStorage, Storage

logger = logging.getLogger(__name__)

HISTORY_FILE: Final = ".sidesave.history"
MAX_NBYTES: Final = 1 << 20
"""Above this the older half is dropped. A save takes some 700 bytes, and 300 once its lines have been merged."""
LOST: Final = "its session ended before it was committed"
_MAX_MESSAGE_LENGTH: Final = 500
_MAX_PENDING: Final = 1000
_LAST_SECOND: Final = 253_402_300_799  # of the year 9999
_SESSION: Final = re.compile(r"[0-9a-f]{16}")


def wall_clock_s() -> float:
    """Seconds since the epoch, of a moment that a record can name in every time zone, whatever the clock says."""
    return min(max(time.time(), 0.0), _LAST_SECOND - 86_400.0)


Outcome = Literal["saving", "unknown", "skipped", "failed", "removed", "committed", "recovered"]

_CERTAINTY: Final[dict[str, int]] = {"saving": 0, "unknown": 1, "skipped": 2, "failed": 2, "removed": 2}
"""How far an outcome is settled, 3 where it is not listed: a later line corrects an earlier one that is less so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRecord:
    """What is known of one call of ``save()``; None is what is not known, or has not happened.

    Attributes:
        step: The step it was to be saved as.
        session: The run, a random nonce of 16 hex digits, that called.
        outcome: ``"committed"``; ``"recovered"``, which is committed at the start of a later session; ``"failed"``;
            ``"skipped"``, as all slots were busy; ``"removed"``, which is failed and cleaned up at such a start;
            ``"saving"``; ``"unknown"``, when nobody was left to tell.
        save_id: Which call of its session it was, counting up.
        sequence: Its place in the order of commits; None when it came to nothing before it got one.
        error: The name of the exception that it failed with.
        message: What that exception says.
        errno: The system's error number behind it.
        path: Where the checkpoint is, if that is not in the run directory.
        nbytes: Bytes of tensors, plain data and files beside them.
        called_s: When ``save()`` was called, in seconds since the epoch.
        stall_s: Seconds that ``save()`` took, up to ``staged_s``: after that only a blocking save takes more time.
        staged_s: Seconds from the call until everything was in staging memory.
        written_s: Seconds from the call until all bytes were durable.
        committed_s: Seconds from the call until the checkpoint was.
        tries: How many times a daemon began to write it.
    """

    step: int
    session: str
    outcome: Outcome
    save_id: int | None = None
    sequence: int | None = None
    error: str | None = None
    message: str | None = None
    errno: int | None = None
    path: str | None = None
    nbytes: int | None = None
    called_s: float | None = None
    stall_s: float | None = None
    staged_s: float | None = None
    written_s: float | None = None
    committed_s: float | None = None
    tries: int = 0

    def corrected_by(self, later: SaveRecord) -> SaveRecord:
        """Both records of one save merged; only a more certain outcome replaces another."""
        settles = _CERTAINTY.get(later.outcome, 3) > _CERTAINTY.get(self.outcome, 3)
        decisive = later if settles else self
        newer = {name: value for name, value in asdict(later).items() if value is not None}
        return replace(
            self,
            **newer
            | {name: getattr(decisive, name) for name in ("outcome", "error", "message", "errno")}
            | {"tries": self.tries + later.tries},
        )

    def to_line(self) -> bytes:
        """The record as a line of the log, between two line feeds: what was torn before it ends there."""
        known = {
            name: value for name, value in asdict(self).items() if value is not None and (name, value) != ("tries", 0)
        }
        body = json.dumps(known, separators=(",", ":")).encode()
        return b"\n%s %s\n" % (xxhash.xxh3_64_hexdigest(body).encode(), body)

    @classmethod
    def from_line(cls, line: bytes) -> SaveRecord:
        """Verify the digest, then read; raises ``ValueError`` for anything but a line of ours."""
        digest, _, body = line.partition(b" ")
        if digest != xxhash.xxh3_64_hexdigest(body).encode():
            raise ValueError("the line does not match its digest")
        raw = json.loads(body)
        if not isinstance(raw, dict):
            raise ValueError("no object")
        known = cast("dict[str, Any]", raw)
        # What a later version adds is left out.
        values = {field.name: known[field.name] for field in fields(cls) if field.name in known}
        for name, value in values.items():
            if not _is_valid(name, value):
                raise ValueError(f"{name} is {value!r:.80}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(str(error)) from error


def _is_valid(name: str, value: Any) -> bool:
    match name:
        case "step" | "save_id" | "sequence" | "nbytes" | "tries" | "errno":
            return type(value) is int and 0 <= value < 1 << 63
        case "called_s" | "stall_s" | "staged_s" | "written_s" | "committed_s":
            return type(value) in (int, float) and 0 <= value <= _LAST_SECOND
        case "outcome":
            return value in get_args(Outcome)
        case "session":
            return isinstance(value, str) and _SESSION.fullmatch(value) is not None
        case _:
            return isinstance(value, str)


def combine(records: Iterable[SaveRecord]) -> list[SaveRecord]:
    """One record for each save, in the order in which they first appear.

    Recovery does not know the number of a call. Its line belongs to the save of that session with that place in the
    order of commits or, if it found no record, to the last one of that step.
    """
    combined: list[SaveRecord] = []
    places: dict[tuple[Any, ...], int] = {}
    for record in records:
        session = record.session
        keys: list[tuple[Any, ...]] = [(session, "call", record.save_id), (session, "sequence", record.sequence)]
        keys = [key for key in keys if key[2] is not None]
        if record.outcome != "skipped" or not keys:
            keys.append((session, "step", record.step))
        place = places.get(keys[0])
        if place is None:
            place = len(combined)
            combined.append(record)
        else:
            combined[place] = combined[place].corrected_by(record)
        places.update(dict.fromkeys(keys, place))
    return combined


def merged(ours: list[SaveRecord], theirs: list[SaveRecord]) -> list[SaveRecord]:
    """The records of two histories, of one run and of a copy of it; of a save in both that of ``theirs``."""

    def save_of(record: SaveRecord) -> tuple[str, int | None, int]:
        return record.session, record.save_id, record.step

    known = {*map(save_of, theirs)}
    return [*(record for record in ours if save_of(record) not in known), *theirs]


def read_history(root: str) -> list[SaveRecord]:
    """The records in the log of a run directory, by :func:`combine`; empty if there is no readable log."""
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
    """The records in the content of a log, by :func:`combine`; what is torn or damaged is left out."""
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
    with _open_regular(path, os.O_RDONLY, directory) as regular, open(regular.fileno(), "rb", closefd=False) as file:
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
        """Nothing is opened before the first line, and then where ``storage`` is, wherever that has been moved to."""
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
        if self._file is not None and os.fstat(self._file.fileno()).st_nlink == 0:  # somebody has removed the file
            self.close()
        if self._file is None:
            self._file = _open_regular(HISTORY_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, self._storage.descriptor)
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
        with _open_regular(temporary, flags, directory) as regular, open(regular.fileno(), "wb", closefd=False) as file:
            file.write(b"".join(lines[kept:]))
            file.flush()
            os.fsync(file.fileno())  # else a power failure may leave the new name without its content
        os.rename(temporary, HISTORY_FILE, src_dir_fd=directory, dst_dir_fd=directory)
        self._limit = MAX_NBYTES
        self.close()

    def close(self) -> None:
        """Release the file; idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Recorder:
    """Makes lines of what a daemon learns about saves. The loop calls it; it never touches storage."""

    def __init__(self, session: str, append: Callable[[SaveRecord], None]) -> None:
        """Record for ``session``; ``append`` takes a line and sees to it that another thread writes it."""
        self._session = session
        self._append = append
        self._open: dict[int, SaveRecord] = {}

    def note(self, note: Note) -> None:
        """Note what the trainer tells: a save begins, is staged, or failed on its side."""
        values = {field.name: getattr(note, field.name) for field in fields(note)}
        known = {name: value for name, value in values.items() if name != "attempt" and value is not None}
        for name, value in known.items():
            if not _is_valid(name, value):
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
        seconds = None if record.called_s is None else max(0.0, round(wall_clock_s() - record.called_s, 6))
        match message:
            case Written(nbytes=nbytes):
                self._open[record.save_id] = replace(record, written_s=seconds, nbytes=nbytes)
            case Committed(name=name, nbytes=nbytes):
                path = name if "/" in name else None
                self._end(replace(record, outcome="committed", committed_s=seconds, nbytes=nbytes, path=path))
            case Failed(error=error, message=text, errno=number, path=path):
                self._end(failure(record, error, _message(text, path), number))
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
    """Log what the start of ``session`` finished and removed, by the names of the directories; blocking.

    Then, what became of the saves whose end nobody was left to write down: storage tells it now, and perhaps no more
    when steps have been deleted or replaced.
    """
    try:
        for record in _found_by_recovery(storage, committed, removed):
            log.append(record)
        for record in _found_out_since(log, storage, session, fallback_directory):
            log.append(record)
    except WriteError as error:
        logger.warning("the history lacks what was recovered: %s", error)


def _found_by_recovery(storage: Storage, committed: Iterable[str], removed: Iterable[str]) -> Iterator[SaveRecord]:
    for name in committed:
        head = _read_head(storage, name)
        if head is not None:
            record = SaveRecord(step=head.step, session=head.session, outcome="recovered", sequence=head.sequence)
            yield replace(record, nbytes=head.nbytes, called_s=head.created_s)
    for name in removed:
        parsed = manifest.parse_hidden_directory(name)
        if parsed is not None and parsed[2] == "partial":
            yield SaveRecord(step=parsed[0], session=parsed[1].partition("-")[0], outcome="removed")


def _found_out_since(log: HistoryLog, storage: Storage, session: str, fallback_directory: str) -> Iterator[SaveRecord]:
    names = storage.list_directory("")
    hidden = filter(None, map(manifest.parse_hidden_directory, names))
    left = {(step, attempt.partition("-")[0]) for step, attempt, _ in hidden}
    for record in log.records():
        is_open = record.outcome in ("saving", "unknown") and record.sequence is not None
        if not is_open or record.session == session or (record.step, record.session) in left:
            continue
        target = manifest.step_directory(record.step)
        head = _read_head(storage, target)
        if head is not None and (head.session, head.sequence) == (record.session, record.sequence):
            record = replace(record, outcome="committed", nbytes=head.nbytes)
            yield replace(record, error=None, message=None, errno=None, tries=0)
        elif fallback_directory and os.path.lexists(os.path.join(fallback_directory, target)):
            continue  # perhaps it is that one
        elif head is not None or target not in names:
            yield replace(record, outcome="failed", message=record.message or LOST, tries=0)


def _read_head(storage: Storage, directory: str) -> manifest.Head | None:
    path = f"{directory}/{manifest.MANIFEST}"
    try:
        data = storage.read(path, manifest.MAX_JSON_NBYTES)
        return None if data is None else manifest.Head.from_bytes(data, path)
    except (SidesaveError, OSError) as error:
        logger.warning("not in the history: %s", error)
        return None


def failure(record: SaveRecord, error: str, message: str, number: int | None) -> SaveRecord:
    """``record`` with its end: failed, or unknown where that is what the error says."""
    outcome = "unknown" if error == "CommitUnknownError" else "failed"
    return replace(record, outcome=outcome, error=error, message=message, errno=number)


def _message(text: str, path: str | None) -> str:
    message = (f"{text}: {path}" if path else text)[:_MAX_MESSAGE_LENGTH]
    return message.encode(errors="backslashreplace").decode()


def describe_error(error: BaseException) -> tuple[str, str, int | None]:
    """Name, message and errno of an exception, as records have them."""
    number = error.errno if isinstance(error, OSError) else None
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    path = error.filename if isinstance(error, OSError) else None
    return type(error).__name__, _message(text, path if isinstance(path, str) else None), number


def _record_of(save: Save) -> SaveRecord:
    return SaveRecord(
        step=save.step,
        session=save.session,
        outcome="saving",
        save_id=save.save_id,
        sequence=save.sequence,
        called_s=save.created_s,
    )
