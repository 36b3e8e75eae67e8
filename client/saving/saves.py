"""The saves of a checkpointer that have no outcome yet, and all that follows from an outcome."""

from __future__ import annotations

import copy
import dataclasses
import errno
import logging
import math
import os
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future

from sidesave import errors
from sidesave.client import arguments
from sidesave.client.cost import CostReport
from sidesave.client.increments import Increments, SavedAs, TableShare
from sidesave.client.saving.history import History
from sidesave.client.saving.lineage import Lineage, Turns
from sidesave.client.saving.mirroring import Mirroring
from sidesave.client.saving.save import Save
from sidesave.errors import CommitUnknownError, SidesaveError, StagingError, WriteStalledError
from sidesave.stager.copy.pool import SlotPool
from sidesave.stager.plan import FileImage
from sidesave.stager.signal_safe import Monitor
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.protocol import Delete, Message
from sidesave.writer_daemon.save_record import SaveRecord
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)


class Failures:
    """Failed saves: warned of, or kept until a call raises them. Thread-safe."""

    def __init__(self, tolerated: int, *, logs: bool) -> None:
        """Only warn of up to ``tolerated`` failures in a row; log others if ``logs``."""
        self._tolerated = tolerated
        self._logs = logs
        self._lock = threading.RLock()
        self._in_a_row = 0
        self._kept: list[SidesaveError] = []

    def add(self, step: int | None, error: SidesaveError) -> None:
        """Warn of a failure, or keep it."""
        with self._lock:
            self._in_a_row += 1
            tolerated = self._in_a_row <= self._tolerated
            if not tolerated:
                if self._tolerated:
                    error.add_note(f"{self._in_a_row} saves in a row have failed")
                self._kept.append(error)
        text = f"the save of step {step} failed: {error}"
        if tolerated:
            try:
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            except RuntimeWarning:
                # under -W error it would end this thread, which is not the user's
                logger.error("%s", text)
        elif self._logs:
            logger.error("%s", text)

    def committed(self) -> None:
        """Begin to count again."""
        with self._lock:
            self._in_a_row = 0

    def raise_first(self) -> None:
        """Raise the first failure that was neither raised nor read before, and log the others."""
        count = len(self._kept)
        failures = [error for error in self._kept[:count] if not error.was_read]
        try:
            for further in failures[1:]:
                logger.error("another save failed: %s", further)
            if failures:
                # whose frames, and the state in them, nothing that lives on refers to
                raise copy.copy(failures[0])
        finally:
            del self._kept[:count]


class Deletions:
    """The requests to delete steps that have no answer yet. Thread-safe."""

    def __init__(self, directory: str, lineage: Lineage) -> None:
        """Start empty."""
        self._directory = directory
        self._lineage = lineage
        self._lock = threading.RLock()
        self._open: dict[int, tuple[Delete, Future[dict[int, SidesaveError]]]] = {}

    def add(self, request: Delete, future: Future[dict[int, SidesaveError]]) -> None:
        """Add a request about to be sent; its future gets an error for each step that stays."""
        with self._lock:
            self._open[request.save_id] = request, future

    def receive(self, message: Message) -> None:
        """Handle the daemon's answer; other messages are ignored."""
        match message:
            case protocol.Failed(save_id=int(request_id)):
                self._fail(request_id, _error_of(message))
            case protocol.Deleted(save_id=request_id):
                with self._lock:
                    request, future = self._open.pop(request_id, (None, None))
                if request is None or future is None:
                    return
                answers = {failed.step: _error_of(failed) for failed in message.failures}
                failures = {step: error for step, error in answers.items() if step is not None}
                for step in () if request.mirror else request.steps:
                    if step not in failures:
                        # first: once the future is done the step may be saved again
                        self._lineage.remove(step)
                future.set_result(failures)
            case _:
                pass

    def lose(self, ids: Sequence[int], error: SidesaveError) -> None:
        """Fail requests that no daemon will answer."""
        for request_id in ids:
            self._fail(request_id, error)

    def abandon(self) -> None:
        """Give up waiting for a daemon that is left alone."""
        text = "the checkpointer was closed before the step was deleted; its daemon may still do so"
        self.lose(list(self._open), CommitUnknownError(errno.ETIMEDOUT, text, self._directory))

    def _fail(self, request_id: int, error: SidesaveError) -> None:
        with self._lock:
            _, future = self._open.pop(request_id, (None, None))
        if future is not None:
            future.set_exception(error)


class Saves:
    """The saves without an outcome yet, and the effects of an outcome.

    Thread-safe: the daemon's answers come in the connection's thread.
    """

    def __init__(
        self,
        directory: str,
        *,
        failures: Failures,
        turns: Turns,
        lineage: Lineage,
        increments: Increments,
        pool: SlotPool,
        history: History,
        mirroring: Mirroring,
        cost: CostReport,
    ) -> None:
        """Start empty; ``directory`` is the run directory, for the paths of checkpoints."""
        self._directory = directory
        self._failures = failures
        self._turns = turns
        self._lineage = lineage
        self._increments = increments
        self._pool = pool
        self._history = history
        self._cost: CostReport | None = cost
        self.mirroring = mirroring
        self.deletions = Deletions(directory, lineage)
        self.last_write: tuple[int, float] | None = None
        """Bytes of the last save that became durable, and the seconds that writing them took."""
        self._warned = False
        self._changed = Monitor()
        self._open: dict[int, Save] = {}

    def begin(self, save: Save, step: int, *, overwrite: bool, raises: bool) -> bool:
        """Check the step of a call with a turn; return whether it may replace a checkpoint.

        Raises:
            SidesaveError: An earlier save failed, if ``raises``.
            InvalidArgumentError: The step is not one.
            CheckpointExistsError: The step is taken.
        """
        if raises:
            self.raise_failure()
        step = save.step = save.handle.step = arguments.check_step(step)
        with self._changed:
            others = [
                each.sequence
                for each in self._open.values()
                if each.step == step and not each.handle.done()
            ]
        replace, save.replaces = self._lineage.may_replace(
            step, overwrite=overwrite, pending=max(others, default=0)
        )
        self._turns.remember(save)
        return replace

    def add(
        self,
        save: Save,
        info: CheckpointInfo,
        tables: Sequence[TableShare],
        files: tuple[FileImage, ...],
    ) -> None:
        """Add a save whose staging begins now."""
        save.info = info
        self._history.began(save)
        self._increments.began(SavedAs(info.step, info.sequence), tables, files)
        with self._changed:
            self._open[save.sequence] = save
        self.mirroring.add(save.sequence, save.handle, replaces=save.replaces)

    def staged(self, save: Save, error: SidesaveError | None, *, refuses: bool) -> bool:
        """End the filling of a slot; return whether the save is staged.

        With ``refuses``, an error is reported to the other ranks.
        """
        with self._changed:
            save.filling = False
            released, has_failed = save.released, save.error is not None
        if released:  # it has failed, or all is written already
            self._release(save)
        if has_failed:
            return False
        if error is not None:
            self.fail(save, error)
            if refuses:
                self._turns.refuse(save, error)
            return False
        save.reach("staged")
        save.handle.staged.resolve(None)
        self._history.staged(save)
        return True

    def drop(self, save: Save, error: BaseException) -> None:
        """End a call that has failed; no copy may be filling its slot any more. Idempotent."""
        if not save.filling:
            return
        self._turns.take(save)
        if save.slot is not None:
            save.slot.void()  # a writer that follows gives up
        # Without the traceback, whose frames hold the state.
        kept = (
            copy.copy(error)
            if isinstance(error, SidesaveError)
            else StagingError(f"copying the state failed: {error!r}")
        )
        with self._changed:
            save.error, save.filling = kept, False
        try:
            self._end(save, kept)
        finally:
            self._turns.refuse(save, kept)

    def nbytes_written(self) -> int:
        """Return how many bytes storage has taken of the saves under way."""
        return sum(save.handle.nbytes_written for save in list(self._open.values()))

    def remaining_s(self) -> float:
        """Estimate the seconds until the first of the saves in slots is durable.

        From the rate of the last save or, before there is one, from that of the save itself. 0 if
        no save is in a slot, infinite if nothing is known.
        """
        now, last = time.monotonic(), self.last_write
        remaining: list[float] = []
        for save in list(self._open.values()):
            if save.slot is not None:
                nbytes, seconds = last or (save.handle.nbytes_written, now - save.called)
                left_nbytes = save.handle.nbytes - save.handle.nbytes_written
                remaining.append(left_nbytes * seconds / nbytes if nbytes else math.inf)
        return min(remaining, default=0.0)

    def warn_of_wait(self, step: int, seconds: float) -> None:
        """Say once, with an object store, which interval of saves it sustains."""
        if self._warned or self.last_write is None or not urls.is_url(self._directory):
            return
        self._warned = True
        nbytes, took_s = self.last_write
        logger.warning(
            "step %d has waited %.1f s for a staging slot, so saves come faster than %s takes "
            "them: %.3g MB took %.1f s (%.3g MB/s), so one save every %.0f s can be sustained; "
            "save less often, or less",
            step,
            seconds,
            self._directory,
            nbytes / 1e6,
            took_s,
            nbytes / 1e6 / max(took_s, 1e-6),
            max(1.0, took_s),
        )

    # Outcomes -------------------------------------------------------------------------------------

    def receive(self, message: Message) -> None:
        """Handle a message of the daemon; one about a save that has its outcome is ignored."""
        self.mirroring.receive(message)
        self.deletions.receive(message)
        save_id = getattr(message, "save_id", None)
        save = self._open.get(save_id) if isinstance(save_id, int) else None
        if save is None:
            return
        match message:
            case protocol.Progress(nbytes=nbytes, total_nbytes=total):
                save.handle.nbytes_written, save.handle.nbytes = nbytes, total
            case protocol.Written(nbytes=nbytes, seconds=seconds):
                self.last_write = nbytes, seconds
                # it may overtake the thread that notes the first
                for phase in ("staged", "written"):
                    save.reach(phase)
                self._release(save)
                save.handle.staged.resolve(None)
                save.handle.written.resolve(None)
            case protocol.Committed(name=name, nbytes=nbytes):
                self._commit(save, os.path.join(self._directory, name), nbytes)
            case protocol.Failed(saved_instead=other):
                if other is not None:  # first: a caller that has seen the failure saves again
                    self._turns.catch_up(save, other)
                self.fail(save, _error_of(message))
            case _:
                pass

    def lose(self, ids: Sequence[int], error: SidesaveError) -> None:
        """Fail the saves and deletions that no daemon will finish."""
        for save in filter(None, map(self._open.get, ids)):
            self.fail(save, error)
        self.deletions.lose(ids, error)

    def being_staged(self) -> list[Save]:
        """The saves whose slots are still being filled."""
        return [save for save in list(self._open.values()) if save.filling and save.error is None]

    def fail(self, save: Save, error: SidesaveError, *, report: bool = True) -> None:
        """Give a save its failure; with ``report`` false no other call raises it."""
        with self._changed:
            if save.sequence not in self._open or save.error is not None:
                return
            save.error = copy.copy(error)
        if report:
            self._failures.add(save.step, error)
        self._end(save, error)

    def abandon(self) -> None:
        """Give up waiting for saves that a daemon, left alone, may still finish."""
        self.deletions.abandon()
        for save in list(self._open.values()):
            save.abandoned = True
            text = (
                f"the checkpointer was closed before step {save.step} was committed; its daemon "
                "may still do so"
            )
            self.fail(
                save, CommitUnknownError(errno.ETIMEDOUT, text, self._directory), report=False
            )
        self.mirroring.abandon()

    def _commit(self, save: Save, path: str, nbytes: int) -> None:
        assert save.info is not None
        save.info = dataclasses.replace(save.info, path=path, nbytes=nbytes)
        for phase in ("staged", "written", "committed"):  # it may overtake what other threads note
            save.reach(phase)
        self._failures.committed()
        cost, self._cost = self._cost, None
        if cost is not None:
            cost.committed(nbytes, save.reached)
        self._end(save, None)

    def _end(self, save: Save, error: SidesaveError | None) -> None:
        """Do all that follows from the outcome of a save."""
        handle, info = save.handle, save.info
        record: SaveRecord | None = None
        try:
            try:
                if error is None and info is not None:
                    self._lineage.add(info)
                self._increments.ended(save.sequence, committed=error is None)
                self._release(save)
                record = self._history.ended(save)
            finally:
                if error is None and info is not None:
                    handle.commit(info)
                elif error is not None:
                    handle.fail(error)
            if record is not None:
                self._history.show(record)
        finally:  # or wait() would wait for it for ever
            with self._changed:
                self._open.pop(save.sequence, None)
                self._changed.notify_all()

    def _release(self, save: Save) -> None:
        with self._changed:
            save.released = True
            if save.filling:
                return
            save.slot = None
        self._pool.release(save, void=not save.abandoned)

    # Waiting --------------------------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> None:
        """Block until saves open now have outcomes; ``WriteStalledError`` after ``timeout_s``."""
        waiting = dict(self._open)
        if not self._changed.wait_for(lambda: not waiting.keys() & self._open.keys(), timeout_s):
            steps = sorted(
                save.handle.step for save in list(self._open.values()) if save.sequence in waiting
            )
            raise WriteStalledError(f"steps {steps} were not committed within {timeout_s:g} s")

    def await_end(self, save: Save) -> None:
        """Block until a save has an outcome and observers know it; raise the error if it failed."""
        self._changed.wait_for(lambda: save.sequence not in self._open)
        save.handle.committed.result()

    def settle(self, step: int | None) -> None:
        """Wait for the outcomes of saves of ``step``, or all; failures are logged, not raised."""
        saves = [save for save in list(self._open.values()) if step is None or save.step == step]
        self._changed.wait_for(lambda: not any(save.sequence in self._open for save in saves))
        for save in saves:
            if save.error is not None:
                logger.warning("step %s was not saved, so it is not there to be loaded", save.step)

    def raise_failure(self) -> None:
        """Raise the first failure that was neither raised nor read before, and log the others."""
        self._failures.raise_first()


def _error_of(failed: protocol.Failed) -> SidesaveError:
    return errors.from_wire(failed.error, failed.message, failed.errno, failed.path)
