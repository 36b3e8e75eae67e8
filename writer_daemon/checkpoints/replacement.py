"""Reading a checkpoint that may be replaced meanwhile: its current path and its identity."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from sidesave.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    IntegrityError,
)
from sidesave.writer_daemon.format.names import (
    parse_hidden_directory,
    parse_step_directory,
    step_directory,
)
from sidesave.writer_daemon.storage import urls

T = TypeVar("T")

_MAX_TRIES: Final = 20
"""A reader gives up if its step is replaced this often while it reads."""
_LOOKS: Final = 5
"""A checkpoint that is not found this many times in a row is not there."""


class RetryIfReplaced:
    """Attempts to read checkpoints; if one is replaced meanwhile, its successor is read.

    ::

        for attempt in RetryIfReplaced(path):
            with attempt as [place]:
                return read(place)

    Without this, a step that is being replaced would look damaged or missing to its reader. An
    error, or a result that is :attr:`in_doubt`, counts only if the checkpoints are still the same
    afterwards.

    Attributes:
        in_doubt: Set in an attempt: the result may be wrong, and does not count if there was a
            replacement.
    """

    def __init__(self, *paths: str, locate: Callable[[], str] | None = None) -> None:
        """``locate`` returns the current directory if the given one is gone."""
        self._paths: tuple[str, ...] = paths
        self._locate = locate
        self._over = self.in_doubt = False
        self._tries = 0
        self._seen: list[tuple[str, object]] = []

    def read(self, read: Callable[[str], T]) -> T:
        """Call ``read`` on the only path."""
        for attempt in self:
            with attempt as (place,):
                return read(place)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def __iter__(self) -> Iterator[RetryIfReplaced]:
        while not self._over:
            yield self

    def __enter__(self) -> list[str]:
        self._over, self.in_doubt = True, False
        self._tries += 1
        self._seen = [_seen(path) for path in self._paths]
        return [place for place, _ in self._seen]

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """Whether to suppress the error and try again."""
        if not (isinstance(error, (CheckpointError, OSError)) if error else self.in_doubt):
            return False
        if (
            isinstance(error, CheckpointReplacedError)
            or [_seen(path) for path in self._paths] != self._seen
        ):
            self._over = self._tries >= _MAX_TRIES
            if self._over and (
                error is None or isinstance(error, (IntegrityError, FileNotFoundError))
            ):
                text = (
                    f"it was replaced or deleted in each of {self._tries} attempts to read it: "
                    "read it again"
                )
                raise CheckpointReplacedError(errno.ESTALE, text, self._paths[0]) from error
        elif self._locate is not None and isinstance(error, CheckpointNotFoundError):
            paths = (self._locate(),)
            if paths != self._paths:
                self._paths, self._tries, self._over = paths, 0, False
        return error is not None and not self._over


def _seen(path: str) -> tuple[str, object]:
    """Return the current path of a checkpoint, and its identity."""
    place = current_path(path)
    return place, identity(place)


def current_path(path: str) -> str:
    """Return a checkpoint's current path: hidden during a replacement, also an interrupted one."""
    parent, name = os.path.split(path)
    step = step_of(name)
    if step is None or urls.is_url(path):
        return path
    current = os.path.join(parent, step_directory(step))
    for _ in range(_LOOKS):  # it may get its name back, or go, between a look and the next
        if os.path.isdir(current):
            break
        with contextlib.suppress(OSError):
            for name in os.listdir(parent):
                other = os.path.join(parent, name)
                if name.startswith(".") and step_of(name) == step and os.path.isdir(other):
                    return other
    return current


def step_of(name: str) -> int | None:
    """Return the step that a directory's name states, also during a replacement; else None."""
    hidden = parse_hidden_directory(name)
    return (
        hidden[0] if hidden is not None and hidden[2] == "replaced" else parse_step_directory(name)
    )


def identity(path: str) -> tuple[int, int] | None:
    """Return inode and time of change, or None if the path cannot be examined.

    Another directory of that name has others, and so has one being removed.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
