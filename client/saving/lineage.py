"""The lineage of a run: which steps are ancestors of the next save, and which may be replaced.

``latest`` is the checkpoint that was committed last, not the highest step: after going back to step 50, an abandoned
step 100 is neither an ancestor nor protected from being replaced.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Final

from sidesave.client.runs import catalog
from sidesave.client.runs.info import CheckpointInfo
from sidesave.errors import CheckpointExistsError
from sidesave.writer_daemon.format.manifest import step_directory

if TYPE_CHECKING:
    from sidesave.client.saving.in_flight import SaveInFlight

_LEFTOVERS: Final = 1 << 20
"""Places in the order of commits kept free for saves of earlier sessions; no session makes so many."""


class Lineage:
    """The ancestors of a session's next save. Thread-safe."""

    def __init__(self, directory: str) -> None:
        """Begin without a past."""
        self._directory = directory
        self._lock = threading.RLock()
        self._sequence = self._since = 0
        self._on_disk: set[int] = set()
        self._parent: tuple[int, str] | None = None
        self._ancestors: set[int] = set()

    def begin(
        self,
        existing: list[CheckpointInfo],
        everything: list[list[CheckpointInfo]],
        *,
        after: int = 0,
        leftovers: bool = False,
    ) -> None:
        """Go on from the latest of the ``existing`` checkpoints, which is the last.

        ``everything`` also holds what may be in the way, where nodes keep their own parts. Places up to ``after`` in
        the order of commits are taken. With ``leftovers`` saves of earlier sessions may still be committed, behind
        these and before ours.
        """
        known = [info for infos in everything for info in infos]
        self._sequence = max([after, *(info.sequence for info in known)]) + _LEFTOVERS * leftovers
        self._on_disk = {info.step for info in known}
        if existing and not existing[-1].given_up:
            self.go_back_to(existing[-1], existing)

    @property
    def parent(self) -> tuple[int, str] | None:
        """Step and session of the checkpoint that this session was resumed from."""
        with self._lock:
            return self._parent

    @property
    def ancestors(self) -> frozenset[int]:
        """The steps that the next save descends from."""
        with self._lock:
            return frozenset(self._ancestors)

    @property
    def sequence(self) -> int:
        """The place of the latest save in the order of commits."""
        with self._lock:
            return self._sequence

    def next_sequence(self) -> int:
        """The next place in the order of commits, for a thread that nothing interrupts."""
        with self._lock:
            self._sequence += 1
            return self._sequence

    def give_place(self, entry: SaveInFlight) -> None:
        """Give a save the next place in the order of commits. Idempotent, so that an interrupted call can be ended."""
        with self._lock:
            if not entry.sequence:
                entry.sequence = self._sequence + 1
            self._sequence = max(self._sequence, entry.sequence)

    def go_back_to(self, info: CheckpointInfo, checkpoints: list[CheckpointInfo]) -> None:
        """Training goes on from ``info``, one of ``checkpoints``."""
        if not info.given_up:  # then nothing that was given up is an ancestor of it
            checkpoints = [each for each in checkpoints if not each.given_up]
        with self._lock:
            parent = (info.step, info.session)
            ancestors = catalog.lineage(checkpoints, parent)
            # At once, as nothing is called in between.
            self._since, self._parent, self._ancestors = self._sequence, parent, ancestors

    def add(self, info: CheckpointInfo) -> None:
        """A save of this session was committed."""
        with self._lock:
            if info.sequence > self._since:  # else it was called before training went back behind it
                self._ancestors.add(info.step)
            self._on_disk.add(info.step)

    def remove(self, step: int) -> None:
        """A step was deleted."""
        with self._lock:
            self._ancestors.discard(step)
            self._on_disk.discard(step)

    def may_replace(self, step: int, *, overwrite: bool, pending: int) -> bool:
        """Whether a save may take the place of a directory of that name.

        ``pending`` is the place of the last save of that step that is under way, 0 for none.

        Raises:
            CheckpointExistsError: The step is taken.
        """
        with self._lock:
            taken = step in self._ancestors or pending > self._since
            if overwrite or (not taken and (step in self._on_disk or pending)):
                return True
            if taken:
                raise CheckpointExistsError(
                    errno.EEXIST,
                    f"step {step} is already saved or being saved; save another step, or pass overwrite=True",
                    os.path.join(self._directory, step_directory(step)),
                )
            return False
