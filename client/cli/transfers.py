"""``sidesave fetch``, ``copy`` and ``mirror``: checkpoints copied by this process."""

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
from sidesave.client.runs import finding
from sidesave.client.runs.history import bring_history
from sidesave.client.runs.mirror import check_mirror, lie_in_each_other
from sidesave.client.runs.pins import Pins
from sidesave.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    IntegrityError,
    InvalidArgumentError,
)
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.lease.record import LeaseRecord
from sidesave.writer_daemon.mirror import identity
from sidesave.writer_daemon.mirror.throttle import Throttle
from sidesave.writer_daemon.mirror.uploader import Uploader
from sidesave.writer_daemon.storage import Storage

_TAKEOVER_TIMEOUT_S: Final = 60.0

BandwidthOption = Annotated[int | None, typer.Option(min=1, help="Bytes per second, at most.")]


def fetch(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="URL of a step, or of a run (its latest is used).")
    ],
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The run directory that the step is to appear in.")
    ],
    step: Annotated[int | None, typer.Option(min=0, help="Which step of a run.")] = None,
) -> None:
    """Download a checkpoint from an object store.

    It appears in RUN when all files are complete and match their digests. If it is interrupted, the
    same command continues with the missing files. Credentials and endpoint come from the
    environment.
    """
    from sidesave.client.reading.fetch import fetch as fetch_checkpoint

    place, started = finding.locate(url, step), time.monotonic()
    total = finding.read_info(place).nbytes
    with progress(total, place.rpartition("/")[2]) as advance:
        info = fetch_checkpoint(place, run, on_bytes=advance)
    typer.echo(printable(f"{info.path}: {size(info.nbytes)} in {time.monotonic() - started:.2f} s"))


def copy(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A run directory, or the URL of a run.")
    ],
    target: Annotated[
        str, typer.Argument(metavar="DST", help="The place of the copy: a directory, or a URL.")
    ],
    bandwidth: BandwidthOption = None,
) -> None:
    """Copy all checkpoints of a run to another place.

    SRC and DST are directories or URLs. DST is a new place or an earlier copy, which gets the
    missing checkpoints; it is a run, from which training can continue. Pins and the history of
    saves are copied too, and steps pinned in DST stay pinned. Every byte is compared with its
    digest while it is copied; damaged checkpoints are left out, with exit status 1. If it is
    interrupted, the same command continues with the missing files. Jobs may save to SRC meanwhile,
    but not to DST. Credentials and endpoint come from the environment.
    """
    run, place = finding.locate_run(source, urls_too=True), place_to_write(target)
    if lie_in_each_other(run, place):
        raise InvalidArgumentError(f"{run} and {place} are inside one another")
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
        str | None,
        typer.Argument(
            metavar="[TARGET]", help="A directory or URL; default: the run's last mirror."
        ),
    ] = None,
    bandwidth: BandwidthOption = None,
) -> None:
    """Copy the missing checkpoints to the mirror of a run.

    Jobs may save to the run meanwhile. If it is interrupted, the same command continues with the
    missing files. A daemon that still mirrors after its trainer's end is asked to leave. The daemon
    of a live run does this work itself, so the command is refused then. Credentials and endpoint
    come from the environment.
    """
    directory = finding.locate_run(run)
    known = target is None
    place = (
        identity.remembered_mirror(directory)
        if known
        else check_mirror(target, directory, node_local=False)
    )
    if not place:
        raise InvalidArgumentError(
            f"{directory} has had no mirror: name one with `sidesave mirror {run} TARGET`"
        )
    storage = (
        identity.open_known(directory, place)
        if known
        else identity.open_target(place, "a new mirror")
    )

    def identify() -> int:
        which = identity.identify(storage)
        if known or identity.has_had(directory, place):
            identity.remember(directory, place, which)
        return 0

    _copy_missing(directory, place, bandwidth, storage, identify)


def _copy_missing(
    run: str, place: str, bandwidth: int | None, storage: Storage, begun: Callable[[], int]
) -> None:
    """Copy missing checkpoints to ``storage``, which is opened at ``place``, and close it.

    ``begun`` is called once this process holds the lease of ``place``; it returns the number of
    damaged records.
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
        uploader.copy_rollbacks()  # also if no checkpoint is missing
        for step in missing:
            with progress(step.nbytes, step.name) as bar:
                bars.append(bar)
                try:
                    uploader.upload(step)
                    copied += step.nbytes
                except (CheckpointNotFoundError, CheckpointExistsError, IntegrityError) as error:
                    typer.echo(
                        printable(f"sidesave: {step.name} is left out: {error_text(error)}"),
                        err=True,
                    )
                    failed += isinstance(error, IntegrityError)
        uploader.close()
    typer.echo(printable(f"{place}: {size(copied)} in {time.monotonic() - started:.2f} s"))
    if failed:
        raise typer.Exit(1)
