"""Loading what is damaged: it is found, told with the place, and nothing is applied."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loads import assert_damaged, flip_bit, live, values, with_manifest
from states import difference
from trainers import save

import sidesave
from sidesave import Checkpointer
from sidesave.client.loading.tensors import TensorLoad
from sidesave.client.reading.checkpoint_reader import CheckpointReader
from sidesave.errors import CheckpointNotFoundError, FormatVersionError, IntegrityError
from sidesave.stager.state.tensor_nodes import TensorRef


def test_a_flipped_bit_is_found_with_file_block_and_name_and_nothing_is_applied(tmp_path: Path):
    large = torch.randn(300_000)  # 1.2 MB: five blocks of its own, after one of the header
    with Checkpointer(tmp_path) as checkpointer:
        info = checkpointer.save(
            1, {"x": {"small": torch.ones(5), "large": large}}, blocking=True
        ).committed.result()
    name = "x.rank-00000.safetensors"
    path = Path(info) / name
    flip_bit(path, 8 + int.from_bytes(path.read_bytes()[:8], "little") + 600_000)
    target = {"x": {"small": torch.zeros(5), "large": torch.zeros(300_000)}}
    with pytest.raises(
        IntegrityError, match=rf"/{name}: block 3 \(bytes .*\) does not .*; it holds x\.large$"
    ):
        sidesave.load(info, into=target)
    assert not any(tensor.any() for tensor in target["x"].values())
    [fault] = sidesave.verify(info).faults
    assert (fault.file, fault.fqns) == (name, ("x.large",))
    assert difference({"x": {"small": torch.ones(5)}}, sidesave.load(info, include="x.small")) == ""
    assert not torch.equal(sidesave.load(info, verify=False)["x"]["large"], large)


FILES = [
    "manifest.json",
    "rank-00000.json",
    "objects.rank-00000.msgpack",
    "model.rank-00000.safetensors",
    "model.rank-00000.xxh3",
    "tensors.rank-00000.safetensors",
]


@pytest.mark.drawn
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("at", [0, 1, 100, -1])
def test_a_flipped_bit_anywhere_is_found_and_nothing_is_applied(
    checkpoint: Path, name: str, at: int
):
    path = checkpoint / name
    flip_bit(path, min(at, path.stat().st_size - 1))
    assert_damaged(checkpoint, name.replace(".", r"\."))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cut", [lambda size: 0, lambda size: size // 2, lambda size: size - 1])
def test_a_short_file_is_found_and_nothing_is_applied(
    checkpoint: Path, name: str, cut: Callable[[int], int]
):
    os.truncate(checkpoint / name, cut((checkpoint / name).stat().st_size))
    assert_damaged(checkpoint, name.replace(".", r"\."))


@pytest.mark.parametrize("name", FILES[1:])
def test_a_missing_file_is_found_and_nothing_is_applied(checkpoint: Path, name: str):
    (checkpoint / name).unlink()
    assert_damaged(checkpoint, name.replace(".", r"\."))


def test_bytes_appended_to_a_file_are_found(checkpoint: Path):
    with (checkpoint / "model.rank-00000.safetensors").open("ab") as file:
        file.write(b"x")
    assert_damaged(checkpoint, r"model\.rank-00000\.safetensors")


def test_files_of_two_checkpoints_do_not_mix(tmp_path: Path):
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": {"w": torch.full((100,), float(step))}}, blocking=True)
    for suffix in ("safetensors", "xxh3"):
        name = f"x.rank-00000.{suffix}"
        shutil.copy(tmp_path / "step-00000001" / name, tmp_path / "step-00000002" / name)
    with pytest.raises(IntegrityError, match=r"x\.rank-00000\.xxh3"):
        sidesave.load(tmp_path / "step-00000002")


def test_a_directory_without_a_checkpoint_is_said_to_have_none(tmp_path: Path, original: Path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere", original / "manifest.json"):
        with pytest.raises(CheckpointNotFoundError):
            sidesave.load(path)


def test_of_a_run_directory_the_newest_is_loaded_and_what_find_lists_too(tmp_path: Path):
    with Checkpointer(tmp_path) as checkpointer:
        for step in (2, 5):
            checkpointer.save(step, {"step": step}, blocking=True)
    assert sidesave.load(tmp_path) == sidesave.load(str(tmp_path), into={"step": 0}) == {"step": 5}
    assert [sidesave.load(info)["step"] for info in sidesave.find(tmp_path)] == [2, 5]
    (tmp_path / "step-00000005" / "manifest.json").write_bytes(b"{}")
    with pytest.raises(IntegrityError):
        sidesave.load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32])
@pytest.mark.parametrize(
    "stored", [torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.float64)]
)
def test_a_treespec_that_takes_a_tensor_for_what_it_is_not_is_damaged(
    tmp_path: Path, stored: torch.Tensor, dtype: torch.dtype
):
    path = save(tmp_path, {"x": stored})
    with (
        CheckpointReader(str(path)) as reader,
        pytest.raises(IntegrityError, match="x is stored as"),
    ):
        TensorLoad(TensorRef("x", dtype)).look_up(reader)


def test_a_newer_format_is_refused_as_such(checkpoint: Path):
    with_manifest(checkpoint, lambda body: None)
    sidesave.load(checkpoint)  # or it would prove nothing
    with_manifest(checkpoint, lambda body: body.update(version=2))
    target = live(1)
    before = values(target)
    with pytest.raises(FormatVersionError, match="format version 2; this sidesave reads version 1"):
        sidesave.load(checkpoint, into=target)
    assert difference(before, values(target)) == ""
