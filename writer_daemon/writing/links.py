"""Links files of an earlier save that this save needs: all rows of tables with changes.

The files are no longer in memory. They are linked from a committed step of the same session whose
record lists them. If a link is not possible (another file system, no hard links, a fallback
directory), the bytes are copied and compared with their digests.
"""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass, field

from sidesave.errors import IntegrityError, WriteError
from sidesave.writer_daemon.checkpoints.copying import copy_tensor_file
from sidesave.writer_daemon.commit import attempts
from sidesave.writer_daemon.format import integrity, layout, manifest
from sidesave.writer_daemon.format.layout import TensorInfo
from sidesave.writer_daemon.format.manifest import FileRecord, RankRecord
from sidesave.writer_daemon.format.names import rank_file, record_file, step_directory
from sidesave.writer_daemon.protocol import Link, Save
from sidesave.writer_daemon.storage import Storage

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Linked:
    """The linked files, and the tensors in them."""

    files: list[FileRecord] = field(default_factory=list[FileRecord])
    tensors: dict[str, TensorInfo] = field(default_factory=dict[str, TensorInfo])


def link_all(storage: Storage, others: Storage | None, save: Save, attempt: str) -> Linked:
    """Link or copy all files in ``save.links`` into the save's directory; blocks until done.

    Args:
        storage: The directory that the save is written to.
        others: The run directory, if it is another one.
        save: The save; its ``links`` name the files and earlier saves.
        attempt: Distinguishes the temporary names of different writers.

    Raises:
        WriteError: None of the earlier saves has the files any more (ENOENT), or storage failed.
    """
    linked = Linked()
    for link in save.links:
        _link(
            storage, [storage] if others is None else [storage, others], save, link, attempt, linked
        )
    return linked


def _link(
    storage: Storage, sources: list[Storage], save: Save, link: Link, attempt: str, linked: Linked
) -> None:
    directory = attempts.partial_of(save)
    wanted = {rank_file(name, save.rank, "safetensors") for name in link.names}
    for step, sequence in link.saves:
        name = step_directory(step)
        for source in sources:
            record = _record(source, f"{name}/{record_file(save.rank)}")
            if record is None or (record.session, record.sequence, record.rank) != (
                save.session,
                sequence,
                save.rank,
            ):
                continue
            files = [file for file in record.files if file.name in wanted]
            if len(files) != len(wanted):
                continue
            try:
                for file in files:
                    _take(storage, source, name, directory, file, attempt)
            except IntegrityError as error:
                logger.warning("cannot link a file, trying another step: %s", error)
                continue
            except WriteError as error:
                if error.errno != errno.ENOENT:
                    raise
                logger.warning("%s is being deleted, trying another step: %s", name, error)
                continue
            containers = {layout.container_of(each) for each in link.names}
            linked.files += files
            linked.tensors |= {
                fqn: info
                for fqn, info in record.part.table.tensors.items()
                if info.container in containers
            }
            return
    steps = ", ".join(str(step) for step, _ in link.saves)
    text = f"the steps {steps} with all rows of a table are deleted or damaged"
    hint = "the next save writes all rows again"
    raise WriteError(
        errno.ENOENT, f"{text}; {hint}", f"{storage.root}/{directory}/{sorted(wanted)[0]}"
    )


def _record(storage: Storage, path: str) -> RankRecord | None:
    try:
        data = storage.read(path, manifest.MAX_JSON_NBYTES)
        return None if data is None else RankRecord.from_bytes(data, path)
    except (WriteError, IntegrityError) as error:
        logger.warning("no files of %s are linked: %s", path, error)
        return None


def _take(
    storage: Storage, source: Storage, old: str, new: str, file: FileRecord, attempt: str
) -> None:
    """Link a tensor file and its digests from the directory ``old``, or copy and verify them.

    Files that exist under the new name come from an earlier attempt of the same save.
    """
    assert file.digests is not None
    for one in (file, file.digests):
        if source is storage and storage.link(f"{old}/{one.name}", f"{new}/{one.name}"):
            continue
        if _is_there(storage, f"{new}/{one.name}", one.nbytes):
            continue
        digests = integrity.read_digests(source, old, file)
        if one is file:
            copy_tensor_file(source, old, file, digests, storage, new, attempt)
        else:
            storage.publish_bytes(new, one.name, digests, attempt)


def _is_there(storage: Storage, path: str, nbytes: int) -> bool:
    try:
        with storage.open(path) as file:
            return file.nbytes == nbytes
    except WriteError:
        return False
