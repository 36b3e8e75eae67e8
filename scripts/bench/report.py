"""What a benchmark prints: series of figures, aligned Markdown tables, bar charts, the machine they
come from.
"""

import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

Row = Sequence[str]
Series = Sequence[float]


def spread(values: Series, scale: float = 1.0, digits: int = 2) -> str:
    """Format ``min / median / max``; a dash where nothing was measured."""
    if not values:
        return "-"
    return " / ".join(
        f"{scale * v:.{digits}f}" for v in (min(values), statistics.median(values), max(values))
    )


def median(values: Series, scale: float = 1.0, digits: int = 2) -> str:
    """Format the median; a dash where nothing was measured."""
    return f"{scale * statistics.median(values):.{digits}f}" if values else "-"


def ratios(values: Series, to: Series) -> list[float]:
    """Divide round by round; rounds in which either figure is not positive say nothing and are left
    out.
    """
    return [value / base for value, base in zip(values, to, strict=False) if value > 0 and base > 0]


def rate(nbytes: int, seconds: Series) -> list[float]:
    """Turn durations into GB/s."""
    return [nbytes / s / 1e9 for s in seconds]


def table(header: Row, rows: Sequence[Row]) -> str:
    """Return a Markdown table that also lines up as plain text: first column to the left, others to
    the right.
    """
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(row: Row) -> str:
        cells = [
            row[0].ljust(widths[0]),
            *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
        ]
        return f"| {' | '.join(cells)} |"

    rule = f"|{'-' * (widths[0] + 2)}|{'|'.join('-' * (width + 1) + ':' for width in widths[1:])}|"
    return "\n".join([line(header), rule, *map(line, rows)])


def filesystem(path: Path) -> str:
    """Return type and device of the filesystem under ``path``."""
    resolved = str(path.resolve())
    inside = [p for p in psutil.disk_partitions(all=True) if resolved.startswith(p.mountpoint)]
    best = max(inside, key=lambda partition: len(partition.mountpoint), default=None)
    return best.fstype if best else "unknown filesystem"


def machine(directory: Path) -> str:
    """Describe in one line what the figures were taken on."""
    facts = [
        f"{len(os.sched_getaffinity(0))} cores",
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        filesystem(directory),
        f"Linux {platform.release()}",
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
    ]
    if torch.cuda.is_available():
        facts.append(torch.cuda.get_device_name())
    return ", ".join(facts)


@dataclass(frozen=True, slots=True)
class Panel:
    """One group of bars: a name and its measured values each."""

    title: str
    unit: str
    bars: Mapping[str, Series]


@dataclass(slots=True)
class Report:
    """Collects sections and panels, then prints them and writes what was asked for."""

    title: str
    sections: list[str] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a paragraph."""
        self.sections.append(text)

    def items(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Add a list of names and what is said of each."""
        if pairs:
            self.sections.append("\n".join(f"- **{name}**: {text}" for name, text in pairs))

    def table(self, header: Row, rows: Sequence[Row]) -> None:
        """Add a table."""
        self.sections.append(table(header, rows))

    def panel(self, title: str, unit: str, bars: Mapping[str, Series]) -> None:
        """Add a group of bars to the chart; series without a value are left out."""
        self.panels.append(
            Panel(title, unit, {name: values for name, values in bars.items() if values})
        )

    def publish(self, markdown: Path | None, chart: Path | None) -> None:
        """Print the report; write it to ``markdown`` and its chart to ``chart`` where these are
        given.
        """
        text = "\n\n".join([f"## {self.title}", *self.sections]) + "\n"
        sys.stdout.write(text)
        if markdown is not None:
            markdown.parent.mkdir(parents=True, exist_ok=True)
            markdown.write_text(text)
        if chart is not None:
            chart.parent.mkdir(parents=True, exist_ok=True)
            draw(self.title, self.panels, chart)


def draw(title: str, panels: Sequence[Panel], path: Path) -> None:
    """Write horizontal bars of medians, with whiskers from minimum to maximum, one panel beside the
    other.
    """
    from matplotlib.figure import Figure  # only a chart needs it

    figure = Figure(
        figsize=(6 * len(panels), 1.2 + 0.4 * max(len(p.bars) for p in panels)),
        layout="constrained",
    )
    figure.suptitle(title)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        names = list(panel.bars)
        medians = [statistics.median(values) for values in panel.bars.values()]
        below = [m - min(values) for m, values in zip(medians, panel.bars.values(), strict=True)]
        above = [max(values) - m for m, values in zip(medians, panel.bars.values(), strict=True)]
        colours = ["tab:orange" if name.startswith("sidesave") else "tab:blue" for name in names]
        bars = axes.barh(
            names, medians, xerr=[below, above], color=colours, ecolor="0.4", capsize=2
        )
        axes.bar_label(bars, fmt="%.3g", padding=4)
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set_title(panel.title)
        axes.set_xlabel(panel.unit)
    figure.savefig(path, dpi=150)
