"""The pinned steps of a run, which are never deleted until they are unpinned."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any, Final, cast

from sidesave.errors import IntegrityError
from sidesave.writer_daemon.storage import sealed_json, urls
from sidesave.writer_daemon.storage.sealed_json import FactFile


def _parse(body: dict[str, Any], path: str) -> frozenset[int]:
    return _steps(sealed_json.get(body, "steps", list, path), path)


def _parse_old(data: bytes, path: str) -> frozenset[int]:
    return _steps(json.loads(data), path)


def _steps(value: object, path: str) -> frozenset[int]:
    if not isinstance(value, list) or not sealed_json.are_whole(cast("list[Any]", value)):
        raise IntegrityError(f"{path}: must hold a list of steps")
    return frozenset(cast("list[int]", value))


PINS: Final = FactFile(
    ".sidesave.pins",
    "sidesave-pins",
    _parse,
    lambda steps: {"steps": sorted(steps)},
    hint="so the pinned steps are unknown; remove it, and pin them again",
    parse_old=_parse_old,
)


class Pins:
    """The steps that retention never deletes.

    They are stored in a small file in the run directory, or an object, replaced atomically.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self.recent = frozenset[int]()
        """Steps pinned through this object, each from before its pin is durable."""

    def read(self) -> frozenset[int]:
        """Return the pinned steps.

        Raises like :meth:`FactFile.read`, so that a damaged file does not unpin any.
        """
        with contextlib.closing(urls.open_storage(self._directory)) as storage:
            return PINS.read(storage) or frozenset()

    def change(self, step: int, *, pinned: bool) -> bool:
        """Pin or unpin a step, durably; return whether it was not so before.

        Raises ``WriteError``, or what :meth:`read` raises.
        """
        steps = frozenset({step})
        return self._change(steps if pinned else frozenset(), frozenset() if pinned else steps)

    def add(self, steps: frozenset[int]) -> None:
        """Pin steps besides those that are pinned, durably. Raises like :meth:`change`."""
        self._change(steps, frozenset())

    def _change(self, added: frozenset[int], removed: frozenset[int]) -> bool:
        with self._lock:
            before = self.read()
            after = (before | added) - removed
            self.recent |= added
            try:
                if after != before:
                    with contextlib.closing(urls.open_for_writing(self._directory)) as storage:
                        PINS.write(storage, after)
            except BaseException:  # also an interrupt
                self.recent -= added - before
                raise
            self.recent -= removed
            return after != before
