"""The cipher: AES-256-GCM of ``cryptography``, which is imported when it is used. The one place that knows it.

A tensor file is sealed block by block, of 256 KiB from its first byte on, under a key of its own: the nonce of a block
is its number, so no block passes for another one, and the same memory is sealed to the same bytes, however often a save
is tried. Whoever seals a block must know that the memory is the save's, for two contents under one nonce would tell of
each other. What is small and may differ between tries has a nonce that is made of its content.
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
"""So much longer is a small file than its content."""
_EXTRA: Final = "encryption needs `cryptography`, which an extra brings: pip install 'sidesave[encryption]'"


def derive(key: bytes, about: bytes, nbytes: int = KEY_NBYTES, salt: bytes | None = None) -> bytes:
    """HKDF-SHA256 (RFC 5869) of ``key``, for what ``about`` says."""
    require_library()
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=SHA256(), length=nbytes, salt=salt, info=about).derive(key)


def require_library() -> None:
    """Raise ``InvalidArgumentError`` where the library of the cipher is missing."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise InvalidArgumentError(_EXTRA) from error


class FileCipher:
    """Seals and opens one file under its own key; thread-safe."""

    def __init__(self, key: bytes) -> None:
        """Each file must have another key."""
        require_library()
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._key = key
        self._aead: AESGCM = AESGCM(key)

    def seal_block(self, number: int, block: memoryview, into: memoryview) -> None:
        """Seal a block into memory that is ``TAG_NBYTES`` longer: the tag stands behind."""
        self._aead.encrypt_into(number.to_bytes(NONCE_NBYTES, "big"), block, None, into)

    def open_block(self, number: int, sealed: memoryview, into: memoryview, where: str) -> None:
        """Open a block, whose tag stands behind it; ``TamperedError`` names ``where`` if it is not what was sealed."""
        from cryptography.exceptions import InvalidTag

        try:
            self._aead.decrypt_into(number.to_bytes(NONCE_NBYTES, "big"), sealed, None, into)
        except InvalidTag:
            raise _tampered(f"{where}: block {number}") from None

    def seal(self, data: bytes, bound: bytes = b"") -> bytes:
        """Seal a small content whole, and bind it to what is ``bound``: the same, the same bytes."""
        nonce = hmac.digest(derive(self._key, b"sidesave nonce"), hashlib.sha256(bound).digest() + data, "sha256")
        nonce = nonce[:NONCE_NBYTES]
        return nonce + self._aead.encrypt(nonce, data, bound)

    def open(self, data: bytes, where: str, bound: bytes = b"") -> bytes:
        """Open what :meth:`seal` has made; raises as :meth:`open_block`."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._aead.decrypt(data[:NONCE_NBYTES], data[NONCE_NBYTES:], bound)
        except (InvalidTag, ValueError):
            raise _tampered(where) from None


def _tampered(where: str) -> TamperedError:
    text = "its digest is right, and it is not what was encrypted here under this key"
    return TamperedError(f"{where}: {text}: somebody has changed, moved or exchanged it; load another checkpoint")
