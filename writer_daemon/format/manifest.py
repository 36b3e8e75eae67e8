"""The records on disk, format version 1: ``manifest.json``, ``rank-XXXXX.json``, digest lists, and their names.

One chain vouches for every byte of a checkpoint: the manifest begins with the digest of its own remaining bytes and
holds the digest of each rank's record; a record begins in the same way and holds the digest of each digest list, of
the objects file and of each file that the user has put beside the tensors; a digest list holds one XXH3-128 digest per
block of a tensor file. It detects damage, not tampering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, cast

from sidesave import errors
from sidesave.errors import IntegrityError, SidesaveError
from sidesave.writer_daemon.format.layout import Part, Table
from sidesave.writer_daemon.sealing.cipher import SMALL_NBYTES
from sidesave.writer_daemon.storage.sealed_json import (
    FORMAT_VERSION,
    are_whole,
    check_digest,
    check_version,
    get,
    load_json,
    seal,
)

MANIFEST: Final = "manifest.json"
MAX_JSON_NBYTES: Final = 1 << 30
_MANY: Final = 20
_LISTS: Final = ("digests", "tags")

_STEP_DIR = re.compile(r"step-(\d{8,19})")
_HIDDEN = re.compile(
    r"\.step-(\d{8,19})\.([0-9a-f]{16}(?:-\d{1,19})?)\.(partial|salvage-\d{1,19}(?:-\d{1,9})?|replaced|aborted|trash|alike|diverged)"
)


# Names -----------------------------------------------------------------------------------------------------------


def step_directory(step: int) -> str:
    """``step-00000100``."""
    return f"step-{step:08d}"


def no_such_step(step: int, steps: Iterable[int]) -> str:
    """The message for a missing step, with the steps that exist; of many, the last."""
    ordered = sorted(steps)
    if not ordered:
        return f"there is no step {step}"
    there = f"there are {ordered}" if len(ordered) <= _MANY else f"the last of {len(ordered)} are {ordered[-_MANY:]}"
    return f"there is no step {step}; {there}"


def attempt_of(session: str, sequence: int, world_size: int) -> str:
    """The part of a hidden directory's name that identifies an attempt to save.

    With several ranks each attempt has its own: a late rank must not meet the files of the next.
    """
    return session if world_size == 1 else f"{session}-{sequence}"


def hidden_directory(step: int, attempt: str, state: str) -> str:
    """``.step-00000100.<attempt>.<state>``; the attempt is a session, of several ranks with ``-<sequence>`` behind it.

    States are ``partial``, ``salvage-<epoch>`` (a partial one in the hands of a recovery), ``replaced``, ``aborted``,
    ``trash`` (behind a session that may have a number too, for what was deleted twice), and the verdicts ``alike`` and
    ``diverged`` (see ``coordination``).
    """
    return f".step-{step:08d}.{attempt}.{state}"


def parse_step_directory(name: str) -> int | None:
    """The step of a committed directory's name, or None."""
    match = _STEP_DIR.fullmatch(name)
    return int(match[1]) if match and step_directory(int(match[1])) == name else None


def parse_hidden_directory(name: str) -> tuple[int, str, str] | None:
    """Step, attempt and state of a hidden directory's name, or None."""
    match = _HIDDEN.fullmatch(name)
    parsed = (int(match[1]), match[2], match[3]) if match else None
    return parsed if parsed and hidden_directory(*parsed) == name else None


def rank_file(container: str, rank: int, suffix: str) -> str:
    """``model.rank-00000.safetensors``."""
    return f"{container}.rank-{rank:05d}.{suffix}"


def record_file(rank: int) -> str:
    """``rank-00000.json``."""
    return f"rank-{rank:05d}.json"


# Rank record -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a checkpoint: a tensor file's digests are listed in ``digests``, another has its own ``xxh3_128``.

    An encrypted tensor file has ``tags`` too, and was encrypted as number ``origin[1]`` of its rank's files in the save
    of the same session whose sequence is ``origin[0]``.
    """

    name: str
    nbytes: int
    xxh3_128: str | None = None
    container: str | None = None
    digests: FileRecord | None = None
    tags: FileRecord | None = None
    origin: tuple[int, int] = (0, 0)

    def to_json(self) -> dict[str, Any]:
        """The JSON form, without what is absent."""
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
        """Itself, and the files that belong to it."""
        return (self, *filter(None, (self.digests, self.tags)))

    @classmethod
    def from_json(cls, body: Any, path: str) -> FileRecord:
        """Read and check; names that could leave the directory are refused."""
        from sidesave.writer_daemon.format.names import is_safe_name

        if not isinstance(body, dict):
            raise IntegrityError(f"{path}: a file entry must be an object")
        fields = cast("dict[str, Any]", body)
        name = get(fields, "name", str, path)
        if not is_safe_name(name):
            raise IntegrityError(f"{path}: {name!r:.80} is no file name of a checkpoint")
        own = fields.get("xxh3_128")
        if own is not None and not (isinstance(own, str) and re.fullmatch(r"[0-9a-f]{32}", own)):
            raise IntegrityError(f"{path}: digest of {name} is malformed")
        container = fields.get("container")
        if container is not None and not isinstance(container, str):
            raise IntegrityError(f"{path}: container of {name} is malformed")
        lists = [cast("Any", fields.get(key)) for key in ("digests", "tags")]
        if any(isinstance(inner, dict) and {"digests", "tags"} & {*inner} for inner in cast("list[object]", lists)):
            raise IntegrityError(f"{path}: the digest list of {name} has one itself")
        digests, tags = (
            cls.from_json(each, path) if key in fields else None for key, each in zip(_LISTS, lists, strict=True)
        )
        of_own = [each for each in (digests, tags) if each is not None]
        if (own is None) == (digests is None) or any(each.xxh3_128 is None for each in of_own) or (tags and own):
            raise IntegrityError(f"{path}: {name} must have one digest or one digest list")
        origin = cast("list[Any]", get({"origin": [0, 0], **fields}, "origin", list, path))
        if len(origin) != 2 or not are_whole(origin):
            raise IntegrityError(f"{path}: the origin of {name} is malformed")
        at: tuple[int, int] = (origin[0], origin[1])
        return cls(name, get(fields, "nbytes", int, path), own, container, digests, tags, at)


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What one rank has written, durable before the record is: ``rank-XXXXX.json``.

    ``extra_files`` are files of the user, which rank 0 alone has. Of an encrypted save ``part``, containers and the
    names of extra files are empty until :mod:`sidesave.writer_daemon.format.sealed_records` opens what is ``sealed``.
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
        """Bytes of the tensor files, the objects file and the user's files."""
        return sum(file.nbytes for file in (*self.files, self.objects, *self.extra_files))

    def to_bytes(self) -> bytes:
        """The file's content: the digest of all that follows it, then the rest."""
        sealed = {"sealed": self.sealed} if self.sealed else self.part.to_json()
        return seal(self.in_clear() | sealed | _metadata(self.metadata))

    def in_clear(self) -> dict[str, Any]:
        """The JSON form of what is never sealed."""
        files = [replace(file, container=None) for file in self.files] if self.sealed else self.files
        return {
            "format": "sidesave-rank",
            "version": FORMAT_VERSION,
            "session": self.session,
            "step": self.step,
            "sequence": self.sequence,
            "rank": self.rank,
            "world_size": self.world_size,
            "status": "written",
            **_lineage(self.parent, self.pickled, self.created_s, self.torch_version),
            "files": [file.to_json() for file in files],
            "objects": self.objects.to_json(),
            **({"extra_files": [file.to_json() for file in self.extra_files]} if self.extra_files else {}),
        }

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> RankRecord:
        """Compare the digest, then parse and check; raises ``IntegrityError`` or ``FormatVersionError``."""
        check_digest(data, path)
        body = load_json(data, path)
        check_version(body, "sidesave-rank", path)
        rank, world_size = get(body, "rank", int, path), get(body, "world_size", int, path)
        if rank >= world_size:
            raise IntegrityError(f"{path}: it is of rank {rank} in a world of {world_size}")
        if body.get("status") != "written":
            raise IntegrityError(f"{path}: its status is {body.get('status')!r:.80}, not 'written'")
        files = tuple(FileRecord.from_json(file, path) for file in get(body, "files", list, path))
        if any(file.digests is None for file in files):
            raise IntegrityError(f"{path}: a tensor file lacks its digest list")
        objects = FileRecord.from_json(body.get("objects"), path)
        if objects.xxh3_128 is None:
            raise IntegrityError(f"{path}: the objects file lacks its digest")
        sealed = get({"sealed": "", **body}, "sealed", str, path)
        if any((file.tags is not None) != bool(sealed) for file in files):
            raise IntegrityError(f"{path}: some of it is encrypted, and some is not")
        return cls(
            session=get(body, "session", str, path),
            step=get(body, "step", int, path),
            sequence=get(body, "sequence", int, path),
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
    from sidesave.writer_daemon.format.names import MAX_EXTRA_NBYTES, is_extra_file_name, is_sealed_file_name

    files = tuple(
        FileRecord.from_json(file, path) for file in get({"extra_files": [], **body}, "extra_files", list, path)
    )
    if files and rank:
        raise IntegrityError(f"{path}: files beside the tensors are listed for rank {rank}; rank 0 alone may have them")
    for file in files:
        may_be = is_sealed_file_name(file.name) if "sealed" in body else is_extra_file_name(file.name)
        if file.xxh3_128 is None or file.container is not None or not may_be:
            raise IntegrityError(f"{path}: {file.name!r:.80} can be no file beside the tensors")
    if len({file.name for file in files}) != len(files):
        raise IntegrityError(f"{path}: two files beside the tensors have the same name")
    more = SMALL_NBYTES * len(files) if "sealed" in body else 0
    if sum(file.nbytes for file in files) > MAX_EXTRA_NBYTES + more:
        raise IntegrityError(f"{path}: files beside the tensors are over the limit of {MAX_EXTRA_NBYTES:,} bytes")
    return files


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rank's reason not to write its part, instead of its record; ``status`` is ``failed`` or ``aborted``."""

    session: str
    step: int
    sequence: int
    rank: int
    world_size: int
    status: str
    error: str
    message: str
    errno: int | None
    path: str | None

    def to_bytes(self) -> bytes:
        """The file's content: the digest of all that follows it, then the rest."""
        return seal({"format": "sidesave-rank", "version": FORMAT_VERSION, **asdict(self)})

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Refusal | None:
        """Read and check; None when it is a record of something written. Raises as :meth:`RankRecord.from_bytes`."""
        check_digest(data, path)
        body = load_json(data, path)
        check_version(body, "sidesave-rank", path)
        if body.get("status") not in ("failed", "aborted"):
            return None
        number, where = body.get("errno"), body.get("path")
        return cls(
            **{name: get(body, name, int, path) for name in ("step", "sequence", "rank", "world_size")},
            **{name: get(body, name, str, path) for name in ("session", "status", "error", "message")},
            errno=number if type(number) is int else None,
            path=where if isinstance(where, str) else None,
        )

    def as_error(self) -> SidesaveError:
        """The error with which this rank's save failed, for another rank."""
        text = self.message if self.status == "aborted" else f"rank {self.rank}: {self.message}"
        return errors.from_wire(self.error, text, self.errno, self.path)


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
        parent = (get(fields, "step", int, path), get(fields, "session", str, path))
    return {
        "parent": parent,
        "pickled": get(body, "pickle", bool, path),
        "created_s": get(body, "created_s", float, path),
        "torch_version": get(body, "torch_version", str, path),
    }


def _metadata(text: str) -> dict[str, str]:
    """JSON within a string, so that its content is never taken for anything of ours."""
    return {"metadata": text} if text else {}


def _read_metadata(body: dict[str, Any], path: str) -> str:
    text = get({"metadata": "", **body}, "metadata", str, path)
    parse_metadata(text, path)
    return text


def parse_metadata(text: str, path: str) -> dict[str, Any]:
    """The user's facts about a checkpoint; raises ``IntegrityError`` for anything but a JSON object."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: its metadata are not JSON: {error}") from error
    if not isinstance(value, dict):
        raise IntegrityError(f"{path}: its metadata are no JSON object")
    return cast("dict[str, Any]", value)


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
    metadata: str = ""
    cipher: str = ""

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Head:
        """Compare the digest of a whole manifest, then parse only its beginning and its end."""
        check_digest(data, path)
        head = cls.from_beginning(data, path)
        at = data.rfind(b',"metadata":"')  # the last key, if it is there: a tensor of that name has no string
        return replace(head, metadata=_read_metadata(load_json(b"{" + data[at + 1 :], path), path)) if at >= 0 else head

    @classmethod
    def from_beginning(cls, data: bytes, path: str) -> Head:
        """Parse the beginning of a manifest whose content is vouched for otherwise; without its metadata."""
        end = data.find(b',"records":')
        body = load_json(data[:end] + b"}" if end >= 0 else data, path)
        check_version(body, "sidesave", path)
        lineage = _read_lineage(body, path)
        return cls(
            step=get(body, "step", int, path),
            session=get(body, "session", str, path),
            sequence=get(body, "sequence", int, path),
            parent=lineage["parent"],
            created_s=lineage["created_s"],
            nbytes=get(body, "nbytes", int, path),
            cipher=get({"cipher": "", **body}, "cipher", str, path),
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """``manifest.json``: the checkpoint, once its directory has the step's name.

    Attributes:
        records: For each rank, the file that lists its files.
        table: All tensors except those of one rank alone, which its record lists.
        treespecs: The ranks whose treespecs together describe all that ranks share.
        diverged: Tensors that differ between the ranks that hold them: FQN to these ranks.
        metadata: Rank 0's user metadata, as JSON; empty if there is none.
        cipher: The cipher of an encrypted checkpoint, whose tables are empty until its records are opened; else empty.
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
        """The file's content: the digest of all that follows it, then the rest."""
        return seal(
            {
                "format": "sidesave",
                "version": FORMAT_VERSION,
                "step": self.step,
                "session": self.session,
                "sequence": self.sequence,
                "world_size": self.world_size,
                **_lineage(self.parent, self.pickled, self.created_s, self.torch_version),
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
        """Compare the digest, then parse and check; raises ``IntegrityError`` or ``FormatVersionError``."""
        check_digest(data, path)
        body = load_json(data, path)
        check_version(body, "sidesave", path)
        records = tuple(FileRecord.from_json(record, path) for record in get(body, "records", list, path))
        world_size = get(body, "world_size", int, path)
        if not world_size or len(records) != world_size or any(record.xxh3_128 is None for record in records):
            raise IntegrityError(f"{path}: {len(records)} records for a world of {world_size}")
        treespecs = _ranks(get(body, "treespecs", list, path), world_size, path)
        diverged = cast("dict[str, Any]", get(body, "diverged", dict, path))
        return cls(
            step=get(body, "step", int, path),
            session=get(body, "session", str, path),
            sequence=get(body, "sequence", int, path),
            world_size=world_size,
            **_read_lineage(body, path),
            nbytes=get(body, "nbytes", int, path),
            records=records,
            table=Table.from_json(body, world_size, path),
            treespecs=treespecs,
            diverged={fqn: _ranks(ranks, world_size, path) for fqn, ranks in diverged.items()},
            metadata=_read_metadata(body, path),
            cipher=get({"cipher": "", **body}, "cipher", str, path),
        )

    def check_record(self, rank: int, record: RankRecord, path: str) -> None:
        """Raise ``IntegrityError`` unless ``record`` is of this save and that rank."""
        identity = (record.session, record.step, record.sequence, record.rank, record.world_size)
        if identity != (self.session, self.step, self.sequence, rank, self.world_size) or (
            bool(record.sealed) != bool(self.cipher)
        ):
            raise IntegrityError(f"{path}: it is of another checkpoint than the manifest, or of another rank")


def _ranks(value: Any, world_size: int, path: str) -> tuple[int, ...]:
    ranks = cast("list[Any]", value) if isinstance(value, list) else []
    if not ranks or not are_whole(ranks) or max(ranks) >= world_size:
        raise IntegrityError(f"{path}: {value!r:.80} is no list of ranks in a world of {world_size}")
    return tuple(ranks)
