"""A staging slot: an arena, and the plan that is laid out in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from sidesave.stager.copy.held import Held
from sidesave.stager.memory.arena import Arena
from sidesave.stager.memory.pinning import PinnedRange
from sidesave.stager.plan import Plan, Target
from sidesave.stager.tables import RowImage


@dataclass(slots=True, eq=False)
class StagingSlot:
    """One arena and the plan laid out in it.

    Attributes:
        nbytes: Host memory that the slot uses now, in bytes.
        arena_id: Identifies the arena in messages; never reused.
        targets: The plan's tensors, container after container, in the order of the state.
        prepared: Cached copy list of these ``targets``, owned by the copier.
        held: The frozen tensors that these ``targets`` already contain.
        image: The arena's data as bytes.
        pinned: The arena's memory, page-locked for devices.
        unpinnable: Page-locking this arena failed and is not retried.
        owner: The save that uses the slot; None while it is free.
        device: The device for which the memory was made.
        last_use: The number of saves that had taken a slot of the pool by then, and the time.
    """

    arena: Arena | None = None
    nbytes: int = 0
    arena_id: int = 0
    plan: Plan | None = None
    image: torch.Tensor | None = None
    targets: list[Target] = field(default_factory=list[Target])
    prepared: object = None
    held: Held = field(default_factory=Held)
    pinned: PinnedRange | None = None
    unpinnable: bool = False
    device: torch.device | None = None
    owner: object | None = None
    last_use: tuple[int, float] = (0, 0.0)

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
            self.arena, self.nbytes = None, 0
