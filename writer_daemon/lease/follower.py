"""The lease as seen by the daemons of ranks above 0; rank 0's daemon holds it for the session."""

from __future__ import annotations

import contextlib
import errno
import math
import threading
import time
from typing import Final

from sidesave.errors import WriteError
from sidesave.writer_daemon.format.names import LEASE_DIRECTORY
from sidesave.writer_daemon.lease.observer import CLOSED, current_holder
from sidesave.writer_daemon.storage import Storage

_VISIBLE_WITHIN_S: Final = 20.0
"""Seconds that a network file system may take to show a lease taken before this daemon started."""
_POLL_S: Final = 0.1
_WATCH_S: Final = 1.0
_GRACE_S: Final = 5.0
"""Seconds that a daemon without a trainer keeps working after the session has ended."""


class LeaseFollower:
    """Checks whether this rank's session still holds the lease.

    Has the interface of ``Lease``, but takes no lease.
    """

    def __init__(self, storage: Storage, session: str, rank: int) -> None:
        """Wait until the lease of ``session`` is visible, up to 20 s.

        Raises:
            WriteError: The lease is not visible, so rank 0 writes to another directory.
        """
        self._storage = storage
        self.session: Final = session
        self._mark = f"{LEASE_DIRECTORY}/{CLOSED}.{session}.{rank}"
        self._watching = threading.Event()
        self.end_by = math.inf
        """Monotonic time at which to abandon unfinished saves: trainer and session have ended."""
        self.lost = False
        """Whether the last :meth:`check` has found another holder."""
        give_up = time.monotonic() + _VISIBLE_WITHIN_S
        while True:
            try:
                self.check()
            except WriteError as error:
                if error.errno != errno.ESTALE:
                    raise
                if time.monotonic() >= give_up:
                    text = (
                        f"rank {rank} does not see rank 0's files here; all ranks must share one "
                        "directory"
                    )
                    raise WriteError(errno.ESTALE, text, storage.root) from error
                time.sleep(_POLL_S)
            else:
                break
        with contextlib.suppress(WriteError):
            storage.remove(self._mark)  # of an earlier daemon of this rank that has exited

    def check(self) -> None:
        """Raise ``WriteError`` unless the session still holds the lease."""
        holder = current_holder(self._storage)
        if holder is None or holder.session != self.session:
            lost = f"{holder} has taken over the run" if holder else "the run has no lease any more"
        elif holder.released and holder.trainer_gone:
            lost = "rank 0 has closed this run, or has ended"
        else:  # held, or released because rank 0's daemon is being replaced
            self.lost = False
            return
        self.lost = True
        raise WriteError(errno.ESTALE, lost, f"{self._storage.root}/{LEASE_DIRECTORY}")

    def tell_trainer_gone(self) -> None:
        """Set :attr:`end_by` once the session has ended; does not block."""
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
        """If ``final``, mark for rank 0 that this rank writes no more records; idempotent."""
        if final:
            with contextlib.suppress(WriteError), self._storage.creating(self._mark, 0) as mark:
                mark.finish(0)
