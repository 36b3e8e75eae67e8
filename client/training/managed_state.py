"""Saves and restores the named state of a manager, with metadata, statistics and retention."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from sidesave.client import arguments
from sidesave.client.checkpointer import Checkpointer
from sidesave.client.internals import saver_of
from sidesave.client.loading.load import Loaded
from sidesave.client.loading.sources import Source, check_sources, read_sources
from sidesave.client.options import LoadOptions
from sidesave.client.reporting.stats import SaveStats
from sidesave.client.runs import finding
from sidesave.client.runs.info import CheckpointInfo
from sidesave.client.saving.handle import SaveHandle
from sidesave.client.training.metadata import Metrics, as_numbers, encode_metadata, is_ephemeral, is_seed
from sidesave.client.training.retention import Retention
from sidesave.client.training.rng_state import RandomState
from sidesave.client.training.schedule import Resumed, Schedule
from sidesave.errors import CheckpointNotFoundError, InvalidArgumentError, SidesaveError, StateMismatchError
from sidesave.stager.state.annotations import PerRank

logger = logging.getLogger(__name__)

RANDOM_STATE: Final = "random_state"
"""The item of the state that holds all random number generators."""


class ManagedState:
    """Saves and restores the items of a state; for one thread.

    Attributes:
        last: The latest save, if any.
        before: Called before each save and load, if set: brings the state up to date.
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
        """See :class:`CheckpointManager`; every save with metrics must have all ``metric_names``."""
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
        self.before: Callable[[], None] | None = None
        self._newest: SaveHandle | None = None

    @property
    def items(self) -> dict[str, Any]:
        """The items to save, or to load into, brought up to date."""
        if self.before is not None:
            self.before()
        if self._random is None:
            return self._state
        return {**self._state, RANDOM_STATE: PerRank(self._random, self._random.when_resized)}

    @property
    def files(self) -> Mapping[str, bytes]:
        """The files to write beside them."""
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
        skips: bool = False,
    ) -> SaveHandle:
        """Save, and note the save in statistics, schedule and retention. All saves of a manager pass here.

        With ``skips`` all ranks have agreed that it is left out, which is noted too.
        """
        if skips:
            handle, now = saver_of(self._checkpointer).skip(step), time.monotonic()
            self._stats.watch(handle, now, now)
            return handle
        try:
            items = self.items
            facts = encode_metadata(
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
                    items,
                    blocking=blocking or self._blocking,
                    overwrite=step == self._seed,
                    metadata=facts,
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
        """Whether a step was finished and not saved."""
        return self._schedule.stepped >= 0 and self._schedule.stepped != self._schedule.saved_step

    def save_at_last(self, *, ephemeral: bool = False, exception: BaseException | None = None) -> SaveHandle:
        """Save the last finished step, without its metrics or in a second attempt if need be: it is the last chance."""
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
                self._checkpointer.wait()  # on_busy="skip": then slots are free
            except SidesaveError as error:  # perhaps of an earlier save
                logger.error("step %d is saved in a second attempt: %s", step, error)
        return self.save(step, metrics, ephemeral=ephemeral, exception=exception)

    def restore(
        self,
        step: int | str | os.PathLike[str] | None,
        sources: Sequence[Source] | Source,
        options: LoadOptions,
        *,
        fallback: bool,
    ) -> bool:
        """Restore the items from a checkpoint. Without one, load ``sources`` and return false."""
        into, sources = self.items, check_sources(sources)
        session = saver_of(self._checkpointer).session
        try:
            with contextlib.ExitStack() as spared:
                with session.world.raise_together("cannot tell what to keep while it loads"):
                    if self._retention is not None:
                        spared.enter_context(self._retention.reading(arguments.as_index(step)))
                self._checkpointer.load(step, into=into, fallback=fallback, **options)
        except CheckpointNotFoundError:
            if step is not None:
                raise
            with session.world.raise_together("finds a damaged checkpoint"):
                if session.node.rank == 0:  # else a run with only damaged checkpoints would start anew
                    session.run.refuse_damaged(None, [])
            if sources:
                into = dict(self._state)
                _load_sources(self._checkpointer, into, sources, options)
                self._state.update(into)
            self._schedule.begin_anew()
            return False
        self._state.update({name: into[name] for name in self._state})
        with session.world.raise_together("cannot restore its random state"):
            if self._random is not None:
                self._random.apply()
        loaded = _what_was_loaded(self._checkpointer)
        if sources:
            logger.info("this run has a checkpoint of its own, step %d: the sources are not read", loaded.step)
        self._seed, self._newest = loaded.step if loaded.is_seed else None, None
        self._schedule.go_on(loaded)
        return True

    def current(self) -> CheckpointInfo:
        """The checkpoint that training continues from; after a rollback not the one committed last."""
        if self._newest is not None:
            return self._newest.committed.result()
        session = saver_of(self._checkpointer).session
        if session.lineage.parent is not None:
            return _loaded_checkpoint(self._checkpointer)
        checkpoints = session.shared.checkpoints()
        if not checkpoints:
            raise finding.not_found(self._checkpointer.directory)
        return checkpoints[-1]


def _load_sources(
    checkpointer: Checkpointer, into: dict[str, Any], sources: Sequence[Source], options: LoadOptions
) -> None:
    """Load items from other runs; an item that no source has stays as it is. Blocking.

    All ranks must call this; an error of one is raised on all.
    """
    world, paths = saver_of(checkpointer).session.world, [""]
    pickled = options.get("allow_pickle")
    with world.raise_together("finds no source"):
        if world.rank == 0:
            paths = [source.locate() for source in sources]
    if world.size > 1:
        paths = world.gather("sources", paths if world.rank == 0 else None)[0]
    with world.raise_together("cannot read the sources"):
        located = [
            dataclasses.replace(source, path=path, step=None) for source, path in zip(sources, paths, strict=True)
        ]
        loaded = read_sources(
            located,
            into,
            strict=False,
            verify=options.get("verify", True),
            allow_pickle=saver_of(checkpointer).session.options.allow_pickle if pickled is None else pickled,
            rank=world.rank,
            size=world.size,
        )
        if options.get("strict", True):
            _refuse_half(loaded, into)
    with world.raise_together("cannot give its objects what it has read of the sources"):
        loaded.apply()


def _refuse_half(loaded: Loaded, items: Collection[str]) -> None:
    """Raise ``StateMismatchError`` if sources have only a part of an item."""
    begun = tuple(f"{name}." for name in items if loaded.has(name))
    half = [fqn for fqn in loaded.missing if fqn.startswith(begun)]
    if half:
        more = f" and {len(half) - 5} more" if len(half) > 5 else ""
        raise StateMismatchError(
            f"the sources lack {', '.join(half[:5])}{more}, and have the rest; nothing was loaded. Add a source "
            "that has it, exclude the item from all, or pass strict=False"
        )


def _what_was_loaded(checkpointer: Checkpointer) -> Resumed:
    """The checkpoint that was just loaded; all ranks must call this, and get the same."""
    parent = saver_of(checkpointer).session.lineage.parent
    assert parent is not None
    world = saver_of(checkpointer).session.world
    seen: list[bool] | None = None
    with world.raise_together("cannot read what it has loaded"):
        if world.rank == 0:
            info = _loaded_checkpoint(checkpointer)
            seen = [is_seed(info), is_ephemeral(info)]
    seed, ephemeral = world.gather("what was loaded", seen)[0] if world.size > 1 else (seen or [])
    return Resumed(parent[0], seed, ephemeral)


def _loaded_checkpoint(checkpointer: Checkpointer) -> CheckpointInfo:
    """The checkpoint that was loaded last, read anew; ``CheckpointNotFoundError`` if it was deleted or replaced."""
    parent = saver_of(checkpointer).session.lineage.parent
    assert parent is not None
    return saver_of(checkpointer).session.run.read(*parent)
