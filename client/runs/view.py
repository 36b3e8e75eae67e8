"""One look at a run: its checkpoints in all places, and which of them a step means.

Reads nothing.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Collection
from dataclasses import dataclass

from sidesave.client.runs import finding
from sidesave.errors import CheckpointNotFoundError, IntegrityError
from sidesave.writer_daemon.checkpoints.catalog import LeftOut, refuse_unknown_newest
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo, in_commit_order
from sidesave.writer_daemon.format.rollback import Rollbacks


@dataclass(frozen=True, slots=True)
class RunView:
    """The checkpoints of a run at one time. One save is one checkpoint, wherever it is.

    Attributes:
        directory: The run directory.
        here: The checkpoints in the run directory and in its fallback directories, in commit order.
        left_out: Step directories there that are not listed.
        rollbacks: Where the run has gone back; this decides for all places.
        missing: A message for each fallback directory that has been used and cannot be found.
        mirrored: The checkpoints in the mirror, in commit order.
        mirror_left_out: Step directories there that are not listed.
        is_mirror_known: False if there is a mirror that could not be listed, or was not to be.
    """

    directory: str
    here: list[CheckpointInfo]
    left_out: list[LeftOut]
    rollbacks: Rollbacks
    missing: tuple[str, ...] = ()
    mirrored: list[CheckpointInfo] = dataclasses.field(default_factory=list[CheckpointInfo])
    mirror_left_out: list[LeftOut] = dataclasses.field(default_factory=list[LeftOut])
    is_mirror_known: bool = True

    @property
    def all(self) -> list[CheckpointInfo]:
        """All checkpoints in commit order, latest last; ``in_mirror`` if only in the mirror."""
        keys = {info.key for info in self.here} if self.mirrored else set[tuple[str, int]]()
        added = [info for info in self.mirrored if info.key not in keys]
        return in_commit_order([*self.here, *added]) if added else self.here

    @property
    def is_complete(self) -> bool:
        """Whether every checkpoint of the run is known, so that no sequence is assigned twice."""
        return self.is_mirror_known and not self.left_out and not self.mirror_left_out

    def find(self, step: int, session: str) -> CheckpointInfo | None:
        """Return the checkpoint that a session saved as ``step``."""
        return next(
            (info for info in self.all if (info.step, info.session) == (step, session)), None
        )

    def unrelated(self) -> list[CheckpointInfo]:
        """Return the mirror's checkpoints if its latest is not a copy of one here, else nothing."""
        keys = {info.key for info in self.here}
        return [] if any(info.key in keys for info in self.mirrored[-1:]) else self.mirrored

    def copies(self, info: CheckpointInfo) -> list[CheckpointInfo]:
        """Return a checkpoint, and behind it its copy in the mirror."""
        return [
            info,
            *(copy for copy in self.mirrored if copy.key == info.key and not info.in_mirror),
        ]

    def limited_to(self, keys: Collection[tuple[str, int]]) -> RunView:
        """Return a view that has only some of the checkpoints; the others are left out."""
        others = [LeftOut(info.step, info.path, None) for info in self.here if info.key not in keys]
        return dataclasses.replace(
            self,
            here=[info for info in self.here if info.key in keys],
            left_out=[*self.left_out, *others],
            mirrored=[info for info in self.mirrored if info.key in keys],
        )

    def refuse_damaged(self, step: int | None) -> None:
        """Raise the problem with a damaged ``step``; for None, with one later than the newest."""
        lost = [each for each in self.left_out if not self._has_copy(each)]
        if step is None:
            if self.missing:
                raise IntegrityError(self.missing[0])
            refuse_unknown_newest(self.all, lost)
        else:
            is_listed = any(info.step == step for info in self.here)
            for each in lost:
                is_other = is_listed and isinstance(each.error, CheckpointNotFoundError)
                if (
                    each.step == step
                    and each.error is not None
                    and not each.is_unfinished
                    and not is_other
                ):
                    raise each.error

    def _has_copy(self, damaged: LeftOut) -> bool:
        """Whether the mirror has what a damaged directory held, or a later save of its step."""
        copies = [
            info
            for info in self.all
            if info.in_mirror and info.step == damaged.step and not info.given_up
        ]
        return any(damaged.sequence is None or info.sequence >= damaged.sequence for info in copies)

    def to_try(
        self, step: int | None, *, within: str, fallback: bool, in_parts: bool
    ) -> list[CheckpointInfo]:
        """Return the checkpoints to try for ``step`` (None: the latest), best first.

        Without ``fallback`` there is only one. Behind each comes its copy in the mirror.

        The ``step`` has to be in the directory ``within``, unless that is empty. With ``in_parts``
        every node keeps its own part, and the view is limited to checkpoints for which all nodes
        have theirs.

        Raises:
            CheckpointNotFoundError: There is no such step, or no checkpoint.
            IntegrityError: The checkpoint that the run went back to is gone.
        """
        checkpoints = self.all
        places = [info for info in checkpoints if within in ("", os.path.dirname(info.path))]
        wanted = [
            info for info in places if info.step == step or (step is None and not info.given_up)
        ]
        is_left_out = not wanted and any(
            each.step == step and not each.is_unfinished for each in self.left_out
        )
        if is_left_out and fallback:
            wanted = [info for info in checkpoints if step is None or info.step < step]
        if not wanted:
            if step is None and checkpoints:
                text = (
                    "the checkpoint that the run went back to no longer exists; load one of "
                    "those given up"
                )
                steps = sorted(info.step for info in checkpoints)[-20:]
                raise IntegrityError(f"{self.directory}: {text} by its step: {steps}")
            if in_parts and (is_left_out or not checkpoints):
                sought = "checkpoint" if step is None else f"step {step}"
                text = f"there is no {sought} of which every node has its part"
                raise CheckpointNotFoundError(errno.ENOENT, text, self.directory)
            raise finding.not_found(within or self.directory, places, step)
        best = max(wanted, key=lambda info: info.order)
        line = self.rollbacks.before(best.sequence)
        older = [
            info
            for info in checkpoints
            if info.position < best.position and line.order(info.sequence)[0]
        ]
        older.sort(key=lambda info: info.position, reverse=True)
        return [
            copy for info in ([best, *older] if fallback else [best]) for copy in self.copies(info)
        ]
