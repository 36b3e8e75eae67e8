"""Keep policies: a checkpoint stays while any policy of a list wants it.

A policy is a pure function of the existing checkpoints. This module does not import torch.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, cast

from sidesave.client.training.metadata import is_ephemeral, metric_of
from sidesave.errors import InvalidArgumentError, brief
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo


class KeepPolicy(ABC):
    """Base class: says which checkpoints to keep. Derive from it to write your own."""

    @abstractmethod
    def wanted(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        """The steps to keep of ``checkpoints``, which come in commit order.

        Must be pure, and the same on all ranks.
        """


@dataclass(frozen=True, slots=True)
class KeepLatest(KeepPolicy):
    """Keep the ``n`` latest checkpoints, by commit."""

    n: int = 1

    def __post_init__(self) -> None:
        check_count("KeepLatest", self.n)

    def wanted(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        """The last ones."""
        return [info.step for info in checkpoints[-self.n :]]


@dataclass(frozen=True, slots=True)
class KeepEverySteps(KeepPolicy):
    """Keep steps with ``step % n == offset``; if such a step was not saved, the next one that was.

    So a run that saves by time keeps about one in ``n`` steps too.
    """

    n: int
    offset: int = 0

    def __post_init__(self) -> None:
        check_every("KeepEverySteps", self.n, self.offset)

    def wanted(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        """The first step at or after each multiple of ``n``; for the offset only that very step."""
        kept: dict[int, int] = {}
        for info in checkpoints:
            period, beyond = divmod(info.step - self.offset, self.n)
            if period > 0 or (period == 0 and beyond == 0):
                kept[period] = min(info.step, kept.get(period, info.step))
        return [*kept.values()]


@dataclass(frozen=True, slots=True)
class KeepEveryMinutes(KeepPolicy):
    """Keep the oldest checkpoint, and each saved ``minutes`` or more after the last one kept."""

    minutes: float

    def __post_init__(self) -> None:
        check_positive("KeepEveryMinutes", "minutes", self.minutes)

    def wanted(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        """One of each period; a clock that was set back starts a new period."""
        kept: list[CheckpointInfo] = []
        for info in checkpoints:
            if not kept or not 0 <= info.created_s - kept[-1].created_s < 60 * self.minutes:
                kept.append(info)
        return [info.step for info in kept]


@dataclass(frozen=True, slots=True)
class KeepBest(KeepPolicy):
    """Keep the ``n`` checkpoints whose metric is lowest (``mode="min"``) or highest (``"max"``).

    Of equal values the newer is better. A checkpoint without this metric, or with NaN, is never
    among the best.
    """

    n: int = 1
    metric: str = ""
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        check_count("KeepBest", self.n)
        if not isinstance(self.metric, str) or not self.metric:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError(
                f"KeepBest needs the name of a metric: KeepBest({self.n}, metric='loss')"
            )
        if self.mode not in ("min", "max"):
            raise InvalidArgumentError(f"mode must be 'min' or 'max', not {self.mode!r}")

    def wanted(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        """The best ones."""
        sign = -1 if self.mode == "min" else 1
        ranked = [
            (sign * value, place, info.step)
            for place, info in enumerate(checkpoints)
            if (value := metric_of(info, self.metric)) is not None and not math.isnan(value)
        ]
        return [step for _, _, step in sorted(ranked)[-self.n :]]


@dataclass(frozen=True, slots=True, init=False)
class KeepSteps(KeepPolicy):
    """Keep these steps."""

    steps: tuple[int, ...]

    def __init__(self, steps: Iterable[int]) -> None:
        object.__setattr__(self, "steps", check_steps("KeepSteps", steps))

    def wanted(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        """Those steps."""
        return self.steps


def to_delete(
    checkpoints: Sequence[CheckpointInfo],
    policies: Sequence[KeepPolicy],
    pinned: AbstractSet[int] = frozenset(),
    loading: AbstractSet[int] = frozenset(),
) -> list[int]:
    """The steps to delete, ephemeral ones first, then the oldest.

    Args:
        checkpoints: All checkpoints, in any order.
        policies: What to keep; without any, all but ephemeral checkpoints are kept.
        pinned: Steps that are never deleted.
        loading: Steps that are being read.
    """
    ordered = sorted(checkpoints, key=lambda info: info.order)
    persistent = [info for info in ordered if not is_ephemeral(info)]
    kept = {*pinned, *loading, *(info.step for info in ordered[-1:])}
    steps = {info.step for info in persistent}
    for policy in policies:
        kept |= steps.intersection(policy.wanted(persistent))
    if not policies:
        kept |= steps
    surplus = [info for info in ordered if info.step not in kept]
    surplus.sort(key=lambda info: (not is_ephemeral(info), info.position))
    return list(dict.fromkeys(info.step for info in surplus))


def check_keep_policies(keep: object) -> tuple[KeepPolicy, ...]:
    """Return the policies in ``keep=``, one or several.

    Raises ``InvalidArgumentError`` for anything that is not a policy, or the same policy twice.
    """
    items = cast("Iterable[object]", keep) if isinstance(keep, Iterable) else (keep,)
    policies: list[KeepPolicy] = []
    for policy in items:
        if not isinstance(policy, KeepPolicy):
            raise InvalidArgumentError(
                f"keep takes policies such as sidesave.KeepLatest(3), not {brief(policy)}"
            )
        if policy in policies:
            raise InvalidArgumentError(f"keep has {policy!r} twice")
        policies.append(policy)
    return tuple(policies)


def check_count(what: str, n: int) -> None:
    """Check a number of checkpoints or steps: an int, 1 or more."""
    if type(n) is not int or n < 1:
        raise InvalidArgumentError(f"{what} takes an int, 1 or more, not {brief(n)}")


def check_every(what: str, n: int, offset: int) -> None:
    """Check an interval of ``n`` steps and its offset."""
    check_count(what, n)
    if type(offset) is not int or not 0 <= offset < n:
        raise InvalidArgumentError(
            f"the offset of {what}({n}) must be an int from 0 to {n - 1}, not {brief(offset)}"
        )


def check_steps(what: str, steps: Iterable[int]) -> tuple[int, ...]:
    """Check steps, each an int, 0 or more; returns them sorted."""
    try:
        listed = sorted({operator.index(step) for step in steps})
    except TypeError:
        listed = []
    if not listed or listed[0] < 0:
        raise InvalidArgumentError(f"{what} takes ints, 0 or more, in a list, not {brief(steps)}")
    return tuple(listed)


def check_positive(what: str, name: str, value: float) -> None:
    """Check a positive, finite number."""
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise InvalidArgumentError(
            f"{name} of {what} must be a positive number, not {brief(value)}"
        )
