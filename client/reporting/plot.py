"""A picture of the cost of saves over a run, from its log; drawn by matplotlib."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from sidesave.client.reporting.whole_file import write_whole
from sidesave.client.runs.history import history
from sidesave.errors import CheckpointNotFoundError, InvalidArgumentError
from sidesave.writer_daemon.save_record import SaveRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_UPPER: Final = ("staged", "stall")
_LOWER: Final = ("written", "committed")
_MILLISECONDS: Final = 1000


def draw(run: str | os.PathLike[str], output: str | os.PathLike[str]) -> int:
    """Plot the saves of a run directory into the file ``output``; return their number.

    The suffix of ``output`` sets the format. The upper plot shows how long ``save()`` blocked
    training, and the time until the state was staged; the lower one the times until it was durable
    and committed. Both mark failed and skipped saves and restarts. Lines are interrupted where a
    run resumed from an earlier step.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message names the command to install
            it.
        CheckpointNotFoundError: The directory does not exist, or has no log of saves.
        InvalidArgumentError: matplotlib does not support the format.
        OSError: The file cannot be written.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        hint = "sidesave plot needs matplotlib, which an extra brings: pip install 'sidesave[plot]'"
        raise ModuleNotFoundError(hint, name=error.name) from None
    records = [record for record in history(run) if record.outcome != "saving"]
    if not records:
        raise CheckpointNotFoundError(
            2, "the log of this run directory has no saves", os.fspath(run)
        )
    name = os.path.basename(os.path.abspath(run)).encode(errors="replace").decode()
    figure = picture_of(records, f"saves of {name}")
    picture = io.BytesIO()
    kind = os.path.splitext(output)[1].lstrip(".") or "png"
    try:
        figure.savefig(picture, format=kind, dpi=120)
    except ValueError as error:
        raise InvalidArgumentError(f"{os.fspath(output)}: {error}") from error
    write_whole(os.fspath(output), picture.getvalue())
    return len(records)


def picture_of(records: list[SaveRecord], title: str) -> Figure:
    """The picture of these saves, in the order of their calls."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a display

    figure = Figure(figsize=(10, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    _draw_lines(upper, records, _UPPER, _MILLISECONDS)
    _draw_lines(lower, records, _LOWER, 1)
    for axes, unit in ((upper, "ms"), (lower, "s")):
        _mark_losses(axes, records)
        _mark_restarts(axes, records)
        axes.set_ylabel(f"after the call, {unit}")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        # beside the axes: within them it would hide points
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    lower.set_xlabel("step")
    upper.set_title(title, parse_math=False)
    return figure


def _draw_lines(axes: Axes, records: list[SaveRecord], phases: Sequence[str], scale: float) -> None:
    for phase in phases:
        steps: list[float] = []
        times: list[float] = []
        earlier: SaveRecord | None = None
        for record in records:
            seconds = record.seconds(phase)
            if seconds is None:
                continue
            if earlier is not None and (
                record.session != earlier.session or record.step <= earlier.step
            ):
                steps.append(float("nan"))  # a gap
                times.append(float("nan"))
            steps.append(record.step)
            times.append(seconds * scale)
            earlier = record
        axes.plot(steps, times, marker="o", markersize=3, linewidth=1, label=phase)


def _mark_losses(axes: Axes, records: list[SaveRecord]) -> None:
    """A vertical line for each failed or skipped save."""
    for outcomes, color in (
        (("failed", "removed", "unknown"), "tab:red"),
        (("skipped",), "tab:gray"),
    ):
        for number, record in enumerate(
            [record for record in records if record.outcome in outcomes]
        ):
            label = " or ".join(outcomes) if number == 0 else None
            axes.axvline(record.step, color=color, linewidth=1, linestyle=":", label=label)


def _mark_restarts(axes: Axes, records: list[SaveRecord]) -> None:
    """A vertical line at the first save of each later session."""
    seen = {records[0].session}
    for record in records:
        if record.session not in seen:
            label = "restart" if len(seen) == 1 else None
            axes.axvline(
                record.step, color="tab:green", linewidth=1, linestyle="--", zorder=0.5, label=label
            )
            seen.add(record.session)
