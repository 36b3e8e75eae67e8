"""What it costs that several ranks make one checkpoint: real rank processes on this machine, joined
by gloo.

    python -m scripts.bench.ranks                            all of it
    python -m scripts.bench.ranks commit --json runs.json    and `python -m scripts.simulate_scale
                                                             --validate runs.json`

    calls    does a save of the same bytes a rank cost a rank more where there are more of them?
    bytes    what does it cost to compare what nobody has declared, beside sidesave.Replicated?
    commit   how long after the last rank has written is the checkpoint there, and how large is its
             manifest?
    reshard  how fast does it come back on another number of ranks, beside
             torch.distributed.checkpoint?

All worlds of a measurement live at the same time and take turns, so that ratios between them are of
the same minutes; those whose turn it is not wait in a read. Where a figure is per rank, ranks take
turns as well: processors are few.
"""

import argparse
import json
import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import sidesave
from scripts.bench.common import arguments, rotated, settle, workspace
from scripts.bench.load import RESIDENT_LIMIT, make_cold, make_warm
from scripts.bench.peers import DEADLINE_S, PlainWriter
from scripts.bench.report import Report, Series, machine, median, ratios, spread
from scripts.bench.world import (
    Rank,
    World,
    build_giant,
    build_own,
    build_replicated,
    build_sharded,
    build_transformer,
    check,
    fill,
    sharded,
    worlds,
)
from sidesave.client.loading.load import LoadRequest

MIB = 1 << 20
BASE = 2  # the world size that the others are compared with: one rank alone has nobody to think of
REPLICAS = 4  # ranks that hold the same
STEP = 1  # of what is saved to be loaded
Seconds = defaultdict[int, list[float]]
Prepare = Callable[[Rank, Path], Callable[[], object]]


# A rank's checkpointer ----------------------------------------------------------------------------


def open_run(rank: Rank, directory: Path, slots: int = 2) -> None:
    """Start this rank's checkpointer, instead of the one before."""
    close_run(rank)
    rank.checkpointer = sidesave.Checkpointer(
        directory, staging=sidesave.StagingOptions(slots=slots)
    )


def close_run(rank: Rank) -> None:
    """Let others have the directory."""
    if rank.checkpointer is not None:
        rank.checkpointer.close()


def save_and_wait(rank: Rank, step: int) -> Path:
    """Save; the path of the checkpoint."""
    rank.handle = rank.checkpointer.save(step, rank.state)
    return await_commit(rank)


def await_commit(rank: Rank) -> Path:
    """Wait for the last save; the path of the checkpoint."""
    return Path(rank.handle.committed.result(DEADLINE_S).path)


# calls --------------------------------------------------------------------------------------------


class Training:
    """Work of about ``step_s`` seconds on all cores, in the place of a training step."""

    def __init__(self, step_s: float) -> None:
        self._factors = torch.rand(2, 1024, 1024)
        self._product = torch.empty(1024, 1024)
        self.loops = 1
        self.step()
        self.loops = max(1, round(step_s / min(self.step() for _ in range(5))))

    def step(self) -> float:
        """Do it; return seconds."""
        start = time.perf_counter()
        for _ in range(self.loops):
            torch.mm(self._factors[0], self._factors[1], out=self._product)
        return time.perf_counter() - start


def time_save(rank: Rank, step: int, step_s: float) -> tuple[float, float]:
    """Seconds of the call of one save, and that it adds to a training step; nobody else may be at
    work.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # the writer shall find no core idle
    training = Training(step_s)
    torch._foreach_add_(rank.tensors, 1e-3)
    settle(sum(tensor.nbytes for tensor in rank.tensors))
    without = [training.step()]
    start = time.perf_counter()
    rank.handle = rank.checkpointer.save(step, rank.state)
    called = time.perf_counter()
    training.step()
    finished = time.perf_counter()
    rank.handle.written.result(DEADLINE_S)
    without.append(training.step())
    return called - start, finished - start - statistics.mean(without)


def measure_calls(args: argparse.Namespace, folder: Path, report: Report) -> None:
    """Save the same bytes a rank in worlds of several sizes, one rank after the other."""
    rows: list[list[str]] = []
    for name, build in {
        "its own plain tensors": build_own,
        "a shard of an FSDP2 module": build_sharded,
    }.items():
        call_s, added_s = Seconds(list), Seconds(list)
        with worlds(args.worlds or (1, 2, 4, 8), folder) as started:
            runs = {world: folder / f"{build.__name__}-{world.size}" for world in started}
            for world, run in runs.items():
                world.all(build, args.mb * MIB)
                world.all(open_run, run)
                world.all(save_and_wait, 0)
            for turn in range(1, args.rounds + 1):
                for world in rotated(started, turn):
                    discard(runs[world])
                    times = world.each(time_save, turn, args.step)
                    world.all(await_commit)
                    call_s[world.size].append(statistics.median(call for call, _ in times))
                    added_s[world.size].append(statistics.median(added for _, added in times))
        for size, taken in sorted(call_s.items()):
            against = median(ratios(taken, call_s.get(BASE, [])))
            rows.append(
                [name, str(size), spread(taken, 1e3), against, spread(added_s[size], 1e3, 1)]
            )
        report.panel(
            f"save(), {name}",
            "ms",
            {f"{n} ranks": [1e3 * s for s in call_s[n]] for n in sorted(call_s)},
        )
    report.note(
        f"Calls: {args.mb} MiB a rank, {args.rounds} rounds, ranks one after the other. Of each "
        "round the median over ranks; min / median / max over rounds. Added: to a step of "
        f"{args.step} s."
    )
    report.table(("a rank saves", "ranks", "call, ms", f"/ {BASE} ranks", "added, ms"), rows)


def discard(run: Path) -> None:
    """Delete all checkpoints of a run."""
    for path in run.glob("step-*"):
        shutil.rmtree(path)


# bytes --------------------------------------------------------------------------------------------


def shares(checkpoint: Path) -> list[int]:
    """Bytes of tensors that each rank has written."""
    found = [0] * REPLICAS
    for path in checkpoint.glob("*.safetensors"):
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        found[int(path.name.split(".")[-2].removeprefix("rank-"))] += (
            path.stat().st_size - 8 - header
        )
    return found


def declare(rank: Rank) -> None:
    """Say that all ranks hold the same."""
    rank.state = {name: sidesave.Replicated(item) for name, item in rank.state.items()}


def differ(rank: Rank) -> None:
    """Hold another number than the other ranks, in the midst of the largest tensor."""
    flat = max(rank.tensors, key=lambda tensor: tensor.nbytes).view(-1)
    flat[len(flat) // 3] += rank.number


@dataclass(frozen=True, slots=True)
class Cost:
    """What a save takes of a rank: staging memory, seconds of the call, of its writer's processors,
    until written.
    """

    staged: int
    call_s: float
    processor_s: float
    held_s: float
    path: Path


def time_cost(rank: Rank, step: int, late_s: float) -> Cost:
    """Save, the last rank so late."""
    writer = psutil.Process(rank.checkpointer.daemon_pid)
    dist.barrier()
    if rank.number == rank.size - 1:
        time.sleep(late_s)
    before, start = sum(writer.cpu_times()[:2]), time.monotonic()
    rank.handle = rank.checkpointer.save(step, rank.state)
    call_s, written = time.monotonic() - start, moment_of(rank.handle.written)
    path = await_commit(rank)
    used_s = sum(writer.cpu_times()[:2]) - before
    staged = sum(
        slot.arena.data_nbytes
        for slot in rank.checkpointer.session.pool._slots
        if slot.arena is not None
    )
    return Cost(staged, call_s, used_s, written.result() - start, path)


def measure_bytes(args: argparse.Namespace, folder: Path, report: Report) -> None:
    """Save what all ranks hold: compared and found equal, compared and found different,
    declared.
    """
    rows: list[list[str]] = []
    sizes: dict[str, str] = {}
    for name, build in {
        "model and AdamW": build_replicated,
        "one giant tensor": build_giant,
    }.items():
        for how, change in {
            "compared, equal": None,
            "compared, different": differ,
            "Replicated": declare,
        }.items():
            with worlds([REPLICAS], folder) as (world,):
                nbytes = world.all(build, args.size)[0]
                sizes[name] = f"{nbytes / 1e6:.1f} MB"
                if change is not None:
                    world.all(change)
                run = folder / f"{build.__name__}-{how}"
                world.all(open_run, run, 1)
                world.all(save_and_wait, 0)
                costs: list[Cost] = []
                parts: list[int] = []
                late: list[float] = []
                for turn in range(args.rounds):
                    discard(run)
                    costs += world.all(time_cost, 2 * turn + 1, 0.0)
                    parts = shares(costs[-1].path)
                    discard(run)
                    late.append(world.all(time_cost, 2 * turn + 2, args.late)[0].held_s)
                rows.append(
                    [
                        f"{name}: {how}",
                        f"{max(cost.staged for cost in costs) / nbytes:.2f}",
                        median([cost.call_s for cost in costs], 1e3, 0),
                        median([cost.processor_s for cost in costs], 1e3, 0),
                        median([cost.held_s for cost in costs], 1e3, 0),
                        median(late, 1e3, 0),
                        f"{sum(parts) / nbytes:.4f}",
                        f"{max(parts) * REPLICAS / sum(parts):.3f}",
                    ]
                )
                discard(run)
    report.note(
        f"Bytes: {sizes}; {REPLICAS} ranks, {args.rounds} rounds, medians over all. Staged and on "
        "disk: over the bytes of one rank's tensors. Writer: its processor time. Held: "
        "milliseconds from the call until the slot is free; late: rank 0's, the last rank "
        f"{args.late} s after the others."
    )
    report.table(
        (
            "",
            "staged",
            "call, ms",
            "writer, ms",
            "held, ms",
            "held, late",
            "on disk",
            "largest share / mean",
        ),
        rows,
    )


# commit -------------------------------------------------------------------------------------------


def time_commit(rank: Rank, step: int, late_s: float) -> tuple[float, float, Path]:
    """Save, the last rank so late; when this one was told that its bytes are durable, and of the
    commit.
    """
    dist.barrier()
    if rank.number == rank.size - 1:
        time.sleep(late_s)
    rank.handle = rank.checkpointer.save(step, rank.state)
    written, committed = moment_of(rank.handle.written), moment_of(rank.handle.committed)
    path = await_commit(rank)
    return written.result(), committed.result(), path


def moment_of(future: "Future[Any]") -> "Future[float]":
    """When a future is done, in the thread that learns of it."""
    moment: Future[float] = Future()
    future.add_done_callback(lambda _: moment.set_result(time.monotonic()))
    return moment


def between_files(checkpoint: Path) -> float:
    """Seconds between the last rank's record and the commit, as the file system has noted them."""
    recorded_ns = max(path.stat().st_mtime_ns for path in checkpoint.glob("rank-*.json"))
    return (checkpoint.stat().st_ctime_ns - recorded_ns) / 1e9


def measure_commit(args: argparse.Namespace, folder: Path, report: Report) -> None:
    """Save on all ranks and see how long the last step, which only rank 0 takes, lasts."""
    sizes = args.worlds or (2, 4, 8, 16)
    commit_s, others_s, files_s = Seconds(list), Seconds(list), Seconds(list)
    manifests: dict[int, bytes] = {}
    with worlds(sizes, folder) as started:
        for world in started:
            world.all(build_transformer, "tiny")
            world.all(open_run, folder / f"commit-{world.size}")
            world.all(save_and_wait, 0)
        for turn in range(1, args.saves + 1):
            for world in rotated(started, turn):
                settle(0)
                written, committed, (path, *_) = zip(
                    *world.all(time_commit, turn, args.late), strict=True
                )
                commit_s[world.size].append(committed[0] - max(written))
                others_s[world.size].append(max(committed) - max(written))
                files_s[world.size].append(between_files(path))
                manifests[world.size] = (path / "manifest.json").read_bytes()
                discard(path.parent)
    bodies = {size: json.loads(data) for size, data in manifests.items()}
    fqns, containers, layouts = (
        max(len(body[key]) for body in bodies.values())
        for key in ("tensors", "containers", "layouts")
    )
    report.note(
        f"Commit: milliseconds, {args.saves} saves a world, the last rank {args.late} s after the "
        "others, so that rank 0 already looks as seldom as it does in a long save. From the moment "
        "when that rank is told that its bytes are durable until rank 0 is told of the commit, and "
        "all ranks; and from record to name by the times of files."
    )
    report.note(
        f"Their like in the model: `simulate_scale --fqns {fqns} --layouts {layouts} --containers "
        f"{containers} --stages 1 --validate FILE`."
    )
    report.table(
        ("ranks", "rank 0 knows", "all know", "by the files", "manifest, bytes", "layouts"),
        [
            [
                str(size),
                spread(commit_s[size], 1e3, 1),
                spread(others_s[size], 1e3, 0),
                spread(files_s[size], 1e3, 1),
                f"{len(manifests[size]):,}",
                str(len(bodies[size]["layouts"])),
            ]
            for size in sizes
        ],
    )
    report.panel(
        "Last written to committed",
        "ms",
        {f"{n} ranks": [1e3 * s for s in commit_s[n]] for n in sizes},
    )
    if args.json is not None:
        found = [
            {
                "ranks": n,
                "commit_s": statistics.median(commit_s[n]),
                "manifest_nbytes": len(manifests[n]),
            }
            for n in sizes
        ]
        args.json.write_text(json.dumps(found, indent=1) + "\n")


# reshard ------------------------------------------------------------------------------------------


def state_dicts(rank: Rank) -> dict[str, Any]:
    """The state as torch.distributed.checkpoint wants it; its tensors are the live ones."""
    model, optimizer = rank.state["model"], rank.state["optimizer"]
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def dcp_save(rank: Rank, path: Path) -> None:
    """Save with torch.distributed.checkpoint."""
    dcp.save(state_dicts(rank), storage_writer=PlainWriter(path, sync_files=True))


def sidesave_load(rank: Rank, path: Path) -> Callable[[], object]:
    """What loads, into the module and the optimizer; the run of ``path`` is open."""
    return lambda: rank.checkpointer.load(STEP, into=rank.state)


def dcp_load(rank: Rank, path: Path) -> Callable[[], object]:
    """What loads, into the live tensors."""
    state = state_dicts(rank)
    return lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(path))


def time_load(rank: Rank, prepare: Prepare, path: Path) -> tuple[float, float, int]:
    """Load into tensors that hold something else, and compare; when it began and ended, and bytes
    that were read.
    """
    for _, part in sharded(rank):
        part.fill_(-1)
    load = prepare(rank, path)
    before = bytes_read()
    dist.barrier()
    start = time.monotonic()
    load()
    end = time.monotonic()
    nbytes = bytes_read() - before
    check(rank)
    return start, end, nbytes


def bytes_read() -> int:
    """What this process has read so far, from the page cache or past it."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


def own_count(rank: Rank, path: Path) -> int:
    """Bytes that sidesave says it reads to load."""
    return LoadRequest(into=rank.state, rank=rank.number).read(path).nbytes_read


@dataclass(slots=True)
class Reload:
    """One way to load in one world what another has saved, with what it took: one entry a round."""

    name: str
    world: World
    path: Path
    needed: list[int]
    prepare: Prepare
    cold_s: list[float] = field(default_factory=list)
    warm_s: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    stayed: float = 0.0

    def measure(self) -> None:
        """Load from the cold cache, then from the warm one."""
        self.stayed = max(self.stayed, make_cold(self.path))
        self._time(self.cold_s)
        make_warm(self.path)
        self._time(self.warm_s)

    def _time(self, taken: list[float]) -> None:
        settle(sum(self.needed))
        starts, ends, nbytes = zip(*self.world.all(time_load, self.prepare, self.path), strict=True)
        taken.append(max(ends) - min(starts))
        self.read.append(max(ratios(nbytes, self.needed)))


def count_large_cells(worlds: list[World], folder: Path) -> list[float]:
    """What sidesave reads over what it needs, from the first world to the second and back, for
    large cells.
    """
    wide, narrow = worlds
    nbytes = 64 * MIB
    needed: dict[World, list[int]] = {}
    for world in worlds:
        world.all(close_run)
        needed[world] = world.all(build_sharded, nbytes * wide.size // world.size)
        world.all(open_run, folder / str(world.size))
        world.all(save_and_wait, STEP)
        world.all(close_run)
    found: list[float] = []
    for source, target in ((wide, narrow), (narrow, wide)):
        path = folder / str(source.size)
        target.all(open_run, path)
        told = target.each(own_count, path / f"step-{STEP:08d}")
        target.all(close_run)
        found.append(max(ratios(told, needed[target])))
    return found


def measure_reshard(args: argparse.Namespace, folder: Path, report: Report) -> None:
    """Save on 8 ranks and load on 4, and the other way round, with sidesave and
    torch.distributed.checkpoint.
    """
    reloads: list[tuple[Reload, Reload]] = []
    own: list[str] = []
    with worlds((8, 4), folder) as started:
        needed: dict[World, list[int]] = {}
        saved: dict[World, tuple[Path, Path]] = {}
        for world in started:
            needed[world] = world.all(build_transformer, args.size)
            world.all(fill)
            world.all(open_run, folder / f"sidesave-{world.size}")
            path = world.all(save_and_wait, STEP)[0]
            world.all(close_run)
            world.all(dcp_save, folder / f"dcp-{world.size}")
            saved[world] = path, folder / f"dcp-{world.size}"
        for source, target in (started, reversed(started)):
            paths = saved[source]
            target.all(open_run, paths[0].parent)
            way = f"{source.size} to {target.size}"
            ours = Reload(
                f"{way}: sidesave, verified", target, paths[0], needed[target], sidesave_load
            )
            theirs = Reload(f"{way}: dcp.load", target, paths[1], needed[target], dcp_load)
            reloads.append((ours, theirs))
        for turn in range(args.rounds):
            for reload in rotated([reload for pair in reloads for reload in pair], turn):
                reload.measure()
        for ours, _ in reloads:
            told = ours.world.each(own_count, ours.path)
            own.append(f"{max(ratios(told, ours.needed)):.3f}")
        total = sum(needed[started[0]])
        large = count_large_cells(started, folder / "large")
    report.note(
        f"Reshard: {total / 1e6:.0f} MB of an FSDP2-sharded model and its AdamW, {args.rounds} "
        "rounds. Seconds until the slowest rank has loaded in place: min / median / max; ratios "
        "pair by pair. Read: the most bytes that a rank has read over those it needs; in brackets "
        "sidesave's own count, which leaves the manifest out. It reads whole blocks of 256 KiB: "
        f"where the smaller cells have 4 MiB, it reads {large[0]:.3f} and {large[1]:.3f}."
    )
    stayed = max(reload.stayed for pair in reloads for reload in pair)
    if stayed > RESIDENT_LIMIT:
        report.note(f"NOT COLD: up to {stayed:.0%} of a checkpoint stayed in the page cache.")
    report.table(
        ("", "cold", "/ sidesave", "warm", "/ sidesave", "read / needed"),
        [
            [
                reload.name,
                spread(reload.cold_s),
                median(ratios(reload.cold_s, ours.cold_s)),
                spread(reload.warm_s),
                median(ratios(reload.warm_s, ours.warm_s)),
                median(reload.read, digits=3) + (f" ({count})" if reload is ours else ""),
            ]
            for (ours, theirs), count in zip(reloads, own, strict=True)
            for reload in (ours, theirs)
        ],
    )
    for what, series in {"Cold": "cold_s", "Warm": "warm_s"}.items():
        bars: dict[str, Series] = {
            reload.name: getattr(reload, series) for pair in reloads for reload in pair
        }
        report.panel(what, "s", bars)


MEASUREMENTS = {
    "calls": measure_calls,
    "bytes": measure_bytes,
    "commit": measure_commit,
    "reshard": measure_reshard,
}


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__, rounds=8, peers=False)
    parser.add_argument("what", nargs="*", help=f"among {', '.join(MEASUREMENTS)} (default all)")
    parser.add_argument(
        "--worlds", type=lambda text: [int(n) for n in text.split(",")], help="of calls and commit"
    )
    parser.add_argument("--mb", type=int, default=64, help="calls: MiB a rank (default 64)")
    parser.add_argument(
        "--step", type=float, default=0.3, help="calls: seconds of a training step (default 0.3)"
    )
    parser.add_argument("--saves", type=int, default=12, help="commit: saves a world (default 12)")
    parser.add_argument(
        "--late",
        type=float,
        default=0.3,
        help="bytes and commit: seconds that one rank is late (default 0.3)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="commit: also write what simulate_scale validates"
    )
    args = parser.parse_args()
    if unknown := sorted(set(args.what) - MEASUREMENTS.keys()):
        parser.error(f"unknown {', '.join(unknown)}; known: {', '.join(MEASUREMENTS)}")
    report = Report("Ranks")
    with workspace(args.dir) as folder:
        report.note(f"{machine(folder)}.")
        for name in args.what or MEASUREMENTS:
            place = folder / name
            place.mkdir()
            MEASUREMENTS[name](args, place, report)
            shutil.rmtree(place)
    report.publish(args.markdown, args.chart)


if __name__ == "__main__":
    main()
