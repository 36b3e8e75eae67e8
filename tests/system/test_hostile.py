"""Hostile bytes: whatever a file or a message holds, the answer is a typed error, soon, and no code
runs.
"""

import contextlib
import json
import os
import pickle
import random
import select
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import campaigns
import forks
import msgpack
import pytest
import torch
from campaigns import Share
from hostile_bytes import MSGPACK_BOMBS
from hypothesis import given
from hypothesis import strategies as st
from trainers import DEADLINE_S, ROOT, save

sys.path.insert(0, str(ROOT))
import sidesave
from scripts import fuzz
from sidesave.errors import (
    CheckpointError,
    IntegrityError,
    SidesaveError,
    StateMismatchError,
    UnsupportedValueError,
)
from sidesave.stager.state.tags import Tag
from sidesave.stager.state.treespec import TreeSpec
from sidesave.writer_daemon import wire
from sidesave.writer_daemon.format import manifest, tensor_file

FLIPS = 500

pytestmark = pytest.mark.usefixtures("seed")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a value of every kind, in a run directory of its own."""
    return fuzz.make_checkpoint(tmp_path_factory.mktemp("run"))


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """A copy of it to be damaged; its run directory has all that belongs to one."""
    shutil.copytree(original.parent, tmp_path / "run", symlinks=True)
    return tmp_path / "run" / original.name


def read_in_all_ways(path: Path) -> list[SidesaveError]:
    """What each way of reading a checkpoint raises; other errors are not caught."""
    raised: list[SidesaveError] = []
    into = {"x": {"w": torch.zeros(2, 3), "complex": torch.zeros(2, dtype=torch.complex128)}}
    for read in (
        lambda: sidesave.load(path),
        lambda: sidesave.load(path, into=into),
        lambda: sidesave.load(path, include="x", verify=False),
    ):
        try:
            read()
        except SidesaveError as error:
            raised.append(error)
    report = sidesave.verify(path)
    if not report.ok:
        raised.append(IntegrityError(*map(str, report.faults)))
    return raised


def attacked(name: str, data: bytes, read: Callable[[bytes], object]) -> bool:
    """Whether one input was accepted; a rule that is broken raises."""
    return fuzz.attack(fuzz.Target(name, (), fuzz.mutate_bytes, read), data)


# Random damage ------------------------------------------------------------------------------------


def test_malformed_input_of_every_parser_is_refused_with_typed_errors_in_bounded_memory_and_time(
    tmp_path: Path,
):
    counts = fuzz.campaign(tmp_path, campaigns.seed(), rounds=25)
    assert len(counts) >= 13
    forgiving = {"lease", "history"}  # what is no record of theirs counts as none
    assert all(refused for name, (_, refused) in counts.items() if name not in forgiving), counts


@pytest.mark.slow(minutes=2)
def test_malformed_input_for_some_time(tmp_path: Path, share: Share):
    fuzz.campaign(tmp_path, share.chance.randrange(1 << 30), seconds=share.seconds)


def test_the_fuzzer_can_be_run_by_hand():
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "scripts.fuzz",
        "--seconds",
        "1",
        "--seed",
        "5",
    ]
    done = forks.run(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "manifest: " in done.stdout


@pytest.mark.parametrize("breach", ["raises", "hangs", "allocates", "unpickles"])
def test_the_fuzzer_notices_every_breach(monkeypatch: pytest.MonkeyPatch, breach: str):
    monkeypatch.setattr(fuzz, "DEADLINE_S", 0.2)
    does: dict[str, Callable[[bytes], object]] = {
        "raises": lambda data: {}["missing"],
        "hangs": lambda data: select.select([], [], [], 60),
        "allocates": lambda data: bytearray(300 << 20),
        "unpickles": lambda data: pickle.loads(pickle.dumps(Path)),
    }
    with pytest.raises(fuzz.Breach):
        attacked(breach, b"", does[breach])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("kind", [manifest.Manifest, manifest.RankRecord, manifest.Head])
def test_any_field_of_any_type_is_refused_or_read(original: Path, kind: Any):
    name = "rank-00000.json" if kind is manifest.RankRecord else "manifest.json"
    whole = json.loads(fuzz.unseal((original / name).read_bytes()))

    @given(st.sampled_from(sorted(whole)), JSON)
    def replaced(field: str, value: Any) -> None:
        data = fuzz.seal(json.dumps(whole | {field: value}, separators=(",", ":")).encode())
        with contextlib.suppress(CheckpointError):
            kind.from_bytes(data, name)

    replaced()


@given(st.lists(st.integers(-2, 2**70) | st.none() | st.text(max_size=3), max_size=5), st.data())
def test_any_shape_and_offsets_are_refused_or_make_sense(shape: list[Any], data: st.DataObject):
    offsets = data.draw(st.lists(st.integers(-3, 30) | st.just(2**64) | st.floats(), max_size=3))
    entry = {"dtype": "U8", "shape": shape, "data_offsets": offsets}
    header = json.dumps(
        {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "b": entry}
    ).encode()
    try:
        file = tensor_file.parse_tensor_file(fuzz.pack_tensor_file(header, b""), "h")
    except IntegrityError:
        return
    assert [entry.offset for entry in file.entries] == [file.data_offset, file.data_offset + 4]
    assert 0 <= file.nbytes < 1 << 64
    assert tensor_file.count_blocks(file) == -(-file.data_offset // tensor_file.BLOCK_NBYTES) + (
        file.nbytes > file.data_offset
    )


@given(
    st.lists(st.integers(0, 3 * tensor_file.BLOCK_NBYTES), max_size=6),
    st.integers(8, 2 * tensor_file.BLOCK_NBYTES),
)
def test_blocks_are_counted_as_they_are_listed(lengths: list[int], data_offset: int):
    entries, end = [], data_offset
    for number, nbytes in enumerate(lengths):
        entries.append(tensor_file.TensorEntry(str(number), "U8", (nbytes,), end, nbytes))
        end += nbytes
    file = tensor_file.TensorFile(data_offset, end, tuple(entries), {})
    assert tensor_file.count_blocks(file) == len(tensor_file.digest_blocks(file))


# Bombs --------------------------------------------------------------------------------------------

JSON_BOMBS = {
    "nested lists": b"[" * 1_000_000,
    "nested maps": b'{"a":' * 500_000,
    "closed nest": b'{"a":' + b"[" * 400_000 + b"]" * 400_000 + b"}",
    "duplicate at the end": b"{"
    + b",".join(b'"%d":0' % (n % 99_999) for n in range(100_000))
    + b"}",
    "huge number": b'{"a":' + b"9" * 1_000_000 + b"}",
    "huge exponent": b'{"a":1e999999999}',
    "NaN": b'{"a":NaN}',
    "half a surrogate pair": b'{"a":"\\ud800"}',
    "not UTF-8": b'{"a":"\xff"}',
    "empty lists": b'{"a":[' + b"[]," * 300_000 + b"[]]}",
    "nothing": b"",
    "no object": b"[]",
}


@pytest.mark.drawn
@pytest.mark.parametrize("bomb", JSON_BOMBS)
@pytest.mark.parametrize("kind", [manifest.Manifest, manifest.RankRecord, manifest.Head, "header"])
def test_json_bombs_are_refused(kind: Any, bomb: str):
    data = JSON_BOMBS[bomb]
    if kind == "header":
        assert not attacked(
            bomb,
            fuzz.pack_tensor_file(data, b""),
            lambda data: tensor_file.parse_tensor_file(data, "h"),
        )
    else:
        assert not attacked(bomb, fuzz.seal(data or b"{"), lambda data: kind.from_bytes(data, "m"))


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def nest(depth: int, tag: int = Tag.LIST) -> Any:
    node: Any = 1
    for _ in range(depth):
        node = [tag, node]
    return node


NODES: dict[str, Any] = {
    "array of 8 TB": [Tag.NUMPY_FILE, fuzz.npy(b"'<f8'", b"(1000000000000,)")],
    "array of 8 GB": [Tag.NUMPY_FILE, fuzz.npy(b"'<f8'", b"(1000000000,)")],
    "scalar of 8 GB": [Tag.NUMPY_SCALAR, "", fuzz.npy(b"'<f8'", b"(1000000000,)")],
    "items of 2 GB": [Tag.NUMPY_FILE, fuzz.npy(b"'V2147483647'", b"()")],
    "array whose size overflows": [Tag.NUMPY_FILE, fuzz.npy(b"'<f8'", b"(4294967296,4294967296)")],
    "array of negative extents": [Tag.NUMPY_FILE, fuzz.npy(b"'<f8'", b"(-1,-3)")],
    "array with a deep header": [Tag.NUMPY_FILE, fuzz.npy(b"(" * 150 + b")" * 150, b"(3,)")],
    "array with a long header": [Tag.NUMPY_FILE, fuzz.npy(b"'<f8'", b"(" + b"1," * 20_000 + b")")],
    "array with an expression": [Tag.NUMPY_FILE, fuzz.npy(b"-" * 9000 + b"1", b"(3,)")],
    "array of objects": [Tag.NUMPY_FILE, fuzz.npy(b"'|O'", b"(3,)")],
    "array of a struct of objects": [Tag.NUMPY_FILE, fuzz.npy(b"[('a','|O')]", b"(3,)")],
    "scalar that is a pointer": [Tag.NUMPY_SCALAR, "|O", bytes(8)],
    "scalar of another length": [Tag.NUMPY_SCALAR, "<f8", bytes(16)],
    "scalar without bytes": [Tag.NUMPY_SCALAR, "<f8", b""],
    "scalar of a made-up dtype": [Tag.NUMPY_SCALAR, [["a", "O"]], bytes(8)],
    "zeros without end": [Tag.BYTEARRAY, 1 << 40],
    "stream without end": [Tag.BYTES_IO, 1 << 40, 0],
    "stream before its start": [Tag.BYTES_IO, b"", -1],
    "recursion": nest(300),
    "recursion of keys": nest(300, Tag.SET),
    "key that cannot be one": [Tag.ITEMS, [[[Tag.LIST], 1]]],
    "key without a value": [Tag.ITEMS, [[1]]],
    "factory of another kind": [Tag.DEFAULT_DICT, "system", []],
    "zone outside": [Tag.DATETIME, "2020-01-01T00:00:00", 0, "../../../../etc/passwd"],
    "zone by its path": [Tag.DATETIME, "2020-01-01T00:00:00", 0, "/etc/localtime"],
    "zone that is a directory": [Tag.DATETIME, "2020-01-01T00:00:00", 0, "Europe"],
    "zone with a null byte": [Tag.DATETIME, "2020-01-01T00:00:00", 0, "Europe/Berlin\0"],
    "zone that is no text": [Tag.TIME, "00:00:00", 0, 7],
    "date that is none": [Tag.DATE, "2020-02-31"],
    "time before time": [Tag.TIMEDELTA, -(10**12), 0, 0],
    "dtype that is a module": [Tag.DTYPE, "nn"],
    "layout that is a module": [Tag.SPARSE, "_dynamo", [2], None, {}],
    "sparse beyond its shape": [
        Tag.SPARSE,
        "sparse_coo",
        [1, 1],
        False,
        {n: [0, "x.w"] for n in ("indices", "values")},
    ],
    "sparse without parts": [Tag.SPARSE, "sparse_csr", [2, 2], None, {}],
    "size of texts": [Tag.SIZE, "a"],
    "device of another world": [Tag.DEVICE, "no such device"],
    "device by a number": [Tag.DEVICE, 0],
    "number that is none": [Tag.INT, "0xzz"],
    "tag that is none": [99],
    "tag that is text": ["a"],
    "node without a tag": [],
    "map in the place of a node": {"a": 1},
    "extension type": msgpack.ExtType(5, b"x"),
    "timestamp": msgpack.Timestamp(0, 0),
    "tensor that is a pickle": [Tag.TENSOR, "x.w", "object"],
}


@pytest.mark.parametrize("name", NODES)
def test_hostile_values_of_a_treespec_are_refused(name: str):
    def read(data: bytes) -> None:
        TreeSpec(data, "objects").build(lambda ref: torch.full((2, 3), 7))

    assert not attacked(name, fuzz.pack({"a": NODES[name]}), read)


@pytest.mark.parametrize("bomb", MSGPACK_BOMBS)
def test_msgpack_bombs_are_refused(bomb: str):
    assert not attacked(bomb, MSGPACK_BOMBS[bomb], wire.decode)
    assert not attacked(bomb, MSGPACK_BOMBS[bomb], lambda data: TreeSpec(data, "objects"))


@pytest.mark.parametrize("hide", ["value", "key", "item of a set", "array", "scalar"])
def test_nothing_is_unpickled_unless_it_was_allowed(tmp_path: Path, checkpoint: Path, hide: str):
    """Though the digests are right and the manifest says that nothing is pickled."""
    touched = tmp_path / "touched"
    payload = pickle.dumps(Touch(touched))
    head = fuzz.npy(b"'|O'", b"()")[:-24]
    node: Any = {
        "value": [Tag.PICKLE, payload],
        "key": [Tag.ITEMS, [[[Tag.PICKLE, payload], 1]]],
        "item of a set": [Tag.SET, [Tag.PICKLE, payload]],
        "array": [Tag.NUMPY_FILE, head + payload],
        "scalar": [Tag.NUMPY_SCALAR, "", head + payload],
    }[hide]
    name = "objects.rank-00000.msgpack"
    body = fuzz.unpack((checkpoint / name).read_bytes()) | {"evil": node}
    fuzz.Forgery(checkpoint).forge(name, fuzz.pack(body))
    ways: list[dict[str, Any]] = [
        {},
        {"into": {"evil": None}},
        {"verify": False},
        {"include": "evil"},
    ]
    for options in ways:
        with pytest.raises((UnsupportedValueError, IntegrityError)):
            sidesave.load(checkpoint, **options)
    assert sidesave.verify(checkpoint).ok
    if hide != "key":  # which is a part of names, so it is needed to tell which are meant
        assert sidesave.load(checkpoint, include="x")["x"]
    assert not touched.exists()
    if hide == "value":
        sidesave.load(checkpoint, allow_pickle=True)["evil"].close()
        assert touched.exists(), "or it would prove nothing"


@pytest.mark.drawn
@pytest.mark.parametrize(
    "optimizer",
    [
        {"state": {}, "param_groups": [5]},
        {"state": {}, "param_groups": [{"params": 5}]},
        {"state": {}, "param_groups": [{}]},
        {"state": {}, "param_groups": [{"params": [[1]]}]},
        {"state": {0: 5}, "param_groups": [{"params": [0]}]},
        {"state": [], "param_groups": {}},
        {"param_groups": None},
        5,
        None,
    ],
)
def test_malformed_optimizer_state_is_refused_and_nothing_is_touched(
    tmp_path: Path, optimizer: Any
):
    path = save(tmp_path, {"optimizer": optimizer})
    target = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    before = repr(target.state_dict())
    with pytest.raises(StateMismatchError):
        sidesave.load(path, into={"optimizer": target})
    assert repr(target.state_dict()) == before


# Forged checkpoints -------------------------------------------------------------------------------


def forge_json(checkpoint: Path, name: str, change: Callable[[Any], object]) -> None:
    forgery = fuzz.Forgery(checkpoint)
    body = json.loads(fuzz.unseal(forgery.originals[name]))
    change(body)
    forgery.forge(name, json.dumps(body, separators=(",", ":")).encode())


def forge_header(checkpoint: Path, change: Callable[[Any], object]) -> None:
    name = "x.rank-00000.safetensors"
    forgery = fuzz.Forgery(checkpoint)
    header, body = fuzz.split_tensor_file(forgery.originals[name])
    entries = json.loads(header)
    change(entries)
    forgery.forge(name, fuzz.pack_tensor_file(json.dumps(entries).encode(), body))


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            ".",
            "..",
            "../outside",
            "/etc/passwd",
            "a/b",
            "a\\b",
            "x\0",
            "x\n",
            ".hidden",
            "\u202ex",
            "x" * 5000,
        ),
        *(5, None, ["x"], {"x": 1}, True, "\udc80"),
    ],
)
def test_names_that_lead_elsewhere_are_refused(checkpoint: Path, name: Any):
    def objects(body: Any) -> None:
        body["objects"]["name"] = name

    def file(body: Any) -> None:
        body["files"][0]["name"] = name

    def digests(body: Any) -> None:
        body["files"][0]["digests"]["name"] = name

    def record(body: Any) -> None:
        body["records"][0]["name"] = name

    for change, target in [(objects, "rank-00000.json")] * 1 + [
        (file, "rank-00000.json"),
        (digests, "rank-00000.json"),
        (record, "manifest.json"),
    ]:
        data = json.loads(fuzz.unseal((checkpoint / target).read_bytes()))
        change(data)
        kind = manifest.Manifest if target == "manifest.json" else manifest.RankRecord
        with pytest.raises(IntegrityError):
            kind.from_bytes(fuzz.seal(json.dumps(data, separators=(",", ":")).encode()), target)


HEADERS: dict[str, Callable[[Any], object]] = {
    "a hole": lambda header: header["x.w"].update(data_offsets=[40, 64]),
    "an overlap": lambda header: header["x.w"].update(data_offsets=[24, 48]),
    "an end before its start": lambda header: header["x.w"].update(data_offsets=[32, 8]),
    "a negative offset": lambda header: header["x.w"].update(data_offsets=[-8, 24]),
    "an end beyond the file": lambda header: header["x.w"].update(data_offsets=[32, 1 << 40]),
    "an end beyond 64 bits": lambda header: header["x.w"].update(data_offsets=[32, 1 << 70]),
    "offsets that are no numbers": lambda header: header["x.w"].update(data_offsets=[32.0, 56.0]),
    "three offsets": lambda header: header["x.w"].update(data_offsets=[32, 40, 56]),
    "a shape of another size": lambda header: header["x.w"].update(shape=[2, 4]),
    "a shape that overflows to the size": lambda header: header["x.w"].update(
        shape=[(1 << 62) + 6 >> 1, 2]
    ),
    "a shape with a negative extent": lambda header: header["x.w"].update(shape=[-2, -3]),
    "a shape with a fraction": lambda header: header["x.w"].update(shape=[2.0, 3.0]),
    "an empty shape that overflows": lambda header: header.update(
        {"x.w": {"dtype": "F32", "shape": [0, 1 << 62, 1 << 62], "data_offsets": [32, 32]}}
    ),
    "a shape of many extents": lambda header: header["x.w"].update(shape=[2, 3] + [1] * 100),
    "a shape of a million extents": lambda header: header["x.w"].update(shape=[1 << 62] * 100_000),
    "an unknown dtype": lambda header: header["x.w"].update(dtype="F128"),
    "a dtype that is no text": lambda header: header["x.w"].update(dtype=["F32"]),
    "another name": lambda header: header.update({"y": header.pop("x.w")}),
    "one name less": lambda header: header.pop("x.w"),
    "an entry that is a list": lambda header: header.update({"x.w": [1]}),
    "metadata that is no text": lambda header: header["__metadata__"].update(format=1),
    "metadata that is a list": lambda header: header.update(__metadata__=[]),
}


@pytest.mark.drawn
@pytest.mark.parametrize("what", HEADERS)
def test_headers_that_do_not_make_sense_are_refused(checkpoint: Path, what: str):
    forge_header(checkpoint, HEADERS[what])
    with pytest.raises(IntegrityError):
        sidesave.load(checkpoint)
    with pytest.raises(IntegrityError):
        sidesave.load(checkpoint, include="x.*", verify=False)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("manifest.json", lambda body: body.update(records=[], world_size=0)),
        ("manifest.json", lambda body: body.update(records=body["records"] * 2, world_size=2)),
        ("manifest.json", lambda body: body["tensors"].update(ghost=[0, "F32", [2], 0])),
        ("manifest.json", lambda body: body["tensors"].pop("x.w")),
        ("manifest.json", lambda body: body["records"][0].update(nbytes=1 << 62)),
        ("rank-00000.json", lambda body: body["objects"].update(nbytes=1 << 62)),
        ("rank-00000.json", lambda body: body["files"][0].update(nbytes=1 << 62)),
        ("rank-00000.json", lambda body: body["files"][0]["digests"].update(nbytes=1 << 62)),
        ("rank-00000.json", lambda body: body.update(files=[])),
        ("rank-00000.json", lambda body: body["objects"].update(name="manifest.json")),
        (
            "rank-00000.json",
            lambda body: body["files"][0].update(name="objects.rank-00000.msgpack"),
        ),
    ],
)
def test_records_that_contradict_each_other_are_refused(
    checkpoint: Path, name: str, change: Callable[[Any], object]
):
    forge_json(checkpoint, name, change)
    with pytest.raises(IntegrityError):
        sidesave.load(checkpoint)


def test_a_sparse_file_of_terabytes_costs_neither_memory_nor_time(checkpoint: Path):
    """Header, record and manifest agree that a tensor has 8 TB; the digest list has one entry too
    few for that.
    """
    name = "x.rank-00000.safetensors"
    nbytes = 8 << 40
    forgery = fuzz.Forgery(checkpoint)
    header = json.dumps(
        {"x.w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}
    ).encode()
    forgery.forge(name, fuzz.pack_tensor_file(header, b""))
    record = json.loads(fuzz.unseal((checkpoint / "rank-00000.json").read_bytes()))
    record["files"][0]["nbytes"] = 8 + len(header) + nbytes
    forgery.forge("rank-00000.json", json.dumps(record, separators=(",", ":")).encode())
    try:
        os.truncate(checkpoint / name, 8 + len(header) + nbytes)
    except OSError as error:
        pytest.skip(f"no sparse file of this size here: {error}")

    def read(data: bytes) -> None:
        assert not sidesave.verify(checkpoint).ok
        sidesave.load(checkpoint)

    assert not attacked("a sparse file", b"", read)


@pytest.mark.parametrize(
    "name", ["manifest.json", "rank-00000.json", "objects.rank-00000.msgpack", "x.rank-00000.xxh3"]
)
def test_a_small_file_that_has_become_terabytes_is_not_read(checkpoint: Path, name: str):
    try:
        os.truncate(checkpoint / name, 8 << 40)
    except OSError as error:
        pytest.skip(f"no sparse file of this size here: {error}")

    def read(data: bytes) -> None:
        assert not sidesave.verify(checkpoint).ok
        sidesave.load(checkpoint)

    assert not attacked("a sparse file", b"", read)


# Something else in the place of a file ------------------------------------------------------------


def put(kind: str, path: Path, tmp_path: Path) -> None:
    """Replace a file by something else of its name."""
    if path.is_dir() and not path.is_symlink():
        path.rename(tmp_path / "moved")
    else:
        path.rename(tmp_path / "moved")
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "link to itself":
            path.symlink_to(path.name)
        case "link to the same bytes":
            path.symlink_to(tmp_path / "moved")
        case "link to nothing":
            path.symlink_to("nowhere")
        case "socket":
            with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(path.parent):
                one.bind(path.name)
        case "device":
            try:
                # /dev/zero, which has no end
                os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
                path.open("rb").close()
            except PermissionError:
                pytest.skip("cannot make a device that can be opened here")
        case _:
            raise AssertionError(kind)


KINDS = [
    "pipe",
    "directory",
    "link to itself",
    "link to the same bytes",
    "link to nothing",
    "socket",
    "device",
]
NAMES = [
    "manifest.json",
    "rank-00000.json",
    "objects.rank-00000.msgpack",
    "x.rank-00000.safetensors",
    "x.rank-00000.xxh3",
]


@pytest.mark.drawn
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_only_files_are_read_and_nothing_else_is_waited_for(
    checkpoint: Path, tmp_path: Path, kind: str, name: str
):
    put(kind, checkpoint / name, tmp_path)
    start = time.monotonic()
    assert len(read_in_all_ways(checkpoint)) == 4
    with pytest.raises(IntegrityError):
        sidesave.load(checkpoint)
    assert time.monotonic() - start < DEADLINE_S


@pytest.mark.drawn
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_directory_with_such_a_checkpoint_is_still_of_use(
    checkpoint: Path, tmp_path: Path, kind: str
):
    put(kind, checkpoint / "manifest.json", tmp_path)
    with sidesave.Checkpointer(checkpoint.parent) as checkpointer:
        assert checkpointer.steps() == []
        assert checkpointer.latest_step() is None
        with pytest.raises(CheckpointError):
            checkpointer.load()
        with pytest.raises(CheckpointError):
            checkpointer.load(7)
        checkpointer.save(8, fuzz.a_state(), blocking=True)
        assert checkpointer.steps() == [8]


@pytest.mark.drawn
@pytest.mark.parametrize("kind", [*KINDS, "junk", "long", "nest", "empty", "other types"])
def test_no_state_of_the_hidden_files_hangs_or_crashes_the_start(
    checkpoint: Path, tmp_path: Path, kind: str
):
    """The lease and its like. The directory may be refused; then with a typed error, and in
    time.
    """
    run = checkpoint.parent
    hidden = [
        path
        for path in run.rglob("*")
        if path.is_file() and path.relative_to(run).parts[0].startswith(".")
    ]
    assert hidden
    for number, path in enumerate(hidden):
        again = tmp_path / str(number)
        shutil.copytree(run, again, symlinks=True)
        place = again / path.relative_to(run)
        junk = {
            "junk": random.Random(campaigns.seed()).randbytes(4096),
            "long": b" " * (8 << 20),
            "nest": b"[" * 4096,
            "empty": b"",
            "other types": json.dumps(
                {"session": 1, "pid": "x", "started": [], "trainer_pid": -1, "epoch": 2**80}
            ).encode(),
        }
        if kind in junk:
            place.write_bytes(junk[kind])
        else:
            moved = tmp_path / f"moved-{number}"
            moved.mkdir()
            put(kind, place, moved)
        before = {path: path.read_bytes() for path in tmp_path.glob("moved-*/moved")}
        with contextlib.suppress(SidesaveError), sidesave.Checkpointer(again) as checkpointer:
            checkpointer.save(8, {"a": 1}, blocking=True)
            assert checkpointer.load()["a"] == 1
        assert {path: path.read_bytes() for path in before} == before, (
            "something was written through a link"
        )


# Every bit ----------------------------------------------------------------------------------------


def assert_noticed(path: Path, what: str) -> None:
    assert not sidesave.verify(path).ok, f"verify() did not notice {what}"
    with pytest.raises(CheckpointError):
        sidesave.load(path)


def flip(checkpoint: Path, positions: Iterator[tuple[Path, int]]) -> int:
    """Flip bits one after the other, each in place and back; how many there were."""
    count = 0
    for path, bit in positions:
        with path.open("r+b", buffering=0) as file:
            original = os.pread(file.fileno(), 1, bit // 8)
            os.pwrite(file.fileno(), bytes([original[0] ^ 1 << bit % 8]), bit // 8)
            assert_noticed(checkpoint, f"bit {bit} of {path.name}")
            os.pwrite(file.fileno(), original, bit // 8)
            count += 1
    assert sidesave.verify(checkpoint).ok, "what has been flipped back is as it was"
    sidesave.load(checkpoint)
    return count


def sample(checkpoint: Path, total: int) -> Iterator[tuple[Path, int]]:
    """Bits of every file: all of a small one where there is room for that, else as many as the
    others' share.
    """
    rng = random.Random(campaigns.seed())
    files = sorted(checkpoint.iterdir(), key=lambda path: path.stat().st_size)
    for number, path in enumerate(files):
        bits = 8 * path.stat().st_size
        share = total // (len(files) - number)
        chosen = range(bits) if bits <= share else rng.sample(range(bits), share)
        yield from ((path, bit) for bit in chosen)
        total -= len(chosen)


@pytest.mark.slow
def test_500_flipped_bits_are_all_noticed(checkpoint: Path):
    assert flip(checkpoint, sample(checkpoint, FLIPS)) == FLIPS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thousands_of_flipped_bits_are_all_noticed(checkpoint: Path, share: Share):
    assert flip(checkpoint, share.points(sample(checkpoint, 10_000)))


def truncated(checkpoint: Path, cuts: Iterable[tuple[Path, int]]) -> None:
    for path, length in cuts:
        data = path.read_bytes()
        os.truncate(path, length)
        assert_noticed(checkpoint, f"{path.name} cut to {length} bytes")
        path.write_bytes(data)
    assert sidesave.verify(checkpoint).ok


def test_every_file_cut_anywhere_is_noticed(checkpoint: Path):
    rng = random.Random(campaigns.seed())
    for path in sorted(checkpoint.iterdir()):
        size = path.stat().st_size
        lengths = {0, 1, 7, 8, size // 2, size - 1, *(rng.randrange(size) for _ in range(6))} - {
            size
        }
        truncated(checkpoint, ((path, length) for length in lengths))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_file_cut_everywhere_is_noticed(checkpoint: Path, share: Share):
    cuts = [
        (path, length)
        for path in sorted(checkpoint.iterdir())
        for length in range(path.stat().st_size)
    ]
    truncated(checkpoint, share.points(cuts))


@pytest.mark.parametrize("extra", [b"\0", b" ", b"\n", b"}", b"x"])
def test_every_file_with_one_more_byte_is_noticed(checkpoint: Path, extra: bytes):
    for path in sorted(checkpoint.iterdir()):
        data = path.read_bytes()
        path.write_bytes(data + extra)
        assert_noticed(checkpoint, f"one more byte of {path.name}")
        path.write_bytes(data)
    assert sidesave.verify(checkpoint).ok


def test_every_file_that_is_missing_is_noticed(checkpoint: Path, tmp_path: Path):
    for path in sorted(checkpoint.iterdir()):
        path.rename(tmp_path / "aside")
        assert_noticed(checkpoint, f"that {path.name} is missing")
        (tmp_path / "aside").rename(path)
    assert sidesave.verify(checkpoint).ok


def test_every_two_files_that_have_changed_places_are_noticed(checkpoint: Path, tmp_path: Path):
    files = sorted(checkpoint.iterdir())

    def swap(one: Path, other: Path) -> None:
        one.rename(tmp_path / "aside")
        other.rename(one)
        (tmp_path / "aside").rename(other)

    for number, one in enumerate(files):
        for other in files[:number]:
            swap(one, other)
            assert_noticed(checkpoint, f"that {one.name} and {other.name} have changed places")
            swap(one, other)
    assert sidesave.verify(checkpoint).ok


@pytest.mark.parametrize(
    "name", ["rank-00001.json", "y.rank-00000.safetensors", ".hidden", "x", "manifest.json.bak"]
)
def test_a_file_too_many_is_noticed(checkpoint: Path, name: str):
    (checkpoint / name).write_bytes(b"x")
    assert [fault.file for fault in sidesave.verify(checkpoint).faults] == [name]
    sidesave.load(checkpoint)  # what is listed is whole
