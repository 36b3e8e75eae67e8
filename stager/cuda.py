"""Copies from CUDA devices: a side stream each, small tensors packed first, the compute stream held back only in order.

At the call, on the compute stream: tensors that nothing guards are captured into device scratch (large ones are copied
out and the stream made to wait), small guarded ones are packed into the same scratch, and an event marks the point in
time that the save is of. Then the stager thread enqueues, on the side stream behind that event, one copy for each run
of packed tensors and the large tensors in chunks: a bulk copy holds the copy engine first in, first out, so that a
short ``.item()`` behind it waits for at most one chunk.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from sidesave.errors import StagingError, TornSnapshotError
from sidesave.stager import ownership
from sidesave.stager.image import SMALL_NBYTES
from sidesave.stager.pinning import PIECE_NBYTES

if TYPE_CHECKING:
    from sidesave.stager.copier import Job
    from sidesave.stager.pool import Slot

logger = logging.getLogger(__name__)

CHUNK_NBYTES: Final = 32 << 20
SCRATCH_NBYTES: Final = 64 << 20
_SCRATCH_TIMEOUT_S: Final = 300.0
_NORMED: Final = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


@dataclass(slots=True)
class _Run:
    """Consecutive bytes of the image that were packed consecutively into scratch."""

    scratch_offset: int
    image_offset: int
    nbytes: int


@dataclass(slots=True)
class _Target:
    """Staging memory as the copies see it; ``base`` is where the image starts in the arena."""

    image: torch.Tensor
    base: int

    def copy_from(self, source: torch.Tensor, offset: int) -> None:
        """Enqueue a copy of bytes in chunks, none of which crosses the border of two pinned pieces."""
        done = 0
        while done < source.numel():
            position = offset + done
            to_border = PIECE_NBYTES - (self.base + position) % PIECE_NBYTES
            nbytes = min(CHUNK_NBYTES, source.numel() - done, to_border)
            self.image[position : position + nbytes].copy_(source[done : done + nbytes], non_blocking=True)
            done += nbytes


@dataclass(slots=True)
class _DeviceCopy:
    """One device's part of a save; ``guarded`` are the tensors that are read beside training."""

    lane: _Lane
    target: _Target
    runs: list[_Run]
    guarded: list[Job]
    start: torch.cuda.Event
    before: list[torch.Tensor]
    validate: bool
    after: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    done: torch.cuda.Event | None = None


class CudaCopy:
    """The CUDA part of one save; see ``StagingCopy`` for who calls what."""

    def __init__(self, parts: Sequence[_DeviceCopy]) -> None:
        """Take the parts that :meth:`CudaLanes.begin` has prepared."""
        self._parts = list(parts)

    def enqueue(self) -> None:
        """Enqueue every copy and record the done events; blocks while the driver's queue is full, not on the copies."""
        for part in self._parts:
            lane = part.lane
            torch.cuda.set_device(lane.device)  # a thread that stays on device 0 would open a context there
            try:
                with torch.cuda.stream(lane.stream):
                    lane.stream.wait_event(part.start)
                    for run in part.runs:
                        source = lane.scratch[run.scratch_offset : run.scratch_offset + run.nbytes]
                        part.target.copy_from(source, run.image_offset)
                    lane.scratch_read = torch.cuda.Event()
                    lane.scratch_read.record(lane.stream)
                    lane.scratch_free.set()
                    for job in part.guarded:
                        if not job.source.untyped_storage().nbytes():
                            raise TornSnapshotError(f"changed while being copied: {job.fqn}, whose memory was freed")
                        part.target.copy_from(_bytes_of(job.source), job.target.offset)
                    part.after = _fingerprint(part.guarded, validate=part.validate)
                    part.done = torch.cuda.Event(blocking=True)
                    part.done.record(lane.stream)
            except BaseException:
                for every in self._parts:
                    every.lane.scratch_free.set()
                    every.lane.stream.synchronize()  # nothing may still be copying into a slot that is given back
                raise

    def make_streams_wait(self) -> None:
        """Let the calling thread's current streams wait for the copies; called after :meth:`enqueue`."""
        for part in self._parts:
            if part.done is not None:
                torch.cuda.current_stream(part.lane.device).wait_event(part.done)

    def finish(self) -> list[str]:
        """Wait on the host until the bytes are in host memory; returns the FQNs that changed meanwhile."""
        torn: list[str] = []
        for part in self._parts:
            assert part.done is not None
            part.done.synchronize()
            for before, after in zip(part.before, part.after, strict=True):
                with torch.cuda.stream(part.lane.stream):  # not the compute stream, whose queue may be long
                    same = cast("list[bool]", ((before == after) | (before.isnan() & after.isnan())).tolist())
                torn += [job.fqn for job, unchanged in zip(part.guarded, same, strict=True) if not unchanged]
        self._parts = []
        return torn


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous device tensor as flat bytes; others are gathered, resolved and flattened first."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _fingerprint(jobs: Sequence[Job], *, validate: bool) -> list[torch.Tensor]:
    """Norms, element i for job i, and with ``validate`` exact checksums as well; enqueued on the current stream.

    ``jobs`` must be sorted by dtype: the fused kernel takes one dtype at a time. Norms of half-precision tensors are
    accumulated and returned in float32, for a norm of three digits would notice little.
    """
    if not jobs:
        return []
    norms: list[torch.Tensor] = []
    for dtype, group in itertools.groupby(jobs, key=lambda job: job.source.dtype):
        wide = torch.float32 if dtype.itemsize == 2 else None
        norms.append(torch.stack(torch._foreach_norm([job.source for job in group], 2, wide)).double())
    prints = [torch.cat(norms)]
    if validate:
        prints.append(torch.stack([_bytes_of(job.source).sum(dtype=torch.int64) for job in jobs]).double())
    return prints


class _Lane:
    """What one device needs: a side stream, scratch, and the turn at the scratch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.scratch_free = threading.Event()
        self.scratch_free.set()
        self.scratch_read: torch.cuda.Event | None = None
        try:
            self.scratch = torch.empty(SCRATCH_NBYTES, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            logger.warning("no device memory for 64 MiB of scratch on %s: small tensors are copied one by one", device)
            self.scratch = torch.empty(0, dtype=torch.uint8, device=device)

    def begin(self, jobs: Sequence[Job], owned: set[int], slot: Slot, *, validate: bool) -> _DeviceCopy:
        """Capture and pack on the current stream; the caller's thread, under ``no_grad``."""
        assert slot.image is not None and slot.arena is not None
        # The save before this one reads the scratch: wait until its copies are enqueued, then in stream order.
        if not self.scratch_free.wait(_SCRATCH_TIMEOUT_S):
            raise StagingError(f"the copies of the save before were not enqueued within {_SCRATCH_TIMEOUT_S:g} s")
        if self.scratch_read is not None:
            torch.cuda.current_stream(self.device).wait_event(self.scratch_read)
        guarded: list[Job] = []
        packed: list[Job] = []
        now: list[Job] = []
        room = self.scratch.numel()
        for job in sorted(jobs, key=lambda job: job.target.offset):
            source, nbytes = job.source, job.target.nbytes
            plain = source.is_contiguous() and not (source.is_conj() or source.is_neg())
            safe = plain and source.dtype in _NORMED and source.data_ptr() in owned
            small = nbytes < SMALL_NBYTES
            if nbytes == 0:
                continue
            if safe and not small:
                # An alias keeps the memory where `p.data = new` would let it go.
                guarded.append(job._replace(source=source.detach()))
            elif nbytes + 16 <= room:
                packed.append(job)
                room -= nbytes + 16  # at most that much is lost to alignment
            else:
                now.append(job)
        guarded.sort(key=lambda job: str(job.source.dtype))
        runs = self._pack(packed)
        stream = torch.cuda.current_stream(self.device)
        target = _Target(slot.image, slot.arena.data_offset)
        if now:
            self._copy_now(now, target, stream)
        before = _fingerprint(guarded, validate=validate)
        for job in guarded:
            job.source.record_stream(self.stream)
        start = torch.cuda.Event()
        start.record(stream)
        self.scratch_free.clear()
        return _DeviceCopy(self, target, runs, guarded, start, before, validate)

    def _pack(self, jobs: Sequence[Job]) -> list[_Run]:
        runs: list[_Run] = []
        by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        position = 0
        for job in jobs:
            view, offset, _, nbytes = job.target
            last = runs[-1] if runs else None
            if last is not None and last.image_offset + last.nbytes == offset:
                last.nbytes += nbytes
            else:
                # Image offsets are multiples of the element size: the same remainder keeps the scratch views aligned.
                position += -position % 16
                runs.append(_Run(position, offset, nbytes))
            views, sources = by_dtype.setdefault(view.dtype, ([], []))
            views.append(self.scratch[position : position + nbytes].view(view.dtype).view(view.shape))
            sources.append(job.source.resolve_conj().resolve_neg())  # which the fused launch might not do
            position += nbytes
        for views, sources in by_dtype.values():  # one fused launch per dtype
            torch._foreach_copy_(views, sources)
        return runs

    def _copy_now(self, jobs: Sequence[Job], target: _Target, stream: torch.cuda.Stream) -> None:
        """Unguarded tensors that exceed the scratch: the compute stream waits for their way out."""
        self.stream.wait_stream(stream)
        with torch.cuda.stream(self.stream):
            for job in jobs:
                target.copy_from(_bytes_of(job.source), job.target.offset)
        stream.wait_stream(self.stream)


class CudaLanes:
    """The lanes of all devices that a checkpointer has met."""

    def __init__(self) -> None:
        """Start without any: a process that never saves CUDA tensors touches no CUDA."""
        self._lanes: dict[torch.device, _Lane] = {}

    def begin(self, jobs: Sequence[Job], owned: set[int], slot: Slot, *, validate: bool) -> CudaCopy:
        """Capture and pack the CUDA tensors of a save on the current stream of each device."""
        if torch.cuda.is_current_stream_capturing():
            raise StagingError("save() was called while a CUDA graph is captured; call it before or after the capture")
        _watch_graphs()
        by_device: dict[torch.device, list[Job]] = {}
        for job in jobs:
            by_device.setdefault(job.source.device, []).append(job)
        parts: list[_DeviceCopy] = []
        for device, of_device in by_device.items():
            if device not in self._lanes:
                with torch.cuda.device(device):
                    self._lanes[device] = _Lane(device)
            try:
                with torch.cuda.device(device):
                    parts.append(self._lanes[device].begin(of_device, owned, slot, validate=validate))
            except BaseException:
                for part in parts:
                    part.lane.scratch_free.set()
                raise
        return CudaCopy(parts)

    def settle(self) -> None:
        """Wait on the host until nothing is being copied, after a save that went wrong in the middle."""
        for lane in self._lanes.values():
            lane.scratch_free.set()
            lane.stream.synchronize()

    def close(self) -> None:
        """Drop streams and scratch; no copy may be under way."""
        self._lanes.clear()


_watching = False


def _watch_graphs() -> None:
    """Guard what runs no Python: a replayed graph may hold an optimizer step.

    A capture waits for pending copies first (nothing may wait for them inside it), and every replay does so in stream
    order, which costs nothing while no save is in flight.
    """
    global _watching
    if _watching:
        return
    _watching = True
    graph: Any = torch.cuda.CUDAGraph
    replay, capture_begin = graph.replay, graph.capture_begin

    def guarded_replay(self: Any) -> None:
        ownership.close_guards()
        replay(self)

    def guarded_capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        ownership.finish_pending()
        capture_begin(self, *args, **kwargs)

    graph.replay, graph.capture_begin = guarded_replay, guarded_capture_begin
