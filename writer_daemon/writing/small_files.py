"""Publishes files under their final names; writes a save's small files next to its tensor files."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import Final, Self

from sidesave.errors import WriteError
from sidesave.writer_daemon.format import tensor_file
from sidesave.writer_daemon.format.names import folders_of
from sidesave.writer_daemon.storage import Storage
from sidesave.writer_daemon.storage.base import FOLDER_MODE

CHUNK_NBYTES: Final = 16 << 20
Read = Callable[[int, int], memoryview]
"""Returns the bytes of a file, given an offset and their number."""


def publish(
    storage: Storage, temporary: str, final: str, nbytes: int, read: Read, *, replaces: bool = False
) -> None:
    """Rename a finished file to its final name.

    Raises ``WriteError`` if a file with other bytes has that name. ``replaces`` removes such a
    file: a daemon that died may have linked one encrypted under another key.
    """
    if storage.publish(temporary, final):
        return
    with storage.open(final) as source:
        published = _digest(source.nbytes, source.read_at)
    if published != _digest(nbytes, read):
        if replaces:
            storage.remove(final)
            if storage.publish(temporary, final):
                return
        raise WriteError(
            errno.EEXIST,
            "another file has this name, with other content",
            f"{storage.root}/{final}",
        )
    storage.remove(temporary)


def _digest(nbytes: int, read: Read) -> bytes:
    """Return the digest of the digests of a file's chunks, in bounded memory."""
    parts = [
        tensor_file.digest(read(offset, min(CHUNK_NBYTES, nbytes - offset)))
        for offset in range(0, nbytes, CHUNK_NBYTES)
    ]
    return tensor_file.digest(b"".join(parts))


class SmallFiles:
    """The small files of one save in one directory; thread-safe except :meth:`publish`.

    Threads of ``pool`` make each file durable under a temporary name, ``temporary(name)``. The
    ``with`` block ends after all threads have finished, so that no file appears in a directory that
    is being removed.
    """

    def __init__(
        self,
        storage: Storage,
        directory: str,
        temporary: Callable[[str], str],
        pool: Executor,
        *,
        replaces: bool = False,
    ) -> None:
        """Start without files; ``replaces`` is passed to :func:`publish`."""
        self._replaces = replaces
        self._storage = storage
        self._directory = directory
        self._temporary = temporary
        self._pool = pool
        self._files: list[tuple[str, bytes, Future[None]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def add(self, name: str, data: bytes) -> None:
        """Start to write a file."""
        self._files.append((name, data, self._pool.submit(self._write, name, data)))

    def wait(self) -> None:
        """Wait until all threads have finished; raises nothing."""
        wait([future for *_, future in self._files])

    def publish(self) -> None:
        """Wait until all files are durable, then rename them to their final names.

        Raises the first error.
        """
        self.wait()
        for *_, future in self._files:
            future.result()
        folders = [
            f"{self._directory}/{folder}"
            for folder in sorted(folders_of(name for name, *_ in self._files))
        ]
        for folder in folders:
            self._storage.make_directory(folder, FOLDER_MODE)
        self._files = [
            (name, data, self._pool.submit(self._publish, name, data))
            for name, data, _ in self._files
        ]
        self.wait()
        for *_, future in self._files:
            future.result()
        self._files = []
        for folder in folders:
            self._storage.sync_directory(folder)

    def _write(self, name: str, data: bytes) -> None:
        final = f"{self._directory}/{name}"
        with self._storage.creating(self._temporary(name), len(data), final) as output:
            output.write_all(data)

    def _publish(self, name: str, data: bytes) -> None:
        view = memoryview(data)
        final = f"{self._directory}/{name}"
        temporary = self._temporary(name)
        read: Read = lambda offset, size: view[offset:][:size]  # noqa: E731
        publish(self._storage, temporary, final, len(data), read, replaces=self._replaces)
