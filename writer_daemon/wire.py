"""The wire format of messages: msgpack maps of kind, version and fields.

No other module encodes messages. Decoding is strict: an unknown kind, version or field, a wrong
type, or a value out of bounds raises ``ProtocolError``. Pickle is never used.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Final, cast

import msgpack

from sidesave.errors import ProtocolError
from sidesave.writer_daemon.protocol import Message

VERSION: Final = 2
MAX_MESSAGE_NBYTES: Final = 1 << 20
"""A longer message is refused unread; a SAVE of 1,000 containers takes 100 KB."""
KINDS: Final[dict[str, type[Message]]] = {cls.kind: cls for cls in Message.__subclasses__()}


def encode(message: Message) -> bytes:
    """Encode a message; raises ``ProtocolError`` if a field cannot be encoded.

    Lone surrogates, possible in texts of messages only, become escapes: UTF-8 cannot hold them.
    """
    body = {"kind": message.kind, "version": VERSION, **_fields(message)}
    try:
        return cast(
            "bytes",
            msgpack.packb(
                body, default=_fields, use_bin_type=True, unicode_errors="backslashreplace"
            ),
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"{message.kind} cannot be encoded: {error}") from error


def decode(data: bytes | memoryview) -> Message:
    """Read a message or raise ``ProtocolError``; memory is bounded by ``len(data)``."""
    if len(data) > MAX_MESSAGE_NBYTES:
        raise ProtocolError(
            f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_NBYTES}"
        )
    try:
        raw = cast("Any", msgpack.unpackb(data, raw=False, use_list=True, strict_map_key=True))
    except Exception as error:
        raise ProtocolError(f"not a msgpack message: {error}") from error
    if not isinstance(raw, dict):
        raise ProtocolError("a message must be a map")
    body = cast("dict[str, Any]", raw)
    kind, version = body.pop("kind", None), body.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise ProtocolError(
            f"protocol version {version!r} is not {VERSION}: trainer and daemon differ"
        )
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ProtocolError(f"unknown message kind {kind!r}")
    return cast("Message", _build(cls, body, cls.kind))


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


_hints: dict[type, dict[str, Any]] = {}


def _build(cls: type, body: dict[str, Any], where: str) -> Any:
    if cls not in _hints:
        hints = typing.get_type_hints(cls)
        _hints[cls] = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    hints = _hints[cls]
    if body.keys() != hints.keys():
        raise ProtocolError(
            f"{where}: fields {sorted(map(str, body.keys() ^ hints.keys()))} are missing or unknown"
        )
    values = {name: _convert(hint, body[name], f"{where}.{name}") for name, hint in hints.items()}
    return cls(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        (hint,) = (option for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ProtocolError(f"{where} must be a list")
        item = typing.get_args(hint)[0]
        return tuple(_convert(item, one, where) for one in cast("list[Any]", value))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise ProtocolError(f"{where} must be a map")
        return _build(hint, cast("dict[str, Any]", value), where)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint or value != value:  # NaN is refused
        raise ProtocolError(
            f"{where} must be {getattr(hint, '__name__', hint)}, not {type(value).__name__}"
        )
    return value
