"""The lease as seen by daemons of other ranks than 0; rank 0's daemon holds it for the whole session."""

from __future__ import annotations

import contextlib
import errno
import math
import threading
import time
from typing import Final

from sidesave.errors import WriteError
from sidesave.writer_daemon.format.names import LEASE_DIRECTORY
from sidesave.writer_daemon.lease.lease import CLOSED, current_holder
from sidesave.writer_daemon.storage import Storage

_VISIBLE_WITHIN_S: Final = 20.0
"""How long a network file system may take to show a lease that was taken before this daemon began."""
_POLL_S: Final = 0.1
_WATCH_S: Final = 1.0
_GRACE_S: Final = 5.0
"""What a daemon without trainer has left when the session has ended around it."""


class LeaseFollower:
    """Tells whether this rank's session still has the directory; used like ``Lease``, but takes nothing."""

    def __init__(self, storage: Storage, session: str, rank: int) -> None:
        """Look for the lease of ``session``; blocking.

        Raises:
            WriteError: It is not visible, so this is not the directory that rank 0 writes to.
        """
        self._storage = storage
        self.session: Final = session
        self._mark = f"{LEASE_DIRECTORY}/{CLOSED}.{session}.{rank}"
        self._watching = threading.Event()
        self.end_by = math.inf
        """When to give up what is unfinished, by the monotonic clock: the trainer is gone, and so is the session."""
        self.lost = False
        """Whether :meth:`check` has last found another holder."""
        give_up = time.monotonic() + _VISIBLE_WITHIN_S
        while True:
            try:
                self.check()
            except WriteError as error:
                if error.errno != errno.ESTALE:
                    raise
                if time.monotonic() >= give_up:
                    text = f"rank {rank} does not see here what rank 0 has written; all ranks must share one directory"
                    raise WriteError(errno.ESTALE, text, storage.root) from error
                time.sleep(_POLL_S)
            else:
                break
        with contextlib.suppress(WriteError):
            storage.remove(self._mark)  # of a daemon before this one, which left in peace

    def check(self) -> None:
        """Raise ``WriteError`` unless the session still holds the lease."""
        holder = current_holder(self._storage)
        if holder is None or holder.session != self.session:
            lost = f"the run has passed to {holder or 'nobody'}"
        elif holder.released and holder.trainer_gone:
            lost = "rank 0 has closed this run, or has ended"
        else:  # where it was released rank 0's daemon is being replaced
            self.lost = False
            return
        self.lost = True
        raise WriteError(errno.ESTALE, lost, f"{self._storage.root}/{LEASE_DIRECTORY}")

    def tell_trainer_gone(self) -> None:
        """Leave soon after the session has ended; returns at once."""
        if not self._watching.is_set():
            self._watching.set()
            threading.Thread(target=self._watch, name="sidesave-lease", daemon=True).start()

    def _watch(self) -> None:
        while self.end_by == math.inf:
            with contextlib.suppress(WriteError):
                holder = current_holder(self._storage)
                if holder is None or holder.session != self.session or holder.released:
                    self.end_by = time.monotonic() + _GRACE_S
            time.sleep(_WATCH_S)

    def release(self, *, final: bool = True) -> None:
        """If ``final``, tell rank 0 that this rank sends no further record; idempotent."""
        if final:
            with contextlib.suppress(WriteError), self._storage.creating(self._mark, 0) as mark:
                mark.finish(0)
