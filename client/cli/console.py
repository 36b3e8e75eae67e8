"""Output of the ``sidesave`` command: tables, JSON, sizes and times, progress bars and errors."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import reprlib
import sys
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final, cast

import typer
from rich.console import Console
from rich.table import Table

from sidesave.errors import CheckpointNotFoundError, InvalidArgumentError, SidesaveError

_UNCONFINED: Final = 100_000
"""Columns of an output that is not a terminal: lines are not wrapped for programs."""


def new_console() -> Console:
    """Return a console; only a terminal gets colors and wrapped lines."""
    width = None if sys.stdout.isatty() else _UNCONFINED
    return Console(width=width, markup=False, emoji=False, highlight=False)


def new_table(*columns: str) -> Table:
    """Return a table without lines; columns whose name starts with ``>`` hold numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        number = column.startswith(">")
        table.add_column(
            column.lstrip(">"),
            justify="right" if number else "left",
            no_wrap=number,
            overflow="fold",
        )
    return table


def print_json(value: Any) -> None:
    """Print nested values as JSON."""
    typer.echo(json.dumps(_jsonable(value), indent=2, allow_nan=False))


def _jsonable(value: Any) -> Any:
    """Return a value for JSON; values without a JSON form, such as infinities, become text."""
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in cast("list[Any]", value)]
    plain = (
        value is None
        or isinstance(value, (bool, int, str))
        or (isinstance(value, float) and math.isfinite(value))
    )
    return value if plain else brief(value)


def printable(text: str) -> str:
    """Return text with control characters escaped, since names come from files."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(nbytes: int) -> str:
    """Format a number of bytes, such as ``15.8 MB``."""
    power = min(5, (len(str(nbytes)) - 1) // 3)
    return (
        f"{nbytes / 1000**power:.1f} {('kB', 'MB', 'GB', 'TB', 'PB')[power - 1]}"
        if power
        else f"{nbytes} B"
    )


def when(seconds: float) -> str:
    """Format a time in the local time zone."""
    try:
        return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):  # the clock was wrong by thousands of years
        return f"{seconds:.0f} s after 1970"


def metrics_text(metrics: Mapping[str, float], most: int | None = None) -> str:
    """Format metrics, such as ``loss=0.25, accuracy=0.9``; beyond ``most``, only their number."""
    shown = [f"{printable(name)}={value:.6g}" for name, value in metrics.items()][:most]
    left = len(metrics) - len(shown)
    return ", ".join(shown) + (f" and {left:,} more" if left else "")


_abbreviation = reprlib.Repr()
_abbreviation.maxstring = _abbreviation.maxother = _abbreviation.maxlong = 100


def brief(value: Any) -> str:
    """Format a plain value in one line; a shortened one has its size after it."""
    text = printable(_abbreviation.repr(value))
    cut = "..." in text and hasattr(value, "__len__") and len(value) > 6
    return f"{text} ({len(value):,} in all)" if cut else text


@contextlib.contextmanager
def progress(total_nbytes: int, title: str = "") -> Generator[Callable[[int], None]]:
    """Show a progress bar for bytes, removed at the end; without a terminal, show nothing."""
    if not sys.stdout.isatty():
        yield lambda nbytes: None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    about = TextColumn("{task.description}", markup=False)
    figures = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(about, BarColumn(), *figures, transient=True) as bar:
        task = bar.add_task(title, total=total_nbytes)
        yield lambda nbytes: bar.update(task, advance=nbytes)


def error_text(error: BaseException) -> str:
    """Format an error in one line, without Python's ``[Errno 2]``."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    return str(error) or type(error).__name__


@contextlib.contextmanager
def errors_told() -> Generator[None]:
    """Print sidesave and system errors in one line, and exit; others keep their traceback."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (SidesaveError, OSError) as error:
        typer.echo(f"sidesave: {printable(error_text(error))}", err=True)
        usage = isinstance(error, (CheckpointNotFoundError, InvalidArgumentError))
        raise typer.Exit(2 if usage else 1) from None
