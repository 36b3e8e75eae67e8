"""What the record of a save says: its files, and the tensors in them."""

from __future__ import annotations

from typing import Protocol

from sidesave.errors import IntegrityError, ProtocolError
from sidesave.stager.memory.arena import Arena
from sidesave.writer_daemon.format import layout, tensor_file
from sidesave.writer_daemon.format.layout import Part, TensorInfo
from sidesave.writer_daemon.format.manifest import FileRecord, RankRecord
from sidesave.writer_daemon.format.tensor_file import TensorFile
from sidesave.writer_daemon.protocol import Extent, Save
from sidesave.writer_daemon.storage.sealed_json import load_json
from sidesave.writer_daemon.writing.links import Linked


class Image(Protocol):
    """A tensor file that has been written, or linked."""

    extent: Extent
    layout: TensorFile

    @property
    def name(self) -> str:
        """The file's."""
        ...

    @property
    def origin(self) -> tuple[int, int]:
        """Of an encrypted one: in which save it was encrypted, and as which number."""
        ...

    def lists(self, rank: int) -> dict[str, bytes]:
        """Its digest list and, of an encrypted one, its tags, by name."""
        ...


def small_file(name: str, data: bytes) -> FileRecord:
    """What a record says of a file with one digest."""
    return FileRecord(name, len(data), tensor_file.digest(data).hex())


def build_record(
    save: Save,
    images: list[Image],
    linked: Linked,
    objects: FileRecord,
    extra_files: tuple[FileRecord, ...],
    part: Part,
    metadata: str,
) -> RankRecord:
    """The record of a save whose files are durable."""

    def entry(image: Image) -> FileRecord:
        digests, *tags = (small_file(*each) for each in image.lists(save.rank).items())
        container = layout.container_of(image.extent.name)
        return FileRecord(
            image.name, image.layout.nbytes, None, container, digests, tags[0] if tags else None, image.origin
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


def read_part(save: Save, arena: Arena, table: Extent) -> Part:
    """Read the trainer's table of the tensors."""
    where = f"the table of step {save.step}"
    try:
        table_json = load_json(bytes(arena.view(table.offset, table.nbytes)), where)
        return Part.from_json(table_json, save.rank, save.world_size, where)
    except IntegrityError as error:
        raise ProtocolError(str(error)) from error


def whole_part(save: Save, images: list[Image], linked: Linked) -> Part:
    """The part of a rank that saves alone, which sends no table: all tensors are whole, and its own."""
    tensors = {
        entry.name: TensorInfo(entry.dtype, entry.shape, layout.container_of(image.extent.name))
        for image in images
        for entry in image.layout.entries
    }
    table = layout.whole(tensors | linked.tensors, save.rank)
    return Part(table, cells=table.sums().get(save.rank, 0))
