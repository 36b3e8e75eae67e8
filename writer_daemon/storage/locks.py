"""``flock(2)`` on one open file: taken at once or not at all, and released by the process that took it.

Such a lock belongs to the open file, not to a process: a forked child has it too, and keeps it as long as it lives
unless it is released explicitly.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
from collections.abc import Callable

from sidesave.writer_daemon.storage.descriptor import Descriptor


def take(file: Descriptor, kind: int) -> Callable[[], None]:
    """Lock the file and give back what unlocks and closes it; it is closed as well where that is refused.

    Raises ``BlockingIOError`` where another lock is in the way, and else plain ``OSError``.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BaseException:  # Ctrl-C as well leaves no descriptor
        file.close()
        raise
    return functools.partial(_give_back, file, os.getpid())


def _give_back(file: Descriptor, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError, ValueError):
            fcntl.flock(file, fcntl.LOCK_UN)
    file.close()
