"""The copies of a save: what is captured at the call, what is copied beside training, and when all is complete.

Every copy is a byte copy: source and target have one dtype and shape, which the plan has checked. CPU tensors are
captured by all cores at the memory's limit; overlapping that copy was measured to gain nothing, so it is done only on
request. Tensors of devices go through :mod:`sidesave.stager.copy.device_copy`.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from sidesave.errors import SidesaveError, StagingError, TornSnapshotError
from sidesave.stager import torch_private
from sidesave.stager.copy import copy_list, fingerprint
from sidesave.stager.copy.copy_list import CopyList
from sidesave.stager.copy.device_copy import DeviceCopy, DeviceList, Lanes
from sidesave.stager.copy.held import Content
from sidesave.stager.copy.memcopy import MemoryCopier, Pieces
from sidesave.stager.copy.pool import Job, Slot
from sidesave.stager.devices import kinds
from sidesave.stager.plan import SMALL_NBYTES, Plan
from sidesave.stager.signal_safe import Worker
from sidesave.stager.state import ownership
from sidesave.stager.state.flat_state import FlatState

logger = logging.getLogger(__name__)

GUARD_TIMEOUT_S: Final = 300.0
"""An optimizer waits this long for a copy before it goes on; the save is then torn, and says so."""


class StagingCopy:
    """The copies of one save that go on after its call.

    The stager thread calls :meth:`enqueue`, another one :meth:`finish`: an optimizer is held back until a copy is
    enqueued, and that must not wait for the copies of the save before.
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
        self._released = threading.Event()
        self._over = threading.Event()
        self.error: SidesaveError | None = None

    def add_host(self, jobs: Sequence[Job]) -> None:
        """Take the overlapped tensors of host memory, and their fingerprints."""
        self._jobs = jobs
        self._versions = [job.source._version for job in jobs]
        self._before = [self._fingerprint(job.source) for job in jobs]

    def enqueue(self) -> None:
        """Start the copies of devices, make those of host memory, and let optimizers go on in stream order."""
        try:
            with torch.no_grad():  # thread-local: without it the copies would grow an autograd graph
                self.device.enqueue()
                for job in self._jobs:
                    if not ownership.is_resizable(job.source):  # it was not at the call: it has lost its memory
                        job.target.view.copy_(job.source)
                self._torn = [
                    job.target.fqn
                    for job, before, version in zip(self._jobs, self._before, self._versions, strict=True)
                    if self._has_changed(job, before, version)
                ]
        except BaseException as error:  # noqa: BLE001 - whatever is raised is this save's failure, not the thread's
            self._fail(error)
        finally:
            self._released.set()

    def finish(self) -> None:
        """Wait for the copies and leave the outcome in ``error``."""
        try:
            with torch.no_grad():
                if self.error is None:
                    self._torn += self.device.finish()
                if self.error is None and self._torn:
                    self.error = _torn(self._torn)
        except BaseException as error:  # noqa: BLE001 - as above
            self._fail(error)
        if self.error is not None:
            try:
                self.device.abandon()  # nothing may still be copying into a slot that is given back
            except Exception as error:  # noqa: BLE001 - the device is broken: nothing moves on it any more
                logger.error("the copies of a failed save cannot be waited for: %s", error)
        self.device.release()
        self._jobs, self._before = (), []
        self._over.set()

    def _fail(self, error: BaseException) -> None:
        chained: BaseException | None = error
        while chained is not None:  # frames hold tensors, for as long as anybody keeps the error
            traceback.clear_frames(chained.__traceback__)
            chained = chained.__cause__ or chained.__context__
        if isinstance(error, SidesaveError):
            self.error = error
        else:
            self.error = StagingError(f"copying the state failed: {error!r}")
            self.error.__cause__ = error

    def close_guard(self) -> None:
        """Hold an optimizer back: on the host until CPU copies are done, in stream order for copies from devices."""
        if not self._released.wait(GUARD_TIMEOUT_S):
            logger.error(
                "a copy did not finish within %g s; the optimizer goes on and that save is dropped", GUARD_TIMEOUT_S
            )
            return
        self.device.make_streams_wait()

    def join(self) -> None:
        """Wait on the host until the bytes are in the slot."""
        if not self._over.wait(GUARD_TIMEOUT_S):
            logger.error("a copy did not end within %g s", GUARD_TIMEOUT_S)

    def _has_changed(self, job: Job, before: bytes, version: int) -> bool:
        """Whether the copy may differ from the tensors at the call.

        Looks at source and copy: weights may have been swapped and swapped back meanwhile.
        """
        return (
            ownership.is_resizable(job.source)
            or job.source._version != version
            or self._fingerprint(job.source) != before
            or self._fingerprint(job.target.view) != before
        )

    def _fingerprint(self, tensor: torch.Tensor) -> bytes:
        return fingerprint.of_host_tensor(tensor, validate=self._validate)


def _torn(fqns: Sequence[str]) -> TornSnapshotError:
    names = ", ".join(fqns[:8]) + (f" and {len(fqns) - 8} more" if len(fqns) > 8 else "")
    return TornSnapshotError(
        f"changed while being copied: {names}. Wrap the code that writes them in `with checkpointer.guard():`; "
        "until then this state is copied at the call"
    )


class Copier:
    """Starts the copies of saves; owns the threads in which they go on."""

    def __init__(self, *, overlap: bool | None, validate: bool) -> None:
        """Set the policy: ``overlap`` None overlaps tensors of devices only, False captures everything at the call."""
        self._overlap = overlap
        self._validate = validate
        self._lanes = Lanes()
        self._memory = MemoryCopier()
        self._starter = Worker("sidesave-stager")
        self._finisher = Worker("sidesave-staged")
        self.workers = (self._starter, self._finisher)
        self._distrusted: list[Plan] = []
        self._count = 0
        ownership.install()  # always, and first: a graph in which no hook fired is taken to change nothing
        kinds.watch_graphs()

    def copy(
        self,
        copy: StagingCopy,
        flat: FlatState,
        plan: Plan,
        slot: Slot,
        done: Callable[[SidesaveError | None], None],
        *,
        blocking: bool,
    ) -> bool:
        """Capture what must be captured and start the rest; returns when the caller may go on training.

        Returns whether all is copied by then. If not, ``done`` is called once with the error, if there is one, from a
        thread of its own. ``copy`` is a new one; where this raises, it is to be given to :meth:`abandon`. No graph may
        be being captured (:func:`sidesave.stager.devices.kinds.no_capture`).
        """
        grad = torch.is_grad_enabled()
        try:
            torch_private.set_grad_enabled(False)  # `no_grad` would stay on where this is interrupted
            slot.fill(flat.row_images)
            tensors = [tensor for container in flat.containers.values() for tensor in container.values()]
            every, lacking = self._what_to_copy(flat, slot, tensors)
            lists = self._lists(flat, plan, slot, tensors, every, blocking=blocking)
            regions = [region for each in lists for region in each.regions]
            beside = [Job(tensors[index].detach(), slot.targets[index]) for each in lists for index in each.overlapped]
            on_device: dict[torch.device, list[DeviceList]] = {}
            for each in lists:
                for index in each.gathered:
                    slot.targets[index].view.copy_(tensors[index])
                for device, of_device in each.devices.items():
                    on_device.setdefault(device, []).append(of_device)
            later = bool(beside or on_device)
            # Where this is all there is to copy, the arena tells its reader how far it is.
            arena = None if later else slot.arena
            copy.pieces = Pieces(
                regions, None if arena is None else lambda address: arena.advance(address - arena.address)
            )
            self._memory.copy(copy.pieces)
            if not later:
                slot.held.end(lacking)
                return True
            copy.add_host(beside)
            self._lanes.begin(copy.device, on_device, tensors, slot, self._starter.submit, validate=self._validate)
        finally:
            torch_private.set_grad_enabled(grad)
        ownership.add_pending(copy)
        held = slot.held

        def finish() -> None:
            copy.finish()
            ownership.remove_pending(copy)
            if copy.error is None:
                held.end(lacking)
            if isinstance(copy.error, TornSnapshotError):
                self._distrusted.append(plan)
                logger.warning("%s", copy.error)
            done(copy.error)

        def start() -> None:
            copy.enqueue()
            self._finisher.submit(finish)

        self._starter.submit(start)
        return False

    def _what_to_copy(
        self, flat: FlatState, slot: Slot, tensors: Sequence[torch.Tensor]
    ) -> tuple[Sequence[int], Mapping[int, Content]]:
        """The indices of the tensors that ``slot`` does not hold yet, and what the frozen ones among them are."""
        count, self._count = self._count, self._count + 1
        targets = enumerate(slot.targets) if flat.frozen else ()
        frozen = [index for index, target in targets if target.fqn in flat.frozen]
        lacking = slot.held.begin(tensors, frozen, count)
        every, held = range(len(tensors)), slot.held.contents
        return [index for index in every if index not in held] if held else every, lacking

    def _lists(
        self,
        flat: FlatState,
        plan: Plan,
        slot: Slot,
        tensors: Sequence[torch.Tensor],
        every: Sequence[int],
        *,
        blocking: bool,
    ) -> list[CopyList]:
        may_overlap = not (self._overlap is False or ownership.in_guard() or plan in self._distrusted)
        owned: dict[int, int] = {}
        if may_overlap and (self._overlap or kinds.first_with_runtime(tensors) is not None):
            least_nbytes = 0 if self._overlap else SMALL_NBYTES
            owned = ownership.owned_memory(flat.optimizers, flat.modules, least_nbytes=least_nbytes)
        overlap_host = bool(self._overlap) and may_overlap and not blocking
        return copy_list.lists_of(slot, flat, tensors, every, owned, overlap_host=overlap_host)

    def new_copy(self) -> StagingCopy:
        """What the next :meth:`copy` will copy."""
        return StagingCopy(validate=self._validate)

    def abandon(self, copy: StagingCopy) -> None:
        """End the copies of a call that has failed, in a thread of ours; blocking and idempotent.

        When this returns nothing is written to the slot any more. Not before what the call has handed over is over: see
        :meth:`when_copied`.
        """
        if copy.pieces is not None:
            copy.pieces.stop()
        ownership.remove_pending(copy)
        if copy.device.parts:
            with kinds.no_capture("save()"):
                copy.device.abandon()
            copy.device.release()

    def captures_all(self, flat: FlatState) -> bool:
        """Whether everything will be captured at the call, so that the writer can follow the copy."""
        return not (self._overlap or flat.tables) and all(
            tensor.is_cpu for tensors in flat.containers.values() for tensor in tensors.values()
        )

    def when_copied(self, run: Callable[[], None]) -> None:
        """Call ``run`` once the copies that are under way now are over: at once, or in the thread that ends them."""
        if self._starter.is_idle():
            run()
        else:
            self._starter.submit(lambda: self._finisher.submit(run))

    def close(self) -> None:
        """Finish the copies under way and stop the threads; idempotent."""
        self._starter.close(GUARD_TIMEOUT_S)
        self._finisher.close(GUARD_TIMEOUT_S)
        self._memory.close()
        self._lanes.close()
