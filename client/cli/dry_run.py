"""A run directory that only seems to change, to show what an operation would do."""

from __future__ import annotations

from contextlib import AbstractContextManager

from sidesave.writer_daemon.storage import InputFile, OutputFile, Storage


class DryRun(Storage):
    """Reads from a storage and changes nothing; directories only seem to be renamed and removed."""

    def __init__(self, storage: Storage) -> None:
        self.root = storage.root
        self._storage = storage
        self._sources = {name: name for name in storage.list_directory("")}

    def free_nbytes(self) -> int:
        """Those of the storage."""
        return self._storage.free_nbytes()

    def make_directory(self, name: str, mode: int) -> bool:
        """Seem to create it; nothing is found in it."""
        return self._sources.setdefault(name, name) == name

    def list_directory(self, name: str) -> list[str]:
        """The names that would be there."""
        return self._storage.list_directory(self._source(name)) if name else list(self._sources)

    def create(self, path: str, nbytes: int, final: str | None = None) -> OutputFile:
        """A file that discards everything."""
        return _Nothing()

    def read(self, path: str, max_nbytes: int) -> bytes | None:
        """The file as it is."""
        return self._storage.read(self._source(path), max_nbytes)

    def open(self, path: str) -> AbstractContextManager[InputFile]:
        """The file as it is."""
        return self._storage.open(self._source(path))

    def is_shared(self, path: str) -> bool | None:
        """As it is."""
        return self._storage.is_shared(self._source(path))

    def publish(self, temporary: str, final: str) -> bool:
        """Seem to."""
        return True

    def replace(self, path: str, data: bytes) -> None:
        """Seem to."""

    def rename_directory(self, source: str, target: str) -> None:
        """Seem to rename it: its content appears under the new name."""
        self._sources[target] = self._sources.pop(source)

    def open_to_readers(self, name: str) -> None:
        """Seem to."""

    def sync_directory(self, name: str) -> None:
        """Nothing has changed."""

    def remove(self, path: str) -> None:
        """Seem to."""
        self._sources.pop(path, None)

    def remove_tree(self, name: str) -> None:
        """Seem to."""
        self._sources.pop(name, None)

    def close(self) -> None:
        """The storage stays its owner's."""

    def _source(self, path: str) -> str:
        first, slash, rest = path.partition("/")
        return self._sources.get(first, first) + slash + rest


class _Nothing(OutputFile):
    def write_at(self, data: memoryview, offset: int) -> None:
        """Drop it."""

    def finish(self, nbytes: int) -> None:
        """There is nothing to finish."""

    def close(self) -> None:
        """There is nothing to close."""
