"""Tensor files on their way through the cipher: from the arena into a bounce buffer, block by block, and to storage.

Blocks are those of the file, from its first byte on, not of its tensors: so any chunk is sealed alone, to whole pages,
and how large the tensors are is not told. What is digested is what is stored.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from sidesave.stager.memory.arena import PAGE, page_up
from sidesave.writer_daemon.format.manifest import rank_file
from sidesave.writer_daemon.format.tensor_file import BLOCK_NBYTES, DIGEST_NBYTES, digest
from sidesave.writer_daemon.sealing.cipher import TAG_NBYTES, FileCipher

BOUNCE_NBYTES: Final = 2 << 20
"""In each thread that writes: of four together 8 MiB, and a page each."""


@dataclass(slots=True)
class Sealed:
    """What becomes of a tensor file where it is encrypted: a ``number`` stands for its name.

    ``origin`` are the sequence and the number under which it was sealed, which are its own unless it is linked.
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
        """The file's."""
        return rank_file(str(self.number), self.rank, "safetensors.enc")

    def linked_to(self, other: Sealed) -> Sealed:
        """This file, with the bytes of another one."""
        linked = replace(self, origin=other.origin)
        linked.tags, linked.digests = other.tags, other.digests
        return linked

    def lists(self) -> dict[str, bytes]:
        """The digest list and the tags, by name."""
        names = {"xxh3": self.digests, "tags": self.tags}
        return {rank_file(str(self.number), self.rank, suffix): bytes(content) for suffix, content in names.items()}

    def seal(self, data: memoryview, offset: int, into: memoryview) -> None:
        """Seal ``data``, which begins at ``offset`` with a block; ``into`` has room for one tag more."""
        for begin in range(0, len(data), BLOCK_NBYTES):
            block = data[begin : begin + BLOCK_NBYTES]
            number, end = (offset + begin) // BLOCK_NBYTES, begin + len(block)
            self.cipher.seal_block(number, block, into[begin : end + TAG_NBYTES])
            tag, at = slice(number * TAG_NBYTES, (number + 1) * TAG_NBYTES), number * DIGEST_NBYTES
            self.tags[tag] = into[end : end + TAG_NBYTES]  # the next block takes its place
            self.digests[at : at + DIGEST_NBYTES] = digest(into[begin:end])

    def pieces(
        self, data: memoryview, offset: int, *, keeps: bool, check: Callable[[], None]
    ) -> Iterator[tuple[memoryview, int]]:
        """Sealed pieces of ``data``, which begins at ``offset``, and the offset of each; whole pages.

        ``check`` raises where the memory was handed to another save by now: then nothing of it may be stored. A storage
        that ``keeps`` what it is given until it has sent it gets memory of its own each time.
        """
        for begin in range(0, len(data), BOUNCE_NBYTES):
            part = data[begin : begin + BOUNCE_NBYTES]
            bounce = memoryview(mmap.mmap(-1, BOUNCE_NBYTES + PAGE)) if keeps else _bounce()
            self.seal(part, offset + begin, bounce)
            check()
            yield bounce[: page_up(len(part))], offset + begin

    def reader(self, data: memoryview) -> Callable[[int, int], memoryview]:
        """Gives the bytes of the file anew, from an offset on that begins a block."""

        def read(offset: int, nbytes: int) -> memoryview:
            into = memoryview(bytearray(nbytes + TAG_NBYTES))
            self.seal(data[offset : offset + nbytes], offset, into)
            return into[:nbytes]

        return read


_of_thread = threading.local()


def _bounce() -> memoryview:
    """The buffer of this thread."""
    if not hasattr(_of_thread, "bounce"):
        _of_thread.bounce = mmap.mmap(-1, BOUNCE_NBYTES + PAGE)
    return memoryview(_of_thread.bounce)
