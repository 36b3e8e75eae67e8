"""A tensor file that is read block by block.

It has a header, a grid, and the digest, or the tag, of each block.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import mmap
import os
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from sidesave.errors import (
    CheckpointNotFoundError,
    IntegrityError,
    SidesaveError,
    listed,
    write_error,
)
from sidesave.stager.dtypes import DTYPES
from sidesave.stager.memory import host_memory
from sidesave.stager.memory.arena import madvise
from sidesave.writer_daemon.format import integrity
from sidesave.writer_daemon.format.layout import UNSHARED
from sidesave.writer_daemon.format.manifest import FileRecord
from sidesave.writer_daemon.format.tensor_file import (
    BLOCK_NBYTES,
    DIGEST_NBYTES,
    TensorEntry,
    TensorFile,
    digest,
    digest_blocks,
    header_nbytes,
    parse_tensor_file,
)
from sidesave.writer_daemon.sealing.cipher import TAG_NBYTES, FileCipher
from sidesave.writer_daemon.storage import InputFile, ReadStorage, urls

MAX_DIMENSIONS: Final = 64
"""Limit above the number of dimensions that torch supports."""
_MADV_HUGEPAGE: Final = 14
_LARGE_NBYTES: Final = 64 << 20
"""A digest list or objects file of this size is read only if there is enough memory for it."""
_DAMAGE: Final = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EFBIG)
"""Errors from opening a file that is missing or was replaced. Other errors do not mean damage."""

_of_thread = threading.local()


@dataclass(slots=True, eq=False)
class BlockFile:
    """A tensor file whose header has been verified.

    ``borders`` are the offsets of its blocks, and its end. With a ``cipher`` it is read decrypted,
    by its ``tags``.
    """

    path: str
    layout: TensorFile
    digests: bytes
    borders: array[int]
    tags: bytes = b""
    cipher: FileCipher | None = None

    def blocks(self, start: int, stop: int) -> tuple[int, int]:
        """The first and last block with bytes from ``start`` to ``stop``."""
        return bisect_right(self.borders, start) - 1, bisect_left(self.borders, stop) - 1

    @property
    def nbytes_of_tables(self) -> int:
        """Bytes of the header and the digests."""
        return self.layout.data_offset + len(self.digests) + len(self.tags)

    def open_block(self, number: int, data: memoryview, into: memoryview) -> None:
        """Decrypt a block; raises ``TamperedError``."""
        assert self.cipher is not None
        sealed = memoryview(scratch_of("sealed", BLOCK_NBYTES + TAG_NBYTES))[
            : len(data) + TAG_NBYTES
        ]
        sealed[: len(data)] = data
        sealed[len(data) :] = self.tags[number * TAG_NBYTES :][:TAG_NBYTES]
        self.cipher.open_block(number, sealed, into, self.path)


def open_file(
    storage: ReadStorage,
    directory: str,
    record: FileRecord,
    digests: bytes | None = None,
    cipher: FileCipher | None = None,
) -> BlockFile:
    """Read and check the digest list, if it is not given, and the header of a tensor file.

    An encrypted file can be read only with its ``cipher``. ``IntegrityError`` describes the damage.
    """
    path = f"{storage.root.rstrip('/')}/{directory}/{record.name}"
    assert record.digests is not None
    tags = b""
    if digests is None:
        require_room(record.digests, os.path.dirname(path))
        digests = integrity.read_digests(storage, directory, record)
    if record.tags is not None and cipher is not None:
        require_room(record.tags, os.path.dirname(path))
        tags = integrity.read_small_file(storage, f"{directory}/{record.tags.name}", record.tags)
    with storage.open(f"{directory}/{record.name}") as source:
        layout = integrity.open_grid(source, record, path, digests)
        borders = array("Q", (offset for offset, _ in digest_blocks(layout)))
        borders.append(layout.nbytes)
        file = BlockFile(
            path, layout, digests, borders, tags, cipher if record.tags is not None else None
        )
        if file.cipher is not None:
            file.layout = _sealed_header(file, source)
    for entry in file.layout.entries:
        problem = shape_problem(entry.dtype, entry.shape, entry.nbytes)
        if problem:
            raise IntegrityError(f"{path}: {entry.name} {problem}")
    return file


def try_to_open(
    storage: ReadStorage, directory: str, record: FileRecord, cipher: FileCipher | None
) -> BlockFile | SidesaveError:
    """Open a file like :func:`open_file`, but return its error.

    The error is raised only if the file is needed.
    """
    try:
        with reading(f"{storage.root.rstrip('/')}/{directory}"):
            return open_file(storage, directory, record, cipher=cipher)
    except SidesaveError as error:
        return error


class RankFiles:
    """The tensor files of one rank.

    Attributes:
        entries: The tensors in those that could be opened, by key.
        errors: The errors of the other files, by container.
        nbytes_of_tables: Bytes of the headers and digests that were read.
    """

    def __init__(self, files: Iterable[tuple[FileRecord, BlockFile | SidesaveError]]) -> None:
        """Sort the results of :func:`try_to_open`."""
        self.entries: dict[str, list[tuple[BlockFile, TensorEntry]]] = {}
        self.errors: dict[str, SidesaveError] = {}
        self.nbytes_of_tables = 0
        for record, file in files:
            if isinstance(file, SidesaveError):
                self.errors.setdefault((record.container or "").removesuffix(UNSHARED), file)
                continue
            self.nbytes_of_tables += file.nbytes_of_tables
            for entry in file.layout.entries:
                self.entries.setdefault(entry.name, []).append((file, entry))

    def compare(self, listed: set[str]) -> set[str]:
        """The keys that only the files or only the manifest have, if the files could be opened."""
        return self.entries.keys() - listed if self.errors else self.entries.keys() ^ listed


def _sealed_header(file: BlockFile, source: InputFile) -> TensorFile:
    """Return the header of an encrypted tensor file.

    Its blocks are verified and opened one after the other.
    """
    header = bytearray()

    def open_up_to(nbytes: int) -> None:
        while len(header) < nbytes:
            number = len(header) // BLOCK_NBYTES
            begin, end = file.borders[number], file.borders[number + 1]
            block = source.read_at(begin, end - begin)
            check_block(file, number, block)
            header.extend(bytes(end - begin))
            with memoryview(header) as view:
                file.open_block(number, block, view[begin:end])

    nbytes = file.layout.nbytes
    open_up_to(min(8, nbytes))
    length = header_nbytes(bytes(header[:8]), nbytes, file.path)
    open_up_to(length)
    layout = parse_tensor_file(bytes(header[:length]), file.path)
    if layout.nbytes != nbytes:
        raise IntegrityError(f"{file.path}: header and record disagree about the length")
    return layout


@functools.lru_cache(1 << 12)
def shape_problem(dtype: str, shape: tuple[int, ...], nbytes: int | None = None) -> str:
    """The problem with a tensor described by a file; empty without one."""
    if dtype not in DTYPES:
        return f"has the unknown dtype {dtype!r:.80}"
    itemsize = DTYPES[dtype].itemsize
    if len(shape) > MAX_DIMENSIONS or (
        nbytes is not None and math.prod(shape) * itemsize != nbytes
    ):
        return "has a length that is not its shape's"
    if math.prod(extent for extent in shape if extent) * itemsize >= 1 << 63:
        return "has a shape that no tensor has, not even an empty one"
    return ""


def require_room(record: FileRecord, directory: str) -> None:
    """Raise ``HostMemoryError`` if a small file has grown too large for memory."""
    if record.nbytes > _LARGE_NBYTES:  # asking takes longer than reading a small one
        path = f"{directory}/{record.name}"
        with suppress(OSError):  # a file that is missing or too short is found to be so later
            there = record.nbytes if urls.is_url(path) else os.lstat(path).st_size
            host_memory.require(min(record.nbytes, there), f"reading {path}")


@contextmanager
def reading(path: str) -> Generator[None]:
    """Distinguish damage from failing storage; ``path`` is for errors that do not name one."""
    try:
        yield
    except CheckpointNotFoundError:
        raise
    except OSError as error:
        failed = write_error(error, "cannot read", error.filename or path)
        if failed.errno not in _DAMAGE:
            raise failed from error
        raise IntegrityError(f"{failed.filename}: {failed.strerror}") from error


def allocate(nbytes: int) -> mmap.mmap:
    """Fresh memory, in huge pages if the system has them."""
    memory = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    madvise(ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)), len(memory), _MADV_HUGEPAGE)
    return memory


def scratch_of(name: str, nbytes: int) -> mmap.mmap:
    """Memory that this thread reuses for the purpose ``name``."""
    memory: mmap.mmap | None = getattr(_of_thread, name, None)
    if memory is None or len(memory) < nbytes:
        memory = allocate(nbytes)
        setattr(_of_thread, name, memory)
    return memory


def check_block(file: BlockFile, number: int, block: memoryview) -> None:
    """Compare a block with its digest; ``IntegrityError`` names file, block and FQNs."""
    if digest(block) == file.digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES]:
        return
    start, end = file.borders[number], file.borders[number + 1]
    names = [e.name for e in file.layout.entries if e.offset < end and start < e.offset + e.nbytes]
    holding = f"; it holds {listed(names, 5)}" if names else ""
    raise IntegrityError(
        f"{file.path}: block {number} (bytes {start:,} to {end:,}) does not match its "
        f"digest{holding}"
    )
