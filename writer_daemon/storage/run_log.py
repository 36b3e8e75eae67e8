"""The names of a run's directories in an object store, which cannot rename: a log of numbered entries.

Each entry is an object of its own, ``.sidesave.log/<number>``, put only if there is none of that number. It says which
names of directories lead to which prefixes from now on; what it does not mention stays. Who writes claims the number
after the last entry that it knows. So one of two writers fails, always, and finds an entry of the other: it has been
taken over from, and nothing that it does counts any more. docs/decisions/0026.

Readers read the last entries. Every 16th has all names in it; what lies before the one before it is removed. A writer
that was away for long might put an entry in such a gap, so it looks for later ones before it believes in its own. Each
entry names the one that it follows, which tells whether one that others have come after counts.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import re
import secrets
import threading
import time
import types
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from sidesave.errors import CommitUnknownError, IntegrityError, WriteError
from sidesave.writer_daemon.storage.remote import Bucket
from sidesave.writer_daemon.storage.sealed_json import check_digest, check_version, get, load_json, seal

logger = logging.getLogger(__name__)

LOG: Final = ".sidesave.log"
_FORMAT: Final = "sidesave-log"
_EVERY: Final = 16
"""Entries from one with all names to the next: a reader asks for no more, and all at once."""
_MAX_NBYTES: Final = 256 << 20
_TRIES: Final = 4
"""Of an entry whose answer got lost, and of a reader that is overtaken by removals; the library has tried before."""
_PAUSE_S: Final = 0.5
_JUDGED: Final = 256
"""Sessions that are remembered: one whose daemon sends something when so many have come after it leaves that behind."""
_SESSION: Final = re.compile(r"step-\d+\.([0-9a-f]{16})(?:[-.].*)?")


@dataclass(frozen=True, slots=True)
class Names:
    """What a log says up to an entry.

    Attributes:
        number: Of that entry, 0 for an empty log.
        whole: The number of the last entry that had everything in it.
        session: Who took over last.
        token: Of that very taking.
        serial: Which entry of that taking it is.
        prefixes: Names of directories, and the prefixes that they lead to.
        open: Earlier sessions whose leftovers nobody has judged yet.
        dropped: Prefixes of these sessions, of this one and of none that were removed: what is there late is nothing.
        judged: The last sessions whose leftovers were judged: what a daemon of theirs sends all the same is rubbish.
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
        """Whether a prefix of a save, which no name leads to, may still become a checkpoint."""
        match = _SESSION.fullmatch(prefix)
        if match is None or prefix in self.dropped:
            return False
        return not self.number or match[1] == self.session or match[1] in self.open

    def lead_to(self, prefix: str) -> bool:
        """Whether a directory has its files there."""
        return prefix in self.prefixes.values()


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry: what changes, and, where ``state`` is, everything. ``before`` is whose, and which, it follows."""

    number: int
    whole: int
    session: str
    token: str
    serial: int
    before: tuple[str, int]
    changes: Mapping[str, str | None]
    dropped: tuple[str, ...]
    state: Names | None

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
            body["open"], body["all_dropped"], body["judged"] = sorted(state.open), sorted(state.dropped), state.judged
        return seal(body)

    @classmethod
    def from_bytes(cls, data: bytes, number: int, path: str) -> _Entry:
        check_digest(data, path)
        body = load_json(data, path)
        check_version(body, _FORMAT, path)
        if get(body, "number", int, path) != number:
            raise IntegrityError(f"{path}: it is entry {body['number']}")
        session, token = get(body, "session", str, path), get(body, "token", str, path)
        whole, serial = get(body, "whole", int, path), get(body, "serial", int, path)
        before = cast("list[Any]", get(body, "before", list, path))
        if [type(value) for value in before] != [str, int]:
            raise IntegrityError(f"{path}: it does not say what it follows")
        changes = cast("dict[str, Any]", get(body, "changes", dict, path))
        dropped = cast("list[Any]", get(body, "dropped", list, path))
        state = None
        if "names" in body:
            names = cast("dict[str, Any]", get(body, "names", dict, path))
            known: dict[str, Any] = {"judged": [], **body}  # older ones have none
            others = [cast("list[Any]", get(known, key, list, path)) for key in ("open", "all_dropped", "judged")]
            _require_texts([*names.values(), *itertools.chain(*others)], path)
            is_open, removed = map(frozenset, others[:2])
            state = Names(number, number, session, token, serial, names, is_open, removed, tuple(others[2]))
        _require_texts([*(each for each in changes.values() if each is not None), *dropped], path)
        return cls(number, whole, session, token, serial, (before[0], before[1]), changes, tuple(dropped), state)

    def after(self, before: Names) -> Names:
        """What holds with this entry behind ``before``."""
        if self.state is not None:
            return self.state
        prefixes = {**before.prefixes, **self.changes}
        kept = {name: prefix for name, prefix in prefixes.items() if prefix is not None}
        dropped = before.dropped.union(self.dropped)
        return replace(before, number=self.number, serial=self.serial, prefixes=kept, dropped=dropped)


def _require_texts(values: Iterable[object], path: str) -> None:
    if not all(isinstance(value, str) for value in values):
        raise IntegrityError(f"{path}: a name or a prefix is no text")


class RunLog:
    """The log of one run. Reading changes nothing; :meth:`take_over` makes this object the one that may write.

    Thread-safe; every method blocks for some requests and raises ``WriteError`` where the store does not answer, and
    ``IntegrityError`` where the log is damaged.
    """

    def __init__(self, bucket: Bucket) -> None:
        """Ask nothing yet."""
        self._bucket = bucket
        self._lock = threading.RLock()
        self._token = ""
        self._serial = 0
        self._names = Names()
        self._whole_before = 1  # the entry with everything in it before the last such one
        self._lost_to = ""
        self._in_doubt = False  # whether an entry of ours may be there, or come, that we do not know of

    @property
    def holds(self) -> bool:
        """Whether this object has taken over, and knows of nobody after it."""
        return bool(self._token)

    def look(self) -> Names:
        """What the log says now: of who writes without a request, of anybody else 1 LIST and at most 17 GETs.

        Who has looked before asks for the last entry and those that are new.
        Who writes, and has an entry of which it is not known whether it is there, adds an empty one first.
        """
        with self._lock:
            if self._token and self._in_doubt:
                try:
                    self._append()  # that number is taken then, by this one or by what had got lost
                except _Overtaken:
                    pass
                except CommitUnknownError as error:
                    raise WriteError(error.errno, str(error.strerror), error.filename) from error
            if not self._token:
                self._names = self._read()
            return self._names

    # Writing ---------------------------------------------------------------------------------------------------

    def take_over(self, session: str, before_first: Callable[[], None] = lambda: None) -> None:
        """Become the one who writes, for ``session``: what anybody before writes from now on fails and does not count.

        ``before_first`` is called where there is no log yet, and stops this by raising.

        Raises:
            WriteError: The store does not refuse to put a second object of one key (EOPNOTSUPP); or somebody else has
                taken over right after (ESTALE).
            CommitUnknownError: The store does not tell whether it has taken the entry: to be called again.
        """
        with self._lock:
            self._probe()
            token = secrets.token_hex(8)
            while self._token != token:
                self._token, self._in_doubt = "", False
                if not self.look().number:
                    before_first()
                self._token = token
                try:
                    self._append(whole=lambda before: _taken_over(before, session, token))
                except _Overtaken:
                    continue  # another entry came first
                except BaseException:  # whatever it was, nothing has been taken over for sure
                    self._token = ""
                    raise
                self._require_writer()

    def change(self, changes: Mapping[str, str | None], dropped: Iterable[str] = ()) -> None:
        """Let names lead to other prefixes, or nowhere (None), all at once; ``dropped`` prefixes never count again.

        Raises:
            WriteError: Somebody has taken over (ESTALE), or the store denies access (EACCES); nothing has changed.
            CommitUnknownError: The store does not tell whether it has taken the entry. The next call finds out.
        """
        with self._lock:
            self._require_writer()
            self._append(changes, tuple(dropped))

    def settle(self) -> tuple[str, ...]:
        """Everything that earlier sessions have left, and that no name leads to, never counts again; which they are."""
        with self._lock:
            self._require_writer()
            if self._names.open:
                self._append(whole=_settled)
            return self._names.judged

    def _append(
        self,
        changes: Mapping[str, str | None] = types.MappingProxyType({}),
        dropped: tuple[str, ...] = (),
        whole: Callable[[Names], Names] | None = None,
    ) -> None:
        """Add an entry; with ``whole`` it holds what that makes of all there is."""
        self._serial += 1
        while True:
            entry = self._next_entry(changes, dropped, whole)
            there = self._claim(entry)
            if there.token != self._token:
                raise self._lost(f"session {there.session} has taken over")
            self._refuse_overtaken(there)
            self._names = there.after(self._names)
            if there.serial == self._serial:
                break  # else it is an earlier change of ours, of which no answer had come
            self._require_writer()
        self._in_doubt = False
        if entry.state is not None and self._token:
            if self._whole_before > 1:
                self._sweep(upto=self._whole_before)
            self._whole_before = entry.number

    def _next_entry(
        self,
        changes: Mapping[str, str | None],
        dropped: tuple[str, ...],
        whole: Callable[[Names], Names] | None,
    ) -> _Entry:
        names = self._names
        number = names.number + 1
        before = names.token, names.serial
        entry = _Entry(
            number, names.whole, names.session, self._token, self._serial, before, {**changes}, dropped, None
        )
        if whole is None and number % _EVERY == 0:
            whole = entry.after
        if whole is None:
            return entry
        state = replace(whole(names), number=number, whole=number, serial=self._serial)
        return replace(entry, whole=number, session=state.session, state=state)

    def _claim(self, entry: _Entry) -> _Entry:
        """Put an entry where its number is free; returns what has that number then."""
        key, data = _key(entry.number), entry.to_bytes()
        failure: WriteError | None = None
        denied = True  # and nothing else: then nothing can be under way
        for tries in range(_TRIES):
            time.sleep(_PAUSE_S * (tries > 0))
            try:
                if self._bucket.create(key, data):
                    return entry
                failure = None
            except WriteError as error:
                failure = error
            denied = denied and failure is not None and failure.errno == errno.EACCES
            try:  # the answer to a lost request may be that the object is there
                there = self._read_entry(entry.number)
            except WriteError as error:
                text = f"whether the store has taken it is not known: {(failure or error).strerror}"
                raise self._unknown(text, entry.number) from error
            if there is not None:
                return there
            if denied and failure is not None:
                raise failure
        text = f"the store does not take it: {failure.strerror if failure else 'it says there is one, and has none'}"
        raise self._unknown(text, entry.number)  # a request may be under way that was given up here

    def _refuse_overtaken(self, entry: _Entry) -> None:
        """Raise where an entry of ours is there and does not count: what it followed was removed long ago."""
        try:
            later = self._numbers(after=entry.number)
            following = self._read_entry(entry.number + 1) if later else None
        except WriteError as error:
            text = f"the store has taken it, and whether that counts is not known: {error.strerror}"
            raise self._unknown(text, entry.number) from error
        if not later:
            return
        overtaken = self._lost(f"entry {later[-1]} of its log is not ours")
        if following is None:
            text = f"whether it counts is not known: {overtaken.strerror}"
            raise CommitUnknownError(errno.ESTALE, text, overtaken.filename)
        if following.before != (entry.token, entry.serial):
            raise overtaken

    def _unknown(self, text: str, number: int) -> CommitUnknownError:
        self._in_doubt = True
        return CommitUnknownError(errno.ETIMEDOUT, text, self._bucket.full(_key(number)))

    def _lost(self, why: str) -> _Overtaken:
        self._token, self._lost_to = "", why
        return _Overtaken(errno.ESTALE, f"the run has passed to another session: {why}", self._bucket.full(LOG))

    def _require_writer(self) -> None:
        if not self._token:
            raise self._lost(self._lost_to or "this one has not taken over")

    def _probe(self) -> None:
        """Find out by trying whether a second object of one key is refused: several kinds of stores just replace it."""
        key = f"{LOG}/probe.{secrets.token_hex(8)}"
        try:
            self._bucket.create(key, b"first")
            if self._bucket.create(key, b"second") or self._bucket.read(key, 100) != b"first":
                text = "this store does not keep an object from being replaced (If-None-Match is ignored), so two jobs "
                hint = "could write here at once and neither would know; use another store for run directories"
                raise WriteError(errno.EOPNOTSUPP, text + hint, self._bucket.root)
        finally:
            with contextlib.suppress(WriteError):
                self._bucket.remove([key])

    def _sweep(self, upto: int) -> None:
        """Remove the entries before ``upto``; readers that have just listed them have one more that is whole."""
        try:
            self._bucket.remove([_key(number) for number in self._numbers() if number < upto])
        except WriteError as error:
            logger.warning("left for the next time: %s", error)

    # Reading ---------------------------------------------------------------------------------------------------

    def _read(self) -> Names:
        known = self._names
        for _ in range(_TRIES):
            numbers = self._numbers()
            if not numbers:
                return Names()
            last = self._read_entry(numbers[-1])
            if last is None:
                continue  # it was removed since: there are many new ones
            if last.number < known.number or known.number < last.whole:
                known = Names()
            first = last.number if last.state is not None else max(last.whole, known.number + 1)
            with ThreadPoolExecutor(_EVERY, "sidesave-log") as pool:
                entries = [*pool.map(self._read_entry, range(first, last.number)), last]
            if last.number == known.number:
                found = known if (last.token, last.serial) == (known.token, known.serial) else None
            else:
                found = _followed(known, entries)
            if found is not None:
                self._whole_before = found.whole
                return found
            known = Names()
        hint = "put them back, or choose another place"
        raise IntegrityError(f"{self._bucket.full(LOG)}: entries of the run's log are missing: {hint}")

    def _read_entry(self, number: int) -> _Entry | None:
        key = _key(number)
        data = self._bucket.read(key, _MAX_NBYTES)
        return None if data is None else _Entry.from_bytes(data, number, self._bucket.full(key))

    def _numbers(self, after: int | None = None) -> list[int]:
        """The numbers of the entries that are there, in order."""
        keys = self._bucket.list_all(LOG, "" if after is None else _key(after))
        names = (key.rpartition("/")[2] for key in keys)
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def _followed(names: Names, entries: Iterable[_Entry | None]) -> Names | None:
    """What holds after all of these; None where one is missing, or follows another one."""
    for entry in entries:
        if entry is None or (entry.state is None and entry.before != (names.token, names.serial)):
            return None
        names = entry.after(names)
    return names


class _Overtaken(WriteError):
    """Another session has taken over."""


def _taken_over(before: Names, session: str, token: str) -> Names:
    others = before.open.union({before.session} if before.session else ()) - {session}
    dropped = frozenset(each for each in before.dropped if session_of(each) in {*others, session, ""})
    judged = tuple(each for each in before.judged if each != session)  # of a mirror one may come back
    return replace(before, session=session, token=token, open=others, dropped=dropped, judged=judged)


def _settled(names: Names) -> Names:
    own = frozenset(each for each in names.dropped if session_of(each) in (names.session, ""))
    judged = (*(each for each in names.judged if each not in names.open), *sorted(names.open))
    return replace(names, open=frozenset(), dropped=own, judged=judged[-_JUDGED:])


def _key(number: int) -> str:
    return f"{LOG}/{number:012d}"


def session_of(prefix: str) -> str:
    """The session whose save a prefix is of, "" where it is of none."""
    match = _SESSION.fullmatch(prefix)
    return match[1] if match else ""
