"""Names of files: those that may be ours, and those that a user may give to files beside the tensors."""

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
    "1 to 200 ASCII letters, digits and any of %_@-. with no dot in front; not manifest.json or abort.json, and none "
    "that begins with rank- or claim., holds .rank-, or ends in .safetensors, .xxh3 or .msgpack"
)
"""What :func:`is_extra_file_name` allows, for people."""
_OURS = re.compile(
    r"manifest\.json|abort\.json|rank-.*|claim\..*|.*\.rank-.*|.*\.(safetensors|xxh3|msgpack)", re.IGNORECASE
)


def is_extra_file_name(name: str) -> bool:
    """Whether a file of the user may have this name in a checkpoint.

    Not one that a file of ours can have, or that stock readers would take for tensors: they read all that ends in
    .safetensors. Case does not count, as there are file systems on which it does not.
    """
    return is_safe_name(name) and _OURS.fullmatch(name) is None
