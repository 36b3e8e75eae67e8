"""The plan of a save: which tensor lies at which offset of which file, and which file at which offset of the arena.

A file image is a complete safetensors file: header first, padded so that data starts on a page, then the tensors,
largest elements first, so that each is aligned to its element size without a hole. Plans depend on structure alone
(FQNs, dtypes, shapes) and are cached: a steady-state save reuses one.
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
from sidesave.stager.memory.arena import PAGE, page_up
from sidesave.stager.state.dtypes import NAMES
from sidesave.stager.state.flat_state import FlatState

MAX_HEADER_NBYTES: Final = 100_000_000
"""What stock safetensors accepts."""
SMALL_NBYTES: Final = 256 << 10
"""Tensors below this size are packed together; the digest grid has the same threshold."""
DCP_VERSION: Final = "1.0"
"""The version of the sharding convention that torch's Hugging Face storage reader expects."""

Structure = tuple[tuple[str, tuple[str, ...], tuple[tuple[torch.dtype, torch.Size], ...]], ...]

Offsets = Mapping[str, tuple[int, ...]]
"""By FQN, where a piece begins in the tensor that it is of; of what is not named here it is the beginning."""


class Placement(NamedTuple):
    """Where a tensor's bytes go, counted from the start of its file's image."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileImage:
    """One file: its container, its own name, header, and where the tensors go, in the order of the flat state."""

    container: str
    name: str
    header: bytes
    placements: tuple[Placement, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All images of one structure; offsets count from the arena's first data byte, ``nbytes`` is what they take.

    Attributes:
        structure: What is in the files, one after the other.
        files: The images.
        nbytes: What they take.
        fixed: The plan that it begins with, of all that has the same shape in each save; None is this one.
        room_nbytes: What should be there for the next saves too, whose tables have grown.
    """

    structure: Structure
    files: tuple[FileImage, ...]
    nbytes: int
    fixed: Plan | None = None
    room_nbytes: int = 0

    @property
    def first(self) -> Plan:
        """The plan that it begins with, or this one."""
        return self.fixed or self


def structure_of(containers: Mapping[str, Mapping[str, torch.Tensor]]) -> Structure:
    """What a plan depends on; equal structures share a plan."""
    return tuple(
        (name, tuple(tensors), tuple([(tensor.dtype, tensor.shape) for tensor in tensors.values()]))
        for name, tensors in containers.items()
    )


@dataclass(frozen=True, slots=True, eq=False)
class Looks:
    """What can be seen of a state's tensors without their memory: names, dtypes, shapes, strides, devices and kinds.

    Of the same looks there is one object: see :class:`LooksCache`.
    """

    structure: Structure


_LookAlike = Callable[[Sequence[torch.Tensor]], bool]


class LooksCache:
    """Tells whether the tensors of a state look like those of the state before, which they nearly always do."""

    def __init__(self) -> None:
        """Begin without a state before."""
        self._last: tuple[Looks, list[tuple[str, tuple[str, ...]]], _LookAlike] | None = None
        self._met: tuple[object, _LookAlike, Looks] | None = None
        """The origin of the state before, what tells the looks of its fresh tensors, and those of all."""

    def of(self, flat: FlatState) -> Looks:
        """The looks of a state's tensors; the same object as last time if they are equal."""
        met, fresh = self._met, [*flat.fresh.values()]
        if met is not None and flat.origin is not None and flat.origin is met[0] and met[1](fresh):
            return met[2]
        looks = self._look(flat)
        self._met = flat.origin, torch_private.tensor_guard(fresh), looks
        return looks

    def _look(self, flat: FlatState) -> Looks:
        tensors = [tensor for named in flat.containers.values() for tensor in named.values()]
        names = [(name, tuple(named)) for name, named in flat.containers.items()]
        last = self._last
        if last is not None and names == last[1] and last[2](tensors):
            return last[0]
        looks = Looks(structure_of(flat.containers))
        self._last = looks, names, torch_private.tensor_guard(tensors)
        return looks


def make_plan(
    structure: Structure, offsets: Mapping[str, Offsets] | None = None, file_nbytes: int | None = None
) -> Plan:
    """Lay a structure out; ``offsets`` are, by container and FQN, those of pieces of larger tensors.

    A container with more than ``file_nbytes`` bytes of tensors gets several files, each with some that follow one
    another; a larger tensor has one of its own.

    Raises ``UnsupportedValueError`` when a header would exceed what stock readers accept.
    """
    files, offset = _lay_out_all(structure, 0, offsets or {}, file_nbytes)
    return Plan(structure, tuple(files), offset)


def extend(plan: Plan, more: Structure, room_nbytes: int, file_nbytes: int | None = None) -> Plan:
    """A plan with further containers behind its own, of which the next save may have larger ones."""
    files, nbytes = _lay_out_all(more, plan.nbytes, {}, file_nbytes)
    return Plan(plan.structure + more, (*plan.files, *files), nbytes, plan, plan.nbytes + room_nbytes)


def _lay_out_all(
    structure: Structure, offset: int, offsets: Mapping[str, Offsets], file_nbytes: int | None
) -> tuple[list[FileImage], int]:
    """The images of a structure from ``offset`` on, and where they end."""
    files: list[FileImage] = []
    for container, fqns, kinds in structure:
        borders = _cut(kinds, file_nbytes)
        for number, (begin, end) in enumerate(itertools.pairwise(borders), start=1):
            # No container has a dot in its name.
            name = container if len(borders) == 2 else f"{container}.{number:05d}-of-{len(borders) - 1:05d}"
            own = offsets.get(container, {})
            file = _lay_out(container, name, fqns[begin:end], kinds[begin:end], offset, own)
            files.append(file)
            offset += page_up(file.nbytes)
    return files, offset


def _cut(kinds: tuple[tuple[torch.dtype, torch.Size], ...], file_nbytes: int | None) -> list[int]:
    """Which tensor each file begins with, and how many there are."""
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
    # Within an element size the small tensors come last and side by side: one copy from the device takes them all.
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
        raise UnsupportedValueError(f"{container}: a tensor's name is not valid Unicode: {error}") from error
    padded = page_up(8 + len(text))
    if padded > MAX_HEADER_NBYTES:
        raise UnsupportedValueError(
            f"{container}: {len(body) - 1:,} tensors need a header of {len(text):,} bytes, and safetensors allows "
            f"{MAX_HEADER_NBYTES:,}; spread them over several top-level items"
        )
    assert padded % PAGE == 0
    return struct.pack("<Q", padded - 8) + text + b" " * (padded - 8 - len(text))
