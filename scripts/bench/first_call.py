"""What the first ``save()`` after ``prepare()`` costs more than a later one, in fresh processes.

``python -m scripts.bench.first_call`` prints both times, their ratio, and what the first call still
had to do: modules it imported, and staging memory it made.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sidesave

_LATER = 8


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=15, help="fresh processes (default 15)")
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="where to write (default: the current folder)"
    )
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    for _ in range(options.processes):
        command = [
            sys.executable,
            "-m",
            "scripts.bench.first_call",
            "--measure",
            os.fspath(options.dir.resolve()),
        ]
        found.append(
            json.loads(
                subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            )
        )
    columns = ("first", "later", "ratio")
    print(
        "| median (least to most) of | "
        + " | ".join(("first call, ms", "later calls, ms", "ratio"))
        + " |"
    )
    print("|---|---|---|---|")
    cells = [
        f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"
        for values in ([each[column] for each in found] for column in columns)
    ]
    print(f"| {len(found)} processes | " + " | ".join(cells) + " |")
    print(
        f"\nThe first call imported {found[0]['imports'] or 'nothing'} and made {found[0]['made']} "
        "staging slots."
    )


def _measure(parent: str) -> None:
    """Print what was measured in this process, as JSON."""
    model = nn.ModuleList(
        nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(32)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 1}
    with (
        tempfile.TemporaryDirectory(dir=parent) as directory,
        sidesave.Checkpointer(directory) as checkpointer,
    ):
        checkpointer.prepare(state).result()
        memory, modules = _memfds(), set(sys.modules)
        times: list[float] = []
        imports, made = list[str](), 0
        for step in range(1 + _LATER):
            optimizer.step()
            began = time.perf_counter()
            handle = checkpointer.save(step, state)
            times.append(1e3 * (time.perf_counter() - began))
            if step == 0:
                imports, made = sorted(set(sys.modules) - modules), _memfds() - memory
            handle.committed.result()
    later = statistics.median(times[1:])
    print(
        json.dumps(
            {
                "first": times[0],
                "later": later,
                "ratio": times[0] / later,
                "imports": imports,
                "made": made,
            }
        )
    )


def _memfds() -> int:
    """How many pieces of shared memory this process has made and kept."""
    links = (link for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return sum(str(link.readlink()).startswith("/memfd:") for link in links)


if __name__ == "__main__":
    _measure(sys.argv[2]) if sys.argv[1:2] == ["--measure"] else main()
