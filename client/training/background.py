"""What works beside training for a manager, and is ended with it: deletions, requests, agreements of ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sidesave.client.checkpointer import Checkpointer
from sidesave.client.internals import saver_of
from sidesave.client.ranks.group import NodeWorld
from sidesave.client.runs.save_requests import TriggerWatch
from sidesave.client.training.keep_policies import KeepEveryMinutes, KeepPolicy
from sidesave.client.training.links import Links, Naming
from sidesave.client.training.retention import Pins, Retention
from sidesave.client.training.save_policies import Ephemeral, OnRequest, SavePolicy
from sidesave.client.training.schedule import Schedule
from sidesave.errors import InvalidArgumentError
from sidesave.stager import apart

AGREE_TO_END_S: Final = 30.0


class Background:
    """What a manager starts where its policies need it.

    Attributes:
        retention: Deletes and names checkpoints, if anything is to be.
        trigger: Looks for what other programs ask for, if the policies allow it.
    """

    def __init__(self, schedule: Schedule) -> None:
        """Start nothing yet."""
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
        *,
        random_state: bool,
    ) -> None:
        """Start what there is a need for; where this raises, :meth:`stop` has to follow.

        Ranks must have been given the same, and the state must be one that can be saved.
        """
        session = saver_of(checkpointer).session
        if session.world.size > 1:
            session.world.require_alike(
                save=sorted(map(_name, save)), keep=sorted(map(_name, keep)), random=random_state
            )
        with session.world.raise_together("cannot save its state"):
            saver_of(checkpointer).submission.check(state)
        if isinstance(session.node, NodeWorld) and any(isinstance(policy, KeepEveryMinutes) for policy in keep):
            raise InvalidArgumentError(
                "nodes that keep their own parts have to delete the same steps, and their clocks differ: "
                "KeepEveryMinutes cannot be combined with node_local=True; take KeepEverySteps"
            )
        self._schedule.start(session.world)
        if session.node.rank:
            return
        deleting = bool(keep) or any(isinstance(policy, Ephemeral) for policy in save)
        links = None if names is None else Links(checkpointer.directory, names)
        if deleting or links is not None:
            self.retention = Retention(checkpointer, keep if deleting else None, pins, links)
        if any(isinstance(policy, OnRequest) for policy in save):
            # Not methods of the manager: the thread must not keep a dropped one alive.
            ask = self._schedule.request
            self.trigger = TriggerWatch(
                checkpointer.directory,
                session.id,
                functools.partial(ask, stop=False),
                functools.partial(ask, stop=True),
            )

    def stop(self, timeout_s: float, checkpointer: Checkpointer | None) -> None:
        """End all of it and close the checkpointer, waiting for saves and deletions for that long.

        Raises what saves have failed of.
        """
        ends: list[Callable[[], object]] = []
        if self.trigger is not None:
            ends.append(self.trigger.close)
        retention = self.retention
        ends.append(lambda: self._schedule.finish(min(timeout_s, AGREE_TO_END_S), failing=False))
        if checkpointer is not None and not saver_of(checkpointer).session.closed:
            if retention is not None:
                ends.append(lambda: checkpointer.wait(timeout_s))
                ends.append(lambda: retention.close(min(timeout_s, AGREE_TO_END_S)))
            ends.append(lambda: checkpointer.close(timeout_s))
        ends.append(self._schedule.close)
        with contextlib.ExitStack() as stack:
            for end in reversed(ends):
                stack.callback(end)


def end_dropped(pid: int, schedule: Schedule, trigger: TriggerWatch | None) -> None:
    """End what a manager that was dropped without ``close()`` has left; its checkpointer does the same for itself."""
    if pid != os.getpid():
        return

    def work() -> None:
        if trigger is not None:
            trigger.close()
        schedule.finish(AGREE_TO_END_S, failing=True)

    schedule.close()
    apart.start(work, "sidesave-close-manager")


def _name(policy: object) -> str:
    """What ranks compare of a policy."""
    known = dataclasses.is_dataclass(policy)
    return repr(policy) if known else f"{type(policy).__module__}.{type(policy).__qualname__}"
