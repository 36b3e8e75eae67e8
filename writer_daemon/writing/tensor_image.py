"""A tensor file in the staging memory, which a save writes, or links if it has not changed."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import xxhash

from sidesave.errors import IntegrityError, ProtocolError
from sidesave.stager.memory.arena import Arena, page_up
from sidesave.writer_daemon.format import layout, tensor_file
from sidesave.writer_daemon.format.names import rank_file
from sidesave.writer_daemon.format.tensor_file import DIGEST_NBYTES, TensorEntry, TensorFile
from sidesave.writer_daemon.protocol import Extent, Save
from sidesave.writer_daemon.sealing.keys import SaveKey
from sidesave.writer_daemon.storage import OutputFile
from sidesave.writer_daemon.writing.sealed import Sealed
from sidesave.writer_daemon.writing.small_files import CHUNK_NBYTES, Read


@dataclass(slots=True)
class TensorImage:
    """One tensor file of one rank, at ``extent`` of ``arena``, to be put into ``directory``.

    ``blocks`` and ``digests`` are those of the memory, also if the file is encrypted (``sealed``).
    """

    arena: Arena
    extent: Extent
    rank: int
    layout: TensorFile
    blocks: list[tuple[int, int]]
    digests: bytearray
    sealed: Sealed | None
    directory: str
    output: OutputFile | None = None
    chunks_left: int = 0
    linked: bool = False
    """Whether the file was linked from the last save, which had the same bytes."""

    @classmethod
    def of(
        cls,
        save: Save,
        arena: Arena,
        number: int,
        extent: Extent,
        directory: str,
        key: SaveKey | None,
    ) -> Self:
        """Return the file at ``extent``, which has ``number`` among the save's tensor files.

        Raises ``ProtocolError`` if there is no tensor file of this size in the memory.
        """
        name = rank_file(extent.name, save.rank, "safetensors")
        try:
            start = arena.view(extent.offset, min(8, extent.nbytes))
            header_nbytes = tensor_file.header_nbytes(start, extent.nbytes, name)
            layout = tensor_file.parse_tensor_file(arena.view(extent.offset, header_nbytes), name)
            arena.view(extent.offset, page_up(extent.nbytes))
        except (IntegrityError, ValueError) as error:
            raise ProtocolError(
                f"arena {save.arena} holds no tensor file at {extent.offset}: {error}"
            ) from error
        if layout.nbytes != extent.nbytes:
            raise ProtocolError(
                f"{name}: SAVE says {extent.nbytes} bytes, its header {layout.nbytes}"
            )
        blocks = tensor_file.digest_blocks(layout)
        digests = bytearray(DIGEST_NBYTES * len(blocks))
        sealed = None
        if key is not None:
            cipher = key.file(save.rank, str(number))
            sealed = Sealed(number, save.rank, layout.nbytes, cipher, (save.sequence, number))
        return cls(arena, extent, save.rank, layout, blocks, digests, sealed, directory)

    @property
    def name(self) -> str:
        """The file's name."""
        if self.sealed is not None:
            return self.sealed.name
        return rank_file(self.extent.name, self.rank, "safetensors")

    @property
    def final(self) -> str:
        """The file's path when it is published."""
        return f"{self.directory}/{self.name}"

    @property
    def container(self) -> str:
        """The container whose tensors the file holds."""
        return layout.container_of(self.extent.name)

    @property
    def origin(self) -> tuple[int, int]:
        """For an encrypted file: sequence and number under which it was encrypted."""
        return (0, 0) if self.sealed is None else self.sealed.origin

    def lists(self) -> dict[str, bytes]:
        """Return the digest list and, for an encrypted file, the tags, by name."""
        if self.sealed is not None:
            return self.sealed.lists()
        return {rank_file(self.extent.name, self.rank, "xxh3"): bytes(self.digests)}

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield the offset and length of each chunk."""
        for offset in range(0, self.extent.nbytes, CHUNK_NBYTES):
            yield offset, min(CHUNK_NBYTES, self.extent.nbytes - offset)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return the memory of bytes of the file."""
        return self.arena.view(self.extent.offset + offset, nbytes)

    def drop_pages(self, offset: int, nbytes: int) -> None:
        """Unmap memory that was read."""
        self.arena.drop_pages(self.extent.offset + offset, nbytes)

    def digest_chunk(self, offset: int, nbytes: int) -> slice:
        """Digest the blocks that begin in a chunk; the last one may extend into the next chunk.

        Returns the place of their digests in the list.
        """
        first = bisect.bisect_left(self.blocks, (offset, 0))
        last = bisect.bisect_left(self.blocks, (offset + nbytes, 0))
        place = slice(first * DIGEST_NBYTES, last * DIGEST_NBYTES)
        if first < last:
            base = self.blocks[first][0]
            view = self.view(base, sum(self.blocks[last - 1]) - base)
            self.digests[place] = b"".join(
                tensor_file.digest(view[start - base : start - base + size])
                for start, size in self.blocks[first:last]
            )
        self.drop_pages(offset, nbytes)
        return place

    def digest_tensor(self, entry: TensorEntry) -> str:
        """Return a digest of a tensor's name, container, dtype, shape and bytes."""
        container = self.container.removesuffix(layout.UNSHARED)
        about = f"{entry.name}\0{container}\0{entry.dtype}\0{entry.shape}\0"
        state = xxhash.xxh3_128(about.encode("utf-8", "surrogatepass"))
        end = entry.offset + entry.nbytes
        for offset in range(entry.offset, end, CHUNK_NBYTES):
            nbytes = min(CHUNK_NBYTES, end - offset)
            state.update(self.view(offset, nbytes))
            self.drop_pages(offset, nbytes)
        return state.hexdigest()

    def reader(self) -> Read:
        """Return a function that reads the file's bytes, encrypted again if it is encrypted."""
        if self.sealed is not None:
            return self.sealed.reader(self.view(0, self.extent.nbytes))
        return self.view
