"""The checkpointers of this process that are open, or still end: what has to be waited for.

At its end the process closes those that are open. A new checkpointer waits for earlier ones of its
directory.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from sidesave.client.runs import finding
from sidesave.errors import SidesaveError
from sidesave.stager.signal_safe import Worker

logger = logging.getLogger(__name__)

T = TypeVar("T")

EXIT_TIMEOUT_S: Final = 600.0
"""Seconds that the end of the process waits for the saves of one checkpointer."""


class AtExit(Generic[T]):
    """Objects that are closed when the interpreter ends, unless they are dropped before."""

    def __init__(self, close: Callable[[T], object], then: Callable[[], object]) -> None:
        """Call ``close`` with each, then ``then``.

        This comes before all that was registered with ``atexit`` earlier than the first object.
        """
        self._close, self._then = close, then
        self._registered: Callable[[], None] | None = None
        self.open: weakref.WeakSet[T] = weakref.WeakSet()

    def add(self, one: T) -> None:
        """Close ``one`` at the end; remove it from ``open`` to take this back."""
        self.open.add(one)
        if self._registered is None:
            self._registered = atexit.register(self._close_all)

    def _close_all(self) -> None:
        for one in list(self.open):
            try:
                self._close(one)
            except SidesaveError as error:
                logger.error("a save failed: %s", error)
            except Exception:  # the others are closed all the same
                logger.exception("%s could not be closed", type(one).__name__)
        self._then()


class _Checkpointer(Protocol):
    @property
    def directory(self) -> str: ...

    def close(self, timeout_s: float | None = None) -> None: ...


_dropped: dict[Worker, tuple[int, str]] = {}
"""Process and directory of dropped checkpointers, by the worker that closes each."""
_finishing: dict[threading.Thread, str] = {}
"""Places of daemons that finish alone, by the thread that ends with each."""
checkpointers: Final = AtExit[_Checkpointer](
    lambda each: each.close(EXIT_TIMEOUT_S), lambda: _await_dropped(None)
)


def close_dropped(worker: Worker, directory: str, close: Callable[[], None]) -> None:
    """Have ``worker`` close a dropped checkpointer, without blocking."""

    def work() -> None:
        try:
            close()
        finally:
            _dropped.pop(worker, None)

    _dropped[worker] = os.getpid(), directory
    worker.submit(work)


def leave_to_finish(reaper: threading.Thread, directory: str) -> None:
    """Note that a daemon is left to finish in ``directory`` until ``reaper`` ends."""
    _finishing[reaper] = finding.place_of(directory)


def await_predecessors(directory: str, timeout_s: float) -> None:
    """Wait for earlier checkpointers and daemons of this process in ``directory``.

    These are checkpointers that nothing refers to, and daemons left behind. Daemons are waited for
    up to ``timeout_s`` seconds.
    """
    place = finding.place_of(directory)
    if any(finding.place_of(each.directory) == place for each in checkpointers.open):
        gc.collect()  # it may be one that only refers to itself
    _await_dropped(place)
    deadline = time.monotonic() + timeout_s
    for reaper, where in list(_finishing.items()):
        if where == place:
            reaper.join(max(0.0, deadline - time.monotonic()))
        if not reaper.is_alive():
            _finishing.pop(reaper, None)


def _await_dropped(place: str | None) -> None:
    for worker, (pid, directory) in list(_dropped.items()):
        if pid == os.getpid() and place in (None, finding.place_of(directory)):
            worker.close(EXIT_TIMEOUT_S)
