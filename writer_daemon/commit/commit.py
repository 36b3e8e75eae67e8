"""Commits a written checkpoint by one manifest and one rename.

A checkpoint exists once its directory has the step's name. Everything in it is durable before.
Order of a commit: read and check the records, publish the manifest, sync the directory, check the
lease, rename the directory, sync the parent.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
from collections.abc import Callable, Collection
from typing import Any, Final, cast

import msgpack

from sidesave.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUnknownError,
    IntegrityError,
    WriteError,
)
from sidesave.stager.gc_pause import gc_paused
from sidesave.writer_daemon.checkpoints.deletion import hide_replaced
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo, read_checkpoint
from sidesave.writer_daemon.commit import attempts, coordination
from sidesave.writer_daemon.commit.manifest_builder import assemble
from sidesave.writer_daemon.format import integrity, manifest
from sidesave.writer_daemon.format.manifest import Manifest, RankRecord
from sidesave.writer_daemon.format.names import (
    hidden_directory,
    parse_step_directory,
    record_file,
    step_directory,
)
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.protocol import Save
from sidesave.writer_daemon.storage import Storage

_TENSOR: Final = 0
"""The tag of a tensor in a treespec (``stager.state.tags``, which this process does not import)."""

logger = logging.getLogger(__name__)


def find_record(storage: Storage, save: Save) -> RankRecord | None:
    """Return the record of this rank's part of the save, if an earlier daemon has left one.

    Looks in the partial and in the committed directory.
    """
    for directory in (attempts.partial_of(save), step_directory(save.step)):
        record = read_own_record(storage, directory, save.rank)
        if record is not None and (record.session, record.sequence) == (
            save.session,
            save.sequence,
        ):
            return record
    return None


def read_own_record(storage: Storage, directory: str, rank: int) -> RankRecord | None:
    """Return a rank's record in a directory; None if it is missing or damaged."""
    path = f"{directory}/{record_file(rank)}"
    data = storage.read(path, manifest.MAX_JSON_NBYTES)
    try:
        return None if data is None else RankRecord.from_bytes(data, path)
    except IntegrityError as error:
        logger.warning("ignoring a damaged record: %s", error)
        return None


def refuse_taken(storage: Storage, save: Save) -> None:
    """Raise ``CheckpointExistsError`` if a save's step exists and may not be replaced.

    Call this before a byte is written: recovery assumes that written files may take the name.
    """
    target = step_directory(save.step)
    if not save.replace and target in storage.list_directory(""):
        raise CheckpointExistsError(
            errno.EEXIST,
            "the step exists; save with overwrite=True to replace it",
            f"{storage.root}/{target}",
        )


def commit(
    storage: Storage,
    lease: Lease,
    save: Save,
    attempt: str,
    await_records: Callable[[], list[RankRecord]] | None = None,
) -> CheckpointInfo:
    """Commit a step all of whose records are durable; blocking. Doing it twice does no harm.

    Of several ranks ``await_records`` gives the records of all, or raises what one of them has
    refused with.

    Raises:
        CheckpointExistsError: The step is there, is not this save, and may not be replaced.
        CommitUnknownError: The step has its name, but storage did not confirm that it keeps it.
        IntegrityError: A record is missing or contradicts the save.
        WriteError: Storage refused.
    """
    partial = attempts.partial_of(save)
    target = step_directory(save.step)
    existing = find_committed(storage, target)
    if existing is not None and existing.key == (save.session, save.sequence):
        _keep_name(storage, target)
        return existing
    if existing is not None and existing.sequence > save.sequence:
        path = f"{storage.root}/{target}"
        raise CheckpointExistsError(
            errno.EEXIST, "a later save of this step has been committed", path
        )
    try:
        records = (
            await_records() if await_records is not None else [_own_record(storage, partial, save)]
        )
    except IntegrityError:
        lease.check(ask=True)  # who has taken over may have taken it away
        raise
    with gc_paused():
        names_of = functools.partial(_names_of, storage, partial)
        content = assemble(records, f"{storage.root}/{partial}", names_of=names_of)
        publish_manifest(storage, partial, content, attempt)
    storage.open_to_readers(partial)
    storage.sync_directory(partial)
    give_name(storage, lease, partial, target, attempts.attempt_of(save), replace=save.replace)
    return CheckpointInfo.of(content, f"{storage.root}/{target}")


def _names_of(storage: Storage, partial: str, record: RankRecord) -> Collection[str]:
    """Return the FQNs in a rank's treespec, for a message; none if it cannot be read."""
    names: set[str] = set()
    with contextlib.suppress(WriteError, ValueError, msgpack.UnpackException):
        data = storage.read(f"{partial}/{record.objects.name}", record.objects.nbytes)
        left: list[Any] = [
            msgpack.unpackb(data or b"\x80", strict_map_key=False, unicode_errors="surrogatepass")
        ]
        while left:
            node = left.pop()
            if isinstance(node, list):
                children = cast("list[Any]", node)
                if len(children) > 1 and children[0] == _TENSOR and isinstance(children[1], str):
                    names.add(children[1])
                left += children
            elif isinstance(node, dict):
                left += cast("dict[Any, Any]", node).values()
    return names


def _own_record(storage: Storage, partial: str, save: Save) -> RankRecord:
    record = read_own_record(storage, partial, save.rank)
    if record is None:
        raise IntegrityError(f"{storage.root}/{partial}: the rank's record is missing")
    if (record.step, record.session, record.sequence) != (save.step, save.session, save.sequence):
        raise IntegrityError(f"{storage.root}/{partial}: the record belongs to another save")
    return record


def find_committed(storage: Storage, target: str) -> CheckpointInfo | None:
    """Return the checkpoint of that name; None if it does not exist or is damaged."""
    try:
        if manifest.MANIFEST not in storage.list_directory(target):
            return None
    except WriteError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        return None  # a file or a link has the name
    path = f"{storage.root}/{target}"
    try:
        info = read_checkpoint(storage, target)
    except (CheckpointNotFoundError, IntegrityError) as error:
        integrity.warn_left_out(logger, path, error)
        return None
    integrity.warn_left_out(logger, path)
    return info


def publish_manifest(storage: Storage, directory: str, content: Manifest, attempt: str) -> None:
    """Remove temporary files from a directory, and write its manifest."""
    for name in storage.list_directory(directory):
        # From a failed or killed attempt, perhaps of this name, or exchanged between ranks.
        if name.startswith((".", coordination.REPLICA_DIGEST)):
            storage.remove(f"{directory}/{name}")
    storage.publish_bytes(directory, manifest.MANIFEST, content.to_bytes(), attempt)


def give_name(
    storage: Storage, lease: Lease, partial: str, target: str, attempt: str, *, replace: bool
) -> None:
    """Make a hidden directory with durable content the checkpoint ``target``.

    The rename is durable and done under the lease. With ``replace`` the directory takes the place
    of one of that name, which becomes trash: the caller removes it when readers have had some time.
    Raises as :func:`commit`.
    """
    storage.check_root()
    lease.check()
    step = parse_step_directory(target)
    assert step is not None
    replaced = hidden_directory(step, attempt, "replaced")
    if target in storage.list_directory(""):
        if not replace:
            raise CheckpointExistsError(
                errno.EEXIST,
                "the step exists; save with overwrite=True to replace it",
                f"{storage.root}/{target}",
            )
        storage.remove_tree(replaced)
        storage.exchange_directory(partial, target, replaced)
    else:
        storage.rename_directory(partial, target)
    _keep_name(storage, target)
    try:
        # Need not be durable: a start does it too, as the step is there.
        hide_replaced(storage, {step}, {*storage.list_directory("")})
    except WriteError as error:
        logger.warning("cannot be removed now, the next start tries again: %s", error)


def _keep_name(storage: Storage, target: str) -> None:
    """Make a step's name durable; never twice, since a second fsync reports nothing."""
    try:
        storage.sync_directory("")
    except WriteError as error:
        message = f"{target} is there, but may not survive a crash: {error.strerror}"
        raise CommitUnknownError(error.errno, message, f"{storage.root}/{target}") from error


def reclaim(storage: Storage, save: Save) -> None:
    """Hide what a failed save left, and remove it; failures are only logged."""
    partial = hidden_directory(save.step, save.session, "partial")
    aborted = hidden_directory(save.step, save.session, "aborted")
    try:
        try:
            storage.remove_tree(aborted)
            if partial in storage.list_directory(""):
                storage.rename_directory(partial, aborted)
                storage.remove_tree(aborted)
        finally:
            if storage.has_passed_on():
                # No session would look for files that have come since the next session began.
                storage.remove_tree(partial)
    except OSError as error:
        logger.warning("cannot be removed now, the next start tries again: %s", error)
