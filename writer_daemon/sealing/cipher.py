"""The cipher: AES-256-GCM from ``cryptography``, which is imported at first use.

No other module uses it. A tensor file is sealed in blocks of 256 KiB, under its own key. A block's
nonce is its number, so blocks cannot be exchanged, and a repeated attempt to save the same memory
yields the same bytes. The caller must make sure that the memory has not changed since: two contents
under one nonce would reveal each other. Small content that may differ between attempts gets a nonce
derived from the content.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING, Final

from sidesave.errors import InvalidArgumentError, TamperedError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

CIPHER: Final = "AES-256-GCM"
KEY_NBYTES: Final = 32
TAG_NBYTES: Final = 16
NONCE_NBYTES: Final = 12
SMALL_NBYTES: Final = NONCE_NBYTES + TAG_NBYTES
"""Bytes that :meth:`FileCipher.seal` adds to a small file."""
_EXTRA: Final = "encryption needs `cryptography`: pip install 'sidesave[encryption]'"


def derive(key: bytes, about: bytes, nbytes: int = KEY_NBYTES, salt: bytes | None = None) -> bytes:
    """Derive a key with HKDF-SHA256 (RFC 5869) for the purpose ``about``."""
    require_library()
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=SHA256(), length=nbytes, salt=salt, info=about).derive(key)


def require_library() -> None:
    """Raise ``InvalidArgumentError`` if ``cryptography`` is not installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise InvalidArgumentError(_EXTRA) from error


class FileCipher:
    """Seals and opens one file under its own key; thread-safe."""

    def __init__(self, key: bytes) -> None:
        """Use ``key``, which no other file may have."""
        require_library()
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._key = key
        self._aead: AESGCM = AESGCM(key)

    def seal_block(self, number: int, block: memoryview, into: memoryview) -> None:
        """Encrypt a block into memory that is ``TAG_NBYTES`` longer; the tag comes last."""
        self._aead.encrypt_into(number.to_bytes(NONCE_NBYTES, "big"), block, None, into)

    def open_block(self, number: int, sealed: memoryview, into: memoryview, where: str) -> None:
        """Decrypt a block followed by its tag.

        Raises ``TamperedError``, which names ``where``, if it was changed.
        """
        from cryptography.exceptions import InvalidTag

        try:
            self._aead.decrypt_into(number.to_bytes(NONCE_NBYTES, "big"), sealed, None, into)
        except InvalidTag:
            raise _tampered(f"{where}: block {number}") from None

    def seal(self, data: bytes, bound: bytes = b"") -> bytes:
        """Encrypt small content and authenticate ``bound`` with it; deterministic."""
        nonce = hmac.digest(
            derive(self._key, b"sidesave nonce"), hashlib.sha256(bound).digest() + data, "sha256"
        )
        nonce = nonce[:NONCE_NBYTES]
        return nonce + self._aead.encrypt(nonce, data, bound)

    def open(self, data: bytes, where: str, bound: bytes = b"") -> bytes:
        """Decrypt the result of :meth:`seal`; raises as :meth:`open_block`."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._aead.decrypt(data[:NONCE_NBYTES], data[NONCE_NBYTES:], bound)
        except (InvalidTag, ValueError):
            raise _tampered(where) from None


def _tampered(where: str) -> TamperedError:
    text = "the digest matches, but the content was not encrypted here with this key"
    return TamperedError(
        f"{where}: {text}: it was changed, moved or exchanged; load another checkpoint"
    )
