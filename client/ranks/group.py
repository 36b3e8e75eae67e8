"""The ranks that save together, and how they agree: at the start of a session and in loads.

Saves need no agreement. :mod:`sidesave.client.ranks.meeting` finds the ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Any, Final

import torch

from sidesave.errors import (
    IntegrityError,
    InvalidArgumentError,
    SidesaveError,
    from_wire,
)
from sidesave.writer_daemon import protocol

TOLD_AFTER_S: Final = 5.0
"""Seconds after which a rank logs which ranks it waits for, as they may never come."""

logger = logging.getLogger(__name__)


class World(ABC):
    """The ranks of a session.

    ``ranks`` are their global ranks, and this process is at position ``rank``.
    """

    rank: int
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks that save together."""
        return len(self.ranks)

    @abstractmethod
    def _exchange(self, value: Any) -> list[Any]: ...

    def close(self) -> None:
        """Leave, without waiting; nothing is exchanged afterwards."""
        return

    def gather(self, about: str, value: Any) -> list[Any]:
        """Exchange a value of plain JSON types with all ranks. Blocking; all ranks must call it.

        Raises:
            InvalidArgumentError: Ranks exchange different values, as they called different methods;
                raised by all.
        """
        gathered = self._exchange([about, value])
        for rank, (theirs, _) in zip(self.ranks, gathered, strict=True):
            if theirs != gathered[0][0]:
                raise InvalidArgumentError(
                    f"ranks are out of step: rank {self.ranks[0]} is at {gathered[0][0]!r}, rank "
                    f"{rank} at {theirs!r}. All must make checkpointers, and load, in the same "
                    "order; threads that do so at the same time need a process_group each"
                )
        return [value for _, value in gathered]

    def require_alike(self, **arguments: Any) -> None:
        """Raise ``InvalidArgumentError`` on all ranks unless all have the same values.

        All ranks must call it.
        """
        gathered = self.gather(" and ".join(arguments), arguments)
        for rank, theirs in zip(self.ranks, gathered, strict=True):
            for name, value in theirs.items():
                if value != gathered[0][name]:
                    raise InvalidArgumentError(
                        f"rank {self.ranks[0]} was given {name}={gathered[0][name]}, and rank "
                        f"{rank} {name}={value}; all ranks need the same"
                    )

    @contextlib.contextmanager
    def raise_together(self, what: str) -> Generator[None]:
        """Raise on all ranks the error that one rank raises in this block, naming the rank.

        All ranks must enter it. Of several errors all ranks raise the first rank's kind, so that
        they continue alike; ``IntegrityError``, after which a caller may try another checkpoint,
        only if there is no other kind. An error of another package, such as ``KeyboardInterrupt``,
        is raised unchanged on its own rank.
        """
        own: BaseException | None = None
        try:
            yield
        except BaseException as error:
            if self.size == 1:
                raise
            own = error
        if self.size == 1:
            return
        try:
            answers = self.gather(what, None if own is None else _told(own))
        except Exception:  # of any kind: this rank's own error takes precedence
            if own is not None:
                raise own from None
            raise
        failures = [
            (rank, answer)
            for rank, answer in zip(self.ranks, answers, strict=True)
            if answer is not None
        ]
        if not failures:
            return
        rank, (name, message, number, path) = min(
            failures, key=lambda each: each[1][0] == IntegrityError.__name__
        )
        if own is not None and (type(own).__name__ == name or not isinstance(own, SidesaveError)):
            raise own
        raise from_wire(name, f"rank {rank} {what}: {message}", number, path) from own


def _told(error: BaseException) -> list[Any]:
    """The form in which an error is sent to other ranks: name, message, errno and path."""
    if not isinstance(error, SidesaveError):
        return [SidesaveError.__name__, f"{type(error).__name__}: {error}"[:4000], None, None]
    failure = protocol.failure(0, None, error)
    return [failure.error, failure.message, failure.errno, failure.path]


class Alone(World):
    """A single process."""

    rank = 0
    ranks = (0,)

    def _exchange(self, value: Any) -> list[Any]:
        return [value]


def warn_of_waiting(whom: str) -> None:
    """Log for whom this rank waits."""
    logger.warning(
        "waiting for %s to make a Checkpointer too; pass distributed=False if this process is "
        "to save alone",
        whom,
    )


class GroupWorld(World):
    """The ranks of a process group."""

    def __init__(self, group: torch.distributed.ProcessGroup | None) -> None:
        self._group = group
        self.ranks = tuple(torch.distributed.get_process_group_ranks(group))
        rank = torch.distributed.get_rank(group)
        if rank < 0:
            raise InvalidArgumentError("this process is not part of process_group")
        self.rank = rank
        self._have_met = False

    def _exchange(self, value: Any) -> list[Any]:
        """Run one collective of the group, with its timeout."""
        values: list[Any] = [None] * self.size
        timer = threading.Timer(
            TOLD_AFTER_S, warn_of_waiting, (f"all {self.size} ranks of the process group",)
        )
        if not self._have_met:
            timer.start()
        try:
            torch.distributed.all_gather_object(values, json.dumps(value), group=self._group)
        finally:
            timer.cancel()
        self._have_met = True
        return [json.loads(each) for each in values]


class NodeWorld(World):
    """The ranks of a world that see one directory: they save together, and agree with all ranks."""

    def __init__(self, world: World, members: Sequence[int], number: int, count: int) -> None:
        """Make the ranks of one node.

        ``members`` are the node's ranks, as positions in ``world``; this is node ``number`` of
        ``count``.
        """
        self.rank = members.index(world.rank)
        self.ranks = tuple(world.ranks[member] for member in members)
        self.number, self.count = number, count
        self._world = world

    def _exchange(self, value: Any) -> list[Any]:
        """Exchange a value with the ranks of all nodes."""
        return self._world._exchange(value)


def is_initialized() -> bool:
    """Whether this process has a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def of_group(process_group: torch.distributed.ProcessGroup | None) -> World:
    """Return the ranks of a process group, None for all; without any, this process alone."""
    if not is_initialized():
        return Alone()
    group = GroupWorld(process_group)
    return group if group.size > 1 else Alone()
