"""Encrypts tensor files: block by block from the arena into a buffer, then to storage.

Blocks count from the file's first byte and ignore its tensors. So each chunk is sealed separately,
in whole pages, and the sizes of tensors are not revealed. Digests are those of the encrypted bytes.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from sidesave.stager.memory.arena import PAGE, page_up
from sidesave.writer_daemon.format.names import rank_file
from sidesave.writer_daemon.format.tensor_file import BLOCK_NBYTES, DIGEST_NBYTES, digest
from sidesave.writer_daemon.sealing.cipher import TAG_NBYTES, FileCipher

BOUNCE_NBYTES: Final = 2 << 20
"""Size of the buffer of each writing thread."""


@dataclass(slots=True)
class Sealed:
    """An encrypted tensor file, whose name is replaced by a ``number``.

    ``origin`` is the sequence and number under which it was sealed: its own, unless the file is
    linked.
    """

    number: int
    rank: int
    nbytes: int
    cipher: FileCipher
    origin: tuple[int, int]
    tags: bytearray = field(init=False)
    digests: bytearray = field(init=False)

    def __post_init__(self) -> None:
        blocks = -(-self.nbytes // BLOCK_NBYTES)
        self.tags, self.digests = bytearray(TAG_NBYTES * blocks), bytearray(DIGEST_NBYTES * blocks)

    @property
    def name(self) -> str:
        """The file's name."""
        return rank_file(str(self.number), self.rank, "safetensors.enc")

    def linked_to(self, other: Sealed) -> Sealed:
        """Return this file with the bytes, tags and digests of ``other``, which it is linked to."""
        linked = replace(self, origin=other.origin)
        linked.tags, linked.digests = other.tags, other.digests
        return linked

    def lists(self) -> dict[str, bytes]:
        """Return the digest list and the tags, by name."""
        names = {"xxh3": self.digests, "tags": self.tags}
        return {
            rank_file(str(self.number), self.rank, suffix): bytes(content)
            for suffix, content in names.items()
        }

    def seal(self, data: memoryview, offset: int, into: memoryview) -> None:
        """Encrypt ``data`` into memory that is at least one tag longer.

        Its ``offset`` in the file begins a block.
        """
        for begin in range(0, len(data), BLOCK_NBYTES):
            block = data[begin : begin + BLOCK_NBYTES]
            number, end = (offset + begin) // BLOCK_NBYTES, begin + len(block)
            self.cipher.seal_block(number, block, into[begin : end + TAG_NBYTES])
            tag, at = slice(number * TAG_NBYTES, (number + 1) * TAG_NBYTES), number * DIGEST_NBYTES
            self.tags[tag] = into[end : end + TAG_NBYTES]  # the next block overwrites it
            self.digests[at : at + DIGEST_NBYTES] = digest(into[begin:end])

    def pieces(
        self, data: memoryview, offset: int, *, keeps: bool, check: Callable[[], None]
    ) -> Iterator[tuple[memoryview, int]]:
        """Yield encrypted pieces of ``data``, in whole pages, with their offsets.

        ``data`` begins at ``offset``. ``check`` raises if the memory was reused by another save, so
        that no such piece is stored. ``keeps`` allocates memory for each piece, for storage that
        sends it later.
        """
        for begin in range(0, len(data), BOUNCE_NBYTES):
            part = data[begin : begin + BOUNCE_NBYTES]
            bounce = memoryview(mmap.mmap(-1, BOUNCE_NBYTES + PAGE)) if keeps else _bounce()
            self.seal(part, offset + begin, bounce)
            check()
            yield bounce[: page_up(len(part))], offset + begin

    def reader(self, data: memoryview) -> Callable[[int, int], memoryview]:
        """Return a function that encrypts the file again from an offset that begins a block."""

        def read(offset: int, nbytes: int) -> memoryview:
            into = memoryview(bytearray(nbytes + TAG_NBYTES))
            self.seal(data[offset : offset + nbytes], offset, into)
            return into[:nbytes]

        return read


_of_thread = threading.local()


def _bounce() -> memoryview:
    """Return this thread's buffer."""
    if not hasattr(_of_thread, "bounce"):
        _of_thread.bounce = mmap.mmap(-1, BOUNCE_NBYTES + PAGE)
    return memoryview(_of_thread.bounce)
