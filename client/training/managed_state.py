"""Saves and restores the named state of a manager, with metadata and retention."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from sidesave.client import arguments
from sidesave.client.checkpointer import Checkpointer
from sidesave.client.loading.load import Loaded
from sidesave.client.loading.sources import Source, check_sources, read_sources
from sidesave.client.options import LoadOptions
from sidesave.client.runs import finding
from sidesave.client.saving.handle import SaveHandle
from sidesave.client.saving.session import Session
from sidesave.client.training.metadata import (
    Metrics,
    as_numbers,
    encode_metadata,
    is_ephemeral,
    is_seed,
)
from sidesave.client.training.retention import Retention
from sidesave.client.training.rng_state import RandomState
from sidesave.client.training.schedule import Resumed, Schedule
from sidesave.errors import (
    CheckpointNotFoundError,
    InvalidArgumentError,
    SidesaveError,
    StateMismatchError,
    listed,
)
from sidesave.stager.state.annotations import PerRank
from sidesave.writer_daemon.checkpoints.info import RANDOM_STATE, CheckpointInfo

logger = logging.getLogger(__name__)


Collect = Callable[[int | None], dict[str, Any]]
"""Updates a state for a save of a step, or a load (None), and returns it: always the same dict."""


class ManagedState:
    """Saves and restores the items of a state. Not thread-safe.

    Attributes:
        last: The latest save, if any.
    """

    def __init__(
        self,
        collect: Collect,
        checkpointer: Checkpointer,
        schedule: Schedule,
        retention: Retention | None,
        *,
        random_state: bool,
        blocking: bool,
        metadata: Mapping[str, Any],
        metric_names: Collection[str],
    ) -> None:
        """See :class:`CheckpointManager`; a save with metrics must have all ``metric_names``."""
        self._collect = collect
        self._state = collect(None)
        self._checkpointer = checkpointer
        self._session = checkpointer.session
        self._schedule = schedule
        self._retention = retention
        self._random = (
            RandomState(self._session.world.rank, resumes_epochs=True) if random_state else None
        )
        self._blocking = blocking
        self._user = dict(metadata)
        self._metric_names = metric_names
        self._files: dict[str, bytes] = {}
        self._seed: int | None = None
        self.last: SaveHandle | None = None
        self._newest: SaveHandle | None = None

    @property
    def items(self) -> dict[str, Any]:
        """The items to load into."""
        return self._items_at(None)

    def _items_at(self, step: int | None) -> dict[str, Any]:
        self._collect(step)
        if self._random is None:
            return self._state
        return {**self._state, RANDOM_STATE: PerRank(self._random, self._random.when_resized)}

    @property
    def files(self) -> Mapping[str, bytes]:
        """The files to write next to the items."""
        return self._files

    def register(self, name: str, value: Any) -> None:
        """Add an item."""
        if name in self._state or (self._random is not None and name == RANDOM_STATE):
            raise InvalidArgumentError(
                f"the state has an item {name!r} already; choose another name"
            )
        self._checkpointer.check({name: value})
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
        """Save, and record it in schedule and retention; every save of a manager goes through here.

        With ``skips``, all ranks have agreed to skip the save, and it is only recorded.
        """
        if skips:
            return self._checkpointer.saver.skip(step)
        try:
            items = self._items_at(step)
            facts = encode_metadata(
                as_numbers(step, metrics, self._metric_names),
                {**self._user, **(metadata or {})},
                ephemeral=ephemeral,
                seed=seed,
                exception=exception,
            )
        except BaseException as error:
            self._checkpointer.saver.give_up(step, error)
            raise
        call = functools.partial(
            self._checkpointer.save,
            step,
            items,
            blocking=blocking or self._blocking,
            overwrite=step == self._seed,
            metadata=facts,
            files=self._files,
        )
        handle = call() if self._retention is None else self._retention.save(call)
        if handle.skipped:
            return handle
        self.last = self._newest = handle
        self._seed = step if seed else None
        self._schedule.note_save(step, ephemeral=ephemeral, seed=seed)
        return handle

    def has_unsaved_step(self) -> bool:
        """Whether a step was finished and not saved."""
        return self._schedule.stepped >= 0 and self._schedule.stepped != self._schedule.saved_step

    def save_at_last(
        self, *, ephemeral: bool = False, exception: BaseException | None = None
    ) -> SaveHandle:
        """Save the last finished step.

        As this is the last chance, bad metrics are dropped, and an error is retried once.
        """
        step, metrics = self._schedule.stepped, self._schedule.metrics
        try:
            as_numbers(step, metrics, self._metric_names)
        except InvalidArgumentError as error:
            logger.error("step %d is saved without its metrics: %s", step, error)
            metrics = None
        if self._session.world.size == 1:
            try:
                handle = self.save(step, metrics, ephemeral=ephemeral, exception=exception)
                if not handle.skipped:
                    return handle
                self._checkpointer.wait()  # skipped by on_busy="skip": wait until a slot is free
            except SidesaveError as error:  # may be the error of an earlier save
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
        session = self._session
        try:
            with contextlib.ExitStack() as spared:
                with session.world.raise_together("cannot keep the checkpoint while it loads"):
                    if self._retention is not None:
                        spared.enter_context(self._retention.reading(arguments.as_index(step)))
                self._checkpointer.load(step, into=into, fallback=fallback, **options)
        except CheckpointNotFoundError:
            if step is not None:
                raise
            with session.world.raise_together("finds a damaged checkpoint"):
                # else a run with only damaged checkpoints would start from step 0
                if session.leads:
                    session.refuse_damaged()
            if sources:
                into = dict(self._state)
                _load_sources(session, into, sources, options)
                self._state.update(into)
            self._schedule.begin_anew()
            return False
        self._state.update({name: into[name] for name in self._state})
        with session.world.raise_together("cannot restore its random state"):
            if self._random is not None:
                self._random.apply()
        loaded = _what_was_loaded(session)
        if sources:
            logger.info(
                "this run has a checkpoint of its own, step %d: the sources are not read",
                loaded.step,
            )
        self._seed, self._newest = loaded.step if loaded.is_seed else None, None
        self._schedule.go_on(loaded)
        return True

    def current(self) -> CheckpointInfo:
        """The checkpoint that training continues from; after a rollback not the last committed."""
        if self._newest is not None:
            return self._newest.committed.result()
        loaded = self._session.loaded()
        if loaded is not None:
            return loaded
        checkpoints = self._checkpointer.checkpoints()
        if not checkpoints:
            raise finding.not_found(self._checkpointer.directory)
        return checkpoints[-1]


def _load_sources(
    session: Session, into: dict[str, Any], sources: Sequence[Source], options: LoadOptions
) -> None:
    """Load items from other runs; an item that no source has is left unchanged. Blocking.

    All ranks must call this; an error on one rank is raised on all.
    """
    world, paths = session.world, [""]
    pickled = options.get("allow_pickle")
    with world.raise_together("finds no source"):
        if world.rank == 0:
            paths = [source.locate() for source in sources]
    if world.size > 1:
        paths = world.gather("sources", paths if world.rank == 0 else None)[0]
    with world.raise_together("cannot read the sources"):
        located = [
            dataclasses.replace(source, path=path, step=None)
            for source, path in zip(sources, paths, strict=True)
        ]
        loaded = read_sources(
            located,
            into,
            strict=False,
            verify=options.get("verify", True),
            allow_pickle=session.options.allow_pickle if pickled is None else pickled,
            rank=world.rank,
            size=world.size,
        )
        if options.get("strict", True):
            _refuse_half(loaded, into)
    with world.raise_together("cannot give the state read from the sources to its objects"):
        loaded.apply()


def _refuse_half(loaded: Loaded, items: Collection[str]) -> None:
    """Raise ``StateMismatchError`` if the sources have only a part of an item."""
    begun = tuple(f"{name}." for name in items if loaded.has(name))
    half = [fqn for fqn in loaded.missing if fqn.startswith(begun)]
    if half:
        raise StateMismatchError(
            f"the sources lack {listed(half, 5)}, and have the rest; nothing was loaded. "
            "Add a source that has it, exclude the item from all, or pass strict=False"
        )


def _what_was_loaded(session: Session) -> Resumed:
    """Return the checkpoint that was just loaded; all ranks must call this, and get the same."""
    world = session.world
    facts: list[Any] | None = None
    with world.raise_together("cannot read what it has loaded"):
        if world.rank == 0:
            info = session.loaded()
            assert info is not None
            facts = [info.step, is_seed(info), is_ephemeral(info)]
    step, seed, ephemeral = (
        world.gather("what was loaded", facts)[0] if world.size > 1 else (facts or [])
    )
    return Resumed(step, seed, ephemeral)
