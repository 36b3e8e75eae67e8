"""``sidesave fetch``: a checkpoint from an object store into a local run directory."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from sidesave.client.cli.console import printable, progress, size
from sidesave.client.runs import catalog, finding


def fetch(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of a step, or of a run for its latest.")],
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run directory that the step is to appear in.")],
    step: Annotated[int | None, typer.Option(min=0, help="Which step of a run.")] = None,
) -> None:
    """Bring a checkpoint from an object store down.

    It appears when all of it has arrived and matches its digests. Interrupted, the same command goes on with the files
    that had not arrived. Credentials and endpoint come from the environment.
    """
    from sidesave.client.reading.fetch import fetch as fetch_checkpoint

    place, started = finding.locate(url, step), time.monotonic()
    total = catalog.read_info(place).nbytes
    with progress(total, place.rpartition("/")[2]) as advance:
        info = fetch_checkpoint(place, run, on_bytes=advance)
    typer.echo(printable(f"{info.path}: {size(info.nbytes)} in {time.monotonic() - started:.2f} s"))
