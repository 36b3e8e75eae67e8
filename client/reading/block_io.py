"""Reads blocks of tensor files and compares each with its digest.

Uncached pages are read past the page cache. Several threads read pieces of 16 MiB directly into the
tensors' memory. Tensors that must be assembled pass in pieces of 2 MiB through memory of the
reading thread, so they are never in memory twice.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import mmap
import os
import stat
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sidesave.client.reading.block_file import BlockFile, check_block, reading, scratch_of
from sidesave.errors import IntegrityError
from sidesave.stager import signal_safe
from sidesave.stager.memory.arena import PAGE, page_up
from sidesave.writer_daemon.storage import Descriptor, PosixStorage, ReadStorage

if TYPE_CHECKING:
    from sidesave.writer_daemon.storage.remote import ObjectStorage

_PIECE_NBYTES: Final = 16 << 20
_SINK_PIECE_NBYTES: Final = 2 << 20
"""For tensors that are assembled: a piece stays in the processor's cache until it is copied on."""
_THREADS: Final = 4
_REMOTE_PIECE_NBYTES: Final = 8 << 20
"""Size of one request: latency would dominate smaller ones, one stream's bandwidth larger ones."""
_GAP_NBYTES: Final = 256 << 10
"""Gap between two ranges that is read, too.

At 50 MB/s this takes 5 ms, less than the latency of a request.
"""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


# Memory -------------------------------------------------------------------------------------------


Sink = Callable[[memoryview, int, int, int], None]
"""Called with memory, its offset in the file, and the wanted range of offsets.

The memory is reused afterwards.
"""


@dataclass(slots=True)
class ReadRequest:
    """Consecutive blocks of a file, and their destination.

    The destination is memory of their own, or a sink called piece by piece.
    """

    file: BlockFile
    first: int
    last: int
    memory: mmap.mmap | None = None
    sink: Sink | None = None

    @property
    def base(self) -> int:
        """The page border at or before its first byte: direct reads are of whole pages."""
        return self.file.borders[self.first] // PAGE * PAGE

    @property
    def nbytes(self) -> int:
        """Bytes of its memory."""
        return page_up(self.file.borders[self.last + 1] - self.base)

    @property
    def content(self) -> memoryview:
        """Its memory, which begins with the byte ``base`` of the file."""
        assert self.memory is not None
        return memoryview(self.memory)


def join(
    ranges: Iterable[tuple[int, int]],
    are_near: Callable[[int, int], bool] = lambda last, begin: begin <= last + 1,
) -> Iterator[tuple[int, int]]:
    """First and last block of overlapping ranges of blocks, joined into as few ranges as possible.

    ``are_near`` decides whether the last block of one and the first of a later one are joined into
    one range.
    """
    ordered = sorted(ranges)
    if not ordered:
        return
    first, last = ordered[0]
    for begin, end in ordered[1:]:
        if not are_near(last, begin):
            yield first, last
            first = begin
        last = max(last, end)
    yield first, last


# Reading ------------------------------------------------------------------------------------------


Opener = Callable[[str, int], Descriptor]
"""``open(2)`` of a file by path and flags."""


@dataclass(frozen=True, slots=True)
class Access:
    """How to read files.

    Has the function that opens one for a thread, the number of threads, and the size of pieces.
    """

    open: Callable[[BlockFile], _Source]
    threads: int = _THREADS
    piece_nbytes: int = _PIECE_NBYTES
    gap_nbytes: int | None = None
    """Largest gap read between ranges to join them into one request.

    None if separate reads are cheaper.
    """

    @classmethod
    def local(cls, open_descriptor: Opener) -> Access:
        """Access to files that have descriptors."""
        return cls(functools.partial(_LocalSource, open_descriptor))

    @classmethod
    def of(cls, storage: ReadStorage, directory: str) -> Access:
        """Access to the files in a directory."""
        if isinstance(storage, PosixStorage):
            return cls.local(
                lambda path, flags: storage.open_descriptor(
                    f"{directory}/{os.path.basename(path)}", flags
                )
            )
        # Imported only if storage is a URL.
        from sidesave.writer_daemon.storage.remote import AT_ONCE, ObjectStorage

        assert isinstance(storage, ObjectStorage)
        opening = functools.partial(_RemoteSource, storage, directory)
        return cls(opening, AT_ONCE, _REMOTE_PIECE_NBYTES, _GAP_NBYTES)


def read_blocks(access: Access, requests: Iterable[ReadRequest], *, verify: bool) -> int:
    """Read all requests and return the number of bytes read; blocking.

    If interrupted, it returns once no thread reads.

    Args:
        access: How to read their files.
        requests: What to read.
        verify: Compare every block with its digest.

    Raises:
        IntegrityError: A block does not match; the message names file, block and FQNs.
        WriteError: Storage does not give the bytes.
    """
    by_file: dict[BlockFile, list[ReadRequest]] = {}
    for each in requests:
        by_file.setdefault(each.file, []).append(each)
    pieces = [piece for file, wanted in by_file.items() for piece in _pieces(file, wanted, access)]
    reader = _PieceReader(access, pieces, verify=verify)
    counts = signal_safe.run_all(
        [reader.work] * min(access.threads, len(pieces)), "sidesave-read", stop=reader.stop
    )
    reader.check()
    return sum(counts)


class _PieceReader:
    """Pieces of files, which threads take one by one until all are taken or one fails.

    Each thread has one file open at a time, so few files are open at once, whatever their number.
    """

    def __init__(self, access: Access, pieces: Iterable[_BlockRange], *, verify: bool) -> None:
        self._access = access
        self._pieces = deque(enumerate(pieces))
        self._verify = verify
        self._errors: dict[int, BaseException] = {}

    def stop(self) -> None:
        """Read no further piece."""
        self._pieces.clear()

    def check(self) -> None:
        """Raise the error of the first piece that failed, once no thread reads any longer."""
        try:
            if self._errors:
                raise self._errors[min(self._errors)]
        finally:
            self._errors.clear()  # their tracebacks refer to this

    def work(self) -> int:
        """Read pieces; returns the bytes that were read. Errors are kept for :meth:`check`."""
        count = 0
        source: _Source | None = None
        try:
            while (taken := self._take()) is not None:
                number, piece = taken
                try:
                    with reading(piece.file.path):
                        if source is None or source.file is not piece.file:
                            if source is not None:
                                source.close()
                            source = self._access.open(piece.file)
                        window, begin = piece.window()
                        done = source.read(window, begin)
                        piece.deliver(window[:done], begin, verify=self._verify)
                        count += done
                except BaseException as error:  # noqa: BLE001 - the caller's, after earlier pieces
                    self._errors[number] = error
                    self.stop()
        finally:
            if source is not None:
                source.close()
        return count

    def _take(self) -> tuple[int, _BlockRange] | None:
        with suppress(IndexError):
            return self._pieces.popleft()
        return None


@dataclass(frozen=True, slots=True)
class _BlockRange:
    """Blocks that are read at once.

    They go into the memory of one request, or to all sinks that want some of them.
    """

    file: BlockFile
    first: int
    last: int
    requests: Sequence[ReadRequest]

    @property
    def _in_place(self) -> bool:
        """Whether it is read directly into its final memory."""
        return len(self.requests) == 1 and self.requests[0].memory is not None

    def window(self) -> tuple[memoryview, int]:
        """The memory for this thread to read into, and the offset in the file at which to begin."""
        borders, home = self.file.borders, self.requests[0]
        # The page at a border is read by both neighbours, with the same bytes.
        begin, stop = borders[self.first] // PAGE * PAGE, page_up(borders[self.last + 1])
        return (
            home.content[begin - home.base : stop - home.base]
            if self._in_place
            else _scratch(stop - begin)
        ), begin

    def deliver(self, window: memoryview, begin: int, *, verify: bool) -> None:
        """Compare the bytes read with their digests, and pass them to the requests.

        The bytes start at ``begin``.
        """
        borders, end = self.file.borders, self.file.borders[self.last + 1]
        if len(window) < end - begin:
            raise IntegrityError(f"{self.file.path}: ends before byte {end:,}")
        spans = [(max(each.first, self.first), min(each.last, self.last)) for each in self.requests]
        if verify:
            for number in itertools.chain(*(range(first, last + 1) for first, last in join(spans))):
                check_block(
                    self.file, number, window[borders[number] - begin : borders[number + 1] - begin]
                )
        if self.file.cipher is not None:
            for number in itertools.chain(*(range(first, last + 1) for first, last in join(spans))):
                block = window[borders[number] - begin : borders[number + 1] - begin]
                self.file.open_block(number, block, block)
        for each, (first, last) in zip(self.requests, spans, strict=True):
            if each.sink is not None:
                each.sink(window, begin, borders[first], borders[last + 1])
            elif not self._in_place:
                part = window[borders[first] - begin : borders[last + 1] - begin]
                each.content[borders[first] - each.base :][: len(part)] = part


def _pieces(
    file: BlockFile, requests: Iterable[ReadRequest], access: Access
) -> Iterator[_BlockRange]:
    """Group requests.

    Tensors next to each other in the file are read at once, and blocks they share are read once.
    """
    gap_nbytes, nbytes = access.gap_nbytes, _SINK_PIECE_NBYTES
    for_sinks: list[ReadRequest] = []
    for each in requests:
        if each.memory is None or gap_nbytes is not None:
            for_sinks.append(each)
            continue
        for first, last in _split(file, each.first, each.last, access.piece_nbytes):
            yield _BlockRange(file, first, last, (each,))
    for_sinks.sort(key=lambda each: each.first, reverse=True)
    ranges = [(each.first, each.last) for each in for_sinks]
    if gap_nbytes is None:
        runs = list(join(ranges))
    else:
        nbytes = access.piece_nbytes
        runs = list(
            join(
                ranges,
                lambda last, begin: file.borders[begin] - file.borders[last + 1] < gap_nbytes,
            )
        )
    concerned: list[ReadRequest] = []
    for run in runs:
        for first, last in _split(file, *run, nbytes):
            while for_sinks and for_sinks[-1].first <= last:
                concerned.append(for_sinks.pop())
            concerned = [each for each in concerned if first <= each.last]
            if concerned:  # of a gap there may be a piece alone
                yield _BlockRange(file, first, last, tuple(concerned))


def _split(file: BlockFile, first: int, last: int, nbytes: int) -> Iterator[tuple[int, int]]:
    while first <= last:
        end = max(first, bisect_right(file.borders, file.borders[first] + nbytes) - 2)
        yield first, min(end, last)
        first = end + 1


def _scratch(nbytes: int) -> memoryview:
    """Memory that this thread reuses."""
    return memoryview(scratch_of("scratch", nbytes))[:nbytes]


class _Source(ABC):
    """A file open for one thread."""

    file: BlockFile

    @abstractmethod
    def read(self, window: memoryview, begin: int) -> int:
        """Fill memory with the bytes from ``begin``, a page's border.

        Returns their number, which is less at the file's end.
        """

    @abstractmethod
    def close(self) -> None:
        """Release its resources; idempotent."""


class _RemoteSource(_Source):
    """A file in an object store; each piece is one request."""

    def __init__(self, storage: ObjectStorage, directory: str, file: BlockFile) -> None:
        self.file = file
        self._storage = storage
        self._path = f"{directory}/{os.path.basename(file.path)}"

    def read(self, window: memoryview, begin: int) -> int:
        return self._storage.read_into(self._path, begin, window)

    def close(self) -> None:
        return


class _LocalSource(_Source):
    """A local file: cached pages are read from the page cache, others by direct I/O."""

    def __init__(self, open_descriptor: Opener, file: BlockFile) -> None:
        # Without blocking on a pipe in the file's place.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self.file = file
        self._cached = open_descriptor(file.path, flags)
        facts = os.fstat(self._cached.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.ENXIO, "not a file", file.path)
        self._direct: Descriptor | None = None
        with suppress(OSError):  # a file system without O_DIRECT
            self._direct = open_descriptor(file.path, flags | os.O_DIRECT)
        self._nbytes = facts.st_size
        address = _libc.mmap(
            None, max(self._nbytes, 1), mmap.PROT_READ, mmap.MAP_SHARED, self._cached.fileno(), 0
        )
        self._address = 0 if address == ctypes.c_void_p(-1).value else int(address or 0)

    def read(self, window: memoryview, begin: int) -> int:
        source = (
            self._cached
            if self._direct is None or self._is_cached(begin, len(window))
            else self._direct
        )
        done = 0
        while done < len(window):
            count = os.preadv(source.fileno(), [window[done:]], begin + done)
            done += count
            if count == 0 or (source is self._direct and done % PAGE):
                break
        return done

    def _is_cached(self, offset: int, nbytes: int) -> bool:
        """Whether all pages are in memory.

        The mapping is only queried, never read, so it cannot raise SIGBUS.
        """
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
        for file in (self._cached, self._direct):
            if file is not None:
                file.close()
