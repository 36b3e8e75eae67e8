"""Files of an earlier save that belong to this one too: all rows of tables of which the save has what has changed.

Nothing of them is in memory any more. They are linked from a committed step of the same session whose record lists
them; where a link is refused (another file system, no hard links, a fallback directory) their bytes are copied.
"""

from __future__ import annotations

import errno
import logging
import mmap
from dataclasses import dataclass, field
from typing import Final

from sidesave.errors import IntegrityError, WriteError
from sidesave.stager.memory.arena import page_up
from sidesave.writer_daemon.commit import coordination
from sidesave.writer_daemon.format import layout, manifest
from sidesave.writer_daemon.format.layout import TensorInfo
from sidesave.writer_daemon.format.manifest import FileRecord, RankRecord
from sidesave.writer_daemon.protocol import Link, Save
from sidesave.writer_daemon.storage import Storage

logger = logging.getLogger(__name__)

_COPY_NBYTES: Final = 16 << 20


@dataclass(slots=True)
class Linked:
    """The files that have their names now, and the tensors in them."""

    files: list[FileRecord] = field(default_factory=list[FileRecord])
    tensors: dict[str, TensorInfo] = field(default_factory=dict[str, TensorInfo])


def link_all(storage: Storage, others: Storage | None, save: Save, attempt: str) -> Linked:
    """Give all files that ``save`` links their names in its directory; blocking.

    Args:
        storage: Where the save is written.
        others: The run directory, if that is another one.
        save: Its ``links`` say what and from where.
        attempt: Tells temporary names of different writers apart.

    Raises:
        WriteError: With ENOENT: none of the saves has them any more. Else storage refused.
    """
    linked = Linked()
    for link in save.links:
        _link(storage, [storage] if others is None else [storage, others], save, link, attempt, linked)
    return linked


def _link(storage: Storage, sources: list[Storage], save: Save, link: Link, attempt: str, linked: Linked) -> None:
    directory = coordination.partial_of(save)
    wanted = {manifest.rank_file(name, save.rank, "safetensors") for name in link.names}
    for step, sequence in link.saves:
        name = manifest.step_directory(step)
        for source in sources:
            record = _record(source, f"{name}/{manifest.record_file(save.rank)}")
            if record is None or (record.session, record.sequence, record.rank) != (save.session, sequence, save.rank):
                continue
            files = [file for file in record.files if file.name in wanted]
            if len(files) != len(wanted):
                continue
            try:
                for file in files:
                    assert file.digests is not None
                    for one in (file, file.digests):
                        _take(storage, source, f"{name}/{one.name}", f"{directory}/{one.name}", one.nbytes, attempt)
            except WriteError as error:
                if error.errno != errno.ENOENT:
                    raise
                logger.warning("%s is being deleted, another step is looked at: %s", name, error)
                continue
            containers = {layout.container_of(each) for each in link.names}
            linked.files += files
            linked.tensors |= {
                fqn: info for fqn, info in record.part.table.tensors.items() if info.container in containers
            }
            return
    steps = ", ".join(str(step) for step, _ in link.saves)
    text = f"all rows of a table were saved last in steps {steps}, which are gone; the next save has all of them again"
    raise WriteError(errno.ENOENT, text, f"{storage.root}/{directory}/{sorted(wanted)[0]}")


def _record(storage: Storage, path: str) -> RankRecord | None:
    try:
        data = storage.read(path, manifest.MAX_JSON_NBYTES)
        return None if data is None else RankRecord.from_bytes(data, path)
    except (WriteError, IntegrityError) as error:
        logger.warning("%s is not linked to: %s", path, error)
        return None


def _take(storage: Storage, source: Storage, old: str, new: str, nbytes: int, attempt: str) -> None:
    """Link a file, or copy it; one that has the new name already was taken by an earlier try of the same save."""
    if (source is storage and storage.link(old, new)) or _is_there(storage, new, nbytes):
        return
    parent, _, name = new.rpartition("/")
    temporary = f"{parent}/.{name}.{attempt}"
    with (
        source.open(old) as file,
        storage.creating(temporary, nbytes, new) as output,
        mmap.mmap(-1, max(page_up(min(nbytes, _COPY_NBYTES)), page_up(1))) as buffer,
        memoryview(buffer) as view,
    ):
        for offset in range(0, nbytes, _COPY_NBYTES):
            data = file.read_at(offset, min(_COPY_NBYTES, nbytes - offset))
            view[: len(data)] = data
            output.write_at(view[: page_up(len(data))], offset)
        output.finish(nbytes)
    if not storage.publish(temporary, new):
        storage.remove(temporary)


def _is_there(storage: Storage, path: str, nbytes: int) -> bool:
    try:
        with storage.open(path) as file:
            return file.nbytes == nbytes
    except WriteError:
        return False
