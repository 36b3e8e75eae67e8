"""The errors of sidesave, one tree.

::

    SidesaveError
    ├── InvalidArgumentError        (ValueError)        an argument is wrong; nothing was done
    ├── ClosedError                 (RuntimeError)      the checkpointer has been closed
    ├── StagingError                                    the state could not be copied to host memory
    │   ├── TornSnapshotError                           a tensor changed while it was being copied
    │   ├── HostMemoryError         (MemoryError)       not enough host memory for a staging slot
    │   └── UnsupportedValueError   (TypeError)         the state has a value that cannot be saved
    ├── DaemonError                                     the writer daemon failed
    │   ├── DaemonStartError                            it did not come up
    │   ├── DaemonDiedError                             it died, and respawning it did not help
    │   └── ProtocolError           (ValueError)        a message was malformed or from a stranger
    ├── WriteError                  (OSError)           storage refused; errno and filename are set
    │   ├── WriteStalledError       (TimeoutError)      storage did not answer within the deadline
    │   ├── NoSpaceError                                full disk or quota
    │   └── CommitUnknownError      (TimeoutError)      the bytes are durable, the commit is unknown
    └── CheckpointError                                 a checkpoint, or its directory, is unusable
        ├── CheckpointNotFoundError (FileNotFoundError)
        │   └── CheckpointReplacedError                 it was replaced or deleted while it was read
        ├── CheckpointExistsError   (FileExistsError)
        ├── IntegrityError          (ValueError)        bytes do not match their digests, or lack
        │   └── TamperedError                           they do, and are not what was encrypted
        ├── KeyMissingError         (LookupError)       it is encrypted, and no key was given
        ├── WrongKeyError           (ValueError)        it is encrypted with another key
        ├── FormatVersionError      (ValueError)        written by a newer sidesave
        ├── StateMismatchError      (ValueError)        keys, shapes or dtypes of the target differ
        └── DirectoryInUseError     (OSError)           another live session holds the directory

Each mixes in the built-in class that a caller would expect. Nothing here imports torch.
"""

from __future__ import annotations

import errno as _errno
import os
import reprlib as _reprlib
from collections.abc import Sequence as _Sequence

__all__ = [
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointReplacedError",
    "ClosedError",
    "CommitUnknownError",
    "DaemonDiedError",
    "DaemonError",
    "DaemonStartError",
    "DirectoryInUseError",
    "FormatVersionError",
    "HostMemoryError",
    "IntegrityError",
    "InvalidArgumentError",
    "KeyMissingError",
    "NoSpaceError",
    "ProtocolError",
    "SidesaveError",
    "StagingError",
    "StateMismatchError",
    "TamperedError",
    "TornSnapshotError",
    "UnsupportedValueError",
    "WriteError",
    "WriteStalledError",
    "WrongKeyError",
    "from_wire",
    "write_error",
]


class SidesaveError(Exception):
    """Base of every error that sidesave raises on purpose."""

    was_read = False
    """Whether the user has read it from a future of the failed save: it is not raised again."""


class InvalidArgumentError(SidesaveError, ValueError):
    """An argument is wrong; nothing was done."""


class ClosedError(SidesaveError, RuntimeError):
    """The checkpointer has been closed."""


class StagingError(SidesaveError):
    """The state could not be copied to host memory."""


class TornSnapshotError(StagingError):
    """A tensor was changed while it was being copied, so the save was dropped."""


class HostMemoryError(StagingError, MemoryError):
    """There is not enough host memory for a staging slot."""


class UnsupportedValueError(StagingError, TypeError):
    """The state holds a value that cannot be saved; the message names its FQN."""


class DaemonError(SidesaveError):
    """The writer daemon failed."""


class DaemonStartError(DaemonError):
    """The writer daemon did not come up."""


class DaemonDiedError(DaemonError):
    """The writer daemon died and respawning it did not help."""


class ProtocolError(DaemonError, ValueError):
    """A message between trainer and daemon was malformed, or not from whom it should be."""


class WriteError(SidesaveError, OSError):
    """Storage refused an operation; ``errno`` and ``filename`` say what and where."""


class WriteStalledError(WriteError, TimeoutError):
    """Storage did not answer within the deadline."""


class NoSpaceError(WriteError):
    """The file system is full, or a quota is used up."""


class CommitUnknownError(WriteError, TimeoutError):
    """This rank's bytes are durable, but whether the step was committed is not known."""


class CheckpointError(SidesaveError):
    """A checkpoint, or the directory that holds it, is not as asked."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No such checkpoint."""


class CheckpointReplacedError(CheckpointNotFoundError):
    """The checkpoint was replaced or deleted while it was read; it is not damaged.

    Read it again.
    """


class CheckpointExistsError(CheckpointError, FileExistsError):
    """The step exists in the current lineage and ``overwrite=True`` was not given."""


class IntegrityError(CheckpointError, ValueError):
    """Bytes on disk do not match their digests, or are missing."""


class TamperedError(IntegrityError):
    """Encrypted bytes match their digests, but were changed or moved after encryption."""


class KeyMissingError(CheckpointError, LookupError):
    """A run, or a checkpoint, is encrypted, and no key was given."""


class WrongKeyError(CheckpointError, ValueError):
    """A run or checkpoint is encrypted with a key other than the given one.

    Also raised if ranks were given different keys.
    """


class FormatVersionError(CheckpointError, ValueError):
    """The checkpoint was written in a newer format than this version reads."""


class StateMismatchError(CheckpointError, ValueError):
    """Keys, shapes or dtypes of a checkpoint differ from those of the target.

    Also raised if state that ranks save together differs between them.
    """

    saved_instead: int | None = None
    """The step that another rank has saved at the same turn, where that is what differs."""


class DirectoryInUseError(CheckpointError, OSError):
    """Another live session holds the run directory; the message names it."""


def brief(value: object) -> str:
    """A value as messages show it: one line of at most 100 characters, whatever its ``repr`` is."""
    text = " ".join(_REPR.repr(value).split())
    return text if len(text) <= _BRIEF else f"{text[: _BRIEF - 3]}..."


_BRIEF = 100
_REPR = _reprlib.Repr()
_REPR.maxother = _REPR.maxstring = _REPR.maxlong = _BRIEF


def listed(names: _Sequence[object], most: int) -> str:
    """Return up to ``most`` names in one line, and the number of those left out."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def write_error(error: OSError, doing: str, path: str | os.PathLike[str]) -> WriteError:
    """Return the ``WriteError`` for an ``OSError`` of storage.

    It says what was being done where.
    """
    if isinstance(error, WriteError):
        return error
    code = error.errno or _errno.EIO
    kind = NoSpaceError if code in (_errno.ENOSPC, _errno.EDQUOT) else WriteError
    return kind(code, f"{doing}: {os.strerror(code)}", os.fspath(path))


def from_wire(name: str, message: str, errno: int | None, path: str | None) -> SidesaveError:
    """Rebuild an error that a daemon reported; an unknown name becomes a ``DaemonError``."""
    kind = globals().get(name) if name in __all__ else None
    if not (isinstance(kind, type) and issubclass(kind, SidesaveError)):
        return DaemonError(f"{name}: {message}")
    if issubclass(kind, OSError) and errno is not None:
        return kind(errno, message, path)
    return kind(message)
