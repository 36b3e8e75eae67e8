"""Copies one committed checkpoint of a run, on a disk or in a store, into a hidden directory of another place.

Every byte is compared with its digest on the way, before it is handed on. A file has its name there once all of it is
there, so that after an interruption, whatever it was, only the other files are copied. The manifest comes last.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Final

from sidesave.errors import IntegrityError, WriteError
from sidesave.stager.memory.arena import page_up
from sidesave.writer_daemon.format import integrity
from sidesave.writer_daemon.format.manifest import MANIFEST, MAX_JSON_NBYTES, FileRecord, Manifest, RankRecord
from sidesave.writer_daemon.sealing.keys import KEYS, MAX_KEYS_NBYTES, Keys
from sidesave.writer_daemon.storage import InputFile, OutputFile, ReadStorage, Storage

CHUNK_NBYTES: Final = 5 << 20
"""Read, compared and handed on at a time, while the next are read: a part of an upload, which then waits for no other.
Of these two are in memory, beside what is being sent, and of a source in a store four more."""
_AT_ONCE: Final = 2
"""Files on their way into a store at a time: what begins and ends one takes several answers each."""
_tries = itertools.count()


def copy_checkpoint(
    source: ReadStorage,
    name: str,
    target: Storage,
    partial: str,
    attempt: str,
    before_chunk: Callable[[int], None],
    arrived: Callable[[], None] = lambda: None,
) -> Manifest:
    """Bring the files of ``name`` into the directory ``partial`` of ``target``, durably; blocking.

    Args:
        source: The run, which keeps ``name`` (``ReadStorage.hold``) while this runs, as far as it can.
        name: The checkpoint's directory.
        target: Where it goes.
        partial: The directory there, made if need be, which may hold files of an interrupted copy of this very save.
        attempt: Tells the temporary names of this process's files from those of any other.
        before_chunk: Called with the number of bytes before each piece is handed on; may block, and stops the copy by
            raising.
        arrived: Called when a file has come to be there whole.

    Raises:
        IntegrityError: The source is damaged. The damage has not been handed on.
        WriteError: The source cannot be read, or the target refuses.
    """
    return _Copy(source, name, target, partial, f"{attempt}.{next(_tries)}", before_chunk, arrived).run()


@dataclass(slots=True)
class _Rank:
    """A rank some of whose files have not arrived; its record follows them."""

    record: str
    data: bytes
    files_left: int


class _StoppedError(Exception):
    """Another thread of this copy has failed, which is what is told."""


class _Copy:
    def __init__(
        self,
        source: ReadStorage,
        name: str,
        target: Storage,
        partial: str,
        attempt: str,
        before_chunk: Callable[[int], None],
        arrived: Callable[[], None],
    ) -> None:
        self._source, self._name = source, name
        self._target, self._partial = target, partial
        self._attempt = attempt
        self._before_chunk, self._arrived = before_chunk, arrived
        self._there: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        """Of one tensor file at a time pieces are in memory."""
        self._stopped = False

    def run(self) -> Manifest:
        path = f"{self._name}/{MANIFEST}"
        data = self._source.read(path, MAX_JSON_NBYTES)
        if data is None:
            raise IntegrityError(f"{self._source.root}/{path}: there is no manifest")
        content = Manifest.from_bytes(data, path)
        self._target.make_directory(self._partial, 0o700)
        self._there = frozenset(self._target.list_directory(self._partial))
        self._copy_files(content)
        for left in self._target.list_directory(self._partial):
            if left.startswith((".", f"{KEYS}.")):  # of a copy that was interrupted
                self._target.remove(f"{self._partial}/{left}")
        if content.cipher:
            self._put_keys()
        self._put_small(MANIFEST, data)
        self._target.open_to_readers(self._partial)
        self._target.sync_directory(self._partial)
        return content

    def _put_keys(self) -> None:
        """Last, since they may be exchanged meanwhile; those of a copy that was interrupted may be older."""
        keys = read_keys(self._source, self._name)
        if keys is None:
            raise IntegrityError(f"{self._source.root}/{self._name}/{KEYS}: the file is missing")
        self._take_turn(len(keys))
        self._target.replace(f"{self._partial}/{KEYS}", keys)
        self._tell_arrived()

    def _copy_files(self, content: Manifest) -> None:
        """Copy the files of all ranks; into a store small ones go beside large ones, which are sent one by one."""
        files = self._files(content)
        count = _AT_ONCE if self._target.round_trip_s else 1
        with ThreadPoolExecutor(count, "sidesave-copy") as pool:
            futures = [pool.submit(self._work, files) for _ in range(count)]
            try:
                for done in as_completed(futures):
                    done.result()
            except BaseException:  # also where this thread is interrupted
                self._stopped = True
                raise

    def _work(self, files: Iterator[tuple[FileRecord, _Rank]]) -> None:
        """Copy files until there are no more; the record of a rank by who has copied the last one of its files."""
        while True:
            with self._lock:
                file, rank = next(files, (None, None))
            if file is None or rank is None or self._stopped:
                return
            if file.digests is None:
                self._put_small(file.name, integrity.read_small_file(self._source, f"{self._name}/{file.name}", file))
            else:
                self._copy_tensors(file)
            with self._lock:
                rank.files_left -= 1
                is_last = not rank.files_left
            if is_last:
                self._put_small(rank.record, rank.data)

    def _files(self, content: Manifest) -> Iterator[tuple[FileRecord, _Rank]]:
        """All files but records and digest lists, rank by rank."""
        for number, entry in enumerate(content.records):
            path = f"{self._name}/{entry.name}"
            data = integrity.read_small_file(self._source, path, entry)
            record = RankRecord.from_bytes(data, path)
            content.check_record(number, record, path)
            files = [record.objects, *record.extra_files, *record.files]
            rank = _Rank(entry.name, data, len(files))
            yield from ((file, rank) for file in files)

    def _put_small(self, name: str, data: bytes) -> None:
        if not self._is_there(name, len(data)):
            self._take_turn(len(data))
            self._target.publish_bytes(self._partial, name, data, self._attempt)
            self._tell_arrived()

    def _take_turn(self, nbytes: int) -> None:
        with self._lock:
            if self._stopped:
                raise _StoppedError
            self._before_chunk(nbytes)

    def _tell_arrived(self) -> None:
        with self._lock:
            self._arrived()

    def _is_there(self, name: str, nbytes: int) -> bool:
        """Whether an earlier copy has brought all of a file; one of another length is removed."""
        if name not in self._there:
            return False
        path = f"{self._partial}/{name}"
        with self._target.open(path) as file:
            whole = file.nbytes == nbytes
        if not whole:
            self._target.remove(path)
        return whole

    def _copy_tensors(self, entry: FileRecord) -> None:
        path = f"{self._name}/{entry.name}"
        assert entry.digests is not None
        digests = integrity.read_digests(self._source, self._name, entry)
        self._put_small(entry.digests.name, digests)
        if entry.tags is not None:
            tags = integrity.read_small_file(self._source, f"{self._name}/{entry.tags.name}", entry.tags)
            self._put_small(entry.tags.name, tags)
        if self._is_there(entry.name, entry.nbytes):
            return
        temporary, final = f"{self._partial}/.{entry.name}.{self._attempt}", f"{self._partial}/{entry.name}"
        with self._opened(path) as file:
            comparison = integrity.Comparison(file, path, entry, digests)

            def copy_into(output: OutputFile) -> None:
                with contextlib.closing(_read_ahead(file)) as pieces:
                    for offset, window, done in pieces:
                        nbytes = min(CHUNK_NBYTES, entry.nbytes - offset)
                        self._take_turn(nbytes)
                        if done < nbytes:
                            raise IntegrityError(f"{path}: the file ends at byte {offset + done:,}")
                        comparison.add(window[:nbytes])
                        output.write_at(window, offset)
                output.finish(entry.nbytes)

            try:
                with self._sending, self._target.creating(temporary, entry.nbytes, final) as output:
                    copy_into(output)
            except BaseException:  # also where it is stopped: what is half copied goes
                with contextlib.suppress(WriteError):  # the room that it takes may be what is missing
                    self._target.remove(temporary)
                raise
        if not self._target.publish(temporary, final):  # who had the lease before was not slow enough
            self._target.remove(temporary)
        self._tell_arrived()

    @contextlib.contextmanager
    def _opened(self, path: str) -> Generator[InputFile]:
        """A file of the source; where there is none that is damage."""
        with contextlib.ExitStack() as opened:
            try:
                file = opened.enter_context(self._source.open(path))
            except WriteError as error:
                if error.errno not in integrity.NO_SUCH_FILE:
                    raise
                raise IntegrityError(f"{path}: {error.strerror}") from error
            yield file


def read_keys(storage: ReadStorage, name: str) -> bytes | None:
    """The keys of a checkpoint, as they are now; None where there are none."""
    data = storage.read(f"{name}/{KEYS}", MAX_KEYS_NBYTES)
    if data is not None:
        Keys.from_bytes(data, f"{storage.root}/{name}/{KEYS}")  # damage is not handed on
    return data


def _read_ahead(file: InputFile) -> Generator[tuple[int, memoryview, int]]:
    """The pieces of a file in order: where each begins, whole pages of memory, and how many bytes of it came.

    The next ones are read meanwhile. Each has memory of its own: a store may send it long after the next one was read.
    """

    def read(offset: int) -> tuple[int, memoryview, int]:
        window = memoryview(mmap.mmap(-1, page_up(min(CHUNK_NBYTES, file.nbytes - offset))))
        return offset, window, file.read_into(offset, window)

    asked: deque[Future[tuple[int, memoryview, int]]] = deque()
    with ThreadPoolExecutor(file.ahead, "sidesave-ahead") as pool:
        try:
            for offset in range(0, file.nbytes, CHUNK_NBYTES):
                asked.append(pool.submit(read, offset))
                if len(asked) > file.ahead:
                    yield asked.popleft().result()
            while asked:
                yield asked.popleft().result()
        finally:  # also where the copy is stopped
            pool.shutdown(cancel_futures=True)
