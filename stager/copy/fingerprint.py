"""Detects whether a tensor that was read beside training has changed since the call.

On the host a few elements, or all, are compared at the call, in the tensor afterwards, and in the copy. On a device the
witnesses are taken in stream order: windows of bytes at the call, compared bit by bit with the staged bytes, and norms
at both ends. Weights that are swapped in and back while they are copied have the norms that they had; their staged
bytes have not.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from typing import Final, cast

import torch
import xxhash

from sidesave.stager import torch_private
from sidesave.stager.copy.pool import Job

SAMPLES: Final = 32
"""At least so many elements of each overlapped host tensor are looked at, less than twice as many."""
WINDOW_NBYTES: Final = 64
SPAN_NBYTES: Final = 32 << 20
"""A device tensor has a window in the middle of each span of this size."""
NORMED: Final = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""What norms are taken of."""
_WORDS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def of_host_tensor(tensor: torch.Tensor, *, validate: bool) -> bytes:
    """Evenly spaced elements of a contiguous tensor, or with ``validate`` the digest of all its bytes."""
    if validate:
        nbytes = tensor.numel() * tensor.element_size()
        return xxhash.xxh3_128_digest((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr()))
    flat = tensor.detach().reshape(-1)
    picked = flat[:: max(1, (flat.numel() - 1) // (SAMPLES - 1))].contiguous()  # up to the very end
    return bytes(cast("list[int]", picked.view(torch.uint8).tolist()))


class WindowViews:
    """Views of the windows of device tensors, and room for their bytes, kept for the next save of the same memory.

    They keep none of the tensors' memory alive; whoever takes windows holds the tensors.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self._of: tuple[list[int], torch.Stream] | None = None
        self.spots: list[tuple[int, int]] = []
        """Number of the tensor, and where in it a window begins, in bytes."""
        self._copies: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._windows = torch.empty(0)

    def take(self, jobs: Sequence[Job], stream: torch.Stream) -> torch.Tensor:
        """Copy the windows of tensors of the looks that they had before, on the current ``stream``.

        Returns the bytes, a row for each of ``spots``; a call for another save may overwrite them.
        """
        of = [job.source.data_ptr() for job in jobs], stream
        if of != self._of:
            self._of = None
            self._look(jobs)
            self._of = of
        for copies, sources in self._copies:
            torch_private.foreach_copy(copies, sources)
        return self._windows

    def _look(self, jobs: Sequence[Job]) -> None:
        self.spots = [(number, begin) for number, job in enumerate(jobs) for begin in _windows(job.target.nbytes)]
        self._windows = torch.empty((len(self.spots), WINDOW_NBYTES), dtype=torch.uint8, device=_device(jobs))
        self._copies = []
        position = 0
        for dtype, group in itertools.groupby(self.spots, key=lambda spot: jobs[spot[0]].source.dtype):
            spots, size = [*group], dtype.itemsize
            word = torch.int16 if size == 2 else dtype  # the fused copy takes half precision through float32
            rows = self._windows[position : position + len(spots)]
            position += len(spots)
            sources = [
                torch_private.view_of_memory(jobs[number].source, begin, WINDOW_NBYTES // size, word)
                for number, begin in spots
            ]
            self._copies.append(([*rows.view(word).unbind()], sources))


class DeviceFingerprint:
    """The witnesses of one device's tensors in one save; under ``no_grad``, with the device current.

    ``jobs`` are contiguous tensors of :data:`NORMED` dtypes and more than a window's bytes, sorted by dtype: the fused
    norm takes one dtype at a time.
    """

    def __init__(self, jobs: Sequence[Job], stream: torch.Stream, views: WindowViews, *, validate: bool) -> None:
        """Take what is compared later, on the current ``stream``; ``views`` are of tensors that look like these."""
        self._jobs = jobs
        self._before = _norms(jobs)
        self._after: torch.Tensor | None = None
        self._expected: torch.Tensor | None = None
        self._sums = torch.stack([_word_sum(job.source) for job in jobs]) if validate and jobs else None
        self._windows, self._spots = views.take(jobs, stream), views.spots

    def take_after(self) -> None:
        """Take the norms again, on the current stream, behind the copies and all that the first were made by."""
        self._expected = _stack(self._before)
        self._after = _stack(_norms(self._jobs))

    def torn(self) -> list[str]:
        """The FQNs of which the staged bytes are not those of the call; waits on the current stream, on the host."""
        if not self._jobs:
            return []
        torn: dict[str, None] = {}
        assert self._expected is not None and self._after is not None
        same = (self._expected == self._after) | (self._expected.isnan() & self._after.isnan())
        for job, unchanged in zip(self._jobs, cast("list[bool]", same.tolist()), strict=True):
            if not unchanged:
                torn[job.target.fqn] = None
        windows = self._windows.cpu()
        for row, (number, begin) in enumerate(self._spots):
            target = self._jobs[number].target
            seen = ctypes.string_at(windows.data_ptr() + row * WINDOW_NBYTES, WINDOW_NBYTES)
            if ctypes.string_at(target.address + begin, WINDOW_NBYTES) != seen:
                torn[target.fqn] = None
        if self._sums is not None:
            for job, expected in zip(self._jobs, cast("list[int]", self._sums.tolist()), strict=True):
                if int(_word_sum(job.target.view).item()) != expected:
                    torn[job.target.fqn] = None
        return list(torn)


def _device(jobs: Sequence[Job]) -> torch.device | None:
    return jobs[0].source.device if jobs else None


@functools.lru_cache(maxsize=1024)
def _windows(nbytes: int) -> tuple[int, ...]:
    """Where the windows of a tensor begin; multiples of 16, as the fused copy likes it."""
    spans = range(0, nbytes, SPAN_NBYTES)
    return tuple(
        max(0, begin + (min(SPAN_NBYTES, nbytes - begin) - WINDOW_NBYTES) // 2) // 16 * 16
        for begin in spans
        if nbytes - begin >= WINDOW_NBYTES or begin == 0
    )


def _norms(jobs: Sequence[Job]) -> list[torch.Tensor]:
    """A norm for each job.

    Those of half-precision tensors are accumulated and returned in float32, for a norm of three digits would notice
    little.
    """
    norms: list[torch.Tensor] = []
    for dtype, group in itertools.groupby(jobs, key=lambda job: job.source.dtype):
        wide = torch.float32 if dtype.itemsize == 2 else None
        norms += torch_private.foreach_norm([job.source for job in group], 2, wide)
    return norms


def _stack(norms: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """All norms in one tensor; those of one dtype stand side by side."""
    stacks = [torch.stack([*group]).double() for _, group in itertools.groupby(norms, key=lambda norm: norm.dtype)]
    return torch.cat(stacks) if stacks else None


def _word_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a contiguous tensor's elements taken as integers, modulo 2**64.

    Integers add up to the same in any order: device and host agree to the bit.
    """
    return tensor.detach().view(-1).view(_WORDS[tensor.element_size()]).sum(dtype=torch.int64)
