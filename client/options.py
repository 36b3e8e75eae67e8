"""The options of a checkpointer and their checks, and types of keyword arguments passed on."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, cast

import torch

from sidesave.client.encryption import Encryption
from sidesave.client.loading.load_filter import Rename
from sidesave.errors import InvalidArgumentError, brief
from sidesave.writer_daemon.options import DaemonOptions
from sidesave.writer_daemon.save_record import SaveRecord

PathLike = str | os.PathLike[str]
Observer = Callable[[SaveRecord], object]
"""Called with a record when a save begins, and again with its outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingOptions:
    """Host memory for the state, and when the state is copied there.

    Attributes:
        slots: Number of saves that can be under way. Each takes host memory of the state's size,
            from the time when a save first meets a busy slot until it was not needed for 20 saves.
        node_memory_bytes: The most host memory for the slots of all ranks of a machine, in bytes
            (int) or as a fraction of its memory (float; in a memory cgroup also of its limit).
            Ranks get equal shares. None means what is available.
        on_busy: If all slots are busy, ``"wait"`` for one or ``"skip"`` the save.
        overlap: Copy owned tensors while training goes on: None for CUDA tensors, True for CPU
            tensors too, False never.
        validate: Compare all bytes, not samples, to find tensors that changed while they were
            copied; for debugging.
    """

    slots: int = 2
    node_memory_bytes: float | None = None
    on_busy: Literal["wait", "skip"] = "wait"
    overlap: bool | None = None
    validate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureOptions:
    """Retries, a fallback and tolerance for saves that storage refuses.

    A failed save is raised by the next ``save()``, ``wait()`` or ``close()``, unless its error was
    read from a future of its handle. With several ranks the next ``save()`` only logs it, since
    ranks may have read different futures.

    Attributes:
        retries: Further tries, in the background, after an error that may be gone a second later,
            such as a server that does not answer. A full disk is not retried.
        fallback_directory: A run directory on another file system, for saves that the first one
            refuses for good. Its checkpoints are found like the others, also by later sessions
            without this option. Slots are then held until the commit. For one rank only.
        tolerated: Number of failed saves in a row that are only warned of. The next failure is
            raised, and each one after it, until a save is committed.
    """

    retries: int = 2
    fallback_directory: PathLike | None = None
    tolerated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorOptions:
    """A second place for committed checkpoints.

    The daemon copies them there after the commit, and no save waits for it. What a session leaves
    uncopied is copied after its end, or by the next session. Loading also finds checkpoints that
    are only there.

    Attributes:
        place: A directory, such as one on a network file system, or a URL.
        bandwidth: Limit in bytes per second; None means no limit.
        backlog: If unmirrored checkpoints fill the disk, ``"fail"`` the save, or ``"drop"`` the
            oldest of them; that needs a ``CheckpointManager``.
    """

    place: PathLike
    bandwidth: int | None = None
    backlog: Literal["fail", "drop"] = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one :class:`~sidesave.Checkpointer` that its session reads.

    Making one raises ``InvalidArgumentError`` for options that are invalid. The groups do not check
    themselves: a rank that raised before it meets the others would have them wait for it.
    """

    staging: StagingOptions
    failures: FailureOptions
    daemon: DaemonOptions
    mirror: MirrorOptions | None = None
    allow_pickle: bool = False
    encryption: Encryption | None = None
    observers: Sequence[Observer] = ()

    def __post_init__(self) -> None:
        for name, kind in (
            ("staging", StagingOptions),
            ("failures", FailureOptions),
            ("daemon", DaemonOptions),
        ):
            group = getattr(self, name)
            _require(name, group, f"a sidesave.{kind.__name__}", isinstance(group, kind))
        given = cast("object", self.encryption)
        _require(
            "encryption",
            given,
            "a sidesave.Encryption",
            given is None or isinstance(given, Encryption),
        )
        are_functions = isinstance(cast("object", self.observers), Sequence) and all(
            map(callable, self.observers)
        )
        _require(
            "observers",
            self.observers,
            "a sequence of functions that take a SaveRecord",
            are_functions,
        )
        staging, failures, daemon, mirror = self.staging, self.failures, self.daemon, self.mirror
        check_staging(staging)
        for name in ("retries", "tolerated"):
            count = getattr(failures, name)
            _require(f"FailureOptions.{name}", count, "an int, 0 or more", _is_count(count))
        _require(
            "DaemonOptions.nice",
            daemon.nice,
            "an int, 0 to 19",
            _is_count(daemon.nice) and daemon.nice <= 19,
        )
        _check_cores(daemon.cpus)
        if daemon.stall_timeout_s is not None:
            _require_seconds("stall_timeout_s", daemon.stall_timeout_s)
        _require_seconds("takeover_timeout_s", daemon.takeover_timeout_s)
        _require_seconds("commit_timeout_s", daemon.commit_timeout_s)
        if mirror is not None:
            limit = mirror.bandwidth
            is_one = limit is None or _is_count(limit, 1)
            _require(
                "MirrorOptions.bandwidth",
                limit,
                "an int of bytes per second, 1 or more, or None",
                is_one,
            )
            _require(
                "MirrorOptions.backlog",
                mirror.backlog,
                "'fail' or 'drop'",
                mirror.backlog in ("fail", "drop"),
            )
            if mirror.backlog == "drop" and not _managed.get():
                raise InvalidArgumentError(
                    "MirrorOptions.backlog='drop' needs a CheckpointManager, whose policies say "
                    "what may be dropped"
                )

    @property
    def slot_patience_s(self) -> float:
        """Seconds without a byte moved by any save, after which a save gives up waiting for a slot.

        A daemon that answers has failed each save that hangs by then, which frees the slot.
        """
        stall_timeout_s = (
            900.0 if self.daemon.stall_timeout_s is None else self.daemon.stall_timeout_s
        )
        return stall_timeout_s + self.daemon.commit_timeout_s

    def check_shared(self) -> None:
        """Raise ``InvalidArgumentError`` for options that only a process saving alone can use."""
        if self.failures.fallback_directory is not None:
            text = (
                "FailureOptions.fallback_directory is for a process that saves alone; ranks share "
                "one directory"
            )
            raise InvalidArgumentError(text)
        if self.staging.on_busy == "skip" and not _managed.get():
            text = (
                "ranks must skip the same saves: use a CheckpointManager, whose ranks agree on them"
            )
            raise InvalidArgumentError(
                f"StagingOptions.on_busy='skip' is for a process that saves alone: {text}"
            )

    def check_slots(self, slots: object) -> None:
        """Raise unless ``slots`` is a number of slots that can be prepared."""
        most = self.staging.slots
        is_one = _is_count(slots, 1) and cast("int", slots) <= most
        _require("slots", slots, f"an int from 1 to {most} (StagingOptions.slots)", is_one)


def check_staging(staging: StagingOptions) -> None:
    """Raise ``InvalidArgumentError`` for invalid options."""
    _require(
        "StagingOptions.slots", staging.slots, "an int, 1 or more", _is_count(staging.slots, 1)
    )
    _require(
        "StagingOptions.on_busy",
        staging.on_busy,
        "'wait' or 'skip'",
        staging.on_busy in ("wait", "skip"),
    )
    _require(
        "StagingOptions.node_memory_bytes",
        staging.node_memory_bytes,
        "an int of bytes, a float above 0.0 and up to 1.0, or None",
        _is_amount(staging.node_memory_bytes),
    )


@contextmanager
def of_manager() -> Generator[None]:
    """Checkpointers made in the block have a manager, which skips on all ranks or on none."""
    token = _managed.set(True)
    try:
        yield
    finally:
        _managed.reset(token)


_managed: ContextVar[bool] = ContextVar("_managed", default=False)


def _is_count(value: object, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _is_amount(value: float | None) -> bool:
    is_fraction = type(value) is float and 0 < value <= 1
    return value is None or is_fraction or _is_count(value, 1)


def _require_seconds(name: str, seconds: float) -> None:
    is_one = type(seconds) in (int, float) and 0 < seconds < float("inf")
    _require(f"DaemonOptions.{name}", seconds, "a positive number of seconds", is_one)


def _check_cores(cpus: object) -> None:
    """Raise unless these are cores of this machine; a list travels in BOOT as a tuple does."""
    shown = brief(cpus)
    cores = cast("Sequence[Any]", cpus if isinstance(cpus, (tuple, list)) else [None])
    if not all(map(_is_count, cores)):
        raise InvalidArgumentError(
            f"DaemonOptions.cpus must be a tuple of core numbers, not {shown}"
        )
    last = os.sysconf("SC_NPROCESSORS_CONF") - 1
    if max(cores, default=0) > last:
        raise InvalidArgumentError(
            f"DaemonOptions.cpus={shown}: this machine has cores 0 to {last}"
        )


def _require(name: str, value: object, expected: str, holds: bool) -> None:
    if not holds:
        raise InvalidArgumentError(f"{name} must be {expected}, not {brief(value)}")


class CheckpointerOptions(TypedDict, total=False):
    """The keyword arguments of :class:`~sidesave.Checkpointer`, which documents them."""

    process_group: torch.distributed.ProcessGroup | None
    distributed: bool
    node_local: bool
    allow_pickle: bool
    storage_options: Mapping[str, Any] | None
    mirror: PathLike | MirrorOptions | None
    encryption: Encryption | None
    observers: Sequence[Observer]
    staging: StagingOptions
    failures: FailureOptions
    daemon: DaemonOptions


class LoadOptions(TypedDict, total=False):
    """Keyword arguments of ``Checkpointer.load`` besides step and target; see there."""

    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    rename: Rename | None
    strict: bool
    dtype: torch.dtype | None
    verify: bool
    allow_pickle: bool | None


class ExportOptions(TypedDict, total=False):
    """Keyword arguments of :func:`sidesave.export` besides checkpoint and target; see there."""

    item: str | None
    include: str | Sequence[str] | None
    exclude: str | Sequence[str] | None
    keep_prefix: bool
    dtype: torch.dtype | None
    max_shard_nbytes: int
