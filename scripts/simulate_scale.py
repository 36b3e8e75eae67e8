"""What a checkpoint costs at 8 to 100,000 ranks: a model of this protocol, of a tree of records, and of DCP's planning.

python -m scripts.simulate_scale                          the tables, with the defaults below
python -m scripts.simulate_scale --chart docs/scale.png   and a picture
python -m scripts.simulate_scale --measure                what can be measured here, printed as options to pass
python -m scripts.simulate_scale --validate runs.json     the model against real runs

`docs/scale.md` derives the formulas and says what the model leaves out.
"""

from __future__ import annotations

import json
import math
import mmap
import pickle
import statistics
import tempfile
import time
from collections import Counter
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

from sidesave.writer_daemon.assembly import assemble
from sidesave.writer_daemon.layout import Layout, Part, Table, TensorInfo
from sidesave.writer_daemon.manifest import FileRecord, Manifest, RankRecord, rank_file
from sidesave.writer_daemon.storage.posix import PosixStorage

Terms = dict[str, float]
NAME_OPS = 3  # changes of names for a published file: create, link, unlink (`PosixStorage.publish`)
COMMIT_OPS = 12  # operations of a commit whatever the ranks: lease, small listings, mode, rename, syncs
LIST_OPS = 2  # open and list
MAX_LOAD = 0.9  # polls take no more of the metadata server's time: from there on they wait for each other
TURNS = 16  # positions over which the wait of a loop is averaged
MANIFEST_NBYTES = 400  # beside ranks, layouts and tensors
CHANGES: dict[str, dict[str, float]] = {
    "others look less often": {"wait_ops": 2, "wait_rate": 20e3},
    "no pause for what was read": {"idle_reading": 0.0},
    "records in a directory of their own": {"listed": 1},
    "32 readers": {"readers": 32},
}
GROUP_ENTRY_NBYTES = 64  # of a rank in a group's record, beside the manifest's entry: the sum of its cells, its bytes


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the model is told. `measured` means here, on 2 cores with ext4; all else is assumed, with its source."""

    bytes_per_rank: Annotated[float, Option(help="Llama 3 405B: 1 MB to 4 GB a GPU (arXiv 2407.21783, 3.3.1)")] = 1e9
    fqns: Annotated[int, Option(help="Tensors: Llama 3 405B has 1,137 parameters, two moments and a step each")] = 4548
    layouts: Annotated[int, Option(help="Distinct ways in which the tensors of one stage are cut: assumption")] = 12
    stages: Annotated[int, Option(help="Parts without a common tensor, at most ranks / 8: Llama 3 405B has 16")] = 16
    containers: Annotated[int, Option(help="Tensor files a rank: model, optimizer, bare tensors")] = 3
    ranks_per_node: Annotated[int, Option(help="Ranks that share one network card for storage")] = 8
    steps_kept: Annotated[int, Option(help="Entries of the run directory: assumption")] = 100
    step_s: Annotated[float, Option(help="Seconds of a training step: assumption")] = 5.0
    save_every_s: Annotated[float, Option(help="Seconds between saves: assumption")] = 600.0
    mtbf_hours: Annotated[float, Option(help="Of one rank. Llama 3: 419 failures, 54 days, 16,384 GPUs")] = 50_676.0
    node_bandwidth: Annotated[float, Option(help="Bytes/s from a node to storage: 100 Gb/s, an assumption")] = 12.5e9
    total_bandwidth: Annotated[float, Option(help="Bytes/s of all storage. Llama 3: 2 TB/s sustained")] = 2e12
    op_s: Annotated[float, Option(help="One metadata operation. Lustre, one client: 2,000 stat/s (Dell)")] = 0.5e-3
    create_s: Annotated[float, Option(help="One change of a name. Lustre, one client: 1,100 creates/s (Dell)")] = 0.9e-3
    create_rate: Annotated[float, Option(help="Changes of names/s of all clients. GPFS: 55,000-68,000 (Dell)")] = 55e3
    lookup_rate: Annotated[float, Option(help="Look-ups/s of all clients. Lustre: 400,000-544,000 (Dell)")] = 400e3
    readdir_rate: Annotated[float, Option(help="Entries/s that one client lists: assumption")] = 250e3
    readdir_total: Annotated[float, Option(help="Entries/s that all clients together list: assumption")] = 10e6
    read_s: Annotated[float, Option(help="Open, read and close a small file, cold: two operations")] = 1e-3
    read_rate: Annotated[float, Option(help="Small files/s read by all clients. GPFS, 4 KiB: 37,000-45,000")] = 40e3
    file_bandwidth: Annotated[float, Option(help="Bytes/s of one file that all nodes read: assumption")] = 10e9
    fsync_s: Annotated[float, Option(help="One fsync: assumption")] = 1e-3
    spread: Annotated[float, Option(help="The last part of writing, in which the records come: assumption")] = 0.1
    poll_s: Annotated[float, Option(help="Rank 0's mean pause between two looks at the records")] = 0.0375
    idle_listing: Annotated[float, Option(help="And at least so many times the listing of a look")] = 2.0
    idle_reading: Annotated[float, Option(help="And so many times the reading of a look")] = 2.0
    readers: Annotated[int, Option(help="Threads that read records")] = 1
    listed: Annotated[int, Option(help="Entries a rank has where rank 0 looks; 0: all of its files")] = 0
    wait_s: Annotated[float, Option(help="Another rank's mean pause between two looks at the run directory")] = 0.75
    wait_ops: Annotated[int, Option(help="Of such a look: list two directories, read the lease")] = 6
    wait_rate: Annotated[float, Option(help="Such looks/s of all ranks at most; 0: no limit")] = 0.0
    seen_manifest: Annotated[bool, Option(help="Each rank reads the manifest to know the commit, else its record")] = (
        True
    )
    group: Annotated[int, Option(help="Ranks in a group of the tree")] = 256
    record_nbytes: Annotated[float, Option(help="A record without tensors: measured")] = 1230.0
    fqn_nbytes: Annotated[float, Option(help="A tensor in a record or the manifest: measured")] = 63.0
    cell_nbytes: Annotated[float, Option(help="A cell of a layout, owner and border: measured")] = 12.0
    entry_nbytes: Annotated[float, Option(help="A rank in the manifest: measured")] = 86.0
    record_read_s: Annotated[float, Option(help="Check and parse a record, processor alone: measured")] = 42e-6
    fqn_read_s: Annotated[float, Option(help="The same for a tensor of a record: measured")] = 1.9e-6
    cell_read_s: Annotated[float, Option(help="The same for a cell: measured")] = 0.24e-6
    entry_read_s: Annotated[float, Option(help="The same for a rank of a manifest: measured")] = 3.1e-6
    record_build_s: Annotated[float, Option(help="From records to manifest, for each record: measured")] = 18e-6
    fqn_build_s: Annotated[float, Option(help="The same for each tensor: measured")] = 4.7e-6
    cell_build_s: Annotated[float, Option(help="The same for each cell: measured")] = 0.44e-6
    entry_build_s: Annotated[float, Option(help="Encode a rank of the manifest: measured")] = 0.7e-6
    item_nbytes: Annotated[float, Option(help="DCP: a tensor in a pickled plan: measured")] = 221.0
    result_nbytes: Annotated[float, Option(help="DCP: a tensor in a pickled write result: measured")] = 133.0
    metadata_nbytes: Annotated[float, Option(help="DCP: a piece of a tensor in .metadata: measured")] = 176.0
    item_local_s: Annotated[float, Option(help="DCP: build and pickle a plan, each tensor of a rank: measured")] = 31e-6
    item_plan_s: Annotated[float, Option(help="DCP: rank 0's planning, each tensor of each rank: measured")] = 53e-6
    item_finish_s: Annotated[float, Option(help="DCP: rank 0's metadata, each tensor of each rank: measured")] = 30e-6
    message_s: Annotated[float, Option(help="DCP: a message at rank 0, gloo over TCP: assumption")] = 20e-6
    net_bandwidth: Annotated[float, Option(help="DCP: bytes/s into rank 0, gloo over TCP: assumption")] = 3e9

    @property
    def files(self) -> int:
        """Files of a rank: tensors with their digest lists, objects, record."""
        return 2 * self.containers + 2

    def cells(self, ranks: int) -> int:
        """Cells of all distinct layouts: each rank has one in each layout of its stage."""
        return self.layouts * ranks

    def items(self, ranks: int) -> float:
        """Tensors of which one rank holds a piece."""
        return self.fqns / max(1, min(self.stages, ranks / 8))

    def table_nbytes(self, ranks: int) -> float:
        """Tensors and layouts, each of which stands in one record, and again in the manifest."""
        return self.fqns * self.fqn_nbytes + self.cells(ranks) * self.cell_nbytes

    def records_nbytes(self, ranks: int) -> float:
        return ranks * self.record_nbytes + self.table_nbytes(ranks)

    def manifest_nbytes(self, ranks: int) -> float:
        return MANIFEST_NBYTES + ranks * self.entry_nbytes + self.table_nbytes(ranks)

    def listing_s(self, entries: float) -> float:
        return LIST_OPS * self.op_s + entries / self.readdir_rate

    def publishing_s(self, nbytes: float) -> float:
        return NAME_OPS * self.create_s + 2 * self.fsync_s + nbytes / self.node_bandwidth

    def awaiting(self, ranks: int, entries: float, files: int, processor_s: float, hosts: int = 1) -> Terms:
        """Seconds after the last of some files has come until one who lists and reads in turn has read all of them.

        Files come evenly. Of the threads that read one at a time computes; as many hosts do the same. A mean over where
        in its turn the loop is when the first file comes.
        """
        spread_s = self.spread * sum(writing(self, ranks).values())
        each_s = max(processor_s, (processor_s + self.read_s) / self.readers, hosts / self.read_rate)
        listing_s, waits = self.listing_s(entries), Counter[str]()
        for phase in range(TURNS):
            now = -phase / TURNS * (listing_s + max(self.poll_s, self.idle_listing * listing_s))
            seen, reading_s = 0, 0.0
            while seen < files:
                come = files if now >= spread_s else int(files * max(0.0, now) / spread_s)
                reading_s, seen = (come - seen) * each_s, come
                now += listing_s + reading_s
                if seen < files:
                    now += max(self.poll_s, self.idle_listing * listing_s + self.idle_reading * reading_s)
            waits.update(notice=(now - spread_s - reading_s) / TURNS, read=reading_s / TURNS)
        return dict(waits)

    def polled(self, ranks: int) -> tuple[Inputs, float, float]:
        """This while every rank polls for the commit (one queue); the pause of each, and the server's load."""
        least_s = ranks * self.wait_ops / MAX_LOAD / self.lookup_rate
        pause_s = max(self.wait_s, least_s, ranks / self.wait_rate if self.wait_rate else 0)
        load = ranks * self.wait_ops / pause_s / self.lookup_rate
        latencies = {name: getattr(self, name) / (1 - load) for name in ("op_s", "create_s", "read_s")}
        return replace(self, **latencies), pause_s, load


def writing(inputs: Inputs, ranks: int, files: int = 0, name_ops: int = NAME_OPS) -> Terms:
    """Seconds until the slowest rank has written: its bytes, and the names of its files."""
    shared, files = inputs.ranks_per_node / inputs.node_bandwidth, files or inputs.files
    return {
        "bytes": inputs.bytes_per_rank * max(shared, ranks / inputs.total_bandwidth),
        "names": files * max(name_ops * inputs.create_s + inputs.fsync_s, ranks * name_ops / inputs.create_rate),
    }


def flat(inputs: Inputs, ranks: int) -> Terms:
    """Seconds from the last record to the commit: rank 0 reads every record itself."""
    now, cells, listed = inputs.polled(ranks)[0], inputs.cells(ranks), ranks * (inputs.listed or inputs.files)
    waits = now.awaiting(ranks, listed, ranks, now.record_read_s)
    return {
        "notice": waits["notice"],
        "read": waits["read"] + now.fqns * now.fqn_read_s + cells * now.cell_read_s,
        "build": ranks * now.record_build_s + now.fqns * now.fqn_build_s + cells * now.cell_build_s,
        "publish": COMMIT_OPS * now.op_s + now.listing_s(listed) + now.publishing_s(now.manifest_nbytes(ranks)),
    }


def tree(inputs: Inputs, ranks: int, group: int = 0) -> Terms:
    """The same where the first rank of each group merges its group's records, which have a directory of their own."""
    group = min(ranks, group or inputs.group)
    now, groups, cells = inputs.polled(ranks)[0], math.ceil(ranks / group), inputs.cells(ranks)
    parsing_s = now.fqns * now.fqn_read_s + cells * now.cell_read_s
    building_s = now.fqns * now.fqn_build_s + cells * now.cell_build_s
    own, above = (
        now.awaiting(ranks, group, group, now.record_read_s, groups),
        now.awaiting(ranks, groups, groups, group * now.entry_read_s),
    )
    merging_s = group * now.record_build_s + (parsing_s + building_s) / groups
    merged = now.table_nbytes(ranks) / groups + group * (now.entry_nbytes + GROUP_ENTRY_NBYTES)
    return {
        "group": sum(own.values()) + merging_s + now.publishing_s(merged),
        "notice": above["notice"],
        "read": above["read"] + parsing_s,
        "build": ranks * now.entry_build_s + building_s,
        "publish": COMMIT_OPS * now.op_s + now.publishing_s(now.manifest_nbytes(ranks)),
    }


def best_group(inputs: Inputs, ranks: int) -> int:
    sizes = [2**power for power in range(2, 14) if 2**power < 2 * ranks]
    return min(sizes, key=lambda size: sum(tree(inputs, ranks, size).values()))


def others(inputs: Inputs, ranks: int) -> Terms:
    """Seconds until another rank knows of a commit; and more for the first save, when all agree on plain tensors."""
    now, pause_s, _ = inputs.polled(ranks)
    served_s = ranks / inputs.ranks_per_node * inputs.manifest_nbytes(ranks) / inputs.file_bandwidth
    knows_s = served_s if inputs.seen_manifest else ranks / inputs.read_rate
    entries = ranks * (inputs.containers + 1)  # unfinished tensor files, and a claim of each rank
    told_s = max(now.listing_s(entries), ranks * entries / inputs.readdir_total)
    return {
        "seen": pause_s / 2 + now.listing_s(now.steps_kept) + now.read_s + knows_s,
        "first save": told_s + ranks * now.create_s,  # rank 0 removes the claims
    }


def dcp(inputs: Inputs, ranks: int) -> Terms:
    """DCP's default planner: plans to rank 0, a global plan, back; one file a rank; results to rank 0, metadata."""
    items, messages_s = inputs.items(ranks), 2 * ranks * inputs.message_s  # the sizes, then the objects
    local_s, moved_s = items * inputs.item_local_s, ranks * items / inputs.net_bandwidth
    file_s = ranks * items * inputs.metadata_nbytes / inputs.node_bandwidth
    return {
        "plan": local_s + 2 * (messages_s + moved_s * inputs.item_nbytes) + ranks * items * inputs.item_plan_s,
        "cached": local_s + 2 * messages_s,
        "write": sum(writing(inputs, ranks, files=1, name_ops=1).values()),
        "finish": messages_s + moved_s * inputs.result_nbytes + ranks * items * inputs.item_finish_s + file_s,
    }


# What is printed -------------------------------------------------------------------------------------------------


def number(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return "<0.001" if 0 < value < 0.001 else f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.2g}"


def grid(title: str, rows: Sequence[Mapping[str, str | float]]) -> None:
    """Print a table that is Markdown as well."""
    table = Grid(*rows[0], box=box.MARKDOWN)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*map(number, row.values()))
    console = Console(width=200, highlight=False)
    console.print(f"\n{title}")
    console.print(table)


def total(protocol: Callable[[Inputs, int], Terms], inputs: Inputs, ranks: int) -> float:
    return sum(protocol(inputs, ranks).values())


def changes(inputs: Inputs) -> dict[str, Callable[[int], float]]:
    """What one change after the other brings."""
    steps = [inputs]
    for change in CHANGES.values():
        steps.append(replace(steps[-1], **change))
    flats = [lambda ranks, to=to: total(flat, to, ranks) for to in steps]
    found = dict(zip(("flat", *CHANGES), flats, strict=True))
    found["tree"] = lambda ranks: total(tree, inputs, ranks)
    found["tree, and all of that"] = lambda ranks: total(tree, steps[-1], ranks)
    return found


def print_model(inputs: Inputs, counts: Sequence[int]) -> None:
    """Print the tables of `docs/scale.md`."""
    flats, trees, peers, days = [], [], [], []
    for ranks in counts:
        name, write, load = {"ranks": f"{ranks:,}"}, writing(inputs, ranks), inputs.polled(ranks)[2]
        own, merged, other = flat(inputs, ranks), tree(inputs, ranks), dcp(inputs, ranks)
        commit, with_tree, best = sum(own.values()), sum(merged.values()), best_group(inputs, ranks)
        sizes = {"records MB": inputs.records_nbytes(ranks) / 1e6, "manifest MB": inputs.manifest_nbytes(ranks) / 1e6}
        row = name | write | {"entries listed": ranks * (inputs.listed or inputs.files)} | sizes | own
        row |= {"commit": commit, "dominates": max(own, key=own.__getitem__)}
        flats.append(row | others(inputs, ranks) | {"polls load": f"{load:.0%}"})
        row = name | {"groups": math.ceil(ranks / inputs.group)} | merged | {"commit": with_tree}
        row |= {"dominates": max(merged, key=merged.__getitem__), "flat / tree": commit / with_tree}
        trees.append(row | {"best group": best, "its commit": sum(tree(inputs, ranks, best).values())})
        items, plan_s, failures = ranks * inputs.items(ranks), other["plan"], 24 * ranks / inputs.mtbf_hours
        row = name | {"items": items, "plans GB": items * inputs.item_nbytes / 1e9} | other
        row |= {"plan in steps": plan_s / inputs.step_s}
        peers.append(row | {"hours a day": 24 * plan_s / (inputs.save_every_s + plan_s)})
        lags = {"flat": sum(write.values()) + commit, "tree": sum(write.values()) + with_tree}
        lags |= {f"DCP, {plan}": other[plan] + other["write"] + other["finish"] for plan in ("cached", "plan")}
        row = name | {"failures": failures, "interval": failures * inputs.save_every_s / 7200}
        in_time = {who: lag_s < inputs.save_every_s for who, lag_s in lags.items()}
        days.append(row | {who: failures * lags[who] / 3600 if in_time[who] else "never done" for who in lags})
    steps = [{"": name} | {f"{ranks:,}": commit(ranks) for ranks in counts} for name, commit in changes(inputs).items()]
    grid("Flat. Seconds to write bytes and names; from the last record to the commit; until others have seen it", flats)
    grid(f"Tree of groups of {inputs.group}. Seconds from the last record to the commit", trees)
    grid("One change after the other. Seconds from the last record to the commit", steps)
    grid("DCP. Seconds; hours a day that dcp.save spends on planning", peers)
    grid("A day. Failures; hours lost because saves are apart, and because one was not committed yet", days)
    worlds = [round(8 * 1.02**power) for power in range(479)]
    bent = [str(ranks) for ranks in worlds if total(flat, inputs, ranks) > 2 * total(flat, inputs, 8)]
    better = [str(ranks) for ranks in worlds if total(tree, inputs, ranks) < total(flat, inputs, ranks)]
    print(
        f"\nFlat takes twice as long as at 8 ranks from {bent[:1]} ranks on; the tree is faster from {better[:1]} on."
    )


def draw(inputs: Inputs, path: Path) -> None:
    """Draw the latencies over the ranks, both logarithmic."""
    from matplotlib.figure import Figure  # only a chart needs it

    counts = [round(8 * 1.1**power) for power in range(100)]
    figure = Figure(figsize=(8, 5.4), layout="constrained")
    axes = figure.subplots()
    commits = changes(inputs)
    commits = {
        f"sidesave: flat, with: {name}" if name in CHANGES else f"sidesave: {name}": commits[name] for name in commits
    }
    for (name, commit), style in zip(commits.items(), ("C1-", "C1--", "", "", "C1:", "C2-", "C2:"), strict=True):
        if style:
            axes.loglog(counts, [commit(ranks) for ranks in counts], style, label=name)
    terms = {"plan": "DCP: planning", "cached": "DCP: planning, cached", "finish": "DCP: last write to .metadata"}
    for (term, name), style in zip(terms.items(), ("C0-", "C0:", "C0--"), strict=True):
        axes.loglog(counts, [dcp(inputs, ranks)[term] for ranks in counts], style, label=name)
    axes.axhline(inputs.step_s, color="0.6", linewidth=0.8)
    axes.annotate("a training step", (20_000, inputs.step_s * 0.7), color="0.4", fontsize=8)
    axes.set(xlabel="ranks", ylabel="seconds")
    axes.set_title("From the last rank's record to the commit, and what DCP spends in its place (model)", fontsize=10)
    axes.grid(which="major", color="0.9")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)


def print_validation(inputs: Inputs, path: Path) -> None:
    """Print the model beside real runs: a JSON list of ``{"ranks": n, "commit_s": x, "manifest_nbytes": b}``."""
    rows = []
    for run in json.loads(path.read_text()):
        ranks, row = run["ranks"], {"ranks": f"{run['ranks']:,}"}
        pairs = {"commit_s": total(flat, inputs, ranks), "manifest_nbytes": inputs.manifest_nbytes(ranks)}
        for name, model in pairs.items():
            row |= {f"{name}: model": number(model), "measured " + name: number(run[name])}
            row["ratio of " + name] = f"{run[name] / model:.2f}"
        rows.append(row)
    grid("The model against real runs; a ratio is measured / model", rows)


# What can be measured here ---------------------------------------------------------------------------------------


def seconds(work: Callable[[], object], rounds: int = 5) -> float:
    """The fastest of some rounds: what else the machine does only adds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


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
    table = Table(tensors, tuple(Layout(who, (where, (0, 4096))) for who, where in zip(owners, cuts, strict=True)))
    digest, sums = "0123456789abcdef" * 2, table.sums()

    def record(rank: int) -> RankRecord:
        def file(container: str) -> FileRecord:
            digests = FileRecord(rank_file(container, rank, "xxh3"), 75_360, digest)
            return FileRecord(rank_file(container, rank, "safetensors"), 1_234_567_890, None, container, digests)

        part = Part(table.only(described[rank]), cells=sums.get(rank, 0), skeleton=digest, replicas=digest)
        objects = FileRecord(rank_file("objects", rank, "msgpack"), 4321, digest)
        files, parent = tuple(map(file, ("model", "optimizer", "tensors"))), (900, digest[16:])
        return RankRecord(
            digest[16:], 1000, 100, rank, ranks, parent, False, 1789000000.5, "2.13.0", files, objects, part
        )

    return [record(rank) for rank in range(ranks)]


def measure_records() -> Terms:
    """Bytes and processor time of records and manifests: slopes, each from two sizes."""

    def measure(ranks: int, fqns: int, layouts: int) -> list[float]:
        records = make_records(ranks, fqns, layouts)
        data, content = [record.to_bytes() for record in records], assemble(records, "")
        encoded = content.to_bytes()
        times = [seconds(lambda: [RankRecord.from_bytes(one, "") for one in data])]
        times += [seconds(lambda: assemble(records, "").to_bytes()), seconds(lambda: Manifest.from_bytes(encoded, ""))]
        return [sum(map(len, data)), *times, seconds(content.to_bytes), len(encoded)]

    few, some, many = measure(1000, 1, 1), measure(1000, 101, 101), measure(8, 5000, 8)
    cell = [(more - less) / 100 / 1000 for more, less in zip(some, few, strict=True)]
    rank = [whole / 1000 - slope for whole, slope in zip(few, cell, strict=True)]
    fqn = [(whole - 8 * slope) / 5000 for whole, slope in zip(many, rank, strict=True)]
    found: Terms = dict(zip(("entry_read_s", "entry_build_s", "entry_nbytes"), rank[3:], strict=True))
    for name, slopes in {"record": rank, "fqn": fqn, "cell": cell}.items():
        found |= {f"{name}_{what}": slopes[index] for index, what in enumerate(("nbytes", "read_s", "build_s"))}
    return found


def measure_storage(folder: Path) -> Terms:
    """The file system under ``folder``, through the daemon's own operations; all of it is in the page cache."""
    storage = PosixStorage(str(folder))
    page, content, rates, syncs = memoryview(mmap.mmap(-1, 4096)), b"x" * 1230, [0.0], [0.0]
    for count in (10_000, 1_000, 100_000):
        (folder / str(count)).mkdir()
        for index in range(count):
            path = folder / str(count) / f"rank-{index:05d}.json"
            if count == 10_000:
                path.write_bytes(content)
            else:  # names are all that a listing sees
                path.hardlink_to(folder / f"10000/rank-{index % 10_000:05d}.json")
        rates.append(count / seconds(lambda name=str(count): storage.list_directory(name)))
        print(f"listing {count:>7,} entries: {rates[-1]:,.0f} entries/s")

    def publish(path: str) -> None:
        with storage.creating(f"{path}.new", len(content)) as output:
            output.write_at(page, 0)
            syncs.append(seconds(lambda: output.finish(len(content)), 1))
        storage.publish(f"{path}.new", path)

    paths = [f"10000/rank-{index:05d}.json" for index in range(10_000)]
    read_s = seconds(lambda: [storage.read(path, 4096) for path in paths]) / len(paths)
    names = [seconds(lambda path=f"1000/new-{n}": publish(path), 1) - syncs[-1] for n in range(300)]
    create_s = statistics.median(names) / NAME_OPS
    op_s = seconds(lambda: [storage.list_directory("") for _ in range(1000)]) / 1000 / POLL_OPS
    storage.close()
    found = {
        "readdir_rate": rates[-1],
        "op_s": op_s,
        "lookup_rate": 1 / op_s,
        "read_s": read_s,
        "read_rate": 1 / read_s,
    }
    return found | {"create_s": create_s, "create_rate": 1 / create_s, "fsync_s": statistics.median(syncs)}


def measure_dcp(ranks: int, tensors: int) -> Terms:
    """What torch's default planner takes for so many tensors of so many ranks, each cut over all of them."""
    from torch import Size, float32
    from torch.distributed.checkpoint import DefaultSavePlanner, metadata, planner
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    names = [f"model.layers.{index // 9}.attention.w{index % 9}.weight" for index in range(tensors)]
    paths = {fqn: ("model", fqn[6:]) for fqn in names}

    def item(fqn: str, rank: int) -> planner.WriteItem:
        chunk = metadata.ChunkStorageMetadata(Size((64 * rank, 0)), Size((64, 4096)))
        data = planner.TensorWriteData(chunk, metadata.TensorProperties(float32), Size((64 * ranks, 4096)))
        index = metadata.MetadataIndex(fqn, chunk.offsets)
        return planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=data)

    def written(item: planner.WriteItem) -> WriteResult:
        return WriteResult(item.index, 1 << 20, _StorageInfo("__12345_0.distcp", 1 << 30, 1 << 20))

    times = [time.perf_counter()]
    plans = [planner.SavePlan([item(fqn, rank) for fqn in names], planner_data=paths) for rank in range(ranks)]
    sent = [pickle.dumps(plan) for plan in plans]
    times.append(time.perf_counter())
    planned, content = DefaultSavePlanner().create_global_plan([pickle.loads(plan) for plan in sent])
    _ = [pickle.dumps(plan) for plan in planned]
    times.append(time.perf_counter())
    results = [pickle.dumps([written(item) for item in plan.items]) for plan in planned]
    times.append(time.perf_counter())
    content.storage_data = {one.index: one.storage_data for result in results for one in pickle.loads(result)}
    file = pickle.dumps(content)
    local_s, plan_s, _, finish_s = (end - start for start, end in pairwise([*times, time.perf_counter()]))
    found = {"item_nbytes": sum(map(len, sent)), "result_nbytes": sum(map(len, results)), "metadata_nbytes": len(file)}
    found |= {"item_local_s": local_s, "item_plan_s": plan_s, "item_finish_s": finish_s}
    return {name: value / ranks / tensors for name, value in found.items()}


def print_measured(folder: Path) -> None:
    """Measure, and print what was found as a table and as options."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="sidesave-scale-") as place:
        found = measure_records() | measure_storage(Path(place)) | measure_dcp(128, 300)
    rows = [{"input": k, "measured": f"{v:.3g}", "default": f"{getattr(Inputs, k):.3g}"} for k, v in found.items()]
    grid("Measured here", rows)
    print("\n" + " ".join(f"--{name.replace('_', '-')} {value:.3g}" for name, value in found.items()))


@dataclass(frozen=True, kw_only=True)
class Command(Inputs):
    """Model what a checkpoint costs at many ranks. Defaults are assumed, but for those `measured` on 2 cores, ext4."""

    ranks: Annotated[str, Option(help="World sizes, with commas")] = "8,64,512,1024,4096,16384,32768,100000"
    chart: Annotated[Path | None, Option(help="Draw the latencies into this file")] = None
    measure: Annotated[bool, Option("--measure", help="Measure what can be measured here, in --dir")] = False
    dir: Annotated[Path, Option(help="Where to measure")] = Path()
    validate: Annotated[Path | None, Option(help="JSON list of real runs: ranks, commit_s, manifest_nbytes")] = None

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
