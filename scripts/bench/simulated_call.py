"""What ``save()`` costs the calling thread: torch's own CUDA code on a simulated GPU that throws
launches away.

    . scripts/_gpu_venv.sh && SIMULATED_GPU=late SIMULATED_GPU_KERNELS=noop python -m
    scripts.bench.simulated_call

Processor time is real but for the driver's share of a launch; how long a device would take is not
told.
"""

import argparse
import statistics
import tempfile
import time

import simulated_gpu
import torch
from torch import nn

from sidesave import Checkpointer

WIDTHS = [64, 64 * 64, 300 * 300, 64, 512 * 512, 96, 700]
"""Small and large in turn."""


def make_state(tensors: int) -> tuple[dict[str, object], torch.optim.Optimizer]:
    """A model and its AdamW: four tensors a parameter, of which three are large."""
    widths = [WIDTHS[i % len(WIDTHS)] for i in range(tensors // 4)]
    model = nn.ParameterList([nn.Parameter(torch.empty(width, device="cuda")) for width in widths])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for parameter in model:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}, optimizer


def measure(tensors: int, rounds: int) -> str:
    """One row of the table."""
    state, optimizer = make_state(tensors)
    took: list[float] = []
    launches: list[int] = []
    with tempfile.TemporaryDirectory() as directory, Checkpointer(directory) as checkpointer:
        for step in range(rounds + 3):
            optimizer.step()
            torch.cuda.synchronize()
            simulated_gpu.counts()
            began = time.thread_time()
            handle = checkpointer.save(step, state)
            took.append(time.thread_time() - began)
            handle.committed.result(100)
            launches.append(
                sum(
                    n
                    for name, n in simulated_gpu.counts().items()
                    if name.startswith(("kernel", "copy"))
                )
            )
    warm = took[3:]
    least, usual = min(warm) * 1e3, statistics.median(warm) * 1e3
    return (
        f"| {tensors} | {least:.2f} ms | {usual:.2f} ms | {least / tensors * 1e3:.2f} ms | "
        f"{launches[-1]} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tensors", type=int, nargs="+", default=[400, 1200, 4000])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    if not simulated_gpu.active():
        parser.error("needs the simulated GPU (scripts/_gpu_venv.sh)")
    simulated_gpu.install()
    print(
        "| tensors | save(), least CPU time | median | least per 1,000 tensors | launches "
        "|\n|---|---|---|---|---|"
    )
    for tensors in options.tensors:
        print(measure(tensors, options.rounds))


if __name__ == "__main__":
    main()
