"""The facts about one committed checkpoint, and the readers of its manifest.

Errors are typed and never handled here: each caller decides which checkpoint it may leave out.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from sidesave.errors import CheckpointNotFoundError, IntegrityError, WriteError
from sidesave.writer_daemon.format.integrity import NO_SUCH_FILE
from sidesave.writer_daemon.format.manifest import (
    MANIFEST,
    MAX_JSON_NBYTES,
    Head,
    Manifest,
    parse_metadata,
)
from sidesave.writer_daemon.format.names import step_directory
from sidesave.writer_daemon.storage import ReadStorage

RANDOM_STATE: Final = "random_state"
"""The name of the item that holds a manager's random number generators."""
_HEAD_NBYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A committed checkpoint.

    Attributes:
        step: The step it was saved as.
        path: Its directory.
        nbytes: Bytes of tensors and plain data, over all ranks.
        session: The run, a random nonce of 16 hex digits, that wrote it.
        sequence: Its place in the order of commits; the latest has the highest that is not given
            up.
        parent: Step and session of the checkpoint that the run was resumed from, if any.
        created_s: When ``save()`` was called, in seconds since the epoch.
        metadata: What was passed to ``save()``, such as metrics; empty if the checkpoint is
            encrypted and its key was not given.
        given_up: Whether the run has gone back behind it: then it is not the latest, whatever its
            sequence.
        in_mirror: Whether ``path`` is in the run's mirror, and the run directory does not have it.
        encrypted: Whether it is encrypted.
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
    encrypted: bool = field(default=False, compare=False)

    @classmethod
    def of(
        cls, manifest: Head | Manifest, path: str, metadata: dict[str, Any] | None = None
    ) -> CheckpointInfo:
        """Return what a manifest says of the checkpoint in the directory ``path``."""
        return cls(
            step=manifest.step,
            path=path,
            nbytes=manifest.nbytes,
            session=manifest.session,
            sequence=manifest.sequence,
            parent=manifest.parent,
            created_s=manifest.created_s,
            metadata=metadata or {},
            encrypted=bool(manifest.cipher),
        )

    @property
    def name(self) -> str:
        """The name of its directory, also while that is hidden."""
        return step_directory(self.step)

    @property
    def key(self) -> tuple[str, int]:
        """Session and sequence, which no other save has."""
        return self.session, self.sequence

    @property
    def position(self) -> tuple[int, float, str]:
        """The key that sorts by time of save; older versions could assign a sequence twice."""
        return self.sequence, self.created_s, self.session

    @property
    def order(self) -> tuple[bool, tuple[int, float, str]]:
        """The key that sorts the checkpoints of a run, the latest last."""
        return not self.given_up, self.position

    def to_json(self) -> list[Any]:
        """Return the JSON form for another rank, whose path of the run directory may differ."""
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
            self.encrypted,
        ]

    @classmethod
    def from_json(cls, body: list[Any], directory: str) -> CheckpointInfo:
        """Return the checkpoint that another rank sent; its run is in ``directory`` on this one."""
        (
            step,
            name,
            nbytes,
            session,
            sequence,
            parent,
            created_s,
            metadata,
            given_up,
            in_mirror,
            encrypted,
        ) = body
        path = name if in_mirror else os.path.join(directory, name)  # all ranks have one mirror
        parent = None if parent is None else tuple(parent)
        return cls(
            step,
            path,
            nbytes,
            session,
            sequence,
            parent,
            created_s,
            metadata,
            given_up,
            in_mirror,
            encrypted,
        )

    def __fspath__(self) -> str:
        """Return the directory, so that an info can be passed as a path."""
        return self.path


def in_commit_order(checkpoints: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Sort by sequence, the latest last: after a rollback, the one that the run went back to."""
    ordered = sorted(checkpoints, key=lambda info: info.position)
    latest = next(
        (index for index in reversed(range(len(ordered))) if not ordered[index].given_up), None
    )
    if latest is not None:
        ordered.append(ordered.pop(latest))
    return ordered


# Reading ------------------------------------------------------------------------------------------

OpenMetadata = Callable[[ReadStorage, str, Head], dict[str, Any]]
"""Returns the user's metadata, given the storage, the directory's name there, and its head."""


def plain_metadata(storage: ReadStorage, name: str, head: Head) -> dict[str, Any]:
    """Return the metadata of a checkpoint that is not encrypted, and nothing of one that is."""
    return {} if head.cipher else parse_metadata(head.metadata, f"{storage.root}/{name}/{MANIFEST}")


def read_checkpoint(
    storage: ReadStorage, name: str, open_metadata: OpenMetadata = plain_metadata
) -> CheckpointInfo:
    """Return the checkpoint in a directory, its manifest compared with its digest.

    Raises:
        CheckpointNotFoundError: There is no manifest.
        IntegrityError: The manifest is damaged, or something else has its name.
        FormatVersionError: It was written in a newer format.
        WriteError: It cannot be read now.
    """
    directory = f"{storage.root}/{name}" if name else storage.root  # a whole bucket
    path = f"{directory}/{MANIFEST}"
    try:
        data = storage.read(f"{name}/{MANIFEST}", MAX_JSON_NBYTES)
        if data is None:
            raise CheckpointNotFoundError(errno.ENOENT, "there is no manifest", path)
        head = Head.from_bytes(data, path)
        metadata = open_metadata(storage, name, head)
    except WriteError as error:
        if error.errno not in NO_SUCH_FILE:
            raise
        raise IntegrityError(f"{path}: {error.strerror}") from error
    return CheckpointInfo.of(head, directory, metadata)


def peek_head(storage: ReadStorage, name: str) -> Head:
    """Return the beginning of a manifest, not verified.

    With many ranks a manifest is long, and each rank reads it.

    Raises:
        IntegrityError: It is not the beginning of a manifest.
        WriteError: It is not there, or cannot be read now.
    """
    path = f"{name}/{MANIFEST}"
    with storage.open(path) as source:
        return Head.from_beginning(bytes(source.read_at(0, _HEAD_NBYTES)), path)


_MANY: Final = 20


def no_such_step(step: int, steps: Iterable[int]) -> str:
    """Return the message for a missing step, with the last steps that exist."""
    ordered = sorted(steps)
    if not ordered:
        return f"there is no step {step}"
    if len(ordered) <= _MANY:
        return f"there is no step {step}; there are {ordered}"
    return f"there is no step {step}; the last of {len(ordered)} are {ordered[-_MANY:]}"
