"""Gives up saves of several ranks: rank 0's daemon for all ranks, another rank's for itself.

A daemon that has lost the lease leaves its saves to the next session.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import time
from typing import Final

from sidesave.errors import CommitUnknownError, WriteError
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.commit import attempts, commit, coordination
from sidesave.writer_daemon.format.names import parse_hidden_directory
from sidesave.writer_daemon.lease.follower import LeaseFollower
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.lease.observer import closed_ranks, current_holder
from sidesave.writer_daemon.protocol import Failed, Refuse, Save
from sidesave.writer_daemon.storage import Storage

logger = logging.getLogger(__name__)

_FAREWELL_S: Final = 3.0
"""Time for other live ranks to see which saves were given up, before this daemon exits."""
_FAREWELL_POLL_S: Final = 0.05


class GivenUpSaves:
    """The saves that one daemon has given up; rank 0 keeps the reasons visible for a while."""

    def __init__(self, storage: Storage, lease: Lease | LeaseFollower, attempt: str) -> None:
        """Work in the run directory ``storage``; ``attempt`` makes temporary names unique."""
        self._storage = storage
        self._lease = lease
        self._attempt = attempt
        self._tombstones: collections.deque[tuple[float, str]] = collections.deque()
        self._other_ranks: frozenset[int] = frozenset()

    def add(self, save: Save | Refuse, failure: Failed) -> Failed:
        """Give a save up for all ranks, or report it to rank 0.

        Returns the failure, which may be that of another rank.
        """
        try:
            return failure if self._leave_to_next_session(save) else self._report(save, failure)
        finally:
            self._leave_to_next_session(save)  # again: it may have looked for leftovers meanwhile

    def _leave_to_next_session(self, save: Save | Refuse) -> bool:
        """Whether the lease is lost, so that this daemon decides nothing about the save any more.

        If another session has taken the run over, remove the incomplete save: it must not appear
        there.
        """
        storage, lease = self._storage, self._lease
        with contextlib.suppress(WriteError):
            lease.check()
        if not lease.lost:
            return False
        try:
            holder = current_holder(storage)
            if holder is None or holder.session == lease.session:
                # The session continues without this daemon, or ends.
                return True
            if isinstance(save, Refuse) or commit.find_record(storage, save) is None:
                storage.remove_tree(attempts.partial_of(save))
            if save.rank == 0:
                coordination.forget_verdict(storage, save)
        except WriteError as error:
            logger.warning("cannot be removed now, the next start tries again: %s", error)
        return True

    def _report(self, save: Save | Refuse, failure: Failed) -> Failed:
        storage = self._storage
        if save.rank == 0:
            tombstone = attempts.abort(storage, save, failure, self._attempt)
            coordination.forget_verdict(storage, save)
            self._other_ranks = frozenset(range(1, save.world_size))
            if tombstone is not None:
                forget_at = time.monotonic() + coordination.TOMBSTONE_S
                self._tombstones.append((forget_at, tombstone))
            return failure
        try:
            if isinstance(save, Save) and commit.find_record(storage, save) is not None:
                # Rank 0 may commit it soon.
                return dataclasses.replace(failure, error=CommitUnknownError.__name__)
            attempts.refuse(storage, save, failure, self._attempt)
        except attempts.GivenUp as error:
            return protocol.failure(failure.attempt, save.save_id, error.reason)
        except WriteError as error:
            logger.warning("cannot report to rank 0 that step %d failed here: %s", save.step, error)
        return failure

    def forget_old(self) -> None:
        """Remove tombstones that the other ranks have had time to see.

        Call this after a commit: a late rank that has missed a save learns it from these.
        """
        while self._tombstones and self._tombstones[0][0] < time.monotonic():
            self._remove(self._tombstones.popleft()[1])

    def close(self) -> None:
        """On rank 0, remove the tombstones; ranks that still run have a moment to end before."""
        storage, session = self._storage, self._lease.session
        if isinstance(self._lease, LeaseFollower):
            return
        deadline = time.monotonic() + (_FAREWELL_S if self._tombstones else 0.0)
        with contextlib.suppress(WriteError):
            while time.monotonic() < deadline and not self._other_ranks <= closed_ranks(
                storage, session
            ):
                time.sleep(max(_FAREWELL_POLL_S, 5 * storage.round_trip_s))
            for name in storage.list_directory(""):
                parsed = parse_hidden_directory(name)
                if parsed and parsed[1].startswith(f"{session}-") and parsed[2] == "aborted":
                    self._remove(name)

    def _remove(self, tombstone: str) -> None:
        try:
            self._storage.remove_tree(tombstone)
        except WriteError as error:
            logger.warning("cannot be removed now, the next start tries again: %s", error)
