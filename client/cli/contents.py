"""The output of ``sidesave show`` and ``diff``: the contents of a checkpoint, or of two."""

from __future__ import annotations

import fnmatch
import math
from dataclasses import asdict, fields
from typing import Any

from sidesave.client.cli.console import (
    brief,
    metrics_text,
    new_console,
    new_table,
    printable,
    progress,
    size,
    when,
)
from sidesave.client.export.diff import (
    ABSENT,
    Contents,
    TensorLeaf,
    children,
    common_nbytes,
    compare,
)
from sidesave.client.training.metadata import metrics_of
from sidesave.writer_daemon.format.manifest import parse_metadata


class CheckpointContents:
    """The contents of a checkpoint: tensors, totals by item, extra files and plain data."""

    def __init__(self, path: str, pattern: str | None) -> None:
        """Read the tensors and plain data whose FQNs match ``pattern``; None matches all."""

        def wanted(fqn: str) -> bool:
            return (
                pattern is None
                or fnmatch.fnmatchcase(fqn, pattern)
                or fqn.startswith(pattern + ".")
            )

        with Contents(path) as contents:
            self._tensors = {fqn: each for fqn, each in contents.tensors.items() if wanted(fqn)}
            self._plain = contents.nest(wanted)
            self._manifest, reader = contents.manifest, contents.reader
            self._path, self._location = reader.path, reader.location
            self._files = {file.name: file.nbytes for file in reader.extra_files()}
        self._metrics = metrics_of(parse_metadata(self._manifest.metadata, self._path))
        self._items: dict[str, list[int]] = {}
        """Number and bytes of the tensors of each item."""
        for facts in self._tensors.values():
            counts = self._items.setdefault(facts.item, [0, 0])
            counts[0] += 1
            counts[1] += facts.nbytes

    def to_json(self) -> dict[str, Any]:
        """Return the contents as values for JSON."""
        head = {
            one.name: getattr(self._manifest, one.name)
            for one in fields(self._manifest)
            if one.name not in ("records", "table")
        }
        tensors = {
            fqn: {
                "dtype": facts.dtype_name,
                "shape": facts.shape,
                "nbytes": facts.nbytes,
                "item": facts.item,
            }
            for fqn, facts in self._tensors.items()
        }
        items = {
            name: {"tensors": count, "nbytes": nbytes}
            for name, (count, nbytes) in self._items.items()
        }
        return {
            "path": self._path,
            "location": self._location,
            **head,
            "metrics": self._metrics,
            "tensors": tensors,
            "items": items,
            "plain": self._plain,
            "files": self._files,
        }

    def show(self) -> None:
        """Print the contents as tables."""
        console, head = new_console(), self._manifest
        ranks = f"{head.world_size} rank{'s' * (head.world_size != 1)}"
        about = f"session {head.session}, sequence {head.sequence}, torch {head.torch_version}"
        saved = f"step {head.step}, saved {when(head.created_s)}, {size(head.nbytes)}"
        console.print(printable(f"{saved}, {ranks}, {about}"))
        if self._location != self._path:
            console.print(printable(f"files in {self._location}"), soft_wrap=True)
        if self._metrics:
            console.print(f"metrics: {metrics_text(self._metrics)}")
        tensors = new_table("tensor", "dtype", "shape", ">bytes")
        for fqn, facts in self._tensors.items():
            row = printable(fqn), facts.dtype_name, str(list(facts.shape)), f"{facts.nbytes:,}"
            tensors.add_row(*row)
        totals = new_table("item", ">tensors", ">bytes")
        for name, (count, nbytes) in self._items.items():
            totals.add_row(printable(name), f"{count:,}", f"{nbytes:,}")
        nbytes = sum(facts.nbytes for facts in self._tensors.values())
        totals.add_row("all", f"{len(self._tensors):,}", f"{nbytes:,}")
        tables = [tensors, totals]
        if self._files:
            tables.append(new_table("file", ">bytes"))
            for name, nbytes in self._files.items():
                tables[-1].add_row(printable(name), f"{nbytes:,}")
        for table in tables:
            console.print()
            console.print(table)
        lines = [line for each in self._plain.items() for line in _plain_lines(*each, "  ")[1]]
        if lines:
            console.print("\nplain data" + " of rank 0" * (head.world_size > 1))
            console.print("\n".join(lines))


def _plain_lines(name: Any, value: Any, indent: str) -> tuple[int, list[str]]:
    """Return the number of tensors in a nested value, and lines for its other values."""
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
        lines.insert(
            0, f"{title} (and {tensors:,} tensor{'s' * (tensors != 1)})" if tensors else title
        )
    return tensors, lines


class Differences:
    """The differences of two checkpoints, the largest changes first."""

    def __init__(self, first: str, second: str, top: int) -> None:
        """Compare two checkpoints; ``top`` is the most lines of each kind. Blocking."""
        self._paths, self._top = (first, second), top
        with (
            Contents(first) as a,
            Contents(second) as b,
            progress(common_nbytes(a, b)) as advance,
        ):
            self._report = compare(a, b, advance)
        self._report.changed.sort(
            key=lambda change: -math.inf if change.relative_l2 is None else -change.relative_l2
        )

    def to_json(self) -> dict[str, Any]:
        """Return the differences as values for JSON."""
        report, (a, b) = self._report, self._paths
        plain = {
            fqn: {
                side: value for side, value in zip("ab", pair, strict=True) if value is not ABSENT
            }
            for fqn, pair in report.plain.items()
        }
        return {
            "a": a,
            "b": b,
            "same": report.same,
            "changed": [asdict(change) for change in report.changed[: self._top]],
            "only_a": report.only_first,
            "only_b": report.only_second,
            "mismatched": report.mismatched,
            "plain": plain,
            "equal": report.equal,
        }

    def show(self) -> None:
        """Print the differences as tables."""
        report, self._console = self._report, new_console()
        uncomparable = len(report.only_first) + len(report.only_second) + len(report.mismatched)
        self._console.print(
            f"tensors: {len(report.changed):,} changed, {uncomparable:,} not comparable, "
            f"{len(report.equal):,} equal; plain values: {len(report.plain):,} changed"
        )
        if report.changed:
            table = new_table(
                "changed tensor",
                ">max |B-A|",
                ">|B-A|/|A|",
                ">elements changed",
                ">NaN in A",
                ">NaN in B",
            )
            for change in report.changed[: self._top]:
                figures = [
                    "-" if n is None else f"{n:.3g}" for n in (change.max_abs, change.relative_l2)
                ]
                share = f"{change.changed:,} ({change.changed / change.elements:.1%})"
                table.add_row(
                    printable(change.fqn), *figures, share, *(f"{count:,}" for count in change.nans)
                )
            self._console.print()
            self._console.print(table)
            self._print_more(len(report.changed))
        self._print_lines("tensors only in A", report.only_first)
        self._print_lines("tensors only in B", report.only_second)
        mismatched = [f"{fqn}: {a} -> {b}" for fqn, (a, b) in report.mismatched.items()]
        self._print_lines("tensors of another dtype or shape", mismatched)
        plain = [f"{fqn}: {brief(a)} -> {brief(b)}" for fqn, (a, b) in report.plain.items()]
        self._print_lines("plain data", plain)

    def _print_lines(self, title: str, lines: list[str]) -> None:
        if lines:
            shown = (f"  {printable(line)}" for line in lines[: self._top])
            self._console.print("", title, *shown, sep="\n")
            self._print_more(len(lines))

    def _print_more(self, count: int) -> None:
        if count > self._top:
            self._console.print(f"  and {count - self._top:,} more: see --top")
