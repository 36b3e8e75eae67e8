"""One mirror, under its lease: finds missing checkpoints, copies them, and deletes others.

A mirror is a run directory: each checkpoint appears by one rename once all of it is durable. A new
lease holder renames the leftovers of interrupted copies before it continues them, so that an
earlier holder that has lost the lease without noticing finds nothing to commit.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Final

from sidesave.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FormatVersionError,
    IntegrityError,
    InvalidArgumentError,
    SidesaveError,
    WriteError,
)
from sidesave.writer_daemon.checkpoints import copying
from sidesave.writer_daemon.checkpoints.catalog import Catalog
from sidesave.writer_daemon.checkpoints.copying import CopyFlow, CopyObserver, copy_checkpoint
from sidesave.writer_daemon.checkpoints.deletion import Trash, delete_steps
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo, read_checkpoint
from sidesave.writer_daemon.commit import commit
from sidesave.writer_daemon.format import integrity, rollback
from sidesave.writer_daemon.format.manifest import MANIFEST
from sidesave.writer_daemon.format.names import (
    hidden_directory,
    parse_hidden_directory,
    step_directory,
)
from sidesave.writer_daemon.format.rollback import Rollbacks
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.sealing.keys import KEYS, MAX_KEYS_NBYTES, RUN_KEYS, Keys
from sidesave.writer_daemon.storage import ReadStorage, Storage, urls

logger = logging.getLogger(__name__)

PIECE_NBYTES: Final = 5 << 20
"""Bytes copied at a time: one part of an upload."""


def _by_position(info: CheckpointInfo) -> tuple[int, float, str]:
    return info.position


def _find_checkpoint(storage: ReadStorage, name: str) -> CheckpointInfo | None:
    """Return the checkpoint ``name``; None if it does not exist or cannot be read."""
    path = f"{storage.root}/{name}"
    try:
        info = read_checkpoint(storage, name)
    except CheckpointNotFoundError:
        return None
    except (IntegrityError, FormatVersionError) as error:
        integrity.warn_left_out(logger, path, error)
        return None
    integrity.warn_left_out(logger, path)
    return info


class Uploader(CopyObserver):
    """Copies checkpoints of one run to another place. All methods block. Not thread-safe."""

    def __init__(
        self, directory: str, target: Storage, lease: Lease, before_chunk: Callable[[int], None]
    ) -> None:
        """Copy from ``directory``, a path or URL, to ``target``; this process holds its ``lease``.

        ``before_chunk`` is called with a number of bytes before each piece; it may block, and raise
        to stop.
        """
        self.target, self.lease = target, lease
        self._directory = directory
        self._run = Catalog(directory)
        self._mirrored = Catalog(target.root, storage=target)
        self._before_chunk = before_chunk
        self._attempt = secrets.token_hex(8)
        self._partials: dict[str, str] = {}
        """Directories of interrupted copies, by step and attempt."""
        self.trash = Trash(target)
        self._latest: CheckpointInfo | None = None
        """The last checkpoint in the mirror when the place was taken over."""
        self.arrived = 0
        """The number of files completed by this object."""

    # The start ------------------------------------------------------------------------------------

    def begin(self) -> tuple[list[CheckpointInfo], list[CheckpointInfo]]:
        """Take the place over; return its missing and existing checkpoints, both in commit order.

        After an error it may be called again.

        Raises:
            WriteError: One of the two places does not answer, or refuses.
        """
        self.target.take_over(self.lease.session)
        self._rename_leftovers()
        there = {
            each.name: each for each in self._mirrored.all(rollbacks=Rollbacks(), complete=True)
        }
        self._latest = max(there.values(), key=_by_position, default=None)
        here = self._run.all(rollbacks=Rollbacks(), complete=True)
        missing = [each for each in here if not _is_settled(each, there.get(each.name))]
        with contextlib.closing(urls.open_storage(self._directory)) as source:
            self._copy_keys(source)
        wanted = {_attempt_of(each) for each in missing}
        # the run directory no longer has the checkpoint
        for attempt in self._partials.keys() - wanted:
            self.target.remove_tree(self._partials.pop(attempt))
        if not self._partials:
            self.target.settle()
        return sorted(missing, key=_by_position), sorted(there.values(), key=_by_position)

    def _rename_leftovers(self) -> None:
        self._partials.clear()
        self.trash.clear()
        self.target.sync_directory("")  # make the renames of a dead daemon durable
        names = self.target.list_directory("")
        for name in names:
            hidden = parse_hidden_directory(name)
            if hidden is None:
                continue
            step, attempt, state = hidden
            if state == "replaced" and step_directory(step) not in names:
                # its replacement is still a partial
                self.target.rename_directory(name, step_directory(step))
            elif state == "partial" or state.startswith("salvage"):
                key, place = (
                    f"{step}.{attempt}",
                    hidden_directory(step, attempt, f"salvage-{self.lease.epoch}"),
                )
                if name != place and (place in names or key in self._partials):
                    self.target.remove_tree(name)  # only one partial copy of a save is continued
                    continue
                try:
                    if name != place:  # else an earlier call of this process has renamed it
                        self.target.rename_directory(name, place)
                except WriteError as error:
                    # else it is gone, or a store lists a directory that has no object
                    if error.errno != errno.ENOENT:
                        raise
                else:
                    self._partials[key] = place
            elif state == "trash":
                self.trash.add([name])
            else:
                self.target.remove_tree(name)

    # Copies ---------------------------------------------------------------------------------------

    def upload(self, step: CheckpointInfo) -> None:
        """Copy one checkpoint and give it its name. Idempotent.

        Raises:
            CheckpointExistsError: The mirror has a later save of this step.
            InvalidArgumentError: The mirror belongs to an encrypted run, and this checkpoint is not
                encrypted.
            CheckpointNotFoundError: The run directory no longer has it.
            IntegrityError: It is damaged in the run directory.
            WriteError: One of the two places does not answer, or refuses.
        """
        self.lease.check()
        self.trash.empty()
        self.copy_rollbacks()
        there = _find_checkpoint(self.target, step.name)
        if there is not None and there.key == step.key:
            return
        if there is not None and there.sequence > step.sequence:
            path = f"{self.target.root}/{step.name}"
            raise CheckpointExistsError(
                errno.EEXIST, "the mirror has a later save of this step", path
            )
        with contextlib.closing(urls.open_storage(self._directory)) as source:
            try:
                source.hold(step.name, MANIFEST)
            except WriteError as error:
                if error.errno in integrity.NO_SUCH_FILE:
                    raise self._gone(step) from error
                raise
            now = _find_checkpoint(source, step.name)
            if now is None or now.key != step.key:
                raise self._gone(step)
            self._refuse_mixture(now)
            attempt = f"{step.session}-{step.sequence}"
            fresh = hidden_directory(step.step, attempt, "partial")
            partial = self._partials.setdefault(_attempt_of(step), fresh)
            try:
                data = copying.read_manifest(source, step.name)
                copy_checkpoint(
                    source, step.name, data, self.target, partial, self._attempt, self._flow(), self
                )
            except IntegrityError as error:
                with contextlib.closing(urls.open_storage(self._directory)) as again:
                    if self._is_current(again, step):
                        raise
                raise self._gone(step) from error  # replaced while it was read
        commit.give_name(self.target, self.lease, partial, step.name, attempt, replace=True)
        del self._partials[_attempt_of(step)]
        if there is not None:
            self.trash.adopt()
        if now.encrypted:
            with contextlib.closing(urls.open_storage(self._directory)) as source:
                self._copy_keys(source)  # they may have been exchanged meanwhile

    def _refuse_mixture(self, step: CheckpointInfo) -> None:
        """Raise ``InvalidArgumentError`` for an unencrypted checkpoint after encrypted ones.

        Such a checkpoint is of another run.
        """
        latest = self._latest
        if (
            latest is not None
            and latest.encrypted
            and not step.encrypted
            and latest.position < step.position
        ):
            text = f"its {latest.name} is encrypted, but {step.name} is not: name another mirror"
            raise InvalidArgumentError(
                f"{self.target.root} is the mirror of an encrypted run: {text}"
            )

    def _flow(self) -> CopyFlow:
        """Two requests at a time to a store; pieces are read ahead, more of them from a store."""
        small_files = 2 if self.target.round_trip_s else 1
        pieces = 5 if urls.is_url(self._directory) else 2
        return CopyFlow(small_files, tensor_files=1, pieces=pieces, piece_nbytes=PIECE_NBYTES)

    def before_write(self, nbytes: int) -> None:
        """Wait until the copy may go on."""
        self._before_chunk(nbytes)

    def completed(self) -> None:
        """Count a completed file."""
        self.arrived += 1

    def _is_current(self, source: ReadStorage, step: CheckpointInfo) -> bool:
        now = _find_checkpoint(source, step.name)
        return now is not None and now.key == step.key

    def _gone(self, step: CheckpointInfo) -> CheckpointNotFoundError:
        text = "it was deleted or replaced before it was copied"
        return CheckpointNotFoundError(errno.ENOENT, text, f"{self._directory}/{step.name}")

    def copy_rollbacks(self) -> None:
        """Copy the record of rollbacks, which the mirror needs before a later commit appears."""
        with contextlib.closing(urls.open_storage(self._directory)) as source:
            # Compared each time: an earlier lease holder may have written late.
            rollback.ROLLBACK_FILE.copy(source, self.target)

    def _copy_keys(self, source: ReadStorage) -> None:
        """Copy the keys files if the run's keys were exchanged; the run's own file comes last."""
        data = source.read(RUN_KEYS, MAX_KEYS_NBYTES)
        if data is None or data == self.target.read(RUN_KEYS, MAX_KEYS_NBYTES):
            return
        for step in self._mirrored.all(rollbacks=Rollbacks(), complete=True):
            keys = copying.read_keys(source, step.name) if step.encrypted else None
            path = f"{step.name}/{KEYS}"
            # Keys of another session belong to a later save of this step, which is not copied yet.
            is_ours = keys is not None and Keys.from_bytes(keys, path).session == step.session
            if keys is not None and is_ours and keys != self.target.read(path, MAX_KEYS_NBYTES):
                self.target.replace(path, keys)
        self.target.replace(RUN_KEYS, data)

    def forget(self, step: CheckpointInfo) -> None:
        """Remove the leftovers of a checkpoint's copy that will not be continued."""
        partial = self._partials.pop(_attempt_of(step), None)
        if partial is not None:
            self.target.remove_tree(partial)

    # Deletion -------------------------------------------------------------------------------------

    def delete(
        self, steps: Sequence[int], sequence: int, *, spare_read: bool
    ) -> dict[int, SidesaveError]:
        """Delete mirrored steps with :func:`delete_steps`; return an error for each that stays."""
        self.copy_rollbacks()  # the trainer has chosen the steps by those of the run
        result = delete_steps(
            self.target,
            self.lease,
            steps,
            sequence,
            catalog=self._mirrored,
            rollbacks=rollback.read(self.target),
            spare_read=spare_read,
        )
        self.trash.add(result.trash)
        return result.failures

    def close(self) -> None:
        """Remove deleted checkpoints; leave those still read or not removable to the next start."""
        try:
            self.lease.check()
            self.trash.empty(everything=True)
        except WriteError as error:
            logger.warning("cannot be removed now, the next start tries again: %s", error)


def _attempt_of(step: CheckpointInfo) -> str:
    return f"{step.step}.{step.session}-{step.sequence}"


def _is_settled(step: CheckpointInfo, there: CheckpointInfo | None) -> bool:
    """Whether a checkpoint needs no copy: the mirror has it, or a later save of its step."""
    return there is not None and (there.key == step.key or there.sequence > step.sequence)
