"""Staging slots: up to a fixed number of arenas that saves use in turn.

A slot is busy from staging until its bytes are durable. One slot has memory. A save that finds it
busy has another one made in a thread, and continues with the one that is ready first; if the rest
of the write is expected to take less time, none is made. A slot that was not needed for long is
given back.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Collection
from typing import Final, TypeVar

import torch

from sidesave.errors import ClosedError, WriteStalledError
from sidesave.stager.copy.slot import StagingSlot
from sidesave.stager.devices.kinds import pci_address
from sidesave.stager.memory import host_memory, numa
from sidesave.stager.memory.arena import PAGE, Arena, arena_nbytes, page_up
from sidesave.stager.memory.host_memory import UNLIMITED, NodeMemory
from sidesave.stager.memory.pinning import PinnedRange
from sidesave.stager.plan import Plan, capacity
from sidesave.stager.signal_safe import Monitor, start

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_IDLE_SAVES: Final = 20
_IDLE_S: Final = 3600.0
"""A slot is given back if 20 saves, or all saves of an hour, did not use it."""


class _PoolWork:
    """Owns a slot while the pool makes it or gives it back; each time another one."""


class SlotPool:
    """The slots of one checkpointer."""

    def __init__(
        self,
        slots: int,
        attach: Callable[[int, Arena], None],
        detach: Callable[[int], None],
        memory: NodeMemory = UNLIMITED,
    ) -> None:
        """Create empty slots.

        Args:
            slots: The number of saves that can be between their call and durability.
            attach: Called with the ID of each new arena and the arena, to send it to the daemon.
            detach: Called with the ID of each arena before it is freed.
            memory: The memory that all slots together may use.
        """
        self._slots = [StagingSlot() for _ in range(slots)]
        self._attach = attach
        self._detach = detach
        self._memory = memory
        self._changed = Monitor()
        self._next_arena = 1
        self._closed = False
        self._taken = self._waits = 0
        self._waited_s = self._s_per_byte = self._not_before = 0.0
        self._warned_unpinnable = False
        self.nbytes = 0
        """Host memory that the slots use now, in bytes."""

    def is_busy(self) -> bool:
        """Whether a save has to wait for another one: saves use all slots that can have memory."""
        made = [slot for slot in self._slots if slot.nbytes]
        usable = made if made and not self._has_memory() else self._slots
        return all(slot.owner and not isinstance(slot.owner, _PoolWork) for slot in usable)

    def try_acquire(self, owner: object, *, empty: bool = False) -> StagingSlot | None:
        """Assign a free slot to ``owner``, or return None. Does not block.

        A slot without memory is assigned only if no other one has memory or is being given some,
        or with ``empty`` if no free slot has memory.
        """
        with self._changed:
            if self._closed:
                raise ClosedError("the checkpointer was closed meanwhile")
            free = [slot for slot in self._slots if slot.owner is None]
            if not empty and any(slot.nbytes or slot.owner is not None for slot in self._slots):
                free = [slot for slot in free if slot.nbytes]
            if not free:
                return None
            slot = max(free, key=lambda slot: slot.nbytes)
            slot.owner = owner
            self._taken += 1
            slot.last_use = self._taken, time.monotonic()
            return slot

    def acquire(
        self,
        owner: object,
        patience_s: float,
        progress: Callable[[], object] = lambda: None,
        remaining_s: Callable[[], float] = lambda: math.inf,
    ) -> StagingSlot:
        """Assign a slot to ``owner``; blocks until one is free or made.

        Args:
            owner: The save.
            patience_s: How long to wait while ``progress()`` does not change.
            progress: Returns how far the saves are that use the slots.
            remaining_s: Estimates the seconds until the first of them is durable.

        Raises:
            WriteStalledError: All slots were busy for ``patience_s`` seconds without progress.
        """
        began = time.monotonic()
        slot = self._wait(
            lambda: self.try_acquire(owner),
            patience_s,
            progress,
            lambda: self._make_another(remaining_s, time.monotonic() - began),
        )
        self._waits, self._waited_s = self._waits + 1, self._waited_s + time.monotonic() - began
        return slot

    def _wait(
        self,
        ready: Callable[[], _T | None],
        patience_s: float,
        progress: Callable[[], object],
        each_round: Callable[[], object] = lambda: None,
    ) -> _T:
        result = self._changed.wait_with_progress(
            ready, patience_s, lambda: (progress(), self._is_making() and object()), each_round
        )
        if not result:
            used = sum(slot.owner is not None for slot in self._slots)
            raise WriteStalledError(
                f"all {used} staging slots are being written, and no byte has moved for "
                f"{patience_s:g} s; check the run's storage, and whether the writer daemon was "
                "stopped"
            )
        return result

    def release(self, owner: object, *, void: bool = False) -> None:
        """Free the slot that ``owner`` holds, if any; after :meth:`close` also frees its memory.

        With ``void`` no daemon may read it any more.
        If that leaves all slots free, those that were not used for long are given back in a thread.
        """
        idle: list[StagingSlot] = []
        with self._changed:
            for slot in self._slots:
                if slot.owner is owner:
                    if void and slot.arena is not None:
                        slot.arena.begin_generation()
                    slot.owner = None
                    if self._closed:
                        self._drop(slot)
            if all(slot.owner is None for slot in self._slots):
                idle = [*filter(self._is_idle, self._slots)]
            self._changed.notify_all()
        if idle and not isinstance(owner, _PoolWork):
            self._begin(lambda: self._give_back(idle), "sidesave-give-back")

    # Making slots, and giving them back -----------------------------------------------------------

    @staticmethod
    def _begin(work: Callable[[], None], name: str) -> None:
        with contextlib.suppress(RuntimeError):  # no thread can be started: saves go on without it
            start(work, name)

    def _is_making(self) -> bool:
        return any(isinstance(slot.owner, _PoolWork) for slot in self._slots)

    def _largest(self) -> StagingSlot | None:
        """Return the largest slot with a plan; one without it may not be pinned yet."""
        ready = (slot for slot in self._slots if slot.plan is not None)
        return max(ready, key=lambda slot: slot.nbytes, default=None)

    def _has_memory(self) -> bool:
        """Whether another slot like the largest one fits, and memory was not short lately."""
        like = self._largest()
        room_nbytes = self._memory.share_nbytes - self.nbytes
        return time.monotonic() >= self._not_before and (like is None or like.nbytes <= room_nbytes)

    def _make_another(self, remaining_s: Callable[[], float], waited_s: float) -> None:
        """Make a slot like the largest in a thread, unless a slot is expected to be free sooner.

        That expectation is given up after a wait as long as making one takes.
        """
        like = self._largest()  # None while another thread makes the first one, see try_acquire()
        if self._to_make() is None or like is None:
            return
        if max(remaining_s(), waited_s) > like.nbytes * self._s_per_byte:
            self._begin(self._make, "sidesave-slot")

    def _to_make(self) -> StagingSlot | None:
        """Return a slot that can be given memory beside saves; one at a time."""
        if self._closed or self._is_making() or not self._has_memory():
            return None
        return next((slot for slot in self._slots if slot.owner is None and not slot.nbytes), None)

    def _make(self) -> None:
        work = _PoolWork()
        with self._changed:
            slot, like = self._to_make(), self._largest()
            if slot is None or like is None or like.arena is None:
                return
            descriptor_nbytes = like.arena.data_offset - PAGE
            data_nbytes, device = like.arena.data_nbytes, like.device
            slot.owner, slot.last_use = work, (self._taken, time.monotonic())
        try:
            self._replace(slot, descriptor_nbytes, data_nbytes, device)
            if device is not None:
                self._pin(slot, device)
        except Exception as error:  # noqa: BLE001 - saves go on with the slots that there are
            self._not_before = time.monotonic() + _IDLE_S
            logger.warning("saves wait for one another, as another slot cannot be made: %s", error)
        finally:
            self.release(work)

    def _is_idle(self, slot: StagingSlot) -> bool:
        taken, at_s = slot.last_use
        many, long = self._taken - taken >= _IDLE_SAVES, time.monotonic() - at_s >= _IDLE_S
        return slot.nbytes > 0 and (many or (long and self._taken > taken))

    def _give_back(self, slots: list[StagingSlot]) -> None:
        for slot in slots:
            # Pinning it again would stall the device, so that memory has to be needed.
            if slot.pinned is not None and host_memory.available_nbytes() >= slot.nbytes:
                continue
            work = _PoolWork()
            with self._changed:
                if slot.owner is not None or self._closed or not self._is_idle(slot):
                    continue
                slot.owner = work
            try:
                self._drop(slot)
            finally:
                self.release(work)

    # Layout ---------------------------------------------------------------------------------------

    def fit(
        self, slot: StagingSlot, plan: Plan, parts: Collection[bytes], device: torch.device | None
    ) -> None:
        """Lay out ``plan`` in an acquired slot, with room for ``parts``.

        Replaces the arena if it does not fit. Blocks while pages are allocated. If ``device`` is
        given, they lie on its NUMA node and are page-locked.

        Raises:
            HostMemoryError: The machine does not have that much memory left; the slot then has no
                arena.
        """
        if not self._has_room(slot, plan, _offsets(plan, parts)[-1]):
            self._replace(slot, *_capacity(plan, parts), device)
        if device is not None and slot.pinned is None and not slot.unpinnable:
            self._pin(slot, device)
        slot.lay_out(plan)

    def lay_out(
        self,
        slot: StagingSlot,
        plan: Plan,
        parts: Collection[bytes],
        device: torch.device | None,
        run: Callable[[Callable[[], None]], None],
        patience: Callable[[], float | None] = lambda: None,
        progress: Callable[[], object] = lambda: None,
    ) -> list[int]:
        """Put ``parts``, such as the treespec, behind a plan's images; return their arena offsets.

        A slot that does not fit the plan yet is first given to :meth:`fit`, which ``run`` calls.
        If ``patience()`` is not None, this first waits for so many seconds, like :meth:`acquire`,
        while other saves use memory of the budget that it needs.
        """
        offsets = _offsets(plan, parts)
        has_room = self._has_room(slot, plan, offsets[-1])
        is_pinned = device is None or slot.pinned is not None or slot.unpinnable
        if not (slot.plan is plan and is_pinned and has_room):
            if not has_room and (patience_s := patience()) is not None:
                nbytes = slot_nbytes(plan, parts)
                self._wait(lambda: self._has_memory_for(slot, nbytes), patience_s, progress)
            run(lambda: self.fit(slot, plan, parts, device))
        arena = slot.arena
        assert arena is not None
        begins = [arena.data_offset + offset for offset in offsets[:-1]]
        for begin, part in zip(begins, parts, strict=True):
            arena.view(begin, len(part))[:] = part
        return begins

    @staticmethod
    def _has_room(slot: StagingSlot, plan: Plan, data_nbytes: int) -> bool:
        """Whether a slot's arena has room for ``data_nbytes``, and these use half of it."""
        arena, most_nbytes = slot.arena, max(2 * max(data_nbytes, plan.room_nbytes), 1 << 20)
        if arena is None or not data_nbytes <= (room_nbytes := arena.data_nbytes) <= most_nbytes:
            return False
        return slot.plan is plan or arena.nbytes - room_nbytes >= capacity(plan, 0)[0]

    def _has_memory_for(self, slot: StagingSlot, nbytes: int) -> bool:
        """Whether a slot can grow to ``nbytes`` now, or never can, so that it need not wait."""
        usable = (None, slot.owner)  # prepare() owns several
        in_use = self.nbytes - sum(each.nbytes for each in self._slots if each.owner in usable)
        most_nbytes = self._memory.share_nbytes
        return not in_use or nbytes > most_nbytes or in_use + nbytes <= most_nbytes

    def _replace(
        self,
        slot: StagingSlot,
        descriptor_nbytes: int,
        data_nbytes: int,
        device: torch.device | None,
    ) -> None:
        began, nbytes = time.monotonic(), arena_nbytes(descriptor_nbytes, data_nbytes)
        with self._changed:
            self._drop(slot)
            for other in self._slots:  # one that is free makes room
                if other.owner is None and self.nbytes + nbytes > self._memory.share_nbytes:
                    self._drop(other)
            self._memory.require(nbytes, self.nbytes)
            self.nbytes += nbytes
        try:
            node = numa.node_of(pci_address(device))
            arena = host_memory.new_arena(descriptor_nbytes, data_nbytes, node)
        except BaseException:
            with self._changed:
                self.nbytes -= nbytes
            raise
        with self._changed:
            slot.arena, slot.nbytes, slot.device = arena, arena.nbytes, device
            slot.arena_id = self._next_arena
            self._next_arena += 1
        self._attach(slot.arena_id, arena)
        self._s_per_byte = (time.monotonic() - began) / arena.nbytes

    def _pin(self, slot: StagingSlot, device: torch.device) -> None:
        assert slot.arena is not None
        began, slot.device = time.monotonic(), device
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
        self._s_per_byte += (time.monotonic() - began) / slot.nbytes

    def _drop(self, slot: StagingSlot) -> None:
        if slot.arena is not None:
            with self._changed:
                self.nbytes -= slot.nbytes
            self._detach(slot.arena_id)
            slot.unmap()

    def close(self) -> None:
        """Free all free slots; a busy one is freed when it is released or made. Idempotent."""
        if self._waits > 1 and not self._closed:
            text = "%d saves have waited for a staging slot, %.1f s in all"
            logger.info(text, self._waits, self._waited_s)
        with self._changed:
            self._closed = True
            for slot in self._slots:
                if slot.owner is None:
                    self._drop(slot)
            self._changed.notify_all()


def slot_nbytes(plan: Plan, parts: Collection[bytes]) -> int:
    """Return the size of a new slot for a plan with ``parts`` behind it."""
    return arena_nbytes(*_capacity(plan, parts))


def _capacity(plan: Plan, parts: Collection[bytes]) -> tuple[int, int]:
    return capacity(plan, _offsets(plan, parts)[-1] - plan.nbytes)


def _offsets(plan: Plan, parts: Collection[bytes]) -> list[int]:
    """Return the offsets of ``parts`` behind a plan's images, page-aligned, and of their end."""
    return [*itertools.accumulate((page_up(len(part)) for part in parts), initial=plan.nbytes)]
