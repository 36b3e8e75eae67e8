"""``CheckpointManager``: when to save, what to keep, how to resume. ``Checkpointer`` saves."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final, Literal, Self, Unpack

from sidesave.client import arguments
from sidesave.client.checkpointer import Checkpointer
from sidesave.client.export.safetensors import Report, export
from sidesave.client.loading.sources import Source
from sidesave.client.options import CheckpointerOptions, ExportOptions, LoadOptions
from sidesave.client.reporting.stats import SaveStats, SaveSummary
from sidesave.client.runs.links import Naming, check_naming
from sidesave.client.saving.handle import SaveHandle
from sidesave.client.training.background import Background
from sidesave.client.training.ending import Ending
from sidesave.client.training.intervals import Advice
from sidesave.client.training.keep_policies import (
    KeepBest,
    KeepPolicy,
    check_count,
    check_keep_policies,
)
from sidesave.client.training.managed_state import Collect, ManagedState
from sidesave.client.training.metadata import Metrics, is_ephemeral
from sidesave.client.training.save_policies import SavePolicy, check_save_policies
from sidesave.client.training.schedule import Schedule
from sidesave.errors import InvalidArgumentError, SidesaveError
from sidesave.writer_daemon.checkpoints.info import RANDOM_STATE, CheckpointInfo
from sidesave.writer_daemon.storage import urls

logger = logging.getLogger(__name__)

_SEED_STEP: Final = 0


class CheckpointManager:
    """Saves a named state when policies say so, keeps the checkpoints that they want, and resumes.

    ::

        with CheckpointManager(
            "runs/exp1",
            {"model": model, "optimizer": optimizer, "data": loader},
            save=[EverySteps(500), EverySeconds(600), OnSignal()],
            keep=[KeepLatest(3), KeepBest(2, metric="loss")],
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
        names: Naming | None = None,
        random_state: bool = True,
        blocking: bool = False,
        metadata: Mapping[str, Any] | None = None,
        **options: Unpack[CheckpointerOptions],
    ) -> None:
        """Open the run directory.

        Every rank of a job makes one, with the same policies. Options and errors are also those of
        :class:`~sidesave.Checkpointer`.

        Args:
            directory: The run directory.
            state: Named items, as for ``Checkpointer.save``. The dict is not copied: a save uses
                the values in it at that time, and :meth:`restore` replaces plain values in it.
            save: When to save: policies, or a number ``n`` for ``EverySteps(n)``; without any, only
                :meth:`save` saves.
            keep: What to keep: policies; without any, everything but ephemeral checkpoints.
            mirror_keep: The same for the mirror. A checkpoint stays here until it is mirrored.
            names: Your names of checkpoints, next to ``step-00000500``: a template such as
                ``"checkpoint-{step}"``, or a function of a ``CheckpointInfo``, called in a thread,
                that may return None. Each name is a link in ``directory``, made soon after the
                commit; if two checkpoints have one name, the newer gets it.
            random_state: Save the random number generators too, as ``"random_state"``: those of
                Python, NumPy, torch and every CUDA device, and those at the start of unfinished
                data loader epochs.
            blocking: Return from each save only when it is committed; for debugging.
            metadata: Facts for every checkpoint of this run, as plain JSON data.
            **options: Those of ``Checkpointer``.

        Raises:
            InvalidArgumentError: Policies are invalid, alone or together; names are invalid or the
                same for all steps; OnSignal outside the main thread; ranks have different policies,
                or policies that need a process group.
            UnsupportedValueError: The state holds values that cannot be saved; all values known
                before training are named.
        """
        if type(state) is not dict:
            raise InvalidArgumentError(
                f"state must be a dict of named items, not {type(state).__name__}"
            )
        self._policies = check_save_policies(save)
        kept, mirrored = check_keep_policies(keep), check_keep_policies(mirror_keep)
        if names is not None:
            check_naming(names)
            if urls.is_url(arguments.place_to_write(directory)):
                raise InvalidArgumentError(
                    "names= needs links, which object stores lack: leave it out for a URL"
                )
        arguments.encode_metadata(metadata)
        if random_state and RANDOM_STATE in state:
            raise InvalidArgumentError(
                f"the state has an item {RANDOM_STATE!r}: rename it, or pass random_state=False"
            )
        self._stats = SaveStats()
        self._schedule = Schedule(self._policies)
        self._background = Background(self._schedule)
        try:
            self._checkpointer = self._background.start(
                directory,
                [self._stats, self._schedule.cost],
                options,
                state,
                self._policies,
                kept,
                names,
                mirrored,
                random_state=random_state,
            )
            self._managed = ManagedState(
                self._collector(state),
                self._checkpointer,
                self._schedule,
                self._background.retention,
                random_state=random_state,
                blocking=blocking,
                metadata=metadata or {},
                metric_names={each.metric for each in kept if isinstance(each, KeepBest)},
            )
        except BaseException:  # also on an interrupt, so that no daemon is left
            self._background.stop(0)
            raise
        self._ending = Ending(self._schedule, self._background, self._managed)

    def _collector(self, state: dict[str, Any]) -> Collect:
        """Return what updates ``state``, without a reference that keeps a dropped manager alive."""
        return lambda step: state

    # Saving ---------------------------------------------------------------------------------------

    def register(self, name: str, value: Any) -> None:
        """Add an item to the state, for all saves from now on.

        Raises:
            InvalidArgumentError: The name is taken.
            UnsupportedValueError: The value cannot be saved.
        """
        self._managed.register(name, value)

    def write_file(self, name: str, content: str | bytes) -> None:
        """Write a small file, such as ``config.json``, into each checkpoint from the next save on.

        A second call with the same name replaces it. See ``files`` of ``Checkpointer.save`` for
        limits and errors.
        """
        self._managed.write_file(name, content)

    def step(self, step: int, metrics: Metrics | None = None) -> SaveHandle | None:
        """Report a finished training step; saves it if a policy says so.

        Call it after each step, with growing numbers. It takes some microseconds if nothing is due.

        Args:
            step: The number of the step.
            metrics: Numbers by name, kept in the checkpoint; ``KeepBest`` ranks by them. They are
                read only if the step is saved; a tensor is then fetched from its device. NaN is
                stored, but never the best.

        Returns:
            The save, or None if nothing was due.

        Raises:
            InvalidArgumentError: The step is not larger than the last; ``metrics`` lacks one that
                ``KeepBest`` needs, or one is not a number. (Without any metrics the step is saved,
                and ``KeepBest`` ignores it.)
            SystemExit: A signal asked for the end, and the step is staged (:class:`OnSignal`).
            SidesaveError: As ``Checkpointer.save``; or ranks could not agree.
        """
        due = self._schedule.pass_step(step, metrics)
        if due.signal:
            self._ending.save_and_leave(due.signal, together=due.together)
        if not (due.persistent or due.ephemeral):
            return None
        if due.stop:  # there may be no other save
            return self._managed.save_at_last(ephemeral=not due.persistent)
        return self._managed.save(
            self._schedule.stepped, metrics, ephemeral=not due.persistent, skips=due.skips
        )

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
            metadata: Facts about this checkpoint, added to those of the run, as plain JSON data.

        Raises:
            InvalidArgumentError: A later step was finished or saved.
            SidesaveError: As ``Checkpointer.save``.
        """
        step = self._schedule.note_finished(step, metrics)
        return self._managed.save(step, metrics, blocking=blocking, metadata=metadata)

    def stats(self) -> SaveSummary:
        """Return the cost of this manager's saves."""
        return self._stats.summary(self._checkpointer.mirror_status())

    def request_save(self) -> None:
        """Have the next possible step saved; returns at once, in any thread or signal handler.

        With several ranks one call is enough; they need the policy :class:`OnRequest`.
        """
        self._schedule.request(stop=False)

    def request_stop(self) -> None:
        """Have the next possible step saved, and ask the loop to end with it (:attr:`stopping`)."""
        self._schedule.request(stop=True)

    @property
    def stopping(self) -> bool:
        """Whether all ranks should end the loop with the last finished step, which is saved."""
        return self._schedule.stopping

    # Resuming -------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | str | os.PathLike[str] | None = None,
        *,
        sources: Sequence[Source] | Source = (),
        fallback: bool = True,
        **options: Unpack[LoadOptions],
    ) -> int:
        """Restore the state from a checkpoint, and return the step to train next.

        That is 0 without a checkpoint, else the one after the restored step. All ranks must call
        it. Blocks until all is read. Waits for unfinished saves first; with ``step``, only for that
        step's.

        Args:
            step: A step, its directory or its ``CheckpointInfo``, as for :meth:`rollback`. None, or
                the run directory, is the latest: the one committed last, or rolled back to since.
            sources: What a new run starts from, in this order: checkpoints of other runs, or parts
                of them. If this run has a checkpoint, they are not read (logged as INFO), so that
                the same script resumes. An item that no source has is left unchanged.
            fallback: If this checkpoint does not verify, take the newest older one that does; each
                skipped one is logged as a warning.
            **options: Those of ``Checkpointer.load``, for a checkpoint of this run.

        Raises:
            CheckpointNotFoundError: There is no such step, or a source is not a checkpoint.
            InvalidArgumentError: ``step`` is a checkpoint of another run; pass it in ``sources``.
            IntegrityError: There are checkpoints, but none verifies.
            StateMismatchError: The state does not fit. Nothing has changed.
            SystemExit: A signal asked for the end meanwhile (:class:`OnSignal`).
            SidesaveError: As ``Checkpointer.load``.
        """
        restored = self._managed.restore(step, sources, options, fallback=fallback)
        if not restored and self._schedule.is_due("restore"):
            self._managed.save(_SEED_STEP, None, seed=True)
        if signal := self._schedule.resume():
            self._ending.leave(signal, self._managed.last)
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

        Like :meth:`restore` of that step. It is durable: a run that crashes before its next commit
        resumes from there. Later checkpoints are given up; a later ``rollback`` to one of them
        takes it up again. All ranks must call it. Blocking.

        Args:
            step: As for :meth:`restore`.
            steps_back: Instead of ``step``: the newest ancestor at least this number of steps
                before the last finished step.
            fallback: As for :meth:`restore`.
            **options: As for :meth:`restore`.

        Raises:
            InvalidArgumentError: Not exactly one of ``step`` and ``steps_back`` is given.
            CheckpointNotFoundError: There is no such step, or no ancestor that far back.
            SidesaveError: As :meth:`restore`.
        """
        if (step is None) == (steps_back is None):
            raise InvalidArgumentError("rollback takes either a step or steps_back=")
        if steps_back is not None:
            check_count("steps_back of rollback", steps_back)
            step = self._checkpointer.session.ancestor(self._schedule.stepped - steps_back)
        return self.restore(step, fallback=fallback, **options)

    # Checkpoints of the run -----------------------------------------------------------------------

    @property
    def checkpointer(self) -> Checkpointer:
        """The ``Checkpointer``, for its other methods."""
        return self._checkpointer

    @property
    def latest(self) -> CheckpointInfo | None:
        """The checkpoint committed last, or rolled back to since, or None. Reads the directory."""
        return (self.checkpoints() or [None])[-1]

    def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints, with metrics, in :func:`sidesave.find`'s order. Reads the directory."""
        return self._checkpointer.checkpoints()

    def best(self, metric: str, mode: Literal["min", "max"] = "min") -> CheckpointInfo | None:
        """The best persistent checkpoint by a metric, ranked as by :class:`KeepBest`, or None."""
        checkpoints = [info for info in self.checkpoints() if not is_ephemeral(info)]
        steps = KeepBest(1, metric, mode).wanted(checkpoints)
        return next((info for info in reversed(checkpoints) if info.step in steps), None)

    def export(
        self, target: str | os.PathLike[str], **options: Unpack[ExportOptions]
    ) -> Report | None:
        """Write the weights of the last finished step as :func:`sidesave.export` does. Blocking.

        Saves the step first if needed, and waits for its commit. All ranks must call this: rank 0
        writes and gets the report; the others wait, at most for the timeout of the process group.

        Raises:
            CheckpointNotFoundError: No step was finished, and there is no checkpoint.
            InvalidArgumentError: With ``node_local`` no rank has all parts.
            SidesaveError: As :meth:`save`, :meth:`wait` and :func:`sidesave.export`; the same on
                all ranks.
        """
        session = self._checkpointer.session
        if session.node_local:
            raise InvalidArgumentError(
                "with node_local no rank has all parts of a checkpoint, so none can export it"
            )
        report = None
        with session.world.raise_together("cannot export"):
            if self._managed.has_unsaved_step():
                self._managed.save_at_last()
            self.wait()
            if session.world.rank == 0:
                report = export(self._managed.current(), target, **options)
        return report

    def prepare(self, *, slots: int = 1) -> Future[None]:
        """Allocate staging memory in the background; optional, see ``Checkpointer.prepare``."""
        managed = self._managed
        return self._checkpointer.prepare(managed.items, files=managed.files, slots=slots)

    def pin(self, step: int) -> None:
        """Never delete this step, also in later sessions; durable when this returns.

        All ranks may call it, or rank 0 alone; with ``node_local`` all must. A step may be pinned
        before it is saved. Waits for a deletion of the step that is under way. If this raises, the
        step is not pinned.

        Raises:
            CheckpointNotFoundError: The step was deleted, or a later one was saved.
            StagingError: It would have to wait in a callback of a save or within ``save()``.
        """
        step = arguments.check_step(step)
        if self._checkpointer.session.leads:
            self._background.pin(step)

    def unpin(self, step: int) -> None:
        """Leave this step to the policies again."""
        step = arguments.check_step(step)
        if self._checkpointer.session.leads:
            self._background.pins.change(step, pinned=False)

    @property
    def pinned(self) -> frozenset[int]:
        """The pinned steps."""
        return self._background.pins.read()

    def advise(self, mtbf_s: float) -> Advice:
        """The save interval that loses least time for one failure in ``mtbf_s`` seconds on average.

        It follows from the measured cost of this run's saves; ``InvalidArgumentError`` before the
        first commit.
        """
        return self._schedule.cost.advise(mtbf_s)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until every earlier save is committed; raises what ``Checkpointer.wait`` does."""
        self._checkpointer.wait(timeout_s)

    # The end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Save the last step if a policy says so (``LastStep``), wait for saves, end the daemon.

        ``close`` is idempotent. Raises what ``Checkpointer.wait`` raises, after everything is
        closed; ``SystemExit`` if a signal meanwhile asks for the end (:class:`OnSignal`).
        """
        self._ending.close("close")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; save the last finished step after an exception if ``OnException`` is set.

        ``SystemExit`` does not count here. After an exception, a failure is only logged.
        """
        if kind is None:
            self.close()
            return
        try:
            self._ending.close(None if issubclass(kind, SystemExit) else "exception", error)
        except SidesaveError as failure:
            logger.error("a save failed as well: %s", failure)

    def __repr__(self) -> str:
        closed = " closed" if self._ending.closed else ""
        return f"<CheckpointManager {self._checkpointer.directory!r}{closed}>"
