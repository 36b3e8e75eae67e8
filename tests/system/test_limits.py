"""Real limits: processes and file systems are filled, limited, frozen and broken."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import forks
import psutil
import pytest
from trainers import (
    DEADLINE_S,
    ROOT,
    a_state,
    await_end,
    check,
    commit,
    daemon,
    pidfd_of,
    save_steps,
    wait_until,
)

import sidesave
from sidesave.client.daemon_link import connection
from sidesave.errors import DaemonStartError, NoSpaceError, WriteError, WriteStalledError

MIB = 1 << 20
Mount = Callable[..., Path]


# Limits of a process ------------------------------------------------------------------------------


LIMITED = """
import os, resource, sys
import torch
import sidesave
kind, soft, hard, run = sys.argv[1:]
resource.setrlimit(getattr(resource, kind), (int(soft), int(hard)))
"""
MANY_TENSORS = """
state = {"model": {f"layers.{n}.weight": torch.full((3, 5), float(n)) for n in range(1300)}}
"""
MANY_ITEMS = """
state = {f"item{n:03}": {"weight": torch.full((3, 5), float(n))} for n in range(300)}
"""
SAVE_AND_LOAD = """
with sidesave.Checkpointer(run) as ckpt:
    for step in (1, 2):
        ckpt.save(step, state).committed.result(300)
    found = ckpt.load()
names = lambda state: {(item, name) for item in state for name in state[item]}
assert names(found) == names(state)
assert all(torch.equal(found[item][name], state[item][name]) for item, name in names(state))
assert sidesave.verify(run + "/step-00000002").ok
print("saved")
"""


def limited(
    run: Path, kind: str, soft: int, *parts: str, hard: int | None = None, said: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a trainer that has set itself a limit."""
    code = LIMITED + "".join(parts)
    limits = [str(soft), str(soft if hard is None else hard)]
    arguments = [sys.executable, "-W", "error", "-c", code, kind, *limits, str(run)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return forks.run(arguments, said, env=environment)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("state", "soft", "hard"),
    [(MANY_TENSORS, 1024, 1024), (MANY_ITEMS, 256, 4096), (MANY_ITEMS, 256, 256)],
    ids=["1300 tensors", "300 items, and more could be had", "300 items"],
)
def test_few_file_descriptors_are_enough_for_many_tensors(
    run: Path, state: str, soft: int, hard: int
):
    """Others open one for each tensor."""
    done = limited(run, "RLIMIT_NOFILE", soft, state, SAVE_AND_LOAD, hard=hard)
    assert done.stdout == "saved\n", done.stderr[-3000:]


LARGE_FILE = """
with sidesave.Checkpointer(run, failures=sidesave.FailureOptions(retries=0)) as ckpt:
    ckpt.save(1, {"w": torch.arange(1000)}).committed.result(300)
    resource.prlimit(ckpt.daemon_pid, resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    error = ckpt.save(2, {"w": torch.rand(1 << 20)}).committed.exception(300)
    print(type(error).__name__, error.errno, error.filename, error)
    try:
        ckpt.wait()
    except OSError:
        pass
    ckpt.save(3, {"w": torch.arange(1000)}).committed.result(300)
    print(ckpt.steps())
"""


def test_file_larger_than_the_process_may_write_is_a_typed_error(run: Path):
    done = limited(run, "RLIMIT_FSIZE", -1, LARGE_FILE)
    first, last = (
        done.stdout.splitlines() if done.stdout.count("\n") == 2 else ("", done.stderr[-3000:])
    )
    assert first.startswith(f"WriteError {errno.EFBIG} {run}/.step-00000002."), first + last
    assert "File too large" in first
    assert last == "[1, 3]"


def test_staging_memory_larger_than_a_file_may_be_is_refused_with_a_typed_error(run: Path):
    """Staging memory is a file to the kernel."""
    code = """
with sidesave.Checkpointer(run) as ckpt:
    try:
        ckpt.save(1, {"w": torch.rand(1 << 20)})
    except sidesave.SidesaveError as error:
        print(type(error).__name__, "--", error)
    ckpt.save(2, {"w": torch.arange(1000)}).committed.result(300)
    print(ckpt.steps())
"""
    done = limited(run, "RLIMIT_FSIZE", 1 << 20, code)
    assert re.fullmatch(r"HostMemoryError -- .*File too large.*\n\[2\]\n", done.stdout), (
        done.stdout + done.stderr[-3000:]
    )


def test_no_memory_may_be_locked_and_saves_work(run: Path):
    done = limited(run, "RLIMIT_MEMLOCK", 0, MANY_TENSORS, SAVE_AND_LOAD)
    assert done.stdout == "saved\n", done.stderr[-3000:]


@pytest.mark.root
def test_small_dev_shm_is_no_limit_to_staging_memory(run: Path):
    """Containers often have 64 MB of it."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made")
    code = """
import os
state = {"model": {"w": torch.rand(50 << 20)}}
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
""".replace("rand(50", "rand(30")
    arguments = [
        sys.executable,
        "-W",
        "error",
        "-c",
        LIMITED + code + SAVE_AND_LOAD,
        "RLIMIT_CORE",
        "0",
        "0",
        str(run),
    ]
    mounted = [
        "sh",
        "-c",
        'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"',
        "sh",
        *arguments,
    ]
    done = subprocess.run(
        ["unshare", "--mount", *mounted],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "saved\n", done.stderr[-3000:]


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of 1 GiB, version 1 or 2."""
    unified, limit = Path("/sys/fs/cgroup"), "memory.limit_in_bytes"
    root = unified / "memory"
    if not (root / limit).exists():
        root, limit = unified, "memory.max"
        with contextlib.suppress(OSError):
            (unified / "cgroup.subtree_control").write_text("+memory")
    group = root / f"sidesave-faults-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    try:
        try:
            (group / limit).write_text(str(1 << 30))
        except OSError as error:
            pytest.skip(f"no memory cgroup can be limited: {error}")
        yield group
    finally:
        deadline = time.monotonic() + DEADLINE_S
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        group.rmdir()


@pytest.mark.root
def test_save_beyond_the_cgroup_is_refused_and_nobody_is_killed(run: Path, cgroup: Path):
    code = """
with open(os.environ["CGROUP"], "w") as file:
    file.write(str(os.getpid()))
with sidesave.Checkpointer(run) as ckpt:
    pid = ckpt.daemon_pid
    ckpt.save(1, {"w": torch.arange(1000)}).committed.result(300)
    large = torch.zeros(120 << 20)  # 480 MiB, and once more in staging memory
    try:
        ckpt.save(2, {"w": large})
    except sidesave.errors.HostMemoryError as error:
        print(error)
    del large
    ckpt.save(3, {"w": torch.arange(1 << 20)}).committed.result(300)
    print(ckpt.steps(), pid == ckpt.daemon_pid)
"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CGROUP", str(cgroup / "cgroup.procs"))
        done = limited(run, "RLIMIT_CORE", 0, code)
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = done.stdout.splitlines()
    assert re.search(
        r"needs 480 MiB of host memory .* but the memory cgroup has [\d,]+ MiB left", first
    )
    assert last == "[1, 3] True"
    events = next(
        path for name in ("memory.events", "memory.oom_control") if (path := cgroup / name).exists()
    )
    assert re.search(r"^oom_kill 0$", events.read_text(), re.MULTILINE)


NO_DESCRIPTORS = """
import signal
import sidesave.client.checkpointer, sidesave.client.loading.load
run, what = run.split(":")
state, steps = {"w": torch.arange(1000)}, iter(range(1, 1000))

def save(ckpt, size=10):
    ckpt.save(next(steps), {"w": torch.zeros(size)}).committed.result(300)

def respawn(ckpt):
    os.kill(ckpt.daemon_pid, signal.SIGKILL)
    save(ckpt)

for spare in map(int, sys.stdin.read().split()):
    descriptors, ckpt = [], None
    if what != "start":
        ckpt = sidesave.Checkpointer(run)
        save(ckpt)
        ckpt.load()  # what is imported late is here by now
    try:
        while True:
            descriptors.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for _ in range(spare):
        os.close(descriptors.pop())
    try:
        match what:
            case "start":
                ckpt = sidesave.Checkpointer(run)
            case "save":
                save(ckpt, 1 << 20)
            case "load":
                ckpt.load()
            case "respawn":
                respawn(ckpt)
        outcome = "done"
    except sidesave.SidesaveError as error:
        outcome = type(error).__name__
    for fd in descriptors:
        os.close(fd)
    if ckpt is None or what == "respawn":  # given up, as it had died too often
        try:
            if ckpt is not None:
                ckpt.close()
        except sidesave.SidesaveError:
            pass
        ckpt = sidesave.Checkpointer(run)
    save(ckpt)
    ckpt.close()
    print(outcome)
"""


@pytest.mark.drawn
@pytest.mark.parametrize(
    "what", ["start", "save", "load", pytest.param("respawn", marks=pytest.mark.slow)]
)
def test_trainer_that_has_no_file_descriptor_left_gets_an_error_and_lives_on(run: Path, what: str):
    """However many are left: libraries below are known to abort the process."""
    spare = [0, 1, 2, 4, 6, 8, 10, 12, 14, 40] if what == "start" else [0, 1, 2, 40]
    done = limited(
        Path(f"{run}:{what}"), "RLIMIT_NOFILE", 200, NO_DESCRIPTORS, said=" ".join(map(str, spare))
    )
    assert done.returncode == 0, (done.stdout, done.stderr[-3000:])
    outcomes = done.stdout.split()
    assert len(outcomes) == len(spare)
    assert outcomes[-1] == "done"
    assert outcomes[0] != "done"


@pytest.mark.root
def test_full_directory_for_temporary_files_is_passed_over(
    run: Path, mount: Mount, monkeypatch: pytest.MonkeyPatch
):
    """Where the way to the daemon's socket is made."""
    full = mount("-t", "tmpfs", "-o", "nr_inodes=4", "none")
    with contextlib.suppress(OSError):
        for number in range(9):
            (full / f"{number}").touch()
    monkeypatch.setenv("TMPDIR", str(full))
    save_steps(run, 1)
    check(run, 1)


# Real file systems --------------------------------------------------------------------------------


def failure(ckpt: sidesave.Checkpointer, step: int, mib: float = 1) -> WriteError:
    error = ckpt.save(step, a_state(step, mib)).committed.exception(DEADLINE_S)
    assert isinstance(error, WriteError), repr(error)
    ckpt.wait()
    return error


def image(folder: Path, mib: int, *command: str) -> Path:
    """A file that holds a file system."""
    path = folder / "image"
    with path.open("wb") as file:
        file.truncate(mib * MIB)
    make = shutil.which(command[0]) or shutil.which(command[0], path="/usr/sbin:/sbin")
    if make is None:
        pytest.skip(f"needs {command[0]}")
    subprocess.run([make, *command[1:], path], check=True, capture_output=True)
    return path


@pytest.fixture
def ext4(mount: Mount, run: Path, tmp_path: Path) -> Path:
    """A run directory on an ext4 of 64 MiB of its own."""
    del run  # for its environment alone
    return mount("-o", "loop", image(tmp_path, 64, "mkfs.ext4", "-q", "-F")) / "run"


def fill(folder: Path, leave: int) -> Path:
    """Take what a file system has, but for ``leave`` bytes."""
    filler = folder / "filler"
    with filler.open("wb") as file:
        facts = os.statvfs(folder)
        os.posix_fallocate(file.fileno(), 0, facts.f_bavail * facts.f_frsize - leave)
    return filler


@pytest.mark.drawn
@pytest.mark.root
@pytest.mark.parametrize("leave_nbytes", [0, 64 << 10, MIB, 3 * MIB])
def test_full_ext4_fails_the_saves_until_there_is_room(ext4: Path, leave_nbytes: int):
    with sidesave.Checkpointer(ext4) as ckpt:
        commit(ckpt, 1)
        filler = fill(ext4.parent, leave_nbytes)
        for step in (2, 3):
            error = failure(ckpt, step, 4)
            assert isinstance(error, NoSpaceError)
            assert error.errno == errno.ENOSPC
            assert str(error.filename).startswith(str(ext4))
            assert re.search(r"[\d,]+ bytes", str(error)), error
            assert re.search(r"are free", str(error)), error
        assert list(ext4.glob(".step-*")) == []
        filler.unlink()
        commit(ckpt, 4)
    check(ext4, 1, 4)


@pytest.mark.root
def test_file_system_without_room_for_one_more_file_says_so(
    mount: Mount, run: Path, tmp_path: Path
):
    """There are bytes, but no inodes."""
    run = mount("-o", "loop", image(tmp_path, 64, "mkfs.ext4", "-q", "-F", "-N", "64")) / "run"
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)
        spare: list[Path] = []
        with contextlib.suppress(OSError):
            while True:
                spare.append(run.parent / f"file-{len(spare)}")
                spare[-1].touch()
        error = failure(ckpt, 2)
        assert isinstance(error, NoSpaceError)
        assert re.search(r"[\d,]+ bytes and 0 files are free", str(error)), error
        for path in spare:
            path.unlink(missing_ok=True)
        commit(ckpt, 3)
    check(run, 1, 3)


@pytest.mark.root
def test_quota_fails_the_saves_until_there_is_room(mount: Mount, run: Path, tmp_path: Path):
    """The quota of a btrfs subvolume, whose file system has room."""
    disk = mount("-o", "loop", image(tmp_path, 256, "mkfs.btrfs", "-q"))
    run = disk / "run"
    commands = ["quota enable", "subvolume create", "qgroup limit 24M"]
    for command, folder in zip(commands, (disk, run, run), strict=True):
        done = subprocess.run(["btrfs", *command.split(), folder], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no quota can be set: {done.stderr.strip()}")
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1, 10)
        error = failure(ckpt, 2, 20)
        assert isinstance(error, NoSpaceError)
        assert error.errno == errno.EDQUOT
        assert str(error.filename).startswith(str(run))
        assert re.search(
            r"[\d,]+ bytes are needed, [\d,]+ are free: Disk quota exceeded", str(error)
        ), error
        commit(ckpt, 3)
        assert list(run.glob(".step-*")) == []
    assert sorted(path.name for path in run.glob("step-*")) == ["step-00000001", "step-00000003"]
    assert sidesave.verify(run / "step-00000001").ok
    assert sidesave.verify(run / "step-00000003").ok


def _shut_down(folder: Path) -> None:
    """Have an ext4 fail everything from here on, as it does when its disk is gone; what is in its
    journal is kept.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        # EXT4_IOC_SHUTDOWN, flushing the log first
        fcntl.ioctl(fd, 0x8004587D, struct.pack("I", 1))
    except OSError as error:
        pytest.skip(f"this ext4 cannot be shut down: {error}")
    finally:
        os.close(fd)


@pytest.mark.root
def test_disk_that_is_gone_fails_all_saves_and_leaves_what_was_committed(
    mount: Mount, run: Path, tmp_path: Path
):
    disk = image(tmp_path, 64, "mkfs.ext4", "-q", "-F")
    run = mount("-o", "loop", disk) / "run"
    with sidesave.Checkpointer(run, failures=sidesave.FailureOptions(retries=0)) as ckpt:
        commit(ckpt, 1)
        _shut_down(run)
        for step in (2, 3):
            error = failure(ckpt, step)
            assert error.errno in (errno.EIO, errno.ESHUTDOWN, errno.EROFS)
            assert str(error.filename).startswith(str(run))
    with pytest.raises((WriteError, DaemonStartError)):
        sidesave.Checkpointer(run)
    subprocess.run(["umount", run.parent], check=True)
    subprocess.run(["mount", "-o", "loop", disk, run.parent], check=True)
    with sidesave.Checkpointer(run) as ckpt:
        assert ckpt.latest_step() == 1
        commit(ckpt, 2)
    check(run, 1, 2)


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Have every write to a file system hang."""
    if shutil.which("fsfreeze") is None:
        pytest.skip("needs fsfreeze")
    subprocess.run(["fsfreeze", "-f", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", folder], check=True)


@pytest.mark.root
def test_overlay_that_cannot_rename_a_directory_of_its_image_says_so(
    mount: Callable[..., Path], tmp_path: Path
):
    for name in ("image", "upper", "work"):
        (tmp_path / name).mkdir()
    save_steps(tmp_path / "image/run", 1, 2)
    layers = (
        f"lowerdir={tmp_path / 'image'},upperdir={tmp_path / 'upper'},workdir={tmp_path / 'work'}"
    )
    run = mount("-t", "overlay", "-o", f"{layers},redirect_dir=off", "none") / "run"
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 3)
        with pytest.raises(
            WriteError, match=r"renameat commits a checkpoint.*overlay.*volume"
        ) as caught:
            ckpt.delete(1).result(DEADLINE_S)
        assert caught.value.errno == errno.EXDEV
        with pytest.raises(WriteError, match=r"overlay"):
            ckpt.save(2, a_state(2), overwrite=True).committed.result(DEADLINE_S)
        commit(ckpt, 4)
    check(run, 1, 2, 3, 4)


@pytest.mark.root
def test_daemon_killed_while_storage_hangs_has_a_successor_once_it_does_no_more(ext4: Path):
    with sidesave.Checkpointer(ext4, daemon=sidesave.DaemonOptions(stall_timeout_s=600)) as ckpt:
        commit(ckpt, 1)
        pid = daemon(ckpt)
        with pidfd_of(pid) as pidfd:
            with frozen(ext4.parent):
                handle = ckpt.save(2, a_state(2))
                handle.staged.result(DEADLINE_S)
                _await_stuck(pid)
                os.kill(pid, signal.SIGKILL)
            await_end(pidfd)
        handle.committed.result(DEADLINE_S)
        assert ckpt.daemon_pid != pid
        commit(ckpt, 3)
    check(ext4, 1, 2, 3)
    assert list(ext4.glob(".step-*")) == []


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("patience_s", [10.0, 600.0])  # a busy disk may take seconds
def test_daemon_that_is_stuck_for_longer_than_it_is_waited_for_ends_nothing(
    ext4: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, patience_s: float
):
    monkeypatch.setattr(connection, "_KILL_TIMEOUT_S", 0.1)
    with sidesave.Checkpointer(
        ext4, daemon=sidesave.DaemonOptions(stall_timeout_s=patience_s)
    ) as ckpt:
        commit(ckpt, 1)
        pid = daemon(ckpt)
        with pidfd_of(pid) as pidfd:
            with frozen(ext4.parent):
                handle = ckpt.save(2, a_state(2))
                # else a later save raises it
                handle.committed.add_done_callback(lambda done: done.exception())
                handle.staged.result(DEADLINE_S)
                _await_stuck(pid)
                os.kill(pid, signal.SIGKILL)
                wait_until(
                    lambda: f"daemon {pid} cannot be killed" in caplog.text,
                    "it is told",
                    DEADLINE_S,
                )
                if patience_s == 10.0:
                    later = ckpt.save(3, a_state(3), overwrite=True)
                    with pytest.raises(
                        WriteStalledError, match=r"stuck in the kernel|no byte of step 2 has moved"
                    ):
                        # the daemon may have noticed before it was killed
                        handle.committed.result(DEADLINE_S)
                    with pytest.raises(WriteStalledError, match="stuck in the kernel"):
                        later.committed.result(DEADLINE_S)
            await_end(pidfd)
        if patience_s == 600.0:
            handle.committed.result(DEADLINE_S)
        commit(ckpt, 4)
        assert ckpt.daemon_pid != pid
    check(ext4, *([1, 4] if patience_s == 10.0 else [1, 2, 4]))


@pytest.mark.root
def test_start_while_storage_hangs_goes_on_when_it_does_no_more(ext4: Path):
    """It is the daemon that is stuck, which can be left alone, and not the trainer."""
    save_steps(ext4, 1)
    started: list[sidesave.Checkpointer] = []
    starting = threading.Thread(target=lambda: started.append(sidesave.Checkpointer(ext4)))
    with frozen(ext4.parent):
        starting.start()
        try:
            _await_stuck(None)
            assert started == []
        except BaseException:  # a frozen file system would hold up all that comes
            subprocess.run(["fsfreeze", "-u", ext4.parent], check=True)
            starting.join(DEADLINE_S)
            [ckpt] = started
            ckpt.close()
            subprocess.run(["fsfreeze", "-f", ext4.parent], check=True)
            raise
    starting.join(DEADLINE_S)
    [ckpt] = started
    with ckpt:
        commit(ckpt, 2)
    check(ext4, 1, 2)


def _await_stuck(pid: int | None) -> None:
    """Block until a thread of this daemon, or of any that this process has started, is stuck in the
    kernel.
    """
    deadline = time.monotonic() + DEADLINE_S
    looks: dict[Path, int] = {}
    # else it may only wait for a page of a program to be read
    while max(looks.values(), default=0) < 20:
        stuck: list[Path] = []
        for writer in (
            [pid] if pid is not None else [child.pid for child in psutil.Process().children()]
        ):
            with contextlib.suppress(OSError):
                tasks = Path(f"/proc/{writer}/task").iterdir()
                stuck += [
                    task
                    for task in tasks
                    if (task / "stat").read_text().rpartition(")")[2].split()[0] == "D"
                ]
        looks = {task: looks.get(task, 0) + 1 for task in stuck}
        assert time.monotonic() < deadline, "no daemon is stuck"
        time.sleep(0.005)
