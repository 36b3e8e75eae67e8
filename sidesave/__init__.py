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
    from sidesave.client.export import export
    from sidesave.client.finding import contains_checkpoint, find, is_checkpoint, latest
    from sidesave.client.handle import CheckpointInfo, SaveHandle
    from sidesave.client.history import history
    from sidesave.client.intervals import Advice
    from sidesave.client.loader import VerifyReport, load, verify
    from sidesave.client.manager import CheckpointManager
    from sidesave.client.metrics import prometheus_text, write_prometheus_file
    from sidesave.client.retention import Best, EveryNMinutes, EveryNSteps, KeepPolicy, Latest
    from sidesave.client.save_policies import (
        AtSteps,
        BeforeTraining,
        Ephemeral,
        EverySeconds,
        EverySteps,
        FirstStep,
        LastStep,
        Moment,
        OnException,
        OnRequest,
        OnSignal,
        OptimalInterval,
        OverheadBudget,
        SavePolicy,
    )
    from sidesave.client.sources import Source, load_sources
    from sidesave.client.stats import SaveEvent, SaveStats, SaveSummary
    from sidesave.client.trace import Trace
    from sidesave.client.watching import hold, watch
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
    "Advice",
    "AtSteps",
    "BeforeTraining",
    "Best",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "Checkpointer",
    "ClosedError",
    "CommitUnknownError",
    "DaemonDiedError",
    "DaemonError",
    "DaemonStartError",
    "DirectoryInUseError",
    "Ephemeral",
    "EveryNMinutes",
    "EveryNSteps",
    "EverySeconds",
    "EverySteps",
    "FirstStep",
    "FormatVersionError",
    "HostMemoryError",
    "IntegrityError",
    "InvalidArgumentError",
    "KeepPolicy",
    "LastStep",
    "Latest",
    "Moment",
    "NoSpaceError",
    "OnException",
    "OnRequest",
    "OnSignal",
    "OptimalInterval",
    "OverheadBudget",
    "PerRank",
    "ProtocolError",
    "Replicated",
    "SaveEvent",
    "SaveHandle",
    "SavePolicy",
    "SaveRecord",
    "SaveStats",
    "SaveSummary",
    "SidesaveError",
    "Source",
    "StagingError",
    "StateMismatchError",
    "TornSnapshotError",
    "Trace",
    "UnsupportedValueError",
    "VerifyReport",
    "WriteError",
    "WriteStalledError",
    "contains_checkpoint",
    "export",
    "find",
    "history",
    "hold",
    "is_checkpoint",
    "latest",
    "load",
    "load_sources",
    "prometheus_text",
    "verify",
    "watch",
    "write_prometheus_file",
]

_ELSEWHERE = {
    "Advice": "sidesave.client.intervals",
    "AtSteps": "sidesave.client.save_policies",
    "BeforeTraining": "sidesave.client.save_policies",
    "Best": "sidesave.client.retention",
    "Checkpointer": "sidesave.client.checkpointer",
    "CheckpointInfo": "sidesave.client.handle",
    "CheckpointManager": "sidesave.client.manager",
    "contains_checkpoint": "sidesave.client.finding",
    "Ephemeral": "sidesave.client.save_policies",
    "EveryNMinutes": "sidesave.client.retention",
    "EveryNSteps": "sidesave.client.retention",
    "EverySeconds": "sidesave.client.save_policies",
    "EverySteps": "sidesave.client.save_policies",
    "export": "sidesave.client.export",
    "find": "sidesave.client.finding",
    "FirstStep": "sidesave.client.save_policies",
    "history": "sidesave.client.history",
    "hold": "sidesave.client.watching",
    "is_checkpoint": "sidesave.client.finding",
    "KeepPolicy": "sidesave.client.retention",
    "LastStep": "sidesave.client.save_policies",
    "Latest": "sidesave.client.retention",
    "latest": "sidesave.client.finding",
    "load": "sidesave.client.loader",
    "load_sources": "sidesave.client.sources",
    "Moment": "sidesave.client.save_policies",
    "OnException": "sidesave.client.save_policies",
    "OnRequest": "sidesave.client.save_policies",
    "OnSignal": "sidesave.client.save_policies",
    "OptimalInterval": "sidesave.client.save_policies",
    "OverheadBudget": "sidesave.client.save_policies",
    "PerRank": "sidesave.stager.marks",
    "prometheus_text": "sidesave.client.metrics",
    "Replicated": "sidesave.stager.marks",
    "SaveEvent": "sidesave.client.stats",
    "SaveHandle": "sidesave.client.handle",
    "SavePolicy": "sidesave.client.save_policies",
    "SaveRecord": "sidesave.writer_daemon.history",
    "SaveStats": "sidesave.client.stats",
    "SaveSummary": "sidesave.client.stats",
    "Source": "sidesave.client.sources",
    "Trace": "sidesave.client.trace",
    "verify": "sidesave.client.loader",
    "VerifyReport": "sidesave.client.loader",
    "watch": "sidesave.client.watching",
    "write_prometheus_file": "sidesave.client.metrics",
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
