"""The records on disk, format version 1: ``manifest.json``, ``rank-XXXXX.json``, digest lists, and their names.

One chain vouches for every byte of a checkpoint: the manifest begins with the digest of its own remaining bytes and
holds the digest of each rank's record; a record begins in the same way and holds the digest of each digest list and of
the objects file; a digest list holds one XXH3-128 digest per block of a tensor file. It detects damage, not tampering.
"""

from __future__ import annotations

import collections
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import xxhash

from sidesave.errors import FormatVersionError, IntegrityError

FORMAT_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
DIGEST_NBYTES: Final = 16
BLOCK_NBYTES: Final = 256 << 10
"""Digest granularity. The grid restarts at each tensor of at least this size, so that a verified read of one tensor
reads hardly more than the tensor."""
MAX_HEADER_NBYTES: Final = 100_000_000
"""The limit that stock safetensors sets to a header."""
MAX_JSON_NBYTES: Final = 1 << 30
_MAX_INT: Final = 1 << 63
"""First whole number that no size, step or count reaches."""

_PREFIX = re.compile(rb'\{"xxh3_128":"([0-9a-f]{32})",')
_STEP_DIR = re.compile(r"step-(\d{8,19})")
_PARTIAL = re.compile(
    r"\.step-(\d{8,19})\.([0-9a-f]{16})\.(partial|salvage-\d{1,19}(?:-\d{1,9})?|replaced|aborted|trash)"
)


def digest(data: bytes | memoryview) -> bytes:
    """XXH3-128 of ``data``, 16 bytes, big-endian as xxhash's canonical form has it."""
    return xxhash.xxh3_128_digest(data)


# Names -----------------------------------------------------------------------------------------------------------


def step_directory(step: int) -> str:
    """``step-00000100``."""
    return f"step-{step:08d}"


def hidden_directory(step: int, session: str, state: str) -> str:
    """``.step-00000100.<session>.<state>``.

    States are ``partial``, ``salvage-<epoch>`` (a partial one in the hands of a recovery), ``replaced``, ``aborted``
    and ``trash``.
    """
    return f".step-{step:08d}.{session}.{state}"


def parse_step_directory(name: str) -> int | None:
    """The step of a committed directory's name, or None."""
    match = _STEP_DIR.fullmatch(name)
    return int(match[1]) if match and step_directory(int(match[1])) == name else None


def parse_hidden_directory(name: str) -> tuple[int, str, str] | None:
    """Step, session and state of a hidden directory's name, or None."""
    match = _PARTIAL.fullmatch(name)
    parsed = (int(match[1]), match[2], match[3]) if match else None
    return parsed if parsed and hidden_directory(*parsed) == name else None


def rank_file(container: str, rank: int, suffix: str) -> str:
    """``model.rank-00000.safetensors``."""
    return f"{container}.rank-{rank:05d}.{suffix}"


def record_file(rank: int) -> str:
    """``rank-00000.json``."""
    return f"rank-{rank:05d}.json"


# The digest grid -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors file; ``offset`` counts from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    """What a safetensors header says."""

    data_offset: int
    nbytes: int
    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]


def header_nbytes(first_eight: bytes | memoryview, limit: int, path: str) -> int:
    """Bytes from the file's start to its first tensor, from its first eight bytes.

    Raises ``IntegrityError`` when that exceeds ``limit`` (the file's size) or what stock safetensors accepts.
    """
    if len(first_eight) < 8:
        raise IntegrityError(f"{path}: too short for a safetensors file")
    (length,) = struct.unpack("<Q", first_eight[:8])
    if length > MAX_HEADER_NBYTES or 8 + length > limit:
        raise IntegrityError(f"{path}: header of {length} bytes in a file of {limit}")
    return 8 + int(length)


def parse_tensor_file(header: bytes | memoryview, path: str) -> TensorFile:
    """Read a safetensors header (its first eight bytes included); ``IntegrityError`` names what is wrong with it."""
    raw = load_json(bytes(header[8:]), path)
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in cast("Any", metadata).values()):
        raise IntegrityError(f"{path}: header metadata must map text to text")
    entries: list[TensorEntry] = []
    end = len(header)
    for name, body in raw.items():
        try:
            dtype, shape, (begin, stop) = body["dtype"], body["shape"], body["data_offsets"]
        except (TypeError, KeyError, ValueError) as error:
            raise IntegrityError(f"{path}: header entry {name!r} is malformed") from error
        whole = isinstance(shape, list) and _are_whole([*cast("list[Any]", shape), begin, stop])
        if not (isinstance(dtype, str) and whole and begin + len(header) == end and stop >= begin):
            raise IntegrityError(f"{path}: header entry {name!r} is malformed, or leaves a hole")
        entries.append(TensorEntry(name, dtype, tuple(cast("list[int]", shape)), len(header) + begin, stop - begin))
        end = len(header) + stop
    return TensorFile(len(header), end, tuple(entries), cast("dict[str, str]", metadata))


def digest_blocks(file: TensorFile) -> list[tuple[int, int]]:
    """The grid of a file's digests: ``(offset, nbytes)`` per block, in order and without holes.

    The header is a run of its own, so that it can be verified before it is believed; each tensor of at least
    ``BLOCK_NBYTES`` is a run, and so is each stretch of smaller ones between them. Runs are cut into blocks.
    """
    return [
        (offset, min(BLOCK_NBYTES, end - offset))
        for start, end in _runs(file)
        for offset in range(start, end, BLOCK_NBYTES)
    ]


def count_blocks(file: TensorFile) -> int:
    """How long :func:`digest_blocks` is, at once: a sparse file of terabytes has a grid that fits in no memory."""
    return sum(-(-(end - start) // BLOCK_NBYTES) for start, end in _runs(file))


def _runs(file: TensorFile) -> Iterator[tuple[int, int]]:
    yield 0, file.data_offset
    start = file.data_offset
    for entry in file.entries:
        if entry.nbytes >= BLOCK_NBYTES:
            if entry.offset > start:
                yield start, entry.offset
            yield entry.offset, entry.offset + entry.nbytes
            start = entry.offset + entry.nbytes
    if file.nbytes > start:
        yield start, file.nbytes


# JSON ------------------------------------------------------------------------------------------------------------


def load_json(data: bytes, path: str) -> dict[str, Any]:
    """Parse a JSON object strictly: duplicate keys, NaN and other top-level values are an ``IntegrityError``."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise IntegrityError(f"{path}: must hold a JSON object")
    return cast("dict[str, Any]", value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        name, _ = collections.Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"duplicate key {name!r:.80}")
    return body


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _seal(body: dict[str, Any]) -> bytes:
    """JSON that begins with the digest of all that follows it."""
    rest = json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()[1:]
    return b'{"xxh3_128":"' + digest(rest).hex().encode() + b'",' + rest


def _check_digest(data: bytes, path: str) -> None:
    match = _PREFIX.match(data)
    if match is None or digest(memoryview(data)[match.end() :]).hex().encode() != match[1]:
        raise IntegrityError(f"{path}: does not match its own digest")


def _get(body: dict[str, Any], key: str, kind: type, path: str) -> Any:
    value = body.get(key)
    if type(value) is not kind or (kind in (int, float) and not 0 <= cast("float", value) < _MAX_INT):
        raise IntegrityError(f"{path}: {key!r} must be a non-negative {kind.__name__}, not {value!r:.80}")
    return value


def _are_whole(numbers: list[Any]) -> bool:
    return all(type(number) is int and 0 <= number < _MAX_INT for number in numbers)


def _check_version(body: dict[str, Any], kind: str, path: str) -> None:
    if body.get("format") != kind:
        raise IntegrityError(f"{path}: format is {body.get('format')!r:.80}, not {kind!r}")
    version = _get(body, "version", int, path)
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            f"{path}: format version {version}; this sidesave reads version {FORMAT_VERSION}, so upgrade it"
        )


# Tensors ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as records list it: safetensors dtype name, shape, the container whose files hold it, and its layout.

    In the manifest ``shape`` is global and ``layout`` indexes the manifest's layouts; in a rank's record both are that
    rank's own, and layout 0 means the whole tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    container: str
    layout: int = 0


def _tensors_to_json(tensors: dict[str, TensorInfo]) -> dict[str, Any]:
    containers = list(dict.fromkeys(tensor.container for tensor in tensors.values()))
    index = {container: number for number, container in enumerate(containers)}
    rows = {fqn: [index[one.container], one.dtype, list(one.shape), one.layout] for fqn, one in tensors.items()}
    return {"containers": containers, "tensors": rows}


def _tensors_from_json(body: dict[str, Any], layouts: int, path: str) -> dict[str, TensorInfo]:
    containers = cast("list[Any]", _get(body, "containers", list, path))
    if not all(isinstance(container, str) for container in containers):
        raise IntegrityError(f"{path}: the name of a container is malformed")
    tensors: dict[str, TensorInfo] = {}
    for fqn, row in cast("dict[str, Any]", _get(body, "tensors", dict, path)).items():
        try:
            container, dtype, shape, layout = row
            whole = isinstance(shape, list) and _are_whole([container, layout, *cast("list[Any]", shape)])
            if not (whole and layout < layouts and isinstance(dtype, str)):
                raise ValueError(row)
            tensors[fqn] = TensorInfo(dtype, tuple(cast("list[int]", shape)), containers[container], layout)
        except (TypeError, ValueError, IndexError) as error:
            raise IntegrityError(f"{path}: tensor entry {fqn!r} is malformed") from error
    return tensors


# Rank record -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a checkpoint: a tensor file's digests are listed in ``digests``, another has its own ``xxh3_128``."""

    name: str
    nbytes: int
    xxh3_128: str | None = None
    container: str | None = None
    digests: FileRecord | None = None

    def to_json(self) -> dict[str, Any]:
        """The JSON form, without what is absent."""
        body: dict[str, Any] = {"name": self.name, "nbytes": self.nbytes}
        if self.xxh3_128 is not None:
            body["xxh3_128"] = self.xxh3_128
        if self.container is not None:
            body["container"] = self.container
        if self.digests is not None:
            body["digests"] = self.digests.to_json()
        return body

    @classmethod
    def from_json(cls, body: Any, path: str) -> FileRecord:
        """Read and check; names that could leave the directory are refused."""
        from sidesave.writer_daemon.protocol import is_safe_name

        if not isinstance(body, dict):
            raise IntegrityError(f"{path}: a file entry must be an object")
        fields = cast("dict[str, Any]", body)
        name = _get(fields, "name", str, path)
        if not is_safe_name(name):
            raise IntegrityError(f"{path}: {name!r:.80} is no file name of a checkpoint")
        own = fields.get("xxh3_128")
        if own is not None and not (isinstance(own, str) and re.fullmatch(r"[0-9a-f]{32}", own)):
            raise IntegrityError(f"{path}: digest of {name} is malformed")
        container = fields.get("container")
        if container is not None and not isinstance(container, str):
            raise IntegrityError(f"{path}: container of {name} is malformed")
        inner = fields.get("digests")
        if isinstance(inner, dict) and "digests" in inner:
            raise IntegrityError(f"{path}: the digest list of {name} has one itself")
        digests = cls.from_json(inner, path) if "digests" in fields else None
        if (own is None) == (digests is None) or (digests is not None and digests.xxh3_128 is None):
            raise IntegrityError(f"{path}: {name} must have one digest or one digest list")
        return cls(name, _get(fields, "nbytes", int, path), own, container, digests)


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one rank has written, durable before the record is: ``rank-XXXXX.json``."""

    session: str
    step: int
    sequence: int
    rank: int
    world_size: int
    parent: tuple[int, str] | None
    pickled: bool
    created_s: float
    torch_version: str
    files: tuple[FileRecord, ...]
    objects: FileRecord
    tensors: dict[str, TensorInfo]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor files and the objects file."""
        return sum(file.nbytes for file in self.files) + self.objects.nbytes

    def to_bytes(self) -> bytes:
        """The file's content: the digest of all that follows it, then the rest."""
        return _seal(
            {
                "format": "sidesave-rank",
                "version": FORMAT_VERSION,
                "session": self.session,
                "step": self.step,
                "sequence": self.sequence,
                "rank": self.rank,
                "world_size": self.world_size,
                "status": "written",
                **_lineage(self.parent, self.pickled, self.created_s, self.torch_version),
                "files": [file.to_json() for file in self.files],
                "objects": self.objects.to_json(),
                **_tensors_to_json(self.tensors),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> RankRecord:
        """Compare the digest, then parse and check; raises ``IntegrityError`` or ``FormatVersionError``."""
        _check_digest(data, path)
        body = load_json(data, path)
        _check_version(body, "sidesave-rank", path)
        files = tuple(FileRecord.from_json(file, path) for file in _get(body, "files", list, path))
        if any(file.digests is None for file in files):
            raise IntegrityError(f"{path}: a tensor file lacks its digest list")
        objects = FileRecord.from_json(body.get("objects"), path)
        if objects.xxh3_128 is None:
            raise IntegrityError(f"{path}: the objects file lacks its digest")
        return cls(
            session=_get(body, "session", str, path),
            step=_get(body, "step", int, path),
            sequence=_get(body, "sequence", int, path),
            rank=_get(body, "rank", int, path),
            world_size=_get(body, "world_size", int, path),
            **_read_lineage(body, path),
            files=files,
            objects=objects,
            tensors=_tensors_from_json(body, 1, path),
        )


def _lineage(parent: tuple[int, str] | None, pickled: bool, created_s: float, torch_version: str) -> dict[str, Any]:
    return {
        "parent": None if parent is None else {"step": parent[0], "session": parent[1]},
        "pickle": pickled,
        "created_s": created_s,
        "torch_version": torch_version,
    }


def _read_lineage(body: dict[str, Any], path: str) -> dict[str, Any]:
    parent = body.get("parent")
    if parent is not None:
        if not isinstance(parent, dict):
            raise IntegrityError(f"{path}: parent must be an object or null")
        fields = cast("dict[str, Any]", parent)
        parent = (_get(fields, "step", int, path), _get(fields, "session", str, path))
    return {
        "parent": parent,
        "pickled": _get(body, "pickle", bool, path),
        "created_s": _get(body, "created_s", float, path),
        "torch_version": _get(body, "torch_version", str, path),
    }


# Manifest --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Head:
    """What a listing needs of a manifest."""

    step: int
    session: str
    sequence: int
    parent: tuple[int, str] | None
    created_s: float
    nbytes: int

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Head:
        """Compare the digest of a whole manifest, then parse only its beginning."""
        _check_digest(data, path)
        end = data.find(b',"records":')
        body = load_json(data[:end] + b"}" if end >= 0 else data, path)
        _check_version(body, "sidesave", path)
        lineage = _read_lineage(body, path)
        return cls(
            step=_get(body, "step", int, path),
            session=_get(body, "session", str, path),
            sequence=_get(body, "sequence", int, path),
            parent=lineage["parent"],
            created_s=lineage["created_s"],
            nbytes=_get(body, "nbytes", int, path),
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """``manifest.json``: the checkpoint, once its directory bears the step's name.

    ``layouts`` holds each distinct way in which a tensor is cut, once; an entry is ``{"owners": [rank]}`` for a tensor
    that one rank holds whole.
    """

    step: int
    session: str
    sequence: int
    world_size: int
    parent: tuple[int, str] | None
    pickled: bool
    created_s: float
    torch_version: str
    nbytes: int
    records: tuple[FileRecord, ...]
    layouts: tuple[dict[str, Any], ...]
    tensors: dict[str, TensorInfo]

    def to_bytes(self) -> bytes:
        """The file's content: the digest of all that follows it, then the rest."""
        return _seal(
            {
                "format": "sidesave",
                "version": FORMAT_VERSION,
                "step": self.step,
                "session": self.session,
                "sequence": self.sequence,
                "world_size": self.world_size,
                **_lineage(self.parent, self.pickled, self.created_s, self.torch_version),
                "nbytes": self.nbytes,
                "records": [record.to_json() for record in self.records],
                "layouts": list(self.layouts),
                **_tensors_to_json(self.tensors),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Manifest:
        """Compare the digest, then parse and check; raises ``IntegrityError`` or ``FormatVersionError``."""
        _check_digest(data, path)
        body = load_json(data, path)
        _check_version(body, "sidesave", path)
        records = tuple(FileRecord.from_json(record, path) for record in _get(body, "records", list, path))
        world_size = _get(body, "world_size", int, path)
        if not world_size or len(records) != world_size or any(record.xxh3_128 is None for record in records):
            raise IntegrityError(f"{path}: {len(records)} records for a world of {world_size}")
        layouts = cast("list[Any]", _get(body, "layouts", list, path))
        if not all(isinstance(layout, dict) and "owners" in layout for layout in layouts):
            raise IntegrityError(f"{path}: a layout must name its owners")
        return cls(
            step=_get(body, "step", int, path),
            session=_get(body, "session", str, path),
            sequence=_get(body, "sequence", int, path),
            world_size=world_size,
            **_read_lineage(body, path),
            nbytes=_get(body, "nbytes", int, path),
            records=records,
            layouts=tuple(layouts),
            tensors=_tensors_from_json(body, len(layouts), path),
        )

    def check_record(self, rank: int, record: RankRecord, path: str) -> None:
        """Raise ``IntegrityError`` unless ``record`` is of this very save, and of that rank."""
        told = (record.session, record.step, record.sequence, record.rank, record.world_size)
        if told != (self.session, self.step, self.sequence, rank, self.world_size):
            raise IntegrityError(f"{path}: it is of another checkpoint than the manifest, or of another rank")
