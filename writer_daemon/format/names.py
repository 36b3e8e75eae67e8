"""The names of a run's directories, of a checkpoint's own files, and of the user's extra files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

LEASE_DIRECTORY: Final = ".sidesave.lease"

_STEP_DIR = re.compile(r"step-(\d{8,19})")
_HIDDEN = re.compile(
    r"\.step-(\d{8,19})\.([0-9a-f]{16}(?:-\d{1,19})?)\."
    r"(partial|salvage-\d{1,19}(?:-\d{1,9})?|replaced|aborted|trash|alike|diverged)"
)
_MAX_NAME: Final = 200
_NAME = re.compile(rf"[A-Za-z0-9%_@-][A-Za-z0-9%_@.-]{{0,{_MAX_NAME - 1}}}")


def step_directory(step: int) -> str:
    """Return the name of a checkpoint's directory: ``step-00000100``."""
    return f"step-{step:08d}"


def attempt_name(session: str, sequence: int, world_size: int) -> str:
    """Return the part of a hidden directory's name that identifies an attempt to save."""
    # With several ranks a late rank must not write into the directory of the next attempt.
    return session if world_size == 1 else f"{session}-{sequence}"


def hidden_directory(step: int, attempt: str, state: str) -> str:
    """Return the name of a hidden directory: ``.step-00000100.<attempt>.<state>``.

    See :func:`attempt_name`. States are ``partial``, ``salvage-<epoch>`` (a recovery examines it),
    ``replaced``, ``aborted``, ``trash`` (deleted; the attempt has a number if a step was deleted
    twice), and the verdicts ``alike`` and ``diverged`` (see ``coordination``).
    """
    return f".step-{step:08d}.{attempt}.{state}"


def parse_step_directory(name: str) -> int | None:
    """Return the step of a committed checkpoint's directory name; None for other names."""
    match = _STEP_DIR.fullmatch(name)
    return int(match[1]) if match and step_directory(int(match[1])) == name else None


def parse_hidden_directory(name: str) -> tuple[int, str, str] | None:
    """Return step, attempt and state of a hidden directory's name; None for other names."""
    match = _HIDDEN.fullmatch(name)
    parsed = (int(match[1]), match[2], match[3]) if match else None
    return parsed if parsed and hidden_directory(*parsed) == name else None


def rank_file(container: str, rank: int, suffix: str) -> str:
    """Return the name of a rank's file: ``model.rank-00000.safetensors``."""
    return f"{container}.rank-{rank:05d}.{suffix}"


def record_file(rank: int) -> str:
    """Return the name of a rank's record: ``rank-00000.json``."""
    return f"rank-{rank:05d}.json"


def is_safe_name(name: str) -> bool:
    """Whether ``name`` is a file name without separator, leading dot and control characters."""
    return _NAME.fullmatch(name) is not None


MAX_EXTRA_FILES: Final = 1000
MAX_EXTRA_NBYTES: Final = 64 << 20
"""Limit for all extra files of one checkpoint, in bytes.

``save()`` copies them, and the daemon keeps them in memory.
"""
EXTRA_FILE_NAMES: Final = (
    "1 to 200 ASCII letters, digits and any of %_@-. without a leading dot; not manifest.json, "
    "abort.json or keys.json; must not begin with rank- or replica-digest., contain .rank-, or end "
    "in .safetensors, .xxh3 or .msgpack; may be in one folder with such a name, as in folder/name"
)
"""Description, for messages, of the names that :func:`is_extra_file_name` allows."""
_OURS = re.compile(
    r"(manifest|abort|keys)\.json|keys\.json\..*|rank-.*|replica-digest\..*|.*\.rank-.*"  # ours
    r"|.*\.(safetensors|xxh3|msgpack)",  # suffixes that readers look for
    re.IGNORECASE,
)


def is_extra_file_name(name: str) -> bool:
    """Whether ``name`` is a valid name, or path ``folder/name``, of an extra file.

    Excludes names of a checkpoint's own files, and suffixes such as .safetensors that other readers
    look for. Ignores case, as some file systems do.
    """
    parts = name.split("/")
    return (
        len(parts) <= 2
        and len(name) <= _MAX_NAME
        and all(is_safe_name(part) and _OURS.fullmatch(part) is None for part in parts)
    )


def folders_of(names: Iterable[str]) -> set[str]:
    """Return the folders of extra files with these names. No file may have the name of a folder."""
    return {folder for folder, slash, _ in (name.rpartition("/") for name in names) if slash}


_SEALED = re.compile(r"[0-9]{1,9}\.rank-[0-9]{5}\.file\.enc")


def is_sealed_file_name(name: str) -> bool:
    """Whether ``name`` is the stored name of an encrypted extra file."""
    return _SEALED.fullmatch(name) is not None
