"""File names: those that may be ours, and those that a user may give to extra files."""

from __future__ import annotations

import re
from typing import Final

LEASE_DIRECTORY: Final = ".sidesave.lease"

_NAME = re.compile(r"[A-Za-z0-9%_@-][A-Za-z0-9%_@.-]{0,199}")


def is_safe_name(name: str) -> bool:
    """Whether ``name`` may become a file name of ours: no separator, no leading dot, no control characters."""
    return _NAME.fullmatch(name) is not None


MAX_EXTRA_FILES: Final = 1000
MAX_EXTRA_NBYTES: Final = 64 << 20
"""All files of the user beside the tensors of one checkpoint: the call copies them, and the daemon holds them."""
EXTRA_FILE_NAMES: Final = (
    "1 to 200 ASCII letters, digits and any of %_@-. with no dot in front; not manifest.json, abort.json or keys.json, "
    "and none that begins with rank- or replica-digest., holds .rank-, or ends in .safetensors, .xxh3 or .msgpack"
)
"""What :func:`is_extra_file_name` allows, for people."""
_OURS = re.compile(
    r"(manifest|abort|keys)\.json|keys\.json\..*|rank-.*|replica-digest\..*|.*\.rank-.*|.*\.(safetensors|xxh3|msgpack)",
    re.IGNORECASE,
)


def is_extra_file_name(name: str) -> bool:
    """Whether a user's extra file may have this name.

    It must not be the name of a file of ours, nor look like tensors to other readers, which read all that ends in
    .safetensors. Case is ignored, since some file systems ignore it.
    """
    return is_safe_name(name) and _OURS.fullmatch(name) is None


_SEALED = re.compile(r"[0-9]{1,9}\.rank-[0-9]{5}\.file\.enc")


def is_sealed_file_name(name: str) -> bool:
    """Whether a user's extra file has this name where it is encrypted, as the name is."""
    return _SEALED.fullmatch(name) is not None
