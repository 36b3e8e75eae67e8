"""Copies a committed checkpoint into a hidden directory of another place, on a disk or in a store.

Every byte is verified against its digest before it is written. A file gets its name when it is
complete, so that after an interruption only the missing files are copied. Small files come first,
then those of tensors, and a rank's record after them; the keys and the manifest are last.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from typing import TypeVar

from sidesave.errors import IntegrityError, NoSpaceError, WriteError
from sidesave.stager.memory.arena import page_up
from sidesave.writer_daemon.format import integrity
from sidesave.writer_daemon.format.manifest import (
    MANIFEST,
    MAX_JSON_NBYTES,
    FileRecord,
    Manifest,
    RankRecord,
)
from sidesave.writer_daemon.sealing.keys import KEYS, MAX_KEYS_NBYTES, Keys
from sidesave.writer_daemon.storage import InputFile, ReadStorage, Storage

T = TypeVar("T")

_tries = itertools.count()


@dataclass(frozen=True, slots=True)
class CopyFlow:
    """How much of a copy is in progress at a time.

    Attributes:
        small_files: Ranks whose small files are copied.
        tensor_files: Tensor files being written.
        pieces: Pieces in memory, of all tensor files.
        piece_nbytes: Bytes read, verified and written at a time; a multiple of the page size.
    """

    small_files: int = 1
    tensor_files: int = 1
    pieces: int = 2
    piece_nbytes: int = 5 << 20


class CopyObserver:
    """Observes a copy. A method that raises stops it.

    The methods are called in several threads, but one at a time.
    """

    def before_read(self, entry: FileRecord) -> None:
        """Learn that a small file is about to be read."""

    def before_write(self, nbytes: int) -> None:
        """Learn the number of bytes that are written next; may block."""

    def present(self, nbytes: int) -> None:
        """Learn the number of bytes that have just been written, or were there already."""

    def completed(self) -> None:
        """Learn that a file has its name."""


def read_manifest(source: ReadStorage, name: str) -> bytes:
    """Return the manifest of a checkpoint; raises ``IntegrityError`` if it is missing."""
    path = f"{name}/{MANIFEST}"
    data = source.read(path, MAX_JSON_NBYTES)
    if data is None:
        raise IntegrityError(f"{source.root}/{path}: there is no manifest")
    return data


def copy_checkpoint(
    source: ReadStorage,
    name: str,
    manifest: bytes,
    target: Storage,
    partial: str,
    attempt: str,
    flow: CopyFlow,
    observer: CopyObserver,
) -> None:
    """Copy the files of ``name`` durably into ``partial``, a directory of ``target``; blocking.

    Args:
        source: The run; the caller holds ``name`` in it (``ReadStorage.hold``).
        name: The checkpoint's directory.
        manifest: Its manifest (:func:`read_manifest`).
        target: The other place.
        partial: The directory there, created if needed; may have files of an interrupted copy of
            the same save.
        attempt: Distinguishes the temporary names of different processes.
        flow: How much is in progress at a time.
        observer: Observes the copy.

    Raises:
        IntegrityError: The source is damaged; no damaged bytes were copied.
        NoSpaceError: The missing tensor files exceed the free space.
        WriteError: The source cannot be read, or the target cannot be written.
    """
    with _Copy(source, name, target, partial, attempt, flow, observer) as copy:
        copy.run(manifest)


def copy_tensor_file(
    source: ReadStorage,
    name: str,
    entry: FileRecord,
    digests: bytes,
    target: Storage,
    directory: str,
    attempt: str,
) -> None:
    """Copy one tensor file of ``name``, verified, without its digest list."""
    with _Copy(source, name, target, directory, attempt, CopyFlow(), CopyObserver()) as copy:
        copy.put_tensors(entry, digests)


def read_keys(storage: ReadStorage, name: str) -> bytes | None:
    """Return a checkpoint's keys file, or None; raises ``IntegrityError`` if it is damaged."""
    data = storage.read(f"{name}/{KEYS}", MAX_KEYS_NBYTES)
    if data is not None:
        Keys.from_bytes(data, f"{storage.root}/{name}/{KEYS}")  # do not copy damage
    return data


@dataclass(slots=True)
class _Rank:
    """A rank with tensor files to copy, each with its digests; its record is copied after them."""

    record: str
    data: bytes
    missing: list[tuple[FileRecord, bytes]]
    files_left: int


class _StoppedError(Exception):
    """Another thread of this copy has failed; its error is reported."""


class _Copy:
    def __init__(
        self,
        source: ReadStorage,
        name: str,
        target: Storage,
        partial: str,
        attempt: str,
        flow: CopyFlow,
        observer: CopyObserver,
    ) -> None:
        self._source, self._name = source, name
        self._target, self._partial = target, partial
        self._attempt = f"{attempt}.{next(_tries)}"
        self._flow, self._observer = flow, observer
        self._there: set[str] = set()
        self._lock = threading.Lock()
        self._stopped = False
        self._readers = ThreadPoolExecutor(flow.pieces, "sidesave-ahead")
        self._room = threading.Semaphore(flow.pieces)
        """One permit for each piece that may be in memory."""

    def __enter__(self) -> _Copy:
        return self

    def __exit__(self, *error: object) -> None:
        self._readers.shutdown()

    def run(self, manifest: bytes) -> None:
        content = Manifest.from_bytes(manifest, f"{self._name}/{MANIFEST}")
        self._target.make_directory(self._partial, 0o700)
        self._there = {*self._target.list_directory(self._partial)}
        small = (
            functools.partial(self._begin_rank, content, number)
            for number in range(len(content.records))
        )
        ranks = self._in_parallel(self._flow.small_files, small)
        self._require_space(ranks)
        large = (
            functools.partial(self._work, rank, *file) for rank in ranks for file in rank.missing
        )
        self._in_parallel(self._flow.tensor_files, large)
        for left in self._target.list_directory(self._partial):
            if left.startswith((".", f"{KEYS}.")):  # a leftover of an interrupted copy
                self._target.remove(f"{self._partial}/{left}")
        if content.cipher:
            self._put_keys()
        self._put_small(MANIFEST, manifest)
        self._target.open_to_readers(self._partial)
        self._target.sync_directory(self._partial)

    def _in_parallel(self, count: int, works: Iterable[Callable[[], T]]) -> list[T]:
        """Run functions in ``count`` threads; return their results, or raise the first error."""
        with ThreadPoolExecutor(count, "sidesave-copy") as pool:
            futures = [pool.submit(work) for work in works]
            try:
                for done in as_completed(futures):
                    done.result()
            except BaseException:  # also if this thread is interrupted
                self._stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [future.result() for future in futures]

    def _require_space(self, ranks: Iterable[_Rank]) -> None:
        needed = sum(entry.nbytes for rank in ranks for entry, _ in rank.missing)
        free = self._target.free_nbytes()
        if needed > free:
            raise NoSpaceError(
                errno.ENOSPC, f"{needed:,} bytes are to come, {free:,} are free", self._target.root
            )

    # Small files --------------------------------------------------------------------------------

    def _begin_rank(self, content: Manifest, number: int) -> _Rank:
        """Copy the small files of a rank; its record only if no tensor file is missing."""
        entry = content.records[number]
        path = f"{self._name}/{entry.name}"
        data = self._read_small(entry)
        record = RankRecord.from_bytes(data, path)
        content.check_record(number, record, path)
        for folder in {os.path.dirname(each.name) for each in record.extra_files} & self._there:
            names = self._target.list_directory(f"{self._partial}/{folder}")
            self._there.update(f"{folder}/{each}" for each in names)
        for each in (record.objects, *record.extra_files):
            self._copy_small(each)
        missing: list[tuple[FileRecord, bytes]] = []
        for each in record.files:
            assert each.digests is not None
            digests = self._copy_small(each.digests)
            if each.tags is not None:
                self._copy_small(each.tags)
            if self._is_there(each.name, each.nbytes):
                self._tell_present(each.nbytes)
            else:
                missing.append((each, digests))
        if not missing:
            self._put_small(entry.name, data)
        return _Rank(entry.name, data, missing, len(missing))

    def _copy_small(self, entry: FileRecord) -> bytes:
        data = self._read_small(entry)
        self._put_small(entry.name, data)
        return data

    def _read_small(self, entry: FileRecord) -> bytes:
        """Return the content of a small file, from the target if it is there and on a disk."""
        self._check_stopped()
        if not self._target.round_trip_s and self._is_there(entry.name, entry.nbytes):
            with contextlib.suppress(IntegrityError):
                return integrity.read_small_file(
                    self._target, f"{self._partial}/{entry.name}", entry
                )
            self._remove(entry.name)
        with self._lock:
            self._observer.before_read(entry)
        return integrity.read_small_file(self._source, f"{self._name}/{entry.name}", entry)

    def _put_small(self, name: str, data: bytes) -> None:
        if not self._is_there(name, len(data)):
            self._take_turn(len(data))
            self._target.publish_bytes(self._partial, name, data, self._attempt)
            self._tell_completed()
        self._tell_present(len(data))

    def _put_keys(self) -> None:
        """Copy the keys last, as they may be exchanged during the copy.

        Replaces those of an interrupted copy.
        """
        keys = read_keys(self._source, self._name)
        if keys is None:
            raise IntegrityError(f"{self._source.root}/{self._name}/{KEYS}: the file is missing")
        self._take_turn(len(keys))
        self._target.replace(f"{self._partial}/{KEYS}", keys)
        self._tell_completed()
        self._tell_present(len(keys))

    def _is_there(self, name: str, nbytes: int) -> bool:
        """Whether an earlier copy has completed a file; removes a file of another length."""
        if name not in self._there:
            return False
        with self._target.open(f"{self._partial}/{name}") as file:
            whole = file.nbytes == nbytes
        if not whole:
            self._remove(name)
        return whole

    def _remove(self, name: str) -> None:
        self._there.discard(name)
        self._target.remove(f"{self._partial}/{name}")

    # Tensor files --------------------------------------------------------------------------------

    def _work(self, rank: _Rank, entry: FileRecord, digests: bytes) -> None:
        """Copy a tensor file; the thread that copies a rank's last one also copies its record."""
        self._check_stopped()
        self.put_tensors(entry, digests)
        with self._lock:
            rank.files_left -= 1
            is_last = not rank.files_left
        if is_last:
            self._put_small(rank.record, rank.data)

    def put_tensors(self, entry: FileRecord, digests: bytes) -> None:
        """Copy a tensor file; its last piece counts as present once the file has its name."""
        path = f"{self._name}/{entry.name}"
        temporary, final = (
            f"{self._partial}/.{entry.name}.{self._attempt}",
            f"{self._partial}/{entry.name}",
        )
        last = 0
        with self._opened(path) as file:
            comparison = integrity.Comparison(file, path, entry, digests)
            try:
                with (
                    self._target.creating(temporary, entry.nbytes, final) as output,
                    contextlib.closing(self._pieces(file)) as pieces,
                ):
                    for offset, window, done in pieces:
                        if offset:
                            self._tell_present(last)
                        last = min(len(window), entry.nbytes - offset)
                        self._take_turn(last)
                        if done < last:
                            raise IntegrityError(f"{path}: the file ends at byte {offset + done:,}")
                        comparison.add(window[:last])
                        output.write_at(window, offset)
                    output.finish(entry.nbytes)
            except BaseException:  # also if the copy is stopped: remove the incomplete file
                with contextlib.suppress(WriteError):  # report the first error
                    self._target.remove(temporary)
                raise
        if not self._target.publish(temporary, final):  # an earlier lease holder was faster
            self._target.remove(temporary)
        self._tell_completed()
        self._tell_present(last)

    @contextlib.contextmanager
    def _opened(self, path: str) -> Generator[InputFile]:
        """Open a file of the source; raises ``IntegrityError`` if it is missing."""
        with contextlib.ExitStack() as opened:
            try:
                file = opened.enter_context(self._source.open(path))
            except WriteError as error:
                if error.errno not in integrity.NO_SUCH_FILE:
                    raise
                raise IntegrityError(f"{path}: {error.strerror}") from error
            yield file

    def _pieces(self, file: InputFile) -> Generator[tuple[int, memoryview, int]]:
        """Yield the pieces of a file in order: offset, memory in whole pages, number of bytes read.

        Reads ahead while there is room. Each piece has its own memory, since a store may send it
        after the next was read.
        """

        def read(offset: int) -> tuple[int, memoryview, int]:
            window = memoryview(
                mmap.mmap(-1, page_up(min(self._flow.piece_nbytes, file.nbytes - offset)))
            )
            return offset, window, file.read_into(offset, window)

        asked: deque[Future[tuple[int, memoryview, int]]] = deque()
        offsets = deque(range(0, file.nbytes, self._flow.piece_nbytes))
        try:
            while offsets or asked:
                # Wait for room only without a piece in memory: others wait for that one.
                while offsets and self._room.acquire(blocking=not asked):
                    asked.append(self._readers.submit(read, offsets.popleft()))
                yield asked[0].result()
                asked.popleft()
                self._room.release()
        finally:  # also if the copy is stopped: no read may outlive the file
            wait([future for future in asked if not future.cancel()])
            for _ in asked:
                self._room.release()

    # The observer --------------------------------------------------------------------------------

    def _check_stopped(self) -> None:
        if self._stopped:
            raise _StoppedError

    def _take_turn(self, nbytes: int) -> None:
        with self._lock:
            self._check_stopped()
            self._observer.before_write(nbytes)

    def _tell_present(self, nbytes: int) -> None:
        with self._lock:
            self._observer.present(nbytes)

    def _tell_completed(self) -> None:
        with self._lock:
            self._observer.completed()
