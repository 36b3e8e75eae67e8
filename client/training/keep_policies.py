"""What to keep: small policies that combine in a list; a checkpoint stays while any of them wants it.

A policy is a pure function of the checkpoints there are. Nothing here imports torch.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, cast

from sidesave.client.runs.info import CheckpointInfo
from sidesave.client.training.metadata import is_ephemeral, metric_of
from sidesave.errors import InvalidArgumentError, brief


class KeepPolicy(ABC):
    """Says which checkpoints it wants kept; to write another one, derive from this."""

    @abstractmethod
    def wanted(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        """The steps to keep of ``checkpoints``, in the order of their commits; pure, and the same for all ranks."""


@dataclass(frozen=True, slots=True)
class KeepLatest(KeepPolicy):
    """Keep the ``n`` checkpoints that were committed last."""

    n: int = 1

    def __post_init__(self) -> None:
        """Check."""
        check_count("KeepLatest", self.n)

    def wanted(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        """The last ones."""
        return [info.step for info in checkpoints[-self.n :]]


@dataclass(frozen=True, slots=True)
class KeepEverySteps(KeepPolicy):
    """Keep the steps that ``n`` divides, counted from ``offset``; of a multiple that was not saved the next that was.

    So a run that saves by time keeps one in about ``n`` steps as well.
    """

    n: int
    offset: int = 0

    def __post_init__(self) -> None:
        """Check."""
        check_every("KeepEverySteps", self.n, self.offset)

    def wanted(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        """The first at or after each multiple of ``n``; of the offset itself only that step."""
        kept: dict[int, int] = {}
        for info in checkpoints:
            period, beyond = divmod(info.step - self.offset, self.n)
            if period > 0 or (period == 0 and beyond == 0):
                kept[period] = min(info.step, kept.get(period, info.step))
        return [*kept.values()]


@dataclass(frozen=True, slots=True)
class KeepEveryMinutes(KeepPolicy):
    """Keep one checkpoint per ``minutes``: the oldest, and each that was saved so much after the one kept before."""

    minutes: float

    def __post_init__(self) -> None:
        """Check."""
        check_positive("KeepEveryMinutes", "minutes", self.minutes)

    def wanted(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        """One of each period; a clock that was set back begins another."""
        kept: list[CheckpointInfo] = []
        for info in checkpoints:
            if not kept or not 0 <= info.created_s - kept[-1].created_s < 60 * self.minutes:
                kept.append(info)
        return [info.step for info in kept]


@dataclass(frozen=True, slots=True)
class KeepBest(KeepPolicy):
    """Keep the ``n`` checkpoints with the lowest (``mode="min"``) or highest (``"max"``) value of a metric.

    Of equal values the newer counts. NaN, and a checkpoint that was saved without this metric, is never among the best.
    """

    n: int = 1
    metric: str = ""
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        """Check."""
        check_count("KeepBest", self.n)
        if not isinstance(self.metric, str) or not self.metric:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgumentError(f"KeepBest needs the name of a metric: KeepBest({self.n}, metric='loss')")
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
        """Any number of steps."""
        object.__setattr__(self, "steps", check_steps("KeepSteps", steps))

    def wanted(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        """Those that are there."""
        return self.steps


def to_delete(
    checkpoints: Sequence[CheckpointInfo],
    policies: Sequence[KeepPolicy],
    pinned: AbstractSet[int] = frozenset(),
    loading: AbstractSet[int] = frozenset(),
) -> list[int]:
    """The steps to delete, ephemeral ones first and then the oldest.

    Args:
        checkpoints: All there are, in any order.
        policies: What to keep; without one all but ephemeral checkpoints are kept.
        pinned: Steps that are never deleted.
        loading: Steps that somebody reads.
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
    surplus.sort(key=lambda info: (not is_ephemeral(info), info.sequence))
    return list(dict.fromkeys(info.step for info in surplus))


def check_keep_policies(keep: object) -> tuple[KeepPolicy, ...]:
    """The policies that ``keep=`` means, one or several; ``InvalidArgumentError`` for what is none, or given twice."""
    items = cast("Iterable[object]", keep) if isinstance(keep, Iterable) else (keep,)
    policies: list[KeepPolicy] = []
    for policy in items:
        if not isinstance(policy, KeepPolicy):
            raise InvalidArgumentError(f"keep takes policies such as sidesave.KeepLatest(3), not {brief(policy)}")
        if policy in policies:
            raise InvalidArgumentError(f"keep has {policy!r} twice")
        policies.append(policy)
    return tuple(policies)


def check_count(what: str, n: int) -> None:
    """A number of checkpoints or steps: an int, 1 or more."""
    if type(n) is not int or n < 1:
        raise InvalidArgumentError(f"{what} takes an int, 1 or more, not {brief(n)}")


def check_every(what: str, n: int, offset: int) -> None:
    """Every n-th step, counted from an offset."""
    check_count(what, n)
    if type(offset) is not int or not 0 <= offset < n:
        raise InvalidArgumentError(f"the offset of {what}({n}) must be an int from 0 to {n - 1}, not {brief(offset)}")


def check_steps(what: str, steps: Iterable[int]) -> tuple[int, ...]:
    """Any number of steps, each an int, 0 or more; sorted."""
    try:
        listed = sorted({operator.index(step) for step in steps})
    except TypeError:
        listed = []
    if not listed or listed[0] < 0:
        raise InvalidArgumentError(f"{what} takes ints, 0 or more, in a list, not {brief(steps)}")
    return tuple(listed)


def check_positive(what: str, name: str, value: float) -> None:
    """An amount of time: positive and finite."""
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise InvalidArgumentError(f"{name} of {what} must be a positive number, not {brief(value)}")
