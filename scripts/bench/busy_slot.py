"""How long a call takes that finds the only staging slot busy, and the staging memory of a run.

    python -m scripts.bench.busy_slot --mbytes 1000 --rounds 5

In each round one checkpointer with one slot saves twice, so that the second call waits for the
write of the first, and one with two slots does, which may make another slot. Ratios are those of a
round. The table also has a call that finds another slot made already.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

import sidesave
from scripts.bench.common import settle
from scripts.bench.report import table


def second_call_s(folder: Path, state: dict[str, torch.Tensor], slots: int, made: int) -> float:
    """Seconds of a call that follows another one, with ``made`` of the ``slots`` made before."""
    nbytes = sum(tensor.nbytes for tensor in state.values())
    staging = sidesave.StagingOptions(slots=slots)
    with (
        tempfile.TemporaryDirectory(dir=folder) as run,
        sidesave.Checkpointer(run, staging=staging) as checkpointer,
    ):
        checkpointer.save(1, state, blocking=True)  # so that the rate of writes is known
        if made > 1:
            checkpointer.prepare(state, slots=made).result()
        settle(0)
        checkpointer.save(2, state)
        began = time.perf_counter()
        checkpointer.save(3, state)
        seconds = time.perf_counter() - began
        checkpointer.wait()
        used = checkpointer.history()[-1].staging_nbytes or 0
        print(f"{slots} slots, {made} made: {seconds:.3f} s, {used / nbytes:.2f}x of the state")
        return seconds


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbytes", type=int, default=1000, help="size of the state (default 1000)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="where to write (default: the current folder)"
    )
    options = parser.parse_args()
    state = {str(part): torch.rand(options.mbytes * 25_000) for part in range(10)}
    kinds = {"one slot": (1, 1), "two slots": (2, 1), "two slots, both made": (2, 2)}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.rounds):
        for name, (slots, made) in kinds.items():
            times[name].append(second_call_s(options.dir, state, slots, made))
    waits = times["one slot"]
    rows = [
        (
            name,
            f"{statistics.median(seconds):.3f}",
            f"{statistics.median(a / b for a, b in zip(seconds, waits, strict=True)):.2f}x",
        )
        for name, seconds in times.items()
    ]
    print(table((f"{options.mbytes} MB", "the call, s", "of the wait for one slot"), rows))


if __name__ == "__main__":
    main()
