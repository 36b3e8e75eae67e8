"""Builds the record of a save: its files, and the tensors in them."""

from __future__ import annotations

from sidesave.errors import IntegrityError, ProtocolError, listed
from sidesave.stager.memory.arena import Arena
from sidesave.writer_daemon.format import layout, tensor_file
from sidesave.writer_daemon.format.layout import Part, TensorInfo
from sidesave.writer_daemon.format.manifest import FileRecord, RankRecord
from sidesave.writer_daemon.protocol import Extent, Save
from sidesave.writer_daemon.storage.sealed_json import load_json
from sidesave.writer_daemon.writing.links import Linked
from sidesave.writer_daemon.writing.tensor_image import TensorImage


def small_file(name: str, data: bytes) -> FileRecord:
    """Return the entry of a file with one digest."""
    return FileRecord(name, len(data), tensor_file.digest(data).hex())


def build_record(
    save: Save,
    images: list[TensorImage],
    linked: Linked,
    objects: FileRecord,
    extra_files: tuple[FileRecord, ...],
    part: Part,
    metadata: str,
) -> RankRecord:
    """Return the record of a save whose files are durable.

    Raises ``ProtocolError`` if ``part`` lists a tensor of this rank that is in none of the files.
    """
    _check_listed(save, images, linked, part)

    def entry(image: TensorImage) -> FileRecord:
        digests, *tags = (small_file(*each) for each in image.lists().items())
        return FileRecord(
            image.name,
            image.layout.nbytes,
            container=image.container,
            digests=digests,
            tags=tags[0] if tags else None,
            origin=image.origin,
        )

    return RankRecord(
        session=save.session,
        step=save.step,
        sequence=save.sequence,
        rank=save.rank,
        world_size=save.world_size,
        parent=None if save.parent is None else (save.parent.step, save.parent.session),
        pickled=save.pickled,
        created_s=save.created_s,
        torch_version=save.torch_version,
        files=(*map(entry, images), *linked.files),
        objects=objects,
        part=part,
        metadata=metadata,
        extra_files=extra_files,
    )


def _check_listed(save: Save, images: list[TensorImage], linked: Linked, part: Part) -> None:
    held = {(image.container, entry.name) for image in images for entry in image.layout.entries}
    linked_containers = {file.container for file in linked.files}
    wanted = [(info.container, name) for name, info in part.own.tensors.items()]
    wanted += [
        (info.container, fqn)
        for fqn, info in part.table.tensors.items()
        if save.rank in part.table.layouts[info.layout].owners
    ]
    lacking = [each[1] for each in wanted if each not in held and each[0] not in linked_containers]
    if lacking:
        raise ProtocolError(
            f"step {save.step}: the files of rank {save.rank} lack tensors that its table lists: "
            f"{listed(lacking, 8)}"
        )


def read_part(save: Save, arena: Arena, table: Extent) -> Part:
    """Return the trainer's table of tensors; raises ``ProtocolError`` if it is malformed."""
    where = f"the table of step {save.step}"
    try:
        table_json = load_json(bytes(arena.view(table.offset, table.nbytes)), where)
        return Part.from_json(table_json, save.rank, save.world_size, where)
    except IntegrityError as error:
        raise ProtocolError(str(error)) from error


def whole_part(save: Save, images: list[TensorImage], linked: Linked) -> Part:
    """Return the table of a rank that saves alone.

    It sends none, since all tensors are whole and its own.
    """
    tensors = {
        entry.name: TensorInfo(entry.dtype, entry.shape, image.container)
        for image in images
        for entry in image.layout.entries
    }
    table = layout.whole(tensors | linked.tensors, save.rank)
    return Part(table, cells=table.sums().get(save.rank, 0))
