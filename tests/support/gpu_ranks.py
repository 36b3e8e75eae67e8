"""One of two ranks that train a transformer which FSDP2 divides between them, with saves and
without.

`python gpu_ranks.py RANK DIRECTORY`; the exit status says whether all was as it should be. The
process group is gloo's, also for what is on the device, for NCCL can neither share a device nor be
simulated.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from gpu import on_host
from gpu_transformer import Transformer, batch, loss_of, repeatable
from states import difference, frozen, like
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from sidesave import Checkpointer, StagingOptions

SIZE, STEPS, SAVES = 2, 5, 4
PLACES = ("begun", "forward", "backward", "stepped")
VARIANTS = ("gathered twice", "kept whole until backward", "offloaded")


class Run:
    def __init__(self, rank: int, variant: str) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.model = Transformer(layers=2).to("cuda")
        options: dict[str, Any] = {"mesh": init_device_mesh("cuda", (SIZE,))}
        options["reshard_after_forward"] = variant != "kept whole until backward"
        if variant == "offloaded":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
        for layer in self.model.encoder.layers:
            fully_shard(layer, **options)
        fully_shard(self.model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.losses: list[Tensor] = []

    def step(self, number: int) -> Generator[str]:
        yield "begun"
        loss = loss_of(self.model, batch(SIZE * number + self.rank))
        self.losses.append(loss.detach())
        yield "forward"
        self.optimizer.zero_grad()
        loss.backward()
        yield "backward"
        self.optimizer.step()
        yield "stepped"

    def told(self) -> list[str]:
        return [float(loss.item()).hex() for loss in self.losses]


def local(value: Any) -> Any:
    """This rank's part of a nest, in host memory."""
    if isinstance(value, DTensor):
        return value.to_local().detach().cpu()
    if isinstance(value, dict):
        return like(value, ((key, local(item)) for key, item in value.items()))
    return type(value)(map(local, value)) if isinstance(value, (list, tuple)) else on_host(value)


def meet(rank: int, directory: Path) -> None:
    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    store = torch.distributed.FileStore(str(directory / "store"), SIZE)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:gloo", store=store, rank=rank, world_size=SIZE
    )


def check(rank: int, directory: Path, variant: str) -> None:
    alone = Run(rank, variant)
    for step in range(STEPS):
        for _ in alone.step(step):
            pass
    losses = alone.told()
    assert len(set(losses)) == STEPS

    run = Run(rank, variant)
    chance = random.Random(variant)  # the same for all ranks
    drawn = set(chance.sample(range(len(PLACES) * STEPS), SAVES)) | {len(PLACES) * 2 - 1}
    taken: list[tuple[int, dict[str, Any]]] = []
    with Checkpointer(directory / variant, staging=StagingOptions(slots=3)) as checkpointer:
        for step in range(STEPS):
            for number, _ in enumerate(run.step(step), len(PLACES) * step):
                if number in drawn:
                    taken.append((number, frozen(run.state)))
                    checkpointer.save(number, run.state)
        assert run.told() == losses
        checkpointer.wait(60)

        fresh = Run(rank, variant)
        for number, expected in taken:
            checkpointer.load(number, into=fresh.state)
            loaded = frozen(fresh.state)
            found = difference(local(expected), local(loaded))
            assert not found, (
                f"step {number // len(PLACES)}, {PLACES[number % len(PLACES)]}, {variant}: {found}"
            )
            if PLACES[number % len(PLACES)] == "stepped":
                for step in range(number // len(PLACES) + 1, STEPS):
                    for _ in fresh.step(step):
                        pass
                rest = fresh.told()
                fresh.losses.clear()
                assert rest == losses[STEPS - len(rest) :], f"resumed from {number}, {variant}"


def main(rank: int, directory: Path) -> None:
    meet(rank, directory)
    for variant in VARIANTS:
        check(rank, directory, variant)
    torch.cuda.synchronize()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    arguments = int(sys.argv[1]), Path(sys.argv[2])
    # of an FSDP module, which nobody changes
    warnings.filterwarnings("ignore", ".*returned a view tensor")
    with repeatable():
        if os.environ.get("SIMULATED_GPU"):
            import simulated_gpu

            simulated_gpu.install()
            main(*arguments)
            assert (found := simulated_gpu.violations()) == [], found
        else:
            main(*arguments)
