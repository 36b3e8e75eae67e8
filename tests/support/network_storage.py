"""A double of a network file system that lies, and what a lease on it needs."""

from __future__ import annotations

import errno
import random
import threading
from contextlib import AbstractContextManager

from sidesave.errors import WriteError
from sidesave.writer_daemon.storage import InputFile, OutputFile, PosixStorage, Storage

ELSEWHERE = "00000000-0000-0000-0000-000000000000"
"""A boot id that is not this system's."""
PERIOD_S = 0.2


class NetworkStorage(Storage):
    """A client of a network file system, as such clients are: no locks, caches that are late,
    requests sent twice.

    A name that was not there stays missing until its directory is listed. A listing may be an old
    one as long as this client changes nothing in it. A change may be reported as failed though it
    was made: its first reply was lost, and the repeated request met its own result.
    """

    def __init__(self, root: str, seed: int | None = None) -> None:
        """Lie as ``seed`` has it; without one only the locks are missing."""
        self._real = PosixStorage(root)
        self.root = root
        self._chance = random.Random(seed)
        self._honest = seed is None
        self._missing: set[str] = set()
        self._listings: dict[str, list[str]] = {}
        self._lock = threading.RLock()

    def _lies(self) -> bool:
        with self._lock:
            return not self._honest and self._chance.random() < 0.3

    def _changed(self, path: str) -> None:
        with self._lock:
            self._listings.pop(path.rpartition("/")[0], None)
            self._missing.discard(path)

    def list_directory(self, name: str) -> list[str]:
        with self._lock:
            if name in self._listings and self._lies():
                return self._listings[name]
            self._listings[name] = self._real.list_directory(name)
            self._missing = {path for path in self._missing if path.rpartition("/")[0] != name}
            return self._listings[name]

    def read(self, path: str, max_nbytes: int) -> bytes | None:
        with self._lock:
            if path in self._missing:
                return None
            data = self._real.read(path, max_nbytes)
            if data is None and not self._honest:
                self._missing.add(path)
            return data

    def create(self, path: str, nbytes: int, final: str | None = None) -> OutputFile:
        self._changed(path)
        return self._real.create(path, nbytes)

    def publish(self, temporary: str, final: str) -> bool:
        self._changed(final)
        published = self._real.publish(temporary, final)
        if not self._lies():
            return published
        if published and self._chance.random() < 0.3:
            return False
        code = self._chance.choice(
            [errno.EIO, errno.ENOENT, errno.ESTALE] if published else [errno.EIO]
        )
        raise WriteError(code, "the reply was lost", f"{self.root}/{final}")

    def link(self, old: str, new: str) -> bool:
        self._changed(new)
        return self._real.link(old, new) and not self._lies()

    def remove(self, path: str) -> None:
        self._changed(path)
        self._real.remove(path)
        if self._lies():
            raise WriteError(errno.EIO, "the reply was lost", f"{self.root}/{path}")

    def make_directory(self, name: str, mode: int) -> bool:
        self._changed(name)
        return self._real.make_directory(name, mode) and not self._lies()

    def replace(self, path: str, data: bytes) -> None:
        self._real.replace(path, data)

    def rename_directory(self, source: str, target: str) -> None:
        self._changed(source)
        self._changed(target)
        self._real.rename_directory(source, target)

    def free_nbytes(self) -> int:
        return self._real.free_nbytes()

    def open(self, path: str) -> AbstractContextManager[InputFile]:
        return self._real.open(path)

    def open_to_readers(self, name: str) -> None:
        self._real.open_to_readers(name)

    def sync_directory(self, name: str) -> None:
        self._real.sync_directory(name)

    def remove_tree(self, name: str) -> None:
        self._changed(name)
        self._real.remove_tree(name)

    def close(self) -> None:
        self._real.close()
