"""Malformed bytes for everything that reads bytes from outside, until the time is up or something
gives way.

python -m scripts.fuzz --seconds 60 --seed 7

Every parser may answer with one of its own typed errors, or accept what it got. It may not raise
anything else, take long, take memory out of proportion, import or run anything, or write. What
breaks a rule is printed with the bytes that did it. The same mutators and targets serve the tests.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import json
import os
import random
import re
import signal
import struct
import sys
import tempfile
import time
import traceback
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

import msgpack
import numpy as np
import torch
import xxhash

import sidesave
from scripts.bench.tables import TrackedTable
from sidesave.errors import SidesaveError
from sidesave.stager.memory.arena import Arena
from sidesave.stager.state import tree
from sidesave.stager.state.treespec import TreeSpec
from sidesave.writer_daemon import protocol, wire
from sidesave.writer_daemon.format import manifest, tensor_file
from sidesave.writer_daemon.format.extra_files import pack_files, unpack_files
from sidesave.writer_daemon.format.sealed_records import bound_to, open_record
from sidesave.writer_daemon.lease.record import LeaseRecord
from sidesave.writer_daemon.log import HISTORY_FILE
from sidesave.writer_daemon.sealing.keys import KEYS, Keys, SaveKey, data_key_of

DEADLINE_S = 20.0
"""For one input, all of which are read in milliseconds: a hang, on however busy a machine."""
MEMORY_FACTOR = 64
MEMORY_NBYTES = 100 << 20
"""An input may cost so many times its length, and so much besides: msgpack keeps room for 10,000
items a level.
"""
FORBIDDEN = {
    "pickle.find_class",
    "os.system",
    "os.exec",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
}
"""What Python audits that no parser has any business with."""


class Hang(BaseException):
    """An input took longer than it may."""


class Breach(Exception):
    """A parser broke a rule; the message says which, with the input."""


# Mutation -----------------------------------------------------------------------------------------

NUMBERS = [
    0,
    1,
    -1,
    2,
    7,
    255,
    256,
    4095,
    4096,
    65535,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**62,
    2**63 - 1,
]
TEXTS = [
    *(
        "",
        ".",
        "..",
        "../../etc/passwd",
        "/etc/passwd",
        "a/b",
        "a\0b",
        "a\nb",
        "-rf",
        "%00",
        "\u202e",
        "\U0001d518" * 50,
    ),
    *(
        "manifest.json",
        "rank-00000.json",
        "step-00000001",
        "x" * 5000,
        "O",
        "V9999999999",
        "_dynamo",
        "cuda:99",
    ),
    *(
        "F64",
        "F32",
        "BOOL",
        "sparse_csr",
        "float8_e4m3fn",
        "complex128",
        "Europe/Berlin",
        "../../../etc/localtime",
    ),
]


def hostile_value(rng: random.Random) -> Any:
    """A leaf of a kind that the place it goes to may not expect."""
    match rng.randrange(10):
        case 0:
            return rng.choice([None, True, False])
        case 1 | 2:
            return rng.choice(NUMBERS) * rng.choice([1, 1, 1, -1])
        case 3:
            return rng.choice([0.0, -0.0, 1.5, -1e308, 5e-324, float("inf"), float("nan")])
        case 4 | 5:
            return rng.choice(TEXTS)
        case 6:
            return [hostile_value(rng) for _ in range(rng.randrange(4))]
        case 7:
            return {rng.choice(TEXTS): hostile_value(rng) for _ in range(rng.randrange(3))}
        case 8:
            return nested(rng, rng.choice([3, 90, 110, 480]))
        case _:
            return rng.getrandbits(8)


def nested(rng: random.Random, depth: int) -> Any:
    """Lists and maps in each other."""
    value: Any = 1
    for _ in range(depth):
        value = [rng.choice([2, 3, 4, 7]), value] if rng.random() < 0.7 else {"a": value}
    return value


def mutate_tree(
    rng: random.Random, value: Any, hostile: Callable[[random.Random], Any] = hostile_value
) -> Any:
    """A copy of a nest in which a few nodes are replaced, removed, doubled, or swapped with
    others.
    """
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        places = list(_places(value))
        if not places:
            return hostile(rng)
        holder, key = rng.choice(places)
        match rng.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(key, holder[key])
            case 2:
                other, where = rng.choice(places)
                holder[key] = json_copy(other[where])
            case 3 if isinstance(holder[key], int):
                holder[key] += rng.choice([-1, 1, 8, 4096, 2**32])
            case _:
                holder[key] = hostile(rng)
    return value


def json_copy(value: Any) -> Any:
    """A nest that shares nothing with ``value``."""
    if isinstance(value, dict):
        return {key: json_copy(item) for key, item in value.items()}
    return [json_copy(item) for item in value] if isinstance(value, list) else value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every ``holder[key]`` of a nest."""
    stack = [value]
    while stack:
        holder = stack.pop()
        keys = (
            list(holder)
            if isinstance(holder, dict)
            else range(len(holder))
            if isinstance(holder, list)
            else ()
        )
        for key in keys:
            yield holder, key
            stack.append(holder[key])


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bits flipped, ends cut, stretches repeated, lengths made huge."""
    work = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at = rng.randrange(len(work) + 1)
        match rng.randrange(7):
            case 0 | 1 if at < len(work):
                work[at] ^= 1 << rng.randrange(8)
            case 2:
                del work[at:]
            case 3:
                work[at:at] = work[at : at + rng.randrange(64)]
            case 4:
                number = rng.choice(NUMBERS) % 2**64
                packed = struct.pack(rng.choice("<>") + "Q", number)[: rng.choice([1, 2, 4, 8])]
                work[at : at + len(packed)] = packed
            case 5:
                del work[at : at + rng.randrange(32)]
            case _:
                work[at:at] = rng.randbytes(rng.randrange(16))
    return bytes(work)


RAW_JSON = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-0",
    "9" * 4000,
    "9" * 5000,
    "0.1e-400",
    '"\\ud800"',
    '"\\u0000"',
]
RAW_JSON += [
    "[" * 5000,
    "[" * 5000 + "]" * 5000,
    '{"a":1,"a":2}',
    "01",
    "'a'",
    "\xff",
    "//",
    '{"a":' * 3000,
]


def mutate_json(rng: random.Random, data: bytes) -> bytes:
    """Malformed as text or as a nest."""
    if rng.random() < 0.2:
        return mutate_bytes(rng, data)
    body = mutate_tree(
        rng, json.loads(data), lambda rng: "@raw@" if rng.random() < 0.2 else hostile_value(rng)
    )
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=rng.random() < 0.5)
    text = re.sub('"@raw@"', lambda _: rng.choice(RAW_JSON), text)
    if rng.random() < 0.1:  # a key twice
        text = re.sub(r'("[a-z_]+":)', lambda found: f"{found[1]}1,{found[1]}", text, count=1)
    return text.encode("utf-8", "surrogatepass")


def mutate_history(rng: random.Random, data: bytes) -> bytes:
    """Lines malformed, with digests that are right or are not."""
    lines = data.splitlines()
    for number, line in enumerate(lines):
        digest, _, body = line.partition(b" ")
        if body and rng.random() < 0.5:
            body = mutate_json(rng, body).replace(b"\n", b"")
            digest = xxhash.xxh3_64_hexdigest(body).encode() if rng.random() < 0.9 else digest
            lines[number] = digest + b" " + body
    return b"\n".join(lines) + b"\n" * rng.randrange(2)


def hostile_msgpack(rng: random.Random) -> Any:
    """A value that only msgpack has, or one that means something to the treespec."""
    match rng.randrange(8):
        case 0:
            return msgpack.ExtType(rng.randrange(128), rng.randbytes(rng.randrange(20)))
        case 1:
            return msgpack.Timestamp(rng.choice([0, -1, 2**62]), 0)
        case 2:
            return rng.randbytes(rng.randrange(40))
        case 3:
            return [17, hostile_npy(rng)]
        case 4:
            return [rng.randrange(30), *(hostile_value(rng) for _ in range(rng.randrange(5)))]
        case 5:
            return [15, rng.choice(TEXTS), rng.randbytes(rng.choice([0, 1, 8, 16]))]
        case 6:
            shape = [rng.choice([0, 1, 5, 2**31, 2**62]) for _ in range(2)]
            nodes = {
                name: [0, "x.w"] for name in ("indices", "values", "crow_indices", "col_indices")
            }
            return [27, rng.choice(["sparse_coo", "sparse_csr", "_dynamo"]), shape, None, nodes]
        case _:
            return hostile_value(rng)


def npy(descr: bytes, shape: bytes) -> bytes:
    """A .npy file of this header, with 24 bytes of data."""
    text = b"{'descr': %s, 'fortran_order': False, 'shape': %s}" % (descr, shape)
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + bytes(24)


def hostile_npy(rng: random.Random) -> bytes:
    """A .npy file that says what it likes of itself."""
    descr = rng.choice(
        [
            "'<f8'",
            "'|O'",
            "'V2147483647'",
            "[('a','|O')]",
            "'U0'",
            "('<f8',(99999,99999))",
            "1+" * 2000,
        ]
    )
    shape = rng.choice(
        [
            "()",
            "(3,)",
            "(10**9,)",
            "(1000000000000,)",
            "(-1,)",
            "(4294967296,4294967296)",
            "(1," * 300,
        ]
    )
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"
    version = rng.choice([b"\1\0"] * 3 + [b"\2\0", b"\3\0", b"\7\0"])
    length = struct.pack(
        "<H" if version == b"\1\0" else "<I", len(text) + rng.choice([0] * 9 + [1, -1])
    )
    return b"\x93NUMPY" + version + length + text.encode() + rng.randbytes(rng.choice([0, 8, 24]))


RAW_MSGPACK = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x91" * 2000,
    b"\xc1",
]
RAW_MSGPACK += [
    b"\xdd\0\0\xf0\0" * 900,
    b"\xc7\xff\x05",
    b"\xd6\xff\xff\xff\xff\xff",
    b"\xa4\xed\xa0\x80x",
    b"\x81\x01",
]


def mutate_msgpack(rng: random.Random, data: bytes) -> bytes:
    """Malformed as bytes or as a nest."""
    if rng.random() < 0.3:
        at = rng.randrange(len(data))
        return (
            mutate_bytes(rng, data)
            if rng.random() < 0.7
            else data[:at] + rng.choice(RAW_MSGPACK) + data[at:]
        )
    body = mutate_tree(rng, unpack(data), hostile_msgpack)
    with suppress(ValueError, OverflowError):  # nested deeper than msgpack packs
        return pack(body)
    return mutate_bytes(rng, data)


def pack(value: Any) -> bytes:
    """A nest as a message or treespec."""
    return cast("bytes", msgpack.packb(value, unicode_errors="surrogatepass"))


def unpack(data: bytes) -> Any:
    """The nest of a message or treespec."""
    return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)


# Checkpoints whose digests are right --------------------------------------------------------------


def seal(body: bytes) -> bytes:
    """A manifest or record of this JSON, with the digest that makes it believed."""
    rest = body[1:]
    return b'{"xxh3_128":"' + tensor_file.digest(rest).hex().encode() + b'",' + rest


def unseal(data: bytes) -> bytes:
    """The JSON of a manifest or record, without its digest."""
    return b"{" + data[len(seal(b"{")) :]


EXTRA_FILES = {"config.json": b"{}", "vocab.txt": b"a\nb\n"}


def with_extra_files(record: bytes) -> bytes:
    """A record that lists files beside the tensors as well."""
    body = json.loads(unseal(record))
    body["extra_files"] = [
        {"name": name, "nbytes": len(data)} for name, data in EXTRA_FILES.items()
    ]
    for entry, data in zip(body["extra_files"], EXTRA_FILES.values(), strict=True):
        entry["xxh3_128"] = tensor_file.digest(data).hex()
    return seal(json.dumps(body, separators=(",", ":")).encode())


class Forgery:
    """A checkpoint in a directory of its own, each file of which can be replaced so that all
    digests fit again.
    """

    def __init__(self, path: Path) -> None:
        """Take over ``path``, a checkpoint of one rank."""
        self.path = path
        self.originals = {file.name: file.read_bytes() for file in path.iterdir()}

    def restore(self) -> None:
        """Make it whole again."""
        for file in self.path.iterdir():
            if file.name not in self.originals:
                file.unlink()
        for name, data in self.originals.items():
            (self.path / name).write_bytes(data)

    def forge(self, name: str, data: bytes) -> None:
        """Put ``data`` in the place of a file, and make all that vouches for it agree."""
        record = json.loads(self.originals["rank-00000.json"])
        del record["xxh3_128"]
        if name == "manifest.json":
            (self.path / name).write_bytes(seal(data))
            return
        if name == "rank-00000.json":
            self._write_record(data)
            return
        self.write(name, data)
        for file in record["files"]:
            if name == file["name"]:
                file["nbytes"] = len(data)
                digests = _digest_list(data)
                self.write(file["digests"]["name"], digests)
                self._describe(file["digests"], digests)
            for part in ("digests", "tags"):
                if part in file and name == file[part]["name"]:
                    self._describe(file[part], data)
        if name == record["objects"]["name"]:
            self._describe(record["objects"], data)
        self._write_record(json.dumps(record, separators=(",", ":")).encode())

    def write(self, name: str, data: bytes) -> None:
        """Replace a file and nothing else."""
        (self.path / name).write_bytes(data)

    @staticmethod
    def _describe(entry: dict[str, Any], data: bytes) -> None:
        entry.update(nbytes=len(data), xxh3_128=tensor_file.digest(data).hex())

    def _write_record(self, body: bytes) -> None:
        data = seal(body)
        self.write("rank-00000.json", data)
        top = json.loads(unseal(self.originals["manifest.json"]))
        self._describe(top["records"][0], data)
        self.write("manifest.json", seal(json.dumps(top, separators=(",", ":")).encode()))


def _digest_list(data: bytes) -> bytes:
    """The digests of a tensor file, or as many as can be had of one whose header makes no sense."""
    try:
        length = tensor_file.header_nbytes(data[:8], len(data), "")
        blocks = tensor_file.digest_blocks(tensor_file.TensorFile(length, length, (), {}))
        with suppress(SidesaveError):
            parsed = tensor_file.parse_tensor_file(data[:length], "")
            if parsed.nbytes <= len(data):
                blocks = tensor_file.digest_blocks(parsed)
    except SidesaveError:
        return bytes(16)
    return b"".join(tensor_file.digest(data[offset : offset + nbytes]) for offset, nbytes in blocks)


def pack_tensor_file(header: bytes, body: bytes) -> bytes:
    """A safetensors file."""
    return struct.pack("<Q", len(header)) + header + body


def split_tensor_file(data: bytes) -> tuple[bytes, bytes]:
    """Header and body of a safetensors file."""
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]


# Targets ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """Something that reads bytes: what it usually gets, how that is malformed, and what reads
    it.
    """

    name: str
    seeds: tuple[bytes, ...]
    mutate: Callable[[random.Random, bytes], bytes]
    read: Callable[[bytes], object]


def a_state() -> dict[str, Any]:
    """A state with a value of every kind that a treespec knows."""
    berlin = datetime.timezone(datetime.timedelta(hours=1))
    with warnings.catch_warnings():
        # torch warns of beta features, and of those that it will remove
        warnings.simplefilter("ignore")
        csr = torch.eye(3).to_sparse_csr()
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    return {
        "x": {
            "w": torch.arange(6.0).reshape(2, 3),
            "complex": torch.ones(2, dtype=torch.complex128),
        },
        "bare": torch.arange(4),
        "plain": {
            "numbers": [1, -1, 2**70, 1.5, 1j, None, True],
            "texts": ["a", b"b", bytearray(b"c")],
            "sets": [{1, 2}, frozenset({"a"})],
            "tuple": (1, (2, [3])),
            5: {(1, "a"): 2},
            "numpy": [
                np.float32(1),
                np.datetime64("2020-01-01"),
                np.arange(3),
                np.array(["a", "bc"]),
                np.zeros((2, 0)),
            ],
            "torch": [torch.Size([2, 3]), torch.float16, torch.device("cpu")],
            "times": [
                datetime.datetime(2020, 1, 1, tzinfo=berlin),
                datetime.timedelta(1),
                datetime.time(1),
            ],
            "sparse": torch.eye(3).to_sparse(),
            "csr": csr,
            "quantized": quantized,
            "jagged": jagged,
            "last": torch.ones(1, 2, 2, 2).to(memory_format=torch.channels_last),
            "paths": [Path("/a/b")],
        },
    }


def make_checkpoint(folder: Path) -> Path:
    """A small committed checkpoint."""
    with sidesave.Checkpointer(folder) as checkpointer:
        return Path(checkpointer.save(7, a_state(), blocking=True).committed.result().path)


def make_weights(folder: Path) -> dict[str, bytes]:
    """Weights of others: what stock safetensors and an index beside it say."""
    folder.mkdir()
    header = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    header |= {"flag": {"dtype": "BOOL", "shape": [], "data_offsets": [24, 25]}}
    index = {"metadata": {"total_size": 25}, "weight_map": dict.fromkeys(header, "a.safetensors")}
    made = {"a.safetensors": pack_tensor_file(json.dumps(header).encode(), bytes(25))}
    made["model.safetensors.index.json"] = json.dumps(index).encode()
    for name, data in made.items():
        (folder / name).write_bytes(data)
    return made


def make_tables(folder: Path) -> Path:
    """A checkpoint of what has changed in a table, beside a link to all of it."""
    table = TrackedTable(40, 0.2)
    with sidesave.Checkpointer(folder) as checkpointer:
        for step in (1, 2):
            path = Path(checkpointer.save(step, {"t": table}).committed.result().path)
            table.train()
    return path


FUZZ_KEY = bytes(range(32))


def make_encrypted(folder: Path) -> Path:
    """A small encrypted checkpoint."""
    with sidesave.Checkpointer(
        folder, encryption=sidesave.Encryption(key=FUZZ_KEY)
    ) as checkpointer:
        return Path(checkpointer.save(7, a_state(), files=EXTRA_FILES).committed.result().path)


def messages() -> tuple[bytes, ...]:
    """A message of every kind, each field of its type."""
    import dataclasses
    import typing

    plain = {int: 1, str: "0123456789abcdef", bytes: b"token", float: 1.5, bool: False}

    def value(hint: Any) -> Any:
        if hint in plain:
            return plain[hint]
        if dataclasses.is_dataclass(hint):
            return body(hint)
        options = typing.get_args(hint)
        if typing.get_origin(hint) is tuple:
            return [value(options[0])]
        return value(options[0])

    def body(kind: Any) -> dict[str, Any]:
        hints = typing.get_type_hints(kind)
        made = {field.name: value(hints[field.name]) for field in dataclasses.fields(kind)}
        if kind is protocol.Extent:
            made["offset"] = 8192
        if "world_size" in made:
            made["rank"] = 0
        if kind is protocol.Link:
            made["names"], made["saves"] = ["linked"], [[1, 2]]
        if kind is protocol.Unshared:
            made["files"][0]["name"] = "unshared"
        return made

    return tuple(
        pack({"kind": name, "version": wire.VERSION, **body(kind)})
        for name, kind in wire.KINDS.items()
    )


def targets(folder: Path) -> list[Target]:
    """Every parser; ``folder`` is for the files of those that read files."""
    forgery = Forgery(make_checkpoint(folder))
    whole = forgery.originals
    header, _ = split_tensor_file(whole["x.rank-00000.safetensors"])
    flat = tree.flatten(a_state())
    tensors = {
        fqn: tensor for container in flat.containers.values() for fqn, tensor in container.items()
    }

    def build(data: bytes) -> None:
        treespec = TreeSpec(data, "objects")
        treespec.build(lambda ref: tensors.get(ref.fqn, torch.zeros(3)))
        treespec.leaves(unpickle=len)
        for first, second in ((flat.objects, data), (data, flat.objects)):
            merged = TreeSpec(first, "objects", 0)
            for optimizers in (True, False):
                merged.add(
                    TreeSpec(second, "objects", 1), tensors.__contains__, optimizers=optimizers
                )
                merged.build(lambda ref: tensors.get(ref.fqn, torch.zeros(3)))

    def read_npy(data: bytes) -> None:
        build(pack({"a": [17, data], "b": [15, "", data]}))

    def ask_holder(data: bytes) -> None:
        holder = LeaseRecord.from_bytes(data)
        if holder is not None:
            str(holder)
            holder.lives()
            holder.trainer_is_gone()
            LeaseRecord.from_bytes(holder.to_bytes())

    history = folder / HISTORY_FILE

    def read_log(data: bytes) -> None:
        before = history.read_bytes()
        try:
            history.write_bytes(data)
            sidesave.history(folder)
        finally:
            history.write_bytes(before)

    def sealed(
        mutate: Callable[[random.Random, bytes], bytes],
    ) -> Callable[[random.Random, bytes], bytes]:
        def mutate_inside(rng: random.Random, data: bytes) -> bytes:
            return (
                mutate_bytes(rng, data) if rng.random() < 0.1 else seal(mutate(rng, unseal(data)))
            )

        return mutate_inside

    def attach(data: bytes) -> None:
        fd = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
        os.write(fd, data)
        import fcntl

        fcntl.fcntl(fd, 1033, 0x6)
        arena = Arena.attach(fd)
        try:
            arena.staged_descriptor()
        finally:
            arena.close()

    arena = Arena.create(100, 5000)
    arena.begin_generation()
    arena.mark_staged(b"message")
    memory = bytes(arena.view(0, arena.nbytes))
    arena.close()

    def load(name: str) -> Callable[[bytes], None]:
        def load(data: bytes) -> None:
            try:
                forgery.forge(name, data)
                report = sidesave.verify(forgery.path)
                try:
                    sidesave.load(forgery.path)
                except SidesaveError:
                    sidesave.load(forgery.path, include="x", verify=False)
                else:
                    faults = [
                        fault
                        for fault in report.faults
                        if not re.search("does not list|its directory is", str(fault))
                    ]
                    assert not faults, faults
                into = {
                    "x": {"w": torch.zeros(2, 3), "complex": torch.ones(2, dtype=torch.complex128)}
                }
                sidesave.load(forgery.path, into=into)
            finally:
                forgery.restore()

        return load

    def mutate_tensor_file(rng: random.Random, data: bytes) -> bytes:
        header, body = split_tensor_file(data)
        if rng.random() < 0.2:
            return mutate_bytes(rng, data)
        return pack_tensor_file(
            mutate_json(rng, header), mutate_bytes(rng, body) if rng.random() < 0.2 else body
        )

    tables = Forgery(make_tables(folder / "tables"))

    def load_table(name: str) -> Callable[[bytes], None]:
        def load_table(data: bytes) -> None:
            try:
                tables.forge(name, data)
                report = sidesave.verify(tables.path)
                try:
                    sidesave.load(tables.path)
                except SidesaveError:
                    sidesave.load(
                        tables.path, into={"t": TrackedTable(3, 1)}, strict=False, verify=False
                    )
                else:
                    assert report.ok, report.faults
                sidesave.load(tables.path, into={"t": TrackedTable(3, 1)})
            finally:
                tables.restore()

        return load_table

    encrypted = Forgery(make_encrypted(folder / "encrypted"))
    record = manifest.RankRecord.from_bytes(encrypted.originals["rank-00000.json"], "r")
    keys = Keys.from_bytes(encrypted.originals[KEYS], KEYS)
    save_key = SaveKey(
        data_key_of(keys.unwrap(FUZZ_KEY, KEYS), record.session, record.sequence),
        record.session,
        record.sequence,
    )

    def open_encrypted(name: str) -> Callable[[bytes], None]:
        def open_encrypted(data: bytes) -> None:
            try:
                if name == KEYS:
                    encrypted.write(name, seal(data))
                else:
                    encrypted.forge(name, data)
                sidesave.verify(encrypted.path)
                sidesave.load(encrypted.path, encryption=sidesave.Encryption(key=FUZZ_KEY))
            finally:
                encrypted.restore()

        return open_encrypted

    def ask_keys(data: bytes) -> None:
        found = Keys.from_bytes(data, KEYS)
        found.is_by(FUZZ_KEY)
        found.unwrap(FUZZ_KEY, KEYS)

    def open_sealed(data: bytes) -> None:
        """What is sealed may be hostile as well: whoever has made it had the key."""
        content = save_key.file(0, "record").seal(data, bound_to(record))
        open_record(replace(record, sealed=base64.b64encode(content).decode()), save_key, "r")

    inside = save_key.file(0, "record").open(base64.b64decode(record.sealed), "r", bound_to(record))
    weights = folder / "weights"
    of_others = make_weights(weights)

    def start(name: str) -> Callable[[bytes], None]:
        def start(data: bytes) -> None:
            try:
                (weights / name).write_bytes(data)
                source = sidesave.Source(weights, item="x", strict=False)
                into = {"x": {"w": torch.zeros(2, 3), "flag": torch.tensor(False)}}
                sidesave.load_sources([source], into, strict=False)
            finally:
                (weights / name).write_bytes(of_others[name])

        return start

    in_checkpoints = {
        "manifest.json": mutate_json,
        "rank-00000.json": mutate_json,
        "objects.rank-00000.msgpack": mutate_msgpack,
        "x.rank-00000.safetensors": mutate_tensor_file,
        "x.rank-00000.xxh3": mutate_bytes,
    }
    return [
        Target(
            "manifest",
            (whole["manifest.json"],),
            sealed(mutate_json),
            lambda data: manifest.Manifest.from_bytes(data, "m"),
        ),
        Target(
            "head",
            (whole["manifest.json"],),
            sealed(mutate_json),
            lambda data: manifest.Head.from_bytes(data, "m"),
        ),
        Target(
            "record",
            (whole["rank-00000.json"],),
            sealed(mutate_json),
            lambda data: manifest.RankRecord.from_bytes(data, "r"),
        ),
        Target(
            "header",
            (pack_tensor_file(header, b""),),
            mutate_tensor_file,
            lambda data: tensor_file.parse_tensor_file(data, "h"),
        ),
        Target(
            "record with files beside",
            (with_extra_files(whole["rank-00000.json"]),),
            sealed(mutate_json),
            lambda data: manifest.RankRecord.from_bytes(data, "r"),
        ),
        Target("files beside", (pack_files(EXTRA_FILES),), mutate_msgpack, unpack_files),
        Target("objects", (flat.objects,), mutate_msgpack, build),
        Target("npy", (npy(b"'<f8'", b"(3,)"),), lambda rng, data: hostile_npy(rng), read_npy),
        Target(
            "lease",
            (LeaseRecord.current("0" * 16, os.getpid()).to_bytes(),),
            mutate_json,
            ask_holder,
        ),
        Target("history", (history.read_bytes(),), mutate_history, read_log),
        Target("message", messages(), mutate_msgpack, wire.decode),
        Target("arena", (memory,), mutate_bytes, attach),
        Target("keys", (encrypted.originals[KEYS],), sealed(mutate_json), ask_keys),
        Target("what is sealed", (inside,), mutate_json, open_sealed),
        *(
            Target(
                f"encrypted/{name}",
                (
                    unseal(encrypted.originals[name])
                    if name.endswith(".json")
                    else encrypted.originals[name],
                ),
                mutate,
                open_encrypted(name),
            )
            for name, mutate in (
                ("manifest.json", mutate_json),
                ("rank-00000.json", mutate_json),
                (KEYS, mutate_json),
                ("objects.rank-00000.msgpack.enc", mutate_bytes),
                ("0.rank-00000.tags", mutate_bytes),
            )
        ),
        *(
            Target(
                f"weights/{name}",
                (data,),
                mutate_json if name.endswith(".json") else mutate_tensor_file,
                start(name),
            )
            for name, data in of_others.items()
        ),
        *(
            Target(f"table/{name}", (tables.originals[name],), mutate, load_table(name))
            for name, mutate in (
                ("objects.rank-00000.msgpack", mutate_msgpack),
                ("t@rows.rank-00000.safetensors", mutate_tensor_file),
                ("t@changed.rank-00000.safetensors", mutate_tensor_file),
            )
        ),
        *(
            Target(
                f"checkpoint/{name}",
                (unseal(whole[name]) if name.endswith(".json") else whole[name],),
                mutate,
                load(name),
            )
            for name, mutate in in_checkpoints.items()
        ),
    ]


# Running ------------------------------------------------------------------------------------------

_watching: list[str] | None = None
_hooked = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching is not None and event in FORBIDDEN:
        _watching.append(f"{event} {arguments!r:.200}")


@contextmanager
def watched(seen: list[str]) -> Iterator[None]:
    """Add to ``seen`` what is done meanwhile that no parser may do."""
    global _watching, _hooked
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked = True
    _watching = seen
    try:
        yield
    finally:
        _watching = None


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang


def attack(target: Target, data: bytes) -> bool:
    """Have one input read. Whether it was accepted; raises :class:`Breach` when a rule is
    broken.
    """
    before = signal.signal(signal.SIGALRM, _hang)
    problem = None
    accepted = False
    seen: list[str] = []
    tracemalloc.start()
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    try:
        with watched(seen), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.read(data)
            accepted = True
    except SidesaveError:
        pass
    except (Exception, Hang):  # noqa: BLE001 - whatever it is, it is a breach
        problem = traceback.format_exc(limit=-4)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    if problem is None and seen:
        problem = f"it did {seen}"
    if problem is None and peak > MEMORY_FACTOR * len(data) + MEMORY_NBYTES:
        problem = f"it took {peak:,} bytes of memory for {len(data):,}"
    if problem is not None:
        raise Breach(
            f"{target.name} broke a rule: {problem}\ninput: "
            f"{data[:2000].hex()}{'...' * (len(data) > 2000)}"
        )
    return accepted


def campaign(
    folder: Path,
    seed: int,
    *,
    seconds: float = float("inf"),
    rounds: int = sys.maxsize,
    keep_going: bool = False,
) -> dict[str, list[int]]:
    """Attack all targets in turn; per target, how many inputs were accepted and refused."""
    found: dict[str, list[int]] = {}
    everything = targets(folder)
    for target in everything:
        for whole in target.seeds:
            # what is well formed is accepted; and what is imported at first use has been imported
            target.read(whole)
    end = time.monotonic() + seconds
    for number in range(rounds):
        for target in everything:
            if time.monotonic() > end:
                return found
            # one input can be made again without those before
            rng = random.Random(f"{seed}/{number}/{target.name}")
            try:
                data = target.mutate(rng, rng.choice(target.seeds))
            except RecursionError:  # nested in itself so often that it cannot be written down
                continue
            counts = found.setdefault(target.name, [0, 0])
            try:
                counts[0 if attack(target, data) else 1] += 1
            except Breach as breach:
                if not keep_going:
                    raise Breach(f"round {number} of seed {seed}: {breach}") from None
                print(f"round {number}: {breach}", flush=True)
    return found


def main() -> None:
    """Attack everything for a while."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument(
        "--seed", type=int, default=int.from_bytes(os.urandom(4)), help="default: a random one"
    )
    parser.add_argument("--keep-going", action="store_true", help="go on after a breach")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = campaign(
                Path(folder), args.seed, seconds=args.seconds, keep_going=args.keep_going
            )
        except Breach as breach:
            sys.exit(str(breach))
    for name, (accepted, refused) in found.items():
        print(f"{name}: {accepted + refused} inputs, {accepted} accepted")


if __name__ == "__main__":
    main()
