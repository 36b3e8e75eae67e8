"""The directories that a daemon may write to: the run, and the fallback directory if it is needed.

Opening one takes its lease and recovers what dead sessions have left.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from sidesave.errors import CommitUnknownError, SidesaveError, WriteError
from sidesave.writer_daemon.checkpoints.catalog import Catalog
from sidesave.writer_daemon.checkpoints.deletion import Trash
from sidesave.writer_daemon.commit.recovery import Recovery, recover
from sidesave.writer_daemon.format import fallbacks
from sidesave.writer_daemon.lease.follower import LeaseFollower
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.lease.observer import current_holder
from sidesave.writer_daemon.lease.record import LeaseRecord
from sidesave.writer_daemon.protocol import Boot
from sidesave.writer_daemon.storage import PosixStorage, Storage, urls
from sidesave.writer_daemon.storage.posix import make_run_directory
from sidesave.writer_daemon.writing.writer import Writer

logger = logging.getLogger(__name__)

_LAST_SLICE_S: Final = 0.3
"""Seconds for removing bytes of deleted checkpoints at the end, before the lease is released."""


@dataclass(frozen=True, slots=True)
class LeasedDirectory:
    """A directory that this daemon, or rank 0's, holds."""

    storage: Storage
    lease: Lease | LeaseFollower
    writer: Writer
    attempt: str
    catalog: Catalog = field(init=False)
    trash: Trash = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "catalog", Catalog(self.storage.root, storage=self.storage))
        object.__setattr__(self, "trash", Trash(self.storage))


def open_run(
    boot: Boot, keep_waiting: Callable[[], bool], trainer_gone: threading.Event
) -> tuple[LeasedDirectory, Recovery]:
    """Open the run directory; raises ``SidesaveError``. Only rank 0 takes the lease and recovers.

    ``keep_waiting`` ends the wait for the lease, ``trainer_gone`` the wait for staged memory.
    """
    name = f"{boot.attempt}-{os.getpid()}"
    if boot.world_size > 1:  # on another host another daemon may have this pid
        name = f"{boot.rank}-{name}"
    if urls.is_url(boot.directory):
        urls.remember(boot.directory, urls.decode_options(boot.storage_options))
    storage, options = urls.open_for_writing(boot.directory), boot.options
    if boot.resumes and current_holder(storage) is None:
        text = (
            "this is not the directory that the run began in (it has no lease): put that back, or "
            "restart"
        )
        raise WriteError(errno.ENOENT, text, boot.directory)
    recovery = Recovery((), (), ())
    lease: Lease | LeaseFollower
    if boot.rank == 0:
        holder = LeaseRecord.current(boot.session, boot.trainer_pid)
        lease = Lease(
            storage, holder, options.takeover_timeout_s, keep_waiting, resumes=boot.resumes
        )
        try:
            recovery = recover(storage, lease, name, alone=boot.world_size == 1)
        except SidesaveError:
            lease.release(final=False)
            raise
    else:
        lease = LeaseFollower(storage, boot.session, boot.rank)
    writer = Writer(storage, name, trainer_gone, lease.check, options.commit_timeout_s)
    return LeasedDirectory(storage, lease, writer, name), recovery


def open_fallback(
    boot: Boot, run: Storage, keep_waiting: Callable[[], bool], trainer_gone: threading.Event
) -> LeasedDirectory:
    """Open the fallback directory of ``run``, creating it if needed."""
    name, options = f"{boot.attempt}-{os.getpid()}", boot.options
    make_run_directory(boot.fallback_directory)
    storage = PosixStorage(boot.fallback_directory)
    holder = LeaseRecord.current(boot.session, boot.trainer_pid)
    with contextlib.ExitStack() as undo:  # the next save tries again
        undo.callback(storage.close)
        lease = Lease(storage, holder, options.takeover_timeout_s, keep_waiting)
        undo.callback(lease.release)
        recover(storage, lease, name)
        fallbacks.mark_used(boot.directory)
        undo.pop_all()
    writer = Writer(storage, name, trainer_gone, lease.check, options.commit_timeout_s, run)
    return LeasedDirectory(storage, lease, writer, name)


class Directories:
    """The run directory and, once it is used or has checkpoints, the fallback directory."""

    def __init__(
        self,
        run: LeasedDirectory,
        fallback_path: str,
        open_fallback: Callable[[], LeasedDirectory],
    ) -> None:
        """Start with ``run``; ``open_fallback`` opens ``fallback_path``, if that is not empty."""
        self.run: Final = run
        self.fallback_path: Final = fallback_path
        self._open_fallback = open_fallback
        self._fallback: LeasedDirectory | None = None

    def all(self) -> Iterator[LeasedDirectory]:
        """Yield the directories that may hold checkpoints.

        Raises if an existing fallback directory cannot be opened.
        """
        yield self.run
        if self._fallback is None and self.fallback_path and os.path.isdir(self.fallback_path):
            self._fallback = self._open_fallback()
        if self._fallback is not None:
            yield self._fallback

    def fallback_after(self, refusal: WriteError) -> LeasedDirectory | None:
        """Return the fallback directory for a save that the run directory has refused.

        Returns None without one, or if it cannot be opened.
        """
        # Without the lease the run, and its fallback, belong to the next session.
        if isinstance(refusal, CommitUnknownError) or self.run.lease.lost:
            return None
        if self._fallback is None and self.fallback_path:
            try:
                self._fallback = self._open_fallback()
            except Exception as error:  # noqa: BLE001 - report the original error of the save
                logger.error("the fallback directory cannot be used: %s", error)
        return self._fallback

    @property
    def _opened(self) -> list[LeasedDirectory]:
        return [self.run] if self._fallback is None else [self.run, self._fallback]

    # Bytes of deleted checkpoints -----------------------------------------------------------------

    def empty_trash(self, *, within_s: float = math.inf, everything: bool = False) -> bool:
        """Remove the bytes of deleted checkpoints that are due and not being read.

        Returns whether some were. Needs no lease: no other session uses the names.
        """
        removed = [
            place.trash.empty(within_s=within_s, everything=everything) for place in self._opened
        ]
        return any(removed)

    @property
    def has_trash(self) -> bool:
        """Whether bytes of deleted checkpoints are left."""
        return any(len(place.trash) for place in self._opened)

    @property
    def is_removing(self) -> bool:
        """Whether a thread is removing bytes of a deleted checkpoint now."""
        return any(place.trash.removing for place in self._opened)

    def adopt_trash(self) -> None:
        """Find the checkpoints that were replaced, or deleted by an earlier session."""
        for place in self._opened:
            if isinstance(place.lease, Lease) and not place.lease.lost:
                # Otherwise the next session owns the rest.
                with contextlib.suppress(WriteError):  # the next session finds it
                    place.trash.adopt()

    def empty_last_trash(self) -> None:
        """Remove bytes of deleted checkpoints for a short time; in a store all, as the log changes.

        :meth:`empty_trash` removes the rest without the lease.
        """
        self.adopt_trash()
        for place in self._opened:
            within_s = math.inf if place.storage.fences else _LAST_SLICE_S
            place.trash.empty(everything=True, within_s=within_s)

    def close(self) -> None:
        """Release the fallback directory; the run directory is its owner's."""
        if self._fallback is not None:
            self._fallback.lease.release()
