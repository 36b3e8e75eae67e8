"""Copies tensors from devices to host memory, on a side stream for each device.

At the call, tensors that no optimizer guards, and small tensors, are captured: packed into device
scratch on the compute stream, batch by batch. The side stream copies each batch to the host.

Large tensors that an optimizer owns are not captured but read during training. At the call their
fingerprints are taken, and an event marks the point in time that the save represents. The stager
thread enqueues their copies after that event, in chunks with an empty kernel between two chunks:
without it the copy engine would run all of them first, and a short ``.item()`` would wait for all.

The scratch of a device has two halves. A half belongs to one batch of one save, from packing until
its copy to the host is enqueued. The next batch waits, in stream order, for the event after that
copy. So the host waits only for the stager thread, and only to reuse a half; the compute stream
waits only if more bytes are captured than both halves hold.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from sidesave.errors import StagingError, TornSnapshotError
from sidesave.stager.copy import packing
from sidesave.stager.copy.copy_list import DeviceList
from sidesave.stager.copy.fingerprint import NORMED, DeviceFingerprint, HeldWindows, WindowViews
from sidesave.stager.copy.packing import ScratchRun, Views, lay_out, pack
from sidesave.stager.copy.slot import StagingSlot
from sidesave.stager.devices import kinds
from sidesave.stager.memory import pinning
from sidesave.stager.plan import Job
from sidesave.stager.signal_safe import Monitor

logger = logging.getLogger(__name__)

CHUNK_NBYTES: Final = 32 << 20
_HALF_TIMEOUT_S: Final = 300.0
_INVALID_ADDRESS: Final = "invalid argument"
"""The driver's message for a copy from null, the address of a storage resized to 0 bytes."""

Submit = Callable[[Callable[[], None]], None]
"""Runs a function in the stager thread, after those submitted before."""


class _Half:
    """Half of a device's scratch."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.views = Views()
        self.owner: _DevicePart | None = None
        self.read: torch.Event | None = None
        """Recorded after the last work on the memory."""


@dataclass(slots=True, eq=False)
class _DevicePart:
    """One device's part of a save; ``sources`` keeps the memory alive that its copies read."""

    lane: _Lane
    slot: StagingSlot
    compute: torch.Stream
    guarded: list[Job] = field(default_factory=list[Job])
    sources: list[torch.Tensor | torch.UntypedStorage] = field(
        default_factory=list[torch.Tensor | torch.UntypedStorage]
    )
    fingerprint: DeviceFingerprint | None = None
    held: HeldWindows | None = None
    changed: list[str] = field(default_factory=list[str])
    start: torch.Event | None = None
    done: torch.Event | None = None
    error: BaseException | None = None
    in_a_row_nbytes: int = 0
    """Bytes enqueued since the last empty kernel; inexact if two threads copy (memory is short)."""

    def copy_out(self, source: torch.Tensor, offset: int) -> None:
        """Enqueue a copy to ``offset`` in the image, in chunks within one pinned piece each."""
        assert self.slot.image is not None and self.slot.arena is not None
        base = self.slot.arena.data_offset
        done = 0
        while done < source.numel():
            position = offset + done
            to_border = pinning.PIECE_NBYTES - (base + position) % pinning.PIECE_NBYTES
            nbytes = min(CHUNK_NBYTES, source.numel() - done, to_border)
            if self.in_a_row_nbytes + nbytes > CHUNK_NBYTES:
                self.lane.runtime.let_others_copy(self.lane.device)
                self.in_a_row_nbytes = 0
            self.in_a_row_nbytes += nbytes
            self.slot.image[position : position + nbytes].copy_(
                _view(source, done, nbytes), non_blocking=True
            )
            done += nbytes

    def copy_batch(self, half: _Half, runs: Sequence[ScratchRun], packed: torch.Event) -> None:
        """Enqueue a half's copy to the host and release the half; runs in the stager thread."""
        lane = self.lane
        try:
            with torch.no_grad(), lane.runtime.on(lane.device, lane.stream):
                lane.stream.wait_event(packed)
                assert half.memory is not None
                try:
                    for run in runs:
                        piece = half.memory[run.scratch_offset : run.scratch_offset + run.nbytes]
                        self.copy_out(piece, run.image_offset)
                finally:  # also after a failure, since some copies may be enqueued
                    read = lane.runtime.new_event()
                    read.record(lane.stream)
                    half.read = read
        except Exception as error:  # noqa: BLE001 - raised by `enqueue`
            self.error = error
        finally:
            lane.give_back(half)

    def enqueue(self) -> None:
        """Enqueue guarded tensors' copies and record the done event; runs in the stager thread."""
        if self.error is not None:
            raise self.error
        lane = self.lane
        assert self.start is not None and self.fingerprint is not None
        with lane.runtime.on(lane.device, lane.stream):
            lane.stream.wait_event(self.start)
            for job in self.guarded:
                try:
                    job.source.record_stream(lane.stream)  # only this protects against `resize_(0)`
                    self.copy_out(job.source.view(-1).view(torch.uint8), job.target.offset)
                except _FreedError as error:
                    raise _freed(job) from error
                except torch.AcceleratorError as error:
                    if _INVALID_ADDRESS not in str(error):
                        raise
                    raise _freed(job) from error  # freed between `_view` and the copy
            for job in self.guarded:  # a norm of freed memory would break the device context
                if not job.source.untyped_storage().nbytes():
                    raise _freed(job)
            self.fingerprint.take_after()
            done = lane.runtime.new_event()
            done.record(lane.stream)
            self.done = done

    def finish(self) -> list[str]:
        """Wait until the bytes are in host memory; return the FQNs that changed during the copy."""
        lane = self.lane
        assert self.done is not None and self.fingerprint is not None
        self.done.synchronize()
        with lane.runtime.on(lane.device, lane.stream):  # the compute stream's queue may be long
            self.changed = [] if self.held is None else self.held.changed()
            return self.fingerprint.torn()


class DeviceCopy:
    """A save's copies from all devices: begun in the caller's thread, continued in the stager's."""

    def __init__(self) -> None:
        """Start without parts; :meth:`Lanes.begin` adds them."""
        self.parts: list[_DevicePart] = []

    def enqueue(self) -> None:
        """Enqueue every copy and record the done events.

        Blocks while the driver's queue is full, but not on the copies.
        """
        for part in self.parts:
            part.enqueue()

    def make_streams_wait(self) -> None:
        """Make this thread's current streams wait until tensors are read; after :meth:`enqueue`."""
        for part in list(self.parts):
            # captured tensors are read before `start`
            read = part.done if part.guarded else part.start
            if read is not None:
                part.lane.runtime.current_stream(part.lane.device).wait_event(read)

    def finish(self) -> list[str]:
        """Wait until the bytes are in host memory; return the FQNs that changed during the copy."""
        return [fqn for part in self.parts for fqn in part.finish()]

    def changed(self) -> list[str]:
        """Return FQNs of held tensors whose bytes differ from the slot's; after :meth:`finish`."""
        return [fqn for part in self.parts for fqn in part.changed]

    def abandon(self) -> None:
        """Wait until no copy of a failed save runs; call after all its submitted functions ran."""
        for part in self.parts:
            part.lane.forget(part)
            part.lane.stream.synchronize()

    def release(self) -> None:
        """Release the tensors that the copies have read; no copy may be in progress."""
        self.parts = []


class _Lane:
    """The side stream and the scratch memory of one device."""

    def __init__(self, device: torch.device) -> None:
        runtime = kinds.runtime_of(device)
        assert runtime is not None
        self.device, self.runtime = device, runtime
        self.stream = runtime.new_stream(device)
        self._halves = [_Half(), _Half()]  # the one used longest ago first
        self._changed = Monitor()
        self._refused = 1 << 62

    def begin(
        self,
        part: _DevicePart,
        lists: Sequence[DeviceList],
        held: Sequence[int],
        tensors: Sequence[torch.Tensor],
        submit: Submit,
        *,
        validate: bool,
    ) -> None:
        """Capture, take fingerprints and record the start event, on the current stream."""
        targets = part.slot.targets
        for each in lists:
            guarded = [tensors[index] for index in each.guarded]
            # keep the memory alive after `p.data = new`
            aliases = map(torch.Tensor.detach, guarded)
            part.guarded += map(Job, aliases, [targets[index] for index in each.guarded])
            self._capture(part, each, tensors, submit)
        views = lists[0].windows if len(lists) == 1 else WindowViews()
        if len(lists) > 1:
            part.guarded.sort(key=lambda job: NORMED[job.source.dtype])
        try:
            part.fingerprint = DeviceFingerprint(
                part.guarded, part.compute, views, validate=validate
            )
        except torch.OutOfMemoryError:
            sources = [job.source for job in part.guarded]
            self._copy_directly(
                part,
                [(index, job.target.offset) for index, job in enumerate(part.guarded)],
                sources,
            )
            part.sources += sources
            part.guarded = []
            part.fingerprint = DeviceFingerprint([], part.compute, WindowViews(), validate=validate)
        if held:
            views = part.slot.held.windows.setdefault(self.device, WindowViews())
            part.held = HeldWindows(
                [Job(tensors[index], targets[index]) for index in held], part.compute, views
            )
        part.start = self.runtime.new_event()
        part.start.record(part.compute)

    def _capture(
        self,
        part: _DevicePart,
        device_list: DeviceList,
        tensors: Sequence[torch.Tensor],
        submit: Submit,
    ) -> None:
        """Pack captured tensors into halves of the scratch, and submit their copies to the host."""
        captured = device_list.captured[::-1]  # taken from the end
        part.sources += map(torch.Tensor.untyped_storage, [tensors[index] for index, _ in captured])
        pool = [*tensors]
        while captured:
            half = self._take(part, device_list.half_nbytes)
            memory = half.memory
            if memory is None:
                self.give_back(half)
                self._copy_directly(part, captured, pool)
                return
            if half.read is not None:
                part.compute.wait_event(half.read)
            room = memory.numel()
            batch = device_list.batches.get(room)
            if batch is None:
                batch = lay_out(room, captured, pool)
                # all of it in one half, and nothing cut
                if not captured and len(pool) == len(tensors):
                    device_list.batches[room] = batch
            else:
                captured = []
            pack(memory, batch, pool, half.views)
            packed = self.runtime.new_event()
            packed.record(part.compute)
            submit(functools.partial(part.copy_batch, half, batch.runs, packed))

    def _take(self, part: _DevicePart, size: int) -> _Half:
        """Acquire a free half for ``part``; ``memory`` is None if the device has no memory left."""
        half = self._changed.wait_for(lambda: self._free(part), _HALF_TIMEOUT_S)
        if half is None:
            raise StagingError(
                f"the previous save's copies were not enqueued within {_HALF_TIMEOUT_S:g} s"
            )
        if half.memory is None or half.memory.numel() < size:
            self._allocate(part, half, size)
        return half

    def _free(self, part: _DevicePart) -> _Half | None:
        """Assign the least recently used free half to ``part``; None if both are in use."""
        half = next((half for half in self._halves if half.owner is None), None)
        if half is not None:
            half.owner = part
            self._halves = [*(other for other in self._halves if other is not half), half]
        return half

    def _allocate(self, part: _DevicePart, half: _Half, size: int) -> None:
        """Allocate ``size`` bytes for a half, or less if memory is short.

        A refused size is never retried: a refusal is expensive, as torch empties its cache first.
        """
        for nbytes in reversed(packing.HALF_NBYTES):
            current = 0 if half.memory is None else half.memory.numel()
            if not current < nbytes <= size or nbytes >= self._refused:
                continue
            try:
                memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError:
                self._refused = nbytes
                text = (
                    "no device memory for %.3g MiB of scratch on %s: training waits longer for "
                    "captured tensors"
                )
                logger.warning(text, nbytes / 2**20, self.device)
                continue
            if half.memory is not None:
                part.sources.append(half.memory)  # copies of earlier saves may still read it
            half.memory, half.views = memory, Views()
            return

    def give_back(self, half: _Half) -> None:
        """Mark the half as free."""
        with self._changed:
            half.owner = None
            self._changed.notify_all()

    def forget(self, part: _DevicePart) -> None:
        """Free the halves that ``part`` still owns, after waiting for its packing kernels."""
        for half in list(self._halves):
            if half.owner is part:
                part.compute.synchronize()
                self.give_back(half)

    def _copy_directly(
        self, part: _DevicePart, captured: list[tuple[int, int]], pool: Sequence[torch.Tensor]
    ) -> None:
        """Copy without scratch on the compute stream, which thus waits for copies to the host."""
        try:
            while captured:
                index, offset = captured.pop()
                plain = pool[index].resolve_conj().resolve_neg().contiguous()
                part.copy_out(plain.reshape(-1).view(torch.uint8), offset)
        finally:
            self.stream.wait_stream(part.compute)  # `abandon` waits for the side stream only


class _FreedError(RuntimeError):
    """Another thread freed the tensor's memory."""


def _view(source: torch.Tensor, begin: int, nbytes: int) -> torch.Tensor:
    try:
        return source[begin : begin + nbytes]
    except RuntimeError as error:  # the range is valid, so another thread has resized the storage
        raise _FreedError(str(error)) from error


def _freed(job: Job) -> TornSnapshotError:
    return TornSnapshotError(
        f"changed while being copied: {job.target.fqn}, whose memory was freed"
    )


class Lanes:
    """The lanes of a checkpointer's devices."""

    def __init__(self) -> None:
        """Start without lanes; a device's lane is created when its first tensor is saved."""
        self._lanes: dict[torch.device, _Lane] = {}

    def begin(
        self,
        copy: DeviceCopy,
        lists: Mapping[torch.device, Sequence[DeviceList]],
        held: Mapping[torch.device, Sequence[int]],
        tensors: Sequence[torch.Tensor],
        slot: StagingSlot,
        submit: Submit,
        *,
        validate: bool,
    ) -> None:
        """Begin the copies of a save on each device's current stream.

        Call it under ``no_grad`` and ``no_capture``. Tensors with the indices in ``held`` are not
        copied; only their windows are taken.
        """
        for device in {**lists, **held}:
            runtime = kinds.runtime_of(device)
            assert runtime is not None
            if device not in self._lanes:
                self._lanes[device] = _Lane(device)
            part = _DevicePart(self._lanes[device], slot, runtime.current_stream(device))
            copy.parts.append(part)
            part.lane.begin(
                part,
                lists.get(device, ()),
                held.get(device, ()),
                tensors,
                submit,
                validate=validate,
            )

    def close(self) -> None:
        """Drop streams and scratch; no copy may be in progress."""
        self._lanes.clear()
