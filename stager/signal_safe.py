"""Locks and threads that stay usable when a signal handler raises in the main thread.

Python runs signal handlers only in the main thread: at function entry, after a call, at a backward
jump, and in blocking calls. A handler that raises, such as the one for Ctrl-C, can separate any two
instructions. So code that the main thread may run follows these rules:

* An operation that must be complete is one instruction (an assignment, a call of C code), or runs
  in an internal thread that the main thread waits for. An interrupt ends the wait, not the
  operation.
* A resource is acquired and marked with its owner in one instruction, and the owner exists before.
  So another thread, or a later call, can release it however the call ended.
* Locks are C locks in a ``with``. ``threading.Condition`` and ``Event`` acquire and release their
  locks in Python code, so an interrupt can leave them locked forever; ``threading.Thread.start``
  has the same flaw.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
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
    """A lock with a condition to wait for."""

    def __init__(self) -> None:
        """Create an unlocked monitor."""
        super().__init__()
        self._waiting: list[Any] = []

    def wait_for(self, predicate: Callable[[], T], timeout_s: float | None = None) -> T:
        """Block until ``predicate`` is true, or for ``timeout_s``; return its last result.

        It is called under the lock, which the caller must not hold.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            notified = allocate_lock()
            notified.acquire()
            with self:
                result = predicate()
                if not result:
                    self._waiting.append(notified)
            left_s = (
                -1 if deadline is None else min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
            )
            if result or (deadline is not None and left_s <= 0):
                return result
            notified.acquire(True, left_s)

    def wait_with_progress(
        self,
        predicate: Callable[[], T],
        patience_s: float,
        progress: Callable[[], object],
        each_round: Callable[[], object],
    ) -> T:
        """Block until ``predicate`` is true, or ``progress()`` did not change for ``patience_s``.

        Returns the predicate's last result. ``each_round`` is called ten times a second, without
        the lock.
        """
        last_change, before = time.monotonic(), progress()
        while True:
            each_round()
            result = self.wait_for(predicate, min(patience_s, 0.1))
            now = progress()
            if now != before:
                before, last_change = now, time.monotonic()
            if result or time.monotonic() - last_change >= patience_s:
                return result

    def notify_all(self) -> None:
        """Wake all waiting threads; the caller holds the lock and is not the main thread."""
        while self._waiting:
            self._waiting.pop().release()


def start(work: Callable[[], object], name: str) -> None:
    """Run ``work`` in a new thread, started in one instruction."""
    thread = threading.Thread(target=work, name=name, daemon=True)

    def begin() -> None:
        try:
            thread.start()
        except RuntimeError:  # the limit of threads is reached: use this one
            work()

    start_new_thread(begin, ())


class Latch:
    """An event that is set once and that threads wait for."""

    def __init__(self) -> None:
        """Create a closed latch."""
        self._changed = Monitor()
        self.is_open = False

    def open(self) -> None:
        """Open the latch and wake all waiting threads."""
        with self._changed:
            self.is_open = True
            self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the latch is open; return False after ``timeout_s``."""
        return self._changed.wait_for(lambda: self.is_open, timeout_s)


class Wakeup:
    """A descriptor that other threads make readable, to wake the thread that polls it.

    The owner sees to it that :meth:`wake` and :meth:`close` do not run at the same time.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Return the descriptor, -1 once closed."""
        return self._fd

    def wake(self) -> None:
        """Make the descriptor readable; does nothing once it is closed."""
        if self._fd >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable until the next :meth:`wake`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def wait(self, timeout_s: float) -> None:
        """Wait until it is readable, or for ``timeout_s``, and clear it."""
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        poller.poll(timeout_s * 1000)
        self.clear()

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _Call(Generic[T]):
    """A call to run, and its result."""

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
        except BaseException as error:  # noqa: BLE001 - raised by `result`
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
        error, self.error = self.error, None  # its traceback would refer to itself
        try:
            if error is not None:
                raise error
            return self._value.pop()
        finally:
            del error


def run(work: Callable[[], T], name: str, stop: Callable[[], object]) -> T:
    """Run ``work`` in a new thread; return its result or raise its error. See :func:`run_all`."""
    return run_all([work], name, stop)[0]


def run_all(works: Iterable[Callable[[], T]], name: str, stop: Callable[[], object]) -> list[T]:
    """Run each of ``works`` in a new thread; return their results, or raise the first error.

    In any case, also on an interrupt, calls ``stop`` and waits until all of them have ended.
    ``stop`` may be called before a work begins; that work must then do nothing.
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
    """Runs functions in order in a thread that starts at the first and survives their errors."""

    def __init__(
        self, name: str, on_failure: Callable[[BaseException], object] = lambda error: None
    ) -> None:
        """Create the worker; its thread starts at the first :meth:`submit`.

        ``on_failure`` is called in the thread with the error of a submitted function, after it is
        logged.
        """
        self._name = name
        self._on_failure = on_failure
        self._jobs: deque[Callable[[], object] | None] = deque()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._runs = allocate_lock()
        self._ended = Latch()
        self._ident = 0

    def submit(self, run: Callable[[], object]) -> None:
        """Run a function after those submitted before; does not block."""
        self._jobs.append(run)
        self._go()

    def call(self, run: Callable[[], T]) -> T:
        """Submit a function and return its result, or raise its error; blocks until then.

        An interrupt ends the wait, not the function. Called in the worker's thread, it runs at
        once.
        """
        if self.is_current():
            return run()
        call = _Call(run)
        self.submit(call)
        return call.result()

    def is_current(self) -> bool:
        """Whether the caller runs in the worker's thread."""
        return self._ident == threading.get_ident()

    def is_idle(self) -> bool:
        """Whether no function is running or submitted."""
        return not (self._jobs or self._runs.locked())

    def end(self) -> None:
        """End the thread after the submitted functions have run; does not wait."""
        if not self.is_idle():
            self._jobs.append(None)
            self._go()

    def close(self, timeout_s: float) -> None:
        """End the thread as :meth:`end` does, and wait for it up to ``timeout_s``; idempotent."""
        if not self.is_idle():
            self.end()
            if not self.is_current():
                self._ended.wait(timeout_s)

    def _go(self) -> None:
        self._wakeups.put(None)
        if not self._runs.locked():  # several threads may start; one of them works
            start(self._work, self._name)

    def _work(self) -> None:
        if self._runs.acquire(False):
            self._ident = threading.get_ident()
            try:
                while self._round():
                    pass
            finally:
                self._ident = 0
                self._ended.open()  # later calls of close() must not wait for work
                self._runs.release()
                if any(self._jobs):
                    self._go()

    def _round(self) -> bool:
        """Run the submitted functions; return False when the thread has to end."""
        run: Callable[[], object] | None = None
        try:
            if self._ended.is_open and not self._jobs:
                return False  # another thread of this worker has done the work
            self._wakeups.get()
            while self._jobs:
                run = self._jobs[0]  # removed after it has run, so that an error cannot lose it
                if run is not None:
                    run()
                self._jobs.popleft()
                if run is None:
                    return False
                run = None  # release the tensors that it refers to
        except BaseException as error:  # the thread must survive, or waiting callers would hang
            logger.error("a function in thread %s failed: %r", self._name, error, exc_info=error)
            if run is not None and self._jobs and self._jobs[0] is run:
                self._jobs.popleft()
            if isinstance(run, _Call):
                run.error = error
                run.end()
            self._wakeups.put(None)  # more functions may be submitted
            self._on_failure(error)
        return True
