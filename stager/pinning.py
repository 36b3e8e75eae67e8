"""Page-locking staging memory for CUDA: ``cudaHostRegister`` piece by piece, so that the device can copy into it alone.

One call over 94 GB was seen to stall a GPU for 11.6 s, pieces of 1 GB for 2 s at worst; so pieces, with a yield.
"""

from __future__ import annotations

import ctypes
import logging
import time
from pathlib import Path
from typing import Any, Final, cast

import torch

logger = logging.getLogger(__name__)

PIECE_NBYTES: Final = 1 << 30
"""A copy may not cross a multiple of this, counted from the arena's start: each piece is registered on its own."""
_PORTABLE: Final = 1


class PinnedRange:
    """Registered memory; every piece is unregistered at its own address, before the memory is unmapped."""

    def __init__(self, address: int, nbytes: int) -> None:
        """Register ``[address, address + nbytes)``; raises ``RuntimeError`` with CUDA's reason, nothing registered."""
        self._pieces: list[int] = []
        runtime = cast("Any", torch.cuda.cudart())
        for offset in range(0, nbytes, PIECE_NBYTES):
            code = int(runtime.cudaHostRegister(address + offset, min(PIECE_NBYTES, nbytes - offset), _PORTABLE))
            if code:
                self.close()
                _clear_last_error()
                raise RuntimeError(f"cudaHostRegister failed with error {code} at byte {offset:,} of {nbytes:,}")
            self._pieces.append(address + offset)
            time.sleep(0)  # let other threads at the driver's lock

    def close(self) -> None:
        """Unregister in reverse order; idempotent. No copy may be under way."""
        runtime = cast("Any", torch.cuda.cudart() if self._pieces else None)
        while self._pieces:
            code = int(runtime.cudaHostUnregister(self._pieces.pop()))
            if code:
                logger.warning("cudaHostUnregister failed with error %d", code)
                _clear_last_error()


def _clear_last_error() -> None:
    """Take the sticky last error of the runtime, which torch would otherwise report at its next unrelated call."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "/libcudart" in path:
            ctypes.CDLL(path).cudaGetLastError()
            return
