"""The daemon's process: one loop that listens, one thread that writes.

The loop owns the sockets and the state machine (``jobs``) and never touches storage, so it answers
while storage hangs. It listens to the trainer's messages, the socket pair that brings staging
memory, signals, and the trainer's end: in its pidfd, except after an ``exec``, and in the socket
pair, except while a forked child holds it. The thread does one storage operation after another.
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
import select
import shutil
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

import zmq

from sidesave.errors import ProtocolError, SidesaveError, WriteStalledError
from sidesave.stager.memory import numa
from sidesave.stager.memory.arena import Arena
from sidesave.stager.signal_safe import Wakeup
from sidesave.writer_daemon import log, protocol, wire
from sidesave.writer_daemon.commit.recovery import Recovery
from sidesave.writer_daemon.mirror.mirror import Mirror
from sidesave.writer_daemon.process import jobs
from sidesave.writer_daemon.process.directories import Directories, open_fallback, open_run
from sidesave.writer_daemon.process.settings import (
    allow_many_files,
    catch_signals,
    leave_no_core,
    lower_priority,
)
from sidesave.writer_daemon.process.worker import StorageWorker
from sidesave.writer_daemon.protocol import Message, Save
from sidesave.writer_daemon.storage import PosixStorage, Storage

logger = logging.getLogger(__name__)

HEARTBEAT_S: Final = 1.0
_BOOT_TIMEOUT_S: Final = 30.0
_RECLAIM_TIMEOUT_S: Final = 10.0
_SLICE_S: Final = 0.2
"""Longest removal of deleted checkpoints' bytes, in seconds, between two tasks such as saves."""

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
        self._wakeup = Wakeup()
        self._trainer_gone = False
        self._trainer_closed = False
        self._abandoned = threading.Event()
        self._running = True
        self._left = False
        self._mirror: Mirror | None = None
        self._last_progress = time.monotonic()

    def run(self) -> int:
        """Serve until work is done and the trainer is gone or sent DRAIN; return the exit code."""
        self._catch_signals()
        boot, self._pidfd = self._receive_boot()
        self._boot, options = boot, boot.options
        if boot.encrypts:
            leave_no_core()
        lower_priority(options)
        allow_many_files()
        self._jobs = jobs.Jobs(boot.attempt)
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a trainer stopped for hours gets all messages
        self._socket.connect(boot.endpoint)
        self._send(protocol.Hello(attempt=boot.attempt, token=boot.token, pid=os.getpid()))
        try:
            run, recovery = open_run(boot, self._trainer_is_there, self._abandoned)
        except SidesaveError as error:
            self._send(protocol.failure(boot.attempt, None, error))
            self._linger()
            return protocol.EXIT_REFUSED
        self._lease, storage = run.lease, run.storage
        ready = protocol.Ready(
            attempt=boot.attempt,
            recovered=recovery.committed,
            removed=recovery.removed,
            left=recovery.left,
        )
        self._send(ready)
        if boot.rank == 0 and boot.mirror:
            self._mirror = Mirror(boot, self._wakeup.wake)
            self._mirror.start()
        self._history = self._open_history(storage, recovery)
        self._directories = Directories(
            run,
            boot.fallback_directory,
            lambda: open_fallback(boot, storage, self._trainer_is_there, self._abandoned),
        )
        self._worker = StorageWorker(
            boot.attempt,
            self._directories,
            boot.retries,
            self._history.started,
            self._post,
            options.commit_timeout_s,
        )
        threads = {"sidesave-storage": self._work}
        if boot.world_size > 1:  # the next save is written while one waits for other ranks
            threads["sidesave-commit"] = self._commits = _Tasks()
        for name, tasks in threads.items():
            threading.Thread(target=self._execute, args=(tasks,), name=name, daemon=True).start()
        self._loop()
        idle = threading.Event()
        self._work.put(self._worker.close)
        self._work.put(idle.set)
        if time.monotonic() < self._lease.end_by:
            idle.wait(_RECLAIM_TIMEOUT_S)  # leftovers of failed saves are being removed
        ended = self._trainer_closed or not self._trainer_is_there()  # else a signal came
        self._left = True
        self._lease.release(final=ended)
        self._finish(goes_on=ended)
        return 0

    def _open_history(self, storage: Storage, recovery: Recovery) -> log.Recorder:
        """Record the recovery; return the run's history, which the storage thread writes."""
        boot = self._boot
        if boot.rank or not isinstance(storage, PosixStorage):
            # Only rank 0 keeps the history, and not in object stores, which cannot append.
            return log.Recorder(boot.session, lambda record: None)
        records, outcome = log.HistoryLog(storage), (recovery.committed, recovery.removed)
        self._work.put(
            lambda: log.log_recovery(
                records, storage, boot.session, *outcome, boot.fallback_directory
            )
        )
        return log.Recorder(
            boot.session, lambda record: self._work.put(lambda: records.append(record))
        )

    def _finish(self, *, goes_on: bool) -> None:
        """Complete the mirror and remove bytes of deleted checkpoints, without the lease.

        Ends early on a signal; a next session, which may run by then, removes the remaining bytes.
        """
        mirror = self._mirror
        removal = threading.Thread(
            target=self._directories.empty_trash, kwargs={"everything": True}, daemon=True
        )
        # Otherwise the session's next daemon removes it.
        has_trash = goes_on and self._directories.has_trash
        if goes_on and (has_trash or (mirror is not None and not mirror.ended.is_set())):
            self._send(protocol.Released(attempt=self._boot.attempt))
        if mirror is not None:
            if goes_on:
                mirror.finish()
            else:
                mirror.stop()
            self._tell_of_mirror()
        self._linger()
        self._arenas.clear()
        if has_trash:
            removal.start()
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        poller.register(self._signals, select.POLLIN)
        give_up_at = math.inf if goes_on else time.monotonic() + _RECLAIM_TIMEOUT_S
        while time.monotonic() < give_up_at:  # storage may hang
            if not (removal.is_alive() or self._directories.is_removing) and (
                mirror is None or mirror.ended.is_set()
            ):
                break
            ready = {fd for fd, _ in poller.poll(int(HEARTBEAT_S * 1000))}
            self._wakeup.clear()
            if self._signals.fileno() in ready:
                self._signals.recv(4096)
                if mirror is not None:
                    mirror.stop()
                give_up_at = min(give_up_at, time.monotonic() + _RECLAIM_TIMEOUT_S)

    # The loop -------------------------------------------------------------------------------------

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for source in (self._control, self._wakeup, self._signals):
            poller.register(source.fileno(), zmq.POLLIN)
        poller.register(self._pidfd, zmq.POLLIN)
        next_heartbeat = time.monotonic()
        while self._running:
            ready = {event[0] for event in poller.poll(int(HEARTBEAT_S * 1000))}
            self._wakeup.clear()
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
            while self._running and not self._events.empty():
                self._handle(self._events.get())
            self._tell_of_mirror()
            now = time.monotonic()
            self._watch_for_stall(now)
            if now >= self._lease.end_by:
                logger.warning(
                    "the next session waits for %s: unfinished saves are left to it",
                    self._boot.directory,
                )
                self._running = False
            if now >= next_heartbeat:
                next_heartbeat = now + HEARTBEAT_S
                self._send(protocol.Heartbeat(attempt=self._boot.attempt, saves=len(self._jobs)))

    def _tell_of_mirror(self) -> None:
        while self._mirror is not None and not self._mirror.messages.empty():
            self._send(self._mirror.messages.get())

    def _handle(self, event: jobs.Event) -> None:
        if (
            self._mirror is not None
            and isinstance(event, jobs.CommitEnded)
            and event.info is not None
        ):
            self._mirror.committed(event.info)
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
        if stuck is not None and now - self._last_progress > self._boot.stall_timeout_s:
            step = stuck.step if isinstance(stuck, Save) else stuck.steps[0]
            message = f"no byte of step {step} has moved for {self._boot.stall_timeout_s:g} s"
            error = WriteStalledError(errno.ETIMEDOUT, message, self._boot.directory)
            self._handle(jobs.Stalled(protocol.failure(self._boot.attempt, stuck.save_id, error)))

    # Messages from the trainer --------------------------------------------------------------------

    def _read_messages(self) -> None:
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = wire.decode(data)
                if message.attempt != self._boot.attempt:
                    raise ProtocolError(
                        f"a message of attempt {message.attempt} reached attempt "
                        f"{self._boot.attempt}"
                    )
                self._accept(message)
            except ProtocolError as error:
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
                    raise ProtocolError(
                        f"REFUSE of rank {message.rank} in session {message.session} is not ours"
                    )
                self._handle(jobs.RefusalRequested(message))
            case protocol.Status():
                self._send(protocol.Heartbeat(attempt=self._boot.attempt, saves=len(self._jobs)))
            case protocol.Drain():
                self._read_control()  # notes of saves were sent first, on the other channel
                self._trainer_closed = True
                if self._mirror is not None:
                    self._mirror.tell_trainer_gone()
                self._handle(jobs.DrainRequested())
            case _:
                raise ProtocolError(f"a trainer does not send {message.kind}")

    def _receive_boot(self) -> tuple[protocol.Boot, int]:
        self._control.settimeout(_BOOT_TIMEOUT_S)
        data, fds, _, _ = socket.recv_fds(self._control, wire.MAX_MESSAGE_NBYTES, 1)
        self._control.setblocking(False)
        boot = wire.decode(data)
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
                self._accept_memory(wire.decode(data), fds)
            except ProtocolError as error:
                logger.warning("refused staging memory: %s", error)
            finally:
                for fd in fds:
                    os.close(fd)

    def _accept_memory(self, message: Message, fds: list[int]) -> None:
        """Take the descriptor of an ATTACH out of ``fds``; the caller closes the others."""
        match message, fds:
            case protocol.Attach(arena=number), [_]:
                self._arenas[number] = arena = Arena.attach(fds.pop())
                if not self._boot.options.cpus:
                    numa.stay_near(arena.node)
            case protocol.Detach(arena=number), []:
                self._arenas.pop(number, None)  # a write in progress has a reference of its own
            case protocol.Note(), []:
                self._history.note(message)
            case _:
                raise ProtocolError(f"{message.kind} with {len(fds)} descriptors is not valid here")

    def _adopt_staged(self) -> None:
        """Adopt the saves in the dead trainer's staging memory that it may not have sent."""
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
                save = wire.decode(descriptor)
            except ProtocolError as error:
                logger.warning("a staged save cannot be read: %s", error)
                continue
            if (
                isinstance(save, Save)
                and save.arena == number
                and not self._jobs.knows(save.save_id)
            ):
                self._handle(jobs.Submitted(dataclasses.replace(save, retry=True)))

    # Messages to the trainer ----------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        try:
            data = wire.encode(message)
        except ProtocolError as error:
            data = wire.encode(
                protocol.failure(self._boot.attempt, getattr(message, "save_id", None), error)
            )
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:  # the trainer is stopped or gone; the checkpoints are on disk
            logger.warning("the trainer does not take %s", message.kind)

    def _linger(self) -> None:
        """Wait up to two seconds until the last messages are sent, unless the trainer is gone."""
        gone = not self._trainer_is_there()
        self._socket.close(linger=0 if gone else 2000)
        self._context.term()
        if gone:  # perhaps before it could remove the directory of its socket
            shutil.rmtree(
                os.path.dirname(self._boot.endpoint.removeprefix("ipc://")), ignore_errors=True
            )

    def _post(self, event: jobs.Event) -> None:
        self._events.put(event)
        self._wakeup.wake()

    def _execute(self, work: _Tasks) -> None:
        pause_s = HEARTBEAT_S
        while not self._left:
            with contextlib.suppress(queue.Empty):
                work.get(timeout=pause_s)()
            if work is self._work:
                pause_s = 0.0 if self._directories.empty_trash(within_s=_SLICE_S) else HEARTBEAT_S

    # The trainer's end, signals -------------------------------------------------------------------

    def _trainer_is_there(self) -> bool:
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        poller.register(self._control, select.POLLHUP)
        return not any(event & (select.POLLIN | select.POLLHUP) for _, event in poller.poll(0))

    def _catch_signals(self) -> None:
        self._signals = catch_signals()
