"""Staging slots: a fixed number of arenas that saves take in turn.

A slot is busy from staging until its bytes are durable, so waiting for a free one is the wait for the save before the
previous one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from sidesave.errors import ClosedError, HostMemoryError, WriteStalledError
from sidesave.stager.copy.held import Held
from sidesave.stager.devices.kinds import pci_address
from sidesave.stager.memory import host_memory, numa
from sidesave.stager.memory.arena import Arena, page_up
from sidesave.stager.memory.pinning import PinnedRange
from sidesave.stager.plan import Plan
from sidesave.stager.signal_safe import Monitor
from sidesave.stager.tables import RowImage

logger = logging.getLogger(__name__)

DESCRIPTOR_NBYTES: Final = 4096
"""Room for an encoded SAVE message with few files; each further file adds ``_DESCRIPTOR_PER_FILE``."""
_DESCRIPTOR_PER_FILE: Final = 512


class Target(NamedTuple):
    """Where one tensor is staged: a view of the arena, its offset in the arena's data, its address and bytes."""

    fqn: str
    view: torch.Tensor
    offset: int
    address: int
    nbytes: int


class Job(NamedTuple):
    """One tensor to copy that needs more than its bytes moved here and now: byte-equal ``source`` and ``target``."""

    source: torch.Tensor
    target: Target


@dataclass(slots=True, eq=False)
class Slot:
    """One arena and what is laid out in it.

    Attributes:
        arena_id: Names the arena on the wire; never used twice.
        targets: The plan's tensors, container after container, in the order of the state.
        prepared: What the copier keeps of how it has filled them; it goes with them.
        held: Which frozen tensors are in it; so does this.
        image: The arena's data as bytes.
        pinned: The arena's memory, page-locked for devices.
        unpinnable: This arena's memory was refused to be page-locked: it is not tried again.
        owner: Who has it; None while it is free.
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
        """Write the plan's headers into the arena and make its views; nothing to do when it is there already."""
        if self.plan is plan:
            return
        assert self.arena is not None
        known, self.plan = self.plan, None
        self.arena.begin_generation()  # whoever still reads for an earlier save must notice
        base = self.arena.data_offset
        first = plan.first
        if known is not None and known.first is first and self.image is not None:  # what follows has other shapes
            containers, files = plan.structure[len(first.structure) :], plan.files[len(first.files) :]
            del self.targets[sum(len(fqns) for _, fqns, _ in first.structure) :]
        else:
            containers, files = plan.structure, plan.files
            self.image = torch.frombuffer(self.arena.view(base, self.arena.data_nbytes), dtype=torch.uint8)
            self.targets, self.prepared, self.held = [], None, Held()
        tensors = (each for _, fqns, kinds in containers for each in zip(fqns, kinds, strict=True))
        for file in files:
            self.arena.view(base + file.offset, len(file.header))[:] = file.header
            for (offset, nbytes), (fqn, (dtype, shape)) in zip(file.placements, tensors, strict=False):
                begin = file.offset + offset
                view = self.image[begin : begin + nbytes].view(dtype).view(shape)
                self.targets.append(Target(fqn, view, begin, self.image.data_ptr() + begin, nbytes))
        assert next(tensors, None) is None
        self.plan = plan

    def fill(self, images: Iterable[RowImage]) -> None:
        """Put rows of tables into the tensors that the plan ends with; blocks until they are there."""
        assert self.plan is not None
        images, last = [*images], sum(len(fqns) for _, fqns, _ in self.plan.first.structure)
        views = (target.view for target in self.targets[last:])
        for image in images:
            image.fill(dict(zip(image.kinds(), views, strict=False)))

    def append(self, parts: Sequence[bytes]) -> list[int]:
        """Put the treespec, and what else there is, behind the images, each on a page; returns their offsets."""
        assert self.arena is not None and self.plan is not None
        offsets: list[int] = []
        offset = self.plan.nbytes
        for part in parts:
            self.arena.view(self.arena.data_offset + offset, len(part))[:] = part
            offsets.append(offset)
            offset += page_up(len(part))
        return offsets

    def void(self) -> None:
        """Invalidate what is staged here, so that a daemon that outlives its trainer does not take it up once more."""
        if self.arena is not None:
            self.arena.begin_generation()

    def unmap(self) -> None:
        """Give the memory back; no copy and no write may be under way."""
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
        budget_nbytes: int | None,
        attach: Callable[[int, Arena], None],
        detach: Callable[[int], None],
    ) -> None:
        """Make ``slots`` empty slots.

        Args:
            slots: How many saves can be between their call and their durability.
            budget_nbytes: Most host memory for all slots together; None leaves it to what the machine has.
            attach: Told of each new arena, with its number; it hands it to the daemon.
            detach: Told of each arena that is about to go.
        """
        self._slots = [Slot() for _ in range(slots)]
        self._budget_nbytes = budget_nbytes
        self._attach = attach
        self._detach = detach
        self._changed = Monitor()
        self._next_arena = 1
        self._closed = False
        self._warned_unpinnable = False

    @property
    def nbytes(self) -> int:
        """Host memory that the slots take now, in bytes."""
        return sum(slot.arena.nbytes for slot in self._slots if slot.arena is not None)

    def is_busy(self) -> bool:
        """Whether each slot is taken."""
        return bool(self._slots) and all(slot.owner is not None for slot in self._slots)

    def try_acquire(self, owner: object) -> Slot | None:
        """Give a free slot to ``owner``; returns None if all are busy."""
        with self._changed:
            if self._closed:
                raise ClosedError("the checkpointer was closed meanwhile")
            free = [slot for slot in self._slots if slot.owner is None]
            if not free:
                return None
            slot = max(free, key=lambda slot: 0 if slot.arena is None else slot.arena.nbytes)
            slot.owner = owner
            return slot

    def acquire(self, owner: object, timeout_s: float) -> Slot:
        """The same; blocks up to ``timeout_s`` seconds, then raises ``WriteStalledError``."""
        slot = self._changed.wait_for(lambda: self.try_acquire(owner), timeout_s)
        if slot is None:
            message = f"all {len(self._slots)} staging slots were still being written after {timeout_s:g} s"
            raise WriteStalledError(message)
        return slot

    def release(self, owner: object) -> None:
        """Free the slot that ``owner`` holds, if any; after :meth:`close` its memory goes at once."""
        with self._changed:
            for slot in self._slots:
                if slot.owner is owner:
                    slot.owner = None
                    if self._closed:
                        self._drop(slot)
            self._changed.notify_all()

    def fit(self, slot: Slot, plan: Plan, parts: Sequence[bytes], device: torch.device | None) -> None:
        """Give a held slot an arena for ``plan`` and, behind it, ``parts``; lay the plan out in it.

        Blocks while pages are allocated, and page-locked where copies come from a ``device`` beside training: then on
        its NUMA node.

        Raises:
            HostMemoryError: Over the budget, or more than the machine has; the slot then has no arena.
        """
        descriptor_nbytes, data_nbytes, parts_nbytes = _sizes(plan, parts)
        if not self._has_room(slot, plan, descriptor_nbytes, data_nbytes):
            self._replace(slot, descriptor_nbytes, _with_headroom(plan, parts_nbytes), device)
        if device is not None and slot.pinned is None and not slot.unpinnable:
            self._pin(slot, device)
        slot.lay_out(plan)

    def fits(self, slot: Slot, plan: Plan, parts: Sequence[bytes], device: torch.device | None) -> bool:
        """Whether :meth:`fit` would have nothing to do."""
        is_pinned = device is None or slot.pinned is not None or slot.unpinnable
        return slot.plan is plan and is_pinned and self._has_room(slot, plan, *_sizes(plan, parts)[:2])

    @staticmethod
    def _has_room(slot: Slot, plan: Plan, descriptor_nbytes: int, data_nbytes: int) -> bool:
        arena, wanted = slot.arena, max(data_nbytes, plan.room_nbytes)
        return (
            arena is not None
            and data_nbytes <= arena.data_nbytes <= max(2 * wanted, 1 << 20)
            and arena.nbytes - arena.data_nbytes >= descriptor_nbytes
        )

    def _replace(self, slot: Slot, descriptor_nbytes: int, data_nbytes: int, device: torch.device | None) -> None:
        with self._changed:
            self._drop(slot)
            if self._budget_nbytes is not None and self.nbytes + data_nbytes > self._budget_nbytes:
                raise HostMemoryError(
                    f"a staging slot of {data_nbytes / 2**20:,.1f} MiB beside {self.nbytes / 2**20:,.1f} MiB already "
                    f"taken exceeds max_host_memory_bytes={self._budget_nbytes:,}; raise it, or use fewer slots"
                )
        try:
            arena = Arena.create(descriptor_nbytes, data_nbytes)
            try:
                host_memory.populate(arena, numa.node_of(pci_address(device)))
            except BaseException:  # Ctrl-C as well leaves no arena
                arena.close()
                raise
        except OSError as error:
            raise HostMemoryError(f"no staging slot of {data_nbytes / 2**20:,.1f} MiB can be made: {error}") from error
        with self._changed:
            slot.arena, slot.arena_id = arena, self._next_arena
            self._next_arena += 1
        self._attach(slot.arena_id, arena)

    def _pin(self, slot: Slot, device: torch.device) -> None:
        assert slot.arena is not None
        try:
            slot.pinned = PinnedRange(device, slot.arena.address, slot.arena.nbytes)
        except RuntimeError as error:
            slot.unpinnable = True
            level, self._warned_unpinnable = logging.DEBUG if self._warned_unpinnable else logging.WARNING, True
            logger.log(level, "staging memory cannot be pinned, so copies from %s will be slow: %s", device, error)

    def _drop(self, slot: Slot) -> None:
        if slot.arena is not None:
            self._detach(slot.arena_id)
            slot.unmap()

    def close(self) -> None:
        """Give back every slot that is free; a busy one goes when it is released. Idempotent."""
        with self._changed:
            self._closed = True
            for slot in self._slots:
                if slot.owner is None:
                    self._drop(slot)
            self._changed.notify_all()


def _with_headroom(plan: Plan, parts_nbytes: int) -> int:
    """Bytes to make for all data: a quarter more than there is now of what grows, tables and the treespec."""
    growing = max(plan.nbytes, plan.room_nbytes) - plan.first.nbytes
    return plan.first.nbytes + growing + page_up(growing // 4) + parts_nbytes + page_up(parts_nbytes // 4)


def _sizes(plan: Plan, parts: Sequence[bytes]) -> tuple[int, int, int]:
    """Bytes for the descriptor, for all data, and of that for ``parts``."""
    parts_nbytes = sum(page_up(len(part)) for part in parts)
    descriptor_nbytes = DESCRIPTOR_NBYTES + _DESCRIPTOR_PER_FILE * len(plan.files)
    return descriptor_nbytes, plan.nbytes + parts_nbytes, parts_nbytes
