"""The ``sidesave`` command: ``ls``, ``show``, ``verify``, ``diff``, ``export``, ``doctor``, and more.

Those for running jobs are in ``run_commands``, those that copy in ``transfers``, and those that change a run in
``changes``. A command imports only what it needs: only ``show``, ``diff``, ``export`` and ``doctor`` need torch. Exit
status: 0 success, 1 an error, damage or a failed check, 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import math
import os
import signal
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import sidesave
from sidesave.client.arguments import path_text, place_to_write
from sidesave.client.encryption import using
from sidesave.client.reading.verify import verify as verify_checkpoint
from sidesave.client.runs import catalog, finding
from sidesave.errors import InvalidArgumentError, SidesaveError
from sidesave.writer_daemon.format.manifest import parse_metadata
from sidesave.writer_daemon.storage import urls

try:
    import rich  # noqa: F401
    import typer
except ModuleNotFoundError as error:
    sys.exit(f"the sidesave command needs {error.name}, which an extra brings: pip install 'sidesave[cli]'")

from sidesave.client.cli import changes, run_commands, transfers
from sidesave.client.cli.changes import KeyEnvOption, KeyFileOption, encryption_of
from sidesave.client.cli.console import (
    brief,
    error_text,
    errors_told,
    metrics_text,
    new_console,
    new_table,
    print_json,
    printable,
    progress,
    size,
    when,
)
from sidesave.client.cli.listing import Listing
from sidesave.client.training.metadata import metrics_of

if TYPE_CHECKING:
    from rich.console import Console

    from sidesave.client.export.diff import Report

_COLORS: Final = {"ok": "green", "warn": "yellow", "fail": "red"}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="A step directory, or a run directory; or its URL.")
]
StepOption = Annotated[int | None, typer.Option(min=0, help="Which step of a run directory.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Run the command line; the console script."""
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
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version, and end.")
    ] = False,
) -> None:
    """Look into the checkpoints of runs, check, compare, export and recover them; watch runs; check this machine."""


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)  # an exception, so that temporary files are removed on the way out


# ls --------------------------------------------------------------------------------------------------------------


@app.command("ls")
@errors_told()
def list_checkpoints(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory, or its URL.")],
    every: Annotated[
        bool, typer.Option("--all", help="All saves that came to nothing, not only those since the latest checkpoint.")
    ] = False,
    as_json: JsonOption = False,
    key_file: KeyFileOption = None,
    key_env: KeyEnvOption = None,
) -> None:
    """List the checkpoints of a run, and the saves that came to nothing.

    Checkpoints stand in the order of their commits. A superseded one is no ancestor of the latest: the run went back
    behind it. Of saves that failed or were skipped, those since the latest checkpoint are listed.
    """
    with using(encryption_of(key_file, key_env)):
        listing = Listing(finding.locate_run(run, urls_too=True), every=every)
        if as_json:
            print_json(listing.to_json())
        else:
            listing.show()


# show ------------------------------------------------------------------------------------------------------------


@app.command()
@errors_told()
def show(
    checkpoint: CheckpointArgument,
    step: StepOption = None,
    pattern: Annotated[
        str | None, typer.Option("--filter", metavar="PATTERN", help="Only FQNs that match, such as 'model.layers.*'.")
    ] = None,
    as_json: JsonOption = False,
    key_file: KeyFileOption = None,
    key_env: KeyEnvOption = None,
) -> None:
    """Show what a checkpoint holds.

    Its metrics, tensors in the order of the state, totals, files beside them and plain data; of a run directory the
    latest. Pickled values are not unpickled.
    """
    from sidesave.client.export.diff import Contents

    def wanted(fqn: str) -> bool:
        return pattern is None or fnmatch.fnmatchcase(fqn, pattern) or fqn.startswith(pattern + ".")

    with using(encryption_of(key_file, key_env)), Contents(finding.locate(checkpoint, step)) as contents:
        tensors = {fqn: facts for fqn, facts in contents.tensors.items() if wanted(fqn)}
        nest = contents.nest(wanted)
        head, path, location = contents.manifest, contents.reader.path, contents.reader.location
        files = {file.name: file.nbytes for file in contents.reader.extra_files()}
    metrics = metrics_of(parse_metadata(head.metadata, path))
    items: dict[str, list[int]] = {}
    for facts in tensors.values():
        counts = items.setdefault(facts.item, [0, 0])
        counts[0] += 1
        counts[1] += facts.nbytes
    if as_json:
        about = {one.name: getattr(head, one.name) for one in fields(head)}
        for long in ("records", "table"):
            del about[long]
        rows = {
            fqn: {"dtype": facts.dtype_name, "shape": facts.shape, "nbytes": facts.nbytes, "item": facts.item}
            for fqn, facts in tensors.items()
        }
        totals = {name: {"tensors": count, "nbytes": nbytes} for name, (count, nbytes) in items.items()}
        print_json(
            {
                "path": path,
                "location": location,
                **about,
                "metrics": metrics,
                "tensors": rows,
                "items": totals,
                "plain": nest,
                "files": files,
            }
        )
        return
    console = new_console()
    ranks = f"{head.world_size} rank{'s' * (head.world_size != 1)}"
    about = f"{ranks}, session {head.session}, sequence {head.sequence}, torch {head.torch_version}"
    console.print(printable(f"step {head.step}, saved {when(head.created_s)}, {size(head.nbytes)}, {about}"))
    if location != path:
        console.print(printable(f"files in {location}"), soft_wrap=True)
    if metrics:
        console.print(f"metrics: {metrics_text(metrics)}")
    console.print()
    table = new_table("tensor", "dtype", "shape", ">bytes")
    for fqn, facts in tensors.items():
        table.add_row(printable(fqn), facts.dtype_name, str(list(facts.shape)), f"{facts.nbytes:,}")
    console.print(table)
    totals = new_table("item", ">tensors", ">bytes")
    for name, (count, nbytes) in items.items():
        totals.add_row(printable(name), f"{count:,}", f"{nbytes:,}")
    totals.add_row("all", f"{len(tensors):,}", f"{sum(facts.nbytes for facts in tensors.values()):,}")
    console.print()
    console.print(totals)
    if files:
        extra_files = new_table("file", ">bytes")
        for name, nbytes in files.items():
            extra_files.add_row(printable(name), f"{nbytes:,}")
        console.print()
        console.print(extra_files)
    lines = [line for name, value in nest.items() for line in _plain_lines(name, value, "  ")[1]]
    if lines:
        console.print("\nplain data" + " of rank 0" * (head.world_size > 1))
        console.print("\n".join(lines))


def _plain_lines(name: Any, value: Any, indent: str) -> tuple[int, list[str]]:
    """The number of tensors in a nest, and lines that show the rest; a nest of tensors alone has none."""
    from sidesave.client.export.diff import TensorLeaf, children

    if isinstance(value, TensorLeaf):
        return 1, []
    title = f"{indent}{printable(str(name))}:"
    below = children(value)
    if below is None:
        return 0, [f"{title} {brief(value)}"]
    tensors, lines = 0, list[str]()
    for key, item in below:
        count, further = _plain_lines(key, item, indent + "  ")
        tensors += count
        lines += further
    if lines:
        lines.insert(0, f"{title} (and {tensors:,} tensor{'s' * (tensors != 1)})" if tensors else title)
    return tensors, lines


# verify ----------------------------------------------------------------------------------------------------------


@app.command()
@errors_told()
def verify(
    checkpoint: CheckpointArgument,
    step: StepOption = None,
    every: Annotated[bool, typer.Option("--all", help="All checkpoints of the run directory CHECKPOINT.")] = False,
) -> None:
    """Compare every byte with its digest.

    Of a run directory all checkpoints are verified, or the one chosen by --step. Exit status 1 means damage.
    """
    if every and step is not None:
        raise InvalidArgumentError("--all and --step exclude each other")
    if every or (step is None and not finding.is_single(checkpoint)):
        run = finding.locate_run(checkpoint, urls_too=True)
        checkpoints = catalog.scan(run)
        by_step = [*((info.step, info.path) for info in checkpoints), *catalog.left_out(run, checkpoints)]
        paths = [path for _, path in sorted(by_step)] or [finding.locate(run)]
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
        total = catalog.read_info(path).nbytes
    except (SidesaveError, OSError):
        total = 0  # the faults will tell
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
    typer.echo(printable(f"{path}: {verdict}, {size(checked)} in {time.monotonic() - started:.2f} s"))
    for fault in faults:
        typer.echo(f"  {printable(fault)}")
    return not faults


# diff ------------------------------------------------------------------------------------------------------------


@app.command()
@errors_told()
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A step directory, or a run directory for its latest.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    top: Annotated[int, typer.Option(min=0, help="At most so many lines of each kind; 0 for all.")] = 20,
    as_json: JsonOption = False,
    key_file: KeyFileOption = None,
    key_env: KeyEnvOption = None,
) -> None:
    """Compare two checkpoints.

    Changes are of B relative to A: the largest difference of two elements, the L2 norm of the difference over that of
    A, and the elements of which a bit differs. The exit status is 0 whether they differ or not.
    """
    from sidesave.client.export.diff import ABSENT, Contents, common_nbytes, compare

    paths = [finding.locate(path) for path in (first, second)]
    with (
        using(encryption_of(key_file, key_env)),
        Contents(paths[0]) as a,
        Contents(paths[1]) as b,
        progress(common_nbytes(a, b)) as advance,
    ):
        report = compare(a, b, advance)
    report.changed.sort(key=lambda change: -math.inf if change.relative_l2 is None else -change.relative_l2)
    if as_json:
        about = {"a": paths[0], "b": paths[1], "same": report.same}
        changed = [asdict(change) for change in report.changed[: top or None]]
        names = {"only_a": report.only_first, "only_b": report.only_second, "mismatched": report.mismatched}
        plain = {
            fqn: {side: value for side, value in zip("ab", pair, strict=True) if value is not ABSENT}
            for fqn, pair in report.plain.items()
        }
        print_json({**about, "changed": changed, **names, "plain": plain, "equal": report.equal})
        return
    _print_report(report, top or sys.maxsize)


def _print_report(report: Report, top: int) -> None:
    console = new_console()
    odd = len(report.only_first) + len(report.only_second) + len(report.mismatched)
    counts = f"{len(report.changed):,} changed, {odd:,} not comparable, {len(report.equal):,} equal"
    console.print(f"tensors: {counts}; plain values: {len(report.plain):,} changed")
    if report.changed:
        table = new_table("changed tensor", ">max |B-A|", ">|B-A|/|A|", ">elements changed", ">NaN in A", ">NaN in B")
        for change in report.changed[:top]:
            figures = ["-" if n is None else f"{n:.3g}" for n in (change.max_abs, change.relative_l2)]
            share = f"{change.changed:,} ({change.changed / change.elements:.1%})"
            table.add_row(printable(change.fqn), *figures, share, *(f"{count:,}" for count in change.nans))
        console.print()
        console.print(table)
        _print_more(console, len(report.changed), top)
    _print_lines(console, "tensors only in A", report.only_first, top)
    _print_lines(console, "tensors only in B", report.only_second, top)
    mismatched = [f"{fqn}: {a} -> {b}" for fqn, (a, b) in report.mismatched.items()]
    _print_lines(console, "tensors of another dtype or shape", mismatched, top)
    plain = [f"{fqn}: {brief(a)} -> {brief(b)}" for fqn, (a, b) in report.plain.items()]
    _print_lines(console, "plain data", plain, top)


def _print_lines(console: Console, title: str, lines: list[str], top: int) -> None:
    if lines:
        console.print("", title, *(f"  {printable(line)}" for line in lines[:top]), sep="\n")
        _print_more(console, len(lines), top)


def _print_more(console: Console, count: int, top: int) -> None:
    if count > top:
        console.print(f"  and {count - top:,} more: see --top")


# export ----------------------------------------------------------------------------------------------------------

PatternsOption = list[str] | None


@app.command()
@errors_told()
def export(
    checkpoint: CheckpointArgument,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A new directory for the files, or its URL.")],
    step: StepOption = None,
    item: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of which item of the state, where several have weights.")
    ] = None,
    include: Annotated[
        PatternsOption, typer.Option(metavar="PATTERN", help="Only FQNs that match, such as 'model.layers.*'.")
    ] = None,
    exclude: Annotated[PatternsOption, typer.Option(metavar="PATTERN", help="Leave out FQNs that match.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Cast floating-point tensors to this, such as bfloat16.")] = None,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Begin another file before that.")] = "5GB",
    keep_prefix: Annotated[bool, typer.Option("--keep-prefix", help="Keep the item's name in front.")] = False,
    key_file: KeyFileOption = None,
    key_env: KeyEnvOption = None,
) -> None:
    """Export weights as safetensors files, as Hugging Face's tools load them.

    Whatever number of ranks has saved them, they come out whole. Tied weights are written once. Files that were saved
    beside the tensors, such as a config.json, come along. Nothing of an export is encrypted.
    """
    from sidesave.client.export.safetensors import Weights, parse_dtype, parse_size

    path, most = finding.locate(checkpoint, step), parse_size(max_shard_size)
    cast_to = None if dtype is None else parse_dtype(dtype)
    with using(encryption_of(key_file, key_env)):
        chosen = Weights(
            path, item=item, include=include or None, exclude=exclude or None, keep_prefix=keep_prefix, dtype=cast_to
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
        typer.echo(printable(f"  {name} is no tensor, and left out"))


# doctor ----------------------------------------------------------------------------------------------------------


@app.command()
@errors_told()
def doctor(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Where checkpoints are to go, or its URL.")] = ".",
    as_json: JsonOption = False,
) -> None:
    """Check this machine and a directory, or an object store.

    What sidesave needs is tried out, which takes some seconds and leaves nothing behind. Exit status 1 means that a
    check has failed.
    """
    from sidesave.client.cli.doctor import examine
    from sidesave.client.cli.finding import Finding

    place = place_to_write(directory) if urls.is_url(directory) else Path(path_text(directory))
    if isinstance(place, Path) and place.exists() and not place.is_dir():
        raise InvalidArgumentError(f"{place} is no directory")
    findings: list[Finding] = []
    console = new_console()
    with contextlib.closing(examine(place)) as examination:
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


# Of other modules ------------------------------------------------------------------------------------------------

_OTHERS: Final = (
    *(changes.recover, changes.rekey, changes.rm),
    *(transfers.fetch, transfers.copy, transfers.mirror),
    *(run_commands.top, run_commands.watch, run_commands.plot, run_commands.trigger),
)
for command in _OTHERS:
    app.command()(errors_told()(command))
