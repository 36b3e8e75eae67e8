"""The outcome of every save of a run: from its log and this process, corrected by what is on disk."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import os
from dataclasses import replace
from typing import Final

from sidesave.client.runs import catalog, finding
from sidesave.errors import InvalidArgumentError, SidesaveError, WriteError
from sidesave.writer_daemon.format.manifest import parse_hidden_directory, step_directory
from sidesave.writer_daemon.lease import lease
from sidesave.writer_daemon.log import (
    HISTORY_FILE,
    LOST,
    MAX_NBYTES,
    SaveRecord,
    merged,
    read_history,
    records_in,
)
from sidesave.writer_daemon.storage import PosixStorage, ReadStorage, Storage, urls

logger = logging.getLogger(__name__)


_MAX_LOG_NBYTES: Final = 64 << 20
_UNFINISHED: Final = ("partial", "salvage-")


def history(path: str | os.PathLike[str]) -> list[SaveRecord]:
    """The outcome of every save of a run directory, in call order. Reads no tensor and needs no daemon.

    The log that this comes from is bounded, so the oldest are missing in a long run. An outcome that nobody was left to
    tell is looked up: a save is ``"committed"`` when its checkpoint is there, ``"failed"`` when its session is over and
    nothing is left that could be finished, and ``"unknown"`` otherwise.

    Raises:
        CheckpointNotFoundError: There is no such directory.
        InvalidArgumentError: It is one checkpoint, or a URL: no log is kept in an object store.
    """
    place = finding.place_of(path)
    if urls.is_url(place):
        text = "a run in an object store has no history, for nothing can be appended to there: find() lists what it has"
        raise InvalidArgumentError(f"{place}: {text}, and Checkpointer.history() tells of the saves of its session")
    directory = finding.locate_run(path)
    return in_order([settled(directory, record) for record in read_history(directory)])


def bring_history(run: str, target: Storage) -> None:
    """Bring the log of a run's saves to a copy of it, where the copy's own sessions may have told of theirs.

    Of a copy in a store it is an object as it is, for whoever copies that back to a disk. Raises ``WriteError``.
    """
    if urls.is_url(run):
        with contextlib.closing(urls.open_storage(run)) as source:
            theirs = _logged_in(source)
    else:
        theirs = history(run)
    ours = _logged_in(target)
    lines = [record.to_line() for record in in_order(merged(ours, theirs))]
    kept = list(itertools.accumulate(map(len, reversed(lines)), initial=0))
    lines = lines[len(lines) - bisect.bisect_right(kept, MAX_NBYTES) + 1 :]  # the newest, as many as a log has
    if theirs and lines != [record.to_line() for record in ours]:
        target.replace(HISTORY_FILE, b"".join(lines))


def _logged_in(storage: ReadStorage) -> list[SaveRecord]:
    return records_in(storage.read(HISTORY_FILE, _MAX_LOG_NBYTES) or b"", f"{storage.root}/{HISTORY_FILE}")


def settled(directory: str, record: SaveRecord, fallback_directory: str = "") -> SaveRecord:
    """``record``, corrected by the run or fallback directory if nobody else knows the outcome."""
    if record.outcome in ("committed", "recovered", "skipped") or record.sequence is None:
        return record
    is_open = record.outcome in ("saving", "unknown")
    live = is_live(directory, record.session) if is_open else False
    info, pending = None, False
    for _ in range(2):  # what is being renamed at this moment can be missed once
        pending = _has_leftover(directory, record)
        try:
            info = catalog.read_info(os.path.join(directory, step_directory(record.step)))
        except FileNotFoundError:
            info = None
        except (SidesaveError, OSError) as error:
            logger.info("the outcome of step %d stays open: %s", record.step, error)
            return record
        if pending or info is not None:
            break
    if info is not None and (info.session, info.sequence) == (record.session, record.sequence):
        return replace(record, outcome="committed", nbytes=info.nbytes, error=None, message=None, errno=None)
    if fallback_directory:
        path = os.path.join(fallback_directory, step_directory(record.step))
        with contextlib.suppress(SidesaveError, OSError):
            info = catalog.read_info(path)
            if (info.session, info.sequence) == (record.session, record.sequence):
                committed = replace(record, outcome="committed", nbytes=info.nbytes, path=path)
                return replace(committed, error=None, message=None, errno=None)
    if live or not is_open:
        return record
    if pending or live is None:
        return replace(record, outcome="unknown")
    return replace(record, outcome="failed", message=record.message or LOST)


def _has_leftover(directory: str, record: SaveRecord) -> bool:
    """Whether there is something that may become the checkpoint of this save."""
    try:
        hidden = map(parse_hidden_directory, os.listdir(directory))
    except OSError:
        return True
    return any(
        parsed is not None and parsed[:2] == (record.step, record.session) and parsed[2].startswith(_UNFINISHED)
        for parsed in hidden
    )


def is_live(directory: str, session: str) -> bool | None:
    """Whether a daemon of this machine still serves this session; None if this machine cannot know."""
    try:
        with contextlib.closing(PosixStorage(directory)) as storage:
            view = lease.Observer(storage).look()
    except WriteError as error:
        logger.info("who holds %s cannot be told: %s", directory, error)
        return None
    return False if view.holder is not None and view.holder.session != session else view.alive


def in_order(records: list[SaveRecord]) -> list[SaveRecord]:
    """Sort by the time of the call; an unknown one stays behind the one before it."""
    times: list[float] = []
    for record in records:
        times.append(record.called_s if record.called_s is not None else times[-1] if times else 0.0)
    return [records[index] for index in sorted(range(len(records)), key=times.__getitem__)]
