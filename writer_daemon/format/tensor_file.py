"""A safetensors file and its digests: its header, and the grid of blocks that have a digest each."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import xxhash

from sidesave.errors import IntegrityError
from sidesave.writer_daemon.storage.sealed_json import are_whole, load_json

DIGEST_NBYTES: Final = 16
BLOCK_NBYTES: Final = 256 << 10
"""Digest granularity. The grid restarts at each tensor of at least this size, so that a verified read of one tensor
reads hardly more than the tensor."""
MAX_HEADER_NBYTES: Final = 100_000_000
"""The limit that stock safetensors sets to a header."""


def digest(data: bytes | memoryview) -> bytes:
    """XXH3-128 of ``data``, 16 bytes, big-endian as xxhash's canonical form has it."""
    return xxhash.xxh3_128_digest(data)


@dataclass(frozen=True, slots=True)
class TensorEntry:
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
    """Bytes from the file's start to its first tensor, from its first eight bytes.

    Raises ``IntegrityError`` when that exceeds ``limit`` (the file's size) or what stock safetensors accepts.
    """
    if len(first_eight) < 8:
        raise IntegrityError(f"{path}: too short for a safetensors file")
    (length,) = struct.unpack("<Q", first_eight[:8])
    if length > MAX_HEADER_NBYTES or 8 + length > limit:
        raise IntegrityError(f"{path}: header of {length} bytes in a file of {limit}")
    return 8 + int(length)


def parse_tensor_file(header: bytes | memoryview, path: str, *, ordered: bool = True) -> TensorFile:
    """Read a safetensors header (its first eight bytes included); ``IntegrityError`` names what is wrong with it.

    The format lets a header name tensors in another order than the file has them in, which ours never does: that takes
    ``ordered=False``. Entries come in the order of the file.
    """
    raw = load_json(bytes(header[8:]), path)
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in cast("Any", metadata).values()):
        raise IntegrityError(f"{path}: header metadata must map text to text")
    entries: list[TensorEntry] = []
    for name, body in raw.items():
        try:
            dtype, shape, (begin, stop) = body["dtype"], body["shape"], body["data_offsets"]
        except (TypeError, KeyError, ValueError) as error:
            raise IntegrityError(f"{path}: header entry {name!r} is malformed") from error
        whole = isinstance(shape, list) and are_whole([*cast("list[Any]", shape), begin, stop])
        if not (isinstance(dtype, str) and whole and stop >= begin):
            raise IntegrityError(f"{path}: header entry {name!r} is malformed")
        entries.append(TensorEntry(name, dtype, tuple(cast("list[int]", shape)), len(header) + begin, stop - begin))
    if not ordered:
        entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    end = len(header)
    for entry in entries:
        if entry.offset != end:
            raise IntegrityError(f"{path}: header entry {entry.name!r} leaves a hole, or lies over another one")
        end += entry.nbytes
    return TensorFile(len(header), end, tuple(entries), cast("dict[str, str]", metadata))


def digest_blocks(file: TensorFile) -> list[tuple[int, int]]:
    """The grid of a file's digests: ``(offset, nbytes)`` per block, in order and without holes.

    The header is a run of its own, so that it can be verified before it is believed; each tensor of at least
    ``BLOCK_NBYTES`` is a run, and so is each stretch of smaller ones between them. Runs are cut into blocks.
    """
    return [
        (offset, min(BLOCK_NBYTES, end - offset))
        for start, end in _runs(file)
        for offset in range(start, end, BLOCK_NBYTES)
    ]


def count_blocks(file: TensorFile) -> int:
    """The length of :func:`digest_blocks`, computed at once: the grid of a sparse file of terabytes fits no memory."""
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
