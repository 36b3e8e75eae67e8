"""Files that have not changed since this rank's last save: they are linked into the new step, and not written again.

Their digests tell, and nothing else. One damaged inode must not be in every checkpoint, so a file is written anew at
the first save of a daemon, and from there on at each :data:`EVERY`-th.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sidesave.errors import WriteError
from sidesave.writer_daemon.commit import coordination
from sidesave.writer_daemon.format import layout, manifest, tensor_file
from sidesave.writer_daemon.protocol import Save
from sidesave.writer_daemon.storage import Storage
from sidesave.writer_daemon.writing.sealed import Sealed

logger = logging.getLogger(__name__)

EVERY: Final = 20
"""Of so many saves one writes every file anew."""


@dataclass(frozen=True, slots=True)
class _File:
    digests: bytearray
    links: int
    sealed: Sealed | None


class FrozenFiles:
    """What one writer's last save has of containers that are not expected to change."""

    def __init__(self, storage: Storage) -> None:
        """Nothing has been written yet."""
        self._storage = storage
        self._save: Save | None = None
        self._record = b""
        self._files: dict[str, _File] = {}

    def digests(self, extent: str) -> bytearray:
        """The digest list of the last save's file, if this save may link that; else empty."""
        file = self._files.get(extent)
        return bytearray() if file is None or file.links >= EVERY - 1 else file.digests

    def sealed(self, extent: str) -> Sealed | None:
        """How the last save's file was encrypted, if it was."""
        file = self._files.get(extent)
        return None if file is None else file.sealed

    def link(self, name: str, final: str) -> bool:
        """Give the last save's file of this name its name in this save; False where that cannot be done."""
        last = self._save
        assert last is not None
        step, partial = manifest.step_directory(last.step), coordination.partial_of(last)
        # Of several ranks it may not be committed yet, and may be at any moment.
        return any(
            self._holds_last(directory) and self._storage.link(f"{directory}/{name}", final)
            for directory in (step, partial, step)
        )

    def _holds_last(self, directory: str) -> bool:
        """Whether a directory is that of the last save, and not of another save of its step."""
        assert self._save is not None
        try:
            data = self._storage.read(f"{directory}/{manifest.record_file(self._save.rank)}", manifest.MAX_JSON_NBYTES)
        except WriteError as error:
            logger.warning("%s is not linked to: %s", directory, error)
            return False
        return data is not None and tensor_file.digest(data) == self._record

    def wrote(
        self,
        save: Save,
        record: bytes,
        written: Mapping[str, tuple[bytearray, Sealed | None]],
        linked: frozenset[str],
    ) -> None:
        """A save is durable with this record and these files, by extent, of which some were linked.

        Of each its digest list, of what was in memory, and how it was encrypted.
        """
        self._files = {
            name: _File(digests, self._files[name].links + 1 if name in linked else 0, sealed)
            for name, (digests, sealed) in written.items()
            if is_frozen(name)
        }
        self._save, self._record = save, tensor_file.digest(record)


def is_frozen(extent: str) -> bool:
    """Whether a file holds what is not expected to change."""
    return layout.container_of(extent).removesuffix(layout.UNSHARED).endswith(layout.FROZEN)
