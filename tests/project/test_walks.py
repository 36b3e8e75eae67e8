"""A tensor's way is short, and the page about it tells it: from `save()` to the disk, and back into
live state.
"""

import contextlib
import os
import re
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

import sidesave
from sidesave.client.daemon_link import connection
from sidesave.stager import signal_safe, torch_private
from sidesave.stager.copy import memcopy
from sidesave.stager.signal_safe import Worker
from sidesave.writer_daemon.process import server

MOST = 12
"""Functions of ours on a way to the disk."""
MOST_BACK = 10
"""And on one back."""
PAGE = Path(__file__).parents[2] / "docs" / "walks.md"
LARGE = 1 << 20

_handed = threading.local()
"""In a thread, for what it was given to do: how that came to be handed over."""


def here() -> list[str]:
    """The functions of ours that have led here, the first one first; through threads as well."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    ours = [
        frame.f_code.co_qualname
        for frame in reversed(frames)
        if _is_ours(frame.f_globals["__name__"])
    ]
    return getattr(_handed, "way", []) + [
        name.replace("<locals>.", "") for name in ours if not name.endswith("comp>")
    ]


def _is_ours(module: str) -> bool:
    return module.startswith("sidesave.")


def carrying(run: Callable[..., Any], *by: str) -> Callable[..., Any]:
    """``run`` for another thread, where :func:`here` tells also how it got there."""
    way = here() + list(by)

    def carried(*arguments: Any) -> Any:
        before, _handed.way = getattr(_handed, "way", []), way
        try:
            return run(*arguments)
        finally:
            _handed.way = before

    return carried


class Tasks(SimpleQueue[Callable[[], None]]):
    """What the daemon's loop gives its threads to do."""

    def put(
        self, item: Callable[[], None], block: bool = True, timeout: float | None = None
    ) -> None:
        super().put(carrying(item))


class Walked(server.Server):
    """A daemon that can be ended: by a task that exits."""

    def _catch_signals(self) -> None:
        self._signals, self.signal = socket.socketpair()

    def _execute(self, work: Any) -> None:
        with contextlib.suppress(SystemExit):
            super()._execute(work)


class DaemonInAThread:
    """A writer daemon in this process; shaped like `DaemonProcess`."""

    pid = os.getpid()

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pidfd, self._end = os.pipe()
        self._thread = threading.Thread(target=self._run, args=(theirs,), daemon=True)
        self._thread.start()

    def _run(self, control: socket.socket) -> None:
        served = Walked(control)
        served.run()
        served._work.put(sys.exit)
        served._directories.run.writer.close()
        for arena in served._arenas.values():
            arena.close()
        for end in (control, served._signals, served.signal):
            end.close()
        served._wakeup.close()
        for fd in (self._end, served._pidfd):
            os.close(fd)

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def wait(self, timeout_s: float) -> int | None:
        self._thread.join(timeout_s)
        return self.poll()

    def relay(self) -> None:
        pass

    def close(self) -> None:
        self.control.close()
        os.close(self.pidfd)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """How each copy of a large tensor came about, and each large write and read."""
    found: dict[str, list[list[str]]] = {"copy": [], "write": [], "read": []}
    start, submit, pool_submit = signal_safe.start, Worker.submit, ThreadPoolExecutor.submit
    monkeypatch.setattr(signal_safe, "start", lambda work, name: start(carrying(work), name))
    monkeypatch.setattr(
        Worker, "submit", lambda self, run: submit(self, carrying(run, "Worker.submit"))
    )
    monkeypatch.setattr(
        ThreadPoolExecutor,
        "submit",
        lambda self, run, *given: pool_submit(self, carrying(run), *given),
    )

    def note(owner: Any, name: str, kind: str, nbytes: Callable[..., int]) -> None:
        original = getattr(owner, name)

        def noting(*arguments: Any, **named: Any) -> Any:
            if nbytes(*arguments) >= LARGE:
                found[kind].append(here())
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, noting)

    note(memcopy, "_memmove", "copy", lambda target, source, nbytes: nbytes)
    note(torch.Tensor, "copy_", "copy", lambda target, source: source.nbytes)
    note(
        torch_private,
        "foreach_copy",
        "copy",
        lambda targets, sources: sum(source.nbytes for source in sources),
    )
    note(os, "pwrite", "write", lambda fd, data, offset: len(data))
    note(os, "preadv", "read", lambda fd, buffers, offset: sum(map(len, buffers)))
    monkeypatch.setattr(server, "_Tasks", Tasks)
    monkeypatch.setattr(connection, "DaemonProcess", DaemonInAThread)
    return found


def owned(device: str, *shape: int) -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.zeros(*shape, device=device))
    return {"weight": weight, "optimizer": torch.optim.SGD([weight], lr=0.1)}


STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "host": lambda: {"w": torch.zeros(1 << 19)},
    "host, by many threads": lambda: {"w": torch.zeros(1 << 23)},
    "host, beside training": lambda: owned("cpu", 1 << 19),
    "device": lambda: {"w": torch.zeros(1 << 19, device="cuda")},
    "device, beside training": lambda: owned("cuda", 1 << 19),
}


@pytest.mark.parametrize(
    "state",
    [pytest.param(name, marks=[pytest.mark.gpu] if "device" in name else []) for name in STATES],
)
def test_a_tensor_passes_few_functions_and_the_page_names_them(
    ways: dict[str, list[list[str]]], tmp_path: Path, state: str
):
    with sidesave.Checkpointer(
        tmp_path,
        staging=sidesave.StagingOptions(overlap=True if state == "host, beside training" else None),
    ) as ckpt:
        for step in (1, 2):
            ckpt.save(step, STATES[state]()).committed.result(300)
    copies = [way for way in ways["copy"] if way[0] == "Checkpointer.save"]
    writes = [way[way.index("Server._read_messages") :] for way in ways["write"]]
    assert copies and writes
    check_ways(copies + writes, MOST)


def check_ways(ways: Iterable[list[str]], most: int) -> None:
    """Each is short, passes no function twice, and is on the page."""
    page = re.sub(r"\s+", " ", PAGE.read_text())
    for way in {tuple(way) for way in ways}:
        assert len(way) <= most, way
        assert len(set(way)) == len(way), way
        assert " → ".join(f"`{name}`" for name in way) in page, way


class Kept:
    """An object of the user's, which takes its tensors one by one."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.copy_(state["value"])


TARGETS: dict[str, Callable[[], Any]] = {
    "module": lambda: torch.nn.Linear(1 << 10, 1 << 9, bias=False),
    "tensor": lambda: torch.zeros(1 << 9, 1 << 10),
    "object": lambda: Kept(torch.zeros(1 << 9, 1 << 10)),
}


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("by", ["load", "Checkpointer.load", "load_sources"])
def test_a_tensor_comes_back_by_few_functions_and_the_page_names_them(
    ways: dict[str, list[list[str]]], tmp_path: Path, kind: str, by: str
):
    target = TARGETS[kind]()
    with sidesave.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": target}, blocking=True)
        ways["copy"].clear()
        if by == "load":
            sidesave.load(tmp_path, into={"x": target})
        elif by == "load_sources":
            sidesave.load_sources([sidesave.Source(tmp_path)], into={"x": target})
        else:
            ckpt.load(into={"x": target})
    copies = [way for way in ways["copy"] if way[0] == by]
    reads = [way for way in ways["read"] if way[0] == by]
    assert copies and reads
    check_ways(copies + reads, MOST_BACK)
