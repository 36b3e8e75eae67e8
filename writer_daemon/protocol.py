"""The wire: typed messages between trainer and daemon, as msgpack maps. Nothing else knows their encoding.

Every message is a frozen dataclass; the map on the wire holds its kind, the protocol version and the fields. Decoding
is strict: another kind, version, field or type, or a value outside its bounds, is a ``ProtocolError``. Never pickle.

Over the inherited socket pair, with file descriptors: ``BOOT``, ``ATTACH``, ``DETACH``, and ``NOTE``, unanswered.
Over ZeroMQ, trainer to daemon: ``SAVE``, ``WATCH``, ``REFUSE``, ``DELETE``, ``STATUS``, ``DRAIN``; daemon to trainer:
``HELLO``, ``READY``, ``PROGRESS``, ``WRITTEN``, ``COMMITTED``, ``DELETED``, ``FAILED``, ``HEARTBEAT``; and of the
mirror, which no request asks for, ``MIRRORED``, ``MIRROR``, ``RELEASED``.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import types
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, cast

import msgpack

from sidesave.errors import ProtocolError, SidesaveError, StateMismatchError
from sidesave.writer_daemon.format.names import is_safe_name
from sidesave.writer_daemon.sealing.keys import Sealing
from sidesave.writer_daemon.storage.sealed_json import are_whole

logger = logging.getLogger(__name__)

VERSION: Final = 2
MAX_MESSAGE_NBYTES: Final = 1 << 20
"""A longer message is refused unread; a SAVE of 1,000 containers takes 100 KB."""
_LAST_SECOND: Final = float(1 << 63)
"""First time that no record holds."""
EXIT_REFUSED: Final = 3
"""Exit status of a daemon that has sent FAILED in the place of READY: that message may arrive after its end is seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """One run of bytes in an arena: ``offset`` from the arena's start, page-aligned, and ``nbytes``."""

    name: str
    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        if not is_safe_name(self.name):
            raise ProtocolError(f"{self.name!r} is no container name")
        if self.offset % 4096 or self.offset < 4096 or not are_whole([self.offset, self.nbytes]):
            raise ProtocolError(f"extent {self.name} at {self.offset}+{self.nbytes} is not page-aligned")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The checkpoint that a run was resumed from."""

    step: int
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Files of this rank that an earlier save of this session has written: they are linked, and not in the arena.

    ``names`` are what their names begin with, all of one container; ``saves`` are committed ones that have them, each
    as step and sequence, the best first.
    """

    names: tuple[str, ...]
    saves: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not (self.names and all(map(is_safe_name, self.names)) and all(len(each) == 2 for each in self.saves)):
            raise ProtocolError(f"there is nothing to be linked as {self.names!r:.80}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unshared:
    """A rank's plain tensors that are compared between ranks, since nothing says that all ranks hold the same.

    ``table`` lists them as ``compared``. Only if they differ, ``files`` are written, and ``table`` replaces the other.
    """

    files: tuple[Extent, ...]
    table: Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Base of all messages; ``attempt`` counts the daemons of one trainer and is checked by the receiver."""

    kind: ClassVar[str] = ""
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """A user's options for the daemon, see ``Checkpointer``; an empty text means none, no ``cpus`` any, 0 no limit."""

    fallback_directory: str
    retries: int
    stall_timeout_s: float
    takeover_timeout_s: float
    commit_timeout_s: float
    nice: int
    io_class: str
    cpus: tuple[int, ...]
    mirror: str = ""
    mirror_bandwidth: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot(Message):
    """First on the socket pair, with a pidfd of the trainer: where to connect, what to serve and how.

    ``token`` comes back in HELLO. ``resumes``: a daemon before this one has had the directory. ``storage_options`` are
    those of its store (``urls.encode_options``), which may be secret. One that ``encrypts`` leaves no core dumps.
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
    options: DaemonOptions


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
    """On the socket pair: for the history, what only the trainer knows of a save; see ``history.SaveRecord``."""

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
    """The daemon is alive and connected. Alive is not ready: it may have to wait for a lease, or to recover."""

    kind: ClassVar[str] = "HELLO"
    token: bytes
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Message):
    """The daemon holds the directory's lease and has recovered what dead sessions left: names of step directories."""

    kind: ClassVar[str] = "READY"
    recovered: tuple[str, ...]
    removed: tuple[str, ...]
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Save(Message):
    """A staged state: extents, never bytes.

    ``retry`` is set when an earlier daemon may already have written some of it: files are then adopted, and the
    directory is not created a second time. ``table`` holds what the rank's record says of tensors (``layout.Part``);
    without it they are whole, and this rank's. ``unshared`` is written as well where ranks turn out to differ.
    ``metadata`` is the user's, as JSON; ``extra_files`` are the user's (:func:`pack_files`), which rank 0 alone has.
    ``droppable`` are steps, the oldest first, of which each may be deleted where the save finds no room. ``links`` are
    files of earlier saves that belong to this one too. ``sealing`` is how it is encrypted.
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
        numbers = [self.step, self.sequence, self.rank, self.world_size, *([self.parent.step] if self.parent else [])]
        if not are_whole(numbers) or self.rank >= self.world_size or not 0 <= self.created_s < _LAST_SECOND:
            raise ProtocolError(f"SAVE of step {self.step}, rank {self.rank} of {self.world_size} makes no sense")
        if re.fullmatch(r"[0-9a-f]{16}", self.session) is None:
            raise ProtocolError(f"{self.session!r} is no session")
        names = [extent.name for extent in (*self.files, *(self.unshared.files if self.unshared else ()))]
        names += [name for link in self.links for name in link.names]
        if len(set(names)) != len(names):
            raise ProtocolError("two files of a SAVE have the same name")
        if self.rank and self.extra_files is not None:
            raise ProtocolError(f"rank {self.rank} has files beside the tensors, which rank 0 alone may have")

    @property
    def nbytes(self) -> int:
        """Bytes to write, as far as that is known beforehand."""
        extra = [] if self.extra_files is None else [self.extra_files]
        return sum(extent.nbytes for extent in (*self.files, self.objects, *extra))


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch(Message):
    """Asks for the outcome of a save whose bytes an earlier daemon declared written; no memory is needed."""

    kind: ClassVar[str] = "WATCH"
    save: Save


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse(Message):
    """One of several ranks will not take part in a save that others may have begun, and why; answered by FAILED."""

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
        if not are_whole([self.step, self.sequence, self.rank, self.world_size]) or self.rank >= self.world_size:
            raise ProtocolError(f"REFUSE of step {self.step}, rank {self.rank} of {self.world_size} makes no sense")


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete(Message):
    """Asks to delete a committed step; ``save_id`` is of the same row as those of saves, and comes back.

    What this session has saved as that step after ``sequence`` is not meant. ``retry`` is set when an earlier daemon
    may have done it. With ``spare_read`` that fails, with EBUSY, while somebody reads the checkpoint. With ``mirror``
    it is the mirror's step that goes, and no other.
    """

    kind: ClassVar[str] = "DELETE"
    save_id: int
    step: int
    sequence: int
    retry: bool
    spare_read: bool = False
    mirror: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Deleted(Message):
    """The step is gone, durably; its bytes are removed a little later."""

    kind: ClassVar[str] = "DELETED"
    save_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Message):
    """Bytes of a save passed to storage so far, and in all."""

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
    """The step is visible and durable; ``name`` is its directory's."""

    kind: ClassVar[str] = "COMMITTED"
    save_id: int
    name: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Message):
    """A save failed, or, with ``save_id`` None, the daemon itself; ``error`` is a name of ``sidesave.errors``.

    ``saved_instead`` is the step that another rank has saved at the same turn, where that is why.
    """

    kind: ClassVar[str] = "FAILED"
    save_id: int | None
    error: str
    message: str
    errno: int | None
    path: str | None
    saved_instead: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrored(Message):
    """A checkpoint is in the mirror, visible and durable; or, with ``error``, it never will be."""

    kind: ClassVar[str] = "MIRRORED"
    session: str
    sequence: int
    name: str
    error: Failed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirror(Message):
    """How the mirror stands, whenever that changes.

    Once both places were ``compared``, ``missing`` are the numbers in the order of commits of what is still to be
    copied, ``nbytes`` is how much that is, and ``last_step`` what this daemon has mirrored last. ``error`` is what it
    fails of: for now, or for good if ``over``.
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
    """After DRAIN: all is done and the lease given back; the daemon goes on with its mirror alone."""

    kind: ClassVar[str] = "RELEASED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status(Message):
    """Asks for a HEARTBEAT."""

    kind: ClassVar[str] = "STATUS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(Message):
    """The poll loop lives; with the number of open saves."""

    kind: ClassVar[str] = "HEARTBEAT"
    saves: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(Message):
    """Finish what was accepted, release the lease, exit."""

    kind: ClassVar[str] = "DRAIN"


def failure(attempt: int, save_id: int | None, error: Exception) -> Failed:
    """FAILED for an error; one that is not of sidesave's own is logged with its traceback."""
    if not isinstance(error, SidesaveError):
        logger.error("unexpected error", exc_info=error)
    code, path = getattr(error, "errno", None), getattr(error, "filename", None)
    return Failed(
        attempt=attempt,
        save_id=save_id,
        error=next(kind.__name__ for kind in type(error).__mro__ if not kind.__name__.startswith("_")),  # a public one
        message=_utf8(error.strerror if isinstance(error, OSError) and error.strerror else str(error))[:4000],
        errno=code if isinstance(code, int) else None,
        path=_utf8(path) if isinstance(path, str) else None,
        saved_instead=error.saved_instead if isinstance(error, StateMismatchError) else None,
    )


def _utf8(text: str) -> str:
    """What people are told of a name that is no UTF-8, such as that of a file: its odd bytes as escapes."""
    return text.encode(errors="backslashreplace").decode()


_KINDS: Final[dict[str, type[Message]]] = {cls.kind: cls for cls in Message.__subclasses__()}


def encode(message: Message) -> bytes:
    """The bytes of a message; raises ``ProtocolError`` where a field has none.

    Half a surrogate pair, which no UTF-8 can hold, becomes its escape: only words for people may have one, names and
    paths are checked before.
    """
    body = {"kind": message.kind, "version": VERSION, **_fields(message)}
    try:
        return cast("bytes", msgpack.packb(body, default=_fields, use_bin_type=True, unicode_errors="backslashreplace"))
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"{message.kind} cannot be encoded: {error}") from error


def decode(data: bytes | memoryview) -> Message:
    """Read a message, or raise ``ProtocolError``; nothing is executed and memory is bounded by ``len(data)``."""
    if len(data) > MAX_MESSAGE_NBYTES:
        raise ProtocolError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_NBYTES}")
    try:
        raw = cast("Any", msgpack.unpackb(data, raw=False, use_list=True, strict_map_key=True))
    except Exception as error:
        raise ProtocolError(f"not a msgpack message: {error}") from error
    if not isinstance(raw, dict):
        raise ProtocolError("a message must be a map")
    body = cast("dict[str, Any]", raw)
    kind, version = body.pop("kind", None), body.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise ProtocolError(f"protocol version {version!r} is not {VERSION}: trainer and daemon differ")
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ProtocolError(f"unknown message kind {kind!r}")
    return cast("Message", _build(cls, body, cls.kind))


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


_hints: dict[type, dict[str, Any]] = {}


def _build(cls: type, body: dict[str, Any], where: str) -> Any:
    if cls not in _hints:
        hints = typing.get_type_hints(cls)
        _hints[cls] = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    hints = _hints[cls]
    if body.keys() != hints.keys():
        raise ProtocolError(f"{where}: fields {sorted(map(str, body.keys() ^ hints.keys()))} are missing or unknown")
    values = {name: _convert(hint, body[name], f"{where}.{name}") for name, hint in hints.items()}
    return cls(**values)


def _convert(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        (hint,) = (option for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ProtocolError(f"{where} must be a list")
        item = typing.get_args(hint)[0]
        return tuple(_convert(item, one, where) for one in cast("list[Any]", value))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, dict):
            raise ProtocolError(f"{where} must be a map")
        return _build(hint, cast("dict[str, Any]", value), where)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint or value != value:  # NaN is no number of anything
        raise ProtocolError(f"{where} must be {getattr(hint, '__name__', hint)}, not {type(value).__name__}")
    return value
