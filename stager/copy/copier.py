"""Copies a state into a staging slot: some tensors at the call, the others during training.

Every copy is a byte copy: source and target have the same dtype and shape, which the plan checks.
CPU tensors are captured at the call, by all cores, at the speed of memory; overlapping that copy
with training gained nothing in measurements, so it is done only on request. Tensors on devices go
through :mod:`sidesave.stager.copy.device_copy`.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Final

import torch

from sidesave.errors import SidesaveError, StagingError, TornSnapshotError, listed
from sidesave.stager import ownership, torch_private
from sidesave.stager.copy import copy_list, fingerprint
from sidesave.stager.copy import held as held_tensors
from sidesave.stager.copy.copy_list import CopyList, DeviceList
from sidesave.stager.copy.device_copy import DeviceCopy, Lanes
from sidesave.stager.copy.held import StepCounts, Turn
from sidesave.stager.copy.memcopy import MemoryCopier, Pieces
from sidesave.stager.copy.slot import StagingSlot
from sidesave.stager.devices import kinds
from sidesave.stager.plan import SMALL_NBYTES, Job, Plan
from sidesave.stager.signal_safe import Worker
from sidesave.stager.state.flat_state import FlatState

logger = logging.getLogger(__name__)

GUARD_TIMEOUT_S: Final = 300.0
"""Seconds an optimizer step waits for a copy; then it goes on, and the save is reported as torn."""


class StagingCopy:
    """The copies of one save that continue after its call.

    The stager thread calls :meth:`enqueue`, and another thread calls :meth:`finish`: an optimizer
    step waits until the copies are enqueued, which must not wait for the previous save's copies.
    """

    def __init__(self, *, validate: bool) -> None:
        """Start with nothing to copy."""
        self._validate = validate
        self.device = DeviceCopy()
        self.pieces: Pieces | None = None
        self._jobs: Sequence[Job] = ()
        self._versions: list[int] = []
        self._before: list[bytes] = []
        self._torn: list[str] = []
        self.changed: list[str] = []
        """FQNs of tensors that were not copied, as the slot held them, but changed untracked."""
        self._released = threading.Event()
        self._over = threading.Event()
        self.error: SidesaveError | None = None

    def add_host(self, jobs: Sequence[Job]) -> None:
        """Add the CPU tensors that are copied during training, and take their fingerprints."""
        self._jobs = jobs
        self._versions = [job.source._version for job in jobs]
        self._before = [self._fingerprint(job.source) for job in jobs]

    def enqueue(self) -> None:
        """Enqueue copies from devices, copy CPU tensors, and release waiting optimizer steps."""
        try:
            # thread-local: without it the copies would grow an autograd graph
            with torch.no_grad():
                self.device.enqueue()
                for job in self._jobs:
                    # resizable now: its memory was freed
                    if not ownership.is_resizable(job.source):
                        torch_private.copy_bits(job.target.view, job.source)
                self._torn = [
                    job.target.fqn
                    for job, before, version in zip(
                        self._jobs, self._before, self._versions, strict=True
                    )
                    if self._has_changed(job, before, version)
                ]
        except BaseException as error:  # noqa: BLE001 - fails this save, not the thread
            self._fail(error)
        finally:
            self._released.set()

    def finish(self) -> None:
        """Wait for the copies and set ``error`` if they failed."""
        try:
            with torch.no_grad():
                if self.error is None:
                    self._torn += self.device.finish()
                    self.changed = self.device.changed()
                if self.error is None and self._torn:
                    self.error = _torn(self._torn)
                if self.error is None and self.changed:
                    self.error = StagingError(
                        f"{_uncounted(self.changed)}: save dropped, since it has older bytes"
                    )
        except BaseException as error:  # noqa: BLE001 - as above
            self._fail(error)
        if self.error is not None:
            try:
                self.device.abandon()  # no copy may still write into a slot that is released
            except Exception as error:  # noqa: BLE001 - the device is broken and copies no more
                logger.error("waiting for the copies of a failed save failed: %s", error)
        self.device.release()
        self._jobs, self._before = (), []
        self._over.set()

    def _fail(self, error: BaseException) -> None:
        chained: BaseException | None = error
        while chained is not None:  # the error's frames would keep tensors alive
            traceback.clear_frames(chained.__traceback__)
            chained = chained.__cause__ or chained.__context__
        if isinstance(error, SidesaveError):
            self.error = error
        else:
            self.error = StagingError(f"copying the state failed: {error!r}")
            self.error.__cause__ = error

    def close_guard(self) -> None:
        """Make an optimizer step wait: on the host for CPU copies, in stream order for others."""
        if not self._released.wait(GUARD_TIMEOUT_S):
            logger.error(
                (
                    "a copy did not finish within %g s; the optimizer step runs and that save is "
                    "dropped"
                ),
                GUARD_TIMEOUT_S,
            )
            return
        self.device.make_streams_wait()

    def join(self) -> None:
        """Wait on the host, up to ``GUARD_TIMEOUT_S``, until the bytes are in the slot."""
        if not self._over.wait(GUARD_TIMEOUT_S):
            logger.error("a copy did not finish within %g s", GUARD_TIMEOUT_S)

    def _has_changed(self, job: Job, before: bytes, version: int) -> bool:
        """Whether the copy may differ from the tensor at the call.

        Checks source and copy: weights may have been swapped out and back in during the copy.
        """
        return (
            ownership.is_resizable(job.source)
            or job.source._version != version
            or self._fingerprint(job.source) != before
            or self._fingerprint(job.target.view) != before
        )

    def _fingerprint(self, tensor: torch.Tensor) -> bytes:
        return fingerprint.of_host_tensor(tensor, validate=self._validate)


def _uncounted(fqns: Sequence[str]) -> str:
    return (
        f"declared sidesave.Frozen, but changed without a new tensor version: {listed(fqns, 8)} "
        "(copied at each save from now on; remove them from Frozen, or write them in `with "
        "checkpointer.guard():`)"
    )


def _torn(fqns: Sequence[str]) -> TornSnapshotError:
    return TornSnapshotError(
        f"changed while being copied: {listed(fqns, 8)}. Wrap the code that writes them in `with "
        "checkpointer.guard():`; this state is copied while save() blocks from now on"
    )


class Copier:
    """Starts the copies of saves; owns the threads that continue them."""

    def __init__(
        self,
        *,
        overlap: bool | None,
        validate: bool,
        on_failure: Callable[[BaseException], object] = lambda error: None,
    ) -> None:
        """Set the policy.

        Args:
            overlap: True overlaps all copies with training, None those from devices, False none.
            validate: Compare all bytes, instead of samples, to detect changes during a copy.
            on_failure: Called in a thread of the copier with the error of a function that failed
                there.
        """
        self._overlap = overlap
        self._validate = validate
        self._lanes = Lanes()
        self._memory = MemoryCopier()
        self._starter = Worker("sidesave-stager", on_failure)
        self._finisher = Worker("sidesave-staged", on_failure)
        self.workers = (self._starter, self._finisher)
        self._distrusted: list[Plan] = []
        self._restless: set[str] = set()
        """FQNs of tensors in ``Frozen`` that changed without a new tensor version."""
        self._steps = StepCounts()
        self._count = 0
        # first: a graph captured without these hooks is taken to change no parameters
        ownership.install()
        kinds.watch_graphs()

    def copy(
        self,
        copy: StagingCopy,
        flat: FlatState,
        plan: Plan,
        slot: StagingSlot,
        done: Callable[[SidesaveError | None], None],
        *,
        blocking: bool,
    ) -> bool:
        """Capture what must be captured now and start the other copies.

        Blocks until training may continue. Returns True if everything is copied. Otherwise another
        thread calls ``done`` once, with the error or None. ``copy`` comes from :meth:`new_copy`; if
        this raises, pass it to :meth:`abandon`. Call this under
        :func:`sidesave.stager.devices.kinds.no_capture`.
        """
        grad = torch.is_grad_enabled()
        try:
            # an interrupted `with no_grad()` could leave it on
            torch_private.set_grad_enabled(False)
            if flat.row_images:
                slot.fill(flat.row_images)
            tensors = [
                tensor for container in flat.containers.values() for tensor in container.values()
            ]
            turn = self._begin_turn(copy, flat, slot, tensors)
            indices, skipped = range(len(tensors)), turn.held.keys() | turn.compared.keys()
            if skipped:
                indices = [index for index in indices if index not in skipped]
            lists = self._lists(flat, plan, slot, tensors, indices, blocking=blocking)
            regions = [region for each in lists for region in each.regions]
            overlapped = [
                Job(tensors[index].detach(), slot.targets[index])
                for each in lists
                for index in each.overlapped
            ]
            on_device: dict[torch.device, list[DeviceList]] = {}
            for each in lists:
                for index in each.gathered:
                    torch_private.copy_bits(slot.targets[index].view, tensors[index])
                for device, of_device in each.devices.items():
                    on_device.setdefault(device, []).append(of_device)
            held: dict[torch.device, list[int]] = {}
            for index in turn.held:
                if not tensors[index].is_cpu:
                    held.setdefault(tensors[index].device, []).append(index)
            later = bool(overlapped or on_device or held)
            # If no copies follow, the arena's fill level lets the daemon write during this one.
            copy.pieces = Pieces(regions)
            self._memory.copy(copy.pieces, None if later else slot.arena)
            if not later:
                if turn.copied or turn.compared:
                    slot.held.end(turn, (), slot.targets)
                return True
            copy.add_host(overlapped)
            self._lanes.begin(
                copy.device,
                on_device,
                held,
                tensors,
                slot,
                self._starter.submit,
                validate=self._validate,
            )
            frozen_on_device = [index for index in turn.copied if not tensors[index].is_cpu]
        finally:
            torch_private.set_grad_enabled(grad)
        ownership.add_pending(copy)
        contents, targets = slot.held, slot.targets

        def finish() -> None:
            copy.finish()
            ownership.remove_pending(copy)
            if copy.error is None:
                self._warn_restless(contents.end(turn, frozen_on_device, targets))
            self._restless.update(copy.changed)
            if isinstance(copy.error, TornSnapshotError):
                self._distrusted.append(plan)
                logger.warning("%s", copy.error)
            done(copy.error)

        def start() -> None:
            copy.enqueue()
            self._finisher.submit(finish)

        self._starter.submit(start)
        return False

    def _begin_turn(
        self, copy: StagingCopy, flat: FlatState, slot: StagingSlot, tensors: Sequence[torch.Tensor]
    ) -> Turn:
        """Decide which frozen tensors to copy, and fully compare the CPU tensors that are due."""
        count, self._count = self._count, self._count + 1
        # A slot that holds frozen tensors must forget those that this save overwrites.
        if not (flat.frozen or slot.held.contents):
            return Turn()
        targets = slot.targets
        candidates = held_tensors.candidates(flat, tensors, targets, self._restless)
        turn = slot.held.begin(tensors, targets, candidates, count, self._steps)
        if turn.compared:
            compared = [(tensors[index], targets[index]) for index in turn.compared]
            regions = [
                (target.address, tensor.data_ptr(), target.nbytes) for tensor, target in compared
            ]
            copy.pieces = pieces = Pieces(regions, compare=True)
            self._memory.copy(pieces)
            for _, target in compared if pieces.different else ():
                if any(
                    0 <= address - target.address < target.nbytes for address in pieces.different
                ):
                    turn.changed.append(target.fqn)
        self._warn_restless(turn.changed)
        return turn

    def _warn_restless(self, fqns: Sequence[str]) -> None:
        """Warn of frozen tensors that have changed, and copy them at each save from now on."""
        if fqns:
            self._restless.update(fqns)
            logger.warning(
                "%s: this save has their new bytes, earlier saves may have older ones",
                _uncounted(fqns),
            )

    def _lists(
        self,
        flat: FlatState,
        plan: Plan,
        slot: StagingSlot,
        tensors: Sequence[torch.Tensor],
        indices: Sequence[int],
        *,
        blocking: bool,
    ) -> list[CopyList]:
        may_overlap = not (
            self._overlap is False or ownership.in_guard() or plan in self._distrusted
        )
        owned: dict[int, int] = {}
        if may_overlap and (self._overlap or kinds.first_with_runtime(tensors) is not None):
            least_nbytes = 0 if self._overlap else SMALL_NBYTES
            owned = ownership.owned_memory(flat.optimizers, flat.modules, least_nbytes=least_nbytes)
        overlap_host = bool(self._overlap) and may_overlap and not blocking
        return copy_list.lists_of(slot, flat, tensors, indices, owned, overlap_host=overlap_host)

    def new_copy(self) -> StagingCopy:
        """Create the object that one call of :meth:`copy` fills."""
        return StagingCopy(validate=self._validate)

    def abandon(self, copy: StagingCopy) -> None:
        """Wait until the copies of a failed call no longer write to the slot; idempotent.

        Call it in an internal thread, through :meth:`when_copied`: after the work that the call has
        submitted.
        """
        if copy.pieces is not None:
            copy.pieces.stop()
        ownership.remove_pending(copy)
        if copy.device.parts:
            with kinds.no_capture("save()"):
                copy.device.abandon()
            copy.device.release()

    def captures_all(self, flat: FlatState) -> bool:
        """Whether :meth:`copy` copies all before it returns, so that the daemon can write along."""
        return not (self._overlap or flat.tables) and all(
            tensor.is_cpu for tensors in flat.containers.values() for tensor in tensors.values()
        )

    def when_copied(self, run: Callable[[], None]) -> None:
        """Call ``run`` once copies in progress have ended: now, or in the thread that ends them."""
        if self._starter.is_idle():
            run()
        else:
            self._starter.submit(lambda: self._finisher.submit(run))

    def close(self) -> None:
        """Finish the copies in progress and stop the threads; idempotent."""
        self._starter.close(GUARD_TIMEOUT_S)
        self._finisher.close(GUARD_TIMEOUT_S)
        self._memory.close()
        self._lanes.close()
