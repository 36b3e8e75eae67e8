"""``CheckpointManager``: when to save, what to keep, how to resume. Saving itself is ``Checkpointer``'s alone."""

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
from sidesave.client.saving.handle import SaveHandle
from sidesave.client.training.background import AGREE_TO_END_S, Background, end_dropped
from sidesave.client.training.intervals import Advice
from sidesave.client.training.keep_policies import KeepBest, KeepPolicy, check_count, check_keep_policies
from sidesave.client.training.links import Naming, check_naming
from sidesave.client.training.managed_state import RANDOM_STATE, ManagedState
from sidesave.client.training.metadata import Metrics, is_ephemeral
from sidesave.client.training.retention import Pins
from sidesave.client.training.save_policies import (
    BeforeTraining,
    PolicyEvent,
    SavePolicy,
    check_save_policies,
)
from sidesave.client.training.schedule import Schedule
from sidesave.errors import InvalidArgumentError, SidesaveError

logger = logging.getLogger(__name__)

_EXIT_TIMEOUT_S: Final = 600.0
_SETTLED_TIMEOUT_S: Final = 5.0
_UNSETTLED_TIMEOUT_S: Final = 0.1
_SEED_STEP: Final = 0


class CheckpointManager:
    """Saves a named state at the steps that policies choose, keeps the checkpoints that policies want, and resumes.

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

    :meth:`step` and :meth:`save` are for one thread, :meth:`request_save` and the rest for any.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        state: dict[str, Any],
        *,
        save: Sequence[SavePolicy] | SavePolicy | int = (),
        keep: Sequence[KeepPolicy] | KeepPolicy = (),
        names: Naming | None = None,
        random_state: bool = False,
        blocking: bool = False,
        metadata: Mapping[str, Any] | None = None,
        stats: SaveStats | None = None,
        **options: Unpack[CheckpointerOptions],
    ) -> None:
        """Open the run directory; see :class:`~sidesave.Checkpointer`, whose options and errors these are as well.

        Of a job with several ranks each makes one, with the same policies.

        Args:
            directory: Where the checkpoints go.
            state: Named items, as for ``Checkpointer.save``. The dict stays the caller's: a value that is replaced in
                it is what the next save takes, and :meth:`restore` replaces plain values in it.
            save: When to save: policies, or a number ``n`` for ``EverySteps(n)``; without any only :meth:`save` does.
            keep: What to keep: policies; without any everything but ephemeral checkpoints.
            names: What to call checkpoints beside ``step-00000500``: a template such as ``"checkpoint-{step}"``, or a
                function of a ``CheckpointInfo``, called in a thread, that may return None. Each name is a link in
                ``directory``, made soon after the commit; of two checkpoints with one name the newer has it.
            random_state: Save the random number generators as well, as ``"random_state"``: Python's, NumPy's, torch's,
                and of every CUDA device.
            blocking: Return from each save only when it is committed; for debugging.
            metadata: Facts for every checkpoint of this run: plain JSON data.
            stats: Where to take down what saves cost: one's own, to have callbacks, metrics or a trace.
            **options: Those of ``Checkpointer``.

        Raises:
            InvalidArgumentError: Policies make no sense, alone or together; names that would be the same for all
                steps, or can be none; OnSignal outside the main thread; ranks were given different policies, or ones
                for which they need a process group.
            UnsupportedValueError: The state holds what cannot be saved, as far as it can tell before training: all of
                that is named.
        """
        if type(state) is not dict:
            raise InvalidArgumentError(f"state must be a dict of named items, not {type(state).__name__}")
        self._policies, self._keep = check_save_policies(save), check_keep_policies(keep)
        if names is not None:
            check_naming(names)
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
            self._checkpointer = Checkpointer(directory, **options)
            self._pins = Pins(self._checkpointer.directory)
            self._background.start(
                self._checkpointer, state, self._policies, self._keep, self._pins, names, random_state=random_state
            )
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
        """Have a small file beside the tensors of each checkpoint from the next save on, such as a ``config.json``.

        Given again it is replaced. See ``files`` of ``Checkpointer.save`` for names, sizes and ranks, and the errors.
        """
        self._managed.write_file(name, content)

    def step(self, step: int, metrics: Metrics | None = None) -> SaveHandle | None:
        """A training step has been finished; saves it if a policy says so.

        To be called after each step, with numbers that grow. Takes some microseconds when nothing is due.

        Args:
            step: Its number.
            metrics: Numbers by name, kept in the checkpoint: what ``KeepBest`` ranks by. Looked at only if the step is
                saved; a tensor is fetched from its device then. NaN is kept, and never the best.

        Returns:
            The save, or None when nothing was due.

        Raises:
            InvalidArgumentError: The number does not grow; ``metrics`` lacks one that ``KeepBest`` asks for, or one is
                no number. (Without any metrics the step is saved, and ``KeepBest`` passes it over.)
            SystemExit: A signal has asked for the end, and the step is staged (:class:`OnSignal`).
            SidesaveError: As ``Checkpointer.save``; or ranks could not agree.
        """
        due = self._schedule.pass_step(step, metrics)
        if due.signal:
            self._save_and_leave(due.signal, together=due.together)
        if not (due.persistent or due.ephemeral):
            return None
        if due.stop:  # there may be no other save
            return self._managed.save_at_last(ephemeral=not due.persistent)
        return self._managed.save(self._schedule.stepped, metrics, ephemeral=not due.persistent)

    def save(
        self,
        step: int,
        metrics: Metrics | None = None,
        *,
        blocking: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """Save now, whatever the policies say; of several ranks all have to call it.

        Args:
            step: The step that was finished last. No earlier one is saved after it, by whatever policy.
            metrics: As for :meth:`step`.
            blocking: Return only when the checkpoint is committed.
            metadata: Facts about this checkpoint, beside those of the run: plain JSON data.

        Raises:
            InvalidArgumentError: The step lies before one that was finished or saved.
            SidesaveError: As ``Checkpointer.save``.
        """
        step = self._schedule.note_finished(step, metrics)
        return self._managed.save(step, metrics, blocking=blocking, metadata=metadata)

    def stats(self) -> SaveSummary:
        """What the saves of this manager have cost so far."""
        return self._stats.summary()

    def request_save(self) -> None:
        """Have the next possible step saved; returns at once, and may be called by any thread or signal handler.

        Of several ranks one is enough; they need the policy :class:`OnRequest` for it.
        """
        self._schedule.request(stop=False)

    def request_stop(self) -> None:
        """As :meth:`request_save`; and ask the loop to end with that step, by :attr:`stopping`."""
        self._schedule.request(stop=True)

    @property
    def stopping(self) -> bool:
        """Whether the loop is asked to end with the step just finished, which is saved, and the same on all ranks."""
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
        """Give the state back what was saved, and return the number of the step to train next.

        That is 0 when there is no checkpoint, else the one after the step restored. Of several ranks all have to call
        it. Blocks until everything is read; saves under way are waited for first, of a ``step`` only its own.

        Args:
            step: Which one, as :meth:`rollback` goes back to it: its number, its directory or its ``CheckpointInfo``.
                None, or the run directory, is the latest: the one committed last, or gone back to since.
            sources: What a new run begins with, in this order: checkpoints of other runs, or parts of them. Where this
                run has a checkpoint they are not read, which the log says (INFO), so that the same script resumes. An
                item of the state that no source has begins as it was made.
            fallback: Take the newest older checkpoint that verifies when this one does not; what was passed over is
                logged as a warning.
            **options: Those of ``Checkpointer.load``, for a checkpoint of this run.

        Raises:
            CheckpointNotFoundError: There is no such step, or a source is no checkpoint.
            InvalidArgumentError: ``step`` is a checkpoint of another run; that is one of the ``sources``.
            IntegrityError: There are checkpoints, and none of them verifies.
            StateMismatchError: The state is another one; nothing was changed.
            SystemExit: A signal has asked for the end meanwhile (:class:`OnSignal`).
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
        """Go back to an earlier checkpoint of this run, and return the number of the step to train next.

        As :meth:`restore` of that step, and as durable: a run that crashes before its next commit goes on from there.
        What was saved after it is given up; a later ``rollback`` to one of those steps takes it up again. Of several
        ranks all have to call it. Blocking.

        Args:
            step: Which one, as for :meth:`restore`.
            steps_back: Instead of it: the newest that training descends from, and that lies at least so many steps
                before the one finished last.
            fallback: As for :meth:`restore`.
            **options: As for :meth:`restore`.

        Raises:
            InvalidArgumentError: Neither ``step`` nor ``steps_back`` is given, or both.
            CheckpointNotFoundError: There is no such step, or none that far back.
            SidesaveError: As :meth:`restore`.
        """
        if (step is None) == (steps_back is None):
            raise InvalidArgumentError("rollback takes a step, or steps_back=: one of them")
        if steps_back is not None:
            check_count("steps_back of rollback", steps_back)
            step = saver_of(self._checkpointer).session.shared.ancestor(self._schedule.stepped - steps_back)
        return self.restore(step, fallback=fallback, **options)

    # What there is ---------------------------------------------------------------------------------------------

    @property
    def checkpointer(self) -> Checkpointer:
        """What saves and loads; for all that this class does not do."""
        return self._checkpointer

    @property
    def latest(self) -> CheckpointInfo | None:
        """The checkpoint committed last, or gone back to since, read from the directory; None when there is none."""
        found = self.checkpoints()
        return found[-1] if found else None

    def checkpoints(self) -> list[CheckpointInfo]:
        """All checkpoints of the run in the order of :func:`sidesave.find`, with metrics; read from the directory."""
        return saver_of(self._checkpointer).session.shared.checkpoints()

    def best(self, metric: str, mode: Literal["min", "max"] = "min") -> CheckpointInfo | None:
        """The checkpoint with the best value of a metric, by the rules of :class:`KeepBest`; None when none has it.

        An ephemeral one is never meant.
        """
        found = [info for info in self.checkpoints() if not is_ephemeral(info)]
        steps = KeepBest(1, metric, mode).wanted(found)
        return next((info for info in reversed(found) if info.step in steps), None)

    def export(self, target: str | os.PathLike[str], **options: Unpack[ExportOptions]) -> Report | None:
        """Write the weights alone, as :func:`sidesave.export` does, of the step finished last; blocking.

        That step is saved first, unless it was, and its commit waited for. Of several ranks all have to call this:
        rank 0 writes and has the report, the others wait, as long as the process group allows.

        Raises:
            CheckpointNotFoundError: No step was finished, and there is no checkpoint.
            InvalidArgumentError: Nodes keep their own parts (``node_local``), of which no rank has all.
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
        """Never delete this step, in this run and in later ones; durable when this returns.

        May be called by all ranks or by rank 0 alone; of nodes with disks of their own (``node_local``) all have to.
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
        """The interval between saves that loses least, for one failure of the job in ``mtbf_s`` seconds on average.

        From what the saves of this run cost, so there has to have been one; else ``InvalidArgumentError``.
        """
        return self._schedule.cost.advise(mtbf_s)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until every save issued so far is committed; raises what ``Checkpointer.wait`` does."""
        self._checkpointer.wait(timeout_s)

    # The end ---------------------------------------------------------------------------------------------------

    def _save_and_leave(self, number: int, *, together: bool) -> None:
        """Save the step just finished, unless other ranks would not, and end the process as a signal has asked for."""
        self._schedule.begin_answer()
        handle, step = self._managed.last, self._schedule.stepped
        if not together:
            logger.error("step %d is not saved before the end, for another rank has failed or died", step)
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
        with contextlib.suppress(SidesaveError):  # of saves; who waited for them has been told, and the log has it
            self._stop(_SETTLED_TIMEOUT_S if settled else _UNSETTLED_TIMEOUT_S)
        raise SystemExit(128 + number)

    def close(self) -> None:
        """Save the last step if a policy says so (``LastStep``), wait for every save, end the daemon; idempotent.

        Raises what ``Checkpointer.wait`` would, after everything has been closed; ``SystemExit`` when a signal asks for
        the end meanwhile (:class:`OnSignal`).
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
        """End all that works here, and wait for saves and deletions for that long; raises what saves have failed of."""
        if self._dropped is not None:
            self._dropped.detach()
        self._background.stop(timeout_s, getattr(self, "_checkpointer", None))
        _open.discard(self)

    def __enter__(self) -> Self:
        """The manager itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close; after an exception that is no ``SystemExit`` save the last finished step if ``OnException`` says so.

        What fails then is only logged.
        """
        if kind is None:
            self.close()
            return
        try:
            self._close(None if issubclass(kind, SystemExit) else "exception", error)
        except SidesaveError as failure:
            logger.error("a save failed as well: %s", failure)

    def __repr__(self) -> str:
        """Directory and state."""
        return f"<CheckpointManager {self._checkpointer.directory!r}{' closed' if self._closed else ''}>"


_open: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()
_registered: Callable[[], None] | None = None


def _at_exit(manager: CheckpointManager) -> None:
    """Have an unclosed manager closed when the interpreter ends, before its checkpointer would be."""
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
