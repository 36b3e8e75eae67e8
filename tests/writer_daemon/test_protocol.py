"""The wire: what is sent arrives as it was, and nothing else gets in."""

import dataclasses
import errno
import math
import types
import typing
from typing import Any, cast

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_messages import a_save

from sidesave.errors import ProtocolError, WriteError
from sidesave.writer_daemon import protocol, wire
from sidesave.writer_daemon.format.names import is_safe_name
from sidesave.writer_daemon.protocol import Extent, Message, Parent, Refuse, Save, Unshared
from sidesave.writer_daemon.wire import decode, encode

KINDS = list(wire.KINDS.values())
INT = st.integers(-(2**63), 2**64 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
NAMES = st.from_regex(r"[A-Za-z0-9%_@-][A-Za-z0-9%_@.-]{0,40}", fullmatch=True)
EXTENTS = st.builds(
    Extent,
    name=NAMES,
    offset=st.integers(1, 2**50).map(lambda page: page * 4096),
    nbytes=st.integers(0, 2**62),
)


@st.composite
def saves(draw: st.DrawFn) -> Save:
    world_size = draw(st.integers(1, 10_000))
    rank = draw(st.just(0) | st.integers(0, world_size - 1))
    files = draw(st.lists(EXTENTS, max_size=6, unique_by=lambda extent: extent.name))
    cut = draw(st.integers(0, len(files)))
    return Save(
        attempt=draw(INT),
        save_id=draw(INT),
        arena=draw(INT),
        generation=draw(INT),
        step=draw(st.integers(0, 10**18)),
        session=draw(st.from_regex(r"[0-9a-f]{16}", fullmatch=True)),
        sequence=draw(st.integers(0, 2**63 - 1)),
        rank=rank,
        world_size=world_size,
        files=tuple(files[:cut]),
        objects=draw(EXTENTS),
        parent=draw(st.none() | st.builds(Parent, step=st.integers(0, 2**63 - 1), session=TEXT)),
        replace=draw(st.booleans()),
        pickled=draw(st.booleans()),
        created_s=draw(st.floats(0, 2.0**60)),
        torch_version=draw(TEXT),
        retry=draw(st.booleans()),
        table=draw(st.none() | EXTENTS),
        metadata=draw(st.none() | EXTENTS),
        extra_files=draw(EXTENTS) if rank == 0 and draw(st.booleans()) else None,
        unshared=draw(
            st.none() | st.builds(Unshared, files=st.just(tuple(files[cut:])), table=EXTENTS)
        ),
    )


@st.composite
def refusals(draw: st.DrawFn) -> Refuse:
    world_size = draw(st.integers(1, 10_000))
    return Refuse(
        attempt=draw(INT),
        save_id=draw(INT),
        step=draw(st.integers(0, 10**18)),
        session=draw(TEXT),
        sequence=draw(st.integers(0, 2**63 - 1)),
        rank=draw(st.integers(0, world_size - 1)),
        world_size=world_size,
        error=draw(TEXT),
        message=draw(TEXT),
        errno=draw(st.none() | INT),
        path=draw(st.none() | TEXT),
        retry=draw(st.booleans()),
    )


def values(hint: Any) -> st.SearchStrategy[Any]:
    """What a field of this type may hold."""
    if isinstance(hint, types.UnionType):
        return st.one_of(*(values(option) for option in typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return st.lists(values(typing.get_args(hint)[0]), max_size=4).map(tuple)
    plain = {
        int: INT,
        str: TEXT,
        bytes: st.binary(max_size=30),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        type(None): st.none(),
        Save: saves(),
    }
    return plain[hint] if hint in plain else messages_of(hint)


def messages_of(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Messages of a kind, or values of a class that is a field of some."""
    if cls in (Save, Refuse):
        return saves() if cls is Save else refusals()
    hints = typing.get_type_hints(cls)
    return st.builds(
        cls, **{field.name: values(hints[field.name]) for field in dataclasses.fields(cls)}
    )


MESSAGES = st.one_of(*(messages_of(cls) for cls in KINDS))


def pack(value: Any) -> bytes:
    return cast("bytes", msgpack.packb(value))


def raw(message: Message) -> dict[str, Any]:
    """The map that travels."""
    return msgpack.unpackb(encode(message))


def test_the_wire_has_the_kinds_that_the_design_names():
    assert {cls.kind for cls in KINDS} >= {
        *("HELLO", "READY", "SAVE", "WATCH", "PROGRESS", "WRITTEN", "COMMITTED", "FAILED"),
        *("STATUS", "HEARTBEAT", "DRAIN", "BOOT", "ATTACH", "DETACH"),
    }


@pytest.mark.drawn
@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.kind)
def test_every_message_arrives_as_it_was_sent(cls: type[Message]):
    @given(messages_of(cls))
    def round_trip(message: Message) -> None:
        arrived = decode(encode(message))
        assert type(arrived) is cls
        assert arrived == message

    round_trip()


@given(MESSAGES, TEXT)
def test_unknown_kind_is_refused(message: Message, kind: str):
    if kind not in {cls.kind for cls in KINDS}:
        with pytest.raises(ProtocolError, match="unknown message kind"):
            decode(pack(raw(message) | {"kind": kind}))


@pytest.mark.parametrize("kind", [None, 5, b"DRAIN", ["DRAIN"], {"DRAIN": 1}, True])
def test_kind_that_is_no_text_is_refused(kind: Any):
    with pytest.raises(ProtocolError, match="unknown message kind"):
        decode(pack({"kind": kind, "version": wire.VERSION, "attempt": 1}))


@pytest.mark.parametrize("version", [0, 1, wire.VERSION + 1, -1, 2**63, None, "1", 2.0, True, [1]])
def test_other_protocol_version_is_refused(version: Any):
    with pytest.raises(ProtocolError, match="protocol version"):
        decode(pack({"kind": "DRAIN", "version": version, "attempt": 1}))


@given(MESSAGES, TEXT, st.data())
def test_surplus_or_missing_field_is_refused(message: Message, surplus: str, data: st.DataObject):
    body = raw(message)
    if surplus not in body:
        with pytest.raises(ProtocolError, match="missing or unknown"):
            decode(pack(body | {surplus: 1}))
    del body[data.draw(st.sampled_from(sorted(body)))]
    with pytest.raises(ProtocolError):
        decode(pack(body))


WRONG = st.one_of(
    st.none(),
    st.booleans(),
    INT,
    st.floats(),
    TEXT,
    st.binary(max_size=4),
    st.just([[]]),
    st.just({}),
)


@given(MESSAGES, WRONG, st.data())
def test_value_of_another_type_is_refused(message: Message, wrong: Any, data: st.DataObject):
    body = raw(message)
    field = data.draw(st.sampled_from(sorted(body.keys() - {"kind", "version"})))
    if type(wrong) is type(body[field]) or (isinstance(body[field], float) and type(wrong) is int):
        return
    hint = typing.get_type_hints(type(message))[field]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else ()
    if kinds and (wrong is None or type(wrong) in kinds or (type(wrong) is int and float in kinds)):
        return
    body[field] = wrong
    with pytest.raises(ProtocolError):
        decode(pack(body))


def test_nested_value_of_another_type_is_refused():
    for path in (("files", 0, "nbytes"), ("objects", "name"), ("parent", "step")):
        body = raw(a_save())
        inner: Any = body
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = b"?"
        with pytest.raises(ProtocolError, match=str(path[-1])):
            decode(pack(body))


@given(st.binary(max_size=400))
def test_random_bytes_are_refused_with_a_protocol_error_only(data: bytes):
    with pytest.raises(ProtocolError):
        decode(data)


@given(MESSAGES, st.data())
def test_damaged_message_is_refused_or_still_of_the_wire(message: Message, data: st.DataObject):
    packed = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        arrived = decode(bytes(packed[: data.draw(st.integers(0, len(packed)))]))
    except ProtocolError:
        return
    assert type(arrived) in KINDS


@given(
    st.recursive(
        WRONG, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4)
    )
)
def test_any_other_msgpack_value_is_refused(value: Any):
    with pytest.raises(ProtocolError):
        decode(pack(value))


@pytest.mark.parametrize(
    "packed",
    [
        b"\x91" * 100_000 + b"\xc0",  # nested 100,000 deep
        b"\xdd\xff\xff\xff\xff",  # a list that says it has 4 billion items
        b"\xdf\xff\xff\xff\xff",  # a map of 4 billion
        b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        b"\xc7\x00\x7f",  # an extension type
        b"\x81\x01\x01",  # a key that is no text
        # something behind the message
        pack({"kind": "DRAIN", "version": wire.VERSION, "attempt": 1}) + b"\xc0",
        b"",
    ],
)
def test_hostile_encoding_is_refused(packed: bytes):
    with pytest.raises(ProtocolError):
        decode(packed)


def test_oversize_message_is_refused_unread():
    text = "x" * wire.MAX_MESSAGE_NBYTES
    message = protocol.Failed(attempt=1, save_id=1, error="", message=text, errno=1, path="")
    with pytest.raises(ProtocolError, match="over the limit"):
        decode(encode(message))


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "/etc/passwd",
        "a\\..\\b",
        ".x",
        "a\0b",
        "a\nb",
        "a b",
        "ä",
        "x" * 201,
        "model\n",
    ],
)
def test_name_that_could_leave_the_directory_is_refused(name: str):
    assert not is_safe_name(name)
    body = raw(a_save())
    body["files"][0]["name"] = name
    with pytest.raises(ProtocolError, match="not a container name"):
        decode(pack(body))


@given(st.text(max_size=20))
def test_safe_name_is_one_path_component_that_is_not_hidden(name: str):
    if is_safe_name(name):
        assert name not in ("", ".", "..")
        assert not name.startswith(".")
        assert not set(name) & set("/\0\\")
        assert name.isascii() and name.isprintable()


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"sequence": -1},
        {"world_size": 0},
        {"rank": 1},
        {"rank": -1},
        {"session": "../../etc/passwd"},
        {"session": "0123456789abcdeF"},
        {"session": "0123456789abcdef\n"},
        {"step": 1 << 63},
        {"sequence": 1 << 63},
        {"parent": {"step": -1, "session": "0123456789abcdef"}},
        {"created_s": -1.0},
        {"created_s": math.inf},
        {"created_s": math.nan},
    ],
)
def test_save_that_makes_no_sense_is_refused(changes: dict[str, Any]):
    with pytest.raises(ProtocolError):
        decode(pack(raw(a_save()) | changes))


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(4097, 1), (0, 1), (-4096, 1), (4096, -1), (4096, 1 << 63)]
)
def test_extent_outside_the_data_area_is_refused(offset: int, nbytes: int):
    body = raw(a_save())
    body["objects"] = {"name": "objects", "offset": offset, "nbytes": nbytes}
    with pytest.raises(ProtocolError, match="not page-aligned"):
        decode(pack(body))


def test_two_files_of_one_name_are_refused():
    body = raw(a_save())
    body["files"] *= 2
    with pytest.raises(ProtocolError, match="same name"):
        decode(pack(body))


def test_what_is_no_number_is_refused():
    written = protocol.Written(attempt=1, save_id=1, nbytes=1, seconds=1.0)
    with pytest.raises(ProtocolError, match="seconds"):
        decode(pack(raw(written) | {"seconds": math.nan}))


def test_whole_number_arrives_as_a_float_where_one_is_due():
    arrived = decode(pack(raw(a_save()) | {"created_s": 3}))
    assert isinstance(arrived, Save)
    assert type(arrived.created_s) is float


def test_error_in_words_that_are_no_text_is_told_with_escapes():
    failed = protocol.failure(1, 2, WriteError(errno.EIO, "broken \udcff", "/run/\udcff"))
    assert (failed.message, failed.path) == (r"broken \udcff", r"/run/\udcff")
    told = decode(encode(dataclasses.replace(failed, message="broken \udcff")))
    assert isinstance(told, protocol.Failed)
    assert told.message == r"broken \udcff"


def test_what_cannot_be_encoded_is_a_typed_error():
    with pytest.raises(ProtocolError, match="DELETE cannot be encoded"):
        encode(protocol.Delete(attempt=1, save_id=1, steps=(1 << 70,), sequence=0, retry=False))
