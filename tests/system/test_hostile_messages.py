"""Hostile messages: whatever a daemon is sent, it refuses what it cannot use, and goes on."""

import contextlib
import dataclasses
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import campaigns
import pytest
import zmq
from hostile_bytes import MSGPACK_BOMBS
from trainers import DEADLINE_S, ROOT, Traces, await_end

sys.path.insert(0, str(ROOT))

from scripts import fuzz
from sidesave.client.daemon_link.process import DaemonProcess
from sidesave.errors import ProtocolError, SidesaveError, WriteError
from sidesave.stager.memory.arena import Arena
from sidesave.writer_daemon import protocol, wire
from sidesave.writer_daemon.options import DaemonOptions

pytestmark = pytest.mark.usefixtures("seed")


class Daemon:
    """A real writer daemon, and what a trainer has of it."""

    def __init__(self, run: Path, folder: str) -> None:
        self.process = DaemonProcess()
        self.control = self.process.control
        self.control.setblocking(True)
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._endpoint = f"ipc://{folder}/1"
        self.socket.bind(self._endpoint)
        self._run = run

    def boot(self) -> None:
        example = next(
            message
            for data in fuzz.messages()
            if isinstance(message := wire.decode(data), protocol.Boot)
        )
        boot = dataclasses.replace(
            example,
            endpoint=self._endpoint,
            token=b"token",
            directory=str(self._run),
            trainer_pid=os.getpid(),
            fallback_directory="",
            options=DaemonOptions(
                stall_timeout_s=60.0, takeover_timeout_s=example.options.takeover_timeout_s
            ),
        )
        me = os.pidfd_open(os.getpid())
        socket.send_fds(self.control, [wire.encode(boot)], [me])
        os.close(me)
        self.hear(protocol.Hello)
        self.hear(protocol.Ready)

    def hear(self, *kinds: type[protocol.Message]) -> protocol.Message:
        """Its next message of one of these kinds."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if self.socket.poll(1000):
                message = wire.decode(self.socket.recv())
                if isinstance(message, kinds):
                    return message
            assert self.process.poll() is None, self.process.last_words()
        raise AssertionError(f"no {kinds} came")

    def say(self, data: bytes) -> None:
        self.socket.send(data)

    def is_well(self) -> None:
        """It answers, and at the end it leaves when it is asked to."""
        while self.socket.poll(0):
            self.socket.recv()
        self.say(wire.encode(protocol.Status(attempt=1)))
        self.hear(protocol.Heartbeat)

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self.process.close()
        self.socket.close(0)
        self._context.term()


@pytest.fixture
def daemon(tmp_path: Path, traces: Traces, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("TMPDIR", traces.folder)
    daemon = Daemon(tmp_path / "run", traces.folder)
    yield daemon
    daemon.close()


@pytest.mark.parametrize(
    "junk",
    [b"", b"junk", b"\x91" * 60_000, "a message of another kind", "no descriptor", "bad pidfd"],
)
def test_a_daemon_that_is_told_nonsense_at_the_start_ends(daemon: Daemon, junk: Any):
    messages = {type(message): data for data in fuzz.messages() for message in [wire.decode(data)]}
    data = (
        junk
        if isinstance(junk, bytes)
        else messages[protocol.Drain if "kind" in junk else protocol.Boot]
    )
    if data:
        with Path(os.devnull).open() as null:
            fds = [null.fileno()] if junk == "bad pidfd" else []
            socket.send_fds(daemon.control, [data], fds)
    else:
        daemon.control.shutdown(socket.SHUT_RDWR)
    await_end(daemon.process.pidfd)
    assert daemon.process.poll() not in (None, 0)


def test_a_daemon_refuses_hostile_messages_and_goes_on(daemon: Daemon, tmp_path: Path):
    daemon.boot()
    rng = random.Random(campaigns.seed())
    seeds = fuzz.messages()
    harmful = (protocol.Drain, protocol.Save, protocol.Watch)
    for number in range(300):
        data = fuzz.mutate_msgpack(rng, rng.choice(seeds))
        with contextlib.suppress(ProtocolError):
            if isinstance(wire.decode(data), harmful):
                continue  # well formed after all, and it would do as told
        daemon.say(data)
        if number % 50 == 0:
            daemon.is_well()
    for bomb in MSGPACK_BOMBS.values():
        daemon.say(bomb)
    daemon.say(b"x" * (3 << 20))
    daemon.is_well()
    daemon.say(wire.encode(protocol.Drain(attempt=1)))
    await_end(daemon.process.pidfd)
    assert daemon.process.poll() == 0, daemon.process.last_words()
    assert [
        path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith(".sidesave")
    ] == []


def hostile_descriptors() -> Iterator[tuple[str, list[int]]]:
    """Descriptors that are no staging memory."""
    header = struct.pack("<8sQQ", b"SIDESAV1", 1 << 40, 4096)

    def memory(data: bytes, seals: int, length: int | None = None) -> int:
        import fcntl

        fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
        os.write(fd, data)
        if length is not None:
            os.ftruncate(fd, length)
        fcntl.fcntl(fd, 1033, seals)
        return fd

    whole = Arena.create(0, 4096)
    yield "none", []
    yield "too many", [os.dup(whole.fd) for _ in range(4)]
    yield "more than are taken", [os.dup(whole.fd) for _ in range(20)]
    yield "pipe", list(os.pipe())[:1]
    yield "directory", [os.open("/", os.O_RDONLY)]
    yield "device", [os.open("/dev/zero", os.O_RDWR)]
    yield "socket", [socket.socket(socket.AF_UNIX).detach()]
    yield "pidfd", [os.pidfd_open(os.getpid())]
    yield "unsealed", [memory(header, 0)]
    yield "empty", [memory(b"", 6)]
    yield "of another length", [memory(header, 6, 8192)]
    yield "terabytes", [memory(header, 6, 1 << 40)]
    yield "data beyond its end", [memory(struct.pack("<8sQQ", b"SIDESAV1", 8192, 1 << 50), 6, 8192)]
    whole.close()


def test_a_daemon_refuses_hostile_descriptors_keeps_none_and_goes_on(daemon: Daemon):
    daemon.boot()
    daemon.is_well()
    attach = wire.encode(protocol.Attach(attempt=1, arena=9))
    detach = wire.encode(protocol.Detach(attempt=1, arena=9))
    arena = Arena.create(0, 4096)
    before = daemon.descriptors()
    for _, fds in hostile_descriptors():
        for data in (attach, detach, b"junk", b"x" * 100_000):
            socket.send_fds(daemon.control, [data], fds)
        for fd in fds:
            os.close(fd)
    socket.send_fds(daemon.control, [detach], [])
    daemon.is_well()
    deadline = time.monotonic() + DEADLINE_S
    while daemon.descriptors() > before and time.monotonic() < deadline:
        daemon.is_well()
    assert daemon.descriptors() <= before  # what it still had from its start may be closed by now
    arena.close()


def test_staging_memory_whose_words_change_under_the_reader_is_refused_or_void():
    rng = random.Random(campaigns.seed())
    arena = Arena.create(200, 8192)
    reader = Arena.attach(os.dup(arena.fd))
    arena.begin_generation()
    arena.mark_staged(b"message")
    assert reader.staged_descriptor() == b"message"
    for _ in range(2000):
        at = rng.choice([0, 8, 16, 64, 128, 136, 192])
        arena.view(at, 8)[:] = struct.pack("<Q", rng.choice(fuzz.NUMBERS) % 2**64)
        found = reader.staged_descriptor()
        assert found is None or len(found) <= reader.data_offset - 4096
        assert reader.data_offset + reader.data_nbytes == reader.nbytes == arena.nbytes
    reader.close()
    arena.close()


def test_a_write_error_is_one_of_ours():
    """What the tests above suppress is the tree of sidesave, whose storage errors are OSErrors
    too.
    """
    assert issubclass(WriteError, SidesaveError) and issubclass(WriteError, OSError)
