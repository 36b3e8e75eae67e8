"""Stages a flat state and asks the daemon to write it: all of a save but its outcome."""

from __future__ import annotations

import collections
import copy
import functools
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from sidesave.client import arguments
from sidesave.client.increments import Increments, SavedAs
from sidesave.client.ranks.group import NodeWorld
from sidesave.client.saving.in_flight import SaveInFlight
from sidesave.client.saving.session import Session
from sidesave.client.saving.shard_plan import ShardPlan, ShardPlanner, with_tables
from sidesave.errors import (
    HostMemoryError,
    SidesaveError,
    StagingError,
    StateMismatchError,
    UnsupportedValueError,
)
from sidesave.stager import signal_safe
from sidesave.stager.copy.pool import Slot
from sidesave.stager.devices import kinds
from sidesave.stager.plan import FileImage, Looks, LooksCache, Plan, Structure, make_plan
from sidesave.stager.state import tree
from sidesave.stager.state.flat_state import OBJECTS, FlatState
from sidesave.stager.state.recall import Recall
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.protocol import Extent, Link, Parent, Refuse, Save, Unshared
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)

_MAX_PLANS: Final = 8
_MAX_STEPS: Final = 1000
"""So many turns back it is remembered which step this rank has saved; one that has missed more never catches up."""
_FOLLOW_NBYTES: Final = 512 << 20
"""From this size on the writer follows the copy. For 1.4 GB that made a save durable 75 ms sooner for 4 ms of the call;
for 0.35 GB it was 11 ms for 7, and there the call counts more."""

_FILE_NBYTES: Final = 512 << 20
"""In a store a file is one object, which arrives whole or not at all."""


class Submission:
    """Flattens states, stages them, and hands them to the daemon; one call at a time."""

    def __init__(self, session: Session) -> None:
        """Work for a session that has started."""
        self._session = session
        self._world = world = session.node
        alone = world.size == 1 and not isinstance(world, NodeWorld)
        # Also of what is copied to a store: there the file is what is begun anew after an interruption.
        stored = urls.is_url(session.directory) or urls.is_url(session.run.mirror.place)
        self._file_nbytes = _FILE_NBYTES if stored else None
        self._planner = None if alone else ShardPlanner(world, self._file_nbytes)
        self._looks = LooksCache()
        self.increments = Increments(links=not session.encryption)
        self._last: tuple[Looks, Plan] | None = None
        self._steps: collections.deque[tuple[int, int]] = collections.deque(maxlen=_MAX_STEPS)
        self._caught_up = 0
        session.saves.on_misaligned = self._catch_up
        for worker in (session.books, *session.copier.workers):
            worker.on_failure = self.lose

    def flatten(self, state: Mapping[str, Any], recall: Recall | None = None) -> FlatState:
        """Flatten a state; raises for what cannot be saved."""
        ranks = None if self._planner is None else self._world.ranks
        return tree.flatten(state, allow_pickle=self._session.options.allow_pickle, ranks=ranks, recall=recall)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise for what cannot be saved of a state, as far as that is known before training."""
        ranks = None if self._planner is None else self._world.ranks
        tree.check(state, allow_pickle=self._session.options.allow_pickle, ranks=ranks)

    def fit(self, shards: ShardPlan, slot: Slot, extra_files: bytes = b"") -> None:
        """Give ``slot`` the memory that a state like this one takes; blocks while pages are allocated.

        For a thread that nothing interrupts.
        """
        self._fit(slot, shards, lambda fit: fit(), extra_files=extra_files)

    def stage(
        self,
        entry: SaveInFlight,
        state: FlatState,
        *,
        replace: bool,
        blocking: bool,
        metadata: bytes = b"",
        extra_files: bytes = b"",
    ) -> None:
        """Copy a state into the slot of ``entry`` and have it written; where this raises, :meth:`undo` has to follow.

        ``metadata`` and ``extra_files`` are what :mod:`sidesave.client.arguments` makes of those arguments.
        """
        session, slot, handle = self._session, entry.slot, entry.handle
        assert slot is not None
        self._steps.append((entry.sequence, entry.step))
        shards = self.shards_of(state)
        flat, plan = shards.flat, shards.plan
        parts = self._fit(slot, shards, session.books.call, metadata, extra_files)
        arena = slot.arena
        assert arena is not None
        save = entry.save = self._describe(entry, shards, slot, parts, replace=replace)
        descriptor = protocol.encode(save)
        if len(descriptor) > protocol.MAX_MESSAGE_NBYTES:
            raise UnsupportedValueError(f"{len(plan.files):,} top-level items with tensors are too many; nest them")
        handle.nbytes = save.nbytes
        entry.metadata = json.loads(metadata or b"{}")
        session.history.begin(entry)
        entry.on_outcome = self.increments.follow(shards.tables, plan.files, SavedAs(entry.step, entry.sequence))
        session.saves.add(entry)
        session.pacer.began(entry.sequence, entry.called, save.nbytes, arena)
        # A large state that is copied right here is written while it is copied: the writer follows the arena's mark.
        follow = plan.nbytes >= _FOLLOW_NBYTES and session.copier.captures_all(flat)

        def staged(error: SidesaveError | None) -> None:
            if error is None:
                try:
                    arena.mark_staged(descriptor)  # from here on the save survives this process
                except BaseException as failure:  # noqa: BLE001 - this save's failure
                    error = StagingError(f"declaring the state staged failed: {failure!r}")
            if not session.saves.filled(entry):
                return  # storage refused before all was copied
            if error is not None:
                session.saves.fail(entry, error)
                if not follow:  # else the daemon finds out by itself
                    self.refuse(entry.step, entry.sequence, error)
                return
            handle.staged.resolve(None)
            session.history.staged(entry)
            if not follow:
                session.connection.submit(save, descriptor)

        if follow:
            session.books.call(lambda: session.connection.submit(save, descriptor))
        if session.copier.copy(entry.copy, flat, plan, slot, staged, blocking=blocking):
            session.books.submit(lambda: staged(None))
            if not session.books.is_current():
                handle.staged.peek()  # wait; not for callbacks

    def undo(self, entry: SaveInFlight, error: BaseException | None) -> None:
        """Give back what a save's call has taken that ended with ``error``, None if its end was not seen.

        For a thread that nothing interrupts; blocks until what the call has handed over is copied, and for no copies
        before it where it has handed over nothing. Idempotent: nothing is undone of a save that was handed over as a
        whole.
        """
        undone = signal_safe.Latch()

        def undo() -> None:
            try:
                self._session.copier.abandon(entry.copy)
                if entry.filling:
                    self._undo(entry, error or StagingError("save() was interrupted"))
            finally:
                undone.open()

        if entry.slot is None:
            undo()
        else:
            self._session.copier.when_copied(undo)
            undone.wait()

    def _undo(self, entry: SaveInFlight, error: BaseException) -> None:
        self._session.lineage.give_place(entry)
        if entry.slot is not None:
            entry.slot.void()  # a writer that follows gives up
        # Without the traceback, whose frames hold the state, and the handle that holds this.
        kept = (
            copy.copy(error)
            if isinstance(error, SidesaveError)
            else StagingError(f"copying the state failed: {error!r}")
        )
        if entry.unrecorded:
            self._session.history.came_to_nothing(entry, error)
        self._session.saves.drop(entry, kept)
        self.refuse(entry.step, entry.sequence, error)

    def lose(self, error: BaseException) -> None:
        """Fail what is being staged: a thread of ours has not done what it had to, perhaps for one of these saves."""
        for entry in self._session.saves.being_staged():
            lost = StagingError(f"a thread that stages step {entry.step} failed: {error!r}")
            self._session.saves.fail(entry, lost)
            self._session.books.submit(functools.partial(self.undo, entry, lost))

    def refuse(self, step: object, sequence: int, error: BaseException) -> None:
        """Tell the other ranks that this one will not take part in what may be under way on theirs."""
        if self._planner is None or self._world.size == 1:  # a node of its own
            return
        failure = protocol.failure(1, None, error if isinstance(error, SidesaveError) else StagingError(str(error)))
        request = Refuse(
            attempt=1,
            save_id=next(self._session.ids),
            step=step if type(step) is int and 0 <= step <= arguments.MAX_STEP else 0,
            session=self._session.id,
            sequence=sequence,
            rank=self._world.rank,
            world_size=self._world.size,
            error=failure.error,
            message=failure.message,
            errno=failure.errno,
            path=failure.path,
            retry=False,
        )
        self._session.connection.submit(request)

    def _catch_up(self, save: Save, other: int) -> None:
        """Another rank saved ``other`` in the turn of ``save``. If this rank saved it before, it has missed turns.

        This rank takes the missed turns without saving, tells the others at once, and is then where they are.
        """
        earlier = [sequence for sequence, step in list(self._steps) if step == other and sequence < save.sequence]
        if not earlier or save.sequence <= self._caught_up:  # another save's failure has told already
            return
        missed = save.sequence - earlier[-1]
        calls = "a call" if missed == 1 else f"{missed} calls"
        text = f"rank {self._world.rank} has missed {calls} of save() before step {other}, and catches up"
        logger.warning("%s: every rank has to save the same steps in the same order", text)
        for _ in range(missed):
            self._caught_up = self._session.lineage.next_sequence()
            self.refuse(save.step, self._caught_up, StateMismatchError(text))

    def shards_of(self, flat: FlatState) -> ShardPlan:
        """What this rank stages of a state, and where; raises for what cannot be staged."""
        tables = self.increments.shares(flat)
        flat.row_images = [image for share in tables for image in share.images]
        if self._planner is not None:
            return self._planner.plan(flat, tables)
        looks = flat.looks = self._looks.of(flat)
        last = self._last
        if last is None or last[0] is not looks:
            last = self._last = looks, _plan_of(looks.structure, self._file_nbytes)
        return ShardPlan(flat, with_tables(last[1], tables, "", self._file_nbytes), (), b"", b"", tuple(tables))

    def _fit(
        self,
        slot: Slot,
        shards: ShardPlan,
        run: Callable[[Callable[[], None]], None],
        metadata: bytes = b"",
        extra_files: bytes = b"",
    ) -> dict[str, bytes]:
        parts = {OBJECTS: shards.flat.objects, "table": shards.table, "unshared": shards.unshared_table}
        parts |= {"metadata": metadata, "extra_files": b"" if self._world.rank else extra_files}
        parts = {name: part for name, part in parts.items() if part or name == OBJECTS}
        try:
            wanted = slot, shards.plan, [*parts.values()], _device(shards.flat)
            if not self._session.pool.fits(*wanted):
                run(lambda: self._session.pool.fit(*wanted))
        except HostMemoryError as error:
            if not shards.unshared:
                raise
            text = "plain tensors that ranks may hold alike or not are staged whole on every rank"
            raise HostMemoryError(f"{error}; {text}: wrap what is alike in sidesave.Replicated") from error
        return parts

    def _describe(
        self, entry: SaveInFlight, shards: ShardPlan, slot: Slot, parts: Mapping[str, bytes], *, replace: bool
    ) -> Save:
        """The SAVE message of what is about to be staged in ``slot``, whose memory it declares unfinished."""
        arena = slot.arena
        assert arena is not None
        base = arena.data_offset
        offsets = slot.append([*parts.values()])
        small = {
            name: Extent(name=name, offset=base + offset, nbytes=len(part))
            for offset, (name, part) in zip(offsets, parts.items(), strict=True)
        }

        def extents(files: list[FileImage]) -> tuple[Extent, ...]:
            return tuple(Extent(name=file.name, offset=base + file.offset, nbytes=file.nbytes) for file in files)

        unshared = None
        if shards.unshared_table:
            files = [file for file in shards.plan.files if file.container in shards.unshared]
            unshared = Unshared(files=extents(files), table=small["unshared"])
        parent = self._session.lineage.parent
        return Save(
            attempt=1,
            save_id=entry.sequence,
            arena=slot.arena_id,
            generation=arena.begin_generation(),
            step=entry.step,
            session=self._session.id,
            sequence=entry.sequence,
            rank=self._world.rank,
            world_size=self._world.size,
            files=extents([file for file in shards.plan.files if file.container not in shards.unshared]),
            objects=small[OBJECTS],
            parent=None if parent is None else Parent(step=parent[0], session=parent[1]),
            replace=replace,
            pickled=shards.flat.pickled,
            created_s=entry.called_s,
            torch_version=str(torch.__version__),
            retry=False,
            table=small.get("table"),
            unshared=unshared,
            metadata=small.get("metadata"),
            extra_files=small.get("extra_files"),
            droppable=self._session.droppable,
            links=tuple(
                Link(names=share.base.names, saves=tuple(share.base.saves)) for share in shards.tables if share.base
            ),
            sealing=self._session.encryption.of_save(self._session.id, entry.sequence),
        )


@functools.lru_cache(maxsize=_MAX_PLANS)
def _plan_of(structure: Structure, file_nbytes: int | None) -> Plan:
    return make_plan(structure, file_nbytes=file_nbytes)


def _device(flat: FlatState) -> torch.device | None:
    """A device for whose copies staging memory is to be page-locked."""
    return kinds.first_with_runtime(tensor for tensors in flat.containers.values() for tensor in tensors.values())
