"""What ``sidesave ls`` shows of a run: its checkpoints, failed and skipped saves, and their leftovers."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, Final

import typer

from sidesave.client.cli.console import metrics_text, new_console, new_table, printable, size, when
from sidesave.client.runs import catalog
from sidesave.client.runs.history import history, is_live
from sidesave.client.runs.info import CheckpointInfo
from sidesave.client.runs.sharing import shared_nbytes
from sidesave.client.training.metadata import metrics_of
from sidesave.errors import FormatVersionError, SidesaveError
from sidesave.writer_daemon.format.manifest import parse_hidden_directory
from sidesave.writer_daemon.log import SaveRecord
from sidesave.writer_daemon.storage import urls

_FEW_WORDS: Final = 100
"""Characters of a reason."""
_FEW_METRICS: Final = 4
_OWNERS: Final = {
    True: "belongs to a live session",
    False: "left by a dead session: the next one, or sidesave recover, finishes or removes it",
    None: "belongs to a session elsewhere, which may be alive",
}


class Listing:
    """One look at a run directory."""

    def __init__(self, directory: str, *, every: bool) -> None:
        """Look; ``every`` includes all failed and skipped saves, not only those since the latest checkpoint."""
        self._directory = directory
        self._found = catalog.scan(directory)
        self._unreadable = _unreadable(directory, self._found)
        remote = urls.is_url(directory)  # where a copy of a run has no log to go by, and no sessions
        saves = [] if remote else history(directory)
        self._saves = [save for save in (saves if every else _since_latest(saves, self._found)) if not _is_listed(save)]
        self._leftovers = [] if remote else _leftovers(directory)
        self._latest = self._found[-1] if self._found else None
        newest = None if self._latest is None else (self._latest.step, self._latest.session)
        self._shared = shared_nbytes(self._found)
        self._lineage = catalog.lineage(self._found, newest)

    def _mark(self, info: CheckpointInfo) -> str:
        return "latest" if info is self._latest else "" if info.step in self._lineage else "superseded"

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        damaged, newer = ([path for _, path, is_newer in self._unreadable if is_newer is x] for x in (False, True))
        checkpoints = [
            {
                **asdict(info),
                "shared_nbytes": self._shared[info.path],
                "metrics": metrics_of(info.metadata),
                "mark": self._mark(info),
            }
            for info in self._found
        ]
        return {
            "run": self._directory,
            "checkpoints": checkpoints,
            "damaged": damaged,
            "newer": newer,
            "saves": [asdict(save) for save in self._saves],
            "leftovers": [asdict(leftover) for leftover in self._leftovers],
        }

    def show(self) -> None:
        """Print it for people."""
        console = new_console()
        if self._found or self._unreadable:
            metrics = {info.path: metrics_of(info.metadata) for info in self._found}
            extra_columns = ["metrics"] if any(metrics.values()) else []
            shares = any(self._shared.values())
            sizes = [">size", ">of its own"] if shares else [">size"]
            rows = new_table(">step", "saved", *sizes, "session", "parent", ">sequence", *extra_columns, "")
            for info in sorted(self._found, key=lambda info: info.sequence):
                parent = "" if info.parent is None else f"{info.parent[0]} of {info.parent[1]}"
                own = [size(info.nbytes - self._shared[info.path])] if shares else []
                about = (when(info.created_s), size(info.nbytes), *own, info.session, parent, str(info.sequence))
                values = [metrics_text(metrics[info.path], _FEW_METRICS)] if extra_columns else []
                rows.add_row(str(info.step), *about, *values, self._mark(info))
            for step, _, is_newer in self._unreadable:
                reason = "of a newer format: upgrade sidesave" if is_newer else "unreadable: see sidesave verify"
                rows.add_row(str(step), *[""] * (4 + len(sizes) + len(extra_columns)), reason)
            console.print(rows)
        else:
            typer.echo(f"no checkpoints in {printable(self._directory)}", err=True)
        if self._saves:
            rows = new_table(">step", "called", "session", "outcome", "")
            for save in self._saves:
                called = "" if save.called_s is None else when(save.called_s)
                rows.add_row(str(save.step), called, save.session, save.outcome, _reason(save))
            console.print()
            console.print(rows)
        if self._leftovers:
            rows = new_table("leftover", "")
            for leftover in self._leftovers:
                rows.add_row(leftover.name, _OWNERS[leftover.live])
            console.print()
            console.print(rows)


@dataclass(frozen=True, slots=True)
class _Leftover:
    """A hidden directory: a save that is under way, or that did not end well."""

    name: str
    step: int
    session: str
    state: str
    live: bool | None


def _leftovers(run: str) -> list[_Leftover]:
    parsed = {name: parse_hidden_directory(name) for name in sorted(os.listdir(run))}
    return [
        _Leftover(name, *facts, live=is_live(run, facts[1].partition("-")[0]))
        for name, facts in parsed.items()
        if facts
    ]


def _unreadable(run: str, checkpoints: list[CheckpointInfo]) -> list[tuple[int, str, bool]]:
    """Step directories that cannot be read: steps, paths, and whether their format is newer."""
    unreadable: list[tuple[int, str, bool]] = []
    for step, path in catalog.left_out(run, checkpoints):
        is_newer = False
        try:
            catalog.read_info(path)
        except (SidesaveError, OSError) as error:
            is_newer = isinstance(error, FormatVersionError)
        unreadable.append((step, path, is_newer))
    return unreadable


def _is_listed(save: SaveRecord) -> bool:
    """Whether it is, or was, one of the checkpoints here."""
    return save.outcome in ("committed", "recovered") and save.path is None


def _since_latest(saves: list[SaveRecord], checkpoints: list[CheckpointInfo]) -> list[SaveRecord]:
    """The saves called after the latest checkpoint; by time if the log does not have it."""
    if not checkpoints:
        return saves
    latest = checkpoints[-1]
    for index, save in enumerate(saves):
        if (save.session, save.sequence) == (latest.session, latest.sequence):
            return saves[index + 1 :]
    return [save for save in saves if save.called_s is None or save.called_s > latest.created_s]


def _reason(save: SaveRecord) -> str:
    match save.outcome:
        case "committed":
            return f"in {printable(save.path or '')}"
        case "skipped":
            return "all slots were busy"
        case "removed":
            return "it was not whole, so recovery removed it"
        case "saving":
            return "being written" if save.tries else "staging"
        case "unknown" if save.message is None:
            return "recovery will tell"
        case _:
            text = printable(": ".join(filter(None, (save.error, save.message))))
            return text if len(text) <= _FEW_WORDS else f"{text[: _FEW_WORDS - 3]}..."
