"""Signals that ask for a save: handlers only record the signal, and another one ends a wait."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Final

from sidesave.client.saving.handle import SaveHandle
from sidesave.client.training.save_policies import OnSignal
from sidesave.errors import InvalidArgumentError

_STAGED_TIMEOUT_S: Final = 300.0


class SignalCatcher:
    """Handles the signals of :class:`OnSignal` policies until :meth:`close`.

    A handler runs between two instructions of the main thread, which may hold any lock. So it only
    assigns attributes, and puts into a ``SimpleQueue``, which is reentrant.

    Attributes:
        ending: The first signal that asks to exit, or 0.
        asking: A signal that asks only for a save and has not been answered, or 0.
    """

    def __init__(self, policies: Iterable[OnSignal], wake: Callable[[], None]) -> None:
        """Install the handlers, which call ``wake``.

        Raises:
            InvalidArgumentError: This is not the main thread; only the main thread may set
                handlers.
        """
        self.ending = 0
        self.asking = 0
        self._policies = {number: policy for policy in policies for number in policy.signals}
        self._wake = wake
        self._pid = os.getpid()
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._before: dict[int, Any] = {}
        self._closed = False
        if self._policies and threading.current_thread() is not threading.main_thread():
            raise InvalidArgumentError("OnSignal needs the main thread: create the manager there")
        for number in self._policies:
            self._before[number] = signal.signal(number, self._handle)

    @property
    def current(self) -> int:
        """The signal to answer next, or 0."""
        return self.ending or self.asking

    def deadline_s(self, number: int) -> float | None:
        """Return the seconds to wait for the commit after that signal; None for no limit."""
        # the signal may come from another rank, with other policies
        policy = self._policies.get(number)
        return None if policy is None else policy.deadline_s

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # in a forked child, or restored by a later handler
        if os.getpid() != self._pid or self._closed:
            before = signal.SIG_DFL if os.getpid() != self._pid else self._before.pop(number, None)
            signal.signal(number, signal.SIG_DFL if before is None else before)
            os.kill(os.getpid(), number)
            return
        if not self._policies[number].ends(number):
            self.asking = number
        elif not self.ending:
            self.ending = number
        self._came.put(number)
        self._wake()

    def begin_answer(self) -> None:
        """Record that earlier signals are being answered: only later ones end :meth:`wait`."""
        self._came = queue.SimpleQueue[int]()

    def wait(self, handle: SaveHandle, deadline_s: float | None) -> bool:
        """Block until a save is done, the deadline has passed, or a signal asks to exit.

        A signal since :meth:`begin_answer` counts too. When this returns, the save is staged or has
        failed. Returns whether it is done.
        """
        came = self._came
        handle.committed.add_done_callback(lambda _: came.put(0))
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        with contextlib.suppress(queue.Empty):
            while True:
                number = came.get(
                    timeout=None if deadline is None else max(0.0, deadline - time.monotonic())
                )
                if not number or self._policies[number].ends(number):
                    break
        concurrent.futures.wait([handle.staged], _STAGED_TIMEOUT_S)
        return handle.done()

    def close(self) -> None:
        """Restore the earlier handlers; idempotent, takes no lock.

        Outside the main thread, or under a later handler, one is restored only when its signal
        arrives.
        """
        self._closed = True
        if threading.current_thread() is not threading.main_thread() or os.getpid() != self._pid:
            return
        for number, before in list(self._before.items()):
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)
                del self._before[number]
