"""Commands for running jobs: ``top``, ``watch``, ``plot`` and ``trigger``."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sidesave.client.arguments import path_text
from sidesave.client.cli.console import new_console, new_table, print_json, printable, size
from sidesave.client.runs.finding import locate_run
from sidesave.client.runs.watch import watch as watch_run
from sidesave.errors import InvalidArgumentError

if TYPE_CHECKING:
    from rich.table import Table

    from sidesave.client.cli.top import DaemonView

_FIRST_LOOK_S: Final = 0.5
"""Seconds between the first two samples, from which the first rates are computed."""

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")]


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one table, and end.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Time between updates.")
    ] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and end.")] = False,
) -> None:
    """Show your writer daemons on this machine.

    Shows the run, the trainer, the step being written, the last commit of the run, and the memory,
    CPU and disk use of each daemon. If the output is not a terminal, one table is printed. Ctrl-C
    ends it.
    """
    from sidesave.client.cli.top import Top

    view = Top()
    view.look()
    time.sleep(min(interval, _FIRST_LOOK_S))
    if as_json:
        print_json([daemon.to_json() for daemon in view.look()])
        return
    console = new_console()
    if once or not sys.stdout.isatty():
        console.print(_table_of(view.look()))
        return
    from rich.live import Live

    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            live.update(_table_of(view.look()), refresh=True)
            time.sleep(interval)


def _table_of(daemons: list[DaemonView]) -> Table | str:
    if not daemons:
        return "no writer daemon of yours runs on this machine"
    columns = (
        "run",
        ">rank",
        ">daemon",
        ">trainer",
        "saving",
        ">last commit",
        ">age",
        ">memory",
        ">CPU",
        ">writes",
        "mirror",
    )
    table = new_table(*columns)
    for daemon in daemons:
        progress = "" if daemon.progress is None else f" {daemon.progress:.0%}"
        trainer = "?" if daemon.trainer_pid is None else str(daemon.trainer_pid)
        age, rate = daemon.last_commit_age_s, daemon.written_nbytes_per_s
        table.add_row(
            "?" if daemon.run is None else printable(daemon.run),
            "?" if daemon.rank is None else str(daemon.rank),
            str(daemon.pid),
            trainer if daemon.trainer_lives else "ended",
            "" if daemon.step is None else f"step {daemon.step}{progress}",
            "" if daemon.last_step is None else f"step {daemon.last_step}",
            "" if age is None else _duration(age),
            "?" if daemon.uss_nbytes is None else size(daemon.uss_nbytes),
            "" if daemon.cpu is None else f"{daemon.cpu:.0%}",
            "" if rate is None else f"{size(round(rate))}/s",
            "" if daemon.mirror is None else _mirror_text(daemon.mirror),
        )
    return table


def _mirror_text(mirror: dict[str, Any]) -> str:
    """Format a mirror's state, such as ``3 to copy (1.2 GB), 90 MB/s, last step 40``, and error."""
    parts = [
        f"{mirror['checkpoints']} to copy ({size(mirror['nbytes'])})"
        if mirror["compared"]
        else "not compared yet"
    ]
    if mirror["nbytes_per_s"]:
        parts.append(f"{size(round(mirror['nbytes_per_s']))}/s")
    if mirror["last_step"] is not None:
        parts.append(f"last step {mirror['last_step']}")
    if mirror["error"] is not None:
        parts.append(printable(mirror["error"]))
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    """Format seconds as ``42 s``, ``7 min``, ``3.5 h`` or ``12.1 d``."""
    for limit, unit_s, unit, digits in (
        (120, 1, "s", 0),
        (7200, 60, "min", 0),
        (172_800, 3600, "h", 1),
    ):
        if seconds < limit:
            return f"{seconds / unit_s:.{digits}f} {unit}"
    return f"{seconds / 86_400:.1f} d"


def watch(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run directory, or the URL of a run.")
    ],
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="SECONDS", help="End after this time without a new checkpoint."
        ),
    ] = None,
) -> None:
    """Print the path or URL of each new checkpoint of a run once it is committed.

    Prints one line per checkpoint, beginning with the latest, for a shell loop. Each line is the
    newest checkpoint at that time: if several are committed in quick succession, all but the last
    may be skipped. Ctrl-C ends it.
    """
    with contextlib.suppress(KeyboardInterrupt):
        for info in watch_run(run, timeout_s=timeout):
            typer.echo(printable(info.path))


def plot(
    run: RunArgument,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="The picture; its suffix is the format. Default: RUN's name.png"
        ),
    ] = None,
) -> None:
    """Plot the cost of a run's saves over its steps.

    Shows the time until each save was staged, durable and committed, and failed and skipped saves,
    from the run's log.
    """
    from sidesave.client.reporting.plot import draw

    directory = locate_run(run)
    target = path_text(output if output is not None else f"{os.path.basename(directory)}.png")
    try:
        count = draw(directory, target)
    except ModuleNotFoundError as error:
        typer.echo(f"sidesave: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(printable(f"{target}: {count:,} save{'s' * (count != 1)}"))


def trigger(
    run: RunArgument,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the commit, and print the path.")
    ] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long to wait.")] = 600.0,
    stop: Annotated[
        bool, typer.Option("--stop", help="Also ask the training loop to end at that step.")
    ] = False,
) -> None:
    """Ask the trainer that has a run open to save at its next step.

    The trainer needs a CheckpointManager with the policy OnRequest. Exit status 1 means that no
    live session has the run open or, with --wait, that the save was not committed in time.
    """
    from sidesave.client.runs.save_requests import SaveRequest

    if timeout < 0:
        raise InvalidArgumentError(f"--timeout must be 0 or more seconds, not {timeout:g}")
    directory = locate_run(run)
    request = SaveRequest(directory, stop=stop)
    if not request.is_sure:
        typer.echo(
            "this machine cannot find out whether the session that has the run open is alive",
            err=True,
        )
    if not wait:
        typer.echo(printable(f"{directory}: asked to save at the next step{' and to stop' * stop}"))
        return
    info = request.wait(timeout)
    typer.echo(printable(f"{info.path}: {size(info.nbytes)}"))
