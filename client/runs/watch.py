"""For programs next to a run, such as evaluators: wait for checkpoints, and keep the one in use.

A checkpoint is held by a lock of this process, so nothing is left behind if it dies. Nothing is
written, and this needs neither a daemon nor torch.
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

from sidesave.client.encryption import open_metadata
from sidesave.client.runs import finding
from sidesave.errors import CheckpointNotFoundError, InvalidArgumentError, WriteError, brief
from sidesave.writer_daemon.checkpoints.catalog import Catalog
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.checkpoints.replacement import RetryIfReplaced, identity
from sidesave.writer_daemon.format.integrity import NO_SUCH_FILE
from sidesave.writer_daemon.format.manifest import MANIFEST
from sidesave.writer_daemon.format.names import parse_step_directory
from sidesave.writer_daemon.storage import PosixStorage, urls

logger = logging.getLogger(__name__)

_POLL_S: Final = 1.0
_POLL_STORE_S: Final = 10.0
_RESCAN_S: Final = 60.0
"""A manifest that could not be read is read again after this, without a change in the directory."""


# Waiting ------------------------------------------------------------------------------------------


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

    It yields the newest: of the checkpoints committed while the loop is busy, all but the last are
    skipped. Existing checkpoints count as new, unless ``after`` is as new. A step that is saved
    again is new again. A checkpoint may be deleted once it is yielded; :func:`hold` then raises
    ``CheckpointNotFoundError``, and otherwise keeps it.

    Args:
        run: A run directory, which may not exist yet; or the URL of a run.
        after: The checkpoint that was handled last, for instance by an earlier process.
        timeout_s: End after this many seconds without a new one; 0 looks once, None waits forever.
        poll_s: Seconds between looks: by default 1, and 10 for an object store. A look lists the
            directory, and reads manifests if something in it has changed. In a store it takes a few
            requests.
        storage_options: For a URL, what its store needs besides the environment: credentials, an
            endpoint.

    Raises:
        InvalidArgumentError: ``run`` is a checkpoint, or a URL that cannot be listed; timeout_s or
            poll_s is invalid.
        WriteError: The directory exists but cannot be read, or the store does not answer; also
            raised by the iterator.
    """
    place = finding.place_of(run)
    with urls.using(storage_options):
        if finding.is_single(place):
            raise InvalidArgumentError(
                f"{place} is a checkpoint; watch its run, at a place that can be listed"
            )
    if timeout_s is not None and not (type(timeout_s) in (int, float) and timeout_s >= 0):
        raise InvalidArgumentError(
            f"timeout_s must be a number, 0 or more, or None, not {brief(timeout_s)}"
        )
    if poll_s is None:
        poll_s = _POLL_STORE_S if urls.is_url(place) else _POLL_S
    if not (type(poll_s) in (int, float) and 0 < poll_s < math.inf):
        raise InvalidArgumentError(f"poll_s must be a positive number or None, not {brief(poll_s)}")
    return _watch(
        place, after, math.inf if timeout_s is None else timeout_s, poll_s, storage_options
    )


def _watch(
    run: str,
    last: CheckpointInfo | None,
    timeout_s: float,
    poll_s: float,
    options: Mapping[str, Any] | None,
) -> Iterator[CheckpointInfo]:
    while True:
        with contextlib.closing(_Look(run, options)) as look:
            last = _await_newer(look, last, timeout_s, poll_s)
        if last is None:
            return
        yield last


def _await_newer(
    look: _Look, last: CheckpointInfo | None, timeout_s: float, poll_s: float
) -> CheckpointInfo | None:
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
    """Looks at a run repeatedly; reads manifests if new, or after a while if they were damaged."""

    def __init__(self, run: str, options: Mapping[str, Any] | None) -> None:
        self._run, self._options = run, options
        self._seen: dict[str, object] | None = None
        self._scan_at = 0.0
        with urls.using(options):
            self._store = urls.open_storage(run) if urls.is_url(run) else None
        self._catalog = Catalog(run, open_metadata, self._store)

    def close(self) -> None:
        """Release the store; idempotent."""
        if self._store is not None:
            self._store.close()

    def newest(self) -> CheckpointInfo | None:
        """Return the latest checkpoint; None also if nothing has changed since the last call."""
        checkpoints: list[CheckpointInfo] = []
        with urls.using(self._options):
            try:
                entries = self._catalog.entries()
                if entries == self._seen and time.monotonic() < self._scan_at:
                    return None
                # a step may have been replaced inside of its directory
                if time.monotonic() >= self._scan_at:
                    self._catalog = Catalog(self._run, open_metadata, self._store)
                self._scan_at = time.monotonic() + _RESCAN_S
                checkpoints = self._catalog.all()
            except CheckpointNotFoundError:
                return None
            except WriteError as error:
                if error.errno not in NO_SUCH_FILE:
                    raise
                return None
        # A step that a user copies to a store has its name there before its manifest.
        count = sum(parse_step_directory(name) is not None for name in entries)
        self._seen = None if self._store is not None and len(checkpoints) < count else entries
        return checkpoints[-1] if checkpoints else None


def _is_newer(info: CheckpointInfo, last: CheckpointInfo) -> bool:
    # By the clock if the order of commits has started again, because a user removed the newest
    # checkpoints by hand.
    return info.sequence > last.sequence or info.created_s > last.created_s


# Holding ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hold(checkpoint: str | os.PathLike[str]) -> Generator[CheckpointInfo]:
    """Keep a checkpoint during the ``with`` block; yields its facts.

    The retention of a run keeps it until then, in any process, and under any user, of this machine.
    It only takes permission to read it. It stays readable, if not under its name, after a
    ``Checkpointer.delete``. A step that is saved again is replaced all the same. The lock ends with
    this process, however that ends.

    Locks do not reach other machines: on a network file system nothing is held, which is logged. A
    deleted checkpoint stays readable for half a minute to processes that have it open;
    ``CheckpointManager.pin`` keeps it.

    Args:
        checkpoint: A ``step-XXXXXXXX`` directory, or its ``CheckpointInfo``.

    Raises:
        CheckpointNotFoundError: There is no such checkpoint, it was deleted, or it is being
            deleted.
        InvalidArgumentError: It is a URL, or a run directory.
        IntegrityError: Its manifest is damaged.
        FormatVersionError: It was written in a newer format.
        WriteError: It cannot be read.
    """
    path = finding.resolved(checkpoint)
    with contextlib.ExitStack() as lock:
        yield RetryIfReplaced(path).read(lambda place: _take(place, lock))


def _take(path: str, lock: contextlib.ExitStack) -> CheckpointInfo:
    lock.close()  # of a checkpoint replaced by this one
    before = identity(path)
    parent, name = os.path.split(path)
    try:
        with contextlib.closing(PosixStorage(parent)) as storage:
            unlock = storage.share(f"{name}/{MANIFEST}")
    except OSError as error:
        if error.errno == errno.EAGAIN:
            raise CheckpointNotFoundError(
                errno.ENOENT, "the checkpoint is being deleted", path
            ) from error
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        newest = finding.latest(path)
        if newest is not None:
            text = (
                f"{path} is a run directory; hold one of its checkpoints, {newest.path} is newest"
            )
            raise InvalidArgumentError(text) from error
        raise finding.not_found(path) from error
    if unlock is None:
        logger.warning("%s is not held: there are no locks on this file system", path)
    else:
        lock.callback(unlock)
    info = finding.read_info(path)
    if before is None or identity(path) != before:
        raise CheckpointNotFoundError(errno.ENOENT, "the checkpoint was deleted just now", path)
    return info
