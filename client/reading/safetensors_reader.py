"""Reads plain safetensors weights, as Hugging Face's tools write them: a file or a directory.

It shows them as a checkpoint of one item. There are no digests. Checked are headers, their
agreement with the index, and file sizes. A file is opened when a tensor in it is wanted, and no
code from the files is run.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import stat
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, cast

import msgpack
import torch

from sidesave.client.messages import few
from sidesave.client.reading import block_file, block_io, regions
from sidesave.client.reading.block_file import BlockFile
from sidesave.client.reading.block_io import Access
from sidesave.client.reading.stored import StoredTensor, Wanted
from sidesave.client.reading.tensor_reads import CellRead, Gathering, TensorRead
from sidesave.client.runs.finding import INDEX, WEIGHTS
from sidesave.errors import IntegrityError, InvalidArgumentError, UnsupportedValueError
from sidesave.stager.dtypes import DTYPES
from sidesave.stager.memory import host_memory
from sidesave.stager.state.tags import Tag
from sidesave.stager.state.tensor_nodes import TensorRef
from sidesave.stager.state.treespec import TreeSpec
from sidesave.writer_daemon.format.layout import Layout
from sidesave.writer_daemon.format.tensor_file import (
    BLOCK_NBYTES,
    MAX_HEADER_NBYTES,
    TensorEntry,
    TensorFile,
    header_nbytes,
    parse_tensor_file,
)
from sidesave.writer_daemon.storage import Descriptor
from sidesave.writer_daemon.storage.sealed_json import load_json

logger = logging.getLogger(__name__)

_WHOLE: Final = "model.safetensors"
_MAX_NAME_NBYTES: Final = 255
_MAX_NBYTES: Final = MAX_HEADER_NBYTES + 8
"""Limit for a header with its length, and for an index."""
_LARGE_NBYTES: Final = 1 << 20
_NBYTES_PER_BYTE: Final = 64
"""Memory that a byte of JSON may need once it is parsed; checked before a large header is read."""


@dataclass(frozen=True, slots=True, eq=False)
class _File:
    """A file whose header has been checked."""

    path: str
    identity: tuple[int, int, int]
    header_nbytes: int
    entries: Mapping[str, TensorEntry]


@dataclass(slots=True)
class _Unaligned(TensorRead):
    """A box at an odd address in the file, which must be aligned in memory."""

    @property
    def stays(self) -> bool:
        """It never does."""
        return False


class SafetensorsReader:
    """Plain safetensors weights, opened for reading.

    See :class:`sidesave.client.reading.stored.Reader`.

    Attributes:
        path: The file or directory.
        rank: The rank that reads it, which makes no difference.
        treespec: One item with all tensors by their names.
        nbytes_read: Bytes that have been read so far.
    """

    def __init__(self, path: str, item: str, rank: int = 0) -> None:
        """Find the files of ``path``, and the names in them, which get ``item`` as a prefix.

        Raises:
            IntegrityError: A file is missing or malformed.
            InvalidArgumentError: It is not clear which files of a directory to read, or two have
                the same name.
            WriteError: Storage does not give the bytes.
            HostMemoryError: There is not enough memory for a header's list.
        """
        self.path = path
        self.rank = rank
        self.nbytes_read = 0
        self._files: dict[str, _File] = {}
        self._listed: dict[str, str] = {}  # by an index
        self._prefix = f"{item}."
        self._places = self._survey()
        nodes = {key: [Tag.TENSOR, self._prefix + key] for key in self._places}
        self.treespec = TreeSpec(cast("bytes", msgpack.packb({item: [Tag.DICT, nodes]})), path)

    # What there is --------------------------------------------------------------------------------

    @property
    def resized(self) -> bool:
        """Never."""
        return False

    @property
    def has_differing(self) -> bool:
        """Never."""
        return False

    def differing(self, fqn: str) -> tuple[int, ...]:
        """No ranks."""
        return ()

    def _survey(self) -> dict[str, str]:
        """The file of each tensor."""
        if not os.path.isdir(self.path):
            if self.path.endswith(INDEX):
                return self._by_index(self.path)
            return dict.fromkeys(self._open(self.path).entries, self.path)
        with block_file.reading(self.path):
            names = sorted(name for name in os.listdir(self.path) if not name.startswith("."))
        indices = [name for name in names if name.endswith(INDEX)]
        files = [name for name in names if name.endswith(WEIGHTS)]
        if len(indices) > 1:
            raise InvalidArgumentError(
                f"{self.path} has {', '.join(indices[:5])}: name the one that is meant"
            )
        if indices:
            paths = self._by_index(os.path.join(self.path, indices[0]))
            if _WHOLE in files and os.path.join(self.path, _WHOLE) not in paths.values():
                raise InvalidArgumentError(
                    f"{self.path} has {_WHOLE}, and {indices[0]}, which does not list it: name the "
                    "one that is meant"
                )
            return paths
        if _WHOLE in files and len(files) > 1:
            others = ", ".join(name for name in files if name != _WHOLE)
            logger.warning("of %s, %s is read, and not %s", self.path, _WHOLE, others)
            files = [_WHOLE]
        return self._together([os.path.join(self.path, name) for name in files])

    def _by_index(self, path: str) -> dict[str, str]:
        """The file of each tensor, by an index."""
        with block_file.reading(path):
            _, data = _read(path)
        self.nbytes_read += len(data)
        names = load_json(data, path).get("weight_map")
        if not isinstance(names, dict):
            raise IntegrityError(f"{path}: weight_map must be a map of names")
        folder = os.path.dirname(path)
        for key, name in cast("dict[str, object]", names).items():
            if not isinstance(name, str) or not _is_plain(name):
                raise IntegrityError(
                    f"{path}: {key!r:.80} is said to be in {name!r:.80}, which is no file beside it"
                )
        self._listed = {
            key: os.path.join(folder, name) for key, name in cast("dict[str, str]", names).items()
        }
        return self._listed

    def _together(self, paths: Iterable[str]) -> dict[str, str]:
        """The file of each tensor, of several files without an index."""
        path_of: dict[str, str] = {}
        for path in paths:
            for key in self._open(path).entries:
                if key in path_of:
                    raise InvalidArgumentError(
                        f"{path_of[key]} and {path} both have {key!r:.80}, and there is no index "
                        "to choose: name one file, or put them together first if each has a part"
                    )
                path_of[key] = path
        return path_of

    def _open(self, path: str) -> _File:
        if path not in self._files:
            with block_file.reading(path):
                self._files[path] = header = _open(path)
            self.nbytes_read += header.header_nbytes
            extra = (
                [key for key in header.entries if key not in self._listed] if self._listed else []
            )
            if extra:
                names = "; ".join(few(extra, str, "are not listed"))
                logger.warning(
                    "%s has what its index does not list, and that is not loaded: %s", path, names
                )
        return self._files[path]

    def _find(self, name: str) -> tuple[_File, TensorEntry]:
        key = name.removeprefix(self._prefix)
        file = self._open(self._places[key])
        if key not in file.entries:
            raise IntegrityError(
                f"{file.path}: {key!r:.80} is missing, which the index says is there"
            )
        return file, file.entries[key]

    def name_of(self, ref: TensorRef) -> str:
        """The name of a tensor that :attr:`treespec` refers to."""
        return ref.fqn

    def entry(self, name: str) -> StoredTensor:
        """Dtype, shape and size of a tensor.

        Raises like the constructor, and ``UnsupportedValueError`` for a dtype that torch or this
        package lacks.
        """
        file, entry = self._find(name)
        if entry.dtype not in DTYPES:
            raise UnsupportedValueError(
                f"{file.path}: {name} has the dtype {entry.dtype!r:.80}, which cannot be loaded; "
                "leave it out with exclude="
            )
        return StoredTensor(entry.name, DTYPES[entry.dtype], entry.shape, Layout((0,)))

    # Reading --------------------------------------------------------------------------------------

    def read_boxes(
        self, wanted: Iterable[Wanted], *, verify: bool = True
    ) -> dict[Wanted, torch.Tensor]:
        """Read boxes of tensors into fresh host memory; blocking, at the medium's speed.

        Reads little more than the boxes.

        Args:
            wanted: Tensors by name, each with a box of it, or None for all.
            verify: Has no effect, as there are no digests.

        Raises:
            IntegrityError: A file has become shorter.
            HostMemoryError: There is not enough memory.
            WriteError: Storage does not give the bytes, or another file has taken the place of one.
        """
        plans = {(name, box): self._find(name) for name, box in wanted}
        shapes = [entry.shape if box is None else box[1] for (_, box), (_, entry) in plans.items()]
        sizes = [DTYPES[entry.dtype].itemsize for _, entry in plans.values()]
        purpose = f"loading {self.path}"
        # Before tables that are as long as tensors are allocated.
        host_memory.require(sum(map(_nbytes, shapes, sizes)), purpose)
        entries: dict[_File, set[TensorEntry]] = {}
        for file, entry in plans.values():
            entries.setdefault(file, set()).add(entry)
        files = {file: _with_blocks(file.path, each) for file, each in entries.items()}
        boxes: dict[Wanted, TensorRead] = {}
        for (each, (file, entry)), size in zip(plans.items(), sizes, strict=True):
            box = each[1] or regions.whole(entry.shape)
            make = _Unaligned if entry.offset % size else TensorRead
            parts = (
                [CellRead(files[file], entry, box, (0,) * len(entry.shape))]
                if math.prod(box[1])
                else []
            )
            boxes[each] = make(DTYPES[entry.dtype], box[1], parts)
        gathering = Gathering(boxes, {}, purpose)
        self.nbytes_read += block_io.read_blocks(
            Access.local(self._open_again), gathering.requests, verify=False
        )
        return gathering.tensors()

    def _open_again(self, path: str, flags: int) -> Descriptor:
        """Open a file to read tensors, following links.

        In Hugging Face's cache all files are links.
        """
        file = Descriptor(path, flags & ~os.O_NOFOLLOW)
        if _identity(os.fstat(file.fileno())) != self._files[path].identity:
            raise OSError(
                errno.ESTALE, "another file has taken the place of the one that was opened", path
            )
        return file


# Files --------------------------------------------------------------------------------------------


def _read(path: str, *, header_only: bool = False) -> tuple[tuple[int, int, int], bytes]:
    """The identity of a file, and its content, or the header of a safetensors file."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a device may do something
        raise IntegrityError(f"{path}: not a file")
    with open(path, "rb", opener=_open_at_once) as file:
        facts = os.fstat(file.fileno())
        start = file.read(8) if header_only else b""
        nbytes = header_nbytes(start, facts.st_size, path) if header_only else facts.st_size
        if nbytes > _MAX_NBYTES:
            raise IntegrityError(
                f"{path}: {nbytes:,} bytes, and no more than {_MAX_NBYTES:,} can be right"
            )
        if nbytes > _LARGE_NBYTES:
            host_memory.require(_NBYTES_PER_BYTE * nbytes, f"reading {path}")
        return _identity(facts), start + file.read(nbytes - len(start))


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # do not block on a pipe that has replaced it


def _open(path: str) -> _File:
    """Read and check the header of a file."""
    identity, header = _read(path, header_only=True)
    layout = parse_tensor_file(header, path, ordered=False)
    *_, nbytes = identity
    if layout.nbytes != nbytes:
        raise IntegrityError(f"{path}: {nbytes:,} bytes instead of {layout.nbytes:,}")
    for entry in layout.entries:
        problem = (
            block_file.shape_problem(entry.dtype, entry.shape, entry.nbytes)
            if entry.dtype in DTYPES
            else ""
        )
        if problem:
            raise IntegrityError(f"{path}: {entry.name!r:.80} {problem}")
    return _File(path, identity, len(header), {entry.name: entry for entry in layout.entries})


def _identity(facts: os.stat_result) -> tuple[int, int, int]:
    """The identity of a file; its size comes last."""
    return facts.st_dev, facts.st_ino, facts.st_size


def _is_plain(name: str) -> bool:
    """Whether a name is a file's name without a path."""
    return (
        name not in ("", ".", "..")
        and not {"/", "\0"} & set(name)
        and len(name.encode()) <= _MAX_NAME_NBYTES
    )


def _with_blocks(path: str, entries: Iterable[TensorEntry]) -> BlockFile:
    """Return a file with a block starting at each of these tensors.

    Large tensors start a block in sidesave's files, too.
    """
    ordered = sorted((entry for entry in entries if entry.nbytes), key=lambda entry: entry.offset)
    borders = array("Q", [0])
    for entry in ordered:
        end = entry.offset + entry.nbytes
        if entry.offset > borders[-1]:
            borders.append(entry.offset)
        borders.extend(range(entry.offset + BLOCK_NBYTES, end, BLOCK_NBYTES))
        borders.append(end)
    return BlockFile(path, TensorFile(0, borders[-1], tuple(ordered), {}), b"", borders)


def _nbytes(shape: tuple[int, ...], itemsize: int) -> int:
    return math.prod(shape) * itemsize
