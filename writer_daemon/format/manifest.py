"""The records on disk, format version 1: ``manifest.json``, ``rank-XXXXX.json``, digest lists.

A chain of digests covers every byte of a checkpoint. The manifest begins with the digest of its
remaining bytes and contains the digest of each rank's record. A record begins in the same way and
contains the digests of digest lists, the objects file and extra files. A digest list contains one
XXH3-128 digest for each block of a tensor file. The chain detects damage, not tampering.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from sidesave.errors import IntegrityError
from sidesave.writer_daemon.format.layout import Part, Table
from sidesave.writer_daemon.format.names import (
    MAX_EXTRA_NBYTES,
    folders_of,
    is_extra_file_name,
    is_safe_name,
    is_sealed_file_name,
)
from sidesave.writer_daemon.sealing.cipher import SMALL_NBYTES
from sidesave.writer_daemon.storage.sealed_json import (
    FORMAT_VERSION,
    are_whole,
    check_digest,
    check_version,
    get,
    load_json,
    seal,
    unseal,
)

MANIFEST: Final = "manifest.json"
MAX_JSON_NBYTES: Final = 1 << 30
_LISTS: Final = ("digests", "tags")


# Rank record --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a checkpoint: a tensor file with ``digests``, or another with ``xxh3_128``.

    An encrypted tensor file also has ``tags``. Its ``origin`` is the sequence number of the save of
    the same session in which it was encrypted, and its number among that rank's files.
    """

    name: str
    nbytes: int
    xxh3_128: str | None = None
    container: str | None = None
    digests: FileRecord | None = None
    tags: FileRecord | None = None
    origin: tuple[int, int] = (0, 0)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form, without absent fields."""
        body: dict[str, Any] = {"name": self.name, "nbytes": self.nbytes}
        if self.xxh3_128 is not None:
            body["xxh3_128"] = self.xxh3_128
        if self.container is not None:
            body["container"] = self.container
        if self.digests is not None:
            body["digests"] = self.digests.to_json()
        if self.tags is not None:
            body |= {"tags": self.tags.to_json(), "origin": list(self.origin)}
        return body

    @property
    def parts(self) -> tuple[FileRecord, ...]:
        """This file and the files that belong to it."""
        return (self, *filter(None, (self.digests, self.tags)))

    @classmethod
    def from_json(cls, body: Any, path: str, *, is_extra: bool = False) -> FileRecord:
        """Parse the JSON form; ``IntegrityError``, also for names that leave the directory."""
        if not isinstance(body, dict):
            raise IntegrityError(f"{path}: a file entry must be an object")
        fields = cast("dict[str, Any]", body)
        name = get(fields, "name", str, path)
        if not is_safe_name(name) and not (is_extra and is_extra_file_name(name)):
            raise IntegrityError(f"{path}: {name!r:.80} is not a valid file name")
        own = fields.get("xxh3_128")
        if own is not None and not (isinstance(own, str) and re.fullmatch(r"[0-9a-f]{32}", own)):
            raise IntegrityError(f"{path}: digest of {name} is malformed")
        container = fields.get("container")
        if container is not None and not isinstance(container, str):
            raise IntegrityError(f"{path}: container of {name} is malformed")
        lists = [cast("Any", fields.get(key)) for key in _LISTS]
        if any(isinstance(each, dict) and {*_LISTS} & {*each} for each in lists):
            raise IntegrityError(f"{path}: the digest list of {name} has a digest list itself")
        digests, tags = (
            cls.from_json(each, path) if key in fields else None
            for key, each in zip(_LISTS, lists, strict=True)
        )
        of_own = [each for each in (digests, tags) if each is not None]
        if (
            (own is None) == (digests is None)
            or any(each.xxh3_128 is None for each in of_own)
            or (tags and own)
        ):
            raise IntegrityError(f"{path}: {name} must have one digest or one digest list")
        origin = cast("list[Any]", get(fields, "origin", list, path, [0, 0]))
        if len(origin) != 2 or not are_whole(origin):
            raise IntegrityError(f"{path}: the origin of {name} is malformed")
        at: tuple[int, int] = (origin[0], origin[1])
        return cls(name, get(fields, "nbytes", int, path), own, container, digests, tags, at)


@dataclass(frozen=True, slots=True)
class RankRecord:
    """``rank-XXXXX.json``: the files that one rank has written; they are durable before it.

    Only rank 0 has ``extra_files``. In an encrypted save ``part``, containers and names of extra
    files are empty until :mod:`sidesave.writer_daemon.format.sealed_records` decrypts ``sealed``.
    """

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
    part: Part
    metadata: str = ""
    extra_files: tuple[FileRecord, ...] = ()
    sealed: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor files, the objects file and the extra files."""
        return sum(file.nbytes for file in (*self.files, self.objects, *self.extra_files))

    def to_bytes(self) -> bytes:
        """Return the file's content, which begins with its digest."""
        sealed = {"sealed": self.sealed} if self.sealed else self.part.to_json()
        return seal(self.in_clear() | sealed | _metadata(self.metadata))

    def in_clear(self) -> dict[str, Any]:
        """Return the JSON form of the fields that are never encrypted."""
        files = (
            [replace(file, container=None) for file in self.files] if self.sealed else self.files
        )
        return {
            "format": "sidesave-rank",
            "version": FORMAT_VERSION,
            "session": self.session,
            "step": self.step,
            "sequence": self.sequence,
            "rank": self.rank,
            "world_size": self.world_size,
            "status": "written",
            **_lineage(self),
            "files": [file.to_json() for file in files],
            "objects": self.objects.to_json(),
            **(
                {"extra_files": [file.to_json() for file in self.extra_files]}
                if self.extra_files
                else {}
            ),
        }

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> RankRecord:
        """Verify the digest and parse; raises ``IntegrityError`` or ``FormatVersionError``."""
        body = unseal(data, "sidesave-rank", path)
        rank, world_size = get(body, "rank", int, path), get(body, "world_size", int, path)
        if rank >= world_size:
            raise IntegrityError(
                f"{path}: rank {rank} is not valid for a world size of {world_size}"
            )
        if body.get("status") != "written":
            raise IntegrityError(f"{path}: the status is {body.get('status')!r:.80}, not 'written'")
        files = tuple(FileRecord.from_json(file, path) for file in get(body, "files", list, path))
        if any(file.digests is None for file in files):
            raise IntegrityError(f"{path}: a tensor file lacks its digest list")
        objects = FileRecord.from_json(body.get("objects"), path)
        if objects.xxh3_128 is None:
            raise IntegrityError(f"{path}: the objects file lacks its digest")
        sealed = get(body, "sealed", str, path, "")
        if any((file.tags is not None) != bool(sealed) for file in files):
            raise IntegrityError(f"{path}: some files are encrypted and others are not")
        return cls(
            rank=rank,
            world_size=world_size,
            **_read_lineage(body, path),
            files=files,
            objects=objects,
            part=Part() if sealed else Part.from_json(body, rank, world_size, path),
            metadata=_read_metadata(body, path),
            extra_files=_read_extra_files(body, rank, path),
            sealed=sealed,
        )


def _read_extra_files(body: dict[str, Any], rank: int, path: str) -> tuple[FileRecord, ...]:
    files = tuple(
        FileRecord.from_json(file, path, is_extra=True)
        for file in get(body, "extra_files", list, path, [])
    )
    if files and rank:
        raise IntegrityError(
            f"{path}: extra files are listed for rank {rank}; only rank 0 may have them"
        )
    for file in files:
        may_be = (is_sealed_file_name if "sealed" in body else is_extra_file_name)(file.name)
        if file.xxh3_128 is None or file.container is not None or not may_be:
            raise IntegrityError(f"{path}: {file.name!r:.80} is not a valid name of an extra file")
    listed = {file.name for file in files}
    if len(listed) != len(files) or listed & folders_of(listed):
        raise IntegrityError(f"{path}: two extra files have the same name")
    more = SMALL_NBYTES * len(files) if "sealed" in body else 0
    if sum(file.nbytes for file in files) > MAX_EXTRA_NBYTES + more:
        raise IntegrityError(f"{path}: extra files exceed the limit of {MAX_EXTRA_NBYTES:,} bytes")
    return files


def _lineage(record: RankRecord | Manifest) -> dict[str, Any]:
    parent = record.parent
    return {
        "parent": None if parent is None else {"step": parent[0], "session": parent[1]},
        "pickle": record.pickled,
        "created_s": record.created_s,
        "torch_version": record.torch_version,
    }


def _read_lineage(body: dict[str, Any], path: str) -> dict[str, Any]:
    parent = body.get("parent")
    if parent is not None:
        if not isinstance(parent, dict):
            raise IntegrityError(f"{path}: parent must be an object or null")
        fields = cast("dict[str, Any]", parent)
        parent = (get(fields, "step", int, path), get(fields, "session", str, path))
    return {
        "step": get(body, "step", int, path),
        "session": get(body, "session", str, path),
        "sequence": get(body, "sequence", int, path),
        "parent": parent,
        "pickled": get(body, "pickle", bool, path),
        "created_s": get(body, "created_s", float, path),
        "torch_version": get(body, "torch_version", str, path),
    }


def _metadata(text: str) -> dict[str, str]:
    """Return metadata as a string of JSON, so that none of it is mistaken for our fields."""
    return {"metadata": text} if text else {}


def _read_metadata(body: dict[str, Any], path: str) -> str:
    text = get(body, "metadata", str, path, "")
    parse_metadata(text, path)
    return text


def parse_metadata(text: str, path: str) -> dict[str, Any]:
    """Return the user's metadata; raises ``IntegrityError`` if they are not a JSON object."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: the metadata are not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise IntegrityError(f"{path}: the metadata are not a JSON object")
    return cast("dict[str, Any]", value)


# Manifest -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Head:
    """The fields of a manifest that a listing of checkpoints needs."""

    step: int
    session: str
    sequence: int
    parent: tuple[int, str] | None
    created_s: float
    nbytes: int
    metadata: str = ""
    cipher: str = ""

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Head:
        """Verify the digest of a complete manifest, then parse only its beginning and end."""
        check_digest(data, path)
        head = cls.from_beginning(data, path)
        at = data.rfind(b',"metadata":"')  # the last key; a tensor of that name has no string value
        return (
            replace(head, metadata=_read_metadata(load_json(b"{" + data[at + 1 :], path), path))
            if at >= 0
            else head
        )

    @classmethod
    def from_beginning(cls, data: bytes, path: str) -> Head:
        """Parse the beginning of a trusted manifest, without verification and metadata."""
        end = data.find(b',"records":')
        body = load_json(data[:end] + b"}" if end >= 0 else data, path)
        check_version(body, "sidesave", path)
        lineage = _read_lineage(body, path)
        return cls(
            **{
                name: lineage[name]
                for name in ("step", "session", "sequence", "parent", "created_s")
            },
            nbytes=get(body, "nbytes", int, path),
            cipher=get(body, "cipher", str, path, ""),
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """``manifest.json``: describes a checkpoint; committed when its directory gets the step's name.

    Attributes:
        records: The record file of each rank.
        table: All tensors except those of a single rank, which its record lists.
        treespecs: The ranks whose treespecs together describe all shared items.
        diverged: Tensors that differ between the ranks that hold them: FQN to these ranks.
        metadata: The user's metadata from rank 0, as JSON; empty if not given.
        cipher: Empty if not encrypted; otherwise the table is empty until records are decrypted.
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
    table: Table
    treespecs: tuple[int, ...] = (0,)
    diverged: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    metadata: str = ""
    cipher: str = ""

    def to_bytes(self) -> bytes:
        """Return the file's content, which begins with its digest."""
        return seal(
            {
                "format": "sidesave",
                "version": FORMAT_VERSION,
                "step": self.step,
                "session": self.session,
                "sequence": self.sequence,
                "world_size": self.world_size,
                **_lineage(self),
                "nbytes": self.nbytes,
                **({"cipher": self.cipher} if self.cipher else {}),
                "records": [record.to_json() for record in self.records],
                "treespecs": list(self.treespecs),
                "diverged": {fqn: list(ranks) for fqn, ranks in self.diverged.items()},
                **self.table.to_json(),
                **_metadata(self.metadata),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Manifest:
        """Verify the digest and parse; raises ``IntegrityError`` or ``FormatVersionError``."""
        body = unseal(data, "sidesave", path)
        records = tuple(
            FileRecord.from_json(record, path) for record in get(body, "records", list, path)
        )
        world_size = get(body, "world_size", int, path)
        if (
            not world_size
            or len(records) != world_size
            or any(record.xxh3_128 is None for record in records)
        ):
            raise IntegrityError(f"{path}: {len(records)} records for a world size of {world_size}")
        treespecs = _ranks(get(body, "treespecs", list, path), world_size, path)
        diverged = cast("dict[str, Any]", get(body, "diverged", dict, path))
        return cls(
            world_size=world_size,
            **_read_lineage(body, path),
            nbytes=get(body, "nbytes", int, path),
            records=records,
            table=Table.from_json(body, world_size, path),
            treespecs=treespecs,
            diverged={fqn: _ranks(ranks, world_size, path) for fqn, ranks in diverged.items()},
            metadata=_read_metadata(body, path),
            cipher=get(body, "cipher", str, path, ""),
        )

    def check_record(self, rank: int, record: RankRecord, path: str) -> None:
        """Raise ``IntegrityError`` unless ``record`` is of this save and that rank."""
        identity = (record.session, record.step, record.sequence, record.rank, record.world_size)
        if identity != (self.session, self.step, self.sequence, rank, self.world_size) or (
            bool(record.sealed) != bool(self.cipher)
        ):
            raise IntegrityError(
                f"{path}: the record belongs to another checkpoint or rank than the manifest states"
            )


def _ranks(value: Any, world_size: int, path: str) -> tuple[int, ...]:
    ranks = cast("list[Any]", value) if isinstance(value, list) else []
    if not ranks or not are_whole(ranks) or max(ranks) >= world_size:
        raise IntegrityError(
            f"{path}: {value!r:.80} is not a list of ranks for a world size of {world_size}"
        )
    return tuple(ranks)
