"""Replaces a small file of a run directory atomically and durably. There is no other way to do so."""

from __future__ import annotations

import contextlib
import os
import secrets

from sidesave.errors import write_error
from sidesave.writer_daemon.storage.descriptor import DIRECTORY, Descriptor


def replace_file(path: str, data: bytes, doing: str) -> None:
    """Replace the content of ``path``, durably; raises ``WriteError``, which says what it was ``doing``."""
    draft = f"{path}.{secrets.token_hex(4)}"
    try:
        with open(draft, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(draft, path)
        with Descriptor(os.path.dirname(path), DIRECTORY) as directory:
            os.fsync(directory.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise write_error(error, doing, path) from error
