"""The record of one save: its outcome, its durations, and its form as a line of the history's log.

Observers of a checkpointer get records; :mod:`sidesave.writer_daemon.log` keeps them in a file.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Literal, cast, get_args

import xxhash

_MAX_MESSAGE_LENGTH: Final = 500
_LAST_SECOND: Final = 253_402_300_799  # of the year 9999
_SESSION: Final = re.compile(r"[0-9a-f]{16}")


def wall_clock_s() -> float:
    """Return the seconds since the epoch, clamped to the range of a record in every time zone."""
    return min(max(time.time(), 0.0), _LAST_SECOND - 86_400.0)


PHASES: Final = ("stall", "staged", "written", "committed")
"""The durations of a save, each measured from its call on; see :meth:`SaveRecord.seconds`."""
Outcome = Literal["saving", "unknown", "skipped", "failed", "removed", "committed", "recovered"]
_CERTAINTY: Final[dict[str, int]] = {
    "saving": 0,
    "unknown": 1,
    "skipped": 2,
    "failed": 2,
    "removed": 2,
}
"""How far an outcome is settled; 3 if it is not listed.

A later line corrects an earlier one that is less settled.
"""
_NOT_LOGGED: Final = frozenset({"called", "ended_s", "rank_nbytes", "staging_nbytes"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRecord:
    """The known facts of one call of ``save()``; None for one that is unknown or still to come.

    Observers of a checkpointer get it, and the history of a run consists of it. The last four are
    known only to the process that saves, and are not in the log.

    Attributes:
        step: The step it was to be saved as.
        session: The run, a random nonce of 16 hex digits, that called.
        outcome: ``"committed"``; ``"recovered"``, which is committed at the start of a later
            session; ``"failed"``; ``"skipped"``, as all slots were busy; ``"removed"``, which is
            failed and cleaned up at such a start; ``"saving"``; ``"unknown"``, if no process
            was left to record it.
        save_id: Which call of its session it was, counting up.
        sequence: Its place in the order of commits; None when it came to nothing before it got one.
        error: The name of the exception that it failed with.
        message: What that exception says.
        errno: The system's error number behind it.
        path: Where the checkpoint is, if that is not in the run directory.
        nbytes: Bytes of tensors, plain data and files beside them.
        called_s: When ``save()`` was called, in seconds since the epoch.
        stall_s: Seconds that ``save()`` has kept training waiting: until it returned, or, if it had
            not returned by then, until the record was made. (In the log that is when the state was
            staged.)
        staged_s: Seconds from the call until everything was in staging memory.
        written_s: Seconds from the call until all bytes were durable.
        committed_s: Seconds from the call until the checkpoint was.
        tries: How many times a daemon began to write it.
        called: When ``save()`` was called, by ``time.monotonic()``.
        ended_s: Seconds from the call until the outcome was known.
        rank_nbytes: Bytes that this rank had to write.
        staging_nbytes: Host memory of this rank's staging slots when the state was to be copied.
    """

    step: int
    session: str
    outcome: Outcome
    save_id: int | None = None
    sequence: int | None = None
    error: str | None = None
    message: str | None = None
    errno: int | None = None
    path: str | None = None
    nbytes: int | None = None
    called_s: float | None = None
    stall_s: float | None = None
    staged_s: float | None = None
    written_s: float | None = None
    committed_s: float | None = None
    tries: int = 0
    called: float | None = None
    ended_s: float | None = None
    rank_nbytes: int | None = None
    staging_nbytes: int | None = None

    def seconds(self, phase: str) -> float | None:
        """Return the seconds of one of :data:`PHASES`."""
        return getattr(self, f"{phase}_s")

    def corrected_by(self, later: SaveRecord) -> SaveRecord:
        """Both records of one save merged; only a more certain outcome replaces another."""
        settles = _CERTAINTY.get(later.outcome, 3) > _CERTAINTY.get(self.outcome, 3)
        decisive = later if settles else self
        newer = {name: value for name, value in asdict(later).items() if value is not None}
        return replace(
            self,
            **newer
            | {name: getattr(decisive, name) for name in ("outcome", "error", "message", "errno")}
            | {"tries": self.tries + later.tries},
        )

    def to_line(self) -> bytes:
        """Return the record as a line of the log, between two line feeds.

        The first line feed ends a torn line before it.
        """
        logged = {name: value for name, value in asdict(self).items() if name not in _NOT_LOGGED}
        known = {
            name: value
            for name, value in logged.items()
            if value is not None and (name, value) != ("tries", 0)
        }
        body = json.dumps(known, separators=(",", ":")).encode()
        return b"\n%s %s\n" % (xxhash.xxh3_64_hexdigest(body).encode(), body)

    @classmethod
    def from_line(cls, line: bytes) -> SaveRecord:
        """Verify the digest, then read; raises ``ValueError`` for anything but a line of ours."""
        digest, _, body = line.partition(b" ")
        if digest != xxhash.xxh3_64_hexdigest(body).encode():
            raise ValueError("the line does not match its digest")
        raw = json.loads(body)
        if not isinstance(raw, dict):
            raise ValueError("no object")
        known = cast("dict[str, Any]", raw)
        # What a later version adds is left out.
        names = {field.name for field in fields(cls)} - _NOT_LOGGED
        values = {name: known[name] for name in names & known.keys()}
        for name, value in values.items():
            if not is_valid(name, value):
                raise ValueError(f"{name} is {value!r:.80}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(str(error)) from error


def is_valid(name: str, value: Any) -> bool:
    """Whether ``value`` is valid for a field of a record that is in the log."""
    match name:
        case "step" | "save_id" | "sequence" | "nbytes" | "tries" | "errno":
            return type(value) is int and 0 <= value < 1 << 63
        case "called_s" | "stall_s" | "staged_s" | "written_s" | "committed_s":
            return type(value) in (int, float) and 0 <= value <= _LAST_SECOND
        case "outcome":
            return value in get_args(Outcome)
        case "session":
            return isinstance(value, str) and _SESSION.fullmatch(value) is not None
        case _:
            return isinstance(value, str)


def combine(records: Iterable[SaveRecord]) -> list[SaveRecord]:
    """Return one record for each save, in the order of first appearance.

    Recovery does not know the number of a call. Its line belongs to the save of that session with
    that place in the order of commits or, if it found no record, to the last one of that step.
    """
    combined: list[SaveRecord] = []
    places: dict[tuple[Any, ...], int] = {}
    for record in records:
        session = record.session
        keys: list[tuple[Any, ...]] = [
            (session, "call", record.save_id),
            (session, "sequence", record.sequence),
        ]
        keys = [key for key in keys if key[2] is not None]
        if record.outcome != "skipped" or not keys:
            keys.append((session, "step", record.step))
        place = places.get(keys[0])
        if place is None:
            place = len(combined)
            combined.append(record)
        else:
            combined[place] = combined[place].corrected_by(record)
        places.update(dict.fromkeys(keys, place))
    return combined


def merged(ours: list[SaveRecord], theirs: list[SaveRecord]) -> list[SaveRecord]:
    """Return the records of two histories: of a run, and of a copy of it.

    The record of a save in both is that of ``theirs``.
    """

    def save_of(record: SaveRecord) -> tuple[str, int | None, int]:
        return record.session, record.save_id, record.step

    known = {*map(save_of, theirs)}
    return [*(record for record in ours if save_of(record) not in known), *theirs]


def failure(record: SaveRecord, error: str, message: str, number: int | None) -> SaveRecord:
    """Return ``record`` with its end: failed, or unknown if the error says so."""
    outcome = "unknown" if error == "CommitUnknownError" else "failed"
    return replace(record, outcome=outcome, error=error, message=message, errno=number)


def shortened(text: str, path: str | None) -> str:
    """Return an error's message for a record, with the path that it is about."""
    message = (f"{text}: {path}" if path else text)[:_MAX_MESSAGE_LENGTH]
    return message.encode(errors="backslashreplace").decode()


def describe_error(error: BaseException) -> tuple[str, str, int | None]:
    """Name, message and errno of an exception, as records have them."""
    number = error.errno if isinstance(error, OSError) else None
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    path = error.filename if isinstance(error, OSError) else None
    return type(error).__name__, shortened(text, path if isinstance(path, str) else None), number
