"""Copies from devices: a side stream each, what may change captured at the call, the rest read beside training.

At the call, on the compute stream: what nothing guards, and small tensors, are packed into device scratch, batch by
batch; each batch leaves on the side stream behind an event. Large tensors that an optimizer owns are not captured:
witnesses are taken, and an event marks the point in time that the save is of. Behind it the stager thread enqueues them
in chunks with an empty kernel between two: so a short ``.item()`` waits for one chunk, where the copy engine would take
them all first.

The scratch of a device has two halves. From the pack until the copy out is enqueued, with an event behind it, a half
belongs to one batch of one save, which alone gives it back; whoever packs into it next waits for that event in stream
order. So the host waits only for the stager thread's progress, and only to reuse a half, and the compute stream only
where more is captured than both halves hold.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from sidesave.errors import StagingError, TornSnapshotError
from sidesave.stager import plan
from sidesave.stager.copy.fingerprint import NORMED, DeviceFingerprint, WindowViews
from sidesave.stager.copy.packing import ALIGNMENT, Batch, Run, Views, is_plain, lay_out, pack
from sidesave.stager.copy.pool import Job, Slot, Target
from sidesave.stager.devices import kinds
from sidesave.stager.memory import pinning
from sidesave.stager.signal_safe import Monitor
from sidesave.stager.state import ownership

logger = logging.getLogger(__name__)

CHUNK_NBYTES: Final = 32 << 20
HALF_NBYTES: Final = (4 << 20, 32 << 20, 128 << 20)
"""Sizes of a half of the scratch: the smallest that takes what is captured, or the largest."""
_HALF_TIMEOUT_S: Final = 300.0
_ORDER: Final = {dtype: number for number, dtype in enumerate(NORMED)}
_INVALID_ADDRESS: Final = "invalid argument"
"""What the driver says of a copy from null, which is the address of a storage that was resized to nothing."""

Submit = Callable[[Callable[[], None]], None]
"""Has something run in the stager thread, behind what it was given before."""


class _Half:
    """Half of a device's scratch."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.views = Views()
        self.owner: _Part | None = None
        self.read: torch.Event | None = None
        """Behind the last work on the memory."""


@dataclass(slots=True, eq=False)
class _Part:
    """One device's part of a save; ``sources`` keeps alive what its copies read."""

    lane: _Lane
    slot: Slot
    compute: torch.Stream
    guarded: list[Job] = field(default_factory=list[Job])
    sources: list[torch.Tensor | torch.UntypedStorage] = field(
        default_factory=list[torch.Tensor | torch.UntypedStorage]
    )
    fingerprint: DeviceFingerprint | None = None
    start: torch.Event | None = None
    done: torch.Event | None = None
    error: BaseException | None = None
    in_a_row_nbytes: int = 0
    """What is enqueued without such a kernel; about that, where device memory is short and two threads copy."""

    def copy_out(self, source: torch.Tensor, offset: int) -> None:
        """Enqueue a copy of bytes in chunks, none of which crosses the border of two pinned pieces."""
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
            self.slot.image[position : position + nbytes].copy_(_view(source, done, nbytes), non_blocking=True)
            done += nbytes

    def copy_batch(self, half: _Half, runs: Sequence[Run], packed: torch.Event) -> None:
        """Enqueue the way out of a packed half, and give it back; runs in the stager thread."""
        lane = self.lane
        try:
            with torch.no_grad(), lane.runtime.on(lane.device, lane.stream):
                lane.stream.wait_event(packed)
                assert half.memory is not None
                try:
                    for run in runs:
                        piece = half.memory[run.scratch_offset : run.scratch_offset + run.nbytes]
                        self.copy_out(piece, run.image_offset)
                finally:  # behind what was enqueued before a failure as well
                    read = lane.runtime.new_event()
                    read.record(lane.stream)
                    half.read = read
        except Exception as error:  # noqa: BLE001 - this save's failure, raised by `enqueue`
            self.error = error
        finally:
            lane.give_back(half)

    def enqueue(self) -> None:
        """Enqueue the copies of what is guarded and record the done event; runs in the stager thread."""
        if self.error is not None:
            raise self.error
        lane = self.lane
        assert self.start is not None and self.fingerprint is not None
        with lane.runtime.on(lane.device, lane.stream):
            lane.stream.wait_event(self.start)
            for job in self.guarded:
                try:
                    job.source.record_stream(lane.stream)  # which alone survives `resize_(0)`
                    self.copy_out(job.source.view(-1).view(torch.uint8), job.target.offset)
                except _FreedError as error:
                    raise _freed(job) from error
                except torch.AcceleratorError as error:
                    if _INVALID_ADDRESS not in str(error):
                        raise
                    raise _freed(job) from error  # between the look at it and the copy
            for job in self.guarded:  # a norm of memory that is gone would break the device for good
                if not job.source.untyped_storage().nbytes():
                    raise _freed(job)
            self.fingerprint.take_after()
            done = lane.runtime.new_event()
            done.record(lane.stream)
            self.done = done

    def finish(self) -> list[str]:
        """Wait on the host until the bytes are in host memory; returns the FQNs that changed meanwhile."""
        lane = self.lane
        assert self.done is not None and self.fingerprint is not None
        self.done.synchronize()
        with lane.runtime.on(lane.device, lane.stream):  # not the compute stream, whose queue may be long
            return self.fingerprint.torn()


class DeviceCopy:
    """The copies of one save from all devices; the caller's thread begins them, the stager's threads do the rest."""

    def __init__(self) -> None:
        """Start without any part; :meth:`Lanes.begin` adds them."""
        self.parts: list[_Part] = []

    def enqueue(self) -> None:
        """Enqueue every copy and record the done events; blocks while the driver's queue is full, not on the copies."""
        for part in self.parts:
            part.enqueue()

    def make_streams_wait(self) -> None:
        """Let the calling thread's current streams wait until all is read; called after :meth:`enqueue`."""
        for part in list(self.parts):
            read = part.done if part.guarded else part.start  # what is captured was read by then
            if read is not None:
                part.lane.runtime.current_stream(part.lane.device).wait_event(read)

    def finish(self) -> list[str]:
        """Wait on the host until the bytes are in host memory; returns the FQNs that changed meanwhile."""
        return [fqn for part in self.parts for fqn in part.finish()]

    def abandon(self) -> None:
        """After a failure, and behind all that was submitted: wait on the host until nothing of this save is copied."""
        for part in self.parts:
            part.lane.forget(part)
            part.lane.stream.synchronize()

    def release(self) -> None:
        """Release the tensors that the copies have read; no copy may be under way."""
        self.parts = []


class _Lane:
    """What one device needs: a side stream and the scratch."""

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
        part: _Part,
        lists: Sequence[DeviceList],
        tensors: Sequence[torch.Tensor],
        submit: Submit,
        *,
        validate: bool,
    ) -> None:
        """Capture, take witnesses and mark the point in time, on the current stream, in the caller's thread."""
        targets = part.slot.targets
        for each in lists:
            guarded = [tensors[index] for index in each.guarded]
            aliases = map(torch.Tensor.detach, guarded)  # keep the memory where `p.data = new` would let it go
            part.guarded += map(Job, aliases, [targets[index] for index in each.guarded])
            self._capture(part, each, tensors, submit)
        views = lists[0].windows
        if len(lists) > 1:
            part.guarded.sort(key=lambda job: _ORDER[job.source.dtype])
            views = WindowViews()
        try:
            part.fingerprint = DeviceFingerprint(part.guarded, part.compute, views, validate=validate)
        except torch.OutOfMemoryError:
            sources = [job.source for job in part.guarded]
            self._copy_directly(part, [(index, job.target.offset) for index, job in enumerate(part.guarded)], sources)
            part.sources += sources
            part.guarded = []
            part.fingerprint = DeviceFingerprint([], part.compute, WindowViews(), validate=validate)
        part.start = self.runtime.new_event()
        part.start.record(part.compute)

    def _capture(self, part: _Part, device_list: DeviceList, tensors: Sequence[torch.Tensor], submit: Submit) -> None:
        """Pack batch after batch, each into a half of the scratch, and have it copied out."""
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
                if not captured and len(pool) == len(tensors):  # all of it in one half, and nothing cut
                    device_list.batches[room] = batch
            else:
                captured = []
            pack(memory, batch, pool, half.views)
            packed = self.runtime.new_event()
            packed.record(part.compute)
            submit(functools.partial(part.copy_batch, half, batch.runs, packed))

    def _take(self, part: _Part, size: int) -> _Half:
        """Make a half that belongs to nobody ``part``'s; without memory if there is none for it."""
        half = self._changed.wait_for(lambda: self._free(part), _HALF_TIMEOUT_S)
        if half is None:
            raise StagingError(f"the copies of the save before were not enqueued within {_HALF_TIMEOUT_S:g} s")
        if half.memory is None or half.memory.numel() < size:
            self._allocate(part, half, size)
        return half

    def _free(self, part: _Part) -> _Half | None:
        """Give ``part`` the free half that was used longest ago."""
        half = next((half for half in self._halves if half.owner is None), None)
        if half is not None:
            half.owner = part
            self._halves = [*(other for other in self._halves if other is not half), half]
        return half

    def _allocate(self, part: _Part, half: _Half, size: int) -> None:
        """Give a half memory of that size, or what there is; a size that was refused is not asked for again.

        To ask is expensive: torch gives back what it has cached first.
        """
        for nbytes in reversed(HALF_NBYTES):
            has = 0 if half.memory is None else half.memory.numel()
            if not has < nbytes <= size or nbytes >= self._refused:
                continue
            try:
                memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError:
                self._refused = nbytes
                text = "no device memory for %.3g MiB of scratch on %s: training waits for more of what is captured"
                logger.warning(text, nbytes / 2**20, self.device)
                continue
            if half.memory is not None:
                part.sources.append(half.memory)  # which may still be read, by copies before those of this save
            half.memory, half.views = memory, Views()
            return

    def give_back(self, half: _Half) -> None:
        """Free the half: it has no owner any more."""
        with self._changed:
            half.owner = None
            self._changed.notify_all()

    def forget(self, part: _Part) -> None:
        """Take the halves of ``part``, which will not be copied out, once nothing is being packed into them."""
        for half in list(self._halves):
            if half.owner is part:
                part.compute.synchronize()
                self.give_back(half)

    def _copy_directly(self, part: _Part, captured: list[tuple[int, int]], pool: Sequence[torch.Tensor]) -> None:
        """Copy without device memory: on the compute stream, which so waits for the copy to the host."""
        try:
            while captured:
                index, offset = captured.pop()
                plain = pool[index].resolve_conj().resolve_neg().contiguous()
                part.copy_out(plain.reshape(-1).view(torch.uint8), offset)
        finally:
            self.stream.wait_stream(part.compute)  # whoever abandons this save waits for the side stream alone


class _FreedError(RuntimeError):
    """A tensor has lost its memory to another thread."""


def _view(source: torch.Tensor, begin: int, nbytes: int) -> torch.Tensor:
    try:
        return source[begin : begin + nbytes]
    except RuntimeError as error:  # the range is right: the storage was resized, and may be as it was by now
        raise _FreedError(str(error)) from error


def _freed(job: Job) -> TornSnapshotError:
    return TornSnapshotError(f"changed while being copied: {job.target.fqn}, whose memory was freed")


class DeviceList:
    """Which tensors of one device are captured at the call, and which an optimizer guards. Keeps no tensor.

    Attributes:
        captured: Index of the tensor, and where it goes in the image, in that order.
        guarded: Indices, those of one dtype side by side.
        half_nbytes: How much scratch to ask for.
        batches: What has been laid out, by the size of the half.
        windows: Views of the guarded ones' windows.
    """

    def __init__(
        self,
        indices: Sequence[int],
        tensors: Sequence[torch.Tensor],
        targets: Sequence[Target],
        owned: Mapping[int, int],
    ) -> None:
        """Say how the tensors with these indices are copied."""
        self.captured: list[tuple[int, int]] = []
        self.guarded: list[int] = []
        self.batches: dict[int, Batch] = {}
        self.windows = WindowViews()
        self._large: list[tuple[int, int, bool]] = []
        need = 0
        for index in sorted(indices, key=lambda index: targets[index].offset):
            source, nbytes = tensors[index], targets[index].nbytes
            if not nbytes:
                continue
            owns = False
            if nbytes >= plan.SMALL_NBYTES and source.dtype in NORMED and is_plain(source):
                owns = ownership.is_owned(source, owned)
                self._large.append((source.data_ptr(), nbytes, owns))
            if owns:
                self.guarded.append(index)
            else:
                self.captured.append((index, targets[index].offset))
                need += nbytes + ALIGNMENT
        self.guarded.sort(key=lambda index: _ORDER[tensors[index].dtype])
        self.half_nbytes = next((size for size in HALF_NBYTES if need <= size), HALF_NBYTES[-1])

    def holds(self, owned: Mapping[int, int]) -> bool:
        """Whether ownership of these tensors, whose memory is the same, is the same as then."""
        return all((nbytes <= owned.get(address, -1)) is owns for address, nbytes, owns in self._large)


class Lanes:
    """The lanes of all devices that a checkpointer has met."""

    def __init__(self) -> None:
        """Start without any: a process that never saves tensors of a device touches none."""
        self._lanes: dict[torch.device, _Lane] = {}

    def begin(
        self,
        copy: DeviceCopy,
        lists: Mapping[torch.device, Sequence[DeviceList]],
        tensors: Sequence[torch.Tensor],
        slot: Slot,
        submit: Submit,
        *,
        validate: bool,
    ) -> None:
        """Begin the copies of a save on the current stream of each device, outside any capture, under ``no_grad``."""
        for device, of_device in lists.items():
            runtime = kinds.runtime_of(device)
            assert runtime is not None
            if device not in self._lanes:
                self._lanes[device] = _Lane(device)
            part = _Part(self._lanes[device], slot, runtime.current_stream(device))
            copy.parts.append(part)
            part.lane.begin(part, of_device, tensors, submit, validate=validate)

    def close(self) -> None:
        """Drop streams and scratch; no copy may be under way."""
        self._lanes.clear()
