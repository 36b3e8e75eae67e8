"""How the daemons of several ranks coordinate, by storage alone.

Each writes its record, or a refusal, into the partial directory of the attempt. Rank 0's daemon waits for all of them
and commits. On the first refusal it aborts: it renames the directory, which ends the attempt for all, and leaves the
reason in it. The others list the run directory until they see the outcome. Nobody looks up a name that may not exist
yet, since network file systems cache its absence for a minute.
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
    SidesaveError,
    StateMismatchError,
    WriteError,
    WriteStalledError,
)
from sidesave.writer_daemon.format import manifest
from sidesave.writer_daemon.format.manifest import Head, RankRecord, Refusal
from sidesave.writer_daemon.format.sealed_records import open_record
from sidesave.writer_daemon.lease.lease import closed_ranks
from sidesave.writer_daemon.protocol import Failed, Refuse, Save
from sidesave.writer_daemon.sealing.keys import save_key
from sidesave.writer_daemon.storage import Storage

ABORT: Final = "abort.json"
REPLICA_DIGEST: Final = "replica-digest."
VERDICTS: Final = ("alike", "diverged")
_FIRST_POLL_S: Final = 0.002
_MAX_POLL_S: Final = 0.05
"""Between two looks of rank 0 at the records of one attempt."""
_MAX_SLOW_POLL_S: Final = 1.0
"""Between two looks of another rank at the run directory: there are many of them."""
_MAX_ASKING_POLL_S: Final = 0.25
"""The same of a rank that asks whether plain tensors are alike, and has stopped writing for that."""
TOMBSTONE_S: Final = 60.0
"""How long an attempt that was given up is told of: longer than any rank goes without a look that counts."""
_MAX_GAP_S: Final = 20.0
"""After this long without a look a rank draws no conclusion from what is not there any more."""
_GRACE_S: Final = 5.0
"""Other ranks wait this much longer than rank 0, which alone can give up for all and knows whom it has waited for."""
_ORPHAN_S: Final = 5.0
"""The daemon of rank 0 may leave and be replaced, with the lease given up in between; not for so long."""
_LOOKS: Final = 3
"""A listing may lack what is being renamed at that moment, but not so many in a row."""
_RANKS_PER_SECOND: Final = 10_000
"""More ranks than this look less often: a metadata server has other things to do as well."""
_RANKS_PER_SECOND_OF_STORE: Final = 16
"""The same where each look is some requests, which are paid for."""
_FIRST_POLL_TRIPS: Final = 2
_MAX_POLL_TRIPS: Final = 10
_LOOKOUT_TRIPS: Final = 40
"""Pauses where a look is a request, in round trips: before the second look, the longest one of rank 0, and between two
looks for ranks that have left."""
_HEAD_NBYTES: Final = 4096
_READERS: Final = 32
"""So many records are read at once. A server that takes a millisecond for each takes 100 s for 100,000 otherwise."""

logger = logging.getLogger(__name__)

Waiting = Callable[[], None]
"""Called now and then while something is awaited; may raise to end the wait."""
Publish = Callable[[str], None]
"""Gives the attempt's directory an empty file of that name."""


class GivenUp(Exception):
    """An attempt failed, whatever this rank may retry; ``reason`` is the error to report."""

    def __init__(self, reason: SidesaveError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def attempt_of(save: Save | Refuse) -> str:
    """The part of a directory's name that identifies this attempt."""
    return manifest.attempt_of(save.session, save.sequence, save.world_size)


def partial_of(save: Save | Refuse) -> str:
    """The directory that an attempt writes to."""
    return manifest.hidden_directory(save.step, attempt_of(save), "partial")


def refuse_aborted(storage: Storage, save: Save | Refuse) -> None:
    """Raise ``GivenUp`` if the attempt was aborted; a directory made after that would belong to nobody."""
    reason = _reason(storage, save, storage.list_directory(""))
    if reason is not None:
        raise GivenUp(reason)


def _tombstone(names: Iterable[str], save: Save | Refuse) -> str | None:
    """The renamed directory of an aborted attempt; rank 0 may have meant another step by it."""
    end = f".{attempt_of(save)}.aborted"
    return next((name for name in names if name.endswith(end) and manifest.parse_hidden_directory(name)), None)


def _reason(storage: Storage, save: Save | Refuse, names: Iterable[str]) -> SidesaveError | None:
    """Why the attempt was aborted, by the run directory's names; None if it was not."""
    aborted = _tombstone(names, save)
    if aborted is None:
        return None
    if save.rank:
        _tidy(lambda: _remove_late(storage, save, aborted))
    data = None
    with contextlib.suppress(WriteError):
        data = storage.read(f"{aborted}/{ABORT}", manifest.MAX_JSON_NBYTES)
    refusal = None
    if data is not None:
        with contextlib.suppress(IntegrityError):
            refusal = Refusal.from_bytes(data, aborted)
    if refusal is None:
        return WriteError(errno.ECONNABORTED, "rank 0 has given up this save", aborted)
    error = refusal.as_error()
    if refusal.step != save.step and isinstance(error, (StateMismatchError, WriteStalledError)):
        if isinstance(error, WriteStalledError):
            text = f"rank 0 saved step {refusal.step} where rank {save.rank} saves step {save.step}"
            error = StateMismatchError(f"{text}; every rank has to save the same steps in the same order. {error}")
        error.saved_instead = refusal.step
    return error


# Rank 0 ----------------------------------------------------------------------------------------------------------


def await_records(storage: Storage, save: Save, timeout_s: float, waiting: Waiting) -> list[RankRecord]:
    """The records of all ranks of an attempt, once they are there; blocking.

    Answers ranks that ask whether plain tensors are alike, even if rank 0 has none.

    Raises:
        GivenUp: With a rank's refusal; ``DaemonDiedError``: a rank's daemon has left without a record;
            ``StateMismatchError``: a rank saves another step in this turn; ``WriteStalledError``: ``timeout_s`` seconds
            have passed.
    """
    directory = partial_of(save)
    records: dict[int, RankRecord] = {}
    missing = set(range(save.world_size))
    lookout = _Lookout(storage, save, waiting)
    answered = False
    for _ in _polls(storage, timeout_s, _MAX_POLL_S):
        names = set(storage.list_directory(directory))
        records |= _read_records(storage, save, [rank for rank in missing if manifest.record_file(rank) in names])
        missing -= records.keys()
        if save.rank in records and not answered:
            answered = save.unshared is not None or bool(_replica_digests(names))
            if answered and save.unshared is None:  # rank 0 has nothing to compare, so others hold other tensors
                storage.make_directory(_verdict(save, alike=False), 0o700)
        if not missing:
            return [records[rank] for rank in range(save.world_size)]
        lookout.look(missing)
    raise _late(storage, save, f"ranks {sorted(missing)[:8]} have not written their part", timeout_s)


class _Lookout:
    """Finds out for a waiting rank 0 that other ranks will never come."""

    def __init__(self, storage: Storage, save: Save, waiting: Waiting) -> None:
        self._storage, self._save, self._waiting = storage, save, waiting
        self._left: frozenset[int] = frozenset()
        self._next = time.monotonic() + _LOOKOUT_TRIPS * storage.round_trip_s

    def look(self, missing: Iterable[int]) -> None:
        """``missing`` are the ranks that had left nothing a moment ago."""
        ended = self._left.intersection(missing)  # before that moment: what they had to say would have been there
        if ended:
            text = f"rank {min(ended)} has ended without writing its part of step {self._save.step}"
            raise GivenUp(DaemonDiedError(text))
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + max(_MAX_SLOW_POLL_S / 2, _LOOKOUT_TRIPS * self._storage.round_trip_s)
            self._waiting()
            _refuse_misaligned(self._storage, self._save)
            self._left = closed_ranks(self._storage, self._save.session)


def _late(storage: Storage, save: Save, what: str, timeout_s: float) -> GivenUp:
    text = f"{what} of step {save.step} within {timeout_s:g} s"
    return GivenUp(WriteStalledError(errno.ETIMEDOUT, text, f"{storage.root}/{partial_of(save)}"))


def _read_records(storage: Storage, save: Save, ranks: list[int]) -> dict[int, RankRecord]:
    """Read the records of ``ranks`` in parallel: on a network file system each open is a round trip."""
    if len(ranks) < (2 if storage.round_trip_s else _READERS):
        return {rank: _read_record(storage, save, rank) for rank in ranks}
    with ThreadPoolExecutor(_READERS, "sidesave-records") as readers:
        futures = {rank: readers.submit(_read_record, storage, save, rank) for rank in ranks}
        return {rank: future.result() for rank, future in futures.items()}


def _read_record(storage: Storage, save: Save, rank: int) -> RankRecord:
    path = f"{partial_of(save)}/{manifest.record_file(rank)}"
    data = storage.read(path, manifest.MAX_JSON_NBYTES)
    if data is None:
        raise WriteError(errno.ENOENT, "a rank's record was there and is not any more", f"{storage.root}/{path}")
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
        parsed = manifest.parse_hidden_directory(name)
        if parsed and parsed[0] != save.step and parsed[1:] == (attempt_of(save), "partial"):
            entries = storage.list_directory(name)
            for entry in entries:
                if entry.startswith("rank-"):
                    _refuse_refused(storage, f"{name}/{entry}")
            if all(entry.startswith(".rank-") for entry in entries):  # nothing yet, or a refusal on its way
                continue
            text = f"a rank saves step {parsed[0]} where rank 0 saves step {save.step}; every rank has to save the same"
            error = StateMismatchError(f"{text} steps in the same order")
            error.saved_instead = parsed[0]
            raise GivenUp(error)


def _refuse_refused(storage: Storage, path: str) -> None:
    """Raise the refusal of a rank that was not even given a step."""
    data = storage.read(path, manifest.MAX_JSON_NBYTES)
    refusal = None
    with contextlib.suppress(IntegrityError):
        refusal = None if data is None else Refusal.from_bytes(data, path)
    if refusal is not None:
        raise GivenUp(refusal.as_error())


def abort(storage: Storage, save: Save | Refuse, failure: Failed, attempt: str) -> str | None:
    """Abort an attempt for all ranks and free its space; returns the directory that tells the reason, if any.

    Never raises ``WriteError``: ranks that do not learn of it end at their own deadline.
    """
    partial, aborted = partial_of(save), manifest.hidden_directory(save.step, attempt_of(save), "aborted")
    try:
        earlier = _tombstone(storage.list_directory(""), save)
        if earlier is not None:
            return earlier
        storage.make_directory(partial, 0o700)
        try:
            _write_refusal(storage, f"{partial}/{ABORT}", save, "aborted", failure, attempt)
        except WriteError as error:  # a full disk: renaming takes no space
            logger.warning("the other ranks are not told why step %d was given up: %s", save.step, error)
        storage.rename_directory(partial, aborted)
    except WriteError as error:
        logger.warning("left for the next start to clean: %s", error)
        return None
    _tidy(lambda: _free(storage, save, aborted))
    return aborted


def _free(storage: Storage, save: Save | Refuse, aborted: str) -> None:
    for _ in range(3):  # some may just be given a name
        names = set(storage.list_directory(aborted)) - {ABORT}
        for name in names:
            storage.remove(f"{aborted}/{name}")
        if not names:
            break
    for name in storage.list_directory(""):
        if name.endswith(f".{attempt_of(save)}.partial"):  # of ranks that save another step
            storage.remove_tree(name)


def _tidy(remove: Callable[[], None]) -> None:
    """Try twice: leftovers take space until the session ends."""
    for _ in range(2):
        try:
            remove()
        except WriteError as error:
            logger.warning("left over: %s", error)
        else:
            break


def _remove_late(storage: Storage, save: Save | Refuse, aborted: str) -> None:
    """Remove what this rank has written since rank 0 removed the rest."""
    storage.remove_tree(partial_of(save))  # made again, or of another step
    _remove_files(storage, aborted, save.rank)  # by a call that had found the directory before it was renamed


# The other ranks -------------------------------------------------------------------------------------------------


def refuse(storage: Storage, save: Save | Refuse, failure: Failed, attempt: str) -> None:
    """Tell rank 0 that this rank's record will not come, and free the space.

    Never raises ``WriteError``: rank 0 ends at its deadline if it does not learn of it.

    Raises:
        GivenUp: The attempt was aborted before.
    """
    directory, record = partial_of(save), manifest.record_file(save.rank)
    try:
        reason = _reason(storage, save, storage.list_directory(""))
        if reason is not None:
            raise GivenUp(reason)
        storage.make_directory(directory, 0o700)
        if record in storage.list_directory(directory):  # it has been told before
            return
        _remove_files(storage, directory, save.rank)
        _write_refusal(storage, f"{directory}/{record}", save, "failed", failure, attempt)
    except SidesaveError as error:
        logger.warning("rank 0 is not told that step %d failed here: %s", save.step, error)


def _remove_files(storage: Storage, directory: str, rank: int) -> None:
    for name in storage.list_directory(directory):
        if f".rank-{rank:05d}." in name or name == manifest.record_file(rank):
            storage.remove(f"{directory}/{name}")


def await_commit(
    storage: Storage, save: Save, timeout_s: float, waiting: Waiting, check_lease: Waiting, seen: float
) -> int:
    """The bytes of the checkpoint, once rank 0 has committed it; blocking.

    0 if it was replaced or deleted before this rank looked: rank 0 leaves a sign for a minute of what it aborts, and
    none of what it commits. ``seen`` is the monotonic time of this rank's record.

    Raises:
        GivenUp: Rank 0 has aborted it, or has ended without writing its part.
        CommitUnknownError: ``timeout_s`` seconds have passed, or a session took over the run without committing it.
    """
    target, partial = manifest.step_directory(save.step), partial_of(save)
    path = f"{storage.root}/{target}"
    orphaned_at: float | None = None
    gone, in_time = 0, False
    for _ in _polls(storage, timeout_s + _GRACE_S, _slowed(_MAX_SLOW_POLL_S, storage, save)):
        names = storage.list_directory("")
        reason = _reason(storage, save, names)
        if reason is not None:
            raise GivenUp(reason)
        head = _read_head(storage, target) if target in names else None
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
        except WriteError:  # without the lease: the next session commits what is whole, and removes what is not
            orphaned_at = now if orphaned_at is None else orphaned_at
        if gone >= _LOOKS and orphaned_at is None:
            if in_time:
                return 0
            raise CommitUnknownError(errno.ENOENT, f"what became of step {save.step} was not seen in time", path)
        if orphaned_at is not None and not any(attempt_of(save) in name for name in names):
            _tidy(lambda: storage.remove_tree(partial))  # in a store what came late may be there, and be nothing
            raise CommitUnknownError(errno.ESTALE, "the run has passed to another session without this step", path)
        if orphaned_at is not None and now - orphaned_at > _ORPHAN_S and partial in names:
            left = storage.list_directory(partial)
            if left and manifest.record_file(0) not in left:
                raise GivenUp(DaemonDiedError(f"rank 0 has ended without writing its part of step {save.step}"))
    raise CommitUnknownError(
        errno.ETIMEDOUT, f"step {save.step} was not committed within {timeout_s:g} s; it may still be", path
    )


def _read_head(storage: Storage, target: str) -> Head | None:
    """The beginning of a manifest: with many ranks it is long, and each of them reads it."""
    path = f"{target}/{manifest.MANIFEST}"
    try:
        with storage.open(path) as source:
            return Head.from_beginning(bytes(source.read_at(0, _HEAD_NBYTES)), path)
    except (IntegrityError, WriteError) as error:
        logger.debug("%s", error)  # it is being replaced, or removed
        return None


# What plain tensors the ranks hold -------------------------------------------------------------------------------


def are_alike(storage: Storage, save: Save, digest: str, timeout_s: float, waiting: Waiting, publish: Publish) -> bool:
    """Whether all ranks hold the same plain tensors with the same values, by their digests; blocking.

    Rank 0's daemon compares. Its verdict is a directory beside the attempt's, so that other ranks need not list the
    attempt's. A rank that has no such tensors, or has seen an earlier daemon's verdict, answers by its record.

    Raises:
        GivenUp: As in :func:`await_records`, or by rank 0.
    """
    directory = partial_of(save)
    own_file = f"{REPLICA_DIGEST}rank-{save.rank:05d}.{digest}"
    publish(own_file)
    recorded: dict[int, str] = {}
    lookout = _Lookout(storage, save, waiting)
    what = "rank 0 has not said what to write"
    max_delay_s, grace_s = (_slowed(_MAX_ASKING_POLL_S, storage, save), _GRACE_S) if save.rank else (_MAX_POLL_S, 0.0)
    for _ in _polls(storage, timeout_s + grace_s, max_delay_s):
        beside = storage.list_directory("")
        for alike in (True, False):
            if _verdict(save, alike=alike) in beside:
                with contextlib.suppress(WriteError):  # else rank 0 does, for all, one after the other
                    storage.remove(f"{directory}/{own_file}")
                return alike
        reason = _reason(storage, save, beside)
        if reason is not None:
            raise GivenUp(reason)
        if save.rank == 0:
            names = set(storage.list_directory(directory))
            published = _replica_digests(names)
            for rank in range(1, save.world_size):
                if rank not in published and rank not in recorded and manifest.record_file(rank) in names:
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
        _tidy(lambda alike=alike: storage.remove_tree(_verdict(save, alike=alike)))


def _verdict(save: Save | Refuse, *, alike: bool) -> str:
    return manifest.hidden_directory(save.step, attempt_of(save), VERDICTS[not alike])


def _replica_digests(names: set[str]) -> dict[int, str]:
    parts = [name.split(".") for name in names if name.startswith(REPLICA_DIGEST)]
    return {int(rank.removeprefix("rank-")): digest for _, rank, digest in parts}


# -----------------------------------------------------------------------------------------------------------------


def _write_refusal(
    storage: Storage, path: str, save: Save | Refuse, status: str, failure: Failed, attempt: str
) -> None:
    content = Refusal(
        session=save.session,
        step=save.step,
        sequence=save.sequence,
        rank=save.rank,
        world_size=save.world_size,
        status=status,
        error=failure.error,
        message=failure.message,
        errno=failure.errno,
        path=failure.path,
    )
    directory, _, name = path.rpartition("/")
    storage.publish_bytes(directory, name, content.to_bytes(), attempt)


def _polls(storage: Storage, timeout_s: float, max_delay_s: float) -> Iterator[None]:
    """Iterations of a polling loop, with growing, jittered pauses, until ``timeout_s`` have passed."""
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
