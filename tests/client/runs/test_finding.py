"""Finding checkpoints from scripts: only committed ones, cheaply, and without an error for what is
not there.
"""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trainers import save

import sidesave
from sidesave import Source
from sidesave.client.runs import finding
from sidesave.errors import CheckpointNotFoundError, IntegrityError, InvalidArgumentError


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 10, 20 and 30, and 15 after going back: that one is the latest."""
    run = tmp_path_factory.mktemp("run")
    with sidesave.Checkpointer(run) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, {"x": torch.full((3,), float(step))}, blocking=True)
        checkpointer.load(10)
        checkpointer.save(15, {"x": torch.full((3,), 15.0)}, blocking=True)
    return run


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy of it to be changed."""
    return shutil.copytree(original, tmp_path / "run")


def steps(path: Path) -> list[int]:
    return [info.step for info in sidesave.find(path)]


def test_checkpoints_are_found_in_the_order_of_their_commits(original: Path):
    assert steps(original) == [10, 20, 30, 15]
    newest = sidesave.latest(original)
    assert newest is not None
    assert (newest.step, newest.path) == (15, str(original / "step-00000015"))
    assert torch.equal(sidesave.load(newest)["x"], torch.full((3,), 15.0))
    assert sidesave.contains_checkpoint(original)
    assert not sidesave.is_checkpoint(original)


def test_a_checkpoint_is_one_and_contains_none(original: Path, tmp_path: Path):
    path = original / "step-00000020"
    link = tmp_path / "best"
    link.symlink_to(path)
    for place in (path, str(path), link, shutil.copytree(path, tmp_path / "moved")):
        assert sidesave.is_checkpoint(place)
        assert not sidesave.contains_checkpoint(place)
        assert [info.step for info in sidesave.find(place)] == [20]


def empty(folder: Path) -> Path:
    path = folder / "empty"
    path.mkdir()
    return path


def a_file(folder: Path) -> Path:
    path = folder / "file"
    path.write_bytes(b"abc")
    return path


def below_a_file(folder: Path) -> Path:
    return a_file(folder) / "below"


def a_dangling_link(folder: Path) -> Path:
    path = folder / "link"
    path.symlink_to(folder / "nowhere")
    return path


def a_link_to_itself(folder: Path) -> Path:
    path = folder / "loop"
    path.symlink_to(path)
    return path


def a_directory_as_manifest(folder: Path) -> Path:
    path = folder / "step-00000001"
    (path / "manifest.json").mkdir(parents=True)
    return path


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: folder / "nowhere" / "at" / "all",
        lambda folder: folder / ("x" * 300),
        lambda folder: Path("/"),
        empty,
        a_file,
        below_a_file,
        a_dangling_link,
        a_link_to_itself,
        a_directory_as_manifest,
    ],
)
def test_where_there_is_nothing_nothing_is_found_and_nothing_is_raised(
    tmp_path: Path, make: Callable[[Path], Path]
):
    path = make(tmp_path)
    assert sidesave.find(path) == []
    assert sidesave.latest(path) is None
    assert not sidesave.is_checkpoint(path)
    assert not sidesave.contains_checkpoint(path)


def test_what_is_unfinished_is_never_shown(run: Path):
    session = "0123456789abcdef"
    partial = run / f".step-00000040.{session}.partial"
    shutil.copytree(
        run / "step-00000030", partial
    )  # all is there, and its name says that it is not committed
    shutil.copytree(run / "step-00000030", run / f".step-00000041.{session}.salvage-7")
    (run / "step-00000042").mkdir()
    (run / "step-00000042" / "rank-00000.json").write_bytes(b"{}")
    assert steps(run) == [10, 20, 30, 15]
    for path in (partial, run / "step-00000042"):
        assert not sidesave.is_checkpoint(path)
        assert sidesave.find(path) == []
    with pytest.raises(CheckpointNotFoundError, match="not finished"):
        Source(partial).locate()


def test_a_step_that_is_being_replaced_is_still_there(run: Path):
    (run / "step-00000020").rename(run / ".step-00000020.0123456789abcdef.replaced")
    assert steps(run) == [10, 20, 30, 15]
    assert sidesave.is_checkpoint(run / "step-00000020")
    assert sidesave.load(Source(run, 20).locate())["x"][0] == 20


def test_a_step_whose_replacement_ends_between_two_looks_is_still_there(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    named, hidden = run / "step-00000020", run / ".step-00000020.0123456789abcdef.replaced"
    named.rename(hidden)
    listing = os.listdir

    def list_and_replace(directory: str) -> list[str]:
        names = listing(directory)
        if hidden.exists():
            hidden.rename(named)
        return names

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", list_and_replace)
        assert finding.locate(named) == str(named)


def test_a_damaged_one_is_left_out_and_does_not_become_the_latest_unnoticed(run: Path):
    manifest = run / "step-00000030" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert steps(run) == [10, 20, 15]
    assert not sidesave.is_checkpoint(run / "step-00000030")
    with pytest.raises(IntegrityError, match="step-00000030"):
        Source(run).locate()
    assert Source(run, 15).locate() == str(run / "step-00000015")
    with pytest.raises(IntegrityError, match="step-00000030"):
        sidesave.load(Source(run / "step-00000030").locate())


def test_urls_of_no_store_are_refused(original: Path):
    for function in (
        sidesave.find,
        sidesave.latest,
        sidesave.is_checkpoint,
        sidesave.contains_checkpoint,
    ):
        with pytest.raises(InvalidArgumentError, match=r"ftp://bucket/run"):
            function("ftp://bucket/run")
        with pytest.raises(InvalidArgumentError, match="path"):
            function(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidArgumentError, match=r"hdfs://bucket"):
        Source("hdfs://bucket").locate()


def test_a_directory_that_cannot_be_read_is_no_empty_one(original: Path):
    code = """
import os, sys, sidesave
functions = sidesave.find, sidesave.latest, sidesave.contains_checkpoint
kind = sidesave.errors.WriteError
print(*(bool(function(sys.argv[1])) for function in functions))
os.chmod(sys.argv[1], 0)
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
for function in functions:
    try:
        print(function(sys.argv[1]))
    except kind as error:
        print(error.errno)
"""
    with tempfile.TemporaryDirectory() as folder:
        run = shutil.copytree(original, Path(folder) / "run")
        Path(folder).chmod(0o755)
        done = subprocess.run([sys.executable, "-c", code, run], capture_output=True, text=True)
        run.chmod(0o755)
    assert done.stdout.split() == ["True"] * 3 + [str(errno.EACCES)] * 3, done.stderr


def test_finding_takes_no_torch(original: Path):
    code = f"""
import sys, sidesave
print([info.step for info in sidesave.find({str(original)!r})], sidesave.latest({str(original)!r}).step)
print(sidesave.is_checkpoint({str(original)!r}), sidesave.contains_checkpoint({str(original)!r}))
print(sorted({{"torch", "numpy"}} & sys.modules.keys()))
"""  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[10, 20, 30, 15] 15", "False True", "[]"]


# Which one ----------------------------------------------------------------------------------------


def test_one_is_located_by_run_and_step_or_by_itself(original: Path):
    assert Source(original).locate() == str(original / "step-00000015")
    assert Source(original, 30).locate() == str(original / "step-00000030")
    assert Source(original / "step-00000010").locate() == str(original / "step-00000010")
    assert Source(original / "step-00000010", 10).locate() == str(original / "step-00000010")
    with pytest.raises(InvalidArgumentError, match="step 10, and not of step 20"):
        Source(original / "step-00000010", 20).locate()
    with pytest.raises(CheckpointNotFoundError, match=r"no step 11; there are \[10, 15, 20, 30\]"):
        Source(original, 11).locate()
    with pytest.raises(InvalidArgumentError, match="step must be"):
        Source(original, -1)


def dcp_checkpoint(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"x": torch.ones(3)}, checkpoint_id=folder, no_dist=True)


def export(folder: Path) -> None:
    import safetensors.torch

    folder.mkdir()
    safetensors.torch.save_file({"x": torch.ones(3)}, folder / "model.safetensors")


def weights(path: Path) -> None:
    import safetensors.torch

    safetensors.torch.save_file({"x": torch.ones(3)}, path)


def fresh_run(folder: Path) -> None:
    with sidesave.Checkpointer(folder):
        pass


def runs(folder: Path) -> None:
    save(folder / "first", {"x": 1})


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [
        ("run", fresh_run, "run directory, and nothing has been committed yet"),
        ("runs", runs, "run directories first"),
        ("dcp", dcp_checkpoint, r"torch\.distributed\.checkpoint"),
        ("hf", export, "directory of safetensors files"),
        ("x.safetensors", weights, "a safetensors file"),
        ("x.pt", lambda path: torch.save({"x": 1}, path), r"torch\.load"),
        ("empty", lambda path: path.mkdir(), "empty"),
        ("nothing", lambda path: None, "nothing at this path"),
        ("text", lambda path: path.write_text("hello"), "it is a file"),
    ],
)
def test_what_is_no_checkpoint_is_said_to_be_what_it_is(
    tmp_path: Path, name: str, make: Callable[[Path], object], words: str
):
    path = tmp_path / name
    make(path)
    for attempt in (lambda: Source(path).locate(), lambda: sidesave.load(path)):
        with pytest.raises(CheckpointNotFoundError, match=words) as caught:
            attempt()
        assert caught.value.filename == str(path)
        assert caught.value.errno == errno.ENOENT
    assert finding.describe_path(str(path)) in str(caught.value)
