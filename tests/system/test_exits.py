"""However a trainer ends, forks or is misused: staged saves are committed, nothing is left, errors
say what to do.
"""

import asyncio
import concurrent.futures
import contextlib
import errno
import gc
import operator
import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from interrupts import dropped_by_python
from trainers import (
    DEADLINE_S,
    Orders,
    Traces,
    Trainer,
    a_model,
    a_state,
    await_end,
    check,
    daemon,
    end,
    entries,
    grouped,
    pidfd_of,
    save_steps,
    staging_memory,
    stopped,
    wait_until,
)

import sidesave
from sidesave.client.options import Options
from sidesave.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ClosedError,
    InvalidArgumentError,
    SidesaveError,
    UnsupportedValueError,
    WriteError,
    WriteStalledError,
)

# The trainer ends ---------------------------------------------------------------------------------


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("way", "status"),
    [
        ("return", 0),
        ("raise", 1),
        ("raise in the block", 1),
        ("sys.exit", 3),
        ("sys.exit in a thread pool", 3),
        ("interrupt", -signal.SIGINT),
    ],
)
def test_exit_with_a_save_in_flight_commits_it_and_leaves_nothing(
    run: Path, traces: Traces, way: str, status: int
):
    with Trainer(traces, "leave", run, way) as trainer:
        trainer.expect("ready")
        trainer.go_on()
        trainer.expect("staged")
        trainer.go_on()
        assert trainer.end() == status
        complaints = trainer.complaints()
    if status in (0, 3):
        assert complaints == ""
    assert "Warning" not in complaints
    check(run, 1)
    assert entries(run) == ["step-00000001"]
    traces.check()


@pytest.mark.parametrize(
    ("way", "status"),
    [
        ("os._exit", 5),
        ("SIGTERM", -signal.SIGTERM),
        ("SIGKILL", -signal.SIGKILL),
        ("SIGHUP", -signal.SIGHUP),
    ],
)
def test_sudden_end_with_a_save_staged_the_daemon_commits_it(
    run: Path, traces: Traces, orders: Orders, way: str, status: int
):
    with Trainer(traces, "leave", run, way) as trainer:
        pid = trainer.stage(orders)
        trainer.go_on()
        assert trainer.end() == status
        assert trainer.complaints() == ""
        assert entries(run) == []
        end(pid, signal.SIGCONT)
    check(run, 1)
    assert entries(run) == ["step-00000001"]
    traces.check()


def test_trainer_dead_before_it_could_tell_the_daemon_finds_the_save_in_memory(
    run: Path, traces: Traces
):
    with Trainer(traces, "die_when_staged", run) as trainer:
        [pid] = trainer.expect("ready")
        with pidfd_of(int(pid)) as pidfd:
            trainer.go_on()
            assert trainer.end() == -signal.SIGKILL
            await_end(pidfd)
    state = sidesave.load(run / "step-00000001")["model"]
    assert sidesave.verify(run / "step-00000001").ok
    for name, tensor in a_model().state_dict().items():
        assert torch.equal(state[name], tensor)
    traces.check()


@pytest.mark.usefixtures("started_daemons")
def test_exec_inherits_nothing_and_the_daemon_ends_though_the_process_lives(
    run: Path, traces: Traces, orders: Orders
):
    with Trainer(traces, "leave", run, "exec") as trainer:
        pid = trainer.stage(orders)
        trainer.go_on()
        assert trainer.expect_all("inherited", until="reported") == []
        end(pid, signal.SIGCONT)
        check(run, 1)
        trainer.go_on()
        assert trainer.end() == 0
    traces.check()


@pytest.mark.usefixtures("started_daemons")
def test_trainer_that_execs_itself_resumes_from_what_it_had_staged(
    run: Path, traces: Traces, orders: Orders
):
    with Trainer(traces, "leave", run, "exec and resume") as trainer:
        trainer.stage(orders, "hold")
        # its new daemon waits for the lease
        orders.give("report", starting_at="got BOOT", after=15, every_step=True)
        trainer.go_on()
        assert orders.obeyed()[1].endswith(".sidesave.lease")
        orders.release()
        assert trainer.expect("latest") == ["1"]
        assert trainer.end() == 0
    check(run, 1, 2)
    traces.check()


@pytest.mark.drawn
@pytest.mark.parametrize("delay_s", [0.01, 0.1, 0.2, 0.3])
@pytest.mark.usefixtures("started_daemons")
def test_trainer_killed_while_its_daemon_starts_leaves_nothing(
    run: Path, traces: Traces, delay_s: float
):
    with Trainer(traces, "die_while_starting", run, delay_s) as trainer:
        assert trainer.end() == -signal.SIGKILL
    traces.check()
    assert not run.exists() or entries(run) == []


@pytest.mark.parametrize("umask", [0o022, 0o027])
@pytest.mark.usefixtures("started_daemons")
def test_checkpoints_follow_the_umask_of_the_trainer(run: Path, traces: Traces, umask: int):
    with Trainer(traces, "resume", run, umask=umask) as trainer:
        trainer.expect("latest")
        assert trainer.end() == 0
    step = run / "step-00000001"
    assert step.stat().st_mode & 0o777 == 0o777 & ~umask
    assert {path.stat().st_mode & 0o777 for path in step.iterdir()} == {0o666 & ~umask}


# Forks --------------------------------------------------------------------------------------------


@pytest.mark.drawn
@pytest.mark.parametrize(
    "way", ["child ends", "child ends by os._exit", "child is collected", "child saves elsewhere"]
)
def test_forked_child_cannot_use_or_disturb_the_checkpointer(run: Path, traces: Traces, way: str):
    with Trainer(traces, "fork", run, way) as trainer:
        trainer.expect("ready")
        said = trainer.expect_all("held", "allowed", "child ended", until="saved")
        assert said == ["child ended 0"]
        trainer.go_on()
        assert trainer.end() == 0
        assert trainer.complaints() == ""
    check(run, 1, 2, mib=40)
    if way == "child saves elsewhere":
        check(f"{run}-child", 3)
    traces.check()


@pytest.mark.usefixtures("started_daemons")
def test_forked_child_that_lives_on_holds_neither_memory_nor_daemon(run: Path, traces: Traces):
    with Trainer(traces, "fork", run, "child lives on") as trainer:
        [pid] = trainer.expect("ready")
        [child] = trainer.expect("child")
        trainer.expect("saved")
        assert staging_memory(int(child)) == []
        with pidfd_of(int(pid)) as pidfd, pidfd_of(int(child)) as orphan:
            trainer.kill()
            await_end(pidfd)
            assert int(child) in traces.processes(), "the daemon ended before the child"
            signal.pidfd_send_signal(orphan, signal.SIGKILL)
            await_end(orphan)
    check(run, 1, 2, mib=40)
    traces.check()


@pytest.mark.usefixtures("started_daemons")
def test_child_that_was_forked_behind_pythons_back_does_not_keep_the_daemon(
    run: Path, traces: Traces
):
    with Trainer(traces, "fork_in_c", run) as trainer:
        [pid] = trainer.expect("ready")
        trainer.expect("forked")
        with pidfd_of(int(pid)) as pidfd:
            trainer.kill()
            await_end(pidfd)
        [child] = traces.processes()
        os.kill(child, signal.SIGKILL)
    check(run, 1)
    traces.check()


@pytest.mark.usefixtures("started_daemons")
def test_data_loader_workers_hold_nothing_and_do_not_outlive_the_trainer(run: Path, traces: Traces):
    with Trainer(traces, "load_data", run) as trainer:
        assert trainer.expect_all("held", until="trained") == []
        assert trainer.end() == 0
        assert trainer.complaints() == ""
    check(run, *range(6))
    traces.check()


# Growth -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sixty_saves_with_reshapes_leak_no_descriptor_thread_or_memory(run: Path):
    sizes = [1, 30, 5, 70, 2]

    def figures() -> dict[str, int]:
        gc.collect()
        writer = psutil.Process(daemon(ckpt))
        arenas = {line.split()[4] for line in staging_memory() if not line.startswith("/proc")}
        return {
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "threads": threading.active_count(),
            "arenas": len(arenas),
            "daemon descriptors": writer.num_fds(),
            "daemon threads": writer.num_threads(),
        }

    def save(steps: range) -> None:
        for step in steps:
            ckpt.save(step, a_state(step, sizes[step % len(sizes)])).committed.result(DEADLINE_S)

    with sidesave.Checkpointer(run) as ckpt:
        save(range(10))
        before, mine = figures(), psutil.Process().memory_info().rss
        daemons = psutil.Process(daemon(ckpt)).memory_info()
        save(range(10, 70))
        # What a save has had may go a moment after its commit is known.
        wait_until(
            lambda: all(now <= before[name] for name, now in figures().items()),
            "nothing is left of sixty",
        )
        assert psutil.Process().memory_info().rss - mine < 150 << 20, (
            "less than one more state of each size"
        )
        now = psutil.Process(daemon(ckpt)).memory_info()
        assert (now.rss - now.shared) - (daemons.rss - daemons.shared) < 16 << 20
    assert entries(run) == [f"step-{step:08d}" for step in range(70)]


def test_closing_gives_everything_back(run: Path, traces: Traces):
    def figures() -> tuple[int, int]:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    save_steps(run, 0, mib=20)
    before = figures()
    for step in range(1, 4):
        with sidesave.Checkpointer(run) as ckpt:
            ckpt.save(step, a_state(step, 20))
        assert ckpt.daemon_pid is None
        assert staging_memory() == []
        wait_until(
            lambda: all(map(operator.le, figures(), before)), "a thread that has done all ends"
        )
    traces.check()


def test_closing_with_a_deadline_leaves_the_daemon_to_finish(
    run: Path, traces: Traces, orders: Orders
):
    ckpt = sidesave.Checkpointer(run)
    orders.give("stop")
    handle = ckpt.save(1, a_state(1))
    pid, _ = orders.obeyed()
    with pidfd_of(pid) as pidfd:
        with pytest.raises(WriteStalledError, match=r"steps \[1\] were not committed within 0.1 s"):
            ckpt.close(timeout_s=0.1)
        assert isinstance(handle.committed.exception(DEADLINE_S), SidesaveError), (
            "nobody waits for ever"
        )
        os.kill(pid, signal.SIGCONT)
        await_end(pidfd)
    check(run, 1)
    del ckpt, handle
    gc.collect()
    traces.check()


# Misuse -------------------------------------------------------------------------------------------


def test_directory_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for directory, code in (
        (tmp_path / "file", errno.EEXIST),
        (tmp_path / "file/run", errno.ENOTDIR),
        (Path("/proc/nothing/run"), errno.ENOENT),
    ):
        with pytest.raises(WriteError, match="cannot create the run directory") as caught:
            sidesave.Checkpointer(directory)
        assert (caught.value.errno, str(caught.value.filename)) == (code, str(directory))
        assert isinstance(caught.value, OSError)


@pytest.mark.parametrize(
    ("group", "name", "value", "says"),
    [
        ("staging", "slots", 0, "StagingOptions.slots must be an int, 1 or more, not 0"),
        ("staging", "slots", 1.5, "StagingOptions.slots must be"),
        ("staging", "slots", "2", "StagingOptions.slots must be"),
        ("staging", "on_busy", "drop", "StagingOptions.on_busy must be 'wait' or 'skip'"),
        ("daemon", "nice", -5, "DaemonOptions.nice must be an int, 0 to 19"),
        ("daemon", "nice", 20, "DaemonOptions.nice must be an int, 0 to 19"),
        (
            "daemon",
            "stall_timeout_s",
            0,
            "DaemonOptions.stall_timeout_s must be a positive number of seconds",
        ),
        ("daemon", "stall_timeout_s", "300", "DaemonOptions.stall_timeout_s must be"),
        ("daemon", "takeover_timeout_s", float("nan"), "DaemonOptions.takeover_timeout_s must be"),
        ("daemon", "commit_timeout_s", None, "DaemonOptions.commit_timeout_s must be"),
        ("daemon", "cpus", (-1,), "DaemonOptions.cpus must be"),
        ("daemon", "cpus", ("0",), "DaemonOptions.cpus must be"),
        ("daemon", "cpus", [9999], r"DaemonOptions.cpus=\[9999\]: this machine has cores 0 to \d+"),
        ("daemon", "cpus", 0, "DaemonOptions.cpus must be"),
    ],
    ids=str,
)
def test_option_that_makes_no_sense_is_refused_before_anything_is_done(
    run: Path, group: str, name: str, value: object, says: str
):
    with pytest.raises(InvalidArgumentError, match=says):
        sidesave.Checkpointer(run, **grouped({group: {name: value}}))
    assert not run.exists()


@pytest.mark.parametrize(
    ("group", "kind"),
    [("staging", "StagingOptions"), ("failures", "FailureOptions"), ("daemon", "DaemonOptions")],
)
@pytest.mark.parametrize("value", [{"slots": 1}, None], ids=str)
def test_group_of_options_of_a_different_type_is_refused(
    run: Path, group: str, kind: str, value: Any
):
    with pytest.raises(InvalidArgumentError, match=f"{group} must be a sidesave.{kind}, not"):
        sidesave.Checkpointer(run, **{group: value})
    assert not run.exists()


@pytest.mark.parametrize(
    "directory",
    [
        "",
        "https://host/run",
        Path("http://host/run"),
        b"bytes",
        7,
        None,
        "nul\0byte",
        "odd\udcff name",
    ],
    ids=repr,
)
def test_directory_that_is_no_path_is_refused(
    directory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"director|path"):
        sidesave.Checkpointer(directory)
    assert list(tmp_path.iterdir()) == []


class _Opaque:
    pass


def test_misused_calls_raise_errors_that_say_what_to_do(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        for step in (-1, True, 1.0, "1", None, 10**19, torch.nn.Linear(9, 9)):
            with pytest.raises(InvalidArgumentError, match=r"step must be an int from 0 to 1e\+18"):
                ckpt.save(step, a_state(1))  # type: ignore[arg-type]
            if step is not None and not isinstance(step, str):  # the latest, and a path
                with pytest.raises(
                    InvalidArgumentError,
                    match=r"^step must be an int from 0 to 1e\+18, not .{1,100}$",
                ):
                    ckpt.load(step)  # type: ignore[arg-type]
        with pytest.raises(CheckpointNotFoundError, match="there is nothing at this path"):
            ckpt.load("1")
        with pytest.raises(InvalidArgumentError, match="path"):
            ckpt.load("")
        for state in (
            None,
            [torch.ones(1)],
            torch.ones(1),
            torch.nn.Linear(1, 1),
            {1: torch.ones(1)},
            "state",
        ):
            with pytest.raises(InvalidArgumentError, match=r"dict|named|str"):
                ckpt.save(1, state)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedValueError, match=r"model\.odd.*allow_pickle=True"):
            ckpt.save(1, {"model": {"odd": _Opaque()}})
        with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint"):
            ckpt.load()
        assert ckpt.latest_step() is None
        assert entries(run) == []

        ckpt.save(1, a_state(1)).committed.result(DEADLINE_S)
        with pytest.raises(CheckpointExistsError, match="overwrite=True"):
            ckpt.save(1, a_state(2))
        with pytest.raises(CheckpointNotFoundError, match=r"there is no step 2; there are \[1\]"):
            ckpt.load(2)
        ckpt.save(1, a_state(1), overwrite=True)
    check(run, 1)
    for use in (lambda: ckpt.save(2, a_state(2)), lambda: ckpt.prepare(a_state(2)), ckpt.load):
        with pytest.raises(ClosedError, match="closed"):
            use()
    ckpt.close()


def test_step_that_is_still_being_saved_is_taken(run: Path, orders: Orders):
    with sidesave.Checkpointer(run) as ckpt:
        orders.give("stop")
        ckpt.save(1, a_state(1))
        pid, _ = orders.obeyed()
        with pytest.raises(CheckpointExistsError, match="already saved or being saved"):
            ckpt.save(1, a_state(1))
        os.kill(pid, signal.SIGCONT)
    check(run, 1)


# Failures reach the user --------------------------------------------------------------------------


@pytest.fixture
def blocked(run: Path) -> Callable[[int], None]:
    """Makes saves of a step fail, by a directory that has its name, or lets them succeed again."""

    def toggle(step: int) -> None:
        path = run / f"step-{step:08d}"
        if path.exists():
            path.rmdir()
        else:
            path.mkdir()

    return toggle


@pytest.mark.parametrize("place", ["save", "wait", "close", "the end of the block"])
def test_failed_save_raises_where_the_user_looks_next_and_once(
    run: Path, blocked: Callable[[int], None], place: str
):
    ckpt = sidesave.Checkpointer(run)
    blocked(1)
    handle = ckpt.save(1, a_state(1))
    concurrent.futures.wait([handle.committed], DEADLINE_S)
    assert handle.staged.result() is None
    assert "failed" in repr(handle)
    look: dict[str, Callable[[], object]] = {
        "save": lambda: ckpt.save(2, a_state(2)),
        "wait": ckpt.wait,
        "close": ckpt.close,
        "the end of the block": lambda: ckpt.__exit__(None, None, None),
    }
    with pytest.raises(CheckpointExistsError) as caught:
        look[place]()
    assert repr(caught.value) == repr(handle.committed.exception())
    ckpt.wait()
    if place in ("save", "wait"):
        ckpt.save(2, a_state(2))
        ckpt.close()
        assert "step-00000002" in entries(run)


async def awaited(future: concurrent.futures.Future[Any]) -> None:
    await asyncio.wrap_future(future)


READS: dict[str, Callable[[sidesave.SaveHandle], object]] = {
    "exception": lambda handle: handle.committed.exception(DEADLINE_S),
    "result": lambda handle: handle.written.result(DEADLINE_S),
    "in a callback": lambda handle: handle.written.add_done_callback(
        lambda future: future.exception()
    ),
    "by asyncio": lambda handle: asyncio.run(awaited(handle.committed)),
}


@pytest.mark.drawn
@pytest.mark.parametrize("place", ["save", "wait", "close"])
@pytest.mark.parametrize("read", READS)
def test_failure_that_was_read_from_the_handle_is_not_raised_again(
    run: Path, blocked: Callable[[int], None], read: str, place: str
):
    with sidesave.Checkpointer(run) as ckpt:
        blocked(1)
        handle = ckpt.save(1, a_state(1))
        with contextlib.suppress(CheckpointExistsError):
            READS[read](handle)
        concurrent.futures.wait([handle.committed], DEADLINE_S)
        if place == "save":
            ckpt.save(2, a_state(2)).committed.result(DEADLINE_S)
        elif place == "wait":
            ckpt.wait()
    assert ("step-00000002" in entries(run)) is (place == "save")


def test_of_several_failures_those_that_were_not_read_are_told(
    run: Path, blocked: Callable[[int], None], caplog: pytest.LogCaptureFixture
):
    with sidesave.Checkpointer(run, staging=sidesave.StagingOptions(slots=3)) as ckpt:
        for step in (1, 2, 3):
            blocked(step)
        with stopped(daemon(ckpt)):
            handles = [ckpt.save(step, a_state(step)) for step in (1, 2, 3)]
        assert handles[0].committed.exception(DEADLINE_S) is not None
        concurrent.futures.wait([handle.committed for handle in handles], DEADLINE_S)
        with pytest.raises(CheckpointExistsError, match="step-00000002"):
            ckpt.wait()
        assert "another save failed" in caplog.text and "step-00000003" in caplog.text
        ckpt.wait()


def test_failure_of_a_blocking_save_is_raised_by_that_call_alone(
    run: Path, blocked: Callable[[int], None]
):
    with sidesave.Checkpointer(run) as ckpt:
        blocked(1)
        with pytest.raises(CheckpointExistsError):
            ckpt.save(1, a_state(1), blocking=True)
        ckpt.save(2, a_state(2), blocking=True)
    check_after_unblocking(run, blocked, 2)


def check_after_unblocking(run: Path, blocked: Callable[[int], None], *steps: int) -> None:
    blocked(1)
    check(run, *steps)


def test_failed_save_only_warns_on_request_and_training_goes_on(
    run: Path, blocked: Callable[[int], None]
):
    ckpt = sidesave.Checkpointer(run, failures=sidesave.FailureOptions(tolerated=5))
    blocked(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = ckpt.save(1, a_state(1))
        assert isinstance(handle.committed.exception(DEADLINE_S), CheckpointExistsError)
        ckpt.wait()
        ckpt.save(2, a_state(2))
        ckpt.close()
    [warning] = caught
    assert warning.category is RuntimeWarning
    assert "the save of step 1 failed: [Errno 17] the step exists" in str(warning.message)
    check_after_unblocking(run, blocked, 2)


def test_warning_that_was_made_an_error_does_not_break_the_saves_that_follow(
    run: Path, blocked: Callable[[int], None]
):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckpt = sidesave.Checkpointer(run, failures=sidesave.FailureOptions(tolerated=5))
        blocked(1)
        assert ckpt.save(1, a_state(1)).committed.exception(DEADLINE_S) is not None
        with contextlib.suppress(RuntimeWarning):
            ckpt.wait(DEADLINE_S)
        ckpt.save(2, a_state(2)).committed.result(DEADLINE_S)
        ckpt.close()
    check_after_unblocking(run, blocked, 2)


def test_failed_step_can_be_saved_again_as_soon_as_the_failure_is_known(
    run: Path, blocked: Callable[[int], None]
):
    again: list[sidesave.SaveHandle | BaseException] = []
    with sidesave.Checkpointer(run) as ckpt:
        blocked(1)
        handle = ckpt.save(1, a_state(1))

        def save_again(future: concurrent.futures.Future[Any]) -> None:
            blocked(1)
            try:
                assert "overwrite=True to replace it" in str(future.exception())
                again.append(ckpt.save(1, a_state(1)))
            except BaseException as error:  # noqa: BLE001 - looked at below
                again.append(error)

        handle.committed.add_done_callback(save_again)
        assert handle.committed.exception(DEADLINE_S) is not None
        ckpt.wait()
    [second] = again
    assert isinstance(second, sidesave.SaveHandle), second
    check(run, 1)


def test_exception_in_the_block_is_not_hidden_by_a_failed_save(
    run: Path, blocked: Callable[[int], None]
):
    def train() -> None:
        with sidesave.Checkpointer(run) as ckpt:
            blocked(1)
            ckpt.save(1, a_state(1))
            raise KeyError("a bug in the training loop")

    with pytest.raises(KeyError, match="a bug in the training loop"):
        train()


def test_busy_pool_skips_a_save_on_request(run: Path, orders: Orders):
    with sidesave.Checkpointer(
        run, staging=sidesave.StagingOptions(slots=1, on_busy="skip")
    ) as ckpt:
        orders.give("stop")
        first = ckpt.save(1, a_state(1))
        pid, _ = orders.obeyed()
        second = ckpt.save(2, a_state(2))
        assert (first.skipped, second.skipped) == (False, True)
        assert "skipped" in repr(second)
        for future in (second.staged, second.written, second.committed):
            assert future.cancelled()
        os.kill(pid, signal.SIGCONT)
        first.committed.result(DEADLINE_S)
        third = ckpt.save(2, a_state(2))
        assert not third.skipped
    check(run, 1, 2)


def test_busy_pool_makes_a_save_wait_unless_no_byte_moves(
    run: Path, orders: Orders, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Options, "slot_patience_s", 0.2)
    with sidesave.Checkpointer(run, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        orders.give("stop")
        first = ckpt.save(1, a_state(1))
        pid, _ = orders.obeyed()
        with pytest.raises(
            WriteStalledError,
            match=r"all 1 staging slots are being written, and no byte has moved for 0\.2 s",
        ):
            ckpt.save(2, a_state(2))
        with pytest.raises(WriteStalledError, match=r"steps \[1\] were not committed within 0.1 s"):
            ckpt.wait(0.1)
        os.kill(pid, signal.SIGCONT)
        first.committed.result(DEADLINE_S)
        ckpt.save(2, a_state(2))
    check(run, 1, 2)


def test_interrupted_save_leaves_nothing_that_writes_into_the_next_one(tmp_path: Path) -> None:
    """Ctrl-C in the middle of the copy, then the usual last save into the same slot."""
    large = {"w": [torch.rand(1 << 22) for _ in range(24)]}
    small = {"w": torch.arange(1 << 20, dtype=torch.float32)}
    with (
        dropped_by_python(KeyboardInterrupt),
        sidesave.Checkpointer(tmp_path, staging=sidesave.StagingOptions(slots=1)) as checkpointer,
    ):
        checkpointer.prepare(large).result()
        for attempt in range(10):
            timer = threading.Timer(0.002 * (1 + attempt), signal.raise_signal, [signal.SIGINT])
            try:
                timer.start()
                checkpointer.save(2 * attempt, large)
                timer.join()
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                timer.cancel()
            info = checkpointer.save(2 * attempt + 1, small).committed.result(300)
            assert sidesave.verify(info).ok
            assert torch.equal(sidesave.load(info)["w"], small["w"])


def test_wait_from_a_signal_handler_inside_save_is_refused_at_once(tmp_path: Path) -> None:
    class Item:
        def state_dict(self) -> dict[str, int]:
            signal.raise_signal(signal.SIGUSR1)
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    raised: list[BaseException] = []

    def handler(number: int, frame: object) -> None:
        for call in (checkpointer.wait, checkpointer.close, lambda: checkpointer.save(9, {})):
            try:
                call()
            except sidesave.errors.StagingError as error:
                raised.append(error)

    with sidesave.Checkpointer(tmp_path) as checkpointer:
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            checkpointer.save(1, {"item": Item()}).committed.result(300)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert len(raised) == 3
        assert "set a flag" in str(raised[0])


def test_commit_that_ends_after_going_back_is_no_obstacle(tmp_path: Path) -> None:
    state = {"w": torch.arange(4)}
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(50, state, blocking=True)
        with stopped(daemon(checkpointer)):
            abandoned = checkpointer.save(100, state)
            checkpointer.load(50)
        abandoned.committed.result(300)
        again = checkpointer.save(100, state).committed.result(300)
        assert again.parent is not None
        assert again.parent[0] == 50
        assert checkpointer.latest_step() == 100
