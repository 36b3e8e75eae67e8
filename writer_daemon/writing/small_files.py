"""How a file gets its final name; and the small files of a save, which are written while its tensor files are."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import Final, Self

from sidesave.errors import WriteError
from sidesave.writer_daemon.format import tensor_file
from sidesave.writer_daemon.storage import Storage

CHUNK_NBYTES: Final = 16 << 20
Read = Callable[[int, int], memoryview]
"""Gives the bytes of a file from an offset on."""


def publish(storage: Storage, temporary: str, final: str, nbytes: int, read: Read, *, replaces: bool = False) -> None:
    """Give a finished file its final name. One that has it already must have these bytes, else ``WriteError``.

    Unless this one ``replaces`` it: what a daemon that died has linked is encrypted under another key.
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
        raise WriteError(errno.EEXIST, "another file has this name, with other content", f"{storage.root}/{final}")
    storage.remove(temporary)


def _digest(nbytes: int, read: Read) -> bytes:
    """The digest of the digests of a file's chunks: bounded memory whatever the file's size."""
    parts = [
        tensor_file.digest(read(offset, min(CHUNK_NBYTES, nbytes - offset)))
        for offset in range(0, nbytes, CHUNK_NBYTES)
    ]
    return tensor_file.digest(b"".join(parts))


class SmallFiles:
    """Those of one save in one directory; thread-safe but for :meth:`publish`.

    Each is made durable by a thread of ``pool`` under a name of its own, which ``temporary`` makes of the final one.
    As a context manager it ends when no thread is at any of them: nothing may appear in what is being removed then.
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
        """There is none yet; ``replaces`` is for :func:`publish`."""
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
        """Begin to write one."""
        self._files.append((name, data, self._pool.submit(self._write, name, data)))

    def wait(self) -> None:
        """Wait until no thread is at any of them; raises nothing."""
        wait([future for *_, future in self._files])

    def publish(self) -> None:
        """Wait until all are durable, and give them their names; raises what the first of them has raised."""
        self.wait()
        for *_, future in self._files:
            future.result()
        self._files = [(name, data, self._pool.submit(self._publish, name, data)) for name, data, _ in self._files]
        self.wait()
        for *_, future in self._files:
            future.result()
        self._files = []

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
