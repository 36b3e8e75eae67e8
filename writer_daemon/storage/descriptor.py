"""An open file owned by an object, so that an interrupt cannot leak the descriptor."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Final, Self

DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Descriptor:
    """A file opened with ``open(2)``. Closing it releases its locks."""

    def __init__(self, path: str, flags: int, *, directory: int | None = None) -> None:
        """Open ``path``, relative to ``directory`` if given; raises plain ``OSError``.

        A created file gets the mode 0o666, before the umask.
        """
        self._open: list[int] = []
        opening = functools.partial(
            os.open, flags=flags | os.O_CLOEXEC, mode=0o666, dir_fd=directory
        )
        self._open.extend(map(opening, (path,)))  # opens and stores it in one instruction

    def fileno(self) -> int:
        """Return the descriptor; -1 after :meth:`close`."""
        return self._open[0] if self._open else -1

    def close(self) -> None:
        """Close the file; idempotent. Ignores errors: fsync has reported those that matter."""
        # already closed, or never opened
        with contextlib.suppress(OSError, IndexError, AttributeError):
            # removes and closes it in one instruction
            list(map(os.close, map(self._open.pop, (-1,))))

    __del__ = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
