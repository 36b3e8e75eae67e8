"""The background work of a manager: its checkpointer, deletions, requests, rank agreement."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from sidesave.client.checkpointer import Checkpointer
from sidesave.client.options import CheckpointerOptions, Observer, of_manager
from sidesave.client.runs import finding
from sidesave.client.runs.links import Links, Naming
from sidesave.client.runs.pins import Pins
from sidesave.client.runs.save_requests import TriggerWatch
from sidesave.client.saving.session import Session
from sidesave.client.training.keep_policies import KeepEveryMinutes, KeepPolicy
from sidesave.client.training.retention import Retention, close_after_deletions
from sidesave.client.training.save_policies import Ephemeral, OnRequest, SavePolicy
from sidesave.client.training.schedule import Schedule
from sidesave.errors import CheckpointNotFoundError, InvalidArgumentError, StagingError
from sidesave.writer_daemon.storage import urls

AGREE_TO_END_S: Final = 30.0
_ROUNDS_S: Final = 3.0
"""Seconds in which live ranks answer. A thread that still waits at exit may abort the process."""


class Background:
    """The checkpointer of a manager, and threads, started only if its policies need them.

    Attributes:
        retention: Deletes and names checkpoints; None if there is nothing to delete or name.
        trigger: Looks for requests of other programs; None without :class:`OnRequest`, and for runs
            in object stores, which have no request files.
        pins: The pins of the run directory.
    """

    pins: Pins

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._checkpointer: Checkpointer | None = None
        self.retention: Retention | None = None
        self.trigger: TriggerWatch | None = None

    def start(
        self,
        directory: str | os.PathLike[str],
        observers: Sequence[Observer],
        options: CheckpointerOptions,
        state: Mapping[str, Any],
        save: Sequence[SavePolicy],
        keep: Sequence[KeepPolicy],
        names: Naming | None,
        mirror_keep: Sequence[KeepPolicy],
        *,
        random_state: bool,
    ) -> Checkpointer:
        """Open the checkpointer, and start the threads that are needed.

        ``observers`` come before those in ``options``. All ranks raise if they have different
        policies or cannot save the state. If this raises, call :meth:`stop`.
        """
        checkpointer = self._open(directory, observers, options)
        self.pins = Pins(checkpointer.directory)
        session = checkpointer.session
        mirror = session.options.mirror
        if session.world.size > 1:
            session.world.require_alike(
                save=sorted(map(_name, save)),
                keep=sorted(map(_name, keep)),
                mirror_keep=sorted(map(_name, mirror_keep)),
                mirror_backlog=mirror.backlog if mirror is not None else "fail",
                random=random_state,
                on_busy=session.options.staging.on_busy,
            )
        with session.world.raise_together("cannot save its state"):
            if mirror_keep and mirror is None:
                raise InvalidArgumentError("mirror_keep needs a mirror: name it with mirror=")
            checkpointer.check(state)
        if session.node_local and any(isinstance(policy, KeepEveryMinutes) for policy in keep):
            raise InvalidArgumentError(
                "KeepEveryMinutes cannot be combined with node_local=True: all nodes have to "
                "delete the same steps, and their clocks differ; take KeepEverySteps"
            )
        skips = session.options.staging.on_busy == "skip"
        self._schedule.start(session.world, session.is_busy if skips else None)
        if not session.leads:
            return checkpointer
        deleting = bool(keep or mirror_keep) or any(
            isinstance(policy, Ephemeral) for policy in save
        )
        links = None if names is None else Links(checkpointer.directory, names)
        if deleting or links is not None:
            self.retention = Retention(
                session, keep if deleting else None, self.pins, links, mirror_keep
            )
        if any(isinstance(policy, OnRequest) for policy in save) and not urls.is_url(
            checkpointer.directory
        ):
            # Not methods of the manager: the thread must not keep a dropped one alive.
            ask = self._schedule.request
            self.trigger = TriggerWatch(
                checkpointer.directory,
                session.id,
                functools.partial(ask, stop=False),
                functools.partial(ask, stop=True),
            )
        return checkpointer

    def _open(
        self,
        directory: str | os.PathLike[str],
        own: Sequence[Observer],
        options: CheckpointerOptions,
    ) -> Checkpointer:
        observers = options.get("observers", ())
        if isinstance(cast("object", observers), Sequence):  # else the checkpointer refuses it
            options = {**options, "observers": [*own, *observers]}
        with of_manager():
            self._checkpointer = Checkpointer(directory, **options)
        return self._checkpointer

    def pin(self, step: int) -> None:
        """Pin a step durably; if it is gone, raise ``CheckpointNotFoundError`` and add no pin."""
        checkpointer, pins = self._checkpointer, self.pins
        assert checkpointer is not None
        is_new = pins.change(step, pinned=True)
        try:
            if self.retention is not None:
                self.retention.spare(
                    step, functools.partial(checkpointer.saver.refuse_waiting, "pin")
                )
            _refuse_gone(checkpointer.session, step)
        except (CheckpointNotFoundError, StagingError):
            if is_new:
                pins.change(step, pinned=False)
            raise

    def stop(self, timeout_s: float) -> None:
        """Stop everything and close the checkpointer.

        Waits up to ``timeout_s`` for saves and deletions. Raises the error of a failed save.
        """
        checkpointer = self._checkpointer
        with contextlib.ExitStack() as stack:  # the last one pushed runs first
            stack.callback(self._schedule.close)
            if checkpointer is not None and not checkpointer.closed:
                stack.callback(close_after_deletions, checkpointer, self.retention, timeout_s)
            stack.callback(
                self._schedule.finish, min(max(timeout_s, _ROUNDS_S), AGREE_TO_END_S), failing=False
            )
            if self.trigger is not None:
                stack.callback(self.trigger.close)


def _refuse_gone(session: Session, step: int) -> None:
    """Raise ``CheckpointNotFoundError`` for a missing step, unless it is later than the latest."""
    view = session.look()
    if any(each.step == step for each in (*view.here, *view.left_out)):
        return
    view = session.add_mirror(view)
    if not view.is_mirror_known or any(
        each.step == step for each in (*view.mirrored, *view.mirror_left_out)
    ):
        return
    if any(info.step > step for info in view.all[-1:]):  # else it may be saved yet
        raise finding.not_found(view.directory, view.all, step)


def _name(policy: object) -> str:
    """Return a text for comparing a policy between ranks."""
    known = dataclasses.is_dataclass(policy)
    return repr(policy) if known else f"{type(policy).__module__}.{type(policy).__qualname__}"
