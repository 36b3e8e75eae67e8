"""Staging slots: a fixed number of arenas that saves use in turn.

A slot is busy from staging until its bytes are durable. With two slots, a save that waits for a
free one waits for the save before the previous one.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from sidesave.errors import ClosedError, HostMemoryError, WriteStalledError
from sidesave.stager.copy.held import Held
from sidesave.stager.devices.kinds import pci_address
from sidesave.stager.memory import host_memory, numa
from sidesave.stager.memory.arena import Arena, page_up
from sidesave.stager.memory.pinning import PinnedRange
from sidesave.stager.plan import Plan, Target
from sidesave.stager.signal_safe import Monitor
from sidesave.stager.tables import RowImage

logger = logging.getLogger(__name__)

DESCRIPTOR_NBYTES: Final = 4096
"""Bytes for an encoded SAVE message; each file adds ``_DESCRIPTOR_PER_FILE``."""
_DESCRIPTOR_PER_FILE: Final = 512


@dataclass(slots=True, eq=False)
class StagingSlot:
    """One arena and the plan laid out in it.

    Attributes:
        arena_id: Identifies the arena in messages; never reused.
        targets: The plan's tensors, container after container, in the order of the state.
        prepared: Cached copy list of these ``targets``, owned by the copier.
        held: The frozen tensors that these ``targets`` already contain.
        image: The arena's data as bytes.
        pinned: The arena's memory, page-locked for devices.
        unpinnable: Page-locking this arena failed and is not retried.
        owner: The save that uses the slot; None while it is free.
    """

    arena: Arena | None = None
    arena_id: int = 0
    plan: Plan | None = None
    image: torch.Tensor | None = None
    targets: list[Target] = field(default_factory=list[Target])
    prepared: object = None
    held: Held = field(default_factory=Held)
    pinned: PinnedRange | None = None
    unpinnable: bool = False
    owner: object | None = None

    def lay_out(self, plan: Plan) -> None:
        """Write the plan's headers to the arena and create its views, unless they exist."""
        if self.plan is plan:
            return
        assert self.arena is not None
        previous, self.plan = self.plan, None
        self.arena.begin_generation()  # a daemon that still reads an earlier save must notice
        base = self.arena.data_offset
        first = plan.first
        # Only the containers after the first plan's have changed: keep the views of the others.
        if previous is not None and previous.first is first and self.image is not None:
            containers, files = (
                plan.structure[len(first.structure) :],
                plan.files[len(first.files) :],
            )
            del self.targets[sum(len(fqns) for _, fqns, _ in first.structure) :]
        else:
            containers, files = plan.structure, plan.files
            self.image = torch.frombuffer(
                self.arena.view(base, self.arena.data_nbytes), dtype=torch.uint8
            )
            self.targets, self.prepared, self.held = [], None, Held()
        tensors = (each for _, fqns, kinds in containers for each in zip(fqns, kinds, strict=True))
        for file in files:
            self.arena.view(base + file.offset, len(file.header))[:] = file.header
            for (offset, nbytes), (fqn, (dtype, shape)) in zip(
                file.placements, tensors, strict=False
            ):
                begin = file.offset + offset
                view = self.image[begin : begin + nbytes].view(dtype).view(shape)
                self.targets.append(Target(fqn, view, begin, self.image.data_ptr() + begin, nbytes))
        assert next(tensors, None) is None
        self.plan = plan

    def fill(self, images: Iterable[RowImage]) -> None:
        """Copy rows of tables into the plan's last tensors; blocks until they are copied."""
        assert self.plan is not None
        images, last = [*images], sum(len(fqns) for _, fqns, _ in self.plan.first.structure)
        views = (target.view for target in self.targets[last:])
        for image in images:
            image.fill(dict(zip(image.kinds(), views, strict=False)))

    def void(self) -> None:
        """Invalidate the staged save, so a daemon that outlives its trainer does not rewrite it."""
        if self.arena is not None:
            self.arena.begin_generation()

    def unmap(self) -> None:
        """Free the memory; no copy and no write may be in progress."""
        self.plan, self.image, self.targets, self.prepared, self.held = None, None, [], None, Held()
        pinned, self.pinned, self.unpinnable = self.pinned, None, False
        if pinned is not None:
            pinned.close()
        if self.arena is not None:
            self.arena.close()
            self.arena = None


class SlotPool:
    """The slots of one checkpointer."""

    def __init__(
        self,
        slots: int,
        attach: Callable[[int, Arena], None],
        detach: Callable[[int], None],
    ) -> None:
        """Create empty slots.

        Args:
            slots: The number of saves that can be between their call and durability.
            attach: Called with the ID of each new arena and the arena, to send it to the daemon.
            detach: Called with the ID of each arena before it is freed.
        """
        self._slots = [StagingSlot() for _ in range(slots)]
        self._attach = attach
        self._detach = detach
        self._changed = Monitor()
        self._next_arena = 1
        self._closed = False
        self._waits, self._waited_s = 0, 0.0
        self._warned_unpinnable = False

    @property
    def nbytes(self) -> int:
        """Host memory that the slots use now, in bytes."""
        return sum(slot.arena.nbytes for slot in self._slots if slot.arena is not None)

    def is_busy(self) -> bool:
        """Whether all slots are in use."""
        return bool(self._slots) and all(slot.owner is not None for slot in self._slots)

    def try_acquire(self, owner: object) -> StagingSlot | None:
        """Assign a free slot to ``owner``; return None if all are busy. Does not block."""
        with self._changed:
            if self._closed:
                raise ClosedError("the checkpointer was closed meanwhile")
            free = [slot for slot in self._slots if slot.owner is None]
            if not free:
                return None
            slot = max(free, key=lambda slot: 0 if slot.arena is None else slot.arena.nbytes)
            slot.owner = owner
            return slot

    def acquire(
        self, owner: object, patience_s: float, progress: Callable[[], object] = lambda: None
    ) -> StagingSlot:
        """Assign a slot to ``owner``; blocks until one is free.

        Raises:
            WriteStalledError: All were busy for ``patience_s`` seconds in which ``progress()`` did
                not change.
        """
        began, before = time.monotonic(), progress()
        while (slot := self._changed.wait_for(lambda: self.try_acquire(owner), patience_s)) is None:
            now = progress()
            if now == before:
                raise WriteStalledError(
                    f"all {len(self._slots)} staging slots are being written, and no byte has "
                    f"moved for {patience_s:g} s; check the run's storage, and whether the writer "
                    "daemon was stopped"
                )
            before = now
        self._waits, self._waited_s = self._waits + 1, self._waited_s + time.monotonic() - began
        return slot

    def release(self, owner: object) -> None:
        """Free the slot that ``owner`` holds, if any; after :meth:`close` also frees its memory."""
        with self._changed:
            for slot in self._slots:
                if slot.owner is owner:
                    slot.owner = None
                    if self._closed:
                        self._drop(slot)
            self._changed.notify_all()

    def fit(
        self, slot: StagingSlot, plan: Plan, parts: Sequence[bytes], device: torch.device | None
    ) -> None:
        """Lay out ``plan`` in an acquired slot, with room for ``parts``.

        Replaces the arena if it does not fit. Blocks while pages are allocated. If ``device`` is
        given, they lie on its NUMA node and are page-locked.

        Raises:
            HostMemoryError: The machine does not have that much memory left; the slot then has no
                arena.
        """
        data_nbytes = _offsets(plan, parts)[-1]
        if not self._has_room(slot, plan, data_nbytes):
            self._replace(
                slot,
                _descriptor_nbytes(plan),
                _with_headroom(plan, data_nbytes - plan.nbytes),
                device,
            )
        if device is not None and slot.pinned is None and not slot.unpinnable:
            self._pin(slot, device)
        slot.lay_out(plan)

    def lay_out(
        self,
        slot: StagingSlot,
        plan: Plan,
        parts: Sequence[bytes],
        device: torch.device | None,
        run: Callable[[Callable[[], None]], None],
    ) -> list[int]:
        """Put ``parts``, such as the treespec, behind a plan's images; return their arena offsets.

        A slot that does not fit the plan yet is first given to :meth:`fit`, which ``run`` calls.
        """
        offsets = _offsets(plan, parts)
        is_pinned = device is None or slot.pinned is not None or slot.unpinnable
        if not (slot.plan is plan and is_pinned and self._has_room(slot, plan, offsets[-1])):
            run(lambda: self.fit(slot, plan, parts, device))
        arena = slot.arena
        assert arena is not None
        begins = [arena.data_offset + offset for offset in offsets[:-1]]
        for begin, part in zip(begins, parts, strict=True):
            arena.view(begin, len(part))[:] = part
        return begins

    @staticmethod
    def _has_room(slot: StagingSlot, plan: Plan, data_nbytes: int) -> bool:
        arena, most_nbytes = slot.arena, max(2 * max(data_nbytes, plan.room_nbytes), 1 << 20)
        if arena is None or not data_nbytes <= (room_nbytes := arena.data_nbytes) <= most_nbytes:
            return False
        return arena.nbytes - room_nbytes >= _descriptor_nbytes(plan)

    def _replace(
        self,
        slot: StagingSlot,
        descriptor_nbytes: int,
        data_nbytes: int,
        device: torch.device | None,
    ) -> None:
        with self._changed:
            self._drop(slot)
        try:
            arena = Arena.create(descriptor_nbytes, data_nbytes)
            try:
                host_memory.populate(arena, numa.node_of(pci_address(device)))
            except BaseException:  # also on Ctrl-C no arena is left
                arena.close()
                raise
        except OSError as error:
            raise HostMemoryError(
                f"cannot create a staging slot of {data_nbytes / 2**20:,.1f} MiB: {error}"
            ) from error
        with self._changed:
            slot.arena, slot.arena_id = arena, self._next_arena
            self._next_arena += 1
        self._attach(slot.arena_id, arena)

    def _pin(self, slot: StagingSlot, device: torch.device) -> None:
        assert slot.arena is not None
        try:
            slot.pinned = PinnedRange(device, slot.arena.address, slot.arena.nbytes)
        except RuntimeError as error:
            slot.unpinnable = True
            level = logging.DEBUG if self._warned_unpinnable else logging.WARNING
            self._warned_unpinnable = True
            logger.log(
                level,
                "staging memory cannot be pinned, so copies from %s will be slow: %s",
                device,
                error,
            )

    def _drop(self, slot: StagingSlot) -> None:
        if slot.arena is not None:
            self._detach(slot.arena_id)
            slot.unmap()

    def close(self) -> None:
        """Free all free slots; a busy slot is freed when it is released. Idempotent."""
        if self._waits > 1 and not self._closed:
            logger.info(
                "%d saves have waited for a staging slot, %.1f s in all",
                self._waits,
                self._waited_s,
            )
        with self._changed:
            self._closed = True
            for slot in self._slots:
                if slot.owner is None:
                    self._drop(slot)
            self._changed.notify_all()


def _with_headroom(plan: Plan, parts_nbytes: int) -> int:
    """Return the data bytes to allocate: growing parts (tables, treespec) get a quarter more."""
    growing = max(plan.nbytes, plan.room_nbytes) - plan.first.nbytes
    return (
        plan.first.nbytes
        + growing
        + page_up(growing // 4)
        + parts_nbytes
        + page_up(parts_nbytes // 4)
    )


def _offsets(plan: Plan, parts: Sequence[bytes]) -> list[int]:
    """Return the offsets of ``parts`` behind a plan's images, page-aligned, and of their end."""
    return [*itertools.accumulate((page_up(len(part)) for part in parts), initial=plan.nbytes)]


def _descriptor_nbytes(plan: Plan) -> int:
    return DESCRIPTOR_NBYTES + _DESCRIPTOR_PER_FILE * len(plan.files)
