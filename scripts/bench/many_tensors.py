"""Time a load that consists of many small tensors, where the work for each tensor counts and the
bytes do not.

``python -m scripts.bench.many_tensors`` prints microseconds a tensor for a load into live objects
and for a fresh load, at several numbers of tensors, and for one optimizer a parameter. Equal
figures mean linear time. Imports come before.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sidesave
from scripts.bench.report import spread, table

PARAMETERS = 16
"""Parameters of a block, of as many floats each."""
TENSORS = 4
"""Tensors of a parameter: itself, its two moments and its step."""


class Block(nn.Module):
    """A module with many small parameters."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(PARAMETERS):
            self.register_parameter(f"weight_{number}", nn.Parameter(torch.zeros(PARAMETERS)))


def state_of(count: int, *, one_each: bool = False) -> dict[str, Any]:
    """Return a model and its AdamW of ``count`` tensors; with ``one_each`` an optimizer for each
    parameter.
    """
    model = nn.Sequential(*(Block() for _ in range(max(count // (PARAMETERS * TENSORS), 1))))
    parameters = list(model.parameters())
    groups = [[each] for each in parameters] if one_each else [parameters]
    optimizers = [torch.optim.AdamW(group, foreach=False) for group in groups]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    return (
        {"model": model, "optimizers": optimizers}
        if one_each
        else {"model": model, "optimizer": optimizers[0]}
    )


def seconds(work: Callable[[], object]) -> float:
    """Time one call, without the time to free its result."""
    start = time.perf_counter()
    result = work()
    taken = time.perf_counter() - start
    del result
    return taken


def measure(folder: Path, state: dict[str, Any], rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of loads into live objects, and of fresh loads; ``state`` is saved in a
    new ``folder``.
    """
    if not folder.exists():
        with sidesave.Checkpointer(folder) as checkpointer:
            checkpointer.save(1, state).committed.result()
    times = [
        (seconds(lambda: sidesave.load(folder, into=state)), seconds(lambda: sidesave.load(folder)))
        for _ in range(rounds)
    ]
    into, fresh = zip(*times, strict=True)
    return list(into), list(fresh)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default 3)")
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="where to write (default: the current folder)"
    )
    parser.add_argument(
        "--counts", default="4000,40000,240000", help="numbers of tensors (default %(default)s)"
    )
    parser.add_argument(
        "--optimizers",
        type=int,
        default=1000,
        help="optimizers of one parameter each (default 1000)",
    )
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="sidesave-bench-", dir=options.dir)).resolve()
    try:
        measure(folder / "imports", state_of(0), 1)
        kinds = [
            (f"{count:,} tensors", count, False) for count in map(int, options.counts.split(","))
        ]
        kinds.append((f"{options.optimizers:,} optimizers", options.optimizers * TENSORS, True))
        rows: list[tuple[str, str, str]] = []
        for name, count, one_each in kinds:
            state = state_of(count, one_each=one_each)
            into, fresh = measure(folder / str(len(rows)), state, options.rounds)
            scale = 1e6 / count
            rows.append((name, spread(into, scale, 1), spread(fresh, scale, 1)))
        print(table(("us a tensor: min / median / max", "load(into=)", "load()"), rows))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
