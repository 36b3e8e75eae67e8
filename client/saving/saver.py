"""The calls that save and delete, and what an interrupted one has left; see :mod:`sidesave.stager.signal_safe`."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from sidesave.client import arguments
from sidesave.client.saving.handle import Outcome, SaveHandle
from sidesave.client.saving.in_flight import SaveInFlight
from sidesave.client.saving.pipeline import Submission
from sidesave.client.saving.session import Session
from sidesave.errors import StagingError
from sidesave.stager import signal_safe
from sidesave.stager.devices import kinds
from sidesave.stager.state.recall import Recall
from sidesave.writer_daemon.protocol import Delete


class Saver:
    """Saves one state after the other; see :class:`Checkpointer` for what is public of it. Thread-safe."""

    def __init__(self, session: Session) -> None:
        """Save for a session that has started."""
        self.session = session
        self.submission = Submission(session)
        self._recall = Recall()
        self._call = threading.RLock()
        self._entry: SaveInFlight | None = None  # of the call of save() under way, or of one that was interrupted

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        blocking: bool,
        overwrite: bool,
        metadata: Mapping[str, Any] | None,
        files: Mapping[str, str | bytes] | None,
    ) -> SaveHandle:
        """See :meth:`Checkpointer.save`."""
        session = self.session
        session.check_open()
        self._refuse_reentry("save")
        if blocking:
            self._refuse_in_callback("save")
        with kinds.exclusion():
            refusal: StagingError | None = None
            try:
                kinds.await_captures("save()")
            except StagingError as error:
                refusal = error
            with self._call:
                self.undo_interrupted()
                # Every call takes a place, whatever comes of it: by its place other ranks know which save is meant.
                handle = SaveHandle(step)
                handle.written.hurry = handle.committed.hurry = session.pacer.lift
                entry = self._entry = SaveInFlight(step, handle, session.copier.new_copy())
                try:
                    session.lineage.give_place(entry)
                    session.check_open()  # again: close() may have come first
                    if session.world.size == 1:  # of several ranks some may have read it, and the others go on
                        session.saves.raise_failure()
                    if refusal is not None:
                        raise refusal
                    step = entry.step = handle.step = arguments.check_step(step)
                    entry.unrecorded = True
                    metadata_json, extra_files = arguments.encode_metadata(metadata), arguments.encode_files(files)
                    pending = session.saves.place_of(step)
                    replace = session.lineage.may_replace(step, overwrite=overwrite, pending=pending)
                    flat = self.submission.flatten(state, self._recall)
                    entry.slot = session.pool.try_acquire(entry)
                    if entry.slot is None and session.options.on_busy == "skip" and session.world.size == 1:
                        session.history.came_to_nothing(entry)
                        self._entry = None
                        return SaveHandle(step, skipped=True)
                    if entry.slot is None:
                        session.pacer.lift()
                        began = time.monotonic()
                        entry.slot = session.pool.acquire(entry, session.options.busy_timeout_s)
                        session.congestion.waited(step, time.monotonic() - began)
                    self.submission.stage(
                        entry, flat, replace=replace, blocking=blocking, metadata=metadata_json, extra_files=extra_files
                    )
                except BaseException as error:
                    self._undo(entry, error)
                    raise
                self._entry = None
                entry.returned = time.monotonic()
                session.pacer.called(entry.called)
        if blocking:
            handle.committed.result()
        return handle

    def prepare(self, state: Mapping[str, Any], extra_files: bytes) -> Future[None]:
        """See :meth:`Checkpointer.prepare`. The first save reuses what this finds out about the state."""
        session, submission = self.session, self.submission
        session.check_open()
        self._refuse_reentry("prepare")
        with kinds.exclusion():
            kinds.await_captures("prepare()")
            with self._call:
                shards = submission.shards_of(submission.flatten(state, self._recall))
        future: Future[None] = Outcome()
        future.set_running_or_notify_cancel()

        def work() -> None:
            failure: BaseException | None = None
            try:
                while (slot := session.pool.try_acquire(future)) is not None:
                    submission.fit(shards, slot, extra_files)
            except BaseException as error:  # noqa: BLE001 - handed over through the future
                failure = error
            session.pool.release(future)
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(failure)

        signal_safe.start(work, "sidesave-prepare")
        return future

    def give_up(self, step: int, error: BaseException) -> None:
        """Take a turn for a save that failed before it was called, and tell the other ranks."""
        with self._call:
            self.undo_interrupted()
            entry = SaveInFlight(step, SaveHandle(step), self.session.copier.new_copy())
            self._entry = entry
            self._undo(entry, error)

    def skip(self, step: int) -> SaveHandle:
        """Take a turn for a save that all ranks have agreed to skip, each by this call; daemons do not hear of it."""
        with self._call:
            self.undo_interrupted()
            entry = SaveInFlight(step, SaveHandle(step), self.session.copier.new_copy())
            self.session.lineage.give_place(entry)
            self.session.history.came_to_nothing(entry)
        return SaveHandle(step, skipped=True)

    def delete(self, step: int, *, spare_read: bool = False, mirror: bool = False) -> Future[None]:
        """See :meth:`Checkpointer.delete`; with ``spare_read`` it is refused, with EBUSY, while somebody reads it.

        With ``mirror`` it is deleted there, and nowhere else.
        """
        session = self.session
        session.check_open()
        step = arguments.check_step(step)
        lineage = session.lineage
        request = Delete(
            attempt=1,
            save_id=next(session.ids),
            step=step,
            sequence=lineage.sequence,
            retry=False,
            spare_read=spare_read,
            mirror=mirror,
        )
        saves, connection, copier = session.saves, session.connection, session.copier
        answer, future = Future[None](), Outcome[None]()
        future.set_running_or_notify_cancel()

        def pass_on(answer: Future[None]) -> None:
            error = answer.exception()
            if error is not None:
                future.set_exception(error)
                return
            if not mirror:
                lineage.remove(step)  # first: who learns of it may save the step again
            future.set_result(None)

        def submit() -> None:
            saves.add_deletion(request.save_id, answer)
            connection.submit(request)

        answer.add_done_callback(pass_on)
        session.books.submit(lambda: copier.when_copied(submit))
        return future

    # What may call, and what a call has left ---------------------------------------------------------------------

    def refuse_waiting(self, what: str) -> None:
        """Raise ``StagingError`` where a call that waits for saves would wait for itself: in one, or in a callback."""
        self._refuse_reentry(what)
        self._refuse_in_callback(what)

    def await_call(self, timeout_s: float | None) -> None:
        """Wait for a ``save()`` of another thread, at most so long or ``busy_timeout_s``."""
        try:
            self._call.acquire(timeout=self.session.options.busy_timeout_s if timeout_s is None else timeout_s)
        finally:
            with contextlib.suppress(RuntimeError):  # else another thread's save() is still at work
                self._call.release()

    def undo_interrupted(self) -> None:
        """Give back what an interrupted call of :meth:`save` has left; not inside another one."""
        entry = self._entry
        if entry is not None and not self._is_saving(entry.thread):
            with self._call:
                if self._entry is entry:
                    self._undo(entry, None)

    def _undo(self, entry: SaveInFlight, error: BaseException | None) -> None:
        """End a call of :meth:`save` that came to nothing; where this is interrupted, the next call does it again."""
        undo = functools.partial(self.submission.undo, entry, error)
        if self.session.is_our_thread():  # that nothing interrupts, and that this would wait for
            self.session.books.submit(undo)
        else:
            self.session.books.call(undo)
        self._entry = None

    def _is_saving(self, thread: int) -> bool:
        """Whether that thread is inside :meth:`save`, as its frames tell, which no interrupt can leave behind."""
        frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage] - documented
        while frame is not None:
            if frame.f_code is Saver.save.__code__ and frame.f_locals.get("entry") is self._entry:
                return True
            frame = frame.f_back
        return False

    def _refuse_reentry(self, what: str) -> None:
        if self._entry is not None and self._is_saving(threading.get_ident()):
            raise StagingError(
                f"{what}() was called inside this thread's save(), by a signal handler for instance; "
                "set a flag there and call it from the training loop"
            )

    def _refuse_in_callback(self, what: str) -> None:
        """Raise in our own threads, where a call that waits for them would wait forever."""
        if self.session.is_our_thread():
            raise StagingError(f"{what}() was called in a callback of a save's future, which it would have to wait for")
