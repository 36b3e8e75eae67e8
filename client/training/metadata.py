"""What a manager tells of a checkpoint in its metadata: metrics, what kind of save it was, and the user's own facts.

To read them takes no torch.
"""

from __future__ import annotations

import contextlib
import logging
import math
import numbers
from collections.abc import Collection, Mapping
from typing import Any, Final, SupportsFloat, cast

from sidesave.client.runs.info import CheckpointInfo
from sidesave.errors import InvalidArgumentError, brief

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
    """The metadata of a checkpoint."""
    about: dict[str, Any] = {METRICS: dict(metrics), EPHEMERAL: ephemeral, USER: dict(user)}
    if seed:
        about[SEED] = True
    if exception is not None:
        about[EXCEPTION] = type(exception).__name__
    return about


def as_numbers(step: int, metrics: Metrics | None, needed: Collection[str]) -> dict[str, float | str]:
    """Metrics as plain JSON data, which has no NaN and no infinity: those are text.

    Raises:
        InvalidArgumentError: One is no number; or there are some, and not those ``needed``.
    """
    if metrics is None:
        if needed:
            logger.info("step %d is saved without metrics, so it cannot be the best", step)
        return {}
    if not isinstance(cast("object", metrics), Mapping):
        raise InvalidArgumentError(f"metrics must be a dict of numbers by name, not {brief(metrics)}")
    missing = set(needed) - metrics.keys()
    if missing:
        raise InvalidArgumentError(
            f"KeepBest needs the metric {', '.join(sorted(missing))}, and step {step} has been given "
            f"{', '.join(map(str, metrics)) or 'none'}"
        )
    found = {name: _number(name, value) for name, value in metrics.items()}
    return {name: number if math.isfinite(number) else repr(number) for name, number in found.items()}


def _number(name: str, value: SupportsFloat) -> float:
    import torch  # who only reads what was told does without

    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.item())
    if isinstance(value, numbers.Real):
        return float(value)
    hint = (
        "leave out what is not known" if cast("object", value) is None else f"not {type(value).__name__} {brief(value)}"
    )
    raise InvalidArgumentError(f"the metric {brief(name)} must be one number, {hint}")


def metric_of(info: CheckpointInfo, name: str) -> float | None:
    """A metric that a checkpoint was saved with; None where it has none of that name."""
    return metrics_of(info.metadata).get(name)


def metrics_of(metadata: Mapping[str, Any]) -> dict[str, float]:
    """All metrics that the metadata of a checkpoint tell, in the order of their names there."""
    metrics = metadata.get(METRICS)
    found: dict[str, float] = {}
    for name, value in cast("dict[str, Any]", metrics).items() if isinstance(metrics, dict) else ():
        if isinstance(value, (int, float, str)):
            with contextlib.suppress(ValueError, OverflowError):
                found[name] = float(value)
    return found


def is_ephemeral(info: CheckpointInfo) -> bool:
    """Whether a checkpoint was saved to be removed by the next one."""
    return info.metadata.get(EPHEMERAL) is True


def is_seed(info: CheckpointInfo) -> bool:
    """Whether a checkpoint was saved before training began."""
    return info.metadata.get(SEED) is True
