"""The checkpoints of one place: a run directory (on a disk or in a store), a mirror or a fallback.

Reads manifests and never writes. What it remembers never decides: each look lists the place, and a
manifest counts as known only as long as its directory is the same one.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import errno
import logging
import os
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from sidesave.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FormatVersionError,
    IntegrityError,
    WriteError,
)
from sidesave.writer_daemon.checkpoints.info import (
    CheckpointInfo,
    OpenMetadata,
    in_commit_order,
    peek_head,
    plain_metadata,
    read_checkpoint,
)
from sidesave.writer_daemon.checkpoints.replacement import RetryIfReplaced, step_of
from sidesave.writer_daemon.format import rollback
from sidesave.writer_daemon.format.integrity import warn_left_out
from sidesave.writer_daemon.format.manifest import MANIFEST, MAX_JSON_NBYTES
from sidesave.writer_daemon.format.names import step_directory
from sidesave.writer_daemon.format.rollback import Rollbacks
from sidesave.writer_daemon.storage import ReadStorage, urls

logger = logging.getLogger(__name__)

_Failure = CheckpointError | WriteError
_AT_ONCE: Final = 16
"""The number of manifests that are read from a store at a time."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A step directory whose checkpoint is not listed.

    Attributes:
        step: The step in its name.
        path: The directory, or its URL.
        error: Why it could not be read; None if it was read and does not count.
        sequence: Its place in the order of commits according to its damaged manifest; None if
            unknown.
    """

    step: int
    path: str
    error: _Failure | None
    sequence: int | None = None

    @property
    def is_unfinished(self) -> bool:
        """Whether it is a store's prefix without a manifest: a save under way, or a failed one."""
        return urls.is_url(self.path) and isinstance(self.error, CheckpointNotFoundError)


@dataclass(frozen=True, slots=True)
class CatalogView:
    """One look at a place: checkpoints in commit order, directories left out, and rollbacks."""

    checkpoints: list[CheckpointInfo]
    left_out: list[LeftOut]
    rollbacks: Rollbacks


def refuse_unknown_newest(
    checkpoints: Sequence[CheckpointInfo], left_out: Iterable[LeftOut]
) -> None:
    """Raise if a step that was left out is later than the newest of ``checkpoints``.

    Its place in the order of commits is unknown, so the caller has to decide whether an older
    checkpoint is taken.

    Raises:
        IntegrityError: Its manifest is damaged or missing.
        FormatVersionError: It is in a newer format.
        WriteError: It cannot be read now.
    """
    newest = checkpoints[-1].step if checkpoints else -1
    for each in left_out:
        if each.error is None or each.is_unfinished or each.step < newest:
            continue
        if not isinstance(each.error, (CheckpointNotFoundError, IntegrityError)):
            raise each.error
        if urls.is_url(each.path) or os.path.isdir(each.path):  # else it was deleted since
            raise IntegrityError(
                f"{each.error}; take an older one by its step or path, or with load(fallback=True) "
                "of a Checkpointer"
            ) from each.error


class Catalog:
    """The committed checkpoints of one place. Remembers what it has read; thread-safe."""

    def __init__(
        self,
        root: str,
        open_metadata: OpenMetadata = plain_metadata,
        storage: ReadStorage | None = None,
    ) -> None:
        """Read nothing yet. ``storage`` is kept open by the caller; if None, each look opens it."""
        self.root = root
        self._open_metadata = open_metadata
        self._storage = storage
        self._known: dict[str, tuple[object, CheckpointInfo]] = {}
        """Identity and checkpoint of each directory, by its name. Each look replaces it whole."""
        self._last = dict[str, object](), CatalogView([], [], Rollbacks())
        """The last listing whose checkpoints are all remembered, and the view of it."""

    def all(
        self, *, rollbacks: Rollbacks | None = None, strict: bool = False, complete: bool = False
    ) -> list[CheckpointInfo]:
        """Return the checkpoints of :meth:`look`."""
        return self.look(rollbacks=rollbacks, strict=strict, complete=complete).checkpoints

    def look(
        self, *, rollbacks: Rollbacks | None = None, strict: bool = False, complete: bool = False
    ) -> CatalogView:
        """List every checkpoint in commit order, with the latest last; read only what is new.

        A checkpoint whose manifest is damaged or missing, or of a newer format, is left out with a
        warning. A step that is being replaced is found in its old directory.

        Args:
            rollbacks: Where the run has gone back, if this directory does not say so.
            strict: Raise for a newer format: commits cannot go on if a part of their order is
                unknown.
            complete: Raise if storage does not give a manifest, instead of leaving the checkpoint
                out.

        Raises:
            CheckpointNotFoundError: There is no such directory.
            FormatVersionError: A checkpoint is in a newer format, and ``strict`` is true.
            IntegrityError: The record of rollbacks is damaged, and ``strict`` is true.
            WriteError: The place cannot be listed; or a checkpoint cannot be read, and ``complete``
                is true.
        """
        with self._opened() as storage:
            if rollbacks is None:
                rollbacks = _rollbacks(storage, strict=strict)
            listing, (last, view) = storage.entries(), self._last
            # as a rule; sorting would take long
            if listing == last and rollbacks == view.rollbacks:
                return dataclasses.replace(view, checkpoints=[*view.checkpoints])
            known = self._known
            entries = _committed(listing, known)
            fresh = {
                name: known[name]
                for name, identity in entries.items()
                if identity is not None and name in known and known[name][0] == identity
            }
            outcomes = self._read(storage, [name for name in entries if name not in fresh])
            left_out: list[LeftOut] = []
            for name, outcome in outcomes.items():
                info = self._judged(storage, name, outcome, strict=strict, complete=complete)
                if isinstance(info, LeftOut):
                    left_out += [] if name[0] == "." else [info]
                elif info is not None:
                    # not remembered if it was found under the hidden name that it had meanwhile
                    fresh[name] = (
                        entries[name] if info.path == f"{self.root}/{name}" else None,
                        info,
                    )
        self._known = fresh
        checkpoints = [info for _, info in fresh.values()]
        if rollbacks.pairs:
            checkpoints = [
                dataclasses.replace(info, given_up=not rollbacks.order(info.sequence)[0])
                for info in checkpoints
            ]
        view = CatalogView(
            in_commit_order(checkpoints), sorted(left_out, key=lambda each: each.step), rollbacks
        )
        if len(fresh) == len(entries) and all(
            identity is not None for identity, _ in fresh.values()
        ):
            self._last = listing, dataclasses.replace(view, checkpoints=[*view.checkpoints])
        return view

    def entries(self) -> dict[str, object]:
        """Return the names in the place with their identities, to compare with another look's."""
        with self._opened() as storage:
            return storage.entries()

    def read(self, name: str) -> CheckpointInfo:
        """Return the checkpoint in a directory, read again. Raises as :func:`read_checkpoint`."""
        with self._opened() as storage:
            return read_checkpoint(storage, name, self._open_metadata)

    @contextlib.contextmanager
    def _opened(self) -> Generator[ReadStorage]:
        if self._storage is not None:
            yield self._storage
            return
        try:
            storage = urls.open_storage(self.root)
        except WriteError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
            raise CheckpointNotFoundError(
                error.errno, "there is no run directory", self.root
            ) from error
        with contextlib.closing(storage):
            yield storage

    def _read(
        self, storage: ReadStorage, names: Collection[str]
    ) -> Mapping[str, CheckpointInfo | _Failure]:
        """Read checkpoints, from a store many at a time; what cannot be read has its error."""
        if not urls.is_url(self.root):  # threads would only wait for each other
            return {name: self._attempt(storage, name) for name in names}
        with ThreadPoolExecutor(_AT_ONCE, "sidesave-catalog") as pool:
            asked = {
                name: pool.submit(contextvars.copy_context().run, self._attempt, storage, name)
                for name in names
            }
            return {name: future.result() for name, future in asked.items()}

    def _attempt(self, storage: ReadStorage, name: str) -> CheckpointInfo | _Failure:
        try:
            try:
                return read_checkpoint(storage, name, self._open_metadata)
            except (CheckpointError, WriteError):
                if urls.is_url(self.root):
                    raise
                return RetryIfReplaced(f"{self.root}/{name}").read(self._read_path)
        except (CheckpointError, WriteError) as error:
            return error

    def _read_path(self, path: str) -> CheckpointInfo:
        return self.read(os.path.basename(path))

    def _judged(
        self,
        storage: ReadStorage,
        name: str,
        outcome: CheckpointInfo | _Failure,
        *,
        strict: bool,
        complete: bool,
    ) -> CheckpointInfo | LeftOut | None:
        """Return the checkpoint, or None if it is gone.

        If it cannot be read, warn, or raise if the caller needs it.
        """
        path, step = f"{self.root}/{name}", step_of(name)
        assert step is not None
        if not isinstance(outcome, CheckpointInfo):
            if (strict and isinstance(outcome, FormatVersionError)) or (
                complete and isinstance(outcome, WriteError)
            ):
                raise outcome
            # removed or replaced since it was listed, perhaps
            if isinstance(outcome, FileNotFoundError):
                is_there = (
                    name in storage.list_directory("") if urls.is_url(path) else os.path.isdir(path)
                )
                if not is_there:
                    return None
            warn_left_out(logger, path, outcome)
            return LeftOut(step, path, outcome, _claimed_sequence(storage, name))
        if outcome.step != step:
            warn_left_out(logger, path, f"its manifest is that of step {outcome.step}")
            return LeftOut(step, path, None)
        warn_left_out(logger, path)
        return outcome


def _claimed_sequence(storage: ReadStorage, name: str) -> int | None:
    """Return the sequence that the beginning of a damaged manifest states."""
    try:
        return peek_head(storage, name).sequence
    except (CheckpointError, WriteError):
        return None


def _committed(
    entries: Mapping[str, object], known: Mapping[str, tuple[object, CheckpointInfo]]
) -> dict[str, object]:
    """Return entries that hold checkpoints, one being replaced only if its step has no other."""
    steps: dict[str, int] = {}
    for name in entries:
        step = known[name][1].step if name in known else step_of(name)  # which takes longer
        if step is not None:
            steps[name] = step
    return {
        name: entries[name]
        for name, step in steps.items()
        if name[0] != "." or step_directory(step) not in steps
    }


_MAY_BE_GIVEN_UP: Final = "%s may list a checkpoint as its latest that the run has given up: %s"


def _rollbacks(storage: ReadStorage, *, strict: bool) -> Rollbacks:
    try:
        return rollback.read(storage)
    except (CheckpointError, WriteError) as error:
        if strict:
            raise
        logger.warning(_MAY_BE_GIVEN_UP, storage.root, error)
        return Rollbacks()


def has_manifest(storage: ReadStorage, name: str) -> bool:
    """Return whether there is a manifest in a directory, without which nothing is there."""
    try:
        return storage.read(f"{name}/{MANIFEST}", MAX_JSON_NBYTES) is not None
    except WriteError as error:
        if error.errno == errno.EFBIG:
            return True
        raise
