"""Which checkpoints of a run are kept. Deleting them is the daemon's work; deciding it is a pure function.

A checkpoint is kept if any policy wants it, if it is pinned, if it is being read, or if it is the newest, which is the
last good one. Ephemeral checkpoints are wanted by no policy: each goes when a newer one of any kind is committed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import json
import logging
import math
import os
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from sidesave.client.internals import saver_of
from sidesave.client.runs.info import CheckpointInfo
from sidesave.client.saving.handle import SaveHandle
from sidesave.client.training.links import Links
from sidesave.client.training.metadata import is_ephemeral, metric_of
from sidesave.errors import (
    CheckpointError,
    ClosedError,
    IntegrityError,
    InvalidArgumentError,
    SidesaveError,
    WriteError,
    brief,
    write_error,
)
from sidesave.stager.apart import Latch
from sidesave.writer_daemon.storage.atomic import replace_file

if TYPE_CHECKING:
    from sidesave.client.checkpointer import Checkpointer

logger = logging.getLogger(__name__)

PINS: Final = ".sidesave.pins"
_DELETE_TIMEOUT_S: Final = 60.0


# Policies --------------------------------------------------------------------------------------------------------


class KeepPolicy(ABC):
    """Says which checkpoints it wants kept; to write another one, derive from this."""

    @abstractmethod
    def wanted(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        """The steps to keep of ``checkpoints``, in the order of their commits; pure, and the same for all ranks."""


@dataclass(frozen=True, slots=True)
class Latest(KeepPolicy):
    """Keep the ``n`` checkpoints that were committed last."""

    n: int = 1

    def __post_init__(self) -> None:
        """Check."""
        check_count("Latest", self.n)

    def wanted(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        """The last ones."""
        return [info.step for info in checkpoints[-self.n :]]


@dataclass(frozen=True, slots=True)
class EveryNSteps(KeepPolicy):
    """Keep the steps that ``n`` divides, counted from ``offset``; of a multiple that was not saved the next that was.

    So a run that saves by time keeps one in about ``n`` steps as well.
    """

    n: int
    offset: int = 0

    def __post_init__(self) -> None:
        """Check."""
        check_every("EveryNSteps", self.n, self.offset)

    def wanted(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        """The first at or after each multiple of ``n``; of the offset itself only that step."""
        kept: dict[int, int] = {}
        for info in checkpoints:
            period, beyond = divmod(info.step - self.offset, self.n)
            if period > 0 or (period == 0 and beyond == 0):
                kept[period] = min(info.step, kept.get(period, info.step))
        return [*kept.values()]


@dataclass(frozen=True, slots=True)
class EveryNMinutes(KeepPolicy):
    """Keep one checkpoint per ``minutes``: the oldest, and each that was saved so much after the one kept before."""

    minutes: float

    def __post_init__(self) -> None:
        """Check."""
        check_positive("EveryNMinutes", "minutes", self.minutes)

    def wanted(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        """One of each period; a clock that was set back begins another."""
        kept: list[CheckpointInfo] = []
        for info in checkpoints:
            if not kept or not 0 <= info.created_s - kept[-1].created_s < 60 * self.minutes:
                kept.append(info)
        return [info.step for info in kept]


@dataclass(frozen=True, slots=True)
class Best(KeepPolicy):
    """Keep the ``n`` checkpoints with the lowest (``mode="min"``) or highest (``"max"``) value of a metric.

    Of equal values the newer counts. NaN, and a checkpoint that was saved without this metric, is never among the best.
    """

    n: int = 1
    metric: str = ""
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        """Check."""
        check_count("Best", self.n)
        if not isinstance(self.metric, str) or not self.metric:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError(f"Best needs the name of a metric, as in Best({self.n}, metric='loss')")
        if self.mode not in ("min", "max"):
            raise InvalidArgumentError(f"mode must be 'min' or 'max', not {self.mode!r}")

    def wanted(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        """The best ones."""
        sign = -1 if self.mode == "min" else 1
        ranked = [
            (sign * value, place, info.step)
            for place, info in enumerate(checkpoints)
            if (value := metric_of(info, self.metric)) is not None and not math.isnan(value)
        ]
        return [step for _, _, step in sorted(ranked)[-self.n :]]


def to_delete(
    checkpoints: Sequence[CheckpointInfo],
    policies: Sequence[KeepPolicy],
    pinned: AbstractSet[int] = frozenset(),
    loading: AbstractSet[int] = frozenset(),
) -> list[int]:
    """The steps to delete, ephemeral ones first and then the oldest.

    Args:
        checkpoints: All there are, in any order.
        policies: What to keep; without one all but ephemeral checkpoints are kept.
        pinned: Steps that are never deleted.
        loading: Steps that somebody reads.
    """
    ordered = sorted(checkpoints, key=lambda info: info.order)
    lasting = [info for info in ordered if not is_ephemeral(info)]
    kept = {*pinned, *loading, *(info.step for info in ordered[-1:])}
    steps = {info.step for info in lasting}
    for policy in policies:
        kept |= steps.intersection(policy.wanted(lasting))
    if not policies:
        kept |= steps
    surplus = [info for info in ordered if info.step not in kept]
    surplus.sort(key=lambda info: (not is_ephemeral(info), info.sequence))
    return list(dict.fromkeys(info.step for info in surplus))


def check_keep_policies(keep: object) -> tuple[KeepPolicy, ...]:
    """The policies that ``keep=`` means, one or several; ``InvalidArgumentError`` for what is none, or given twice."""
    items = cast("Iterable[object]", keep) if isinstance(keep, Iterable) else (keep,)
    policies: list[KeepPolicy] = []
    for policy in items:
        if not isinstance(policy, KeepPolicy):
            raise InvalidArgumentError(f"keep takes policies such as sidesave.Latest(3), not {brief(policy)}")
        if policy in policies:
            raise InvalidArgumentError(f"keep has {policy!r} twice")
        policies.append(policy)
    return tuple(policies)


def check_count(what: str, n: int) -> None:
    """A number of checkpoints or steps: an int, 1 or more."""
    if type(n) is not int or n < 1:
        raise InvalidArgumentError(f"{what} takes an int, 1 or more, not {brief(n)}")


def check_every(what: str, n: int, offset: int) -> None:
    """Every n-th step, counted from an offset."""
    check_count(what, n)
    if type(offset) is not int or not 0 <= offset < n:
        raise InvalidArgumentError(f"the offset of {what}({n}) must be an int from 0 to {n - 1}, not {brief(offset)}")


def check_positive(what: str, name: str, value: float) -> None:
    """An amount of time: positive and finite."""
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise InvalidArgumentError(f"{name} of {what} must be a positive number, not {brief(value)}")


# Pins ------------------------------------------------------------------------------------------------------------


class Pins:
    """The steps that retention never deletes: a small file of the run directory, replaced as a whole."""

    def __init__(self, directory: str) -> None:
        """Of a run directory."""
        self._path = os.path.join(directory, PINS)
        self._lock = threading.Lock()

    def read(self) -> frozenset[int]:
        """The pinned steps; raises ``IntegrityError`` for a file that is none of ours, else ``WriteError``."""
        try:
            with open(self._path, "rb") as file:
                steps = json.load(file)
        except FileNotFoundError:
            return frozenset()
        except OSError as error:
            raise write_error(error, "cannot read which checkpoints are pinned", self._path) from error
        except ValueError as error:
            raise IntegrityError(f"{self._path} is damaged: {error}") from error
        if not isinstance(steps, list) or not all(type(step) is int for step in cast("list[Any]", steps)):
            raise IntegrityError(f"{self._path} is damaged: it is no list of steps")
        return frozenset(cast("list[int]", steps))

    def change(self, step: int, *, pinned: bool) -> None:
        """Pin a step or unpin it; durable when this returns. Raises ``WriteError``, or what :meth:`read` does."""
        with self._lock:
            before = self.read()
            after = before | {step} if pinned else before - {step}
            if after == before:
                return
            replace_file(self._path, json.dumps(sorted(after)).encode(), "cannot pin a checkpoint")


# Doing it --------------------------------------------------------------------------------------------------------


class Retention:
    """Has the daemon delete what nobody wants, after each commit, in a thread of its own; that it fails is logged.

    What stays is linked to under names of the user's, if there are any.
    """

    def __init__(
        self, checkpointer: Checkpointer, policies: Sequence[KeepPolicy] | None, pins: Pins, links: Links | None = None
    ) -> None:
        """Work for one checkpointer, which stays the caller's to close; None for ``policies`` is to delete nothing.

        The thread does not keep the checkpointer alive, and ends with it.
        """
        self._reference = weakref.ref(checkpointer)
        self._policies = policies
        self._pins = pins
        self._links = links
        self._turn = threading.Lock()
        self._handles: dict[int, SaveHandle] = {}
        self._loading: frozenset[int] = frozenset()
        self._deletions: dict[int, Future[None]] = {}
        self._commits: queue.SimpleQueue[bool | Latch] = queue.SimpleQueue()
        """True for a commit, false for the end; a latch is opened when all before it is looked at."""
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
        """Around a call of ``save()``: no deletion is asked for meanwhile."""
        with self._turn:
            yield

    def add(self, handle: SaveHandle) -> None:
        """A save was called, within :meth:`saving`; once it is committed, others may go."""
        self._handles[handle.step] = handle
        handle.committed.add_done_callback(
            lambda done: self._commits.put(True) if not done.cancelled() and handle.committed.peek() is None else None
        )

    @contextlib.contextmanager
    def reading(self, step: int | None) -> Generator[None]:
        """Around a load of ``step``: what is there then stays, and what is being deleted has gone before."""
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
            logger.debug("retention has come to its end: %s", error)
        except (SidesaveError, OSError) as error:
            logger.error("no checkpoint is deleted or named now, retention failed: %s", error)
        except BaseException:
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
                # A save of that step which the list has not seen would be what is deleted, once it is committed.
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

    def _surplus(self, checkpoints: Sequence[CheckpointInfo], pinned: AbstractSet[int]) -> list[int]:
        return [] if self._policies is None else to_delete(checkpoints, self._policies, pinned, self._loading)

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
                logger.error("step %d is to be deleted, and cannot: %s", step, error)
            self._deletions.pop(step, None)
            ended.set_result(None)

        deletion.add_done_callback(gone)

    def close(self, timeout_s: float) -> None:
        """Finish what the commits so far make due, at most in that time; idempotent."""
        self._commits.put(False)
        self._thread.join(timeout_s)
        concurrent.futures.wait(list(self._deletions.values()), timeout_s)
