"""Bytes that checkpoints of one run share, because unchanged files are linked, not rewritten."""

from __future__ import annotations

import os
from collections.abc import Iterable

from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.format import layout
from sidesave.writer_daemon.storage import urls


def shared_nbytes(checkpoints: Iterable[CheckpointInfo]) -> dict[str, int]:
    """Return by path the bytes of a checkpoint's tensor files that an earlier one has, too.

    Reads the disk. In an object store nothing is shared.
    """
    seen: set[tuple[int, int]] = set()
    shared: dict[str, int] = {}
    for info in sorted(checkpoints, key=lambda info: info.position):
        shared[info.path] = 0
        for facts in () if urls.is_url(info.path) else _linked_files(info.path):
            identity = facts.st_dev, facts.st_ino
            shared[info.path] += facts.st_size if identity in seen else 0
            seen.add(identity)
    return shared


def _linked_files(path: str) -> list[os.stat_result]:
    try:
        with os.scandir(path) as entries:
            files = [
                entry.stat(follow_symlinks=False) for entry in entries if _is_frozen(entry.name)
            ]
    except OSError:  # it is being deleted
        return []
    return [facts for facts in files if facts.st_nlink > 1]


def _is_frozen(name: str) -> bool:
    return layout.FROZEN in name and name.endswith(".safetensors")
