"""Links files that have not changed since this rank's last save, instead of writing them again.

A file counts as unchanged only if all its digests are equal. So that one damaged inode is not in
every checkpoint, a file is written again at a daemon's first save and at each :data:`EVERY`-th one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sidesave.errors import WriteError
from sidesave.writer_daemon.commit import attempts
from sidesave.writer_daemon.format import layout, manifest, tensor_file
from sidesave.writer_daemon.format.names import record_file, step_directory
from sidesave.writer_daemon.protocol import Save
from sidesave.writer_daemon.storage import Storage
from sidesave.writer_daemon.writing.sealed import Sealed
from sidesave.writer_daemon.writing.tensor_image import TensorImage

logger = logging.getLogger(__name__)

EVERY: Final = 20
"""Number of saves after which every file is written again."""


@dataclass(frozen=True, slots=True)
class _WrittenFile:
    digests: bytearray
    links: int
    sealed: Sealed | None


class FrozenFiles:
    """The files of frozen containers in one writer's last save."""

    def __init__(self, storage: Storage) -> None:
        """Start without a last save."""
        self._storage = storage
        self._save: Save | None = None
        self._record = b""
        self._files: dict[str, _WrittenFile] = {}

    def digests(self, extent: str) -> bytearray:
        """Return the digest list of the last save's file if this save may link it.

        Returns an empty list if not.
        """
        file = self._files.get(extent)
        return bytearray() if file is None or file.links >= EVERY - 1 else file.digests

    def sealed(self, extent: str) -> Sealed | None:
        """Return how the last save's file was encrypted; None if it was not."""
        file = self._files.get(extent)
        return None if file is None else file.sealed

    def link(self, name: str, final: str) -> bool:
        """Link the last save's file ``name`` as ``final``; return False if that is not possible."""
        last = self._save
        assert last is not None
        step, partial = step_directory(last.step), attempts.partial_of(last)
        # With several ranks the last save may not be committed yet, and may be committed at any
        # moment.
        return any(
            self._holds_last(directory) and self._storage.link(f"{directory}/{name}", final)
            for directory in (step, partial, step)
        )

    def _holds_last(self, directory: str) -> bool:
        """Whether a directory belongs to the last save, not to another save of its step."""
        assert self._save is not None
        try:
            data = self._storage.read(
                f"{directory}/{record_file(self._save.rank)}", manifest.MAX_JSON_NBYTES
            )
        except WriteError as error:
            logger.warning("no files of %s are linked: %s", directory, error)
            return False
        return data is not None and tensor_file.digest(data) == self._record

    def wrote(self, save: Save, record: bytes, images: Iterable[TensorImage]) -> None:
        """Remember a durable save, the content of its record, and its tensor files."""
        files: dict[str, _WrittenFile] = {}
        for image in images:
            name = image.extent.name
            if is_frozen(name):
                links = self._files[name].links + 1 if image.linked else 0
                files[name] = _WrittenFile(image.digests, links, image.sealed)
        self._save, self._record, self._files = save, tensor_file.digest(record), files


def is_frozen(extent: str) -> bool:
    """Whether a file holds frozen tensors."""
    return layout.container_of(extent).removesuffix(layout.UNSHARED).endswith(layout.FROZEN)
