"""Checks a ``Checkpointer``'s arguments before it acts; mistakes raise ``InvalidArgumentError``."""

from __future__ import annotations

import errno
import json
import operator
import os
from collections.abc import Mapping
from typing import Any, Final, SupportsIndex, cast

from sidesave.errors import InvalidArgumentError, brief, write_error
from sidesave.writer_daemon.format.extra_files import pack_files
from sidesave.writer_daemon.format.names import (
    EXTRA_FILE_NAMES,
    MAX_EXTRA_FILES,
    MAX_EXTRA_NBYTES,
    folders_of,
    is_extra_file_name,
)
from sidesave.writer_daemon.storage import urls
from sidesave.writer_daemon.storage.posix import make_run_directory

MAX_STEP: Final = 10**18
_MAX_METADATA_NBYTES: Final = 64 << 10


def as_index(value: object) -> int | None:
    """Return ``value`` as an int if ``operator.index`` takes it (like ``np.int64``); else None."""
    try:
        return None if isinstance(value, bool) else operator.index(cast("SupportsIndex", value))
    except TypeError:
        return None


def check_step(step: object) -> int:
    """Check a step: an int, 0 or more."""
    number = as_index(step)
    if number is None or not 0 <= number <= MAX_STEP:
        raise InvalidArgumentError(
            f"step must be an int from 0 to {MAX_STEP:.0e}, not {brief(step)}"
        )
    return number


def encode_metadata(metadata: object) -> bytes:
    """Encode facts about a checkpoint as JSON; None gives no bytes."""
    if metadata is None:
        return b""
    if not isinstance(metadata, Mapping):
        raise InvalidArgumentError(f"metadata must be a dict, not {type(metadata).__name__}")
    try:
        facts = dict(cast("Mapping[Any, Any]", metadata))
        _check_keys(facts)
        data = json.dumps(facts, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"metadata must be plain JSON data: {error}; call .item() on tensors"
        ) from error
    if len(data) > _MAX_METADATA_NBYTES:
        limit = f"over the limit of {_MAX_METADATA_NBYTES:,}"
        raise InvalidArgumentError(
            f"metadata of {len(data):,} bytes are {limit}; put them into the state"
        )
    return data


def _check_keys(value: object) -> None:
    """Raise ``TypeError`` for keys that are not text: in JSON ``1`` and ``"1"`` are one key."""
    if isinstance(value, dict):
        for key, item in cast("dict[Any, Any]", value).items():
            if not isinstance(key, str):
                raise TypeError(f"{key!r} is a key, and keys are str")
            _check_keys(item)
    elif isinstance(value, (list, tuple)):
        for item in cast("list[Any]", value):
            _check_keys(item)


def encode_files(files: object) -> bytes:
    """Encode files to store next to the tensors, as they are staged; None gives no bytes."""
    if files is None:
        return b""
    if not isinstance(files, Mapping):
        raise InvalidArgumentError(
            f"files must be a dict of names to str or bytes, not {type(files).__name__}"
        )
    encoded: dict[str, bytes] = {}
    nbytes = 0
    for name, content in cast("Mapping[Any, Any]", files).items():
        if not isinstance(name, str) or not is_extra_file_name(name):
            raise InvalidArgumentError(
                f"files cannot have the name {name!r:.80}; names are {EXTRA_FILE_NAMES}"
            )
        encoded[str(name)] = _encode_file(name, content)
        nbytes += len(encoded[name])
        if nbytes > MAX_EXTRA_NBYTES or len(encoded) > MAX_EXTRA_FILES:
            limit = (
                f"the limit of {MAX_EXTRA_FILES:,} files and {MAX_EXTRA_NBYTES >> 20} MiB in all"
            )
            raise InvalidArgumentError(
                f"files exceed {limit} at {name}; put larger data into the state"
            )
    if both := folders_of(encoded) & encoded.keys():
        raise InvalidArgumentError(
            f"files: {min(both)} cannot be a file and the folder of another file"
        )
    return pack_files(encoded) if encoded else b""


def _encode_file(name: str, content: object) -> bytes:
    if isinstance(content, bytes):
        return content
    if not isinstance(content, str):
        raise InvalidArgumentError(
            f"the content of file {name} must be str or bytes, not {type(content).__name__}"
        )
    try:
        return content.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"the content of file {name} cannot be UTF-8: {error}"
        ) from error


def check_path(path: str) -> None:
    """Check that the path of a directory to write to can be sent to a daemon."""
    if path != path.encode(errors="replace").decode():
        raise InvalidArgumentError(f"the directory's path must be valid UTF-8: {path!r}")


def make_directory(path: str) -> None:
    """Create the run directory if needed; ``WriteError`` if it cannot be created or written to.

    Does nothing for URLs; prefixes are not created, and the daemon finds out whether it may write
    there.
    """
    if urls.is_url(path):
        return
    try:
        make_run_directory(path)
    except OSError as error:
        raise write_error(error, "cannot create the run directory", path) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise write_error(
            PermissionError(errno.EACCES, ""), "cannot write to the run directory", path
        )


def place_to_write(path: str | os.PathLike[str]) -> str:
    """Return :func:`path_text` of a run directory, or its normalized URL.

    Raises ``InvalidArgumentError`` if it is unusable.
    """
    text: object = os.fspath(path) if isinstance(cast("object", path), (str, os.PathLike)) else None
    if not (isinstance(text, str) and urls.is_url(text)):
        return path_text(path)
    url = urls.normalized(text, to_write=True)
    if not urls.can_write(url):
        raise InvalidArgumentError(
            f"{url}: this can be read, but not written to; run directories are s3, gs, az or file "
            "URLs"
        )
    return url


def path_text(path: str | os.PathLike[str]) -> str:
    """Return an absolute path as text; ``InvalidArgumentError`` if it is not a path."""
    try:
        text: str | bytes = os.fspath(cast("str | bytes", path))
    except TypeError:
        text = b""
    if isinstance(text, bytes) or "\0" in text or not text:
        raise InvalidArgumentError(
            f"a path must be a str or an os.PathLike of one, not {brief(path)}"
        )
    if urls.is_url(text):
        where = (
            "URLs are for Checkpointer and CheckpointManager, load, Source, find, watch, verify, "
            "export and fetch"
        )
        raise InvalidArgumentError(
            f"{urls.shown(text)}: this is for local and mounted directories; {where}"
        )
    return os.path.abspath(os.path.expanduser(text))
