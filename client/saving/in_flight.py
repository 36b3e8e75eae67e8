"""The saves between their call and their outcome: their futures, their slots, and the failures still to be raised."""

from __future__ import annotations

import copy
import errno
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from sidesave import errors
from sidesave.client.runs.info import CheckpointInfo
from sidesave.client.saving.handle import SaveHandle
from sidesave.client.saving.mirroring import Mirroring
from sidesave.errors import CommitUnknownError, SidesaveError, WriteStalledError
from sidesave.stager.copy.copier import StagingCopy
from sidesave.stager.copy.pool import Slot
from sidesave.stager.signal_safe import Monitor
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.log import wall_clock_s
from sidesave.writer_daemon.protocol import Message, Save

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SaveInFlight:
    """One save, from the first moment of its call, so that whatever is taken for it has an owner.

    Its slot goes back once it is neither filled by the trainer nor needed by the writer any more.
    """

    step: int
    handle: SaveHandle
    copy: StagingCopy
    sequence: int = 0  # no place yet
    thread: int = field(default_factory=threading.get_ident)
    called_s: float = field(default_factory=wall_clock_s)
    called: float = field(default_factory=time.monotonic)
    returned: float | None = None
    unrecorded: bool = False
    save: Save = field(init=False)
    slot: Slot | None = None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    filling: bool = True
    released: bool = False
    failed: bool = False
    abandoned: bool = False
    on_outcome: Callable[[CheckpointInfo | None], object] = lambda info: None
    """Told of its checkpoint, or with None of its failure, before its futures are."""


class SavesInFlight:
    """All saves of a checkpointer that have no outcome yet. Thread-safe: outcomes come from the connection's thread."""

    def __init__(
        self,
        directory: str,
        *,
        bearable_failures: int,
        logs_failures: bool,
        release_slot: Callable[[SaveInFlight], None],
        on_committed: Callable[[CheckpointInfo], None],
        on_ended: Callable[[SaveInFlight], None],
    ) -> None:
        """Start with none.

        Args:
            directory: The run directory, for the paths of checkpoints.
            bearable_failures: So many in a row are only warned of; others are kept for :meth:`raise_failure`.
            logs_failures: Log those others as well, as they may be raised much later.
            release_slot: Takes the slot of a save back, if it has one.
            on_committed: Told of each checkpoint before its future is.
            on_ended: Told of each save after its futures are.
        """
        self._directory = directory
        self._bearable_failures = bearable_failures
        self._logs_failures = logs_failures
        self._failures_in_a_row = 0
        self._release_slot = release_slot
        self._on_committed = on_committed
        self._on_ended = on_ended
        self._changed = Monitor()
        self._entries: dict[int, SaveInFlight] = {}
        self._deletions: dict[int, Future[None]] = {}
        self._failures: list[SidesaveError] = []
        self.hurry: Callable[[], object] = lambda: None
        """Called before somebody waits for all that is under way."""
        self.on_written: Callable[[int, float], object] = lambda nbytes, seconds: None
        """Told of each save that is durable: its bytes, and how long the daemon has written them."""
        self.mirroring = Mirroring()
        """Keeps the futures that are done after all others."""
        self.on_misaligned: Callable[[Save, int], None] = lambda save, step: None
        """Told of a save that failed as another rank has saved that step at the same turn."""

    def add(self, entry: SaveInFlight) -> None:
        """Add a save whose staging begins now."""
        with self._changed:
            self._entries[entry.sequence] = entry
        self.mirroring.add(entry.sequence, entry.handle)

    def drop(self, entry: SaveInFlight, error: SidesaveError) -> None:
        """Drop a save whose call raises; idempotent. A copy that fills its slot must have ended."""
        with self._changed:
            entry.failed, entry.filling = True, False
        entry.on_outcome(None)
        self._release(entry)
        entry.handle.fail(error)
        self._forget(entry)

    def add_deletion(self, request_id: int, future: Future[None]) -> None:
        """Add a deletion that is requested now."""
        with self._changed:
            self._deletions[request_id] = future

    def place_of(self, step: int) -> int:
        """The place in the order of commits of the last save of a step that is in flight, 0 for none."""
        with self._changed:
            entries = list(self._entries.values())
        return max((each.sequence for each in entries if each.step == step and not each.handle.done()), default=0)

    # Outcomes --------------------------------------------------------------------------------------------------

    def filled(self, entry: SaveInFlight) -> bool:
        """The trainer's copy has ended, with or without an error; False when the save has failed meanwhile."""
        with self._changed:
            entry.filling = False
            released = entry.released
        if released:  # it failed, or all is written already
            self._release(entry)
        return not entry.failed

    def receive(self, message: Message) -> None:
        """Handle a message of the daemon; one about a save that is not in flight is ignored."""
        self.mirroring.receive(message)
        save_id = getattr(message, "save_id", None)
        if not isinstance(save_id, int):
            return
        with self._changed:
            entry = self._entries.get(save_id)
            deletion = self._deletions.pop(save_id, None)
        if deletion is not None:
            if isinstance(message, protocol.Failed):
                deletion.set_exception(errors.from_wire(message.error, message.message, message.errno, message.path))
            else:
                deletion.set_result(None)
        if entry is None:
            return
        handle, save = entry.handle, entry.save
        match message:
            case protocol.Progress(nbytes=nbytes, total_nbytes=total):
                handle.nbytes_written, handle.nbytes = nbytes, total
            case protocol.Written(nbytes=nbytes, seconds=seconds):
                self.on_written(nbytes, seconds)
                self._release(entry)
                handle.written.resolve(None)
            case protocol.Committed(name=name, nbytes=nbytes):
                info = CheckpointInfo(
                    step=save.step,
                    path=os.path.join(self._directory, name),
                    nbytes=nbytes,
                    session=save.session,
                    sequence=save.sequence,
                    parent=None if save.parent is None else (save.parent.step, save.parent.session),
                    created_s=save.created_s,
                    metadata=entry.metadata,
                )
                with self._changed:
                    self._failures_in_a_row = 0
                self._on_committed(info)
                entry.on_outcome(info)
                self._release(entry)
                handle.written.resolve(None)
                handle.committed.resolve(info)
                self._forget(entry)
            case protocol.Failed(error=name, message=text, errno=code, path=path, saved_instead=other):
                if other is not None:  # first: who has seen the failure saves again
                    self.on_misaligned(save, other)
                self.fail(entry, errors.from_wire(name, text, code, path))
            case _:
                pass

    def lose(self, ids: list[int], error: SidesaveError) -> None:
        """Fail the saves and deletions that no daemon will finish."""
        for save_id in ids:
            with self._changed:
                entry = self._entries.get(save_id)
                deletion = self._deletions.pop(save_id, None)
            if entry is not None:
                self.fail(entry, error)
            if deletion is not None:
                deletion.set_exception(error)

    def being_staged(self) -> list[SaveInFlight]:
        """The saves whose slots are still being filled."""
        return [entry for entry in list(self._entries.values()) if entry.filling and not entry.failed]

    def fail(self, entry: SaveInFlight, error: SidesaveError, *, report: bool = True) -> None:
        """Give a save its failure; with ``report`` false the caller raises it itself."""
        with self._changed:
            if entry.sequence not in self._entries:
                return
            entry.failed = True
            self._failures_in_a_row += report
            bearable = self._failures_in_a_row <= self._bearable_failures
            if report and not bearable:
                if self._bearable_failures:
                    error.add_note(f"{self._failures_in_a_row} saves in a row have failed")
                self._failures.append(error)
        if report and bearable:
            text = f"the save of step {entry.step} failed: {error}"
            try:
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            except RuntimeWarning:  # under -W error it would end this thread, which is none of the user's
                logger.error("%s", text)
        elif report and self._logs_failures:
            logger.error("the save of step %d failed: %s", entry.save.step, error)
        entry.on_outcome(None)
        self._release(entry)
        entry.handle.fail(error)
        self._forget(entry)

    def abandon(self) -> None:
        """Give up waiting for saves that a daemon, left alone, may still finish."""
        with self._changed:
            entries = list(self._entries.values())
            deletions, self._deletions = self._deletions, {}
        for deletion in deletions.values():
            text = "the checkpointer was closed before the step was deleted; its daemon may still do so"
            deletion.set_exception(CommitUnknownError(errno.ETIMEDOUT, text, self._directory))
        for entry in entries:
            entry.abandoned = True
            text = f"the checkpointer was closed before step {entry.step} was committed; its daemon may still do so"
            self.fail(entry, CommitUnknownError(errno.ETIMEDOUT, text, self._directory), report=False)

    def _release(self, entry: SaveInFlight) -> None:
        with self._changed:
            entry.released = True
            if entry.filling:
                return
            slot, entry.slot = entry.slot, None
        if slot is not None and not entry.abandoned:
            slot.void()
        self._release_slot(entry)

    def _forget(self, entry: SaveInFlight) -> None:
        try:
            self._on_ended(entry)
        finally:  # or wait() would wait for it for ever
            with self._changed:
                self._entries.pop(entry.sequence, None)
                self._changed.notify_all()

    # Waiting ---------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> None:
        """Block until every save that is in flight now has its outcome; ``WriteStalledError`` after ``timeout_s``."""
        waiting = set(self._entries)
        if waiting:
            self.hurry()
        if not self._changed.wait_for(lambda: not waiting & self._entries.keys(), timeout_s):
            steps = sorted(entry.step for entry in list(self._entries.values()) if entry.sequence in waiting)
            raise WriteStalledError(f"steps {steps} were not committed within {timeout_s:g} s")

    def settle(self, step: int | None) -> None:
        """Block until the saves of ``step``, or all, have their outcomes; those that failed are logged, not raised."""
        entries = [entry for entry in list(self._entries.values()) if step is None or entry.step == step]
        if entries:
            self.hurry()
        self._changed.wait_for(lambda: not any(entry.sequence in self._entries for entry in entries))
        for entry in entries:
            if entry.failed:
                logger.warning("step %d was not saved, so it is not there to be loaded", entry.step)

    def raise_failure(self) -> None:
        """Raise the first failure that has not been reported to the user yet, and log the others."""
        count = len(self._failures)
        failures = [error for error in self._failures[:count] if not error.was_read]
        try:
            for further in failures[1:]:
                logger.error("another save failed: %s", further)
            if failures:
                raise copy.copy(failures[0])  # whose frames, and the state in them, nothing that lives on refers to
        finally:
            del self._failures[:count]
