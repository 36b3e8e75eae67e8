"""Reads one committed checkpoint: its records, its skeletons, and verified tensor bytes at the medium's speed.

Bytes go straight into the memory that the tensors will have: an anonymous region per stretch of wanted blocks, read
in 16 MiB pieces by several threads, with O_DIRECT where the page cache does not hold them, and each block compared
with its digest in place. The region lives as long as a tensor in it.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import stat
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import torch

from sidesave.errors import CheckpointNotFoundError, IntegrityError, InvalidArgumentError, write_error
from sidesave.stager import host_memory
from sidesave.stager.arena import PAGE, madvise, page_up
from sidesave.stager.dtypes import DTYPES
from sidesave.stager.skeleton import Skeleton
from sidesave.writer_daemon import integrity
from sidesave.writer_daemon.manifest import (
    FileRecord,
    Manifest,
    RankRecord,
)
from sidesave.writer_daemon.storage import PosixStorage
from sidesave.writer_daemon.tensor_file import (
    DIGEST_NBYTES,
    TensorEntry,
    TensorFile,
    count_blocks,
    digest,
    digest_blocks,
)

_PIECE_NBYTES: Final = 16 << 20
_MAX_OPEN_FILES: Final = 64
"""Read at the same time, each through two descriptors: a process may have no more than 256."""
_THREADS: Final = 4
_MADV_HUGEPAGE: Final = 14
_MAX_DIMENSIONS: Final = 64
"""More than torch computes with."""
_LARGE_NBYTES: Final = 64 << 20
"""A digest list or objects file of this size is read only where there is room for it."""
_DAMAGE: Final = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EFBIG)
"""Errors of opening a file that is missing or whose place something else has taken. Others say nothing about it."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


_Open = Callable[[str, int], int]


@dataclass(frozen=True, slots=True)
class _Located:
    """A tensor's place: its file and its header entry."""

    file: _OpenFile
    entry: TensorEntry


@dataclass(slots=True, eq=False)
class _OpenFile:
    record: FileRecord
    path: str
    layout: TensorFile
    blocks: list[tuple[int, int]]
    digests: bytes


@dataclass(slots=True)
class _Stretch:
    """Consecutive blocks of one file and the memory they go to; ``base`` is the file offset of the memory's start."""

    file: _OpenFile
    first: int
    last: int
    base: int
    memory: mmap.mmap


class CheckpointReader:
    """A checkpoint opened for reading; nothing of its tensors is read before :meth:`read`."""

    def __init__(self, path: str) -> None:
        """Open the directory ``path``, reading and checking manifest, records, headers and skeletons.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            IntegrityError: A file is missing or does not match its digest.
            FormatVersionError: It was written in a newer format.
            WriteError: Storage does not give the bytes (EIO, EACCES); they may be whole.
            HostMemoryError: There is not enough memory for what it lists.
        """
        if not os.path.isdir(path):
            raise CheckpointNotFoundError(errno.ENOENT, "there is no checkpoint", path)
        self.path = path
        self._storage = PosixStorage(os.path.dirname(path) or "/")
        try:
            self._name = os.path.basename(path)
            with _reading(path):
                self._storage.hold(self._name)
                self.manifest: Manifest = integrity.read_manifest(self._storage, self._name)
                self.records: list[RankRecord] = [
                    self._read_record(rank, entry) for rank, entry in enumerate(self.manifest.records)
                ]
                self._located: dict[str, _Located] = {}
                for record in self.records:
                    for entry in record.files:
                        self._open_file(entry)
                if self._located.keys() != self.manifest.table.tensors.keys():
                    odd = sorted(self._located.keys() ^ self.manifest.table.tensors.keys())[:5]
                    raise IntegrityError(f"{path}: manifest and files disagree about {odd}")
                self.skeletons: list[Skeleton] = [self._read_skeleton(record) for record in self.records]
        except BaseException:
            self._storage.close()
            raise

    def _open_descriptor(self, path: str, flags: int) -> int:
        return self._storage.open_descriptor(f"{self._name}/{os.path.basename(path)}", flags)

    def _read_record(self, rank: int, entry: FileRecord) -> RankRecord:
        self._require_room(entry)
        record = integrity.read_record(self._storage, self._name, entry)
        self.manifest.check_record(rank, record, f"{self.path}/{entry.name}")
        return record

    def _open_file(self, record: FileRecord) -> None:
        path = f"{self.path}/{record.name}"
        assert record.digests is not None
        self._require_room(record.digests)
        digests = integrity.read_digests(self._storage, self._name, record)
        with self._storage.open(f"{self._name}/{record.name}") as source:
            if source.nbytes != record.nbytes:
                raise IntegrityError(f"{path}: {source.nbytes:,} bytes instead of {record.nbytes:,}")
            layout = integrity.read_header(source, path, digests)
        if layout.nbytes != record.nbytes or len(digests) != DIGEST_NBYTES * count_blocks(layout):
            raise IntegrityError(f"{path}: header, record and digest list disagree about the length")
        file = _OpenFile(record, os.path.join(self.path, record.name), layout, digest_blocks(layout), digests)
        for entry in layout.entries:
            if entry.dtype not in DTYPES:
                raise IntegrityError(f"{path}: {entry.name} has the unknown dtype {entry.dtype!r:.80}")
            itemsize = DTYPES[entry.dtype].itemsize
            if len(entry.shape) > _MAX_DIMENSIONS or math.prod(entry.shape) * itemsize != entry.nbytes:
                raise IntegrityError(f"{path}: {entry.name} has a length that is not its shape's")
            if math.prod(extent for extent in entry.shape if extent) * itemsize >= 1 << 63:
                raise IntegrityError(f"{path}: no tensor has the shape of {entry.name}, not even an empty one")
            self._located[entry.name] = _Located(file, entry)

    def _read_skeleton(self, record: RankRecord) -> Skeleton:
        self._require_room(record.objects)
        data = integrity.read_small_file(self._storage, f"{self._name}/{record.objects.name}", record.objects)
        return Skeleton(data, os.path.join(self.path, record.objects.name))

    def _require_room(self, entry: FileRecord) -> None:
        if entry.nbytes > _LARGE_NBYTES:  # asking takes longer than reading a small one
            path = f"{self.path}/{entry.name}"
            with suppress(OSError):  # a file that is missing, or shorter than it should be, is found to be so later
                host_memory.require(min(entry.nbytes, os.lstat(path).st_size), f"reading {path}")

    def close(self) -> None:
        """Release the directory; tensors that were read stay valid. Idempotent."""
        self._storage.close()

    def __enter__(self) -> CheckpointReader:
        """The reader itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def entry(self, fqn: str) -> TensorEntry:
        """Stored dtype, shape and size of a tensor; ``IntegrityError`` when a skeleton names one that is not there."""
        try:
            return self._located[fqn].entry
        except KeyError:
            raise IntegrityError(f"{self.path}: the tensor {fqn} is missing") from None

    def read(self, fqns: Iterable[str], *, verify: bool = True) -> dict[str, torch.Tensor]:
        """Read tensors into fresh host memory; blocking, at the medium's speed.

        Args:
            fqns: Which ones.
            verify: Compare every block with its digest.

        Raises:
            IntegrityError: A block does not match; the message names file, block and FQNs.
            HostMemoryError: There is not enough memory.
            WriteError: Storage does not give the bytes.
        """
        wanted = {fqn: self.entry(fqn) for fqn in dict.fromkeys(fqns)}
        stretches = [
            stretch
            for file in {self._located[fqn].file for fqn, entry in wanted.items() if entry.nbytes}
            for stretch in _stretches(file, [e for f, e in wanted.items() if self._located[f].file is file])
        ]
        for stretch in stretches:
            _advise_huge_pages(stretch.memory)
        by_path: dict[str, list[_Stretch]] = {}
        for stretch in stretches:
            by_path.setdefault(stretch.file.path, []).append(stretch)
        paths = list(by_path)
        for first in range(0, len(paths), _MAX_OPEN_FILES):
            some = {path: by_path[path] for path in paths[first : first + _MAX_OPEN_FILES]}
            _read_files(self._open_descriptor, some, verify)
        return {fqn: self._tensor(self._located[fqn].file, entry, stretches) for fqn, entry in wanted.items()}

    @staticmethod
    def _tensor(file: _OpenFile, entry: TensorEntry, stretches: list[_Stretch]) -> torch.Tensor:
        dtype = DTYPES[entry.dtype]
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        for stretch in stretches:
            start, end = stretch.file.blocks[stretch.first][0], sum(stretch.file.blocks[stretch.last])
            if stretch.file is file and start <= entry.offset and entry.offset + entry.nbytes <= end:
                count = entry.nbytes // dtype.itemsize
                flat = torch.frombuffer(stretch.memory, dtype=dtype, count=count, offset=entry.offset - stretch.base)
                return flat.view(entry.shape)
        raise AssertionError("every wanted tensor lies in a stretch")


def _read_files(open_descriptor: _Open, files: dict[str, list[_Stretch]], verify: bool) -> None:
    sources: dict[str, _Source] = {}
    try:
        for path in files:
            with _reading(path):
                sources[path] = _Source(open_descriptor, path)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="sidesave-read") as pool:
            work = [
                pool.submit(_read_blocks, sources[path], stretch, first, last, verify)
                for path, stretches in files.items()
                for stretch in stretches
                for first, last in _pieces(stretch)
            ]
            try:
                for future in work:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        for source in sources.values():
            source.close()


def _stretches(file: _OpenFile, entries: list[TensorEntry]) -> Iterator[_Stretch]:
    """The runs of blocks that hold ``entries``, each with memory of its own."""
    needed = _blocks_of(file, entries)
    first = 0
    for index, number in enumerate(needed):
        if index == 0 or needed[index - 1] != number - 1:
            first = number
        if index == len(needed) - 1 or needed[index + 1] != number + 1:
            base = file.blocks[first][0] // PAGE * PAGE
            nbytes = page_up(sum(file.blocks[number]) - base)
            host_memory.require(nbytes, f"loading {file.record.name}")
            yield _Stretch(file, first, number, base, mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _blocks_of(file: _OpenFile, entries: list[TensorEntry]) -> list[int]:
    """Numbers of the blocks that hold a byte of ``entries``, ascending."""
    spans = sorted((entry.offset, entry.offset + entry.nbytes) for entry in entries if entry.nbytes)
    numbers: list[int] = []
    position = 0
    for number, (offset, nbytes) in enumerate(file.blocks):
        while position < len(spans) and spans[position][1] <= offset:
            position += 1
        if position < len(spans) and spans[position][0] < offset + nbytes:
            numbers.append(number)
    return numbers


def _pieces(stretch: _Stretch) -> Iterator[tuple[int, int]]:
    blocks = stretch.file.blocks
    first = stretch.first
    for number in range(stretch.first, stretch.last + 1):
        if number == stretch.last or sum(blocks[number + 1]) - blocks[first][0] > _PIECE_NBYTES:
            yield first, number
            first = number + 1


def _read_blocks(source: _Source, stretch: _Stretch, first: int, last: int, verify: bool) -> None:
    file = stretch.file
    start, end = file.blocks[first][0], sum(file.blocks[last])
    # Direct reads are of whole pages: the page at a border is read by both neighbours, with the same bytes.
    begin = start // PAGE * PAGE
    stop = page_up(end)
    window = memoryview(stretch.memory)[begin - stretch.base : stop - stretch.base]
    with _reading(file.path):
        if source.read_into(window, begin) < end - begin:
            raise IntegrityError(f"{file.path}: ends before byte {end:,}")
    if not verify:
        return
    for number in range(first, last + 1):
        offset, nbytes = file.blocks[number]
        block = window[offset - begin : offset - begin + nbytes]
        if digest(block) != file.digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES]:
            names = [e.name for e in file.layout.entries if e.offset < offset + nbytes and offset < e.offset + e.nbytes]
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            holding = f"; it holds {', '.join(names[:5])}{more}" if names else ""
            raise IntegrityError(
                f"{file.path}: block {number} (bytes {offset:,} to {offset + nbytes:,}) does not match its digest"
                f"{holding}"
            )


class _Source:
    """A file read from the page cache where it is there, and past it where it is not."""

    def __init__(self, open_descriptor: _Open, path: str) -> None:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in its place blocks nobody
        self._cached = open_descriptor(path, flags)
        facts = os.fstat(self._cached)
        if not stat.S_ISREG(facts.st_mode):
            os.close(self._cached)
            raise OSError(errno.ENXIO, "not a file", path)
        self._direct = -1
        with suppress(OSError):  # a file system without O_DIRECT
            self._direct = open_descriptor(path, flags | os.O_DIRECT)
        self._nbytes = facts.st_size
        address = _libc.mmap(None, max(self._nbytes, 1), mmap.PROT_READ, mmap.MAP_SHARED, self._cached, 0)
        self._address = 0 if address == ctypes.c_void_p(-1).value else int(address or 0)

    def read_into(self, window: memoryview, offset: int) -> int:
        """Fill ``window`` from ``offset``, a page border; returns how many bytes there were."""
        fd = self._cached if self._direct < 0 or self._is_cached(offset, len(window)) else self._direct
        done = 0
        while done < len(window):
            count = os.preadv(fd, [window[done:]], offset + done)
            done += count
            if count == 0 or (fd == self._direct and done % PAGE):
                break
        return done

    def _is_cached(self, offset: int, nbytes: int) -> bool:
        """Whether all pages are in memory. The mapping is only asked about, never read: no SIGBUS can come of it."""
        nbytes = min(nbytes, self._nbytes - offset)
        if not self._address or nbytes <= 0:
            return True
        pages = (ctypes.c_ubyte * (page_up(nbytes) // PAGE))()
        if _libc.mincore(self._address + offset, nbytes, pages):
            return False
        return bytes(pages).count(0) == 0

    def close(self) -> None:
        if self._address:
            _libc.munmap(self._address, max(self._nbytes, 1))
            self._address = 0
        for fd in (self._cached, self._direct):
            if fd >= 0:
                os.close(fd)
        self._cached = self._direct = -1


@contextmanager
def _reading(path: str) -> Generator[None]:
    """Tell damage from storage that fails; ``path`` is for errors that do not say it."""
    try:
        yield
    except CheckpointNotFoundError:
        raise
    except OSError as error:
        failed = write_error(error, "cannot read", error.filename or path)
        if failed.errno not in _DAMAGE:
            raise failed from error
        raise IntegrityError(f"{failed.filename}: {failed.strerror}") from error


def _advise_huge_pages(memory: mmap.mmap) -> None:
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    madvise(address, len(memory), _MADV_HUGEPAGE)


def open_checkpoint(path: str) -> CheckpointReader:
    """Open a checkpoint directory; a run directory is refused with a hint, being one level too high."""
    path = os.path.realpath(path)
    if os.path.isdir(path) and not os.path.lexists(os.path.join(path, "manifest.json")):
        from sidesave.client.catalog import scan

        found = scan(path)
        if found:
            raise InvalidArgumentError(
                f"{path} is a run directory; load one of its checkpoints, {found[-1].path} is newest"
            )
        raise CheckpointNotFoundError(errno.ENOENT, "there is no checkpoint", path)
    return CheckpointReader(path)
