"""The keyword arguments that ``CheckpointManager`` passes on, so that checkers know them by name and type."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, TypedDict

import torch

from sidesave.client.loading.rename import Rename


class CheckpointerOptions(TypedDict, total=False):
    """What :class:`~sidesave.Checkpointer` takes beside the directory; the meaning and the defaults are told there."""

    slots: int
    max_host_memory_bytes: int | None
    overlap: bool | None
    validate: bool
    on_error: Literal["raise", "warn"]
    max_consecutive_failures: int
    retries: int
    fallback_directory: str | os.PathLike[str] | None
    on_busy: Literal["wait", "skip"]
    busy_timeout_s: float
    stall_timeout_s: float
    takeover_timeout_s: float
    commit_timeout_s: float
    distributed: bool
    process_group: torch.distributed.ProcessGroup | None
    node_local: bool
    allow_pickle: bool
    nice: int
    io_class: Literal["", "idle", "best-effort"]
    cpus: Sequence[int]


class LoadOptions(TypedDict, total=False):
    """What ``Checkpointer.load`` takes beside step and target; the meaning and the defaults are told there."""

    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    rename: Rename | None
    strict: bool
    dtype: torch.dtype | None
    verify: bool
    allow_pickle: bool | None


class ExportOptions(TypedDict, total=False):
    """What :func:`sidesave.export` takes beside checkpoint and target; the meaning and the defaults are told there."""

    item: str | None
    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    keep_prefix: bool
    dtype: torch.dtype | None
    max_shard_nbytes: int
