"""The options of a checkpointer, checked; and keyword arguments that are passed on, by name and type."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast

import torch

from sidesave.client.encryption import Encryption
from sidesave.client.loading.rename import Rename
from sidesave.errors import InvalidArgumentError, brief
from sidesave.writer_daemon.protocol import DaemonOptions
from sidesave.writer_daemon.storage import urls


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a :class:`~sidesave.Checkpointer`; ``daemon`` is the part that is passed to its daemons.

    Making one raises ``InvalidArgumentError`` for what makes no sense.
    """

    slots: int
    max_host_memory_bytes: int | None
    overlap: bool | None
    validate: bool
    on_error: str
    max_consecutive_failures: int
    on_busy: str
    busy_timeout_s: float
    allow_pickle: bool
    daemon: DaemonOptions
    encryption: Encryption | None = None

    def __post_init__(self) -> None:
        daemon = self.daemon
        given = cast("object", self.encryption)
        _require("encryption", given, "a sidesave.Encryption", given is None or isinstance(given, Encryption))
        _require("slots", self.slots, "1 or more", type(self.slots) is int and self.slots >= 1)
        most = self.max_host_memory_bytes
        _require("max_host_memory_bytes", most, "positive", most is None or most >= 1)
        _require("on_error", self.on_error, "'raise' or 'warn'", self.on_error in ("raise", "warn"))
        _require("on_busy", self.on_busy, "'wait' or 'skip'", self.on_busy in ("wait", "skip"))
        _require("nice", daemon.nice, "0 to 19", 0 <= daemon.nice <= 19)
        kinds = ("", "idle", "best-effort")
        _require("io_class", daemon.io_class, "'', 'idle' or 'best-effort'", daemon.io_class in kinds)
        for options, name in ((self, "max_consecutive_failures"), (daemon, "retries")):
            count = getattr(options, name)
            _require(name, count, "an int, 0 or more", type(count) is int and count >= 0)
        timeouts = ("stall_timeout_s", "takeover_timeout_s", "commit_timeout_s")
        for options, name in ((self, "busy_timeout_s"), *((daemon, name) for name in timeouts)):
            seconds = getattr(options, name)
            is_one = type(seconds) in (int, float) and 0 < seconds < float("inf")
            _require(name, seconds, "a positive number of seconds", is_one)

    @property
    def bearable_failures(self) -> int:
        """How many failed saves in a row are only warned of."""
        return self.max_consecutive_failures if self.on_error == "warn" else 0

    def check_shared(self) -> None:
        """Raise ``InvalidArgumentError`` for options that only a process that saves alone can use."""
        if self.daemon.fallback_directory:
            text = "fallback_directory is for a process that saves alone; ranks share one directory"
            raise InvalidArgumentError(text)
        if self.on_busy == "skip" and not _managed.get():
            text = "a save takes all ranks, which CheckpointManager has agree on what is skipped"
            raise InvalidArgumentError(f'on_busy="skip" is for a process that saves alone: {text}')


@contextmanager
def of_manager() -> Generator[None]:
    """Checkpointers that are made in the block have a manager, which skips on all ranks or on none."""
    token = _managed.set(True)
    try:
        yield
    finally:
        _managed.reset(token)


_managed: ContextVar[bool] = ContextVar("_managed", default=False)


def default_stall_timeout_s(directory: str) -> float:
    """After how long without a byte moved a save to a run directory, or its URL, fails: in seconds."""
    return 900.0 if urls.is_url(directory) else 300.0


def check_cores(cpus: object) -> tuple[int, ...]:
    """The cores that a daemon may use."""
    shown = brief(cpus)
    cores = cast("list[Any]", list(cast("Iterable[Any]", cpus)) if isinstance(cpus, Iterable) else [None])
    if not all(type(core) is int and core >= 0 for core in cores):
        raise InvalidArgumentError(f"cpus must be numbers of cores in a list, not {shown}")
    last = os.sysconf("SC_NPROCESSORS_CONF") - 1
    if max(cores, default=0) > last:
        raise InvalidArgumentError(f"cpus={shown}: this machine has cores 0 to {last}")
    return tuple(cores)


def _require(name: str, value: object, what: str, holds: bool) -> None:
    if not holds:
        raise InvalidArgumentError(f"{name} must be {what}, not {brief(value)}")


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
    stall_timeout_s: float | None
    takeover_timeout_s: float
    commit_timeout_s: float
    distributed: bool
    process_group: torch.distributed.ProcessGroup | None
    node_local: bool
    allow_pickle: bool
    nice: int
    io_class: Literal["", "idle", "best-effort"]
    cpus: Sequence[int]
    storage_options: Mapping[str, Any] | None
    mirror: str | os.PathLike[str] | None
    mirror_bandwidth: int | None
    encryption: Encryption | None


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
