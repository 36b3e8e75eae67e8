"""Recovery: plans what to do with leftovers of dead sessions when a session starts, then does it.

A partial directory whose records and bytes are all there and verify (read back from the medium)
becomes a checkpoint: its ranks were told that their bytes are durable. Everything else of dead
sessions is removed, except deleted checkpoints that are being read. A transient error of the
storage decides nothing: that leftover stays.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Collection, Generator, Iterable
from dataclasses import dataclass
from typing import Final

from sidesave.errors import IntegrityError, StateMismatchError, WriteError
from sidesave.writer_daemon.checkpoints.deletion import is_read, is_trash
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.commit import commit, coordination
from sidesave.writer_daemon.commit.manifest_builder import assemble
from sidesave.writer_daemon.format import integrity, manifest
from sidesave.writer_daemon.format.manifest import Manifest
from sidesave.writer_daemon.format.names import (
    attempt_name,
    hidden_directory,
    parse_hidden_directory,
    step_directory,
)
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.storage import Storage

logger = logging.getLogger(__name__)

_NOT_A_FILE: Final = (errno.EFBIG, errno.EISDIR, errno.ELOOP, errno.ENXIO)


@dataclass(frozen=True, slots=True)
class Recovery:
    """The outcome of a recovery: leftovers of dead sessions that were committed or removed."""

    committed: tuple[str, ...]
    removed: tuple[str, ...]
    left: tuple[str, ...] = ()
    """Leftovers that storage refused to read, finish or remove: the next start tries again."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A hidden directory of a dead session, with what its name says."""

    name: str
    step: int
    attempt: str
    state: str

    @property
    def target(self) -> str:
        """The directory name of its step."""
        return step_directory(self.step)

    @property
    def is_save(self) -> bool:
        """Whether it is a save that may be complete."""
        return self.state == "partial" or self.state.startswith("salvage")

    @property
    def original_name(self) -> str:
        """Its name before any recovery renamed it."""
        return hidden_directory(self.step, self.attempt, "partial") if self.is_save else self.name


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """The operations of a recovery, before any of them is executed.

    Attributes:
        commits: Complete saves with their manifests, in the order in which they are committed.
        rest: Leftovers to rename back or to remove; :func:`_sort_rest` tells which.
        trash: Deleted checkpoints that are not being read.
        undecided: Leftovers that cannot be read or renamed now, so they stay.
        names: The names in the run directory.
    """

    commits: list[tuple[Leftover, Manifest]]
    rest: list[Leftover]
    trash: list[str]
    undecided: list[str]
    names: frozenset[str]

    def expected(self) -> Recovery:
        """Return the outcome if every operation succeeds."""
        committed = [leftover.target for leftover, _ in self.commits]
        restored, removed = _sort_rest(self.rest, self.names.union(committed))
        return Recovery(
            committed=(*committed, *(leftover.target for leftover in restored)),
            removed=(*_reported(removed), *self.trash),
            left=tuple(self.undecided),
        )


def recover(storage: Storage, lease: Lease, attempt: str, *, alone: bool = True) -> Recovery:
    """Plan a recovery and execute it; blocking, under the lease.

    ``alone`` is False in a session of several ranks.
    """
    lease.check(ask=True)  # a daemon that has lost the lease must not keep its holder out
    storage.take_over(lease.session)
    storage.sync_directory("")  # a dead daemon's renames count from here on, and outlive power loss
    names = storage.list_directory("")
    saves = [leftover for leftover in _leftovers(names, lease.session) if leftover.is_save]
    undecided = _set_apart(storage, lease, saves)
    if saves:
        names = storage.list_directory("")
    plan = plan_recovery(storage, lease.session, names, undecided)
    recovery = _execute(storage, lease, plan, attempt)
    lease.check()
    if not recovery.left:
        storage.settle(alone=alone)
    return recovery


# The plan -----------------------------------------------------------------------------------------


def plan_recovery(
    storage: Storage, session: str, names: Iterable[str], undecided: Collection[str] = ()
) -> RecoveryPlan:
    """Read and verify the leftovers among ``names``, without a change.

    Those in ``undecided`` are not read.
    """
    plan = RecoveryPlan([], [], [], [*undecided], frozenset(names))
    planned: dict[str, CheckpointInfo] = {}
    for leftover in _leftovers(plan.names, session):
        if leftover.name in undecided:
            continue
        if is_trash(leftover.name):
            if is_read(storage, leftover.name):
                logger.info("%s stays, as it is being read", leftover.name)
            else:
                plan.trash.append(leftover.name)
            continue
        content = None
        try:
            if leftover.is_save:
                content = _complete(storage, leftover, planned.get(leftover.target))
        except (IntegrityError, StateMismatchError) as error:
            logger.warning("%s is incomplete and cannot be committed: %s", leftover.name, error)
        except WriteError as error:
            logger.warning("%s stays until it can be read: %s", leftover.name, error)
            plan.undecided.append(leftover.name)
            continue
        if content is None:
            plan.rest.append(leftover)
        else:
            plan.commits.append((leftover, content))
            planned[leftover.target] = CheckpointInfo.of(content, leftover.target)
    return plan


def _leftovers(names: Iterable[str], session: str) -> list[Leftover]:
    """Return the leftovers of other sessions.

    Ranks of this session may be alive, though their daemon died.
    """
    leftovers: list[Leftover] = []
    for name in sorted(names):
        if (parsed := parse_hidden_directory(name)) is None:
            continue
        leftover = Leftover(name, *parsed)
        is_own = leftover.attempt.startswith(f"{session}-")
        if not (is_own and leftover.state in ("partial", "aborted", *coordination.VERDICTS)):
            leftovers.append(leftover)
    return leftovers


def _complete(
    storage: Storage, leftover: Leftover, planned: CheckpointInfo | None
) -> Manifest | None:
    """Return the manifest of a complete save, or None if it is not to be committed.

    It is not if it lacks a record, or if a later save of its step exists. ``planned`` is the
    checkpoint that the plan commits as this step so far. Raises ``IntegrityError`` or
    ``StateMismatchError`` if the files do not verify.
    """
    try:
        count = sum(name.startswith("rank-") for name in storage.list_directory(leftover.name))
        records = [commit.read_own_record(storage, leftover.name, rank) for rank in range(count)]
    except WriteError as error:
        if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
            raise IntegrityError(f"no directory of files: {error}") from error
        raise
    whole = [record for record in records if record is not None]
    if not whole or len(whole) != whole[0].world_size:
        return None
    first = whole[0]
    identity = attempt_name(first.session, first.sequence, first.world_size)
    if (first.step, identity) != (leftover.step, leftover.attempt):
        return None
    existing = planned or commit.find_committed(storage, leftover.target)
    if existing is not None and existing.position > (
        first.sequence,
        first.created_s,
        first.session,
    ):
        return None
    for record in whole:
        for fault in integrity.check_record(storage, leftover.name, record):
            raise IntegrityError(str(fault))
    return assemble(whole, f"{storage.root}/{leftover.name}")


def _sort_rest(
    leftovers: Iterable[Leftover], names: Collection[str]
) -> tuple[list[Leftover], list[Leftover]]:
    """Return what to rename back, and what to remove.

    A save is renamed back if the one that was to replace it never came.
    """
    back: dict[str, Leftover] = {}
    removed: list[Leftover] = []
    for leftover in leftovers:
        if (
            leftover.state == "replaced"
            and leftover.target not in names
            and leftover.target not in back
        ):
            back[leftover.target] = leftover
        else:
            removed.append(leftover)
    return [*back.values()], removed


def _reported(leftovers: Iterable[Leftover]) -> list[str]:
    """Return the names of removed leftovers; the verdicts of ranks are no saves."""
    return [each.original_name for each in leftovers if each.state not in coordination.VERDICTS]


# Its execution ------------------------------------------------------------------------------------


def _set_apart(storage: Storage, lease: Lease, saves: Iterable[Leftover]) -> list[str]:
    """Rename leftovers before all else; return those that cannot be renamed.

    A daemon that has lost the lease, and does not know it yet, then finds nothing to commit.
    """
    apart: set[str] = set()
    left: list[str] = []
    for leftover in saves:
        place = hidden_directory(leftover.step, leftover.attempt, f"salvage-{lease.epoch}")
        if place in apart:  # not judged by an earlier recovery, and written again
            place += f"-{len(apart)}"
        try:
            storage.rename_directory(leftover.name, place)
            apart.add(place)
        except WriteError as error:
            if error.errno != errno.ENOENT:  # else that daemon was faster
                logger.warning("%s stays until it can be renamed: %s", leftover.name, error)
                left.append(leftover.name)
    return left


def _execute(storage: Storage, lease: Lease, plan: RecoveryPlan, attempt: str) -> Recovery:
    """Do what a plan says; what storage refuses is left to the next start."""
    committed: list[str] = []
    removed: list[str] = []
    left = [*plan.undecided]
    unfinished: set[int] = set()
    for leftover, content in plan.commits:
        unfinished.add(leftover.step)
        with _leaving(left, leftover.name, "finished"):
            _finish(storage, lease, leftover, content, attempt)
            committed.append(leftover.target)
            unfinished.remove(leftover.step)
    back, others = _sort_rest(plan.rest, storage.list_directory("")) if plan.rest else ([], [])
    for leftover in back:
        with _leaving(left, leftover.name, "renamed"):
            storage.rename_directory(leftover.name, leftover.target)
            committed.append(leftover.target)
    for leftover in others:
        if leftover.is_save and leftover.step in unfinished:
            left.append(leftover.name)  # until the later save of its step is committed
            continue
        with _leaving(left, leftover.name, "removed"):
            storage.remove_tree(leftover.name)
            removed += _reported([leftover])
    if plan.commits or plan.trash:
        for name in filter(is_trash, storage.list_directory("")):  # also what a commit replaced
            if is_read(storage, name):
                continue
            with _leaving(left, name, "removed"):
                storage.remove_tree(name)
                removed += [name] if name in plan.trash else []
    return Recovery(tuple(committed), tuple(removed), tuple(left))


@contextlib.contextmanager
def _leaving(left: list[str], name: str, done: str) -> Generator[None]:
    """Note a leftover that storage refuses to change, and go on."""
    try:
        yield
    except WriteError as error:
        logger.warning("%s stays until it can be %s: %s", name, done, error)
        left.append(name)


def _finish(
    storage: Storage, lease: Lease, leftover: Leftover, content: Manifest, attempt: str
) -> None:
    """Commit a complete save."""
    if not _holds(storage, f"{leftover.name}/{manifest.MANIFEST}", content.to_bytes()):
        storage.remove(f"{leftover.name}/{manifest.MANIFEST}")  # damaged, without readers
    commit.publish_manifest(storage, leftover.name, content, attempt)
    storage.open_to_readers(leftover.name)
    storage.sync_directory(leftover.name)
    # A step of that name is still there if the save was accepted as its replacement.
    commit.give_name(storage, lease, leftover.name, leftover.target, leftover.attempt, replace=True)


def _holds(storage: Storage, path: str, data: bytes) -> bool:
    """Return whether a file has exactly this content."""
    try:
        return storage.read(path, len(data)) == data
    except WriteError as error:
        if error.errno in _NOT_A_FILE:
            return False
        raise
