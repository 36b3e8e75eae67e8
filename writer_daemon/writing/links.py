"""Links files of an earlier save that this save needs: all rows of tables with changes.

The files are no longer in memory. They are linked from a committed step of the same session whose
record lists them. If a link is not possible (another file system, no hard links, a fallback
directory), the bytes are copied and compared with their digests.
"""

from __future__ import annotations

import errno
import itertools
from dataclasses import dataclass, field

from sidesave.errors import IntegrityError, WriteError, listed
from sidesave.writer_daemon.checkpoints.copying import copy_tensor_file
from sidesave.writer_daemon.commit import attempts
from sidesave.writer_daemon.format import integrity, layout, manifest
from sidesave.writer_daemon.format.layout import TensorInfo
from sidesave.writer_daemon.format.manifest import FileRecord, RankRecord
from sidesave.writer_daemon.format.names import rank_file, record_file, step_directory
from sidesave.writer_daemon.protocol import Link, Save
from sidesave.writer_daemon.storage import Storage


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
    failures: list[str] = []
    for source, (step, sequence) in itertools.product(sources, link.saves):
        name = step_directory(step)
        try:
            record = _record(source, name, save, sequence)
            files = [file for file in record.files if file.name in wanted]
            if len(files) != len(wanted):
                raise IntegrityError(f"{name}: its record does not list all of {sorted(wanted)}")
            for file in files:
                _take(storage, source, name, directory, file, attempt)
        except (WriteError, IntegrityError) as error:
            if isinstance(error, WriteError) and error.errno != errno.ENOENT:
                raise
            failures.append(f"{source.root}: {error}")
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
        errno.ENOENT,
        f"{text} ({listed(failures, 5)}); {hint}",
        f"{storage.root}/{directory}/{sorted(wanted)[0]}",
    )


def _record(source: Storage, name: str, save: Save, sequence: int) -> RankRecord:
    """Return the record that the save ``sequence`` of this session left in the step ``name``.

    Raises:
        IntegrityError: It is not there, is damaged, or is that of another save.
        WriteError: Storage cannot read it.
    """
    path = f"{name}/{record_file(save.rank)}"
    data = source.read(path, manifest.MAX_JSON_NBYTES)
    if data is None:
        raise IntegrityError(f"{path} does not exist")
    record = RankRecord.from_bytes(data, path)
    found = (record.session, record.sequence, record.rank)
    if found != (save.session, sequence, save.rank):
        raise IntegrityError(f"{path} is of save {found[1]} of session {found[0]}, not {sequence}")
    return record


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
