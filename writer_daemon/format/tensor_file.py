"""A safetensors file's header, and the grid of its blocks, each of which has a digest."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import xxhash

from sidesave.errors import IntegrityError
from sidesave.writer_daemon.storage.sealed_json import are_whole, load_json

DIGEST_NBYTES: Final = 16
BLOCK_NBYTES: Final = 256 << 10
"""Bytes for each digest.

The grid restarts at each tensor of at least this size, so that a verified read of one tensor reads
little more than the tensor.
"""
MAX_HEADER_NBYTES: Final = 100_000_000
"""The safetensors library's limit for a header."""


def digest(data: bytes | memoryview) -> bytes:
    """Return the XXH3-128 of ``data``: 16 bytes, big-endian (xxhash's canonical form)."""
    return xxhash.xxh3_128_digest(data)


class TensorEntry(NamedTuple):
    """One tensor of a safetensors file; ``offset`` counts from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The content of a safetensors header."""

    data_offset: int
    nbytes: int
    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]


def header_nbytes(first_eight: bytes | memoryview, limit: int, path: str) -> int:
    """Return the offset of a file's first tensor, given the file's first eight bytes.

    Raises ``IntegrityError`` if it exceeds ``limit`` (the file's size) or
    :data:`MAX_HEADER_NBYTES`.
    """
    if len(first_eight) < 8:
        raise IntegrityError(f"{path}: too short for a safetensors file")
    (length,) = struct.unpack("<Q", first_eight[:8])
    if length > MAX_HEADER_NBYTES or 8 + length > limit:
        raise IntegrityError(f"{path}: header of {length} bytes in a file of {limit}")
    return 8 + int(length)


def parse_tensor_file(header: bytes | memoryview, path: str, *, ordered: bool = True) -> TensorFile:
    """Parse a safetensors header, including its first eight bytes.

    Returns entries in the order of the file. ``ordered=False`` accepts headers that list tensors in
    another order, which other writers may do. Raises ``IntegrityError`` if the header is malformed.
    """
    raw = load_json(bytes(header[8:]), path)
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(text, str) for text in cast("Any", metadata).values()
    ):
        raise IntegrityError(f"{path}: header metadata must map text to text")
    entries: list[TensorEntry] = []
    start = len(header)
    checked: dict[Any, tuple[int, ...]] = {}  # most shapes are like others
    for name, body in raw.items():
        try:
            dtype, listed, (begin, stop) = body["dtype"], body["shape"], body["data_offsets"]
            # With the types, as true, 1 and 1.0 are equal.
            key = dtype, *listed, *map(type, (listed, *listed))
            shape = checked.get(key)
            sizes = cast("list[int]", listed)
            if (
                shape is None
                and isinstance(dtype, str)
                and isinstance(listed, list)
                and are_whole(sizes)
            ):
                shape = checked[key] = tuple(sizes)
            whole = shape is not None and are_whole([begin, stop])
        except (TypeError, KeyError, ValueError) as error:
            raise IntegrityError(f"{path}: header entry {name!r} is malformed") from error
        if shape is None or not whole or stop < begin:
            raise IntegrityError(f"{path}: header entry {name!r} is malformed")
        entries.append(TensorEntry(name, dtype, shape, start + begin, stop - begin))
    if not ordered:
        entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    end = len(header)
    for entry in entries:
        if entry.offset != end:
            raise IntegrityError(
                f"{path}: header entry {entry.name!r} leaves a gap, or overlaps another entry"
            )
        end += entry.nbytes
    return TensorFile(len(header), end, tuple(entries), cast("dict[str, str]", metadata))


def digest_blocks(file: TensorFile) -> list[tuple[int, int]]:
    """Return ``(offset, nbytes)`` of each block that has a digest, in order and without gaps.

    The header, each tensor of at least ``BLOCK_NBYTES``, and the smaller tensors between two of
    those are cut into blocks separately. So the header can be verified before it is parsed.
    """
    return [
        (offset, min(BLOCK_NBYTES, end - offset))
        for start, end in _runs(file)
        for offset in range(start, end, BLOCK_NBYTES)
    ]


def count_blocks(file: TensorFile) -> int:
    """Return the length of :func:`digest_blocks` without the list, which may exceed memory."""
    return sum(-(-(end - start) // BLOCK_NBYTES) for start, end in _runs(file))


def _runs(file: TensorFile) -> Iterator[tuple[int, int]]:
    yield 0, file.data_offset
    start = file.data_offset
    for entry in file.entries:
        if entry.nbytes >= BLOCK_NBYTES:
            if entry.offset > start:
                yield start, entry.offset
            yield entry.offset, entry.offset + entry.nbytes
            start = entry.offset + entry.nbytes
    if file.nbytes > start:
        yield start, file.nbytes
