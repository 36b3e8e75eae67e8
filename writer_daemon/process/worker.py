"""The daemon's storage operations, one after another, each ending in an event.

They run in one thread, so that the loop answers while storage hangs. A temporary failure is retried. A permanent one
goes to the fallback directory, if there is one; any other error becomes the save's.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from sidesave.errors import (
    CheckpointNotFoundError,
    CommitUnknownError,
    NoSpaceError,
    ProtocolError,
    SidesaveError,
    WriteError,
)
from sidesave.stager.memory.arena import Arena
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.commit import commit, coordination
from sidesave.writer_daemon.format import manifest, rollback
from sidesave.writer_daemon.format.manifest import RankRecord, step_directory
from sidesave.writer_daemon.lease.follower import LeaseFollower
from sidesave.writer_daemon.lease.lease import Lease, closed_ranks, current_holder
from sidesave.writer_daemon.process import jobs
from sidesave.writer_daemon.protocol import Delete, Failed, Refuse, Save
from sidesave.writer_daemon.storage import Storage
from sidesave.writer_daemon.writing.writer import Writer

T = TypeVar("T")

logger = logging.getLogger(__name__)

TRANSIENT: Final = frozenset(
    {
        *(errno.EIO, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ENOMEM, errno.ENOBUFS, errno.EMFILE, errno.ENFILE),
        *(errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOLCK, errno.ENOLINK, errno.ECONNRESET),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    }
)
"""Errors that may be gone a second later. A full disk, a quota and a missing permission are not among them."""
FIRST_BACKOFF_S: Final = 0.25
"""Before the first further try; four times as long before each one after it."""
MAX_BACKOFF_S: Final = 30.0
"""And no longer than this: the saves behind it wait as well."""
_CHECK_LEASE_S: Final = 2.0
"""While other ranks are waited for, the lease is looked at this often: each look takes several requests.
Less often where these are paid for."""
_FAREWELL_S: Final = 3.0
"""Time for other ranks that are still there to see what was given up last, before this daemon leaves."""
_FAREWELL_POLL_S: Final = 0.05
TRASH_GRACE_S: Final = 30.0
"""How long a deleted checkpoint stays readable for whoever has opened it, also where locks do not tell of readers."""


@dataclass(frozen=True, slots=True)
class Place:
    """A run directory that this daemon, or rank 0's, holds."""

    storage: Storage
    lease: Lease | LeaseFollower
    writer: Writer
    attempt: str


class Worker:
    """Writes, commits and deletes; every method blocks and is called in the storage thread."""

    def __init__(
        self,
        attempt: int,
        primary: Place,
        fallback_directory: str,
        open_fallback: Callable[[], Place],
        retries: int,
        on_retry: Callable[[Save], None],
        post: Callable[[jobs.Event], None],
        commit_timeout_s: float = math.inf,
    ) -> None:
        """Work in ``primary``; ``open_fallback`` takes hold of the other directory, if one is named, once needed.

        Other ranks are waited for up to ``commit_timeout_s``. ``on_retry`` is told of a save that is about to be tried
        again, in the storage thread.
        """
        self._commit_timeout_s = commit_timeout_s
        self._tombstones: collections.deque[tuple[float, str]] = collections.deque()
        self._others: frozenset[int] = frozenset()
        self._written: dict[int, float] = {}
        self._attempt = attempt
        self._primary = primary
        self._fallback_directory = fallback_directory
        self._open_fallback = open_fallback
        self._fallback: Place | None = None
        self._retries = retries
        self._on_retry = on_retry
        self._post = post
        self._committed: dict[int, tuple[str, int]] = {}
        self._trash: collections.deque[tuple[float, Place, str]] = collections.deque()

    # Saves -----------------------------------------------------------------------------------------------------

    def write(self, save: Save, arena: Arena | None) -> None:
        """Make a save durable, from ``arena`` or by adopting what an earlier daemon has written."""
        started = time.monotonic()
        try:
            try:
                write = self._adopt if arena is None else functools.partial(self._write_to, self._primary, arena)
                record = self._persistently(save, write)
            except WriteError as error:
                fallback = None if arena is None else self._get_fallback(error)
                if arena is None or fallback is None:
                    raise
                logger.warning("step %d goes to %s: %s", save.step, fallback.storage.root, error)
                record = self._write_to(fallback, arena, save)
        except Exception as error:  # noqa: BLE001 - a fault of ours must fail one save, not the daemon
            failure = self._failure(save, error)
            if save.world_size > 1 and not isinstance(error, CommitUnknownError):
                failure = self._give_up(save, failure)
            self._post(jobs.WriteEnded(save.save_id, 0, 0.0, failure))
        else:
            if save.rank:
                self._written[save.save_id] = time.monotonic()
            self._post(jobs.WriteEnded(save.save_id, record.nbytes, time.monotonic() - started))

    def _write_to(self, place: Place, arena: Arena, save: Save) -> RankRecord:
        def progressed(nbytes: int, total: int) -> None:
            self._post(jobs.Progressed(save.save_id, nbytes, total))

        try:
            record = commit.find_record(place.storage, save) if save.retry else None
            if record is None:
                if save.rank == 0:  # who has deleted the step for all; without its record nothing gets the name
                    commit.refuse_taken(place.storage, save)
                record = place.writer.write(save, arena, progressed, self._waiting(place, save))
            if self._fallback_directory:  # while the memory is there, so that the commit may fail as well
                self._committed[save.save_id] = self._commit_in(place, save)
        except CommitUnknownError:
            raise
        except BaseException as error:
            # Once the record is there rank 0 may commit, and so rename the directory that is still to be synced here.
            is_renamed = save.rank and isinstance(error, WriteError) and error.errno == errno.ENOENT
            record = commit.find_record(place.storage, save) if is_renamed else None
            if record is None:
                if save.world_size == 1:
                    commit.reclaim(place.storage, save)
                raise
        return record

    def _adopt(self, save: Save) -> RankRecord:
        for place in self._places():
            record = commit.find_record(place.storage, save)
            if record is not None:
                if place is not self._primary:
                    self._committed[save.save_id] = self._commit_in(place, save)
                return record
        if save.world_size > 1:
            coordination.refuse_aborted(self._primary.storage, save)
            text = f"step {save.step} was written, and what became of it is not there to be seen any more"
            raise CommitUnknownError(errno.ENOENT, text, self._primary.storage.root)
        raise ProtocolError(f"step {save.step} was said to be written, but its record is not there")

    def commit(self, save: Save) -> None:
        """Give a written save its name."""
        try:
            done = self._committed.pop(save.save_id, None)
            name, nbytes = done or self._persistently(save, functools.partial(self._commit_in, self._primary))
        except Exception as error:  # noqa: BLE001 - as above
            failure = self._failure(save, error)
            if isinstance(self._primary.lease, LeaseFollower):
                if isinstance(error, WriteError):  # its part is there, so rank 0 may commit it all the same
                    failure = dataclasses.replace(failure, error=CommitUnknownError.__name__)
            elif not self._primary.lease.lost or self._primary.storage.fences:  # else it is not ours
                if not isinstance(error, CommitUnknownError):
                    self.reclaim(save, failure)
                elif save.world_size > 1:  # it has its name
                    coordination.forget_verdict(self._primary.storage, save)
            self._post(jobs.CommitEnded(save.save_id, "", 0, failure))
        else:
            self._post(jobs.CommitEnded(save.save_id, name, nbytes))
        self._written.pop(save.save_id, None)

    def _commit_in(self, place: Place, save: Save) -> tuple[str, int]:
        name = step_directory(save.step)
        if isinstance(place.lease, LeaseFollower):
            written = self._written.get(save.save_id, -math.inf)
            timeout_s, waiting, check = self._commit_timeout_s, self._waiting(place, save), place.lease.check
            return name, coordination.await_commit(place.storage, save, timeout_s, waiting, check, written)
        records = None if save.world_size == 1 else lambda: self._await_records(place, save)
        content = commit.commit(place.storage, place.lease, save, place.attempt, records)
        if save.world_size > 1:
            coordination.forget_verdict(place.storage, save)
            # Not before: a rank that has missed a save finds out by these, however late it comes.
            while self._tombstones and self._tombstones[0][0] < time.monotonic():
                self._remove_tombstone(self._tombstones.popleft()[1])
        return name if place is self._primary else os.path.join(place.storage.root, name), content.nbytes

    def _await_records(self, place: Place, save: Save) -> list[RankRecord]:
        return coordination.await_records(place.storage, save, self._commit_timeout_s, self._waiting(place, save))

    def _waiting(self, place: Place, save: Save) -> Callable[[], None]:
        pause_s = max(_CHECK_LEASE_S, 100 * place.storage.round_trip_s)
        next_check = time.monotonic() + pause_s

        def waiting() -> None:
            nonlocal next_check
            self._post(jobs.Waited(save.save_id))  # storage answers: this is no stall
            if time.monotonic() >= next_check:
                next_check = time.monotonic() + pause_s
                place.lease.check()

        return waiting

    def reclaim(self, save: Save, failure: Failed) -> None:
        """Remove the leftovers of a failed save, for all ranks or for this one."""
        if save.world_size == 1:
            commit.reclaim(self._primary.storage, save)
        else:
            self._give_up(save, failure)

    def _failure(self, save: Save | Refuse, error: Exception) -> Failed:
        reason = error.reason if isinstance(error, coordination.GivenUp) else error
        return protocol.failure(self._attempt, save.save_id, reason)

    def refuse(self, request: Refuse) -> None:
        """Tell the other ranks that this one will not take part in a save."""
        failure = Failed(
            attempt=self._attempt,
            save_id=request.save_id,
            error=request.error,
            message=request.message,
            errno=request.errno,
            path=request.path,
        )
        self._give_up(request, failure)
        self._post(jobs.RefusalEnded(request.save_id, failure))

    def _give_up(self, save: Save | Refuse, failure: Failed) -> Failed:
        """Give a save up for all ranks, or tell rank 0; returns its failure, which another rank may have reported."""
        try:
            return failure if self._leave_to_next_session(save) else self._tell_given_up(save, failure)
        finally:
            self._leave_to_next_session(save)  # which may have come meanwhile, and has looked for leftovers before

    def _leave_to_next_session(self, save: Save | Refuse) -> bool:
        """Whether the run has been taken over; then nothing more of an incomplete save may appear in it."""
        storage, lease = self._primary.storage, self._primary.lease
        with contextlib.suppress(WriteError):
            lease.check()
        if not lease.lost:
            return False
        try:
            holder = current_holder(storage)
            if holder is None or holder.session == lease.session:  # it goes on without this daemon, or just ends
                return True
            if isinstance(save, Refuse) or commit.find_record(storage, save) is None:
                storage.remove_tree(coordination.partial_of(save))
            if save.rank == 0:
                coordination.forget_verdict(storage, save)
        except WriteError as error:
            logger.warning("left for the next start to clean: %s", error)
        return True

    def _tell_given_up(self, save: Save | Refuse, failure: Failed) -> Failed:
        storage, attempt = self._primary.storage, self._primary.attempt
        if save.rank:
            try:
                if isinstance(save, Save) and commit.find_record(storage, save) is not None:  # nobody can take it back
                    return dataclasses.replace(failure, error=CommitUnknownError.__name__)
                coordination.refuse(storage, save, failure, attempt)
            except coordination.GivenUp as error:
                return self._failure(save, error)
            except WriteError as error:
                logger.warning("rank 0 is not told that step %d failed here: %s", save.step, error)
            return failure
        tombstone = coordination.abort(storage, save, failure, attempt)
        coordination.forget_verdict(storage, save)
        self._others = frozenset(range(1, save.world_size))
        if tombstone is not None:
            self._tombstones.append((time.monotonic() + coordination.TOMBSTONE_S, tombstone))
        return failure

    def _remove_tombstone(self, name: str) -> None:
        try:
            self._primary.storage.remove_tree(name)
        except WriteError as error:
            logger.warning("left for the next start to clean: %s", error)

    def _remove_tombstones(self) -> None:
        """Remove this session's tombstones once the other ranks have seen them or left."""
        storage, session = self._primary.storage, self._primary.lease.session
        deadline = time.monotonic() + _FAREWELL_S * bool(self._tombstones)
        with contextlib.suppress(WriteError):
            while time.monotonic() < deadline and not self._others <= closed_ranks(storage, session):
                time.sleep(max(_FAREWELL_POLL_S, 5 * storage.round_trip_s))
            for name in storage.list_directory(""):
                parsed = manifest.parse_hidden_directory(name)
                if parsed and parsed[1].startswith(f"{session}-") and parsed[2] == "aborted":
                    self._remove_tombstone(name)

    def _persistently(self, save: Save, operation: Callable[[Save], T]) -> T:
        tries = 0
        while True:
            try:
                return operation(save)
            except CommitUnknownError:
                raise
            except NoSpaceError:
                if not (self.empty_trash(everything=True) or self._drop_one(save)):
                    raise
            except WriteError as error:
                if tries >= self._retries or error.errno not in TRANSIENT or self._primary.lease.lost:
                    raise
                delay_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 4.0 ** min(tries, 9))
                tries += 1
                self._on_retry(save)
                logger.warning("step %d is tried again in %g s: %s", save.step, delay_s, error)
                time.sleep(delay_s)
            save = dataclasses.replace(save, retry=True)

    # Places ----------------------------------------------------------------------------------------------------

    def _places(self) -> Iterator[Place]:
        """The directories that may hold checkpoints; raises if the fallback directory exists and cannot be opened."""
        yield self._primary
        if self._fallback is None and self._fallback_directory and os.path.isdir(self._fallback_directory):
            self._fallback = self._open_fallback()
        if self._fallback is not None:
            yield self._fallback

    def _get_fallback(self, refusal: WriteError) -> Place | None:
        """The place for what the run directory refuses; None if there is none, or it cannot be opened."""
        # Without the lease it is the next session's run: nothing of ours may appear there from now on.
        if isinstance(refusal, CommitUnknownError) or self._primary.lease.lost:
            return None
        if self._fallback is None and self._fallback_directory:
            try:
                self._fallback = self._open_fallback()
            except Exception as error:  # noqa: BLE001 - what the save failed of is the error to report
                logger.error("the fallback directory cannot be used: %s", error)
        return self._fallback

    # Deletion --------------------------------------------------------------------------------------------------

    def delete(self, request: Delete) -> None:
        """Make a checkpoint invisible; its bytes go when those who read it have had some time, and are done."""
        failure = None
        try:
            places = list(self._places())
            name = step_directory(request.step)
            names = [place.storage.list_directory("") for place in places]
            holding = [place for place, listing in zip(places, names, strict=True) if name in listing]
            for place in holding or [self._primary]:
                if isinstance(place.lease, LeaseFollower):  # rank 0's daemon does it for all
                    continue
                others = [other.storage for other in places if other is not place]
                trash = commit.delete(
                    place.storage,
                    place.lease,
                    request.step,
                    request.sequence,
                    others,
                    spare_read=request.spare_read,
                    rollbacks=rollback.read(self._primary.storage),
                )
                if trash is None:  # a save that was asked for later has taken its place, so it is gone
                    continue
                for entry in [entry for entry in list(self._trash) if entry[1:] == (place, trash)]:
                    self._trash.remove(entry)  # of what had this name before
                self._trash.append((time.monotonic() + TRASH_GRACE_S, place, trash))
            for place, listing in zip(places, names, strict=True):
                self._take_over_trash(place, listing)
        except CheckpointNotFoundError as error:
            if not request.retry:  # else the daemon before this one has done it
                failure = protocol.failure(self._attempt, request.save_id, error)
        except Exception as error:  # noqa: BLE001 - as above
            failure = protocol.failure(self._attempt, request.save_id, error)
        self._post(jobs.DeleteEnded(request.save_id, failure))

    def _drop_one(self, save: Save) -> bool:
        """Make room by the oldest checkpoint that the save may drop and nobody reads; whether there was one."""
        storage, lease = self._primary.storage, self._primary.lease
        if not isinstance(lease, Lease):  # rank 0's daemon deletes for all
            return False
        rollbacks = rollback.read(storage)
        for step in save.droppable:
            with contextlib.suppress(SidesaveError):  # it is gone, or being copied to the mirror
                trash = commit.delete(storage, lease, step, save.sequence, spare_read=True, rollbacks=rollbacks)
                if trash is not None:
                    storage.remove_tree(trash)
                    logger.warning("step %d is dropped unmirrored: step %d found no room", step, save.step)
                    return True
        return False

    def _take_over_trash(self, place: Place, names: Iterable[str]) -> None:
        """Schedule what an earlier session deleted while it was read, like this session's own."""
        known = {name for _, other, name in list(self._trash) if other is place}
        for name in names:
            hidden = manifest.parse_hidden_directory(name)
            if isinstance(place.lease, Lease) and hidden is not None and hidden[2] == "trash" and name not in known:
                self._trash.append((time.monotonic() + TRASH_GRACE_S, place, name))

    def empty_trash(self, *, everything: bool = False) -> bool:
        """Remove the bytes of deleted checkpoints that are due and that nobody reads; returns whether some were."""
        removed = False
        if everything:
            for place in filter(None, (self._primary, self._fallback)):
                with contextlib.suppress(WriteError):
                    self._take_over_trash(place, place.storage.list_directory(""))
        for _ in range(len(self._trash)):
            try:
                due_s, place, name = self._trash.popleft()
            except IndexError:  # of several ranks the thread that commits may need the room as well
                break
            try:
                if (due_s > time.monotonic() and not everything) or commit.is_read(place.storage, name):
                    self._trash.append((due_s, place, name))
                else:
                    place.storage.remove_tree(name)
                    removed = True
            except WriteError as error:
                logger.warning("left for the next start to clean: %s", error)
        return removed

    def close(self) -> None:
        """Remove what was deleted, and let the next session into the fallback directory.

        What is still read is left to that session, and never waited for.
        """
        self.empty_trash(everything=True)
        if isinstance(self._primary.lease, Lease):
            self._remove_tombstones()
        if self._fallback is not None:
            self._fallback.lease.release()
