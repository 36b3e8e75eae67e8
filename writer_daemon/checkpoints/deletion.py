"""Deletion of checkpoints: a rename makes trash of them, and their bytes are removed later.

A reader that has opened a deleted checkpoint can go on: its bytes stay while a lock tells of a
reader, and for a grace where no locks do.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import logging
import math
import os
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from sidesave.errors import (
    CheckpointNotFoundError,
    IntegrityError,
    InvalidArgumentError,
    SidesaveError,
    WriteError,
)
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.checkpoints.catalog import Catalog
from sidesave.writer_daemon.checkpoints.info import (
    CheckpointInfo,
    no_such_step,
    peek_head,
    read_checkpoint,
)
from sidesave.writer_daemon.format.manifest import MANIFEST
from sidesave.writer_daemon.format.names import (
    hidden_directory,
    parse_hidden_directory,
    parse_step_directory,
    step_directory,
)
from sidesave.writer_daemon.format.rollback import Rollbacks
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.protocol import Delete, Failed
from sidesave.writer_daemon.storage import Storage

logger = logging.getLogger(__name__)

GRACE_S: Final = 30.0
"""How long the bytes of a deleted checkpoint stay for readers that have opened it."""


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """The outcome of a batch: the trash it has made, and an error for each step that stays."""

    trash: list[str] = field(default_factory=list[str])
    failures: dict[int, SidesaveError] = field(default_factory=dict[int, SidesaveError])


def delete_steps(
    storage: Storage,
    lease: Lease,
    steps: Sequence[int],
    before: int,
    *,
    catalog: Catalog | None = None,
    others: Iterable[Catalog] = (),
    rollbacks: Rollbacks = Rollbacks(),  # noqa: B008 - it is frozen
    spare_read: bool = False,
) -> DeleteResult:
    """Make steps disappear, each by one rename, and durably: with one sync for all of them.

    A step that this session has saved again after the sequence ``before`` counts as deleted, and is
    left alone. The latest checkpoint of the run is refused, as it may be the last good one.

    Args:
        storage: The place.
        lease: Its lease, which is checked before each rename.
        steps: The steps to delete.
        before: The sequence of the last save that was called before the deletion.
        catalog: The catalog of the place, if the caller keeps one.
        others: The catalogs of the other directories of the same run.
        rollbacks: Where the run has gone back.
        spare_read: Fail, with EBUSY, for a step that is being read.

    Raises:
        FormatVersionError: A checkpoint is in a newer format, so it is not known which one is the
            latest.
        WriteError: Storage refused, or did not confirm the renames.
    """
    catalog = catalog or Catalog(storage.root, storage=storage)
    listed = [
        (info, place)
        for place in (catalog, *others)
        for info in place.all(rollbacks=rollbacks, strict=True)
    ]
    here = {info.step: info for info, place in listed if place is catalog}
    latest = _latest(sorted(listed, key=lambda pair: pair[0].order, reverse=True))
    names = {*storage.list_directory("")}
    hidden = [parsed for name in names if (parsed := parse_hidden_directory(name)) is not None]
    replaced = {step for step, _, state in hidden if state == "replaced"}
    result, moves, has_hidden = DeleteResult(), dict[int, _Move](), False
    lease.check()
    for step in steps:
        try:
            if _may_be_deleted(
                storage, step, names, here.get(step), latest, (lease.session, before)
            ):
                if step in replaced:
                    has_hidden |= hide_replaced(storage, {step}, names)
                moves[step] = _Move(
                    step_directory(step), _free_trash(step, lease.session, names), here.get(step)
                )
        except SidesaveError as error:
            result.failures[step] = error
    if has_hidden:
        storage.sync_directory("")  # or a power loss might keep what was replaced, and not the step
    if moves:
        result.trash.extend(_rename(storage, lease, moves, result.failures, spare_read=spare_read))
        storage.sync_directory("")
    return result


@dataclass(frozen=True, slots=True)
class _Move:
    """A step to be deleted: its name, its name as trash, and its checkpoint, None if damaged."""

    name: str
    trash: str
    info: CheckpointInfo | None

    def was_replaced(self, storage: Storage) -> bool:
        """Return whether the step was saved again since.

        With several ranks a commit may end between the renames.
        """
        if self.info is None:
            return False
        try:
            head = peek_head(storage, self.name)
        except (IntegrityError, WriteError):
            return False
        return (head.session, head.sequence) != (self.info.session, self.info.sequence)


def _latest(latest_first: Iterable[tuple[CheckpointInfo, Catalog]]) -> list[CheckpointInfo]:
    """Return the latest checkpoints of two steps, read again: catalogs miss damaged manifests."""
    latest: list[CheckpointInfo] = []
    for info, place in latest_first:
        with contextlib.suppress(CheckpointNotFoundError, IntegrityError, WriteError):
            place.read(os.path.basename(info.path))
            latest.append(info)
        if len({each.step for each in latest}) == 2:
            break
    return latest


def failure_messages(
    attempt: int, request: Delete, failures: Mapping[int, SidesaveError]
) -> tuple[Failed, ...]:
    """Return the failures of DELETED.

    A missing step counts as deleted if an earlier daemon may have deleted it.
    """
    return tuple(
        replace(protocol.failure(attempt, request.save_id, error), step=step)
        for step, error in failures.items()
        if not (request.retry and isinstance(error, CheckpointNotFoundError))
    )


def _may_be_deleted(
    storage: Storage,
    step: int,
    names: set[str],
    info: CheckpointInfo | None,
    latest: Sequence[CheckpointInfo],
    mark: tuple[str, int],
) -> bool:
    """Return whether there is something to delete; raise the reason why a step has to stay."""
    name = step_directory(step)
    if name not in names:
        there = [parsed for each in names if (parsed := parse_step_directory(each)) is not None]
        raise CheckpointNotFoundError(
            errno.ENOENT, no_such_step(step, there), f"{storage.root}/{name}"
        )
    if info is None:
        # it is damaged, and may go
        with contextlib.suppress(CheckpointNotFoundError, IntegrityError):
            info = read_checkpoint(storage, name)
    session, before = mark
    if info is not None and info.session == session and info.sequence > before:
        return False
    rival = next((other for other in latest if other.step != step), None)
    if rival is None or (info is not None and rival.order <= info.order):
        raise InvalidArgumentError(
            f"step {step} is the newest checkpoint; it can be deleted once a newer one is there"
        )
    return True


def _rename(
    storage: Storage,
    lease: Lease,
    moves: Mapping[int, _Move],
    failures: dict[int, SidesaveError],
    *,
    spare_read: bool,
) -> Generator[str]:
    """Make trash of steps; yields the names. An error is that of its step."""
    if storage.fences:  # no look at the lease is needed, and there are no locks
        storage.rename_directories({move.name: move.trash for move in moves.values()})
        yield from (move.trash for move in moves.values())
        return
    for step, move in moves.items():
        try:
            with _unread(storage, move.name) if spare_read else contextlib.nullcontext():
                lease.check()  # before each: after a takeover the step may be the next session's
                if move.was_replaced(storage):
                    continue
                storage.rename_directory(move.name, move.trash)
        except SidesaveError as error:
            failures[step] = error
        else:
            yield move.trash


@contextlib.contextmanager
def _unread(storage: Storage, name: str) -> Generator[None]:
    """Lock readers out of a checkpoint for a moment, as far as locks work.

    Raises ``WriteError`` (EBUSY) if the checkpoint is being read.
    """
    unlock = None
    try:
        unlock = storage.lock(f"{name}/{MANIFEST}")
    except WriteError as error:
        if error.errno == errno.EAGAIN:
            raise WriteError(
                errno.EBUSY, "the checkpoint is being read", f"{storage.root}/{name}"
            ) from error
        # it is damaged, or the system has no locks
        logger.debug("%s cannot be locked: %s", name, error)
    try:
        yield
    finally:
        if unlock is not None:
            unlock()


def hide_replaced(storage: Storage, steps: set[int], names: set[str]) -> bool:
    """Make trash of what saves of steps have replaced; return whether there was something.

    Without the step it would be taken for it, also if it was removed in part. ``names`` are those
    of the place.
    """
    found = False
    for name in list(names):
        hidden = parse_hidden_directory(name)
        if hidden is not None and hidden[0] in steps and hidden[2] == "replaced":
            storage.rename_directory(name, _free_trash(hidden[0], hidden[1], names))
            found = True
    return found


def _free_trash(step: int, attempt: str, names: set[str]) -> str:
    """Take a free name for a step to be removed; an earlier one's trash may still be read."""
    further = (f"{attempt.partition('-')[0]}-{number}" for number in itertools.count())
    candidates = (
        hidden_directory(step, each, "trash") for each in itertools.chain([attempt], further)
    )
    name = next(name for name in candidates if name not in names)
    names.add(name)
    return name


# The bytes ----------------------------------------------------------------------------------------


def is_read(storage: Storage, directory: str) -> bool:
    """Return whether a process of this machine reads a checkpoint, even under another name.

    False also if unknown: on network file systems, or if storage fails.
    """
    try:
        return bool(storage.is_shared(f"{directory}/{MANIFEST}"))
    except WriteError:
        return False


def is_trash(name: str) -> bool:
    """Return whether a directory is a deleted or replaced checkpoint, by its name."""
    hidden = parse_hidden_directory(name)
    return hidden is not None and hidden[2] == "trash"


class Trash:
    """The deleted checkpoints of one place whose bytes are still there. Thread-safe."""

    def __init__(self, storage: Storage) -> None:
        """Start empty."""
        self._storage = storage
        self._entries: collections.deque[tuple[float, str]] = collections.deque()
        self.removing = 0
        """The number of threads that are removing a checkpoint now."""
        self.error: WriteError | None = None
        """The last error of a removal, which is tried again after the grace."""

    def __len__(self) -> int:
        return len(self._entries) + self.removing

    def add(self, names: Iterable[str]) -> None:
        """Have directories removed after the grace."""
        due = time.monotonic() + GRACE_S
        self._entries.extend((due, name) for name in names)

    def adopt(self) -> None:
        """Add the place's unknown trash: steps replaced, or deleted by an earlier session."""
        known = {name for _, name in list(self._entries)}
        names = self._storage.list_directory("")
        self.add(name for name in names if is_trash(name) and name not in known)

    def clear(self) -> None:
        """Forget everything, and remove nothing."""
        self._entries.clear()

    def empty(self, *, within_s: float = math.inf, everything: bool = False) -> bool:
        """Remove what is due and not being read; return whether something was removed.

        Stops after about ``within_s`` seconds. With ``everything`` all of it is due. What cannot be
        removed is logged, and left to the next session.
        """
        removed, deadline = False, time.monotonic() + within_s
        for _ in range(len(self._entries)):
            try:
                due, name = self._entries.popleft()
            except IndexError:  # another thread needs the room as well
                break
            if (due > time.monotonic() and not everything) or is_read(self._storage, name):
                self._entries.append((due, name))
                continue
            self.removing += 1
            try:
                self._storage.remove_tree(name)
                removed = True
            except WriteError as error:
                self.error = error
                self.add([name])
                logger.warning("cannot be removed now, the next start tries again: %s", error)
            finally:
                self.removing -= 1
            if time.monotonic() >= deadline:
                break
        return removed

    def is_due(self) -> bool:
        """Return whether :meth:`empty` has something to do, readers aside."""
        return any(due <= time.monotonic() for due, _ in list(self._entries))
