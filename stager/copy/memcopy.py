"""Memory to memory on all cores.

The pieces are handed out one by one, without a barrier between tensors: torch's own parallel copy splits each tensor
evenly and waits for the slowest part, which was seen to take 50 times as long on a machine whose cores have other work.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Final

from sidesave.errors import StagingError
from sidesave.stager.signal_safe import Monitor, Worker
from sidesave.stager.system_calls import usable_cpus

PIECE_NBYTES: Final = 4 << 20
_MAX_THREADS: Final = 8
_END_TIMEOUT_S: Final = 10.0

_memmove = ctypes.CDLL(None).memmove
_memmove.restype = ctypes.c_void_p
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

Region = tuple[int, int, int]
"""Target address, source address, bytes."""


class MemoryCopier:
    """Copies regions with the calling thread and a few helpers, which start with the first large copy."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._helpers = [Worker("sidesave-copy") for _ in range(min(len(usable_cpus()), _MAX_THREADS) - 1)]

    def copy(self, pieces: Pieces) -> None:
        """Copy all pieces, blocking; where this raises, :meth:`Pieces.stop` has to follow."""
        if pieces.nbytes >= 2 * PIECE_NBYTES:
            for helper in self._helpers:
                helper.submit(pieces.help)
        pieces.work()
        pieces.stop()
        if pieces.failure is not None or not pieces.all_taken:
            raise StagingError(f"a thread that copies failed: {pieces.failure!r}")

    def close(self) -> None:
        """End the helpers; idempotent, and no copy may be under way."""
        for helper in self._helpers:
            helper.close(_END_TIMEOUT_S)


class Pieces:
    """The pieces of a copy in the order of their targets, each given to exactly one thread."""

    def __init__(self, regions: list[Region], on_prefix: Callable[[int], None] | None = None) -> None:
        """Make pieces of ``regions``, which must not overlap, and whose memory must stay.

        ``on_prefix``, if given, is called now and then with a target address: all regions below it are copied, in the
        order of their target addresses.
        """
        self.nbytes = sum(nbytes for _, _, nbytes in regions)
        self.all_taken = False
        self._pieces = self._cut(sorted(regions))
        self._on_prefix = on_prefix
        self._changed = Monitor()
        self._caller = threading.get_ident()
        self._under_way: dict[int, int] = {}  # target address, ascending, to thread
        self._reported_address = 0
        self._stopped = False
        self.failure: BaseException | None = None

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

    def help(self) -> None:
        """The same in a thread of ours."""
        try:
            self.work()
        except BaseException as error:  # noqa: BLE001 - a piece is missing, which the caller has to be told
            with self._changed:
                self.failure = error
                me = threading.get_ident()
                self._under_way = {at: thread for at, thread in self._under_way.items() if thread != me}
                self._changed.notify_all()

    def stop(self) -> None:
        """Hand out no more, and wait for the pieces of the helpers, milliseconds; idempotent.

        The thread that called :meth:`MemoryCopier.copy` is not waited for: it copies nothing any more.
        """
        self._stopped = True
        self._changed.wait_for(lambda: all(thread == self._caller for thread in self._under_way.values()))

    def _take(self) -> list[Region] | None:
        with self._changed:
            if self._stopped:
                return None
            piece = next(self._pieces, None)
            if piece is None:
                self.all_taken = True
            else:
                self._under_way[piece[0][0]] = threading.get_ident()
                first = next(iter(self._under_way))
                if self._on_prefix is not None and first - self._reported_address >= PIECE_NBYTES:
                    self._reported_address = first
                    self._on_prefix(first)
            return piece

    def _finish(self, piece: list[Region]) -> None:
        with self._changed:
            del self._under_way[piece[0][0]]
            self._changed.notify_all()
