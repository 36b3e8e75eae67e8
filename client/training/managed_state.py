"""The named state of a manager, on its way to checkpoints and back, with all that is told about them."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from sidesave.client import arguments
from sidesave.client.checkpointer import Checkpointer
from sidesave.client.internals import saver_of
from sidesave.client.loading.sources import Source, check_sources
from sidesave.client.options import LoadOptions
from sidesave.client.reporting.stats import SaveStats
from sidesave.client.runs.info import CheckpointInfo
from sidesave.client.saving.handle import SaveHandle
from sidesave.client.training import restore
from sidesave.client.training.metadata import Metrics, as_numbers, encode_metadata
from sidesave.client.training.retention import Retention
from sidesave.client.training.rng_state import RandomState
from sidesave.client.training.schedule import Schedule
from sidesave.errors import CheckpointNotFoundError, InvalidArgumentError, SidesaveError
from sidesave.stager.state.annotations import PerRank

logger = logging.getLogger(__name__)

RANDOM_STATE: Final = "random_state"
"""The name in the state of all random number generators."""


class ManagedState:
    """Saves and restores the items of a state; for one thread.

    Attributes:
        last: The save called last, if any.
    """

    def __init__(
        self,
        state: dict[str, Any],
        checkpointer: Checkpointer,
        schedule: Schedule,
        retention: Retention | None,
        stats: SaveStats,
        *,
        random_state: bool,
        blocking: bool,
        metadata: Mapping[str, Any],
        metric_names: Collection[str],
    ) -> None:
        """See :class:`CheckpointManager`; ``metric_names`` are those that every save with metrics has to have."""
        self._state = state
        self._checkpointer = checkpointer
        self._schedule = schedule
        self._retention = retention
        self._stats = stats
        self._random = RandomState(saver_of(checkpointer).session.world.rank) if random_state else None
        self._blocking = blocking
        self._user = dict(metadata)
        self._metric_names = metric_names
        self._files: dict[str, bytes] = {}
        self._seed: int | None = None
        self.last: SaveHandle | None = None
        self._newest: SaveHandle | None = None

    @property
    def items(self) -> dict[str, Any]:
        """What is saved."""
        if self._random is None:
            return self._state
        return {**self._state, RANDOM_STATE: PerRank(self._random, self._random.when_resized)}

    @property
    def files(self) -> Mapping[str, bytes]:
        """What is written beside it."""
        return self._files

    def register(self, name: str, value: Any) -> None:
        """Add an item."""
        if name in self._state or (self._random is not None and name == RANDOM_STATE):
            raise InvalidArgumentError(f"the state has an item {name!r} already; choose another name")
        saver_of(self._checkpointer).submission.check({name: value})
        self._state[name] = value

    def write_file(self, name: str, content: str | bytes) -> None:
        """Add a file, or replace it."""
        files: dict[str, str | bytes] = {**self._files, name: content}
        arguments.encode_files(files)
        self._files[name] = content.encode() if isinstance(content, str) else content

    def save(
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
            saver_of(self._checkpointer).give_up(step, error)
            raise
        began_s = time.perf_counter()
        with contextlib.nullcontext() if self._retention is None else self._retention.saving():
            called = time.monotonic()
            try:
                handle = self._checkpointer.save(
                    step,
                    self.items,
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
        self.last = self._newest = handle
        self._seed = step if seed else None
        self._schedule.note_save(step, ephemeral=ephemeral, seed=seed)
        return handle

    def has_unsaved_step(self) -> bool:
        """Whether a step was finished, and not saved since."""
        return self._schedule.stepped >= 0 and self._schedule.stepped != self._schedule.saved_step

    def save_at_last(self, *, ephemeral: bool = False, exception: BaseException | None = None) -> SaveHandle:
        """Save the last finished step with all that can be done for it: there is no other chance."""
        step, metrics = self._schedule.stepped, self._schedule.metrics
        try:
            as_numbers(step, metrics, self._metric_names)
        except InvalidArgumentError as error:
            logger.error("step %d is saved without its metrics: %s", step, error)
            metrics = None
        if saver_of(self._checkpointer).session.world.size == 1:
            try:
                handle = self.save(step, metrics, ephemeral=ephemeral, exception=exception)
                if not handle.skipped:
                    return handle
                self._checkpointer.wait()  # on_busy="skip": now there are slots
            except SidesaveError as error:  # perhaps of an earlier save
                logger.error("step %d is saved in a second attempt: %s", step, error)
        return self.save(step, metrics, ephemeral=ephemeral, exception=exception)

    def restore(
        self, step: int | None, sources: Sequence[Source] | Source, options: LoadOptions, *, fallback: bool
    ) -> bool:
        """Give the items what was saved of them; false when there is no checkpoint, and they begin with ``sources``."""
        into, sources = self.items, check_sources(sources)
        session = saver_of(self._checkpointer).session
        try:
            with contextlib.nullcontext() if self._retention is None else self._retention.reading(step):
                self._checkpointer.load(step, into=into, fallback=fallback, **options)
        except CheckpointNotFoundError:
            if step is not None:
                raise
            with session.world.agreeing("finds a damaged checkpoint"):
                if session.node.rank == 0:  # else a run whose checkpoints are all damaged would begin anew
                    session.run.refuse_damaged(None, [])
            if sources:
                into = dict(self._state)
                restore.load_bank(self._checkpointer, into, sources, options)
                self._state.update(into)
            self._schedule.begin_anew()
            return False
        self._state.update({name: into[name] for name in self._state})
        if self._random is not None:
            self._random.apply()
        loaded = restore.what_was_loaded(self._checkpointer)
        self._seed, self._newest = loaded.step if loaded.is_seed else None, None
        self._schedule.go_on(loaded)
        return True

    def current(self) -> CheckpointInfo:
        """The checkpoint that training stands on: after going back it is not the one that was committed last."""
        if self._newest is not None:
            return self._newest.committed.result()
        session = saver_of(self._checkpointer).session
        if session.lineage.parent is not None:
            return restore.loaded_checkpoint(self._checkpointer)
        found = session.shared.checkpoints()
        if not found:
            raise CheckpointNotFoundError(errno.ENOENT, "there is no checkpoint", self._checkpointer.directory)
        return found[-1]
