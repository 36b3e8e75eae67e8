"""A flat state on its way into staging memory, and the request that has it written: all of a save but its outcome."""

from __future__ import annotations

import errno
import itertools
import json
from collections.abc import Mapping
from typing import Any, Final

import torch

from sidesave.client import arguments
from sidesave.client.connection import Connection
from sidesave.client.handle import SaveHandle
from sidesave.client.history import OwnHistory
from sidesave.client.lineage import Lineage
from sidesave.client.placement import Alike, Placed, Placements
from sidesave.client.saves import SaveInFlight, SavesInFlight
from sidesave.client.world import NodeWorld, World
from sidesave.errors import (
    HostMemoryError,
    SidesaveError,
    StagingError,
    StateMismatchError,
    UnsupportedValueError,
    WriteError,
)
from sidesave.stager import tree
from sidesave.stager.copier import Copier
from sidesave.stager.image import FileImage, Plan, Structure, make_plan, structure_of
from sidesave.stager.pool import Slot, SlotPool
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.protocol import Extent, Parent, Refuse, Save, Spare

_MAX_PLANS: Final = 8
_FOLLOW_NBYTES: Final = 512 << 20
"""From this size on the writer follows the copy. For 1.4 GB that made a save durable 75 ms sooner for 4 ms of the call;
for 0.35 GB it was 11 ms for 7, and there the call counts more."""


class Submission:
    """Takes states apart, stages them, and hands them to the daemon; one call at a time."""

    def __init__(
        self,
        world: World,
        session: str,
        ids: itertools.count[int],
        connection: Connection,
        pool: SlotPool,
        copier: Copier,
        saves: SavesInFlight,
        lineage: Lineage,
        history: OwnHistory,
        *,
        allow_pickle: bool,
    ) -> None:
        """Work for a session of ``world``; everything else stays the caller's to close."""
        self._world = world
        self._session = session
        self._ids = ids
        self._connection = connection
        self._pool = pool
        self._copier = copier
        self._saves = saves
        self._lineage = lineage
        self._history = history
        self._allow_pickle = allow_pickle
        self._plans: dict[Structure, Plan] = {}
        alone = world.size == 1 and not isinstance(world, NodeWorld)
        self._placements = None if alone else Placements(world)
        self._asking: list[tuple[Structure, SaveInFlight]] = []

    def flatten(self, state: Mapping[str, Any]) -> tree.FlatState:
        """Take a state apart; raises what cannot be saved."""
        ranks = None if self._placements is None else self._world.ranks
        return tree.flatten(state, allow_pickle=self._allow_pickle, ranks=ranks)

    def fit(self, flat: tree.FlatState, slot: Slot, beside: bytes = b"") -> None:
        """Give ``slot`` the memory that a state like this one takes; blocks while pages are allocated."""
        self._fit(slot, self._place(flat), beside=beside)

    def stage(
        self,
        step: int,
        state: tree.FlatState,
        slot: Slot,
        handle: SaveHandle,
        sequence: int,
        *,
        replace: bool,
        blocking: bool,
        metadata: bytes = b"",
        beside: bytes = b"",
    ) -> None:
        """Copy a state into ``slot``, which belongs to the save from here on, and have it written.

        ``metadata`` and ``beside`` are what :mod:`sidesave.client.arguments` makes of those arguments.
        """
        try:
            self._learn()
            placed = self._place(state, sequence)
            flat, plan = placed.flat, placed.plan
            parts = self._fit(slot, placed, metadata, beside)
            arena = slot.arena
            assert arena is not None
            save = self._describe(step, placed, slot, sequence, parts, replace=replace)
            descriptor = protocol.encode(save)
            if len(descriptor) > protocol.MAX_MESSAGE_NBYTES:
                raise UnsupportedValueError(f"{len(plan.files):,} top-level items with tensors are too many; nest them")
            handle._nbytes_total = save.nbytes
            self._history.begin(save, handle)
            entry = self._saves.add(save, handle, slot, json.loads(metadata or b"{}"))
        except BaseException:
            self._pool.release(slot)
            raise
        if self._placements is not None:
            self._asking.append((placed.key, entry))
        # A large state that is copied right here is written while it is copied: the writer follows the arena's mark.
        follow = plan.nbytes >= _FOLLOW_NBYTES and self._copier.captures_all(flat)

        def staged(error: SidesaveError | None) -> None:
            if error is None:
                arena.mark_staged(descriptor)  # from here on the save survives this process
            if not self._saves.filled(entry):
                return  # storage refused before all was copied
            if error is not None:
                self._saves.fail(entry, error)
                if not follow:  # else the daemon finds out by itself
                    self.refuse(step, sequence, error)
                return
            handle._resolve(handle.staged, None)
            if not follow:
                self._connection.submit(save)

        try:
            if follow:
                self._connection.submit(save)
            self._copier.copy(flat, plan, slot, staged, blocking=blocking)
        except BaseException as error:
            arena.begin_generation()  # a writer that follows gives up
            if self._saves.filled(entry):
                self._saves.fail(entry, StagingError(f"copying the state failed: {error}"), report=False)
            raise

    def refuse(self, step: object, sequence: int, error: BaseException, *, earlier: bool = False) -> None:
        """Tell the other ranks that this one will not take part in what may be under way on theirs.

        With ``earlier`` the error is an earlier save's, of which they have been told as well.
        """
        if self._placements is None or self._world.size == 1:  # a node of its own
            return
        if earlier:
            error = WriteError(errno.ECANCELED, f"save() has raised an earlier failure and saved nothing: {error}")
        failure = protocol.failure(1, None, error if isinstance(error, SidesaveError) else StagingError(str(error)))
        request = Refuse(
            attempt=1,
            save_id=next(self._ids),
            step=step if type(step) is int and 0 <= step <= arguments.MAX_STEP else 0,
            session=self._session,
            sequence=sequence,
            rank=self._world.rank,
            world_size=self._world.size,
            error=failure.error,
            message=failure.message,
            errno=failure.errno,
            path=failure.path,
            retry=False,
        )
        self._connection.submit(request)

    def _place(self, flat: tree.FlatState, sequence: int = 0) -> Placed:
        if self._placements is not None:
            return self._placements.place(flat, sequence)
        structure = structure_of(flat.containers)
        plan = self._plans.get(structure)
        if plan is None:
            plan = make_plan(structure)
            while len(self._plans) >= _MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[structure] = plan
        return Placed(flat, plan, (), b"", b"", "", structure)

    def _fit(self, slot: Slot, placed: Placed, metadata: bytes = b"", beside: bytes = b"") -> dict[str, bytes]:
        parts = {tree.OBJECTS: placed.flat.objects, "table": placed.table, "spare": placed.spare_table}
        parts |= {"metadata": metadata, "beside": b"" if self._world.rank else beside}
        parts = {name: part for name, part in parts.items() if part or name == tree.OBJECTS}
        try:
            self._pool.fit(slot, placed.plan, [*parts.values()], pin=_has_cuda(placed.flat))
        except HostMemoryError as error:
            if not placed.spare:
                raise
            text = "a first save of plain tensors stages all of them on every rank, as ranks may hold other values"
            raise HostMemoryError(f"{error}; {text}: wrap what is alike in sidesave.Replicated") from error
        return parts

    def _learn(self) -> None:
        """Take in what the saves before have found out: whether the ranks hold the same plain tensors.

        Here, and not when a save ends: who has seen its outcome relies on it in the next call.
        """
        if self._placements is None:
            return
        before, self._asking = self._asking, []
        for key, entry in before:
            written, committed = entry.handle.written, entry.handle.committed
            if not committed.done():
                self._asking.append((key, entry))
            elif isinstance(committed.exception(), StateMismatchError):
                self._placements.learn(key, Alike.UNKNOWN)
                continue
            if entry.save.spare is not None and written.done() and written.exception() is None:
                self._placements.learn(key, Alike.NO if entry.apart else Alike.YES)

    def _describe(
        self, step: int, placed: Placed, slot: Slot, sequence: int, parts: Mapping[str, bytes], *, replace: bool
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
            return tuple(Extent(name=file.container, offset=base + file.offset, nbytes=file.nbytes) for file in files)

        spare = None
        if placed.spare_table:
            files = [file for file in placed.plan.files if file.container in placed.spare]
            spare = Spare(claim=placed.claim, files=extents(files), table=small["spare"])
        parent = self._lineage.parent
        return Save(
            attempt=1,
            save_id=sequence,
            arena=slot.arena_id,
            generation=arena.begin_generation(),
            step=step,
            session=self._session,
            sequence=sequence,
            rank=self._world.rank,
            world_size=self._world.size,
            files=extents([file for file in placed.plan.files if file.container not in placed.spare]),
            objects=small[tree.OBJECTS],
            parent=None if parent is None else Parent(step=parent[0], session=parent[1]),
            replace=replace,
            pickled=placed.flat.pickled,
            created_s=self._history.called_s,
            torch_version=str(torch.__version__),
            retry=False,
            table=small.get("table"),
            spare=spare,
            metadata=small.get("metadata"),
            beside=small.get("beside"),
        )


def _has_cuda(flat: tree.FlatState) -> bool:
    return any(tensor.is_cuda for tensors in flat.containers.values() for tensor in tensors.values())
