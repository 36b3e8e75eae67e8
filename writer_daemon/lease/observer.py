"""The lease of a run directory as others see it: who holds it, and whether the holder is alive.

If file locks are reliable, the lock on a lease's file shows whether its holder is alive. Otherwise
a process of this system is looked up by its pid, and other holders must advance a counter once a
period.
"""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass
from typing import Final

from sidesave.errors import WriteError
from sidesave.writer_daemon.format.names import LEASE_DIRECTORY
from sidesave.writer_daemon.lease.record import PERIOD_S, RECORD_NBYTES, LeaseRecord
from sidesave.writer_daemon.storage import Storage

CLOSED: Final = "closed"
"""``closed.<session>.<rank>``: the daemon of that rank has exited and writes no more records."""
STILL_PERIODS: Final = 3
"""Number of periods without a change of the counter after which its holder counts as dead."""
REREAD_S: Final = (0.0, 0.01, 0.1)
"""Pauses before the attempts to read what a network file system may show late."""
_NO_RECORD: Final = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EFBIG)
"""Errors of reading a link, a directory, a device or a large file; a lease is a regular file."""


def path_of(epoch: int) -> str:
    """Return the path of a lease's file."""
    return f"{LEASE_DIRECTORY}/{epoch}"


def epochs(storage: Storage) -> dict[str, int]:
    """Return the names in the lease directory with their epochs, read from storage."""
    numbers = {name: name.partition(".")[0] for name in storage.list_directory(LEASE_DIRECTORY)}
    return {
        name: int(number)
        for name, number in numbers.items()
        if number.isascii() and number.isdigit()
    }


def newest_epoch(storage: Storage) -> int:
    """Return the epoch of the newest lease; 0 without a lease."""
    return max((epoch for name, epoch in epochs(storage).items() if name == str(epoch)), default=0)


def read_lease(storage: Storage, epoch: int) -> bytes | None:
    """Return a record, read again while it looks incomplete; None if it does not exist."""
    data = None
    for delay_s in REREAD_S:
        time.sleep(delay_s)
        data = storage.read(path_of(epoch), RECORD_NBYTES)
        if data is None or LeaseRecord.from_bytes(data) is not None:
            break
    return data


def current_holder(storage: Storage) -> LeaseRecord | None:
    """Return the record of the newest lease; None if there is no lease or it is empty."""
    last_epoch = 0
    while (epoch := newest_epoch(storage)) != last_epoch:
        data = read_lease(storage, epoch)
        if data is not None:
            return LeaseRecord.from_bytes(data)
        last_epoch = epoch  # a new holder has removed it between the two reads
    return None


def closed_ranks(storage: Storage, session: str) -> frozenset[int]:
    """Return the ranks of a session whose daemons have exited."""
    prefix = f"{CLOSED}.{session}."
    names = (
        name.removeprefix(prefix)
        for name in storage.list_directory(LEASE_DIRECTORY)
        if name.startswith(prefix)
    )
    return frozenset(int(name) for name in names if name.isascii() and name.isdigit())


@dataclass(frozen=True, slots=True)
class View:
    """The newest lease.

    ``holder`` is None if its file is not a record; ``alive`` is None while unknown.
    """

    epoch: int
    holder: LeaseRecord | None = None
    alive: bool | None = None
    evidence: str = ""


class Observer:
    """Determines whether the newest lease is alive.

    This may take several calls, a period apart.
    """

    def __init__(self, storage: Storage, period_s: float = PERIOD_S) -> None:
        """Observe ``storage`` without changing it.

        ``period_s`` is used if the record has no period.
        """
        self._storage = storage
        self._period_s = period_s
        self.known = 0
        """An epoch that is known to be taken; a listing may be out of date."""
        self.local = True
        """Whether file locks were reliable at the last :meth:`look`."""
        self._seen: tuple[int, bytes | None] = (0, None)
        self._still_s = 0.0
        self._last_look = 0.0

    def look(self) -> View:
        """Return the current lease; raises ``WriteError``."""
        epoch = max(self.known, newest_epoch(self._storage))
        if epoch == 0:
            return View(0, alive=False)
        try:
            data = read_lease(self._storage, epoch)
            locked = self._storage.is_locked(path_of(epoch))
        except WriteError as error:
            if error.errno not in _NO_RECORD:
                raise
            return View(epoch, alive=False)
        holder = LeaseRecord.from_bytes(data or b"")
        period_s = (
            self._period_s if holder is None else min(10 * PERIOD_S, max(0.01, holder.period_s))
        )
        before, self._seen = self._seen, (epoch, data)
        # A pause counts as one period at most: storage that hung here may have hung for the holder
        # too.
        gap_s, self._last_look = min(time.monotonic() - self._last_look, period_s), time.monotonic()
        self._still_s = self._still_s + gap_s if before == self._seen else 0.0
        if holder is not None and holder.released:
            return View(epoch, holder, alive=False)
        self.local = locked is not None
        if locked is not None:
            return View(epoch, holder, locked, "it holds the lock")
        lives = None if holder is None else holder.lives()
        if lives is not None:
            return View(epoch, holder, lives, "its process runs")
        if before[0] == epoch and before[1] not in (None, data):
            return View(epoch, holder, True, "its counter advances")
        return View(epoch, holder, False if self._still_s > STILL_PERIODS * period_s else None)
