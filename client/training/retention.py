"""Deletes checkpoints that nothing keeps. A pure function decides, the daemon deletes.

A checkpoint is kept if any policy wants it, if it is pinned, if it is being read, or if it is the
newest. No policy wants ephemeral checkpoints: each is deleted once a newer one of any kind is
committed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from sidesave.client.checkpointer import Checkpointer
from sidesave.client.runs.links import Links
from sidesave.client.runs.pins import Pins
from sidesave.client.runs.view import RunView
from sidesave.client.saving.handle import SaveHandle
from sidesave.client.saving.session import Session
from sidesave.client.training.keep_policies import KeepPolicy, to_delete
from sidesave.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ClosedError,
    CommitUnknownError,
    SidesaveError,
    WriteError,
)
from sidesave.stager.signal_safe import Latch
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.format.names import step_directory

logger = logging.getLogger(__name__)

_TIDY_TIMEOUT_S: Final = 30.0
_DELETE_TIMEOUT_S: Final = 60.0
_BATCH: Final = 100
"""Steps are deleted this many at a time, so that a save waits for one batch at most."""


# The decision -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeepRules:
    """The policies for the run directory, None to keep everything, and those for the mirror."""

    here: Sequence[KeepPolicy] | None
    mirror: Sequence[KeepPolicy] = ()


@dataclass(frozen=True, slots=True)
class Surplus:
    """The steps that nothing keeps, in the order of their deletion.

    Attributes:
        here: Those to delete in the run directory.
        mirrored: Those to delete in the mirror.
        under_pressure: Those that stay here only until the mirror has them; a save that finds no
            room may delete them.
    """

    here: tuple[int, ...] = ()
    mirrored: tuple[int, ...] = ()
    under_pressure: tuple[int, ...] = ()


def surplus(
    view: RunView,
    rules: KeepRules,
    awaited: Callable[[int], bool],
    pinned: AbstractSet[int] = frozenset(),
    loading: AbstractSet[int] = frozenset(),
) -> Surplus:
    """Return what may be deleted in each place; the newest checkpoint of a place never is.

    Args:
        view: The checkpoints.
        rules: What to keep.
        awaited: Whether the checkpoint with this sequence is still to be copied to the mirror, or
            may be.
        pinned: Steps that are never deleted.
        loading: Steps that are being read.
    """
    if rules.here is None:
        return Surplus()
    unwanted = to_delete(view.here, rules.here, pinned, loading)
    unwanted_there = {*to_delete(view.here, rules.mirror, pinned)}
    held = [
        info.step
        for info in sorted(view.here, key=lambda info: info.position)
        if info.step in unwanted and info.step not in unwanted_there and awaited(info.sequence)
    ]
    return Surplus(
        here=tuple(step for step in unwanted if step not in held),
        mirrored=tuple(to_delete(view.mirrored, rules.mirror, pinned, loading)),
        under_pressure=tuple(dict.fromkeys(held)),
    )


# Doing it -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeletionBatch:
    """Steps the daemon was asked to delete together; ``ended`` is done once it has answered."""

    steps: frozenset[int]
    ended: Future[None]


class Retention:
    """After each commit, has the daemon delete what nothing keeps, and links names to the rest.

    It works in a thread of its own. Failures are logged.
    """

    def __init__(
        self,
        session: Session,
        policies: Sequence[KeepPolicy] | None,
        pins: Pins,
        links: Links | None = None,
        mirror_keep: Sequence[KeepPolicy] = (),
    ) -> None:
        """Start the thread, which ends with ``session``.

        ``policies=None`` deletes nothing. What ``mirror_keep`` wants, without policies all that is
        not ephemeral, stays here until it is in the mirror.
        """
        self._session = session
        self._rules = KeepRules(policies, mirror_keep)
        self._pins = pins
        self._links = links
        self._batches: dict[bool, DeletionBatch] = {}
        """The last batches: that of the mirror by true, that of the run directory by false."""
        self._has_more = self._mirror_has_more = False
        """Whether steps are to be deleted once the batch under way has ended."""
        if session.mirroring.mirror and policies is not None:
            session.mirroring.watch(lambda: self._events.put(True))
        self._turn = threading.Lock()
        self._deciding = threading.RLock()  # a signal handler may pin too
        """Held while a batch is decided on and begun, and never for long; taken after ``_turn``."""
        self._handles: dict[int, SaveHandle] = {}
        self._loading: frozenset[int] = frozenset()
        self._refused: set[tuple[bool, int]] = set()
        """Steps (mirror or not) that were not deleted; not tried again before the next commit."""
        self._events: queue.SimpleQueue[bool | Latch | None] = queue.SimpleQueue()
        """True for a commit, None for a batch's end, False for the end; a latch opens in turn."""
        self._thread = threading.Thread(target=self._work, name="sidesave-retention", daemon=True)
        self._thread.start()
        session.at_end(functools.partial(self._events.put, False))

    def save(self, save: Callable[[], SaveHandle]) -> SaveHandle:
        """Call ``save`` while no deletion begins; delete what its commit makes surplus."""
        with self._turn:
            handle = save()
            if not handle.skipped:
                self._handles[handle.step] = handle
                handle.committed.add_done_callback(
                    lambda _: self._events.put(True) if handle.committed.peek() is None else None
                )
        return handle

    @contextlib.contextmanager
    def reading(self, step: int | None) -> Generator[None]:
        """Keep all existing checkpoints during a load of ``step``, once deletions under way end."""
        self._session.settle(step)
        until = time.monotonic() + _DELETE_TIMEOUT_S
        while True:
            looked = Latch()
            self._events.put(looked)  # after what was committed before
            looked.wait(_DELETE_TIMEOUT_S)
            self._await_batch(_DELETE_TIMEOUT_S)
            if not self._has_more or time.monotonic() > until:
                break
        with self._turn:
            self._loading = frozenset(info.step for info in self._session.checkpoints())
        self._await_batch(_DELETE_TIMEOUT_S)
        try:
            yield
        finally:
            with self._turn:
                self._loading = frozenset()

    def spare(self, step: int, refuse_waiting: Callable[[], None]) -> None:
        """Keep a step that was pinned just now; wait for the deletions under way that may be of it.

        ``refuse_waiting`` raises if the calling thread must not wait. ``CheckpointNotFoundError``
        if the daemon does not answer.
        """
        with self._deciding:
            may_be_dropped = self._session.spare(step)
            ends = [
                batch.ended
                for batch in self._batches.values()
                if step in batch.steps and not batch.ended.done()
            ]
        if ends or may_be_dropped:
            refuse_waiting()
        if concurrent.futures.wait(ends, _DELETE_TIMEOUT_S).not_done:
            path = f"{self._session.directory}/{step_directory(step)}"
            raise CheckpointNotFoundError(errno.ENOENT, "it is being deleted", path)
        if may_be_dropped:  # by the saves under way, which were called before
            self._session.settle(None)

    def _work(self) -> None:
        self._guarded(lambda: self._link(self._session.look().here))
        goes_on = True
        while goes_on or self._has_more:
            events = [self._events.get()]
            while not self._events.empty():
                events.append(self._events.get())
            if True in events:
                self._refused.clear()
            is_due = True in events or (
                None in events and (self._has_more or self._mirror_has_more)
            )
            if is_due and not self._guarded(self._run):
                self._has_more = self._mirror_has_more = False
            for each in events:
                if isinstance(each, Latch):
                    each.open()
            goes_on = goes_on and False not in events

    def _guarded(self, operation: Callable[[], None]) -> bool:
        """Return whether the operation succeeded; its error is logged."""
        try:
            operation()
            return True
        except ClosedError as error:
            logger.debug("retention ends: %s", error)
        except (SidesaveError, OSError) as error:
            logger.error("no checkpoint is deleted or named now, retention failed: %s", error)
        except BaseException:  # the thread must not die silently
            logger.exception("no checkpoint is deleted or named now, retention failed")
        return False

    def _link(self, checkpoints: Sequence[CheckpointInfo]) -> None:
        if self._links is not None:
            self._links.update(checkpoints)

    def _run(self) -> None:
        self._session.check_open()  # the directory may belong to another session soon
        with self._turn:
            before = dict(self._handles)
            settled = {step for step, handle in before.items() if handle.done()}
        view = self._session.look()
        pinned = self._read_pins(view)
        with self._turn, self._deciding:
            decided = self._decide(view, pinned)
            has_older = self._session.mirroring.has_older  # which would be loaded in its place
            held = [step for step in decided.under_pressure if not has_older(step)]
            self._session.hold(held, {info.step for info in view.here})
            going: list[int] = []
            for step in decided.here:
                handle = self._handles.get(step)
                # A newer save of that step, which the list has not seen, would be deleted once
                # committed.
                is_newer = handle is not None and (
                    handle is not before.get(step) or step not in settled
                )
                if not is_newer and (False, step) not in self._refused:
                    going.append(step)
            self._has_more = self._begin_batch(going)
            for step in settled - {info.step for info in view.here}:
                if self._handles.get(step) is before[step]:
                    del self._handles[step]
        self._link([info for info in view.here if info.step not in going])
        if self._rules.here is not None and self._session.mirroring.mirror:
            self._run_mirror(view, pinned)

    def _read_pins(self, view: RunView) -> frozenset[int]:
        try:
            return self._pins.read()
        except SidesaveError:
            # a step that a save may delete could have been pinned since
            with self._turn, self._deciding:
                self._session.hold((), {info.step for info in view.here})
            raise

    def _run_mirror(self, view: RunView, pinned: frozenset[int]) -> None:
        """Delete in the mirror what its own policies do not keep."""
        view = self._session.add_mirror(view)
        with self._turn, self._deciding:
            decided = self._decide(view, pinned)
            going = [step for step in decided.mirrored if (True, step) not in self._refused]
            self._mirror_has_more = self._begin_batch(going, mirror=True)

    def _decide(self, view: RunView, pinned: frozenset[int]) -> Surplus:
        """Return what may be deleted; steps may have been pinned since ``pinned`` was read."""
        awaits = self._session.mirroring.awaits
        return surplus(view, self._rules, awaits, pinned | self._pins.recent, self._loading)

    def _begin_batch(self, steps: Sequence[int], *, mirror: bool = False) -> bool:
        """Begin to delete steps unless a batch is under way there; return whether some are left."""
        if not steps:
            return False
        if mirror in self._batches and not self._batches[mirror].ended.done():
            return True
        batch = steps[:_BATCH]
        self._batches[mirror] = DeletionBatch(frozenset(batch), self._delete(batch, mirror=mirror))
        return len(steps) > _BATCH

    def _delete(self, steps: Sequence[int], *, mirror: bool = False) -> Future[None]:
        """Delete steps by the daemon, here or in the mirror; the future is done once it answers."""
        ended = Future[None]()
        where = " from the mirror" if mirror else ""

        def log(step: int, error: BaseException | None) -> None:
            if error is None:
                logger.info("deleted step %d%s, which no policy keeps", step, where)
            elif isinstance(error, WriteError) and error.errno == errno.EBUSY:
                logger.info("step %d is not deleted%s now, as it is being read", step, where)
            elif isinstance(error, CommitUnknownError):  # the next session tries again
                logger.info("step %d is not deleted%s now: %s", step, where, error)
            elif not isinstance(error, CheckpointError):  # else it is gone
                level = logging.WARNING if mirror else logging.ERROR
                logger.log(level, "cannot delete step %d%s: %s", step, where, error)

        def gone(done: Future[dict[int, SidesaveError]]) -> None:
            failure = done.exception()
            failures = {} if failure is not None else done.result()
            for step in steps:
                error = failure or failures.get(step)
                log(step, error)
                if error is not None:
                    self._refused.add((mirror, step))
                elif mirror:
                    self._session.mirroring.removed(step)
            ended.set_result(None)
            self._events.put(None)

        deletion = self._session.delete(steps, spare_read=True, mirror=mirror)
        deletion.add_done_callback(gone)
        return ended

    def _await_batch(self, timeout_s: float) -> None:
        with self._turn:
            batch = self._batches.get(False)
        if batch is not None:
            concurrent.futures.wait([batch.ended], timeout_s)

    def close(self, timeout_s: float) -> None:
        """Finish the deletions that are due, for up to ``timeout_s`` seconds; idempotent."""
        self._events.put(False)
        self._thread.join(timeout_s)
        self._await_batch(timeout_s)


def close_after_deletions(
    checkpointer: Checkpointer, retention: Retention | None, timeout_s: float | None
) -> None:
    """Wait for the saves, then for the deletions that follow, and close the checkpointer.

    Waits up to ``timeout_s`` for each. Raises the error of a failed save.
    """
    with contextlib.ExitStack() as stack:  # the last one pushed runs first
        stack.callback(checkpointer.close, timeout_s)
        if retention is not None:
            tidy_s = _TIDY_TIMEOUT_S if timeout_s is None else min(timeout_s, _TIDY_TIMEOUT_S)
            stack.callback(retention.close, tidy_s)
            stack.callback(checkpointer.wait, timeout_s)
