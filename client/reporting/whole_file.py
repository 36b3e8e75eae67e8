"""Replaces a small file atomically: other programs see the old content or the new one."""

from __future__ import annotations

import contextlib
import os
import tempfile


def write_whole(path: str, data: bytes) -> None:
    """Replace ``path`` by a file that every user may read; no fsync. Raises ``OSError``."""
    fd, temporary = tempfile.mkstemp(prefix=".sidesave-", dir=os.path.dirname(path) or ".")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            os.fchmod(fd, 0o644)  # mkstemp makes it private, and readers are often other users
        os.replace(temporary, path)
    except BaseException:  # an interrupt leaves no temporary file either
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
