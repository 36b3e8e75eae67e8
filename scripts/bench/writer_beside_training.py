"""What a writer daemon costs the training steps beside it: as fast as it can, niced, and at fixed paces.

    python -m scripts.bench.writer_beside_training --mb 700 --rounds 6

A turn trains steps without a save, saves, and trains as many steps again; the variants take turns. The call of ``save``
itself is left out. Steps under a write are compared with the steps just before it, whose median is that turn's 100 %.
"""

import contextlib
import mmap
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from scripts.bench.common import arguments, rotated, settle, workspace
from scripts.bench.report import Report, machine, median, spread
from sidesave import Checkpointer
from sidesave.client.internals import saver_of
from sidesave.client.saving.pace import PaceSearch

READ_NBYTES = 16 << 20
FILE_NBYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Variant:
    """How the daemon writes: its niceness, and its pace in bytes per second, 0 for none."""

    name: str
    nice: int = 0
    pace: int = 0
    saves: bool = True


class Fixed(PaceSearch):
    """Every write has this pace."""

    def __init__(self, pace: int) -> None:
        super().__init__()
        self._fixed = pace

    @property
    def usual_s(self) -> float:
        """No pace lapses."""
        return 100.0

    def began(self, save: int, called_s: float, nbytes: int) -> None:
        """Set the pace."""
        super().began(save, called_s, nbytes)
        self.pace = self._fixed


@dataclass(slots=True)
class Times:
    """What the turns of one variant beside one loop took."""

    slower: list[float] = field(default_factory=list)  # per save: mean step under the write / median quiet step
    worst: list[float] = field(default_factory=list)  # per save: slowest step under the write / median quiet step
    added_s: list[float] = field(default_factory=list)
    durable_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


@contextlib.contextmanager
def matmuls(folder: Path, step_s: float) -> Iterator[Callable[[], object]]:
    """Yield a step of matrix products, which all cores compute from their caches."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    out = torch.empty(1024, 1024)
    yield repeated(lambda: torch.mm(a, b, out=out), step_s)


@contextlib.contextmanager
def memory(folder: Path, step_s: float) -> Iterator[Callable[[], object]]:
    """Yield a step that all cores spend waiting for memory."""
    data = torch.zeros(64 << 20)
    yield repeated(lambda: data[: 16 << 20].add_(data[16 << 20 : 32 << 20]), step_s)


@contextlib.contextmanager
def loader(folder: Path, step_s: float) -> Iterator[Callable[[], object]]:
    """Yield a step of a device that computes for ``step_s``; a thread of the host reads ahead for two steps at most.

    The disk that is written to gives it the data of a step in half of a step's time, when it is quiet.
    """
    with disk(folder, 0.5 * step_s) as read:
        ready: queue.Queue[None] = queue.Queue(2)
        over = threading.Event()

        def work() -> None:
            while not over.is_set():
                read()
                with contextlib.suppress(queue.Full):
                    ready.put(None, timeout=1.0)

        def step() -> None:
            ready.get()
            time.sleep(step_s)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield step
        finally:
            over.set()
            thread.join()


@contextlib.contextmanager
def disk(folder: Path, step_s: float) -> Iterator[Callable[[], object]]:
    """Yield a step that reads its data from the disk that is written to, past the page cache."""
    path = folder / "data"
    path.write_bytes(os.urandom(READ_NBYTES) * (FILE_NBYTES // READ_NBYTES))
    os.sync()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    at = 0
    with mmap.mmap(-1, READ_NBYTES) as buffer:

        def read() -> None:
            nonlocal at
            os.preadv(fd, [buffer], at)
            at = (at + READ_NBYTES) % FILE_NBYTES

        yield repeated(read, step_s)
    os.close(fd)
    path.unlink()


LOOPS = {"matmul": matmuls, "memory": memory, "loader": loader, "disk": disk}


def repeated(work: Callable[[], object], step_s: float) -> Callable[[], None]:
    """Return a step of about ``step_s`` seconds."""
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    times = max(1, round(step_s / best))

    def step() -> None:
        for _ in range(times):
            work()

    return step


def timed(step: Callable[[], object]) -> float:
    """Return the seconds that a step takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def take_turn(
    checkpointer: Checkpointer,
    variant: Variant,
    state: dict[str, torch.Tensor],
    step: Callable[[], object],
    steps: int,
    times: Times,
) -> None:
    """Train, save, train; note what the write did to the steps."""
    settle(0)
    assert checkpointer.daemon_pid is not None
    daemon = psutil.Process(checkpointer.daemon_pid)
    quiet = [timed(step) for _ in range(steps)]
    saver_of(checkpointer).session.pacer.search = Fixed(variant.pace)
    before = sum(daemon.cpu_times()[:2])
    beside: list[float] = []
    if variant.saves:
        handle = checkpointer.save(0, state, overwrite=True)
        start = time.monotonic()
        while not handle.written.done():
            beside.append(timed(step))
        handle.committed.result()
        written = handle.written.reached
        assert written is not None
        times.durable_s.append(written - start)
        times.cpu_s.append(sum(daemon.cpu_times()[:2]) - before)
    else:
        beside = [timed(step) for _ in range(steps)]
    quiet += [timed(step) for _ in range(steps)]
    usual = statistics.median(quiet)
    times.slower.append(statistics.mean(beside) / usual)
    times.worst.append(max(beside) / usual)
    times.added_s.append(sum(beside) - usual * len(beside))


def search(
    directory: Path, state: dict[str, torch.Tensor], step: Callable[[], object], saves: int, steps: int
) -> list[tuple[int, Times]]:
    """Let the checkpointer find the pace by itself; returns that of each save, and its times."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    found: list[tuple[int, Times]] = []
    with Checkpointer(directory, slots=1) as checkpointer:
        pacer = saver_of(checkpointer).session.pacer
        for number in range(saves):
            times, beside, quiet = Times(), list[float](), list[float]()
            handle = checkpointer.save(number, state)
            found.append((pacer.search.pace, times))
            start = time.monotonic()
            for _ in range(steps):
                optimizer.step()
                (quiet if handle.written.done() else beside).append(timed(step))
            written = handle.written.reached
            if written is not None and quiet:
                times.durable_s.append(written - start)
                times.added_s.append(sum(beside) - statistics.median(quiet) * len(beside))
            if number:
                checkpointer.delete(number - 1).result()
    return found


def main() -> None:
    """Measure and report."""
    parser = arguments(__doc__, rounds=6, peers=False)
    parser.add_argument("--mb", type=int, default=700, help="size of the state in MB (default 700)")
    parser.add_argument("--step", type=float, default=0.05, help="seconds a step shall take (default 0.05)")
    parser.add_argument("--steps", type=int, default=20, help="quiet steps before each save (default 20)")
    parser.add_argument("--paces", default="1000,400,200", help="MB/s (default 1000,400,200)")
    parser.add_argument("--loops", default=",".join(LOOPS), help=f"among {', '.join(LOOPS)} (default all)")
    parser.add_argument("--search", type=int, default=0, help="also this many saves that find their pace (default 0)")
    parser.add_argument("--every", type=int, default=250, help="steps between those (default 250)")
    args = parser.parse_args()
    paces = [int(pace) for pace in args.paces.split(",")]
    variants = [Variant("no save", saves=False), Variant("full speed"), Variant("nice 19", nice=19)]
    variants += [Variant(f"{pace} MB/s", pace=pace * 10**6) for pace in paces]
    state = {f"w{i}": torch.randn(args.mb * 10**6 // 4 // 16) for i in range(16)}
    report = Report("The writer beside training")
    with workspace(args.dir) as folder, contextlib.ExitStack() as stack:
        report.note(f"State of {args.mb} MB, {args.rounds} rounds. {machine(folder)}.")
        checkpointers = {
            nice: stack.enter_context(Checkpointer(folder / f"run-{nice}", slots=1, nice=nice)) for nice in (0, 19)
        }
        for checkpointer in checkpointers.values():
            checkpointer.save(0, state, blocking=True)
        for loop in args.loops.split(","):
            results = {variant.name: Times() for variant in variants}
            with LOOPS[loop](folder, args.step) as step:
                for turn in range(args.rounds):
                    for variant in rotated(variants, turn):
                        times = results[variant.name]
                        take_turn(checkpointers[variant.nice], variant, state, step, args.steps, times)
                found = search(folder / f"search-{loop}", state, step, args.search, args.every) if args.search else []
            report.note(f"**{loop}**; min / median / max over the saves")
            report.table(
                (
                    "",
                    "steps under the write, %",
                    "slowest of them, %",
                    "a save adds, ms",
                    "durable, s",
                    "daemon CPU, s",
                ),
                [
                    (
                        name,
                        spread(times.slower, 100, 0),
                        median(times.worst, 100, 0),
                        spread(times.added_s, 1e3, 0),
                        spread(times.durable_s),
                        median(times.cpu_s),
                    )
                    for name, times in results.items()
                ],
            )
            report.panel(
                f"{loop}: a save adds", "ms", {name: [1e3 * s for s in results[name].added_s] for name in results}
            )
            if found:
                report.table(
                    ("save", "pace, MB/s", "adds, ms", "durable, s"),
                    [
                        (
                            str(number),
                            f"{pace / 1e6:.0f}" if pace else "-",
                            median(times.added_s, 1e3, 0),
                            median(times.durable_s),
                        )
                        for number, (pace, times) in enumerate(found)
                    ],
                )
    report.publish(args.markdown, args.chart)


if __name__ == "__main__":
    main()
