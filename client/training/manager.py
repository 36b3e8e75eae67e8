"""``CheckpointManager``: when to save, what to keep, how to resume. ``Checkpointer`` does the saving."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final, Literal, Self, Unpack

from sidesave.client import arguments
from sidesave.client.checkpointer import Checkpointer
from sidesave.client.export.safetensors import Report, export
from sidesave.client.internals import saver_of
from sidesave.client.loading.sources import Source
from sidesave.client.options import CheckpointerOptions, ExportOptions, LoadOptions
from sidesave.client.ranks.group import NodeWorld
from sidesave.client.reporting.stats import SaveStats, SaveSummary
from sidesave.client.runs.info import CheckpointInfo
from sidesave.client.runs.pins import Pins
from sidesave.client.saving.handle import SaveHandle
from sidesave.client.training.background import AGREE_TO_END_S, Background, end_dropped, open_managed
from sidesave.client.training.intervals import Advice
from sidesave.client.training.keep_policies import KeepBest, KeepPolicy, check_count, check_keep_policies
from sidesave.client.training.links import Naming, check_naming
from sidesave.client.training.managed_state import RANDOM_STATE, ManagedState
from sidesave.client.training.metadata import Metrics, is_ephemeral
from sidesave.client.training.retention import Backlog, MirrorRules
from sidesave.client.training.save_policies import (
    BeforeTraining,
    PolicyEvent,
    SavePolicy,
    check_save_policies,
)
from sidesave.client.training.schedule import Schedule
from sidesave.errors import InvalidArgumentError, SidesaveError
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S: Final = 600.0
_SETTLED_TIMEOUT_S: Final = 5.0
_UNSETTLED_TIMEOUT_S: Final = 0.1
_SEED_STEP: Final = 0


class CheckpointManager:
    """Saves a named state when policies say so, keeps the checkpoints that policies want, and resumes.

    ::

        with CheckpointManager(
            "runs/exp1",
            {"model": model, "optimizer": optimizer, "data": loader},
            save=[EverySteps(500), EverySeconds(600), OnSignal()],
            keep=[KeepLatest(3), KeepBest(2, metric="loss")],
            random_state=True,
        ) as manager:
            for step in range(manager.restore(), total):
                loss = train(step)
                manager.step(step, {"loss": loss})

    Call :meth:`step` and :meth:`save` from one thread; :meth:`request_save` and the rest from any.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        state: dict[str, Any],
        *,
        save: Sequence[SavePolicy] | SavePolicy | int = (),
        keep: Sequence[KeepPolicy] | KeepPolicy = (),
        mirror_keep: Sequence[KeepPolicy] | KeepPolicy = (),
        mirror_backlog: Backlog = "fail",
        names: Naming | None = None,
        random_state: bool = False,
        blocking: bool = False,
        metadata: Mapping[str, Any] | None = None,
        stats: SaveStats | None = None,
        **options: Unpack[CheckpointerOptions],
    ) -> None:
        """Open the run directory. Options and errors are also those of :class:`~sidesave.Checkpointer`.

        Every rank of a job makes one, with the same policies.

        Args:
            directory: The run directory.
            state: Named items, as for ``Checkpointer.save``. The dict stays the caller's: the next save takes a value
                that was replaced in it, and :meth:`restore` replaces plain values in it.
            save: When to save: policies, or a number ``n`` for ``EverySteps(n)``; without any, only :meth:`save` saves.
            keep: What to keep: policies; without any, everything but ephemeral checkpoints.
            mirror_keep: What to keep in the mirror, in the same way. What is on its way there stays here until it is.
            mirror_backlog: A save that finds no room because of that fails, or drops the oldest of it, unmirrored.
            names: The user's names of checkpoints beside ``step-00000500``: a template such as ``"checkpoint-{step}"``,
                or a function of a ``CheckpointInfo``, called in a thread, that may return None. Each name is a link in
                ``directory``, made soon after the commit; of two checkpoints with one name the newer gets it.
            random_state: Save the random number generators too, as ``"random_state"``: Python's, NumPy's, torch's,
                and those of every CUDA device.
            blocking: Return from each save only when it is committed; for debugging.
            metadata: Facts for every checkpoint of this run, as plain JSON data.
            stats: Your own statistics, for callbacks, metrics or a trace.
            **options: Those of ``Checkpointer``.

        Raises:
            InvalidArgumentError: Policies make no sense, alone or together; names are invalid or the same for all
                steps; OnSignal outside the main thread; ranks have different policies, or ones that need a process
                group.
            UnsupportedValueError: The state holds values that cannot be saved; all that are known before training are
                named.
        """
        if type(state) is not dict:
            raise InvalidArgumentError(f"state must be a dict of named items, not {type(state).__name__}")
        self._policies, self._keep = check_save_policies(save), check_keep_policies(keep)
        far = MirrorRules(check_keep_policies(mirror_keep), mirror_backlog)
        if names is not None:
            check_naming(names)
            if urls.is_url(arguments.place_to_write(directory)):
                raise InvalidArgumentError("names= are links, which an object store has not: leave it out for a URL")
        arguments.encode_metadata(metadata)
        if random_state and RANDOM_STATE in state:
            raise InvalidArgumentError(f"random_state=True saves an item {RANDOM_STATE!r}, and the state has one")
        self._pid = os.getpid()
        self._closed = False
        self._stats = SaveStats() if stats is None else stats
        self._dropped: weakref.finalize[..., Self] | None = None
        self._schedule = Schedule(self._policies)
        self._background = Background(self._schedule)
        try:
            self._checkpointer = open_managed(directory, **options)
            self._pins = Pins(self._checkpointer.directory)
            self._background.start(
                self._checkpointer, state, self._policies, self._keep, self._pins, names, far, random_state=random_state
            )
            self._stats.mirror_status = saver_of(self._checkpointer).session.saves.mirroring.status  # keeps none alive
            self._managed = ManagedState(
                state,
                self._checkpointer,
                self._schedule,
                self._background.retention,
                self._stats,
                random_state=random_state,
                blocking=blocking,
                metadata=metadata or {},
                metric_names={policy.metric for policy in self._keep if isinstance(policy, KeepBest)},
            )
        except BaseException:  # an interrupt leaves no daemon either
            self._stop(0)
            raise
        self._dropped = weakref.finalize(self, end_dropped, os.getpid(), self._schedule, self._background.trigger)
        self._dropped.atexit = False  # _close_all comes first, and saves the last step
        _at_exit(self)

    # Saving ----------------------------------------------------------------------------------------------------

    def register(self, name: str, value: Any) -> None:
        """Add an item to the state, for all saves from now on.

        Raises:
            InvalidArgumentError: The name is taken.
            UnsupportedValueError: The value cannot be saved.
        """
        self._managed.register(name, value)

    def write_file(self, name: str, content: str | bytes) -> None:
        """Write a small file, such as ``config.json``, into each checkpoint from the next save on.

        A second call with the same name replaces it. See ``files`` of ``Checkpointer.save`` for limits and errors.
        """
        self._managed.write_file(name, content)

    def step(self, step: int, metrics: Metrics | None = None) -> SaveHandle | None:
        """Report a finished training step; saves it if a policy says so.

        Call it after each step, with growing numbers. It takes some microseconds if nothing is due.

        Args:
            step: The number of the step.
            metrics: Numbers by name, kept in the checkpoint; ``KeepBest`` ranks by them. They are read only if the step
                is saved; a tensor is then fetched from its device. NaN is kept, and never the best.

        Returns:
            The save, or None if nothing was due.

        Raises:
            InvalidArgumentError: The step is not larger than the last; ``metrics`` lacks one that ``KeepBest`` needs,
                or one is no number. (Without any metrics the step is saved, and ``KeepBest`` ignores it.)
            SystemExit: A signal asked for the end, and the step is staged (:class:`OnSignal`).
            SidesaveError: As ``Checkpointer.save``; or ranks could not agree.
        """
        due = self._schedule.pass_step(step, metrics)
        if due.signal:
            self._save_and_leave(due.signal, together=due.together)
        if not (due.persistent or due.ephemeral):
            return None
        if due.stop:  # there may be no other save
            return self._managed.save_at_last(ephemeral=not due.persistent)
        return self._managed.save(self._schedule.stepped, metrics, ephemeral=not due.persistent, skips=due.skips)

    def save(
        self,
        step: int,
        metrics: Metrics | None = None,
        *,
        blocking: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """Save now, whatever the policies say. All ranks must call it.

        Args:
            step: The last finished step. No policy saves an earlier one after it.
            metrics: As for :meth:`step`.
            blocking: Return only when the checkpoint is committed.
            metadata: Facts about this checkpoint beside those of the run, as plain JSON data.

        Raises:
            InvalidArgumentError: A later step was finished or saved.
            SidesaveError: As ``Checkpointer.save``.
        """
        step = self._schedule.note_finished(step, metrics)
        return self._managed.save(step, metrics, blocking=blocking, metadata=metadata)

    def stats(self) -> SaveSummary:
        """The cost of this manager's saves so far."""
        return self._stats.summary()

    def request_save(self) -> None:
        """Have the next possible step saved. Returns at once; any thread or signal handler may call it.

        With several ranks one call is enough; they need the policy :class:`OnRequest`.
        """
        self._schedule.request(stop=False)

    def request_stop(self) -> None:
        """As :meth:`request_save`, and ask the loop to end with that step, by :attr:`stopping`."""
        self._schedule.request(stop=True)

    @property
    def stopping(self) -> bool:
        """Whether the loop should end with the last finished step, which is saved; the same on all ranks."""
        return self._schedule.stopping

    # Resuming --------------------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | str | os.PathLike[str] | None = None,
        *,
        sources: Sequence[Source] | Source = (),
        fallback: bool = True,
        **options: Unpack[LoadOptions],
    ) -> int:
        """Restore the state from a checkpoint, and return the step to train next.

        That is 0 without a checkpoint, else the one after the restored step. All ranks must call it. Blocks until all
        is read. Saves under way are awaited first; with ``step``, only that step's.

        Args:
            step: A step, its directory or its ``CheckpointInfo``, as for :meth:`rollback`. None, or the run directory,
                is the latest: the one committed last, or rolled back to since.
            sources: What a new run starts from, in this order: checkpoints of other runs, or parts of them. If this run
                has a checkpoint, they are not read (logged as INFO), so that the same script resumes. An item that no
                source has stays as it is.
            fallback: If this checkpoint does not verify, take the newest older one that does; what is skipped is logged
                as a warning.
            **options: Those of ``Checkpointer.load``, for a checkpoint of this run.

        Raises:
            CheckpointNotFoundError: There is no such step, or a source is no checkpoint.
            InvalidArgumentError: ``step`` is a checkpoint of another run; pass it in ``sources``.
            IntegrityError: There are checkpoints, but none verifies.
            StateMismatchError: The state does not fit. Nothing has changed.
            SystemExit: A signal asked for the end meanwhile (:class:`OnSignal`).
            SidesaveError: As ``Checkpointer.load``.
        """
        restored = self._managed.restore(step, sources, options, fallback=fallback)
        if not restored and any(isinstance(policy, BeforeTraining) for policy in self._policies):
            self._managed.save(_SEED_STEP, None, seed=True)
        ending = self._schedule.resume()
        if ending:
            self._leave(ending, self._managed.last)
        return self._schedule.stepped + 1

    def rollback(
        self,
        step: int | str | os.PathLike[str] | None = None,
        *,
        steps_back: int | None = None,
        fallback: bool = True,
        **options: Unpack[LoadOptions],
    ) -> int:
        """Go back to an earlier checkpoint of this run, and return the step to train next.

        Like :meth:`restore` of that step. It is durable: a run that crashes before its next commit resumes from there.
        Later checkpoints are given up; a later ``rollback`` to one of them takes it up again. All ranks must call it.
        Blocking.

        Args:
            step: As for :meth:`restore`.
            steps_back: Instead of ``step``: the newest ancestor that is at least so many steps before the last finished
                one.
            fallback: As for :meth:`restore`.
            **options: As for :meth:`restore`.

        Raises:
            InvalidArgumentError: Not exactly one of ``step`` and ``steps_back`` is given.
            CheckpointNotFoundError: There is no such step, or none that far back.
            SidesaveError: As :meth:`restore`.
        """
        if (step is None) == (steps_back is None):
            raise InvalidArgumentError("rollback takes either a step or steps_back=")
        if steps_back is not None:
            check_count("steps_back of rollback", steps_back)
            step = saver_of(self._checkpointer).session.shared.ancestor(self._schedule.stepped - steps_back)
        return self.restore(step, fallback=fallback, **options)

    # What there is ---------------------------------------------------------------------------------------------

    @property
    def checkpointer(self) -> Checkpointer:
        """The ``Checkpointer``, for all that this class does not do."""
        return self._checkpointer

    @property
    def latest(self) -> CheckpointInfo | None:
        """The checkpoint committed last, or rolled back to since; None if there is none. Reads the directory."""
        checkpoints = self.checkpoints()
        return checkpoints[-1] if checkpoints else None

    def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints of the run in the order of :func:`sidesave.find`, with metrics. Reads the directory."""
        return saver_of(self._checkpointer).session.shared.checkpoints()

    def best(self, metric: str, mode: Literal["min", "max"] = "min") -> CheckpointInfo | None:
        """The persistent checkpoint with the best value of a metric, as :class:`KeepBest` ranks them, or None."""
        checkpoints = [info for info in self.checkpoints() if not is_ephemeral(info)]
        steps = KeepBest(1, metric, mode).wanted(checkpoints)
        return next((info for info in reversed(checkpoints) if info.step in steps), None)

    def export(self, target: str | os.PathLike[str], **options: Unpack[ExportOptions]) -> Report | None:
        """Write the weights of the last finished step as :func:`sidesave.export` does. Blocking.

        The step is saved first, unless it was, and its commit awaited. All ranks must call this: rank 0 writes and gets
        the report, the others wait, as long as the process group allows.

        Raises:
            CheckpointNotFoundError: No step was finished, and there is no checkpoint.
            InvalidArgumentError: With ``node_local`` no rank has all parts.
            SidesaveError: As :meth:`save`, :meth:`wait` and :func:`sidesave.export`; the same on all ranks.
        """
        world = saver_of(self._checkpointer).session.world
        if isinstance(saver_of(self._checkpointer).session.node, NodeWorld):
            raise InvalidArgumentError("with node_local no rank has all parts of a checkpoint, so none can export it")
        report = None
        with world.raise_together("cannot export"):
            if self._managed.has_unsaved_step():
                self._managed.save_at_last()
            self.wait()
            if world.rank == 0:
                report = export(self._managed.current(), target, **options)
        return report

    def prepare(self) -> Future[None]:
        """Allocate staging memory for the state in the background; optional, see ``Checkpointer.prepare``."""
        return self._checkpointer.prepare(self._managed.items, files=self._managed.files)

    def pin(self, step: int) -> None:
        """Never delete this step, also in later sessions; durable when this returns.

        All ranks may call it, or rank 0 alone; with ``node_local`` all must.
        """
        step = arguments.check_step(step)
        if saver_of(self._checkpointer).session.node.rank == 0:
            self._pins.change(step, pinned=True)

    def unpin(self, step: int) -> None:
        """Leave this step to the policies again."""
        step = arguments.check_step(step)
        if saver_of(self._checkpointer).session.node.rank == 0:
            self._pins.change(step, pinned=False)

    @property
    def pinned(self) -> frozenset[int]:
        """The pinned steps."""
        return self._pins.read()

    def advise(self, mtbf_s: float) -> Advice:
        """The interval between saves that loses least time, for one failure in ``mtbf_s`` seconds on average.

        It follows from the measured cost of this run's saves; ``InvalidArgumentError`` before the first commit.
        """
        return self._schedule.cost.advise(mtbf_s)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until every save issued so far is committed; raises what ``Checkpointer.wait`` does."""
        self._checkpointer.wait(timeout_s)

    # The end ---------------------------------------------------------------------------------------------------

    def _save_and_leave(self, number: int, *, together: bool) -> None:
        """Save the last finished step, if all ranks do, and raise ``SystemExit`` for a signal."""
        self._schedule.begin_answer()
        handle, step = self._managed.last, self._schedule.stepped
        if not together:
            logger.error("step %d is not saved before the end: another rank has failed or died", step)
        elif self._managed.has_unsaved_step():
            try:
                handle = self._managed.save_at_last()
            except SidesaveError as error:
                logger.error("step %d is not saved before the end: %s", step, error)
        self._leave(number, handle)

    def _leave(self, number: int, handle: SaveHandle | None) -> None:
        if handle is not None and not self._schedule.await_save(handle, number):
            logger.warning("signal %d: leaving before step %d is committed; its daemon goes on", number, handle.step)
        self._closed = True
        settled = handle is None or handle.done()
        with contextlib.suppress(SidesaveError):  # of saves: raised where they were awaited, and logged
            self._stop(_SETTLED_TIMEOUT_S if settled else _UNSETTLED_TIMEOUT_S)
        raise SystemExit(128 + number)

    def close(self) -> None:
        """Save the last step if a policy says so (``LastStep``), wait for every save, end the daemon; idempotent.

        Raises what ``Checkpointer.wait`` raises, after everything is closed; ``SystemExit`` if a signal asks for the
        end meanwhile (:class:`OnSignal`).
        """
        self._close("close")

    def _close(self, event: PolicyEvent | None, error: BaseException | None = None) -> None:
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        try:
            schedule = self._schedule
            schedule.begin_answer()
            left = schedule.finish(AGREE_TO_END_S, failing=event != "close")
            due = event is not None and (schedule.is_due(event) or (event == "close" and bool(left)))
            if due and self._managed.has_unsaved_step():
                ephemeral = left.ephemeral and not left.persistent and not schedule.is_due("close")
                self._managed.save_at_last(ephemeral=ephemeral, exception=error)
            if self._managed.last is not None and not schedule.ending:
                schedule.await_save(self._managed.last)
            if schedule.ending:
                self._leave(schedule.ending, self._managed.last)
        finally:
            self._stop(_EXIT_TIMEOUT_S)

    def _stop(self, timeout_s: float) -> None:
        """Stop everything, waiting up to ``timeout_s`` for saves and deletions; raises the error of a failed save."""
        if self._dropped is not None:
            self._dropped.detach()
        self._background.stop(timeout_s, getattr(self, "_checkpointer", None))
        _open.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close. After an exception other than ``SystemExit``, save the last finished step if ``OnException`` is set.

        A failure is then only logged.
        """
        if kind is None:
            self.close()
            return
        try:
            self._close(None if issubclass(kind, SystemExit) else "exception", error)
        except SidesaveError as failure:
            logger.error("a save failed as well: %s", failure)

    def __repr__(self) -> str:
        return f"<CheckpointManager {self._checkpointer.directory!r}{' closed' if self._closed else ''}>"


_open: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()
_registered: Callable[[], None] | None = None


def _at_exit(manager: CheckpointManager) -> None:
    """Close the manager when the interpreter ends, before its checkpointer."""
    global _registered
    _open.add(manager)
    if _registered is None:
        _registered = atexit.register(_close_all)


def _close_all() -> None:
    for manager in list(_open):
        try:
            with contextlib.suppress(SystemExit):  # of a signal; the interpreter ends anyway
                manager._close(None)  # pyright: ignore[reportPrivateUsage] - a function of the class
        except SidesaveError as error:
            logger.error("a save failed: %s", error)
