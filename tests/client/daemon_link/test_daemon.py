"""The daemon and whatever happens to it: killed, stopped, hung, orphaned, out of space. Real
processes and signals.
"""

import contextlib
import errno
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from pathlib import Path

import campaigns
import pytest
from campaigns import Share
from trainers import (
    DEADLINE_S,
    LAST_WORDS,
    Orders,
    Traces,
    Trainer,
    a_state,
    await_end,
    check,
    commit,
    daemon,
    end,
    entries,
    kill_with_a_save_staged,
    pidfd_of,
    save_steps,
    staging_memory,
    stopped,
    wait_until,
)

import sidesave
from sidesave.client.daemon_link import connection, restarts
from sidesave.client.runs.finding import catalog_of
from sidesave.client.saving import saver
from sidesave.errors import (
    DaemonDiedError,
    DaemonStartError,
    DirectoryInUseError,
    NoSpaceError,
    ProtocolError,
    SidesaveError,
    WriteError,
    WriteStalledError,
)
from sidesave.writer_daemon.protocol import Delete


@pytest.fixture
def run(run: Path, traced: None) -> Path:
    return run


def failure(handle: sidesave.SaveHandle, future: str = "committed") -> BaseException:
    error = getattr(handle, future).exception(DEADLINE_S)
    assert error is not None
    return error


def next_daemon(ckpt: sidesave.Checkpointer, before: int | None) -> int:
    """Wait for the daemon that follows ``before``; its pid."""
    wait_until(lambda: ckpt.daemon_pid not in (None, before), "a daemon follows", DEADLINE_S)
    return daemon(ckpt)


# Killed -------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["writing after staging", "writing while staging"])
def follow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the writer follows the copy, as it does for states too large for a quick test."""
    monkeypatch.setattr(saver, "_FOLLOW_NBYTES", 0 if request.param else 1 << 60)
    return request.param


@pytest.mark.slow
@pytest.mark.usefixtures("follow")
def test_daemon_killed_at_random_moments_every_save_still_commits(run: Path, traces: Traces):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    sizes = {step: chance.choice([1, 20, 70]) for step in range(20)}
    kills = 0

    def kill() -> None:
        nonlocal kills
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(ckpt.daemon_pid, signal.SIGKILL)  # type: ignore[arg-type]
            kills += 1

    with sidesave.Checkpointer(run) as ckpt:
        for step, mib in sizes.items():
            killer = threading.Timer(chance.uniform(0, 0.03 + mib / 400), kill)
            killer.start()
            handle = ckpt.save(step, a_state(step, mib))
            handle.committed.result(DEADLINE_S)
            killer.join()
    assert kills > 10
    assert entries(run) == [f"step-{step:08d}" for step in sizes]
    for step, mib in sizes.items():
        (run.parent / f"{step}").mkdir()
        (run / f"step-{step:08d}").rename(run.parent / f"{step}" / f"step-{step:08d}")
        check(run.parent / f"{step}", step, mib=mib)
    traces.check()


@pytest.mark.slow
def test_daemon_killed_before_any_operation_on_storage_save_still_commits(
    run: Path, orders: Orders, traces: Traces, share: Share
):
    killed: list[str] = []
    step = -1
    with sidesave.Checkpointer(run) as ckpt:
        for after in share.numbers():
            orders.give("kill", after=after)
            commit(ckpt, step := step + 1, 0.1)
            if not orders.was_obeyed():
                share.is_past(after)
            while not orders.was_obeyed():  # it is the next save that comes to that operation
                commit(ckpt, step := step + 1, 0.1)
            killed.append(orders.obeyed()[1].split(" ")[0])
    assert len(killed) > 30 or not campaigns.WHOLE
    names = {"os.mkdir", "open", "os.link", "os.remove", "os.chmod", "os.rename"}
    assert set(killed) >= names or not campaigns.WHOLE
    check(run, *range(step + 1), mib=0.1)
    assert entries(run) == [f"step-{each:08d}" for each in range(step + 1)]
    traces.check()


@pytest.mark.parametrize("after", [0, 1])
def test_daemon_killed_before_it_was_ready_start_succeeds(run: Path, orders: Orders, after: int):
    orders.give("kill", starting_at="", after=after)
    with sidesave.Checkpointer(run) as ckpt:
        pid, _ = orders.obeyed(0)
        assert pid != daemon(ckpt)
        commit(ckpt, 1)
    check(run, 1)


def test_daemon_killed_while_idle_is_replaced_before_the_next_save_needs_it(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)
        first = daemon(ckpt)
        os.kill(first, signal.SIGKILL)
        commit(ckpt, 2)
        assert daemon(ckpt) != first
    check(run, 1, 2)


def test_two_saves_in_flight_survive_their_daemon(run: Path, orders: Orders):
    with sidesave.Checkpointer(run) as ckpt:
        orders.give("stop")
        handles = [ckpt.save(step, a_state(step, 2)) for step in (1, 2)]
        pid, _ = orders.obeyed()
        os.kill(pid, signal.SIGKILL)
        assert [handle.committed.result(DEADLINE_S).step for handle in handles] == [1, 2]
    check(run, 1, 2, mib=2)


def test_save_that_was_written_needs_no_memory_when_its_daemon_dies_before_the_commit(
    run: Path, orders: Orders
):
    with sidesave.Checkpointer(run, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        orders.give("hold", starting_at="os.chmod")  # in the midst of the commit
        first = ckpt.save(1, a_state(1))
        pid, _ = orders.obeyed()
        first.written.result(DEADLINE_S)
        second = ckpt.save(2, a_state(2, 9))  # in another arena: the first one has gone
        os.kill(pid, signal.SIGKILL)
        assert [handle.committed.result(DEADLINE_S).step for handle in (first, second)] == [1, 2]
    assert sidesave.verify(run / "step-00000001").ok
    shutil.rmtree(run / "step-00000001")
    check(run, 2, mib=9)


def test_overwriting_save_survives_its_daemon_and_so_does_what_it_replaces(
    run: Path, orders: Orders
):
    with sidesave.Checkpointer(run) as ckpt:
        ckpt.save(1, a_state(7)).committed.result(DEADLINE_S)
        # the old one has been moved aside, the new one is next
        orders.give("stop", starting_at="os.rename", after=1)
        handle = ckpt.save(1, a_state(1), overwrite=True)
        pid, operation = orders.obeyed()
        assert operation.startswith("os.rename")
        [info] = catalog_of(str(run)).all()
        assert info.sequence == 1, "readers see the old one until the new one is committed"
        os.kill(pid, signal.SIGKILL)
        handle.committed.result(DEADLINE_S)
    check(run, 1)
    assert entries(run) == ["step-00000001"]


# Told to go, stopped, dying again and again -------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_means_finish_what_is_there_and_a_successor_takes_over(
    run: Path, orders: Orders, number: signal.Signals
):
    with sidesave.Checkpointer(run) as ckpt:
        orders.give("hold", after=4)
        handles = [ckpt.save(1, a_state(1))]
        pid, _ = orders.obeyed()
        orders.give("report", starting_at="got SAVE", every_step=True)
        handles.append(ckpt.save(2, a_state(2)))
        orders.obeyed()  # it has got both
        with pidfd_of(pid) as pidfd:
            orders.give("report", starting_at="os.rename", keep=True)
            os.kill(pid, number)
            orders.release()
            for handle in handles:
                handle.committed.result(DEADLINE_S)
            assert [orders.obeyed()[0] for _ in handles] == [pid, pid], (
                "the one that was told to go finished both"
            )
            await_end(pidfd)
        commit(ckpt, 3)
        assert daemon(ckpt) != pid
    check(run, 1, 2, 3)


def test_idle_daemon_ends_by_a_signal_and_a_successor_takes_over(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        pid = daemon(ckpt)
        end(pid, signal.SIGTERM)
        commit(ckpt, 1)
        assert daemon(ckpt) != pid


def test_stopped_daemon_is_noticed_killed_and_replaced(
    run: Path, orders: Orders, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connection, "SILENCE_TIMEOUT_S", 3.0)
    with sidesave.Checkpointer(run) as ckpt:
        orders.give("stop", after=5)
        with pidfd_of(daemon(ckpt)) as pidfd:  # before it can be gone
            ckpt.save(1, a_state(1)).committed.result(DEADLINE_S)
            await_end(pidfd, 0)
        assert orders.was_obeyed()
    check(run, 1)
    assert entries(run) == ["step-00000001"]


def test_daemon_that_cannot_start_is_given_up_with_its_last_words(
    run: Path, orders: Orders, traces: Traces
):
    orders.give("exit", starting_at="", keep=True)
    with pytest.raises(DaemonStartError, match=rf"exit status 7.*{LAST_WORDS}"):
        sidesave.Checkpointer(run)
    assert orders.withdraw()
    traces.check()
    save_steps(run, 1)


@pytest.mark.slow
def test_daemon_that_dies_again_and_again_is_given_up_and_says_why(
    run: Path, orders: Orders, traces: Traces
):
    ckpt = sidesave.Checkpointer(run)
    commit(ckpt, 1)
    orders.give("exit", keep=True)
    handle = ckpt.save(2, a_state(2))
    for future in (handle.written, handle.committed):
        error = future.exception(DEADLINE_S)
        assert isinstance(error, DaemonDiedError)
        assert LAST_WORDS in str(error)
    error = failure(ckpt.save(3, a_state(3)))
    assert isinstance(error, DaemonDiedError)
    with contextlib.suppress(DaemonDiedError):
        ckpt.close()
    orders.withdraw()
    traces.check()
    check(run, 1)
    save_steps(run, 2)
    check(run, 1, 2)


def test_request_that_kills_every_daemon_is_given_up_alone(run: Path, orders: Orders):
    with sidesave.Checkpointer(run, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        commit(ckpt, 1)
        orders.give("exit", keep=True)
        error = failure(ckpt.save(2, a_state(2)))
        assert isinstance(error, DaemonDiedError)
        assert "died 6 times" in str(error)
        orders.withdraw()
        ckpt.wait()
        commit(ckpt, 3)
    check(run, 1, 3)


def test_daemons_that_die_idle_are_replaced_as_often_as_it_takes(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(restarts, "_MAX_IDLE_PAUSE_S", 0.1)
    with sidesave.Checkpointer(run) as ckpt:
        pid = None
        for _ in range(connection.MAX_DEATHS + 3):
            pid = next_daemon(ckpt, pid)
            end(pid)
        commit(ckpt, 1)
    check(run, 1)


def test_daemon_lets_go_of_staging_memory_that_was_replaced(run: Path):
    with sidesave.Checkpointer(run, staging=sidesave.StagingOptions(slots=1)) as ckpt:
        for step in range(1, 7):
            commit(ckpt, step, step % 3 * 4 + 1)
            mappings = [
                line for line in staging_memory(daemon(ckpt)) if not line.startswith("/proc")
            ]
            assert len({line.split()[4] for line in mappings}) == 1, "one slot, one arena"


# The trainer goes ---------------------------------------------------------------------------------


def test_trainer_killed_after_staging_the_daemon_commits_and_leaves_nothing(
    run: Path, orders: Orders, traces: Traces
):
    with Trainer(traces, "save_and_wait", run, 5, 3) as trainer:
        [pid] = trainer.expect("ready")
        orders.give("stop")
        trainer.go_on()
        trainer.expect("staged")
        with pidfd_of(int(pid)) as pidfd:
            assert orders.obeyed()[0] == int(pid)
            trainer.kill()
            assert entries(run) == [], "nothing had been written when the trainer died"
            os.kill(int(pid), signal.SIGCONT)
            await_end(pidfd)
    check(run, 5, mib=3)
    assert entries(run) == ["step-00000005"]
    traces.check()


def test_trainer_killed_while_it_stages_nothing_of_that_save_is_visible(
    run: Path, orders: Orders, traces: Traces
):
    with Trainer(traces, "hold_while_staging", run) as trainer:
        [pid] = trainer.expect("ready")
        orders.give("report", after=1)  # its directory has been made
        with pidfd_of(int(pid)) as pidfd:
            trainer.go_on()
            trainer.expect("copying")
            orders.obeyed()
            assert len(entries(run)) == 1, "its files have been made"
            trainer.kill()
            await_end(pidfd)
    assert entries(run) == []
    traces.check()
    with sidesave.Checkpointer(run) as ckpt:
        assert ckpt.latest_step() is None
        commit(ckpt, 5)
    check(run, 5)


def test_trainer_and_daemon_killed_the_next_start_cleans_up(
    run: Path, orders: Orders, traces: Traces
):
    save_steps(run, 1)
    pid = kill_with_a_save_staged(traces, run, orders, after=6)
    end(pid)
    assert len(entries(run)) == 2, "a leftover and the first checkpoint"
    check(run, 1)
    with sidesave.Checkpointer(run) as ckpt:
        assert ckpt.latest_step() == 1
        assert entries(run) == ["step-00000001"]
        commit(ckpt, 5)
    check(run, 1, 5)
    traces.check()


# Who may write ------------------------------------------------------------------------------------


def test_second_session_in_a_directory_is_refused_by_name_of_the_holder(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        with pytest.raises(DirectoryInUseError) as caught:
            sidesave.Checkpointer(run)
        for name in (str(os.getpid()), str(daemon(ckpt)), socket.gethostname(), str(run)):
            assert name in str(caught.value)
        assert caught.value.errno == errno.EBUSY
        commit(ckpt, 1)
    with sidesave.Checkpointer(run) as ckpt:
        assert ckpt.latest_step() == 1


def test_restart_waits_for_the_old_daemon_and_then_sees_its_checkpoint(
    run: Path, orders: Orders, traces: Traces
):
    pid = kill_with_a_save_staged(traces, run, orders, after=6)
    started: list[sidesave.Checkpointer] = []
    starting = threading.Thread(target=lambda: started.append(sidesave.Checkpointer(run)))
    # the new daemon has looked at the lease in vain, and asked
    orders.give("report", starting_at="open", after=12)
    starting.start()
    waiting, operation = orders.obeyed()
    assert waiting != pid
    assert operation.endswith(".sidesave.lease")
    assert started == []
    os.kill(pid, signal.SIGCONT)
    starting.join(DEADLINE_S)
    [ckpt] = started
    with ckpt:
        assert ckpt.latest_step() == 5
        check(run, 5)
        commit(ckpt, 6)
    check(run, 5, 6)
    assert entries(run) == ["step-00000005", "step-00000006"]
    traces.check()


def test_old_daemon_that_hangs_is_fenced_at_the_deadline(run: Path, orders: Orders, traces: Traces):
    pid = kill_with_a_save_staged(traces, run, orders, after=6)
    with (
        pidfd_of(pid) as pidfd,
        sidesave.Checkpointer(run, daemon=sidesave.DaemonOptions(takeover_timeout_s=1.0)) as ckpt,
    ):
        # it is stopped, so somebody has killed it; its lock goes a moment before it does
        await_end(pidfd)
        assert ckpt.latest_step() is None
        assert entries(run) == []
        commit(ckpt, 5)
    check(run, 5)
    traces.check()


# Storage ------------------------------------------------------------------------------------------


@pytest.fixture
def small(mount: Callable[..., Path], run: Path) -> Path:
    """A run directory on 24 MiB of tmpfs."""
    return mount("-t", "tmpfs", "-o", "size=24m", "none") / "run"


@pytest.mark.root
def test_full_disk_fails_that_save_and_the_next_one_works_once_there_is_space(
    small: Path, follow: bool
):
    with sidesave.Checkpointer(small) as ckpt:
        commit(ckpt, 1, 15)
        handle = ckpt.save(2, a_state(2, 15))
        if not follow:
            handle.staged.result(DEADLINE_S)
        for future in ("written", "committed"):
            error = failure(handle, future)
            assert isinstance(error, NoSpaceError)
            assert error.errno == errno.ENOSPC
            assert error.filename == str(small)
            assert re.search(r"step 2 needs [\d,]+ bytes, [\d,]+ are free", str(error))
        assert entries(small) == ["step-00000001"], "partial bytes are reclaimed"
        shutil.rmtree(small / "step-00000001")
        commit(ckpt, 3, 15)
    check(small, 3, mib=15)


@pytest.mark.root
def test_daemon_killed_on_a_full_disk_comes_back(small: Path):
    with sidesave.Checkpointer(small) as ckpt:
        commit(ckpt, 1)
        first = daemon(ckpt)
        with (
            (small.parent / "filler").open("wb", buffering=0) as file,
            contextlib.suppress(OSError),
        ):
            while file.write(b"x" * 65536) == 65536:
                pass
        os.kill(first, signal.SIGKILL)
        assert isinstance(failure(ckpt.save(2, a_state(2))), NoSpaceError)
        assert daemon(ckpt) != first
        (small.parent / "filler").unlink()
        commit(ckpt, 3)
    check(small, 1, 3)


@pytest.mark.root
def test_start_on_a_full_disk_is_refused_with_the_reason(small: Path):
    small.mkdir()
    with (small.parent / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096) == 4096:
            pass
    with pytest.raises(NoSpaceError) as caught:
        sidesave.Checkpointer(small)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.root
def test_directory_made_unwritable_fails_the_saves_until_it_is_writable_again(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)
        if subprocess.run(["chattr", "+i", run], capture_output=True).returncode:
            pytest.skip("the file system knows no immutable directories")
        try:
            error = failure(ckpt.save(2, a_state(2)))
        finally:
            subprocess.run(["chattr", "-i", run], check=True)
        assert isinstance(error, WriteError)
        assert error.errno in (errno.EPERM, errno.EACCES)
        assert str(error.filename).startswith(f"{run}/")
        ckpt.wait()
        commit(ckpt, 3)
    check(run, 1, 3)


@pytest.mark.root
def test_read_only_file_system_is_refused_at_the_start(mount: Callable[..., Path]):
    root = mount("-t", "tmpfs", "-o", "ro", "none")
    for directory in (root, root / "run"):
        with pytest.raises(WriteError) as caught:
            sidesave.Checkpointer(directory)
        assert caught.value.errno in (errno.EROFS, errno.EACCES)
        assert str(caught.value.filename) == str(directory)


@pytest.mark.root
def test_file_system_that_goes_read_only_under_way_is_a_typed_error(disk: Path):
    with sidesave.Checkpointer(disk) as ckpt:
        commit(ckpt, 1)
        device = Path(_device(disk)).name
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("test")
        error = failure(ckpt.save(2, a_state(2)))
        assert isinstance(error, WriteError)
        assert error.errno in (errno.EROFS, errno.EIO, errno.ESHUTDOWN)
        ckpt.wait()
    check(disk, 1)


@pytest.fixture
def disk(mount: Callable[..., Path], run: Path, tmp_path: Path) -> Path:
    """A run directory on an ext4 of its own that goes read-only at an error."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, capture_output=True)
    return mount("-o", "loop,errors=remount-ro", image) / "run"


def _device(folder: Path) -> str:
    done = subprocess.run(
        ["findmnt", "-n", "-o", "SOURCE", "-T", folder], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.root
@pytest.mark.slow
def test_storage_that_hangs_fails_all_that_wait_for_it_and_works_again_afterwards(disk: Path):
    with sidesave.Checkpointer(
        disk, daemon=sidesave.DaemonOptions(stall_timeout_s=10.0)
    ) as ckpt:  # a busy disk may take seconds
        commit(ckpt, 1)
        pid = daemon(ckpt)
        subprocess.run(["fsfreeze", "-f", disk.parent], check=True)
        try:
            handles = [ckpt.save(step, a_state(step)) for step in (2, 3)]
            for handle in handles:
                handle.staged.result(DEADLINE_S)
                assert isinstance(failure(handle), WriteStalledError)
            assert "no byte of step 2 has moved for 10 s" in str(failure(handles[0]))
            ckpt.wait(DEADLINE_S)
        finally:
            subprocess.run(["fsfreeze", "-u", disk.parent], check=True)
        commit(ckpt, 4)
        assert daemon(ckpt) == pid, "it was storage that hung, not the daemon"
    check(disk, 1, 4)
    assert entries(disk) == ["step-00000001", "step-00000004"]


@pytest.mark.skipif(
    not Path("/usr/lib/fiu/fiu_run_preload.so").exists(), reason="needs libfiu (Debian: fiu-utils)"
)
@pytest.mark.parametrize("point", ["posix/io/sync/fsync", "posix/io/rw/pwrite"])
@pytest.mark.parametrize("retries", [0, 2])
def test_error_of_the_medium_fails_that_save_at_most_and_not_the_next(
    run: Path, tmp_path: Path, point: str, retries: int
):
    preload = "/usr/lib/fiu/fiu_run_preload.so /usr/lib/fiu/fiu_posix_preload.so"
    faults = {"LD_PRELOAD": preload, "FIU_CTRL_FIFO": str(tmp_path / "fiu"), "FIU_ENABLE": ""}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in faults.items():
            patch.setenv(name, value)
        ckpt = sidesave.Checkpointer(run, failures=sidesave.FailureOptions(retries=retries))
    with ckpt:
        commit(ckpt, 1)
        command = f"enable name={point},onetime,failinfo={errno.EIO}\n"
        with pidfd_of(daemon(ckpt)):
            Path(f"{tmp_path / 'fiu'}-{daemon(ckpt)}.in").write_text(command)
            assert Path(f"{tmp_path / 'fiu'}-{daemon(ckpt)}.out").read_text().strip() == "0"
        handle = ckpt.save(2, a_state(2))
        if not retries:
            error = failure(handle)
            assert isinstance(error, WriteError)
            assert error.errno == errno.EIO
            assert str(error.filename).startswith(str(run))
            ckpt.wait()
            assert entries(run) == ["step-00000001"]
            handle = ckpt.save(2, a_state(2))
        handle.committed.result(DEADLINE_S)
    check(run, 1, 2)


def test_request_that_cannot_be_encoded_fails_alone(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        future: Future[dict[int, SidesaveError]] = Future()
        request = Delete(attempt=1, save_id=1 << 61, steps=(1 << 70,), sequence=0, retry=False)
        ckpt.session.saves.deletions.add(request, future)
        ckpt.session.connection.submit(request)
        assert isinstance(future.exception(DEADLINE_S), ProtocolError)
        commit(ckpt, 1)


def test_thread_of_the_daemon_that_dies_takes_the_daemon_along_and_a_successor_goes_on(
    run: Path, orders: Orders
):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)
        orders.give("break", starting_at="os.rename", keep=True)
        with pidfd_of(daemon(ckpt)) as pidfd:
            handle = ckpt.save(2, a_state(2))
            orders.obeyed()  # of the commit
            orders.obeyed()  # and of what removes the rest: nobody is left to catch that
            orders.withdraw()
            await_end(pidfd)
        # the first error was the save's, or a successor has finished it
        handle.committed.exception(DEADLINE_S)
        commit(ckpt, 3)
        with contextlib.suppress(sidesave.SidesaveError):
            ckpt.wait()


def test_run_directory_deleted_under_way_is_a_typed_error(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)
        with stopped(daemon(ckpt)):  # it may still have a line to write down there
            shutil.rmtree(run)
        error = failure(ckpt.save(2, a_state(2)))
        assert isinstance(error, WriteError)
        assert error.errno in (errno.ENOENT, errno.ESTALE)
        assert str(error.filename).startswith(str(run))
        ckpt.wait()
    assert not run.exists(), "nobody makes it again behind the user's back"


def _put_away(run: Path) -> None:
    shutil.rmtree(run)
    run.mkdir()


def _rename(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))


def _replace(run: Path) -> None:
    _rename(run)
    run.mkdir()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shutil.rmtree, "was removed, and its path leads to nothing"),
        (_put_away, "was removed, and its path leads to another directory"),
        (_rename, "was moved to .*/elsewhere, and its path leads to nothing"),
        (_replace, "was moved to .*/elsewhere, and its path leads to another directory"),
    ],
    ids=["removed", "made again", "renamed", "replaced"],
)
@pytest.mark.parametrize("moment", ["before the save", "before its commit"])
def test_run_directory_that_is_another_one_is_noticed_before_a_commit(
    run: Path, orders: Orders, change: Callable[[Path], None], said: str, moment: str
):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)
        if moment == "before the save":
            with stopped(daemon(ckpt)):
                change(run)
            handle = ckpt.save(2, a_state(2))
        else:
            # it is opened to readers: the next is its name
            orders.give("stop", starting_at="os.chmod")
            handle = ckpt.save(2, a_state(2))
            pid, _ = orders.obeyed()
            change(run)
            os.kill(pid, signal.SIGCONT)
        error = failure(handle)
        assert isinstance(error, WriteError)
        if moment == "before the save" or change in (_rename, _replace):
            assert re.search(said, str(error))
        assert not run.exists() or entries(run) == []
    if (run.parent / "elsewhere").exists():
        check(run.parent / "elsewhere", 1)
        assert entries(run.parent / "elsewhere") == ["step-00000001"]


def test_link_to_the_run_directory_that_is_re_pointed_is_noticed_before_a_commit(run: Path):
    for name in ("one", "other"):
        run.with_name(name).mkdir()
    run.symlink_to("one")
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)
        run.unlink()
        run.symlink_to("other")
        with pytest.raises(
            WriteError, match=r"was moved to .*/one, and its path leads to another directory"
        ):
            ckpt.save(2, a_state(2), blocking=True)
        assert list(run.iterdir()) == []
        run.unlink()
        run.symlink_to("one")
        commit(ckpt, 3)
    check(run, 1, 3)


def test_daemon_that_follows_another_does_not_go_on_in_the_directory_of_another_run(run: Path):
    other = run.with_name("other")
    save_steps(other, 1)
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)
        run.rename(run.with_name("kept"))
        other.rename(run)
        end(daemon(ckpt))
        error = failure(ckpt.save(2, a_state(2)))
        assert isinstance(error, DaemonDiedError)
        assert (
            "has used this directory since, or it is not the directory that the run began in"
            in str(error)
        )
        assert entries(run) == ["step-00000001"]
        run.rename(other)
        run.with_name("kept").rename(run)
        commit(ckpt, 3)
    check(run, 1, 3)


@contextlib.contextmanager
def slow_zmq_threads() -> Generator[None]:
    """Let ZeroMQ's own threads of this process run only now and then, beside one that is always
    busy.
    """
    cpu = min(os.sched_getaffinity(0))
    threads: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # another thread has ended
            if (task / "comm").read_text().startswith("ZMQbg"):
                threads.append(int(task.name))
    assert threads
    with subprocess.Popen(
        [sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{cpu}])\nwhile True: pass"]
    ) as busy:
        try:
            for thread in threads:
                os.sched_setaffinity(thread, [cpu])
                os.setpriority(os.PRIO_PROCESS, thread, 19)
            yield
        finally:
            busy.kill()


def test_daemon_that_follows_another_does_not_begin_in_a_directory_made_meanwhile(
    run: Path, caplog: pytest.LogCaptureFixture
):
    """Why it refuses is heard, though its end is seen before its last message."""
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)
        run.rename(run.with_name("kept"))
        run.mkdir()
        with slow_zmq_threads():
            end(daemon(ckpt))
            error = failure(ckpt.save(2, a_state(2)))
        assert isinstance(error, DaemonDiedError)
        assert "not the directory that the run began in" in str(error)
        assert list(run.iterdir()) == []
        told = [
            record.getMessage()
            for record in caplog.records
            if "starting another" in record.getMessage()
        ]
        assert "ended by signal 9" in told[0]
        assert "not the directory that the run began in" in told[1]
        run.rmdir()
        run.with_name("kept").rename(run)
        commit(ckpt, 3)
    check(run, 1, 3)


def test_run_directory_deleted_during_a_save_is_a_typed_error(run: Path, orders: Orders):
    with sidesave.Checkpointer(run) as ckpt:
        orders.give("stop", starting_at="os.link")
        handle = ckpt.save(2, a_state(2))
        pid, _ = orders.obeyed()
        shutil.rmtree(run)
        os.kill(pid, signal.SIGCONT)
        error = failure(handle)
        assert isinstance(error, WriteError)
        assert error.errno in (errno.ENOENT, errno.ESTALE)
        ckpt.wait()
