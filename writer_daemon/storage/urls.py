"""URLs of run directories and checkpoints; chooses the storage of a path by its scheme."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Generator, Mapping
from contextvars import ContextVar
from typing import Any, Final, cast

from sidesave.errors import InvalidArgumentError
from sidesave.writer_daemon.storage.base import ReadStorage, Storage
from sidesave.writer_daemon.storage.posix import PosixStorage

SCHEMES: Final = ("s3", "gs", "az", "file", "http", "https", "memory")
"""``memory`` is for tests: its objects live in this process."""
_WRITTEN: Final = SCHEMES[:4]
"""Schemes that another process, such as the daemon, can write to."""
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")  # an os.PathLike turns "://" into ":/"
_options: ContextVar[Mapping[str, Any] | None] = ContextVar("_options", default=None)
_remembered: Final[dict[str, list[Mapping[str, Any]]]] = {}


def is_url(path: str) -> bool:
    """Whether ``path`` is a URL, also with an unknown scheme."""
    return _URL.match(path) is not None


def shown(url: str) -> str:
    """Return a URL for messages, without user, query and fragment, which may be secret."""
    scheme, _, rest = url.partition(":")
    return f"{scheme}://{re.split('[?#]', rest.lstrip('/'))[0].rpartition('@')[2]}"


def normalized(url: str, *, to_write: bool = False) -> str:
    """Return a URL as ``scheme://bucket/key`` without a trailing slash.

    Raises ``InvalidArgumentError`` if it is malformed or its scheme is unknown. ``to_write``
    changes only that message; see :func:`can_write`.
    """
    scheme, _, rest = url.partition(":")
    scheme, rest = scheme.lower(), rest.strip("/")
    if scheme not in SCHEMES:
        valid = (
            f"saved to {', '.join(_WRITTEN)}"
            if to_write
            else f"read from {', '.join(SCHEMES[:-1])}"
        )
        raise InvalidArgumentError(f"{shown(url)}: checkpoints are {valid} URLs")
    parts = rest.split("/")
    if re.search(r"[?#\0]", rest) or "@" in parts[0] or {"", ".", ".."} & {*parts}:
        text = (
            "a URL must be a scheme, a bucket and a key, without user, query, fragment, or empty, "
            ". or .. parts"
        )
        raise InvalidArgumentError(f"{shown(url)}: {text}; pass other settings in storage_options")
    return f"{scheme}:///{rest}" if scheme == "file" else f"{scheme}://{rest}"


def can_list(url: str) -> bool:
    """Whether the storage of a URL can list names."""
    return not url.startswith("http")


def can_write(url: str) -> bool:
    """Whether another process, such as the daemon, can write to a URL."""
    return url.partition(":")[0] in _WRITTEN


@contextlib.contextmanager
def using(storage_options: Mapping[str, Any] | None) -> Generator[None]:
    """Set the options of stores that this thread opens in the block; None keeps the outer ones."""
    if storage_options is not None and not isinstance(cast("object", storage_options), Mapping):
        raise InvalidArgumentError(
            f"storage_options must be a dict, not {type(storage_options).__name__}"
        )
    token = _options.set(_options.get() if storage_options is None else storage_options)
    try:
        yield
    finally:
        _options.reset(token)


def remember(root: str, storage_options: Mapping[str, Any]) -> None:
    """Set the default options of a run's store for all threads until :func:`forget`.

    If several are set for one run, the last counts.
    """
    _remembered.setdefault(root, []).append(storage_options)


def forget(root: str) -> None:
    """Undo the last :func:`remember` of a run."""
    remembered = _remembered.get(root, [])
    if remembered:
        remembered.pop()
    if not remembered:
        _remembered.pop(root, None)


def _options_for(url: str) -> Mapping[str, Any]:
    options = _options.get()
    if options is not None:
        return options
    roots = [root for root in list(_remembered) if url == root or url.startswith(f"{root}/")]
    last = [*_remembered.get(max(roots, key=len), [])][-1:] if roots else []
    return last[0] if last else {}


def encode_options(storage_options: Mapping[str, Any] | None) -> bytes:
    """Encode options for the daemon; raises ``InvalidArgumentError`` for unsupported values."""

    def refuse_unplain(value: object, name: str) -> None:
        if isinstance(value, Mapping):
            for key, inner in cast("Mapping[object, object]", value).items():
                refuse_unplain(inner, f"{name}[{key!r:.80}]")
        elif not isinstance(value, (str, int, float, bool)):
            hint = (
                "the daemon outlives this process, so options must be strings, numbers and dicts "
                "of these"
            )
            raise InvalidArgumentError(f"{name} is a {type(value).__name__}: {hint}")

    with using(storage_options):  # checks that it is a dict
        options = storage_options or {}
    refuse_unplain(options, "storage_options")
    return json.dumps(options).encode()


def decode_options(data: bytes) -> dict[str, Any]:
    """Decode the result of :func:`encode_options`."""
    return cast("dict[str, Any]", json.loads(data)) if data else {}


def open_storage(root: str) -> ReadStorage:
    """Open the run directory ``root``, a path or URL, for reading. Raises ``WriteError``."""
    if not is_url(root):
        return PosixStorage(root)
    # needs an optional, large library
    from sidesave.writer_daemon.storage.object_run import NamedObjects

    return NamedObjects(root, _options_for(root))


def open_for_writing(root: str) -> Storage:
    """Open the run directory ``root``, a path or URL, for writing. Raises ``WriteError``."""
    if not is_url(root):
        return PosixStorage(root)
    from sidesave.writer_daemon.storage.object_run import ObjectRun

    return ObjectRun(root, _options_for(root))


def parent_of(path: str) -> tuple[str, str]:
    """Return the run directory of a checkpoint, given by path or URL, and the checkpoint's name."""
    parent, name = os.path.split(path)
    # the URL of a bucket
    return (path, "") if is_url(path) and parent.endswith(":") else (parent, name)
