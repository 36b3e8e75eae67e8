"""Asynchronous, out-of-process checkpoints for PyTorch training.

Public names are resolved on first use (PEP 562), so that ``python -m sidesave.writer_daemon`` stays without torch.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidesave.client.checkpointer import Checkpointer
    from sidesave.client.handle import CheckpointInfo, SaveHandle
    from sidesave.client.history import history
    from sidesave.client.loader import VerifyReport, load, verify
    from sidesave.errors import (
        CheckpointError,
        CheckpointExistsError,
        CheckpointNotFoundError,
        ClosedError,
        CommitUnknownError,
        DaemonDiedError,
        DaemonError,
        DaemonStartError,
        DirectoryInUseError,
        FormatVersionError,
        HostMemoryError,
        IntegrityError,
        InvalidArgumentError,
        NoSpaceError,
        ProtocolError,
        SidesaveError,
        StagingError,
        StateMismatchError,
        TornSnapshotError,
        UnsupportedValueError,
        WriteError,
        WriteStalledError,
    )
    from sidesave.stager.marks import PerRank, Replicated
    from sidesave.writer_daemon.history import SaveRecord

if sys.platform != "linux":
    raise ImportError("sidesave runs on Linux only: it is built on memfd, O_DIRECT and pidfd")
if sys.version_info < (3, 11):  # noqa: UP036 - said here as well, for those who run from a checkout
    raise ImportError("sidesave needs Python 3.11 or newer")

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointInfo",
    "CheckpointNotFoundError",
    "Checkpointer",
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
    "NoSpaceError",
    "PerRank",
    "ProtocolError",
    "Replicated",
    "SaveHandle",
    "SaveRecord",
    "SidesaveError",
    "StagingError",
    "StateMismatchError",
    "TornSnapshotError",
    "UnsupportedValueError",
    "VerifyReport",
    "WriteError",
    "WriteStalledError",
    "history",
    "load",
    "verify",
]

_ELSEWHERE = {
    "Checkpointer": "sidesave.client.checkpointer",
    "CheckpointInfo": "sidesave.client.handle",
    "PerRank": "sidesave.stager.marks",
    "Replicated": "sidesave.stager.marks",
    "SaveHandle": "sidesave.client.handle",
    "SaveRecord": "sidesave.writer_daemon.history",
    "VerifyReport": "sidesave.client.loader",
    "history": "sidesave.client.history",
    "load": "sidesave.client.loader",
    "verify": "sidesave.client.loader",
}

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sidesave' has no attribute {name!r}")
    value = getattr(importlib.import_module(_ELSEWHERE.get(name, "sidesave.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
