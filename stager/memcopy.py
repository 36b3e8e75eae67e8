"""Memory to memory on all cores.

The pieces are handed out one by one, without a barrier between tensors: torch's own parallel copy splits each tensor
evenly and waits for the slowest part, which was seen to take 50 times as long on a machine whose cores have other work.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
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

    def copy(self, regions: list[Region], on_prefix: Callable[[int], None] | None = None) -> None:
        """Copy all regions, blocking; they must not overlap, and their memory must stay.

        ``on_prefix``, if given, is called now and then with a target address: all regions below it are copied, in the
        order of their target addresses.
        """
        regions = sorted(regions)
        pieces = _Pieces(regions, on_prefix)
        helpers = self._helpers if sum(nbytes for _, _, nbytes in regions) >= 2 * PIECE_NBYTES else 0
        try:
            for _ in range(helpers):
                self._submit(pieces.work)
            pieces.work()
        finally:
            pieces.stop()  # also when Ctrl-C comes in between: no thread may write to the target after this returns

    def _submit(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._helpers, thread_name_prefix="sidesave-copy")
            with contextlib.suppress(RuntimeError):  # the interpreter is ending: the caller copies alone
                self._pool.submit(work)

    def close(self) -> None:
        """Stop the helpers; idempotent."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)


class _Pieces:
    """The pieces of a copy in the order of their targets, each given to exactly one thread."""

    def __init__(self, regions: list[Region], on_prefix: Callable[[int], None] | None) -> None:
        self._pieces = self._cut(regions)
        self._on_prefix = on_prefix
        self._changed = threading.Condition()
        self._under_way: dict[int, int] = {}  # target address, ascending, to thread
        self._told = 0
        self._stopped = False

    @staticmethod
    def _cut(regions: list[Region]) -> Iterator[list[Region]]:
        """Cut large regions, and put small ones together: taking a piece costs as much as copying 50 KB."""
        piece: list[Region] = []
        room = PIECE_NBYTES
        for region in regions:
            target, source, nbytes = region
            if 0 < nbytes < room:
                piece.append(region)
                room -= nbytes
                continue
            for offset in range(0, nbytes, PIECE_NBYTES):
                part = min(PIECE_NBYTES, nbytes - offset)
                piece.append((target + offset, source + offset, part))
                room -= part
                if room <= 0:
                    yield piece
                    piece, room = [], PIECE_NBYTES
        if piece:
            yield piece

    def work(self) -> None:
        """Copy pieces until none is left."""
        while (piece := self._take()) is not None:
            try:
                for target, source, nbytes in piece:
                    _memmove(target, source, nbytes)
            finally:
                self._finish(piece)

    def stop(self) -> None:
        """Hand out no more and wait for the other threads' pieces, milliseconds; a second Ctrl-C waits as well."""
        me = threading.get_ident()
        interrupt: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._stopped = True
                    while any(thread != me for thread in self._under_way.values()):
                        self._changed.wait()
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _take(self) -> list[Region] | None:
        with self._changed:
            piece = None if self._stopped else next(self._pieces, None)
            if piece is not None:
                self._under_way[piece[0][0]] = threading.get_ident()
                first = next(iter(self._under_way))
                if self._on_prefix is not None and first - self._told >= PIECE_NBYTES:
                    self._told = first
                    self._on_prefix(first)
            return piece

    def _finish(self, piece: list[Region]) -> None:
        with self._changed:
            del self._under_way[piece[0][0]]
            self._changed.notify_all()
