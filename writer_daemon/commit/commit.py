"""Commits a written checkpoint by one manifest and one rename; and at start deals with leftovers of dead sessions.

A checkpoint exists once its directory has the step's name. Everything in it is durable before. Order of a commit:
records read and checked, manifest published, directory synced, lease checked, directory renamed, parent synced.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass

from sidesave.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    IntegrityError,
    InvalidArgumentError,
    WriteError,
)
from sidesave.writer_daemon.commit import coordination
from sidesave.writer_daemon.commit.manifest_builder import assemble
from sidesave.writer_daemon.format import integrity, manifest
from sidesave.writer_daemon.format.manifest import Manifest, RankRecord
from sidesave.writer_daemon.format.rollback import Rollbacks
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.protocol import Save
from sidesave.writer_daemon.storage import Storage

logger = logging.getLogger(__name__)


def find_record(storage: Storage, save: Save) -> RankRecord | None:
    """This rank's record of this save, left by an earlier daemon in the partial or committed directory."""
    for directory in (coordination.partial_of(save), manifest.step_directory(save.step)):
        record = _read_own_record(storage, directory, save.rank)
        if record is not None and (record.session, record.sequence) == (save.session, save.sequence):
            return record
    return None


def _read_own_record(storage: Storage, directory: str, rank: int) -> RankRecord | None:
    path = f"{directory}/{manifest.record_file(rank)}"
    data = storage.read(path, manifest.MAX_JSON_NBYTES)
    try:
        return None if data is None else RankRecord.from_bytes(data, path)
    except IntegrityError as error:
        logger.warning("ignoring a damaged record: %s", error)
        return None


def refuse_taken(storage: Storage, save: Save) -> None:
    """Raise ``CheckpointExistsError`` if a save's step exists and may not be replaced.

    To be called before a byte is written: recovery assumes that what has been written may take the name.
    """
    target = manifest.step_directory(save.step)
    if not save.replace and target in storage.list_directory(""):
        raise CheckpointExistsError(
            errno.EEXIST, "the step exists; save with overwrite=True to replace it", f"{storage.root}/{target}"
        )


def commit(
    storage: Storage,
    lease: Lease,
    save: Save,
    attempt: str,
    await_records: Callable[[], list[RankRecord]] | None = None,
) -> Manifest:
    """Commit a step all of whose records are durable; blocking. Doing it twice does no harm.

    Of several ranks ``await_records`` gives the records of all, or raises what one of them has refused with.

    Raises:
        CheckpointExistsError: The step is there, is not this save, and may not be replaced.
        CommitUnknownError: The step has its name, but storage did not confirm that it keeps it.
        IntegrityError: A record is missing or contradicts the save.
        WriteError: Storage refused.
    """
    partial = coordination.partial_of(save)
    target = manifest.step_directory(save.step)
    existing = _committed(storage, target)
    if existing is not None and (existing.session, existing.sequence) == (save.session, save.sequence):
        _keep_name(storage, target)
        return existing
    if existing is not None and existing.sequence > save.sequence:
        path = f"{storage.root}/{target}"
        raise CheckpointExistsError(errno.EEXIST, "a later save of this step has been committed", path)
    try:
        records = await_records() if await_records is not None else [_own_record(storage, partial, save)]
    except IntegrityError:
        lease.check(ask=True)  # who has taken over may have taken it away
        raise
    content = assemble(records, f"{storage.root}/{partial}")
    _publish_manifest(storage, partial, content, attempt)
    storage.open_to_readers(partial)
    storage.sync_directory(partial)
    give_name(storage, lease, partial, target, coordination.attempt_of(save), replace=save.replace)
    return content


def _own_record(storage: Storage, partial: str, save: Save) -> RankRecord:
    record = _read_own_record(storage, partial, save.rank)
    if record is None:
        raise IntegrityError(f"{storage.root}/{partial}: the rank's record is missing")
    if (record.step, record.session, record.sequence) != (save.step, save.session, save.sequence):
        raise IntegrityError(f"{storage.root}/{partial}: the record belongs to another save")
    return record


def _committed(storage: Storage, target: str) -> Manifest | None:
    try:
        if manifest.MANIFEST not in storage.list_directory(target):
            return None
    except WriteError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        return None  # a file or a link has the name
    try:
        return integrity.read_manifest(storage, target)
    except IntegrityError as error:
        logger.warning("%s", error)
        return None


def _checkpoints(storage: Storage) -> Iterator[Manifest]:
    """The committed checkpoints, highest step first, which is most often the newest."""
    names = (name for name in storage.list_directory("") if manifest.parse_step_directory(name) is not None)
    for name in sorted(names, reverse=True):
        content = _committed(storage, name)
        if content is not None:
            yield content


def _publish_manifest(storage: Storage, directory: str, content: Manifest, attempt: str) -> None:
    for name in storage.list_directory(directory):
        # Of a try that failed or was killed, perhaps of this name; or what ranks had to tell each other.
        if name.startswith((".", coordination.REPLICA_DIGEST)):
            storage.remove(f"{directory}/{name}")
    storage.publish_bytes(directory, manifest.MANIFEST, content.to_bytes(), attempt)


def give_name(storage: Storage, lease: Lease, partial: str, target: str, attempt: str, *, replace: bool) -> None:
    """Make a hidden directory, in which all is durable, the checkpoint ``target``, durably and under the lease.

    With ``replace`` it takes the place of one of that name. Raises as :func:`commit`.
    """
    storage.check_root()
    lease.check()
    step = manifest.parse_step_directory(target)
    assert step is not None
    replaced = manifest.hidden_directory(step, attempt, "replaced")
    if target in storage.list_directory(""):
        if not replace:
            raise CheckpointExistsError(
                errno.EEXIST, "the step exists; save with overwrite=True to replace it", f"{storage.root}/{target}"
            )
        storage.remove_tree(replaced)
        storage.exchange_directory(partial, target, replaced)
    else:
        storage.rename_directory(partial, target)
    _keep_name(storage, target)
    try:
        _remove_replaced(storage, step)
    except WriteError as error:
        logger.warning("left for the next start to clean: %s", error)


def _remove_replaced(storage: Storage, step: int) -> bool:
    """Remove what saves of a step that is there have replaced; whether there was something.

    Without the step it would be taken for it.
    """
    found = False
    for name in storage.list_directory(""):
        hidden = manifest.parse_hidden_directory(name)
        if hidden is not None and (hidden[0], hidden[2]) == (step, "replaced"):
            trash = _free_trash(storage, step, hidden[1])
            storage.rename_directory(name, trash)  # half removed it must not be taken for what it was
            storage.remove_tree(trash)
            found = True
    return found


def _keep_name(storage: Storage, target: str) -> None:
    """Make a step's name durable; never twice, since a second fsync reports nothing."""
    try:
        storage.sync_directory("")
    except WriteError as error:
        message = f"{target} is there, but whether it outlives a crash is not known: {error.strerror}"
        raise CommitUnknownError(error.errno, message, f"{storage.root}/{target}") from error


def delete(
    storage: Storage,
    lease: Lease,
    step: int,
    sequence: int,
    others: Iterable[Storage] = (),
    *,
    spare_read: bool = False,
    rollbacks: Rollbacks = Rollbacks(),  # noqa: B008 - it is frozen
) -> str | None:
    """Make a step disappear in one step, durably; returns the hidden directory that is to be removed later.

    None, and nothing is done, where this session has saved the step again after ``sequence``.

    Readers that have opened it can go on until then; :func:`is_read` tells of them. With ``spare_read`` there must be
    none. ``others`` are further run directories of the same run, and ``rollbacks`` says where it has gone back.

    Raises:
        CheckpointNotFoundError: There is no such step.
        InvalidArgumentError: It is the latest checkpoint, so it may be the last good one.
        WriteError: Storage refused.
    """
    target = manifest.step_directory(step)
    there = storage.list_directory("")
    if target not in there:
        steps = [parsed for name in there if (parsed := manifest.parse_step_directory(name)) is not None]
        raise CheckpointNotFoundError(errno.ENOENT, manifest.no_such_step(step, steps), f"{storage.root}/{target}")
    content = _committed(storage, target)
    if content is not None and content.session == lease.session and content.sequence > sequence:
        return None
    rest = (other for place in (storage, *others) for other in _checkpoints(place) if other.step != step)
    order = rollbacks.order
    if not any(content is None or order(other.sequence) > order(content.sequence) for other in rest):
        raise InvalidArgumentError(f"step {step} is the newest checkpoint; it can be deleted once a newer one is there")
    with _unread(storage, target) if spare_read else contextlib.nullcontext():
        lease.check()
        if _remove_replaced(storage, step):
            storage.sync_directory("")  # or a power loss might keep that, and not the step
        trash = _free_trash(storage, step, lease.session)
        storage.rename_directory(target, trash)
    storage.sync_directory("")
    return trash


@contextlib.contextmanager
def _unread(storage: Storage, target: str) -> Generator[None]:
    """Lock readers out of a checkpoint for a moment, as far as locks work; ``WriteError`` (EBUSY) if there are some."""
    unlock = None
    try:
        unlock = storage.lock(f"{target}/{manifest.MANIFEST}")
    except WriteError as error:
        if error.errno == errno.EAGAIN:
            raise WriteError(errno.EBUSY, "somebody reads this checkpoint", f"{storage.root}/{target}") from error
        logger.debug("%s cannot be locked: %s", target, error)  # it is damaged, or the system has no locks
    try:
        yield
    finally:
        if unlock is not None:
            unlock()


def _free_trash(storage: Storage, step: int, attempt: str) -> str:
    """A free name under which to remove a step; an earlier removed one may still be read."""
    further = (f"{attempt.partition('-')[0]}-{number}" for number in itertools.count())
    names = (manifest.hidden_directory(step, each, "trash") for each in itertools.chain([attempt], further))
    name = next(name for name in names if not is_read(storage, name))
    storage.remove_tree(name)
    return name


def is_read(storage: Storage, directory: str) -> bool:
    """Whether a process of this machine reads a checkpoint, even under another name.

    Also false if unknown: on network file systems, or if storage fails.
    """
    try:
        return bool(storage.is_shared(f"{directory}/{manifest.MANIFEST}"))
    except WriteError:
        return False


def reclaim(storage: Storage, save: Save) -> None:
    """Hide what a failed save left, and remove it; failures are only logged."""
    partial = manifest.hidden_directory(save.step, save.session, "partial")
    aborted = manifest.hidden_directory(save.step, save.session, "aborted")
    try:
        try:
            storage.remove_tree(aborted)
            if partial in storage.list_directory(""):
                storage.rename_directory(partial, aborted)
                storage.remove_tree(aborted)
        finally:
            if storage.has_passed_on():  # nobody would look for what has come since the next session began
                storage.remove_tree(partial)
    except OSError as error:
        logger.warning("left for the next start to clean: %s", error)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What the start of a session did with leftovers of dead sessions."""

    committed: tuple[str, ...]
    removed: tuple[str, ...]
    left: tuple[str, ...] = ()
    """What storage would not let it read, finish or remove: the next start tries again."""


def recover(storage: Storage, lease: Lease, attempt: str, *, alone: bool = True) -> Recovery:
    """Finish what is complete and remove what is not; blocking, under the lease. Of several ranks none is ``alone``.

    A partial directory whose records and bytes are all there and verify (read back from the medium) becomes a
    checkpoint: its ranks were told that their bytes are durable. Everything else of dead sessions goes, except deleted
    checkpoints that somebody still reads. Storage that fails for the moment is no verdict on a leftover, which then
    stays.
    """
    committed: list[str] = []
    removed: list[str] = []
    left: list[str] = []
    lease.check(ask=True)  # who has lost it meanwhile must not keep its holder out
    storage.take_over(lease.session)
    storage.sync_directory("")  # what a dead daemon has renamed counts from here on, and outlives a power loss
    names = sorted(storage.list_directory(""))
    hidden = [
        (name, parsed)
        for name in names
        # What ranks of this session are about is not left over: a daemon before this one has died, and they have not.
        if (parsed := manifest.parse_hidden_directory(name))
        and not (
            parsed[1].startswith(f"{lease.session}-") and parsed[2] in ("partial", "aborted", *coordination.VERDICTS)
        )
    ]
    apart: dict[str, str] = {}
    for name, (step, attempted, state) in hidden:
        if state == "partial" or state.startswith("salvage"):
            # Before all else: a daemon that has lost the lease, and does not know yet, finds nothing to commit.
            place = manifest.hidden_directory(step, attempted, f"salvage-{lease.epoch}")
            if place in apart.values():  # what a recovery before this one could not judge, and its save again
                place += f"-{len(apart)}"
            try:
                storage.rename_directory(name, place)
                apart[name] = place
            except WriteError as error:
                if error.errno != errno.ENOENT:  # else that daemon was faster
                    logger.warning("%s stays until it can be renamed: %s", name, error)
                    left.append(name)
    for name, (step, attempted, _) in hidden:
        if name not in apart:
            continue
        try:
            if _finish(storage, lease, apart[name], step, attempted, attempt):
                committed.append(manifest.step_directory(step))
        except IntegrityError as error:
            logger.warning("%s is not whole, so it is removed: %s", name, error)
        except WriteError as error:
            logger.warning("%s stays until it can be read and finished: %s", apart[name], error)
            left.append(apart[name])
    for name, (step, attempted, state) in hidden:
        target, place = manifest.step_directory(step), apart.get(name, name)
        try:
            if state == "replaced" and target not in storage.list_directory(""):
                storage.rename_directory(name, target)  # the save that was to replace it never came
                committed.append(target)
            elif state == "trash" and is_read(storage, name):
                logger.info("%s stays, for somebody reads it", name)
            elif place not in left and place in storage.list_directory(""):
                storage.remove_tree(place)
                if state not in coordination.VERDICTS:
                    removed.append(manifest.hidden_directory(step, attempted, "partial") if name in apart else name)
        except WriteError as error:
            logger.warning("%s stays until it can be removed: %s", place, error)
            left.append(place)
    lease.check()
    if not left:
        storage.settle(alone=alone)
    return Recovery(tuple(committed), tuple(removed), tuple(left))


def _finish(storage: Storage, lease: Lease, partial: str, step: int, attempted: str, attempt: str) -> bool:
    """Commit a leftover if it is whole; false if it is superseded or lacks a record. Raises ``IntegrityError``."""
    target = manifest.step_directory(step)
    try:
        count = sum(name.startswith("rank-") for name in storage.list_directory(partial))
        records = [_read_own_record(storage, partial, rank) for rank in range(count)]
    except WriteError as error:
        if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
            raise IntegrityError(f"no directory of files: {error}") from error
        raise
    whole = [record for record in records if record is not None]
    if not whole or len(whole) != whole[0].world_size:
        return False
    first = whole[0]
    identity = manifest.attempt_of(first.session, first.sequence, first.world_size)
    if (first.step, identity) != (step, attempted):
        return False
    existing = _committed(storage, target)
    if existing is not None and existing.sequence > whole[0].sequence:
        return False
    for record in whole:
        for fault in integrity.check_record(storage, partial, record):
            raise IntegrityError(str(fault))
    content = assemble(whole, f"{storage.root}/{partial}")
    if not _holds(storage, f"{partial}/{manifest.MANIFEST}", content.to_bytes()):
        storage.remove(f"{partial}/{manifest.MANIFEST}")  # it is damaged, and nobody reads it here
    _publish_manifest(storage, partial, content, attempt)
    storage.open_to_readers(partial)
    storage.sync_directory(partial)
    # It had been accepted as a replacement where a step of that name is still there.
    give_name(storage, lease, partial, target, attempted, replace=True)
    return True


def _holds(storage: Storage, path: str, data: bytes) -> bool:
    """Whether a file has this very content."""
    try:
        return storage.read(path, len(data)) == data
    except WriteError as error:
        if error.errno in (errno.EFBIG, errno.EISDIR, errno.ELOOP, errno.ENXIO):
            return False
        raise
