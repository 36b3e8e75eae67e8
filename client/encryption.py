"""The user's key of encrypted runs: its source, and which key a reader uses."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, cast

from sidesave.errors import (
    IntegrityError,
    InvalidArgumentError,
    KeyMissingError,
    WrongKeyError,
    write_error,
)
from sidesave.writer_daemon.format import sealed_records
from sidesave.writer_daemon.format.manifest import MANIFEST, Head, parse_metadata
from sidesave.writer_daemon.format.names import parse_step_directory
from sidesave.writer_daemon.sealing.cipher import KEY_NBYTES, require_library
from sidesave.writer_daemon.sealing.keys import (
    KEYS,
    MAX_KEYS_NBYTES,
    RUN_KEYS,
    Keys,
    SaveKey,
    data_key_of,
)
from sidesave.writer_daemon.storage import ReadStorage, urls

_HINT: Final = (
    "a key is 32 random bytes, or 64 hex digits of them in a file or variable: `openssl rand -hex "
    "32`"
)
_MAX_FILE_NBYTES: Final = 4096
_MAX_ASKED: Final = 3
"""The number of checkpoints whose keys are read to find one that is not damaged."""


@dataclass(frozen=True, slots=True, repr=False)
class Encryption:
    """The key that encrypts a run (docs/encryption.md). It is in no message, log or ``repr``.

    Attributes:
        key: 32 bytes; or the path of a file that holds them, or 64 hex digits; or a function that
            returns them, called once, such as a request to a key service.
        env: The name of an environment variable with 64 hex digits, in the place of ``key``.
    """

    key: bytes | str | os.PathLike[str] | Callable[[], bytes] | None = None
    env: str | None = None
    _asked: list[bytes] = field(default_factory=list[bytes], init=False, compare=False)

    def __post_init__(self) -> None:
        if (self.key is None) == (self.env is None):
            raise InvalidArgumentError(
                "Encryption takes a key, or the env that holds it: one of them"
            )
        is_one = (
            self.key is None
            or callable(self.key)
            or isinstance(cast("Any", self.key), (bytes, str, os.PathLike))
        )
        if not is_one or not isinstance(cast("Any", self.env), (str, type(None))):
            raise InvalidArgumentError(
                f"a key is bytes, a path or a function, not {type(self.key or self.env).__name__}: "
                f"{_HINT}"
            )
        require_library()

    def __repr__(self) -> str:
        source = f"env={self.env!r}" if self.key is None else f"key=<{type(self.key).__name__}>"
        return f"Encryption({source})"

    def __deepcopy__(self, memo: object) -> Encryption:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Encryption cannot be pickled, as its key must not reach a disk")

    def read(self) -> bytes:
        """Read the key; ``InvalidArgumentError`` or ``WriteError`` if that fails."""
        if isinstance(self.key, bytes):
            return _checked(self.key, "key=")
        if callable(self.key):
            if not self._asked:
                self._asked.append(_checked(self.key(), "what the function of the key returns"))
            return self._asked[0]
        if self.env is not None:
            text = os.environ.get(self.env)
            if text is None:
                raise KeyMissingError(
                    f"the environment variable {self.env} for the key is not set: {_HINT}"
                )
            return _checked(text.encode(errors="replace"), f"${self.env}")
        path = os.path.expanduser(os.fspath(cast("str", self.key)))
        try:
            with open(path, "rb") as file:
                return _checked(file.read(_MAX_FILE_NBYTES), path)
        except FileNotFoundError as error:
            raise KeyMissingError(f"{path}: the key file does not exist") from error
        except OSError as error:
            raise write_error(error, "cannot read the key", path) from error


def _checked(data: object, where: str) -> bytes:
    if isinstance(data, bytes):
        if len(data) == KEY_NBYTES:
            return data
        text = data.strip()
        if re.fullmatch(rb"[0-9a-fA-F]{64}", text):
            return bytes.fromhex(text.decode())
    raise InvalidArgumentError(f"{where} is no key: {_HINT}")


# Which one ----------------------------------------------------------------------------------------

_using: ContextVar[Encryption | None] = ContextVar("_using", default=None)
_remembered: Final[dict[str, list[Encryption]]] = {}


@contextlib.contextmanager
def using(encryption: Encryption | None) -> Generator[None]:
    """Read checkpoints with this key in this block and thread; None keeps the outer block's key."""
    if encryption is not None and not isinstance(cast("object", encryption), Encryption):
        raise InvalidArgumentError(
            f"encryption must be a sidesave.Encryption, not {type(encryption).__name__}"
        )
    token = _using.set(encryption or _using.get())
    try:
        yield
    finally:
        _using.reset(token)


def remember(root: str, encryption: Encryption) -> None:
    """Register a run's key for all threads, until :func:`forget`; used if no other is given."""
    _remembered.setdefault(_place(root), []).append(encryption)


def forget(root: str) -> None:
    """Undo the last :func:`remember` of a run."""
    remembered = _remembered.get(_place(root), [])
    if remembered:
        remembered.pop()
    if not remembered:
        _remembered.pop(_place(root), None)


def _place(root: str) -> str:
    return root.rstrip("/") if urls.is_url(root) else os.path.realpath(root)


def known_for(root: str) -> Encryption | None:
    """The key given or registered for reading a run; None without one."""
    return _using.get() or next(reversed(_remembered.get(_place(root), [])), None)


# What it opens ------------------------------------------------------------------------------------


class Opened:
    """The keys of one checkpoint, opened."""

    def __init__(self, session: str, session_key: bytes) -> None:
        self._session, self._session_key = session, session_key

    def save_key(self, sequence: int) -> SaveKey:
        """The key of the checkpoint's own save, or of the save that a file was linked from."""
        data_key = data_key_of(self._session_key, self._session, sequence)
        return SaveKey(data_key, self._session, sequence)


def open_keys(storage: ReadStorage, name: str, session: str) -> Opened:
    """Return the keys of the checkpoint ``name``, saved by ``session``.

    Raises:
        KeyMissingError: No key was given.
        WrongKeyError: Another key was given.
        IntegrityError: Its keys are missing or damaged, or belong to another session.
    """
    where = f"{storage.root}/{name}/{KEYS}"
    data = storage.read(f"{name}/{KEYS}", MAX_KEYS_NBYTES)
    if data is None:
        raise IntegrityError(
            f"{where}: the file is missing; without it this checkpoint cannot be read"
        )
    keys = Keys.from_bytes(data, where)
    encryption = known_for(storage.root)
    if encryption is None:
        raise missing(f"{storage.root}/{name}")
    if keys.session != session:
        raise IntegrityError(f"{where}: it belongs to another session than the checkpoint")
    return Opened(session, keys.unwrap(encryption.read(), where))


def open_metadata(storage: ReadStorage, name: str, head: Head) -> dict[str, Any]:
    """Return the user's metadata; for an encrypted checkpoint without a key, an empty one."""
    path = f"{storage.root}/{name}/{MANIFEST}"
    if not (head.cipher and head.metadata):
        return parse_metadata(head.metadata, path)
    try:
        key = open_keys(storage, name, head.session).save_key(head.sequence)
    except (KeyMissingError, WrongKeyError):
        return {}
    return parse_metadata(sealed_records.open_metadata(head.metadata, key, path), path)


def missing(where: str) -> KeyMissingError:
    """The error for a missing key."""
    text = (
        "pass encryption=sidesave.Encryption(...), or --key-file or --key-env; to save in clear, "
        "begin another run"
    )
    return KeyMissingError(f"{where} is encrypted, and no key was given: {text}")


def check_run(directory: str, key: bytes | None) -> Keys | None:
    """Compare the user's key with a run's, and return the run's keys; None if never encrypted.

    If the run's own keys are missing its last step decides. :func:`check_latest` follows, once the
    latest step is known.

    Raises:
        KeyMissingError: The run is encrypted, and ``key`` is None.
        WrongKeyError: It is encrypted with another key; or its keys are being exchanged.
        IntegrityError: The run's record of its key is damaged.
        WriteError: The run cannot be read.
    """
    keys = _keys_of(directory)
    if keys is None:
        return None
    if key is None:
        raise missing(directory)
    if keys.following:
        raise WrongKeyError(
            f"{directory}: an exchange of its keys was interrupted: call `sidesave rekey` again"
        )
    if not keys.is_by(key):
        raise _wrong(directory)
    return keys


def check_mirror(mirror: str, keys: Keys | None, key: bytes | None) -> None:
    """Compare the user's key with that of a run's mirror, as :func:`check_run` does.

    ``keys`` are those of the run. If they were exchanged since, the mirror has the former ones of
    the same session: it gets the new ones later.
    """
    there = None if key is None or keys is None else _keys_of(mirror)
    if keys is None or there is None or keys.session != there.session:
        check_run(mirror, key)


def check_latest(paths: Sequence[str], key: bytes | None) -> None:
    """Compare the user's key with that of encrypted checkpoints, the latest first.

    The first checkpoint with undamaged keys decides. The run's own keys are not used.

    Raises:
        KeyMissingError: ``key`` is None.
        WrongKeyError: It is encrypted with another key.
    """
    if key is None:
        raise missing(paths[0])
    for path in paths[:_MAX_ASKED]:
        parent, name = urls.parent_of(path)
        with contextlib.closing(urls.open_storage(parent)) as storage:
            try:
                keys = _read_keys(storage, f"{name}/{KEYS}")
            except IntegrityError:  # reported when this step is read
                continue
        if keys is not None and not keys.is_by(key):
            raise _wrong(path)
        if keys is not None:
            return


def _keys_of(place: str) -> Keys | None:
    """The keys of a run, or else of its last step."""
    with contextlib.closing(urls.open_storage(place)) as storage:
        steps = sorted(
            name for name in storage.list_directory("") if parse_step_directory(name) is not None
        )
        paths = [RUN_KEYS, *(f"{name}/{KEYS}" for name in steps[-1:])]
        return next(
            (keys for path in paths if (keys := _read_keys(storage, path)) is not None), None
        )


def _read_keys(storage: ReadStorage, path: str) -> Keys | None:
    data = storage.read(path, MAX_KEYS_NBYTES)
    return None if data is None else Keys.from_bytes(data, f"{storage.root}/{path}")


def _wrong(what: str) -> WrongKeyError:
    return WrongKeyError(
        f"{what} is encrypted with another key; give that one, or exchange it with `sidesave rekey`"
    )
