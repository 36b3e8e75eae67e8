"""The trainer as the driver sees it: a child process that tells what happens in it, line by
line.
"""

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

# What is limited is silence, not the whole: each line is progress, and how many there can be is
# known. The limit grows with the slowest line so far, for a machine that is busy with other things
# is no failure.
START_SILENCE_S = 300.0
SILENCE_S = 120.0
TIMES_THE_SLOWEST = 50.0
END_S = 120.0
STDERR_TAIL_LINES = 25


class Process:
    """Any process, held by pidfd: its end can be waited for, and a signal can never reach a later
    owner of its pid.
    """

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
    """One trainer process. Its lines come as dicts from `events()`; leaving the `with` block ends
    it.
    """

    def __init__(self, arguments: list[str], *, stderr: Path) -> None:
        """Start `python -m demo_lib.trainer` with `arguments`."""
        self._stderr = stderr
        with stderr.open("wb") as errors:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "demo_lib.trainer", *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self.pid = self._popen.pid

    def events(self) -> Iterator[Event]:
        """What the trainer says, until it closes its end; `DemoError` when it is silent for too
        long.
        """
        assert self._popen.stdout is not None
        output, pending, slowest_s = self._popen.stdout.fileno(), b"", None
        while True:
            limit_s = (
                START_SILENCE_S
                if slowest_s is None
                else max(SILENCE_S, TIMES_THE_SLOWEST * slowest_s)
            )
            asked_s = time.monotonic()
            if not select.select([output], [], [], limit_s)[0]:
                after = (
                    "its start"
                    if slowest_s is None
                    else f"its last line, the slowest came after {slowest_s:.1f} s"
                )
                raise self.failure(
                    f"said nothing for {limit_s:.0f} s, the limit on silence after {after}"
                )
            if not (chunk := os.read(output, 1 << 16)):
                return
            slowest_s = max(slowest_s or 0.0, time.monotonic() - asked_s)
            *lines, pending = (pending + chunk).split(b"\n")
            yield from map(json.loads, lines)

    def kill(self) -> None:
        self._popen.kill()
        self._wait()

    def finish(self) -> None:
        """Wait for a good end, or raise `DemoError` with the last lines of its standard error."""
        if code := self._wait():
            raise self.failure(f"ended with status {code}")

    def _wait(self) -> int:
        try:
            return self._popen.wait(END_S)
        except subprocess.TimeoutExpired:
            raise self.failure(
                f"is still there {END_S:.0f} s, the limit on ending, after its last line"
            ) from None

    def failure(self, what: str) -> DemoError:
        tail = self._stderr.read_text(errors="replace").splitlines()[-STDERR_TAIL_LINES:]
        return DemoError(
            "\n    ".join([f"trainer {self.pid} {what}; {self._stderr} ends with:", *tail])
        )

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        assert self._popen.stdout is not None
        self._popen.stdout.close()
