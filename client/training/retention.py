"""Deletes checkpoints that nothing keeps. A pure function decides, the daemon deletes.

A checkpoint is kept if any policy wants it, if it is pinned, if it is being read, or if it is the newest. No policy
wants ephemeral checkpoints: each is deleted once a newer one of any kind is committed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from sidesave.client.internals import saver_of
from sidesave.client.runs.info import CheckpointInfo
from sidesave.client.runs.pins import Pins
from sidesave.client.saving.handle import SaveHandle
from sidesave.client.training.keep_policies import KeepPolicy, to_delete
from sidesave.client.training.links import Links
from sidesave.errors import (
    CheckpointError,
    ClosedError,
    CommitUnknownError,
    InvalidArgumentError,
    SidesaveError,
    WriteError,
    brief,
)
from sidesave.stager.signal_safe import Latch

if TYPE_CHECKING:
    from sidesave.client.checkpointer import Checkpointer

logger = logging.getLogger(__name__)

_DELETE_TIMEOUT_S: Final = 60.0
Backlog = Literal["fail", "drop"]


# The mirror ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MirrorRules:
    """What stays in the mirror, without policies all that is not ephemeral; and what gives way to a save here."""

    keep: Sequence[KeepPolicy] = ()
    backlog: Backlog = "fail"

    def __post_init__(self) -> None:
        if self.backlog not in ("fail", "drop"):
            raise InvalidArgumentError(f"mirror_backlog must be 'fail' or 'drop', not {brief(self.backlog)}")


def _by_sequence(info: CheckpointInfo) -> int:
    return info.sequence


# Doing it --------------------------------------------------------------------------------------------------------


class Retention:
    """After each commit, has the daemon delete what nothing keeps, and links the rest to the user's names.

    It works in a thread of its own. Failures are logged.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        policies: Sequence[KeepPolicy] | None,
        pins: Pins,
        links: Links | None = None,
        mirror: MirrorRules | None = None,
    ) -> None:
        """Start the thread. It does not keep ``checkpointer`` alive, and ends with it.

        ``policies=None`` deletes nothing. What ``mirror`` wants stays here until it is there.
        """
        self._reference = weakref.ref(checkpointer)
        self._policies = policies
        self._pins = pins
        self._links = links
        self._mirror = mirror or MirrorRules()
        self._mirror_deletions: set[int] = set()
        mirroring = saver_of(checkpointer).session.saves.mirroring
        if mirroring.mirror and policies is not None:
            mirroring.on_mirrored = lambda: self._commits.put(True)
        self._turn = threading.Lock()
        self._handles: dict[int, SaveHandle] = {}
        self._loading: frozenset[int] = frozenset()
        self._deletions: dict[int, Future[None]] = {}
        self._commits: queue.SimpleQueue[bool | Latch] = queue.SimpleQueue()
        """True for a commit, false for the end; a latch is opened once everything before it has been handled."""
        self._thread = threading.Thread(target=self._work, name="sidesave-retention", daemon=True)
        self._thread.start()
        weakref.finalize(checkpointer, self._commits.put, False).atexit = False

    @property
    def _checkpointer(self) -> Checkpointer:
        checkpointer = self._reference()
        if checkpointer is None:
            raise ClosedError("the checkpointer is gone")
        return checkpointer

    @contextlib.contextmanager
    def saving(self) -> Generator[None]:
        """Hold back deletions during a call of ``save()``."""
        with self._turn:
            yield

    def add(self, handle: SaveHandle) -> None:
        """Add a save, within :meth:`saving`; its commit may make others deletable."""
        self._handles[handle.step] = handle
        handle.committed.add_done_callback(
            lambda done: self._commits.put(True) if not done.cancelled() and handle.committed.peek() is None else None
        )

    @contextlib.contextmanager
    def reading(self, step: int | None) -> Generator[None]:
        """During a load of ``step``, keep all existing checkpoints; deletions under way are awaited first."""
        saver_of(self._checkpointer).session.saves.settle(step)
        looked = Latch()
        self._commits.put(looked)  # after what was committed before
        looked.wait(_DELETE_TIMEOUT_S)
        with self._turn:
            under_way = list(self._deletions.values())
        concurrent.futures.wait(under_way, _DELETE_TIMEOUT_S)
        with self._turn:
            self._loading = frozenset(self._checkpointer.steps())
        try:
            yield
        finally:
            with self._turn:
                self._loading = frozenset()

    def _work(self) -> None:
        self._guarded(lambda: self._link(saver_of(self._checkpointer).session.run.scan()))
        goes_on = True
        while goes_on:
            batch = [self._commits.get()]
            while not self._commits.empty():
                batch.append(self._commits.get())
            if True in batch:
                self._guarded(self._run)
            for each in batch:
                if isinstance(each, Latch):
                    each.open()
            goes_on = False not in batch

    def _guarded(self, operation: Callable[[], None]) -> None:
        try:
            operation()
        except ClosedError as error:
            logger.debug("retention ends: %s", error)
        except (SidesaveError, OSError) as error:
            logger.error("no checkpoint is deleted or named now, retention failed: %s", error)
        except BaseException:  # the thread must not die silently
            logger.exception("no checkpoint is deleted or named now, retention failed")

    def _link(self, checkpoints: Sequence[CheckpointInfo]) -> None:
        if self._links is not None:
            self._links.update(checkpoints)

    def _run(self) -> None:
        with self._turn:
            before = dict(self._handles)
            settled = {step for step, handle in before.items() if handle.done()}
            going = set(self._deletions)
        checkpoints = saver_of(self._checkpointer).session.run.scan()
        pinned = self._pins.read()
        with self._turn:
            for step in self._surplus(checkpoints, pinned):
                handle = self._handles.get(step)
                # A newer save of that step, which the list has not seen, would be deleted once committed.
                if handle is not None and (handle is not before.get(step) or step not in settled):
                    continue
                if step not in self._deletions:
                    self._delete(step)
                going.add(step)
            listed = {info.step for info in checkpoints}
            for step in settled - listed:
                if self._handles.get(step) is before[step]:
                    del self._handles[step]
        self._link([info for info in checkpoints if info.step not in going])
        if self._policies is not None and saver_of(self._checkpointer).session.saves.mirroring.mirror:
            self._run_mirror(pinned)

    def _surplus(self, checkpoints: Sequence[CheckpointInfo], pinned: frozenset[int]) -> list[int]:
        """What nothing keeps here, and is not on its way to the mirror."""
        if self._policies is None:
            return []
        awaits = saver_of(self._checkpointer).session.saves.mirroring.awaits
        not_wanted = to_delete(checkpoints, self._mirror.keep, pinned)
        surplus = to_delete(checkpoints, self._policies, pinned, self._loading)
        on_their_way = [info for info in checkpoints if info.step in surplus and awaits(info.sequence)]
        held = [info.step for info in sorted(on_their_way, key=_by_sequence) if info.step not in not_wanted]
        session = saver_of(self._checkpointer).session
        for step in {*session.droppable} - {info.step for info in checkpoints}:
            session.lineage.remove(step)  # a save has dropped it
        session.droppable = tuple(held) if self._mirror.backlog == "drop" else ()
        return [step for step in surplus if step not in held]

    def _run_mirror(self, pinned: frozenset[int]) -> None:
        """Delete in the mirror what its own policies do not keep."""
        checkpointer = self._checkpointer
        session = saver_of(checkpointer).session
        with self._turn:
            loading = self._loading
        for step in to_delete(session.run.mirror.scan(), self._mirror.keep, pinned, loading):
            if step in self._mirror_deletions:
                continue
            self._mirror_deletions.add(step)
            deletion = saver_of(checkpointer).delete(step, spare_read=True, mirror=True)
            deletion.add_done_callback(functools.partial(self._gone_from_mirror, step))

    def _gone_from_mirror(self, step: int, done: Future[None]) -> None:
        error = done.exception()
        if error is None:
            logger.info("deleted step %d from the mirror, where no policy keeps it", step)
        elif not isinstance(error, CheckpointError):  # else it is gone
            told = logging.INFO if isinstance(error, CommitUnknownError) else logging.WARNING  # the next session tries
            logger.log(told, "step %d is not deleted from the mirror now: %s", step, error)
        self._mirror_deletions.discard(step)

    def _delete(self, step: int) -> None:
        checkpointer = self._checkpointer  # not dropped meanwhile
        deletion = saver_of(checkpointer).delete(step, spare_read=True)
        ended = self._deletions[step] = Future[None]()

        def gone(done: Future[None]) -> None:
            error = done.exception()
            if error is None:
                logger.info("deleted step %d, which no policy keeps", step)
            elif isinstance(error, WriteError) and error.errno == errno.EBUSY:
                logger.info("step %d is not deleted now, somebody reads it", step)
            elif not isinstance(error, CheckpointError):  # else it is gone
                logger.error("cannot delete step %d: %s", step, error)
            self._deletions.pop(step, None)
            ended.set_result(None)

        deletion.add_done_callback(gone)

    def close(self, timeout_s: float) -> None:
        """Finish the deletions that are due, for up to ``timeout_s`` seconds; idempotent."""
        self._commits.put(False)
        self._thread.join(timeout_s)
        concurrent.futures.wait(list(self._deletions.values()), timeout_s)
