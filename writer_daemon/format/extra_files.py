"""Files of the user as they are staged: in one piece, however many they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgpack

from sidesave.errors import ProtocolError
from sidesave.writer_daemon.format.names import MAX_EXTRA_FILES, MAX_EXTRA_NBYTES, is_extra_file_name


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """The piece that holds them."""
    return cast("bytes", msgpack.packb(dict(files), use_bin_type=True))


def unpack_files(data: bytes | memoryview) -> dict[str, bytes]:
    """Read what :func:`pack_files` has made, or raise ``ProtocolError``; memory is bounded by ``len(data)``."""
    try:
        limits = {"max_map_len": MAX_EXTRA_FILES, "max_array_len": 0, "max_ext_len": 0}
        pairs = cast("Any", msgpack.unpackb(data, object_pairs_hook=tuple, **limits))
    except Exception as error:
        raise ProtocolError(f"not a msgpack map of files: {error}") from error
    if type(pairs) is not tuple:  # an empty extension is one of a kind
        raise ProtocolError("files beside the tensors must be a map")
    files: dict[str, bytes] = {}
    for name, content in cast("tuple[tuple[Any, Any], ...]", pairs):
        if not isinstance(name, str) or not is_extra_file_name(name) or name in files:
            raise ProtocolError(f"{name!r:.80} cannot be the name of a file beside the tensors, or of two")
        if not isinstance(content, bytes):
            raise ProtocolError(f"the content of {name} must be bytes, not {type(content).__name__}")
        files[name] = content
    if sum(map(len, files.values())) > MAX_EXTRA_NBYTES:
        raise ProtocolError(f"files beside the tensors are over the limit of {MAX_EXTRA_NBYTES:,} bytes")
    return files
