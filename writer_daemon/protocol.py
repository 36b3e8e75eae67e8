"""Messages between trainer and daemon, as frozen dataclasses; ``wire`` encodes and decodes them.

The inherited socket pair carries ``BOOT``, ``ATTACH`` and ``DETACH``, with file descriptors, and
``NOTE``, which is not answered. ZeroMQ carries ``SAVE``, ``WATCH``, ``REFUSE``, ``DELETE``,
``STATUS`` and ``DRAIN`` to the daemon, all other messages to the trainer. ``MIRRORED``, ``MIRROR``
and ``RELEASED`` answer no request.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import ClassVar, Final

from sidesave.errors import ProtocolError, SidesaveError, StateMismatchError
from sidesave.writer_daemon.format.names import is_safe_name
from sidesave.writer_daemon.options import DaemonOptions
from sidesave.writer_daemon.sealing.keys import Sealing
from sidesave.writer_daemon.storage import urls
from sidesave.writer_daemon.storage.sealed_json import are_whole

logger = logging.getLogger(__name__)

_LAST_SECOND: Final = float(1 << 63)
"""Times of saves must be before this."""
EXIT_REFUSED: Final = 3
"""Exit status after FAILED instead of READY: the trainer may see it before the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """One run of bytes in an arena; ``offset`` is page-aligned, from the arena's start."""

    name: str
    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        if not is_safe_name(self.name):
            raise ProtocolError(f"{self.name!r} is not a container name")
        if self.offset % 4096 or self.offset < 4096 or not are_whole([self.offset, self.nbytes]):
            raise ProtocolError(
                f"extent {self.name} at {self.offset}+{self.nbytes} is not page-aligned"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The checkpoint that a run was resumed from."""

    step: int
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Files of this rank from an earlier save of this session: linked, and not in the arena.

    ``names`` are the prefixes of their names, all of one container; ``saves`` are committed saves
    that have the files, each as step and sequence, the preferred one first.
    """

    names: tuple[str, ...]
    saves: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not (
            self.names
            and all(map(is_safe_name, self.names))
            and all(len(each) == 2 for each in self.saves)
        ):
            raise ProtocolError(f"invalid links to files of earlier saves: {self.names!r:.80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unshared:
    """A rank's plain tensors that are compared between ranks, because they may differ.

    ``table`` has them as ``compared``; if they differ, it replaces SAVE's, with ``files`` written.
    """

    files: tuple[Extent, ...]
    table: Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages; receivers check ``attempt``, the number of the trainer's daemon."""

    kind: ClassVar[str] = ""
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot(Message):
    """First on the socket pair, with a pidfd of the trainer: endpoint, run and options.

    HELLO returns ``token``. ``resumes``: an earlier daemon has used the directory. A daemon that
    ``encrypts`` leaves no core dumps. ``storage_options`` (``urls.encode_options``) may be secret.
    ``fallback_directory`` and ``mirror`` may be empty; a ``mirror_bandwidth`` of 0 is no limit.
    """

    kind: ClassVar[str] = "BOOT"
    endpoint: str = ""
    token: bytes = b""
    directory: str
    session: str
    rank: int
    world_size: int
    trainer_pid: int
    resumes: bool = False
    encrypts: bool = False
    storage_options: bytes = field(default=b"", repr=False)
    fallback_directory: str = ""
    retries: int = 0
    mirror: str = ""
    mirror_bandwidth: int = 0
    options: DaemonOptions

    @property
    def stall_timeout_s(self) -> float:
        """Seconds without a byte moved after which a save fails."""
        if self.options.stall_timeout_s is not None:
            return self.options.stall_timeout_s
        return 900.0 if urls.is_url(self.directory) else 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach(Message):
    """On the socket pair, with the arena's memfd."""

    kind: ClassVar[str] = "ATTACH"
    arena: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Detach(Message):
    """On the socket pair: the trainer no longer uses this arena."""

    kind: ClassVar[str] = "DETACH"
    arena: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Note(Message):
    """On the socket pair: facts for ``save_record.SaveRecord`` that only the trainer knows."""

    kind: ClassVar[str] = "NOTE"
    save_id: int
    step: int
    outcome: str
    sequence: int | None
    error: str | None
    message: str | None
    errno: int | None
    called_s: float
    staged_s: float | None
    stall_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """The daemon is connected, but may still have to wait for a lease, or to recover."""

    kind: ClassVar[str] = "HELLO"
    token: bytes
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Message):
    """The daemon holds the lease and has recovered saves of dead sessions, named by directory."""

    kind: ClassVar[str] = "READY"
    recovered: tuple[str, ...]
    removed: tuple[str, ...]
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Save(Message):
    """A staged state: extents, never bytes.

    ``retry``: an earlier daemon may have written some of it; files are then adopted, and the
    directory is not created again. ``table`` holds the entries of the rank's record for tensors
    (``layout.Part``); without it they are whole, and only this rank's. ``unshared`` is written if
    the ranks' tensors differ. ``metadata`` (JSON) and ``extra_files`` (:func:`pack_files`, on rank
    0 only) are the user's. ``droppable`` are steps, oldest first, that may be deleted to make room.
    ``links`` are files of earlier saves that belong to this save too. ``sealing``: the encryption.
    """

    kind: ClassVar[str] = "SAVE"
    save_id: int
    arena: int
    generation: int
    step: int
    session: str
    sequence: int
    rank: int
    world_size: int
    files: tuple[Extent, ...]
    objects: Extent
    parent: Parent | None
    replace: bool
    pickled: bool
    created_s: float
    torch_version: str
    retry: bool
    table: Extent | None = None
    unshared: Unshared | None = None
    metadata: Extent | None = None
    extra_files: Extent | None = None
    droppable: tuple[int, ...] = ()
    links: tuple[Link, ...] = ()
    sealing: Sealing | None = None

    def __post_init__(self) -> None:
        numbers = [
            self.step,
            self.sequence,
            self.rank,
            self.world_size,
            *([self.parent.step] if self.parent else []),
        ]
        if (
            not are_whole(numbers)
            or self.rank >= self.world_size
            or not 0 <= self.created_s < _LAST_SECOND
        ):
            raise ProtocolError(
                f"invalid SAVE of step {self.step}, rank {self.rank} of {self.world_size}"
            )
        if re.fullmatch(r"[0-9a-f]{16}", self.session) is None:
            raise ProtocolError(f"{self.session!r} is not a session")
        names = [
            extent.name for extent in (*self.files, *(self.unshared.files if self.unshared else ()))
        ]
        names += [name for link in self.links for name in link.names]
        if len(set(names)) != len(names):
            raise ProtocolError("two files of a SAVE have the same name")
        if self.rank and self.extra_files is not None:
            raise ProtocolError(f"rank {self.rank} has extra files, which only rank 0 may have")

    @property
    def nbytes(self) -> int:
        """Bytes to write, as far as known before the write."""
        extra = [] if self.extra_files is None else [self.extra_files]
        return sum(extent.nbytes for extent in (*self.files, self.objects, *extra))


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch(Message):
    """Asks, without memory, for the outcome of a save that an earlier daemon reported WRITTEN."""

    kind: ClassVar[str] = "WATCH"
    save: Save


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse(Message):
    """This rank declines a save that others may have begun, and says why; answer: FAILED."""

    kind: ClassVar[str] = "REFUSE"
    save_id: int
    step: int
    session: str
    sequence: int
    rank: int
    world_size: int
    error: str
    message: str
    errno: int | None
    path: str | None
    retry: bool

    def __post_init__(self) -> None:
        if (
            not are_whole([self.step, self.sequence, self.rank, self.world_size])
            or self.rank >= self.world_size
        ):
            raise ProtocolError(
                f"invalid REFUSE of step {self.step}, rank {self.rank} of {self.world_size}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete(Message):
    """Asks to delete committed steps; ``save_id``, numbered like a save's, is in the answer.

    Saves of these steps in this session after ``sequence`` are not deleted. ``retry`` is set when
    an earlier daemon may have deleted some. With ``spare_read``, a step that is being read is not
    deleted but fails with EBUSY. With ``mirror``, only the mirror's copies are deleted.
    """

    kind: ClassVar[str] = "DELETE"
    save_id: int
    steps: tuple[int, ...]
    sequence: int
    retry: bool
    spare_read: bool = False
    mirror: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted(Message):
    """The steps are deleted durably, except ``failures``; their bytes are removed later."""

    kind: ClassVar[str] = "DELETED"
    save_id: int
    failures: tuple[Failed, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Message):
    """The number of bytes of a save passed to storage, and their total."""

    kind: ClassVar[str] = "PROGRESS"
    save_id: int
    nbytes: int
    total_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written(Message):
    """This rank's bytes and its record are durable; the arena may be reused."""

    kind: ClassVar[str] = "WRITTEN"
    save_id: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Message):
    """The step is visible and durable; ``name`` is the name of its directory."""

    kind: ClassVar[str] = "COMMITTED"
    save_id: int
    name: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Message):
    """A save failed or, with ``save_id`` None, the daemon; ``error`` names a ``SidesaveError``.

    ``saved_instead`` is the step that another rank has saved in its place, if that is the reason.
    """

    kind: ClassVar[str] = "FAILED"
    save_id: int | None
    error: str
    message: str
    errno: int | None
    path: str | None
    saved_instead: int | None = None
    step: int | None = None  # of a deletion


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrored(Message):
    """A checkpoint is in the mirror, visible and durable; or, with ``error``, it never will be."""

    kind: ClassVar[str] = "MIRRORED"
    session: str
    sequence: int
    name: str
    error: Failed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorState(Message):
    """The state of the mirror, sent after each change.

    Once both places were ``compared``, ``missing`` are the sequence numbers of the checkpoints
    still to be copied, ``nbytes`` is their size, and ``last_step`` is the step that this daemon has
    mirrored last. ``error`` is the current failure; it is final if ``over``.
    """

    kind: ClassVar[str] = "MIRROR"
    compared: bool = False
    missing: tuple[int, ...] = ()
    nbytes: int = 0
    over: bool = False
    error: Failed | None = None
    nbytes_per_s: float = 0.0
    last_step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(Message):
    """After DRAIN: the lease is released; the mirror and deleted bytes are still handled."""

    kind: ClassVar[str] = "RELEASED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(Message):
    """Asks for a HEARTBEAT."""

    kind: ClassVar[str] = "STATUS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Message):
    """The poll loop is running; ``saves`` is the number of open saves."""

    kind: ClassVar[str] = "HEARTBEAT"
    saves: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(Message):
    """Finish all accepted requests, release the lease, exit."""

    kind: ClassVar[str] = "DRAIN"


def failure(attempt: int, save_id: int | None, error: Exception) -> Failed:
    """Return FAILED for an error; logs the traceback if it is not a ``SidesaveError``."""
    if not isinstance(error, SidesaveError):
        logger.error("unexpected error", exc_info=error)
    code, path = getattr(error, "errno", None), getattr(error, "filename", None)
    return Failed(
        attempt=attempt,
        save_id=save_id,
        # The nearest public class.
        error=next(
            kind.__name__ for kind in type(error).__mro__ if not kind.__name__.startswith("_")
        ),
        message=_utf8(
            error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        )[:4000],
        errno=code if isinstance(code, int) else None,
        path=_utf8(path) if isinstance(path, str) else None,
        saved_instead=error.saved_instead if isinstance(error, StateMismatchError) else None,
    )


def _utf8(text: str) -> str:
    """Return text for messages, with the bytes of file names that are not UTF-8 as escapes."""
    return text.encode(errors="backslashreplace").decode()
