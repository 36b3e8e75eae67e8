"""The fallback directories of a run, which may hold checkpoints; recorded in the run directory.

A session records its fallback directory before it saves. Before the first commit there it marks the
directory as used, by a rename, which works on a full disk. So a later session without the option
also looks there, and reports if it cannot.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Final

from sidesave.errors import CheckpointError
from sidesave.writer_daemon.format.names import LEASE_DIRECTORY
from sidesave.writer_daemon.storage import sealed_json, urls
from sidesave.writer_daemon.storage.sealed_json import FactFile

logger = logging.getLogger(__name__)


def _declare(name: str) -> FactFile[list[str]]:
    return FactFile(
        name,
        "sidesave-fallback",
        lambda body, path: [
            each
            for each in sealed_json.get(body, "directories", list, path)
            if isinstance(each, str)
        ],
        lambda directories: {"directories": directories},
        hint=(
            "so other directories with checkpoints of the run are unknown; remove it to go on "
            "without them"
        ),
    )


USED: Final = _declare(".sidesave.fallback")
GIVEN: Final = _declare(".sidesave.fallback.given")


def remember(root: str, fallback: str) -> tuple[list[str], list[str]]:
    """Record this session's fallback directory; return the earlier ones: existing, missing.

    Raises:
        IntegrityError: The record is damaged.
        WriteError: The record cannot be read or written.
    """
    with contextlib.closing(urls.open_for_writing(root)) as storage:
        used, given = USED.read(storage) or [], GIVEN.read(storage) or []
        earlier = [path for path in dict.fromkeys([*used, *given]) if path != fallback]
        if fallback and fallback not in used:
            GIVEN.write(storage, [*used, fallback])
    # A used directory has a lease directory; a mount point whose file system is missing has none.
    existing = [
        path for path in [*earlier, fallback] if path and os.path.isdir(f"{path}/{LEASE_DIRECTORY}")
    ]
    missing = [path for path in used if path not in existing]
    return [path for path in existing if path != fallback], missing


def mark_used(root: str) -> None:
    """Mark the fallback directory as used; a failure is only logged, since a save waits."""
    try:
        with contextlib.closing(urls.open_for_writing(root)) as storage:
            if urls.is_url(root):
                given = GIVEN.read(storage)
                if given is not None:  # otherwise it is marked already
                    USED.write(storage, given)
                    storage.remove(GIVEN.name)
                return
            with contextlib.suppress(FileNotFoundError):  # it is marked already
                os.rename(f"{root}/{GIVEN.name}", f"{root}/{USED.name}")
            storage.sync_directory("")
    except (OSError, CheckpointError) as error:
        logger.error("cannot record that the fallback directory is used: %s", error)
