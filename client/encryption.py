"""The user's key of encrypted runs: where it comes from, and which one a reader is to use."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, cast

from sidesave.errors import (
    IntegrityError,
    InvalidArgumentError,
    KeyMissingError,
    WriteError,
    WrongKeyError,
    write_error,
)
from sidesave.writer_daemon.format.manifest import parse_step_directory
from sidesave.writer_daemon.sealing.cipher import KEY_NBYTES, require_library
from sidesave.writer_daemon.sealing.keys import KEYS, MAX_KEYS_NBYTES, RUN_KEYS, Keys, SaveKey, data_key_of
from sidesave.writer_daemon.storage import ReadStorage, urls

_HINT: Final = "a key is 32 random bytes, or 64 hex digits of them in a file or variable: `openssl rand -hex 32`"
_MAX_FILE_NBYTES: Final = 4096


@dataclass(frozen=True, slots=True, repr=False)
class Encryption:
    """The key that a run is encrypted with (docs/encryption.md). It is in no message, log or ``repr``.

    Attributes:
        key: 32 bytes; or the path of a file that holds them, or 64 hex digits; or a function that returns them, which
            is called once, where they come from a key service.
        env: The name of an environment variable with 64 hex digits, in the place of ``key``.
    """

    key: bytes | str | os.PathLike[str] | Callable[[], bytes] | None = None
    env: str | None = None
    _asked: list[bytes] = field(default_factory=list[bytes], init=False, compare=False)

    def __post_init__(self) -> None:
        if (self.key is None) == (self.env is None):
            raise InvalidArgumentError("Encryption takes a key, or the env that holds it: one of them")
        is_one = self.key is None or callable(self.key) or isinstance(cast("Any", self.key), (bytes, str, os.PathLike))
        if not is_one or not isinstance(cast("Any", self.env), (str, type(None))):
            raise InvalidArgumentError(
                f"a key is bytes, a path or a function, not {type(self.key or self.env).__name__}: {_HINT}"
            )
        require_library()

    def __repr__(self) -> str:
        source = f"env={self.env!r}" if self.key is None else f"key=<{type(self.key).__name__}>"
        return f"Encryption({source})"

    def __deepcopy__(self, memo: object) -> Encryption:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Encryption is not pickled, for its key must reach no disk")

    def read(self) -> bytes:
        """The key itself; ``InvalidArgumentError`` or ``WriteError`` says why there is none."""
        if isinstance(self.key, bytes):
            return _checked(self.key, "key=")
        if callable(self.key):
            if not self._asked:
                self._asked.append(_checked(self.key(), "what the function of the key returns"))
            return self._asked[0]
        if self.env is not None:
            text = os.environ.get(self.env)
            if text is None:
                raise KeyMissingError(f"the environment has no {self.env}, which is to hold the key: {_HINT}")
            return _checked(text.encode(errors="replace"), f"${self.env}")
        path = os.path.expanduser(os.fspath(cast("str", self.key)))
        try:
            with open(path, "rb") as file:
                return _checked(file.read(_MAX_FILE_NBYTES), path)
        except FileNotFoundError as error:
            raise KeyMissingError(f"{path}: the file of the key is not there") from error
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


# Which one --------------------------------------------------------------------------------------------------------

_using: ContextVar[Encryption | None] = ContextVar("_using", default=None)
_remembered: Final[dict[str, list[Encryption]]] = {}


@contextlib.contextmanager
def using(encryption: Encryption | None) -> Generator[None]:
    """What checkpoints are read with in the block, by this thread; None is what a block around it says, or nothing."""
    if encryption is not None and not isinstance(cast("object", encryption), Encryption):
        raise InvalidArgumentError(f"encryption must be a sidesave.Encryption, not {type(encryption).__name__}")
    token = _using.set(encryption or _using.get())
    try:
        yield
    finally:
        _using.reset(token)


def remember(root: str, encryption: Encryption) -> None:
    """What a run is read with by any thread, where nothing else is said, until :func:`forget`."""
    _remembered.setdefault(_place(root), []).append(encryption)


def forget(root: str) -> None:
    """Take back the last :func:`remember` of a run."""
    remembered = _remembered.get(_place(root), [])
    if remembered:
        remembered.pop()
    if not remembered:
        _remembered.pop(_place(root), None)


def _place(root: str) -> str:
    return root.rstrip("/") if urls.is_url(root) else os.path.realpath(root)


def known_for(root: str) -> Encryption | None:
    """What a run is to be read with, if that was said."""
    return _using.get() or next(reversed(_remembered.get(_place(root), [])), None)


# What it opens ----------------------------------------------------------------------------------------------------


class Opened:
    """The keys of one checkpoint, opened."""

    def __init__(self, session: str, session_key: bytes) -> None:
        self._session, self._session_key = session, session_key

    def save_key(self, sequence: int) -> SaveKey:
        """Of its own save, or of that from which one of its files was linked."""
        data_key = data_key_of(self._session_key, self._session, sequence)
        return SaveKey(data_key, self._session, sequence)


def open_keys(storage: ReadStorage, name: str, session: str) -> Opened:
    """The keys of the checkpoint ``name``, which ``session`` has saved.

    Raises:
        KeyMissingError: No key was given.
        WrongKeyError: Another key was given.
        IntegrityError: Its keys are missing or damaged, or those of another session.
    """
    where = f"{storage.root}/{name}/{KEYS}"
    data = storage.read(f"{name}/{KEYS}", MAX_KEYS_NBYTES)
    if data is None:
        raise IntegrityError(f"{where}: the file is missing, and without it nobody can read this checkpoint")
    keys = Keys.from_bytes(data, where)
    encryption = known_for(storage.root)
    if encryption is None:
        raise missing(f"{storage.root}/{name}")
    if keys.session != session:
        raise IntegrityError(f"{where}: it is of another session than the checkpoint")
    return Opened(session, keys.unwrap(encryption.read(), where))


def missing(where: str) -> KeyMissingError:
    """The error where no key was given."""
    text = "pass encryption=sidesave.Encryption(...), or --key-file or --key-env"
    return KeyMissingError(f"{where} is encrypted, and no key was given: {text}")


def check_run(directory: str, key: bytes | None, mirror: str = "") -> None:
    """Compare the user's key with that of a run, before anything is changed; one that was never encrypted has none.

    Of one whose disk is gone the ``mirror`` is asked; of one on a disk that says nothing the last step.

    Raises:
        KeyMissingError: The run is encrypted, and ``key`` is None.
        WrongKeyError: It is encrypted with another key; or its keys are being exchanged.
        IntegrityError: What it says of its key is damaged.
        WriteError: The run cannot be read.
    """
    keys = None
    for place in filter(None, (directory, mirror)):
        unreachable = contextlib.suppress(*[WriteError] * (place == mirror))  # which is told by who needs it
        with unreachable, contextlib.closing(urls.open_storage(place)) as storage:
            steps = sorted(name for name in storage.list_directory("") if parse_step_directory(name) is not None)
            paths = [RUN_KEYS, *(f"{name}/{KEYS}" for name in steps[-1:] if not urls.is_url(place))]
            for path in paths:
                data = storage.read(path, MAX_KEYS_NBYTES)
                if data is not None:
                    keys = Keys.from_bytes(data, f"{place}/{path}")
                    break
            if steps or keys is not None:
                break
    if keys is None:
        return
    if key is None:
        raise missing(directory)
    if keys.following:
        raise WrongKeyError(f"{directory}: an exchange of its keys was interrupted: call `sidesave rekey` again")
    if not keys.is_by(key):
        raise WrongKeyError(
            f"{directory}: the run is encrypted with another key; give that one, or exchange it with `sidesave rekey`"
        )
