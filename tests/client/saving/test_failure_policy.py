"""What becomes of saves that storage refuses: tried again, sent elsewhere, told loudly. And
deletion on request.
"""

import errno
import gc
import logging
import os
import shutil
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import forks
import pytest
import torch
from trainers import (
    DEADLINE_S,
    Orders,
    Traces,
    a_state,
    await_end,
    check,
    commit,
    entries,
    pidfd_of,
    same,
    wait_until,
)

import sidesave
from sidesave.client.saving.handle import Outcome, SaveHandle
from sidesave.client.saving.save import Save
from sidesave.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DirectoryInUseError,
    InvalidArgumentError,
    NoSpaceError,
    SidesaveError,
)
from sidesave.stager.copy.copier import StagingCopy
from sidesave.stager.memory import host_memory
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.process import worker


@pytest.fixture
def run(run: Path, traced: None) -> Path:
    return run


@pytest.fixture
def small(mount: Callable[..., Path], run: Path) -> Path:
    """A run directory on 8 MiB of tmpfs."""
    return mount("-t", "tmpfs", "-o", "size=8m", "none") / "run"


def fail(ckpt: sidesave.Checkpointer, step: int) -> None:
    """Save a step whose way is blocked, and return when the failure has been told."""
    handle = ckpt.save(step, a_state(step))
    ckpt.session.saves.wait(DEADLINE_S)
    assert handle.committed.peek() is not None


class Unpicklable:
    def __reduce__(self) -> str:
        raise RuntimeError("not this one")


@pytest.mark.parametrize("allow_pickle", [False, True])
@pytest.mark.parametrize(
    "reason", ["value", "step", "exists", "metadata", "memory", "an earlier failure"]
)
def test_a_save_that_is_refused_keeps_nothing_of_its_state(
    run: Path, reason: str, monkeypatch: pytest.MonkeyPatch, *, allow_pickle: bool
):
    """Not even until the garbage collector comes, which training often has turned off."""
    state: dict[str, Any] = {
        "model": {"w": torch.ones(1000)},
        **({"odd": Unpicklable()} if reason == "value" else {}),
    }
    if reason == "memory":
        state["model"]["large"] = torch.empty(16 << 20)
    kept = weakref.ref(state["model"]["w"])
    if reason == "memory":
        monkeypatch.setattr(
            host_memory, "_mem_available", lambda: (32 << 20) + host_memory._RESERVE_NBYTES
        )
    with sidesave.Checkpointer(run, allow_pickle=allow_pickle) as ckpt:
        ckpt.save(1, a_state(1), blocking=True)
        if reason == "an earlier failure":
            in_the_way(run, 2)
            fail(ckpt, 2)
        step: int = {"exists": 1, "step": -1}.get(reason, 3)
        gc.disable()
        try:
            ckpt.save(step, state, metadata={"a": object()} if reason == "metadata" else None)
        except SidesaveError:
            del state
            refused = True
        else:
            refused = False
        finally:
            gc.enable()
        assert refused
        assert kept() is None


def in_the_way(run: Path, step: int) -> Path:
    """Something that no save of that step can replace."""
    obstacle = run / f"step-{step:08d}"
    obstacle.write_text("not a directory")
    return obstacle


# Failures in a row --------------------------------------------------------------------------------


def test_warnings_turn_into_errors_after_so_many_failures_in_a_row(run: Path):
    with sidesave.Checkpointer(run, failures=sidesave.FailureOptions(tolerated=2)) as ckpt:
        commit(ckpt, 1)
        for step in (2, 3):
            in_the_way(run, step)
            with pytest.warns(RuntimeWarning, match=f"step {step} failed"):
                fail(ckpt, step)
        in_the_way(run, 4)
        fail(ckpt, 4)
        with pytest.raises(CheckpointExistsError) as raised:
            ckpt.save(5, a_state(5))
        assert raised.value.__notes__ == ["3 saves in a row have failed"]
        commit(ckpt, 5)
        in_the_way(run, 6)
        # a commit has begun the count anew
        with pytest.warns(RuntimeWarning, match="step 6 failed"):
            fail(ckpt, 6)


@pytest.mark.parametrize("option", ["retries", "tolerated"])
@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_counts_that_make_no_sense_are_refused(run: Path, option: str, value: object):
    with pytest.raises(
        InvalidArgumentError, match=rf"FailureOptions\.{option} must be an int, 0 or more"
    ):
        sidesave.Checkpointer(run, failures=sidesave.FailureOptions(**{option: value}))  # type: ignore[arg-type]
    assert not run.exists()


# The fallback directory ---------------------------------------------------------------------------


@pytest.mark.root
def test_what_does_not_fit_goes_to_the_fallback_directory_and_is_found_like_the_rest(
    small: Path, tmp_path: Path
):
    other = tmp_path / "other"
    with sidesave.Checkpointer(
        small, failures=sidesave.FailureOptions(fallback_directory=other)
    ) as ckpt:
        commit(ckpt, 1, 1)
        assert not other.exists(), "nothing is made before it is needed"
        info = commit(ckpt, 2, 12)
        assert Path(info.path) == other / "step-00000002"
        assert commit(ckpt, 3, 1).path == str(small / "step-00000003"), (
            "the first directory is tried first again"
        )
        assert ckpt.steps() == [1, 2, 3]
        assert same(ckpt.load(2), a_state(2, 12))
        with pytest.raises(CheckpointExistsError):
            ckpt.save(2, a_state(2))
        commit(ckpt, 4, 12)
        assert ckpt.latest_step() == 4
    assert entries(small) == ["step-00000001", "step-00000003"]
    assert entries(other) == ["step-00000002", "step-00000004"]
    check(other, 2, 4, mib=12)

    with sidesave.Checkpointer(
        small, failures=sidesave.FailureOptions(fallback_directory=other)
    ) as ckpt:  # the next run goes on from there
        assert ckpt.latest_step() == 4
        assert commit(ckpt, 5).sequence > 4
        ckpt.delete(2).result(DEADLINE_S)
        assert 2 not in ckpt.steps()


@pytest.mark.root
def test_a_fallback_that_cannot_be_had_leaves_the_first_error_to_be_told(
    small: Path, tmp_path: Path
):
    obstacle = tmp_path / "file"
    obstacle.write_text("")
    with sidesave.Checkpointer(
        small, failures=sidesave.FailureOptions(fallback_directory=obstacle)
    ) as ckpt:
        error = ckpt.save(1, a_state(1, 12)).committed.exception(DEADLINE_S)
        assert isinstance(error, NoSpaceError)
        ckpt.wait()
        commit(ckpt, 2)


def test_the_run_directory_is_no_fallback_for_itself(run: Path):
    with pytest.raises(InvalidArgumentError, match="fallback_directory"):
        sidesave.Checkpointer(
            run, failures=sidesave.FailureOptions(fallback_directory=f"{run}/../run")
        )


@pytest.mark.root
def test_daemon_killed_while_it_writes_to_the_fallback_finishes_there(small: Path, tmp_path: Path):
    other = tmp_path / "other"
    with sidesave.Checkpointer(
        small, failures=sidesave.FailureOptions(fallback_directory=other)
    ) as ckpt:
        commit(ckpt, 1)
        for step in range(2, 8):
            handle = ckpt.save(step, a_state(step, 12))
            handle.staged.result(DEADLINE_S)
            pid = ckpt.daemon_pid
            if pid is not None:
                with pidfd_of(pid) as pidfd:
                    os.kill(pid, 9)
                    await_end(pidfd)
            handle.committed.result(DEADLINE_S)
        assert ckpt.steps() == list(range(1, 8))
    assert entries(small) == ["step-00000001"]
    assert entries(other) == [f"step-{step:08d}" for step in range(2, 8)]
    check(other, *range(2, 8), mib=12)


# Deletion -----------------------------------------------------------------------------------------


def test_a_deleted_step_is_gone_at_once_and_its_number_is_free(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        for step in (1, 2, 3):
            commit(ckpt, step)
        ckpt.delete(1).result(DEADLINE_S)
        assert ckpt.steps() == [2, 3]
        assert not (run / "step-00000001").exists()
        commit(ckpt, 1)
        assert ckpt.latest_step() == 1
    assert entries(run) == ["step-00000001", "step-00000002", "step-00000003"]
    check(run, 1, 2, 3)


def test_the_number_of_a_deleted_step_is_free_before_anybody_learns_of_it(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    """Who waits for the deletion may go on before its callbacks have been called."""
    go_on = threading.Event()
    invoke = Outcome._invoke_callbacks

    def invoke_late(future: Outcome[None]) -> None:
        assert go_on.wait(DEADLINE_S)
        invoke(future)

    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)
        commit(ckpt, 2)
        ckpt.wait()
        try:
            with monkeypatch.context() as patch:
                patch.setattr(Outcome, "_invoke_callbacks", invoke_late)
                ckpt.delete(1).result(DEADLINE_S)
            handle = ckpt.save(1, a_state(1))
        finally:
            go_on.set()
        handle.committed.result(DEADLINE_S)
    check(run, 1, 2)


def test_the_newest_checkpoint_is_never_deleted(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 9)
        with pytest.raises(InvalidArgumentError, match="newest"):
            ckpt.delete(9).result(DEADLINE_S)
        commit(ckpt, 3)  # newer, though its step is lower
        with pytest.raises(InvalidArgumentError, match="newest"):
            ckpt.delete(3).result(DEADLINE_S)
        handle = ckpt.save(4, a_state(4))
        deleted = ckpt.delete(3)  # behind the save, which is committed first
        handle.committed.result(DEADLINE_S)
        deleted.result(DEADLINE_S)
        assert ckpt.steps() == [4, 9]


def test_deleting_what_is_not_there_is_an_error_and_no_failure_of_the_next_save(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)
        with pytest.raises(CheckpointNotFoundError, match=r"no step 7; there are \[1\]"):
            ckpt.delete(7).result(DEADLINE_S)
        with pytest.raises(InvalidArgumentError):
            ckpt.delete(-1)
        commit(ckpt, 2)
        ckpt.wait()


def test_a_save_that_is_over_is_not_waited_for_though_what_follows_from_its_end_raises(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(save: Save) -> None:
        raise RuntimeError("on purpose")

    with sidesave.Checkpointer(run) as ckpt:
        session = ckpt.session
        monkeypatch.setattr(session.history, "ended", fail)
        save = Save(SaveHandle(1), cast(StagingCopy, None), 1, 1)
        session.saves.add(save, CheckpointInfo(1, "", 0, session.id, 1, None, 0.0), [], ())
        with pytest.raises(RuntimeError, match="on purpose"):
            session.saves.drop(save, SidesaveError("it failed"))
        session.saves.wait(0.0)


def test_a_reader_goes_on_with_a_checkpoint_that_is_deleted_meanwhile(run: Path):
    from sidesave.client.reading.checkpoint_reader import CheckpointReader

    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)
        commit(ckpt, 2)
        reader = CheckpointReader(str(run / "step-00000001"))
        ckpt.delete(1).result(DEADLINE_S)
        read = dict(reader.read(list(reader.manifest.table.tensors), verify=True))
        reader.close()
        assert torch.equal(read["model.w"], a_state(1)["model"]["w"])
    assert entries(run) == ["step-00000002"], "the end of the session leaves nothing of it"


def test_daemon_killed_around_a_deletion_it_is_done_once(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        for step in range(1, 12):
            commit(ckpt, step)
        for step in range(1, 11):
            deleted = ckpt.delete(step)
            pid = ckpt.daemon_pid
            if pid is not None:
                with pidfd_of(pid) as pidfd:
                    os.kill(pid, 9)
                    await_end(pidfd)
            deleted.result(DEADLINE_S)
            commit(ckpt, 100 + step)  # and MAX_DEATHS counts anew
            assert step not in ckpt.steps()
    check(run, 11, *range(101, 111))
    assert len(entries(run)) == 11


def test_a_full_disk_first_takes_back_what_was_deleted(run: Path, mount: Callable[..., Path]):
    place = mount("-t", "tmpfs", "-o", "size=20m", "none") / "run"
    with sidesave.Checkpointer(place) as ckpt:
        for step in (1, 2):
            commit(ckpt, step, 8)
        assert isinstance(ckpt.save(3, a_state(3, 8)).committed.exception(DEADLINE_S), NoSpaceError)
        ckpt.wait()
        ckpt.delete(1).result(DEADLINE_S)
        commit(ckpt, 3, 8)
        assert ckpt.steps() == [2, 3]


# What is transient --------------------------------------------------------------------------------


def test_a_full_disk_or_a_missing_permission_is_not_tried_again():
    assert (
        not {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT}
        & worker.TRANSIENT
    )
    assert {errno.EIO, errno.ESTALE, errno.ETIMEDOUT} <= worker.TRANSIENT


# Checkpointers that nobody holds any more ---------------------------------------------------------


def test_a_dropped_checkpointer_finishes_its_saves_and_lets_the_next_one_in(
    run: Path, traces: Traces
):
    def train() -> int:
        ckpt = sidesave.Checkpointer(run)
        ckpt.save(1, a_state(1, 20))
        assert ckpt.daemon_pid is not None
        return os.pidfd_open(ckpt.daemon_pid)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pidfd = train()
        gc.collect()
    await_end(pidfd)
    os.close(pidfd)
    check(run, 1, mib=20)
    traces.check()


@pytest.mark.parametrize("kind", ["Checkpointer", "CheckpointManager"])
def test_a_second_one_in_the_same_process_is_told_so_and_how_to_go_on(run: Path, kind: str):
    state = {} if kind == "Checkpointer" else {"state": {"x": 1}}
    make = getattr(sidesave, kind)
    with make(run, **state) as first:
        with pytest.raises(
            DirectoryInUseError, match=r"of this process: use that one, or close\(\) it"
        ):
            make(run, **state)
        first.close()
        make(run, **state).close()


@pytest.mark.parametrize("held", ["by nobody", "by itself"])
def test_a_directory_is_free_again_as_soon_as_its_checkpointer_is_dropped(run: Path, held: str):
    for step in range(1, 4):  # as a cell of a notebook that is run again
        ckpt = sidesave.Checkpointer(run)
        assert ckpt.latest_step() == (step - 1 or None)
        ckpt.save(step, a_state(step, 4))
        if held == "by itself":
            ckpt.itself = ckpt  # type: ignore[attr-defined]
        del ckpt
    with sidesave.Checkpointer(run):
        pass
    check(run, 1, 2, 3, mib=4)


def test_a_dropped_manager_frees_its_directory_its_threads_and_its_signals(
    run: Path, traces: Traces
):
    threads, handler = set(threading.enumerate()), signal.getsignal(signal.SIGUSR1)
    for step in range(1, 4):
        manager = sidesave.CheckpointManager(
            run,
            {"state": a_state(step)},
            save=[sidesave.EverySteps(1), sidesave.OnRequest(), sidesave.OnSignal(signal.SIGUSR1)],
            keep=[sidesave.KeepLatest(5)],
            names="checkpoint-{step}",
        )
        kept = weakref.ref(manager)
        try:
            assert manager.restore() == (step if step > 1 else 0)
            manager.step(step)
            del manager
            assert signal.getsignal(signal.SIGUSR1) == handler
        finally:
            # a failure keeps it, and its threads would be those of later tests
            if (left := kept()) is not None:
                left.close()
    with sidesave.Checkpointer(run) as ckpt:
        assert ckpt.steps() == [1, 2, 3]
    for thread in set(threading.enumerate()) - threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), thread
    traces.await_ends()


@pytest.mark.parametrize("keep", [(), sidesave.KeepLatest(1)], ids=["keep all", "keep one"])
def test_nothing_is_deleted_or_named_for_a_dropped_manager(
    run: Path, traces: Traces, orders: Orders, keep: Any
):
    threads = set(threading.enumerate())
    manager = sidesave.CheckpointManager(
        run, {"x": torch.ones(3)}, keep=keep, names="checkpoint-{step}", random_state=False
    )
    manager.save(1)
    manager.wait()
    wait_until(lambda: (run / "checkpoint-1").exists())
    orders.give("hold", after=2)
    manager.save(2)
    orders.obeyed()
    del manager
    orders.release()
    with sidesave.Checkpointer(run) as ckpt:  # waits for the one before
        for thread in set(threading.enumerate()) - threads:
            if thread.name == "sidesave-retention":
                thread.join(DEADLINE_S)
                assert not thread.is_alive()
        assert ckpt.steps() == [1, 2]
    assert not (run / "checkpoint-2").exists()
    traces.await_ends()


def test_a_checkpointer_is_dropped_where_the_lock_of_threads_is_held(run: Path, traces: Traces):
    """Garbage is collected anywhere, as inside ``Thread.start``."""
    code = (
        "import sys, threading, sidesave\n"
        "ckpt = sidesave.Checkpointer(sys.argv[1])\n"
        "ckpt.save(1, {'x': 1})\n"
        "with threading._active_limbo_lock: del ckpt\n"
        "sidesave.Checkpointer(sys.argv[1]).close()\n"
        "assert sidesave.latest(sys.argv[1]).step == 1\n"
    )
    done = forks.run([sys.executable, "-c", code, str(run)])
    assert done.returncode == 0, done.stderr
    traces.check()


def test_a_process_that_ends_waits_for_what_it_has_dropped(run: Path, traces: Traces):
    code = (
        "import sys, sidesave, trainers\nsidesave.Checkpointer(sys.argv[1]).save(1, "
        "trainers.a_state(1, 20))"
    )
    done = forks.run([sys.executable, "-c", code, str(run)])
    assert done.returncode == 0, done.stderr
    check(run, 1, mib=20)
    traces.check()


def test_a_save_that_fails_after_its_checkpointer_was_dropped_is_logged(
    run: Path, caplog: pytest.LogCaptureFixture
):
    def train() -> int:
        ckpt = sidesave.Checkpointer(run)
        commit(ckpt, 1)
        shutil.rmtree(run / "step-00000001")
        in_the_way(run, 2)
        ckpt.save(2, a_state(2, 20))
        assert ckpt.daemon_pid is not None
        return os.pidfd_open(ckpt.daemon_pid)

    with caplog.at_level(logging.ERROR):
        pidfd = train()
        gc.collect()
        await_end(pidfd)
        os.close(pidfd)
    assert any("failed" in record.message for record in caplog.records)
