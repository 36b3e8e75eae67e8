"""Export: the weights of any checkpoint, whole, as stock readers of Hugging Face's layout expect
them.
"""

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from commands import output, sidesave_cli
from hypothesis import given, settings
from hypothesis import strategies as st
from loads import flip_bit
from object_server import ObjectServer
from safetensors.torch import load_file
from states import difference, noise
from torch import nn
from trainers import DEADLINE_S, save
from worlds import Apart, Own, Spread, cut, write_world

from sidesave.client.export.safetensors import export, parse_size
from sidesave.errors import (
    IntegrityError,
    InvalidArgumentError,
    NoSpaceError,
    StateMismatchError,
    UnsupportedValueError,
)
from sidesave.writer_daemon.format.layout import Layout


def load_as_transformers(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor by the index, or of the only file; nothing else may lie there."""
    files = {path.name for path in folder.iterdir()}
    if files == {"model.safetensors"}:
        return load_file(folder / "model.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = set(index["weight_map"].values())
    assert files == {"model.safetensors.index.json", *names}
    assert names == {
        f"model-{n:05d}-of-{len(names):05d}.safetensors" for n in range(1, len(names) + 1)
    }
    loaded: dict[str, torch.Tensor] = {}
    for name in names:
        held = load_file(folder / name)
        assert held.keys() == {fqn for fqn, file in index["weight_map"].items() if file == name}
        loaded |= held
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in loaded.values())
    return loaded


def write(run: Path, state: dict[str, Any], world: int = 1) -> Path:
    """A checkpoint; of several ranks all large tensors are cut, in rows or in columns."""

    def spread(fqn: str, tensor: torch.Tensor) -> Spread:
        if fqn.startswith("loader"):
            return Own()
        dim = len(fqn) % max(tensor.dim(), 1)
        return (
            cut(tensor.shape, world, dim)
            if tensor.dim() and all(tensor.shape)
            else Layout((world - 1,))
        )

    return write_world(run, [state] * world, spread)


def a_model(seed: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    tensors = {f"layers.{n}.weight": torch.randn(300, 257) for n in range(6)}
    return {
        "embed": noise(torch.bfloat16, 500, 64),
        **tensors,
        "count": torch.tensor(5),
        "empty": torch.empty(0, 3),
    }


def a_state() -> dict[str, Any]:
    momenta = {n: {"exp_avg": torch.randn(300, 257), "step": torch.tensor(1.0)} for n in range(3)}
    optimizer = {"state": momenta, "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}]}
    return {
        "model": a_model(),
        "optimizer": optimizer,
        "loader": {"position": torch.tensor(3)},
        "epoch": 4,
    }


@pytest.mark.drawn
@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("limit", [1 << 40, 700_000, 1])
def test_weights_come_out_whole_whoever_has_saved_them(tmp_path: Path, world: int, limit: int):
    path = write(tmp_path / "run", a_state(), world)
    report = export(path, tmp_path / "out", max_shard_nbytes=limit)
    expected = a_model()
    assert (
        difference(
            dict(sorted(expected.items())),
            dict(sorted(load_as_transformers(tmp_path / "out").items())),
        )
        == ""
    )
    assert (report.tensors, report.nbytes) == (
        len(expected),
        sum(tensor.nbytes for tensor in expected.values()),
    )
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == set(report.files)
    for name in report.files:
        with safetensors.safe_open(tmp_path / "out" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
        content = (tmp_path / "out" / name).read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for fqn, entry in json.loads(content[8:start]).items():
            offset = 0 if fqn == "__metadata__" else start + entry["data_offsets"][0]
            assert fqn == "__metadata__" or offset % expected[fqn].itemsize == 0
    if limit == 700_000:
        sizes = [(tmp_path / "out" / name).stat().st_size for name in report.files]
        assert len(sizes) == 3
        assert max(sizes) < 700_000 + 4096
    assert len(report.files) == {1 << 40: 1, 700_000: 3, 1: 9}[limit]


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=12),
    st.integers(1, 8000),
    st.integers(1, 4),
)
def test_files_are_divided_by_size_in_the_order_of_the_state(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, int]], limit: int, world: int
):
    folder = tmp_path_factory.mktemp("export")
    model = {f"t{n}": torch.randn(shape) for n, shape in enumerate(shapes)}
    export(write(folder, {"model": model}, world), folder / "out", max_shard_nbytes=limit)
    loaded = load_as_transformers(folder / "out")
    assert difference(dict(sorted(model.items())), dict(sorted(loaded.items()))) == ""
    for file in (folder / "out").glob("*.safetensors"):
        held = load_file(file)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= limit


def test_a_module_saved_by_a_checkpointer_is_loaded_by_a_module(tmp_path: Path):
    model = nn.TransformerEncoderLayer(32, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    save(tmp_path / "run", {"model": model, "optimizer": optimizer, "step": 1})
    export(tmp_path / "run" / "step-00000001", tmp_path / "new" / "out")
    other = nn.TransformerEncoderLayer(32, 4)
    other.load_state_dict(load_file(tmp_path / "new" / "out" / "model.safetensors"))
    assert difference(dict(model.state_dict()), dict(other.state_dict())) == ""
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "new" / "out").stat().st_mode & 0o777 == 0o777 & ~mask


# What is chosen -----------------------------------------------------------------------------------


def test_where_several_items_have_weights_one_must_be_named(tmp_path: Path):
    path = write(
        tmp_path / "run", {"model": {"w": torch.ones(2)}, "ema": {"w": torch.zeros(2)}, "n": 1}
    )
    with pytest.raises(InvalidArgumentError, match=r"which item\? model, ema have tensors"):
        export(path, tmp_path / "out")
    with pytest.raises(InvalidArgumentError, match=r"no item 'modle'; it has model, ema, n"):
        export(path, tmp_path / "out", item="modle")
    with pytest.raises(InvalidArgumentError, match="nothing to export: no tensor of n"):
        export(path, tmp_path / "out", item="n")
    assert not (tmp_path / "out").exists()
    assert not export(path, tmp_path / "out", item="ema").tied
    assert not load_as_transformers(tmp_path / "out")["w"].any()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, {"a.w", "a.b", "c"}),
        ({"keep_prefix": True}, {"model.a.w", "model.a.b", "model.c"}),
        ({"include": "model.a"}, {"a.w", "a.b"}),
        ({"include": ["*.w", "model.c"]}, {"a.w", "c"}),
        ({"exclude": "model.a.*"}, {"c"}),
    ],
)
def test_patterns_choose_and_the_items_name_goes(
    tmp_path: Path, options: dict[str, Any], names: set[str]
):
    model = {"a": {"w": torch.ones(2), "b": torch.ones(3)}, "c": torch.ones(4)}
    export(write(tmp_path / "run", {"model": model}), tmp_path / "out", **options)
    assert load_as_transformers(tmp_path / "out").keys() == names


def test_tied_weights_are_written_once_and_told(tmp_path: Path):
    weight = torch.randn(4, 3)
    state = {
        "model": {"embed": weight, "head": weight, "note": "hello", "list": [1, 2]},
        "ema": {"copy": weight},
    }
    path = write(tmp_path / "run", state)
    report = export(path, tmp_path / "out", item="model")
    assert (report.tied, report.left_out) == ({"head": "embed"}, ("note", "list"))
    assert load_as_transformers(tmp_path / "out").keys() == {"embed"}
    export(path, tmp_path / "alone", item="model", exclude="model.embed")
    assert torch.equal(load_as_transformers(tmp_path / "alone")["head"], weight)
    export(path, tmp_path / "ema", item="ema")
    assert torch.equal(load_as_transformers(tmp_path / "ema")["copy"], weight)


def test_floating_point_weights_are_cast_and_others_are_not(tmp_path: Path):
    model = {
        "w": torch.randn(50, 70_000),  # several pieces
        "narrow": noise(torch.float8_e4m3fnuz, 300),
        "half": noise(torch.bfloat16, 7),
        "count": torch.arange(5),
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    export(write(tmp_path / "run", {"model": model}, 2), tmp_path / "out", dtype=torch.bfloat16)
    expected = {name: t.bfloat16() if t.is_floating_point() else t for name, t in model.items()}
    loaded = load_as_transformers(tmp_path / "out")
    assert difference(dict(sorted(expected.items())), dict(sorted(loaded.items()))) == ""


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            torch.zeros(3, dtype=torch.complex128),
            "model.odd: there is no dtype complex128; leave it out with exclude=",
        ),
        (
            noise(torch.float8_e8m0fnu, 3),
            "model.odd: there is no dtype float8_e8m0fnu; cast it with dtype=, or leave",
        ),
        (torch.eye(3).to_sparse(), "model.odd: it is a sparse tensor; leave it out with exclude="),
    ],
)
def test_what_safetensors_does_not_know_is_refused_by_name(
    tmp_path: Path, tensor: torch.Tensor, message: str
):
    path = write(tmp_path / "run", {"model": {"w": torch.ones(2), "odd": tensor}})
    with pytest.raises(UnsupportedValueError, match=re.escape(message)):
        export(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(path, tmp_path / "out", exclude="model.odd")
    assert load_as_transformers(tmp_path / "out").keys() == {"w"}


def test_tensors_that_each_rank_has_for_itself_are_named_for_rank_0s_are_exported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    states = [{"ema": {"w": torch.full((3,), float(rank))}} for rank in range(2)]
    path = write_world(tmp_path / "run", states, lambda fqn, tensor: Own())
    export(path, tmp_path / "out", item="ema")
    assert "each of 2 ranks has its own, and rank 0's is exported: ema.w" in caplog.text
    assert torch.equal(load_as_transformers(tmp_path / "out")["w"], torch.zeros(3))


def test_what_has_no_arithmetic_is_not_cast(tmp_path: Path):
    packed = torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    path = write(tmp_path / "run", {"model": {"w": packed}})
    with pytest.raises(
        UnsupportedValueError,
        match=r"model\.w: this torch cannot turn float4_e2m1fn_x2 into float16",
    ):
        export(path, tmp_path / "out", dtype=torch.float16)


def test_tensors_of_which_ranks_have_several_are_refused(tmp_path: Path):
    states = [
        {"model": {"expert": torch.full((3,), float(rank)), "w": torch.ones(2)}}
        for rank in range(2)
    ]

    def spread(fqn: str, tensor: torch.Tensor) -> Spread:
        return Apart((0, 1)) if fqn == "model.expert" else Layout((1,))

    path = write_world(tmp_path / "run", states, spread)
    with pytest.raises(StateMismatchError, match=r"model\.expert differs between ranks \(0, 1\)"):
        export(path, tmp_path / "out")
    export(path, tmp_path / "out", exclude="model.expert")
    assert load_as_transformers(tmp_path / "out").keys() == {"w"}


# What can go wrong --------------------------------------------------------------------------------


def test_weights_go_to_a_store_as_they_go_to_a_disk(tmp_path: Path, server: ObjectServer):
    model = {
        "large": torch.randn(3000, 1000),
        "small": torch.randn(7),
        "cast": torch.randn(1000, 900),
    }
    path, url = write(tmp_path / "run", {"model": model}), "s3://bucket/exports/one"
    on_disk = export(path, tmp_path / "out", max_shard_nbytes=8_000_000, dtype=torch.bfloat16)
    report = export(
        path, url, max_shard_nbytes=8_000_000, dtype=torch.bfloat16, storage_options=server.options
    )
    assert (report.path, report.files, report.nbytes) == (url, on_disk.files, on_disk.nbytes)
    there = server.root / "bucket" / "exports" / "one"
    assert {path.name: path.read_bytes() for path in there.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()
    }
    assert server.count("PART") == 2, "what is above 5 MiB is sent in parts while it is read"
    with pytest.raises(InvalidArgumentError, match="not empty"):
        export(path, url, storage_options=server.options)


@pytest.mark.parametrize("limit", [1 << 20, 1 << 40])
def test_of_an_export_to_a_store_that_fails_nothing_is_left(
    tmp_path: Path, server: ObjectServer, limit: int
):
    path = write(
        tmp_path / "run", {"model": {"a": torch.randn(1500, 1000), "b": torch.randn(1500, 1000)}}
    )
    flip_bit(next(path.glob("model*.safetensors")), -1)
    with pytest.raises(IntegrityError, match="does not match"):
        export(path, "s3://bucket/out", max_shard_nbytes=limit, storage_options=server.options)
    assert [path for path in (server.root / "bucket").rglob("*") if path.is_file()] == []
    assert not server.uploads


def test_the_command_exports_to_a_url(tmp_path: Path):
    write(tmp_path / "run", a_state())
    url = f"file://{tmp_path}/store/out"
    assert url in output("export", tmp_path / "run", url, "--item", "model")
    assert load_as_transformers(tmp_path / "store" / "out").keys()
    assert "not written to" in output(
        "export", tmp_path / "run", "https://host/out", "--item", "model", status=2
    )


def test_nothing_is_overwritten_and_an_empty_directory_is_taken(tmp_path: Path):
    path = write(tmp_path / "run", {"model": {"w": torch.ones(2)}})
    full, empty, file = tmp_path / "full", tmp_path / "empty", tmp_path / "file"
    full.mkdir()
    (full / "precious").write_text("x")
    empty.mkdir()
    file.write_text("x")
    for target in (full, file):
        with pytest.raises(InvalidArgumentError, match="exists and is not empty"):
            export(path, target)
    assert [path.name for path in full.iterdir()] == ["precious"]
    export(path, empty)
    assert load_as_transformers(empty).keys() == {"w"}


@pytest.mark.parametrize("limit", [1 << 30, 100_000])
def test_damage_is_noticed_and_nothing_is_left(tmp_path: Path, limit: int):
    path = write(tmp_path / "run", {"model": a_model()}, 3)
    flip_bit(path / "model.rank-00002.safetensors", -100)
    with pytest.raises(IntegrityError, match=r"model\.rank-00002\.safetensors: block"):
        export(path, tmp_path / "out", max_shard_nbytes=limit)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@pytest.mark.root
def test_a_full_disk_is_told_before_or_while_writing_and_nothing_is_left(
    tmp_path: Path, mount: Callable[..., Path]
):
    small = mount("-t", "tmpfs", "-o", "size=1m", "none")
    path = write(tmp_path / "run", {"model": {"w": torch.zeros(1 << 20)}})
    with pytest.raises(NoSpaceError, match="4,194,304 bytes are needed") as caught:
        export(path, small / "out")
    assert caught.value.errno == errno.ENOSPC
    fits_not = write(
        tmp_path / "other", {"model": {f"{n}{'w' * 600}": torch.zeros(1) for n in range(2000)}}
    )
    with pytest.raises(NoSpaceError):  # for its header
        export(fits_not, small / "out", keep_prefix=True)
    assert not list(small.iterdir())


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9),
        ("5gib", 5 << 30),
        ("1.5MB", 1_500_000),
        ("300", 300),
        ("2 KB", 2000),
        ("7B", 7),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_are_read_as_huggingface_writes_them(text: str, nbytes: int):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "5 apples", "0", "-5GB", "1e3MB", "0.1B"])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(InvalidArgumentError, match="is no size"):
        parse_size(text)


# The command --------------------------------------------------------------------------------------


def test_the_command_exports_the_latest_of_a_run(tmp_path: Path):
    weight = torch.randn(64, 8)
    for step in (1, 2):
        state = {
            "model": {"embed": weight + step, "head": weight, "tied": weight, "extra": None},
            "epoch": step,
        }
        write_world(tmp_path / "run", [state], lambda fqn, tensor: Layout((0,)), step=step)
    told = output(
        "export",
        tmp_path / "run",
        tmp_path / "out",
        "--dtype",
        "float16",
        "--max-shard-size",
        "1KB",
    )
    first, *more = told.splitlines()
    assert first == f"{tmp_path / 'out'}: 2 tensors of model, 2.0 kB in 2 files"
    assert more == ["  tied is tied to head, and left out", "  extra is not a tensor, and left out"]
    loaded = load_as_transformers(tmp_path / "out")
    assert (
        difference(
            {"embed": (weight + 2).half(), "head": weight.half()}, dict(sorted(loaded.items()))
        )
        == ""
    )
    output(
        "export",
        tmp_path / "run",
        tmp_path / "old",
        "--step",
        1,
        "--exclude",
        "model.head",
        "--keep-prefix",
    )
    assert load_as_transformers(tmp_path / "old").keys() == {"model.embed", "model.tied"}


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--dtype", "float99"], 2, "there is no dtype 'float99'"),
        (["--dtype", "int8"], 2, "dtype casts floating-point tensors"),
        (["--max-shard-size", "big"], 2, "'big' is no size"),
        (["--item", "x"], 2, "no item 'x'"),
        (["--include", "nothing"], 2, "nothing to export"),
    ],
)
def test_mistakes_are_told_in_a_line(tmp_path: Path, options: list[str], status: int, message: str):
    path = write(tmp_path / "run", {"model": {"w": torch.ones(2)}})
    result = sidesave_cli("export", path, tmp_path / "out", *options)
    assert (result.exit_code, len(result.output.splitlines())) == (status, 1)
    assert message in result.output
    assert not (tmp_path / "out").exists()


# Memory -------------------------------------------------------------------------------------------

EXPORT = """
import sys, torch
from sidesave.client.export.safetensors import export

def peak():  # unlike ru_maxrss, which a process inherits
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))

export(sys.argv[1], sys.argv[2])  # a small one, for all that is imported and allocated once
before = peak()
export(sys.argv[3], sys.argv[4], **({"dtype": getattr(torch, sys.argv[5])} if len(sys.argv) > 5 else {}))
print(peak() - before)
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["", "float64"])
def test_memory_stays_bounded_however_large_a_tensor_is(tmp_path: Path, dtype: str):
    """A tensor of 800 MB, cut in columns, and many of which several fit in a batch."""
    wide = torch.arange(200_000_000, dtype=torch.int32).view(10_000, 20_000)
    model = {
        "wide": wide.view(torch.float32),
        **{f"w{n}": torch.full((3_000_000,), float(n)) for n in range(20)},
    }
    world = 4
    layouts = {"model.wide": cut(wide.shape, world, 1)}
    path = write_world(
        tmp_path / "run",
        [{"model": model}] * world,
        lambda fqn, t: layouts.get(fqn, cut(t.shape, world)),
    )
    small = write(tmp_path / "small", {"model": {"w": torch.ones(3)}})
    names = [small, tmp_path / "small-out", path, tmp_path / "out", *filter(None, [dtype])]
    done = subprocess.run(
        [sys.executable, "-c", EXPORT, *names],
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 300e6
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        part = file.get_slice("wide")[4_990:5_010, :].to(torch.float32)
    assert torch.equal(part.view(torch.int32), wide[4_990:5_010])
