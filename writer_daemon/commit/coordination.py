"""How the daemons of several ranks coordinate, by storage alone.

Each writes its record, or a refusal, into the partial directory of the attempt (``attempts``). Rank
0's daemon waits for all of them and commits, or aborts on the first refusal. The others list the
run directory until they see the outcome. No daemon looks up a name that may not exist yet, since
network file systems cache its absence for a minute.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from sidesave.errors import (
    CommitUnknownError,
    DaemonDiedError,
    IntegrityError,
    StateMismatchError,
    WriteError,
    WriteStalledError,
)
from sidesave.writer_daemon.checkpoints.info import peek_head
from sidesave.writer_daemon.commit.attempts import (
    GivenUp,
    abort_reason,
    attempt_of,
    partial_of,
    tidy,
)
from sidesave.writer_daemon.format.manifest import MAX_JSON_NBYTES, Head, RankRecord
from sidesave.writer_daemon.format.names import (
    hidden_directory,
    parse_hidden_directory,
    record_file,
    step_directory,
)
from sidesave.writer_daemon.format.refusal import Refusal
from sidesave.writer_daemon.format.sealed_records import open_record
from sidesave.writer_daemon.lease.observer import closed_ranks
from sidesave.writer_daemon.protocol import Refuse, Save
from sidesave.writer_daemon.sealing.keys import save_key
from sidesave.writer_daemon.storage import Storage

REPLICA_DIGEST: Final = "replica-digest."
VERDICTS: Final = ("alike", "diverged")
_FIRST_POLL_S: Final = 0.002
_MAX_POLL_S: Final = 0.05
"""Between two looks of rank 0 at the records of one attempt."""
_MAX_SLOW_POLL_S: Final = 1.0
"""Between two looks of another rank at the run directory: there are many of them."""
_MAX_ASKING_POLL_S: Final = 0.25
"""The same of a rank that has stopped writing and asks whether plain tensors are alike."""
TOMBSTONE_S: Final = 60.0
"""Time for which an aborted attempt stays visible; longer than any rank's pause between looks."""
_MAX_GAP_S: Final = 20.0
"""After this long without a look a rank draws no conclusion from what is not there any more."""
_GRACE_S: Final = 5.0
"""Ranks above 0 wait this much longer: only rank 0 can give up for all, and name the late ranks."""
_ORPHAN_S: Final = 5.0
"""Other ranks give up after this time without a lease; replacing rank 0's daemon is quicker."""
_LOOKS: Final = 3
"""A listing may lack what is being renamed at that moment, but not so many in a row."""
_RANKS_PER_SECOND: Final = 10_000
"""More ranks than this look less often: a metadata server has other things to do as well."""
_RANKS_PER_SECOND_OF_STORE: Final = 16
"""The same where each look is some requests, which are paid for."""
_FIRST_POLL_TRIPS: Final = 2
_MAX_POLL_TRIPS: Final = 10
_LOOKOUT_TRIPS: Final = 40
"""Round trips, if looks are requests: of the first and longest pause, and for ranks that left."""
_READERS: Final = 32
"""Records read at once: if each takes a millisecond, 100,000 one by one would take 100 s."""

logger = logging.getLogger(__name__)

Waiting = Callable[[], None]
"""Called now and then while something is awaited; may raise to end the wait."""


# Rank 0 -------------------------------------------------------------------------------------------


def await_records(
    storage: Storage, save: Save, timeout_s: float, waiting: Waiting
) -> list[RankRecord]:
    """The records of all ranks of an attempt, once they are there; blocking.

    Answers ranks that ask whether plain tensors are alike, even if rank 0 has none.

    Raises:
        GivenUp: With a rank's refusal; ``DaemonDiedError``: a rank's daemon has left without a
            record; ``StateMismatchError``: a rank saves another step in this turn;
            ``WriteStalledError``: ``timeout_s`` seconds have passed.
    """
    directory = partial_of(save)
    records: dict[int, RankRecord] = {}
    missing = set(range(save.world_size))
    lookout = _Lookout(storage, save, waiting)
    answered = False
    for _ in _polls(storage, timeout_s, _MAX_POLL_S):
        names = set(storage.list_directory(directory))
        records |= _read_records(
            storage, save, [rank for rank in missing if record_file(rank) in names]
        )
        missing -= records.keys()
        if save.rank in records and not answered:
            answered = save.unshared is not None or bool(_replica_digests(names))
            if answered and save.unshared is None:
                # Rank 0 has nothing to compare, so other ranks hold other tensors.
                storage.make_directory(_verdict(save, alike=False), 0o700)
        if not missing:
            return [records[rank] for rank in range(save.world_size)]
        lookout.look(missing)
    raise _late(
        storage, save, f"ranks {sorted(missing)[:8]} have not written their part", timeout_s
    )


class _Lookout:
    """Finds out for a waiting rank 0 that other ranks will never come."""

    def __init__(self, storage: Storage, save: Save, waiting: Waiting) -> None:
        self._storage, self._save, self._waiting = storage, save, waiting
        self._left: frozenset[int] = frozenset()
        self._next = time.monotonic() + _LOOKOUT_TRIPS * storage.round_trip_s

    def look(self, missing: Iterable[int]) -> None:
        """``missing`` are the ranks that had left nothing a moment ago."""
        # They had left before that look, which would have found their records.
        ended = self._left.intersection(missing)
        if ended:
            text = f"rank {min(ended)} has ended without writing its part of step {self._save.step}"
            raise GivenUp(DaemonDiedError(text))
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + max(
                _MAX_SLOW_POLL_S / 2, _LOOKOUT_TRIPS * self._storage.round_trip_s
            )
            self._waiting()
            _refuse_misaligned(self._storage, self._save)
            self._left = closed_ranks(self._storage, self._save.session)


def _late(storage: Storage, save: Save, what: str, timeout_s: float) -> GivenUp:
    text = f"{what} of step {save.step} within {timeout_s:g} s"
    return GivenUp(WriteStalledError(errno.ETIMEDOUT, text, f"{storage.root}/{partial_of(save)}"))


def _read_records(storage: Storage, save: Save, ranks: list[int]) -> dict[int, RankRecord]:
    """Read the records of ``ranks`` in parallel; on network storage each takes a round trip."""
    if len(ranks) < (2 if storage.round_trip_s else _READERS):
        return {rank: _read_record(storage, save, rank) for rank in ranks}
    with ThreadPoolExecutor(_READERS, "sidesave-records") as readers:
        futures = {rank: readers.submit(_read_record, storage, save, rank) for rank in ranks}
        return {rank: future.result() for rank, future in futures.items()}


def _read_record(storage: Storage, save: Save, rank: int) -> RankRecord:
    path = f"{partial_of(save)}/{record_file(rank)}"
    data = storage.read(path, MAX_JSON_NBYTES)
    if data is None:
        raise WriteError(errno.ENOENT, "a rank's record has disappeared", f"{storage.root}/{path}")
    try:
        record = RankRecord.from_bytes(data, path)
    except IntegrityError:
        refusal = Refusal.from_bytes(data, path)
        if refusal is None:
            raise
        raise GivenUp(refusal.as_error()) from None
    if (record.session, record.step, record.sequence) != (save.session, save.step, save.sequence):
        raise IntegrityError(f"{storage.root}/{path}: the record belongs to another save")
    key = save_key(save.sealing, save.session, save.sequence)
    return record if key is None else open_record(record, key, path).record


def _refuse_misaligned(storage: Storage, save: Save) -> None:
    for name in storage.list_directory(""):
        parsed = parse_hidden_directory(name)
        if parsed and parsed[0] != save.step and parsed[1:] == (attempt_of(save), "partial"):
            entries = storage.list_directory(name)
            for entry in entries:
                if entry.startswith("rank-"):
                    _refuse_refused(storage, f"{name}/{entry}")
            if all(entry.startswith(".rank-") for entry in entries):  # or empty: no record yet
                continue
            text = (
                f"a rank saves step {parsed[0]} where rank 0 saves step {save.step}; every rank "
                "has to save the same"
            )
            error = StateMismatchError(f"{text} steps in the same order")
            error.saved_instead = parsed[0]
            raise GivenUp(error)


def _refuse_refused(storage: Storage, path: str) -> None:
    """Raise the refusal of a rank that was not even given a step."""
    data = storage.read(path, MAX_JSON_NBYTES)
    refusal = None
    with contextlib.suppress(IntegrityError):
        refusal = None if data is None else Refusal.from_bytes(data, path)
    if refusal is not None:
        raise GivenUp(refusal.as_error())


# The other ranks ----------------------------------------------------------------------------------


def await_commit(
    storage: Storage,
    save: Save,
    timeout_s: float,
    waiting: Waiting,
    check_lease: Waiting,
    seen: float,
) -> int:
    """The bytes of the checkpoint, once rank 0 has committed it; blocking.

    0 if it was replaced or deleted before this rank looked: rank 0 leaves a sign for a minute of
    what it aborts, and none of what it commits. ``seen`` is the monotonic time of this rank's
    record.

    Raises:
        GivenUp: Rank 0 has aborted it, or has ended without writing its part.
        CommitUnknownError: ``timeout_s`` seconds have passed, or a session took over the run
            without committing it.
    """
    target, partial = step_directory(save.step), partial_of(save)
    path = f"{storage.root}/{target}"
    orphaned_at: float | None = None
    gone, in_time = 0, False
    for _ in _polls(storage, timeout_s + _GRACE_S, _slowed(_MAX_SLOW_POLL_S, storage, save)):
        names = storage.list_directory("")
        reason = abort_reason(storage, save, names)
        if reason is not None:
            raise GivenUp(reason)
        head = _peek_head(storage, target) if target in names else None
        if head is not None and (head.session, head.sequence) == (save.session, save.sequence):
            return head.nbytes
        now = time.monotonic()
        if partial in names:
            seen, gone = now, 0
        else:
            in_time = in_time if gone else now - seen < _MAX_GAP_S
            gone += 1
        try:
            waiting()
            if gone >= _LOOKS or orphaned_at is not None:
                check_lease()
                orphaned_at = None
        except WriteError:  # no lease: the next session commits what is whole, removes the rest
            orphaned_at = now if orphaned_at is None else orphaned_at
        if gone >= _LOOKS and orphaned_at is None:
            if in_time:
                return 0
            raise CommitUnknownError(
                errno.ENOENT, f"the outcome of step {save.step} was not seen in time", path
            )
        if orphaned_at is not None and not any(attempt_of(save) in name for name in names):
            # In a store, an object that came late may be there; it has no meaning.
            tidy(lambda: storage.remove_tree(partial))
            raise CommitUnknownError(
                errno.ESTALE, "the run has passed to another session without this step", path
            )
        if orphaned_at is not None and now - orphaned_at > _ORPHAN_S and partial in names:
            left = storage.list_directory(partial)
            if left and record_file(0) not in left:
                raise GivenUp(
                    DaemonDiedError(
                        f"rank 0 has ended without writing its part of step {save.step}"
                    )
                )
    raise CommitUnknownError(
        errno.ETIMEDOUT,
        f"step {save.step} was not committed within {timeout_s:g} s; it may still be",
        path,
    )


def _peek_head(storage: Storage, target: str) -> Head | None:
    try:
        return peek_head(storage, target)
    except (IntegrityError, WriteError) as error:
        logger.debug("%s", error)  # it is being replaced, or removed
        return None


# What plain tensors the ranks hold ----------------------------------------------------------------


def are_alike(
    storage: Storage, save: Save, digest: str, timeout_s: float, waiting: Waiting, attempt: str
) -> bool:
    """Whether all ranks hold the same plain tensors with the same values; blocking.

    Rank 0's daemon compares their digests. Its verdict is a directory next to the attempt's, so
    that other ranks need not list the attempt's. A rank that has no such tensors, or has seen an
    earlier daemon's verdict, answers by its record. ``attempt`` makes temporary names unique.

    Raises:
        GivenUp: As in :func:`await_records`, or by rank 0.
    """
    directory = partial_of(save)
    own_file = f"{REPLICA_DIGEST}rank-{save.rank:05d}.{digest}"
    storage.publish_bytes(directory, own_file, b"", attempt)
    recorded: dict[int, str] = {}
    lookout = _Lookout(storage, save, waiting)
    what = "rank 0 has not said what to write"
    max_delay_s, grace_s = (
        (_slowed(_MAX_ASKING_POLL_S, storage, save), _GRACE_S) if save.rank else (_MAX_POLL_S, 0.0)
    )
    for _ in _polls(storage, timeout_s + grace_s, max_delay_s):
        beside = storage.list_directory("")
        for alike in (True, False):
            if _verdict(save, alike=alike) in beside:
                with contextlib.suppress(WriteError):  # else rank 0 does, for all in turn
                    storage.remove(f"{directory}/{own_file}")
                return alike
        reason = abort_reason(storage, save, beside)
        if reason is not None:
            raise GivenUp(reason)
        if save.rank == 0:
            names = set(storage.list_directory(directory))
            published = _replica_digests(names)
            for rank in range(1, save.world_size):
                if rank not in published and rank not in recorded and record_file(rank) in names:
                    recorded[rank] = _read_record(storage, save, rank).part.replica_digest
            digests = {**recorded, **published}
            alike = set(digests.values()) == {digest}
            if not alike or len(digests) == save.world_size:
                storage.make_directory(_verdict(save, alike=alike), 0o700)
                return alike
            missing = sorted(set(range(save.world_size)) - digests.keys())
            what = f"ranks {missing[:8]} have not begun to write their part"
            lookout.look(missing)
        else:
            waiting()
    raise _late(storage, save, what, timeout_s)


def _slowed(delay_s: float, storage: Storage, save: Save) -> float:
    at_once = _RANKS_PER_SECOND_OF_STORE if storage.round_trip_s else _RANKS_PER_SECOND
    return min(_MAX_GAP_S / 2, delay_s * max(1.0, save.world_size / at_once))


def forget_verdict(storage: Storage, save: Save | Refuse) -> None:
    """Remove the verdict on plain tensors, which nobody needs any more."""
    for alike in (True, False):
        tidy(lambda alike=alike: storage.remove_tree(_verdict(save, alike=alike)))


def _verdict(save: Save | Refuse, *, alike: bool) -> str:
    return hidden_directory(save.step, attempt_of(save), VERDICTS[not alike])


def _replica_digests(names: set[str]) -> dict[int, str]:
    parts = [name.split(".") for name in names if name.startswith(REPLICA_DIGEST)]
    return {int(rank.removeprefix("rank-")): digest for _, rank, digest in parts}


def _polls(storage: Storage, timeout_s: float, max_delay_s: float) -> Iterator[None]:
    """Iterate with growing, jittered pauses until ``timeout_s`` have passed; a polling loop."""
    deadline = time.monotonic() + timeout_s
    delay_s = max(_FIRST_POLL_S, _FIRST_POLL_TRIPS * storage.round_trip_s)
    max_delay_s = max(max_delay_s, _MAX_POLL_TRIPS * storage.round_trip_s)
    while True:
        began = time.monotonic()
        yield
        now = time.monotonic()
        if now >= deadline:
            return
        time.sleep(max(random.uniform(0.5, 1.0) * delay_s, min(2 * (now - began), max_delay_s)))
        delay_s = min(max_delay_s, 1.5 * delay_s)
