"""A manager's work beside training: deletions, requests from outside, agreement of ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Unpack

from sidesave.client.checkpointer import Checkpointer
from sidesave.client.internals import saver_of
from sidesave.client.options import CheckpointerOptions, of_manager
from sidesave.client.ranks.group import NodeWorld
from sidesave.client.runs.pins import Pins
from sidesave.client.runs.save_requests import TriggerWatch
from sidesave.client.training.keep_policies import KeepEveryMinutes, KeepPolicy
from sidesave.client.training.links import Links, Naming
from sidesave.client.training.retention import MirrorRules, Retention
from sidesave.client.training.save_policies import Ephemeral, OnRequest, SavePolicy
from sidesave.client.training.schedule import Schedule
from sidesave.errors import InvalidArgumentError
from sidesave.stager import signal_safe
from sidesave.writer_daemon.storage import urls

AGREE_TO_END_S: Final = 30.0
_ROUNDS_S: Final = 3.0
"""Ranks that take part have answered by then. A thread that still waits for them when its process ends may abort it."""


def open_managed(directory: str | os.PathLike[str], **options: Unpack[CheckpointerOptions]) -> Checkpointer:
    """The checkpointer of a manager."""
    with of_manager():
        return Checkpointer(directory, **options)


class Background:
    """The threads of a manager, as far as its policies need them.

    Attributes:
        retention: Deletes and names checkpoints; None if there is nothing to delete or name.
        trigger: Looks for requests of other programs; None without :class:`OnRequest`, and of a run in an object store,
            where there are no files to ask by.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.retention: Retention | None = None
        self.trigger: TriggerWatch | None = None

    def start(
        self,
        checkpointer: Checkpointer,
        state: Mapping[str, Any],
        save: Sequence[SavePolicy],
        keep: Sequence[KeepPolicy],
        pins: Pins,
        names: Naming | None,
        mirror: MirrorRules,
        *,
        random_state: bool,
    ) -> None:
        """Check that ranks have the same policies and can save the state, then start what is needed.

        If this raises, call :meth:`stop`.
        """
        session = saver_of(checkpointer).session
        if session.world.size > 1:
            session.world.require_alike(
                save=sorted(map(_name, save)),
                keep=sorted(map(_name, keep)),
                mirror_keep=sorted(map(_name, mirror.keep)),
                mirror_backlog=mirror.backlog,
                random=random_state,
                on_busy=session.options.on_busy,
            )
        with session.world.raise_together("cannot save its state"):
            if (mirror.keep or mirror.backlog != "fail") and not session.saves.mirroring.mirror:
                raise InvalidArgumentError("mirror_keep and mirror_backlog are of a mirror: name it with mirror=")
            saver_of(checkpointer).submission.check(state)
        if isinstance(session.node, NodeWorld) and any(isinstance(policy, KeepEveryMinutes) for policy in keep):
            raise InvalidArgumentError(
                "KeepEveryMinutes cannot be combined with node_local=True: all nodes have to delete the same steps, "
                "and their clocks differ; take KeepEverySteps"
            )
        skips = session.options.on_busy == "skip"
        self._schedule.start(session.world, session.pool.is_busy if skips else None)
        if session.node.rank:
            return
        deleting = bool(keep or mirror.keep) or any(isinstance(policy, Ephemeral) for policy in save)
        links = None if names is None else Links(checkpointer.directory, names)
        if deleting or links is not None:
            self.retention = Retention(checkpointer, keep if deleting else None, pins, links, mirror)
        if any(isinstance(policy, OnRequest) for policy in save) and not urls.is_url(checkpointer.directory):
            # Not methods of the manager: the thread must not keep a dropped one alive.
            ask = self._schedule.request
            self.trigger = TriggerWatch(
                checkpointer.directory,
                session.id,
                functools.partial(ask, stop=False),
                functools.partial(ask, stop=True),
            )

    def stop(self, timeout_s: float, checkpointer: Checkpointer | None) -> None:
        """Stop everything and close the checkpointer, waiting up to ``timeout_s`` for saves and deletions.

        Raises the error of a failed save.
        """
        retention = self.retention
        with contextlib.ExitStack() as stack:  # the last one pushed runs first
            stack.callback(self._schedule.close)
            if checkpointer is not None and not saver_of(checkpointer).session.closed:
                stack.callback(checkpointer.close, timeout_s)
                if retention is not None:
                    stack.callback(retention.close, min(timeout_s, AGREE_TO_END_S))
                    stack.callback(checkpointer.wait, timeout_s)
            stack.callback(self._schedule.finish, min(max(timeout_s, _ROUNDS_S), AGREE_TO_END_S), failing=False)
            if self.trigger is not None:
                stack.callback(self.trigger.close)


def end_dropped(pid: int, schedule: Schedule, trigger: TriggerWatch | None) -> None:
    """Stop the threads of a manager that was dropped without ``close()``; its checkpointer closes itself."""
    if pid != os.getpid():
        return

    def work() -> None:
        if trigger is not None:
            trigger.close()
        schedule.finish(AGREE_TO_END_S, failing=True)

    schedule.close()
    signal_safe.start(work, "sidesave-close-manager")


def _name(policy: object) -> str:
    """The text by which ranks compare a policy."""
    known = dataclasses.is_dataclass(policy)
    return repr(policy) if known else f"{type(policy).__module__}.{type(policy).__qualname__}"
