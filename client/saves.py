"""The saves between their call and their outcome: their futures, their slots, and the failures still to be raised."""

from __future__ import annotations

import contextlib
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
from sidesave.client.handle import CheckpointInfo, SaveHandle
from sidesave.errors import CommitUnknownError, SidesaveError, WriteError, WriteStalledError
from sidesave.stager.pool import Slot
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.protocol import Message, Save

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SaveInFlight:
    """One save; its slot goes back once it is neither filled by the trainer nor needed by the writer any more."""

    save: Save
    handle: SaveHandle
    slot: Slot | None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    filling: bool = True
    released: bool = False
    failed: bool = False
    abandoned: bool = False
    apart: bool = False


class SavesInFlight:
    """All saves of a checkpointer that have no outcome yet. Thread-safe: outcomes come from the connection's thread."""

    def __init__(
        self,
        directory: str,
        *,
        bearable_failures: int,
        release_slot: Callable[[Slot], None],
        on_committed: Callable[[CheckpointInfo], None],
    ) -> None:
        """Start with none.

        Args:
            directory: The run directory, for the paths of checkpoints.
            bearable_failures: So many in a row are only warned of; others are kept for :meth:`raise_failure`.
            release_slot: Takes a slot back.
            on_committed: Told of each checkpoint before its future is.
        """
        self._directory = directory
        self._bearable_failures = bearable_failures
        self._failures_in_a_row = 0
        self._release_slot = release_slot
        self._on_committed = on_committed
        self._changed = threading.Condition()
        self._entries: dict[int, SaveInFlight] = {}
        self._deletions: dict[int, Future[None]] = {}
        self._failures: list[SidesaveError] = []

    def add(self, save: Save, handle: SaveHandle, slot: Slot, metadata: dict[str, Any]) -> SaveInFlight:
        """A save whose staging begins now."""
        entry = SaveInFlight(save, handle, slot, metadata)
        with self._changed:
            self._entries[save.save_id] = entry
        return entry

    def add_deletion(self, request_id: int) -> Future[None]:
        """A deletion that is asked for now."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        with self._changed:
            self._deletions[request_id] = future
        return future

    def has_step(self, step: int) -> bool:
        """Whether this step is on its way."""
        with self._changed:
            entries = list(self._entries.values())
        return any(entry.save.step == step and not entry.handle.done() for entry in entries)

    # Outcomes --------------------------------------------------------------------------------------------------

    def filled(self, entry: SaveInFlight) -> bool:
        """The trainer's copy is over, well or not; False when the save has failed meanwhile."""
        with self._changed:
            entry.filling = False
            released = entry.released
        if released:  # it failed, or all is written already
            self._release(entry)
        return not entry.failed

    def receive(self, message: Message) -> None:
        """A message of the daemon; one about a save that is not in flight is ignored."""
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
                handle._nbytes_written, handle._nbytes_total = nbytes, total
            case protocol.Written(apart=apart):
                entry.apart = apart
                self._release(entry)
                handle._resolve(handle.written, None)
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
                self._release(entry)
                handle._resolve(handle.written, None)
                handle._resolve(handle.committed, info)
                self._forget(entry)
            case protocol.Failed(error=name, message=text, errno=code, path=path):
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

    def fail(self, entry: SaveInFlight, error: SidesaveError, *, report: bool = True) -> None:
        """Give a save its failure; with ``report`` false the caller raises it itself.

        That another rank has saved nothing because it raised an earlier failure is not raised again: of that failure
        this rank has been told as well, and so the ranks would go on for ever telling each other.
        """
        if isinstance(error, WriteError) and error.errno == errno.ECANCELED:
            logger.error("step %d is not saved: %s", entry.save.step, error)
            report = False
        with self._changed:
            if entry.save.save_id not in self._entries:
                return
            entry.failed = True
            self._failures_in_a_row += report
            bearable = self._failures_in_a_row <= self._bearable_failures
            if report and not bearable:
                if self._bearable_failures:
                    error.add_note(f"{self._failures_in_a_row} saves in a row have failed")
                self._failures.append(error)
        if report and bearable:
            text = f"the save of step {entry.save.step} failed: {error}"
            try:
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            except RuntimeWarning:  # under -W error it would end this thread, which is none of the user's
                logger.error("%s", text)
        self._release(entry)
        entry.handle._fail(error)
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
            text = (
                f"the checkpointer was closed before step {entry.save.step} was committed; its daemon may still do so"
            )
            self.fail(entry, CommitUnknownError(errno.ETIMEDOUT, text, self._directory), report=False)

    def _release(self, entry: SaveInFlight) -> None:
        with self._changed:
            entry.released = True
            slot = None
            if not entry.filling:
                slot, entry.slot = entry.slot, None
        if slot is not None:
            if not entry.abandoned:
                slot.void()
            self._release_slot(slot)

    def _forget(self, entry: SaveInFlight) -> None:
        with self._changed:
            self._entries.pop(entry.save.save_id, None)
            self._changed.notify_all()

    # Waiting ---------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> None:
        """Block until every save that is in flight now has its outcome; ``WriteStalledError`` after ``timeout_s``."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            waiting = set(self._entries)
            while open_ids := waiting & self._entries.keys():
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    steps = sorted(self._entries[save_id].save.step for save_id in open_ids)
                    raise WriteStalledError(f"steps {steps} were not committed within {timeout_s:g} s")
                self._changed.wait(left)

    def raise_failure(self) -> None:
        """Raise the first failure that has not been raised yet, and log the others."""
        with self._changed:
            failures, self._failures = self._failures, []
        for further in failures[1:]:
            logger.error("another save failed: %s", further)
        if failures:
            raise failures[0]

    def was_raised(self, error: SidesaveError) -> None:
        """The caller has seen this failure."""
        with self._changed, contextlib.suppress(ValueError):
            self._failures.remove(error)
