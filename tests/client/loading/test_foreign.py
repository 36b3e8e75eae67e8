"""Weights of others as a start: plain safetensors, as stock tools write them, are sources like
checkpoints of ours.
"""

import json
import logging
import os
import random
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import forks
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from loads import values
from states import difference
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from trainers import save
from worlds import drop_from_cache

import sidesave
from sidesave import Source, load_sources
from sidesave.client.export.safetensors import export
from sidesave.client.loading import sources
from sidesave.client.reading.safetensors_reader import SafetensorsReader
from sidesave.errors import (
    CheckpointNotFoundError,
    HostMemoryError,
    IntegrityError,
    InvalidArgumentError,
    SidesaveError,
    StateMismatchError,
    UnsupportedValueError,
    WriteError,
)

MiB = 1 << 20
INDEX = "model.safetensors.index.json"


class Net(nn.Module):
    """A small language model, whose embedding may be its last layer too."""

    def __init__(self, seed: int = 0, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.BatchNorm1d(16)
        self.lm_head = nn.Linear(16, 50, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a file holds of it: of tensors that share memory the first."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor.detach().clone()))
    return dict(found.values())


def write(
    folder: Path, tensors: Mapping[str, torch.Tensor], files: int = 1, *, index: bool = True
) -> Path:
    """A directory as ``save_pretrained`` of transformers writes it."""
    folder.mkdir(parents=True)
    names = [f"model-{n:05d}-of-{files:05d}.safetensors" for n in range(1, files + 1)]
    names = ["model.safetensors"] if files == 1 else names
    where = {key: names[number % files] for number, key in enumerate(tensors)}
    for name in names:
        mine = {key: tensor for key, tensor in tensors.items() if where[key] == name}
        safetensors.torch.save_file(mine, folder / name, metadata={"format": "pt"})
    if files > 1 and index:
        total = sum(tensor.nbytes for tensor in tensors.values())
        body = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(body, indent=2) + "\n")
    return folder


def file_of(header: Any, body: bytes) -> bytes:
    """A safetensors file of this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def about(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def assert_untouched(
    into: dict[str, Any], kind: type[Exception], *words: str, of: Any, **options: Any
) -> None:
    """That loading ``of`` fails as told, and has changed nothing."""
    before, objects = values(into), dict(into)
    with pytest.raises(kind) as caught:
        load_sources(of if isinstance(of, list) else [of], into, **options)
    for word in words:
        assert word in str(caught.value)
    assert difference(before, values(into)) == ""
    assert all(into[name] is value for name, value in objects.items())


# What is taken ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["file", "directory", "sharded", "index", "several"])
def test_a_module_begins_with_what_stock_tools_have_written(tmp_path: Path, name: str):
    expected = Net(1)
    files = 1 if name in ("file", "directory") else 3
    folder = write(tmp_path / "weights", tensors_of(expected), files, index=name != "several")
    path = {"file": folder / "model.safetensors", "index": folder / INDEX}.get(name, folder)
    into: dict[str, Any] = {"model": Net(2)}
    assert load_sources([Source(path, item="model")], into) is into
    assert difference(values(expected), values(into["model"])) == ""


def test_names_have_the_item_in_front_when_they_are_chosen_and_renamed(tmp_path: Path):
    given = {f"transformer.{name}": tensor for name, tensor in tensors_of(Net(1)).items()}
    folder = write(tmp_path / "weights", given, 2)
    into: dict[str, Any] = {"net": {"first": Net(2)}, "step": 3}
    source = Source(
        folder,
        item="x",
        include="x.transformer.*",
        exclude="*.layers.0.*",
        rename={"x.transformer": "net.first"},
    )
    load_sources([source], into, strict=False)
    expected = values(Net(1))
    expected.update(
        {name: tensor for name, tensor in values(Net(2)).items() if name.startswith("layers.0.")}
    )
    assert difference(expected, values(into["net"]["first"])) == ""
    hint = 'pass rename={"model.transformer": "model"}'
    assert_untouched({"model": Net(2)}, StateMismatchError, hint, of=Source(folder, item="model"))


def test_weights_and_checkpoints_are_laid_over_each_other(tmp_path: Path):
    save(tmp_path / "run", {"model": Net(1), "epoch": 5})
    folder = write(tmp_path / "weights", tensors_of(Net(2)), 3)
    into: dict[str, Any] = {"model": Net(3), "epoch": 0}
    load_sources(
        [Source(tmp_path / "run"), Source(folder, item="model", include="model.layers")], into
    )
    expected = values(Net(1))
    expected.update(
        {name: tensor for name, tensor in values(Net(2)).items() if name.startswith("layers.")}
    )
    assert difference(expected, values(into["model"])) == ""
    assert into["epoch"] == 5
    load_sources(
        [Source(folder, item="model", include="model.embed*"), Source(tmp_path / "run")], into
    )
    assert difference(values(Net(1)), values(into["model"])) == ""


def test_names_that_share_a_tensor_take_what_one_of_them_has(tmp_path: Path):
    expected = Net(1, tied=True)
    folder = write(tmp_path / "weights", tensors_of(expected), 2)
    assert "lm_head.weight" not in json.loads((folder / INDEX).read_text())["weight_map"]
    into: dict[str, Any] = {"model": Net(2, tied=True)}
    load_sources([Source(folder, item="model")], into)
    assert difference(values(expected), values(into["model"])) == ""
    assert into["model"].lm_head.weight is into["model"].embed.weight
    assert_untouched(
        {"model": Net(2)},
        StateMismatchError,
        "model.lm_head.weight: missing",
        of=Source(folder, item="model"),
    )
    # The other name of the two, in a dict of modules; and over a run that has both of them.
    given = tensors_of(expected)
    given["lm_head.weight"] = given.pop("embed.weight")
    other = write(tmp_path / "other", given)
    save(tmp_path / "run", {"models": {"a": Net(3, tied=True)}})
    into = {"models": {"a": Net(2, tied=True)}}
    for path in (folder, other):
        load_sources(
            [Source(tmp_path / "run"), Source(path, item="m", rename={"m": "models.a"})], into
        )
        assert difference(values(expected), values(into["models"]["a"])) == ""
        load_sources(
            [Source(path, item="m", rename={"m": "models.a"}), Source(tmp_path / "run")], into
        )
        assert difference(values(Net(3, tied=True)), values(into["models"]["a"])) == ""


def test_weights_are_cast(tmp_path: Path):
    folder = write(tmp_path / "weights", tensors_of(Net(1)), 2)
    into: dict[str, Any] = {"model": Net(2).bfloat16()}
    assert_untouched(
        into, StateMismatchError, "pass dtype= to cast", of=Source(folder, item="model")
    )
    load_sources([Source(folder, item="model", dtype=torch.bfloat16)], into)
    assert difference(values(Net(1).bfloat16()), values(into["model"])) == ""


def test_what_was_exported_is_a_start_bit_for_bit(tmp_path: Path):
    expected = Net(1, tied=True).bfloat16()
    path = save(tmp_path / "run", {"model": expected, "epoch": 5})
    for limit in (1000, 1_000_000):
        report = export(path, tmp_path / f"export-{limit}", max_shard_nbytes=limit)
        assert report.tied and (len(report.files) > 1) == (limit == 1000)
        into: dict[str, Any] = {"model": Net(2, tied=True).bfloat16()}
        load_sources([Source(report.path, item="model")], into)
        assert difference(values(expected), values(into["model"])) == ""


def test_a_new_run_begins_with_weights_and_resumes_its_own(tmp_path: Path):
    folder = write(tmp_path / "weights", tensors_of(Net(1, tied=True)), 3)

    def train(last: int) -> tuple[int, dict[str, Any]]:
        torch.manual_seed(0)
        state: dict[str, Any] = {"model": Net(2, tied=True), "train": {"seen": 0}}
        state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=0.1, momentum=0.9)
        with sidesave.CheckpointManager(
            tmp_path / "run", state=state, save=[sidesave.EverySteps(1)]
        ) as manager:
            first = manager.restore(sources=[Source(folder, item="model")])
            begun = values(state["model"])
            for step in range(first, last):
                for parameter in state["model"].parameters():
                    parameter.grad = torch.ones_like(parameter)
                state["optimizer"].step()
                manager.step(step)
        return first, {"begun": begun, "ended": values(state["model"])}

    first, started = train(2)
    assert first == 0
    assert difference(values(Net(1, tied=True)), started["begun"]) == ""
    assert difference(started["begun"], started["ended"]) != ""
    again, resumed = train(3)
    assert again == 2
    assert difference(started["ended"], resumed["begun"]) == ""


def test_half_a_model_is_no_start_for_a_manager(tmp_path: Path):
    given = tensors_of(Net(1))
    del given["layers.1.weight"]
    folder = write(tmp_path / "weights", given)
    state = {"model": Net(2)}
    with sidesave.CheckpointManager(tmp_path / "run", state=state) as manager:
        with pytest.raises(StateMismatchError, match=r"model\.layers\.1\.weight"):
            manager.restore(sources=[Source(folder, item="model")])
        with pytest.raises(CheckpointNotFoundError, match="item="):
            manager.restore(sources=[Source(folder)])
        (folder / "model.safetensors").write_bytes(b"")
        with pytest.raises(IntegrityError, match="too short"):
            manager.restore(sources=[Source(folder, item="model")])
        assert difference(values(Net(2)), values(state["model"])) == ""
        assert manager.restore() == 0


def test_files_of_a_cache_are_links(tmp_path: Path):
    """The cache of huggingface_hub: names are links to blobs that are called after their
    content.
    """
    folder = write(tmp_path / "weights", tensors_of(Net(1)), 2)
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    (tmp_path / "link").symlink_to(snapshot)
    for path in (snapshot, snapshot / INDEX, tmp_path / "link"):
        into: dict[str, Any] = {"model": Net(2)}
        load_sources([Source(path, item="model")], into)
        assert difference(values(Net(1)), values(into["model"])) == ""
    first = next(path for path in snapshot.iterdir() if path.name.startswith("model-00001"))
    into = {"model": Net(2)}
    load_sources([Source(first, item="model")], into, strict=False)
    assert difference(values(Net(2)), values(into["model"])) != ""


def test_every_dtype_that_stock_files_have_comes_back(tmp_path: Path):
    torch.manual_seed(0)
    given: dict[str, torch.Tensor] = {
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
        "flag": torch.ones(3) > 0,
    }
    for dtype in (
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ):
        given[str(dtype)] = torch.randn(5, 3).to(dtype)
    for dtype in (
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
    ):
        given[str(dtype)] = torch.randint(0, 100, (5, 3)).to(dtype)
    given["complex"] = torch.randn(4, dtype=torch.complex64)
    safetensors.torch.save_file(given, tmp_path / "x.safetensors")
    into: dict[str, Any] = {"x": dict.fromkeys(given)}
    load_sources([Source(tmp_path / "x.safetensors", item="x")], into)
    assert difference(given, {name: into["x"][name] for name in given}) == ""
    wide: dict[str, Any] = {"x": {"torch.float8_e5m2": torch.zeros(5, 3)}}
    source = Source(
        tmp_path / "x.safetensors", item="x", include="x.torch.float8_e5m2", dtype=torch.float32
    )
    load_sources([source], wide)
    assert torch.equal(wide["x"]["torch.float8_e5m2"], given["torch.float8_e5m2"].float())


def test_a_dtype_that_is_not_known_is_told_with_the_name_of_its_tensor(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    header = {"a": about("F32", [2], 0, 8), "scale": about("F8_E8M0", [4], 8, 12)}
    path.write_bytes(file_of(header, struct.pack("<2f", 1, 2) + bytes(4)))
    into = {"x": {"a": torch.zeros(2), "scale": torch.zeros(4)}}
    assert_untouched(
        into, UnsupportedValueError, "x.scale", "F8_E8M0", "exclude", of=Source(path, item="x")
    )
    load_sources([Source(path, item="x", exclude="x.scale")], into, strict=False)
    assert into["x"]["a"].tolist() == [1, 2]


def test_names_in_any_order_and_tensors_at_odd_places(tmp_path: Path):
    """What the format allows and stock tools of today do not write: others do, and older ones
    did.
    """
    small, large = torch.arange(5.0), torch.arange(200_000, dtype=torch.float64).reshape(500, 400)
    bits = [bytes([7]), small.numpy().tobytes(), bytes([1, 0, 1]), large.numpy().tobytes()]
    header = {
        "large": about("F64", [500, 400], 24, 24 + large.nbytes),
        "none": about("F16", [0, 7], 21, 21),
        "small": about("F32", [5], 1, 21),
        "flags": about("BOOL", [3], 21, 24),
        "first": about("U8", [1], 0, 1),
    }
    for pad in (b"", b" ", b"     "):
        path = tmp_path / f"x{len(pad)}.safetensors"
        path.write_bytes(file_of(json.dumps(header).encode() + pad, b"".join(bits)))
        assert sorted(safetensors.torch.load_file(path)) == sorted(header)
        into: dict[str, Any] = {"x": dict.fromkeys(header)}
        load_sources([Source(path, item="x")], into)
        found = into["x"]
        expected = [
            large,
            torch.zeros(0, 7, dtype=torch.float16),
            small,
            torch.tensor([True, False, True]),
        ]
        assert (
            difference(
                [*expected, torch.tensor([7], dtype=torch.uint8)], [found[name] for name in header]
            )
            == ""
        )
        assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in found.values())
        reader = SafetensorsReader(str(path), "x")
        wanted = [
            ("x.large", ((3, 10), (490, 5))),
            ("x.large", ((499, 0), (1, 400))),
            ("x.small", ((2,), (2,))),
        ]
        boxes = reader.read_boxes(wanted)
        assert torch.equal(boxes[wanted[0]], large[3:493, 10:15])
        assert torch.equal(boxes[wanted[1]], large[499:])
        assert torch.equal(boxes[wanted[2]], small[2:4])


# No more than is needed ---------------------------------------------------------------------------


def test_only_what_is_chosen_is_read_and_the_other_files_need_not_be_there(tmp_path: Path):
    given = {name: torch.randn(MiB // 4) for name in "abcdef"}
    folder = write(tmp_path / "weights", given, 3)
    gone = json.loads((folder / INDEX).read_text())["weight_map"]["b"]
    (folder / gone).unlink()
    drop_from_cache(folder)
    into = {"x": {"a": torch.zeros(MiB // 4)}}
    loaded = sources.read_sources([Source(folder, item="x", include="x.a")], into)
    assert loaded.nbytes_read < 1.1 * MiB
    loaded.apply()
    assert torch.equal(into["x"]["a"], given["a"])
    assert_untouched(
        {"x": {"b": torch.zeros(MiB // 4)}},
        IntegrityError,
        gone,
        of=Source(folder, item="x", include="x.b"),
    )


def test_a_file_that_says_it_is_enormous_takes_no_memory(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    nbytes = 1 << 43
    header = file_of(
        {"a": about("F32", [2], 0, 8), "b": about("U8", [nbytes], 8, 8 + nbytes)},
        struct.pack("<2f", 1, 2),
    )
    path.write_bytes(header)
    try:
        os.truncate(path, len(header) + nbytes)
    except OSError as error:
        pytest.skip(f"no file of 8 TiB here: {error}")
    into: dict[str, Any] = {"x": {"a": torch.zeros(2), "b": 0}}
    assert_untouched(into, HostMemoryError, of=Source(path, item="x"))
    load_sources([Source(path, item="x", include="x.a")], into, strict=False)
    assert into["x"]["a"].tolist() == [1, 2]


def start_sharded(rank: int, world: int, folder: Path) -> None:
    mesh = dist.init_device_mesh("cpu", (world,))

    def sharded(model: nn.Module, dim: int = 0) -> nn.Module:
        tied: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in tied:
                    spread = distribute_tensor(
                        parameter.detach(),
                        mesh,
                        [Shard(min(dim, parameter.dim() - 1))],
                        src_data_rank=None,
                    )
                    tied[id(parameter)] = nn.Parameter(spread)
                setattr(module, name, tied[id(parameter)])
        return model

    def whole(model: nn.Module) -> dict[str, torch.Tensor]:
        found = model.state_dict(keep_vars=True)
        return {
            name: getattr(tensor, "full_tensor", lambda t=tensor: t)().detach()
            for name, tensor in found.items()
        }

    expected = dict(Net(1, tied=True).state_dict())
    for dim in (0, 1):
        into = {"model": sharded(Net(2, tied=True), dim)}
        load_sources([Source(f"{folder}/weights", item="model")], into)
        assert difference(expected, whole(into["model"])) == ""

    big = {"w": distribute_tensor(torch.zeros(1024, 512), mesh, [Shard(0)], src_data_rank=None)}
    for path in ("big", "odd"):
        loaded = sources.read_sources(
            [Source(f"{folder}/{path}", item="x", include="x.w")], {"x": big}, rank=rank
        )
        assert loaded.nbytes_read < 0.6 * big["w"].nbytes, (
            "this rank's half, and what it takes to find it"
        )
        loaded.apply()
        assert torch.equal(big["w"].full_tensor(), torch.arange(1024.0 * 512).reshape(1024, 512))
        big["w"].zero_()

    for first in (0, 1):
        state = {"model": sharded(Net(2, tied=True))}
        manager = sidesave.CheckpointManager(f"{folder}/run", state=state, save=[])
        assert manager.restore(sources=[Source(f"{folder}/weights", item="model")]) == first
        assert difference(expected, whole(state["model"])) == ""
        if first == 0:
            manager.save(0, blocking=True)
        manager.close()
    with pytest.raises(CheckpointNotFoundError, match="item="):
        sidesave.CheckpointManager(f"{folder}/other", state=state).restore(
            sources=[Source(f"{folder}/weights")]
        )


def test_each_rank_reads_its_part_and_a_manager_begins_with_it(tmp_path: Path):
    write(tmp_path / "weights", tensors_of(Net(1, tied=True)), 3)
    big = torch.arange(1024.0 * 512).reshape(1024, 512)
    write(tmp_path / "big", {"w": big})
    (tmp_path / "odd").mkdir()
    header = {"w": about("F32", [1024, 512], 1, 1 + big.nbytes), "b": about("U8", [1], 0, 1)}
    (tmp_path / "odd" / "w.safetensors").write_bytes(file_of(header, b"\0" + big.numpy().tobytes()))
    forks.spawn_group(start_sharded, 2, tmp_path)


# What is wrong ------------------------------------------------------------------------------------


def damaged_index(**changes: Any) -> Callable[[Path], object]:
    """Writes an index in which some tensors are elsewhere."""

    def damage(folder: Path) -> None:
        body = json.loads((folder / INDEX).read_text())
        body["weight_map"].update(
            {name.replace("_", "."): place for name, place in changes.items()}
        )
        (folder / INDEX).write_text(json.dumps(body))

    return damage


def put(name: str, data: bytes | str) -> Callable[[Path], object]:
    """Writes something in the place of a file."""
    return lambda folder: (folder / name).write_bytes(
        data.encode() if isinstance(data, str) else data
    )


def change(name: str, edit: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(edit((folder / name).read_bytes()))


def pipe(folder: Path) -> None:
    (folder / FIRST).unlink()
    os.mkfifo(folder / FIRST)


def directory(folder: Path) -> None:
    (folder / FIRST).unlink()
    (folder / FIRST).mkdir()


def device(folder: Path) -> None:
    (folder / FIRST).unlink()
    (folder / FIRST).symlink_to("/dev/zero")


FIRST = "model-00001-of-00002.safetensors"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "short": (change(FIRST, lambda data: data[:-1]), "bytes instead of"),
    "long": (change(FIRST, lambda data: data + b"\0"), "bytes instead of"),
    "empty": (put(FIRST, b""), "too short"),
    "text": (put(FIRST, "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "header of"),
    "huge header": (change(FIRST, lambda data: struct.pack("<Q", 2**63) + data[8:]), "header of"),
    "missing": (lambda folder: (folder / FIRST).unlink(), "No such file"),
    "pipe": (pipe, "not a file"),
    "directory": (directory, "not a file"),
    "device": (device, "not a file"),
    "hole": (put(FIRST, file_of({"embed.weight": about("U8", [1], 1, 2)}, b"ab")), "leaves a gap"),
    "over": (
        put(FIRST, file_of({"a": about("U8", [2], 0, 2), "b": about("U8", [2], 1, 3)}, b"abc")),
        "overlaps",
    ),
    "shape": (
        put(FIRST, file_of({"embed.weight": about("F32", [2], 0, 4)}, b"abcd")),
        "length that is not",
    ),
    "negative": (
        put(FIRST, file_of({"embed.weight": about("U8", [-1], 0, 4)}, b"abcd")),
        "malformed",
    ),
    "twice": (put(FIRST, file_of(b'{"a":{},"a":{}}', b"")), "duplicate key"),
    "list": (put(FIRST, file_of(b"[]", b"")), "JSON object"),
    "metadata": (put(FIRST, file_of({"__metadata__": {"a": 1}}, b"")), "text to text"),
    "dimensions": (
        put(FIRST, file_of({"embed.weight": about("U8", [0] * 999, 0, 0)}, b"")),
        "length that is not",
    ),
    "lack": (damaged_index(embed_extra=FIRST), "embed.extra"),
    "up": (damaged_index(embed_weight="../secret.safetensors"), "no file beside it"),
    "root": (damaged_index(embed_weight="/etc/passwd"), "no file beside it"),
    "below": (damaged_index(embed_weight=f"./{FIRST}"), "no file beside it"),
    "dots": (damaged_index(embed_weight=".."), "no file beside it"),
    "none": (damaged_index(embed_weight=""), "no file beside it"),
    "nul": (damaged_index(embed_weight="a\0b"), "no file beside it"),
    "endless": (damaged_index(embed_weight="x" * 300), "no file beside it"),
    "number": (damaged_index(embed_weight=7), "no file beside it"),
    "elsewhere": (damaged_index(embed_weight="nothing.safetensors"), "No such file"),
    "other": (damaged_index(embed_weight="config.json"), "header of"),
    "index of a list": (put(INDEX, "[]"), "JSON object"),
    "index without a map": (put(INDEX, '{"metadata": {}}'), "weight_map"),
    "index with a list": (put(INDEX, '{"weight_map": []}'), "weight_map"),
    "index twice": (put(INDEX, '{"weight_map": {"a": "b", "a": "b"}}'), "duplicate key"),
    "index of nothing": (put(INDEX, b""), "JSON"),
    "index too deep": (put(INDEX, b'{"a":' * 99999), "JSON"),
    "index of bytes": (put(INDEX, b"\xff\xfe"), "JSON"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_told_and_nothing_is_touched(tmp_path: Path, name: str):
    folder = write(tmp_path / "weights", tensors_of(Net(1)), 2)
    (folder / "config.json").write_text(json.dumps({"architectures": ["Net"]}))
    (tmp_path / "secret.safetensors").write_bytes((folder / FIRST).read_bytes())
    damage, words = DAMAGES[name]
    damage(folder)
    assert_untouched(
        {"model": Net(2)}, IntegrityError, str(folder), words, of=Source(folder, item="model")
    )


def test_headers_and_indices_that_are_cut_or_flipped_are_taken_or_told(tmp_path: Path):
    given = {"a": torch.arange(4.0), "b": torch.arange(6, dtype=torch.int16), "c": torch.ones(())}
    folder = write(tmp_path / "weights", given, 2)
    rng = random.Random(5)
    refused = taken = 0

    def attempt() -> None:
        nonlocal refused, taken
        into = {"x": {name: torch.full_like(tensor, 9) for name, tensor in given.items()}}
        before = values(into)
        try:
            load_sources([Source(folder, item="x")], into)
        except SidesaveError:
            refused += 1
            assert difference(before, into) == ""
        else:
            taken += 1

    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        end = len(data) if file.name == INDEX else 8 + int.from_bytes(data[:8], "little")
        for length in range(len(data)):
            file.write_bytes(data[:length])
            attempt()
        for at in range(end):
            changed = bytearray(data)
            changed[at] ^= 1 << rng.randrange(8)
            file.write_bytes(changed)
            attempt()
        file.write_bytes(data)
    assert refused > 20 * taken, (
        "what is flipped in metadata, or in the length of a name's file, may be as good"
    )
    taken = 0
    attempt()
    assert taken == 1


def test_a_file_that_is_another_by_the_time_it_is_read_is_told(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.ones(4)}, path)
    reader = SafetensorsReader(str(path), "x")
    safetensors.torch.save_file({"b": torch.ones(4)}, tmp_path / "y.safetensors")
    (tmp_path / "y.safetensors").rename(path)
    with pytest.raises(WriteError, match="Stale"):
        reader.read_boxes([("x.a", None)])
    reader = SafetensorsReader(str(path), "x")
    path.unlink()
    with pytest.raises(IntegrityError, match="No such file"):
        reader.read_boxes([("x.b", None)])


def test_storage_that_refuses_is_no_damage(tmp_path: Path):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    folder = write(tmp_path / "weights", tensors_of(Net(1)))
    (folder / "model.safetensors").chmod(0)
    assert_untouched({"model": Net(2)}, WriteError, of=Source(folder, item="model"))


def test_what_does_not_fit_is_told_by_name_and_nothing_is_touched(tmp_path: Path):
    given = tensors_of(Net(1))
    given["layers.1.weigth"] = given.pop("layers.1.weight")
    given["embed.weight"] = torch.zeros(50, 8)
    given["layers.0.bias"] = given["layers.0.bias"].double()
    source = Source(write(tmp_path / "weights", given, 2), item="model")
    unexpected = "model.layers.1.weigth: unexpected"
    assert_untouched({"model": Net(2)}, StateMismatchError, unexpected, of=source)
    lenient = Source(source.path, item="model", strict=False)
    words = [
        "model.layers.1.weight: missing in the checkpoint (near: ",
        "model.embed.weight: shape [50, 8] in the checkpoint, [50, 16] in the target",
        "model.layers.0.bias: torch.float64 in the checkpoint",
    ]
    assert_untouched({"model": Net(2)}, StateMismatchError, *words, of=lenient)


def test_what_is_not_strict_leaves_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    given = {**tensors_of(Net(1)), "rotary.inv_freq": torch.ones(3)}
    del given["norm.running_mean"]
    folder = write(tmp_path / "weights", given)
    into: dict[str, Any] = {"model": Net(2), "step": 3}
    with caplog.at_level(logging.INFO):
        load_sources([Source(folder, item="model", strict=False)], into, strict=False)
    assert difference(values(Net(1)), values(into["model"])) == ""  # a mean is zero from the start
    assert into["step"] == 3
    assert "model.rotary.inv_freq" in caplog.text and "model.norm.running_mean" in caplog.text


# Which files, and for what ------------------------------------------------------------------------


def test_an_item_is_needed_for_weights_and_for_nothing_else(tmp_path: Path):
    folder = write(tmp_path / "weights", tensors_of(Net(1)), 2)
    path = save(tmp_path / "run", {"model": Net(1)})
    into: dict[str, Any] = {"net": Net(2), "step": 3}
    for place in (folder, folder / INDEX, folder / FIRST):
        assert_untouched(
            into,
            CheckpointNotFoundError,
            "say which they are for with item='net'",
            of=Source(place),
        )
        with pytest.raises(CheckpointNotFoundError, match="item="):
            sidesave.load(place)
    words = ["item='model' is not among", "net, step"]
    assert_untouched(into, InvalidArgumentError, *words, of=Source(folder, item="model"))
    two = {"net": Net(2), "other": Net(3), "step": 3}
    assert_untouched(two, CheckpointNotFoundError, "item='net' or item='other'", of=Source(folder))
    for place in (path, path.parent):
        assert_untouched(into, InvalidArgumentError, "leave it out", of=Source(place, item="net"))
    for place, words in [
        (tmp_path / "nothing", "nothing at this path"),
        (tmp_path / "nothing.safetensors", "nothing at this path"),
        (tmp_path, "run directories run"),
    ]:
        assert_untouched(into, CheckpointNotFoundError, words, of=Source(place, item="net"))
    (path / "manifest.json").unlink()
    words = "manifest is missing"
    assert_untouched(into, CheckpointNotFoundError, words, of=Source(path, item="net"))
    assert_untouched(into, CheckpointNotFoundError, words, of=Source(path))
    for wrong in ("", ".", "net.", 7):
        with pytest.raises(InvalidArgumentError, match="item"):
            Source(folder, item=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="step="):
        Source(folder, 5, item="net")
    with pytest.raises(InvalidArgumentError, match="for local and mounted"):
        Source("s3://bucket/weights", item="net").locate()


def test_which_files_of_a_directory_count_is_never_guessed(tmp_path: Path):
    folder = write(tmp_path / "weights", tensors_of(Net(1)), 2)
    source = Source(folder, item="model")
    safetensors.torch.save_file({"stray": torch.ones(2)}, folder / "adapter.safetensors")
    (folder / ".hidden.safetensors").write_bytes(b"\0")
    into: dict[str, Any] = {"model": Net(2)}
    load_sources([source], into)
    assert difference(values(Net(1)), values(into["model"])) == ""

    listed = (folder / INDEX).read_text()
    body = json.loads(listed)
    del body["weight_map"]["embed.weight"]
    (folder / INDEX).write_text(json.dumps(body))
    assert_untouched(
        {"model": Net(2)}, StateMismatchError, "model.embed.weight: missing", of=source
    )
    (folder / INDEX).write_text(listed)

    safetensors.torch.save_file(tensors_of(Net(3)), folder / "model.safetensors")
    assert_untouched(
        {"model": Net(2)}, InvalidArgumentError, "name the one that is meant", of=source
    )
    for place, seed in ((folder / INDEX, 1), (folder / "model.safetensors", 3)):
        load_sources([Source(place, item="model")], into)
        assert difference(values(Net(seed)), values(into["model"])) == ""
    (folder / INDEX).rename(folder / "other.safetensors.index.json")
    (folder / "third.safetensors.index.json").write_text("{}")
    assert_untouched(
        {"model": Net(2)}, InvalidArgumentError, "other.safetensors.index.json, third", of=source
    )
    for file in folder.glob("*.json"):
        file.unlink()
    load_sources([source], into)
    assert difference(values(Net(3)), values(into["model"])) == ""
    (folder / "model.safetensors").unlink()
    assert_untouched({"model": Net(2)}, StateMismatchError, "model.stray: unexpected", of=source)
    safetensors.torch.save_file({"stray": torch.ones(2)}, folder / "z.safetensors")
    assert_untouched(
        {"model": Net(2)}, InvalidArgumentError, "adapter.safetensors", "z.safetensors", of=source
    )


def test_weights_without_a_tensor_are_told(tmp_path: Path):
    safetensors.torch.save_file({}, tmp_path / "x.safetensors")
    assert_untouched(
        {"x": Net(1)},
        StateMismatchError,
        "nothing of it",
        of=Source(tmp_path / "x.safetensors", item="x"),
    )
