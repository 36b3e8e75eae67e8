"""The keys of a run: a checkpoint's ``keys.json`` contains the session's key, wrapped.

The user's key wraps a random session key, which is stored in no other form. The data key of each
save is derived from the session key, and the key of each file from the data key. So ranks need not
communicate during a save, a file that is linked from an earlier save of the session needs no other
key, and ``sidesave rekey`` rewrites only this small file.
"""

from __future__ import annotations

import hmac
import re
import secrets
from dataclasses import dataclass, field
from typing import Final

from sidesave.errors import IntegrityError, TamperedError, WrongKeyError
from sidesave.writer_daemon.sealing.cipher import CIPHER, KEY_NBYTES, FileCipher, derive
from sidesave.writer_daemon.storage.sealed_json import FORMAT_VERSION, get, seal, unseal

KEYS: Final = "keys.json"
"""File name in each encrypted checkpoint."""
RUN_KEYS: Final = ".sidesave.keys"
"""File name in the directory of an encrypted run.

The file identifies the key, so that a wrong key is reported early.
"""
MAX_KEYS_NBYTES: Final = 1 << 16
_FORMAT: Final = "sidesave-keys"
_HEX: Final = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Keys:
    """The content of the file; none of it is secret.

    Attributes:
        session: The session of the key, 16 hex digits.
        salt: Random, so that the same user key gives other derived keys in each file.
        check: A hash that identifies the user's key without revealing it.
        wrapped: The session's key, encrypted with the user's key.
        following: During an exchange of keys, the ``check`` of the new key.
    """

    session: str
    salt: bytes
    check: bytes
    wrapped: bytes
    following: bytes = b""

    @classmethod
    def wrap(cls, key: bytes, session: str, session_key: bytes) -> Keys:
        """Wrap a session's key with the user's ``key``."""
        salt = secrets.token_bytes(16)
        wrapped = FileCipher(derive(key, b"sidesave wrap", salt=salt)).seal(
            session_key, session.encode()
        )
        return cls(session, salt, _check_of(key, salt), wrapped)

    def is_by(self, key: bytes) -> bool:
        """Whether ``key`` is the user's key that wraps the session's key."""
        return hmac.compare_digest(_check_of(key, self.salt), self.check)

    def is_followed_by(self, key: bytes) -> bool:
        """Whether ``key`` is the new key of a running exchange."""
        return hmac.compare_digest(_check_of(key, self.salt), self.following)

    def followed_by(self, key: bytes) -> bytes:
        """Return the value of :attr:`following` for an exchange to ``key``."""
        return _check_of(key, self.salt)

    def unwrap(self, key: bytes, where: str) -> bytes:
        """Return the session's key.

        Raises:
            WrongKeyError: It was wrapped with another key.
            TamperedError: It was wrapped with this key, but changed since.
        """
        if not self.is_by(key):
            raise WrongKeyError(
                f"{where}: encrypted with another key; pass that key, or exchange the run's key"
            )
        session_key = FileCipher(derive(key, b"sidesave wrap", salt=self.salt)).open(
            self.wrapped, where, self.session.encode()
        )
        if len(session_key) != KEY_NBYTES:
            raise TamperedError(
                f"{where}: the session key has {len(session_key)} bytes instead of {KEY_NBYTES}"
            )
        return session_key

    def to_bytes(self) -> bytes:
        """Return the file's content, which begins with its digest."""
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
        """Verify the digest and parse; raises ``IntegrityError`` or ``FormatVersionError``."""
        body = unseal(data, _FORMAT, path)
        if body.get("cipher") != CIPHER:
            raise IntegrityError(f"{path}: the cipher is {body.get('cipher')!r:.80}, not {CIPHER}")
        session = get(body, "session", str, path)
        if re.fullmatch(r"[0-9a-f]{16}", session) is None:
            raise IntegrityError(f"{path}: {session!r:.80} is not a session ID")
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
    """The encryption of a save: its data key and the content of its ``keys.json``.

    The data key is never stored.
    """

    key: bytes = field(repr=False)
    keys: bytes = field(repr=False)


class SaveKey:
    """The data key of one save, from which its writer and readers derive the key of each file."""

    def __init__(self, data_key: bytes, session: str, sequence: int) -> None:
        """See :func:`data_key_of`."""
        self._data_key = data_key
        self._session, self._sequence = session, sequence

    def file(self, rank: int, name: str) -> FileCipher:
        """Return the cipher of a file.

        ``name`` is a tensor file's number, or the kind of another file.
        """
        about = f"sidesave file {self._session} {self._sequence} {rank} {name}"
        return FileCipher(derive(self._data_key, about.encode()))

    def keyed_digest(self, digest: str) -> str:
        """Return a keyed form of a digest that ranks compare.

        It reveals nothing without the key.
        """
        return hmac.digest(derive(self._data_key, b"sidesave digest"), digest.encode(), "sha256")[
            :16
        ].hex()


def save_key(sealing: Sealing | None, session: str, sequence: int) -> SaveKey | None:
    """Return the key of a save; None if it is not encrypted."""
    return None if sealing is None else SaveKey(sealing.key, session, sequence)


def data_key_of(session_key: bytes, session: str, sequence: int) -> bytes:
    """Derive the data key of a save from its session's key."""
    return derive(session_key, f"sidesave data {session} {sequence}".encode())
