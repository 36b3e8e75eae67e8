"""JSON that begins with the digest of all that follows, parsed strictly: the form of records on disk."""

from __future__ import annotations

import collections
import json
import re
from typing import Any, Final, cast

import xxhash

from sidesave.errors import FormatVersionError, IntegrityError

FORMAT_VERSION: Final = 1
_MAX_INT: Final = 1 << 63
"""First whole number that no size, step or count reaches."""
_PREFIX = re.compile(rb'\{"xxh3_128":"([0-9a-f]{32})",')


def load_json(data: bytes, path: str) -> dict[str, Any]:
    """Parse a JSON object strictly; duplicate keys, NaN and other top-level values are an ``IntegrityError``."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
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
    """JSON that begins with the digest of all that follows."""
    rest = json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()[1:]
    return b'{"xxh3_128":"' + xxhash.xxh3_128_hexdigest(rest).encode() + b'",' + rest


def check_digest(data: bytes, path: str) -> None:
    """Raise ``IntegrityError`` unless the digest at the beginning is that of the rest."""
    match = _PREFIX.match(data)
    if match is None or xxhash.xxh3_128_hexdigest(memoryview(data)[match.end() :]).encode() != match[1]:
        raise IntegrityError(f"{path}: does not match its own digest")


def get(body: dict[str, Any], key: str, kind: type, path: str) -> Any:
    """A required value of a type; numbers are not negative. Raises ``IntegrityError``."""
    value = body.get(key)
    if type(value) is not kind or (kind in (int, float) and not 0 <= cast("float", value) < _MAX_INT):
        raise IntegrityError(f"{path}: {key!r} must be a non-negative {kind.__name__}, not {value!r:.80}")
    return value


def are_whole(numbers: list[Any]) -> bool:
    """Whether all are ints that can be a size or a count."""
    return all(type(number) is int and 0 <= number < _MAX_INT for number in numbers)


def check_version(body: dict[str, Any], kind: str, path: str) -> None:
    """Raise ``IntegrityError`` for another kind of file, ``FormatVersionError`` for a newer one."""
    if body.get("format") != kind:
        raise IntegrityError(f"{path}: format is {body.get('format')!r:.80}, not {kind!r}")
    version = get(body, "version", int, path)
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            f"{path}: format version {version}; this sidesave reads version {FORMAT_VERSION}, so upgrade it"
        )
