"""What a run descends from: which steps are ancestors of the next save, and which are in nobody's way.

``latest`` is the checkpoint that was committed last, not the highest step: after going back to step 50, an abandoned
step 100 is neither an ancestor nor protected from being replaced.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import Final

from sidesave.client import catalog
from sidesave.client.handle import CheckpointInfo
from sidesave.errors import CheckpointExistsError
from sidesave.writer_daemon.manifest import (
    step_directory,
)

_LEFTOVERS: Final = 1 << 20
"""Places in the order of commits kept free for saves of earlier sessions; no session makes so many."""


class Lineage:
    """The ancestors of a session's next save. Thread-safe."""

    def __init__(self, directory: str) -> None:
        """Begin without a past."""
        self._directory = directory
        self._lock = threading.Lock()
        self._sequence = 0
        self._on_disk: set[int] = set()
        self._parent: tuple[int, str] | None = None
        self._ancestors: set[int] = set()

    def begin(
        self, existing: list[CheckpointInfo], everything: list[list[CheckpointInfo]], *, leftovers: bool = False
    ) -> None:
        """Go on from the newest of the ``existing`` checkpoints, which come in the order of their commits.

        Of ``everything`` that there is some may be in the way, where nodes keep their own parts. With ``leftovers``
        some of earlier sessions may still be committed one day, behind these and before ours.
        """
        found = [info for infos in everything for info in infos]
        self._sequence = max((info.sequence for info in found), default=0) + _LEFTOVERS * leftovers
        self._on_disk = {info.step for info in found}
        if existing:
            self.go_back_to(existing[-1], existing)

    @property
    def parent(self) -> tuple[int, str] | None:
        """Step and session of the checkpoint that this session was resumed from."""
        with self._lock:
            return self._parent

    @property
    def sequence(self) -> int:
        """The place of the latest save in the order of commits."""
        with self._lock:
            return self._sequence

    def next_sequence(self) -> int:
        """The place of the next save in the order of commits."""
        with self._lock:
            self._sequence += 1
            return self._sequence

    def go_back_to(self, info: CheckpointInfo, checkpoints: list[CheckpointInfo]) -> None:
        """Training goes on from ``info``, one of ``checkpoints``."""
        with self._lock:
            self._parent = (info.step, info.session)
            self._ancestors = catalog.lineage(checkpoints, self._parent)

    def add(self, info: CheckpointInfo) -> None:
        """A save of this session was committed."""
        with self._lock:
            if info.parent == self._parent:  # else it was called before training went back behind it
                self._ancestors.add(info.step)
            self._on_disk.add(info.step)

    def remove(self, step: int) -> None:
        """A step was deleted."""
        with self._lock:
            self._ancestors.discard(step)
            self._on_disk.discard(step)

    def may_replace(self, step: int, *, overwrite: bool, pending: bool) -> bool:
        """Whether a save may take the place of a directory of that name; ``pending`` when the step is being saved.

        Raises:
            CheckpointExistsError: The step is taken.
        """
        with self._lock:
            if overwrite or (step in self._on_disk and step not in self._ancestors and not pending):
                return True
            if step in self._ancestors or pending:
                raise CheckpointExistsError(
                    errno.EEXIST,
                    f"step {step} is already saved or being saved; save another step, or pass overwrite=True",
                    os.path.join(self._directory, step_directory(step)),
                )
            return False
