"""The format of records on disk: JSON, parsed strictly, that begins with the digest of the rest.

A :class:`FactFile` is a small record of a run directory that is replaced as a whole. Each is
declared by its owner.
"""

from __future__ import annotations

import collections
import json
import logging
import re
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar, cast

import xxhash

from sidesave.errors import FormatVersionError, IntegrityError
from sidesave.writer_daemon.storage.base import ReadStorage, Storage

logger = logging.getLogger(__name__)

T = TypeVar("T")

FORMAT_VERSION: Final = 1
_MAX_INT: Final = 1 << 63
"""Exclusive upper limit of sizes, steps and counts."""
_MAX_FACT_NBYTES: Final = 16 << 20
_PREFIX = re.compile(rb'\{"xxh3_128":"([0-9a-f]{32})",')


def load_json(data: bytes, path: str) -> dict[str, Any]:
    """Parse a JSON object, else raise ``IntegrityError``, also for duplicate keys and NaN."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # refuse lone surrogates
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise IntegrityError(f"{path}: must hold a JSON object")
    return cast("dict[str, Any]", value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        name, _ = collections.Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"duplicate key {name!r:.80}")
    return body


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def seal(body: dict[str, Any]) -> bytes:
    """Encode an object as JSON that begins with the digest of the rest."""
    rest = json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()[1:]
    return b'{"xxh3_128":"' + xxhash.xxh3_128_hexdigest(rest).encode() + b'",' + rest


def unseal(data: bytes, kind: str, path: str) -> dict[str, Any]:
    """Verify the digest and parse; raises ``IntegrityError`` or ``FormatVersionError``."""
    check_digest(data, path)
    body = load_json(data, path)
    check_version(body, kind, path)
    return body


def check_digest(data: bytes, path: str) -> None:
    """Raise ``IntegrityError`` unless the digest at the beginning matches the rest."""
    match = _PREFIX.match(data)
    if (
        match is None
        or xxhash.xxh3_128_hexdigest(memoryview(data)[match.end() :]).encode() != match[1]
    ):
        raise IntegrityError(f"{path}: does not match its own digest")


def get(body: dict[str, Any], key: str, kind: type, path: str, default: Any = None) -> Any:
    """Return a value, required unless ``default`` is given.

    Raises ``IntegrityError`` for another type or a negative number.
    """
    value = body.get(key, default)
    if type(value) is not kind or (
        kind in (int, float) and not 0 <= cast("float", value) < _MAX_INT
    ):
        raise IntegrityError(
            f"{path}: {key!r} must be a non-negative {kind.__name__}, not {value!r:.80}"
        )
    return value


def are_whole(numbers: list[Any]) -> bool:
    """Whether all values are ints in the range of sizes and counts."""
    for number in numbers:  # noqa: SIM110 - `all` of a generator takes twice as long, and there is a call for each tensor
        if type(number) is not int or not 0 <= number < _MAX_INT:
            return False
    return True


def check_version(body: dict[str, Any], kind: str, path: str) -> None:
    """Raise ``IntegrityError`` for another kind of file, ``FormatVersionError`` for a newer one."""
    if body.get("format") != kind:
        raise IntegrityError(f"{path}: format is {body.get('format')!r:.80}, not {kind!r}")
    version = get(body, "version", int, path)
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            f"{path}: format version {version}; this sidesave reads version {FORMAT_VERSION}, so "
            "upgrade it"
        )


class FactFile(Generic[T]):
    """A run directory's small file of one value, checked by a digest and replaced atomically."""

    def __init__(
        self,
        name: str,
        kind: str,
        parse: Callable[[dict[str, Any], str], T],
        to_json: Callable[[T], dict[str, Any]],
        *,
        hint: str = "",
        parse_old: Callable[[bytes, str], T] | None = None,
    ) -> None:
        """Declare the file ``name``.

        Args:
            name: Its name in the run directory.
            kind: The value of its ``format``.
            parse: Returns the value of a JSON object; its second argument is the path, for
                messages.
            to_json: Returns the JSON object of a value, without format and version.
            hint: What damage means, and what to do; appended to the message.
            parse_old: Returns the value of a file of an earlier form, which has no digest and is no
                JSON object.
        """
        self.name = name
        self._kind, self._parse, self._to_json = kind, parse, to_json
        self._hint, self._parse_old = f", {hint}" if hint else "", parse_old

    def read(self, storage: ReadStorage) -> T | None:
        """Return the value, None if there is no such file.

        Raises:
            IntegrityError: The file is damaged.
            FormatVersionError: The file was written by a newer version.
            WriteError: The file cannot be read.
        """
        data = storage.read(self.name, _MAX_FACT_NBYTES)
        return None if data is None else self._decode(data, f"{storage.root}/{self.name}")

    def _decode(self, data: bytes, path: str) -> T:
        """Return the value in the content of the file; raises like :meth:`read`."""
        try:
            if self._parse_old is not None and not data.startswith(b"{"):
                return self._parse_old(data, path)
            return self._parse(unseal(data, self._kind, path), path)
        except FormatVersionError:  # a ValueError too
            raise
        except (IntegrityError, TypeError, ValueError, RecursionError) as error:
            where = "" if isinstance(error, IntegrityError) else f"{path}: "
            raise IntegrityError(f"{where}{error}{self._hint}") from error

    def write(self, storage: Storage, value: T) -> None:
        """Write the value durably; raises ``WriteError``."""
        body = {"format": self._kind, "version": FORMAT_VERSION, **self._to_json(value)}
        storage.replace(self.name, seal(body))

    def copy(self, source: ReadStorage, target: Storage) -> None:
        """Copy the file if it differs in the other place; do not copy a damaged one, but warn."""
        data = source.read(self.name, _MAX_FACT_NBYTES)
        if data is None or data == target.read(self.name, _MAX_FACT_NBYTES):
            return
        try:
            self._decode(data, f"{source.root}/{self.name}")
        except FormatVersionError:  # intact, for a newer version
            pass
        except IntegrityError as error:
            logger.warning("not copied to %s: %s", target.root, error)
            return
        target.replace(self.name, data)
