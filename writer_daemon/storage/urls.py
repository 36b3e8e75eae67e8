"""URLs of run directories and checkpoints, and the one place that chooses the storage of a path by its scheme."""

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
"""Where a process of its own, as the daemon is, can write."""
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")  # of "://" an os.PathLike leaves one slash
_options: ContextVar[Mapping[str, Any] | None] = ContextVar("_options", default=None)
_remembered: Final[dict[str, list[Mapping[str, Any]]]] = {}


def is_url(path: str) -> bool:
    """Whether it is a URL, also one of a scheme that is not known here."""
    return _URL.match(path) is not None


def shown(url: str) -> str:
    """A URL for messages: without what is said in it to a server alone, which may be a secret."""
    scheme, _, rest = url.partition(":")
    return f"{scheme}://{re.split('[?#]', rest.lstrip('/'))[0].rpartition('@')[2]}"


def normalized(url: str, *, to_write: bool = False) -> str:
    """``scheme://bucket/key`` without a slash at the end; ``InvalidArgumentError`` says what is wrong with it.

    It is read from, unless it is ``to_write``, which is said of schemes that are not known alone: see
    :func:`can_write`.
    """
    scheme, _, rest = url.partition(":")
    scheme, rest = scheme.lower(), rest.strip("/")
    if scheme not in SCHEMES:
        known = f"saved to {', '.join(_WRITTEN)}" if to_write else f"read from {', '.join(SCHEMES[:-1])}"
        raise InvalidArgumentError(f"{shown(url)}: checkpoints are {known} URLs")
    parts = rest.split("/")
    if re.search(r"[?#\0]", rest) or "@" in parts[0] or {"", ".", ".."} & {*parts}:
        text = "a URL is a scheme, a bucket and a key: no user, query or fragment, and no empty, . or .. part"
        raise InvalidArgumentError(f"{shown(url)}: {text}; what a store needs besides goes into storage_options")
    return f"{scheme}:///{rest}" if scheme == "file" else f"{scheme}://{rest}"


def can_list(url: str) -> bool:
    """Whether what is below a URL can be listed."""
    return not url.startswith("http")


def can_write(url: str) -> bool:
    """Whether a process of its own, as the daemon is, can write below a URL."""
    return url.partition(":")[0] in _WRITTEN


@contextlib.contextmanager
def using(storage_options: Mapping[str, Any] | None) -> Generator[None]:
    """What stores are opened with in the block, by this thread; None is what a block around it says, or nothing."""
    if storage_options is not None and not isinstance(cast("object", storage_options), Mapping):
        raise InvalidArgumentError(f"storage_options must be a dict, not {type(storage_options).__name__}")
    token = _options.set(_options.get() if storage_options is None else storage_options)
    try:
        yield
    finally:
        _options.reset(token)


def remember(root: str, storage_options: Mapping[str, Any]) -> None:
    """What a run's store is opened with by any thread, where nothing else is said, until :func:`forget`.

    Of several that are remembered for one run the last counts.
    """
    _remembered.setdefault(root, []).append(storage_options)


def forget(root: str) -> None:
    """Take back the last :func:`remember` of a run."""
    remembered = _remembered.get(root, [])
    if remembered:
        remembered.pop()
    if not remembered:
        _remembered.pop(root, None)


def _options_for(url: str) -> Mapping[str, Any]:
    said = _options.get()
    if said is not None:
        return said
    roots = [root for root in list(_remembered) if url == root or url.startswith(f"{root}/")]
    last = [*_remembered.get(max(roots, key=len), [])][-1:] if roots else []
    return last[0] if last else {}


def encode_options(storage_options: Mapping[str, Any] | None) -> bytes:
    """Options for a process that outlives this one; ``InvalidArgumentError`` names what cannot be handed on."""

    def refuse_unplain(value: object, name: str) -> None:
        if isinstance(value, Mapping):
            for key, inner in cast("Mapping[object, object]", value).items():
                refuse_unplain(inner, f"{name}[{key!r:.80}]")
        elif not isinstance(value, (str, int, float, bool)):
            hint = "the daemon goes on when this process has ended, so they must be text, numbers and dicts of these"
            raise InvalidArgumentError(f"{name} is a {type(value).__name__}: {hint}")

    with using(storage_options):  # which checks that it is a dict
        options = storage_options or {}
    refuse_unplain(options, "storage_options")
    return json.dumps(options).encode()


def decode_options(data: bytes) -> dict[str, Any]:
    """Read what :func:`encode_options` has made."""
    return cast("dict[str, Any]", json.loads(data)) if data else {}


def open_storage(root: str) -> ReadStorage:
    """The run directory ``root``, a path or a URL; ``WriteError`` where it cannot be opened."""
    if not is_url(root):
        return PosixStorage(root)
    from sidesave.writer_daemon.storage.object_run import NamedObjects  # its library is an extra, and some MiB

    return NamedObjects(root, _options_for(root))


def open_for_writing(root: str) -> Storage:
    """The same, for who writes."""
    if not is_url(root):
        return PosixStorage(root)
    from sidesave.writer_daemon.storage.object_run import ObjectRun

    return ObjectRun(root, _options_for(root))


def parent_of(path: str) -> tuple[str, str]:
    """The run directory of a checkpoint, a path or a URL, and its name there."""
    parent, name = os.path.split(path)
    return (path, "") if is_url(path) and parent.endswith(":") else (parent, name)  # a whole bucket
