"""What of a rank's record and of a manifest is sealed: names, tables, and the user's metadata.

What is in clear (identity, sizes, digests) is bound to what is sealed, so that neither can be exchanged alone.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass, replace
from typing import Any, cast

from sidesave.errors import IntegrityError, TamperedError
from sidesave.writer_daemon.format.layout import Part, Table
from sidesave.writer_daemon.format.manifest import Manifest, RankRecord, parse_metadata
from sidesave.writer_daemon.format.names import is_extra_file_name
from sidesave.writer_daemon.sealing.keys import SaveKey
from sidesave.writer_daemon.storage.sealed_json import get, load_json

_SEALED_METADATA = "sealed"


@dataclass(frozen=True, slots=True)
class OpenRecord:
    """A record that has been opened, with the true names of the user's files beside the tensors, in its order."""

    record: RankRecord
    extra_names: tuple[str, ...]


def seal_record(record: RankRecord, extra_names: tuple[str, ...], key: SaveKey) -> RankRecord:
    """The record with all sealed that is not for everybody; it keeps that beside it."""
    body = {
        "containers": [file.container for file in record.files],
        "extra_files": list(extra_names),
        "part": record.part.to_json(),
    }
    data = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    metadata = seal_metadata(record.metadata, key)
    bare = replace(record, metadata=metadata, sealed="-")  # in which no names are left
    sealed = key.file(record.rank, "record").seal(data, bound_to(bare))
    return replace(bare, sealed=base64.b64encode(sealed).decode())


def open_record(record: RankRecord, key: SaveKey, path: str) -> OpenRecord:
    """Open what is sealed of a record; ``TamperedError`` if that, or what is in clear, is not what was written."""
    data = key.file(record.rank, "record").open(_decode(record.sealed, path), path, bound_to(record))
    body = load_json(data, path)
    containers = cast("list[Any]", get(body, "containers", list, path))
    names = cast("list[Any]", get(body, "extra_files", list, path))
    if not all(isinstance(name, str) and is_extra_file_name(name) for name in names):
        raise IntegrityError(f"{path}: a file beside the tensors has a name that none can have")
    fits = len(containers) == len(record.files) and len(names) == len(record.extra_files) == len({*names})
    if not fits or not all(isinstance(each, str) for each in containers):
        raise IntegrityError(f"{path}: what is sealed does not fit what is not")
    files = tuple(replace(file, container=each) for file, each in zip(record.files, containers, strict=True))
    part = Part.from_json(get(body, "part", dict, path), record.rank, record.world_size, path)
    return OpenRecord(replace(record, files=files, part=part), tuple(names))


def seal_metadata(metadata: str, key: SaveKey) -> str:
    """The user's metadata, as they stand in the record and in the manifest."""
    if not metadata:
        return ""
    sealed = key.file(0, "metadata").seal(metadata.encode())
    return json.dumps({_SEALED_METADATA: base64.b64encode(sealed).decode()})


def open_metadata(metadata: str, key: SaveKey, path: str) -> str:
    """The opposite of :func:`seal_metadata`; raises as :func:`open_record`."""
    if not metadata:
        return ""
    sealed = get(parse_metadata(metadata, path), _SEALED_METADATA, str, path)
    return key.file(0, "metadata").open(_decode(sealed, path), f"{path}: the metadata").decode()


def name_of_extra(number: int, rank: int) -> str:
    """The stored name of one of the user's files."""
    return f"{number}.rank-{rank:05d}.file.enc"


def without_tables(manifest: Manifest) -> Manifest:
    """The manifest of an encrypted checkpoint: who has the key builds the tables of its records anew."""
    return replace(manifest, table=Table(), treespecs=(0,), diverged={})


def bound_to(record: RankRecord) -> bytes:
    """What is in clear of a record, to which what is sealed is bound."""
    body = {**record.in_clear(), "metadata": record.metadata}
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def _decode(text: str, path: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        raise TamperedError(f"{path}: what is sealed is malformed") from None
