"""Encrypts parts of a rank's record and of a manifest: names, tables, and the user's metadata.

The plain parts (identity, sizes, digests) are authenticated with the sealed parts, so that neither
can be exchanged alone.
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
from sidesave.writer_daemon.format.names import folders_of, is_extra_file_name
from sidesave.writer_daemon.sealing.keys import SaveKey
from sidesave.writer_daemon.storage.sealed_json import get, load_json

_SEALED_METADATA = "sealed"


@dataclass(frozen=True, slots=True)
class OpenRecord:
    """A decrypted record, with the real names of its extra files, in the record's order."""

    record: RankRecord
    extra_names: tuple[str, ...]


def seal_record(record: RankRecord, extra_names: tuple[str, ...], key: SaveKey) -> RankRecord:
    """Return a record whose names, tensors and metadata are encrypted."""
    body = {
        "containers": [file.container for file in record.files],
        "extra_files": list(extra_names),
        "part": record.part.to_json(),
    }
    data = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    metadata = seal_metadata(record.metadata, key)
    bare = replace(record, metadata=metadata, sealed="-")  # any value: names are then left out
    sealed = key.file(record.rank, "record").seal(data, bound_to(bare))
    return replace(bare, sealed=base64.b64encode(sealed).decode())


def open_record(record: RankRecord, key: SaveKey, path: str) -> OpenRecord:
    """Decrypt a record; raises ``TamperedError`` if its sealed or plain parts were changed."""
    data = key.file(record.rank, "record").open(
        _decode(record.sealed, path), path, bound_to(record)
    )
    body = load_json(data, path)
    containers = cast("list[Any]", get(body, "containers", list, path))
    names = cast("list[Any]", get(body, "extra_files", list, path))
    are_names = all(isinstance(name, str) and is_extra_file_name(name) for name in names)
    if not are_names or folders_of(names) & {*names}:
        raise IntegrityError(f"{path}: an extra file has an invalid name")
    fits = len(containers) == len(record.files) and len(names) == len(record.extra_files) == len(
        {*names}
    )
    if not fits or not all(isinstance(each, str) for each in containers):
        raise IntegrityError(f"{path}: the sealed and the plain parts do not match")
    files = tuple(
        replace(file, container=each) for file, each in zip(record.files, containers, strict=True)
    )
    part = Part.from_json(get(body, "part", dict, path), record.rank, record.world_size, path)
    return OpenRecord(replace(record, files=files, part=part), tuple(names))


def seal_metadata(metadata: str, key: SaveKey) -> str:
    """Encrypt the user's metadata for the record and the manifest."""
    if not metadata:
        return ""
    sealed = key.file(0, "metadata").seal(metadata.encode())
    return json.dumps({_SEALED_METADATA: base64.b64encode(sealed).decode()})


def open_metadata(metadata: str, key: SaveKey, path: str) -> str:
    """Decrypt the result of :func:`seal_metadata`; raises as :func:`open_record`."""
    if not metadata:
        return ""
    sealed = get(parse_metadata(metadata, path), _SEALED_METADATA, str, path)
    return key.file(0, "metadata").open(_decode(sealed, path), f"{path}: the metadata").decode()


def name_of_extra(number: int, rank: int) -> str:
    """Return the stored name of an encrypted extra file."""
    return f"{number}.rank-{rank:05d}.file.enc"


def without_tables(manifest: Manifest) -> Manifest:
    """Return the manifest of an encrypted checkpoint, without tables.

    Readers with the key rebuild the tables from the records.
    """
    return replace(manifest, table=Table(), treespecs=(0,), diverged={})


def bound_to(record: RankRecord) -> bytes:
    """Return the plain parts of a record, which are authenticated with the sealed parts."""
    body = {**record.in_clear(), "metadata": record.metadata}
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def _decode(text: str, path: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        raise TamperedError(f"{path}: the sealed part is malformed") from None
