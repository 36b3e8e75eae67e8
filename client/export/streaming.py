"""Streams the weights of an export: a batch is read while the one before is written.

A larger tensor is read slab by slab, so memory stays bounded whatever the size of the model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import torch

from sidesave.client.reading import regions
from sidesave.client.reading.checkpoint_reader import CheckpointReader
from sidesave.client.reading.stored import Wanted

_BATCH_NBYTES: Final = 64 << 20
"""Bytes of a batch; two batches are in memory at a time, besides the reader's buffers."""
_PIECE_ELEMENTS: Final = 512 << 10


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of the export.

    Has its name, the name to read, its dtype before and after, and its shape.
    """

    name: str
    stored: str
    dtype: torch.dtype
    cast_to: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the export."""
        return torch.Size(self.shape).numel() * self.cast_to.itemsize

    def slabs(self) -> Iterator[Wanted]:
        """The boxes to read, in order."""
        for box in regions.slabs(self.shape, _BATCH_NBYTES // self.dtype.itemsize):
            yield self.stored, box


def batches(wanted: Iterable[tuple[Weight, Wanted]]) -> Iterator[list[tuple[Weight, Wanted]]]:
    """Group boxes of weights into batches of bounded size."""
    batch: list[tuple[Weight, Wanted]] = []
    room = _BATCH_NBYTES
    for weight, each in wanted:
        assert each[1] is not None
        nbytes = torch.Size(each[1][1]).numel() * weight.dtype.itemsize
        if batch and nbytes > room:
            yield batch
            batch, room = [], _BATCH_NBYTES
        batch.append((weight, each))
        room -= nbytes
    if batch:
        yield batch


def read_ahead(
    reader: CheckpointReader, batches: Iterable[list[tuple[Weight, Wanted]]]
) -> Iterator[list[tuple[Weight, torch.Tensor]]]:
    """Read batches one ahead of the caller, in another thread."""

    def read(batch: list[tuple[Weight, Wanted]]) -> list[tuple[Weight, torch.Tensor]]:
        stored = reader.read_boxes(each for _, each in batch)
        return [(weight, stored[each]) for weight, each in batch]

    with ThreadPoolExecutor(1, "sidesave-export") as pool:
        ahead: Future[list[tuple[Weight, torch.Tensor]]] | None = None
        for batch in batches:
            ready, ahead = ahead, pool.submit(read, batch)
            if ready is not None:
                yield ready.result()
        if ahead is not None:
            yield ahead.result()


def pieces(tensor: torch.Tensor, weight: Weight) -> Iterator[memoryview]:
    """The bytes of a tensor in its exported dtype; each piece is valid until the next."""
    flat = tensor.reshape(-1)
    flat = flat if flat.dtype == weight.dtype else flat.view(weight.dtype)
    step = flat.numel() if weight.dtype == weight.cast_to else _PIECE_ELEMENTS
    for start in range(0, flat.numel(), max(step, 1)):
        piece = flat[start : start + step].to(weight.cast_to)
        nbytes = piece.numel() * piece.element_size()
        yield memoryview((ctypes.c_ubyte * nbytes).from_address(piece.data_ptr()))
