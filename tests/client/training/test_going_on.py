"""Going on: which step a save is of, what loading waits for, and going back."""

from __future__ import annotations

import queue
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import forks
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from managers import Manage, damage, release_when_waited_for, steps
from trainers import DEADLINE_S, Orders, save

import sidesave
from sidesave.client.saving.lineage import Lineage
from sidesave.errors import (
    CheckpointNotFoundError,
    IntegrityError,
    InvalidArgumentError,
    StagingError,
    WriteError,
)
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.format.rollback import ROLLBACK_FILE, Rollbacks

# The step that was finished last ------------------------------------------------------------------


def test_a_step_is_past_once_a_later_one_was_saved(manage: Manage, run: Path):
    state = {"x": 4}
    manager = manage(state, save=[sidesave.LastStep(), sidesave.OnRequest()])
    manager.step(4)
    state["x"] = 10
    manager.save(10)
    manager.request_save()
    manager.close()
    assert steps(run) == [10]
    manager = manage(state)
    assert (manager.restore(), state["x"]) == (11, 10)


def test_an_earlier_step_that_exists_is_not_saved_again_at_the_end(manage: Manage, run: Path):
    manager = manage(save=[sidesave.EverySteps(4)])
    manager.step(4)
    manager = manage(save=[sidesave.LastStep()])
    manager.restore()
    manager.save(10)
    manager.close()
    assert steps(run) == [4, 10]


def test_what_is_exported_after_a_later_save_is_that(manage: Manage, run: Path):
    state = {"x": torch.tensor([4.0])}
    manager = manage({"state": state})
    manager.step(4)
    state["x"].fill_(10)
    manager.save(10)
    manager.export(run.parent / "weights")
    assert steps(run) == [10]
    [file] = (run.parent / "weights").glob("*.safetensors")
    assert [tensor.item() for tensor in safetensors.torch.load_file(file).values()] == [10.0]


def test_a_later_save_that_came_to_nothing_is_the_step_to_save_at_the_end(
    manage: Manage, run: Path, orders: Orders
):
    manager = manage(
        {"x": 0},
        save=[sidesave.LastStep()],
        staging=sidesave.StagingOptions(slots=1, on_busy="skip"),
    )
    orders.give("hold")
    manager.save(1, {"loss": 1})
    orders.obeyed()
    manager.step(2)
    assert manager.save(3, {"loss": 3}).skipped
    orders.release()
    manager.close()
    assert steps(run) == [1, 3]
    assert sidesave.find(run)[-1].metadata["metrics"] == {"loss": 3.0}


def test_steps_do_not_go_back_behind_a_save(manage: Manage, run: Path):
    manager = manage(save=[sidesave.EverySteps(1)])
    manager.save(5)
    with pytest.raises(InvalidArgumentError, match="step 3 does not come after step 5"):
        manager.step(3)
    assert manager.step(5) is None, "it is what was saved"
    with pytest.raises(InvalidArgumentError, match="step 5 does not come after step 5"):
        manager.step(5)
    assert manager.step(6) is not None
    manager.close()
    assert steps(run) == [5, 6]


# The latest one -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["disk", "store", "mirror"])
def test_the_last_save_is_the_latest_whatever_could_not_be_read_when_sessions_began(
    tmp_path: Path, kind: str
):
    run, place = tmp_path / "run", tmp_path / ("mirror" if kind == "mirror" else "run")
    if kind == "store":
        pytest.importorskip("obstore")
    hidden: list[tuple[Path, Path]] = []
    for session in range(4):
        options: dict[str, Any] = {"mirror": place} if kind == "mirror" else {}
        with sidesave.Checkpointer(
            f"file://{run}" if kind == "store" else run, **options
        ) as checkpointer:
            for step in range(3 * session, 3 * session + 3):
                checkpointer.save(step, {"x": step}, blocking=True)
            checkpointer.wait(mirrored=kind == "mirror")
        manifests = sorted(
            place.rglob("step-*/manifest.json"), key=lambda path: path.stat().st_mtime_ns
        )
        for manifest in (
            manifests[1:] if session == 0 else manifests[-3:]
        ):  # the first one stays, the order begins there
            away = tmp_path / f"away-{len(hidden)}"
            hidden.append((manifest.rename(away), manifest))
        if kind == "mirror":
            shutil.rmtree(run)
    for away, manifest in hidden:
        away.rename(manifest)
    checkpoints = sidesave.find(f"file://{place}" if kind == "store" else place)
    assert [info.step for info in checkpoints] == [*range(12)]
    sequences = [info.sequence for info in checkpoints]
    assert sequences == sorted(set(sequences)), "no sequence was given away twice"


@pytest.mark.parametrize("first", [1, 2])
def test_of_equal_sequences_the_one_saved_later_is_the_latest(tmp_path: Path, first: int):
    run, other = tmp_path / "run", tmp_path / "other"
    last = 3 - first
    for place, step in ((run, first), (other, last)):
        save(place, {"x": step}, step)
    (other / f"step-0000000{last}").rename(run / f"step-0000000{last}")
    checkpoints = sidesave.find(run)
    assert [(info.step, info.sequence) for info in checkpoints] == [(first, 1), (last, 1)]
    with sidesave.Checkpointer(run) as checkpointer:
        assert checkpointer.load() == {"x": last}
        with pytest.raises(InvalidArgumentError, match="newest"):
            checkpointer.delete(last).result()
        checkpointer.delete(first).result()
        assert checkpointer.steps() == [last]


# Loading waits for this session's saves -----------------------------------------------------------


@pytest.mark.parametrize("step", [None, 7])
def test_loading_waits_for_the_saves_under_way(
    manage: Manage, run: Path, orders: Orders, step: int | None
):
    state = {"x": 7}
    manager = manage(state, save=[sidesave.BeforeTraining()])
    orders.give("hold")
    manager.save(7)
    orders.obeyed()
    state["x"] = 0
    release_when_waited_for(manager.checkpointer, orders)
    assert (manager.restore(step), state["x"]) == (8, 7)
    assert steps(run) == [7], "the run has begun, so it has no seed"
    with manage(state).checkpointer as checkpointer:
        orders.give("hold")
        checkpointer.save(9, {"x": 9})
        orders.obeyed()
        release_when_waited_for(checkpointer, orders)
        assert checkpointer.load(step and 9)["x"] == 9


def test_an_earlier_step_is_loaded_at_once_and_what_was_under_way_is_given_up(
    manage: Manage, run: Path, orders: Orders
):
    state = {"x": 1}
    manager = manage(state)
    manager.save(1, blocking=True)
    orders.give("hold")
    abandoned = manager.save(2)
    orders.obeyed()
    assert manager.restore(1) == 2
    orders.release()
    assert abandoned.committed.result(DEADLINE_S).step == 2
    assert manager.latest is not None and manager.latest.step == 1
    assert manager.restore() == 2
    assert manage(state).restore() == 2


def test_an_ancestor_replaced_by_what_was_under_way_and_given_up_is_none_any_more(
    manage: Manage, run: Path, orders: Orders
):
    manager = manage({"x": 1})
    for step in (1, 3, 5):
        manager.save(step, blocking=True)
    manager.restore(1)
    orders.give("hold")
    abandoned = manager.save(3)
    orders.obeyed()
    assert manager.restore(5) == 6
    orders.release()
    abandoned.committed.result(DEADLINE_S)
    assert manager.rollback(steps_back=1) == 2, "step 3 is of another branch now"


def test_a_commit_while_the_checkpoint_to_go_back_to_is_read_replaces_an_ancestor_too():
    def info(step: int, sequence: int, parent: tuple[int, str] | None = None) -> CheckpointInfo:
        return CheckpointInfo(step, "", 0, "A", sequence, parent, 0.0)

    listed = [info(1, 1), info(3, 2), info(5, 3)]
    known = Lineage("/run", cast("Any", SimpleNamespace(last=4)))
    known.begin(listed, [listed], Rollbacks(((1, 3),)))
    known.add(info(3, 4, (1, "A")))
    known.go_back_to(listed[-1], listed, Rollbacks(((1, 3),)))
    assert known.ancestors == {1, 5}


def test_a_save_that_fails_meanwhile_is_told_and_still_raised(
    manage: Manage, run: Path, orders: Orders, caplog: pytest.LogCaptureFixture
):
    manager = manage(failures=sidesave.FailureOptions(retries=0))
    manager.save(1, blocking=True)
    orders.give("hold")
    manager.save(2)
    orders.obeyed()
    orders.give("EIO")
    handle = manager.save(3)
    release_when_waited_for(manager.checkpointer, orders)
    assert manager.restore() == 3
    assert "step 3 was not saved, so it is not there to be loaded" in caplog.text
    with pytest.raises(WriteError):
        manager.wait()
    assert handle.committed.exception(DEADLINE_S) is not None


def test_loading_where_it_would_wait_for_itself_is_refused(tmp_path: Path, orders: Orders):
    refused: queue.SimpleQueue[StagingError] = queue.SimpleQueue()

    class Item:
        def state_dict(self) -> dict[str, int]:
            attempt(None)
            return {"x": 1}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    def attempt(_: object) -> None:
        try:
            checkpointer.load()
        except StagingError as error:
            refused.put(error)

    with sidesave.Checkpointer(tmp_path) as checkpointer:
        orders.give("hold")
        handle = checkpointer.save(1, {"item": Item()})
        assert "inside this thread's save()" in str(refused.get(timeout=DEADLINE_S))
        orders.obeyed()
        handle.committed.add_done_callback(attempt)  # before it is done, so in our thread
        orders.release()
        assert "in a callback" in str(refused.get(timeout=DEADLINE_S))


def test_a_step_that_is_given_up_while_it_is_saved_can_be_saved_again_at_once(
    manage: Manage, run: Path, orders: Orders
):
    state = {"x": 1}
    manager = manage(state)
    manager.save(1, blocking=True)
    for time_line in (10, 20):  # twice from the same parent
        assert manager.restore(1) == 2
        state["x"] = time_line
        orders.give("hold")
        manager.save(2)
        orders.obeyed()
        manager.restore(1)
        state["x"] = time_line + 1
        again = manager.save(2)
        orders.release()
        again.committed.result(DEADLINE_S)
    assert (manager.restore(), state["x"]) == (3, 21)


# Going back ---------------------------------------------------------------------------------------


@pytest.fixture
def five(manage: Manage) -> tuple[dict[str, Any], sidesave.CheckpointManager]:
    """A manager that has saved steps 0 to 4, and its state."""
    state = {"x": 0}
    manager = manage(state, save=[sidesave.EverySteps(1)])
    for step in range(5):
        state["x"] = step
        manager.step(step)
    manager.wait()
    return state, manager


def test_going_back_outlives_a_crash_before_the_next_commit(tmp_path: Path):
    """A process that is killed right after it has gone back, with another save under way."""
    script = """
import os, signal, sys, sidesave
manager = sidesave.CheckpointManager(sys.argv[1], {"x": 0}, save=[sidesave.EverySteps(1)])
for step in range(manager.restore(), 4):
    manager.step(step)
manager.wait()
assert manager.restore(1) == 2
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = tmp_path / "run"
    for _ in range(2):
        done = forks.run([sys.executable, "-c", script, str(run)])
        assert done.returncode == -signal.SIGKILL, done.stderr
        with sidesave.CheckpointManager(run, {"x": 0}) as manager:
            assert manager.latest is not None and manager.latest.step == 1
            assert manager.restore() == 2
        latest = sidesave.latest(run)
        assert latest is not None and latest.step == 1
    assert [info.step for info in sidesave.find(run) if not info.given_up] == [0, 1]


def test_what_was_given_up_is_never_the_latest_again_unless_it_is_taken_up(
    five: tuple[dict[str, Any], sidesave.CheckpointManager], manage: Manage, run: Path
):
    state, manager = five
    manager.restore(2)
    assert [(info.step, info.given_up) for info in sidesave.find(run)] == [
        (0, False), (1, False), (3, True), (4, True), (2, False),
    ]  # fmt: skip
    assert manager.restore() == 3
    manager = manage(state, save=[sidesave.EverySteps(1)])
    assert (manager.restore(), state["x"]) == (3, 2)
    assert manager.restore(4) == 5, "taken up again"
    assert not any(info.given_up for info in sidesave.find(run))
    manager = manage(state, save=[sidesave.EverySteps(1)])
    assert (manager.restore(), state["x"]) == (5, 4)
    manager.restore(1)
    state["x"] = 12
    manager.step(2)
    manager.wait()
    assert [info.step for info in sidesave.find(run)] == [0, 1, 3, 4, 2]
    manager = manage(state)
    assert (manager.restore(), state["x"]) == (3, 12)


def test_older_ones_are_fallen_back_on_along_the_line_that_was_gone_on_with(
    five: tuple[dict[str, Any], sidesave.CheckpointManager], manage: Manage, run: Path
):
    state, manager = five
    manager.restore(1)
    manager.step(2)
    manager.close()
    damage(run, 2)
    assert (manage(state).restore(), state["x"]) == (2, 1)
    damage(run, 1)
    damage(run, 0)
    with pytest.raises(IntegrityError):
        manage(state).restore()
    assert manage(state).restore(3) == 4


def test_where_the_checkpoint_gone_back_to_is_lost_nothing_begins_anew(
    five: tuple[dict[str, Any], sidesave.CheckpointManager], manage: Manage, run: Path
):
    state, manager = five
    manager.restore(0)
    manager.close()
    shutil.rmtree(run / "step-00000000")
    manager = manage(state)
    with pytest.raises(IntegrityError, match=r"no longer exists.*\[1, 2, 3, 4\]"):
        manager.restore()
    assert manager.rollback(3) == 4


def test_what_a_run_has_gone_back_to_is_not_deleted(manage: Manage, run: Path):
    manager = manage(save=[sidesave.EverySteps(1)])
    for step in range(4):
        manager.step(step)
    manager.wait()
    manager.restore(1)
    with pytest.raises(InvalidArgumentError, match="step 1 is the newest"):
        manager.checkpointer.delete(1).result(DEADLINE_S)
    manager.checkpointer.delete(3).result(DEADLINE_S)
    manager.close()
    manager = manage(save=[sidesave.EverySteps(1)], keep=[sidesave.KeepLatest(2)])
    assert manager.restore() == 2
    manager.step(2)
    manager.close()
    assert steps(run) == [1, 2], "those given up are the first to go"


def test_places_of_saves_that_failed_are_not_given_up_for_later_sessions(
    manage: Manage, run: Path, orders: Orders
):
    state = {"x": 0}
    manager = manage(state)
    manager.save(0, blocking=True)
    orders.give("EROFS")
    assert manager.save(3).committed.exception(DEADLINE_S) is not None
    manager.restore(0)
    manager.close()
    manager = manage(state)
    assert manager.restore() == 1
    manager.save(1)
    manager.close()
    assert manage(state).restore() == 2


def test_rolling_back_is_by_step_or_by_so_many_steps_along_the_line(
    five: tuple[dict[str, Any], sidesave.CheckpointManager], manage: Manage, run: Path
):
    state, manager = five
    manager.step(5)
    assert (manager.rollback(steps_back=2), state["x"]) == (4, 3)
    assert (manager.rollback(1), state["x"]) == (2, 1)
    manager = manage(state)
    assert manager.restore() == 2
    manager.step(6)
    assert (manager.rollback(steps_back=1), state["x"]) == (2, 1), (
        "steps 2 to 4 are none of its past"
    )
    with pytest.raises(CheckpointNotFoundError, match="up to step -1"):
        manager.rollback(steps_back=2)
    wrong: dict[str, Any]
    for wrong in ({}, {"step": 1, "steps_back": 1}, {"steps_back": 0}):
        with pytest.raises(InvalidArgumentError, match=r"rollback|steps_back"):
            manager.rollback(**wrong)
    with pytest.raises(CheckpointNotFoundError, match="no step 9"):
        manager.rollback(9)
    assert manager.restore() == 2


def test_a_damaged_word_about_going_back_is_told(
    five: tuple[dict[str, Any], sidesave.CheckpointManager],
    manage: Manage,
    run: Path,
    caplog: pytest.LogCaptureFixture,
):
    _, manager = five
    manager.restore(1)
    manager.close()
    file = run / ROLLBACK_FILE.name
    file.write_bytes(file.read_bytes().replace(b"2", b"3", 1))
    assert sidesave.find(run)[-1].step == 4
    assert "the latest checkpoint is unknown" in caplog.text
    with pytest.raises(IntegrityError, match="remove it"):
        manage()
    file.unlink()
    assert manage().restore(1) == 2


@given(st.data())
def test_what_is_given_up_is_what_the_run_does_not_descend_from(data: st.DataObject):
    """Commits and goings back, against a tree of commits that knows its parents."""
    parents: dict[int, int] = {}
    rollbacks, head, place = Rollbacks(), 0, 0
    for back in data.draw(st.lists(st.booleans(), max_size=30)):
        if back and parents:
            head = data.draw(st.sampled_from(sorted(parents)))
            rollbacks = rollbacks.going_back(head, place)
        else:
            place += data.draw(st.integers(1, 3))  # some places come to nothing
            parents[place], head = head, place
        assert {sequence for sequence in parents if rollbacks.order(sequence)[0]} == _line(
            parents, head
        )
        assert not parents or max(parents, key=rollbacks.order) == head
    for commit in parents:
        line = rollbacks.before(commit)
        found = {sequence for sequence in parents if sequence <= commit and line.order(sequence)[0]}
        assert found == _line(parents, commit), "also of one that was given up"


def _line(parents: dict[int, int], commit: int) -> set[int]:
    """All that a commit descends from, and itself."""
    line = set[int]()
    while commit:
        line.add(commit)
        commit = parents[commit]
    return line


def test_what_is_taken_up_again_descends_only_from_what_was_not_given_up_before_it(
    five: tuple[dict[str, Any], sidesave.CheckpointManager], manage: Manage, run: Path
):
    state, manager = five
    for branch in ((1, 3), (2,)):
        manager.restore(0)
        for step in branch:
            state["x"] = 10 + step
            manager.step(step)
    manager.restore(0)
    assert manager.restore(2) == 3
    manager.step(3)
    manager.wait()
    assert [(info.step, info.given_up) for info in sidesave.find(run)] == [
        (0, False), (4, True), (1, True), (2, False), (3, False),
    ]  # fmt: skip
    manager.restore(0)
    damage(run, 3)
    damage(run, 2)
    assert (manager.restore(3, fallback=True), state["x"]) == (1, 0), (
        "1 is older than 2, and of another branch"
    )


# The fallback directory ---------------------------------------------------------------------------


def test_a_run_remembers_its_fallback_directory(
    manage: Manage, run: Path, orders: Orders, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    state, other = {"x": 1}, tmp_path / "other"
    manager = manage(state, failures=sidesave.FailureOptions(fallback_directory=other))
    manager.save(1, blocking=True)
    manager = manage(state)
    assert manager.restore() == 2 and not other.exists() and not caplog.messages, (
        "it was never used"
    )
    manager = manage(state, failures=sidesave.FailureOptions(fallback_directory=other))
    manager.restore()
    state["x"] = 2
    orders.give("EROFS")
    assert manager.save(2, blocking=True).committed.result().path == str(other / "step-00000002")
    caplog.clear()
    manager = manage(state)
    assert f"the run has steps [2] in {other}" in caplog.text
    assert (manager.restore(), state["x"]) == (3, 2)
    manager.save(3, blocking=True)
    manager = manage(state, failures=sidesave.FailureOptions(fallback_directory=tmp_path / "third"))
    assert (manager.checkpointer.steps(), manager.restore(2)) == ([1, 2, 3], 3)
    manager.close()
    other.rename(tmp_path / "away")
    other.mkdir()
    caplog.clear()
    manager = manage(state)
    assert (
        f"{other}, the fallback directory that this run has saved to, is not there" in caplog.text
    )
    assert manager.restore() == 2, "an older one, by the caller's word"
    with pytest.raises(IntegrityError, match="mount it"):
        manager.restore(fallback=False)
    for step in (1, 3):
        shutil.rmtree(run / f"step-{step:08d}")
    with pytest.raises(IntegrityError, match=r"remove .*\.sidesave\.fallback"):
        manager.restore()
    (run / ".sidesave.fallback").unlink()
    assert manage(state).restore() == 0
