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
    from sidesave.client.export.safetensors import export
    from sidesave.client.loading.load import load
    from sidesave.client.loading.sources import Source, load_sources
    from sidesave.client.reading.verify import VerifyReport, verify
    from sidesave.client.reporting.prometheus import prometheus_text, write_prometheus_file
    from sidesave.client.reporting.stats import SaveEvent, SaveStats, SaveSummary
    from sidesave.client.reporting.trace import Trace
    from sidesave.client.runs.finding import contains_checkpoint, find, is_checkpoint, latest
    from sidesave.client.runs.history import history
    from sidesave.client.runs.info import CheckpointInfo
    from sidesave.client.runs.watch import hold, watch
    from sidesave.client.saving.handle import SaveHandle
    from sidesave.client.training.intervals import Advice
    from sidesave.client.training.manager import CheckpointManager
    from sidesave.client.training.retention import Best, EveryNMinutes, EveryNSteps, KeepPolicy, Latest
    from sidesave.client.training.save_policies import (
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
    from sidesave.stager.state.annotations import PerRank, Replicated
    from sidesave.writer_daemon.log import SaveRecord

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
    "Advice": "sidesave.client.training.intervals",
    "AtSteps": "sidesave.client.training.save_policies",
    "BeforeTraining": "sidesave.client.training.save_policies",
    "Best": "sidesave.client.training.retention",
    "Checkpointer": "sidesave.client.checkpointer",
    "CheckpointInfo": "sidesave.client.saving.handle",
    "CheckpointManager": "sidesave.client.training.manager",
    "contains_checkpoint": "sidesave.client.runs.finding",
    "Ephemeral": "sidesave.client.training.save_policies",
    "EveryNMinutes": "sidesave.client.training.retention",
    "EveryNSteps": "sidesave.client.training.retention",
    "EverySeconds": "sidesave.client.training.save_policies",
    "EverySteps": "sidesave.client.training.save_policies",
    "export": "sidesave.client.export.safetensors",
    "find": "sidesave.client.runs.finding",
    "FirstStep": "sidesave.client.training.save_policies",
    "history": "sidesave.client.runs.history",
    "hold": "sidesave.client.runs.watch",
    "is_checkpoint": "sidesave.client.runs.finding",
    "KeepPolicy": "sidesave.client.training.retention",
    "LastStep": "sidesave.client.training.save_policies",
    "Latest": "sidesave.client.training.retention",
    "latest": "sidesave.client.runs.finding",
    "load": "sidesave.client.loading.load",
    "load_sources": "sidesave.client.loading.sources",
    "Moment": "sidesave.client.training.save_policies",
    "OnException": "sidesave.client.training.save_policies",
    "OnRequest": "sidesave.client.training.save_policies",
    "OnSignal": "sidesave.client.training.save_policies",
    "OptimalInterval": "sidesave.client.training.save_policies",
    "OverheadBudget": "sidesave.client.training.save_policies",
    "PerRank": "sidesave.stager.state.annotations",
    "prometheus_text": "sidesave.client.reporting.prometheus",
    "Replicated": "sidesave.stager.state.annotations",
    "SaveEvent": "sidesave.client.reporting.stats",
    "SaveHandle": "sidesave.client.saving.handle",
    "SavePolicy": "sidesave.client.training.save_policies",
    "SaveRecord": "sidesave.writer_daemon.log",
    "SaveStats": "sidesave.client.reporting.stats",
    "SaveSummary": "sidesave.client.reporting.stats",
    "Source": "sidesave.client.loading.sources",
    "Trace": "sidesave.client.reporting.trace",
    "verify": "sidesave.client.reading.verify",
    "VerifyReport": "sidesave.client.reading.verify",
    "watch": "sidesave.client.runs.watch",
    "write_prometheus_file": "sidesave.client.reporting.prometheus",
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
