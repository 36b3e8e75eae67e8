"""The thread of rank 0's daemon that keeps a mirror: it waits for commits, and copies them one after the other.

It is told of commits and never asks for them, so nothing that saves waits for it. Whatever keeps it from copying is
tried again, with growing pauses, for as long as the trainer lives. When the trainer has ended it goes on until all is
copied, or until the next session's mirror asks for the place.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from sidesave.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DirectoryInUseError,
    IntegrityError,
    InvalidArgumentError,
    SidesaveError,
    WriteError,
)
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.format import manifest
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.lease.record import LeaseRecord
from sidesave.writer_daemon.mirror import identity
from sidesave.writer_daemon.mirror.progress import Progress
from sidesave.writer_daemon.mirror.throttle import Throttle
from sidesave.writer_daemon.mirror.uploader import Step, Uploader
from sidesave.writer_daemon.protocol import Boot, Delete, Message
from sidesave.writer_daemon.storage import Storage, urls

logger = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.25
"""Before what has failed is tried again; twice as long each time."""
MAX_PAUSE_S: Final = 60.0
_PATIENCE_S: Final = 900.0
"""After the trainer's end, a mirror that does not answer for so long is left to the next session."""
_LOCAL_TRIES: Final = 3
"""After so many the storage of the run directory has shown that it does not give a checkpoint's bytes."""
_IDLE_S: Final = 1.0
_HOPELESS: Final = (errno.EOPNOTSUPP, errno.EINVAL)
"""What a store says that cannot be a mirror whatever is tried."""


class _Stopped(Exception):
    """The thread is to leave, between two pieces."""


class Mirror:
    """The mirror of one daemon. Every method returns at once, and may be called from any thread."""

    def __init__(self, boot: Boot, wake: Callable[[], None]) -> None:
        """Prepare; ``wake`` is called when there is something in :attr:`messages`, and at the end."""
        self._boot = boot
        self._tell_of = wake
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.ended = threading.Event()
        self._news: collections.deque[Step | Delete] = collections.deque()
        self._changed = threading.Event()
        self._stopping = False
        self._trainer_gone = False
        self._leaves_when_done = False
        self._uploader: Uploader | None = None
        self._lease: Lease | None = None
        self._backlog: dict[tuple[str, int], Step] = {}
        self._compared = False
        self._failure: Exception | None = None
        self._troubled = ""
        self._tries = 0
        self._failing_since = math.inf
        self._throttle = Throttle(boot.options.mirror_bandwidth, self._halt)
        self._progress = Progress()
        self._thread = threading.Thread(target=self._run, name="sidesave-mirror", daemon=True)

    def start(self) -> None:
        """Begin, in a thread: this opens the mirror, which may take long."""
        self._thread.start()

    def committed(self, sequence: int, name: str, nbytes: int) -> None:
        """A save of this session was committed as ``name``."""
        elsewhere, own_name = os.path.split(name)
        step = manifest.parse_step_directory(own_name)
        assert step is not None
        committed = Step(sequence, self._boot.session, step, nbytes)
        if elsewhere:
            text = "it was committed in the fallback directory, which is not mirrored"
            self._say_failed(committed, WriteError(errno.EXDEV, text, name))
            return
        self._news.append(committed)
        self._changed.set()

    def delete(self, request: Delete) -> None:
        """Delete a step of the mirror, after what is being copied; DELETED or FAILED follows."""
        self._news.append(request)
        self._changed.set()
        self._refuse_deletions()

    def tell_trainer_gone(self) -> None:
        """The trainer has ended or closed: the next session's mirror may ask for the place."""
        self._trainer_gone = True
        if self._lease is not None:
            self._lease.tell_trainer_gone()

    def finish(self) -> None:
        """Leave once all is copied."""
        self.tell_trainer_gone()
        self._leaves_when_done = True
        self._changed.set()

    def stop(self) -> None:
        """Leave after the piece that is being copied; the next daemon goes on."""
        self._stopping = True
        self._changed.set()

    # The thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with urls.using(urls.decode_options(self._boot.storage_options)):
                self._remember()
                self._serve()
        except _Stopped:
            pass
        except Exception as error:  # noqa: BLE001 - saves go on without a mirror
            self._end_with(error)
        finally:
            if self._lease is not None:
                self._lease.release(final=self._trainer_gone)
            self.ended.set()
            self._tell_of()

    def _serve(self) -> None:
        pause_s, reached = FIRST_PAUSE_S, self._reached()
        while True:
            self._halt()
            try:
                if self._uploader is None:
                    self._uploader = self._open()
                if not self._compared:
                    self._compare(self._uploader)
                if self._work(self._uploader):
                    pause_s, self._failing_since, self._troubled = FIRST_PAUSE_S, math.inf, ""
                    continue
            except (DirectoryInUseError, InvalidArgumentError):
                raise
            except (SidesaveError, OSError) as error:
                if reached != self._reached():  # it had answered meanwhile: this is another trouble
                    pause_s, reached, self._failing_since = FIRST_PAUSE_S, self._reached(), math.inf
                self._judge(error)
                self._say_trouble(error)
                self._pause(pause_s)
                pause_s = min(MAX_PAUSE_S, 2 * pause_s)
                continue
            if self._leaves_when_done and not self._news:
                self._uploader.close()
                return
            self._changed.wait(_IDLE_S)
            self._changed.clear()

    def _reached(self) -> tuple[bool, bool, int]:
        """How far copying has come: what does not change any more where a try gets nothing done."""
        uploader = self._uploader
        return uploader is not None, self._compared, uploader.arrived if uploader is not None else 0

    def _remember(self, which: str = "") -> None:
        try:
            identity.remember(self._boot.directory, self._boot.options.mirror, which)
        except WriteError as error:  # a full disk must not keep from the mirror what is to relieve it
            logger.warning("`sidesave mirror` will not know where the mirror is: %s", error)

    def _open(self) -> Uploader:
        target = identity.open_known(self._boot.directory, self._boot.options.mirror)
        try:
            lease = self._take_lease(target)
        except BaseException:  # the next try opens it anew
            target.close()
            raise
        self._lease = lease
        if self._trainer_gone:
            lease.tell_trainer_gone()
        return Uploader(self._boot.directory, target, lease, self._before_chunk)

    def _before_chunk(self, nbytes: int) -> None:
        self._throttle.take(nbytes)
        if self._progress.add(nbytes):
            self._say_state()

    def _take_lease(self, target: Storage) -> Lease:
        holder = LeaseRecord.current(self._boot.session, self._boot.trainer_pid)
        timeout_s = self._boot.options.takeover_timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return Lease(target, holder, timeout_s, lambda: not self._stopping, kills=False)
            except DirectoryInUseError:
                self._halt()
                if self._leaves_when_done:  # the next session has it
                    raise _Stopped from None
                # Where the checkpointer before this one was closed in this moment, its daemon is about to say so.
                if time.monotonic() >= deadline:
                    raise
            self._pause(FIRST_PAUSE_S)

    def _compare(self, uploader: Uploader) -> None:
        """Find out what is missing, and tell the trainer what is there."""
        missing, there = uploader.begin()
        self._remember(identity.identify(uploader.target))
        for step in missing:
            self._backlog[step.key] = step
        for step in there:
            self._say_mirrored(step)
        self._compared = True
        self._say_state()

    def _work(self, uploader: Uploader) -> bool:
        """Copy or delete one checkpoint; whether there was something to do."""
        deletions: list[Delete] = []
        while self._news:
            news = self._news.popleft()
            if isinstance(news, Step):
                self._backlog[news.key] = news
            else:
                deletions.append(news)
        for deletion in deletions:
            self._delete(uploader, deletion)
        uploader.empty_trash()
        if not self._backlog:
            return bool(deletions)
        step = min(self._backlog.values())
        try:
            uploader.upload(step)
        except (IntegrityError, CheckpointNotFoundError, CheckpointExistsError) as error:
            self._give_up(uploader, step, error)
        except WriteError as error:
            local = str(error.filename or "").startswith(f"{self._boot.directory}/")
            self._tries += local
            if not local or self._tries < _LOCAL_TRIES:
                raise
            self._give_up(uploader, step, error)
        else:
            self._tries = 0
            del self._backlog[step.key]
            self._progress.last_step = step.step
            self._say_mirrored(step)
            self._say_state()
        return True

    def _give_up(self, uploader: Uploader, step: Step, error: SidesaveError) -> None:
        self._tries = 0
        del self._backlog[step.key]
        self._say_failed(step, error)
        self._say_state()
        uploader.forget(step)

    def _delete(self, uploader: Uploader, request: Delete) -> None:
        answer: Message = protocol.Deleted(attempt=self._boot.attempt, save_id=request.save_id)
        try:
            uploader.delete(request.step, request.sequence, spare_read=request.spare_read)
        except CheckpointNotFoundError as error:
            if not request.retry:  # else the daemon before this one has done it
                answer = protocol.failure(self._boot.attempt, request.save_id, error)
        except SidesaveError as error:
            answer = protocol.failure(self._boot.attempt, request.save_id, error)
        self._say(answer)

    # What stands in the way ------------------------------------------------------------------------------------

    def _halt(self) -> None:
        """Raise where the thread is to leave: a signal came, or the next session's mirror has asked for the place."""
        asked = self._lease is not None and self._lease.end_by < math.inf
        if self._stopping or asked:
            raise _Stopped

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._halt()
            time.sleep(min(0.1, left))

    def _judge(self, error: Exception) -> None:
        """Raise what no further try can change."""
        if isinstance(error, WriteError) and error.errno in _HOPELESS:
            raise error
        if self._lease is not None:
            with contextlib.suppress(WriteError):
                self._lease.check(ask=True)
            if self._lease.lost:
                raise error
        self._failing_since = min(self._failing_since, time.monotonic())
        if not self._trainer_gone:
            return
        gone = not os.path.exists(self._boot.directory)  # and with it all that was to be copied
        if gone or time.monotonic() - self._failing_since > _PATIENCE_S:
            raise error

    def _end_with(self, error: Exception) -> None:
        logger.error("the mirror %s is given up: %s", self._boot.options.mirror, error)
        failure = protocol.failure(self._boot.attempt, None, error)
        self._failure = error
        state = protocol.Mirror(attempt=self._boot.attempt, over=True, error=failure)
        self._progress.show(state)
        self._say(state)
        self._refuse_deletions()

    def _refuse_deletions(self) -> None:
        """Once the mirror is given up, answer who asks for a deletion there."""
        while self._failure is not None and self._news:
            with contextlib.suppress(IndexError):
                news = self._news.popleft()
                if isinstance(news, Delete):
                    self._say(protocol.failure(self._boot.attempt, news.save_id, self._failure))

    # What the trainer is told ----------------------------------------------------------------------------------

    def _say(self, message: Message) -> None:
        self.messages.put(message)
        self._tell_of()

    def _say_mirrored(self, step: Step) -> None:
        self._say(
            protocol.Mirrored(
                attempt=self._boot.attempt,
                session=step.session,
                sequence=step.sequence,
                name=step.name,
            )
        )

    def _say_failed(self, step: Step, error: SidesaveError) -> None:
        logger.warning("step %d is not mirrored: %s", step.step, error)
        failure = protocol.failure(self._boot.attempt, None, error)
        self._say(
            protocol.Mirrored(
                attempt=self._boot.attempt,
                session=step.session,
                sequence=step.sequence,
                name=step.name,
                error=failure,
            )
        )

    def _say_trouble(self, error: Exception) -> None:
        """Tell what is in the way, and log it once."""
        text = f"{type(error).__name__} {error}"
        if text != self._troubled:
            self._troubled = text
            logger.warning("the mirror %s is tried again: %s", self._boot.options.mirror, error)
        self._say_state(protocol.failure(self._boot.attempt, None, error))

    def _say_state(self, error: protocol.Failed | None = None) -> None:
        steps = [*self._backlog.values(), *(news for news in list(self._news) if isinstance(news, Step))]
        self._say(self._progress.state(self._boot.attempt, steps, compared=self._compared, error=error))
