"""Records what becomes of the saves of one checkpointer, from their calls on."""

from __future__ import annotations

import collections
import logging
import os
import threading
from dataclasses import replace
from typing import Final

from sidesave.client.daemon_link.connection import Connection
from sidesave.client.runs.history import in_order, settled
from sidesave.client.saving.in_flight import SaveInFlight
from sidesave.errors import CommitUnknownError, DaemonDiedError, StagingError
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.log import SaveRecord, combine, describe_error, read_history
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)


_MAX_ENDED: Final = 1000
"""Saves of this process that are remembered without the log."""


class OwnHistory:
    """The saves of one checkpointer, from their calls on; its daemon hears what it cannot know. Thread-safe."""

    def __init__(self, directory: str, fallback_directory: str, session: str, connection: Connection) -> None:
        """Begin with none."""
        self._directory = directory
        self._fallback_directory = fallback_directory
        self._session = session
        self._connection = connection
        self._lock = threading.RLock()  # a signal handler may come in where this thread holds it
        self._under_way: dict[int, SaveInFlight] = {}
        self._ended: collections.deque[SaveRecord] = collections.deque(maxlen=_MAX_ENDED)

    def begin(self, save: SaveInFlight) -> None:
        """A save is about to be staged."""
        with self._lock:
            self._under_way[save.sequence] = save
        save.unrecorded = False
        self._tell(self._reached(save))

    def staged(self, save: SaveInFlight) -> None:
        """A save is staged, or has failed in this moment."""
        if save.handle.staged.reached is not None:
            self._tell(self._reached(save))

    def ended(self, save: SaveInFlight) -> None:
        """A save has its outcome; idempotent."""
        with self._lock:
            if self._under_way.get(save.sequence) is not save:
                return
            record = self._result(save)
            self._ended.append(record)
            del self._under_way[save.sequence]
        if isinstance(save.handle.committed.peek(), StagingError):  # the daemon has not heard of it
            self._tell(record)

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
        """All saves of the run directory, those of this process as it knows them; see :func:`history`.

        Of a run in an object store, where no log is kept, those of this session.
        """
        in_store = urls.is_url(self._directory)
        logged = [] if in_store else read_history(self._directory)
        with self._lock:
            own = [*self._ended, *map(self._result, self._under_way.values())]
        under_way = {record.save_id for record in own if record.outcome == "saving"}
        combined = combine([*logged, *own])
        return in_order(
            [
                record
                if in_store or (record.session == self._session and record.save_id in under_way)
                else settled(self._directory, record, self._fallback_directory)
                for record in combined
            ]
        )

    def _reached(self, save: SaveInFlight) -> SaveRecord:
        """How far a save has come, whatever its outcome."""

        def since(at: float | None) -> float | None:
            return None if at is None else round(at - save.called, 6)

        handle = save.handle
        staged_s, returned_s = since(handle.staged.reached), since(save.returned)
        return SaveRecord(
            step=save.step,
            session=self._session,
            outcome="saving",
            save_id=save.sequence,
            sequence=save.sequence,
            called_s=save.called_s,
            stall_s=min((seconds for seconds in (staged_s, returned_s) if seconds is not None), default=None),
            staged_s=staged_s,
            written_s=since(handle.written.reached),
            committed_s=since(handle.committed.reached),
        )

    def _result(self, save: SaveInFlight) -> SaveRecord:
        """The record of a save as it stands now."""
        record, future = self._reached(save), save.handle.committed
        if not future.done():
            return record
        error = future.peek()
        if error is None:
            info = future.result()
            elsewhere = os.path.dirname(info.path) != self._directory
            return replace(record, outcome="committed", nbytes=info.nbytes, path=info.path if elsewhere else None)
        name, message, number = describe_error(error)
        # A daemon that died may have made it durable before it did, and so may one that was left alone.
        unknown = isinstance(error, (CommitUnknownError, DaemonDiedError))
        outcome = "unknown" if unknown else "failed"
        return replace(record, outcome=outcome, error=name, message=message, errno=number)

    def _tell(self, record: SaveRecord) -> None:
        """Have the daemon write a record down, if one listens; never blocks."""
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
