"""The steps of a run that nothing deletes unless they are unpinned first."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from typing import Any, Final, cast

from sidesave.errors import IntegrityError
from sidesave.writer_daemon.storage import urls

PINS: Final = ".sidesave.pins"
_MAX_PINS_NBYTES: Final = 16 << 20


class Pins:
    """The steps that retention never deletes: a small file in the run directory, or object, replaced atomically."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._path = os.path.join(directory, PINS)
        self._lock = threading.Lock()

    def read(self) -> frozenset[int]:
        """The pinned steps; raises ``IntegrityError`` for a damaged file, else ``WriteError``."""
        try:
            with contextlib.closing(urls.open_storage(self._directory)) as storage:
                data = storage.read(PINS, _MAX_PINS_NBYTES)
            if data is None:
                return frozenset()
            steps = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"{self._path} is damaged: {error}") from error
        if not isinstance(steps, list) or not all(type(step) is int for step in cast("list[Any]", steps)):
            raise IntegrityError(f"{self._path} is damaged: it is no list of steps")
        return frozenset(cast("list[int]", steps))

    def change(self, step: int, *, pinned: bool) -> None:
        """Pin or unpin a step, durably. Raises ``WriteError``, or what :meth:`read` raises."""
        self._change(lambda before: before | {step} if pinned else before - {step})

    def add(self, steps: frozenset[int]) -> None:
        """Pin steps besides those that are pinned, durably. Raises like :meth:`change`."""
        self._change(steps.union)

    def _change(self, change: Callable[[frozenset[int]], frozenset[int]]) -> None:
        with self._lock:
            before = self.read()
            after = change(before)
            if after == before:
                return
            with contextlib.closing(urls.open_for_writing(self._directory)) as storage:
                storage.replace(PINS, json.dumps(sorted(after)).encode())
