"""Two checkouts of sidesave, measured in pairs: is one slower than the other, and by how much at
most?

``python -m scripts.bench.compare OLD`` compares a checkout in the folder OLD, such as one of
``git worktree add``, with this one. Each run is a process of its own, and the two of a pair follow
each other, in turns. A ratio is that of a pair; its mean is geometric, and with 95 % probability
the true one is not above the bound (Student's t, one-sided).
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import sidesave

_T95 = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81, 1.80, 1.78, 1.77, 1.76, 1.75)
"""Of Student's t distribution with 1, 2, ... degrees of freedom; 1.7 for more."""
_COMMAND_LINE = """
try:
    from sidesave.client.cli.main import main
except ImportError:  # of older checkouts
    from sidesave.client.cli import main
main()
"""
_WHAT = {
    "start": "start of a checkpointer, s",
    "first": "first save, until it is committed, s",
    "call": "call, 0.3 GB, s",
    "commit": "the same, until it is committed, s",
    "small": "call, two small tensors, s",
    "many": "call, 5,000 tensors of 16 elements, s",
    "load": "load into live objects, s",
    "fresh": "load as a fresh nest, s",
    "diff": "`sidesave diff` that finds one tensor changed, s",
    "list": "load of a list of 300,000 integers, s",
    "daemon": "memory of the daemon, MB",
}


def main() -> None:
    """Print a table of all pairs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="the other checkout")
    parser.add_argument(
        "--pairs", type=int, default=10, help="after one that does not count (default 10)"
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="where to write (default: the current folder)"
    )
    options = parser.parse_args()
    trees = [options.old.resolve(), Path(__file__).resolve().parents[2]]
    pairs: list[list[dict[str, float]]] = []
    for turn in range(options.pairs + 1):
        order = trees if turn % 2 else trees[::-1]
        measured = {tree: _run(tree, options.dir.resolve()) for tree in order}
        pairs += [[measured[tree] for tree in trees]] * (turn > 0)
        print(f"\rpair {turn} of {options.pairs}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(f"{'':50} {'old':>9} {'new':>9} {'ratio':>7} {'at most':>8}")
    for key, what in _WHAT.items():
        old, new = (statistics.median(pair[side][key] for pair in pairs) for side in (0, 1))
        ratio, bound = _ratio([pair[1][key] / pair[0][key] for pair in pairs])
        print(f"{what:50} {old:9.4f} {new:9.4f} {ratio:7.3f} {bound:8.3f}")


def _ratio(ratios: list[float]) -> tuple[float, float]:
    """The geometric mean, and its bound."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.mean(logs)
    if len(logs) < 2:
        return math.exp(mean), math.inf
    quantile = _T95[len(logs) - 2] if len(logs) - 2 < len(_T95) else 1.7
    return math.exp(mean), math.exp(mean + quantile * statistics.stdev(logs) / math.sqrt(len(logs)))


def _run(tree: Path, directory: Path) -> dict[str, float]:
    """Measure a checkout once, in a process that imports sidesave from there."""
    command = [sys.executable, "-P", __file__, "--measure", os.fspath(directory)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.fspath(tree)},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"the run in {tree} has failed")
    return json.loads(done.stdout)


def _measure(parent: str) -> None:
    """Print what was measured in this process, as JSON."""
    torch.manual_seed(0)
    model = nn.ModuleList(
        nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(32)
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 1}
    small: dict[str, Any] = {"weight": torch.ones(8), "bias": torch.ones(8)}
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        began = time.perf_counter()
        checkpointer = sidesave.Checkpointer(directory)
        found["start"] = time.perf_counter() - began
        with checkpointer:
            _, found["first"] = _save(checkpointer, 0, state)
            times = [_save(checkpointer, step, state) for step in range(1, 10)]
            found["call"], found["commit"] = (
                statistics.median(column) for column in zip(*times, strict=True)
            )
            found["small"] = statistics.median(
                _save(checkpointer, step, small)[0] for step in range(100, 140)
            )
            many = nn.ParameterList(torch.ones(16) for _ in range(5000))
            times = [_save(checkpointer, step, {"many": many})[0] for step in range(200, 212)]
            found["many"] = statistics.median(times[2:])
            checkpointer.save(300, {"list": [*range(300_000)]}, blocking=True)
            next(model.parameters()).data.add_(1)
            checkpointer.save(301, state, blocking=True)
            assert checkpointer.daemon_pid is not None
            found["daemon"] = psutil.Process(checkpointer.daemon_pid).memory_full_info().uss / 1e6
        path = f"{directory}/step-00000009"
        found["load"] = _median(
            lambda: sidesave.load(path, into={"model": model, "optimizer": optimizer, "step": 0})
        )
        found["fresh"] = _median(lambda: sidesave.load(path))
        found["list"] = _median(lambda: sidesave.load(f"{directory}/step-00000300"))
        command = [
            sys.executable,
            "-P",
            "-c",
            _COMMAND_LINE,
            "diff",
            path,
            f"{directory}/step-00000301",
        ]
        found["diff"] = _median(
            lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL), tries=3
        )
    print(json.dumps(found))


def _save(
    checkpointer: sidesave.Checkpointer, step: int, state: dict[str, Any]
) -> tuple[float, float]:
    """Seconds until the call returned, and until the save was committed."""
    began = time.perf_counter()
    handle = checkpointer.save(step, state)
    called = time.perf_counter()
    handle.committed.result()
    return called - began, time.perf_counter() - began


def _median(run: Callable[[], object], tries: int = 7) -> float:
    times: list[float] = []
    for _ in range(tries):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    _measure(sys.argv[2]) if sys.argv[1:2] == ["--measure"] else main()
