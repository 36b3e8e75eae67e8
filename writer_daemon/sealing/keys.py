"""The keys of a run: ``keys.json`` of a checkpoint, which holds its session's key, wrapped by the user's.

The user's key wraps a random key of the session, which is in no file in any other form; of that the data key of each
save is derived, and of that the key of each file. So ranks need not talk during a save, a file that is linked from an
earlier save of the session needs no further key, and ``sidesave rekey`` writes nothing but this small file.
"""

from __future__ import annotations

import hmac
import re
import secrets
from dataclasses import dataclass, field
from typing import Final

from sidesave.errors import IntegrityError, TamperedError, WrongKeyError
from sidesave.writer_daemon.sealing.cipher import CIPHER, KEY_NBYTES, FileCipher, derive
from sidesave.writer_daemon.storage.sealed_json import FORMAT_VERSION, check_digest, check_version, get, load_json, seal

KEYS: Final = "keys.json"
"""In each encrypted checkpoint."""
RUN_KEYS: Final = ".sidesave.keys"
"""In the run directory, where something is encrypted: by which key, so that a lost one is told before anything else."""
MAX_KEYS_NBYTES: Final = 1 << 16
_FORMAT: Final = "sidesave-keys"
_HEX: Final = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Keys:
    """What stands in the file: all of it may be read by anybody.

    Attributes:
        session: Whose key it is, 16 hex digits.
        salt: Makes other keys of the same key in each file.
        check: What tells the user's key from another one, and nothing else of it.
        wrapped: The session's key, for who has the user's.
        following: In a run whose keys are being exchanged, the ``check`` of the new key.
    """

    session: str
    salt: bytes
    check: bytes
    wrapped: bytes
    following: bytes = b""

    @classmethod
    def wrap(cls, key: bytes, session: str, session_key: bytes) -> Keys:
        """Wrap a session's key."""
        salt = secrets.token_bytes(16)
        wrapped = FileCipher(derive(key, b"sidesave wrap", salt=salt)).seal(session_key, session.encode())
        return cls(session, salt, _check_of(key, salt), wrapped)

    def is_by(self, key: bytes) -> bool:
        """Whether this key has wrapped it."""
        return hmac.compare_digest(_check_of(key, self.salt), self.check)

    def is_followed_by(self, key: bytes) -> bool:
        """Whether keys are being exchanged for this one."""
        return hmac.compare_digest(_check_of(key, self.salt), self.following)

    def followed_by(self, key: bytes) -> bytes:
        """The :attr:`following` that tells of an exchange for this key."""
        return _check_of(key, self.salt)

    def unwrap(self, key: bytes, where: str) -> bytes:
        """The session's key.

        Raises:
            WrongKeyError: Another key has wrapped it.
            TamperedError: This key has, but what is there is not what it has wrapped.
        """
        if not self.is_by(key):
            raise WrongKeyError(f"{where}: it was encrypted with another key; give that one, or exchange the run's")
        session_key = FileCipher(derive(key, b"sidesave wrap", salt=self.salt)).open(
            self.wrapped, where, self.session.encode()
        )
        if len(session_key) != KEY_NBYTES:
            raise TamperedError(f"{where}: the key in it has {len(session_key)} bytes")
        return session_key

    def to_bytes(self) -> bytes:
        """The file's content: the digest of all that follows it, then the rest."""
        body = {
            "format": _FORMAT,
            "version": FORMAT_VERSION,
            "cipher": CIPHER,
            "session": self.session,
            "salt": self.salt.hex(),
            "check": self.check.hex(),
            "wrapped": self.wrapped.hex(),
        }
        return seal(body | ({"following": self.following.hex()} if self.following else {}))

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Keys:
        """Compare the digest, then parse and check; raises ``IntegrityError`` or ``FormatVersionError``."""
        check_digest(data, path)
        body = load_json(data, path)
        check_version(body, _FORMAT, path)
        if body.get("cipher") != CIPHER:
            raise IntegrityError(f"{path}: the cipher is {body.get('cipher')!r:.80}, not {CIPHER}")
        session = get(body, "session", str, path)
        if re.fullmatch(r"[0-9a-f]{16}", session) is None:
            raise IntegrityError(f"{path}: {session!r:.80} is no session")
        names = {"salt": 16, "check": 16, "wrapped": 60, "following": 16}
        values = {
            name: _read_hex(get({"following": "", **body}, name, str, path), count, name, path)
            for name, count in names.items()
        }
        return cls(session, **values)


def _read_hex(text: str, nbytes: int, name: str, path: str) -> bytes:
    if text == "" and name == "following":
        return b""
    if len(text) != 2 * nbytes or _HEX.fullmatch(text) is None:
        raise IntegrityError(f"{path}: {name!r} is malformed")
    return bytes.fromhex(text)


def _check_of(key: bytes, salt: bytes) -> bytes:
    return derive(key, b"sidesave check", 16, salt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealing:
    """How a save is encrypted: its data key, which is in memory alone, and the content of its ``keys.json``."""

    key: bytes = field(repr=False)
    keys: bytes = field(repr=False)


class SaveKey:
    """The data key of one save: all that its writer, or a reader of what it has written, needs."""

    def __init__(self, data_key: bytes, session: str, sequence: int) -> None:
        """See :func:`data_key_of`."""
        self._data_key = data_key
        self._session, self._sequence = session, sequence

    def file(self, rank: int, name: str) -> FileCipher:
        """The cipher of one of its files: the number of a tensor file, or what the other one is."""
        about = f"sidesave file {self._session} {self._sequence} {rank} {name}"
        return FileCipher(derive(self._data_key, about.encode()))

    def keyed_digest(self, digest: str) -> str:
        """A digest that ranks compare, which tells nothing to who lacks the key."""
        return hmac.digest(derive(self._data_key, b"sidesave digest"), digest.encode(), "sha256")[:16].hex()


def save_key(sealing: Sealing | None, session: str, sequence: int) -> SaveKey | None:
    """What the files of a save are encrypted with, if they are."""
    return None if sealing is None else SaveKey(sealing.key, session, sequence)


def data_key_of(session_key: bytes, session: str, sequence: int) -> bytes:
    """The data key of a save of a session."""
    return derive(session_key, f"sidesave data {session} {sequence}".encode())
