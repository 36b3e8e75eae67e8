"""Saves, deletes, and undoes interrupted calls; see :mod:`sidesave.stager.signal_safe`."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Final

import torch

from sidesave.client import arguments
from sidesave.client.saving.handle import Outcome, SaveHandle
from sidesave.client.saving.planner import Planner
from sidesave.client.saving.save import Save
from sidesave.client.saving.session import Session
from sidesave.client.saving.shard_plan import ShardPlan
from sidesave.errors import (
    HostMemoryError,
    InvalidArgumentError,
    SidesaveError,
    StagingError,
    UnsupportedValueError,
)
from sidesave.stager import signal_safe
from sidesave.stager.copy.pool import slot_nbytes
from sidesave.stager.copy.slot import StagingSlot
from sidesave.stager.devices import kinds
from sidesave.stager.plan import FileImage
from sidesave.stager.state.flat_state import OBJECTS
from sidesave.writer_daemon import protocol, wire
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.protocol import Extent, Link, Parent, Unshared
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)

_FOLLOW_NBYTES: Final = 512 << 20
"""Size from which on the writer follows the copy.

For 1.4 GB this made a save durable 75 ms sooner, and its call 4 ms longer. For 0.35 GB these were
11 ms and 7 ms, and there the call counts more.
"""
_FILE_NBYTES: Final = 512 << 20
"""Largest file in a store, where a file is one object that arrives whole or not at all."""
_CALL_TIMEOUT_S: Final = 600.0


class Saver:
    """Saves one state after another; see :class:`Checkpointer` for its public part. Thread-safe."""

    def __init__(self, session: Session) -> None:
        """Save for a session that has started."""
        self.session = session
        # Also for a mirror in a store: there an interrupted file is begun again.
        stored = urls.is_url(session.directory) or urls.is_url(session.run.mirror.place)
        self._planner = Planner(
            session.node,
            session.increments,
            allow_pickle=session.options.allow_pickle,
            file_nbytes=_FILE_NBYTES if stored else None,
        )
        self._is_alone = session.world.size == 1
        self._skips = session.options.staging.on_busy == "skip" and self._is_alone
        self._encryption = session.encryption if session.encryption else None
        self._new_message = functools.partial(
            protocol.Save,
            attempt=1,
            session=session.id,
            rank=session.node.rank,
            world_size=session.node.size,
            torch_version=str(torch.__version__),
            retry=False,
        )
        self._call = threading.RLock()
        # of the call of save() under way, or of one that was interrupted
        self._current: Save | None = None

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
                save = self._current = Save(SaveHandle(step), session.copier.new_copy())
                try:
                    session.turns.take(save)  # first: every call takes a turn, also one that fails
                    session.check_open()  # again: close() may have come first
                    # With several ranks some may have read a failure, and the others would go on.
                    replace = session.saves.begin(
                        save, step, overwrite=overwrite, raises=self._is_alone
                    )
                    if refusal is not None:
                        raise refusal
                    metadata_json = arguments.encode_metadata(metadata)
                    extra_files = arguments.encode_files(files)
                    flat = self._planner.flatten(state)
                    save.slot = session.pool.try_acquire(save)
                    if save.slot is None and self._skips and session.pool.is_busy():
                        self._current = None
                        return self._skip(save)
                    if save.slot is None:
                        save.slot = self._await_slot(save)
                    # after the wait: it links to saves that may fail until then
                    shards = self._planner.plan(flat)
                    parts = self._parts(shards, extra_files, metadata_json)
                    self._stage(save, shards, parts, replace=replace, blocking=blocking)
                except BaseException as error:
                    self._undo(save, error)
                    raise
                self._current = None
        try:
            if blocking:
                session.saves.await_end(save)
        finally:
            save.reach("returned")
        return save.handle

    def _await_slot(self, save: Save) -> StagingSlot:
        session = self.session
        if (patience_s := session.slot_patience_s()) is None:
            slot = session.pool.try_acquire(save, empty=True)
            if slot is None:
                raise StagingError(
                    "save() was called in a callback of a save's future while all staging slots "
                    "are busy, and would have to wait for itself; save in the training loop"
                )
            return slot
        began, saves = time.monotonic(), session.saves
        slot = session.pool.acquire(save, patience_s, saves.nbytes_written, saves.remaining_s)
        saves.warn_of_wait(save.handle.step, time.monotonic() - began)
        return slot

    def check(self, state: Mapping[str, Any]) -> None:
        """See :meth:`Planner.check`."""
        self._planner.check(state)

    def _stage(
        self,
        save: Save,
        shards: ShardPlan,
        parts: Mapping[str, bytes],
        *,
        replace: bool,
        blocking: bool,
    ) -> None:
        """Copy a state into a save's slot and have it written; if it raises, call :meth:`_undo`."""
        session, slot, flat, plan = self.session, save.slot, shards.flat, shards.plan
        assert slot is not None
        small = self._lay_out(slot, shards, parts, session.books.call)
        save.staging_nbytes = session.pool.nbytes
        save.reached["laid_out"] = time.monotonic()
        arena = slot.arena
        assert arena is not None
        message = self._describe(save, shards, slot, small, replace=replace)
        descriptor = wire.encode(message)
        if len(descriptor) > wire.MAX_MESSAGE_NBYTES:
            raise UnsupportedValueError(
                f"{len(plan.files):,} top-level items with tensors are too many; nest them"
            )
        save.handle.nbytes = message.nbytes
        parent = None if message.parent is None else (message.parent.step, message.parent.session)
        info = CheckpointInfo(
            step=message.step,
            path="",
            nbytes=0,
            session=message.session,
            sequence=message.sequence,
            parent=parent,
            created_s=message.created_s,
            metadata=json.loads(parts.get("metadata", b"{}")),
        )
        session.saves.add(save, info, shards.tables, plan.files)
        # A large state that is copied right here is written while it is copied: the writer follows
        # the arena's mark.
        follow = plan.nbytes >= _FOLLOW_NBYTES and session.copier.captures_all(flat)

        def staged(error: SidesaveError | None) -> None:
            if error is None:
                try:
                    arena.mark_staged(descriptor)  # from here on the save survives this process
                except BaseException as failure:  # noqa: BLE001 - this save's failure
                    error = StagingError(f"declaring the state staged failed: {failure!r}")
            # A daemon that follows finds out by itself that the copy has failed.
            if session.saves.staged(save, error, refuses=not follow) and not follow:
                session.connection.submit(message, descriptor)

        if follow:
            session.books.call(lambda: session.connection.submit(message, descriptor))
        if session.copier.copy(save.copy, flat, plan, slot, staged, blocking=blocking):
            session.books.submit(lambda: staged(None))
            if not session.books.is_current():
                save.handle.staged.peek()  # wait; not for callbacks

    def _parts(
        self, shards: ShardPlan, extra_files: bytes, metadata: bytes = b""
    ) -> dict[str, bytes]:
        """Return all that is staged behind the tensors, by name."""
        parts = {
            OBJECTS: shards.flat.objects,
            "table": shards.table,
            "unshared": shards.unshared_table,
            "metadata": metadata,
            "extra_files": b"" if self.session.node.rank else extra_files,
        }
        return {name: part for name, part in parts.items() if part or name == OBJECTS}

    def _lay_out(
        self,
        slot: StagingSlot,
        shards: ShardPlan,
        parts: Mapping[str, bytes],
        run: Callable[[Callable[[], None]], None],
    ) -> dict[str, Extent]:
        """Give a slot memory for a plan, with ``run`` if it needs any, and put ``parts`` there."""
        session, progress = self.session, self.session.saves.nbytes_written
        if not slot.nbytes:
            session.cost.before(slot_nbytes(shards.plan, parts.values()))
        device = kinds.first_with_runtime(  # the memory is page-locked for its copies
            tensor for tensors in shards.flat.containers.values() for tensor in tensors.values()
        )
        try:
            offsets = session.pool.lay_out(
                slot, shards.plan, parts.values(), device, run, session.slot_patience_s, progress
            )
        except HostMemoryError as error:
            if not shards.unshared:
                raise
            text = "plain tensors that ranks may hold alike or not are staged whole on every rank"
            raise HostMemoryError(
                f"{error}; {text}: wrap equal ones in sidesave.Replicated"
            ) from error
        return {
            name: Extent(name=name, offset=offset, nbytes=len(part))
            for offset, (name, part) in zip(offsets, parts.items(), strict=True)
        }

    def _describe(
        self,
        save: Save,
        shards: ShardPlan,
        slot: StagingSlot,
        small: Mapping[str, Extent],
        *,
        replace: bool,
    ) -> protocol.Save:
        """Return the SAVE message for a slot about to be filled; void what was staged in it."""
        session, arena = self.session, slot.arena
        assert arena is not None and save.step is not None
        base = arena.data_offset

        def extents(files: list[FileImage]) -> tuple[Extent, ...]:
            return tuple(
                Extent(name=file.name, offset=base + file.offset, nbytes=file.nbytes)
                for file in files
            )

        unshared = None
        if shards.unshared_table:
            files = [file for file in shards.plan.files if file.container in shards.unshared]
            unshared = Unshared(files=extents(files), table=small["unshared"])
        parent = session.lineage.parent
        return self._new_message(
            save_id=save.sequence,
            arena=slot.arena_id,
            generation=arena.begin_generation(),
            step=save.step,
            sequence=save.sequence,
            files=extents(
                [file for file in shards.plan.files if file.container not in shards.unshared]
            ),
            objects=small[OBJECTS],
            parent=None if parent is None else Parent(step=parent[0], session=parent[1]),
            replace=replace,
            pickled=shards.flat.pickled,
            created_s=save.called_s,
            table=small.get("table"),
            unshared=unshared,
            metadata=small.get("metadata"),
            extra_files=small.get("extra_files"),
            droppable=session.droppable,
            links=tuple(
                Link(names=share.base.names, saves=tuple(share.base.saves))
                for share in shards.tables
                if share.base
            ),
            sealing=None
            if self._encryption is None
            else self._encryption.of_save(session.id, save.sequence),
        )

    def _skip(self, save: Save) -> SaveHandle:
        save.step = save.handle.step
        save.handle = SaveHandle(save.step, skipped=True)
        record = self.session.history.ended(save)
        if record is not None:
            self.session.history.show(record)
        return save.handle

    def prepare(self, state: Mapping[str, Any], extra_files: bytes, slots: int) -> Future[None]:
        """See :meth:`Checkpointer.prepare`. The first save reuses the plan."""
        session = self.session
        session.check_open()
        self._refuse_reentry("prepare")
        session.options.check_slots(slots)
        with kinds.exclusion():
            kinds.await_captures("prepare()")
            with self._call:
                shards = self._planner.plan(self._planner.flatten(state))
        parts = self._parts(shards, extra_files)
        future: Future[None] = Outcome()
        future.set_running_or_notify_cancel()

        def work() -> None:
            try:
                for _ in range(slots):
                    if (slot := session.pool.try_acquire(future, empty=True)) is not None:
                        self._lay_out(slot, shards, parts, lambda fit: fit())
            except BaseException as error:  # noqa: BLE001 - handed over through the future
                session.pool.release(future)
                future.set_exception(error)
            else:
                session.pool.release(future)
                future.set_result(None)

        signal_safe.start(work, "sidesave-prepare")
        return future

    def give_up(self, step: int, error: BaseException) -> None:
        """Take a turn for a save that failed before it was called, and tell the other ranks."""
        with self._call:
            self.undo_interrupted()
            save = self._current = Save(SaveHandle(step), self.session.copier.new_copy())
            self._undo(save, error)

    def skip(self, step: int) -> SaveHandle:
        """Take a turn for a save that all ranks have agreed to skip.

        All ranks must call this. Daemons do not hear of it.
        """
        with self._call:
            self.undo_interrupted()
            save = Save(SaveHandle(step), self.session.copier.new_copy())
            self.session.turns.take(save)
            return self._skip(save)

    def delete(self, step: int) -> Future[None]:
        """See :meth:`Checkpointer.delete`."""
        step = arguments.check_step(step)
        future = Outcome[None]()
        future.set_running_or_notify_cancel()
        if self.session.mirroring.has_older(step):
            future.set_exception(
                InvalidArgumentError(
                    f"step {step} was saved again, and the mirror may have only the older save, "
                    "which would be loaded then; call wait(mirrored=True), and delete the step "
                    "after it"
                )
            )
            return future

        def pass_on(answer: Future[dict[int, SidesaveError]]) -> None:
            error = answer.exception() or answer.result().get(step)
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self.session.delete((step,)).add_done_callback(pass_on)
        return future

    # What may call, and what a call has left ------------------------------------------------------

    def refuse_waiting(self, what: str) -> None:
        """Raise ``StagingError`` inside a save or a callback: waiting there would never end."""
        self._refuse_reentry(what)
        self._refuse_in_callback(what)

    def await_call(self, timeout_s: float | None) -> None:
        """Wait up to ``timeout_s`` seconds (None: ten minutes) for another thread's ``save()``."""
        try:
            self._call.acquire(timeout=_CALL_TIMEOUT_S if timeout_s is None else timeout_s)
        finally:
            with contextlib.suppress(RuntimeError):  # else another thread's save() is still at work
                self._call.release()

    def undo_interrupted(self) -> None:
        """Give back all that an interrupted :meth:`save` has left; not inside another one."""
        save = self._current
        if save is not None and not self._is_saving(save.thread):
            with self._call:
                if self._current is save:
                    self._undo(save, None)

    def _undo(self, save: Save, error: BaseException | None) -> None:
        """End a failed call of :meth:`save`; if interrupted, the next call does it again."""
        undo = functools.partial(self.session.undo, save, error)
        if self.session.is_our_thread():  # no signal interrupts it, and this would wait for it
            self.session.books.submit(undo)
        else:
            self.session.books.call(undo)
        self._current = None

    def _is_saving(self, thread: int) -> bool:
        """Whether a thread is in :meth:`save`, by its frames, which no interrupt leaves behind."""
        frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage] - documented
        while frame is not None:
            if frame.f_code is Saver.save.__code__ and frame.f_locals.get("save") is self._current:
                return True
            frame = frame.f_back
        return False

    def _refuse_reentry(self, what: str) -> None:
        if self._current is not None and self._is_saving(threading.get_ident()):
            raise StagingError(
                f"{what}() was called inside this thread's save(), by a signal handler for "
                "instance; set a flag there and call it from the training loop"
            )

    def _refuse_in_callback(self, what: str) -> None:
        """Raise in our own threads, where a call that waits for them would wait forever."""
        if self.session.is_our_thread():
            raise StagingError(
                f"{what}() was called in a callback of a save's future, which it would have to "
                "wait for"
            )
