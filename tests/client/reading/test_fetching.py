"""A checkpoint that is fetched from an object store: whole or not there, and not fetched twice."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from object_server import ObjectServer, Request, serving
from states import difference
from trainers import save

import sidesave
from sidesave import Checkpointer
from sidesave.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DirectoryInUseError,
    IntegrityError,
    InvalidArgumentError,
    NoSpaceError,
    WriteError,
)
from sidesave.writer_daemon.format import integrity
from sidesave.writer_daemon.storage import PosixStorage

STEP = "s3://bucket/run/step-00000002"
FILES = ["manifest.json", "notes.txt", "objects.rank-00000.msgpack", "rank-00000.json"] + [
    f"{name}.rank-00000.{suffix}"
    for name in ("head", "model")
    for suffix in ("safetensors", "xxh3")
]


def state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "model": {"large": torch.randn(3 << 20)},
        "head": {"weight": torch.randn(1 << 20)},
        "loss": 0.5,
    }


def fetch(server: ObjectServer, run: Path, url: str = STEP, **more: Any) -> sidesave.CheckpointInfo:
    retries = {"retry_config": {"max_retries": 1}}
    return sidesave.fetch(url, run, storage_options={**server.options, **retries}, **more)


def names(directory: str | os.PathLike[str]) -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir())


def hidden(run: Path) -> list[str]:
    return [name for name in names(run) if name.startswith(".fetch-")]


def test_what_is_fetched_is_a_committed_checkpoint_like_the_one_in_the_store(
    server: ObjectServer, buckets: Path, tmp_path: Path
):
    arrived: list[int] = []
    info = fetch(server, tmp_path / "new" / "run", "s3://bucket/run", on_bytes=arrived.append)
    original = buckets / "bucket" / "run" / "step-00000002"
    assert (info.step, info.path) == (2, str(tmp_path / "new" / "run" / "step-00000002"))
    assert names(info) == names(original) == sorted(FILES)
    for name in FILES:
        assert (Path(info) / name).read_bytes() == (original / name).read_bytes()
    assert sidesave.find(tmp_path / "new" / "run") == [info]
    assert sidesave.verify(info).ok
    assert sum(arrived) == sum((original / name).stat().st_size for name in FILES)
    assert stat.S_IMODE(Path(info).stat().st_mode) == stat.S_IMODE(original.stat().st_mode)
    assert names(tmp_path / "new" / "run") == ["step-00000002"]


def test_a_fetch_takes_a_request_for_each_file_and_each_8_mib_and_one_more_for_each_file_of_tensors(
    server: ObjectServer, tmp_path: Path
):
    """docs/remote.md says so."""
    fetch(server, tmp_path)
    assert server.count("LIST") == 0
    assert server.count("GET") == 6 + (1 + 1) + (1 + 2)  # small files; head, of 4 MiB; model, of 12


def test_a_run_goes_on_from_what_was_fetched(server: ObjectServer, tmp_path: Path):
    fetch(server, tmp_path, "s3://bucket/run", step=1)
    with Checkpointer(tmp_path) as checkpointer:
        assert difference(checkpointer.load(), state(1)) == ""
        info = checkpointer.save(2, state(3), blocking=True).committed.result()
    assert info.parent is not None
    assert info.parent[0] == 1


def test_a_step_that_is_there_is_an_error_and_stays(server: ObjectServer, tmp_path: Path):
    save(tmp_path, state(7), 2)
    with pytest.raises(CheckpointExistsError, match="there is this step already"):
        fetch(server, tmp_path)
    assert difference(sidesave.load(tmp_path), state(7)) == ""


def test_nothing_is_fetched_into_a_run_that_is_being_saved(server: ObjectServer, tmp_path: Path):
    with Checkpointer(tmp_path), pytest.raises(DirectoryInUseError, match="live session"):
        fetch(server, tmp_path)


def test_one_checkpoint_is_fetched_by_one_at_a_time(server: ObjectServer, tmp_path: Path):
    refused: list[BaseException] = []

    def meanwhile(nbytes: int) -> None:
        if not refused:
            with pytest.raises(DirectoryInUseError, match="another call fetches") as raised:
                fetch(server, tmp_path)
            refused.append(raised.value)

    fetch(server, tmp_path, on_bytes=meanwhile)
    assert refused


@pytest.mark.drawn
@pytest.mark.parametrize("fault", [403, 404, 500, "cut", "flip"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_wrong_on_the_way_leaves_no_checkpoint_and_the_next_call_goes_on(
    server: ObjectServer, tmp_path: Path, name: str, fault: Any
):
    wrong = f"step-00000002/{name}"
    # Of a tensor file the head comes, and then not the rest.
    server.fault = lambda request, number: (
        fault
        if request.key.endswith(wrong) and (number or not name.endswith(".safetensors"))
        else None
    )
    with pytest.raises(
        (WriteError, IntegrityError, CheckpointNotFoundError), match="step-00000002"
    ):
        fetch(server, tmp_path)
    assert sidesave.find(tmp_path) == []
    assert not (tmp_path / "step-00000002").exists()
    for partial in hidden(tmp_path):
        assert stat.S_IMODE((tmp_path / partial).stat().st_mode) == 0o700
    server.heal()
    assert sidesave.verify(fetch(server, tmp_path)).ok
    assert hidden(tmp_path) == []


def test_what_has_arrived_is_not_fetched_again(server: ObjectServer, tmp_path: Path):
    model = "bucket/run/step-00000002/model.rank-00000.safetensors"
    head = "bucket/run/step-00000002/head.rank-00000.safetensors"
    arrived = threading.Event()

    def fault(request: Request, number: int) -> Any:
        if request.key == model and number:
            arrived.wait(300)
            return 403
        return None

    def look(nbytes: int) -> None:
        (partial,) = hidden(tmp_path)
        if (tmp_path / partial / Path(head).name).exists():
            arrived.set()

    server.fault = fault
    with pytest.raises(WriteError):
        fetch(server, tmp_path, on_bytes=look)
    server.heal()
    server.requests.clear()
    again: list[int] = []
    fetch(server, tmp_path, on_bytes=again.append)
    asked = {request.key.rpartition("/")[2] for request in server.requests}
    assert asked == {
        "manifest.json",
        "rank-00000.json",
        "model.rank-00000.safetensors",
    }  # the record is the last
    assert sum(again) > 16 << 20


def test_a_small_file_that_is_damaged_meanwhile_is_fetched_again_and_no_other(tmp_path: Path):
    run = tmp_path / "buckets" / "bucket" / "run"
    run.mkdir(parents=True)
    with Checkpointer(run) as checkpointer:
        checkpointer.save(2, {"x": torch.ones(3)}, files={"notes/a.txt": "a note"}, blocking=True)
    with serving(tmp_path / "buckets") as server:
        server.fault = lambda request, number: 403 if request.key.endswith(".safetensors") else None
        with pytest.raises(WriteError):
            fetch(server, tmp_path / "copy")
        (partial,) = hidden(tmp_path / "copy")
        objects = tmp_path / "copy" / partial / "objects.rank-00000.msgpack"
        objects.write_bytes(bytes(objects.stat().st_size))
        server.heal()
        server.requests.clear()
        assert sidesave.verify(fetch(server, tmp_path / "copy")).ok
        asked = {request.key.rpartition("/")[2] for request in server.requests}
    assert asked == {
        "manifest.json",
        "rank-00000.json",
        objects.name,
        "tensors.rank-00000.safetensors",
    }


def test_a_fetch_that_is_killed_is_gone_on_with(server: ObjectServer, tmp_path: Path):
    code = """
import os, signal, sys, sidesave
count = 0
def arrived(nbytes):
    global count
    count += nbytes
    if count > 6 << 20:
        os.kill(os.getpid(), signal.SIGKILL)
sidesave.fetch(sys.argv[1], sys.argv[2], on_bytes=arrived)
"""
    environment = os.environ | {name.upper(): value for name, value in server.options.items()}
    killed = subprocess.run([sys.executable, "-c", code, STEP, tmp_path], env=environment)
    assert killed.returncode == -signal.SIGKILL
    assert sidesave.find(tmp_path) == []
    assert len(hidden(tmp_path)) == 1
    assert sidesave.verify(fetch(server, tmp_path)).ok


def test_what_has_no_room_is_refused_before_it_is_fetched(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(PosixStorage, "free_nbytes", lambda self: 1 << 20)
    with pytest.raises(NoSpaceError, match="are free"):
        fetch(server, tmp_path)
    ranges = [request for request in server.requests if request.key.endswith(".safetensors")]
    assert all(request.range == (0, 256 << 10) for request in ranges)


@pytest.mark.slow
def test_a_disk_that_refuses_is_told_with_its_path(server: ObjectServer, tmp_path: Path):
    fetch(server, tmp_path, "s3://bucket/run", step=1)
    code = """
import resource, signal, sys, sidesave
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, 5 << 20))
try:
    sidesave.fetch(sys.argv[1], sys.argv[2])
except sidesave.errors.WriteError as error:
    print(error)
"""
    environment = os.environ | {name.upper(): value for name, value in server.options.items()}
    told = subprocess.run(
        [sys.executable, "-c", code, STEP, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert "cannot reserve" in told.stdout
    assert "File too large" in told.stdout
    assert "model.rank-00000.safetensors" in told.stdout


def test_what_is_no_url_is_copied_otherwise(buckets: Path, tmp_path: Path):
    with pytest.raises(InvalidArgumentError, match="is no URL"):
        sidesave.fetch(buckets / "bucket" / "run", tmp_path)
    with pytest.raises(InvalidArgumentError, match="for local and mounted directories"):
        sidesave.fetch(STEP, "s3://bucket/copy")


def test_a_hostile_manifest_leads_nowhere_else(buckets: Path, tmp_path: Path):
    copy = shutil.copytree(buckets, tmp_path / "buckets")
    manifest = copy / "bucket" / "run" / "step-00000002" / "manifest.json"
    text = manifest.read_bytes().replace(b'"rank-00000.json"', b'"../../rank.json"')
    start = text.index(b",") + 1
    manifest.write_bytes(
        b'{"xxh3_128":"' + integrity.digest(text[start:]).hex().encode() + b'",' + text[start:]
    )
    (tmp_path / "run").mkdir()
    with serving(copy) as server, pytest.raises(IntegrityError, match="name"):
        fetch(server, tmp_path / "run")
    assert names(tmp_path / "run") == []
