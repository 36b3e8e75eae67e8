"""Verifies every byte of a checkpoint against its digests.

Used before a leftover is committed, and by ``sidesave.verify``. Faults are collected, not raised: the first flipped bit
does not tell whether the rest is good. A file that storage cannot read now (EIO, EMFILE, EACCES) is a fault, but no
verdict on its bytes: see :func:`check_record`.
"""

from __future__ import annotations

import errno
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
    parse_step_directory,
)
from sidesave.writer_daemon.format.names import is_extra_file_name
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
NO_SUCH_FILE: Final = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EFBIG)
"""What storage says of a file that is missing, or whose place something else has taken: that is damage."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: its file, the bytes of it, and the FQNs that lie there.

    ``unreadable`` is storage's error if it did not give the bytes: then nothing is known of them.
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
    """The rank record that a manifest lists; ``IntegrityError`` if it is missing or another one."""
    path = f"{directory}/{entry.name}"
    return RankRecord.from_bytes(read_small_file(storage, path, entry), path)


def read_manifest(storage: ReadStorage, directory: str) -> Manifest:
    """The manifest of a directory; ``IntegrityError`` if it is missing or damaged."""
    path = f"{directory}/{MANIFEST}"
    data = storage.read(path, MAX_JSON_NBYTES)
    if data is None:
        raise IntegrityError(f"{path}: there is no manifest")
    return Manifest.from_bytes(data, path)


def read_small_file(storage: ReadStorage, path: str, entry: FileRecord) -> bytes:
    """A file with one digest, verified; raises ``IntegrityError``."""
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
    """Every fault of a committed directory, files that the manifest does not list included.

    Args:
        storage: The run directory.
        directory: The name of the step's directory in it.
        on_bytes: Called with the number of bytes checked since its last call.
        on_files: Called with the names of the files that belong to it, as far as they are known.
    """
    try:
        manifest = read_manifest(storage, directory)
    except (IntegrityError, WriteError) as error:
        yield _fault(MANIFEST, error)
        return
    step = parse_step_directory(directory)
    if step is not None and step != manifest.step:
        yield Fault(MANIFEST, f"it is of step {manifest.step}, its directory is {directory}")
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
        known.update(part.name for file in (record.objects, *record.extra_files, *record.files) for part in file.parts)
    on_files(known)
    listed = storage.list_directory(directory) if storage.can_list else ()
    for name in sorted(set(listed) - known):
        if not any(_may_be_of(rank, name) for rank in unknown_ranks):  # what their records list is not known
            yield Fault(name, "the manifest does not list this file")


def _check_keys(storage: ReadStorage, path: str, session: str) -> Iterator[Fault]:
    try:
        data = storage.read(path, MAX_KEYS_NBYTES)
        if data is None:
            yield Fault(KEYS, "the file is missing, and without it nobody can read this checkpoint")
        elif Keys.from_bytes(data, path).session != session:
            yield Fault(KEYS, "it is of another session than the checkpoint")
    except (IntegrityError, WriteError) as error:
        yield _fault(KEYS, error)


def _may_be_of(rank: int, name: str) -> bool:
    return f".rank-{rank:05d}." in name or (rank == 0 and is_extra_file_name(name))


def check_record(storage: ReadStorage, directory: str, record: RankRecord) -> Iterator[Fault]:
    """Every fault in the files of one rank, for recovery.

    Raises ``WriteError`` if storage does not give the bytes: what cannot be read now may be whole.
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
    unreadable = error if isinstance(error, WriteError) and error.errno not in NO_SUCH_FILE else None
    return Fault(file, str(error), unreadable=unreadable)


def read_digests(storage: ReadStorage, directory: str, entry: FileRecord) -> bytes:
    """The digest list of a tensor file, verified by the record."""
    assert entry.digests is not None
    return read_small_file(storage, f"{directory}/{entry.digests.name}", entry.digests)


def read_header(source: InputFile, path: str, digests: bytes) -> TensorFile:
    """Verify a tensor file's header against its first digests, then parse it."""
    length = header_nbytes(bytes(source.read_at(0, 8)), source.nbytes, path)
    header = bytes(source.read_at(0, length))
    blocks = digest_blocks(TensorFile(length, length, (), {}))
    for number, (offset, nbytes) in enumerate(blocks):
        expected = digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES]
        if digest(memoryview(header)[offset : offset + nbytes]) != expected:
            raise IntegrityError(f"{path}: the header does not match its digest (block {number})")
    return parse_tensor_file(header, path)


class Comparison:
    """Compares the bytes of a tensor file, which come in order, with the digests of its blocks."""

    def __init__(self, file: InputFile, path: str, entry: FileRecord, digests: bytes) -> None:
        """Compare its header; ``IntegrityError`` where that, its length, ``entry`` and ``digests`` do not agree."""
        self._blocks = digest_blocks(open_grid(file, entry, path, digests))
        self._digests, self._path = digests, path
        self._number = 0
        self._done = 0
        """Of the current block."""
        self._hash = xxhash.xxh3_128()

    def add(self, data: memoryview) -> None:
        """Take the next bytes; ``IntegrityError`` where a block that ends in them does not match."""
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
                raise IntegrityError(f"{self._path}: block {self._number} at byte {offset:,} does not match its digest")
            self._number, self._done = self._number + 1, 0
            self._hash.reset()


def open_grid(source: InputFile, entry: FileRecord, path: str, digests: bytes) -> TensorFile:
    """The tensors of a file, by its verified header; of an encrypted one, whose grid needs none, there are none."""
    if source.nbytes != entry.nbytes:
        raise IntegrityError(f"{path}: {source.nbytes:,} bytes instead of {entry.nbytes:,}")
    if entry.tags is not None:
        file = TensorFile(0, entry.nbytes, (), {})
        if entry.tags.nbytes != count_blocks(file) * DIGEST_NBYTES:  # which a tag has as well
            raise IntegrityError(f"{path}: its length and that of its tags disagree")
    else:
        file = read_header(source, path, digests)
    if file.nbytes != entry.nbytes or len(digests) != count_blocks(file) * DIGEST_NBYTES:
        raise IntegrityError(f"{path}: header, record and digest list disagree about the file's length")
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
        spans = ((blocks[first][0], sum(blocks[last]) - blocks[first][0]) for first, last in batches)
        for (first, last), data in zip(batches, source.read_each(spans), strict=True):
            start = blocks[first][0]
            for number in range(first, last + 1):
                offset, nbytes = blocks[number]
                block = data[offset - start : offset - start + nbytes]
                if digest(block) != digests[number * DIGEST_NBYTES : (number + 1) * DIGEST_NBYTES]:
                    yield Fault(
                        entry.name, f"block {number} does not match its digest", offset, _at(file, offset, nbytes)
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
        entry.name for entry in file.entries if entry.offset < offset + nbytes and offset < entry.offset + entry.nbytes
    )
