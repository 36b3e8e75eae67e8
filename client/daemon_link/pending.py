"""Unanswered requests to the daemon: bookkeeping without I/O, so that a model can test it.

Invariants, which property tests hold together with the daemon's state machine
(``writer_daemon.process.jobs``):

* a request is sent to every daemon until it is answered, and its answer is passed on once;
* a successor gets SAVE until WRITTEN was heard, and WATCH after it: the staging slot may have been
  reused by then;
* a request that is sent again says so (``retry``), so that a daemon adopts its predecessor's
  results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sidesave.errors import SidesaveError
from sidesave.writer_daemon.protocol import (
    Committed,
    Delete,
    Deleted,
    Failed,
    Message,
    Refuse,
    Save,
    Watch,
    Written,
)

Request = Save | Delete | Refuse


@dataclass(slots=True)
class _OpenRequest:
    request: Request
    first_attempt: int | None = None  # number of the first daemon that received it
    written: bool = False
    deaths: int = 0

    def message(self, attempt: int) -> Message:
        if self.first_attempt is None:
            self.first_attempt = attempt
        again = attempt > self.first_attempt
        if self.request.attempt == attempt and not again:
            return self.request
        request = dataclasses.replace(
            self.request, attempt=attempt, retry=again or self.request.retry
        )
        if self.written and isinstance(request, Save):
            return Watch(attempt=attempt, save=request)
        return request


class Listener(Protocol):
    """The object that hears of the outcome of requests, in the connection's thread."""

    def receive(self, message: Message) -> None:
        """Handle PROGRESS, WRITTEN, COMMITTED, DELETED, FAILED, MIRRORED or MIRROR."""

    def lose(self, ids: Sequence[int], error: SidesaveError) -> None:
        """Handle the end of requests that no daemon will finish."""


class Requests:
    """The open requests of one trainer; ``attempt`` counts its daemons."""

    def __init__(self) -> None:
        self._open: dict[int, _OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request: Request, attempt: int) -> Message:
        """Add a request; returns what to send."""
        self.keep(request)
        return self._open[request.save_id].message(attempt)

    def keep(self, request: Request) -> None:
        """Add a request for the next daemon, while no daemon runs."""
        self._open[request.save_id] = _OpenRequest(request)

    def for_successor(self, attempt: int) -> list[Message]:
        """The messages to send to a new daemon, in the order of the requests."""
        return [entry.message(attempt) for entry in self._open.values()]

    def hear(self, message: Message) -> bool:
        """Note a daemon's message.

        Returns whether it answers an open request and must be passed on.
        """
        save_id = getattr(message, "save_id", None)
        entry = self._open.get(save_id) if isinstance(save_id, int) else None
        if entry is None:
            return False
        if isinstance(message, Written):
            entry.written = True
        elif isinstance(message, (Committed, Deleted, Failed)):
            del self._open[entry.request.save_id]
            # They were queued behind it: earlier daemons did not die of them.
            for other in self._open.values():
                other.deaths = 0
        return True

    def drop(self, save_id: int) -> None:
        """Forget a request."""
        del self._open[save_id]

    def daemon_died(self, most: int) -> list[int]:
        """Note that a daemon died with these requests open; returns the ids of those to give up.

        They have seen more than ``most`` daemons die, with no answer to any request in between.
        """
        for entry in self._open.values():
            entry.deaths += 1
        ids = [save_id for save_id, entry in self._open.items() if entry.deaths > most]
        for save_id in ids:
            self.drop(save_id)
        return ids

    def give_up(self) -> dict[int, bool]:
        """Give up all open requests; return their ids, and whether each was reported as written."""
        ids = {save_id: entry.written for save_id, entry in self._open.items()}
        self._open = {}
        return ids
