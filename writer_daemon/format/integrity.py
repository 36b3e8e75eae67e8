"""Verifies every byte of a checkpoint against its digests.

Used before recovery commits a save, and by ``sidesave.verify``. Faults are yielded, not raised, so
that one damaged block does not hide the state of the others. A file that cannot be read now (EIO,
EMFILE, EACCES) is a fault, but it may be undamaged: see :func:`check_record`.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import xxhash

from sidesave.errors import IntegrityError, WriteError
from sidesave.writer_daemon.format.manifest import (
    MANIFEST,
    MAX_JSON_NBYTES,
    FileRecord,
    Manifest,
    RankRecord,
)
from sidesave.writer_daemon.format.names import folders_of, is_extra_file_name, parse_step_directory
from sidesave.writer_daemon.format.tensor_file import (
    DIGEST_NBYTES,
    TensorFile,
    count_blocks,
    digest,
    digest_blocks,
    header_nbytes,
    parse_tensor_file,
)
from sidesave.writer_daemon.sealing.keys import KEYS, MAX_KEYS_NBYTES, Keys
from sidesave.writer_daemon.storage import InputFile, ReadStorage

_READ_NBYTES: Final = 16 << 20
NO_SUCH_FILE: Final = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENXIO,
    errno.EFBIG,
)
"""Error numbers for a file that is missing or is not a regular file; these count as damage."""


_left_out: Final[dict[str, str]] = {}
"""The last reason to leave out a checkpoint, by its path."""


def warn_left_out(logger: logging.Logger, path: str, problem: object = None) -> None:
    """Warn if the checkpoint at ``path`` has a new ``problem``; None means that it was read.

    Runs are listed repeatedly, so the same problem is logged as a warning only once.
    """
    text = _left_out.pop(path, None)
    if problem is not None:
        _left_out[path] = str(problem)
        level = logging.DEBUG if text == _left_out[path] else logging.WARNING
        logger.log(level, "left out: %s", problem if path in str(problem) else f"{path}: {problem}")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: the file, the offset of the faulty block, and the FQNs of its tensors.

    ``unreadable`` is storage's error if the bytes could not be read; they may be undamaged.
    """

    file: str
    problem: str
    offset: int | None = None
    fqns: tuple[str, ...] = ()
    unreadable: WriteError | None = None

    def __str__(self) -> str:
        at = "" if self.offset is None else f" at byte {self.offset:,}"
        names = f" ({', '.join(self.fqns)})" if self.fqns else ""
        return f"{self.file}{at}: {self.problem}{names}"


def read_record(storage: ReadStorage, directory: str, entry: FileRecord) -> RankRecord:
    """Return a rank record of a manifest; ``IntegrityError`` if it is missing or differs."""
    path = f"{directory}/{entry.name}"
    return RankRecord.from_bytes(read_small_file(storage, path, entry), path)


def read_manifest(storage: ReadStorage, directory: str) -> Manifest:
    """Return the manifest of a directory; raises ``IntegrityError`` if it is missing or damaged."""
    path = f"{directory}/{MANIFEST}"
    data = storage.read(path, MAX_JSON_NBYTES)
    if data is None:
        raise IntegrityError(f"{path}: the manifest is missing")
    return Manifest.from_bytes(data, path)


def read_small_file(storage: ReadStorage, path: str, entry: FileRecord) -> bytes:
    """Return the verified content of a file with one digest; raises ``IntegrityError``."""
    data = storage.read(path, entry.nbytes + 1)
    if data is None:
        raise IntegrityError(f"{path}: the file is missing")
    if len(data) != entry.nbytes:
        raise IntegrityError(f"{path}: {len(data)} bytes instead of {entry.nbytes}")
    if digest(data).hex() != entry.xxh3_128:
        raise IntegrityError(f"{path}: content does not match its digest")
    return data


def check_checkpoint(
    storage: ReadStorage,
    directory: str,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
    on_files: Callable[[set[str]], None] = lambda names: None,
) -> Iterator[Fault]:
    """Yield every fault of a committed checkpoint, including files that its manifest does not list.

    Args:
        storage: The run directory.
        directory: The name of the step's directory.
        on_bytes: Called with the number of bytes checked since its last call.
        on_files: Called with the names of the files that belong to the checkpoint, as far as known.
    """
    try:
        manifest = read_manifest(storage, directory)
    except (IntegrityError, WriteError) as error:
        yield _fault(MANIFEST, error)
        return
    step = parse_step_directory(directory)
    if step is not None and step != manifest.step:
        yield Fault(
            MANIFEST, f"the manifest is of step {manifest.step}, but its directory is {directory}"
        )
    known = {MANIFEST}
    if manifest.cipher:
        known.add(KEYS)
        yield from _check_keys(storage, f"{directory}/{KEYS}", manifest.session)
    unknown_ranks: list[int] = []
    for rank, entry in enumerate(manifest.records):
        known.add(entry.name)
        try:
            record = read_record(storage, directory, entry)
            manifest.check_record(rank, record, f"{directory}/{entry.name}")
        except (IntegrityError, WriteError) as error:
            yield _fault(entry.name, error)
            unknown_ranks.append(rank)
            continue
        yield from _check_files(storage, directory, record, on_bytes)
        known.update(
            part.name
            for file in (record.objects, *record.extra_files, *record.files)
            for part in file.parts
        )
    on_files(known)
    listed = {*storage.list_directory(directory)} if storage.can_list else set[str]()
    for folder in sorted(folders_of(known) & listed):
        listed.remove(folder)
        try:
            listed.update(
                f"{folder}/{name}" for name in storage.list_directory(f"{directory}/{folder}")
            )
        except WriteError as error:
            yield _fault(folder, error)
    for name in sorted(listed - known):
        if manifest.cipher and name.startswith(f"{KEYS}."):
            # From a running or interrupted exchange of keys.
            continue
        if not any(_may_be_of(rank, name) for rank in unknown_ranks):  # their records may list it
            yield Fault(name, "the manifest does not list this file")


def _check_keys(storage: ReadStorage, path: str, session: str) -> Iterator[Fault]:
    try:
        data = storage.read(path, MAX_KEYS_NBYTES)
        if data is None:
            yield Fault(KEYS, "the file is missing; without it this checkpoint cannot be read")
        elif Keys.from_bytes(data, path).session != session:
            yield Fault(KEYS, "the file is from another session than the checkpoint")
    except (IntegrityError, WriteError) as error:
        yield _fault(KEYS, error)


def _may_be_of(rank: int, name: str) -> bool:
    return f".rank-{rank:05d}." in name or (rank == 0 and is_extra_file_name(name))


def check_record(storage: ReadStorage, directory: str, record: RankRecord) -> Iterator[Fault]:
    """Yield every fault in the files of one rank, for recovery.

    Raises ``WriteError`` if a file cannot be read: it may be undamaged.
    """
    for fault in _check_files(storage, directory, record, lambda nbytes: None):
        if fault.unreadable is not None:
            raise fault.unreadable
        yield fault


def _check_files(
    storage: ReadStorage, directory: str, record: RankRecord, on_bytes: Callable[[int], None]
) -> Iterator[Fault]:
    for entry in (record.objects, *record.extra_files):
        try:
            on_bytes(len(read_small_file(storage, f"{directory}/{entry.name}", entry)))
        except (IntegrityError, WriteError) as error:
            yield _fault(entry.name, error)
    for entry in record.files:
        try:
            yield from _check_tensor_file(storage, directory, entry, on_bytes)
        except (IntegrityError, WriteError) as error:
            yield _fault(entry.name, error)


def _fault(file: str, error: IntegrityError | WriteError) -> Fault:
    unreadable = (
        error if isinstance(error, WriteError) and error.errno not in NO_SUCH_FILE else None
    )
    return Fault(file, str(error), unreadable=unreadable)


def read_digests(storage: ReadStorage, directory: str, entry: FileRecord) -> bytes:
    """Return the digest list of a tensor file, verified against the record."""
    assert entry.digests is not None
    return read_small_file(storage, f"{directory}/{entry.digests.name}", entry.digests)


def read_header(source: InputFile, path: str, digests: bytes) -> TensorFile:
    """Verify a tensor file's header by its digests and parse it; may raise ``IntegrityError``."""
    length = header_nbytes(bytes(source.read_at(0, 8)), source.nbytes, path)
    header = bytes(source.read_at(0, length))
    blocks = digest_blocks(TensorFile(length, length, (), {}))
    for number, (offset, nbytes) in enumerate(blocks):
        expected = digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES]
        if digest(memoryview(header)[offset : offset + nbytes]) != expected:
            raise IntegrityError(f"{path}: the header does not match its digest (block {number})")
    return parse_tensor_file(header, path)


class Comparison:
    """Compares the bytes of a tensor file, passed in order, with the digests of its blocks."""

    def __init__(self, file: InputFile, path: str, entry: FileRecord, digests: bytes) -> None:
        """Verify header, length, ``entry`` and ``digests``; ``IntegrityError`` if they disagree."""
        self._blocks = digest_blocks(open_grid(file, entry, path, digests))
        self._digests, self._path = digests, path
        self._number = 0
        self._done = 0  # bytes of the current block
        self._hash = xxhash.xxh3_128()

    def add(self, data: memoryview) -> None:
        """Add the next bytes; ``IntegrityError`` if a block that ends in them does not match."""
        while data:
            offset, nbytes = self._blocks[self._number]
            part = data[: nbytes - self._done]
            data = data[len(part) :]
            self._done += len(part)
            self._hash.update(part)
            if self._done < nbytes:
                return
            at = self._number * DIGEST_NBYTES
            if self._hash.digest() != self._digests[at : at + DIGEST_NBYTES]:
                raise IntegrityError(
                    f"{self._path}: block {self._number} at byte {offset:,} does not match its "
                    "digest"
                )
            self._number, self._done = self._number + 1, 0
            self._hash.reset()


def open_grid(source: InputFile, entry: FileRecord, path: str, digests: bytes) -> TensorFile:
    """Return the tensors of a file, from its verified header.

    Returns a grid without tensors for an encrypted file.
    """
    if source.nbytes != entry.nbytes:
        raise IntegrityError(f"{path}: {source.nbytes:,} bytes instead of {entry.nbytes:,}")
    if entry.tags is not None:
        file = TensorFile(0, entry.nbytes, (), {})
        if entry.tags.nbytes != count_blocks(file) * DIGEST_NBYTES:  # a tag is as long as a digest
            raise IntegrityError(f"{path}: the lengths of the file and of its tags do not match")
    else:
        file = read_header(source, path, digests)
    if file.nbytes != entry.nbytes or len(digests) != count_blocks(file) * DIGEST_NBYTES:
        raise IntegrityError(
            f"{path}: header, record and digest list disagree about the file's length"
        )
    return file


def _check_tensor_file(
    storage: ReadStorage, directory: str, entry: FileRecord, on_bytes: Callable[[int], None]
) -> Iterator[Fault]:
    path = f"{directory}/{entry.name}"
    digests = read_digests(storage, directory, entry)
    if entry.tags is not None:
        on_bytes(len(read_small_file(storage, f"{directory}/{entry.tags.name}", entry.tags)))
    with storage.open(path) as source:
        file = open_grid(source, entry, path, digests)
        blocks = digest_blocks(file)
        batches = list(_batches(blocks))
        spans = (
            (blocks[first][0], sum(blocks[last]) - blocks[first][0]) for first, last in batches
        )
        for (first, last), data in zip(batches, source.read_each(spans), strict=True):
            start = blocks[first][0]
            for number in range(first, last + 1):
                offset, nbytes = blocks[number]
                block = data[offset - start : offset - start + nbytes]
                if digest(block) != digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES]:
                    yield Fault(
                        entry.name,
                        f"block {number} does not match its digest",
                        offset,
                        _at(file, offset, nbytes),
                    )
            on_bytes(len(data))


def _batches(blocks: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    first = 0
    for number in range(1, len(blocks) + 1):
        if number == len(blocks) or sum(blocks[number]) - blocks[first][0] > _READ_NBYTES:
            yield first, number - 1
            first = number


def _at(file: TensorFile, offset: int, nbytes: int) -> tuple[str, ...]:
    return tuple(
        entry.name
        for entry in file.entries
        if entry.offset < offset + nbytes and offset < entry.offset + entry.nbytes
    )
