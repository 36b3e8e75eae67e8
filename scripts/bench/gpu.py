"""What a save does to a CUDA machine: copy rate, blocking, training, latency of other work,
exactness, memory.

    python -m scripts.bench.gpu --size huge --rounds 10

Needs a CUDA device and sidesave. Comparisons are made within a round, with the same work without a
save.
"""

import contextlib
import mmap
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from scripts.bench.common import Field, arguments, settle, workspace
from scripts.bench.peers import Sidesave, require
from scripts.bench.report import Report, machine, rate, ratios, spread
from scripts.bench.state import VOCABULARY, TrainState, flatten
from sidesave.stager.devices.kinds import pci_address
from sidesave.stager.memory import host_memory, numa
from sidesave.stager.memory.arena import PAGE, Arena
from sidesave.stager.memory.pinning import PinnedRange

MIB = 1 << 20
MATMUL = 8192
Clock = Callable[[], float]


class Subject:
    """A state on the device and the checkpointer that saves it."""

    def __init__(self, state: TrainState, peer: Sidesave) -> None:
        self.state = state
        self.peer = peer
        self.step = 0

    def save(self) -> None:
        """Start a save."""
        self.step += 1
        self.peer.save(self.step, self.state)

    def copying(self) -> bool:
        """Say whether the last save still copies from the device."""
        return not self.peer.handles[-1].staged.done()

    def finish(self) -> Path:
        """Wait until the last save is committed; return its path."""
        self.peer.wait()
        return self.peer.saved[-1]

    def settle(self) -> None:
        """Delete what was saved and let disk and device come to rest."""
        self.peer.discard()
        settle(self.state.nbytes)
        torch.cuda.synchronize()


def seconds(work: Callable[[], object]) -> float:
    """Run ``work`` and wait for the device."""
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def copy_rate(subject: Subject, rounds: int, report: Report) -> None:
    """Compare the copy of a save with plain copies of the same bytes into pinned memory, the device
    idle.
    """
    tensors = [tensor.detach() for tensor in subject.state.tensors()]
    nbytes = subject.state.nbytes
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    flat = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    targets, offset = [], 0
    for tensor in tensors:
        targets.append(pinned[offset : offset + tensor.nbytes])
        offset += tensor.nbytes
    sources = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]

    def one_by_one() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)

    def save() -> None:
        subject.save()
        subject.peer.wait_staged()

    times: dict[str, list[float]] = {
        "one pinned copy": [],
        "a pinned copy a tensor": [],
        "sidesave": [],
    }
    for _ in range(rounds):
        subject.settle()
        times["one pinned copy"].append(seconds(lambda: pinned.copy_(flat, non_blocking=True)))
        times["a pinned copy a tensor"].append(seconds(one_by_one))
        times["sidesave"].append(seconds(save))
        subject.finish()
    plain = times["one pinned copy"]
    report.note(
        "Device to host, nothing else running; rate relative to one plain copy, pair by pair."
    )
    report.table(
        ("", "GB/s", "/ one pinned copy"),
        [
            (name, spread(rate(nbytes, taken)), spread(ratios(plain, taken)))
            for name, taken in times.items()
        ],
    )
    report.panel(
        "Device to host", "GB/s", {name: rate(nbytes, taken) for name, taken in times.items()}
    )


def staging_memory() -> str:
    """Return how much of the staging memory of this process lies on which NUMA node."""
    found: dict[str, int] = {}
    maps = Path("/proc/self/numa_maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        for node, pages in re.findall(r" N(\d+)=(\d+)", line) if "memfd:sidesave" in line else ():
            found[node] = found.get(node, 0) + int(pages) * mmap.PAGESIZE
    return (
        ", ".join(f"{nbytes / MIB:,.0f} MiB on node {node}" for node, nbytes in found.items())
        or "unknown"
    )


def nodes(rounds: int, report: Report, nbytes: int = 256 * MIB) -> None:
    """Tell the node of the device and of its staging memory; compare copies to each node, where
    there are several.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    node = numa.node_of(pci_address(device))
    report.note(
        f"NUMA node of the device: {'unknown' if node is None else node}. Staging memory: "
        f"{staging_memory()}."
    )
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    times: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        targets: dict[str, Tensor] = {}
        for node in [node for node in numa.nodes() if numa.cores_near(node)]:
            arena = stack.enter_context(contextlib.closing(Arena.create(PAGE, nbytes)))
            host_memory.populate(arena, node)
            stack.enter_context(
                contextlib.closing(PinnedRange(device, arena.address, arena.nbytes))
            )
            targets[f"to node {node}"] = torch.frombuffer(
                arena.view(arena.data_offset, nbytes), dtype=torch.uint8
            )
        for turn in range(rounds + 1):
            for name, target in targets.items():
                taken = seconds(lambda target=target: target.copy_(source, non_blocking=True))
                if turn:  # the first one warms up
                    times.setdefault(name, []).append(taken)
    if times:
        rows = [(name, spread(rate(nbytes, taken))) for name, taken in times.items()]
        report.note(f"A pinned copy of {nbytes / MIB:.0f} MiB to the host.")
        report.table(("", "GB/s"), rows)


def call_time(subject: Subject, rounds: int, report: Report) -> None:
    """Time ``save()`` behind an idle stream and behind one with work queued on it, and what follows
    it.
    """
    matrix = torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16)
    queued = 100
    times: dict[str, list[list[float]]] = {"idle stream": [], f"{queued} large matmuls queued": []}
    for _ in range(rounds):
        for name, taken in times.items():
            subject.settle()
            if name != "idle stream":
                for _ in range(queued):
                    torch.mm(matrix, matrix)
            start = time.perf_counter()
            subject.save()
            called = time.perf_counter() - start
            subject.peer.wait_staged()
            staged = time.perf_counter() - start
            subject.finish()
            taken.append([called, staged, time.perf_counter() - start])
    report.note("Milliseconds from the call of `save()`.")
    report.table(
        ("", "call returns", "staged", "committed"),
        [
            (
                name,
                *(spread([t[i] for t in taken], 1e3, digits) for i, digits in enumerate((2, 1, 0))),
            )
            for name, taken in times.items()
        ],
    )


def training(
    subject: Subject, rounds: int, steps: int, shape: tuple[int, int], report: Report
) -> None:
    """Train blocks of steps with a save at the start and without, never waiting for the device
    inside a block.
    """
    tokens = torch.randint(VOCABULARY, shape, device="cuda")

    def train() -> None:
        for _ in range(steps):
            subject.state.train_step(tokens)

    def save_and_train() -> None:
        subject.save()
        train()

    train()
    times: dict[str, list[float]] = {"without": [], "with a save": []}
    for turn in range(rounds):
        order = ("without", "with a save") if turn % 2 == 0 else ("with a save", "without")
        for name in order:
            subject.settle()
            times[name].append(seconds(train if name == "without" else save_and_train))
            subject.peer.wait()
    added = [
        1e3 * (with_save - without)
        for with_save, without in zip(times["with a save"], times["without"], strict=True)
    ]
    report.note(
        f"Blocks of {steps} training steps with fused AdamW, batch of {shape[0]} x {shape[1]}; "
        "milliseconds."
    )
    report.table(
        ("", "block", "a step"),
        [
            (name, spread(taken, 1e3, 1), spread(taken, 1e3 / steps, 2))
            for name, taken in times.items()
        ]
        + [("one save adds", spread(added, 1, 1), "-")],
    )


def sample(clock: Clock, subject: Subject | None, limit_s: float = 0.1) -> list[float]:
    """Call ``clock`` while the subject copies, or for ``limit_s`` where there is none."""
    found = []
    deadline = time.perf_counter() + limit_s
    while subject.copying() if subject else time.perf_counter() < deadline:
        found.append(clock())
    return found


def item_clock() -> Clock:
    """Return a clock of one read of a scalar from the device."""
    scalar = torch.ones((), device="cuda")

    def clock() -> float:
        start = time.perf_counter()
        scalar.item()
        return time.perf_counter() - start

    return clock


def matmul_clock() -> Clock:
    """Return a clock of one large matrix product, by the device's own time."""
    matrix = torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def clock() -> float:
        start.record()
        torch.mm(matrix, matrix)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return clock


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of the sorted values."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def beside_a_save(subject: Subject, rounds: int, report: Report) -> None:
    """Measure other work on the device while a save copies, and while none does."""
    rows = []
    for name, clock in ((".item()", item_clock()), (f"matmul {MATMUL} bf16", matmul_clock())):
        for _ in range(10):
            clock()
        alone, beside = [], []
        for _ in range(rounds):
            subject.settle()
            alone += sample(clock, None)
            subject.save()
            beside += sample(clock, subject)
            subject.finish()
        rows += [
            (label, str(len(found)), *(f"{1e6 * x:.0f}" for x in summary))
            for label, found in ((f"{name} alone", alone), (f"{name} beside a save", beside))
            if found
            for summary in [(statistics.median(found), percentile(found, 99), max(found))]
        ]
    report.note("Other work while a save copies; microseconds.")
    report.table(("", "samples", "median", "99th percentile", "longest"), rows)


def exactness(subject: Subject, rounds: int, shape: tuple[int, int], report: Report) -> None:
    """Train on right after ``save()`` and compare the checkpoint with a clone from before it, bit
    by bit.
    """
    load = require("sidesave").load
    tokens = torch.randint(VOCABULARY, shape, device="cuda")
    exact, torn = 0, set()
    for _ in range(rounds):
        subject.settle()
        before = {name: tensor.clone() for name, tensor in subject.state.flat_tensors().items()}
        subject.save()
        for _ in range(5):
            subject.state.train_step(tokens)
        loaded = dict(flatten(load(subject.finish())))
        wrong = {name for name, tensor in before.items() if not same_bits(tensor, loaded.get(name))}
        exact += not wrong
        torn |= wrong
    report.note(
        (
            "Bit for bit equal to a clone taken before the save, while fused AdamW trained on: "
            f"{exact} of {rounds} saves."
        )
        + (
            f" Different or missing: {', '.join(sorted(torn)[:5])} and others, {len(torn)} in all."
            if torn
            else ""
        )
    )


def same_bits(expected: Tensor, found: Tensor | None) -> bool:
    """Compare bytes, shape and dtype."""
    if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return torch.equal(
        expected.cpu().reshape(-1).view(torch.uint8), found.cpu().reshape(-1).view(torch.uint8)
    )


def compute_processes() -> str:
    """Return what nvidia-smi says of processes with a context; containers often hide them."""
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return "; ".join(answer.stdout.split("\n")).strip("; ") or "none shown"


def touches_gpu(pid: int) -> bool:
    """Say whether a process has an NVIDIA device or library open or mapped."""
    opened = [
        str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()
    ]
    return any(
        "nvidia" in name or "libcuda" in name
        for name in [*opened, Path(f"/proc/{pid}/maps").read_text()]
    )


def device_used() -> int:
    """Return the bytes of the device in use that torch's allocator does not hold: contexts,
    mostly.
    """
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def device_memory(subject: Subject, saves: int, outside_before: int, report: Report) -> None:
    """Save often and watch the memory of the device and the daemon's hold on it."""
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    allocated, reserved, outside = [], [], []
    for _ in range(saves):
        subject.settle()
        subject.save()
        subject.finish()
        allocated.append((torch.cuda.memory_allocated() - start) / MIB)
        reserved.append(torch.cuda.memory_reserved() / MIB)
        outside.append((device_used() - outside_before) / MIB)
    report.note(f"Memory of the device over {saves} saves; MiB.")
    report.table(
        ("", "after the first", "after the last", "largest"),
        [
            (name, *(f"{x:.1f}" for x in (values[0], values[-1], max(values))))
            for name, values in (
                ("allocated, above the start", allocated),
                ("reserved by torch", reserved),
                ("outside of torch, above the start", outside),
            )
        ]
        + [
            (
                "allocated at the peak, above the start",
                "-",
                "-",
                f"{(torch.cuda.max_memory_allocated() - start) / MIB:.1f}",
            )
        ],
    )
    pid = subject.peer.checkpointer.daemon_pid
    report.note(
        f"The daemon (pid {pid}) has an NVIDIA device or library open: "
        f"{'YES' if touches_gpu(pid) else 'no'}. Processes with a context, by nvidia-smi: "
        f"{compute_processes()}."
    )


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__, rounds=10, size="large", peers=False)
    parser.add_argument("--steps", type=int, default=20, help="training steps a block (default 20)")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step (default 8)")
    parser.add_argument("--length", type=int, default=512, help="bytes a sequence (default 512)")
    parser.add_argument(
        "--saves", type=int, default=20, help="saves to watch memory over (default 20)"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu: torch sees no CUDA device here; this benchmark needs one")
    shape = args.batch, args.length
    state = TrainState(args.size, "cuda")
    # cuBLAS workspaces before anything is counted
    state.train_step(torch.randint(VOCABULARY, shape, device="cuda"))
    torch.cuda.synchronize()
    report = Report("GPU")
    with workspace(args.dir) as folder, Field([Sidesave], folder, state) as field:
        report.note(
            f"{state.nbytes / 1e9:.2f} GB in {len(state.tensors())} CUDA tensors, {args.rounds} "
            f"rounds; min / median / max. {machine(folder)}."
        )
        outside = device_used()
        peer = field.start(Sidesave)
        if not isinstance(peer, Sidesave):
            sys.exit(f"gpu: {field.refused[Sidesave.name]}")
        subject = Subject(state, peer)
        report.note(
            "`prepare()`, allocation and pinning of the staging memory: "
            f"{seconds(lambda: peer.prepare(state)):.2f} s."
        )
        device_memory(subject, args.saves, outside, report)
        nodes(args.rounds, report)
        copy_rate(subject, args.rounds, report)
        call_time(subject, args.rounds, report)
        training(subject, args.rounds, args.steps, shape, report)
        beside_a_save(subject, args.rounds, report)
        exactness(subject, args.rounds, shape, report)
    report.publish(args.markdown, args.chart)


if __name__ == "__main__":
    main()
