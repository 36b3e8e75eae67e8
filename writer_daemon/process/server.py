"""The daemon's process: one loop that listens, one thread that writes.

The loop owns the sockets and the state machine (``jobs``) and never touches storage, so it answers while storage hangs.
It listens to the trainer's messages, to the socket pair that brings staging memory, to the trainer's end (its pidfd
and the end of the socket pair: an ``exec`` silences the first, a forked child the second), and to signals. The thread
executes one storage operation after another and reports back as events.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import math
import os
import queue
import resource
import select
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

import psutil
import zmq

from sidesave.errors import ProtocolError, SidesaveError, WriteError, WriteStalledError
from sidesave.stager.memory import numa
from sidesave.stager.memory.arena import Arena
from sidesave.writer_daemon import log, protocol
from sidesave.writer_daemon.commit import commit
from sidesave.writer_daemon.format import fallbacks
from sidesave.writer_daemon.lease.follower import LeaseFollower
from sidesave.writer_daemon.lease.lease import Lease, current_holder
from sidesave.writer_daemon.lease.record import LeaseRecord
from sidesave.writer_daemon.mirror.mirror import Mirror
from sidesave.writer_daemon.process import jobs
from sidesave.writer_daemon.process.worker import Place, Worker
from sidesave.writer_daemon.protocol import Message, Save
from sidesave.writer_daemon.storage import PosixStorage, urls
from sidesave.writer_daemon.storage.posix import make_run_directory
from sidesave.writer_daemon.writing.writer import Writer

logger = logging.getLogger(__name__)

HEARTBEAT_S: Final = 1.0
_BOOT_TIMEOUT_S: Final = 30.0
_RECLAIM_TIMEOUT_S: Final = 10.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


_Tasks = queue.SimpleQueue[Callable[[], None]]


class Server:
    """Serves one trainer over an inherited socket pair until it drains or dies."""

    def __init__(self, control: socket.socket) -> None:
        """Take over ``control``; :meth:`run` does the rest."""
        self._control = control
        self._arenas: dict[int, Arena] = {}
        self._events: queue.SimpleQueue[jobs.Event] = queue.SimpleQueue()
        self._work = _Tasks()
        self._commits = self._work
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._trainer_gone = False
        self._trainer_closed = False
        self._abandoned = threading.Event()
        self._running = True
        self._left = False
        self._mirror: Mirror | None = None
        self._last_progress = time.monotonic()

    def run(self) -> int:
        """Serve until all accepted work is done and the trainer is gone or sent DRAIN; returns the exit status."""
        self._catch_signals()
        boot, self._pidfd = self._receive_boot()
        self._boot, options = boot, boot.options
        if boot.encrypts:
            _leave_no_core()
        _be_modest(options)
        _allow_many_files()
        self._jobs = jobs.Jobs(boot.attempt)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a trainer that was stopped for hours must still learn of its saves
        self._socket.connect(boot.endpoint)
        self._send(protocol.Hello(attempt=boot.attempt, token=boot.token, pid=os.getpid()))
        lease: Lease | LeaseFollower | None = None
        recovery = commit.Recovery((), (), ())
        name = f"{boot.attempt}-{os.getpid()}"
        if boot.world_size > 1:  # on another host another daemon may have this pid
            name = f"{boot.rank}-{name}"
        try:
            if urls.is_url(boot.directory):
                urls.remember(boot.directory, urls.decode_options(boot.storage_options))
            storage = urls.open_for_writing(boot.directory)
            if boot.resumes and current_holder(storage) is None:
                text = "this is not the directory that the run began in, as no lease is here: put that back, or restart"
                raise WriteError(errno.ENOENT, text, boot.directory)
            if boot.rank == 0:
                holder = LeaseRecord.current(boot.session, boot.trainer_pid)
                lease = Lease(storage, holder, options.takeover_timeout_s, self._trainer_is_there, resumes=boot.resumes)
                recovery = commit.recover(storage, lease, name, alone=boot.world_size == 1)
            else:
                lease = LeaseFollower(storage, boot.session, boot.rank)
        except SidesaveError as error:
            self._send(protocol.failure(boot.attempt, None, error))
            if lease is not None:
                lease.release(final=False)
            self._linger()
            return protocol.EXIT_REFUSED
        self._lease, self._storage = lease, storage
        ready = protocol.Ready(
            attempt=boot.attempt, recovered=recovery.committed, removed=recovery.removed, left=recovery.left
        )
        self._send(ready)
        if boot.rank == 0 and options.mirror:
            self._mirror = Mirror(boot, self._wake_up)
            self._mirror.start()
        outcome = recovery.committed, recovery.removed
        if boot.rank == 0 and isinstance(storage, PosixStorage):
            records = log.HistoryLog(storage)
            self._history = log.Recorder(boot.session, lambda record: self._work.put(lambda: records.append(record)))
            self._work.put(
                lambda: log.log_recovery(records, storage, boot.session, *outcome, options.fallback_directory)
            )
        else:
            # Rank 0 keeps it for all, and nobody in a store, where nothing can be appended to.
            self._history = log.Recorder(boot.session, lambda record: None)
        writer = Writer(storage, name, self._abandoned, lease.check, options.commit_timeout_s)
        primary = Place(storage, lease, writer, name)
        self._worker = Worker(
            boot.attempt,
            primary,
            options.fallback_directory,
            self._open_fallback,
            options.retries,
            self._history.started,
            self._post,
            options.commit_timeout_s,
        )
        threading.Thread(target=self._execute, args=(self._work,), name="sidesave-storage", daemon=True).start()
        if boot.world_size > 1:  # the next save is written while one waits for other ranks
            self._commits = _Tasks()
            threading.Thread(target=self._execute, args=(self._commits,), name="sidesave-commit", daemon=True).start()
        self._loop()
        idle = threading.Event()
        self._work.put(self._worker.close)
        self._work.put(idle.set)
        if time.monotonic() < lease.end_by:
            idle.wait(_RECLAIM_TIMEOUT_S)  # what failed saves and deleted steps leave is still being removed
        ended = self._trainer_closed or not self._trainer_is_there()  # else a signal came
        if self._mirror is None:
            self._linger()
            lease.release(final=ended)
        else:
            self._left = True
            lease.release(final=ended)
            self._finish_mirror(self._mirror, goes_on=ended)
        return 0

    def _finish_mirror(self, mirror: Mirror, *, goes_on: bool) -> None:
        """The next session has the run directory: let the mirror get what it lacks, until a signal comes."""
        if goes_on and not mirror.ended.is_set():
            self._send(protocol.Released(attempt=self._boot.attempt))
            mirror.finish()
        else:
            mirror.stop()
        self._tell_of_mirror()
        self._linger()
        self._arenas.clear()
        poller = select.poll()
        for fd in (self._wake, self._signals.fileno()):
            poller.register(fd, select.POLLIN)
        give_up_at = math.inf if goes_on else time.monotonic() + _RECLAIM_TIMEOUT_S
        while not mirror.ended.is_set() and time.monotonic() < give_up_at:  # its storage may hang
            ready = {fd for fd, _ in poller.poll(int(HEARTBEAT_S * 1000))}
            self._drain_wakeups()
            if self._signals.fileno() in ready:
                self._signals.recv(4096)
                mirror.stop()
                give_up_at = min(give_up_at, time.monotonic() + _RECLAIM_TIMEOUT_S)

    def _open_fallback(self) -> Place:
        """Open the fallback directory, creating it if needed; in the storage thread."""
        boot, name = self._boot, f"{self._boot.attempt}-{os.getpid()}"
        directory = boot.options.fallback_directory
        make_run_directory(directory)
        storage = PosixStorage(directory)
        holder = LeaseRecord.current(boot.session, boot.trainer_pid)
        lease = None
        try:
            lease = Lease(storage, holder, boot.options.takeover_timeout_s, self._trainer_is_there)
            commit.recover(storage, lease, name)
            fallbacks.mark_used(boot.directory)
        except BaseException:  # the next save tries again
            if lease is not None:
                lease.release()
            storage.close()
            raise
        writer = Writer(storage, name, self._abandoned, lease.check, boot.options.commit_timeout_s, self._storage)
        return Place(storage, lease, writer, name)

    # The loop --------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for fd in (self._control.fileno(), self._pidfd, self._wake, self._signals.fileno()):
            poller.register(fd, zmq.POLLIN)
        next_heartbeat = time.monotonic()
        while self._running:
            ready = {event[0] for event in poller.poll(int(HEARTBEAT_S * 1000))}
            self._drain_wakeups()
            if self._signals.fileno() in ready:
                self._signals.recv(4096)
                self._handle(jobs.DrainRequested())
            if self._control.fileno() in ready and not self._trainer_gone:
                self._read_control()
            if self._socket in ready:
                self._read_messages()
            if not self._trainer_gone and self._pidfd in ready:
                self._trainer_gone = True
            if self._trainer_gone and self._control.fileno() in poller:
                poller.unregister(self._control.fileno())
                poller.unregister(self._pidfd)
                self._adopt_staged()
                self._handle(jobs.DrainRequested())
            while self._running:
                try:
                    event = self._events.get_nowait()
                except queue.Empty:
                    break
                self._handle(event)
            self._tell_of_mirror()
            now = time.monotonic()
            self._watch_for_stall(now)
            if now >= self._lease.end_by:
                logger.warning("the next session waits for %s: what is unfinished is left to it", self._boot.directory)
                self._running = False
            if now >= next_heartbeat:
                next_heartbeat = now + HEARTBEAT_S
                self._send(protocol.Heartbeat(attempt=self._boot.attempt, saves=len(self._jobs)))

    def _tell_of_mirror(self) -> None:
        if self._mirror is not None:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._send(self._mirror.messages.get_nowait())

    def _handle(self, event: jobs.Event) -> None:
        if self._mirror is not None and isinstance(event, jobs.CommitEnded) and event.error is None:
            self._mirror.committed(event.save_id, event.name, event.nbytes)
        if not isinstance(event, jobs.Request):
            self._last_progress = time.monotonic()
        if isinstance(event, (jobs.Submitted, jobs.Watched)):
            self._history.accepted(event.save)
        for action in self._jobs.handle(event):
            match action:
                case jobs.Send(message):
                    self._send(message)
                    self._history.reported(message)
                case jobs.StartWrite(save, memory):
                    self._last_progress = time.monotonic()
                    if memory:
                        self._history.started(save)
                    arena = self._arenas.get(save.arena) if memory else None
                    self._work.put(functools.partial(self._worker.write, save, arena))
                case jobs.StartCommit(save):
                    self._commits.put(functools.partial(self._worker.commit, save))
                case jobs.StartDelete(request):
                    self._last_progress = time.monotonic()
                    self._work.put(functools.partial(self._worker.delete, request))
                case jobs.StartRefusal(request):
                    self._work.put(functools.partial(self._worker.refuse, request))
                case jobs.Reclaim(save, failure):
                    self._work.put(functools.partial(self._worker.reclaim, save, failure))
                case jobs.Exit():
                    self._running = False

    def _watch_for_stall(self, now: float) -> None:
        stuck = self._jobs.awaited
        if stuck is not None and now - self._last_progress > self._boot.options.stall_timeout_s:
            message = f"no byte of step {stuck.step} has moved for {self._boot.options.stall_timeout_s:g} s"
            error = WriteStalledError(errno.ETIMEDOUT, message, self._boot.directory)
            self._handle(jobs.Stalled(protocol.failure(self._boot.attempt, stuck.save_id, error)))

    # What comes in ---------------------------------------------------------------------------------------------

    def _read_messages(self) -> None:
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = protocol.decode(data)
                if message.attempt != self._boot.attempt:
                    raise ProtocolError(f"a message of attempt {message.attempt} reached attempt {self._boot.attempt}")
                self._accept(message)
            except ProtocolError as error:
                logger.warning("refused a message: %s", error)
                self._send(protocol.failure(self._boot.attempt, None, error))

    def _accept(self, message: Message) -> None:
        match message:
            case Save():
                if message.arena not in self._arenas:
                    self._read_control()  # its ATTACH was sent first, on the other channel
                if message.arena not in self._arenas:
                    error = ProtocolError(f"arena {message.arena} was never attached")
                    self._send(protocol.failure(self._boot.attempt, message.save_id, error))
                    return
                self._handle(jobs.Submitted(message))
            case protocol.Watch(save=save):
                self._handle(jobs.Watched(save))
            case protocol.Delete(mirror=True) if self._mirror is not None:
                self._mirror.delete(message)
            case protocol.Delete(mirror=False):
                self._handle(jobs.DeleteRequested(message))
            case protocol.Refuse():
                boot = self._boot
                identity = (message.session, message.rank, message.world_size)
                if identity != (boot.session, boot.rank, boot.world_size) or boot.world_size == 1:
                    raise ProtocolError(f"REFUSE of rank {message.rank} in session {message.session} is not ours")
                self._handle(jobs.RefusalRequested(message))
            case protocol.Status():
                self._send(protocol.Heartbeat(attempt=self._boot.attempt, saves=len(self._jobs)))
            case protocol.Drain():
                self._trainer_closed = True
                if self._mirror is not None:
                    self._mirror.tell_trainer_gone()
                self._handle(jobs.DrainRequested())
            case _:
                raise ProtocolError(f"a trainer does not send {message.kind}")

    def _receive_boot(self) -> tuple[protocol.Boot, int]:
        self._control.settimeout(_BOOT_TIMEOUT_S)
        data, fds, _, _ = socket.recv_fds(self._control, protocol.MAX_MESSAGE_NBYTES, 1)
        self._control.setblocking(False)
        boot = protocol.decode(data)
        if not isinstance(boot, protocol.Boot) or len(fds) != 1:
            raise ProtocolError("the first message must be BOOT, with a pidfd")
        return boot, fds[0]

    def _read_control(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._control, 65536, 4)
            except BlockingIOError:
                return
            except OSError as error:
                logger.warning("the socket pair broke: %s", error)
                data, fds = b"", []
            if not data:
                self._trainer_gone = True
                return
            try:
                self._accept_memory(protocol.decode(data), fds)
            except ProtocolError as error:
                logger.warning("refused staging memory: %s", error)
            finally:
                for fd in fds:
                    os.close(fd)

    def _accept_memory(self, message: Message, fds: list[int]) -> None:
        """Take the descriptor of an ATTACH out of ``fds``; the caller closes the rest."""
        match message, fds:
            case protocol.Attach(arena=number), [_]:
                self._arenas[number] = arena = Arena.attach(fds.pop())
                if not self._boot.options.cpus:
                    numa.stay_near(arena.node)
            case protocol.Detach(arena=number), []:
                self._arenas.pop(number, None)  # unmapped with the last reference: a write under way keeps its own
            case protocol.Note(), []:
                self._history.note(message)
            case _:
                raise ProtocolError(f"{message.kind} with {len(fds)} descriptors makes no sense here")

    def _adopt_staged(self) -> None:
        """After the trainer's death, take saves from memory that it had staged and may not have sent."""
        self._abandoned.set()
        self._lease.tell_trainer_gone()
        if self._mirror is not None:
            self._mirror.tell_trainer_gone()
        self._read_messages()
        for number, arena in self._arenas.items():
            descriptor = arena.staged_descriptor()
            if descriptor is None:
                continue
            try:
                save = protocol.decode(descriptor)
            except ProtocolError as error:
                logger.warning("a staged save cannot be read: %s", error)
                continue
            if isinstance(save, Save) and save.arena == number and not self._jobs.knows(save.save_id):
                self._handle(jobs.Submitted(dataclasses.replace(save, retry=True)))

    # What goes out ---------------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        try:
            data = protocol.encode(message)
        except ProtocolError as error:
            data = protocol.encode(protocol.failure(self._boot.attempt, getattr(message, "save_id", None), error))
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:  # the trainer is stopped or gone; what matters is on disk
            logger.warning("the trainer does not take %s", message.kind)

    def _linger(self) -> None:
        """Give the last messages up to two seconds to leave, unless nobody reads them."""
        gone = not self._trainer_is_there()
        self._socket.close(linger=0 if gone else 2000)
        self._context.term()
        if gone:  # perhaps before it could remove the way to its socket
            shutil.rmtree(os.path.dirname(self._boot.endpoint.removeprefix("ipc://")), ignore_errors=True)

    def _post(self, event: jobs.Event) -> None:
        self._events.put(event)
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake, 1)

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _execute(self, work: _Tasks) -> None:
        while not self._left:
            with contextlib.suppress(queue.Empty):
                work.get(timeout=HEARTBEAT_S)()
            if work is self._work:
                self._worker.empty_trash()

    # The trainer's end, signals --------------------------------------------------------------------------------

    def _trainer_is_there(self) -> bool:
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        poller.register(self._control, select.POLLHUP)
        return not any(event & (select.POLLIN | select.POLLHUP) for _, event in poller.poll(0))

    def _catch_signals(self) -> None:
        self._signals, writer = socket.socketpair()
        self._signals.setblocking(False)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, _ignore)  # the wakeup descriptor tells the loop


def _ignore(number: int, frame: object) -> None:
    """A handler that does nothing; without one the signal would end the process."""


def _allow_many_files() -> None:
    """Raise the limit of open files to the maximum: a save keeps one open for each of its containers."""
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _leave_no_core() -> None:
    """Keep keys out of core dumps: to a file that is too little, and of a program that takes them the kernel's word."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    limit = 1 if hard == resource.RLIM_INFINITY else min(1, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))


def _be_modest(options: protocol.DaemonOptions) -> None:
    """Apply niceness, I/O class and cores; what the system refuses is logged."""
    me = psutil.Process()
    try:
        if options.nice:
            me.nice(options.nice)
        if options.io_class:
            me.ionice(psutil.IOPRIO_CLASS_IDLE if options.io_class == "idle" else psutil.IOPRIO_CLASS_BE)
        if options.cpus:
            me.cpu_affinity(list(options.cpus))
    except (psutil.Error, OSError, ValueError) as error:
        logger.warning("cannot set the daemon's priority or cores: %s", error)
