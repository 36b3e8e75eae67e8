"""The daemon's storage operations, executed one after another; each ends in an event.

They run in one thread, so that the loop answers while storage hangs. A temporary failure is
retried. After a permanent one the save goes to the fallback directory, if there is one; any other
error fails the save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import math
import os
import time
from collections.abc import Callable
from typing import Final, TypeVar

from sidesave.errors import (
    CommitUnknownError,
    NoSpaceError,
    ProtocolError,
    SidesaveError,
    WriteError,
)
from sidesave.stager.memory.arena import Arena
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.checkpoints.deletion import delete_steps, failure_messages
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.commit import attempts, commit, coordination
from sidesave.writer_daemon.commit.given_up import GivenUpSaves
from sidesave.writer_daemon.format import rollback
from sidesave.writer_daemon.format.manifest import RankRecord
from sidesave.writer_daemon.format.names import step_directory
from sidesave.writer_daemon.lease.follower import LeaseFollower
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.process import jobs
from sidesave.writer_daemon.process.directories import Directories, LeasedDirectory
from sidesave.writer_daemon.protocol import Delete, Failed, Refuse, Save

T = TypeVar("T")

logger = logging.getLogger(__name__)

TRANSIENT: Final = frozenset(
    {
        errno.EIO,
        errno.EAGAIN,
        errno.EINTR,
        errno.EBUSY,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.EMFILE,
        errno.ENFILE,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EREMOTEIO,
        errno.ENOLCK,
        errno.ENOLINK,
        errno.ECONNRESET,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENETRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
    }
)
"""Errors that may disappear within a second: not a full disk, a quota, a missing permission."""
FIRST_BACKOFF_S: Final = 0.25
"""Pause before the first retry; multiplied by four for each further one."""
MAX_BACKOFF_S: Final = 30.0
"""The longest pause, since later saves wait too."""
_CHECK_LEASE_S: Final = 2.0
"""Interval between checks of the lease while waiting for other ranks; longer on slow storage."""


class StorageWorker:
    """Writes, commits and deletes. Every method blocks.

    The storage thread calls them; with several ranks, another thread calls :meth:`commit`.
    """

    def __init__(
        self,
        attempt: int,
        directories: Directories,
        retries: int,
        on_retry: Callable[[Save], None],
        post: Callable[[jobs.Event], None],
        commit_timeout_s: float = math.inf,
    ) -> None:
        """Work in ``directories``.

        Waits up to ``commit_timeout_s`` for other ranks. ``on_retry`` is called in the storage
        thread with a save that is about to be retried.
        """
        self._commit_timeout_s = commit_timeout_s
        self._written: dict[int, float] = {}
        self._attempt = attempt
        self._directories = directories
        self._run = run = directories.run
        self._given_up = GivenUpSaves(run.storage, run.lease, run.attempt)
        self._retries = retries
        self._on_retry = on_retry
        self._post = post
        self._committed: dict[int, tuple[str, CheckpointInfo]] = {}

    # Saves ----------------------------------------------------------------------------------------

    def write(self, save: Save, arena: Arena | None) -> None:
        """Make a save durable from ``arena``, or adopt files that an earlier daemon has written."""
        started = time.monotonic()
        try:
            try:
                write = (
                    self._adopt
                    if arena is None
                    else functools.partial(self._write_to, self._run, arena)
                )
                record = self._persistently(save, write)
            except WriteError as error:
                fallback = None if arena is None else self._directories.fallback_after(error)
                if arena is None or fallback is None:
                    raise
                logger.warning("step %d goes to %s: %s", save.step, fallback.storage.root, error)
                record = self._write_to(fallback, arena, save)
        except Exception as error:  # noqa: BLE001 - must fail one save, not the daemon
            failure = self._failure(save, error)
            if save.world_size > 1 and not isinstance(error, CommitUnknownError):
                failure = self._given_up.add(save, failure)
            self._post(jobs.WriteEnded(save.save_id, 0, 0.0, failure))
        else:
            if save.rank:
                self._written[save.save_id] = time.monotonic()
            self._post(jobs.WriteEnded(save.save_id, record.nbytes, time.monotonic() - started))

    def _write_to(self, place: LeasedDirectory, arena: Arena, save: Save) -> RankRecord:
        def progressed(nbytes: int, total: int) -> None:
            self._post(jobs.Progressed(save.save_id, nbytes, total))

        try:
            record = commit.find_record(place.storage, save) if save.retry else None
            if record is None:
                if save.rank == 0:  # deletes for all ranks; without its record there is no commit
                    commit.refuse_taken(place.storage, save)
                record = place.writer.write(save, arena, progressed, self._waiting(place, save))
            if self._directories.fallback_path:  # if the commit fails, memory is still held
                self._committed[save.save_id] = self._commit_in(place, save)
        except CommitUnknownError:
            raise
        except BaseException as error:
            # Rank 0 may commit the record and rename the directory before it is synced here.
            is_renamed = save.rank and isinstance(error, WriteError) and error.errno == errno.ENOENT
            record = commit.find_record(place.storage, save) if is_renamed else None
            if record is None:
                if save.world_size == 1:
                    commit.reclaim(place.storage, save)
                raise
        return record

    def _adopt(self, save: Save) -> RankRecord:
        for place in self._directories.all():
            record = commit.find_record(place.storage, save)
            if record is not None:
                if place is not self._run:
                    self._committed[save.save_id] = self._commit_in(place, save)
                return record
        if save.world_size > 1:
            attempts.refuse_aborted(self._run.storage, save)
            text = f"step {save.step} was written, but its outcome is no longer visible"
            raise CommitUnknownError(errno.ENOENT, text, self._run.storage.root)
        raise ProtocolError(
            f"step {save.step} was reported as written, but its record does not exist"
        )

    def commit(self, save: Save) -> None:
        """Give a written save its name."""
        try:
            done = self._committed.pop(save.save_id, None)
            name, info = done or self._persistently(
                save, functools.partial(self._commit_in, self._run)
            )
        except Exception as error:  # noqa: BLE001 - as above
            failure = self._failure(save, error)
            if isinstance(self._run.lease, LeaseFollower):
                if isinstance(error, WriteError):  # its part is durable: rank 0 may commit it
                    failure = dataclasses.replace(failure, error=CommitUnknownError.__name__)
            elif not self._run.lease.lost or self._run.storage.fences:
                # Otherwise the run is another session's.
                if not isinstance(error, CommitUnknownError):
                    self.reclaim(save, failure)
                elif save.world_size > 1:  # the step has its name
                    coordination.forget_verdict(self._run.storage, save)
            self._post(jobs.CommitEnded(save.save_id, error=failure))
        else:
            self._post(jobs.CommitEnded(save.save_id, name, info))
        self._written.pop(save.save_id, None)

    def _commit_in(self, place: LeasedDirectory, save: Save) -> tuple[str, CheckpointInfo]:
        name = step_directory(save.step)
        path = os.path.join(place.storage.root, name)
        if isinstance(place.lease, LeaseFollower):
            written = self._written.get(save.save_id, -math.inf)
            nbytes = coordination.await_commit(
                place.storage,
                save,
                self._commit_timeout_s,
                self._waiting(place, save),
                place.lease.check,
                written,
            )
            parent = None if save.parent is None else (save.parent.step, save.parent.session)
            return name, CheckpointInfo(
                save.step, path, nbytes, save.session, save.sequence, parent, save.created_s
            )
        records = None if save.world_size == 1 else lambda: self._await_records(place, save)
        info = commit.commit(place.storage, place.lease, save, place.attempt, records)
        if save.replace:
            self._directories.adopt_trash()
        if save.world_size > 1:
            coordination.forget_verdict(place.storage, save)
            self._given_up.forget_old()
        return name if place is self._run else path, info

    def _await_records(self, place: LeasedDirectory, save: Save) -> list[RankRecord]:
        return coordination.await_records(
            place.storage, save, self._commit_timeout_s, self._waiting(place, save)
        )

    def _waiting(self, place: LeasedDirectory, save: Save) -> Callable[[], None]:
        pause_s = max(_CHECK_LEASE_S, 100 * place.storage.round_trip_s)
        next_check = time.monotonic() + pause_s

        def waiting() -> None:
            nonlocal next_check
            self._post(jobs.Waited(save.save_id))  # storage answers, so this is not a stall
            if time.monotonic() >= next_check:
                next_check = time.monotonic() + pause_s
                place.lease.check()

        return waiting

    def reclaim(self, save: Save, failure: Failed) -> None:
        """Remove the leftovers of a failed save, for all ranks or for this one."""
        if save.world_size == 1:
            commit.reclaim(self._run.storage, save)
        else:
            self._given_up.add(save, failure)

    def _failure(self, save: Save | Refuse, error: Exception) -> Failed:
        reason = error.reason if isinstance(error, attempts.GivenUp) else error
        return protocol.failure(self._attempt, save.save_id, reason)

    def refuse(self, request: Refuse) -> None:
        """Report to the other ranks that this one will not take part in a save."""
        failure = Failed(
            attempt=self._attempt,
            save_id=request.save_id,
            error=request.error,
            message=request.message,
            errno=request.errno,
            path=request.path,
        )
        self._given_up.add(request, failure)
        self._post(jobs.RefusalEnded(request.save_id, failure))

    def _persistently(self, save: Save, operation: Callable[[Save], T]) -> T:
        tries = 0
        while True:
            try:
                return operation(save)
            except CommitUnknownError:
                raise
            except NoSpaceError:
                self._directories.adopt_trash()
                if not (self._directories.empty_trash(everything=True) or self._drop_one(save)):
                    raise
            except WriteError as error:
                if tries >= self._retries or error.errno not in TRANSIENT or self._run.lease.lost:
                    raise
                delay_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 4.0 ** min(tries, 9))
                tries += 1
                self._on_retry(save)
                logger.warning("step %d is tried again in %g s: %s", save.step, delay_s, error)
                time.sleep(delay_s)
            save = dataclasses.replace(save, retry=True)

    # Deletion -------------------------------------------------------------------------------------

    def delete(self, request: Delete) -> None:
        """Make checkpoints invisible; their bytes are removed after a grace and the last reader."""
        try:
            failures = self._delete(request)
        except Exception as error:  # noqa: BLE001 - as above
            failure = protocol.failure(self._attempt, request.save_id, error)
            self._post(jobs.DeleteEnded(request.save_id, failure))
        else:
            self._post(jobs.DeleteEnded(request.save_id, failures=failures))

    def _delete(self, request: Delete) -> tuple[Failed, ...]:
        places = list(self._directories.all())
        if isinstance(self._run.lease, LeaseFollower):  # rank 0's daemon does it for all
            return ()
        failures: dict[int, SidesaveError] = {}
        left = {*request.steps}
        for place in reversed(places):  # a step in no directory is reported for the primary one
            assert isinstance(place.lease, Lease)
            names = {*place.storage.list_directory("")}
            steps = [step for step in request.steps if step_directory(step) in names]
            left -= {*steps}
            if place is self._run:
                steps += sorted(left)
            if not steps:
                continue
            result = delete_steps(
                place.storage,
                place.lease,
                steps,
                request.sequence,
                catalog=place.catalog,
                others=[other.catalog for other in places if other is not place],
                rollbacks=rollback.read(self._run.storage),
                spare_read=request.spare_read,
            )
            place.trash.add(result.trash)
            place.trash.adopt()
            failures |= result.failures
        return failure_messages(self._attempt, request, failures)

    def _drop_one(self, save: Save) -> bool:
        """Delete the oldest droppable checkpoint that is not being read, to make room.

        Returns whether one was deleted.
        """
        storage, lease, catalog = self._run.storage, self._run.lease, self._run.catalog
        if not isinstance(lease, Lease):  # rank 0's daemon deletes for all
            return False
        rollbacks = rollback.read(storage)
        for step in save.droppable:
            with contextlib.suppress(SidesaveError):  # gone, or being copied to the mirror
                result = delete_steps(
                    storage,
                    lease,
                    [step],
                    save.sequence,
                    catalog=catalog,
                    rollbacks=rollbacks,
                    spare_read=True,
                )
                for name in result.trash:
                    storage.remove_tree(name)
                    logger.warning(
                        "step %d is dropped unmirrored: step %d found no room", step, save.step
                    )
                    return True
        return False

    def close(self) -> None:
        """Finish all but the removal of bytes that :meth:`Directories.empty_trash` may do later."""
        self._directories.empty_last_trash()
        self._given_up.close()
        self._directories.close()
