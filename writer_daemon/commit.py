"""From written to committed: one manifest, one rename. And, at start, what to do with what a dead session left.

A checkpoint exists when its directory bears the step's name; everything in it is durable before that. Order of a
commit: records read and checked, manifest published, directory synced, lease checked, directory renamed, parent synced.
"""

from __future__ import annotations

import errno
import logging
import mmap
from dataclasses import dataclass

from sidesave.errors import CheckpointExistsError, IntegrityError, WriteError
from sidesave.stager.arena import page_up
from sidesave.writer_daemon import integrity, manifest
from sidesave.writer_daemon.lease import Lease
from sidesave.writer_daemon.manifest import FileRecord, Manifest, RankRecord, TensorInfo
from sidesave.writer_daemon.protocol import Save
from sidesave.writer_daemon.storage import Storage

logger = logging.getLogger(__name__)


def find_record(storage: Storage, save: Save) -> RankRecord | None:
    """This rank's record of this very save, left by an earlier daemon: in the partial or the committed directory."""
    for directory in (
        manifest.hidden_directory(save.step, save.session, "partial"),
        manifest.step_directory(save.step),
    ):
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


def commit(storage: Storage, lease: Lease, save: Save, attempt: str) -> Manifest:
    """Commit a step all of whose records are durable; blocking. Doing it twice does no harm.

    Raises:
        CheckpointExistsError: The step is there, is not this save, and may not be replaced.
        IntegrityError: A record is missing or contradicts the save.
        WriteError: Storage refused.
    """
    partial = manifest.hidden_directory(save.step, save.session, "partial")
    target = manifest.step_directory(save.step)
    existing = _committed(storage, target)
    if existing is not None and (existing.session, existing.sequence) == (save.session, save.sequence):
        storage.sync_directory("")
        return existing
    if existing is not None and existing.sequence > save.sequence:
        path = f"{storage.root}/{target}"
        raise CheckpointExistsError(errno.EEXIST, "a later save of this step has been committed", path)
    records = [_read_own_record(storage, partial, rank) for rank in range(save.world_size)]
    found = [record for record in records if record is not None]
    if len(found) != save.world_size:
        raise IntegrityError(f"{storage.root}/{partial}: {save.world_size - len(found)} rank records are missing")
    if (found[0].step, found[0].session, found[0].sequence) != (save.step, save.session, save.sequence):
        raise IntegrityError(f"{storage.root}/{partial}: the records belong to another save")
    content = _build(storage, partial, found)
    _publish_manifest(storage, partial, content, attempt)
    storage.open_to_readers(partial)
    storage.sync_directory(partial)
    _give_name(storage, lease, partial, target, save.session, replace=save.replace)
    return content


def _committed(storage: Storage, target: str) -> Manifest | None:
    if manifest.MANIFEST not in storage.list_directory(target):
        return None
    try:
        return integrity.read_manifest(storage, target)
    except IntegrityError as error:
        logger.warning("%s", error)
        return None


def _build(storage: Storage, directory: str, records: list[RankRecord]) -> Manifest:
    first = records[0]
    entries: list[FileRecord] = []
    tensors: dict[str, TensorInfo] = {}
    layouts: dict[int, int] = {}  # owner -> index of the layout "held whole by this rank"
    for rank, record in enumerate(records):
        if (record.session, record.step, record.sequence, record.rank, record.world_size) != (
            first.session,
            first.step,
            first.sequence,
            rank,
            len(records),
        ):
            raise IntegrityError(f"{storage.root}/{directory}: the record of rank {rank} belongs to another save")
        data = record.to_bytes()
        entries.append(FileRecord(manifest.record_file(rank), len(data), manifest.digest(data).hex()))
        for fqn, tensor in record.tensors.items():
            if fqn in tensors:
                raise IntegrityError(f"{storage.root}/{directory}: {fqn} was written by two ranks")
            layout = layouts.setdefault(rank, len(layouts))
            tensors[fqn] = TensorInfo(tensor.dtype, tensor.shape, tensor.container, layout)
    return Manifest(
        step=first.step,
        session=first.session,
        sequence=first.sequence,
        world_size=first.world_size,
        parent=first.parent,
        pickled=any(record.pickled for record in records),
        created_s=first.created_s,
        torch_version=first.torch_version,
        nbytes=sum(record.nbytes for record in records),
        records=tuple(entries),
        layouts=tuple({"owners": [rank]} for rank in layouts),
        tensors=tensors,
    )


def _publish_manifest(storage: Storage, directory: str, content: Manifest, attempt: str) -> None:
    data = content.to_bytes()
    temporary, final = f"{directory}/.{manifest.MANIFEST}.{attempt}", f"{directory}/{manifest.MANIFEST}"
    with mmap.mmap(-1, page_up(len(data))) as buffer:
        buffer[: len(data)] = data
        with storage.creating(temporary, len(data)) as output, memoryview(buffer) as view:
            output.write_at(view, 0)
            output.finish(len(data))
    if not storage.publish(temporary, final):
        if storage.read(final, manifest.MAX_JSON_NBYTES) != data:
            raise WriteError(errno.EEXIST, "another manifest is already there", f"{storage.root}/{final}")
        storage.remove(temporary)
    for name in storage.list_directory(directory):
        if name.startswith("."):
            storage.remove(f"{directory}/{name}")  # attempt files of a daemon that was killed


def _give_name(storage: Storage, lease: Lease, partial: str, target: str, session: str, *, replace: bool) -> None:
    lease.check()
    step = manifest.parse_step_directory(target)
    assert step is not None
    replaced = manifest.hidden_directory(step, session, "replaced")
    if target in storage.list_directory(""):
        if not replace:
            raise CheckpointExistsError(
                errno.EEXIST, "the step exists; save with overwrite=True to replace it", f"{storage.root}/{target}"
            )
        storage.remove_tree(replaced)
        storage.rename_directory(target, replaced)
        storage.sync_directory("")
        try:
            storage.rename_directory(partial, target)
        except WriteError:
            storage.rename_directory(replaced, target)
            raise
    else:
        storage.rename_directory(partial, target)
    storage.sync_directory("")
    storage.remove_tree(replaced)


def reclaim(storage: Storage, save: Save) -> None:
    """Remove what a failed save has left, invisibly at once and then for good; failing to is only logged."""
    partial = manifest.hidden_directory(save.step, save.session, "partial")
    aborted = manifest.hidden_directory(save.step, save.session, "aborted")
    try:
        storage.remove_tree(aborted)
        if partial in storage.list_directory(""):
            storage.rename_directory(partial, aborted)
            storage.remove_tree(aborted)
    except OSError as error:
        logger.warning("left for the next start to clean: %s", error)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What the start of a session did with the leftovers of dead ones."""

    committed: tuple[str, ...]
    removed: tuple[str, ...]


def recover(storage: Storage, lease: Lease, attempt: str) -> Recovery:
    """Finish what is complete and remove what is not; blocking, under the lease.

    A partial directory whose records and bytes are all there and verify (read back from the medium) becomes a
    checkpoint: its ranks were told that their bytes are durable. Everything else of dead sessions goes.
    """
    committed: list[str] = []
    removed: list[str] = []
    names = sorted(storage.list_directory(""))
    hidden = [(name, parsed) for name in names if (parsed := manifest.parse_hidden_directory(name))]
    for name, (step, session, state) in hidden:
        try:
            if state == "partial" and _finish(storage, lease, name, step, session, attempt):
                committed.append(manifest.step_directory(step))
        except IntegrityError as error:
            logger.warning("%s is not whole, so it is removed: %s", name, error)
    for name, (step, _, state) in hidden:
        target = manifest.step_directory(step)
        if state == "replaced" and target not in storage.list_directory(""):
            storage.rename_directory(name, target)  # the save that was to replace it never came
            storage.sync_directory("")
            committed.append(target)
        elif name in storage.list_directory(""):
            storage.remove_tree(name)
            removed.append(name)
    if removed:
        storage.sync_directory("")
    return Recovery(tuple(committed), tuple(removed))


def _finish(storage: Storage, lease: Lease, partial: str, step: int, session: str, attempt: str) -> bool:
    """Commit a leftover if it is whole; False when it is superseded or lacks a record. Raises ``IntegrityError``."""
    target = manifest.step_directory(step)
    try:
        count = sum(name.startswith("rank-") for name in storage.list_directory(partial))
        records = [_read_own_record(storage, partial, rank) for rank in range(count)]
    except WriteError as error:
        if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
            raise IntegrityError(f"no directory of files: {error}") from error
        raise
    whole = [record for record in records if record is not None]
    if not whole or len(whole) != whole[0].world_size or (whole[0].step, whole[0].session) != (step, session):
        return False
    existing = _committed(storage, target)
    if existing is not None and existing.sequence > whole[0].sequence:
        return False
    for record in whole:
        for fault in integrity.check_record(storage, partial, record):
            raise IntegrityError(str(fault))
        for file in record.files:
            storage.sync_file(f"{partial}/{file.name}")
    content = _build(storage, partial, whole)
    storage.remove(f"{partial}/{manifest.MANIFEST}")  # the same, or damaged; nobody reads it here
    _publish_manifest(storage, partial, content, attempt)
    storage.open_to_readers(partial)
    storage.sync_directory(partial)
    # It had been accepted as a replacement where a step of that name is still there.
    _give_name(storage, lease, partial, target, session, replace=True)
    return True
