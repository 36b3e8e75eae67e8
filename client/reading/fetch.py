"""Brings a checkpoint from an object store down into a local run directory, whole or not at all.

All of it is compared with its digests while it arrives. What has arrived lies in a hidden directory, each file under
its name once it is whole, so that after an interruption only the others are fetched. In the end it is renamed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from sidesave.client.arguments import make_directory, path_text
from sidesave.client.reading import block_file, block_io
from sidesave.client.reading.block_file import BlockFile
from sidesave.client.reading.block_io import ReadRequest
from sidesave.client.runs import catalog, finding
from sidesave.client.runs.info import CheckpointInfo
from sidesave.errors import (
    CheckpointExistsError,
    DirectoryInUseError,
    IntegrityError,
    InvalidArgumentError,
    NoSpaceError,
    WriteError,
    write_error,
)
from sidesave.stager import signal_safe
from sidesave.writer_daemon.format import integrity
from sidesave.writer_daemon.format.manifest import (
    MANIFEST,
    MAX_JSON_NBYTES,
    FileRecord,
    Manifest,
    RankRecord,
    step_directory,
)
from sidesave.writer_daemon.lease.lease import Observer
from sidesave.writer_daemon.mirror.copying import read_keys
from sidesave.writer_daemon.sealing.keys import KEYS
from sidesave.writer_daemon.storage import Descriptor, PosixStorage, ReadStorage, urls

logger = logging.getLogger(__name__)

_THREADS: Final = 16
"""Small files, each a request, that are fetched at a time."""


def fetch(
    url: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> CheckpointInfo:
    """Bring a checkpoint from an object store down into a run directory; blocking, at the speed of the network.

    It is there as a committed checkpoint once all of it has arrived, been compared with its digests and been made
    durable, and not before. Interrupted in whatever way, the same call goes on with the files that had not arrived.

    Args:
        url: Of a checkpoint, or of a run, of which it is the newest one.
        directory: The run directory, made where it is missing, in which ``step-XXXXXXXX`` is to appear.
        step: Which one of a run.
        storage_options: What the store needs besides the environment: credentials, an endpoint.
        on_bytes: Called, from several threads but never twice at a time, with the number of bytes that have arrived
            since its last call, first with those of an earlier, interrupted call.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointExistsError: The directory has this step.
        DirectoryInUseError: A live session saves there, or another call fetches the same checkpoint.
        IntegrityError: What has arrived does not match its digest, or is missing.
        NoSpaceError: There is not enough room for it.
        InvalidArgumentError: ``url`` is no URL, or not one that can be read.
        WriteError: The store does not answer or give it, or the directory does not take it.
    """
    if not urls.is_url(finding.place_of(url)):
        raise InvalidArgumentError(f"{path_text(url)} is no URL; a checkpoint on a disk is copied like any directory")
    target = path_text(directory)
    with urls.using(storage_options), contextlib.ExitStack() as opened:
        place = finding.locate(url, step)
        parent, name = urls.parent_of(place)
        store = opened.enter_context(contextlib.closing(urls.open_storage(parent)))
        data = store.read(f"{name}/{MANIFEST}", MAX_JSON_NBYTES)
        if data is None:
            raise finding.not_found(place)
        manifest = Manifest.from_bytes(data, f"{place}/{MANIFEST}")
        final = step_directory(manifest.step)
        make_directory(target)
        run = opened.enter_context(contextlib.closing(PosixStorage(target)))
        exists = CheckpointExistsError(errno.EEXIST, "there is this step already", f"{target}/{final}")
        if os.path.lexists(f"{target}/{final}"):
            raise exists
        if Observer(run).look().alive:
            raise DirectoryInUseError(errno.EBUSY, "a live session saves here; fetch to another directory", target)
        partial = f".fetch-{final}.{manifest.session}-{manifest.sequence}"
        run.make_directory(partial, 0o700)
        opened.callback(_lock(run, partial))
        _Fetch(store, name, run, partial, manifest, on_bytes).run()
        if manifest.cipher:
            _bring_keys(store, name, run, partial)
        _write(f"{target}/{partial}/{MANIFEST}", data)
        run.sync_directory(partial)
        run.open_to_readers(partial)
        try:
            run.rename_directory(partial, final)
        except WriteError as error:
            if error.errno == errno.EEXIST:
                raise exists from error
            raise
        run.sync_directory("")
        logger.info("%s was fetched to %s", place, target)
        return catalog.read_info(f"{target}/{final}")


def _bring_keys(store: ReadStorage, name: str, run: PosixStorage, partial: str) -> None:
    """Bring the keys of an encrypted checkpoint."""
    keys = read_keys(store, name)
    if keys is None:
        raise IntegrityError(f"{store.root}/{name}/{KEYS}: the file is missing")
    _write(f"{run.root}/{partial}/{KEYS}", keys)


def _lock(run: PosixStorage, partial: str) -> Callable[[], None]:
    try:
        return run.lock(partial) or (lambda: None)
    except WriteError as error:
        if error.errno != errno.EAGAIN:
            raise
        raise DirectoryInUseError(errno.EBUSY, "another call fetches this checkpoint", run.root) from error


class _Fetch:
    """The files of one checkpoint on their way into a directory of ours."""

    def __init__(
        self,
        store: ReadStorage,
        name: str,
        run: PosixStorage,
        partial: str,
        manifest: Manifest,
        on_bytes: Callable[[int], None] | None,
    ) -> None:
        self._store, self._name = store, name
        self._run, self._partial = run, partial
        self._manifest = manifest
        self._on_bytes = on_bytes
        self._path = f"{run.root}/{partial}"
        self._lock = threading.Lock()

    def run(self) -> None:
        """Fetch what is not there yet, the manifest apart."""

        def all_ranks() -> list[list[BlockFile]]:
            with ThreadPoolExecutor(_THREADS, "sidesave-fetch") as pool:
                return list(pool.map(self._rank, range(len(self._manifest.records))))

        with block_file.reading(f"{self._store.root}/{self._name}"):
            found = signal_safe.run(all_ranks, "sidesave-fetch", stop=lambda: None)
        files = [file for rank in found for file in rank]
        needed, free = sum(file.layout.nbytes for file in files), self._run.free_nbytes()
        if needed > free:
            raise NoSpaceError(errno.ENOSPC, f"{needed:,} bytes are to come, {free:,} are free", self._run.root)
        targets: list[_Target] = []
        requests: list[ReadRequest] = []
        for file in files:
            targets.append(_Target(f"{self._path}/{os.path.basename(file.path)}", file.layout.nbytes, self._arrived))
            requests.append(ReadRequest(file, 0, len(file.borders) - 2, sink=targets[-1].put))
        try:
            block_io.read_blocks(block_io.Access.of(self._store, self._name), requests, verify=True)
        finally:
            for target in targets:
                target.close()
            if failed := [target.failed for target in targets if target.failed is not None]:
                raise failed[0]

    def _rank(self, rank: int) -> list[BlockFile]:
        """The small files of a rank, fetched, and its tensor files that are still to come."""
        entry = self._manifest.records[rank]
        record = RankRecord.from_bytes(self._small(entry), f"{self._name}/{entry.name}")
        self._manifest.check_record(rank, record, f"{self._name}/{entry.name}")
        for each in (record.objects, *record.extra_files):
            self._small(each)
        missing: list[BlockFile] = []
        for each in record.files:
            assert each.digests is not None
            digests = self._small(each.digests)
            if each.tags is not None:
                self._small(each.tags)
            if self._is_there(each):
                self._arrived(each.nbytes)
            else:
                missing.append(block_file.open_file(self._store, self._name, each, digests))
        return missing

    def _is_there(self, entry: FileRecord) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.lstat(f"{self._path}/{entry.name}").st_size == entry.nbytes
        return False

    def _small(self, entry: FileRecord) -> bytes:
        """The content of a file that has one digest, which is here afterwards."""
        if self._is_there(entry):
            data = integrity.read_small_file(self._run, f"{self._partial}/{entry.name}", entry)
        else:
            block_file.require_room(entry, f"{self._store.root}/{self._name}")
            data = integrity.read_small_file(self._store, f"{self._name}/{entry.name}", entry)
            _write(f"{self._path}/{entry.name}", data)
        self._arrived(len(data))
        return data

    def _arrived(self, nbytes: int) -> None:
        if self._on_bytes is not None:
            with self._lock:
                self._on_bytes(nbytes)


class _Target:
    """A tensor file that is written piece by piece, by several threads, and has its name once it is whole."""

    def __init__(self, path: str, nbytes: int, arrived: Callable[[int], None]) -> None:
        self._path, self._left, self._arrived = path, nbytes, arrived
        self._file: Descriptor | None = None
        self.failed: WriteError | None = None
        """Why it could not be written, which is no damage of what was read."""
        self._lock = threading.Lock()

    def put(self, window: memoryview, begin: int, start: int, stop: int) -> None:
        """Write the bytes from ``start`` to ``stop`` of the file; ``window`` begins with the byte ``begin``."""
        try:
            with _writing(self._path):
                self._put(window[start - begin : stop - begin], start)
        except WriteError as error:
            self.failed = error
            raise
        self._arrived(stop - start)

    def _put(self, data: memoryview, at: int) -> None:
        nbytes = len(data)
        with self._lock:
            if self._file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
                self._file = Descriptor(f"{self._path}.part", flags)
        while data:
            count = os.pwrite(self._file.fileno(), data, at)
            data, at = data[count:], at + count
        with self._lock:
            self._left -= nbytes
            if not self._left:
                os.fsync(self._file.fileno())
                self._file.close()
                os.rename(f"{self._path}.part", self._path)

    def close(self) -> None:
        """Give its descriptor back; idempotent."""
        if self._file is not None:
            self._file.close()


def _write(path: str, data: bytes) -> None:
    """A small file, under its name when it is durable."""
    with _writing(path), open(f"{path}.part", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        os.rename(f"{path}.part", path)


@contextlib.contextmanager
def _writing(path: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise write_error(error, "cannot write", path) from error
