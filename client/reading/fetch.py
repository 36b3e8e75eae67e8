"""Copies a checkpoint from an object store into a local run directory, completely or not at all.

The files come into a hidden directory, as in any copy (``writer_daemon.checkpoints.copying``), so
that after an interruption only the missing ones are fetched. At the end it is renamed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final

from sidesave.client.arguments import make_directory, path_text
from sidesave.client.reading import block_file
from sidesave.client.runs import finding
from sidesave.errors import (
    CheckpointExistsError,
    CheckpointReplacedError,
    DirectoryInUseError,
    InvalidArgumentError,
    WriteError,
)
from sidesave.stager import signal_safe
from sidesave.writer_daemon.checkpoints.copying import CopyFlow, CopyObserver, copy_checkpoint
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.checkpoints.replacement import RetryIfReplaced
from sidesave.writer_daemon.format.manifest import MANIFEST, MAX_JSON_NBYTES, FileRecord, Manifest
from sidesave.writer_daemon.format.names import step_directory
from sidesave.writer_daemon.lease.observer import Observer
from sidesave.writer_daemon.storage import PosixStorage, urls

logger = logging.getLogger(__name__)

_FLOW: Final = CopyFlow(small_files=16, tensor_files=16, pieces=16, piece_nbytes=8 << 20)


def fetch(
    url: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> CheckpointInfo:
    """Copy a checkpoint from an object store into a run directory; blocks, at network speed.

    It becomes a committed checkpoint once all of it has arrived, was compared with its digests and
    is durable, and not before. After any interruption, the same call continues with the files that
    had not arrived.

    Args:
        url: URL of a checkpoint, or of a run (its newest is used).
        directory: The run directory for the new ``step-XXXXXXXX``; created if it does not exist.
        step: The step, for the URL of a run.
        storage_options: Options of the store besides the environment: credentials, an endpoint.
        on_bytes: Called, from several threads but never twice at a time, with the number of bytes
            that have arrived since its last call, first with those of an earlier, interrupted call.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointReplacedError: It was replaced repeatedly meanwhile.
        CheckpointExistsError: The directory has this step.
        DirectoryInUseError: A live session saves there, or another call fetches the same
            checkpoint.
        IntegrityError: A file does not match its digest, or is missing.
        NoSpaceError: There is not enough space for it.
        InvalidArgumentError: ``url`` is not a URL, or cannot be read.
        WriteError: The store does not answer or give it, or the directory does not take it.
    """
    if not urls.is_url(finding.place_of(url)):
        raise InvalidArgumentError(
            f"{path_text(url)} is no URL; a checkpoint on a disk is copied like any directory"
        )
    target = path_text(directory)
    with urls.using(storage_options):
        for attempt in RetryIfReplaced(
            finding.locate(url, step), locate=lambda: finding.locate(url, step)
        ):
            with attempt as (place,):
                return _fetch(place, target, on_bytes)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _fetch(place: str, target: str, on_bytes: Callable[[int], None] | None) -> CheckpointInfo:
    parent, name = urls.parent_of(place)
    with contextlib.ExitStack() as opened:
        store = opened.enter_context(contextlib.closing(urls.open_storage(parent)))
        store.hold(name, MANIFEST)
        data = store.read(f"{name}/{MANIFEST}", MAX_JSON_NBYTES)
        if data is None:
            raise finding.not_found(place)
        manifest = Manifest.from_bytes(data, f"{place}/{MANIFEST}")
        final = step_directory(manifest.step)
        make_directory(target)
        run = opened.enter_context(contextlib.closing(PosixStorage(target)))
        exists = CheckpointExistsError(
            errno.EEXIST, "there is this step already", f"{target}/{final}"
        )
        if os.path.lexists(f"{target}/{final}"):
            raise exists
        if Observer(run).look().alive:
            raise DirectoryInUseError(
                errno.EBUSY, "a live session saves here; fetch to another directory", target
            )
        partial = f".fetch-{final}.{manifest.session}-{manifest.sequence}"
        run.make_directory(partial, 0o700)
        opened.callback(_lock(run, partial))
        try:
            arrivals, attempt = _Arrivals(place, on_bytes), secrets.token_hex(8)
            copy = functools.partial(
                copy_checkpoint, store, name, data, run, partial, attempt, _FLOW, arrivals
            )
            signal_safe.run(copy, "sidesave-fetch", arrivals.stop)
        except CheckpointReplacedError:
            run.remove_tree(partial)
            raise
        try:
            run.rename_directory(partial, final)
        except WriteError as error:
            if error.errno == errno.EEXIST:
                raise exists from error
            raise
        run.sync_directory("")
        logger.info("%s was fetched to %s", place, target)
        return finding.read_info(f"{target}/{final}")


def _lock(run: PosixStorage, partial: str) -> Callable[[], None]:
    try:
        return run.lock(partial) or (lambda: None)
    except WriteError as error:
        if error.errno != errno.EAGAIN:
            raise
        raise DirectoryInUseError(
            errno.EBUSY, "another call fetches this checkpoint", run.root
        ) from error


class _StoppedError(Exception):
    """The call was interrupted."""


class _Arrivals(CopyObserver):
    """Reports the bytes that have arrived, and ends the copy when the call is interrupted."""

    def __init__(self, place: str, on_bytes: Callable[[int], None] | None) -> None:
        self._place, self._on_bytes = place, on_bytes
        self._stopped = False

    def stop(self) -> None:
        """End the copy."""
        self._stopped = True

    def before_read(self, entry: FileRecord) -> None:
        """Raise ``HostMemoryError`` if the file is too large for memory."""
        self.before_write(entry.nbytes)
        block_file.require_room(entry, self._place)

    def before_write(self, nbytes: int) -> None:
        """Go on unless the call was interrupted."""
        if self._stopped:
            raise _StoppedError

    def present(self, nbytes: int) -> None:
        """Report bytes."""
        if self._on_bytes is not None:
            self._on_bytes(nbytes)
