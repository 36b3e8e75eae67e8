"""The cost of many checkpoints in a run: finding the latest one, a commit's retention, and deleting
them.

    python -m scripts.bench.many_checkpoints            10, 1,000 and 10,000 checkpoints
    python -m scripts.bench.many_checkpoints 1000       another number

Prints a Markdown table. The checkpoints are empty: one is saved, and its manifest is written again
for each step.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import sidesave
from sidesave.client.training.keep_policies import KeepLatest
from sidesave.writer_daemon.format.manifest import MANIFEST, Manifest
from sidesave.writer_daemon.format.names import step_directory

_ROUNDS = 5
_COLUMNS = (
    "checkpoints",
    "cold `latest()`",
    "warm `latest_step()`",
    "CPU of a look",
    "`close()` that deletes",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure runs with many checkpoints.")
    parser.add_argument("counts", nargs="*", type=int, default=[10, 1000, 10000])
    print(f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|")
    for count in parser.parse_args().counts:
        with tempfile.TemporaryDirectory() as directory:
            run = Path(directory) / "run"
            _fill(run, count)
            cold = _median_ms(lambda run=run: sidesave.latest(run), time.perf_counter)
            with sidesave.Checkpointer(run) as checkpointer:
                checkpointer.latest_step()
                warm = _median_ms(checkpointer.latest_step, time.perf_counter)
                listing = _median_ms(checkpointer.session.run.look, time.thread_time)  # pyright: ignore[reportPrivateUsage]
            closing = _closing_s(run)
        print(
            f"| {count:,} | {cold:.1f} ms | {warm:.2f} ms | {listing:.2f} ms | {closing:.2f} s |",
            flush=True,
        )


def _fill(run: Path, count: int) -> None:
    with sidesave.Checkpointer(run) as checkpointer:
        checkpointer.save(1, {"x": torch.zeros(4)}, blocking=True)
    first = run / step_directory(1)
    manifest = Manifest.from_bytes((first / MANIFEST).read_bytes(), MANIFEST)
    for step in range(2, count + 1):
        copy = run / step_directory(step)
        copy.mkdir()
        changed = dataclasses.replace(manifest, step=step, sequence=manifest.sequence + step)
        (copy / MANIFEST).write_bytes(changed.to_bytes())


def _median_ms(call: Callable[[], object], clock: Callable[[], float]) -> float:
    times: list[float] = []
    for _ in range(_ROUNDS):
        started = clock()
        call()
        times.append(clock() - started)
    return 1000 * statistics.median(times)


def _closing_s(run: Path) -> float:
    """Seconds from the commit of one more step to the end of ``close()``, which finishes the
    deletions.
    """
    manager = sidesave.CheckpointManager(run, {"x": torch.zeros(4)}, keep=[KeepLatest(1)])
    manager.save(1 << 40, blocking=True)
    started = time.perf_counter()
    manager.close()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
