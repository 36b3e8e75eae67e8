"""Manifests and records of ranks: they read back as they were written, and nothing else is taken
for one.
"""

import dataclasses
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sessions import NEW, OLD, vouched

from sidesave.errors import FormatVersionError, IntegrityError
from sidesave.writer_daemon.format import tensor_file
from sidesave.writer_daemon.format.layout import GroupSum, Part, TensorInfo, whole
from sidesave.writer_daemon.format.manifest import FileRecord, Head, Manifest, RankRecord
from sidesave.writer_daemon.format.names import (
    hidden_directory,
    parse_hidden_directory,
    parse_step_directory,
    step_directory,
)

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
INT = st.integers(0, 2**63 - 1)
NAMES = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,20}", fullmatch=True)
DIGESTS = st.from_regex(r"[0-9a-f]{32}", fullmatch=True)
PLAIN_FILES = st.builds(FileRecord, NAMES, INT, DIGESTS)
TENSOR_FILES = st.builds(FileRecord, NAMES, INT, st.none(), TEXT, PLAIN_FILES)
TENSORS = st.dictionaries(
    TEXT, st.builds(TensorInfo, TEXT, st.lists(INT, max_size=3).map(tuple), TEXT), max_size=4
)
SUMS = st.integers(0, 2**128 - 1)


@st.composite
def parts(draw: st.DrawFn, rank: int) -> Part:
    own = draw(TENSORS)
    return Part(
        table=whole(draw(TENSORS), rank),
        own=whole(own, rank),
        cells=draw(SUMS),
        treespec=draw(TEXT),
        replica_digest=draw(TEXT),
        compared={fqn: draw(TEXT) for fqn in own if draw(st.booleans())},
        groups=draw(st.dictionaries(TEXT, st.builds(GroupSum, INT, SUMS), max_size=2)),
    )


COMMON = {
    "session": TEXT,
    "step": INT,
    "sequence": INT,
    "parent": st.none() | st.tuples(INT, TEXT),
    "pickled": st.booleans(),
    "created_s": st.floats(0, 1e18),
    "torch_version": TEXT,
    "metadata": st.dictionaries(TEXT, st.none() | INT | TEXT, max_size=3).map(json.dumps)
    | st.just(""),
}
RECORDS = st.tuples(st.integers(0, 9), st.integers(1, 9)).flatmap(
    lambda ranks: st.builds(
        RankRecord,
        rank=st.just(ranks[0]),
        world_size=st.just(sum(ranks)),
        files=st.lists(TENSOR_FILES, max_size=3).map(tuple),
        objects=PLAIN_FILES,
        part=parts(ranks[0]),
        **COMMON,
    )
)
MANIFESTS = st.lists(PLAIN_FILES, min_size=1, max_size=3).flatmap(
    lambda records: st.builds(
        Manifest,
        world_size=st.just(len(records)),
        nbytes=INT,
        records=st.just(tuple(records)),
        table=TENSORS.map(lambda tensors: whole(tensors, 0)),
        **COMMON,
    )
)
A_MANIFEST = Manifest(
    step=100,
    session=NEW,
    sequence=3,
    world_size=1,
    parent=(50, OLD),
    pickled=False,
    created_s=1.5,
    torch_version="2.8",
    nbytes=1234,
    records=(FileRecord("rank-00000.json", 10, "0" * 32),),
    table=whole({"model.w": TensorInfo("F32", (3, 4), "model")}, 0),
)
A_RECORD = RankRecord(
    session=NEW,
    step=100,
    sequence=3,
    rank=0,
    world_size=1,
    parent=(50, OLD),
    pickled=False,
    created_s=1.5,
    torch_version="2.8",
    files=(FileRecord("m", 1, None, "model", FileRecord("n", 1, "0" * 32)),),
    objects=FileRecord("objects", 1, "0" * 32),
    part=Part(whole({"model.w": TensorInfo("F32", (3, 4), "model")}, 0)),
)
READERS = [Manifest.from_bytes, Head.from_bytes, RankRecord.from_bytes]
SAMPLES = [A_MANIFEST.to_bytes(), A_MANIFEST.to_bytes(), A_RECORD.to_bytes()]


def only_typed_errors(read: Callable[[bytes, str], object], data: bytes) -> bool:
    """Whether ``data`` is refused, with one of the two errors that may come of reading records."""
    try:
        read(data, "x")
    except (IntegrityError, FormatVersionError):
        return True
    return False


@given(MANIFESTS)
def test_manifest_reads_back_as_it_was_written(content: Manifest):
    data = content.to_bytes()
    assert Manifest.from_bytes(data, "x") == content
    head = Head.from_bytes(data, "x")
    for field in dataclasses.fields(Head):
        assert getattr(head, field.name) == getattr(content, field.name)


@given(RECORDS)
def test_rank_record_reads_back_as_it_was_written(record: RankRecord):
    assert RankRecord.from_bytes(record.to_bytes(), "x") == record


@pytest.mark.parametrize("data", SAMPLES[1:], ids=["manifest", "rank record"])
def test_record_begins_with_the_digest_of_all_that_follows(data: bytes):
    assert data[:13] == b'{"xxh3_128":"'
    assert data[45:47] == b'",'
    assert bytes.fromhex(data[13:45].decode()) == tensor_file.digest(data[47:])
    assert json.loads(data)["format"].startswith("sidesave")


@pytest.mark.parametrize(("read", "data"), [*zip(READERS, SAMPLES, strict=True)])
def test_any_flipped_bit_of_a_record_is_found(read: Callable[[bytes, str], object], data: bytes):
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(IntegrityError):
                read(bytes(damaged), "x")


@pytest.mark.parametrize(("read", "data"), [*zip(READERS, SAMPLES, strict=True)])
def test_cut_or_lengthened_record_is_found(read: Callable[[bytes, str], object], data: bytes):
    for damaged in [*(data[:length] for length in range(len(data))), data + b" ", b" " + data]:
        with pytest.raises(IntegrityError):
            read(damaged, "x")


@given(st.sampled_from(READERS), st.binary(max_size=300))
def test_random_bytes_are_no_record(read: Callable[[bytes, str], object], data: bytes):
    assert only_typed_errors(read, data)
    assert only_typed_errors(read, vouched(data))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(READERS), MANIFESTS, RECORDS, st.data())
def test_any_json_in_any_field_is_refused_or_means_what_it_says(
    read: Callable[[bytes, str], object], content: Manifest, record: RankRecord, data: st.DataObject
):
    body = json.loads(b"{" + (record if read == RankRecord.from_bytes else content).to_bytes()[47:])
    for key in data.draw(st.lists(st.sampled_from(sorted(body)), min_size=1, max_size=3)):
        target = body
        while isinstance(target[key], dict | list) and target[key] and data.draw(st.booleans()):
            target = target[key]
            key = data.draw(
                st.sampled_from(sorted(target) if isinstance(target, dict) else range(len(target)))
            )
        target[key] = data.draw(JSON)
    only_typed_errors(read, vouched(json.dumps(body).encode()))


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "body",
    [
        b"{" * 100_000,
        b'{"a":' * 100_000,
        b'{"format":"sidesave","version":1,"files":'
        + b'[{"digests":' * 900
        + b"{}"
        + b"}]" * 900
        + b"}",
        b"[" * 100_000,
        b'{"format":"sidesave","version":' + b"9" * 10_000 + b"}",
        b'{"format":"sidesave","version":1,"step":NaN}',
        b'{"format":"sidesave","version":1,"step":-Infinity}',
        b'{"format":"sidesave","version":1,"step":1e999}',
        b'{"format":"sidesave","version":true}',
        b'{"format":"sidesave","version":1.0}',
        b'{"format":"sidesave\\ud800","version":1}',
        b'{"format":"\xff\xfe"}',
        b'{"f\x00o":1}',
        '{"format":"sidesave"}'.encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b"{}}",
        b"null",
        b"",
    ],
    ids=lambda body: repr(body[:40]),
)
def test_hostile_json_is_refused(read: Callable[[bytes, str], object], body: bytes):
    assert only_typed_errors(read, body)
    assert only_typed_errors(read, vouched(body))


@pytest.mark.parametrize("read", READERS[:2])
@pytest.mark.parametrize("key", ["step", "session", "records", "xxh3_128", "nbytes"])
def test_duplicate_key_is_refused(read: Callable[[bytes, str], object], key: str):
    body = A_MANIFEST.to_bytes()[47:]
    with pytest.raises(IntegrityError):
        read(vouched(b'{"%s":1,' % key.encode() + body), "x")
    with pytest.raises(IntegrityError, match=f"duplicate key '{key}'"):
        Manifest.from_bytes(vouched(b'{"%s":1,' % key.encode() + body), "x")


def test_nested_duplicate_key_is_refused():
    body = A_MANIFEST.to_bytes()[47:].replace(b'"step":50,', b'"step":50,"step":51,')
    with pytest.raises(IntegrityError, match="duplicate key 'step'"):
        Manifest.from_bytes(vouched(body), "x")


@pytest.mark.parametrize("read", READERS)
def test_newer_format_says_what_to_do(read: Callable[[bytes, str], object]):
    kind = b"sidesave-rank" if read == RankRecord.from_bytes else b"sidesave"
    body = b'{"format":"%s","version":2,"unheard":"of"}' % kind
    with pytest.raises(
        FormatVersionError, match="version 2; this sidesave reads version 1, so upgrade it"
    ):
        read(vouched(body), "x")


@given(TEXT)
def test_file_name_that_could_leave_the_directory_is_refused(name: str):
    body = {"name": name, "nbytes": 1, "xxh3_128": "0" * 32}
    if set(name) & set("/\\\0\n ") or name.startswith(".") or not name:
        with pytest.raises(IntegrityError, match="not a valid file name"):
            FileRecord.from_json(body, "x")


@pytest.mark.parametrize(
    "name", ["..", "../step-00000001/manifest.json", "/etc/passwd", ".manifest.json.1", "a/b", ""]
)
def test_records_of_files_elsewhere_are_refused(name: str):
    for record in (
        FileRecord(name, 1, "0" * 32),
        FileRecord("fine", 1, None, "c", FileRecord(name, 1, "0" * 32)),
    ):
        with pytest.raises(IntegrityError, match="not a valid file name"):
            FileRecord.from_json(record.to_json(), "x")


@given(st.integers(0, 10**18))
def test_step_names_read_back(step: int):
    assert parse_step_directory(step_directory(step)) == step
    assert parse_hidden_directory(hidden_directory(step, NEW, "partial")) == (step, NEW, "partial")


@pytest.mark.parametrize(
    "name",
    [
        "step-1",
        "step-000000001",
        "step-0000000a",
        "step-00000001/",
        "step--0000001",
        "step-" + "\u0661" * 8,
    ],
)
def test_other_names_are_no_steps(name: str):
    assert parse_step_directory(name) is None
    assert parse_hidden_directory(f".{name}.{NEW}.partial") is None
