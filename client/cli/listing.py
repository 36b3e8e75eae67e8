"""The output of ``sidesave ls``: checkpoints of a run, failed and skipped saves, and leftovers."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, Final

import typer

from sidesave.client.cli.console import metrics_text, new_console, new_table, printable, size, when
from sidesave.client.runs import finding
from sidesave.client.runs.history import history, is_live
from sidesave.client.runs.sharing import shared_nbytes
from sidesave.client.saving.lineage import lineage
from sidesave.client.training.metadata import metrics_of
from sidesave.errors import FormatVersionError
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.format.names import parse_hidden_directory
from sidesave.writer_daemon.save_record import SaveRecord
from sidesave.writer_daemon.storage import urls

_FEW_WORDS: Final = 100
"""The most characters of a reason."""
_FEW_METRICS: Final = 4
_OWNERS: Final = {
    True: "belongs to a live session",
    False: "left by a dead session: the next one, or sidesave recover, finishes or removes it",
    None: "belongs to a session elsewhere, which may be alive",
}


class Listing:
    """The contents of a run directory at one time."""

    def __init__(self, directory: str, *, every: bool) -> None:
        """Read the run.

        With ``every``, all failed and skipped saves are included, not only those since the latest
        checkpoint.
        """
        self._directory = directory
        view = finding.catalog_of(directory).look()
        self._found = view.checkpoints
        self._unreadable = [
            (each.step, each.path, isinstance(each.error, FormatVersionError))
            for each in view.left_out
            if not each.is_unfinished
        ]
        """Step and path of each unreadable step directory, and whether its format is newer."""
        # runs in object stores have no log and no local sessions to look at
        remote = urls.is_url(directory)
        saves = [] if remote else history(directory)
        self._saves = [
            save
            for save in (saves if every else _since_latest(saves, self._found))
            if not _is_listed(save)
        ]
        self._leftovers = [] if remote else _leftovers(directory)
        self._latest = self._found[-1] if self._found else None
        self._shared = shared_nbytes(self._found)
        self._lineage = (
            lineage(self._found, self._latest, view.rollbacks) if self._latest else set[int]()
        )

    def _mark(self, info: CheckpointInfo) -> str:
        return (
            "latest" if info is self._latest else "" if info.step in self._lineage else "superseded"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the listing as values for JSON."""
        damaged, newer = (
            [path for _, path, is_newer in self._unreadable if is_newer is x] for x in (False, True)
        )
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
        """Print the listing as tables."""
        console = new_console()
        if self._found or self._unreadable:
            metrics = {info.path: metrics_of(info.metadata) for info in self._found}
            extra_columns = ["metrics"] if any(metrics.values()) else []
            shares = any(self._shared.values())
            sizes = [">size", ">of its own"] if shares else [">size"]
            rows = new_table(
                ">step", "saved", *sizes, "session", "parent", ">sequence", *extra_columns, ""
            )
            for info in sorted(self._found, key=lambda info: info.position):
                parent = "" if info.parent is None else f"{info.parent[0]} of {info.parent[1]}"
                own = [size(info.nbytes - self._shared[info.path])] if shares else []
                about = (
                    when(info.created_s),
                    size(info.nbytes),
                    *own,
                    info.session,
                    parent,
                    str(info.sequence),
                )
                values = [metrics_text(metrics[info.path], _FEW_METRICS)] if extra_columns else []
                rows.add_row(str(info.step), *about, *values, self._mark(info))
            for step, _, is_newer in self._unreadable:
                reason = (
                    "of a newer format: upgrade sidesave"
                    if is_newer
                    else "unreadable: see sidesave verify"
                )
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
    """A hidden directory: a save that is in progress or did not finish."""

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


def _is_listed(save: SaveRecord) -> bool:
    """Whether the save is, or was, a checkpoint in this directory."""
    return save.outcome in ("committed", "recovered") and save.path is None


def _since_latest(saves: list[SaveRecord], checkpoints: list[CheckpointInfo]) -> list[SaveRecord]:
    """Return the saves called after the latest checkpoint, by time if the log lacks that one."""
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
            return "it was incomplete, so recovery removed it"
        case "saving":
            return "being written" if save.tries else "staging"
        case "unknown" if save.message is None:
            return "recovery will decide"
        case _:
            text = printable(": ".join(filter(None, (save.error, save.message))))
            return text if len(text) <= _FEW_WORDS else f"{text[: _FEW_WORDS - 3]}..."
