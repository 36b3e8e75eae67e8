"""The history of one checkpointer's saves, from their calls on, and its observers."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Sequence
from typing import Final

from sidesave.client.daemon_link.connection import Connection
from sidesave.client.options import Observer
from sidesave.client.runs.history import in_order, settled
from sidesave.client.saving.save import Save
from sidesave.errors import StagingError
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.log import read_history
from sidesave.writer_daemon.save_record import SaveRecord, combine
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)

_MAX_ENDED: Final = 1000
"""Saves of this process that are remembered without the log."""


class History:
    """Records a checkpointer's saves, and sends its daemon what that cannot know. Thread-safe."""

    def __init__(
        self,
        directory: str,
        fallback_directory: str,
        session: str,
        connection: Connection,
        observers: Sequence[Observer],
    ) -> None:
        """Start empty. ``observers`` get a record when a save begins, and one with its outcome."""
        self._directory = directory
        self._fallback_directory = fallback_directory
        self._session = session
        self._connection = connection
        self._observers = tuple(observers)
        self._lock = threading.RLock()  # a signal handler may come in where this thread holds it
        self._under_way: dict[int, Save] = {}
        self._ended: collections.deque[SaveRecord] = collections.deque(maxlen=_MAX_ENDED)

    def began(self, save: Save) -> None:
        """Add a save that is about to be staged."""
        with self._lock:
            self._under_way[save.sequence] = save
        record = self._record(save)
        self._note(record)
        self.show(record)

    def staged(self, save: Save) -> None:
        """Note that a save is staged."""
        self._note(self._record(save))

    def ended(self, save: Save) -> SaveRecord | None:
        """Record a save's outcome, even if it never began; return the record if it is to be shown.

        Idempotent: nothing is to be shown of a save that was recorded before, nor of a call whose
        step was never checked, nor without observers.
        """
        if save.step is None:
            return None
        with self._lock:
            began = self._under_way.get(save.sequence) is save
            if not began and any(record.save_id == save.sequence for record in self._ended):
                return None
            record = self._record(save)
            self._ended.append(record)
            self._under_way.pop(save.sequence, None)
        if not began or isinstance(save.error, StagingError):  # the daemon has not heard of it
            self._note(record)
        return record if self._observers else None

    def show(self, record: SaveRecord) -> None:
        """Pass a record to the observers in turn; log the exceptions that they raise."""
        for observer in self._observers:
            try:
                observer(record)
            except BaseException as error:
                is_main = threading.get_ident() == threading.main_thread().ident
                # an interrupt of the call of save()
                if is_main and not isinstance(error, Exception):
                    raise
                logger.exception("an observer of saves failed at step %d", record.step)

    def records(self) -> list[SaveRecord]:
        """All saves of the run directory; see :func:`sidesave.history`.

        Those of this process are as it knows them. A run in an object store keeps no log: only the
        saves of this session are returned.
        """
        in_store = urls.is_url(self._directory)
        logged = [] if in_store else read_history(self._directory)
        with self._lock:
            own = [*self._ended, *map(self._record, self._under_way.values())]
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

    def _record(self, save: Save) -> SaveRecord:
        return save.record(self._session, self._directory)

    def _note(self, record: SaveRecord) -> None:
        """Have the daemon log a record, if one listens; never blocks."""
        assert record.save_id is not None
        assert record.called_s is not None
        # Before that the daemon's line would have the few milliseconds until now for a save that
        # hangs in its call.
        stall_s = None if record.outcome == "saving" and record.staged_s is None else record.stall_s
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
            stall_s=stall_s,
        )
        self._connection.note(note)
