"""Trainers in processes of their own, daemons that misbehave on request, and what either may leave behind.

As a script this module is a trainer: ``python trainers.py NAME ARGUMENTS`` runs the function of that name. Imported by
a daemon's ``sitecustomize`` it makes that daemon follow orders. It is light to import for that reason.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

    import torch

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 60.0
"""For everything that takes a moment: nothing waits without an end, and a busy machine is no failure."""


# States ----------------------------------------------------------------------------------------------------------


def a_state(seed: int, mib: float = 1) -> dict[str, Any]:
    """A state that its seed determines, of about ``mib`` MiB in two containers, with plain data beside them."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    count = int(mib * (1 << 20)) // 16
    model = {"w": torch.rand(count, generator=generator), "b": torch.rand(7, generator=generator)}
    return {"model": model, "optimizer": {"m": torch.rand(3 * count, generator=generator)}, "seed": seed}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states made by :func:`a_state` are equal, bit for bit."""
    import torch

    def leaves(state: dict[str, Any]) -> list[torch.Tensor]:
        return [state["model"]["w"], state["model"]["b"], state["optimizer"]["m"]]

    return one["seed"] == other["seed"] and all(map(torch.equal, leaves(one), leaves(other)))


def check(run: str | os.PathLike[str], *steps: int, mib: float = 1) -> None:
    """These steps, each saved from ``a_state(step, mib)``, are all there is, whole and bit-exact."""
    import sidesave
    from sidesave.client import catalog

    found = {info.step: info.path for info in catalog.scan(os.fspath(run))}
    assert sorted(found) == sorted(steps)
    for step, path in found.items():
        report = sidesave.verify(path)
        assert report.ok, report.faults
        assert same(sidesave.load(path), a_state(step, mib)), f"step {step} holds another state"


# What is left behind ---------------------------------------------------------------------------------------------


def entries(run: str | os.PathLike[str]) -> list[str]:
    """What a run directory holds beside the lease file."""
    return sorted(path.name for path in Path(run).iterdir() if path.name != ".sidesave.lease")


def await_end(pidfd: int, timeout_s: float = DEADLINE_S) -> None:
    """Block until a process has ended."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    assert poller.poll(timeout_s * 1000), f"still running after {timeout_s:g} s"


class Traces:
    """A temporary directory of its own for trainers and their daemons, by which all their processes are known."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="t-", dir="/tmp")  # short: it holds sockets

    def processes(self) -> dict[int, str]:
        """Processes started under this directory that still run, and their command lines."""
        marker, found = f"TMPDIR={self.folder}".encode(), {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and marker in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def check(self) -> None:
        """Every process ends, with it go descriptors and memory; no socket directory remains."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                try:
                    await_end(pidfd)
                finally:
                    os.close(pidfd)
        assert self.processes() == {}
        assert [path for path in Path(self.folder).iterdir() if not path.name.startswith("torchinductor_")] == []

    def close(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def staging_memory(pid: int | str = "self") -> list[str]:
    """Where a process holds staging memory: descriptors and mappings."""
    held = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:sidesave" in line]
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(link.readlink())
            if "memfd:sidesave" in target:
                held.append(f"{link}: {target}")
    return held


# Orders to daemons -----------------------------------------------------------------------------------------------

_ORDERS = "SIDESAVE_TEST_ORDERS"
_STORAGE_EVENTS = {"os.mkdir", "os.link", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.truncate", "open"}
LAST_WORDS = "broken on purpose"


class Orders:
    """Makes daemons report, stop, exit or die right before a certain operation on storage.

    The operations are those that Python audits: to create, link, rename, remove, to sync a directory, and so on.
    """

    def __init__(self, folder: Path, environment: Callable[[str, str], None]) -> None:
        self._folder = folder
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(
            f"import sys\nsys.path.append({str(ROOT / 'tests')!r})\nimport trainers\ntrainers.obey()\n"
        )
        os.mkfifo(folder / "reports")
        os.mkfifo(folder / "release")
        self._reports = os.open(folder / "reports", os.O_RDWR | os.O_NONBLOCK)
        environment(_ORDERS, str(folder))
        environment("PYTHONPATH", f"{folder}:{_python_path()}")

    def give(self, what: str, *, after: int = 0, starting_at: str = "os.mkdir", keep: bool = False) -> None:
        """The next daemon that comes to an operation ``starting_at`` goes on for ``after`` more of any kind.

        Args:
            what: "report", "hold" (that thread, until :meth:`release`), "stop" (SIGSTOP to itself), "exit" (with last
                words), or "kill" (SIGKILL).
            after: Operations that still happen.
            starting_at: The kind from which they are counted; "" is the first of any kind. A save begins with os.mkdir.
            keep: Whether every later daemon gets the same order.
        """
        (self._folder / "new").write_text(f"{what} {after} {int(keep)} {starting_at}")
        (self._folder / "new").rename(self._folder / "order")

    def release(self) -> None:
        """Let the thread go on that an order holds."""
        release = os.open(self._folder / "release", os.O_WRONLY | os.O_NONBLOCK)
        os.write(release, b"\n")
        os.close(release)

    def withdraw(self) -> bool:
        """Take the order back; whether no daemon had got it."""
        try:
            (self._folder / "order").unlink()
        except FileNotFoundError:
            return False
        return True

    def obeyed(self, timeout_s: float = DEADLINE_S) -> tuple[int, str]:
        """Block until a daemon has come to where it was ordered; its pid and the operation."""
        deadline = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._reports, select.POLLIN)
        assert poller.poll(timeout_s * 1000), "no daemon has come to that operation"
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self._reports, 1)
        what, pid, operation = line.decode().strip().split(" ", 2)
        while what == "stop" and ") T " not in Path(f"/proc/{pid}/stat").read_text():
            assert time.monotonic() < deadline, f"daemon {pid} does not stop"
            time.sleep(0.001)
        return int(pid), operation

    def was_obeyed(self) -> bool:
        """Whether a report waits to be read."""
        poller = select.poll()
        poller.register(self._reports, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        os.close(self._reports)


def obey() -> None:
    """In a daemon: look for orders at every operation on storage, and follow them."""
    if "sidesave.writer_daemon" not in sys.orig_argv:
        return
    folder = Path(os.environ[_ORDERS])
    left: int | None = None
    what = ""
    inside = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left, what, inside
        if inside or event not in _STORAGE_EVENTS or (event == "open" and not _concerns_storage(arguments)):
            return
        inside = True
        try:
            if left is None:
                with contextlib.suppress(FileNotFoundError):
                    order, after, keep, starting_at = (folder / "order").read_text().split(" ")
                    if starting_at in ("", event):
                        what, left = order, int(after)
                        if keep == "0":
                            (folder / "order").unlink()
            if left is None:
                return
            left -= 1
            if left >= 0:
                return
            left = None
            release = os.open(folder / "release", os.O_RDWR)
            report = os.open(folder / "reports", os.O_WRONLY | os.O_NONBLOCK)
            os.write(report, f"{what} {os.getpid()} {event} {arguments[0]}\n".encode())
            os.close(report)
            if what == "exit":
                sys.stderr.write(f"{LAST_WORDS}\n")
                sys.stderr.flush()
                os._exit(7)
            if what == "hold":
                os.read(release, 1)
            elif what != "report":  # to this thread: it does not even return from the call
                signal.pthread_kill(threading.get_ident(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
            os.close(release)
        finally:
            inside = False

    sys.addaudithook(hook)


def _concerns_storage(arguments: tuple[Any, ...]) -> bool:
    path, _, flags = arguments
    if not isinstance(path, str) or not isinstance(flags, int):
        return False
    return path.endswith(".sidesave.lease") or (
        not path.startswith("/") and bool(flags & (os.O_CREAT | os.O_DIRECTORY))
    )


# Trainers --------------------------------------------------------------------------------------------------------


class Trainer:
    """A trainer process, from its start to the end of the ``with`` block, which it does not survive."""

    def __init__(self, traces: Traces, name: str, *arguments: object, umask: int = -1, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__, name, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            umask=umask,
            env={**os.environ, "TMPDIR": traces.folder, "PYTHONPATH": _python_path(), **environment},
        )
        self.pid = self._process.pid
        self.heard: list[str] = []
        self._said = b""

    def expect(self, word: str, timeout_s: float = DEADLINE_S) -> list[str]:
        """Block until it says ``word``; what else is on that line. Its exit before that is a failure."""
        deadline = time.monotonic() + timeout_s
        assert self._process.stdout is not None
        while True:
            line, newline, rest = self._said.partition(b"\n")
            if newline:
                self._said = rest
                self.heard.append(line.decode())
                said, *arguments = self.heard[-1].split(" ")
                if said == word:
                    return arguments
                continue
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the trainer did not say {word!r} within {timeout_s:g} s"
            data = os.read(self._process.stdout.fileno(), 65536)
            assert data, f"the trainer ended before it said {word!r}: {self.complaints()}"
            self._said += data

    def expect_all(self, *words: str, until: str) -> list[str]:
        """Block until it says ``until``; the lines before that which begin with one of ``words``."""
        self.expect(until)
        return [line for line in self.heard if line.startswith(words)]

    def go_on(self) -> None:
        """Let a trainer that waits in :func:`wait_to_go_on` go on."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

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

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _python_path() -> str:
    inherited = os.environ.get("PYTHONPATH", "")
    return inherited if str(ROOT) in inherited.split(":") else f"{inherited}:{ROOT}".lstrip(":")


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


def hold_while_staging(run: str) -> None:
    """Says when the copy of a state has begun that is written while it is copied, and gets no further."""
    import sidesave
    from sidesave.client import checkpointer

    checkpointer._FOLLOW_NBYTES = 0  # type: ignore[misc] - 512 MiB would do as well
    ckpt = sidesave.Checkpointer(run)
    state = a_state(5, 40)
    ckpt.prepare(state).result()

    def look(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.endswith("stager/memcopy.py"):
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

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.sendmsg":
            threading.Timer(float(delay_s), os.kill, (os.getpid(), signal.SIGKILL)).start()

    sys.addaudithook(hook)
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

    ckpt = sidesave.Checkpointer(run, overlap=True)
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
        for use in (lambda: ckpt.save(9, a_state(9)), ckpt.wait, ckpt.load, lambda: ckpt.prepare(a_state(9))):
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
    libc = ctypes.PyDLL(None)  # which keeps the interpreter's lock: the child has no other thread to give it back
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
    loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork", persistent_workers=True)
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
    globals()[sys.argv[1]](*sys.argv[2:])
