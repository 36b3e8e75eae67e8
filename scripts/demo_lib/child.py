"""The trainer as the driver sees it: a child process that tells what happens in it, line by line."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from demo_lib import DemoError, Event

SILENCE_S = 60.0
STDERR_TAIL_LINES = 25


class Process:
    """Any process, held by pidfd: its end can be waited for, and a signal can never reach a later owner of its pid."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def ended(self, within_s: float) -> bool:
        return bool(select.select([self._pidfd], [], [], max(0.0, within_s))[0])

    def close(self) -> None:
        os.close(self._pidfd)


class Trainer:
    """One trainer process. Its lines come as dicts from `events()`; leaving the `with` block ends it."""

    def __init__(self, arguments: list[str], *, stderr: Path, deadline_s: float) -> None:
        """Start `python -m demo_lib.trainer` with `arguments`; `deadline_s` is an instant of `time.monotonic()`."""
        self._stderr, self._deadline_s = stderr, deadline_s
        with stderr.open("wb") as errors:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "demo_lib.trainer", *arguments], stdout=subprocess.PIPE, stderr=errors
            )
        self.pid = self._popen.pid

    def events(self) -> Iterator[Event]:
        """What the trainer says, until it closes its end; `DemoError` when it is silent for too long."""
        assert self._popen.stdout is not None
        output, pending = self._popen.stdout.fileno(), b""
        while True:
            patience_s = min(SILENCE_S, self._deadline_s - time.monotonic())
            if not select.select([output], [], [], max(0.0, patience_s))[0]:
                raise self.failure(f"said nothing for {patience_s:.0f} s, or ran past the demo's deadline")
            if not (chunk := os.read(output, 1 << 16)):
                return
            *lines, pending = (pending + chunk).split(b"\n")
            yield from map(json.loads, lines)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait(SILENCE_S)

    def finish(self) -> None:
        """Wait for a good end, or raise `DemoError` with the last lines of its standard error."""
        if code := self._popen.wait(SILENCE_S):
            raise self.failure(f"ended with status {code}")

    def failure(self, what: str) -> DemoError:
        tail = self._stderr.read_text(errors="replace").splitlines()[-STDERR_TAIL_LINES:]
        return DemoError("\n    ".join([f"trainer {self.pid} {what}; {self._stderr} ends with:", *tail]))

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        assert self._popen.stdout is not None
        self._popen.stdout.close()
