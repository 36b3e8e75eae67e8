"""Threads in which no signal handler runs, and a lock that can always be left, also when a handler raises.

Python runs handlers in the main thread alone: when a function begins, when a call has returned, at a jump back, and in
calls that wait. One that raises, as that of Ctrl-C does, may so leave any two instructions of ours half done. Hence the
rules, for whatever the main thread comes to:

* What must not be half done is one instruction (an assignment, a call of C code), or is done in a thread of ours, for
  which the main thread waits: interrupted, it leaves, and the work goes on to its end.
* What is taken knows its owner by the same instruction that takes it, and the owner is known before: so it can be given
  back, by another thread or a later call, however the call was left.
* Locks are locks of C, in a ``with``. Those of ``threading.Condition`` and ``Event`` are entered, left and waited for
  in Python, where an interrupt leaves them locked for good; and so starts ``threading.Thread``.
"""

from __future__ import annotations

import logging
import threading
import time
from _thread import RLock, allocate_lock, start_new_thread
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Monitor(RLock):  # pyright: ignore[reportGeneralTypeIssues] - final for type checkers alone
    """A lock, and waiting for what changes under it."""

    def __init__(self) -> None:
        """Nobody waits."""
        super().__init__()
        self._waiting: list[Any] = []

    def wait_for(self, predicate: Callable[[], T], timeout_s: float | None = None) -> T:
        """Block until ``predicate``, called under the lock, is true, or for ``timeout_s``; returns what it said last.

        Not to be called under the lock, which is free meanwhile.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            came = allocate_lock()
            came.acquire()
            with self:
                said = predicate()
                if not said:
                    self._waiting.append(came)
            left_s = -1 if deadline is None else min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
            if said or (deadline is not None and left_s <= 0):
                return said
            came.acquire(True, left_s)

    def notify_all(self) -> None:
        """Have all who wait look again; the caller holds the lock, in a thread that nothing interrupts."""
        while self._waiting:
            self._waiting.pop().release()


def start(work: Callable[[], object], name: str) -> None:
    """Run ``work`` in a thread of its own, started in one instruction."""
    thread = threading.Thread(target=work, name=name, daemon=True)

    def begin() -> None:
        try:
            thread.start()
        except RuntimeError:  # no more threads: this one is there
            work()

    start_new_thread(begin, ())


class Latch:
    """An event that happens once, for threads to wait for."""

    def __init__(self) -> None:
        """Closed."""
        self._changed = Monitor()
        self.is_open = False

    def open(self) -> None:
        """Let all go on."""
        with self._changed:
            self.is_open = True
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it is open; false after ``timeout_s``."""
        return self._changed.wait_for(lambda: self.is_open, timeout_s)


class _Call(Generic[T]):
    """A call to run, and its outcome."""

    def __init__(self, run: Callable[[], T]) -> None:
        self._run = run
        self._over = allocate_lock()
        self._over.acquire()
        self.begun = self._ended = False
        self._value: list[T] = []
        self.error: BaseException | None = None

    def __call__(self) -> None:
        self.begun = True
        try:
            self._value.append(self._run())
        except BaseException as error:  # noqa: BLE001 - the caller's
            self.error = error
        self.end()

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._over.release()

    def wait(self) -> None:
        with self._over:
            pass

    def result(self) -> T:
        self.wait()
        error, self.error = self.error, None  # whose traceback would refer to itself
        try:
            if error is not None:
                raise error
            return self._value.pop()
        finally:
            del error


def run(work: Callable[[], T], name: str, stop: Callable[[], object]) -> T:
    """Run ``work`` in a thread of its own and wait for what it returns or raises; see :func:`run_all`."""
    return run_all([work], name, stop)[0]


def run_all(works: Iterable[Callable[[], T]], name: str, stop: Callable[[], object]) -> list[T]:
    """Run each of ``works`` in a thread of its own and wait for what they return, or one of them raises.

    Interrupted, or when one has failed, this calls ``stop`` and waits for the end of all before it leaves. ``stop`` is
    called in any case, perhaps before they have begun, and what has been stopped does nothing.
    """
    calls = [_Call(work) for work in works]
    try:
        for call in calls:
            start(call, name)
        return [call.result() for call in calls]
    finally:
        stop()
        for call in calls:
            if call.begun:
                call.wait()


class Worker:
    """Runs what it is given, in order, in a thread that begins with the first of it and outlives what that raises."""

    def __init__(self, name: str) -> None:
        """Start nothing yet."""
        self._name = name
        self.on_failure: Callable[[BaseException], object] = lambda error: None
        """Told in the thread, after the log, of what something that was submitted has raised."""
        self._jobs: deque[Callable[[], object] | None] = deque()
        self._came: SimpleQueue[None] = SimpleQueue()
        self._runs = allocate_lock()
        self._ended = Latch()
        self._ident = 0

    def submit(self, run: Callable[[], object]) -> None:
        """Have ``run`` run behind what was submitted before."""
        self._jobs.append(run)
        self._go()

    def call(self, run: Callable[[], T]) -> T:
        """The same, and wait for what it returns or raises; interrupted, this leaves and ``run`` goes on.

        In the thread itself it is run at once.
        """
        if self.is_current():
            return run()
        call = _Call(run)
        self.submit(call)
        return call.result()

    def is_current(self) -> bool:
        """Whether the caller runs in the thread."""
        return self._ident == threading.get_ident()

    def is_idle(self) -> bool:
        """Whether there is nothing to wait for."""
        return not (self._jobs or self._runs.locked())

    def end(self) -> None:
        """End the thread once it has done what was submitted; does not wait."""
        if not self.is_idle():
            self._jobs.append(None)
            self._go()

    def close(self, timeout_s: float) -> None:
        """The same, and wait for it ``timeout_s`` at most; idempotent."""
        if not self.is_idle():
            self.end()
            if not self.is_current():
                self._ended.wait(timeout_s)

    def _go(self) -> None:
        self._came.put(None)
        if not self._runs.locked():  # several may start: one of them works
            start(self._work, self._name)

    def _work(self) -> None:
        if self._runs.acquire(False):
            self._ident = threading.get_ident()
            try:
                while self._round():
                    pass
            finally:
                self._ident = 0
                self._ended.open()  # who comes too late is not to wait for work
                self._runs.release()
                if any(self._jobs):
                    self._go()

    def _round(self) -> bool:
        """Run what has been submitted; false at the end."""
        run: Callable[[], object] | None = None
        try:
            if self._ended.is_open and not self._jobs:
                return False  # started for what another thread of this worker has done
            self._came.get()
            while self._jobs:
                run = self._jobs[0]  # what somebody waits for must not get lost in between
                if run is not None:
                    run()
                self._jobs.popleft()
                if run is None:
                    return False
                run = None  # what a copy has read must not live until the next one
        except BaseException as error:  # a thread that ended would let everybody wait
            logger.error("what the thread %s was doing failed: %r", self._name, error, exc_info=error)
            if run is not None and self._jobs and self._jobs[0] is run:
                self._jobs.popleft()
            if isinstance(run, _Call):
                run.error = error
                run.end()
            self._came.put(None)  # there may be more
            self.on_failure(error)
        return True
