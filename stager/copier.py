"""The copies of a save: what is captured at the call, what goes on beside training, and when it is all there.

Every copy is a byte copy: source and target have one dtype and shape, which the plan has checked. CPU tensors are
captured by all cores at the memory's limit; overlapping that copy was measured to gain nothing, so it is done only on
request. CUDA tensors go through :mod:`sidesave.stager.cuda`.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, cast

import torch
import xxhash

from sidesave.errors import SidesaveError, StagingError, TornSnapshotError, UnsupportedValueError
from sidesave.stager import ownership
from sidesave.stager.cuda import CudaCopy, CudaLanes
from sidesave.stager.image import Plan
from sidesave.stager.memcopy import MemoryCopier, Region
from sidesave.stager.pool import Slot, Target
from sidesave.stager.tree import FlatState

logger = logging.getLogger(__name__)

GUARD_TIMEOUT_S: Final = 300.0
"""An optimizer waits this long for a copy before it goes on; the save is then torn, and says so."""
SAMPLES: Final = 32
"""Elements of each overlapped CPU tensor that the fingerprint looks at."""


class Job(NamedTuple):
    """One tensor to copy that needs more than its bytes moved here and now: byte-equal ``source`` and ``target``."""

    fqn: str
    source: torch.Tensor
    target: Target


class StagingCopy:
    """The copies of one save that go on after its call."""

    def __init__(self, jobs: Sequence[Job], *, validate: bool) -> None:
        """Take the fingerprint of ``jobs``, the overlapped CPU tensors; ``cuda``, set later, has its own."""
        self._jobs = jobs
        self.cuda: CudaCopy | None = None
        self._validate = validate
        self._released = threading.Event()
        self._over = threading.Event()
        self._versions = [job.source._version for job in jobs]
        self._before = [self._fingerprint(job.source) for job in jobs]
        self.error: SidesaveError | None = None

    def run(self) -> None:
        """Copy, then compare fingerprints; runs in the stager thread and leaves the outcome in ``error``."""
        try:
            with torch.no_grad():  # thread-local: without it the copies would grow an autograd graph
                if self.cuda is not None:
                    self.cuda.enqueue()
                for job in self._jobs:
                    if not ownership.is_resizable(job.source):  # it was not at the call: it has lost its memory
                        job.target.view.copy_(job.source)
                torn = [
                    job.fqn
                    for job, before, version in zip(self._jobs, self._before, self._versions, strict=True)
                    if self._has_changed(job, before, version)
                ]
                self._released.set()
                if self.cuda is not None:
                    torn += self.cuda.finish()
            if torn:
                self.error = _torn(torn)
        except SidesaveError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - whatever torch raises is this save's failure, not the thread's
            self.error = StagingError(f"copying the state failed: {error}")
            self.error.__cause__ = error
        finally:
            self._released.set()
            self._over.set()
            self._jobs, self._before = (), []

    def close_guard(self) -> None:
        """Hold an optimizer back: on the host until CPU copies are done, in stream order for CUDA copies."""
        if not self._released.wait(GUARD_TIMEOUT_S):
            logger.error(
                "a copy did not finish within %g s; the optimizer goes on and that save is dropped", GUARD_TIMEOUT_S
            )
            return
        if self.cuda is not None:
            self.cuda.make_streams_wait()

    def join(self) -> None:
        """Wait on the host until the bytes are there."""
        self._over.wait(GUARD_TIMEOUT_S)

    def _has_changed(self, job: Job, before: bytes, version: int) -> bool:
        """Whether the copy may not be what was there at the call.

        Looks at source and copy: weights may have been swapped and swapped back meanwhile.
        """
        return (
            ownership.is_resizable(job.source)
            or job.source._version != version
            or self._fingerprint(job.source) != before
            or self._fingerprint(job.target.view) != before
        )

    def _fingerprint(self, tensor: torch.Tensor) -> bytes:
        return _digest(tensor) if self._validate else _spot_check(tensor)


def _torn(fqns: Sequence[str]) -> TornSnapshotError:
    names = ", ".join(fqns[:8]) + (f" and {len(fqns) - 8} more" if len(fqns) > 8 else "")
    return TornSnapshotError(
        f"changed while being copied: {names}. Wrap the code that writes them in `with checkpointer.guard():`; "
        "until then this state is copied at the call"
    )


def _spot_check(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    picked = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].contiguous()
    return bytes(cast("list[int]", picked.view(torch.uint8).tolist()))


def _digest(tensor: torch.Tensor) -> bytes:
    import ctypes

    nbytes = tensor.numel() * tensor.element_size()
    return xxhash.xxh3_128_digest((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr()))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes in memory are those to be saved."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


class Copier:
    """Starts the copies of saves; owns the stager thread, which begins with the first copy that needs it."""

    def __init__(self, *, overlap: bool | None, validate: bool) -> None:
        """Set the policy: ``overlap`` None overlaps CUDA tensors only, False captures everything at the call."""
        self._overlap = overlap
        self._validate = validate
        self._lanes = CudaLanes()
        self._memory = MemoryCopier()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._distrusted: list[Plan] = []
        if overlap is not False:
            ownership.install()

    def copy(
        self, flat: FlatState, plan: Plan, slot: Slot, done: Callable[[SidesaveError | None], None], *, blocking: bool
    ) -> None:
        """Capture what must be captured and start the rest; returns when the caller may go on training.

        ``done`` is called exactly once, with the error if there is one: before this returns where everything was
        captured, else from the stager thread.
        """
        regions: list[Region] = []
        jobs: list[Job] = []
        named = itertools.chain.from_iterable(tensors.items() for tensors in flat.containers.values())
        at_once = not self._overlap
        for (fqn, source), target in zip(named, slot.targets, strict=True):
            if source.is_cpu and target.nbytes and not source.untyped_storage().nbytes():
                raise UnsupportedValueError(f"{fqn} has no memory: its storage was resized to nothing")  # FSDP does so
            if at_once and source.is_cpu and _is_plain(source):
                regions.append((target.address, source.data_ptr(), target.nbytes))
            else:
                jobs.append(Job(fqn, source, target))
        may_overlap = not (blocking or self._overlap is False or ownership.in_guard() or plan in self._distrusted)
        owned = (
            ownership.owned_addresses(flat.optimizers, flat.modules)
            if may_overlap and self._wants_overlap(jobs)
            else set[int]()
        )
        try:
            self._start(regions, jobs, owned, plan, slot, done, blocking=blocking)
        except BaseException:
            self._lanes.settle()  # no device may still be writing into a slot that is given back
            raise

    def _start(
        self,
        regions: list[Region],
        jobs: list[Job],
        owned: set[int],
        plan: Plan,
        slot: Slot,
        done: Callable[[SidesaveError | None], None],
        *,
        blocking: bool,
    ) -> None:
        overlapped: list[Job] = []
        on_cuda: list[Job] = []
        for job in jobs:
            source = job.source
            if source.is_cuda:
                on_cuda.append(job)
            elif source.is_cpu and self._overlap and self._may_run_beside(source, owned):
                overlapped.append(job._replace(source=source.detach()))
            elif source.is_cpu and _is_plain(source):
                regions.append((job.target.address, source.data_ptr(), job.target.nbytes))
            else:  # to be gathered, resolved, or fetched from another kind of device
                with torch.no_grad():
                    job.target.view.copy_(source)
        later = bool(overlapped or on_cuda)
        # Where this is all there is to copy, the arena tells its reader how far it is.
        arena = None if later else slot.arena
        self._memory.copy(regions, None if arena is None else lambda address: arena.advance(address - arena.address))
        if not later:
            done(None)
            return
        with torch.no_grad():
            copy = StagingCopy(overlapped, validate=self._validate)
            if on_cuda:
                copy.cuda = self._lanes.begin(on_cuda, owned, slot, validate=self._validate)
        ownership.add_pending(copy)

        def run() -> None:
            copy.run()
            ownership.remove_pending(copy)
            if isinstance(copy.error, TornSnapshotError):
                self._distrusted.append(plan)
                logger.warning("%s", copy.error)
            done(copy.error)

        if blocking:
            run()
        else:
            self._submit(run)

    def captures_all(self, flat: FlatState) -> bool:
        """Whether everything will be captured at the call, so that the writer can follow the copy."""
        return not self._overlap and all(
            tensor.is_cpu for tensors in flat.containers.values() for tensor in tensors.values()
        )

    def _wants_overlap(self, jobs: list[Job]) -> bool:
        return bool(self._overlap) or any(job.source.is_cuda for job in jobs)

    @staticmethod
    def _may_run_beside(source: torch.Tensor, owned: set[int]) -> bool:
        return (
            source.data_ptr() in owned
            and _is_plain(source)
            and not (source.is_shared() or ownership.is_resizable(source))
        )

    def when_copied(self, run: Callable[[], None]) -> None:
        """Call ``run`` once the copies that are under way now are over: at once, or in the stager thread."""
        if self._thread is None:
            run()
        else:
            self._queue.put(run)

    def _submit(self, run: Callable[[], None]) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="sidesave-stager", daemon=True)
            self._thread.start()
        self._queue.put(run)

    def is_this_thread(self) -> bool:
        """Whether the caller runs in the stager thread."""
        return threading.current_thread() is self._thread

    def _work(self) -> None:
        while (run := self._queue.get()) is not None:
            run()

    def close(self) -> None:
        """Finish the copies under way and stop the thread; idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            self._queue.put(None)
            thread.join(GUARD_TIMEOUT_S)
        self._memory.close()
        self._lanes.close()
