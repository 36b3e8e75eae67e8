"""The entries of a run's log (``run_log``), and the state that they describe."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sidesave.errors import IntegrityError
from sidesave.writer_daemon.storage.sealed_json import get, seal, unseal

_FORMAT: Final = "sidesave-log"
_JUDGED: Final = 256
"""Number of past sessions remembered; what daemons of older ones still upload is left behind."""
_SESSION: Final = re.compile(r"step-\d+\.([0-9a-f]{16})(?:[-.].*)?")


def session_of(prefix: str) -> str:
    """Return the session that wrote a save's prefix; "" for other prefixes."""
    match = _SESSION.fullmatch(prefix)
    return match[1] if match else ""


@dataclass(frozen=True, slots=True)
class LogState:
    """The state that a log describes up to one entry.

    Attributes:
        number: The entry's number; 0 for an empty log.
        whole: The number of the last snapshot.
        session: The session that took over last.
        token: Identifies that takeover.
        serial: The entry's number within the takeover.
        prefixes: The prefix of each directory, by the directory's name.
        open: Earlier sessions whose unfinished saves are not settled yet.
        dropped: Removed prefixes of this session, of ``open`` ones and of no session; objects that
            appear there later do not count.
        judged: The last settled sessions; objects that their daemons still upload are garbage.
    """

    number: int = 0
    whole: int = 0
    session: str = ""
    token: str = ""
    serial: int = 0
    prefixes: Mapping[str, str] = field(default_factory=dict[str, str])
    open: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    judged: tuple[str, ...] = ()

    def counts(self, prefix: str) -> bool:
        """Whether a save's prefix without a name may still become a checkpoint."""
        session = session_of(prefix)
        if not session or prefix in self.dropped:
            return False
        return not self.number or session == self.session or session in self.open

    def lead_to(self, prefix: str) -> bool:
        """Whether ``prefix`` is the prefix of a directory."""
        return prefix in self.prefixes.values()

    def taken_over(self, session: str, token: str) -> LogState:
        """Return the state after ``session`` has taken over."""
        earlier = self.open.union({self.session} if self.session else ()) - {session}
        dropped = frozenset(
            each for each in self.dropped if session_of(each) in {*earlier, session, ""}
        )
        # a mirror's session may take over again
        judged = tuple(each for each in self.judged if each != session)
        return replace(
            self, session=session, token=token, open=earlier, dropped=dropped, judged=judged
        )

    def settled(self) -> LogState:
        """Return the state after the earlier sessions are settled."""
        own = frozenset(each for each in self.dropped if session_of(each) in (self.session, ""))
        judged = (*(each for each in self.judged if each not in self.open), *sorted(self.open))
        return replace(self, open=frozenset(), dropped=own, judged=judged[-_JUDGED:])


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry: the changes and, in a snapshot, the complete ``state``.

    ``before`` has the token and serial of the previous entry.
    """

    number: int
    whole: int
    session: str
    token: str
    serial: int
    before: tuple[str, int]
    changes: Mapping[str, str | None]
    dropped: tuple[str, ...]
    state: LogState | None

    def to_bytes(self) -> bytes:
        body: dict[str, Any] = {
            "format": _FORMAT,
            "version": 1,
            "number": self.number,
            "whole": self.whole,
            "session": self.session,
            "token": self.token,
            "serial": self.serial,
            "before": self.before,
            "changes": self.changes,
            "dropped": self.dropped,
        }
        if self.state is not None:
            state = self.state
            body["names"] = {**state.prefixes}
            body["open"], body["all_dropped"] = sorted(state.open), sorted(state.dropped)
            body["judged"] = state.judged
        return seal(body)

    @classmethod
    def from_bytes(cls, data: bytes, number: int, path: str) -> LogEntry:
        body = unseal(data, _FORMAT, path)
        if get(body, "number", int, path) != number:
            raise IntegrityError(f"{path}: this object holds entry {body['number']}")
        session, token = get(body, "session", str, path), get(body, "token", str, path)
        whole, serial = get(body, "whole", int, path), get(body, "serial", int, path)
        before: list[Any] = get(body, "before", list, path)
        if [type(value) for value in before] != [str, int]:
            raise IntegrityError(f"{path}: the entry does not name its predecessor")
        changes: dict[str, Any] = get(body, "changes", dict, path)
        dropped: list[Any] = get(body, "dropped", list, path)
        state = None
        if "names" in body:
            names: dict[str, Any] = get(body, "names", dict, path)
            is_open: list[Any] = get(body, "open", list, path)
            removed: list[Any] = get(body, "all_dropped", list, path)
            judged: list[Any] = get(body, "judged", list, path, [])  # older entries lack it
            _require_texts([*names.values(), *is_open, *removed, *judged], path)
            state = LogState(
                number,
                number,
                session,
                token,
                serial,
                names,
                frozenset(is_open),
                frozenset(removed),
                tuple(judged),
            )
        _require_texts([*(each for each in changes.values() if each is not None), *dropped], path)
        return cls(
            number,
            whole,
            session,
            token,
            serial,
            (before[0], before[1]),
            changes,
            tuple(dropped),
            state,
        )

    def after(self, before: LogState) -> LogState:
        """Return the state after this entry, given the state ``before`` it."""
        if self.state is not None:
            return self.state
        prefixes = {**before.prefixes, **self.changes}
        kept = {name: prefix for name, prefix in prefixes.items() if prefix is not None}
        dropped = before.dropped.union(self.dropped)
        return replace(
            before, number=self.number, serial=self.serial, prefixes=kept, dropped=dropped
        )


def _require_texts(values: Iterable[object], path: str) -> None:
    if not all(isinstance(value, str) for value in values):
        raise IntegrityError(f"{path}: a name or a prefix is not a string")
