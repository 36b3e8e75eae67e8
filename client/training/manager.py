"""``CheckpointManager``: when to save, what to keep, how to resume. Saving itself is ``Checkpointer``'s alone."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import functools
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Final, Literal, Self, Unpack

from sidesave.client import arguments
from sidesave.client.checkpointer import Checkpointer
from sidesave.client.export.safetensors import Report, export
from sidesave.client.loading.sources import Source, check_sources
from sidesave.client.options import CheckpointerOptions, ExportOptions, LoadOptions
from sidesave.client.ranks.group import NodeWorld
from sidesave.client.reporting.stats import SaveStats, SaveSummary
from sidesave.client.runs.info import CheckpointInfo
from sidesave.client.runs.save_requests import TriggerWatch
from sidesave.client.saving.handle import SaveHandle
from sidesave.client.training import restore
from sidesave.client.training.intervals import Advice
from sidesave.client.training.links import Links, Naming, check_naming
from sidesave.client.training.metadata import Metrics, as_numbers, encode_metadata, is_ephemeral
from sidesave.client.training.retention import (
    Best,
    EveryNMinutes,
    KeepPolicy,
    Pins,
    Retention,
    check_count,
    check_keep_policies,
)
from sidesave.client.training.rng_state import RandomState
from sidesave.client.training.save_policies import (
    BeforeTraining,
    Ephemeral,
    Occasion,
    OnRequest,
    SavePolicy,
    check_save_policies,
)
from sidesave.client.training.schedule import Schedule
from sidesave.errors import CheckpointNotFoundError, InvalidArgumentError, SidesaveError
from sidesave.stager import apart
from sidesave.stager.state.annotations import PerRank

logger = logging.getLogger(__name__)

RANDOM_STATE: Final = "random_state"
"""The name in the state of all random number generators."""
_EXIT_TIMEOUT_S: Final = 600.0
_AGREE_TO_END_S: Final = 30.0
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
            keep=[Latest(3), Best(2, metric="loss")],
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
        self._names = names
        arguments.encode_metadata(metadata)
        self._state = state
        self._user = dict(metadata or {})
        self._files: dict[str, bytes] = {}
        self._random: RandomState | None = None
        if random_state and RANDOM_STATE in state:
            raise InvalidArgumentError(f"random_state=True saves an item {RANDOM_STATE!r}, and the state has one")
        self._metric_names = {policy.metric for policy in self._keep if isinstance(policy, Best)}
        self._blocking = blocking
        self._pid = os.getpid()
        self._closed = False
        self._seed: int | None = None
        self._last: SaveHandle | None = None
        self._newest: SaveHandle | None = None
        self._stats = SaveStats() if stats is None else stats
        self._retention: Retention | None = None
        self._trigger: TriggerWatch | None = None
        self._dropped: weakref.finalize[..., Self] | None = None
        self._schedule = Schedule(self._policies)
        try:
            self._checkpointer = Checkpointer(directory, **options)
            if random_state:
                self._random = RandomState(self._checkpointer.session.world.rank)
            self._pins = Pins(self._checkpointer.directory)
            self._start()
        except BaseException:
            self._stop(0)
            raise
        self._dropped = weakref.finalize(self, _end_dropped, os.getpid(), self._schedule, self._trigger)
        self._dropped.atexit = False  # _close_all comes first, and saves the last step
        _at_exit(self)

    def _start(self) -> None:
        """What works beside training, where there is a need for it."""
        world, node = self._checkpointer.session.world, self._checkpointer.session.node
        if world.size > 1:
            world.require_alike(
                save=sorted(map(_name, self._policies)), keep=sorted(map(_name, self._keep)), random=bool(self._random)
            )
        with world.agreeing("cannot save its state"):
            self._checkpointer.session.submission.check(self._state)
        if isinstance(node, NodeWorld) and any(isinstance(policy, EveryNMinutes) for policy in self._keep):
            raise InvalidArgumentError(
                "nodes that keep their own parts have to delete the same steps, and their clocks differ: EveryNMinutes "
                "cannot be combined with node_local=True; take EveryNSteps"
            )
        self._schedule.start(world)
        self._is_first_of_node = node.rank == 0
        if self._is_first_of_node:
            self._retention = self._make_retention()
        if self._is_first_of_node and any(isinstance(policy, OnRequest) for policy in self._policies):
            # Not methods of this object: the thread must not keep a dropped manager alive.
            ask, session = self._schedule.request, self._checkpointer.session.id
            self._trigger = TriggerWatch(
                self._checkpointer.directory,
                session,
                functools.partial(ask, stop=False),
                functools.partial(ask, stop=True),
            )

    def _make_retention(self) -> Retention | None:
        deleting = bool(self._keep) or any(isinstance(policy, Ephemeral) for policy in self._policies)
        links = None if self._names is None else Links(self._checkpointer.directory, self._names)
        if not deleting and links is None:
            return None
        return Retention(self._checkpointer, self._keep if deleting else None, self._pins, links)

    # Saving ----------------------------------------------------------------------------------------------------

    def register(self, name: str, value: Any) -> None:
        """Add an item to the state, for all saves from now on.

        Raises:
            InvalidArgumentError: The name is taken.
            UnsupportedValueError: The value cannot be saved.
        """
        if name in self._state or (self._random is not None and name == RANDOM_STATE):
            raise InvalidArgumentError(f"the state has an item {name!r} already; choose another name")
        self._checkpointer.session.submission.check({name: value})
        self._state[name] = value

    def write_file(self, name: str, content: str | bytes) -> None:
        """Have a small file beside the tensors of each checkpoint from the next save on, such as a ``config.json``.

        Given again it is replaced. See ``files`` of ``Checkpointer.save`` for names, sizes and ranks, and the errors.
        """
        files: dict[str, str | bytes] = {**self._files, name: content}
        arguments.encode_files(files)
        self._files[name] = content.encode() if isinstance(content, str) else content

    def step(self, step: int, metrics: Metrics | None = None) -> SaveHandle | None:
        """A training step has been finished; saves it if a policy says so.

        To be called after each step, with numbers that grow. Takes some microseconds when nothing is due.

        Args:
            step: Its number.
            metrics: Numbers by name, kept in the checkpoint: what ``Best`` ranks by. Looked at only if the step is
                saved; a tensor is fetched from its device then. NaN is kept, and never the best.

        Returns:
            The save, or None when nothing was due.

        Raises:
            InvalidArgumentError: The number does not grow; ``metrics`` lacks one that ``Best`` asks for, or one is no
                number. (Without any metrics the step is saved, and ``Best`` passes it over.)
            SystemExit: A signal has asked for the end, and the step is staged (:class:`OnSignal`).
            SidesaveError: As ``Checkpointer.save``; or ranks could not agree.
        """
        due = self._schedule.pass_step(step, metrics)
        if due.signal:
            self._save_and_leave(due.signal, together=due.together)
        if not (due.lasting or due.ephemeral):
            return None
        if due.stop:  # there may be no other save
            return self._save_at_last(ephemeral=not due.lasting)
        return self._save(self._schedule.stepped, metrics, ephemeral=not due.lasting)

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
        return self._save(step, metrics, blocking=blocking, metadata=metadata)

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

    def _save(
        self,
        step: int,
        metrics: Metrics | None,
        *,
        ephemeral: bool = False,
        blocking: bool = False,
        metadata: Mapping[str, Any] | None = None,
        seed: bool = False,
        exception: BaseException | None = None,
    ) -> SaveHandle:
        """The one way from here to a checkpoint."""
        try:
            told = encode_metadata(
                as_numbers(step, metrics, self._metric_names),
                {**self._user, **(metadata or {})},
                ephemeral=ephemeral,
                seed=seed,
                exception=exception,
            )
        except BaseException as error:
            self._checkpointer.saver.give_up(step, error)
            raise
        began_s = time.perf_counter()
        with contextlib.nullcontext() if self._retention is None else self._retention.saving():
            called = time.monotonic()
            try:
                handle = self._checkpointer.save(
                    step,
                    self._items(),
                    blocking=blocking or self._blocking,
                    overwrite=step == self._seed,
                    metadata=told,
                    files=self._files,
                )
            except BaseException as error:
                self._stats.refused(step, error, called, time.monotonic())
                raise
            self._stats.watch(handle, called, time.monotonic())
            if self._retention is not None and not handle.skipped:
                self._retention.add(handle)
        if handle.skipped:
            return handle
        cost = self._schedule.cost
        cost.add_stall(time.perf_counter() - began_s)

        def committed(done: object) -> None:
            if handle.committed.peek() is None:
                cost.add_commit(time.perf_counter() - began_s)

        handle.committed.add_done_callback(committed)
        self._last = self._newest = handle
        self._seed = step if seed else None
        self._schedule.note_save(step, ephemeral=ephemeral, seed=seed)
        return handle

    def _items(self) -> dict[str, Any]:
        if self._random is None:
            return self._state
        return {**self._state, RANDOM_STATE: PerRank(self._random, self._random.when_resized)}

    # Resuming --------------------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        *,
        sources: Sequence[Source] | Source = (),
        fallback: bool = True,
        **options: Unpack[LoadOptions],
    ) -> int:
        """Give the state back what was saved, and return the number of the step to train next.

        That is 0 when there is no checkpoint, else the one after the step restored. Of several ranks all have to call
        it. Blocks until everything is read; saves under way are waited for first, of a ``step`` only its own.

        Args:
            step: Which one, as :meth:`rollback` goes back to it; None is the latest: the one committed last, or gone
                back to since.
            sources: What a new run begins with, in this order: checkpoints of other runs, or parts of them. Where this
                run has a checkpoint they do not count, so that the same script resumes. An item of the state that no
                source has begins as it was made.
            fallback: Take the newest older checkpoint that verifies when this one does not; what was passed over is
                logged as a warning.
            **options: Those of ``Checkpointer.load``, for a checkpoint of this run.

        Raises:
            CheckpointNotFoundError: There is no such step, or a source is no checkpoint.
            IntegrityError: There are checkpoints, and none of them verifies.
            StateMismatchError: The state is another one; nothing was changed.
            SystemExit: A signal has asked for the end meanwhile (:class:`OnSignal`).
            SidesaveError: As ``Checkpointer.load``.
        """
        into, sources = self._items(), check_sources(sources)
        world = self._checkpointer.session.world
        try:
            with contextlib.nullcontext() if self._retention is None else self._retention.reading(step):
                self._checkpointer.load(step, into=into, fallback=fallback, **options)
        except CheckpointNotFoundError:
            if step is not None:
                raise
            with world.agreeing("finds a damaged checkpoint"):
                if self._is_first_of_node:  # else a run whose checkpoints are all damaged would begin anew
                    self._checkpointer.session.run.refuse_damaged(None, [])
            if sources:
                into = dict(self._state)
                restore.load_bank(self._checkpointer, into, sources, options)
                self._state.update(into)
            self._schedule.begin_anew()
            if any(isinstance(policy, BeforeTraining) for policy in self._policies):
                self._save(_SEED_STEP, None, seed=True)
        else:
            self._state.update({name: into[name] for name in self._state})
            if self._random is not None:
                self._random.apply()
            loaded = restore.what_was_loaded(self._checkpointer)
            self._seed, self._newest = loaded.step if loaded.is_seed else None, None
            self._schedule.go_on(loaded)
        ending = self._schedule.resume()
        if ending:
            self._leave(ending, self._last)
        return self._schedule.stepped + 1

    def rollback(
        self,
        step: int | None = None,
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
            step: Which one.
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
            step = self._checkpointer.session.shared.ancestor(self._schedule.stepped - steps_back)
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
        return self._checkpointer.session.shared.checkpoints()

    def best(self, metric: str, mode: Literal["min", "max"] = "min") -> CheckpointInfo | None:
        """The checkpoint with the best value of a metric, by the rules of :class:`Best`; None when none has it.

        An ephemeral one is never meant.
        """
        found = [info for info in self.checkpoints() if not is_ephemeral(info)]
        steps = Best(1, metric, mode).wanted(found)
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
        world = self._checkpointer.session.world
        if isinstance(self._checkpointer.session.node, NodeWorld):
            raise InvalidArgumentError("with node_local no rank has all parts of a checkpoint, so none can export it")
        report = None
        with world.agreeing("cannot export"):
            if self._has_unsaved_step():
                self._save_at_last()
            self.wait()
            if world.rank == 0:
                report = export(self._current(), target, **options)
        return report

    def _current(self) -> CheckpointInfo:
        """The checkpoint that training stands on: after going back it is not the one that was committed last."""
        if self._newest is not None:
            return self._newest.committed.result()
        if self._checkpointer.session.lineage.parent is not None:
            return restore.loaded_checkpoint(self._checkpointer)
        found = self.latest
        if found is None:
            raise CheckpointNotFoundError(errno.ENOENT, "there is no checkpoint", self._checkpointer.directory)
        return found

    def prepare(self) -> Future[None]:
        """Allocate staging memory for the state in the background; optional, see ``Checkpointer.prepare``."""
        return self._checkpointer.prepare(self._items(), files=self._files)

    def pin(self, step: int) -> None:
        """Never delete this step, in this run and in later ones; durable when this returns.

        May be called by all ranks or by rank 0 alone; of nodes with disks of their own (``node_local``) all have to.
        """
        step = arguments.check_step(step)
        if self._is_first_of_node:
            self._pins.change(step, pinned=True)

    def unpin(self, step: int) -> None:
        """Leave this step to the policies again."""
        step = arguments.check_step(step)
        if self._is_first_of_node:
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
        handle, step = self._last, self._schedule.stepped
        if not together:
            logger.error("step %d is not saved before the end, for another rank has failed or died", step)
        elif self._has_unsaved_step():
            try:
                handle = self._save_at_last()
            except SidesaveError as error:
                logger.error("step %d is not saved before the end: %s", step, error)
        self._leave(number, handle)

    def _has_unsaved_step(self) -> bool:
        """Whether a step was finished, and not saved since."""
        return self._schedule.stepped >= 0 and self._schedule.stepped != self._schedule.saved_step

    def _save_at_last(self, *, ephemeral: bool = False, exception: BaseException | None = None) -> SaveHandle:
        """Save the last finished step with all that can be done for it: there is no other chance."""
        step, metrics = self._schedule.stepped, self._schedule.metrics
        try:
            as_numbers(step, metrics, self._metric_names)
        except InvalidArgumentError as error:
            logger.error("step %d is saved without its metrics: %s", step, error)
            metrics = None
        if self._checkpointer.session.world.size == 1:
            try:
                handle = self._save(step, metrics, ephemeral=ephemeral, exception=exception)
                if not handle.skipped:
                    return handle
                self._checkpointer.wait()  # on_busy="skip": now there are slots
            except SidesaveError as error:  # perhaps of an earlier save
                logger.error("step %d is saved in a second attempt: %s", step, error)
        return self._save(step, metrics, ephemeral=ephemeral, exception=exception)

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

    def _close(self, occasion: Occasion | None, error: BaseException | None = None) -> None:
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        try:
            schedule = self._schedule
            left = schedule.finish(_AGREE_TO_END_S, failing=occasion != "close")
            due = occasion is not None and (schedule.is_due(occasion) or (occasion == "close" and bool(left)))
            if due and self._has_unsaved_step():
                ephemeral = left.ephemeral and not left.lasting and not schedule.is_due("close")
                self._save_at_last(ephemeral=ephemeral, exception=error)
            if self._last is not None and not schedule.ending:
                schedule.await_save(self._last)
            if schedule.ending:
                self._leave(schedule.ending, self._last)
        finally:
            self._stop(_EXIT_TIMEOUT_S)

    def _stop(self, timeout_s: float) -> None:
        """End all that works here, and wait for saves and deletions for that long; raises what saves have failed of."""
        if self._dropped is not None:
            self._dropped.detach()
        ends: list[Callable[[], object]] = []
        if self._trigger is not None:
            ends.append(self._trigger.close)
        retention = self._retention
        ends.append(lambda: self._schedule.finish(min(timeout_s, _AGREE_TO_END_S), failing=False))
        checkpointer: Checkpointer | None = getattr(self, "_checkpointer", None)
        if checkpointer is not None and not checkpointer.session.closed:
            if retention is not None:
                ends.append(lambda: checkpointer.wait(timeout_s))
                ends.append(lambda: retention.close(min(timeout_s, _AGREE_TO_END_S)))
            ends.append(lambda: checkpointer.close(timeout_s))
        ends.append(self._schedule.close)
        with contextlib.ExitStack() as stack:
            for end in reversed(ends):
                stack.callback(end)
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


def _name(policy: object) -> str:
    """What ranks compare of a policy."""
    known = dataclasses.is_dataclass(policy)
    return repr(policy) if known else f"{type(policy).__module__}.{type(policy).__qualname__}"


_open: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()
_registered: Callable[[], None] | None = None


def _at_exit(manager: CheckpointManager) -> None:
    """Have an unclosed manager closed when the interpreter ends, before its checkpointer would be."""
    global _registered
    _open.add(manager)
    if _registered is None:
        _registered = atexit.register(_close_all)


def _end_dropped(pid: int, schedule: Schedule, trigger: TriggerWatch | None) -> None:
    """End what a manager that was dropped without ``close()`` has left; its checkpointer does the same for itself."""
    if pid != os.getpid():
        return

    def work() -> None:
        if trigger is not None:
            trigger.close()
        schedule.finish(_AGREE_TO_END_S, failing=True)

    schedule.close()
    apart.start(work, "sidesave-close-manager")


def _close_all() -> None:
    for manager in list(_open):
        try:
            with contextlib.suppress(SystemExit):  # of a signal; the interpreter ends anyway
                manager._close(None)
        except SidesaveError as error:
            logger.error("a save failed: %s", error)
