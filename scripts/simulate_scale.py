"""What a checkpoint costs at 8 to 100,000 ranks: a model of this protocol, of a tree of records,
and of DCP's planning.

python -m scripts.simulate_scale --chart docs/scale.png   the tables, and a picture
python -m scripts.simulate_scale --measure                what can be measured here, printed as
                                                          options to pass
python -m scripts.simulate_scale --validate runs.json     the model beside real runs

`docs/scale.md` derives the formulas and says what the model leaves out.
"""

from __future__ import annotations

import gc
import json
import math
import mmap
import pickle
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table as Grid
from typer import Option

from sidesave.writer_daemon.commit.manifest_builder import assemble
from sidesave.writer_daemon.format.layout import Layout, Part, Table, TensorInfo
from sidesave.writer_daemon.format.manifest import FileRecord, Manifest, RankRecord
from sidesave.writer_daemon.format.names import rank_file
from sidesave.writer_daemon.format.refusal import Refusal
from sidesave.writer_daemon.storage.posix import PosixStorage

Terms = dict[str, float]
Row = dict[str, str | float]
NAME_OPS = 3  # changes of names for a published file: create, link, unlink (`PosixStorage.publish`)
# operations of a commit whatever the ranks: lease, small listings, mode, rename, syncs
COMMIT_OPS = 12
LIST_OPS = 2  # open and list
# polls take no more of the metadata server's time: from there on they wait for each other
MAX_LOAD = 0.9
TURNS = 32  # positions over which the wait of a loop is averaged
MANIFEST_NBYTES = 400  # beside ranks, layouts and tensors
# of a rank in a group's record, beside the manifest's entry: the sum of its cells, its bytes
GROUP_ENTRY_NBYTES = 64
FIRST: dict[str, float] = {"wait_rate": 0, "lease_every_s": 0, "max_idle_s": math.inf, "readers": 1}
"""The protocol as it was first built."""
CHANGES: dict[str, dict[str, float]] = {
    "first built": {},
    "+ others look less often": {"wait_rate": 40e3 / 3, "lease_every_s": 2.0},
    "+ no pause for what was read": {"max_idle_s": 0.05},
    "+ 32 readers (as it is)": {"readers": 32},
    "+ records in a directory of their own": {"listed": 1},
}
"""What was changed since, one after the other, and a last step that was not taken."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the model is told. `measured` means here, on 2 cores with ext4; all else is assumed,
    with its source.
    """

    bytes_per_rank: Annotated[
        float, Option(help="Llama 3 405B: 1 MB to 4 GB a GPU (arXiv 2407.21783, 3.3.1)")
    ] = 1e9
    fqns: Annotated[
        int, Option(help="Tensors: Llama 3 405B has 1,137 parameters, two moments and a step each")
    ] = 4548
    layouts: Annotated[
        int, Option(help="Distinct ways in which the tensors of one stage are cut: assumption")
    ] = 12
    stages: Annotated[
        int, Option(help="Parts without a common tensor, at most ranks / 8: Llama 3 405B has 16")
    ] = 16
    containers: Annotated[
        int, Option(help="Tensor files a rank: model, optimizer, bare tensors")
    ] = 3
    ranks_per_node: Annotated[int, Option(help="Ranks that share one network card for storage")] = 8
    steps_kept: Annotated[int, Option(help="Entries of the run directory: assumption")] = 100
    step_s: Annotated[float, Option(help="Seconds of a training step: assumption")] = 5.0
    save_every_s: Annotated[float, Option(help="Seconds between saves: assumption")] = 600.0
    mtbf_hours: Annotated[
        float, Option(help="Of one rank. Llama 3: 419 failures, 54 days, 16,384 GPUs")
    ] = 50_676.0
    node_bandwidth: Annotated[
        float, Option(help="Bytes/s from a node to storage: 100 Gb/s, an assumption")
    ] = 12.5e9
    total_bandwidth: Annotated[
        float, Option(help="Bytes/s of all storage. Llama 3: 2 TB/s sustained")
    ] = 2e12
    op_s: Annotated[
        float, Option(help="One metadata operation. Lustre, one client: 2,000 stat/s (Dell)")
    ] = 0.5e-3
    create_s: Annotated[
        float, Option(help="One change of a name. Lustre, one client: 1,100 creates/s (Dell)")
    ] = 0.9e-3
    create_rate: Annotated[
        float, Option(help="Changes of names/s of all clients. GPFS: 55,000-68,000 (Dell)")
    ] = 55e3
    lookup_rate: Annotated[
        float, Option(help="Look-ups/s of all clients. Lustre: 400,000-544,000 (Dell)")
    ] = 400e3
    readdir_rate: Annotated[float, Option(help="Entries/s that one client lists: assumption")] = (
        250e3
    )
    read_s: Annotated[
        float, Option(help="Open, read and close a small file, cold: two operations")
    ] = 1e-3
    read_rate: Annotated[
        float, Option(help="Small files/s read by all clients. GPFS, 4 KiB: 37,000-45,000")
    ] = 40e3
    file_bandwidth: Annotated[
        float, Option(help="Bytes/s of one file that all nodes read: assumption")
    ] = 10e9
    fsync_s: Annotated[float, Option(help="One fsync: assumption")] = 1e-3
    spread: Annotated[
        float, Option(help="The last part of writing, in which the records come: assumption")
    ] = 0.1
    poll_s: Annotated[
        float, Option(help="Rank 0's mean pause between two looks at the records")
    ] = 0.0375
    idle: Annotated[float, Option(help="And at least so many times the look before it")] = 2.0
    max_idle_s: Annotated[float, Option(help="But for that no longer than this")] = 0.05
    readers: Annotated[int, Option(help="Threads that read records")] = 32
    listed: Annotated[
        int, Option(help="Entries a rank has where rank 0 looks; 0: all of its files")
    ] = 0
    wait_s: Annotated[
        float, Option(help="Another rank's mean pause between two looks at the run directory")
    ] = 0.75
    ask_s: Annotated[
        float, Option(help="The same while it asks whether plain tensors are alike")
    ] = 0.1875
    wait_ops: Annotated[int, Option(help="Of such a look: list a directory")] = 2
    lease_ops: Annotated[
        int, Option(help="Of a look at the lease: list a directory, read a file")
    ] = 4
    lease_every_s: Annotated[float, Option(help="Seconds between two such looks at least")] = 2.0
    wait_rate: Annotated[float, Option(help="Looks/s of all ranks at most; 0: no limit")] = 40e3 / 3
    group: Annotated[int, Option(help="Ranks in a group of the tree")] = 256
    record_nbytes: Annotated[float, Option(help="A record without tensors: measured")] = 1190.0
    fqn_nbytes: Annotated[float, Option(help="A tensor in a record or the manifest: measured")] = (
        63.0
    )
    cell_nbytes: Annotated[float, Option(help="A cell of a layout, owner and border: measured")] = (
        11.5
    )
    entry_nbytes: Annotated[float, Option(help="A rank in the manifest: measured")] = 86.0
    record_read_s: Annotated[
        float, Option(help="Check and parse a record, processor alone: measured")
    ] = 53e-6
    fqn_read_s: Annotated[float, Option(help="The same for a tensor of a record: measured")] = (
        2.3e-6
    )
    cell_read_s: Annotated[float, Option(help="The same for a cell: measured")] = 0.32e-6
    entry_read_s: Annotated[float, Option(help="The same for a rank of a manifest: measured")] = (
        3.0e-6
    )
    record_build_s: Annotated[
        float, Option(help="From records to manifest, for each record: measured")
    ] = 17e-6
    fqn_build_s: Annotated[float, Option(help="The same for each tensor: measured")] = 4.6e-6
    cell_build_s: Annotated[float, Option(help="The same for each cell: measured")] = 0.43e-6
    entry_build_s: Annotated[float, Option(help="Encode a rank of the manifest: measured")] = (
        0.56e-6
    )
    item_nbytes: Annotated[float, Option(help="DCP: a tensor in a pickled plan: measured")] = 221.0
    result_nbytes: Annotated[
        float, Option(help="DCP: a tensor in a pickled write result: measured")
    ] = 119.0
    item_local_s: Annotated[
        float, Option(help="DCP: build and pickle a plan, each tensor of a rank: measured")
    ] = 30e-6
    item_plan_s: Annotated[
        float, Option(help="DCP: rank 0's planning, each tensor of each rank: measured")
    ] = 52e-6
    item_finish_s: Annotated[
        float, Option(help="DCP: rank 0's metadata, each tensor of each rank: measured")
    ] = 25e-6
    message_s: Annotated[
        float, Option(help="DCP: a message at rank 0, gloo over TCP: assumption")
    ] = 20e-6
    net_bandwidth: Annotated[
        float, Option(help="DCP: bytes/s into rank 0, gloo over TCP: assumption")
    ] = 3e9

    @property
    def files(self) -> int:
        """Files of a rank: tensors with their digest lists, objects, record."""
        return 2 * self.containers + 2

    def cells(self, ranks: int) -> int:
        """Cells of all distinct layouts: each rank has one in each layout of its stage."""
        return self.layouts * ranks

    def table_nbytes(self, ranks: int) -> float:
        """Tensors and layouts, each of which stands in one record, and again in the manifest."""
        return self.fqns * self.fqn_nbytes + self.cells(ranks) * self.cell_nbytes

    def records_nbytes(self, ranks: int) -> float:
        return ranks * self.record_nbytes + self.table_nbytes(ranks)

    def manifest_nbytes(self, ranks: int) -> float:
        return MANIFEST_NBYTES + ranks * self.entry_nbytes + self.table_nbytes(ranks)

    def writing(self, ranks: int, files: int = 0, name_ops: int = NAME_OPS) -> Terms:
        """Seconds until the slowest rank has written: its bytes, and the names of its files."""
        per_byte_s = max(self.ranks_per_node / self.node_bandwidth, ranks / self.total_bandwidth)
        per_file_s = max(
            name_ops * self.create_s + self.fsync_s, ranks * name_ops / self.create_rate
        )
        return {
            "bytes": self.bytes_per_rank * per_byte_s,
            "names": (files or self.files) * per_file_s,
        }

    def listing_s(self, entries: float) -> float:
        return LIST_OPS * self.op_s + entries / self.readdir_rate

    def publishing_s(self, nbytes: float) -> float:
        return NAME_OPS * self.create_s + 2 * self.fsync_s + nbytes / self.node_bandwidth

    def awaiting(
        self, ranks: int, entries: float, files: int, processor_s: float, hosts: int = 1
    ) -> Terms:
        """Seconds after the last of some files has come until one who lists and reads in turn has
        read all of them.

        Files come evenly. Of the threads that read one at a time computes; as many hosts do the
        same. A mean over where in its turn the loop is when the first file comes.
        """
        spread_s, listing_s = (
            self.spread * sum(self.writing(ranks).values()),
            self.listing_s(entries),
        )
        each_s = max(
            processor_s, (processor_s + self.read_s) / self.readers, hosts / self.read_rate
        )
        waits = {"notice": 0.0, "read": 0.0}
        for phase in range(TURNS):
            now = (
                -phase
                / TURNS
                * (listing_s + max(self.poll_s, min(self.idle * listing_s, self.max_idle_s)))
            )
            seen, after_s = 0, 0.0
            while True:
                come = files if now >= spread_s else int(files * now / spread_s) if now > 0 else 0
                reading_s, seen = (come - seen) * each_s, come
                now += listing_s + reading_s
                after_s += min(reading_s, max(0.0, now - spread_s))
                if seen == files:
                    break
                now += max(self.poll_s, min(self.idle * (listing_s + reading_s), self.max_idle_s))
            waits["notice"] += (now - spread_s - after_s) / TURNS
            waits["read"] += after_s / TURNS
        return waits

    def polled(self, ranks: int) -> tuple[Inputs, float, float]:
        """This while every rank polls for the commit (one queue); the pause of each, and the
        server's load.
        """
        pause_s = max(self.wait_s, ranks / self.wait_rate if self.wait_rate else 0)
        rate = ranks * (self.wait_ops / pause_s + self.lease_ops / max(pause_s, self.lease_every_s))
        load = min(MAX_LOAD, rate / self.lookup_rate)
        pause_s *= max(1.0, rate / self.lookup_rate / MAX_LOAD)
        latencies = {
            name: getattr(self, name) / (1 - load) for name in ("op_s", "create_s", "read_s")
        }
        return replace(self, **latencies), pause_s, load

    def flat(self, ranks: int) -> Terms:
        """Seconds from the last record to the commit: rank 0 reads every record itself."""
        now, cells, listed = (
            self.polled(ranks)[0],
            self.cells(ranks),
            ranks * (self.listed or self.files),
        )
        waits = now.awaiting(ranks, listed, ranks, now.record_read_s)
        return {
            "notice": waits["notice"],
            "read": waits["read"] + now.fqns * now.fqn_read_s + cells * now.cell_read_s,
            "build": ranks * now.record_build_s
            + now.fqns * now.fqn_build_s
            + cells * now.cell_build_s,
            "publish": COMMIT_OPS * now.op_s
            + now.listing_s(listed)
            + now.publishing_s(now.manifest_nbytes(ranks)),
        }

    def tree(self, ranks: int, group: int = 0) -> Terms:
        """The same where the first rank of a group merges the group's records, which have a
        directory of their own.
        """
        group = min(ranks, group or self.group)
        now, groups, cells = self.polled(ranks)[0], math.ceil(ranks / group), self.cells(ranks)
        parsing_s = now.fqns * now.fqn_read_s + cells * now.cell_read_s
        building_s = now.fqns * now.fqn_build_s + cells * now.cell_build_s
        own = now.awaiting(ranks, group, group, now.record_read_s, groups)
        above = now.awaiting(ranks, groups, groups, group * now.entry_read_s)
        merging_s = group * now.record_build_s + (parsing_s + building_s) / groups
        merged = now.table_nbytes(ranks) / groups + group * (now.entry_nbytes + GROUP_ENTRY_NBYTES)
        return {
            "group": sum(own.values()) + merging_s + now.publishing_s(merged),
            "notice": above["notice"],
            "read": above["read"] + parsing_s,
            "build": ranks * now.entry_build_s + building_s,
            "publish": COMMIT_OPS * now.op_s + now.publishing_s(now.manifest_nbytes(ranks)),
        }

    def best_group(self, ranks: int) -> int:
        sizes = [2**power for power in range(2, 14) if 2**power < 2 * ranks]
        return min(sizes, key=lambda size: sum(self.tree(ranks, size).values()))

    def others(self, ranks: int) -> Terms:
        """Seconds until another rank knows of a commit, more if it asks first; the load of the
        metadata server.
        """
        now, pause_s, load = self.polled(ranks)
        look_s, claims_s = now.listing_s(now.steps_kept), ranks / self.create_rate
        # unfinished tensor files, and a replica digest of each rank
        entries = ranks * (self.containers + 1)
        told_s = (
            now.listing_s(entries) + now.create_s + self.ask_s * pause_s / self.wait_s / 2 + look_s
        )
        seen_s = pause_s / 2 + look_s + now.read_s + ranks / self.read_rate
        # made, and removed
        return {"seen": seen_s, "first save": told_s + 2 * claims_s, "load": load}

    def dcp(self, ranks: int) -> Terms:
        """DCP's default planner: plans to rank 0, a global plan, back; one file a rank; results to
        rank 0, metadata.
        """
        items = self.fqns / max(1, min(self.stages, ranks / 8))  # of which a rank holds a piece
        messages_s = 2 * ranks * self.message_s  # the sizes, then the objects
        local_s, moved_s = items * self.item_local_s, ranks * items / self.net_bandwidth
        return {
            "items": ranks * items,
            "plans GB": ranks * items * self.item_nbytes / 1e9,
            "plan": local_s
            + 2 * (messages_s + moved_s * self.item_nbytes)
            + ranks * items * self.item_plan_s,
            "cached": local_s + 2 * messages_s,
            "write": sum(self.writing(ranks, files=1, name_ops=1).values()),
            "finish": messages_s
            + moved_s * self.result_nbytes
            + ranks * items * self.item_finish_s,
        }


# What is printed ----------------------------------------------------------------------------------


def grid(title: str, rows: Sequence[Mapping[str, str | float]]) -> None:
    """Print a table that is Markdown as well."""

    def text(value: str | float) -> str:
        if isinstance(value, str):
            return value
        return (
            "<0.001"
            if 0 < value < 0.001
            else f"{value:,.0f}"
            if value >= 10 or value == 0
            else f"{value:.2g}"
        )

    table = Grid(*rows[0], box=box.MARKDOWN)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*map(text, row.values()))
    console = Console(width=200, highlight=False)
    console.print(f"\n{title}")
    console.print(table)


def changes(inputs: Inputs) -> dict[str, Callable[[int], Terms]]:
    """What one change after the other brings."""
    found: dict[str, Callable[[int], Terms]] = {}
    best = first = replace(inputs, **FIRST)
    for name, change in CHANGES.items():
        best = replace(best, **change)
        found[name] = best.flat
    return found | {"tree, nothing else": first.tree, "tree": inputs.tree, "tree, all +": best.tree}


def commit_s(protocol: Callable[[int], Terms], ranks: int) -> float:
    return sum(protocol(ranks).values())


def print_model(inputs: Inputs, counts: Sequence[int]) -> None:
    """Print the tables of `docs/scale.md`."""

    def whole(terms: Terms) -> Row:
        return {
            **terms,
            "commit": sum(terms.values()),
            "dominates": max(terms, key=terms.__getitem__),
        }

    def of_flat(ranks: int) -> Row:
        sizes = {
            "records MB": inputs.records_nbytes(ranks) / 1e6,
            "manifest MB": inputs.manifest_nbytes(ranks) / 1e6,
        }
        listed = {"listed": ranks * (inputs.listed or inputs.files)}
        return {
            **inputs.writing(ranks),
            **listed,
            **sizes,
            **whole(inputs.flat(ranks)),
            **inputs.others(ranks),
        }

    def of_tree(ranks: int) -> Row:
        best, row = (
            inputs.best_group(ranks),
            {"groups": math.ceil(ranks / inputs.group), **whole(inputs.tree(ranks))},
        )
        return row | {"best group": best, "its commit": sum(inputs.tree(ranks, best).values())}

    def of_dcp(ranks: int) -> Row:
        terms = inputs.dcp(ranks)
        share = terms["plan"] / (inputs.save_every_s + terms["plan"])
        return {**terms, "plan in steps": terms["plan"] / inputs.step_s, "hours a day": 24 * share}

    def of_day(ranks: int) -> Row:
        written_s, dcp, failures = (
            commit_s(inputs.writing, ranks),
            inputs.dcp(ranks),
            24 * ranks / inputs.mtbf_hours,
        )
        lags = {
            "flat": written_s + commit_s(inputs.flat, ranks),
            "tree": written_s + commit_s(inputs.tree, ranks),
        }
        lags |= {
            f"DCP, {plan}": dcp[plan] + dcp["write"] + dcp["finish"] for plan in ("cached", "plan")
        }
        row: Row = {"failures": failures, "interval": failures * inputs.save_every_s / 7200}
        for who, lag_s in lags.items():
            row[who] = failures * lag_s / 3600 if lag_s < inputs.save_every_s else "never done"
        return row

    tables = {
        (
            "Flat. Seconds to write bytes and names, from the last record to the commit, until "
            "others see it"
        ): of_flat,
        f"Tree of groups of {inputs.group}. Seconds from the last record to the commit": of_tree,
        "DCP. Seconds; hours a day that dcp.save spends on planning": of_dcp,
        (
            "A day. Failures; hours lost because saves are apart, and because one was not "
            "committed yet"
        ): of_day,
    }
    for title, columns in tables.items():
        grid(title, [{"ranks": f"{ranks:,}"} | columns(ranks) for ranks in counts])
    steps = [
        {"": name} | {f"{n:,}": commit_s(commit, n) for n in counts}
        for name, commit in changes(inputs).items()
    ]
    grid("One change after the other. Seconds from the last record to the commit", steps)
    worlds = [round(8 * 1.02**power) for power in range(479)]
    bent = next(
        (ranks for ranks in worlds if commit_s(inputs.flat, ranks) > 2 * commit_s(inputs.flat, 8)),
        None,
    )
    better = next(
        (ranks for ranks in worlds if commit_s(inputs.tree, ranks) < commit_s(inputs.flat, ranks)),
        None,
    )
    print(
        f"\nFlat takes twice as long as at 8 ranks from {bent} ranks on; a tree would be faster "
        f"from {better} on."
    )


def draw(inputs: Inputs, path: Path) -> None:
    """Draw the latencies over the ranks, both logarithmic."""
    from matplotlib.figure import Figure  # only a chart needs it

    counts = [round(8 * 1.1**power) for power in range(100)]
    figure = Figure(figsize=(8, 5.4), layout="constrained")
    axes = figure.subplots()
    commits = changes(inputs)
    names = {
        "first built": "first built",
        "+ 32 readers (as it is)": "as it is",
        "tree, nothing else": "first built, with a tree",
        "tree": "as it is, with a tree",
    }
    for (name, label), style in zip(names.items(), ("C1:", "C1-", "C2:", "C2-"), strict=True):
        axes.loglog(
            counts,
            [commit_s(commits[name], ranks) for ranks in counts],
            style,
            label=f"sidesave: {label}",
        )
    terms = {
        "plan": "planning",
        "cached": "planning, cached",
        "finish": "from the last write to .metadata",
    }
    for (term, label), style in zip(terms.items(), ("C0-", "C0:", "C0--"), strict=True):
        axes.loglog(
            counts, [inputs.dcp(ranks)[term] for ranks in counts], style, label=f"DCP: {label}"
        )
    axes.axhline(inputs.step_s, color="0.7", linewidth=0.8, label="a training step")
    axes.set(
        xlabel="ranks",
        ylabel="seconds",
        title="From the last rank's record to the commit; DCP beside it (model)",
    )
    axes.grid(which="major", color="0.9")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)


def print_validation(inputs: Inputs, path: Path) -> None:
    """Print the model beside real runs: a JSON list of
    ``{"ranks": n, "commit_s": x, "manifest_nbytes": b}``.
    """
    rows: list[Row] = []
    for run in json.loads(path.read_text()):
        ranks: int = run["ranks"]
        model = {
            "commit_s": commit_s(inputs.flat, ranks),
            "manifest_nbytes": inputs.manifest_nbytes(ranks),
        }
        ratios = {f"{name} ratio": run[name] / value for name, value in model.items()}
        rows.append({**run, **{f"{name} model": value for name, value in model.items()}, **ratios})
    grid("Real runs and the model; a ratio is measured / model", rows)


# What can be measured here ------------------------------------------------------------------------


def seconds(work: Callable[[], object], rounds: int = 5) -> float:
    """The fastest of some rounds: what else the machine does only adds. Garbage is collected as in
    the daemon.
    """
    return min(timeit.repeat(work, gc.enable, number=1, repeat=rounds))


def make_records(ranks: int, fqns: int, layouts: int) -> list[RankRecord]:
    """Records of a model each of whose tensors is cut over all ranks, in one of so many ways."""
    rows = [64 * (turn + 1) for turn in range(layouts)]  # of one cell
    owners = [tuple((turn + rank) % ranks for rank in range(ranks)) for turn in range(layouts)]
    cuts = [tuple(range(0, ranks * step + 1, step)) for step in rows]
    tensors: dict[str, TensorInfo] = {}
    described: list[list[str]] = [[] for _ in range(ranks)]
    for index in range(fqns):
        turn, fqn = index % layouts, f"model.layers.{index // 9}.attention.w{index % 9}.weight"
        tensors[fqn] = TensorInfo("F32", (ranks * rows[turn], 4096), "model", turn)
        described[owners[turn][0]].append(fqn)
    table = Table(
        tensors,
        tuple(Layout(who, (where, (0, 4096))) for who, where in zip(owners, cuts, strict=True)),
    )
    digest, sums = "0123456789abcdef" * 2, table.sums()

    def record(rank: int) -> RankRecord:
        def file(container: str) -> FileRecord:
            digests = FileRecord(rank_file(container, rank, "xxh3"), 75_360, digest)
            return FileRecord(
                rank_file(container, rank, "safetensors"), 1_234_567_890, None, container, digests
            )

        part = Part(
            table.only(described[rank]),
            cells=sums.get(rank, 0),
            treespec=digest,
            replica_digest=digest,
        )
        objects = FileRecord(rank_file("objects", rank, "msgpack"), 4321, digest)
        files = tuple(map(file, ("model", "optimizer", "tensors")))
        return RankRecord(
            digest[16:],
            9,
            9,
            rank,
            ranks,
            None,
            False,
            1789000000.5,
            "2.13.0",
            files,
            objects,
            part,
        )

    return [record(rank) for rank in range(ranks)]


def measure_records() -> Terms:
    """Bytes and processor time of records and manifests: slopes, each from two sizes."""

    def measure(ranks: int, fqns: int, layouts: int) -> list[float]:
        records = make_records(ranks, fqns, layouts)
        data, content = [record.to_bytes() for record in records], assemble(records, "")
        encoded = content.to_bytes()
        times = [
            seconds(
                lambda: [
                    (Refusal.from_bytes(one, ""), RankRecord.from_bytes(one, "")) for one in data
                ]
            )
        ]
        times += [
            seconds(lambda: assemble(records, "").to_bytes()),
            seconds(lambda: Manifest.from_bytes(encoded, "")),
        ]
        return [sum(map(len, data)), *times, seconds(content.to_bytes), len(encoded)]

    few, some, many = measure(1000, 1, 1), measure(1000, 101, 101), measure(8, 5000, 8)
    cell = [(more - less) / 100 / 1000 for more, less in zip(some, few, strict=True)]
    rank = [whole / 1000 - slope for whole, slope in zip(few, cell, strict=True)]
    fqn = [(whole - 8 * slope) / 5000 for whole, slope in zip(many, rank, strict=True)]
    found: Terms = dict(
        zip(("entry_read_s", "entry_build_s", "entry_nbytes"), rank[3:], strict=True)
    )
    for name, slopes in {"record": rank, "fqn": fqn, "cell": cell}.items():
        found |= {
            f"{name}_{what}": slopes[index]
            for index, what in enumerate(("nbytes", "read_s", "build_s"))
        }
    return found


def measure_storage(folder: Path) -> Terms:
    """The file system under ``folder``, through the daemon's own operations; all of it is in the
    page cache.
    """
    storage = PosixStorage(str(folder))
    page, content, listed, syncs = memoryview(mmap.mmap(-1, 4096)), b"x" * 1230, [0.0], [0.0]
    for count in (10_000, 1_000, 100_000):
        (folder / str(count)).mkdir()
        for index in range(count):
            path = folder / str(count) / f"rank-{index:05d}.json"
            if count == 10_000:
                path.write_bytes(content)
            else:  # names are all that a listing sees
                path.hardlink_to(folder / f"10000/rank-{index % 10_000:05d}.json")
        listed.append(count / seconds(lambda name=str(count): storage.list_directory(name)))
        print(f"listing {count:>7,} entries: {listed[-1]:,.0f} entries/s")

    def publish(path: str) -> None:
        with storage.creating(f"{path}.new", len(content)) as output:
            output.write_at(page, 0)
            syncs.append(seconds(lambda: output.finish(len(content)), 1))
        storage.publish(f"{path}.new", path)

    paths = [f"10000/rank-{index:05d}.json" for index in range(10_000)]
    read_s = seconds(lambda: [storage.read(path, 4096) for path in paths]) / len(paths)
    names = [seconds(lambda path=f"1000/new-{n}": publish(path), 1) - syncs[-1] for n in range(300)]
    create_s = statistics.median(names) / NAME_OPS
    op_s = seconds(lambda: [storage.list_directory("") for _ in range(1000)]) / 1000 / LIST_OPS
    storage.close()
    rates = {
        "readdir_rate": listed[-1],
        "lookup_rate": 1 / op_s,
        "read_rate": 1 / read_s,
        "create_rate": 1 / create_s,
    }
    return rates | {
        "op_s": op_s,
        "read_s": read_s,
        "create_s": create_s,
        "fsync_s": statistics.median(syncs),
    }


def measure_dcp(ranks: int, tensors: int) -> Terms:
    """What torch's default planner takes for so many tensors of so many ranks, each cut over all of
    them.
    """
    from torch import Size, float32
    from torch.distributed.checkpoint import DefaultSavePlanner, metadata, planner
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    names = [f"model.layers.{index // 9}.attention.w{index % 9}.weight" for index in range(tensors)]
    paths = {fqn: ("model", fqn[6:]) for fqn in names}

    def item(fqn: str, rank: int) -> planner.WriteItem:
        chunk = metadata.ChunkStorageMetadata(Size((64 * rank, 0)), Size((64, 4096)))
        data = planner.TensorWriteData(
            chunk, metadata.TensorProperties(float32), Size((64 * ranks, 4096))
        )
        index = metadata.MetadataIndex(fqn, chunk.offsets)
        return planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data)

    def written(item: planner.WriteItem) -> WriteResult:
        return WriteResult(item.index, 1 << 20, _StorageInfo("__12345_0.distcp", 1 << 30, 1 << 20))

    times = [time.perf_counter()]
    plans = [
        planner.SavePlan([item(fqn, rank) for fqn in names], planner_data=paths)
        for rank in range(ranks)
    ]
    sent = [pickle.dumps(plan) for plan in plans]
    times.append(time.perf_counter())
    planned, content = DefaultSavePlanner().create_global_plan(
        [pickle.loads(plan) for plan in sent]
    )
    _ = [pickle.dumps(plan) for plan in planned]
    times.append(time.perf_counter())
    results = [pickle.dumps([written(item) for item in plan.items]) for plan in planned]
    times.append(time.perf_counter())
    content.storage_data = {
        one.index: one.storage_data for result in results for one in pickle.loads(result)
    }
    pickle.dumps(content)
    local_s, plan_s, _, finish_s = (
        end - start for start, end in pairwise([*times, time.perf_counter()])
    )
    found = {"item_nbytes": sum(map(len, sent)), "result_nbytes": sum(map(len, results))}
    found |= {"item_local_s": local_s, "item_plan_s": plan_s, "item_finish_s": finish_s}
    return {name: value / ranks / tensors for name, value in found.items()}


def print_measured(folder: Path) -> None:
    """Measure, and print what was found as a table and as options."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="sidesave-scale-") as place:
        found = measure_records() | measure_storage(Path(place)) | measure_dcp(128, 300)
    rows = [
        {"input": k, "measured": f"{v:.3g}", "default": f"{getattr(Inputs, k):.3g}"}
        for k, v in found.items()
    ]
    grid("Measured here", rows)
    print(
        "\n" + " ".join(f"--{name.replace('_', '-')} {value:.3g}" for name, value in found.items())
    )


@dataclass(frozen=True, kw_only=True)
class Command(Inputs):
    """Model what a checkpoint costs at many ranks. Defaults are assumed, but for those `measured`
    on 2 cores, ext4.
    """

    ranks: Annotated[str, Option(help="World sizes, with commas")] = (
        "8,64,512,1024,4096,16384,32768,100000"
    )
    chart: Annotated[Path | None, Option(help="Draw the latencies into this file")] = None
    measure: Annotated[
        bool, Option("--measure", help="Measure what can be measured here, in --dir")
    ] = False
    dir: Annotated[Path, Option(help="Where to measure")] = Path()
    validate: Annotated[
        Path | None, Option(exists=True, help="Real runs: ranks, commit_s, manifest_nbytes")
    ] = None

    def __post_init__(self) -> None:
        inputs = Inputs(**{field.name: getattr(self, field.name) for field in fields(Inputs)})
        if self.measure:
            print_measured(self.dir)
        elif self.validate is not None:
            print_validation(inputs, self.validate)
        else:
            print_model(inputs, [int(ranks) for ranks in self.ranks.split(",")])
        if self.chart is not None:
            draw(inputs, self.chart)


if __name__ == "__main__":
    typer.run(Command)
