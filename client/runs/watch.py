"""For programs beside a run, such as evaluators: wait for checkpoints, and keep the one in use.

A checkpoint is held by a lock of this process, so nothing is left behind if it dies. Nothing is written, and neither a
daemon nor torch is needed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Final

from sidesave.client.runs import catalog, finding
from sidesave.client.runs.info import CheckpointInfo
from sidesave.errors import CheckpointNotFoundError, InvalidArgumentError, brief, write_error
from sidesave.writer_daemon.format.integrity import NO_SUCH_FILE
from sidesave.writer_daemon.format.manifest import MANIFEST, parse_step_directory
from sidesave.writer_daemon.storage import PosixStorage, ReadStorage, urls

logger = logging.getLogger(__name__)

_POLL_S: Final = 1.0
_POLL_STORE_S: Final = 10.0
_RESCAN_S: Final = 60.0
"""A manifest that could not be read may be readable now, without a change in the directory."""


# Waiting ---------------------------------------------------------------------------------------------------------


def watch(
    run: str | os.PathLike[str],
    *,
    after: CheckpointInfo | None = None,
    timeout_s: float | None = None,
    poll_s: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[CheckpointInfo]:
    """Wait for the checkpoints of a run, in any process, and yield each once it is committed.

    ::

        for info in sidesave.watch("runs/exp1"):
            with sidesave.hold(info):
                evaluate(sidesave.load(info))

    It is always the newest: of those that are committed while the loop is busy all but the last are skipped. What is
    there already counts as new, unless ``after`` is as new. A step that is saved again is new again. What is given may
    be deleted in the next moment; :func:`hold` raises ``CheckpointNotFoundError`` then, and else keeps it.

    Args:
        run: A run directory, which may not be there yet; or the URL of a run.
        after: The checkpoint that was dealt with last, by an earlier process for instance.
        timeout_s: End when nothing new has come for so long after it was asked for; 0 looks once, None waits for ever.
        poll_s: How often to look, by default every second, and in an object store every 10 s. A look lists the
            directory; manifests are read when something in it has changed. In a store it is some requests.
        storage_options: For a URL, what its store needs besides the environment: credentials, an endpoint.

    Raises:
        InvalidArgumentError: ``run`` is a checkpoint, or a URL where nothing can be listed; a time is none.
        WriteError: The directory is there and cannot be read, or the store does not answer; later too, by the iterator.
    """
    place = finding.place_of(run)
    with urls.using(storage_options):
        if finding.is_single(place):
            raise InvalidArgumentError(f"{place} is a checkpoint; watch the run that it is in, where it can be listed")
    if timeout_s is not None and not (type(timeout_s) in (int, float) and timeout_s >= 0):
        raise InvalidArgumentError(f"timeout_s must be a number, 0 or more, or None, not {brief(timeout_s)}")
    if poll_s is None:
        poll_s = _POLL_STORE_S if urls.is_url(place) else _POLL_S
    if not (type(poll_s) in (int, float) and 0 < poll_s < math.inf):
        raise InvalidArgumentError(f"poll_s must be a positive number or None, not {brief(poll_s)}")
    return _watch(place, after, math.inf if timeout_s is None else timeout_s, poll_s, storage_options)


def _watch(
    run: str, last: CheckpointInfo | None, timeout_s: float, poll_s: float, options: Mapping[str, Any] | None
) -> Iterator[CheckpointInfo]:
    while True:
        with contextlib.closing(_Look(run, options)) as look:
            last = _await_newer(look, last, timeout_s, poll_s)
        if last is None:
            return
        yield last


def _await_newer(look: _Look, last: CheckpointInfo | None, timeout_s: float, poll_s: float) -> CheckpointInfo | None:
    deadline = time.monotonic() + timeout_s
    while True:
        newest = look.newest()
        if newest is not None and (last is None or _is_newer(newest, last)):
            return newest
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return None
        time.sleep(min(poll_s, left_s))


class _Look:
    """Looks at a run again and again; manifests are read when something in it has changed, or after a while."""

    def __init__(self, run: str, options: Mapping[str, Any] | None) -> None:
        self._run, self._options = run, options
        self._seen: frozenset[tuple[str, object]] | None = None
        self._scan_at = 0.0
        with urls.using(options):
            self._store = urls.open_storage(run) if urls.is_url(run) else None

    def close(self) -> None:
        """Release the store; idempotent."""
        if self._store is not None:
            self._store.close()

    def newest(self) -> CheckpointInfo | None:
        """The latest checkpoint; None also where nothing has changed since the last call."""
        with urls.using(self._options):
            entries = _entries(self._run) if self._store is None else _entries_in(self._store)
            if entries == self._seen and time.monotonic() < self._scan_at:
                return None
            self._scan_at = time.monotonic() + _RESCAN_S
            found = finding.find(self._run)
        # A step that is copied to a store by hand has its name there before its manifest.
        self._seen = None if self._store is not None and len(found) < len(entries) else entries
        return found[-1] if found else None


def _entries(run: str) -> frozenset[tuple[str, object]]:
    """Names in a run directory, with the identities of the directories."""
    try:
        with os.scandir(run) as entries:
            return frozenset((entry.name, entry.inode()) for entry in entries)
    except OSError as error:
        if error.errno in NO_SUCH_FILE:
            return frozenset()
        raise write_error(error, "cannot list the run directory", run) from error


def _entries_in(store: ReadStorage) -> frozenset[tuple[str, object]]:
    """Names of steps, with the places of their files: another save of a step lies in another place."""
    names = [name for name in store.list_directory("") if parse_step_directory(name) is not None]
    return frozenset((name, store.location_of(name)) for name in names)


def _is_newer(info: CheckpointInfo, last: CheckpointInfo) -> bool:
    # By the clock where the order of commits has begun anew, because somebody has removed the newest by hand, or all.
    return info.sequence > last.sequence or info.created_s > last.created_s


# Holding ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hold(checkpoint: str | os.PathLike[str]) -> Generator[CheckpointInfo]:
    """Keep a checkpoint during the ``with`` block; yields what is kept.

    The retention of a run spares it as long, be it of any process and user of this machine; reading it is all that has
    to be allowed here. It stays readable, if not under its name, when somebody calls ``Checkpointer.delete`` for it. A
    step that is saved again is replaced all the same. The lock ends with this process, however that ends.

    Locks do not reach other machines: on a network file system nothing is held, which is logged. There a deleted
    checkpoint stays readable for half a minute to whoever has it open, and ``CheckpointManager.pin`` keeps it.

    Args:
        checkpoint: A ``step-XXXXXXXX`` directory, or what describes it.

    Raises:
        CheckpointNotFoundError: There is no checkpoint, or not any more, or it is being deleted.
        InvalidArgumentError: It is a URL, or a run directory.
        IntegrityError: Its manifest is damaged.
        FormatVersionError: It was written in a newer format.
        WriteError: It cannot be read.
    """
    path = finding.resolved(checkpoint)
    with contextlib.ExitStack() as lock:
        yield catalog.Attempts(path).read(lambda place: _take(place, lock))


def _take(path: str, lock: contextlib.ExitStack) -> CheckpointInfo:
    lock.close()  # of what has been replaced by this
    before = catalog.identity(path)
    parent, name = os.path.split(path)
    try:
        with contextlib.closing(PosixStorage(parent)) as storage:
            unlock = storage.share(f"{name}/{MANIFEST}")
    except OSError as error:
        if error.errno == errno.EAGAIN:
            raise CheckpointNotFoundError(errno.ENOENT, "the checkpoint is being deleted", path) from error
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        newest = finding.latest(path)
        if newest is not None:
            text = f"{path} is a run directory; hold one of its checkpoints, {newest.path} is newest"
            raise InvalidArgumentError(text) from error
        raise finding.not_found(path) from error
    if unlock is None:
        logger.warning("%s is not held: there are no locks on this file system", path)
    else:
        lock.callback(unlock)
    info = catalog.read_info(path)
    if before is None or catalog.identity(path) != before:
        raise CheckpointNotFoundError(errno.ENOENT, "the checkpoint was deleted in this moment", path)
    return info
