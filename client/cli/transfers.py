"""``sidesave fetch``, ``copy`` and ``mirror``: checkpoints copied by this process from one place to another."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from typing import Annotated, Final

import typer

from sidesave.client.arguments import place_to_write
from sidesave.client.cli.console import error_text, printable, progress, size
from sidesave.client.runs import catalog, finding
from sidesave.client.runs.history import bring_history
from sidesave.client.runs.mirror import check_mirror, lie_in_each_other
from sidesave.client.runs.pins import Pins
from sidesave.errors import CheckpointExistsError, CheckpointNotFoundError, IntegrityError, InvalidArgumentError
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.lease.record import LeaseRecord
from sidesave.writer_daemon.mirror import identity
from sidesave.writer_daemon.mirror.throttle import Throttle
from sidesave.writer_daemon.mirror.uploader import Uploader
from sidesave.writer_daemon.storage import Storage

_TAKEOVER_TIMEOUT_S: Final = 60.0

BandwidthOption = Annotated[int | None, typer.Option(min=1, help="Bytes per second, at most.")]


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


def copy(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A run directory, or the URL of a run.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Where the copy is to be: a directory, or a URL.")],
    bandwidth: BandwidthOption = None,
) -> None:
    """Copy all checkpoints of a run to another place.

    Either is a directory or in an object store. DST is a new place or an earlier copy, to which what is missing is
    brought; it is a run, from which training can go on. Pins and the history of saves come along: steps that are pinned
    in DST stay so. Every byte is compared with its digest while it is copied, and what is damaged is left out, with
    exit status 1. Interrupted, the same command goes on with the files that had not arrived. Saving may go on in SRC
    meanwhile, and not in DST. Credentials and endpoint come from the environment.
    """
    run, place = finding.locate_run(source, urls_too=True), place_to_write(target)
    if lie_in_each_other(run, place):
        raise InvalidArgumentError(f"{run} and {place} lie in each other")
    storage = identity.open_target(place, "a copy")

    def bring_records() -> int:
        bring_history(run, storage)
        try:
            Pins(place).add(Pins(run).read())
        except IntegrityError as error:
            typer.echo(printable(f"sidesave: the pins are left out: {error_text(error)}"), err=True)
            return 1
        return 0

    _copy_missing(run, place, bandwidth, storage, bring_records)


def mirror(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run directory.")],
    target: Annotated[
        str | None, typer.Argument(metavar="[TARGET]", help="A directory or URL; without, the one the run has had.")
    ] = None,
    bandwidth: BandwidthOption = None,
) -> None:
    """Copy what is missing to the mirror of a run.

    Saving may go on in the run meanwhile. Interrupted, the same command goes on with the files that had not arrived. A
    daemon that mirrors after its trainer's end is asked to leave; that of a live run does this work by itself, so then
    the command is refused. Credentials and endpoint come from the environment.
    """
    directory = finding.locate_run(run)
    known = target is None
    place = identity.remembered_mirror(directory) if known else check_mirror(target, directory, node_local=False)
    if not place:
        raise InvalidArgumentError(f"{directory} has had no mirror: say where with `sidesave mirror {run} TARGET`")
    storage = identity.open_known(directory, place) if known else identity.open_target(place, "a new mirror")

    def identify() -> int:
        which = identity.identify(storage)
        if known or identity.has_had(directory, place):
            identity.remember(directory, place, which)
        return 0

    _copy_missing(directory, place, bandwidth, storage, identify)


def _copy_missing(run: str, place: str, bandwidth: int | None, storage: Storage, begun: Callable[[], int]) -> None:
    """Copy to ``storage``, which is ``place`` and is closed at the end.

    ``begun`` is called once it is taken over, and returns how many things were damaged.
    """
    started, copied, failed = time.monotonic(), 0, 0
    with contextlib.ExitStack() as opened:
        opened.callback(storage.close)
        holder = LeaseRecord.current(secrets.token_hex(8), os.getpid())
        lease = Lease(storage, holder, _TAKEOVER_TIMEOUT_S, lambda: True, kills=False)
        opened.callback(lease.release)
        throttle = Throttle(bandwidth or 0, lambda: None)
        bars: list[Callable[[int], None]] = []

        def before_chunk(nbytes: int) -> None:
            throttle.take(nbytes)
            bars[-1](nbytes)

        uploader = Uploader(run, storage, lease, before_chunk)
        missing, _ = uploader.begin()
        failed += begun()
        for step in missing:
            with progress(step.nbytes, step.name) as bar:
                bars.append(bar)
                try:
                    uploader.upload(step)
                    copied += step.nbytes
                except (CheckpointNotFoundError, CheckpointExistsError, IntegrityError) as error:
                    typer.echo(printable(f"sidesave: {step.name} is left out: {error_text(error)}"), err=True)
                    failed += isinstance(error, IntegrityError)
        uploader.close()
    typer.echo(printable(f"{place}: {size(copied)} in {time.monotonic() - started:.2f} s"))
    if failed:
        raise typer.Exit(1)
