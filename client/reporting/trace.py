"""A trace of saves beside training steps, as JSON for https://ui.perfetto.dev and chrome://tracing.

The tracks of a process (its rank): training steps; calls of ``save()``, in which training stands
still; and saves, each a bar from its call to its end, divided into staging, writing and commit.
Saves that overlap get different tracks.
"""

from __future__ import annotations

import collections
import json
import os
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, Self

from sidesave.client.arguments import path_text
from sidesave.client.reporting.whole_file import write_whole
from sidesave.errors import InvalidArgumentError
from sidesave.writer_daemon.save_record import SaveRecord

_STEPS, _CALLS, _SAVES = range(1, 4)
"""Numbers of tracks; from the last one on there are as many as saves were under way at once."""
_PHASES: Final = (("staged", "staging"), ("written", "writing"), ("committed", "commit"))


class Trace:
    """Collects steps and saves; :meth:`write` and :meth:`close` write them to a file. Thread-safe.

    Its :meth:`save` is an observer of a checkpointer:
    ``Checkpointer(directory, observers=[trace.save])``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rank: int = 0,
        max_steps: int = 20_000,
        max_saves: int = 5_000,
    ) -> None:
        """Begin an empty trace.

        Args:
            path: The file to write at the end, such as ``trace.json``; each rank needs its own.
            rank: Of this process: its number in the trace, so that traces of several ranks can be
                joined.
            max_steps: Of the steps, the newest so many are kept.
            max_saves: Of the saves likewise. A step takes some 150 bytes of memory, a save some
                400.

        Raises:
            InvalidArgumentError: A limit below 1.
        """
        if max_steps < 1 or max_saves < 1:
            raise InvalidArgumentError(
                f"a trace of {max_steps} steps and {max_saves} saves would show nothing"
            )
        self._path = path_text(path)
        self._rank = rank
        self._lock = threading.RLock()  # a signal handler may come in where this thread holds it
        self._steps: collections.deque[tuple[int, float, float]] = collections.deque(
            maxlen=max_steps
        )
        self._saves: collections.deque[SaveRecord] = collections.deque(maxlen=max_saves)
        self._seen = 0
        self._closed = False

    def step(self, step: int, began: float, ended: float) -> None:
        """Add a training step, by ``time.monotonic()``; ignored after :meth:`close`."""
        self._take(self._steps, (step, began, max(began, ended)))

    def save(self, record: SaveRecord) -> None:
        """Add a save that has ended; others are ignored, and all after :meth:`close`."""
        if record.ended_s is not None:
            self._take(self._saves, record)

    def write(self, path: str | os.PathLike[str] | None = None) -> None:
        """Write the collected trace (to ``path`` if given); keep collecting. Raises ``OSError``."""
        body = json.dumps(self._body(), separators=(",", ":")).encode()
        write_whole(self._path if path is None else path_text(path), body)

    def close(self) -> None:
        """Write the file and ignore later steps and saves; idempotent. Raises ``OSError``."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self.write()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; a trace of failed training holds all until its end."""
        self.close()

    def _take(self, kept: collections.deque[Any], item: Any) -> None:
        with self._lock:
            if not self._closed:
                kept.append(item)
                self._seen += 1

    def _body(self) -> dict[str, Any]:
        with self._lock:
            steps, saves, seen = list(self._steps), sorted(self._saves, key=_called), self._seen

        def bar(track: int, name: str, began: float, ended: float, **about: Any) -> dict[str, Any]:
            # whole, so that bars nest exactly
            first, last = (round(at * 1e6) for at in (began, ended))
            where = {"pid": self._rank, "tid": track, "ts": first, "dur": last - first}
            return {"name": name, "ph": "X", "cat": "sidesave", **where, "args": about}

        events = [
            bar(_STEPS, f"step {step}", began, ended, step=step) for step, began, ended in steps
        ]
        lanes: list[float] = []  # until when each is taken
        for save in saves:
            called = _called(save)
            events.append(
                bar(
                    _CALLS,
                    f"save {save.step}",
                    called,
                    called + (save.stall_s or 0.0),
                    step=save.step,
                )
            )
            if save.outcome == "skipped":
                events[-1]["args"]["outcome"] = "skipped"
                continue
            end = called + (save.ended_s or 0.0)
            lane = next((lane for lane, until in enumerate(lanes) if until <= called), len(lanes))
            lanes[lane : lane + 1] = [end]
            events.append(bar(_SAVES + lane, f"save {save.step}", called, end, **_about(save)))
            events.extend(bar(_SAVES + lane, *phase, step=save.step) for phase in _phases(save))
        titles = {_STEPS: "training steps", _CALLS: "calls of save(): training waits"}
        titles |= {_SAVES + lane: f"saves {lane + 1}" for lane in range(len(lanes))}
        return {
            "traceEvents": [*_titles(self._rank, titles), *events],
            "displayTimeUnit": "ms",
            # When its clock, the system's monotonic one, was 0; in seconds since the epoch.
            "otherData": {
                "clock began": time.time() - time.monotonic(),
                "left out": seen - len(steps) - len(saves),
            },
        }


def _called(save: SaveRecord) -> float:
    return save.called or 0.0


def _about(save: SaveRecord) -> dict[str, Any]:
    error = None if save.error is None else f"{save.error}: {save.message}"
    known = {
        "outcome": save.outcome,
        "nbytes": save.rank_nbytes,
        "stall_s": save.stall_s,
        "error": error,
    }
    return {"step": save.step} | {name: value for name, value in known.items() if value is not None}


def _phases(save: SaveRecord) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of a save's phases, consecutive and without overlap.

    A state that is written while it is copied may be reported durable a moment before it is
    reported staged. The phase in which a save failed lasts until its failure.
    """
    began, called, ended_s = 0.0, _called(save), save.ended_s or 0.0
    for index, (phase, name) in enumerate(_PHASES):
        reached = [at for later, _ in _PHASES[index:] if (at := save.seconds(later)) is not None]
        ended = max(began, min(reached, default=ended_s))
        yield name, called + began, called + ended
        if save.seconds(phase) is None:
            return
        began = ended


def _titles(rank: int, tracks: dict[int, str]) -> list[dict[str, Any]]:
    titles: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
    ]
    for track, title in tracks.items():
        about = {"ph": "M", "pid": rank, "tid": track}
        titles.append({"name": "thread_name", **about, "args": {"name": title}})
        titles.append({"name": "thread_sort_index", **about, "args": {"sort_index": track}})
    return titles
