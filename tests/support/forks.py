"""Python processes that are forked from one which has done their imports: they start in a moment.

Most of the time of the whole suite would go into interpreters that import torch, or what a daemon
needs. ``popen`` is ``subprocess.Popen`` for such a process; daemons of this process, and of those
started so, are started so as well. ``/proc`` shows the command line and the environment that they
would have had, ``sitecustomize`` is imported, warnings are as ``-W`` says. They end as any
interpreter does, except that modules and objects are not taken apart, which takes ten times as long
as the rest. Tests that are about starts, about what is inherited, or about ends do without.

As a script this module is the process from which others are forked. It is their parent, and reaps
them when asked to, or when who has started them is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import pickle
import secrets
import select
import selectors
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import recv_fds, send_fds  # which stay what they are where a process follows orders
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DAEMON = ("sidesave.writer_daemon.process.server",)
TRAINER = (
    "hypothesis",
    "pytest",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch._dynamo",  # by the first step of an optimizer
    "sidesave.client.checkpointer",
)
"""What daemons import, and what trainers do."""
_ARGUMENTS_NBYTES, _ENVIRONMENT_NBYTES = 4096, 32_768
"""Room for a command line, and for an environment."""
_HIGH_FD = 900
"""Above all that are in use."""
_NUMBER, _REAP = struct.Struct("<I"), b"?"
_MAX_FDS = 16
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
ADDRESS = "SIDESAVE_TEST_FORKS"
"""The variable that holds where daemons are forked; without it they are started."""
_wanted = False
_quick_ends = True


def popen(command: list[str], **options: Any) -> subprocess.Popen[Any]:
    """``subprocess.Popen(command, **options)`` of a process that will find imported what trainers
    import.
    """
    if not _wanted or "LD_PRELOAD" in (options.get("env") or os.environ):
        return subprocess.Popen(command, **options)
    return _Popen(_server("trainers", TRAINER), command, **options)


def run(command: list[str], said: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """Run such a process to its end; what it has said, on stdout and stderr."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with popen(command, text=True, **pipes, **options) as process:
        try:
            told, complaints = process.communicate(said, timeout=300)
        except BaseException:  # it does not outlive who waits for it
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, told, complaints)


def spawn(function: Callable[..., None], *arguments: Any, count: int = 2) -> None:
    """Call ``function(rank, *arguments)`` in this many processes, and wait for them; one that fails
    ends them all.
    """
    _spawn(function, arguments, count, Path(inspect.getfile(function)).parent)


def spawn_group(function: Callable[..., None], *arguments: Any, count: int = 2) -> None:
    """Like :func:`spawn`, within a process group of these processes over Gloo."""
    with tempfile.TemporaryDirectory() as folder:
        in_group = functools.partial(_call_in_group, function, count, f"file://{folder}/meeting")
        _spawn(in_group, arguments, count, Path(inspect.getfile(function)).parent)


def _call_in_group(
    function: Callable[..., None], count: int, meeting: str, rank: int, *arguments: Any
) -> None:
    import torch

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count)
    function(rank, *arguments)
    torch.distributed.destroy_process_group()


def _spawn(
    function: Callable[..., None], arguments: tuple[Any, ...], count: int, folder: Path
) -> None:
    call = f"import pickle; call, arguments = pickle.loads({pickle.dumps((function, arguments))!r})"
    path = ":".join([str(folder), *_paths()])
    with tempfile.TemporaryFile() as said, contextlib.ExitStack() as stack:
        processes: list[subprocess.Popen[Any]] = []
        for rank in range(count):
            command = [sys.executable, "-c", f"{call}; call({rank}, *arguments)"]
            processes.append(
                popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=said, stderr=said)
            )
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        deadline = time.monotonic() + 300
        while any(process.poll() is None for process in processes):
            assert time.monotonic() < deadline, "these processes do not end"
            if any(process.returncode for process in processes):
                break
            time.sleep(0.005)
        said.seek(0)
        assert not any(process.returncode for process in processes), said.read().decode()


def address() -> dict[str, str]:
    """The variable by which a process that starts others forks them where this one does."""
    return {f"{ADDRESS}_TRAINERS": _server("trainers", TRAINER)}


def _paths() -> list[str]:
    return [
        str(ROOT),
        str(ROOT / "tests" / "support"),
        *filter(None, os.environ.get("PYTHONPATH", "").split(":")),
    ]


def _popen_daemon(command: list[str], **options: Any) -> subprocess.Popen[Any]:
    environment = options["env"]
    if ADDRESS not in environment or "LD_PRELOAD" in environment:
        return subprocess.Popen(command, **options)
    return _Popen(environment[ADDRESS], command, **options)


def share() -> None:
    """The processes that this one starts from here on fork from the same two, which are started
    now.
    """
    for name, modules in (("trainers", TRAINER), ("daemons", DAEMON)):
        os.environ[f"{ADDRESS}_{name.upper()}"] = _server(name, modules)


def prepare() -> None:
    """Daemons of this process are forked wherever that is wanted."""
    from sidesave.client.daemon_link import process

    process.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": _popen_daemon})  # type: ignore[assignment]


@contextlib.contextmanager
def wanted(*, daemons: bool, quick_ends: bool = True) -> Iterator[None]:
    """From here on trainers are forked, and ``daemons`` too; without ``quick_ends`` they take apart
    all they have.
    """
    global _wanted, _quick_ends
    _wanted, _quick_ends = True, quick_ends
    if daemons:
        os.environ[ADDRESS] = _server("daemons", DAEMON)
    try:
        yield
    finally:
        _wanted = False
        os.environ.pop(ADDRESS, None)


class _Popen(subprocess.Popen[Any]):
    """A process whose parent is another, which tells how it ended."""

    def __init__(self, address: str, command: list[str], **options: Any) -> None:
        self._parent = socket.socket(socket.AF_UNIX)
        try:
            self._parent.connect("\0" + address)
            super().__init__(command, **options)
        except BaseException:  # nobody would close it
            self._parent.close()
            raise

    def _execute_child(self, *arguments: Any) -> None:
        asked = inspect.signature(super()._execute_child).bind(*arguments).arguments  # type: ignore[misc]
        streams = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        fds = {number: fd if fd >= 0 else number for number, fd in enumerate(streams)}
        fds |= {fd: fd for fd in asked["pass_fds"]}
        own_umask = Path("/proc/self/status").read_text().partition("Umask:")[2].split()[0]
        request = {
            "numbers": list(fds),
            "command": list(map(os.fspath, asked["args"])),
            "environment": {**(os.environ if asked["env"] is None else asked["env"])},
            "folder": str(asked["cwd"] or Path.cwd()),
            "umask": asked["umask"] if asked["umask"] >= 0 else int(own_umask, 8),
            "session": asked["start_new_session"],
            "quick_end": _quick_ends,
        }
        data = json.dumps(request).encode()
        sys.audit(
            "subprocess.Popen",
            sys.executable,
            request["command"],
            request["folder"],
            request["environment"],
        )
        send_fds(self._parent, [_NUMBER.pack(len(data))], list(fds.values()))
        self._parent.sendall(data)
        self.pid = self._ask()
        self._ended = os.pidfd_open(self.pid)
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in _PIPES))  # type: ignore[attr-defined]

    def _ask(self) -> int:
        answer = self._parent.recv(_NUMBER.size, socket.MSG_WAITALL)
        if not answer:
            raise OSError("the process that others are forked from has ended")
        return _NUMBER.unpack(answer)[0]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
                self._parent.sendall(_REAP)
                self.returncode = os.waitstatus_to_exitcode(self._ask())
                self._parent.close()
                os.close(self._ended)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        poller = select.poll()
        if self.returncode is None:  # else that descriptor is closed, and may be another one by now
            with contextlib.suppress(OSError):  # which another thread has closed
                poller.register(self._ended, select.POLLIN)
                poller.poll(None if timeout is None else max(0.0, timeout) * 1000)
        returncode = self._internal_poll()
        if returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return returncode


@functools.cache
def _server(name: str, modules: tuple[str, ...]) -> str:
    """The address of a process that has imported these modules, to fork from; starts it unless one
    is shared.
    """
    if address := os.environ.get(f"{ADDRESS}_{name.upper()}"):
        return address
    address = f"sidesave-tests-{name}-{os.getpid()}-{secrets.token_hex(8)}"
    ours, theirs = socket.socketpair()  # it ends when ours is closed, whatever may have ended us
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("\0" + address)
    listening.listen(64)
    own = {
        "PYTHONPATH": ":".join(_paths()),
        "OPENBLAS_NUM_THREADS": "1",
        "_ROOM": _ENVIRONMENT_NBYTES * "-",
    }
    with theirs, listening:
        fds = [listening.fileno(), theirs.fileno()]
        command = [
            sys.executable,
            "-P",
            __file__,
            *map(str, fds),
            *modules,
            _ARGUMENTS_NBYTES * "-",
        ]
        environment = {**os.environ, **own}
        environment.pop("TMPDIR", None)  # by which the processes of a test are known
        process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, env=environment)

    def close() -> None:
        ours.close()
        process.wait()

    atexit.register(close)
    return address


# The script ---------------------------------------------------------------------------------------


def _serve(listening: socket.socket, starter: socket.socket) -> dict[str, Any]:
    """Answer until who has started us is gone; returns in each process that is forked, with what
    was asked of it.
    """
    children: dict[socket.socket, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        selector.register(starter, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                source: Any = key.fileobj
                if source is starter:
                    os._exit(0)
                elif source is listening:
                    selector.register(listening.accept()[0], selectors.EVENT_READ)
                elif key.data:  # abandoned, and now it has ended
                    selector.unregister(source)
                    os.close(source)
                    os.waitpid(key.data, 0)
                elif source not in children:
                    if asked := _request(source):
                        pid = os.fork()
                        if pid == 0:
                            return asked
                        for fd in asked["received"]:
                            os.close(fd)
                        children[source] = pid
                        _tell(source, pid)
                    else:
                        selector.unregister(source)
                        source.close()
                else:
                    pid = children.pop(source)
                    if _receive(source, len(_REAP)):
                        _tell(source, os.waitpid(pid, 0)[1])
                    else:
                        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                    selector.unregister(source)
                    source.close()


def _request(source: socket.socket) -> dict[str, Any] | None:
    """What is asked for; None where who has begun to ask was killed meanwhile."""
    try:
        header, received, _, _ = recv_fds(source, _NUMBER.size, _MAX_FDS)
    except OSError:
        return None
    nbytes = _NUMBER.unpack(header)[0] if len(header) == _NUMBER.size else 0
    data = _receive(source, nbytes)
    if not nbytes or len(data) != nbytes:
        for fd in received:
            os.close(fd)
        return None
    return {**json.loads(data), "received": received}


def _receive(source: socket.socket, nbytes: int) -> bytes:
    """So many bytes, or fewer where there is nobody any more."""
    try:
        return source.recv(nbytes, socket.MSG_WAITALL)
    except OSError:
        return b""


def _tell(source: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody is there any more
        source.sendall(_NUMBER.pack(number))


def _become(asked: dict[str, Any]) -> list[str]:
    """Be what an interpreter would be that was started with this; what it is to run, and with
    what.
    """
    if asked["session"]:
        os.setsid()
    os.umask(asked["umask"])
    os.chdir(asked["folder"])
    _arrange(dict(zip(asked["received"], asked["numbers"], strict=True)))
    sys.executable, *arguments = sys.orig_argv = asked["command"]
    _show(sys.orig_argv, asked["environment"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    tempfile.tempdir = None
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
    sys.path[:0] = [entry for entry in path if entry not in sys.path]
    if (torch := sys.modules.get("torch")) and (count := os.environ.get("OMP_NUM_THREADS")):
        torch.set_num_threads(int(count))
    if any(Path(entry, "sitecustomize.py").exists() for entry in path):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    return arguments


def _arrange(numbers: dict[int, int]) -> None:
    """Give descriptors their numbers, and close all others."""
    high = {
        fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD): number for fd, number in numbers.items()
    }
    os.closerange(0, _HIGH_FD)
    for fd, number in high.items():
        os.dup2(fd, number)
        os.close(fd)


def _show(command: list[str], environment: dict[str, str]) -> None:
    """Have ``/proc`` show these as what this process was started with."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    arguments_at, arguments_end, environment_at, environment_end = map(int, fields[45:49])
    spare = arguments_end - arguments_at - sum(len(os.fsencode(word)) + 1 for word in command)
    folder, _, name = command[0].rpartition("/")
    # there is no other way to make it as long
    command = [f"{folder}/{spare * '/'}{name}", *command[1:]]
    variables = [f"{name}={value}" for name, value in environment.items()]
    for words, at, end in (
        (command, arguments_at, arguments_end),
        (variables, environment_at, environment_end),
    ):
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        assert len(text) <= end - at, "there is no room for it"
        ctypes.memmove(at, text.ljust(end - at, b"\0"), end - at)


def _code(path: str) -> types.CodeType:
    """Of that file, compiled once for all that run it."""
    code = importlib.machinery.SourceFileLoader("__main__", path).get_code("__main__")
    assert code is not None
    return code


def _run(arguments: list[str]) -> None:
    """Do what an interpreter does with these."""
    folder = True
    while (option := arguments[0]) in ("-P", "-W", "-u"):
        del arguments[0]
        if option == "-P":
            folder = False
        elif option == "-u":
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        else:
            sys.warnoptions = [arguments.pop(0)]
            warnings.simplefilter(sys.warnoptions[0])  # type: ignore[arg-type]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    match arguments:
        case ["-c", source, *rest]:
            sys.argv, place = ["-c", *rest], ""
            code = compile(source, "<string>", "exec")
        case ["-m", name, *rest]:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{name}.__main__")
            assert spec is not None and spec.origin is not None, f"there is no module {name}"
            sys.argv, place = [spec.origin, *rest], ""
            code = _code(spec.origin)
            main.__spec__ = spec
        case _:
            sys.argv, place = arguments, str(Path(arguments[0]).parent)
            code = _code(arguments[0])
            main.__file__ = arguments[0]
    if folder:
        sys.path.insert(0, place)
    exec(code, main.__dict__)


def _run_to_end(arguments: list[str]) -> None:
    """Do what an interpreter does with these and end as it does, but that nothing is freed one by
    one.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    try:
        _run(arguments)
        code = 0
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception:  # noqa: BLE001 - whatever it is, it is shown
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = 120
    os._exit(code & 0xFF)


if __name__ == "__main__":
    for module in sys.argv[3:-1]:
        importlib.import_module(module)
    if sys.argv[3:-1] == list(TRAINER):
        prepare()
    gc.collect()
    gc.freeze()
    asked = _serve(*(socket.socket(fileno=int(fd)) for fd in sys.argv[1:3]))
    (_run_to_end if asked["quick_end"] else _run)(_become(asked))
