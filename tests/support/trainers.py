"""Trainers in processes of their own, daemons that misbehave on request, and what either may leave
behind.

As a script this module is a trainer: ``python trainers.py NAME ARGUMENTS`` runs the function of
that name. Imported by a daemon's ``sitecustomize`` it makes that daemon follow orders. It is light
to import for that reason.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from concurrent.futures import Future
    from types import FrameType

    import torch

    import sidesave

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
"""Where this module and others like it are found."""
DEADLINE_S = 300.0
"""For everything that takes a moment: nothing waits without an end, and a busy machine is no
failure.
"""


# States -------------------------------------------------------------------------------------------


def a_state(seed: int, mib: float = 1) -> dict[str, Any]:
    """A state that its seed determines, of about ``mib`` MiB in two containers, with plain data
    beside them.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    count = int(mib * (1 << 20)) // 16
    model = {"w": torch.rand(count, generator=generator), "b": torch.rand(7, generator=generator)}
    return {
        "model": model,
        "optimizer": {"m": torch.rand(3 * count, generator=generator)},
        "seed": seed,
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states made by :func:`a_state` are equal, bit for bit."""
    import torch

    def leaves(state: dict[str, Any]) -> list[torch.Tensor]:
        return [state["model"]["w"], state["model"]["b"], state["optimizer"]["m"]]

    return one["seed"] == other["seed"] and all(map(torch.equal, leaves(one), leaves(other)))


def check(run: str | os.PathLike[str], *steps: int, mib: float = 1) -> None:
    """These steps, each saved from ``a_state(step, mib)``, are all there is, whole and
    bit-exact.
    """
    from sidesave.client.runs.finding import catalog_of

    found = {info.step: info.path for info in catalog_of(os.fspath(run)).all()}
    assert sorted(found) == sorted(steps)
    for step, path in found.items():
        check_step(path, step, mib)


def check_step(
    path: str | os.PathLike[str],
    step: int,
    mib: float = 1,
    storage_options: dict[str, Any] | None = None,
) -> None:
    """A checkpoint is whole, and holds ``a_state(step, mib)`` bit for bit."""
    import sidesave

    report = sidesave.verify(path, storage_options=storage_options)
    assert report.ok, report.faults
    loaded = sidesave.load(path, storage_options=storage_options)
    assert same(loaded, a_state(step, mib)), f"step {step} holds another state"


# What is left behind ------------------------------------------------------------------------------


def grouped(options: dict[str, Any]) -> dict[str, Any]:
    """Options as JSON holds them, with the dict of each group made into the class of its name."""
    import sidesave

    kinds = {
        "staging": sidesave.StagingOptions,
        "failures": sidesave.FailureOptions,
        "daemon": sidesave.DaemonOptions,
    }
    return {
        name: kinds[name](**value) if name in kinds else value for name, value in options.items()
    }


def entries(run: str | os.PathLike[str]) -> list[str]:
    """Return the names in a run directory, or in a mirror, without the files that every run has."""
    await_removal(run)
    names = ("lease", "history", "rollback", "fallback", "keys", "mirror", "mirror-id")
    own = {f".sidesave.{name}" for name in names}
    return sorted(path.name for path in Path(run).iterdir() if path.name not in own)


def await_removal(run: str | os.PathLike[str]) -> None:
    """Wait up to 20 s for the removal of deleted checkpoints, which a daemon continues after
    ``close()``.
    """
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not any(Path(run).glob(".*.trash")), timeout_s=20)


def commit(ckpt: sidesave.Checkpointer, step: int, mib: float = 1) -> sidesave.CheckpointInfo:
    return ckpt.save(step, a_state(step, mib)).committed.result(DEADLINE_S)


def save_steps(run: str | os.PathLike[str], *steps: int, mib: float = 1, **options: Any) -> None:
    """Commit ``a_state(step, mib)`` as each of these steps in one session, and wait for its mirror
    if it has one.
    """
    import sidesave

    with sidesave.Checkpointer(run, **options) as ckpt:
        for step in steps:
            commit(ckpt, step, mib)
        ckpt.wait(DEADLINE_S, mirrored="mirror" in options)


def save(run: str | os.PathLike[str], state: dict[str, Any], step: int = 1, **options: Any) -> Path:
    """Commit a state in a session of its own, and return the path of its checkpoint."""
    import sidesave

    with sidesave.Checkpointer(run, **options) as ckpt:
        return Path(ckpt.save(step, state).committed.result(DEADLINE_S))


def wait_until(
    condition: Callable[[], object], what: str = "", timeout_s: float = DEADLINE_S
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.001)


def daemon(ckpt: sidesave.Checkpointer) -> int:
    """The pid of its daemon."""
    assert ckpt.daemon_pid is not None
    return ckpt.daemon_pid


def end(pid: int, number: int = signal.SIGKILL) -> None:
    """Send a process a signal by which it comes to its end, and wait for that; it need be no child
    of this one.
    """
    with pidfd_of(pid) as pidfd:
        os.kill(pid, number)
        await_end(pidfd)


def await_end(pidfd: int, timeout_s: float = DEADLINE_S) -> None:
    """Block until a process has ended."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    assert poller.poll(timeout_s * 1000), f"still running after {timeout_s:g} s"


def stands_still(pid: int) -> bool:
    """Whether every thread of a process is stopped: a signal comes to them one after the other."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # this one has ended
            if (task / "stat").read_text().rpartition(")")[2].split()[0] != "T":
                return False
    return True


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process stands still within the block, and goes on after it, however that ends."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: stands_still(pid), f"process {pid} stops")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _environment_of(process: Path) -> bytes:
    """What a process of ``/proc`` was started with.

    While a process is inside ``execve`` its environment reads as empty, as does its command line:
    that is waited for.
    """
    while not (environment := (process / "environ").read_bytes()):
        # an OSError where there is none: it is the kernel's, or has ended
        (process / "exe").readlink()
        if (process / "cmdline").read_bytes():  # it may have gone on in between
            return (process / "environ").read_bytes()
    return environment


class Traces:
    """A temporary directory of its own for trainers and their daemons, by which all their processes
    are known.
    """

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="t-", dir="/tmp")  # short: it holds sockets

    def processes(self) -> dict[int, str]:
        """Processes started under this directory that still run, and their command lines."""
        marker, found = f"TMPDIR={self.folder}".encode(), {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and marker in _environment_of(entry).split(b"\0"):
                    found[int(entry.name)] = (
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    )
        return found

    def await_ends(self) -> None:
        """Block until every process has ended; with it go descriptors and memory."""
        while left := self.processes():  # each may start another while it ends
            for pid in left:
                with contextlib.suppress(ProcessLookupError), pidfd_of(pid) as pidfd:
                    await_end(pidfd)

    def check(self) -> None:
        """Every process ends; no socket directory remains."""
        self.await_ends()
        left = [
            path
            for path in Path(self.folder).iterdir()
            if not path.name.startswith("torchinductor_")
        ]
        assert not left, f"left behind: {left}"

    def close(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def staging_memory(pid: int | str = "self") -> list[str]:
    """Where a process holds staging memory: descriptors and mappings."""
    held = [
        line
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "memfd:sidesave" in line
    ]
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(link.readlink())
            if "memfd:sidesave" in target:
                held.append(f"{link}: {target}")
    return held


# Orders -------------------------------------------------------------------------------------------

_ORDERS = "SIDESAVE_TEST_ORDERS"
_STORAGE_EVENTS = {
    "os.mkdir",
    "os.link",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.chmod",
    "os.truncate",
    "open",
}
_TRAINER_EVENTS = {"tempfile.mkdtemp", "os.mkdir", "os.remove", "os.rmdir", "subprocess.Popen"}
LAST_WORDS = "broken on purpose"


class Orders:
    """Makes daemons and trainers report, stop, fail, exit or die right before a certain step.

    Steps are, in the order in which a process comes to them:

    - operations on storage, those that Python audits: to create, link, rename, remove, to sync a
      directory, and so on, by their names ("os.mkdir"). In a trainer they concern its socket and
      the start of its daemon;
    - messages: "sends READY" and "sent READY", "got SAVE", and so on for each kind, on both
      channels. PROGRESS and HEARTBEAT come at any moment, so they are counted only where an order
      begins with them;
    - in a trainer "stages" and "staged", around the moment from which on a save needs it no longer.
    """

    def __init__(self, folder: Path, environment: Callable[[str, str], None]) -> None:
        self._folder = folder
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(
            f"import sys\nsys.path.append({str(SUPPORT)!r})\nimport trainers\ntrainers.obey()\n"
        )
        os.mkfifo(folder / "reports")
        os.mkfifo(folder / "release")
        self._reports = os.open(folder / "reports", os.O_RDWR | os.O_NONBLOCK)
        # its end releases what is held
        self._release = os.open(folder / "release", os.O_RDWR | os.O_NONBLOCK)
        environment(_ORDERS, str(folder))
        environment("PYTHONPATH", f"{folder}:{_python_path()}")

    def give(
        self,
        what: str,
        *,
        after: int = 0,
        starting_at: str = "os.mkdir",
        on: str = "",
        keep: bool = False,
        to: str = "daemon",
        every_step: bool = False,
    ) -> None:
        """The next daemon that comes to a step ``starting_at`` goes on for ``after`` more of any
        kind.

        Args:
            what: "report", "hold" (that thread, until :meth:`release`), "stop" (SIGSTOP to itself),
                "exit" (with last words), "kill" (SIGKILL), "break" (an error that nobody expects),
                or the name of an errno, as in "ENOSPC", with which that operation fails.
            after: Steps that still happen.
            starting_at: The kind from which they are counted; "" is the first of any kind. A save
                begins with os.mkdir.
            on: A part of the path that this first step has to concern.
            keep: Whether every later daemon gets the same order.
            to: "daemon", or "trainer": one that runs :func:`follow_orders`.
            every_step: Count messages as well, and not only operations on storage.
        """
        counted = {"after": after, "starting_at": starting_at, "on": on, "every_step": every_step}
        order = {"what": what, "keep": keep, **counted}
        (self._folder / "new").write_text(json.dumps(order))
        (self._folder / "new").rename(self._folder / to)

    def release(self) -> None:
        """Let the thread go on that an order holds."""
        os.write(self._release, b"\n")

    def withdraw(self, to: str = "daemon") -> bool:
        """Take the order back; whether nobody had got it."""
        try:
            (self._folder / to).unlink()
        except FileNotFoundError:
            return False
        return True

    def obeyed(self, timeout_s: float = DEADLINE_S) -> tuple[int, str]:
        """Block until a process has come to where it was ordered; its pid and the step."""
        deadline = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._reports, select.POLLIN)
        assert poller.poll(timeout_s * 1000), "nobody has come to that step"
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self._reports, 1)
        what, pid, step = line.decode().strip().split(" ", 2)
        while what == "stop" and not stands_still(int(pid)):
            assert time.monotonic() < deadline, f"process {pid} does not stop"
            time.sleep(0.001)
        return int(pid), step.strip()

    def was_obeyed(self) -> bool:
        """Whether a report waits to be read."""
        poller = select.poll()
        poller.register(self._reports, select.POLLIN)
        return bool(poller.poll(0))

    @property
    def reports(self) -> int:
        """The descriptor that is readable when :meth:`was_obeyed`."""
        return self._reports

    def close(self) -> None:
        os.close(self._reports)
        os.close(self._release)


def obey() -> None:
    """In a process that has just begun: a daemon follows orders from here on."""
    if "sidesave.writer_daemon" in sys.orig_argv:
        follow_orders("daemon")


def follow_orders(role: str) -> None:
    """Look for orders to processes of this role at every step, and follow them."""
    folder = Path(os.environ[_ORDERS])
    followed: dict[str, Any] | None = None
    turn = threading.Lock()
    this_thread = threading.local()

    def is_next(step: str, detail: object, *, of_storage: bool) -> str:
        """What is to be done at this step, if anything."""
        nonlocal followed
        begins = False
        if followed is None:
            followed = _take_order(folder / role, step, detail, of_storage=of_storage)
            begins = followed is not None
        if (
            followed is None
            or not (of_storage or followed["every_step"])
            or not (begins or _is_counted(step))
        ):
            return ""
        followed["after"] -= 1
        if followed["after"] >= 0:
            return ""
        what, followed = followed["what"], None
        return what

    def come_to(step: str, detail: object = "", *, of_storage: bool = False) -> None:
        if getattr(this_thread, "is_looking", False):
            return
        this_thread.is_looking = True
        try:
            with turn:
                what = is_next(step, detail, of_storage=of_storage)
            if not what:
                return
            release = os.open(folder / "release", os.O_RDONLY | os.O_NONBLOCK)
            os.set_blocking(release, True)
            report = os.open(folder / "reports", os.O_WRONLY | os.O_NONBLOCK)
            os.write(report, f"{what} {os.getpid()} {step} {detail}\n".encode())
            os.close(report)
            if what == "exit":
                sys.stderr.write(f"{LAST_WORDS}\n")
                sys.stderr.flush()
                os._exit(7)
            if what == "hold":
                os.read(release, 1)
            elif what in ("kill", "stop"):  # to this thread: it does not even return from the call
                signal.pthread_kill(
                    threading.get_ident(), signal.SIGKILL if what == "kill" else signal.SIGSTOP
                )
            os.close(release)
            if what == "break":
                raise RuntimeError(LAST_WORDS)
            if what.startswith("E"):  # raised by an audit hook, it is what the operation raises
                raise OSError(getattr(errno, what), os.strerror(getattr(errno, what)))
        finally:
            this_thread.is_looking = False

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if role == "trainer":
            if event in _TRAINER_EVENTS:
                come_to(event, arguments[0])
        elif event in _STORAGE_EVENTS and (event != "open" or _concerns_storage(arguments)):
            come_to(event, arguments[0], of_storage=True)

    _announce_messages(come_to)
    if role == "trainer":
        _announce_staging(come_to)
    sys.addaudithook(audit)


def _take_order(
    path: Path, step: str, detail: object, *, of_storage: bool
) -> dict[str, Any] | None:
    """The order that begins at this step, if there is one."""
    try:
        order = json.loads(path.read_text())
        begins = step == order["starting_at"] or (order["starting_at"] == "" and _is_counted(step))
        if not begins or order["on"] not in str(detail) or not (of_storage or order["every_step"]):
            return None
        if not order["keep"]:
            path.unlink()
    except FileNotFoundError:  # or another process has taken it in this moment, or it was withdrawn
        return None
    return order


def _is_counted(step: str) -> bool:
    return not step.endswith(("HEARTBEAT", "PROGRESS"))


def _announce_messages(come_to: Callable[[str], None]) -> None:
    """Come to a step before and after each message is sent, and when one has come, on ZeroMQ and on
    the socket pair.
    """
    import msgpack
    import zmq

    def around(data: bytes, send: Callable[[], Any]) -> Any:
        kind = msgpack.unpackb(data)["kind"]
        come_to(f"sends {kind}")
        result = send()
        come_to(f"sent {kind}")
        return result

    def arrived(data: bytes) -> None:
        come_to(f"got {msgpack.unpackb(data)['kind'] if data else 'the end'}")

    zmq_send, zmq_recv = zmq.Socket.send, zmq.Socket.recv
    send_fds, recv_fds = socket.send_fds, socket.recv_fds

    def send(self: Any, data: bytes, *arguments: Any, **options: Any) -> Any:
        return around(data, lambda: zmq_send(self, data, *arguments, **options))

    def recv(self: Any, *arguments: Any, **options: Any) -> Any:
        data = zmq_recv(self, *arguments, **options)
        arrived(data)
        return data

    def send_with_fds(one: socket.socket, buffers: list[bytes], *arguments: Any) -> Any:
        return around(buffers[0], lambda: send_fds(one, buffers, *arguments))

    def recv_with_fds(one: socket.socket, *arguments: Any) -> Any:
        received = recv_fds(one, *arguments)
        arrived(received[0])
        return received

    zmq.Socket.send, zmq.Socket.recv = send, recv  # type: ignore[method-assign]
    socket.send_fds, socket.recv_fds = send_with_fds, recv_with_fds


def _announce_staging(come_to: Callable[[str], None]) -> None:
    from sidesave.stager.memory.arena import Arena

    mark_staged = Arena.mark_staged

    def mark(self: Arena, descriptor: bytes) -> None:
        come_to("stages")
        mark_staged(self, descriptor)
        come_to("staged")

    Arena.mark_staged = mark


def _concerns_storage(arguments: tuple[Any, ...]) -> bool:
    path, _, flags = arguments
    if not isinstance(path, str) or not isinstance(flags, int):
        return False
    return path.endswith(".sidesave.lease") or (
        not path.startswith("/") and bool(flags & (os.O_CREAT | os.O_DIRECTORY))
    )


# Trainers -----------------------------------------------------------------------------------------


class Trainer:
    """A trainer process, from its start to the end of the ``with`` block, which it does not
    survive.
    """

    script: ClassVar[str] = __file__
    """What it runs, with the arguments."""

    def __init__(
        self, traces: Traces, *arguments: object, umask: int = -1, **environment: str
    ) -> None:
        import forks  # which is light, but daemons that follow orders import this module as well

        self._process = forks.popen(
            [sys.executable, "-W", "error", self.script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            umask=umask,
            env={
                **os.environ,
                "TMPDIR": traces.folder,
                "PYTHONPATH": _python_path(),
                **environment,
            },
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.pid = self._process.pid
        self.heard: list[str] = []
        self._to, self._of = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._said = b""

    def lines(
        self, timeout_s: float = DEADLINE_S, *, until_readable: int | None = None
    ) -> Iterator[str]:
        """What it says, line by line, up to its end or until that descriptor becomes readable."""
        deadline = time.monotonic() + timeout_s
        sources = [self._of] if until_readable is None else [self._of, until_readable]
        while True:
            line, newline, rest = self._said.partition(b"\n")
            if newline:
                self._said = rest
                self.heard.append(line.decode())
                yield self.heard[-1]
                continue
            ready, _, _ = select.select(sources, [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the trainer has not said what was expected within {timeout_s:g} s"
            if until_readable in ready:
                return
            data = os.read(self._of, 65536)
            if not data:
                return
            self._said += data

    def expect(self, word: str, timeout_s: float = DEADLINE_S) -> list[str]:
        """Block until it says ``word``; what else is on that line. Its exit before that is a
        failure.
        """
        for line in self.lines(timeout_s):
            said, *arguments = line.split(" ")
            if said == word:
                return arguments
        raise AssertionError(f"the trainer ended before it said {word!r}: {self.complaints()}")

    def stage(self, orders: Orders, order: str = "stop", **when: Any) -> int:
        """Let it stage a save, wait until its daemon has obeyed an order, and return the pid of the
        daemon.
        """
        [pid] = self.expect("ready")
        orders.give(order, **when)
        self.go_on()
        self.expect("staged")
        orders.obeyed()
        return int(pid)

    def expect_all(self, *words: str, until: str) -> list[str]:
        """Block until it says ``until``; the lines before that which begin with one of
        ``words``.
        """
        self.expect(until)
        return [line for line in self.heard if line.startswith(words)]

    def go_on(self) -> None:
        """Let a trainer that waits in :func:`wait_to_go_on` go on; one that has been killed does
        not mind.
        """
        with contextlib.suppress(BrokenPipeError):
            os.write(self._to, b"\n")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self._process.kill()
        self._process.wait()

    def end(self, timeout_s: float = DEADLINE_S) -> int:
        """Block until it has ended by itself; its exit status."""
        return self._process.wait(timeout_s)

    def complaints(self) -> str:
        """Its stderr, once it has ended."""
        assert self._process.stderr is not None
        return self._process.stderr.read().decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def kill_with_a_save_staged(
    traces: Traces, run: str | os.PathLike[str], orders: Orders, order: str = "stop", **when: Any
) -> int:
    """Kill a trainer that has staged step 5, once its daemon has obeyed that order; the pid of the
    daemon.
    """
    with Trainer(traces, "save_and_wait", run, 5) as trainer:
        pid = trainer.stage(orders, order, **when)
        trainer.kill()
    return pid


def _python_path() -> str:
    inherited = list(filter(None, os.environ.get("PYTHONPATH", "").split(":")))
    return ":".join(
        [*inherited, *(path for path in map(str, (ROOT, SUPPORT)) if path not in inherited)]
    )


def say(*words: object) -> None:
    """In a trainer: tell the test, in one line."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def wait_to_go_on() -> None:
    """In a trainer: wait for :meth:`Trainer.go_on`; it ends instead when the test is gone."""
    if not os.read(0, 1):
        os._exit(9)


@contextlib.contextmanager
def pidfd_of(pid: int) -> Iterator[int]:
    """A descriptor of a process, by which its end is seen."""
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def save_and_wait(run: str, step: str, mib: str = "1") -> None:
    """Saves when told to, says when that is staged, and waits."""
    import sidesave

    ckpt = sidesave.Checkpointer(run)
    say("ready", ckpt.daemon_pid)
    wait_to_go_on()
    ckpt.save(int(step), a_state(int(step), float(mib))).staged.result()
    say("staged")
    wait_to_go_on()


def save_without(run: str, calls: str, code: str) -> None:
    """Saves and loads where these system calls are refused, and says what it came to."""
    import traceback

    from denied import deny

    import sidesave

    cpus = list(os.sched_getaffinity(0))
    try:
        deny(calls.split(","), int(code))
    except OSError as error:
        say("skipped", error)
        os._exit(0)
    try:
        with sidesave.Checkpointer(
            run, daemon=sidesave.DaemonOptions(nice=1, cpus=tuple(cpus[:1]), stall_timeout_s=20)
        ) as ckpt:
            for step in (1, 2):
                ckpt.save(step, a_state(step, 0.1)).committed.result(DEADLINE_S)
                say("committed", step)
                assert same(ckpt.load(step), a_state(step, 0.1))
            ckpt.save(2, a_state(2, 0.1), overwrite=True, blocking=True)
            ckpt.delete(1).result(DEADLINE_S)
        report = sidesave.verify(f"{run}/step-00000002")
        assert report.ok, report.faults
        say("fine")
    except sidesave.SidesaveError as error:
        say("refused", type(error).__name__, json.dumps(str(error)))
    except BaseException:  # noqa: BLE001 - it is the test's to judge
        say("broke", json.dumps(traceback.format_exc()))
    os._exit(0)


def examine_without(folder: str, calls: str, code: str) -> None:
    """Says what the doctor finds where these system calls are refused."""
    from denied import deny

    from sidesave.client.cli import directory_checks

    try:
        deny(calls.split(","), int(code))
    except OSError as error:
        say("skipped", error)
        os._exit(0)
    for status, finding, remedy in directory_checks._system_calls(Path(folder)):
        say(status, finding, "|", remedy)
    os._exit(0)


def save_at(run: str, seconds: str) -> None:
    """Saves a step while the clock shows another time, and says what the history has of it."""
    import sidesave

    assert abs(time.time() - float(seconds)) < 3600
    with sidesave.Checkpointer(run) as ckpt:
        ckpt.save(1, a_state(1), blocking=True)
        ckpt.wait()
    for record in sidesave.history(run):
        say(record.outcome, record.called_s, record.committed_s)


def keep_saving(run: str, first: str, count: str, follow: str) -> None:
    """Saves step after step, says when each is staged and when it is committed, and closes; follows
    orders.

    Their sizes are :func:`size_of` the steps; with ``follow`` "1" the writer follows the copy.
    """
    import sidesave
    from sidesave.client.saving import saver

    if follow == "1":
        saver._FOLLOW_NBYTES = 0  # type: ignore[misc] - 512 MiB would do as well
    if _ORDERS in os.environ:
        follow_orders("trainer")
    ckpt = sidesave.Checkpointer(run)
    say("ready", ckpt.daemon_pid)
    wait_to_go_on()

    def tell(future: Future[Any], word: str, step: int) -> None:
        say(word if future.exception() is None else f"lost {word}", step)

    for step in range(int(first), int(first) + int(count)):
        handle = ckpt.save(step, a_state(step, size_of(step)))
        handle.staged.add_done_callback(lambda future, step=step: tell(future, "staged", step))
        handle.committed.add_done_callback(
            lambda future, step=step: tell(future, "committed", step)
        )
    ckpt.close()
    say("closed")


def size_of(step: int) -> float:
    """How large the state of a step is, in MiB, where steps of many sizes follow each other."""
    return (0.05, 1, 0.2)[step % 3]


def compete(run: str) -> None:
    """Takes the directory as soon as it gets it, tries again when told to, saves a step and ends
    when told to.
    """
    import sidesave
    from sidesave.errors import DirectoryInUseError

    say("started")
    while True:
        wait_to_go_on()
        try:
            ckpt = sidesave.Checkpointer(run)
            break
        except DirectoryInUseError as error:
            say("refused", str(error).replace("\n", " "))
    step = (ckpt.latest_step() or 0) + 1
    ckpt.save(step, a_state(step)).committed.result()
    say("won", step, ckpt.daemon_pid)
    wait_to_go_on()
    ckpt.close()
    say("closed")


def hold_while_staging(run: str) -> None:
    """Says when the copy of a state has begun that is written while it is copied, and gets no
    further.
    """
    import sidesave
    from sidesave.client.saving import saver

    saver._FOLLOW_NBYTES = 0  # type: ignore[misc] - 512 MiB would do as well
    ckpt = sidesave.Checkpointer(run)
    state = a_state(5, 40)
    ckpt.prepare(state).result()

    def look(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.endswith("stager/copy/memcopy.py"):
            say("copying")
            wait_to_go_on()

    say("ready", ckpt.daemon_pid)
    wait_to_go_on()
    sys.setprofile(look)
    ckpt.save(5, state)
    say("staged")


def die_while_starting(run: str, delay_s: str) -> None:
    """SIGKILLs itself some time after the daemon has been told what to do, be it ready or not."""
    import sidesave
    from sidesave.client.daemon_link.connection import Connection

    send = Connection._send_control

    def send_and_die(connection: Connection, message: Any, fds: list[int]) -> None:
        send(connection, message, fds)
        threading.Timer(float(delay_s), os.kill, (os.getpid(), signal.SIGKILL)).start()

    setattr(Connection, "_send_control", send_and_die)  # noqa: B010 - which it does not expect
    sidesave.Checkpointer(run)
    wait_to_go_on()


def a_model() -> Any:
    """A module whose parameters take 64 MiB."""
    import torch

    torch.manual_seed(5)
    return torch.nn.Linear(4096, 4096)


def die_when_staged(run: str) -> None:
    """SIGKILLs itself when its save is staged, before it can tell the daemon."""
    import torch

    import sidesave

    ckpt = sidesave.Checkpointer(run, staging=sidesave.StagingOptions(overlap=True))
    say("ready", ckpt.daemon_pid)
    wait_to_go_on()
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters())
    handle = ckpt.save(1, {"model": model, "optimizer": optimizer})
    handle.staged.add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    wait_to_go_on()


def leave(run: str, way: str) -> None:
    """Saves step 1 when told to and ends with that save staged, in one of many ways."""
    import sidesave

    ckpt = sidesave.Checkpointer(run)
    say("ready", ckpt.daemon_pid)
    wait_to_go_on()
    ckpt.save(1, a_state(1)).staged.result()
    say("staged")
    wait_to_go_on()
    match way:
        case "return":
            pass
        case "raise":
            raise RuntimeError("a bug in the training loop")
        case "raise in the block":
            with ckpt:
                raise RuntimeError("a bug in the training loop")
        case "sys.exit":
            sys.exit(3)
        case "sys.exit in a thread pool":
            _exit_from_a_pool()
        case "interrupt":
            signal.raise_signal(signal.SIGINT)
        case "os._exit":
            os._exit(5)
        case "exec":
            os.execv(sys.executable, [sys.executable, __file__, "report_inheritance"])
        case "exec and resume":
            os.execv(sys.executable, [sys.executable, __file__, "resume", run])
        case _:
            signal.raise_signal(signal.Signals[way])


def _exit_from_a_pool() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        pool.submit(time.monotonic).result()
        sys.exit(3)


def report_inheritance() -> None:
    """What a trainer's ``exec`` has left to this program, beside the standard streams."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if int(link.name) > 2:
                say("inherited", link.readlink())
    for line in staging_memory():
        say("inherited", line)
    say("reported")
    wait_to_go_on()


def resume(run: str) -> None:
    """Says which checkpoint is the latest, and saves the step after it."""
    import sidesave

    with sidesave.Checkpointer(run) as ckpt:
        latest = ckpt.latest_step()
        say("latest", latest)
        step = (latest or 0) + 1
        ckpt.save(step, a_state(step))


def fork(run: str, way: str) -> None:
    """Forks in the middle of a save; parent and child go on in different ways."""
    import sidesave
    from sidesave.errors import ClosedError

    ckpt = sidesave.Checkpointer(run)
    say("ready", ckpt.daemon_pid)
    handle = ckpt.save(1, a_state(1, 40))
    child = os.fork()
    if child == 0:
        for line in staging_memory():
            say("held", line)
        for use in (
            lambda: ckpt.save(9, a_state(9)),
            ckpt.wait,
            ckpt.load,
            lambda: ckpt.prepare(a_state(9)),
        ):
            try:
                use()
                say("allowed", use)
            except ClosedError as error:
                say(*(["allowed"] if "forked child" not in str(error) else ["refused"]), error)
        ckpt.close()
        if way == "child lives on":
            say("child", os.getpid())
            wait_to_go_on()
        if way == "child saves elsewhere":
            with sidesave.Checkpointer(run + "-child") as own:
                own.save(3, a_state(3))
        if way == "child is collected":
            del ckpt, handle
            gc.collect()
        if way == "child ends by os._exit":
            os._exit(0)
        return  # through the end of the interpreter, with its exit handlers
    if way != "child lives on":
        _, status = os.waitpid(child, 0)
        say("child ended", status)
    handle.committed.result()
    ckpt.save(2, a_state(2, 40)).committed.result()
    say("saved")
    wait_to_go_on()
    os._exit(0) if way == "child lives on" else ckpt.close()


def fork_in_c(run: str) -> None:
    """Forks a child behind Python's back, which holds all that the trainer held, and waits."""
    import ctypes

    import sidesave

    ckpt = sidesave.Checkpointer(run)
    ckpt.save(1, a_state(1)).committed.result()
    say("ready", ckpt.daemon_pid)
    # which keeps the interpreter's lock: the child has no other thread to give it back
    libc = ctypes.PyDLL(None)
    if libc.fork() == 0:
        libc.pause()
    say("forked")
    wait_to_go_on()


def load_data(run: str) -> None:
    """Trains with forked DataLoader workers and a save at every batch, and ends without a word."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import sidesave

    ckpt = sidesave.Checkpointer(run)
    data = TensorDataset(torch.arange(12.0))
    loader = DataLoader(
        data, batch_size=4, num_workers=2, multiprocessing_context="fork", persistent_workers=True
    )
    for epoch in range(2):
        for step, _ in enumerate(loader, start=3 * epoch):
            ckpt.save(step, a_state(step))
    for pid in multiprocessing_children():
        for line in staging_memory(pid):
            say("held", line)
    say("trained")


def multiprocessing_children() -> list[int]:
    import multiprocessing

    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


if __name__ == "__main__":
    # Who ran the tests in the background, or under nohup, has them ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    globals()[sys.argv[1]](*sys.argv[2:])
