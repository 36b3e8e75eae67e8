"""Runs in a store whose names come from a log: all that reads finds them by the names that they
have there.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_server import ObjectServer, serving
from object_sessions import KINDS, new_place, open_run
from sessions import NEW, Session, a_state, same

import sidesave
from sidesave.client.export.diff import Contents, compare
from sidesave.errors import CheckpointNotFoundError, CheckpointReplacedError
from sidesave.writer_daemon.storage import urls
from sidesave.writer_daemon.storage.remote import Bucket


def save(root: str, *steps: int, name: str = NEW, first: int = 1) -> Session:
    """A session that has saved these steps, and goes on."""
    session = Session(root, name, open_run=open_run)
    session.recover()
    for sequence, step in enumerate(steps, first):
        session.save(step, a_state(step), sequence=sequence)
    return session


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with new_place(request.param, tmp_path) as url:
        yield url


@pytest.fixture
def root(place: str, end_all: None) -> str:
    """All that has been begun there ends before the store does."""
    return place


@pytest.mark.drawn
def test_all_that_reads_takes_a_run_with_a_log(root: str, tmp_path: Path):
    save(root, 1, 2)
    place = f"{root}/step-00000002.{NEW}"
    for path in (root, f"{root}/", f"{root}/step-00000002", place):
        assert same(sidesave.load(path), a_state(2))
        assert sidesave.verify(path).ok
        assert sidesave.latest(path).step == 2  # pyright: ignore[reportOptionalMemberAccess]
    found = sidesave.find(root)
    assert [(info.step, info.path) for info in found] == [
        (n, f"{root}/step-{n:08d}") for n in (1, 2)
    ]
    assert same(sidesave.load(found[0]), a_state(1))
    into = a_state(3)
    sidesave.load(root, into=into, include="model")
    assert same({"model": into["model"]}, {"model": a_state(2)["model"]})
    sidesave.export(root, tmp_path / "export", item="model")
    with Contents(f"{root}/step-00000001") as first, Contents(place) as second:
        assert not compare(first, second).same
    for number, path in enumerate((f"{root}/step-00000002", place)):
        fetched = sidesave.fetch(path, tmp_path / f"fetched-{number}")
        assert Path(fetched.path).name == "step-00000002"
        assert same(sidesave.load(fetched), a_state(2))
    assert sidesave.fetch(root, tmp_path / "first", step=1).step == 1


def test_a_run_whose_log_is_longer_than_a_reader_asks_for(root: str):
    session = save(root, *range(1, 12))
    for step in range(1, 10):
        trash = session.delete(step, 99)
        assert trash is not None
        session.storage.remove_tree(trash)
    assert [info.step for info in sidesave.find(root)] == [10, 11]
    assert same(sidesave.load(root), a_state(11))


def test_a_step_that_was_deleted_is_not_there(root: str):
    session = save(root, 1, 2)
    session.delete(1, 1)
    assert [info.step for info in sidesave.find(root)] == [2]
    for call in (sidesave.load, sidesave.verify):
        with pytest.raises(CheckpointNotFoundError):
            call(f"{root}/step-00000001")
    assert sidesave.find(f"{root}/step-00000001") == []


def test_a_reader_says_that_its_step_was_replaced_and_reports_no_damage(root: str):
    session = save(root, 1)
    with Contents(f"{root}/step-00000001") as contents:
        session.save(1, a_state(5), sequence=2, replace=True)
        with pytest.raises(
            CheckpointReplacedError, match="was replaced or deleted while it was being read"
        ):
            contents.reader.read(contents.reader.names())
    assert same(sidesave.load(f"{root}/step-00000001"), a_state(5))


@pytest.mark.parametrize("call", ["load", "verify", "fetch"])
def test_a_reader_whose_step_is_replaced_in_the_middle_starts_over(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
):
    session = save(root, 1)
    read_into, lock, replaced = Bucket.read_into, threading.Lock(), list[str]()

    def replace_first(bucket: Bucket, key: str, offset: int, window: memoryview) -> tuple[int, int]:
        with lock:  # of a file of tensors, so the manifest was read before
            if not replaced:
                replaced.append(key)
                session.save(1, a_state(5), sequence=2, replace=True)
        return read_into(bucket, key, offset, window)

    monkeypatch.setattr(Bucket, "read_into", replace_first)
    if call == "load":
        assert same(sidesave.load(root), a_state(5))
    elif call == "verify":
        assert sidesave.verify(root).faults == ()
    else:
        info = sidesave.fetch(root, tmp_path / "fetched")
        assert (info.sequence, same(sidesave.load(info), a_state(5))) == (2, True)
        assert sorted(path.name for path in (tmp_path / "fetched").iterdir()) == ["step-00000001"]
    assert replaced


def test_what_a_session_before_has_left_is_not_shown(root: str):
    session = save(root, 1)
    session.write(session.stage(2, a_state(2), sequence=2))
    assert [info.step for info in sidesave.find(root)] == [1]
    with pytest.raises(CheckpointNotFoundError):
        sidesave.load(f"{root}/step-00000002")


@pytest.mark.slow
def test_the_commands_that_read_take_it_and_show_tells_where_its_files_lie(
    tmp_path: Path, end_all: None
):
    root = f"file://{tmp_path}/run"
    save(root, 1, 2)
    place = f"{root}/step-00000002.{NEW}"

    def command(*arguments: str | Path) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "sidesave", *arguments], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = json.loads(command("ls", root, "--json"))
    assert [(one["step"], one["mark"]) for one in listed["checkpoints"]] == [(1, ""), (2, "latest")]
    assert f"files in {place}" in command("show", root)
    assert json.loads(command("show", place, "--json"))["location"] == place
    assert command("verify", root).count(": ok") == 2
    command("fetch", root, tmp_path / "fetched", "--step", "1")
    assert [info.step for info in sidesave.find(tmp_path / "fetched")] == [1]


# What it costs ------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ObjectServer]:
    (tmp_path / "buckets").mkdir()
    with serving(tmp_path / "buckets") as server, urls.using(server.options):
        yield server


@pytest.fixture
def server(served: ObjectServer, end_all: None) -> ObjectServer:
    return served


def counts(server: ObjectServer) -> tuple[int, int]:
    found = server.count("LIST"), server.count("GET")
    assert sum(found) == len(server.requests)
    server.requests.clear()
    return found


def test_a_log_costs_a_list_and_a_request_for_each_entry_since_the_last_whole_one(
    server: ObjectServer,
):
    """docs/remote.md says so."""
    root, log, steps = "s3://bucket/run", 4, 3
    save(root, 1, 2, 3)  # and a taking over
    step = 3 + 2 * 2 + 2  # as of a run without one
    server.requests.clear()
    sidesave.find(root)
    assert counts(server) == (1 + 1, 2 + log + steps)
    sidesave.load(f"{root}/step-00000002")
    assert counts(server) == (1, 1 + log + step)
    sidesave.load(f"{root}/step-00000002.{NEW}")  # which is asked first whether it is a checkpoint
    assert counts(server) == (0, 1 + step)
    sidesave.load(root)
    assert counts(server) == ((1 + 1) + 1, (2 + log + steps) + (1 + log + step))
