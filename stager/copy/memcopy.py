"""Copies host memory on all cores.

Threads take pieces one by one, without a barrier between tensors. torch's own parallel copy splits
each tensor evenly and waits for the slowest thread, which took 50 times as long on a busy machine.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Final

from sidesave.errors import StagingError
from sidesave.stager.memory.arena import Arena
from sidesave.stager.signal_safe import Monitor, Worker
from sidesave.stager.system_calls import usable_cpus

PIECE_NBYTES: Final = 4 << 20
_MAX_THREADS: Final = 8
_END_TIMEOUT_S: Final = 10.0

_memmove = ctypes.CDLL(None).memmove
_memmove.restype = ctypes.c_void_p
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

Region = tuple[int, int, int]
"""Target address, source address, bytes."""


class MemoryCopier:
    """Copies regions in the calling thread and a few helpers, started at the first large copy."""

    def __init__(self) -> None:
        """Create the helpers without starting their threads."""
        self._helpers = [
            Worker("sidesave-copy") for _ in range(min(len(usable_cpus()), _MAX_THREADS) - 1)
        ]

    def copy(self, pieces: Pieces, arena: Arena | None = None) -> None:
        """Copy all pieces; blocks until done. If this raises, call :meth:`Pieces.stop`.

        Progress is reported to ``arena``, that of the targets, if nothing else is copied to it
        later.
        """
        if pieces.nbytes >= 2 * PIECE_NBYTES:
            for helper in self._helpers:
                helper.submit(functools.partial(pieces.help, arena))
        pieces.work(arena)
        pieces.stop()
        if pieces.failure is not None or not pieces.all_taken:
            raise StagingError(f"a copying thread failed: {pieces.failure!r}")

    def close(self) -> None:
        """Stop the helpers; idempotent. No copy may be in progress."""
        for helper in self._helpers:
            helper.close(_END_TIMEOUT_S)


class Pieces:
    """The pieces of a copy in the order of their targets, each given to exactly one thread."""

    def __init__(self, regions: list[Region], *, compare: bool = False) -> None:
        """Cut ``regions`` into pieces.

        Args:
            regions: Must not overlap; their memory must stay valid.
            compare: Copy only pieces that differ, and add their target addresses to ``different``.
        """
        self.nbytes = sum(nbytes for _, _, nbytes in regions)
        self.all_taken = False
        self.different: list[int] = []
        self._compare = compare
        self._pieces = self._cut(sorted(regions))
        self._changed = Monitor()
        self._caller = threading.get_ident()
        self._in_progress: dict[int, int] = {}  # target address, ascending -> thread
        self._reported_address = 0
        self._stopped = False
        self.failure: BaseException | None = None

    @staticmethod
    def _cut(regions: list[Region]) -> Iterator[list[Region]]:
        """Cut large regions, and join small ones: taking a piece costs as much as copying 50 KB."""
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

    def work(self, arena: Arena | None) -> None:
        """Copy pieces until none is left, and report progress to ``arena``."""
        while (piece := self._take(arena)) is not None:
            try:
                for target, source, nbytes in piece:
                    if self._compare:
                        if not _memcmp(target, source, nbytes):
                            continue
                        self.different.append(target)
                    _memmove(target, source, nbytes)
            finally:
                self._finish(piece)

    def help(self, arena: Arena | None) -> None:
        """Call :meth:`work` in a helper thread; an exception is stored in ``failure``."""
        try:
            self.work(arena)
        except BaseException as error:  # noqa: BLE001 - raised again by `MemoryCopier.copy`
            with self._changed:
                self.failure = error
                me = threading.get_ident()
                self._in_progress = {
                    at: thread for at, thread in self._in_progress.items() if thread != me
                }
                self._changed.notify_all()

    def stop(self) -> None:
        """Hand out no more pieces, and wait for those of the helpers, for milliseconds; idempotent.

        Does not wait for the thread that called :meth:`MemoryCopier.copy`: it no longer copies.
        """
        self._stopped = True
        self._changed.wait_for(
            lambda: all(thread == self._caller for thread in self._in_progress.values())
        )

    def _take(self, arena: Arena | None) -> list[Region] | None:
        with self._changed:
            if self._stopped:
                return None
            piece = next(self._pieces, None)
            if piece is None:
                self.all_taken = True
            else:
                self._in_progress[piece[0][0]] = threading.get_ident()
                first = next(iter(self._in_progress))
                if arena is not None and first - self._reported_address >= PIECE_NBYTES:
                    self._reported_address = first
                    arena.advance_to(first)
            return piece

    def _finish(self, piece: list[Region]) -> None:
        with self._changed:
            del self._in_progress[piece[0][0]]
            self._changed.notify_all()
