"""The metadata that a manager writes with a checkpoint: metrics, kind of save, the user's facts.

Reading it does not need torch.
"""

from __future__ import annotations

import contextlib
import logging
import math
import numbers
from collections.abc import Collection, Mapping
from typing import Any, Final, SupportsFloat, cast

from sidesave.errors import InvalidArgumentError, brief
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo

logger = logging.getLogger(__name__)

METRICS: Final = "metrics"
EPHEMERAL: Final = "ephemeral"
SEED: Final = "seed"
EXCEPTION: Final = "exception"
USER: Final = "user"
Metrics = Mapping[str, SupportsFloat]


def encode_metadata(
    metrics: Mapping[str, float | str],
    user: Mapping[str, Any],
    *,
    ephemeral: bool,
    seed: bool,
    exception: BaseException | None,
) -> dict[str, Any]:
    """Return the metadata of a checkpoint."""
    about: dict[str, Any] = {METRICS: dict(metrics), EPHEMERAL: ephemeral, USER: dict(user)}
    if seed:
        about[SEED] = True
    if exception is not None:
        about[EXCEPTION] = type(exception).__name__
    return about


def as_numbers(
    step: int, metrics: Metrics | None, needed: Collection[str]
) -> dict[str, float | str]:
    """Return metrics for JSON, with NaN and infinity as text.

    Raises:
        InvalidArgumentError: A value is not a number, or one of the ``needed`` metrics is missing.
    """
    if metrics is None:
        if needed:
            logger.info("step %d is saved without metrics, so it cannot be the best", step)
        return {}
    if not isinstance(cast("object", metrics), Mapping):
        raise InvalidArgumentError(
            f"metrics must be a dict of numbers by name, not {brief(metrics)}"
        )
    missing = set(needed) - metrics.keys()
    if missing:
        raise InvalidArgumentError(
            f"KeepBest needs the metric {', '.join(sorted(missing))}, but step {step} was given "
            f"{', '.join(map(str, metrics)) or 'none'}"
        )
    values = {name: _number(name, value) for name, value in metrics.items()}
    return {
        name: number if math.isfinite(number) else repr(number) for name, number in values.items()
    }


def _number(name: str, value: SupportsFloat) -> float:
    import torch  # imported only here: reading metadata must not need torch

    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.item())
    if isinstance(value, numbers.Real):
        return float(value)
    hint = (
        "leave out what is not known"
        if cast("object", value) is None
        else f"not {type(value).__name__} {brief(value)}"
    )
    raise InvalidArgumentError(f"the metric {brief(name)} must be one number, {hint}")


def metric_of(info: CheckpointInfo, name: str) -> float | None:
    """Return a metric of a checkpoint; None if it was saved without it."""
    return metrics_of(info.metadata).get(name)


def metrics_of(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Return all metrics in the metadata of a checkpoint, in their order there."""
    metrics = metadata.get(METRICS)
    numbers_by_name: dict[str, float] = {}
    for name, value in cast("dict[str, Any]", metrics).items() if isinstance(metrics, dict) else ():
        if isinstance(value, (int, float, str)):
            with contextlib.suppress(ValueError, OverflowError):
                numbers_by_name[name] = float(value)
    return numbers_by_name


def is_ephemeral(info: CheckpointInfo) -> bool:
    """Whether a checkpoint is deleted once a newer one is committed."""
    return info.metadata.get(EPHEMERAL) is True


def is_seed(info: CheckpointInfo) -> bool:
    """Whether a checkpoint was saved before training began."""
    return info.metadata.get(SEED) is True
