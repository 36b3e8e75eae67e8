"""The outcome of every save of a run: from its log and this process, corrected by the disk."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import os
from dataclasses import replace
from typing import Final

from sidesave.client.runs import finding
from sidesave.errors import InvalidArgumentError, SidesaveError, WriteError
from sidesave.writer_daemon.format.names import parse_hidden_directory, step_directory
from sidesave.writer_daemon.lease.observer import Observer
from sidesave.writer_daemon.log import HISTORY_FILE, LOST, MAX_NBYTES, read_history, records_in
from sidesave.writer_daemon.save_record import SaveRecord, merged
from sidesave.writer_daemon.storage import PosixStorage, ReadStorage, Storage, urls

logger = logging.getLogger(__name__)


_MAX_LOG_NBYTES: Final = 64 << 20
_UNFINISHED: Final = ("partial", "salvage-")


def history(path: str | os.PathLike[str]) -> list[SaveRecord]:
    """Return the outcome of every save of a run directory, in call order.

    Reads no tensor and needs no daemon. The log behind this is bounded, so the oldest saves of a
    long run are missing. If it lacks an outcome, that is looked up: ``"committed"`` if its
    checkpoint is there, ``"failed"`` if its session is over and has left nothing that could be
    finished, and ``"unknown"`` otherwise.

    Raises:
        CheckpointNotFoundError: There is no such directory.
        InvalidArgumentError: It is one checkpoint, or a URL: an object store keeps no log.
    """
    place = finding.place_of(path)
    if urls.is_url(place):
        text = (
            "a run in an object store has no history, for nothing can be appended to there: find() "
            "lists what it has"
        )
        raise InvalidArgumentError(
            f"{place}: {text}, and Checkpointer.history() lists the saves of its session"
        )
    directory = finding.locate_run(path)
    return in_order([settled(directory, record) for record in read_history(directory)])


def bring_history(run: str, target: Storage) -> None:
    """Copy a run's log of saves to a copy of the run, whose own sessions may have added to theirs.

    In a store the log becomes a plain object, so that it can be copied back to a disk. Raises
    ``WriteError``.
    """
    if urls.is_url(run):
        with contextlib.closing(urls.open_storage(run)) as source:
            theirs = _logged_in(source)
    else:
        theirs = history(run)
    ours = _logged_in(target)
    lines = [record.to_line() for record in in_order(merged(ours, theirs))]
    kept = list(itertools.accumulate(map(len, reversed(lines)), initial=0))
    # the newest, up to the limit of a log
    lines = lines[len(lines) - bisect.bisect_right(kept, MAX_NBYTES) + 1 :]
    if theirs and lines != [record.to_line() for record in ours]:
        target.replace(HISTORY_FILE, b"".join(lines))


def _logged_in(storage: ReadStorage) -> list[SaveRecord]:
    return records_in(
        storage.read(HISTORY_FILE, _MAX_LOG_NBYTES) or b"", f"{storage.root}/{HISTORY_FILE}"
    )


def settled(directory: str, record: SaveRecord, fallback_directory: str = "") -> SaveRecord:
    """``record``, corrected by the run or fallback directory if its outcome is not known."""
    if record.outcome in ("committed", "recovered", "skipped") or record.sequence is None:
        return record
    is_open = record.outcome in ("saving", "unknown")
    live = is_live(directory, record.session) if is_open else False
    info, pending = None, False
    for _ in range(2):  # a directory that is being renamed at this moment can be missed once
        pending = _has_leftover(directory, record)
        try:
            info = finding.read_info(os.path.join(directory, step_directory(record.step)))
        except FileNotFoundError:
            info = None
        except (SidesaveError, OSError) as error:
            logger.info("the outcome of step %d is unknown: %s", record.step, error)
            return record
        if pending or info is not None:
            break
    if info is not None and (info.session, info.sequence) == (record.session, record.sequence):
        return replace(
            record, outcome="committed", nbytes=info.nbytes, error=None, message=None, errno=None
        )
    if fallback_directory:
        path = os.path.join(fallback_directory, step_directory(record.step))
        with contextlib.suppress(SidesaveError, OSError):
            info = finding.read_info(path)
            if (info.session, info.sequence) == (record.session, record.sequence):
                committed = replace(record, outcome="committed", nbytes=info.nbytes, path=path)
                return replace(committed, error=None, message=None, errno=None)
    if live or not is_open:
        return record
    if pending or live is None:
        return replace(record, outcome="unknown")
    return replace(record, outcome="failed", message=record.message or LOST)


def _has_leftover(directory: str, record: SaveRecord) -> bool:
    """Whether a directory exists that may become the checkpoint of this save."""
    try:
        hidden = map(parse_hidden_directory, os.listdir(directory))
    except OSError:
        return True
    return any(
        parsed is not None
        and parsed[:2] == (record.step, record.session)
        and parsed[2].startswith(_UNFINISHED)
        for parsed in hidden
    )


def is_live(directory: str, session: str) -> bool | None:
    """Whether a daemon of this machine still serves this session; None if it cannot be known."""
    try:
        with contextlib.closing(PosixStorage(directory)) as storage:
            view = Observer(storage).look()
    except WriteError as error:
        logger.info("the holder of %s is unknown: %s", directory, error)
        return None
    return False if view.holder is not None and view.holder.session != session else view.alive


def in_order(records: list[SaveRecord]) -> list[SaveRecord]:
    """Sort by the time of the call; a record without one follows the record before it."""
    times: list[float] = []
    for record in records:
        times.append(
            record.called_s if record.called_s is not None else times[-1] if times else 0.0
        )
    return [records[index] for index in sorted(range(len(records)), key=times.__getitem__)]
