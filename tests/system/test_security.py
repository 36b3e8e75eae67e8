"""Who may do what: another user sees nothing and stalls nobody, and no name, link or environment
leads code astray.
"""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from loads import flip_bit
from trainers import (
    DEADLINE_S,
    Orders,
    Traces,
    a_state,
    check,
    daemon,
    pidfd_of,
    save_steps,
    staging_memory,
)
from zmq.utils.monitor import recv_monitor_message

import sidesave
from sidesave.client.daemon_link import connection, socket_dir
from sidesave.client.daemon_link.process import DaemonProcess
from sidesave.errors import DaemonStartError, IntegrityError, SidesaveError
from sidesave.stager.memory.arena import Arena
from sidesave.writer_daemon.format.names import LEASE_DIRECTORY
from sidesave.writer_daemon.lease.record import LeaseRecord

STRANGER = 65534


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that everybody may enter and read, which pytest's own are not."""
    place = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


# It gives up its rights when it has imported what it needs: this Python may lie where nobody else
# can read it.
BECOME_A_STRANGER = f"""
import ctypes, fcntl, json, os, socket, sys
os.setgroups([])
os.setresgid({STRANGER}, {STRANGER}, {STRANGER})
os.setresuid({STRANGER}, {STRANGER}, {STRANGER})
"""


@contextlib.contextmanager
def stranger(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process of another user that runs ``code``."""
    command = [sys.executable, "-I", "-c", BECOME_A_STRANGER + code, *map(str, arguments)]
    process = subprocess.Popen(
        command, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ask_stranger(code: str, *arguments: object) -> Any:
    """What such a process prints, as JSON."""
    with stranger(code, *arguments) as process:
        output, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
        return json.loads(output)


OPENED = """
opened = []
def attempt(name, act):
    try:
        act()
    except OSError:
        return
    opened.append(name)
"""


# Another user -------------------------------------------------------------------------------------


@pytest.mark.root
def test_another_user_reads_no_memory_of_trainer_or_daemon(place: Path):
    code = (
        OPENED
        + """
libc = ctypes.CDLL(None, use_errno=True)
def get_descriptor(pidfd, number):
    if libc.syscall(438, pidfd, number, 0) < 0:  # pidfd_getfd
        raise OSError
for pid in map(int, sys.argv[1:]):
    for name in ("fd", "map_files", "fdinfo"):
        attempt(f"/proc/{pid}/{name}", lambda: os.listdir(f"/proc/{pid}/{name}"))
    for name in ("mem", "environ", "maps", "auxv"):
        attempt(f"/proc/{pid}/{name}", lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
    pidfd = os.pidfd_open(pid)
    for number in range(64):
        attempt(f"/proc/{pid}/fd/{number}", lambda: os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY))
        attempt(f"descriptor {number} of {pid}", lambda: get_descriptor(pidfd, number))
    attempt(f"signal {pid}", lambda: os.kill(pid, 0))
    attempt(f"trace {pid}", lambda: libc.ptrace(0x4206, pid, 0, 0) and (_ for _ in ()).throw(OSError()))
print(json.dumps(opened))
"""  # noqa: E501
    )
    with sidesave.Checkpointer(place / "run") as checkpointer:
        checkpointer.save(1, a_state(1), blocking=True)
        assert staging_memory(), "there is something to be seen"
        assert ask_stranger(code, os.getpid(), checkpointer.daemon_pid) == []


@pytest.mark.root
def test_another_user_cannot_reach_the_socket(place: Path, monkeypatch: pytest.MonkeyPatch):
    place.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(place))
    directory = Path(socket_dir.socket_directory())
    assert directory.parent == place
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(directory / "1"))
        listening.listen()
        code = (
            OPENED
            + """
path = sys.argv[1]
attempt("list", lambda: os.listdir(path))
attempt("connect", lambda: socket.socket(socket.AF_UNIX).connect(path + "/1"))
attempt("add", lambda: open(path + "/2", "w"))
attempt("rename", lambda: os.rename(path, path + "-mine"))
attempt("remove", lambda: os.unlink(path + "/1"))
print(json.dumps(opened))
"""
        )
        assert ask_stranger(code, directory) == []


READ = (
    OPENED
    + """
for folder, _, files in os.walk(sys.argv[1]):
    for name in files:
        path = os.path.join(folder, name)
        attempt(os.path.relpath(path, sys.argv[1]), lambda: open(path, "rb").read(1))
print(json.dumps(opened))
"""
)


@pytest.mark.root
def test_another_user_reads_a_checkpoint_once_it_is_committed_and_not_before(
    place: Path, orders: Orders
):
    run = place / "run"
    umask = os.umask(0o022)
    try:
        with sidesave.Checkpointer(run) as checkpointer:
            orders.give("hold", starting_at="os.link", after=2)
            handle = checkpointer.save(1, a_state(1))
            try:
                orders.obeyed()
                partial = [
                    stat.S_IMODE(path.stat().st_mode) for path in run.glob(".step-*.partial")
                ]
                content = list(run.glob(".step-*.partial/*"))
                read = [name for name in ask_stranger(READ, run) if "step" in name]
            finally:
                orders.release()
            assert partial == [0o700]
            assert content, "there is something to be read"
            assert read == []
            path = handle.committed.result(DEADLINE_S).path
            expected = {f"{Path(path).name}/{file.name}" for file in Path(path).iterdir()}
            assert {name for name in ask_stranger(READ, run) if "step" in name} == expected
    finally:
        os.umask(umask)


@pytest.mark.root
def test_a_umask_that_keeps_others_out_keeps_them_out(place: Path):
    umask = os.umask(0o077)
    try:
        save_steps(place / "run", 1)
        assert ask_stranger(READ, place) == []
        (place / "run").chmod(0o755)
        assert ask_stranger(READ, place) == []
    finally:
        os.umask(umask)


LOCK = """
held = []
for folder, _, files in os.walk(sys.argv[1]):
    for path in [folder] + [os.path.join(folder, name) for name in files]:
        try:
            held.append(os.open(path, os.O_RDONLY))
            fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pass
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.root
@pytest.mark.parametrize("end", ["closed", "power lost"])
def test_another_user_who_may_read_the_directory_cannot_keep_a_run_from_starting(
    place: Path, end: str
):
    """A lock on a file takes no more than the right to read it."""
    run = place / "run"
    umask = os.umask(0o022)
    try:
        holder = sidesave.Checkpointer(run)
        holder.save(1, a_state(1), blocking=True)
        holder.close()
        if end == "power lost":
            leave_dead_lease(run)
        with stranger(LOCK, run) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            save_steps(run, 2, daemon=sidesave.DaemonOptions(takeover_timeout_s=1.0))
        check(run, 1, 2)
    finally:
        os.umask(umask)


def newest_lease(run: Path) -> Path:
    return max(
        (path for path in (run / LEASE_DIRECTORY).iterdir() if path.name.isdigit()),
        key=lambda path: int(path.name),
    )


def write_lease(run: Path, **changes: Any) -> Path:
    """Change the record of the newest lease."""
    path = newest_lease(run)
    body = json.loads(path.read_bytes()) | changes
    path.write_bytes(json.dumps(body).encode().ljust(path.stat().st_size))
    assert LeaseRecord.from_bytes(path.read_bytes()) is not None
    return path


def leave_dead_lease(run: Path) -> None:
    """Make the lease look as a daemon leaves it that ends with its machine: not released, of an
    earlier boot.
    """
    write_lease(run, released=False, boot_id="of an earlier boot")


@pytest.mark.root
def test_another_user_in_a_directory_without_rights_cannot_write_a_lease(place: Path):
    with sidesave.Checkpointer(place / "run"):
        code = (
            OPENED
            + """
path = sys.argv[1]
for folder, folders, files in os.walk(path):
    attempt(f"add to {folder}", lambda: open(folder + "/99", "w"))
    for name in folders + files:
        attempt(f"write {name}", lambda: open(os.path.join(folder, name), "r+b"))
        attempt(f"remove {name}", lambda: os.unlink(os.path.join(folder, name)))
        attempt(f"rename {name}", lambda: os.rename(os.path.join(folder, name), os.path.join(folder, "x")))
print(json.dumps(opened))
"""  # noqa: E501
        )
        assert ask_stranger(code, place / "run") == []


def test_a_lease_that_names_another_process_does_not_get_it_killed(tmp_path: Path):
    """Who may write to the directory may not choose whom our daemon kills."""
    run = tmp_path / "run"
    sidesave.Checkpointer(run).close()
    with subprocess.Popen(["sleep", "600"]) as victim, pidfd_of(victim.pid):
        try:
            path = write_lease(
                run,
                released=False,
                trainer_gone=True,
                pid=victim.pid,
                started=started(victim.pid),
                session="f" * 16,
            )
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # so that it counts as held
                with contextlib.suppress(SidesaveError):
                    sidesave.Checkpointer(
                        run, daemon=sidesave.DaemonOptions(takeover_timeout_s=0.2)
                    ).close()
            assert victim.poll() is None
        finally:
            victim.kill()


def started(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


# The socket ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "used"),
    [(0o777, False), (0o1777, True), (0o755, True), (0o770, True), (0o555, None), (0o700, True)],
)
def test_the_socket_is_not_put_where_others_can_rename_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, used: bool | None
):
    base = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    try:
        base.chmod(mode)
        monkeypatch.setenv("TMPDIR", str(base))
        directory = Path(socket_dir.socket_directory())
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        if used is not None:  # root may write wherever it likes
            assert (directory.parent == base) is used
        shutil.rmtree(directory)
    finally:
        shutil.rmtree(base)


def test_a_temporary_directory_that_is_none_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    for odd in (tmp_path / "file", tmp_path / "nowhere"):
        monkeypatch.setenv("TMPDIR", str(odd))
        directory = Path(socket_dir.socket_directory())
        assert directory.parent != odd
        directory.rmdir()


class Usurper:
    """A process of the same user, in a thread: takes the daemon's seat on every socket, before the
    daemon can.
    """

    def __init__(self, folder: str, orders: Orders, words: bytes | None, times: int) -> None:
        self.taken: list[bool] = []
        self.sits = threading.Event()
        self._folder = Path(folder)
        self._orders = orders
        self._words = words
        self._times = times
        orders.give("hold", starting_at="got BOOT", every_step=True, keep=True)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with zmq.Context() as context, contextlib.ExitStack() as stack:
            for number in range(self._times):
                self._orders.obeyed()
                try:
                    if number == self._times - 1:
                        self._orders.withdraw()
                    [path] = self._folder.glob(f"sidesave-*/{number + 1}")
                    one = stack.enter_context(context.socket(zmq.PAIR))
                    one.setsockopt(zmq.LINGER, 0)
                    one.setsockopt(zmq.RECONNECT_IVL, -1)
                    self.taken.append(self._is_seated(one, f"ipc://{path}"))
                    if self._words is not None and self.taken[-1]:
                        one.send(self._words)
                    self.sits.set()
                finally:
                    self._orders.release()

    @staticmethod
    def _is_seated(one: zmq.Socket[bytes], endpoint: str) -> bool:
        """Connect, and wait until it is known whether that was accepted."""
        with one.get_monitor_socket() as monitor:
            one.connect(endpoint)
            while True:
                assert monitor.poll(int(DEADLINE_S * 1000))
                event = recv_monitor_message(monitor)["event"]
                if event not in (zmq.EVENT_CONNECTED, zmq.EVENT_CONNECT_DELAYED):
                    one.disable_monitor()
                    return event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def close(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


TOKEN = b"a token not told"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["junk", "HELLO with a wrong token", "another message", "silence"]
)
def test_a_stranger_in_the_daemons_seat_is_refused_and_the_daemon_comes_up(
    tmp_path: Path,
    traces: Traces,
    orders: Orders,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    words: str,
):
    from sidesave.writer_daemon import protocol, wire

    said: dict[str, bytes | None] = {
        "junk": b"\xc1junk",
        "HELLO with a wrong token": wire.encode(
            protocol.Hello(attempt=1, token=b"x" * 16, pid=os.getpid())
        ),
        "another message": wire.encode(
            protocol.Ready(attempt=1, recovered=(), removed=(), left=())
        ),
        "silence": None,
    }
    monkeypatch.setenv("TMPDIR", traces.folder)
    monkeypatch.setattr(
        secrets, "token_bytes", lambda nbytes: TOKEN if nbytes == len(TOKEN) else os.urandom(nbytes)
    )
    usurper = Usurper(traces.folder, orders, said[words], times=2)
    await_message = connection.Connection._await

    def await_less(
        self: connection.Connection, process: DaemonProcess, timeout_s: float, purpose: str
    ) -> Any:
        """Of the first daemon; from when its seat is taken, for a busy machine takes longer to
        start one.
        """
        if words == "silence" and self._attempt == 1:
            assert usurper.sits.wait(DEADLINE_S)
            timeout_s = 1.0
        return await_message(self, process, timeout_s, purpose)

    monkeypatch.setattr(connection.Connection, "_await", await_less)
    with caplog.at_level(logging.DEBUG), sidesave.Checkpointer(tmp_path / "run") as checkpointer:
        usurper.close()
        assert usurper.taken == [True, False], "the second daemon's seat is for its pid alone"
        checkpointer.save(1, a_state(1), blocking=True)
        assert checkpointer.daemon_pid is not None
        process = Path(f"/proc/{checkpointer.daemon_pid}")
        told = [
            caplog.text.encode(),
            (process / "cmdline").read_bytes(),
            (process / "environ").read_bytes(),
        ]
        assert not any(TOKEN in text or TOKEN.hex().encode() in text for text in told)
    check(tmp_path / "run", 1)
    assert list(Path(traces.folder).glob("sidesave-*")) == []


def test_a_daemon_whose_seat_is_always_taken_fails_in_time(
    tmp_path: Path, traces: Traces, orders: Orders, monkeypatch: pytest.MonkeyPatch
):
    """Where the pid of a peer cannot be asked for, there is only the token."""
    monkeypatch.setenv("TMPDIR", traces.folder)
    monkeypatch.setattr(zmq, "IPC_FILTER_PID", 9999)  # no option of this number
    monkeypatch.setattr(connection, "MAX_DEATHS", 1)
    usurper = Usurper(traces.folder, orders, b"junk", times=2)
    try:
        with pytest.raises(DaemonStartError, match="another process answered"):
            sidesave.Checkpointer(tmp_path / "run")
    finally:
        usurper.close()
    assert usurper.taken == [True, True]


# The daemon's environment -------------------------------------------------------------------------


@pytest.mark.parametrize("python_path", ["", ":{}", "{}:", "{}::{}"])
def test_the_daemon_imports_nothing_from_where_it_happens_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python_path: str
):
    run, canary = tmp_path / "run", tmp_path / "canary"
    run.mkdir()
    for name in (
        "msgpack",
        "zmq",
        "sidesave",
        "psutil",
        "xxhash",
        "logging",
        "sitecustomize",
        "startup",
    ):
        (run / f"{name}.py").write_text(f"open({str(canary)!r}, 'a').write({name!r})\n")
    inherited = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv(
        "PYTHONPATH", python_path.format(inherited, inherited) if python_path else inherited
    )
    monkeypatch.setenv("PYTHONSTARTUP", str(run / "startup.py"))
    monkeypatch.setenv("PYTHONINSPECT", "1")
    monkeypatch.chdir(run)
    with sidesave.Checkpointer(run) as checkpointer:
        checkpointer.save(1, a_state(1), blocking=True)
        assert checkpointer.load()["seed"] == 1
    assert not canary.exists()
    subprocess.run(
        [sys.executable, "-c", "import msgpack"], cwd=run, check=True, stdin=subprocess.DEVNULL
    )
    assert canary.exists(), "or it would prove nothing"


# Links in the run directory -----------------------------------------------------------------------


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """What no link may lead to."""
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "precious").write_text("precious")
    (outside / "folder/precious").write_text("precious")
    outside.chmod(0o750)
    return outside


def facts(path: Path) -> dict[str, Any]:
    """Names, modes and contents."""
    return {
        str(entry.relative_to(path.parent)): (
            entry.lstat().st_mode,
            entry.read_bytes() if entry.is_file() else b"",
        )
        for entry in [path, *path.rglob("*")]
    }


SESSION = "0123456789abcdef"


def plant_step(run: Path, outside: Path) -> None:
    (run / "step-00000007").symlink_to(outside)


def plant_partial(run: Path, outside: Path) -> None:
    (run / f".step-00000007.{SESSION}.partial").symlink_to(outside)


def plant_replaced(run: Path, outside: Path) -> None:
    (run / f".step-00000006.{SESSION}.replaced").symlink_to(outside)
    (run / f".step-00000007.{SESSION}.trash").symlink_to(outside)
    (run / f".step-00000007.{SESSION}.aborted").symlink_to(outside)


def plant_in_partial(run: Path, outside: Path) -> None:
    partial = run / f".step-00000007.{SESSION}.partial"
    (partial / "inner").mkdir(parents=True)
    for folder in (partial, partial / "inner"):
        for number, target in enumerate([outside, outside / "folder", outside / "precious"]):
            (folder / f"link-{number}").symlink_to(target)
    for name in ("rank-00000.json", "manifest.json", "model.rank-00000.safetensors"):
        (partial / name).symlink_to(outside / "precious")


def plant_lease(run: Path, outside: Path) -> None:
    (run / LEASE_DIRECTORY).symlink_to(outside)


def plant_in_lease(run: Path, outside: Path) -> None:
    (run / LEASE_DIRECTORY).mkdir()
    (run / LEASE_DIRECTORY / "1").symlink_to(outside / "precious")
    (run / LEASE_DIRECTORY / "1.takeover").symlink_to(outside / "precious")


def plant_history(run: Path, outside: Path) -> None:
    (run / ".sidesave.history").symlink_to(outside / "precious")


def plant_manifest(run: Path, outside: Path) -> None:
    (run / "step-00000007").mkdir()
    (run / "step-00000007/manifest.json").symlink_to(outside / "precious")


@pytest.mark.drawn
@pytest.mark.parametrize(
    "plant",
    [
        *(plant_step, plant_partial, plant_replaced, plant_in_partial),
        *(plant_lease, plant_in_lease, plant_history, plant_manifest),
    ],
)
def test_no_link_in_the_run_directory_is_written_through_or_deleted_through(
    tmp_path: Path, outside: Path, plant: Callable[[Path, Path], None]
):
    run = tmp_path / "run"
    run.mkdir()
    plant(run, outside)
    before = facts(outside)
    with contextlib.suppress(SidesaveError), sidesave.Checkpointer(run) as checkpointer:
        for overwrite in (False, True):
            with contextlib.suppress(SidesaveError):
                checkpointer.save(7, a_state(7), overwrite=overwrite, blocking=True)
        checkpointer.save(8, a_state(8), blocking=True)
        assert checkpointer.load(8)["seed"] == 8
    assert facts(outside) == before
    assert (run / "step-00000008").is_dir() or plant is plant_lease


def test_a_link_in_the_place_of_a_checkpoint_is_read_through_and_one_of_a_file_is_not(
    tmp_path: Path,
):
    """Teams link checkpoints; a link inside one has never been written by us."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    save_steps(elsewhere, 7)
    run.mkdir()
    (run / "best").symlink_to(elsewhere / "step-00000007")
    assert sidesave.load(run / "best")["seed"] == 7
    assert sidesave.verify(run / "best").ok
    (elsewhere / "step-00000007/manifest.json").rename(tmp_path / "manifest")
    (elsewhere / "step-00000007/manifest.json").symlink_to(tmp_path / "manifest")
    with pytest.raises(IntegrityError, match=r"manifest\.json"):
        sidesave.load(run / "best")


# What is left in dumps and logs -------------------------------------------------------------------


def flags(pid: int | str, name: str) -> list[set[str]]:
    """The kernel's flags of each mapping of ``name`` in a process."""
    found: list[set[str]] = []
    ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            ours = name in line
        elif ours and first == "VmFlags:":
            found.append(set(line.split()[1:]))
    return found


def test_core_dumps_leave_staging_memory_out(tmp_path: Path):
    arena = Arena.create(0, 8192)
    try:
        attached = Arena.attach(os.dup(arena.fd))
        mapped = flags("self", "memfd:sidesave (deleted)")
        attached.close()
    finally:
        arena.close()
    assert len(mapped) >= 2
    assert all("dd" in one for one in mapped)
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, a_state(1), blocking=True)
        assert checkpointer.daemon_pid is not None
        for pid in (os.getpid(), checkpointer.daemon_pid):
            mapped = flags(pid, "memfd:sidesave (deleted)")
            assert mapped
            assert all("dd" in one for one in mapped), pid


def test_messages_of_errors_hold_no_values_of_tensors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    secret = 1234.5678
    state = {"x": {"w": torch.full((300,), secret)}}
    texts: list[str] = []
    with caplog.at_level(logging.DEBUG), sidesave.Checkpointer(tmp_path) as checkpointer:
        path = Path(checkpointer.save(1, state, blocking=True).committed.result().path)
        flip_bit(path / "x.rank-00000.safetensors", -1)
        for attempt in (
            lambda: sidesave.load(path),
            lambda: sidesave.load(path, into={"x": {"w": torch.full((3,), secret)}}, verify=False),
            lambda: checkpointer.save(1, state),
            lambda: checkpointer.save(2, {"x": torch.full((2,), secret), "y": object()}),
        ):
            with pytest.raises(SidesaveError) as caught:
                attempt()
            texts.append(str(caught.value))
    assert "1234" not in "\n".join([*texts, caplog.text])


def test_a_daemon_can_be_ended_by_its_own_user_only(tmp_path: Path):
    """Which the kernel sees to; here it is told that nothing was done to weaken that: no setuid, no
    extra groups.
    """
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        pid = daemon(checkpointer)
        status = Path(f"/proc/{pid}/status").read_text()
        own = Path("/proc/self/status").read_text()
        for key in ("Uid:", "Gid:", "Groups:", "CapEff:", "NoNewPrivs:"):
            find = [
                next(line for line in text.splitlines() if line.startswith(key))
                for text in (status, own)
            ]
            assert find[0] == find[1]
        os.kill(pid, signal.SIG_DFL)
