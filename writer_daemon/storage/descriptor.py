"""An open file that belongs to an object, so that an interrupt cannot leak it."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Final, Self

DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Descriptor:
    """A file, opened with ``open(2)``; plain ``OSError``. What is locked through it is unlocked when it is closed."""

    def __init__(self, path: str, flags: int, *, directory: int | None = None) -> None:
        """Open ``path``, in ``directory`` if it is relative; what is made has the mode 0o666 less the umask."""
        self._open: list[int] = []
        opening = functools.partial(os.open, flags=flags | os.O_CLOEXEC, mode=0o666, dir_fd=directory)
        self._open.extend(map(opening, (path,)))  # it is open and ours by the same instruction

    def fileno(self) -> int:
        """Its number; -1 once closed."""
        return self._open[0] if self._open else -1

    def close(self) -> None:
        """Close it; idempotent. An error comes too late to act on: what counts is what fsync has said."""
        with contextlib.suppress(OSError, IndexError, AttributeError):  # closed already, or never opened
            list(map(os.close, map(self._open.pop, (-1,))))  # it is closed and not ours any more, likewise

    __del__ = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
