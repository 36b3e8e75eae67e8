"""Reads a committed checkpoint of any number of ranks: what it holds, and verified tensors or boxes of them.

A file is opened only when something in it is wanted. A tensor or box whose bytes are contiguous is a view of the memory
that they were read into, which lives as long as a tensor in it. Any other is put together from its cells.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch

from sidesave.client import encryption
from sidesave.client.reading import block_file, block_io, regions
from sidesave.client.reading.block_file import BlockFile
from sidesave.client.reading.block_io import ReadRequest
from sidesave.client.reading.tensor_reads import Gathering, Part, TensorRead
from sidesave.client.runs import finding
from sidesave.errors import IntegrityError, InvalidArgumentError, StateMismatchError
from sidesave.stager import signal_safe
from sidesave.stager.state.dtypes import DTYPES
from sidesave.stager.state.treespec import TensorRef, TreeSpec
from sidesave.writer_daemon.commit.manifest_builder import assemble
from sidesave.writer_daemon.format import integrity
from sidesave.writer_daemon.format.layout import CHANGED, ELSEWHERE, ROWS, Box, Layout
from sidesave.writer_daemon.format.manifest import MANIFEST, MAX_JSON_NBYTES, FileRecord, Manifest, RankRecord
from sidesave.writer_daemon.format.sealed_records import open_metadata, open_record
from sidesave.writer_daemon.format.tensor_file import DIGEST_NBYTES, TensorEntry
from sidesave.writer_daemon.sealing.cipher import SMALL_NBYTES
from sidesave.writer_daemon.storage import urls

Wanted = tuple[str, Box | None]
"""A tensor by its name, and a box of it; None is all of it."""

_OWN = re.compile(r"(.+)@rank-(\d{5,})", re.DOTALL)
_OPENING_THREADS: Final = 8


def fqn_of(name: str) -> str:
    """The FQN of a tensor by its name, which tells the rank where it belongs to one alone."""
    match = _OWN.fullmatch(name)
    return match[1] if match else name


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it is stored: its key in files, and the ranks that hold its cells.

    What safetensors has no dtype for is stored as another one, complex numbers with a last dimension of 2: see
    :mod:`sidesave.stager.state.dtypes`.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Layout

    @property
    def nbytes(self) -> int:
        """Bytes of all its cells."""
        return math.prod(self.shape) * self.dtype.itemsize


class Reader(Protocol):
    """The interface that loading reads checkpoints by; :class:`CheckpointReader` documents it."""

    path: str
    rank: int
    treespec: TreeSpec
    nbytes_read: int

    def differing(self, fqn: str) -> tuple[int, ...]:
        """The ranks that have saved a tensor, if it differs between them and none of theirs is this rank's."""
        ...

    def name_of(self, ref: TensorRef) -> str:
        """The name of a tensor that :attr:`treespec` refers to."""
        ...

    def entry(self, name: str) -> StoredTensor:
        """Stored dtype, global shape and size of a tensor."""
        ...

    def read_boxes(self, wanted: Iterable[Wanted], *, verify: bool = True) -> dict[Wanted, torch.Tensor]:
        """Read boxes of tensors into fresh host memory."""
        ...


def _drop(memory: memoryview, *place: int) -> None:
    """A sink for bytes that are only verified."""


class CheckpointReader:
    """A checkpoint opened for reading, as one rank sees it.

    Its tensors have names: the FQN, and ``<FQN>@rank-00003`` for one that belongs to rank 3 alone; rank 0's go without.

    Attributes:
        path: The directory.
        rank: Whose view it is.
        manifest: What the checkpoint holds.
        treespec: The state without its tensors: that of ``rank``, or of rank 0 where another number of ranks has saved
            it, completed by what only other ranks have.
        size: How many ranks load it; None is as many as have saved it.
        nbytes_read: Bytes that have been read so far, besides the manifest.
    """

    def __init__(self, path: str, rank: int = 0, size: int | None = None) -> None:
        """Open the directory ``path`` itself, reading and checking its manifest and treespecs.

        ``rank`` is one of ``size`` that load it; None is as many as have saved it.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            IntegrityError: A file is missing or does not match its digest.
            FormatVersionError: It was written in a newer format.
            WriteError: Storage does not give the bytes (EIO, EACCES); they may be whole.
            HostMemoryError: There is not enough memory for what it lists.
        """
        self.path = path = finding.place_of(path)
        parent, self._name = urls.parent_of(path)
        if not urls.is_url(path) and not os.path.lexists(os.path.join(path, MANIFEST)):
            raise finding.not_found(path)
        self.rank = rank
        self.size = size
        self.nbytes_read = 0
        self._storage = urls.open_storage(parent)
        self._access = block_io.Access.of(self._storage, self._name)
        self._records: dict[int, RankRecord] = {}
        self._entries: dict[int, dict[str, list[tuple[BlockFile, TensorEntry]]]] = {}
        self._stored: dict[str, StoredTensor] = {}
        self._keys: encryption.Opened | None = None
        self._extra_names: tuple[str, ...] = ()
        try:
            with block_file.reading(path):
                self._storage.hold(self._name, MANIFEST)
                data = self._storage.read(f"{self._name}/{MANIFEST}", MAX_JSON_NBYTES)
                if data is None:
                    raise finding.not_found(path)
                self.manifest: Manifest = Manifest.from_bytes(data, f"{self._name}/{MANIFEST}")
                if self.manifest.cipher:
                    self._unlock()
                self.treespec: TreeSpec = self._read_treespecs()
        except BaseException:  # an interrupt leaves no descriptor either
            self._storage.close()
            raise

    def close(self) -> None:
        """Release the directory; tensors that were read stay valid. Idempotent."""
        self._storage.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What there is ---------------------------------------------------------------------------------------------

    @property
    def location(self) -> str:
        """Where its files lie: :attr:`path`, or where the log of a run in a store says that this leads."""
        return self._storage.location_of(self._name)

    @property
    def resized(self) -> bool:
        """Whether another number of ranks loads it than saved it."""
        return self.size not in (None, self.manifest.world_size)

    def differing(self, fqn: str) -> tuple[int, ...]:
        """The ranks that saved a tensor, if it differs between them and none of them is this rank."""
        ranks = self.manifest.diverged.get(fqn, ())
        return ranks if self.resized or self.rank not in ranks else ()

    def differences(self, wanted: Callable[[str], bool]) -> dict[str, bool]:
        """FQNs of per-rank state that is not the same on all ranks, and whether they are plain numbers.

        Tensors in :attr:`differing` are not among them. Reads all that is ``wanted`` of all ranks.
        """
        table, first = self.manifest.table.tensors, self.read_treespec(0)
        own = [
            fqn
            for fqn, info in self.record(0).part.own.tensors.items()
            if fqn not in table and not info.container.endswith((ROWS, CHANGED)) and wanted(fqn)
        ]
        differing: dict[str, bool] = {}
        for rank in range(1, self.manifest.world_size):
            for fqn, is_number in first.differences(self.read_treespec(rank), table.__contains__):
                if wanted(fqn):
                    differing[fqn] = is_number and differing.get(fqn, True)
            others = self.record(rank).part.own.tensors
            for fqn in own:
                name = f"{fqn}@rank-{rank:05d}"
                if fqn not in differing and name in others and not self._are_equal(fqn, name):
                    differing[fqn] = False
        return differing

    def _are_equal(self, *names: str) -> bool:
        one, other = (self.entry(name) for name in names)
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        first, second = (tensor.reshape(-1).view(torch.uint8) for tensor in self.read(names).values())
        return torch.equal(first, second)

    def record(self, rank: int) -> RankRecord:
        """The record of a rank; raises like the constructor."""
        if rank not in self._records:
            with block_file.reading(self.path):
                self._records[rank] = self._read_record(rank)
            self.nbytes_read += self.manifest.records[rank].nbytes
        return self._records[rank]

    def extra_files(self) -> list[FileRecord]:
        """The files beside the tensors, by their true names and lengths."""
        files = self.record(0).extra_files
        if self._keys is None:
            return list(files)
        pairs = zip(files, self._extra_names, strict=True)
        return [FileRecord(name, file.nbytes - SMALL_NBYTES, file.xxh3_128) for file, name in pairs]

    def read_extra_file(self, entry: FileRecord) -> bytes:
        """The content of one of :meth:`extra_files`, verified; raises like the constructor."""
        with block_file.reading(self.path):
            if self._keys is None:
                return integrity.read_small_file(self._storage, f"{self._name}/{entry.name}", entry)
            return self._read_sealed(self.record(0).extra_files[self._extra_names.index(entry.name)], 0)

    def _read_sealed(self, entry: FileRecord, rank: int, name: str = "") -> bytes:
        """A small file, verified and decrypted."""
        data, path = integrity.read_small_file(self._storage, f"{self._name}/{entry.name}", entry), self.path
        if self._keys is None:
            return data
        key = self._keys.save_key(self.manifest.sequence)
        return key.file(rank, name or entry.name).open(data, f"{path}/{entry.name}")

    def _unlock(self) -> None:
        """Open the records of all ranks, which say together what the manifest of an encrypted checkpoint does not."""
        self._keys = encryption.open_keys(self._storage, self._name, self.manifest.session)
        ranks = range(self.manifest.world_size)
        with ThreadPoolExecutor(_OPENING_THREADS, "sidesave-open") as pool:
            records = list(pool.map(self._read_record, ranks) if len(ranks) > 1 else map(self._read_record, ranks))
        self._records.update(enumerate(records))
        self.nbytes_read += sum(entry.nbytes for entry in self.manifest.records)
        path = f"{self.path}/{MANIFEST}"
        key = self._keys.save_key(self.manifest.sequence)
        metadata = open_metadata(self.manifest.metadata, key, path)
        whole = assemble(records, self.path, opened=True)
        self.manifest = replace(whole, records=self.manifest.records, metadata=metadata)

    def open_all(self) -> None:
        """Open the files of all ranks, several at a time; raises like the constructor."""
        self._open(range(self.manifest.world_size))

    def names(self) -> list[str]:
        """All tensors, shared ones first. Opens and compares all files."""
        self._open(range(self.manifest.world_size))
        table, diverged = self.manifest.table, self.manifest.diverged
        fqns = list(table.tensors)
        for rank in range(self.manifest.world_size):
            for key in self.record(rank).part.own.tensors:
                if key not in table.tensors:
                    fqns.append(key)
                elif key in diverged and table.layout(key).owners != (rank,):
                    fqns.append(f"{key}@rank-{rank:05d}")
        return fqns

    def name_of(self, ref: TensorRef) -> str:
        """The name of a tensor that :attr:`treespec` refers to.

        Of one that was compared and saved by each rank, because not all held the same, it is this rank's; of another
        number of ranks, and where it has none, the first one's which has.
        """
        if ref.rank:
            name = f"{ref.fqn}@rank-{ref.rank:05d}"
            if name in self.record(ref.rank).part.own.tensors:
                return name
        alone = 0 < self.rank < self.manifest.world_size and not self.resized
        differs = alone and ref.fqn in self.record(self.rank).part.compared
        return f"{ref.fqn}@rank-{self.rank:05d}" if differs else ref.fqn

    def entry(self, name: str) -> StoredTensor:
        """Stored dtype, global shape and size of a tensor; ``IntegrityError`` if there is no such tensor."""
        if name not in self._stored:
            self._stored[name] = self._look_up(name)
        return self._stored[name]

    def _look_up(self, name: str) -> StoredTensor:
        table, key, layout = self.manifest.table, name, None
        if name in table.tensors:
            layout = table.layout(name)
        else:
            match = _OWN.fullmatch(name)
            rank = int(match[2]) if match else 0
            if rank < self.manifest.world_size:
                table, layout = self.record(rank).part.own, Layout((rank,))
                key = match[1] if match and name not in table.tensors else name
        if layout is None or key not in table.tensors:
            raise IntegrityError(f"{self.path}: the tensor {name} is missing")
        info = table.tensors[key]
        problem = block_file.shape_problem(info.dtype, info.shape)
        if problem:
            raise IntegrityError(f"{self.path}: {name} {problem}")
        return StoredTensor(key, DTYPES[info.dtype], info.shape, layout)

    def _read_record(self, rank: int) -> RankRecord:
        entry = self.manifest.records[rank]
        block_file.require_room(entry, self.path)
        record = integrity.read_record(self._storage, self._name, entry)
        path = f"{self.path}/{entry.name}"
        self.manifest.check_record(rank, record, path)
        if self._keys is None:
            return record
        opened = open_record(record, self._keys.save_key(self.manifest.sequence), path)
        self._extra_names = opened.extra_names if rank == 0 else self._extra_names
        return opened.record

    def _read_treespecs(self) -> TreeSpec:
        has_own = self.rank < self.manifest.world_size and not self.resized
        own = self.rank if has_own else 0
        treespec, *others = (self.read_treespec(rank) for rank in dict.fromkeys((own, *self.manifest.treespecs)))
        for other in others:
            treespec.add(other, self.manifest.table.tensors.__contains__, optimizers=not has_own)
        return treespec

    def read_treespec(self, rank: int) -> TreeSpec:
        """The treespec of one rank; raises like the constructor."""
        objects = self.record(rank).objects
        block_file.require_room(objects, self.path)
        with block_file.reading(self.path):
            data = self._read_sealed(objects, rank, "objects")
        self.nbytes_read += objects.nbytes
        return TreeSpec(data, f"{self.path}/{objects.name}", rank)

    # Ranks -----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _by_layout(self) -> list[tuple[frozenset[int], list[str]]]:
        """For each layout of the manifest, its owners and the FQNs that have it."""
        by_layout = [(frozenset(layout.owners), list[str]()) for layout in self.manifest.table.layouts]
        for fqn, tensor in self.manifest.table.tensors.items():
            by_layout[tensor.layout][1].append(fqn)
        return by_layout

    def _open(self, ranks: Iterable[int]) -> None:
        """Read records, digest lists and headers of these ranks, unless that has been done."""
        missing = [rank for rank in dict.fromkeys(ranks) if rank not in self._entries]
        if not missing:
            return

        def read(rank: int) -> RankRecord:
            return self._records.get(rank) or self._read_record(rank)

        def open_file(rank: int, file: FileRecord) -> BlockFile:
            cipher = None
            if self._keys is not None:
                sequence, number = file.origin
                cipher = self._keys.save_key(sequence).file(rank, str(number))
            return block_file.open_file(self._storage, self._name, file, cipher=cipher)

        def read_all() -> list[tuple[RankRecord, list[BlockFile]]]:
            with ThreadPoolExecutor(_OPENING_THREADS, "sidesave-open") as pool:
                records = list(pool.map(read, missing))
                files = pool.map(
                    open_file,
                    [record.rank for record in records for _ in record.files],
                    [file for record in records for file in record.files],
                )
                return [(record, [*itertools.islice(files, len(record.files))]) for record in records]

        with block_file.reading(self.path):
            if len(missing) == 1 and not urls.is_url(self.path):
                pairs = [(record := read(missing[0]), [open_file(record.rank, each) for each in record.files])]
            else:
                pairs = signal_safe.run(read_all, "sidesave-open", stop=lambda: None)
        for rank, (record, files) in zip(missing, pairs, strict=True):
            self.nbytes_read += self.manifest.records[rank].nbytes if rank not in self._records else 0
            self.nbytes_read += sum(file.nbytes_of_tables for file in files)
            self._records[rank] = record
            entries: dict[str, list[tuple[BlockFile, TensorEntry]]] = {}
            for file in files:
                for entry in file.layout.entries:
                    entries.setdefault(entry.name, []).append((file, entry))
            listed = itertools.chain(
                record.part.own.tensors, *(fqns for owners, fqns in self._by_layout if rank in owners)
            )
            if odd := sorted(entries.keys() ^ set(listed)):
                raise IntegrityError(f"{self.path}: the manifest and the files of rank {rank} disagree about {odd[:5]}")
            self._entries[rank] = entries

    def _find(self, rank: int, stored: StoredTensor, cell: Box) -> tuple[BlockFile, TensorEntry]:
        """The place where a rank stored a cell."""
        # There may be a share of it too, in another file: what is compared is written in any case.
        for file, entry in self._entries[rank][stored.key]:
            if (DTYPES[entry.dtype], entry.shape) == (stored.dtype, cell[1]):
                return file, entry
        raise IntegrityError(
            f"{self.path}: the files of rank {rank} do not hold the part of {stored.key} that is listed as theirs"
        )

    # Reading ---------------------------------------------------------------------------------------------------

    def read(self, names: Iterable[str], *, verify: bool = True) -> dict[str, torch.Tensor]:
        """Read whole tensors into fresh host memory; see :meth:`read_boxes`."""
        tensors = self.read_boxes(((name, None) for name in names), verify=verify)
        return {name: tensor for (name, _), tensor in tensors.items()}

    def read_boxes(self, wanted: Iterable[Wanted], *, verify: bool = True) -> dict[Wanted, torch.Tensor]:
        """Read boxes of tensors into fresh host memory; blocking, at the medium's speed.

        What is read is little more than what is wanted: of each cell the blocks of 256 KiB that hold some of it.

        Args:
            wanted: Tensors by name, each with a box of it, or None for all.
            verify: Compare every block with its digest.

        Raises:
            IntegrityError: A block does not match; the message names file, block and FQNs.
            StateMismatchError: Some of it is on the disk of another node.
            HostMemoryError: There is not enough memory.
            WriteError: Storage does not give the bytes.
        """
        plans = {each: self._plan(*each) for each in wanted}
        self._open(owner for _, _, cells in plans.values() for owner, _ in cells)
        boxes = [
            TensorRead(stored.dtype, box[1], [self._part(stored, box, *cell) for cell in cells])
            for stored, box, cells in plans.values()
        ]
        gathering = Gathering(boxes, f"loading {self.path}")
        self.nbytes_read += block_io.read_blocks(self._access, gathering.requests, verify=verify)
        return dict(zip(plans, gathering.tensors(), strict=True))

    def fingerprint(self, name: str) -> list[tuple[Box, int, bytes]]:
        """A key that tensors of one dtype and shape share only if their bytes are equal; equal ones may differ in it.

        It is made of stored digests, and says something of the bytes when :meth:`check` has read them.
        """
        parts: list[tuple[Box, int, bytes]] = []
        for cell, file, entry in self._cells(name):
            first, last = file.blocks(entry.offset, entry.offset + entry.nbytes)
            digests = file.digests[first * DIGEST_NBYTES : (last + 1) * DIGEST_NBYTES]
            parts.append((cell, entry.offset - file.borders[first], digests))
        return parts

    def check(self, names: Iterable[str]) -> None:
        """Read tensors and compare them with their digests, in little memory; raises like :meth:`read_boxes`."""
        ranges: dict[BlockFile, list[tuple[int, int]]] = {}
        for name in names:
            for _, file, entry in self._cells(name):
                ranges.setdefault(file, []).append(file.blocks(entry.offset, entry.offset + entry.nbytes))
        requests = [
            ReadRequest(file, *blocks, sink=_drop) for file, each in ranges.items() for blocks in block_io.join(each)
        ]
        self.nbytes_read += block_io.read_blocks(self._access, requests, verify=True)

    def _cells(self, name: str) -> Iterator[tuple[Box, BlockFile, TensorEntry]]:
        """The cells of a tensor, and their places."""
        stored, _, cells = self._plan(name, None)
        self._open(owner for owner, _ in cells)
        return ((cell, *self._find(owner, stored, cell)) for owner, cell in cells)

    def _plan(self, name: str, box: Box | None) -> tuple[StoredTensor, Box, list[tuple[int, Box]]]:
        """A tensor, the box to read, and the ranks that wrote its cells."""
        stored = self.entry(name)
        if box is None:
            box = regions.whole(stored.shape)
        elif not regions.contains(stored.shape, box):
            raise InvalidArgumentError(f"{name} has shape {list(stored.shape)}: there is no box {box} in it")
        cells = list(regions.cells(stored.layout, stored.shape, box)) if math.prod(box[1]) else []
        if any(owner == ELSEWHERE for owner, _ in cells):
            raise StateMismatchError(
                f"{self.path}: what is wanted of {name} is on another node, each of which keeps its own part; "
                "load with the same ranks on the same nodes"
            )
        return stored, box, cells

    def _part(self, stored: StoredTensor, box: Box, owner: int, cell: Box) -> Part:
        file, entry = self._find(owner, stored, cell)
        if box == cell:
            within = regions.whole(cell[1])
            return Part(file, entry, within, within[0])
        common = regions.intersect(cell, box)
        assert common is not None
        return Part(file, entry, regions.within(common, cell[0]), regions.within(common, box[0])[0])
