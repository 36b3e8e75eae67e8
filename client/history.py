"""What happened to every save of a run: what its log tells and this process knows, set right by what is on disk."""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from sidesave.client import catalog
from sidesave.client.handle import CheckpointInfo, SaveHandle, path_text
from sidesave.errors import (
    CheckpointNotFoundError,
    CommitUnknownError,
    DaemonDiedError,
    SidesaveError,
    StagingError,
    WriteError,
)
from sidesave.writer_daemon import lease, protocol
from sidesave.writer_daemon.history import LOST, SaveRecord, combine, describe_error, read_history
from sidesave.writer_daemon.manifest import (
    parse_hidden_directory,
    step_directory,
)
from sidesave.writer_daemon.storage import PosixStorage

if TYPE_CHECKING:
    from sidesave.client.connection import Connection
    from sidesave.client.saves import SaveInFlight

logger = logging.getLogger(__name__)

_MAX_ENDED: Final = 1000
"""Saves of this process that are remembered without the log."""

_UNFINISHED: Final = ("partial", "salvage-")


def history(path: str | os.PathLike[str]) -> list[SaveRecord]:
    """What became of the saves of a run directory, in the order of their calls; reads no tensor and needs no daemon.

    The log that this comes from is bounded, so the oldest are missing in a long run. An outcome that nobody was left to
    tell is looked up: a save is ``"committed"`` when its checkpoint is there, ``"failed"`` when its session is over and
    nothing is left that could be finished, and ``"unknown"`` otherwise.

    Raises:
        CheckpointNotFoundError: There is no such directory.
    """
    directory = path_text(path)
    if not os.path.isdir(directory):
        raise CheckpointNotFoundError(errno.ENOENT, "there is no run directory", directory)
    return _in_order([settled(directory, record) for record in read_history(directory)])


def settled(directory: str, record: SaveRecord, fallback_directory: str = "") -> SaveRecord:
    """``record``, corrected by what is in the run directory, or the fallback directory, where nobody else can tell."""
    if record.outcome in ("committed", "recovered", "skipped") or record.sequence is None:
        return record
    is_open = record.outcome in ("saving", "unknown")
    live = is_live(directory, record.session) if is_open else False
    info, pending = None, False
    for _ in range(2):  # what is being renamed at this moment can be missed once
        pending = _has_leftover(directory, record)
        try:
            info = catalog.read_info(os.path.join(directory, step_directory(record.step)))
        except FileNotFoundError:
            info = None
        except (SidesaveError, OSError) as error:
            logger.info("the outcome of step %d stays open: %s", record.step, error)
            return record
        if pending or info is not None:
            break
    if info is not None and (info.session, info.sequence) == (record.session, record.sequence):
        return replace(record, outcome="committed", nbytes=info.nbytes, error=None, message=None, errno=None)
    if fallback_directory:
        path = os.path.join(fallback_directory, step_directory(record.step))
        with contextlib.suppress(SidesaveError, OSError):
            info = catalog.read_info(path)
            if (info.session, info.sequence) == (record.session, record.sequence):
                found = replace(record, outcome="committed", nbytes=info.nbytes, path=path)
                return replace(found, error=None, message=None, errno=None)
    if live or not is_open:
        return record
    if pending or live is None:
        return replace(record, outcome="unknown")
    return replace(record, outcome="failed", message=record.message or LOST)


def _has_leftover(directory: str, record: SaveRecord) -> bool:
    """Whether something is there that may become the checkpoint of this save."""
    try:
        hidden = map(parse_hidden_directory, os.listdir(directory))
    except OSError:
        return True
    return any(
        parsed is not None and parsed[:2] == (record.step, record.session) and parsed[2].startswith(_UNFINISHED)
        for parsed in hidden
    )


def is_live(directory: str, session: str) -> bool | None:
    """Whether a daemon still serves this session here; None when that cannot be told from this machine."""
    try:
        with contextlib.closing(PosixStorage(directory)) as storage:
            view = lease.Observer(storage).look()
    except WriteError as error:
        logger.info("who holds %s cannot be told: %s", directory, error)
        return None
    return False if view.holder is not None and view.holder.session != session else view.alive


def _in_order(records: list[SaveRecord]) -> list[SaveRecord]:
    """By the time of the call; one that is not known keeps its place behind the one before it."""
    times: list[float] = []
    for record in records:
        times.append(record.called_s if record.called_s is not None else times[-1] if times else 0.0)
    return [records[index] for index in sorted(range(len(records)), key=times.__getitem__)]


@dataclass(slots=True, eq=False)
class _UnderWay:
    record: SaveRecord
    handle: SaveHandle
    called: float
    ended: bool = False


class OwnHistory:
    """The saves of one checkpointer, from their calls on; its daemon hears what it cannot know. Thread-safe."""

    def __init__(self, directory: str, fallback_directory: str, session: str, connection: Connection) -> None:
        """Begin with none."""
        self._directory = directory
        self._fallback_directory = fallback_directory
        self._session = session
        self._connection = connection
        self._lock = threading.RLock()  # a signal handler may come in where this thread holds it
        self._under_way: dict[int, _UnderWay] = {}
        self._ended: collections.deque[SaveRecord] = collections.deque(maxlen=_MAX_ENDED)

    def begin(self, save: SaveInFlight) -> None:
        """A save is about to be staged."""
        record = SaveRecord(
            step=save.step,
            session=self._session,
            outcome="saving",
            save_id=save.sequence,
            sequence=save.sequence,
            called_s=save.called_s,
        )
        entry, handle = _UnderWay(record, save.handle, save.called), save.handle

        def staged(future: Future[None]) -> None:
            if handle.staged.peek() is None:
                seconds = _since(entry)
                stall_s = entry.record.stall_s  # of a call that is still under way there is none
                self._tell(self._reached(entry, staged_s=seconds, stall_s=seconds if stall_s is None else stall_s))

        def written(future: Future[None]) -> None:
            if handle.written.peek() is None:
                self._reached(entry, written_s=_since(entry))

        def committed(future: Future[CheckpointInfo]) -> None:
            with self._lock:
                record = self._result(entry)
                entry.ended = True
                self._under_way.pop(save.sequence, None)
                self._ended.append(record)
            if isinstance(handle.committed.peek(), StagingError):  # the daemon has not heard of it
                self._tell(record)

        handle.committed.add_done_callback(committed)
        handle.staged.add_done_callback(staged)
        handle.written.add_done_callback(written)
        save.unrecorded = False
        with self._lock:
            self._under_way[save.sequence] = entry
        self._tell(record)

    def returned(self, save: SaveInFlight) -> None:
        """The call has returned: its stall ended there, if not when it was staged."""
        with self._lock:
            entry = self._under_way.get(save.sequence)
            if entry is not None and entry.record.staged_s is None:
                self._reached(entry, stall_s=_since(entry))

    def came_to_nothing(self, save: SaveInFlight, error: BaseException | None = None) -> None:
        """The call has failed with ``error`` before :meth:`begin`, or saves nothing, as all slots are busy."""
        outcome = "skipped" if error is None else "failed"
        record = SaveRecord(
            step=save.step,
            session=self._session,
            outcome=outcome,
            save_id=save.sequence,
            called_s=save.called_s,
        )
        if error is not None:
            name, message, number = describe_error(error)
            record = replace(record, error=name, message=message, errno=number)
        with self._lock:
            self._ended.append(record)
        self._tell(record)

    def records(self) -> list[SaveRecord]:
        """All saves of the run directory, those of this process as it knows them; see :func:`history`."""
        logged = read_history(self._directory)
        with self._lock:
            own = [*self._ended, *(self._result(entry) for entry in self._under_way.values())]
        under_way = {record.save_id for record in own if record.outcome == "saving"}
        found = combine([*logged, *own])
        return _in_order(
            [
                record
                if record.session == self._session and record.save_id in under_way
                else settled(self._directory, record, self._fallback_directory)
                for record in found
            ]
        )

    def _reached(self, entry: _UnderWay, **seconds: float) -> SaveRecord:
        with self._lock:
            entry.record = replace(entry.record, **seconds)
            return entry.record

    def _result(self, entry: _UnderWay) -> SaveRecord:
        """Where a save stands; its futures tell before their callbacks come."""
        future = entry.handle.committed
        if not future.done():
            return entry.record
        error = future.peek()
        if error is None:
            info = future.result()
            elsewhere = os.path.dirname(info.path) != self._directory
            return replace(
                entry.record,
                outcome="committed",
                nbytes=info.nbytes,
                path=info.path if elsewhere else None,
                committed_s=_since(entry),
            )
        name, message, number = describe_error(error)
        # A daemon that died may have made it durable before it did, and so may one that was left alone.
        unknown = isinstance(error, (CommitUnknownError, DaemonDiedError))
        outcome = "unknown" if unknown else "failed"
        return replace(entry.record, outcome=outcome, error=name, message=message, errno=number)

    def _tell(self, record: SaveRecord) -> None:
        """Let the daemon write it down, if there is one that listens; never blocks."""
        assert record.save_id is not None
        assert record.called_s is not None
        note = protocol.Note(
            attempt=0,
            save_id=record.save_id,
            step=record.step,
            outcome=record.outcome,
            sequence=record.sequence,
            error=record.error,
            message=record.message,
            errno=record.errno,
            called_s=record.called_s,
            staged_s=record.staged_s,
            stall_s=record.stall_s,
        )
        self._connection.note(note)


def _since(entry: _UnderWay) -> float:
    return round(time.monotonic() - entry.called, 6)
