"""Save statistics for Prometheus: text without a library, or a ``prometheus_client`` registry."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from sidesave.client.arguments import path_text
from sidesave.client.reporting.stats import BOUNDS_S, SaveSummary, Spread
from sidesave.client.reporting.whole_file import write_whole
from sidesave.errors import InvalidArgumentError
from sidesave.writer_daemon.save_record import PHASES

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import CollectorRegistry

Labels = Mapping[str, str]

_HELP: Final = {
    "stall": "Seconds that save() kept training waiting.",
    "staged": "Seconds from the call of save() until the state was in staging memory.",
    "written": "Seconds from the call of save() until the bytes of this rank were durable.",
    "committed": "Seconds from the call of save() until the checkpoint was committed.",
}


@dataclass(frozen=True, slots=True)
class _Family:
    """One metric; a sample is the suffix of its name, its labels and its value."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: list[tuple[str, dict[str, str], float]] = field(
        default_factory=list[tuple[str, dict[str, str], float]]
    )


def prometheus_text(summary: SaveSummary, labels: Labels | None = None) -> str:
    """Statistics in Prometheus' text format 0.0.4.

    Args:
        summary: The statistics of one rank.
        labels: Added to every sample, such as ``{"run": "exp1", "rank": "0"}``.

    Raises:
        InvalidArgumentError: Prometheus does not allow a label's name.
    """
    lines: list[str] = []
    for family in _families(summary, labels or {}):
        name = f"{family.name}_total" if family.kind == "counter" else family.name
        lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
        for suffix, about, value in family.samples:
            inner = ",".join(f'{label}="{_escaped(text)}"' for label, text in about.items())
            lines.append(f"{family.name}{suffix}{f'{{{inner}}}' if inner else ''} {_number(value)}")
    return "\n".join(lines) + "\n"


def write_prometheus_file(
    path: str | os.PathLike[str], summary: SaveSummary, labels: Labels | None = None
) -> None:
    """Replace the file ``path`` by statistics, for the textfile collector of ``node_exporter``.

    A reader sees the old text or the new one. The collector reads files ``*.prom`` in its
    directory, so each rank needs a file of its own there.

    Raises:
        InvalidArgumentError: Prometheus does not allow a label's name.
        OSError: The file cannot be written.
    """
    write_whole(path_text(path), prometheus_text(summary, labels).encode())


class Collector:
    """Offers statistics to a registry of ``prometheus_client``, which collects at each scrape."""

    def __init__(self, summary: Callable[[], SaveSummary], labels: Labels | None = None) -> None:
        """Collect what ``summary`` (such as ``manager.stats``) returns; each sample has ``labels``.

        Raises:
            ModuleNotFoundError: ``prometheus_client`` is not installed; the message names the
                command.
            InvalidArgumentError: A label's name is not valid in Prometheus.
        """
        try:
            from prometheus_client.core import Metric
        except ModuleNotFoundError as error:
            hint = (
                "metrics for a registry need prometheus_client, which an extra brings: pip install "
                "'sidesave[metrics]'"
            )
            raise ModuleNotFoundError(hint, name=error.name) from None
        self._metric = Metric
        self._summary = summary
        self._labels = dict(labels or {})
        _check_labels(self._labels)

    def register(self, registry: CollectorRegistry | None = None) -> None:
        """Register with ``registry``, by default the one that ``prometheus_client`` serves."""
        from prometheus_client import REGISTRY

        (registry or REGISTRY).register(self)  # pyright: ignore[reportArgumentType] - it asks for nothing but collect()

    def collect(self) -> Iterable[Metric]:
        """The current metrics; called by the registry."""
        for family in _families(self._summary(), self._labels):
            metric = self._metric(family.name, family.help, family.kind)
            for suffix, labels, value in family.samples:
                metric.add_sample(f"{family.name}{suffix}", labels, value)
            yield metric


def _families(summary: SaveSummary, labels: Labels) -> Iterator[_Family]:
    _check_labels(labels)
    about = dict(labels)
    saves = _Family("sidesave_saves", "counter", "Saves that have ended, by outcome.")
    saves.samples.extend(
        ("_total", {**about, "outcome": name}, count) for name, count in summary.counts.items()
    )
    yield saves
    total = "Bytes that this rank has written, of committed checkpoints."
    yield _Family(
        "sidesave_checkpoint_bytes", "counter", total, [("_total", about, summary.nbytes)]
    )
    for phase in PHASES:
        name = f"sidesave_save_{phase}_seconds"
        yield _Family(
            name, "histogram", _HELP[phase], list(_histogram(summary.spread(phase), about))
        )

    def gauge(name: str, text: str, value: float | None) -> _Family:
        return _Family(
            f"sidesave_{name}", "gauge", text, [] if value is None else [("", about, value)]
        )

    yield gauge("saves_under_way", "Saves without an outcome yet.", summary.under_way)
    yield gauge(
        "staging_bytes", "Host memory of this rank's staging slots.", summary.staging_nbytes
    )
    yield gauge(
        "stall_ratio",
        "Part of the run's time that training stood still in save().",
        summary.stall_share,
    )
    yield gauge(
        "write_bytes_per_second",
        "Median bytes per second, from call to durable.",
        summary.bandwidth,
    )
    yield gauge(
        "last_committed_step",
        "Step of the checkpoint that was committed last.",
        summary.last_committed_step,
    )
    yield gauge(
        "last_commit_timestamp_seconds", "When that was, since the epoch.", summary.last_commit_s
    )
    mirror = summary.mirror
    if mirror is None:
        return
    yield gauge(
        "mirror_backlog_checkpoints", "Checkpoints still to be mirrored.", mirror.checkpoints
    )
    yield gauge(
        "mirror_backlog_bytes",
        "Bytes of those.",
        None if mirror.checkpoints is None else mirror.nbytes,
    )
    yield gauge(
        "mirror_bytes_per_second",
        "Bytes per second that go to the mirror now.",
        mirror.nbytes_per_s,
    )
    yield gauge(
        "mirror_last_step",
        "Step that was mirrored last since the daemon started.",
        mirror.last_step,
    )
    yield gauge(
        "mirror_failing", "1 while the mirror cannot be written to.", int(mirror.error is not None)
    )


def _histogram(
    spread: Spread, labels: dict[str, str]
) -> Iterator[tuple[str, dict[str, str], float]]:
    below = 0
    for bound, count in zip([*map(_number, BOUNDS_S), "+Inf"], spread.classes, strict=True):
        below += count
        yield "_bucket", {**labels, "le": bound}, below
    yield "_count", labels, spread.count
    yield "_sum", labels, spread.total_s


def _check_labels(labels: Labels) -> None:
    for name in labels:
        if (
            not (name.isascii() and name.isidentifier())
            or name.startswith("__")
            or name in ("le", "outcome")
        ):
            raise InvalidArgumentError(f"{name!r} cannot be the name of a label here")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
