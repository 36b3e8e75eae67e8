"""Reads a committed checkpoint of any number of ranks.

It returns the contents, and verified tensors or boxes of them. The files of a rank are opened when
something of that rank is read; if one cannot be opened, only reads of its contents fail. A tensor
or box whose bytes are contiguous is a view of the memory that they were read into, which lives as
long as a tensor in it. Any other is assembled from its cells.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

import torch

from sidesave.client import encryption
from sidesave.client.reading import block_file, block_io, regions
from sidesave.client.reading.block_file import BlockFile, RankFiles
from sidesave.client.reading.block_io import ReadRequest
from sidesave.client.reading.stored import OWN, StoredTensor, Wanted, own_name
from sidesave.client.reading.tensor_reads import CellRead, Gathering, TensorRead, WholeRead
from sidesave.client.runs import finding
from sidesave.errors import IntegrityError, InvalidArgumentError, SidesaveError, StateMismatchError
from sidesave.stager import signal_safe
from sidesave.stager.dtypes import DTYPES
from sidesave.stager.state.tensor_nodes import TensorRef
from sidesave.stager.state.treespec import TreeSpec
from sidesave.writer_daemon.commit.manifest_builder import assemble
from sidesave.writer_daemon.format import integrity
from sidesave.writer_daemon.format.layout import ELSEWHERE, Box, Layout
from sidesave.writer_daemon.format.manifest import (
    MANIFEST,
    MAX_JSON_NBYTES,
    FileRecord,
    Manifest,
    RankRecord,
)
from sidesave.writer_daemon.format.sealed_records import open_metadata, open_record
from sidesave.writer_daemon.format.tensor_file import TensorEntry
from sidesave.writer_daemon.sealing.cipher import SMALL_NBYTES
from sidesave.writer_daemon.storage import urls

_OPENING_THREADS: Final = 8


def _drop(memory: memoryview, *place: int) -> None:
    """A sink for bytes that are only verified."""


class CheckpointReader:
    """A checkpoint opened for reading, as one rank sees it.

    Its tensors have names: the FQN, or ``<FQN>@rank-00003`` if it belongs to rank 3 alone; rank 0's
    have no suffix.

    Attributes:
        path: The directory.
        rank: The rank that reads it.
        manifest: The contents of the checkpoint.
        treespec: The state without its tensors: that of ``rank``, or of rank 0 if another number of
            ranks saved it, with items that only other ranks have.
        size: The number of ranks that load it; None is the number that saved it.
        nbytes_read: Bytes that have been read so far, besides the manifest.
    """

    def __init__(self, path: str, rank: int = 0, size: int | None = None) -> None:
        """Open the directory ``path`` itself, reading and checking its manifest and treespecs.

        ``rank`` is one of ``size`` that load it; None is the number of ranks that saved it.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            IntegrityError: A file is missing or does not match its digest.
            FormatVersionError: It was written in a newer format.
            WriteError: Storage does not give the bytes (EIO, EACCES); they may be whole.
            HostMemoryError: There is not enough memory for its lists.
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
        self._files: dict[int, RankFiles] = {}
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

    # What there is --------------------------------------------------------------------------------

    @property
    def location(self) -> str:
        """The directory of its files: :attr:`path`, or where the log of a run in a store has it."""
        return self._storage.location_of(self._name)

    @property
    def resized(self) -> bool:
        """Whether another number of ranks loads it than saved it."""
        return self.size not in (None, self.manifest.world_size)

    @property
    def has_differing(self) -> bool:
        """Whether there are tensors that differ between ranks."""
        return bool(self.manifest.diverged)

    def differing(self, fqn: str) -> tuple[int, ...]:
        """Return the ranks that saved a tensor, if it differs and none of them is this rank."""
        ranks = self.manifest.diverged.get(fqn, ())
        return ranks if self.resized or self.rank not in ranks else ()

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
            if self._keys is not None:
                entry = self.record(0).extra_files[self._extra_names.index(entry.name)]
            return self._read_sealed(entry, 0)

    def _read_sealed(self, entry: FileRecord, rank: int, name: str = "") -> bytes:
        """A small file, verified, and decrypted if it is encrypted."""
        data = integrity.read_small_file(self._storage, f"{self._name}/{entry.name}", entry)
        if self._keys is None:
            return data
        key = self._keys.save_key(self.manifest.sequence)
        return key.file(rank, name or entry.name).open(data, f"{self.path}/{entry.name}")

    def _unlock(self) -> None:
        """Open the records of all ranks, which hold the contents of an encrypted manifest."""
        self._keys = encryption.open_keys(self._storage, self._name, self.manifest.session)
        ranks = range(self.manifest.world_size)
        with ThreadPoolExecutor(_OPENING_THREADS, "sidesave-open") as pool:
            records = list((pool.map if len(ranks) > 1 else map)(self._read_record, ranks))
        self._records.update(enumerate(records))
        self.nbytes_read += sum(entry.nbytes for entry in self.manifest.records)
        path = f"{self.path}/{MANIFEST}"
        key = self._keys.save_key(self.manifest.sequence)
        metadata = open_metadata(self.manifest.metadata, key, path)
        whole = assemble(records, self.path, opened=True)
        self.manifest = replace(whole, records=self.manifest.records, metadata=metadata)

    def open_all(self) -> None:
        """Open the files of all ranks; one that cannot be opened fails when it is read."""
        self._open(range(self.manifest.world_size))

    def names(self) -> list[str]:
        """Return all tensors, shared ones first; opens all files, raises like the constructor."""
        self.open_all()
        for error in itertools.chain.from_iterable(
            files.errors.values() for files in self._files.values()
        ):
            raise error
        table, diverged = self.manifest.table, self.manifest.diverged
        fqns = list(table.tensors)
        for rank in range(self.manifest.world_size):
            for key in self.record(rank).part.own.tensors:
                if key not in table.tensors:
                    fqns.append(key)
                elif key in diverged and table.layout(key).owners != (rank,):
                    fqns.append(own_name(key, rank))
        return fqns

    def name_of(self, ref: TensorRef) -> str:
        """The name of a tensor that :attr:`treespec` refers to.

        If a tensor was compared and saved by each rank because they differed, it is this rank's;
        for another number of ranks, or if this rank has none, that of the first rank with one.
        """
        if ref.rank:
            name = own_name(ref.fqn, ref.rank)
            if name in self.record(ref.rank).part.own.tensors:
                return name
        alone = 0 < self.rank < self.manifest.world_size and not self.resized
        differs = alone and ref.fqn in self.record(self.rank).part.compared
        return own_name(ref.fqn, self.rank) if differs else ref.fqn

    def entry(self, name: str) -> StoredTensor:
        """A tensor's dtype, global shape and layout; ``IntegrityError`` if it is missing."""
        if name not in self._stored:
            self._stored[name] = self._look_up(name)
        return self._stored[name]

    def _look_up(self, name: str) -> StoredTensor:
        table, key, layout = self.manifest.table, name, None
        if name in table.tensors:
            layout = table.layout(name)
        else:
            match = OWN.fullmatch(name)
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
        treespec, *others = (
            self.read_treespec(rank) for rank in dict.fromkeys((own, *self.manifest.treespecs))
        )
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

    # Ranks ----------------------------------------------------------------------------------------

    @functools.cached_property
    def _by_layout(self) -> list[tuple[frozenset[int], list[str]]]:
        """The owners, and the FQNs, of each layout of the manifest."""
        by_layout = [
            (frozenset(layout.owners), list[str]()) for layout in self.manifest.table.layouts
        ]
        for fqn, tensor in self.manifest.table.tensors.items():
            by_layout[tensor.layout][1].append(fqn)
        return by_layout

    def _open(self, ranks: Iterable[int]) -> None:
        """Read records, digest lists and headers of these ranks, unless that has been done."""
        missing = [rank for rank in dict.fromkeys(ranks) if rank not in self._files]
        if not missing:
            return

        def read(rank: int) -> RankRecord:
            return self._records.get(rank) or self._read_record(rank)

        def open_file(rank: int, file: FileRecord) -> BlockFile | SidesaveError:
            cipher = None
            if self._keys is not None:
                sequence, number = file.origin
                cipher = self._keys.save_key(sequence).file(rank, str(number))
            return block_file.try_to_open(self._storage, self._name, file, cipher)

        def read_all(over: Any) -> list[tuple[RankRecord, list[BlockFile | SidesaveError]]]:
            records: list[RankRecord] = list(over(read, missing))
            ranks = [record.rank for record in records for _ in record.files]
            files = over(open_file, ranks, [file for record in records for file in record.files])
            return [(record, [*itertools.islice(files, len(record.files))]) for record in records]

        def read_in_threads() -> list[tuple[RankRecord, list[BlockFile | SidesaveError]]]:
            with ThreadPoolExecutor(_OPENING_THREADS, "sidesave-open") as pool:
                return read_all(pool.map)

        with block_file.reading(self.path):
            if len(missing) == 1 and not urls.is_url(self.path):
                pairs = read_all(map)
            else:
                pairs = signal_safe.run(read_in_threads, "sidesave-open", stop=lambda: None)
        for rank, (record, opened) in zip(missing, pairs, strict=True):
            files = RankFiles(zip(record.files, opened, strict=True))
            self.nbytes_read += (
                self.manifest.records[rank].nbytes if rank not in self._records else 0
            )
            self.nbytes_read += files.nbytes_of_tables
            self._records[rank] = record
            listed = itertools.chain(
                record.part.own.tensors,
                *(fqns for owners, fqns in self._by_layout if rank in owners),
            )
            if odd := sorted(files.compare(set(listed))):
                raise IntegrityError(
                    f"{self.path}: the manifest and the files of rank {rank} disagree about "
                    f"{odd[:5]}"
                )
            self._files[rank] = files

    def _find(
        self, rank: int, stored: StoredTensor, shape: tuple[int, ...]
    ) -> tuple[BlockFile, TensorEntry]:
        """The place of a rank's cell of this shape; raises the error of a file that is damaged."""
        # Another file may hold a share of it too: a tensor that ranks compare is written in any
        # case.
        files = self._files[rank]
        for file, entry in files.entries.get(stored.key, ()):
            if (DTYPES[entry.dtype], entry.shape) == (stored.dtype, shape):
                return file, entry
        info = (
            self.record(rank).part.own.tensors.get(stored.key)
            or self.manifest.table.tensors[stored.key]
        )
        raise files.errors.get(info.container) or IntegrityError(
            f"{self.path}: the files of rank {rank} do not hold the part of {stored.key} that is "
            "listed as theirs"
        )

    # Reading --------------------------------------------------------------------------------------

    def read(self, names: Iterable[str], *, verify: bool = True) -> dict[str, torch.Tensor]:
        """Read whole tensors into fresh host memory; see :meth:`read_boxes`."""
        tensors = self.read_boxes(((name, None) for name in names), verify=verify)
        return {name: tensor for (name, _), tensor in tensors.items()}

    def read_boxes(
        self, wanted: Iterable[Wanted], *, verify: bool = True
    ) -> dict[Wanted, torch.Tensor]:
        """Read boxes of tensors into fresh host memory; blocking, at the medium's speed.

        Reads little more than requested: of each cell the blocks of 256 KiB that hold some of it.

        Args:
            wanted: Tensors by name, each with a box of it, or None for all.
            verify: Compare every block with its digest.

        Raises:
            IntegrityError: A block does not match; the message names file, block and FQNs.
            StateMismatchError: Some of it is on the disk of another node.
            HostMemoryError: There is not enough memory.
            WriteError: Storage does not give the bytes.
        """
        plans, in_one_place = dict[Wanted, Any](), dict[Wanted, StoredTensor]()
        for each in wanted:
            stored = None if each[1] else self.entry(each[0])
            if stored is not None and stored.is_in_one_place:
                in_one_place[each] = stored
            else:
                plans[each] = self._plan(*each)
        self._open(owner for _, _, cells in plans.values() for owner, _ in cells)
        self._open(stored.layout.owners[0] for stored in in_one_place.values())
        wholes = {
            each: WholeRead(
                stored.dtype, *self._find(stored.layout.owners[0], stored, stored.shape)
            )
            for each, stored in in_one_place.items()
        }
        boxes = {
            each: TensorRead(
                stored.dtype,
                box[1],
                [
                    CellRead.of(*self._find(owner, stored, cell[1]), cell, box)
                    for owner, cell in cells
                ],
            )
            for each, (stored, box, cells) in plans.items()
        }
        gathering = Gathering(boxes, wholes, f"loading {self.path}")
        self.nbytes_read += block_io.read_blocks(self._access, gathering.requests, verify=verify)
        return gathering.tensors()

    def check(self, names: Iterable[str]) -> None:
        """Compare tensors with their digests, in little memory; raises like :meth:`read_boxes`."""
        ranges: dict[BlockFile, list[tuple[int, int]]] = {}
        for name in names:
            for _, file, entry in self.cells(name):
                ranges.setdefault(file, []).append(
                    file.blocks(entry.offset, entry.offset + entry.nbytes)
                )
        requests = [
            ReadRequest(file, *blocks, sink=_drop)
            for file, each in ranges.items()
            for blocks in block_io.join(each)
        ]
        self.nbytes_read += block_io.read_blocks(self._access, requests, verify=True)

    def cells(self, name: str) -> Iterator[tuple[Box, BlockFile, TensorEntry]]:
        """The cells of a tensor, and the places where they are stored."""
        stored, _, cells = self._plan(name, None)
        self._open(owner for owner, _ in cells)
        return ((cell, *self._find(owner, stored, cell[1])) for owner, cell in cells)

    def _plan(self, name: str, box: Box | None) -> tuple[StoredTensor, Box, list[tuple[int, Box]]]:
        """A tensor, the box to read, and the ranks that wrote its cells."""
        stored = self.entry(name)
        if box is None:
            box = regions.whole(stored.shape)
        elif not regions.contains(stored.shape, box):
            raise InvalidArgumentError(
                f"{name} has shape {list(stored.shape)}: there is no box {box} in it"
            )
        cells = list(regions.cells(stored.layout, stored.shape, box)) if math.prod(box[1]) else []
        if any(owner == ELSEWHERE for owner, _ in cells):
            raise StateMismatchError(
                f"{self.path}: part of {name} is on another node, as each node keeps its own part; "
                "load with the same ranks on the same nodes"
            )
        return stored, box, cells
