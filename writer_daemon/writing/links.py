"""Files of an earlier save that belong to this one too: all rows of tables of which the save has what has changed.

Nothing of them is in memory any more. They are linked from a committed step of the same session whose record lists
them; where a link is refused (another file system, no hard links, a fallback directory) their bytes are copied,
and compared with their digests.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
from dataclasses import dataclass, field
from typing import Final

from sidesave.errors import IntegrityError, WriteError
from sidesave.stager.memory.arena import page_up
from sidesave.writer_daemon.commit import coordination
from sidesave.writer_daemon.format import integrity, layout, manifest
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
                    _take(storage, source, name, directory, file, attempt)
            except IntegrityError as error:
                logger.warning("not copied, another step is looked at: %s", error)
                continue
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
    text = f"all rows of a table were saved last in steps {steps}, which are gone, or damaged"
    hint = "the next save has all of them again"
    raise WriteError(errno.ENOENT, f"{text}; {hint}", f"{storage.root}/{directory}/{sorted(wanted)[0]}")


def _record(storage: Storage, path: str) -> RankRecord | None:
    try:
        data = storage.read(path, manifest.MAX_JSON_NBYTES)
        return None if data is None else RankRecord.from_bytes(data, path)
    except (WriteError, IntegrityError) as error:
        logger.warning("%s is not linked to: %s", path, error)
        return None


def _take(storage: Storage, source: Storage, old: str, new: str, file: FileRecord, attempt: str) -> None:
    """Link a tensor file of the directory ``old`` and its digests, or copy them, compared on the way.

    What has the new name already was taken by an earlier try of the same save.
    """
    assert file.digests is not None
    for one in (file, file.digests):
        if source is storage and storage.link(f"{old}/{one.name}", f"{new}/{one.name}"):
            continue
        if _is_there(storage, f"{new}/{one.name}", one.nbytes):
            continue
        digests = integrity.read_digests(source, old, file)
        if one is file:
            _copy(storage, source, old, new, file, digests, attempt)
        else:
            storage.publish_bytes(new, one.name, digests, attempt)


def _copy(
    storage: Storage, source: Storage, old: str, new: str, entry: FileRecord, digests: bytes, attempt: str
) -> None:
    path, temporary, final = f"{old}/{entry.name}", f"{new}/.{entry.name}.{attempt}", f"{new}/{entry.name}"
    with source.open(path) as file:
        comparison = integrity.Comparison(file, path, entry, digests)
        try:
            with storage.creating(temporary, entry.nbytes, final) as output:
                for offset in range(0, entry.nbytes, _COPY_NBYTES):
                    data = file.read_at(offset, min(_COPY_NBYTES, entry.nbytes - offset))
                    comparison.add(data)
                    view = memoryview(mmap.mmap(-1, page_up(len(data))))  # of its own: a store sends it later
                    view[: len(data)] = data
                    output.write_at(view, offset)
                output.finish(entry.nbytes)
        except BaseException:  # also of bytes that do not match, which must not stay under any name
            with contextlib.suppress(WriteError):  # what went wrong first is told
                storage.remove(temporary)
            raise
    if not storage.publish(temporary, final):
        storage.remove(temporary)


def _is_there(storage: Storage, path: str, nbytes: int) -> bool:
    try:
        with storage.open(path) as file:
            return file.nbytes == nbytes
    except WriteError:
        return False
