"""The trainer: an ordinary training script, its own process, that saves with `sidesave` and resumes
by itself.

It appends one JSON line per event to `DIR/log.jsonl` and writes the same line to its standard
output, so that whoever started it can follow. It knows nothing of the driver that kills it.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import time
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from demo_lib import SIZES
from demo_lib.corpus import BlockSampler
from demo_lib.model import CharTransformer

if TYPE_CHECKING:
    from sidesave import Checkpointer

LOG_NAME = "log.jsonl"
MODEL_SEED = 20_240_229
WARMUP_STEPS = 20


class EventLog:
    """Appends JSON lines to a file and to standard output, each with one unbuffered write, from any
    thread.
    """

    def __init__(self, path: Path) -> None:
        self._outputs = (os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 1)

    def write(self, event: str, **fields: object) -> None:
        line = json.dumps({"event": event, "time_s": time.monotonic(), **fields}).encode() + b"\n"
        for output in self._outputs:
            os.write(output, line)


def learning_rate(step: int) -> float:
    """Linear warmup, then decay with the inverse square root, as a factor of the base rate."""
    return min((step + 1) / WARMUP_STEPS, math.sqrt(WARMUP_STEPS / (step + 1)))


def reached(
    log: EventLog, ckpt: Checkpointer, event: str, step: int, began_s: float, future: Future[Any]
) -> None:
    """Called by a future of a save, from whichever thread completes it."""
    error, after_s = future.exception(), time.monotonic() - began_s
    log.write(
        event, step=step, after_s=after_s, daemon_pid=ckpt.daemon_pid, error=error and repr(error)
    )


def set_up_cuda() -> None:
    """Makes CUDA repeat its sums bit for bit, and is to be called before it is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Attention by plain operators: of all its forms it is deterministic in every precision, and can
    # be simulated.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if os.environ.get("SIMULATED_GPU"):
        import simulated_gpu

        simulated_gpu.install()


def violations(device: str) -> list[str]:
    """Accesses to the memory of a simulated device that nothing orders."""
    if device != "cuda" or not os.environ.get("SIMULATED_GPU"):
        return []
    import simulated_gpu

    torch.cuda.synchronize()
    return simulated_gpu.violations()


def train(run: Path, corpus: Path, size_name: str, device: str, checkpoints: str) -> None:
    size = SIZES[size_name]
    log = EventLog(run / LOG_NAME)
    text = corpus.read_text()
    place = {character: index for index, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([place[character] for character in text])

    torch.manual_seed(MODEL_SEED)
    model = CharTransformer(size, characters=len(place)).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01, fused=device == "cuda"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    sampler = BlockSampler(tokens, batch=size.batch, context=size.context, seed=MODEL_SEED)

    with ExitStack() as stack:
        manager, first = None, 1
        if checkpoints:
            import sidesave  # Only here: the run without saving must not have it in the process.

            state = {"model": model, "optimizer": optimizer, "lr": schedule, "data": sampler}
            policies = [sidesave.EverySteps(size.save_every)]
            manager = stack.enter_context(
                sidesave.CheckpointManager(checkpoints, state, save=policies, random_state=True)
            )
            first = max(1, manager.restore())
            if first > 1:
                manager.prepare()  # staging memory is allocated while the first steps are trained
        log.write(
            "start", resumed_from=first - 1, daemon_pid=manager and manager.checkpointer.daemon_pid
        )

        for step in range(first, size.steps + 1):
            began_s = time.monotonic()
            inputs, targets = (part.to(device) for part in sampler.next_batch())
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            value = float(loss.item())
            log.write("step", step=step, loss=value.hex(), step_s=time.monotonic() - began_s)
            began_s = time.monotonic()
            handle = None if manager is None else manager.step(step, {"loss": value})
            if manager is None or handle is None:
                continue

            log.write("save", step=step, call_s=time.monotonic() - began_s)

            for event, future in (
                ("staged", handle.staged),
                ("written", handle.written),
                ("committed", handle.committed),
            ):
                future.add_done_callback(
                    partial(reached, log, manager.checkpointer, event, step, began_s)
                )
        if manager is not None:
            manager.wait()
    log.write("done", violations=violations(device))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument(
        "--checkpoints", default="", help="a directory or a URL; without it nothing is saved"
    )
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(options.threads)
    if options.device == "cuda":
        set_up_cuda()
    options.run.mkdir(parents=True, exist_ok=True)
    train(options.run, options.corpus, options.size, options.device, options.checkpoints)


if __name__ == "__main__":
    main()
