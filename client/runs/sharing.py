"""Bytes that checkpoints of one run share, because a file that has not changed is linked and not written again."""

from __future__ import annotations

import os
from collections.abc import Iterable

from sidesave.client.runs.info import CheckpointInfo
from sidesave.writer_daemon.format import layout
from sidesave.writer_daemon.storage import urls


def shared_nbytes(checkpoints: Iterable[CheckpointInfo]) -> dict[str, int]:
    """By path, how many bytes of each checkpoint's tensor files are those of an earlier one as well; reads the disk.

    In an object store nothing is shared.
    """
    seen: set[tuple[int, int]] = set()
    shared: dict[str, int] = {}
    for info in sorted(checkpoints, key=lambda info: info.sequence):
        shared[info.path] = 0
        for facts in () if urls.is_url(info.path) else _linked_files(info.path):
            identity = facts.st_dev, facts.st_ino
            shared[info.path] += facts.st_size if identity in seen else 0
            seen.add(identity)
    return shared


def _linked_files(path: str) -> list[os.stat_result]:
    try:
        with os.scandir(path) as entries:
            files = [entry.stat(follow_symlinks=False) for entry in entries if _is_frozen(entry.name)]
    except OSError:  # it is being deleted
        return []
    return [facts for facts in files if facts.st_nlink > 1]


def _is_frozen(name: str) -> bool:
    return layout.FROZEN in name and name.endswith(".safetensors")
