"""Paths that are links to steps of a run: there at once, never half-written, and put in order after
a kill.
"""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import campaigns
import forks
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sidesave
from sidesave import Checkpointer, StagingOptions
from sidesave.client.integrations.checkpoint_paths import CheckpointPaths, is_left_out, is_pending
from sidesave.errors import InvalidArgumentError, UnsupportedValueError, WriteError


class Held:
    """Paths whose daemon can be stopped, so that nothing is committed meanwhile."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.open()

    def open(self) -> None:
        # A stopped daemon gives no slot back, not even one of a save that is committed.
        self.checkpointer = Checkpointer(self.run, staging=StagingOptions(slots=8))
        self.paths = CheckpointPaths(self.checkpointer)

    def save(self, path: Path, value: Any = 1) -> sidesave.SaveHandle:
        claim = self.paths.claim(str(path))
        return self.paths.save(str(path), claim, {"x": torch.tensor(value)}, {})

    def remove(self, path: Path) -> None:
        self.paths.remove(str(path))

    def signal(self, number: int) -> None:
        pid = self.checkpointer.daemon_pid
        assert pid is not None
        os.kill(pid, number)

    def stop(self) -> None:
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)


@pytest.fixture
def held(run: Path) -> Iterator[Held]:
    held = Held(run)
    yield held
    held.paths.close()


def value_at(path: Path) -> int:
    return sidesave.load(path)["x"].item()


def exists_elsewhere(path: Path) -> bool:
    return subprocess.run(["test", "-e", path]).returncode == 0


def test_a_path_is_there_at_once_for_the_saver_and_for_others_with_the_commit(
    held: Held, tmp_path: Path
):
    path = tmp_path / "deep" / "a.ckpt"
    held.stop()
    handle = held.save(path)
    assert path.exists()
    assert is_pending(str(path))
    assert not exists_elsewhere(path)
    held.go_on()
    held.paths.wait_for(str(path))
    assert handle.committed.done()
    assert exists_elsewhere(path)
    assert not is_pending(str(path))
    assert value_at(path) == 1


def test_what_is_replaced_stays_until_the_commit_and_goes_then(
    held: Held, run: Path, tmp_path: Path
):
    last = tmp_path / "last.ckpt"
    held.save(last, 1).committed.result()
    held.paths.wait_for(str(last))
    held.stop()
    held.save(last, 2)
    assert value_at(last) == 1
    held.go_on()
    held.paths.close()
    assert value_at(last) == 2
    assert [info.step for info in sidesave.find(run)] == [1]
    assert not is_left_out(str(run))
    held.open()


def test_a_removal_waits_for_the_commit_of_the_save_before_it(
    held: Held, run: Path, tmp_path: Path
):
    old, new = tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    held.save(old, 1)
    held.paths.wait_for(str(old))
    held.stop()
    held.save(new, 2)
    held.remove(old)
    assert value_at(old) == 1
    held.go_on()
    held.paths.wait_for(str(new))
    assert not os.path.lexists(old)
    held.paths.close()
    assert [info.step for info in sidesave.find(run)] == [1]
    held.open()


def test_a_removal_with_nothing_under_way_is_done_at_once_but_the_newest_keeps_its_bytes(
    held: Held, run: Path, tmp_path: Path
):
    one, two = tmp_path / "1.ckpt", tmp_path / "2.ckpt"
    for path in (one, two):
        held.save(path)
        held.paths.wait_for(str(path))
    held.remove(two)
    assert not os.path.lexists(two)
    held.remove(one)
    held.paths.close()
    assert [info.step for info in sidesave.find(run)] == [1]  # a run has its newest
    assert is_left_out(str(run))  # it goes when there is a newer one
    held.open()
    held.save(one, 3).committed.result()
    held.paths.close()
    assert [info.step for info in sidesave.find(run)] == [2]
    assert not is_left_out(str(run))
    held.open()


def test_a_path_moved_away_keeps_its_checkpoint(held: Held, run: Path, tmp_path: Path):
    path, kept = tmp_path / "a.ckpt", tmp_path / "kept.ckpt"
    held.save(path, 1)
    held.paths.wait_for(str(path))
    path.rename(kept)
    held.save(path, 2)
    held.remove(path)
    held.save(tmp_path / "b.ckpt", 3).committed.result()
    held.paths.close()
    assert value_at(kept) == 1
    held.open()


def test_a_path_moved_away_before_its_removal_is_due_keeps_its_checkpoint(
    held: Held, tmp_path: Path
):
    path, kept = tmp_path / "a.ckpt", tmp_path / "kept.ckpt"
    held.save(path, 1)
    held.paths.wait_for(str(path))
    held.stop()
    held.save(tmp_path / "b.ckpt", 2)
    held.remove(path)
    path.rename(kept)
    held.go_on()
    held.paths.close()
    assert value_at(kept) == 1
    held.open()


def test_what_is_replaced_goes_while_the_run_is_open(held: Held, run: Path, tmp_path: Path):
    last = tmp_path / "last.ckpt"
    for value in (1, 2):
        held.save(last, value)
        held.paths.wait_for(str(last))
    held.checkpointer.wait()
    held.paths._changes.wait_for(lambda: not held.paths._deletions)
    assert [info.step for info in sidesave.find(run)] == [1]


def test_a_failed_save_leaves_the_path_as_it_was_and_cancels_the_removal(
    held: Held, run: Path, tmp_path: Path
):
    old, new = tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    held.save(old, 1)
    held.paths.wait_for(str(old))
    held.stop()
    held.save(new, 2)
    held.remove(old)
    away = run.rename(tmp_path / "away")
    held.go_on()
    with pytest.raises(WriteError):
        held.paths.wait_for(str(new))
    away.rename(run)
    with pytest.raises(InvalidArgumentError):
        held.save(run, 3)  # a directory
    assert not os.path.lexists(new)
    assert value_at(old) == 1


def test_what_cannot_be_saved_leaves_no_path(held: Held, run: Path, tmp_path: Path):
    path = tmp_path / "a.ckpt"
    with pytest.raises(UnsupportedValueError, match="x"):
        held.paths.save(str(path), held.paths.claim(str(path)), {"x": object()}, {})
    assert not os.path.lexists(path)
    assert not is_left_out(str(run))


# Kills --------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, torch
from pathlib import Path
from sidesave import Checkpointer
from sidesave.client.integrations.checkpoint_paths import CheckpointPaths
run, folder, daemon_too = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
checkpointer = Checkpointer(run)
paths = CheckpointPaths(checkpointer)
def save(name, value):
    path = f"{folder}/{name}.ckpt"
    return paths.save(path, paths.claim(path), {"x": torch.tensor(value)}, {})
save("first", 1).committed.result()
save("last", 1).committed.result()
paths.wait_for(f"{folder}/last.ckpt")
pid = checkpointer.daemon_pid
os.kill(pid, signal.SIGSTOP)
save("new", 2)
save("last", 2)
paths.remove(f"{folder}/first.ckpt")
os.symlink("new.ckpt", f"{folder}/link.ckpt")
assert os.path.exists(f"{folder}/link.ckpt")
Path(folder, "pid").write_text(str(pid))
if daemon_too:
    os.kill(pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "committed by the daemon"])
def test_after_a_kill_each_path_leads_to_its_newest_commit(
    is_lost: bool, run: Path, tmp_path: Path
):
    folder = tmp_path / "ckpts"
    folder.mkdir()
    process = forks.popen([sys.executable, "-c", KILLED, str(run), str(folder), str(is_lost)])
    assert process.wait(280) == -signal.SIGKILL
    paths = {name: folder / f"{name}.ckpt" for name in ("first", "last", "new", "link")}
    assert {name for name, path in paths.items() if path.exists()} == {"first", "last"}
    assert value_at(paths["last"]) == 1
    if not is_lost:
        os.kill(int((folder / "pid").read_text()), signal.SIGCONT)
    assert is_left_out(str(run))
    with Checkpointer(run) as checkpointer:
        CheckpointPaths(checkpointer).close()
    found = {name: value_at(path) for name, path in paths.items() if os.path.lexists(path)}
    # A link that had come to lead nowhere leads to the newest beside it.
    assert found == (
        {"first": 1, "last": 1, "link": 1} if is_lost else {"last": 2, "new": 2, "link": 2}
    )
    assert not is_left_out(str(run))
    assert len(sidesave.find(run)) == len(
        {path.resolve() for path in paths.values() if path.exists()}
    )


# Sequences of calls -------------------------------------------------------------------------------

CALLS = st.tuples(
    st.sampled_from(["save", "save", "remove", "hold", "go on", "reopen"]), st.sampled_from("abc")
)


@settings(
    max_examples=campaigns.examples(20),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(calls=st.lists(CALLS, max_size=14))
def test_whatever_is_called_each_path_has_its_newest_save_and_nothing_else_is_kept(
    calls: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("example")
    held = Held(folder / "run")
    try:
        follow(calls, held, folder)
    finally:
        held.go_on()
        held.paths.close()


def follow(calls: list[tuple[str, str]], held: Held, folder: Path) -> None:
    model, newest = dict[str, int](), None
    handles: list[sidesave.SaveHandle] = []
    for number, (call, name) in enumerate([*calls, ("reopen", "")]):
        path = folder / f"{name}.ckpt"
        handles = [handle for handle in handles if not handle.done()]
        # else no slot gets free
        if (call == "save" and len(handles) == 2) or call in ("go on", "reopen"):
            held.go_on()
        if call == "hold":
            held.stop()
        elif call == "save":
            handles.append(held.save(path, number))
            model[name] = newest = number
            # A look may follow a link that a commit replaces right then; the next look follows the
            # new one.
            assert path.exists() or path.exists()
        elif call == "remove":
            held.remove(path)
            model.pop(name, None)
        elif call == "reopen":
            held.paths.close()
            there = {each.stem: value_at(each) for each in folder.glob("*.ckpt")}
            kept = {value_at(Path(info.path)) for info in sidesave.find(folder / "run")}
            held.open()
            assert there == model
            assert kept == {*model.values()} | ({newest} - {None})


def test_a_deletion_that_is_refused_keeps_nobody_and_is_done_at_the_end(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    held, path = Held(run), tmp_path / "a.ckpt"
    held.save(path, 1).committed.result()
    delete, refused = held.checkpointer.delete, threading.Event()

    def refuse_once(step: int) -> Any:
        if not refused.is_set():
            refused.set()
            raise WriteError(errno.EIO, "refused", str(run))
        return delete(step)

    monkeypatch.setattr(held.checkpointer, "delete", refuse_once)
    held.save(path, 2)
    with pytest.raises(WriteError, match="refused"):
        held.paths.close()
    assert refused.is_set()
    assert [info.step for info in sidesave.find(run)] == [1]
    assert value_at(path) == 2
