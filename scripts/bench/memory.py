"""What the writer costs beside the trainer: private memory, shared staging memory, threads, files,
time to start.

    python -m scripts.bench.memory --rounds 30

A round is one save. Private memory is USS: what would be free if the process ended. Staging memory
is what is resident in shared mappings (memfd or /dev/shm) of the trainer and the writer, each
counted once.
"""

import gc
import os
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil

from scripts.bench.common import Field, arguments, rotated, settle, workspace
from scripts.bench.peers import (
    DcpProcess,
    Peer,
    Sidesave,
    TorchCheckpointing,
    TorchExperimental,
    choose,
)
from scripts.bench.report import Report, machine, median, spread
from scripts.bench.state import TrainState

SHARED = ("/memfd:", "/dev/shm/")
MIB = 1 << 20

# Each prints seconds since the process was started: after its imports, after construction, after 4
# MB were committed.
STARTS = {
    "sidesave": """
import torch
from sidesave import Checkpointer
report()
with Checkpointer(folder) as checkpointer:
    report()
    checkpointer.save(1, {"x": torch.ones(1 << 20)}).committed.result()
    report()
""",
    "torch_checkpointing": """
import torch
from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
if __name__ == "__main__":  # its process imports this file again
    report()
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))
    report()
    manager.save(folder + "/step-1", {"x": torch.ones(1 << 20)}).result()
    report()
    manager.close()
""",
}
PRELUDE = """
import sys, time
start, folder = float(sys.argv[1]), sys.argv[2]
def report():
    print(time.monotonic() - start, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a peer's processes hold at one moment.

    Attributes:
        private_bytes: USS of the peer's processes.
        staging_bytes: Resident bytes of shared mappings of the trainer and these processes.
        threads: Threads of these processes.
        files: Open descriptors of these processes.
        torch: One of these processes has torch loaded.
    """

    private_bytes: int
    staging_bytes: int
    threads: int
    files: int
    torch: bool


def shared_mappings(pid: int) -> dict[str, int]:
    """Return the resident bytes of each shared mapping of a process, by inode."""
    resident: dict[str, int] = defaultdict(int)
    inode = None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            inode = words[4] if len(words) > 5 and words[5].startswith(SHARED) else None
        elif inode is not None and words[0] == "Rss:":
            resident[inode] += int(words[1]) * 1024
    return resident


@dataclass(frozen=True, slots=True)
class Baseline:
    """What was there before a peer was started, and is not its own."""

    pids: set[int]
    inodes: set[str]

    @classmethod
    def now(cls) -> "Baseline":
        """Look at this process and its children."""
        gc.collect()  # memory of the peer before
        return cls({child.pid for child in children()}, set(shared_mappings(os.getpid())))


def children() -> list[psutil.Process]:
    """Return all processes below this one."""
    return psutil.Process().children(recursive=True)


def footprint(baseline: Baseline) -> Footprint:
    """Measure the processes that are new, and the staging memory that they share with this one."""
    processes = [child for child in children() if child.pid not in baseline.pids]
    staging: dict[str, int] = {}
    for pid in [os.getpid(), *(process.pid for process in processes)]:
        for inode, nbytes in shared_mappings(pid).items():
            staging[inode] = max(nbytes, staging.get(inode, 0))
    return Footprint(
        private_bytes=sum(process.memory_full_info().uss for process in processes),
        staging_bytes=sum(
            nbytes for inode, nbytes in staging.items() if inode not in baseline.inodes
        ),
        threads=sum(process.num_threads() for process in processes),
        files=sum(process.num_fds() for process in processes),
        torch=any(
            "libtorch" in Path(f"/proc/{process.pid}/maps").read_text() for process in processes
        ),
    )


def run(peer: Peer, baseline: Baseline, state: TrainState, saves: int) -> list[Footprint]:
    """Save so often and measure after each."""
    peer.prepare(state)
    found = []
    for step in range(saves):
        peer.discard()
        state.perturb()
        peer.save(step, state)
        peer.wait_staged()
        peer.wait()
        found.append(footprint(baseline))
    return found


def measure_start(name: str, folder: Path, turn: int) -> list[float]:
    """Run a fresh process and return its seconds to imports, to construction and to a commit of 4
    MB.
    """
    target = folder / f"start-{name}-{turn}"
    target.mkdir()
    script = folder / f"start-{name}.py"
    script.write_text(PRELUDE + STARTS[name])
    settle(0)
    command = [sys.executable, str(script), str(time.monotonic()), str(target)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    }
    answer = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return [float(line) for line in answer.stdout.split()[:3]]


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__, rounds=30)
    parser.add_argument("--starts", type=int, default=5, help="fresh processes (default 5)")
    args = parser.parse_args()
    state = TrainState(args.size)
    default = [kind.name for kind in (Sidesave, TorchCheckpointing, TorchExperimental, DcpProcess)]
    report = Report("Memory and start")
    footprints: dict[str, list[Footprint]] = {}
    starts: dict[str, list[list[float]]] = defaultdict(list)

    with workspace(args.dir) as folder, Field(choose(args.only, default), folder, state) as field:
        report.note(
            f"{state.nbytes / 1e9:.2f} GB in {len(state.tensors())} tensors. {machine(folder)}."
        )
        for kind in field.chosen:
            baseline = Baseline.now()
            if (peer := field.start(kind)) is not None:
                footprints[kind.name] = run(peer, baseline, state, args.rounds)
            field.close()
            del peer
        for turn in range(args.starts):
            for name in rotated([name for name in STARTS if name in footprints], turn):
                starts[name].append(measure_start(name, folder, turn))
        settings = field.settings()

    report.table(
        (
            "writer process",
            "USS, MiB: first save",
            "middle",
            "last",
            "staging / state",
            "threads",
            "open files",
            "torch loaded",
        ),
        [
            (
                name,
                *(
                    f"{f.private_bytes / MIB:.0f}"
                    for f in (found[0], found[len(found) // 2], found[-1])
                ),
                f"{found[-1].staging_bytes / state.nbytes:.2f}",
                str(found[-1].threads),
                str(found[-1].files),
                "yes" if found[-1].torch else "no",
            )
            for name, found in footprints.items()
        ],
    )
    if starts:
        report.note(
            f"Seconds from the start of a fresh process; {args.starts} processes: min / median / "
            "max."
        )
        report.table(
            ("", "imports done", "constructed", "4 MB committed", "construction to commit"),
            [
                (
                    name,
                    *(spread([t[i] for t in times]) for i in range(3)),
                    median([t[2] - t[0] for t in times]),
                )
                for name, times in starts.items()
            ],
        )
    report.items(settings)
    uss = {name: [f.private_bytes / MIB for f in found] for name, found in footprints.items()}
    report.panel("Private memory of the writer", "MiB", uss)
    report.panel(
        "Construction to a 4 MB commit",
        "s",
        {n: [t[2] - t[0] for t in times] for n, times in starts.items()},
    )
    report.publish(args.markdown, args.chart)


if __name__ == "__main__":
    main()
