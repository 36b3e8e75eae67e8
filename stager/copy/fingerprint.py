"""Detects whether a tensor changed while it was copied during training, or since an earlier copy.

On the host, samples of elements (or all) are compared: in the tensor at the call, in the tensor
after the copy, and in the copy. On a device, fingerprints are taken in stream order: windows of
bytes at the call, which are compared with the staged bytes, and norms before and after the copy.
The windows detect weights that are swapped out and back in during the copy, since their norms are
unchanged.
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
from sidesave.stager.plan import Job

SAMPLES: Final = 32
"""Minimum number of samples of each overlapped host tensor; fewer than twice as many are taken."""
WINDOW_NBYTES: Final = 64
SPAN_NBYTES: Final = 32 << 20
"""A device tensor has a window in the middle of each span of this size."""
NORMED: Final = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
"""Dtypes that norms are taken of, by their order."""
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_WORDS: Final = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def of_host_tensor(tensor: torch.Tensor, *, validate: bool) -> bytes:
    """Return a contiguous tensor's evenly spaced elements, or with ``validate`` its full digest."""
    if validate:
        return of_memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    flat = tensor.detach().reshape(-1)
    picked = flat[:: max(1, (flat.numel() - 1) // (SAMPLES - 1))].contiguous()  # up to the very end
    return bytes(cast("list[int]", picked.view(torch.uint8).tolist()))


def samples_match(one: int, other: int, nbytes: int) -> bool:
    """Whether evenly spaced windows of ``nbytes`` bytes of host memory at two addresses match."""
    step = max(WINDOW_NBYTES, (nbytes - WINDOW_NBYTES) // (SAMPLES - 1))
    return not any(
        _memcmp(one + begin, other + begin, WINDOW_NBYTES)
        for begin in range(0, nbytes - WINDOW_NBYTES + 1, step)
    )


def of_memory(address: int, nbytes: int) -> bytes:
    """Return the digest of host memory."""
    return xxhash.xxh3_128_digest((ctypes.c_ubyte * nbytes).from_address(address))


class WindowViews:
    """Cached views of the windows of device tensors, and a buffer for their bytes.

    The views do not keep the tensors' memory alive: the caller of :meth:`take` holds the tensors.
    """

    def __init__(self) -> None:
        """Start without views."""
        self._of: tuple[list[int], torch.Stream] | None = None
        self.spots: list[tuple[int, int]] = []
        """For each window: number of its tensor, and its offset in it in bytes."""
        self._copies: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._windows = torch.empty(0, device="cpu")

    def take(self, jobs: Sequence[Job], stream: torch.Stream) -> torch.Tensor:
        """Copy the windows of the jobs' sources on ``stream``, which must be the current one.

        Returns their bytes, a row for each of ``spots``. A call for another save may overwrite
        them. The sources must have the same dtypes and shapes at each call.
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
        self.spots = [
            (number, begin)
            for number, job in enumerate(jobs)
            for begin in _windows(job.target.nbytes)
        ]
        self._windows = torch.empty(
            (len(self.spots), WINDOW_NBYTES), dtype=torch.uint8, device=_device(jobs)
        )
        self._copies = []
        position = 0
        for dtype, group in itertools.groupby(
            self.spots, key=lambda spot: jobs[spot[0]].source.dtype
        ):
            spots, size = [*group], dtype.itemsize
            # the fused copy would convert through float32
            word = torch.int16 if size == 2 else dtype
            rows = self._windows[position : position + len(spots)]
            position += len(spots)
            sources = [
                torch_private.view_of_memory(
                    jobs[number].source, begin, WINDOW_NBYTES // size, word
                )
                for number, begin in spots
            ]
            self._copies.append(([*rows.view(word).unbind()], sources))


class HeldWindows:
    """Windows of one device's tensors that are not copied, because the slot holds their bytes."""

    def __init__(self, jobs: Sequence[Job], stream: torch.Stream, views: WindowViews) -> None:
        """Take the windows on ``stream``, which must be the current one."""
        self._jobs = jobs
        self._windows, self._spots = views.take(jobs, stream), views.spots

    def changed(self) -> list[str]:
        """Return the FQNs whose bytes differ from the slot's; blocks on the current stream."""
        return _differing(self._jobs, self._windows, self._spots)


class DeviceFingerprint:
    """Fingerprints of a device's tensors in a save; use under ``no_grad`` with the device current.

    The sources of ``jobs`` are contiguous, have :data:`NORMED` dtypes and more bytes than a window,
    and are sorted by dtype, since the fused norm takes one dtype at a time.
    """

    def __init__(
        self, jobs: Sequence[Job], stream: torch.Stream, views: WindowViews, *, validate: bool
    ) -> None:
        """Take norms and windows on the current ``stream``; ``views`` are of the same tensors."""
        self._jobs = jobs
        self._before = _norms(jobs)
        self._after: torch.Tensor | None = None
        self._expected: torch.Tensor | None = None
        self._sums = (
            torch.stack([_word_sum(job.source) for job in jobs]) if validate and jobs else None
        )
        self._windows, self._spots = views.take(jobs, stream), views.spots

    def take_after(self) -> None:
        """Take the norms again, on the current stream, after the copies were enqueued."""
        self._expected = _stack(self._before)
        self._after = _stack(_norms(self._jobs))

    def torn(self) -> list[str]:
        """Return the FQNs whose staged bytes differ from those at the call.

        Blocks on the current stream.
        """
        if not self._jobs:
            return []
        torn: dict[str, None] = {}
        assert self._expected is not None and self._after is not None
        same = (self._expected == self._after) | (self._expected.isnan() & self._after.isnan())
        for job, unchanged in zip(self._jobs, cast("list[bool]", same.tolist()), strict=True):
            if not unchanged:
                torn[job.target.fqn] = None
        torn.update(dict.fromkeys(_differing(self._jobs, self._windows, self._spots)))
        if self._sums is not None:
            for job, expected in zip(
                self._jobs, cast("list[int]", self._sums.tolist()), strict=True
            ):
                if int(_word_sum(job.target.view).item()) != expected:
                    torn[job.target.fqn] = None
        return list(torn)


def _differing(
    jobs: Sequence[Job], windows: torch.Tensor, spots: Sequence[tuple[int, int]]
) -> list[str]:
    """Return the FQNs whose staged bytes differ from ``windows``; blocks on the current stream."""
    on_host = windows.cpu()
    differing: dict[str, None] = {}
    for row, (number, begin) in enumerate(spots):
        target = jobs[number].target
        if _memcmp(target.address + begin, on_host.data_ptr() + row * WINDOW_NBYTES, WINDOW_NBYTES):
            differing[target.fqn] = None
    return list(differing)


def _device(jobs: Sequence[Job]) -> torch.device | None:
    return jobs[0].source.device if jobs else None


@functools.lru_cache(maxsize=1024)
def _windows(nbytes: int) -> tuple[int, ...]:
    """Return byte offsets of a tensor's windows: multiples of 16, which the fused copy prefers."""
    spans = range(0, nbytes, SPAN_NBYTES)
    return tuple(
        max(0, begin + (min(SPAN_NBYTES, nbytes - begin) - WINDOW_NBYTES) // 2) // 16 * 16
        for begin in spans
        if nbytes - begin >= WINDOW_NBYTES or begin == 0
    )


def _norms(jobs: Sequence[Job]) -> list[torch.Tensor]:
    """Return the norm of each job's source.

    Norms of half-precision tensors are float32: in half precision small changes would be lost.
    """
    norms: list[torch.Tensor] = []
    for dtype, group in itertools.groupby(jobs, key=lambda job: job.source.dtype):
        wide = torch.float32 if dtype.itemsize == 2 else None
        norms += torch_private.foreach_norm([job.source for job in group], 2, wide)
    return norms


def _stack(norms: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return all norms in one float64 tensor; None if there are no norms."""
    stacks = [
        torch.stack([*group]).double()
        for _, group in itertools.groupby(norms, key=lambda norm: norm.dtype)
    ]
    return torch.cat(stacks) if stacks else None


def _word_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a contiguous tensor's elements, taken as integers, modulo 2**64.

    Integer sums do not depend on the order, so device and host agree exactly.
    """
    return tensor.detach().view(-1).view(_WORDS[tensor.element_size()]).sum(dtype=torch.int64)
