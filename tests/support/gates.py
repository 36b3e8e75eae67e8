"""CUDA streams that stand still until a test lets them go on, so that no assertion depends on who
is quicker.

While a stream is held nothing may wait for it on the host, not even in passing: no first use of a
kernel (hence all are loaded when CUDA starts), no ``cudaFree``, no pinning. A test has done all of
that once before it holds a stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Self

import torch
from trainers import wait_until

# read when CUDA starts; loading one later waits for streams
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

LIMIT_S: Final = 60.0
"""A gate opens by itself after this long, and says so: below pytest's limit for one test."""
_SEMAPHORE_NBYTES: Final = 64  # more than a sem_t has anywhere
# in glibc's, how many threads wait for it: 32 bits behind the 32 of its value
_WAITING_OFFSET: Final = 4

# for ever: nobody tells when the driver's thread has let go of one
_kept: list[ctypes.Array[ctypes.c_char]] = []


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@functools.cache
def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded; another copy would not know its streams."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    path = next(line.split(maxsplit=5)[5] for line in maps if "/libcudart" in line)
    return ctypes.CDLL(path)


class Gate:
    """Holds a stream: what is enqueued on it from now on runs after :meth:`open`.

    The host function that the stream waits in is libc's ``sem_wait`` itself: no Python runs in the
    driver's thread. Host functions of all streams share that thread. So of gates that are closed
    together, all must be opened before anything behind one of them can be counted upon, unless that
    one was reached before the others were closed.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        """Close the gate, on the current stream by default."""
        stream = stream or torch.cuda.current_stream()
        self._semaphore = ctypes.create_string_buffer(_SEMAPHORE_NBYTES)
        self._lock = threading.Lock()
        self._open = False
        self.gave_up = False
        self._stream = stream
        _kept.append(self._semaphore)
        assert _libc().sem_init(self._semaphore, 0, 0) == 0
        wait = ctypes.cast(_libc().sem_wait, ctypes.c_void_p)
        with torch.cuda.device(stream.device):
            code = _runtime().cudaLaunchHostFunc(
                ctypes.c_void_p(stream.cuda_stream), wait, self._semaphore
            )
        assert code == 0, f"cudaLaunchHostFunc failed with error {code}"
        self._watchdog = threading.Timer(LIMIT_S, self._give_up)
        self._watchdog.daemon = True
        self._watchdog.start()

    def wait_until_reached(self) -> None:
        """Return once the stream stands at this gate, which is closed: it is then the first of all
        that are to open.
        """
        waiting = ctypes.c_uint32.from_buffer(self._semaphore, _WAITING_OFFSET)
        # A simulated stream that nobody waits for gets there when it has been asked often enough.
        wait_until(lambda: bool(waiting.value) or self._stream.query(), "the stream at its gate")
        assert waiting.value, "the gate was opened"

    def open(self) -> None:
        """Let the stream go on; idempotent."""
        with self._lock:
            if not self._open:
                self._open = True
                self._watchdog.cancel()
                _libc().sem_post(self._semaphore)

    def _give_up(self) -> None:
        self.gave_up = not self._open
        self.open()

    def __enter__(self) -> Self:
        """The gate, closed."""
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Open it; fails when it had opened by itself."""
        self.open()
        assert kind or not self.gave_up, (
            f"something waited {LIMIT_S:g} s on the host for a stream that is held"
        )


class Gates:
    """Several gates as one."""

    def __init__(self, gates: Iterable[Gate]) -> None:
        """Take gates that are closed."""
        self._gates = list(gates)

    def open(self) -> None:
        """Open all; idempotent."""
        for gate in self._gates:
            gate.open()


@contextlib.contextmanager
def held(streams: Iterable[torch.cuda.Stream]) -> Iterator[Gates]:
    """Streams stand still until the block ends, or what it gives is opened."""
    with contextlib.ExitStack() as stack:
        yield Gates([stack.enter_context(Gate(stream)) for stream in streams])
