"""One mirror, under its lease: what is there, what is missing, and how a checkpoint gets there.

A mirror is a run directory: each checkpoint appears by one rename once all of it is durable. What interrupted copies
have left is renamed by who takes over, so that a holder that has lost the lease, and does not know, finds nothing to
commit; then it is gone on with.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from sidesave.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FormatVersionError,
    IntegrityError,
    WriteError,
)
from sidesave.writer_daemon.commit import commit
from sidesave.writer_daemon.format import integrity, manifest, rollback
from sidesave.writer_daemon.format.manifest import MANIFEST, MAX_JSON_NBYTES, Head
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.mirror import copying
from sidesave.writer_daemon.mirror.copying import copy_checkpoint
from sidesave.writer_daemon.sealing.keys import KEYS, MAX_KEYS_NBYTES, RUN_KEYS, Keys
from sidesave.writer_daemon.storage import ReadStorage, Storage, urls

logger = logging.getLogger(__name__)

_TRASH_GRACE_S: Final = 30.0
"""How long a deleted checkpoint stays readable for whoever has opened it."""
_MAX_ROLLBACK_NBYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """A committed checkpoint, in the order in which they are copied."""

    sequence: int
    session: str
    step: int
    nbytes: int
    is_encrypted: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        """Its directory's."""
        return manifest.step_directory(self.step)

    @property
    def key(self) -> tuple[str, int]:
        """What tells it from every other save."""
        return self.session, self.sequence


def steps_in(storage: ReadStorage) -> Iterator[Step]:
    """The committed checkpoints of a place; one that cannot be read as such is passed over with a warning."""
    for name in storage.list_directory(""):
        step = manifest.parse_step_directory(name)
        found = None if step is None else read_step(storage, name)
        if found is not None and found.step == step:
            yield found


def read_step(storage: ReadStorage, name: str) -> Step | None:
    """The checkpoint ``name``; None where there is none, or nothing that can be read."""
    path = f"{name}/{MANIFEST}"
    data = storage.read(path, MAX_JSON_NBYTES)
    if data is None:
        return None
    try:
        head = Head.from_bytes(data, f"{storage.root}/{path}")
    except (IntegrityError, FormatVersionError) as error:
        logger.warning("not copied: %s", error)
        return None
    return Step(head.sequence, head.session, head.step, head.nbytes, bool(head.cipher))


class Uploader:
    """Copies checkpoints of one run to another place. All methods block, and are called by one thread."""

    def __init__(self, directory: str, target: Storage, lease: Lease, before_chunk: Callable[[int], None]) -> None:
        """Copy from ``directory``, a path or URL, to ``target``, of which this process has the ``lease``.

        ``before_chunk`` is called with a number of bytes before each piece; it may block, and raise to stop.
        """
        self.target, self.lease = target, lease
        self._directory = directory
        self._before_chunk = before_chunk
        self._attempt = secrets.token_hex(8)
        self._partials: dict[str, str] = {}
        """Directories of interrupted copies, by what ends in them."""
        self._trash: list[tuple[float, str]] = []
        self.arrived = 0
        """Files that have arrived whole since this process began."""

    # The start -------------------------------------------------------------------------------------------------

    def begin(self) -> tuple[list[Step], list[Step]]:
        """Take the place over; what of the run directory is not there yet, in order, and what is there.

        What has failed in the middle may be called again.

        Raises:
            WriteError: One of the two places does not answer, or refuses.
        """
        self.target.take_over(self.lease.session)
        self._rename_leftovers()
        there = {each.name: each for each in steps_in(self.target)}
        with contextlib.closing(urls.open_storage(self._directory)) as source:
            missing = [each for each in steps_in(source) if not _is_settled(each, there.get(each.name))]
            self._copy_keys(source)
        wanted = {_attempt_of(each) for each in missing}
        for attempt in self._partials.keys() - wanted:  # of what the run directory does not have any more
            self.target.remove_tree(self._partials.pop(attempt))
        if not self._partials:
            self.target.settle()
        return sorted(missing), sorted(there.values())

    def _rename_leftovers(self) -> None:
        self._partials.clear()
        self._trash.clear()
        self.target.sync_directory("")  # what a dead daemon has renamed counts from here on
        names = self.target.list_directory("")
        for name in names:
            hidden = manifest.parse_hidden_directory(name)
            if hidden is None:
                continue
            step, attempt, state = hidden
            if state == "replaced" and manifest.step_directory(step) not in names:
                self.target.rename_directory(name, manifest.step_directory(step))  # what was to replace it is a partial
            elif state == "partial" or state.startswith("salvage"):
                key, place = (
                    f"{step}.{attempt}",
                    manifest.hidden_directory(step, attempt, f"salvage-{self.lease.epoch}"),
                )
                if name != place and (place in names or key in self._partials):
                    self.target.remove_tree(name)  # of one save one is gone on with
                    continue
                try:
                    if name != place:  # else an earlier try of this process has done it
                        self.target.rename_directory(name, place)
                except WriteError as error:
                    if error.errno != errno.ENOENT:  # else it is gone, or a store lists a directory that has no object
                        raise
                else:
                    self._partials[key] = place
            elif state == "trash":
                self._trash.append((time.monotonic() + _TRASH_GRACE_S, name))
            else:
                self.target.remove_tree(name)

    # Copies ----------------------------------------------------------------------------------------------------

    def upload(self, step: Step) -> None:
        """Copy one checkpoint and give it its name. Doing it twice does no harm.

        Raises:
            CheckpointExistsError: A later save of this step is there.
            CheckpointNotFoundError: The run directory does not have it any more.
            IntegrityError: It is damaged there.
            WriteError: One of the two places does not answer, or refuses.
        """
        self.lease.check()
        self.empty_trash()
        self._copy_rollbacks()
        there = read_step(self.target, step.name)
        if there is not None and there.key == step.key:
            return
        if there is not None and there.sequence > step.sequence:
            path = f"{self.target.root}/{step.name}"
            raise CheckpointExistsError(errno.EEXIST, "a later save of this step is there", path)
        with contextlib.closing(urls.open_storage(self._directory)) as source:
            try:
                source.hold(step.name, MANIFEST)
            except WriteError as error:
                if error.errno in integrity.NO_SUCH_FILE:
                    raise self._gone(step) from error
                raise
            if not self._is_current(source, step):
                raise self._gone(step)
            attempt = f"{step.session}-{step.sequence}"
            fresh = manifest.hidden_directory(step.step, attempt, "partial")
            partial = self._partials.setdefault(_attempt_of(step), fresh)
            try:
                copy_checkpoint(
                    source, step.name, self.target, partial, self._attempt, self._before_chunk, self._count_arrived
                )
            except IntegrityError as error:
                with contextlib.closing(urls.open_storage(self._directory)) as again:
                    if self._is_current(again, step):
                        raise
                raise self._gone(step) from error  # replaced while it was read
        commit.give_name(self.target, self.lease, partial, step.name, attempt, replace=True)
        del self._partials[_attempt_of(step)]
        if step.is_encrypted:
            with contextlib.closing(urls.open_storage(self._directory)) as source:
                self._copy_keys(source)  # they may have been exchanged meanwhile

    def _count_arrived(self) -> None:
        self.arrived += 1

    def _is_current(self, source: ReadStorage, step: Step) -> bool:
        now = read_step(source, step.name)
        return now is not None and now.key == step.key

    def _gone(self, step: Step) -> CheckpointNotFoundError:
        text = "it was deleted or replaced before it was copied"
        return CheckpointNotFoundError(errno.ENOENT, text, f"{self._directory}/{step.name}")

    def _copy_rollbacks(self) -> None:
        """Before a later commit appears, it has to be known there where the run has gone back."""
        with contextlib.closing(urls.open_storage(self._directory)) as source:
            data = source.read(rollback.ROLLBACK_FILE, _MAX_ROLLBACK_NBYTES)
        # Read each time: a holder before this one may have written late.
        if data is not None and data != self.target.read(rollback.ROLLBACK_FILE, _MAX_ROLLBACK_NBYTES):
            self.target.replace(rollback.ROLLBACK_FILE, data)

    def _copy_keys(self, source: ReadStorage) -> None:
        """Where the keys of the run have been exchanged since, exchange those here too, the run's own at last."""
        data = source.read(RUN_KEYS, MAX_KEYS_NBYTES)
        if data is None or data == self.target.read(RUN_KEYS, MAX_KEYS_NBYTES):
            return
        for step in steps_in(self.target):
            keys = copying.read_keys(source, step.name) if step.is_encrypted else None
            path = f"{step.name}/{KEYS}"
            # Those of another session are of a save that has taken the step's name, and is still to be copied.
            is_ours = keys is not None and Keys.from_bytes(keys, path).session == step.session
            if keys is not None and is_ours and keys != self.target.read(path, MAX_KEYS_NBYTES):
                self.target.replace(path, keys)
        self.target.replace(RUN_KEYS, data)

    def forget(self, step: Step) -> None:
        """Remove what an interrupted copy of a checkpoint has left that will not be gone on with."""
        partial = self._partials.pop(_attempt_of(step), None)
        if partial is not None:
            self.target.remove_tree(partial)

    # Deletion --------------------------------------------------------------------------------------------------

    def delete(self, step: int, sequence: int, *, spare_read: bool) -> None:
        """Delete a checkpoint here, as ``commit.delete`` does; its bytes go a little later."""
        rollbacks = rollback.read(self.target)
        trash = commit.delete(self.target, self.lease, step, sequence, spare_read=spare_read, rollbacks=rollbacks)
        if trash is not None:
            self._trash.append((time.monotonic() + _TRASH_GRACE_S, trash))

    def empty_trash(self, *, everything: bool = False) -> None:
        """Remove the bytes of what was deleted some time ago, or ``everything``, and nobody reads."""
        for entry in list(self._trash):
            due, name = entry
            if (everything or due <= time.monotonic()) and not commit.is_read(self.target, name):
                self.target.remove_tree(name)
                self._trash.remove(entry)

    def close(self) -> None:
        """Remove what was deleted; what is still read, or cannot be removed, is left to the next start."""
        try:
            self.lease.check()
            self.empty_trash(everything=True)
        except WriteError as error:
            logger.warning("left for the next start to clean: %s", error)


def _attempt_of(step: Step) -> str:
    return f"{step.step}.{step.session}-{step.sequence}"


def _is_settled(step: Step, there: Step | None) -> bool:
    """Whether a checkpoint needs no copy: it, or a later save of its step, is there."""
    return there is not None and (there.key == step.key or there.sequence > step.sequence)
