"""The plan of a save: the offset of each tensor in its file, and of each file in the arena.

A file image is a complete safetensors file: the header, padded so that data starts on a page, then
the tensors, largest element size first, so that each is aligned to its element size without gaps. A
plan depends only on the structure (FQNs, dtypes, shapes), and is reused while the structure is
unchanged.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from sidesave.errors import UnsupportedValueError
from sidesave.stager import torch_private
from sidesave.stager.dtypes import NAMES
from sidesave.stager.memory.arena import PAGE, page_up
from sidesave.stager.state.flat_state import FlatState

MAX_HEADER_NBYTES: Final = 100_000_000
"""Largest header that the safetensors library accepts."""
SMALL_NBYTES: Final = 256 << 10
"""Tensors below this size are packed together; the digest grid has the same threshold."""
DESCRIPTOR_NBYTES: Final = 4096
"""Bytes for an encoded SAVE message; each file adds ``_DESCRIPTOR_PER_FILE``."""
_DESCRIPTOR_PER_FILE: Final = 512
DCP_VERSION: Final = "1.0"
"""The version of the sharding convention that torch's Hugging Face storage reader expects."""

Structure = tuple[tuple[str, tuple[str, ...], tuple[tuple[torch.dtype, torch.Size], ...]], ...]

Offsets = Mapping[str, tuple[int, ...]]
"""Offsets of a shard in its full tensor, one per dimension, by FQN; all 0 for FQNs not listed."""


class Placement(NamedTuple):
    """Offset of a tensor's bytes from the start of its file's image, and their number."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileImage:
    """One file of a plan.

    Attributes:
        container: The container whose tensors it holds.
        name: The file's name without its suffix.
        placements: Offsets of the tensors, in the order of the flat state.
        offset: Offset of the image from the arena's first data byte.
    """

    container: str
    name: str
    header: bytes
    placements: tuple[Placement, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All file images of one structure.

    Attributes:
        structure: Containers, FQNs, dtypes and shapes, in the order of the files.
        files: The images.
        nbytes: Size of all images.
        fixed: The plan of the part whose shapes are the same in each save; None if that is all of
            it.
        room_nbytes: Size to allocate, so that tables can grow in later saves; 0 for ``nbytes``.
    """

    structure: Structure
    files: tuple[FileImage, ...]
    nbytes: int
    fixed: Plan | None = None
    room_nbytes: int = 0

    @property
    def first(self) -> Plan:
        """The plan of the part with fixed shapes, or this plan."""
        return self.fixed or self


def capacity(plan: Plan, parts_nbytes: int) -> tuple[int, int]:
    """Return the bytes that an arena needs for a descriptor, and for images and parts behind them.

    What grows (tables, the treespec) gets a quarter more.
    """
    growing = max(plan.nbytes, plan.room_nbytes) - plan.first.nbytes, parts_nbytes
    data_nbytes = plan.first.nbytes + sum(nbytes + page_up(nbytes // 4) for nbytes in growing)
    return DESCRIPTOR_NBYTES + _DESCRIPTOR_PER_FILE * len(plan.files), data_nbytes


def structure_of(containers: Mapping[str, Mapping[str, torch.Tensor]]) -> Structure:
    """Return the structure of a state's containers; equal structures share a plan."""
    return tuple(
        (name, tuple(tensors), tuple([(tensor.dtype, tensor.shape) for tensor in tensors.values()]))
        for name, tensors in containers.items()
    )


@dataclass(frozen=True, slots=True, eq=False)
class StateSignature:
    """Names, classes, dtypes, shapes, strides and devices of a state's tensors, not their memory.

    Compared by identity: :class:`SignatureCache` returns the same object for equal states.
    """

    structure: Structure


_HasSameLayout = Callable[[Sequence[torch.Tensor]], bool]


class Target(NamedTuple):
    """The place in the arena where one tensor is staged.

    ``offset`` counts from the arena's first data byte; ``nbytes`` is the tensor's size.
    """

    fqn: str
    view: torch.Tensor
    offset: int
    address: int
    nbytes: int


class Job(NamedTuple):
    """A tensor and the place that it is copied to."""

    source: torch.Tensor
    target: Target


class SignatureCache:
    """Returns the signature of a state, which is usually that of the previous state."""

    def __init__(self) -> None:
        """Start without a previous state."""
        self._last: (
            tuple[StateSignature, list[tuple[str, tuple[str, ...]]], _HasSameLayout] | None
        ) = None
        self._last_origin: tuple[object, _HasSameLayout, StateSignature] | None = None
        """Origin of the previous state, a check of its fresh tensors, and its signature."""

    def of(self, flat: FlatState) -> StateSignature:
        """Return the signature of a state; the same object as last time if it is unchanged."""
        last, fresh = self._last_origin, [*flat.fresh.values()]
        if (
            last is not None
            and flat.origin is not None
            and flat.origin is last[0]
            and last[1](fresh)
        ):
            return last[2]
        signature = self._compare(flat)
        self._last_origin = flat.origin, torch_private.tensor_guard(fresh), signature
        return signature

    def _compare(self, flat: FlatState) -> StateSignature:
        tensors = [tensor for named in flat.containers.values() for tensor in named.values()]
        names = [(name, tuple(named)) for name, named in flat.containers.items()]
        last = self._last
        if last is not None and names == last[1] and last[2](tensors):
            return last[0]
        signature = StateSignature(structure_of(flat.containers))
        self._last = signature, names, torch_private.tensor_guard(tensors)
        return signature


def make_plan(
    structure: Structure,
    offsets: Mapping[str, Offsets] | None = None,
    file_nbytes: int | None = None,
) -> Plan:
    """Lay out a structure.

    Args:
        structure: Containers, FQNs, dtypes and shapes.
        offsets: Offsets of shards in their full tensors, by container.
        file_nbytes: Split a container's tensors, in order, into files of at most this size; a
            larger tensor gets its own file. None writes one file for each container.

    Raises:
        UnsupportedValueError: A header exceeds :data:`MAX_HEADER_NBYTES`.
    """
    files, offset = _lay_out_all(structure, 0, offsets or {}, file_nbytes)
    return Plan(structure, tuple(files), offset)


def extend(plan: Plan, more: Structure, room_nbytes: int, file_nbytes: int | None = None) -> Plan:
    """Return ``plan`` with containers appended, and ``room_nbytes`` for them in later saves."""
    files, nbytes = _lay_out_all(more, plan.nbytes, {}, file_nbytes)
    return Plan(
        plan.structure + more, (*plan.files, *files), nbytes, plan, plan.nbytes + room_nbytes
    )


def _lay_out_all(
    structure: Structure, offset: int, offsets: Mapping[str, Offsets], file_nbytes: int | None
) -> tuple[list[FileImage], int]:
    """Return a structure's images, laid out from ``offset`` on, and the offset of their end."""
    files: list[FileImage] = []
    for container, fqns, kinds in structure:
        borders = _cut(kinds, file_nbytes)
        for number, (begin, end) in enumerate(itertools.pairwise(borders), start=1):
            # No container has a dot in its name.
            name = (
                container
                if len(borders) == 2
                else f"{container}.{number:05d}-of-{len(borders) - 1:05d}"
            )
            own = offsets.get(container, {})
            file = _lay_out(container, name, fqns[begin:end], kinds[begin:end], offset, own)
            files.append(file)
            offset += page_up(file.nbytes)
    return files, offset


def _cut(kinds: tuple[tuple[torch.dtype, torch.Size], ...], file_nbytes: int | None) -> list[int]:
    """Return the index of each file's first tensor, and last the number of tensors."""
    borders, nbytes = [0], 0
    for index, (dtype, shape) in enumerate(kinds):
        own = shape.numel() * dtype.itemsize
        if file_nbytes is not None and nbytes and nbytes + own > file_nbytes:
            borders.append(index)
            nbytes = 0
        nbytes += own
    return [*borders, len(kinds)]


def _lay_out(
    container: str,
    name: str,
    fqns: tuple[str, ...],
    kinds: tuple[tuple[torch.dtype, torch.Size], ...],
    offset: int,
    offsets: Offsets,
) -> FileImage:
    # Small tensors come last within an element size: adjacent ones are copied from the device at
    # once.
    small = [shape.numel() * dtype.itemsize < SMALL_NBYTES for dtype, shape in kinds]
    order = sorted(range(len(fqns)), key=lambda index: (-kinds[index][0].itemsize, small[index]))
    begins = [0] * len(fqns)
    body: dict[str, object] = {"__metadata__": _metadata(fqns, kinds, offsets)}
    position = 0
    for index in order:
        dtype, shape = kinds[index]
        nbytes = shape.numel() * dtype.itemsize
        begins[index] = position
        body[fqns[index]] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [position, position + nbytes],
        }
        position += nbytes
    header = _encode(container, body)
    placements = tuple(
        Placement(len(header) + begin, shape.numel() * dtype.itemsize)
        for begin, (dtype, shape) in zip(begins, kinds, strict=True)
    )
    return FileImage(container, name, header, placements, offset, len(header) + position)


def _metadata(
    fqns: tuple[str, ...],
    kinds: tuple[tuple[torch.dtype, torch.Size], ...],
    offsets: Offsets,
) -> dict[str, str]:
    saved = {
        fqn: {"saved_offsets": list(offsets.get(fqn, (0,) * len(shape)))}
        for fqn, (_, shape) in zip(fqns, kinds, strict=True)
    }
    return {"format": "pt", "DCP_VERSION": DCP_VERSION, "DCP_SHARDING_INFO": json.dumps(saved)}


def _encode(container: str, body: dict[str, object]) -> bytes:
    try:
        text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UnsupportedValueError(
            f"{container}: a tensor's name is not valid Unicode: {error}"
        ) from error
    padded = page_up(8 + len(text))
    if padded > MAX_HEADER_NBYTES:
        raise UnsupportedValueError(
            f"{container}: {len(body) - 1:,} tensors need a header of {len(text):,} bytes, but "
            f"safetensors allows {MAX_HEADER_NBYTES:,}; distribute them over several top-level "
            "items"
        )
    assert padded % PAGE == 0
    return struct.pack("<Q", padded - 8) + text + b" " * (padded - 8 - len(text))
