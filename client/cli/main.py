"""The ``sidesave`` command: ``ls``, ``show``, ``verify``, ``diff``, ``export`` and others.

Commands for running jobs are in ``run_commands``, those that copy are in ``transfers``, and those
that change a run in ``changes``. A command imports only the modules that it needs; only ``show``,
``diff``, ``export`` and ``doctor`` import torch. Exit status: 0 success, 1 an error, damage or a
failed check, 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, Final, NoReturn

import sidesave
from sidesave.client.arguments import path_text, place_to_write
from sidesave.client.encryption import using
from sidesave.client.reading.verify import verify as verify_checkpoint
from sidesave.client.runs import finding
from sidesave.errors import InvalidArgumentError, SidesaveError
from sidesave.writer_daemon.storage import urls

try:
    import rich  # noqa: F401
    import typer
except ModuleNotFoundError as error:
    sys.exit(
        f"the sidesave command needs {error.name}, which an extra brings: pip install "
        "'sidesave[cli]'"
    )

from sidesave.client.cli import changes, run_commands, transfers
from sidesave.client.cli.changes import KeyEnvOption, KeyFileOption, encryption_of
from sidesave.client.cli.console import (
    error_text,
    errors_told,
    new_console,
    print_json,
    printable,
    progress,
    size,
)
from sidesave.client.cli.listing import Listing

_COLORS: Final = {"ok": "green", "warn": "yellow", "fail": "red"}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

CheckpointArgument = Annotated[
    str,
    typer.Argument(metavar="CHECKPOINT", help="A step directory, or a run directory; or its URL."),
]
StepOption = Annotated[int | None, typer.Option(min=0, help="Which step of a run directory.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Run the command line; the entry point of the console script."""
    logging.basicConfig(level=logging.WARNING, format="sidesave: %(message)s")
    signal.signal(signal.SIGTERM, _leave)
    app()


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sidesave {sidesave.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_tell_version, is_eager=True, help="Print the version, and end."
        ),
    ] = False,
) -> None:
    """Look into the checkpoints of runs, check, compare, export and recover them.

    Other commands watch runs and check this machine.
    """


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)  # an exception, so that temporary files are removed on the way out


# ls -----------------------------------------------------------------------------------------------


@app.command("ls")
@errors_told()
def list_checkpoints(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or its URL.")],
    every: Annotated[
        bool,
        typer.Option(
            "--all",
            help="All failed and skipped saves, not only those since the latest checkpoint.",
        ),
    ] = False,
    as_json: JsonOption = False,
    key_file: KeyFileOption = None,
    key_env: KeyEnvOption = None,
) -> None:
    """List the checkpoints of a run, and failed and skipped saves.

    Checkpoints are in the order of their commits. A superseded one is not an ancestor of the
    latest: the run went back behind it. Only the failed and skipped saves since the latest
    checkpoint are listed, unless --all is given.
    """
    with using(encryption_of(key_file, key_env)):
        listing = Listing(finding.locate_run(run, urls_too=True), every=every)
        if as_json:
            print_json(listing.to_json())
        else:
            listing.show()


# show ---------------------------------------------------------------------------------------------


@app.command()
@errors_told()
def show(
    checkpoint: CheckpointArgument,
    step: StepOption = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--filter", metavar="PATTERN", help="Only FQNs that match, such as 'model.layers.*'."
        ),
    ] = None,
    as_json: JsonOption = False,
    key_file: KeyFileOption = None,
    key_env: KeyEnvOption = None,
) -> None:
    """Show the contents of a checkpoint.

    Prints metrics, tensors in the order of the state, totals, extra files and plain data. For a run
    directory, the latest checkpoint is shown. Pickled values are not unpickled.
    """
    from sidesave.client.cli.contents import CheckpointContents

    with using(encryption_of(key_file, key_env)):
        contents = CheckpointContents(finding.locate(checkpoint, step), pattern)
    if as_json:
        print_json(contents.to_json())
    else:
        contents.show()


# verify -------------------------------------------------------------------------------------------


@app.command()
@errors_told()
def verify(
    checkpoint: CheckpointArgument,
    step: StepOption = None,
    every: Annotated[
        bool, typer.Option("--all", help="All checkpoints of the run directory CHECKPOINT.")
    ] = False,
) -> None:
    """Compare every byte with its digest.

    For a run directory, all checkpoints are verified, or the one chosen by --step. Exit status 1
    means damage.
    """
    if every and step is not None:
        raise InvalidArgumentError("--all and --step exclude each other")
    if every or (step is None and not finding.is_single(checkpoint)):
        run = finding.locate_run(checkpoint, urls_too=True)
        view = finding.catalog_of(run).look()
        left_out = [each for each in view.left_out if not each.is_unfinished]
        by_step = sorted((each.step, each.path) for each in (*view.checkpoints, *left_out))
        paths = [path for _, path in by_step] or [finding.locate(run)]
    else:
        paths = [finding.locate(checkpoint, step)]
    ok = True
    for number, path in enumerate(paths, start=1):
        ok = _verify(path, f"{os.path.basename(path)} ({number} of {len(paths)})") and ok
    if not ok:
        raise typer.Exit(1)


def _verify(path: str, title: str) -> bool:
    started, checked = time.monotonic(), 0
    try:
        total = finding.read_info(path).nbytes
    except (SidesaveError, OSError):
        total = 0  # verification reports this error below
    try:
        with progress(total, title) as advance:

            def count(nbytes: int) -> None:
                nonlocal checked
                checked += nbytes
                advance(nbytes)

            faults = [str(fault) for fault in verify_checkpoint(path, on_bytes=count).faults]
    except (SidesaveError, OSError) as error:
        faults = [error_text(error)]
    verdict = f"{len(faults)} fault{'s' * (len(faults) != 1)}" if faults else "ok"
    typer.echo(
        printable(f"{path}: {verdict}, {size(checked)} in {time.monotonic() - started:.2f} s")
    )
    for fault in faults:
        typer.echo(f"  {printable(fault)}")
    return not faults


# diff ---------------------------------------------------------------------------------------------


@app.command()
@errors_told()
def diff(
    first: Annotated[
        str,
        typer.Argument(metavar="A", help="A step directory, or a run directory for its latest."),
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    top: Annotated[int, typer.Option(min=0, help="The most lines of each kind; 0 for all.")] = 20,
    as_json: JsonOption = False,
    key_file: KeyFileOption = None,
    key_env: KeyEnvOption = None,
) -> None:
    """Compare two checkpoints.

    Changes are of B relative to A: the largest absolute difference of an element, the L2 norm of
    the difference divided by that of A, and the number of elements that differ in any bit. The exit
    status is 0 whether they differ or not.
    """
    from sidesave.client.cli.contents import Differences

    paths = finding.locate(first), finding.locate(second)
    with using(encryption_of(key_file, key_env)):
        differences = Differences(*paths, top or sys.maxsize)
    if as_json:
        print_json(differences.to_json())
    else:
        differences.show()


# export -------------------------------------------------------------------------------------------

PatternsOption = list[str] | None


@app.command()
@errors_told()
def export(
    checkpoint: CheckpointArgument,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="A new directory for the files, or its URL.")
    ],
    step: StepOption = None,
    item: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The item of the state to export, if several have weights."
        ),
    ] = None,
    include: Annotated[
        PatternsOption,
        typer.Option(metavar="PATTERN", help="Only FQNs that match, such as 'model.layers.*'."),
    ] = None,
    exclude: Annotated[
        PatternsOption, typer.Option(metavar="PATTERN", help="Leave out FQNs that match.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Cast floating-point tensors to this, such as bfloat16.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="The most bytes of one file.")
    ] = "5GB",
    keep_prefix: Annotated[
        bool, typer.Option("--keep-prefix", help="Keep the item's name in front.")
    ] = False,
    key_file: KeyFileOption = None,
    key_env: KeyEnvOption = None,
) -> None:
    """Export weights as safetensors files that Hugging Face's tools load.

    Tensors are written whole, whatever number of ranks saved them. Tied weights are written once.
    Extra files of the checkpoint, such as a config.json, are copied. Exports are never encrypted.
    """
    from sidesave.client.export.safetensors import Weights, parse_dtype, parse_size

    path, most = finding.locate(checkpoint, step), parse_size(max_shard_size)
    cast_to = None if dtype is None else parse_dtype(dtype)
    with using(encryption_of(key_file, key_env)):
        chosen = Weights(
            path,
            item=item,
            include=include or None,
            exclude=exclude or None,
            keep_prefix=keep_prefix,
            dtype=cast_to,
        )
    with chosen as weights, progress(weights.nbytes, os.path.basename(path)) as advance:
        report = weights.write(target, max_shard_nbytes=most, on_bytes=advance)
    tensors = f"{report.tensors:,} tensor{'s' * (report.tensors != 1)} of {weights.item}"
    files = f"{len(report.files):,} file{'s' * (len(report.files) != 1)}"
    typer.echo(printable(f"{report.path}: {tensors}, {size(report.nbytes)} in {files}"))
    if report.extra_files:
        typer.echo(printable(f"  with {', '.join(report.extra_files)}"))
    for name, other in report.tied.items():
        typer.echo(printable(f"  {name} is tied to {other}, and left out"))
    for name in report.left_out:
        typer.echo(printable(f"  {name} is not a tensor, and left out"))


# doctor -------------------------------------------------------------------------------------------


@app.command()
@errors_told()
def doctor(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="A directory for checkpoints, or a URL.")
    ] = ".",
    as_json: JsonOption = False,
    state_bytes: Annotated[
        str | None,
        typer.Option(help="Size of a state, like 112GB: estimate the cost of its saves."),
    ] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks that divide the state.")] = 1,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks that share a node; all by default.")
    ] = None,
) -> None:
    """Check this machine and a directory, or an object store.

    Tries everything that sidesave needs, which takes some seconds and leaves nothing behind. Exit
    status 1 means that a check has failed.
    """
    from sidesave.client.cli.doctor import examine
    from sidesave.client.cli.finding import Finding
    from sidesave.client.export.safetensors import parse_size
    from sidesave.client.planning import check_ranks

    nbytes = None if state_bytes is None else parse_size(state_bytes)
    if nbytes is None and (world_size, ranks_per_node) != (1, None):
        raise InvalidArgumentError(
            "--world-size and --ranks-per-node divide a state: add --state-bytes SIZE"
        )
    check_ranks(world_size, ranks_per_node)
    place = place_to_write(directory) if urls.is_url(directory) else Path(path_text(directory))
    if isinstance(place, Path) and place.exists() and not place.is_dir():
        raise InvalidArgumentError(f"{place} is not a directory")
    findings: list[Finding] = []
    console = new_console()
    with contextlib.closing(examine(place, nbytes, world_size, ranks_per_node)) as examination:
        for one in examination:
            findings.append(one)
            if not as_json:
                console.print(f"{one.status:4}", style=_COLORS[one.status], end="  ")
                console.print(printable(f"{one.name:14}  {one.finding}"))
                if one.remedy:
                    console.print(f"{'':22}-> {one.remedy}")
    if as_json:
        print_json([asdict(one) for one in findings])
    if any(one.status == "fail" for one in findings):
        raise typer.Exit(1)


# Commands of other modules ------------------------------------------------------------------------

_OTHERS: Final = (
    *(changes.recover, changes.rekey, changes.rm),
    *(transfers.fetch, transfers.copy, transfers.mirror),
    *(run_commands.top, run_commands.watch, run_commands.plot, run_commands.trigger),
)
for command in _OTHERS:
    app.command()(errors_told()(command))
