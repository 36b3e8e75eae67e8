"""Memory to memory on all cores.

The pieces are handed out one by one, without a barrier between tensors: torch's own parallel copy splits each tensor
evenly and waits for the slowest part, which was seen to take 50 times as long on a machine whose cores have other work.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

PIECE_NBYTES: Final = 4 << 20
_MAX_THREADS: Final = 8

_memmove = ctypes.CDLL(None).memmove
_memmove.restype = ctypes.c_void_p
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

Region = tuple[int, int, int]
"""Target address, source address, bytes."""


class MemoryCopier:
    """Copies regions with the calling thread and a few helpers, which start with the first large copy."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._helpers = min(len(os.sched_getaffinity(0)), _MAX_THREADS) - 1
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def copy(self, regions: list[Region]) -> None:
        """Copy all regions, blocking; they must not overlap, and their memory must stay."""
        total = sum(nbytes for _, _, nbytes in regions)
        pieces = _Pieces(regions)
        if total < 2 * PIECE_NBYTES or not self._helpers:
            _work(pieces)
            return
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._helpers, thread_name_prefix="sidesave-copy")
        helpers = [self._pool.submit(_work, pieces) for _ in range(self._helpers)]
        _work(pieces)
        for helper in helpers:
            if not helper.cancel():  # one that has not begun has nothing left to do
                helper.result()

    def close(self) -> None:
        """Stop the helpers; idempotent."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)


class _Pieces:
    """The pieces of a copy, each given to exactly one thread."""

    def __init__(self, regions: list[Region]) -> None:
        self._pieces = self._cut(regions)
        self._lock = threading.Lock()

    @staticmethod
    def _cut(regions: list[Region]) -> Iterator[Region]:
        for target, source, nbytes in regions:
            for offset in range(0, nbytes, PIECE_NBYTES):
                yield target + offset, source + offset, min(PIECE_NBYTES, nbytes - offset)

    def take(self) -> Region | None:
        with self._lock:
            return next(self._pieces, None)


def _work(pieces: _Pieces) -> None:
    while (piece := pieces.take()) is not None:
        _memmove(*piece)
