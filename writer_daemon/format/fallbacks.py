"""The fallback directories of a run, which may hold checkpoints; written down in the run directory.

A session's fallback directory is written down before it saves. It is marked as used before anything is committed there,
by a rename, which needs no room on a full disk. So a later session without the option looks there, and knows if it
cannot.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Final, cast

from sidesave.errors import IntegrityError
from sidesave.writer_daemon.format.names import LEASE_DIRECTORY
from sidesave.writer_daemon.storage import PosixStorage, sealed_json
from sidesave.writer_daemon.storage.atomic import replace_file

logger = logging.getLogger(__name__)

USED: Final = ".sidesave.fallback"
GIVEN: Final = ".sidesave.fallback.given"
_FORMAT: Final = "sidesave-fallback"
_MAX_NBYTES: Final = 1 << 20


def remember(root: str, fallback: str) -> tuple[list[str], list[str]]:
    """Write down the fallback directory of this session; returns the earlier ones that exist, and those that are lost.

    Raises:
        IntegrityError: The file is damaged.
        WriteError: It cannot be read or written.
    """
    used = _read(root, USED)
    known = [path for path in dict.fromkeys([*used, *_read(root, GIVEN)]) if path != fallback]
    if fallback and fallback not in used:
        body = {"format": _FORMAT, "version": sealed_json.FORMAT_VERSION, "directories": [*used, fallback]}
        replace_file(f"{root}/{GIVEN}", sealed_json.seal(body), "cannot write down where else checkpoints may be")
    # Its lease stays in every directory that was used: a mount point without its file system has none.
    there = [path for path in [*known, fallback] if path and os.path.isdir(f"{path}/{LEASE_DIRECTORY}")]
    lost = [path for path in used if path not in there]
    return [path for path in there if path != fallback], lost


def mark_used(root: str) -> None:
    """Mark the fallback directory as used; a failure is only logged, since a save waits."""
    try:
        with contextlib.suppress(FileNotFoundError):  # it was used before
            os.rename(f"{root}/{GIVEN}", f"{root}/{USED}")
        with contextlib.closing(PosixStorage(root)) as storage:
            storage.sync_directory("")
    except OSError as error:
        logger.error("the run does not remember that it uses its fallback directory: %s", error)


def _read(root: str, name: str) -> list[str]:
    with contextlib.closing(PosixStorage(root)) as storage:
        data = storage.read(name, _MAX_NBYTES)
    if data is None:
        return []
    path = f"{root}/{name}"
    try:
        sealed_json.check_digest(data, path)
        body = sealed_json.load_json(data, path)
        sealed_json.check_version(body, _FORMAT, path)
        directories = cast("list[object]", sealed_json.get(body, "directories", list, path))
    except IntegrityError as error:
        text = "so it is not known where else the run has checkpoints; remove it to go on without them"
        raise IntegrityError(f"{error}, {text}") from error
    return [each for each in directories if isinstance(each, str)]
