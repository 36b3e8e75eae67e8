"""Names of a run's directories in an object store, which cannot rename: a log of numbered entries.

Each entry is an object, ``.sidesave.log/<number>``, created only if that number is free. It maps
names of directories to prefixes from then on. A writer claims the number after the last entry that
it knows. So of two writers one fails and finds the entry of the other, which has taken over. See
docs/decisions/0026.

Readers read the last entries. Every 16th entry is a snapshot with all names; entries before the
second-to-last snapshot are removed. A writer that was suspended for long could create an entry in
such a gap, so it looks for later entries before it relies on its own. Each entry names its
predecessor, which shows whether an entry with later ones is valid.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import threading
import time
import types
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from sidesave.errors import CommitUnknownError, IntegrityError, WriteError
from sidesave.writer_daemon.storage.log_entry import LogEntry, LogState
from sidesave.writer_daemon.storage.remote import Bucket

logger = logging.getLogger(__name__)

LOG: Final = ".sidesave.log"
_EVERY: Final = 16
"""Entries from one snapshot to the next; a reader requests at most this many, all at once."""
_MAX_NBYTES: Final = 256 << 20
_TRIES: Final = 4
"""Attempts to create an entry whose response was lost, and to read a log that changes."""
_MAX_OVERTAKEN: Final = 20
"""Number of times that a reader tries again because entries were added and removed meanwhile."""
_PAUSE_S: Final = 0.5


class RunLog:
    """The log of one run.

    Reading changes nothing; after :meth:`take_over` only this object may write. Thread-safe. Each
    method blocks for some requests, and raises ``WriteError`` if the store does not respond and
    ``IntegrityError`` if the log is damaged.
    """

    def __init__(self, bucket: Bucket) -> None:
        """Create the log without sending a request."""
        self._bucket = bucket
        self._lock = threading.RLock()
        self._token = ""
        self._serial = 0
        self._state = LogState()
        self._whole_before = 1  # number of the second-to-last snapshot
        self._lost_to = ""
        self._in_doubt = False  # whether an entry of ours may exist, or appear, unknown to us

    @property
    def holds(self) -> bool:
        """Whether this object has taken over and knows of no later takeover."""
        return bool(self._token)

    @property
    def state(self) -> LogState:
        """The state after the last entry that was read or written; sends no request."""
        return self._state

    def look(self) -> LogState:
        """Return the current state.

        The writer sends no request, unless its last entry may have been lost: then it adds an empty
        one. A reader sends 1 LIST and at most 17 GETs, fewer if it has read before.
        """
        with self._lock:
            if self._token and self._in_doubt:
                try:
                    self._append()  # then the number is taken, by this entry or the lost one
                except _Overtaken:
                    pass
                except CommitUnknownError as error:
                    raise WriteError(error.errno, str(error.strerror), error.filename) from error
            if not self._token:
                self._state = self._read()
            return self._state

    # Writing --------------------------------------------------------------------------------------

    def take_over(self, session: str, before_first: Callable[[], None] = lambda: None) -> None:
        """Become the writer, for ``session``; from now on writes of earlier writers fail.

        ``before_first`` is called if there is no log yet; it can prevent the takeover by raising.

        Raises:
            WriteError: The store does not refuse a second object of the same key (EOPNOTSUPP), or
                another session has taken over immediately after (ESTALE).
            CommitUnknownError: It is not known whether the store has the entry; call this again.
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
                    self._append(whole=lambda before: before.taken_over(session, token))
                except _Overtaken:
                    continue  # another writer's entry came first
                except BaseException:  # in any case this object is not surely the writer
                    self._token = ""
                    raise
                self._require_writer()

    def change(self, changes: Mapping[str, str | None], dropped: Iterable[str] = ()) -> None:
        """Change the prefixes of names atomically; None removes a name.

        ``dropped`` prefixes never count again.

        Raises:
            WriteError: Another session has taken over (ESTALE), or the store denies access
                (EACCES). Nothing has changed.
            CommitUnknownError: It is not known whether the store has the entry. The next call finds
                out.
        """
        with self._lock:
            self._require_writer()
            self._append(changes, tuple(dropped))

    def settle(self) -> tuple[str, ...]:
        """Make unnamed prefixes of earlier sessions never count again; return these sessions."""
        with self._lock:
            self._require_writer()
            if self._state.open:
                self._append(whole=LogState.settled)
            return self._state.judged

    def _append(
        self,
        changes: Mapping[str, str | None] = types.MappingProxyType({}),
        dropped: tuple[str, ...] = (),
        whole: Callable[[LogState], LogState] | None = None,
    ) -> None:
        """Add an entry; with ``whole``, a snapshot of the state that this function returns."""
        self._serial += 1
        while True:
            entry = self._next_entry(changes, dropped, whole)
            stored = self._claim(entry)
            if stored.token != self._token:
                raise self._lost(f"session {stored.session} has taken over")
            self._refuse_overtaken(stored)
            self._state = stored.after(self._state)
            if stored.serial == self._serial:
                break  # otherwise it is an earlier change of ours, whose response was lost
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
        whole: Callable[[LogState], LogState] | None,
    ) -> LogEntry:
        last = self._state
        number = last.number + 1
        before = last.token, last.serial
        entry = LogEntry(
            number,
            last.whole,
            last.session,
            self._token,
            self._serial,
            before,
            {**changes},
            dropped,
            None,
        )
        if whole is None and number % _EVERY == 0:
            whole = entry.after
        if whole is None:
            return entry
        state = replace(whole(last), number=number, whole=number, serial=self._serial)
        return replace(entry, whole=number, session=state.session, state=state)

    def _claim(self, entry: LogEntry) -> LogEntry:
        """Create an entry if its number is free; return the entry that has it afterwards."""
        key, data = _key(entry.number), entry.to_bytes()
        failure: WriteError | None = None
        denied = True  # if each request was denied, none can still create the object
        for tries in range(_TRIES):
            time.sleep(_PAUSE_S * (tries > 0))
            try:
                if self._bucket.create(key, data):
                    return entry
                failure = None
            except WriteError as error:
                failure = error
            denied = denied and failure is not None and failure.errno == errno.EACCES
            try:  # a request whose response was lost may have created the object
                stored = self._read_entry(entry.number)
            except WriteError as error:
                text = f"not known whether the store has the entry: {(failure or error).strerror}"
                raise self._unknown(text, entry.number) from error
            if stored is not None:
                return stored
            if denied and failure is not None:
                raise failure
        reason = (
            failure.strerror if failure else "it reports an object of this key, but returns none"
        )
        text = f"the store does not accept the entry: {reason}"
        raise self._unknown(text, entry.number)  # an abandoned request may still create it

    def _refuse_overtaken(self, entry: LogEntry) -> None:
        """Raise if our stored entry is invalid: others followed its predecessor and are gone."""
        try:
            later = self._numbers(after=entry.number)
            following = self._read_entry(entry.number + 1) if later else None
        except WriteError as error:
            text = (
                "the store has the entry, but it is not known whether it is valid: "
                f"{error.strerror}"
            )
            raise self._unknown(text, entry.number) from error
        if not later:
            return
        overtaken = self._lost(f"entry {later[-1]} of its log is from another session")
        if following is None:
            text = f"not known whether the entry is valid: {overtaken.strerror}"
            raise CommitUnknownError(errno.ESTALE, text, overtaken.filename)
        if following.before != (entry.token, entry.serial):
            raise overtaken

    def _unknown(self, text: str, number: int) -> CommitUnknownError:
        self._in_doubt = True
        return CommitUnknownError(errno.ETIMEDOUT, text, self._bucket.full(_key(number)))

    def _lost(self, why: str) -> _Overtaken:
        self._token, self._lost_to = "", why
        return _Overtaken(
            errno.ESTALE, f"the run has passed to another session: {why}", self._bucket.full(LOG)
        )

    def _require_writer(self) -> None:
        if not self._token:
            raise self._lost(self._lost_to or "this session has not taken over")

    def _probe(self) -> None:
        """Test whether the store refuses a second object of a key; some replace the first."""
        key = f"{LOG}/probe.{secrets.token_hex(8)}"
        try:
            self._bucket.create(key, b"first")
            if self._bucket.create(key, b"second") or self._bucket.read(key, 100) != b"first":
                text = (
                    "this store ignores If-None-Match and replaces existing objects, so two jobs "
                    "could write here "
                )
                hint = "at once without noticing; use another store for run directories"
                raise WriteError(errno.EOPNOTSUPP, text + hint, self._bucket.root)
        finally:
            with contextlib.suppress(WriteError):
                self._bucket.remove([key])

    def _sweep(self, upto: int) -> None:
        """Remove entries before ``upto``; readers with an older listing find a later snapshot."""
        try:
            self._bucket.remove([_key(number) for number in self._numbers() if number < upto])
        except WriteError as error:
            logger.warning(
                "cannot remove old entries of the log; the next session tries again: %s", error
            )

    # Reading --------------------------------------------------------------------------------------

    def _read(self) -> LogState:
        previous, before, tries = self._state, list[int](), 0
        for _ in range(_MAX_OVERTAKEN):
            numbers = self._numbers()
            if not numbers:
                return LogState()
            # a writer that adds entries does not count
            tries = tries + 1 if numbers == before else 1
            if tries > _TRIES:
                break
            before = numbers
            last = self._read_entry(numbers[-1])
            if last is None:
                continue  # it was removed, so there are many new entries
            if last.number < previous.number or previous.number < last.whole:
                previous = LogState()
            first = last.number if last.state is not None else max(last.whole, previous.number + 1)
            with ThreadPoolExecutor(_EVERY, "sidesave-log") as pool:
                entries = [*pool.map(self._read_entry, range(first, last.number)), last]
            if last.number == previous.number:
                state = (
                    previous
                    if (last.token, last.serial) == (previous.token, previous.serial)
                    else None
                )
            else:
                state = _followed(previous, entries)
            if state is not None:
                self._whole_before = state.whole
                return state
            previous = LogState()
        hint = "restore them, or use another run directory"
        raise IntegrityError(
            f"{self._bucket.full(LOG)}: entries of the run's log are missing: {hint}"
        )

    def _read_entry(self, number: int) -> LogEntry | None:
        key = _key(number)
        data = self._bucket.read(key, _MAX_NBYTES)
        return None if data is None else LogEntry.from_bytes(data, number, self._bucket.full(key))

    def _numbers(self, after: int | None = None) -> list[int]:
        """Return the numbers of the existing entries, sorted."""
        keys = self._bucket.list_all(LOG, "" if after is None else _key(after))
        names = (key.rpartition("/")[2] for key in keys)
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def _followed(state: LogState, entries: Iterable[LogEntry | None]) -> LogState | None:
    """Return the state after all ``entries``; None if one is missing or has another predecessor."""
    for entry in entries:
        if entry is None or (entry.state is None and entry.before != (state.token, state.serial)):
            return None
        state = entry.after(state)
    return state


class _Overtaken(WriteError):
    """Another session has taken over."""


def _key(number: int) -> str:
    return f"{LOG}/{number:012d}"
