"""What is seen of runs from outside, through /proc and the run directory, and the request that they
save.
"""

import contextlib
import ctypes
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import output
from rank_trainers import Ranks
from trainers import (
    DEADLINE_S,
    Orders,
    Traces,
    Trainer,
    a_state,
    await_end,
    kill_with_a_save_staged,
    pidfd_of,
    wait_until,
)

import sidesave
from sidesave.client.cli.top import DaemonView, Top, _RunLog, _written
from sidesave.client.reporting import plot
from sidesave.client.runs.save_requests import LISTENING, STOP, TRIGGER, listen, request_save
from sidesave.writer_daemon.save_record import SaveRecord

MODULE = [sys.executable, "-m", "sidesave"]
STATE = {"x": torch.zeros(3)}


def seen(run: Path, top: Top | None = None) -> list[DaemonView]:
    return [view for view in (top or Top()).look() if view.run == str(run)]


# top ----------------------------------------------------------------------------------------------


def test_a_daemon_is_seen_with_its_run_its_trainer_and_the_last_commit_until_it_ends(
    tmp_path: Path,
):
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        [view] = seen(tmp_path)
        assert (view.pid, view.rank) == (checkpointer.daemon_pid, 0)
        assert (view.trainer_pid, view.trainer_lives) == (os.getpid(), True)
        assert (view.step, view.last_step, view.last_commit_age_s) == (None, None, None)
        assert view.uss_nbytes is not None and 1 << 20 < view.uss_nbytes < 1 << 28
        before = time.time()
        for step in (7, 3):
            checkpointer.save(step, STATE).committed.result()
        wait_until(
            lambda: seen(tmp_path)[0].last_step == 3, "the log has the commit, which it follows"
        )
        [view] = seen(tmp_path)
        assert view.last_commit_s is not None and before <= view.last_commit_s <= time.time()
        assert view.pid is not None
        with pidfd_of(view.pid) as pidfd:
            checkpointer.close()
            await_end(pidfd)
    assert seen(tmp_path) == []


def test_rates_are_those_since_the_look_before(tmp_path: Path):
    top = Top()
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        began = time.monotonic()  # no later than the first look
        [first] = seen(tmp_path, top)
        assert (first.cpu, first.written_nbytes_per_s) == (None, None)
        info = checkpointer.save(1, a_state(1, 8)).committed.result()
        [second] = seen(tmp_path, top)
        seconds = time.monotonic() - began
        assert second.cpu is not None and 0 <= second.cpu <= (os.cpu_count() or 1) + 1
        assert second.written_nbytes_per_s is not None
        if second.written_nbytes_per_s:  # a file system in memory has nothing written
            assert second.written_nbytes_per_s >= info.nbytes / seconds / 2


def test_the_step_that_is_being_written_is_seen_and_how_much_of_it(tmp_path: Path, orders: Orders):
    """Held when the first of its two tensor files has been reserved, and nothing of it is
    written.
    """
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, a_state(0)).committed.result(DEADLINE_S)
        orders.give("hold", starting_at="open", on="/.optimizer.rank-00000.safetensors.")
        handle = checkpointer.save(1, a_state(1))
        orders.obeyed()
        wait_until(
            lambda: seen(tmp_path)[0].last_step == 0, "the log has the commit, which it follows"
        )
        [view] = seen(tmp_path)
        assert view.step == 1
        # small files may have been written
        assert view.progress is not None and view.progress < 0.01
        orders.release()
        handle.committed.result(DEADLINE_S)


def test_a_save_that_waits_for_its_turn_is_seen_as_well(tmp_path: Path, orders: Orders):
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        orders.give("hold", after=0)
        handle = checkpointer.save(5, STATE)
        orders.obeyed()
        [view] = seen(tmp_path)
        assert (view.step, view.progress) == (5, None)
        orders.release()
        handle.committed.result(DEADLINE_S)


def test_written_parts_of_a_reserved_file_are_told_from_the_rest(tmp_path: Path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        os.posix_fallocate(fd, 0, 64 << 20)
        if _written(fd) == (64 << 20, 64 << 20):
            pytest.skip("this file system does not tell reserved space from data")
        assert _written(fd) == (0, 64 << 20)
        for offset in (0, 1 << 20, 32 << 20):
            os.pwrite(fd, bytes(1 << 20), offset)
        assert _written(fd) == (3 << 20, 64 << 20)
        os.pwrite(fd, bytes(64 << 20), 0)
        assert _written(fd) == (64 << 20, 64 << 20)
    finally:
        os.close(fd)


def test_a_daemon_that_finishes_what_its_dead_trainer_had_staged_is_seen_as_such(
    tmp_path: Path, orders: Orders, traces: Traces
):
    run = tmp_path / "run"
    with Trainer(traces, "save_and_wait", run, 5) as trainer:
        [pid] = trainer.expect("ready")
        orders.give("hold", after=2)
        with pidfd_of(int(pid)) as pidfd:
            trainer.go_on()
            trainer.expect("staged")
            orders.obeyed()
            assert [(view.trainer_pid, view.trainer_lives) for view in seen(run)] == [
                (trainer.pid, True)
            ]
            trainer.kill()
            [view] = seen(run)
            assert (view.pid, view.trainer_lives, view.step) == (int(pid), False, 5)
            assert "ended" in output("top", "--once")
            orders.release()
            await_end(pidfd)


def test_every_rank_is_seen_by_its_number(tmp_path: Path, traces: Traces):
    with Ranks(2, tmp_path / "meeting", traces) as ranks:
        ranks.open(tmp_path / "run")
        views = seen(tmp_path / "run")
        assert [(view.rank, view.pid) for view in views] == list(enumerate(ranks.daemons))
        assert [view.trainer_pid for view in views] == [rank.pid for rank in ranks]


def test_a_process_that_only_names_the_module_is_no_daemon():
    code = "import sys; print('here', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, "sidesave.writer_daemon"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        assert process.pid not in {view.pid for view in Top().look()}
        process.communicate()


def test_a_removed_run_directory_does_not_keep_the_others_from_being_seen(tmp_path: Path):
    with (
        sidesave.Checkpointer(tmp_path / "kept") as kept,
        sidesave.Checkpointer(tmp_path / "gone") as gone,
    ):
        (tmp_path / "gone").rename(tmp_path / "moved")
        pids = {view.pid: view.run for view in Top().look()}
        assert pids[kept.daemon_pid or 0] == str(tmp_path / "kept")
        assert pids[gone.daemon_pid or 0] == str(tmp_path / "moved")
        (tmp_path / "moved").rename(tmp_path / "gone")


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Path]:
    """A file system whose server never answers."""
    point = tmp_path / "hanging"
    point.mkdir()
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        pytest.skip("needs /dev/fuse")
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"none", bytes(point), b"fuse", 0, options):
        os.close(fd)
        pytest.skip(f"cannot mount: {os.strerror(ctypes.get_errno())}")
    try:
        yield point
    finally:
        os.close(fd)  # whoever waits gets an error
        libc.umount2(bytes(point), 2)


@pytest.mark.root
def test_a_run_whose_storage_hangs_is_waited_for_once(hanging: Path):
    log, began = _RunLog(str(hanging)), time.monotonic()
    log.read()
    assert time.monotonic() - began < DEADLINE_S
    reading = log._reading
    assert reading is not None and reading.is_alive()
    log.read()
    assert log._reading is reading


def test_the_log_of_a_run_is_read_again_when_it_has_grown_and_checkpoints_tell_where_it_is_lost(
    tmp_path: Path,
):
    log = _RunLog(str(tmp_path))
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, STATE).committed.result()
    log.read()
    assert log.last_step == 2
    (tmp_path / ".sidesave.history").write_bytes(b"")
    fresh = _RunLog(str(tmp_path))
    fresh.read()
    assert (fresh.last_step, fresh.under_way) == (2, None)


def test_top_prints_a_table_or_json(tmp_path: Path):
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(12, STATE).committed.result()
        wait_until(
            lambda: seen(tmp_path)[0].last_step == 12, "the log has the commit, which it follows"
        )
        [line] = [line for line in output("top", "--once").splitlines() if str(tmp_path) in line]
        words = line.split()
        assert words[:4] == [str(tmp_path), "0", str(checkpointer.daemon_pid), str(os.getpid())]
        assert "step 12" in line
        [row] = [row for row in json.loads(output("top", "--json")) if row["run"] == str(tmp_path)]
    assert (row["pid"], row["last_step"], row["trainer_lives"]) == (int(words[2]), 12, True)
    assert 0 <= row["last_commit_age_s"] < DEADLINE_S
    assert row["cpu"] is not None


def test_top_refreshes_on_a_terminal_until_it_is_interrupted(tmp_path: Path):
    ours, theirs = pty.openpty()
    shown = b""
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "500"}
    command = [*MODULE, "top", "--interval", "0.1"]
    with sidesave.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(12, STATE).committed.result()
        with subprocess.Popen(
            command, stdout=theirs, stderr=subprocess.PIPE, env=environment
        ) as process:
            os.close(theirs)
            try:
                for step in (b"step 12", b"step 13"):
                    while step not in shown:
                        assert select.select([ours], [], [], DEADLINE_S)[0], shown
                        shown += os.read(ours, 65536)
                    if step == b"step 12":
                        checkpointer.save(13, STATE).committed.result()
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(OSError):  # its end
                    while os.read(ours, 65536):
                        pass
                assert process.wait(DEADLINE_S) == 0
                assert process.stderr is not None and process.stderr.read() == b""
            finally:
                process.kill()
                os.close(ours)


# plot ---------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Commits, a failure, and a second session that goes back."""
    path = tmp_path / "exp1"
    for steps in ((10, 20, 30), (15, 25)):
        with sidesave.Checkpointer(path) as checkpointer:
            if steps[0] == 15:
                checkpointer.load(10)
            for step in steps:
                checkpointer.save(step, STATE).committed.result()
            (path / "step-00000099").mkdir()
            checkpointer.save(99, STATE)
            with pytest.raises(sidesave.errors.CheckpointExistsError):
                checkpointer.wait()
            (path / "step-00000099").rmdir()
    return path


def a_record(step: int, session: str, seconds: float = 0.5) -> SaveRecord:
    times = dict.fromkeys(("stall_s", "staged_s", "written_s", "committed_s"), seconds)
    return SaveRecord(step=step, session=session, outcome="committed", **times)


def test_plot_draws_times_and_losses_over_steps(run: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    text = output("plot", run, "--output", tmp_path / "plot.svg")
    assert text == f"{tmp_path / 'plot.svg'}: 7 saves\n"
    drawn = (tmp_path / "plot.svg").read_text()
    for label in (
        "saves of exp1",
        "stall",
        "staged",
        "written",
        "committed",
        "failed or removed or unknown",
        "step",
    ):
        assert f"<!-- {label} -->" in drawn
    assert drawn.count("<!-- restart -->") == 2  # once in each half


def test_plot_marks_each_restart_where_its_first_save_is():
    pytest.importorskip("matplotlib")
    steps = {"a" * 16: (10, 20, 30), "b" * 16: (15, 25), "c" * 16: (28,)}
    records = [a_record(step, session) for session, those in steps.items() for step in those]
    for axes in plot.picture_of(records, "saves").axes:
        marks = [
            np.asarray(line.get_xdata()).tolist()
            for line in axes.lines
            if line.get_linestyle() == "--"
        ]
        assert marks == [[15, 15], [28, 28]]
        assert [line.get_label() for line in axes.lines].count("restart") == 1
    alone = plot.picture_of(records[:3], "saves")
    assert not [line for axes in alone.axes for line in axes.lines if line.get_linestyle() == "--"]


def test_plot_has_its_legends_beside_the_points():
    pytest.importorskip("matplotlib")
    figure = plot.picture_of(
        [a_record(step, "a" * 16, step / 10) for step in range(1, 30)], "saves"
    )
    figure.draw_without_rendering()
    for axes in figure.axes:
        legend = axes.get_legend()
        assert legend is not None
        box = legend.get_window_extent()
        assert box.x0 >= axes.get_window_extent().x1
        assert box.x1 <= figure.bbox.x1


def test_plot_writes_a_picture_named_after_the_run_where_it_was_called(
    run: Path, tmp_path: Path, monkeypatch: Any
):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    output("plot", run)
    assert (tmp_path / "exp1.png").read_bytes().startswith(b"\x89PNG")


def test_plot_refuses_what_it_cannot_draw_in_one_line(run: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    assert "nonsense" in output("plot", run, "--output", tmp_path / "x.nonsense", status=2)
    (tmp_path / "empty").mkdir()
    assert "has no saves" in output(
        "plot", tmp_path / "empty", "--output", tmp_path / "x.png", status=2
    )
    assert "one checkpoint" in output("plot", run / "step-00000010", status=2)
    assert not list(tmp_path.glob("x.*"))


def test_plot_without_its_extra_says_which_to_install(run: Path):
    code = f"import sys; sys.modules['matplotlib'] = None; sys.argv[1:] = ['plot', {str(run)!r}]\n"
    code += "from sidesave.client.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "pip install 'sidesave[plot]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# trigger ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def obeying(
    checkpointer: sidesave.Checkpointer, run: Path, obey: Callable[[], object]
) -> Iterator[None]:
    """A trainer's loop: it does as it is told when the request is there."""
    listen(str(run), checkpointer.session.id)
    end = threading.Event()

    def train() -> None:
        while not end.wait(0.01):
            with contextlib.suppress(FileNotFoundError):
                (run / TRIGGER).unlink()
                obey()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(DEADLINE_S)


def test_trigger_leaves_a_request_for_a_live_session_however_often(tmp_path: Path):
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        listen(str(tmp_path), checkpointer.session.id)
        for _ in range(2):
            assert "asked to save" in output("trigger", tmp_path)
            assert (tmp_path / TRIGGER).exists()


def test_trigger_is_refused_where_nobody_would_save(tmp_path: Path):
    assert "no live session" in output("trigger", tmp_path, status=1)
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, STATE)
    assert "no live session" in output("trigger", tmp_path, "--wait", status=1)
    assert "one checkpoint" in output("trigger", tmp_path / "step-00000001", status=2)
    assert "no run directory" in output("trigger", tmp_path / "nowhere", status=2)
    assert not (tmp_path / TRIGGER).exists()


def test_trigger_is_refused_where_the_run_does_not_listen(tmp_path: Path):
    with sidesave.CheckpointManager(tmp_path, dict(STATE), save=[sidesave.EverySteps(1)]):
        assert "needs the policy OnRequest()" in output("trigger", tmp_path, "--stop", status=1)
        assert not (tmp_path / STOP).exists()


def test_requests_end_with_the_session_that_they_were_made_for(tmp_path: Path):
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        listen(str(tmp_path), checkpointer.session.id)
        output("trigger", tmp_path, "--stop")
        earlier = (tmp_path / STOP).read_bytes()
    with sidesave.CheckpointManager(tmp_path, dict(STATE), save=[sidesave.OnRequest()]) as manager:
        assert not (tmp_path / STOP).exists()
        # asked by who had looked before
        request_save(tmp_path, stop=True, session=earlier.decode())
        deadline = time.monotonic() + DEADLINE_S
        while (tmp_path / STOP).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        manager.step(0)
        request_save(tmp_path)
        assert not manager.stopping
    assert not [
        path for path in tmp_path.iterdir() if path.name.startswith((STOP, TRIGGER, LISTENING))
    ]


def test_trigger_is_refused_while_a_daemon_only_finishes_for_a_dead_trainer(
    tmp_path: Path, orders: Orders, traces: Traces
):
    run = tmp_path / "run"
    with pidfd_of(kill_with_a_save_staged(traces, run, orders, "hold", after=2)) as pidfd:
        assert "no live session" in output("trigger", run, status=1)
        orders.release()
        await_end(pidfd)
    assert not (run / TRIGGER).exists()


def test_trigger_waits_for_the_save_that_it_has_asked_for_and_for_no_earlier_one(
    tmp_path: Path, orders: Orders
):
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        orders.give("hold", after=2)
        earlier = [checkpointer.save(step, STATE) for step in (1, 2)]
        orders.obeyed()

        def obey() -> None:
            orders.release()  # what was under way ends first
            earlier[1].committed.result(DEADLINE_S)
            checkpointer.save(3, STATE)

        with obeying(checkpointer, tmp_path, obey):
            text = output("trigger", tmp_path, "--wait", "--timeout", DEADLINE_S)
    assert text.startswith(f"{tmp_path}/step-00000003: ")


def test_trigger_has_a_manager_save_its_next_step(tmp_path: Path):
    run = tmp_path / "run"
    with sidesave.CheckpointManager(run, state=dict(STATE), save=[sidesave.OnRequest()]) as manager:
        command = [*MODULE, "trigger", run, "--wait", "--timeout", str(DEADLINE_S)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            handle, deadline = None, time.monotonic() + DEADLINE_S
            step = manager.restore()
            while handle is None:
                assert time.monotonic() < deadline
                handle = manager.step(step)
                step += 1
                time.sleep(0.001)
            told, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert told.startswith(f"{handle.committed.result().path}: ")
    assert not (run / TRIGGER).exists()


def test_trigger_can_have_the_loop_stop_as_well(tmp_path: Path):
    with sidesave.CheckpointManager(tmp_path, dict(STATE), save=[sidesave.OnRequest()]) as manager:
        assert "to save at the next step and to stop" in output("trigger", tmp_path, "--stop")
        deadline = time.monotonic() + DEADLINE_S
        step = 0
        while not manager.stopping:
            assert time.monotonic() < deadline
            manager.step(step)
            step += 1
            time.sleep(0.001)
        assert manager.latest is None or manager.latest.step == step - 1
    assert [info.step for info in sidesave.find(tmp_path)] == [step - 1]


def test_trigger_that_waits_in_vain_says_whether_the_request_was_seen(tmp_path: Path):
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, STATE).committed.result()
        listen(str(tmp_path), checkpointer.session.id)
        text = output("trigger", tmp_path, "--wait", "--timeout", 0, status=1)
        assert "within 0 s; the trainer has not seen the request" in text
        assert (tmp_path / TRIGGER).exists()
    assert "--timeout must be 0 or more seconds" in output(
        "trigger", tmp_path, "--timeout", -1, status=2
    )


def test_trigger_reports_the_failure_of_the_save(tmp_path: Path):
    checkpointer = sidesave.Checkpointer(tmp_path)
    (tmp_path / "step-00000004").mkdir()
    with obeying(checkpointer, tmp_path, lambda: checkpointer.save(4, STATE)):
        text = output("trigger", tmp_path, "--wait", "--timeout", DEADLINE_S, status=1)
    assert text.startswith(
        "sidesave: the save of step 4 failed: CheckpointExistsError: the step exists"
    )
    with pytest.raises(sidesave.errors.CheckpointExistsError):
        checkpointer.close()


def test_trigger_ends_with_the_session_and_takes_back_what_was_not_seen(tmp_path: Path):
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        listen(str(tmp_path), checkpointer.session.id)
        command = [*MODULE, "trigger", tmp_path, "--wait"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            deadline = time.monotonic() + DEADLINE_S
            while not (tmp_path / TRIGGER).exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            checkpointer.close()
            _, told = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "has ended without such a save" in told
    assert not (tmp_path / TRIGGER).exists()


@pytest.mark.root
def test_trigger_finds_a_checkpoint_that_went_elsewhere(mount: Callable[..., Path], tmp_path: Path):
    small, state = mount("-t", "tmpfs", "-o", "size=4m", "none"), {"x": torch.zeros(2 << 20)}
    with sidesave.Checkpointer(
        small, failures=sidesave.FailureOptions(fallback_directory=tmp_path / "other")
    ) as checkpointer:
        with obeying(checkpointer, small, lambda: checkpointer.save(1, state)):
            text = output("trigger", small, "--wait", "--timeout", DEADLINE_S)
        [view] = seen(small)
        assert view.last_step == 1
    assert text.startswith(f"{tmp_path / 'other'}/step-00000001: ")


# The process --------------------------------------------------------------------------------------


@pytest.mark.drawn
@pytest.mark.parametrize(
    "command", [["top", "--once"], ["plot", "RUN", "--output", "x.png"], ["trigger", "RUN"]]
)
def test_commands_for_runs_under_way_do_without_torch(command: list[str], tmp_path: Path):
    pytest.importorskip("matplotlib")
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, STATE).committed.result()
        listen(str(tmp_path), checkpointer.session.id)
        code = (
            "import sys, sidesave.client.cli.main as cli\ntry: cli.main()\nfinally: assert 'torch' "
            "not in sys.modules"
        )
        arguments = [str(tmp_path) if word == "RUN" else word for word in command]
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
