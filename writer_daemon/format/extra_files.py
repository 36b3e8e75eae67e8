"""Packs the user's extra files of a save into one piece for staging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgpack

from sidesave.errors import ProtocolError
from sidesave.writer_daemon.format.names import (
    MAX_EXTRA_FILES,
    MAX_EXTRA_NBYTES,
    folders_of,
    is_extra_file_name,
)


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """Return the files, by name, packed into one piece."""
    return cast("bytes", msgpack.packb(dict(files), use_bin_type=True))


def unpack_files(data: bytes | memoryview) -> dict[str, bytes]:
    """Unpack the result of :func:`pack_files`; raises ``ProtocolError``.

    Memory is bounded by ``len(data)``.
    """
    try:
        limits = {"max_map_len": MAX_EXTRA_FILES, "max_array_len": 0, "max_ext_len": 0}
        pairs = cast("Any", msgpack.unpackb(data, object_pairs_hook=tuple, **limits))
    except Exception as error:
        raise ProtocolError(f"not a msgpack map of files: {error}") from error
    if type(pairs) is not tuple:  # an empty msgpack extension is a subclass
        raise ProtocolError("extra files must be a map")
    files: dict[str, bytes] = {}
    for name, content in cast("tuple[tuple[Any, Any], ...]", pairs):
        if not isinstance(name, str) or not is_extra_file_name(name) or name in files:
            raise ProtocolError(
                f"{name!r:.80} is not a valid name of an extra file, or occurs twice"
            )
        if not isinstance(content, bytes):
            raise ProtocolError(
                f"the content of {name} must be bytes, not {type(content).__name__}"
            )
        files[name] = content
    if both := folders_of(files) & files.keys():
        raise ProtocolError(f"{min(both)} cannot be a file and the folder of another file")
    if sum(map(len, files.values())) > MAX_EXTRA_NBYTES:
        raise ProtocolError(f"extra files exceed the limit of {MAX_EXTRA_NBYTES:,} bytes")
    return files
