"""A picture of the cost of saves over a run, from its log; drawn by matplotlib."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from sidesave.client.reading.whole_file import write_whole
from sidesave.client.runs.history import history
from sidesave.errors import CheckpointNotFoundError, InvalidArgumentError
from sidesave.writer_daemon.log import SaveRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Time = Callable[[SaveRecord], float | None]

_UPPER: Final[dict[str, _Time]] = {
    "staged": lambda record: record.staged_s,
    "stall": lambda record: record.stall_s,
}
_LOWER: Final[dict[str, _Time]] = {
    "written": lambda record: record.written_s,
    "committed": lambda record: record.committed_s,
}
_MILLISECONDS: Final = 1000


def draw(run: str | os.PathLike[str], output: str | os.PathLike[str]) -> int:
    """Draw the saves of a run directory into the file ``output``, whose ending names the format; returns how many.

    Above, how long ``save()`` held training up, and the time until the state was staged; below, the times until it was
    durable and committed; in both, saves that came to nothing, and the first one after each restart. Where a run went
    on from an earlier step, its lines begin anew.

    Raises:
        ModuleNotFoundError: There is no matplotlib; the message tells how to install it.
        CheckpointNotFoundError: There is no such directory, or no log of saves in it.
        InvalidArgumentError: matplotlib has no such format.
        OSError: The file cannot be written.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        hint = "sidesave plot needs matplotlib, which an extra brings: pip install 'sidesave[plot]'"
        raise ModuleNotFoundError(hint, name=error.name) from None
    records = [record for record in history(run) if record.outcome != "saving"]
    if not records:
        raise CheckpointNotFoundError(2, "the log of this run directory tells of no save", os.fspath(run))
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
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))  # beside the axes: within them it would hide points
    lower.set_xlabel("step")
    upper.set_title(title, parse_math=False)
    return figure


def _draw_lines(axes: Axes, records: list[SaveRecord], kinds: dict[str, _Time], scale: float) -> None:
    for name, time_of in kinds.items():
        steps: list[float] = []
        times: list[float] = []
        earlier: SaveRecord | None = None
        for record in records:
            seconds = time_of(record)
            if seconds is None:
                continue
            if earlier is not None and (record.session != earlier.session or record.step <= earlier.step):
                steps.append(float("nan"))  # a gap
                times.append(float("nan"))
            steps.append(record.step)
            times.append(seconds * scale)
            earlier = record
        axes.plot(steps, times, marker="o", markersize=3, linewidth=1, label=name)


def _mark_losses(axes: Axes, records: list[SaveRecord]) -> None:
    """A vertical line for each failed or skipped save."""
    for outcomes, color in ((("failed", "removed", "unknown"), "tab:red"), (("skipped",), "tab:gray")):
        for number, record in enumerate([record for record in records if record.outcome in outcomes]):
            label = " or ".join(outcomes) if number == 0 else None
            axes.axvline(record.step, color=color, linewidth=1, linestyle=":", label=label)


def _mark_restarts(axes: Axes, records: list[SaveRecord]) -> None:
    """A vertical line at the first save of each later session."""
    seen = {records[0].session}
    for record in records:
        if record.session not in seen:
            label = "restart" if len(seen) == 1 else None
            axes.axvline(record.step, color="tab:green", linewidth=1, linestyle="--", zorder=0.5, label=label)
            seen.add(record.session)
