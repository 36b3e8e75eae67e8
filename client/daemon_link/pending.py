"""Requests to the daemon that are not answered yet: bookkeeping without I/O, so that a model can test it.

Invariants, which property tests hold together with the daemon's state machine (``writer_daemon.process.jobs``):

* a request is sent to every daemon until it is answered, and its answer is passed on once;
* a successor gets SAVE until WRITTEN was heard, and WATCH after it: the staging slot may have been reused by then;
* what is sent again says so (``retry``), so that a daemon adopts what its predecessor has done.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sidesave.writer_daemon.protocol import Committed, Delete, Deleted, Failed, Message, Refuse, Save, Watch, Written

Request = Save | Delete | Refuse


@dataclass(slots=True)
class _Open:
    request: Request
    first_attempt: int | None = None  # of the first daemon that was told
    written: bool = False
    deaths: int = 0

    def message(self, attempt: int) -> Message:
        if self.first_attempt is None:
            self.first_attempt = attempt
        again = attempt > self.first_attempt
        if self.request.attempt == attempt and not again:
            return self.request
        request = dataclasses.replace(self.request, attempt=attempt, retry=again or self.request.retry)
        if self.written and isinstance(request, Save):
            return Watch(attempt=attempt, save=request)
        return request


class Requests:
    """The open requests of one trainer; ``attempt`` counts its daemons."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request: Request, attempt: int) -> Message:
        """Add a request; returns what to send."""
        self.keep(request)
        return self._open[request.save_id].message(attempt)

    def keep(self, request: Request) -> None:
        """Add a request for the next daemon, while there is none."""
        self._open[request.save_id] = _Open(request)

    def for_successor(self, attempt: int) -> list[Message]:
        """What to send to a new daemon, in the order of the requests."""
        return [entry.message(attempt) for entry in self._open.values()]

    def hear(self, message: Message) -> bool:
        """Note a daemon's message; returns whether it answers an open request and must be passed on."""
        save_id = getattr(message, "save_id", None)
        entry = self._open.get(save_id) if isinstance(save_id, int) else None
        if entry is None:
            return False
        if isinstance(message, Written):
            entry.written = True
        elif isinstance(message, (Committed, Deleted, Failed)):
            del self._open[entry.request.save_id]
            for other in self._open.values():  # they stood behind it: what daemons died of was not theirs
                other.deaths = 0
        return True

    def drop(self, save_id: int) -> None:
        """Forget a request."""
        del self._open[save_id]

    def daemon_died(self, most: int) -> list[int]:
        """Note that a daemon died with these requests open; returns the ids of those to give up.

        They have seen more than ``most`` daemons die, without an answer to any request in between.
        """
        for entry in self._open.values():
            entry.deaths += 1
        ids = [save_id for save_id, entry in self._open.items() if entry.deaths > most]
        for save_id in ids:
            self.drop(save_id)
        return ids

    def give_up(self) -> dict[int, bool]:
        """Give up all open requests; returns their ids, and whether each was reported as written."""
        ids = {save_id: entry.written for save_id, entry in self._open.items()}
        self._open = {}
        return ids
