"""Asynchronous, out-of-process checkpoints for PyTorch training.

Public names are resolved on first use (PEP 562), so that ``python -m sidesave.writer_daemon`` stays
without torch. Errors are in :mod:`sidesave.errors`, statistics, metrics and records in
:mod:`sidesave.reporting`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidesave import errors, reporting
    from sidesave.client.checkpointer import Checkpointer
    from sidesave.client.encryption import Encryption
    from sidesave.client.export.safetensors import export
    from sidesave.client.loading.load import load
    from sidesave.client.loading.sources import Source, load_sources
    from sidesave.client.options import FailureOptions, MirrorOptions, StagingOptions
    from sidesave.client.planning import plan
    from sidesave.client.reading.fetch import fetch
    from sidesave.client.reading.verify import verify
    from sidesave.client.runs.finding import contains_checkpoint, find, is_checkpoint, latest
    from sidesave.client.runs.history import history
    from sidesave.client.runs.watch import hold, watch
    from sidesave.client.saving.handle import SaveHandle
    from sidesave.client.saving.mirroring import MirrorStatus
    from sidesave.client.training.keep_policies import (
        KeepBest,
        KeepEveryMinutes,
        KeepEverySteps,
        KeepLatest,
        KeepPolicy,
        KeepSteps,
    )
    from sidesave.client.training.manager import CheckpointManager
    from sidesave.client.training.save_policies import (
        AtSteps,
        BeforeTraining,
        Ephemeral,
        EverySeconds,
        EverySteps,
        FirstStep,
        LastStep,
        OnException,
        OnRequest,
        OnSignal,
        OptimalInterval,
        PolicyContext,
        SavePolicy,
    )
    from sidesave.errors import SidesaveError
    from sidesave.stager.state.annotations import Frozen, PerRank, Replicated
    from sidesave.stager.tables import ChangeTracking, Column, RowChanges, RowTable, owner_of
    from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
    from sidesave.writer_daemon.options import DaemonOptions

if sys.platform != "linux":
    raise ImportError("sidesave runs on Linux only: it is built on memfd, O_DIRECT and pidfd")
if sys.version_info < (3, 11):  # noqa: UP036 - said here as well, for those who run from a checkout
    raise ImportError("sidesave needs Python 3.11 or newer")

__version__ = "0.1.0"

__all__ = [
    "AtSteps",
    "BeforeTraining",
    "ChangeTracking",
    "CheckpointInfo",
    "CheckpointManager",
    "Checkpointer",
    "Column",
    "DaemonOptions",
    "Encryption",
    "Ephemeral",
    "EverySeconds",
    "EverySteps",
    "FailureOptions",
    "FirstStep",
    "Frozen",
    "KeepBest",
    "KeepEveryMinutes",
    "KeepEverySteps",
    "KeepLatest",
    "KeepPolicy",
    "KeepSteps",
    "LastStep",
    "MirrorOptions",
    "MirrorStatus",
    "OnException",
    "OnRequest",
    "OnSignal",
    "OptimalInterval",
    "PerRank",
    "PolicyContext",
    "Replicated",
    "RowChanges",
    "RowTable",
    "SaveHandle",
    "SavePolicy",
    "SidesaveError",
    "Source",
    "StagingOptions",
    "contains_checkpoint",
    "errors",
    "export",
    "fetch",
    "find",
    "history",
    "hold",
    "is_checkpoint",
    "latest",
    "load",
    "load_sources",
    "owner_of",
    "plan",
    "reporting",
    "verify",
    "watch",
]

_MODULES = {
    "sidesave.client.checkpointer": "Checkpointer",
    "sidesave.client.encryption": "Encryption",
    "sidesave.client.export.safetensors": "export",
    "sidesave.client.loading.load": "load",
    "sidesave.client.loading.sources": "Source load_sources",
    "sidesave.client.options": "FailureOptions MirrorOptions StagingOptions",
    "sidesave.client.reading.fetch": "fetch",
    "sidesave.client.reading.verify": "verify",
    "sidesave.client.planning": "plan",
    "sidesave.client.runs.finding": "contains_checkpoint find is_checkpoint latest",
    "sidesave.client.runs.history": "history",
    "sidesave.writer_daemon.checkpoints.info": "CheckpointInfo",
    "sidesave.client.runs.watch": "hold watch",
    "sidesave.client.saving.handle": "SaveHandle",
    "sidesave.client.saving.mirroring": "MirrorStatus",
    "sidesave.client.training.keep_policies": (
        "KeepBest KeepEveryMinutes KeepEverySteps KeepLatest KeepPolicy KeepSteps "
    ),
    "sidesave.client.training.manager": "CheckpointManager",
    "sidesave.client.training.save_policies": (
        "AtSteps BeforeTraining Ephemeral EverySeconds EverySteps FirstStep LastStep OnException "
        "OnRequest OnSignal OptimalInterval PolicyContext SavePolicy"
    ),
    "sidesave.errors": "SidesaveError",
    "sidesave.stager.state.annotations": "Frozen PerRank Replicated",
    "sidesave.stager.tables": "ChangeTracking Column RowChanges RowTable owner_of",
    "sidesave.writer_daemon.options": "DaemonOptions",
}
_ELSEWHERE = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sidesave' has no attribute {name!r}")
    if name not in _ELSEWHERE:
        return importlib.import_module(f"sidesave.{name}")
    value = getattr(importlib.import_module(_ELSEWHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
