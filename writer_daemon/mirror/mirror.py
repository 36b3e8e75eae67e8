"""The mirror thread of rank 0's daemon: waits for commits, and copies them one after the other.

The server reports commits to it, so saves never wait for it. Errors are retried, with growing
pauses, as long as the trainer lives. After the trainer's end the thread continues until all
checkpoints are copied, or until the mirror of the next session asks for the lease of the place.
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
from sidesave.writer_daemon.checkpoints.deletion import failure_messages
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.lease.record import LeaseRecord
from sidesave.writer_daemon.mirror import identity
from sidesave.writer_daemon.mirror.progress import MirrorProgress
from sidesave.writer_daemon.mirror.throttle import Throttle
from sidesave.writer_daemon.mirror.uploader import Uploader
from sidesave.writer_daemon.protocol import Boot, Delete, Message
from sidesave.writer_daemon.storage import Storage, urls

logger = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.25
"""Pause before the first retry; doubled for each further one."""
MAX_PAUSE_S: Final = 60.0
_PATIENCE_S: Final = 900.0
"""After the trainer ends, a mirror not answering for this time is left to the next session."""
_LOCAL_TRIES: Final = 3
"""A checkpoint with this number of read errors in the run directory is not mirrored."""
_IDLE_S: Final = 1.0
_HOPELESS: Final = (errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of a store that can never be a mirror; not retried."""


class _Stopped(Exception):
    """The thread must end, between two pieces."""


class Mirror:
    """The mirror of one daemon. Every method returns at once, and may be called from any thread."""

    def __init__(self, boot: Boot, wake: Callable[[], None]) -> None:
        """Prepare; ``wake`` is called after each new message in :attr:`messages` and at the end."""
        self._boot = boot
        self._tell_of = wake
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.ended = threading.Event()
        self._news: collections.deque[CheckpointInfo | Delete] = collections.deque()
        self._changed = threading.Event()
        self._stopping = False
        self._trainer_gone = False
        self._leaves_when_done = False
        self._uploader: Uploader | None = None
        self._lease: Lease | None = None
        self._backlog: dict[tuple[str, int], CheckpointInfo] = {}
        self._compared = False
        self._failure: Exception | None = None
        self._tries = 0
        self._failing_since = math.inf
        self._throttle = Throttle(boot.mirror_bandwidth, self._halt)
        self._progress = MirrorProgress()
        self._thread = threading.Thread(target=self._run, name="sidesave-mirror", daemon=True)

    def start(self) -> None:
        """Start the thread, which opens the mirror; opening may take long."""
        self._thread.start()

    def committed(self, info: CheckpointInfo) -> None:
        """Queue a checkpoint that this session has committed."""
        if os.path.dirname(info.path) != self._boot.directory:
            text = "it was committed in the fallback directory, which is not mirrored"
            self._say_failed(info, WriteError(errno.EXDEV, text, info.path))
            return
        self._news.append(info)
        self._changed.set()

    def delete(self, request: Delete) -> None:
        """Delete steps of the mirror after the current copy; the answer is DELETED or FAILED."""
        self._news.append(request)
        self._changed.set()
        self._refuse_deletions()

    def tell_trainer_gone(self) -> None:
        """Record that the trainer has ended or closed.

        The next session's mirror may now ask for the lease.
        """
        self._trainer_gone = True
        if self._lease is not None:
            self._lease.tell_trainer_gone()

    def finish(self) -> None:
        """End once all checkpoints are copied."""
        self.tell_trainer_gone()
        self._leaves_when_done = True
        self._changed.set()

    def stop(self) -> None:
        """End after the current piece; the next daemon continues the copy."""
        self._stopping = True
        self._changed.set()

    # The thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with urls.using(urls.decode_options(self._boot.storage_options)):
                self._remember()
                self._serve()
        except _Stopped:
            pass
        except Exception as error:  # noqa: BLE001 - saves continue without a mirror
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
                    pause_s, self._failing_since = FIRST_PAUSE_S, math.inf
                    continue
            except (DirectoryInUseError, InvalidArgumentError):
                raise
            except (SidesaveError, OSError) as error:
                if reached != self._reached():  # it made progress, so this is a new problem
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
        """Return the progress of copying; a retry without progress does not change it."""
        uploader = self._uploader
        return uploader is not None, self._compared, uploader.arrived if uploader is not None else 0

    def _remember(self, which: str = "") -> None:
        try:
            identity.remember(self._boot.directory, self._boot.mirror, which)
        except WriteError as error:  # mirror even if the local disk is full
            logger.warning("cannot record the place of the mirror for `sidesave mirror`: %s", error)

    def _open(self) -> Uploader:
        target = identity.open_known(self._boot.directory, self._boot.mirror)
        try:
            lease = self._take_lease(target)
        except BaseException:  # the next try opens it again
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
                if self._leaves_when_done:  # the next session holds the mirror
                    raise _Stopped from None
                # The holder may be the daemon of a checkpointer closed just now, which is about to
                # release the lease.
                if time.monotonic() >= deadline:
                    raise
            self._pause(FIRST_PAUSE_S)

    def _compare(self, uploader: Uploader) -> None:
        """Find the missing checkpoints, and report the existing ones to the trainer."""
        missing, there = uploader.begin()
        self._remember(identity.identify(uploader.target))
        for step in missing:
            self._backlog[step.key] = step
        for step in there:
            self._say_mirrored(step)
        self._compared = True
        self._say_state()

    def _work(self, uploader: Uploader) -> bool:
        """Delete the requested checkpoints and copy one; return whether there was work to do."""
        deletions: list[Delete] = []
        while self._news:
            news = self._news.popleft()
            if isinstance(news, CheckpointInfo):
                self._backlog[news.key] = news
            else:
                deletions.append(news)
        for deletion in deletions:
            self._delete(uploader, deletion)
        uploader.trash.empty()
        if not self._backlog:
            return bool(deletions)
        step = min(self._backlog.values(), key=lambda info: info.position)
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

    def _give_up(self, uploader: Uploader, step: CheckpointInfo, error: SidesaveError) -> None:
        self._tries = 0
        del self._backlog[step.key]
        self._say_failed(step, error)
        self._say_state()
        uploader.forget(step)

    def _delete(self, uploader: Uploader, request: Delete) -> None:
        attempt = self._boot.attempt
        try:
            failures = uploader.delete(
                request.steps, request.sequence, spare_read=request.spare_read
            )
        except SidesaveError as error:
            self._say(protocol.failure(attempt, request.save_id, error))
        else:
            answer = failure_messages(attempt, request, failures)
            self._say(protocol.Deleted(attempt=attempt, save_id=request.save_id, failures=answer))

    # Errors and the end ---------------------------------------------------------------------------

    def _halt(self) -> None:
        """Raise ``_Stopped`` if a signal came, or if the next session asks for the lease."""
        asked = self._lease is not None and self._lease.end_by < math.inf
        if self._stopping or asked:
            raise _Stopped

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._halt()
            time.sleep(min(0.1, left))

    def _judge(self, error: Exception) -> None:
        """Raise an error that a retry cannot change, or whose retries have taken too long."""
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
        gone = not os.path.exists(self._boot.directory)  # with all checkpoints to be copied
        if gone or time.monotonic() - self._failing_since > _PATIENCE_S:
            raise error

    def _end_with(self, error: Exception) -> None:
        failure = protocol.failure(self._boot.attempt, None, error)
        self._failure = error
        state = protocol.MirrorState(attempt=self._boot.attempt, over=True, error=failure)
        self._progress.show(state)
        self._say(state)
        self._refuse_deletions()

    def _refuse_deletions(self) -> None:
        """Answer requests for deletions with the failure, once the mirror is given up."""
        while self._failure is not None and self._news:
            with contextlib.suppress(IndexError):
                news = self._news.popleft()
                if isinstance(news, Delete):
                    self._say(protocol.failure(self._boot.attempt, news.save_id, self._failure))

    # Messages to the trainer ----------------------------------------------------------------------

    def _say(self, message: Message) -> None:
        self.messages.put(message)
        self._tell_of()

    def _say_mirrored(self, step: CheckpointInfo) -> None:
        self._say(
            protocol.Mirrored(
                attempt=self._boot.attempt,
                session=step.session,
                sequence=step.sequence,
                name=step.name,
            )
        )

    def _say_failed(self, step: CheckpointInfo, error: SidesaveError) -> None:
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
        """Report the error to the trainer, which logs it if it is new."""
        self._say_state(protocol.failure(self._boot.attempt, None, error))

    def _say_state(self, error: protocol.Failed | None = None) -> None:
        steps = [
            *self._backlog.values(),
            *(news for news in list(self._news) if isinstance(news, CheckpointInfo)),
        ]
        self._say(
            self._progress.state(self._boot.attempt, steps, compared=self._compared, error=error)
        )
