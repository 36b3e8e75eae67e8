"""The cost of a save for two ranks under DistributedDataParallel, by optimizer; this checkout next
to others.

    python -m scripts.bench.data_parallel OLD --rounds 5

OLD is a checkout in a folder, such as one of ``git worktree add``. Each run is two processes that
import sidesave from one checkout and save with one optimizer; the runs of a round follow each
other, in turns. ``AdamW`` is torch's, and ``other`` has a ``step`` of its own that does the same.
``one owner`` keeps the state of each parameter on one rank, which this checkout alone is asked to
save.
"""

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sidesave

KINDS = ("AdamW", "other", "one owner")
LAYERS, WIDTH, SAVES = 200, 128, 9
DEADLINE_S = 300.0


class Other(torch.optim.AdamW):
    """AdamW with a ``step`` that is not torch's."""

    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        return super().step(closure)


def main() -> None:
    """Print a table of medians over rounds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("others", nargs="*", type=Path, help="other checkouts")
    parser.add_argument(
        "--rounds", type=int, default=5, help="how often each is measured (default 5)"
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="where to write (default: the current folder)"
    )
    options = parser.parse_args()
    this = Path(__file__).resolve().parents[2]
    trees = [*(tree.resolve() for tree in options.others), this]
    pairs = [
        (kind, tree) for kind in KINDS for tree in trees if kind != "one owner" or tree == this
    ]
    results: dict[tuple[str, Path], list[dict[str, float]]] = {pair: [] for pair in pairs}
    for turn in range(options.rounds):
        for pair in pairs if turn % 2 else pairs[::-1]:
            results[pair].append(_run(*pair, options.dir.resolve()))
    columns = ("call, ms", "staged, MB", "written, MB", "on disk, MB", "peak, MB")
    print(f"{'':44} " + " ".join(f"{column:>12}" for column in columns))
    for (kind, tree), runs in results.items():
        values = [statistics.median(run[column] for run in runs) for column in columns]
        print(f"{kind + ', ' + tree.name:44} " + " ".join(f"{value:12.2f}" for value in values))


def _run(kind: str, tree: Path, directory: Path) -> dict[str, float]:
    """Measure a checkout once; the figures of rank 0."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-P", __file__, "--measure", str(rank), kind, folder],
                env={
                    **os.environ,
                    "PYTHONPATH": os.fspath(tree),
                    "OMP_NUM_THREADS": "1",
                    "GLOO_SOCKET_IFNAME": "lo",
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"the run in {tree} has failed")
    return json.loads(said[0])


def _measure(rank: int, kind: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    )
    optimizer = (torch.optim.AdamW if kind == "AdamW" else Other)(model.parameters(), foreach=False)
    for number, parameter in enumerate(model.parameters()):
        if kind != "one owner" or number % 2 == rank:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    calls, path = list[float](), Path()
    with sidesave.Checkpointer(f"{folder}/run") as checkpointer:
        for step in range(SAVES):
            dist.barrier()
            began = time.perf_counter()
            handle = checkpointer.save(step, {"model": model, "optimizer": optimizer})
            calls.append(time.perf_counter() - began)
            path = Path(handle.committed.result(DEADLINE_S).path)
        # in any tree
        pool = next(each for each in gc.get_objects() if type(each).__name__ == "SlotPool")
        staged = max(slot.arena.data_nbytes for slot in pool._slots if slot.arena is not None)
    sizes = [
        [file.stat().st_size for file in path.glob(f"*.rank-0000{each}.safetensors")]
        for each in range(2)
    ]
    figures = {
        "call, ms": 1e3 * statistics.median(calls[2:]),
        "staged, MB": staged / 1e6,
        "written, MB": sum(sizes[rank]) / 1e6,
        "on disk, MB": sum(map(sum, sizes)) / 1e6,
        "peak, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(figures))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        _measure(int(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        main()
