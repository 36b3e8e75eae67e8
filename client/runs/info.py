"""Facts about a committed checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A committed checkpoint.

    Attributes:
        step: The step it was saved as.
        path: Its directory.
        nbytes: Bytes of tensors and plain data, over all ranks.
        session: The run, a random nonce of 16 hex digits, that wrote it.
        sequence: Its place in the order of commits; ``latest`` is the highest that is not given up.
        parent: Step and session of the checkpoint that the run was resumed from, if any.
        created_s: When ``save()`` was called, in seconds since the epoch.
        metadata: What ``save()`` was told about it, metrics for instance; empty where it is encrypted and the key is
            not at hand.
        given_up: Whether the run has gone back behind it: it is not the latest then, whatever its sequence.
        in_mirror: Whether ``path`` is in the run's mirror, and the run directory does not have it.
    """

    step: int
    path: str
    nbytes: int
    session: str
    sequence: int
    parent: tuple[int, str] | None
    created_s: float
    metadata: dict[str, Any] = field(default_factory=dict[str, Any], compare=False)
    given_up: bool = field(default=False, compare=False)
    in_mirror: bool = field(default=False, compare=False)

    @property
    def order(self) -> tuple[bool, int]:
        """The key that sorts the checkpoints of a run, the latest last."""
        return not self.given_up, self.sequence

    def to_json(self) -> list[Any]:
        """The JSON form for another rank, which may see the run directory under another path."""
        return [
            self.step,
            self.path if self.in_mirror else os.path.basename(self.path),
            self.nbytes,
            self.session,
            self.sequence,
            self.parent,
            self.created_s,
            self.metadata,
            self.given_up,
            self.in_mirror,
        ]

    @classmethod
    def from_json(cls, body: list[Any], directory: str) -> CheckpointInfo:
        """The checkpoint that another rank sent, of a run that is in ``directory`` on this one."""
        step, name, nbytes, session, sequence, parent, created_s, metadata, given_up, in_mirror = body
        path = name if in_mirror else os.path.join(directory, name)  # the mirror is one place for all
        parent = None if parent is None else tuple(parent)
        return cls(step, path, nbytes, session, sequence, parent, created_s, metadata, given_up, in_mirror)

    def __fspath__(self) -> str:
        """The directory, so that an info can be passed as a path."""
        return self.path
