"""What becomes of the saves of one checkpointer, from their calls on."""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Final

from sidesave.client.daemon_link.connection import Connection
from sidesave.client.runs.history import in_order, settled
from sidesave.client.runs.info import CheckpointInfo
from sidesave.client.saving.handle import SaveHandle
from sidesave.client.saving.in_flight import SaveInFlight
from sidesave.errors import CommitUnknownError, DaemonDiedError, StagingError
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.log import SaveRecord, combine, describe_error, read_history

logger = logging.getLogger(__name__)


_MAX_ENDED: Final = 1000
"""Saves of this process that are remembered without the log."""


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
        return in_order(
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
