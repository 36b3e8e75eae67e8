"""What the demo measured: a table for the terminal and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from demo_lib import Event


def read_log(path: Path) -> list[Event]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(events: list[Event]) -> dict[int, str]:
    """The last loss of each step, as the hexadecimal text of the float."""
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


def step_times_ms(events: list[Event]) -> dict[int, float]:
    """The last time of each step, the call that saved it included."""
    times: dict[int, float] = {}
    for event in events:
        if event["event"] == "step":
            times[event["step"]] = event["step_s"] * 1e3
        elif event["event"] == "save":
            times[event["step"]] += event["call_s"] * 1e3
    return times


def table(plain: list[Event], saving: list[Event], killed_save: int | None) -> str:
    """Medians and maxima; the save whose daemon was killed stands apart, for a respawn is in its
    times.
    """
    calls_ms = {
        event["step"]: event["call_s"] * 1e3 for event in saving if event["event"] == "save"
    }
    times_ms = step_times_ms(saving)

    def after_ms(name: str, *, killed: bool) -> list[float]:
        return [
            event["after_s"] * 1e3
            for event in saving
            if event["event"] == name and (event["step"] == killed_save) == killed
        ]

    rows: dict[str, Iterable[float]] = {
        "save() call (the stall)": calls_ms.values(),
        "staged, from the call": after_ms("staged", killed=False),
        "written, from the call": after_ms("written", killed=False),
        "committed, from the call": after_ms("committed", killed=False),
        "committed, daemon killed": after_ms("committed", killed=True),
        "step, run without saving": step_times_ms(plain).values(),
        "step, run with saving": (
            value for step, value in times_ms.items() if step not in calls_ms
        ),
        "step that saves": (value for step, value in times_ms.items() if step in calls_ms),
    }
    lines = [f"{'ms':<26} {'count':>6} {'median':>8} {'max':>8}"]
    for name, values in rows.items():
        if found := list(values):
            lines.append(f"{name:<26} {len(found):>6} {median(found):>8.1f} {max(found):>8.1f}")
    return "\n".join(lines)


def draw(path: Path, plain: list[Event], saving: list[Event], kills: list[tuple[str, int]]) -> None:
    """Step times with and without saving; `kills` are (who, step)."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.add_subplot()
    times_ms = step_times_ms(saving)
    saved = sorted({event["step"] for event in saving if event["event"] == "save"})
    without_ms = step_times_ms(plain)
    axes.plot(
        list(without_ms),
        list(without_ms.values()),
        color="0.6",
        linewidth=1,
        label="without saving",
    )
    axes.plot(
        list(times_ms), list(times_ms.values()), color="tab:blue", linewidth=1, label="with saving"
    )
    axes.plot(
        saved,
        [times_ms[step] for step in saved],
        "o",
        color="tab:blue",
        markersize=4,
        label="steps that save",
    )
    for who, step in kills:
        color = "tab:red" if who == "daemon" else "tab:orange"
        axes.axvline(
            step,
            color=color,
            linestyle="--",
            linewidth=1.5,
            label=f"SIGKILL to the {who}, step {step}",
        )
    axes.set(
        xlabel="training step", ylabel="time of the step, save() call included (ms)", ylim=(0, None)
    )
    axes.set_title("Step times with and without saving")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)
    FigureCanvasAgg(figure).print_figure(path, dpi=120)
