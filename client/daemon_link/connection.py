"""The trainer's side of the wire: a thread owns the ZeroMQ socket, watches and replaces the daemon.

A new daemon gets the same memory, and every open request again
(:mod:`sidesave.client.daemon_link.pending`). This room knows no tensors.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Final

import zmq

from sidesave import errors
from sidesave.client.daemon_link.pending import Listener, Request, Requests
from sidesave.client.daemon_link.process import DaemonProcess, require_descriptors
from sidesave.client.daemon_link.restarts import Restarts
from sidesave.client.daemon_link.socket_dir import locked_socket_directory
from sidesave.errors import (
    ClosedError,
    CommitUnknownError,
    DaemonDiedError,
    DaemonStartError,
    ProtocolError,
    SidesaveError,
    WriteError,
    WriteStalledError,
)
from sidesave.stager.memory.arena import Arena, forget_in_child
from sidesave.stager.signal_safe import Wakeup
from sidesave.writer_daemon import protocol, wire
from sidesave.writer_daemon.protocol import Boot, Message, Note

logger = logging.getLogger(__name__)

START_TIMEOUT_S: Final = 60.0
"""From spawn to HELLO; a cold file system may have to read Python itself first."""
SILENCE_TIMEOUT_S: Final = 30.0
"""Silence, in seconds, after which a ready daemon is replaced; it sends a message each second."""
MAX_DEATHS: Final = 5
"""Deaths of daemons that a request or a start survives; deaths without work do not count."""
_KILL_TIMEOUT_S: Final = 10.0
_LAST_MESSAGE_TIMEOUT_S: Final = 2.0
"""What a daemon has sent before it ended may still be on its way through ZeroMQ's own thread."""


class Connection:
    """Keeps a daemon running and sends it saves; any thread may call its public methods."""

    _listener: Listener

    def __init__(self, boot: Boot) -> None:
        """Prepare; ``boot`` is each daemon's first message, without the fields set per daemon."""
        self._boot = boot
        self._lock = threading.RLock()  # a signal handler may come in where this thread holds it
        self._arenas: dict[int, Arena] = {}
        self._requests = Requests()
        self._to_send: queue.SimpleQueue[tuple[Request, bytes | None]] = queue.SimpleQueue()
        require_descriptors()
        self._wakeup = Wakeup()
        self._process: DaemonProcess | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._context = zmq.Context(io_threads=1)
        self._attempt = 0
        self._by_pid = False
        self._restarts = Restarts()
        self._ready = threading.Event()
        self._failure: SidesaveError | None = None
        self._draining = False
        self._drain_by = float("inf")
        self.recovered: tuple[str, ...] = ()
        self.removed: tuple[str, ...] = ()
        self.left: tuple[str, ...] = ()
        self.released = False
        """Whether the last daemon has released the directory and only finishes its mirror."""
        self.reaper: threading.Thread | None = None
        """Ends with the last daemon, where that was left to finish alone."""
        forget_in_child(self)
        self._thread = threading.Thread(target=self._run, name="sidesave-client", daemon=True)

    def start(self, listener: Listener) -> None:
        """Start the thread and the first daemon."""
        self._listener = listener
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The daemon's process id; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def wait_ready(self) -> None:
        """Block until the daemon holds the directory, or raise; its deadlines bound the wait."""
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    def attach(self, number: int, arena: Arena) -> None:
        """Pass an arena to this daemon and to every later one."""
        with self._lock:
            self._arenas[number] = arena
            self._send_arena(number, arena)

    def detach(self, number: int) -> None:
        """Say that an arena is about to go."""
        with self._lock:
            if self._arenas.pop(number, None) is not None:
                self._send_control(protocol.Detach(attempt=self._attempt, arena=number), [])

    def submit(self, request: Request, encoded: bytes | None = None) -> None:
        """Have a staged save written or refused, or a step deleted; never blocks.

        The listener hears the outcome. A request that is ``encoded`` already is sent as it is to
        the daemon that it is for.
        """
        with self._lock:
            failure = self._failure
            if failure is None:
                self._to_send.put((request, encoded))
        if failure is None:
            self._wake_up()
        else:
            self._listener.lose([request.save_id], failure)

    def note(self, note: Note) -> None:
        """Send a message that needs no answer. Never blocks; it is lost if no daemon listens."""
        with self._lock, contextlib.suppress(OSError):
            if self._process is not None:
                data = wire.encode(replace(note, attempt=self._attempt))
                self._process.control.send(data, socket.MSG_DONTWAIT)

    def close(self, timeout_s: float) -> None:
        """Let the daemon finish, for up to ``timeout_s``; then it finishes alone. Idempotent."""
        self._drain(timeout_s)
        if self._thread.ident is not None and not self.is_this_thread():
            self._thread.join(timeout_s + 5)
        with self._lock:
            # What another thread had begun before is refused: nobody would answer it.
            text = f"the checkpointer of {self._boot.directory} is closed"
            self._failure = self._failure or ClosedError(text)
            if not self._thread.is_alive():
                self._forget()

    def give_up_starting(self, timeout_s: float) -> None:
        """End a daemon that is not ready and fail the start; a ready one has ``timeout_s``."""
        self._drain(timeout_s)

    def _drain(self, timeout_s: float) -> None:
        self._drain_by = time.monotonic() + timeout_s
        self._draining = True
        self._wake_up()

    def is_this_thread(self) -> bool:
        """Whether the caller runs in the connection's thread, as callbacks of futures do."""
        return threading.get_ident() == self._thread.ident

    def _wake_up(self) -> None:
        with self._lock:
            self._wakeup.wake()

    def _forget(self) -> None:
        self._wakeup.close()

    # The thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (words := self._serve_one_daemon()) is not None:
                self._pause(words)
        except SidesaveError as error:
            self._give_up(error)
        except BaseException as error:  # whatever it is, saves wait for this thread
            logger.exception("the connection to the writer daemon broke")
            self._give_up(DaemonDiedError(f"the connection to the writer daemon broke: {error!r}"))
        finally:
            self._context.term()
            self._ready.set()

    def _serve_one_daemon(self) -> str | None:
        """Run one daemon to its end; return its last words, or None if no other should follow."""
        try:
            with self._spawned() as process:
                self._converse(process)
                if self._draining:
                    left_s = 0.0 if self.released else self._drain_by - time.monotonic()
                    status = process.wait(max(0.0, left_s))
                    process.relay()
                    if status == 0 or status is None:
                        return None  # drained, or left to finish alone
                words = self._end(process)
        except DaemonStartError as error:
            words = str(error)
        self._take_queued()
        if self._draining and not self._requests:
            return None
        self._restarts.daemon_died()
        if self._restarts.in_a_row > MAX_DEATHS and not self._ready.is_set():
            raise DaemonStartError(words)
        lost = self._requests.daemon_died(MAX_DEATHS)
        if lost:
            text = f"the writer daemon died {MAX_DEATHS + 1} times with this to do"
            self._listener.lose(lost, DaemonDiedError(f"{text}, so it is given up: {words}"))
        return words

    def _pause(self, words: str) -> None:
        """Wait before the next daemon; longer after each that died early."""
        delay_s = self._restarts.pause_s(idle=not self._requests)
        logger.warning(
            "the writer daemon died; starting another in %.2f s. How it ended: %s", delay_s, words
        )
        self._wakeup.wait(delay_s)

    def _take_queued(self) -> None:
        """Take what was submitted while no daemon listened, for the next one."""
        while not self._to_send.empty():
            self._requests.keep(self._to_send.get()[0])

    @contextlib.contextmanager
    def _spawned(self) -> Generator[DaemonProcess]:
        require_descriptors()
        try:
            with locked_socket_directory() as directory:
                self._attempt += 1
                token = secrets.token_bytes(16)
                endpoint = f"ipc://{directory}/{self._attempt}"
                boot = replace(self._boot, endpoint=endpoint, token=token)
                boot = replace(boot, attempt=self._attempt, resumes=self._ready.is_set())
                process = DaemonProcess()
                me = os.pidfd_open(os.getpid())
                try:
                    with self._lock:
                        self._process = process
                        self._bind(endpoint, process.pid)
                        self._send_control(boot, [me])
                        for number, arena in self._arenas.items():
                            self._send_arena(number, arena)
                finally:
                    os.close(me)
                self._greet(process, token)
            # The connection goes on without its path, and nobody else can join.
            self._await_ready(process)
            yield process
        finally:
            self._hang_up()

    def _bind(self, endpoint: str, pid: int) -> None:
        """Open a socket that serves only the first process to connect, even if it is a stranger."""
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        if self._by_pid:  # not always: some sandboxes do not tell the pid of a peer
            with contextlib.suppress(zmq.ZMQError):  # a libzmq built without
                self._socket.setsockopt(zmq.IPC_FILTER_PID, pid)
        self._socket.bind(endpoint)

    def _hang_up(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            self.reaper = process.close()
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None

    def _greet(self, process: DaemonProcess, token: bytes) -> None:
        """Wait for HELLO; after a stranger's message the next daemon gets another place."""
        self._by_pid = not self._by_pid  # for the next one, unless this one is there
        try:
            hello = self._await(process, START_TIMEOUT_S, "to connect")
            given = hello.token if isinstance(hello, protocol.Hello) else b""
            if not secrets.compare_digest(given, token):
                raise ProtocolError(f"{hello.kind} without the token came in place of HELLO")
        except ProtocolError as error:
            self._end(process)
            text = f"another process answered in place of the writer daemon: {error}"
            raise DaemonStartError(text) from error
        self._by_pid = False

    def _await_ready(self, process: DaemonProcess) -> None:
        timeout_s = START_TIMEOUT_S + self._boot.options.takeover_timeout_s + 600
        ready = self._await(process, timeout_s, "to recover the directory")
        if isinstance(ready, protocol.Failed):
            self._end(process)
            error = errors.from_wire(ready.error, ready.message, ready.errno, ready.path)
            if self._ready.is_set() and isinstance(error, WriteError):
                # This may be temporary: the next daemon tries again.
                raise DaemonStartError(str(error)) from error
            raise error
        if not isinstance(ready, protocol.Ready):
            raise ProtocolError(f"{ready.kind} came in place of READY")
        if not self._ready.is_set():
            self.recovered, self.removed, self.left = ready.recovered, ready.removed, ready.left
        for message in self._requests.for_successor(self._attempt):
            self._send(message)
        self._restarts.ready_at = time.monotonic()
        self._ready.set()

    def _await(self, process: DaemonProcess, timeout_s: float, purpose: str) -> Message:
        """The daemon's next message during its start."""
        assert self._socket is not None
        poller = self._poller(process)
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            events = dict(poller.poll(max(0, int(left * 1000))))
            self._wakeup.clear()
            if self._draining and not self._ready.is_set():
                process.kill()  # nothing was asked of it yet
                self._end(process)
                text = f"the checkpointer of {self._boot.directory} was closed while it started"
                raise ClosedError(text)
            if self._socket in events:
                return wire.decode(self._socket.recv(zmq.NOBLOCK))
            has_ended = process.pidfd in events
            if has_ended or left <= 0:
                refused = process.poll() == protocol.EXIT_REFUSED
                if refused and self._socket.poll(int(_LAST_MESSAGE_TIMEOUT_S * 1000)):
                    continue
                waited = "ended while it was" if has_ended else f"took over {timeout_s:g} s"
                text = f"the writer daemon {waited} {purpose}: {self._end(process)}"
                raise DaemonStartError(text)

    def _converse(self, process: DaemonProcess) -> None:
        """Exchange messages until the daemon ends, hangs, or is to be left."""
        assert self._socket is not None
        poller = self._poller(process)
        heard = time.monotonic()
        drain_sent = False
        while True:
            events = dict(poller.poll(200 if self._draining else 1000))
            self._wakeup.clear()
            if process.pidfd not in events:  # else they are in its last words
                process.relay()
            while True:
                try:
                    data = self._socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                heard = time.monotonic()
                self._receive(wire.decode(data))
            while not self._to_send.empty():
                request, encoded = self._to_send.get()
                try:
                    message = self._requests.add(request, self._attempt)
                    self._send(message, encoded if message is request else None)
                except ProtocolError as error:  # it cannot be told to any daemon; all others can
                    self._requests.drop(request.save_id)
                    self._listener.lose([request.save_id], error)
            if process.pidfd in events or self.released:
                return
            if self._draining and not drain_sent:
                self._send(protocol.Drain(attempt=self._attempt))
                drain_sent = True
            if self._draining and time.monotonic() > self._drain_by:
                return
            if time.monotonic() - heard > SILENCE_TIMEOUT_S:
                text = "the writer daemon %d has been silent for %g s: killing it"
                logger.error(text, process.pid, SILENCE_TIMEOUT_S)
                process.kill()
                return

    def _poller(self, process: DaemonProcess) -> zmq.Poller:
        assert self._socket is not None
        poller = zmq.Poller()
        for source in (self._socket, process.pidfd, self._wakeup):
            poller.register(source, zmq.POLLIN)
        return poller

    def _receive(self, message: Message) -> None:
        if message.attempt != self._attempt:
            logger.warning("ignored a message of an earlier daemon: %s", message.kind)
            return
        if isinstance(message, protocol.Committed):
            self._restarts.in_a_row = 0
        if isinstance(message, protocol.Released):
            self.released = True
        elif self._requests.hear(message) or isinstance(
            message, (protocol.Mirrored, protocol.MirrorState)
        ):
            self._listener.receive(message)
        elif isinstance(message, protocol.Failed):
            logger.warning("the writer daemon reports: %s", message.message)

    def _send(self, message: Message, encoded: bytes | None = None) -> None:
        assert self._socket is not None
        try:
            self._socket.send(encoded or wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # it takes 1,000 messages unread; the silence deadline will deal with it
            logger.warning("the writer daemon does not take messages")

    def _send_control(self, message: Message, fds: list[int]) -> None:
        """Send on the socket pair, with the lock held; a dead daemon's successor gets it."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                socket.send_fds(self._process.control, [wire.encode(message)], fds)

    def _send_arena(self, number: int, arena: Arena) -> None:
        self._send_control(protocol.Attach(attempt=self._attempt, arena=number), [arena.fd])

    def _end(self, process: DaemonProcess) -> str:
        """Make sure that a daemon is gone, which fences it; returns its last words."""
        if process.wait(2.0) is None:
            process.kill()
            if process.wait(_KILL_TIMEOUT_S) is None:
                self._outwait(process)
        return process.last_words()

    def _outwait(self, process: DaemonProcess) -> None:
        """Wait for the end of a daemon that is stuck in the kernel.

        It may still write, so no other may start. Requests that have waited for ``stall_timeout_s``
        fail meanwhile.
        """
        text = (
            f"the writer daemon {process.pid} cannot be killed: it is stuck in the kernel until "
            "storage answers"
        )
        if not self._ready.is_set():
            raise DaemonDiedError(text)
        logger.error("%s; another one starts when it does", text)
        fail_at = time.monotonic() + self._boot.stall_timeout_s
        while process.wait(0.2) is None:
            if self._draining and time.monotonic() > self._drain_by:
                raise DaemonDiedError(text)
            if time.monotonic() > fail_at:
                self._lose(WriteStalledError(errno.ETIMEDOUT, text, self._boot.directory))

    def _give_up(self, error: SidesaveError) -> None:
        with self._lock:
            self._failure = error  # from here on submit() refuses
        self._lose(error)

    def _lose(self, error: SidesaveError) -> None:
        """Fail all open requests; saves reported as written may or may not be committed."""
        self._take_queued()
        lost = self._requests.give_up()
        unknown = CommitUnknownError(errno.ETIMEDOUT, str(error), self._boot.directory)
        self._listener.lose([save_id for save_id, written in lost.items() if not written], error)
        self._listener.lose([save_id for save_id, written in lost.items() if written], unknown)
