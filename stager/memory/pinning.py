"""Page-locking staging memory piece by piece, so that a device can copy into it without the host.

One call over 94 GB was seen to stall a GPU for 11.6 s, pieces of 1 GB for 2 s at worst; so pieces, with a yield.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import torch

from sidesave.errors import StagingError
from sidesave.stager.devices import kinds

logger = logging.getLogger(__name__)

PIECE_NBYTES: Final = 1 << 30
"""A copy may not cross a multiple of this, counted from the arena's start: each piece is registered on its own."""


class PinnedRange:
    """Registered memory; every piece is unregistered at its own address, before the memory is unmapped."""

    def __init__(self, device: torch.device, address: int, nbytes: int) -> None:
        """Register ``[address, address + nbytes)`` for ``device`` and all others of its kind.

        ``device`` is one that the process uses: the call opens a context there, and on no other. Raises
        ``RuntimeError`` with the reason, nothing registered.
        """
        runtime = kinds.runtime_of(device)
        assert runtime is not None
        self._device, self._runtime = device, runtime
        self._pieces: list[int] = []
        try:
            for offset in range(0, nbytes, PIECE_NBYTES):
                with kinds.no_capture("prepare()"), runtime.on(device):
                    self._pieces.append(address + offset)  # before: Ctrl-C may come right after
                    try:
                        runtime.register(address + offset, min(PIECE_NBYTES, nbytes - offset))
                    except RuntimeError as error:
                        self._pieces.pop()
                        raise RuntimeError(f"{error} at byte {offset:,} of {nbytes:,}") from error
                time.sleep(0)  # let other threads at the driver's lock
        except BaseException:  # Ctrl-C as well leaves nothing registered
            self.close()
            raise

    def close(self) -> None:
        """Unregister in reverse order; idempotent. No copy may be under way."""
        while self._pieces:
            piece = self._pieces.pop()
            try:
                with kinds.no_capture("close()"), self._runtime.on(self._device):
                    self._runtime.unregister(piece)
            except StagingError as error:  # memory that is unmapped next must not stay registered
                logger.error("unregistering staging memory ends that capture: %s", error)
                with self._runtime.on(self._device):
                    self._runtime.unregister(piece)
