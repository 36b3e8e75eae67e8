# pyright: reportMissingImports=false, reportUntypedBaseClass=false
"""What a save costs in a framework: by its own means, by its own asynchronous means if it has some,
and by sidesave.

    scripts/test --integrations lightning              # makes .venv-lightning, unless it is there
    .venv-lightning/bin/python -m scripts.bench.integrations lightning

One process and one model with its AdamW for all ways of a framework. In each round every way saves
once, in rotating order, when what the others have begun is durable; the first two rounds do not
count. A save by a framework that does not call fsync is followed by one of its files, which counts
until it is durable.

`dcp` runs where sidesave itself does, the others in the environment of their name.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

Save = Callable[[int], Callable[[], object]]
"""Saves a step; what it returns waits until that is durable."""
Measure = Callable[[dict[str, Save]], None]
"""Measures ways to save, by name."""
UNCOUNTED = 2
WIDTH = 1000


class Task:
    """A model whose state with AdamW has some megabytes, and which can be trained a step."""

    def __init__(self, megabytes: int) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH) for _ in range(max(1, megabytes // 12)))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.train()

    def train(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def sync(path: Path) -> None:
    """Have all that is at a path on the disk."""
    for each in [path, *path.rglob("*")]:
        fd = os.open(each, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def dcp(task: Task, folder: Path, measure: Measure) -> None:
    import torch.distributed.checkpoint as stock
    from torch.distributed.checkpoint.state_dict import get_state_dict

    import sidesave.integrations.dcp as ours

    def state() -> dict[str, Any]:
        model, optimizer = get_state_dict(task.model, task.optimizer)
        return {"model": model, "optimizer": optimizer}

    def by_default(step: int) -> Callable[[], object]:
        stock.save(state(), checkpoint_id=folder / "stock" / str(step))
        return lambda: None

    def by_thread(step: int) -> Callable[[], object]:
        saved: Any = stock.async_save(state(), checkpoint_id=folder / "async" / str(step))
        return saved.result

    def by_sidesave(step: int) -> Callable[[], object]:
        saved: Any = ours.async_save(state(), checkpoint_id=folder / "ours" / str(step))
        return saved.result

    store = torch.distributed.HashStore()
    # async_save wants one
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    ours.open_run(folder / "ours")
    measure({"`save`": by_default, "`async_save`": by_thread, "sidesave": by_sidesave})
    ours.close()
    torch.distributed.destroy_process_group()


def lightning(task: Task, folder: Path, measure: Measure) -> None:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

    from sidesave.integrations.lightning import SidesaveCheckpointIO

    def checkpoint() -> dict[str, Any]:
        state = task.state()
        return {
            "state_dict": state["model"],
            "optimizer_states": [state["optimizer"]],
            "global_step": 1,
        }

    plain, threaded, ours = (
        TorchCheckpointIO(),
        AsyncCheckpointIO(TorchCheckpointIO()),
        SidesaveCheckpointIO(folder),
    )

    def by_default(step: int) -> Callable[[], object]:
        path = folder / f"stock-{step}.ckpt"
        plain.save_checkpoint(checkpoint(), path)
        return lambda: sync(path)

    def by_thread(step: int) -> Callable[[], object]:
        path = folder / f"async-{step}.ckpt"
        threaded.save_checkpoint(checkpoint(), path)
        executor: Any = threaded._executor
        return lambda: (executor.submit(int).result(), sync(path))

    def by_sidesave(step: int) -> Callable[[], object]:
        ours.save_checkpoint(checkpoint(), folder / f"ours-{step}.ckpt")
        assert ours.checkpointer is not None
        return ours.checkpointer.wait

    ours.open()
    measure(
        {
            "`TorchCheckpointIO`": by_default,
            "`AsyncCheckpointIO`": by_thread,
            "sidesave": by_sidesave,
        }
    )
    ours.teardown()
    threaded.teardown()


def transformers(task: Task, folder: Path, measure: Measure) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from sidesave.integrations.transformers import SidesaveTrainerMixin

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = task.model

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layers(x).square().mean()}

    class Measured(SidesaveTrainerMixin, Trainer):
        pass

    class Measuring(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            measure({"`Trainer`": by_default, "sidesave": by_sidesave})

    def by_default(step: int) -> Callable[[], object]:
        trainer.state.global_step, trainer.args.output_dir = step, str(folder / "stock")
        Trainer._save_checkpoint(trainer, trainer.model, None)
        return lambda: sync(folder / "stock" / f"checkpoint-{step}")

    def by_sidesave(step: int) -> Callable[[], object]:
        trainer.state.global_step, trainer.args.output_dir = step, str(folder / "ours")
        trainer._save_checkpoint(trainer.model, None)
        return trainer._sidesave.settle

    quiet: dict[str, Any] = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    trainer: Any = Measured(
        Model(),
        TrainingArguments(str(folder / "ours"), use_cpu=True, max_steps=1, **quiet),
        train_dataset=[{"x": torch.ones(WIDTH)}] * 8,  # pyright: ignore[reportArgumentType]
        optimizers=(task.optimizer, None),
        callbacks=[Measuring()],
    )
    trainer.train()


def accelerate(task: Task, folder: Path, measure: Measure) -> None:
    from accelerate import Accelerator

    from sidesave.integrations.accelerate import SidesaveState

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(task.model, task.optimizer)

    def by_default(step: int) -> Callable[[], object]:
        path = folder / f"stock-{step}"
        accelerator.save_state(str(path))
        return lambda: sync(path)

    with SidesaveState(accelerator, folder / "ours") as state:
        measure(
            {"`save_state`": by_default, "sidesave": lambda step: state.save(step).committed.result}
        )


def torchtitan(task: Task, folder: Path, measure: Measure) -> None:
    sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))
    importlib.import_module("titan_on_cpu")  # before all of torchtitan
    from torchtitan.components.checkpointer import CheckpointManager

    from sidesave.integrations.torchtitan import SidesaveCheckpointManager

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    trainers = importlib.import_module("titan_trainers")
    parts = trainers.Parts(
        1, names=tuple(f"layer{each}" for each in range(len(task.model))), width=WIDTH
    )
    task.model, task.optimizer = parts.model, next(iter(parts.optimizers.optimizers))
    task.train()

    def made(kind: Any, name: str, **options: Any) -> Any:
        return parts.build(kind.Config(enable=True, interval=1, folder=name, **options), folder)

    def way(manager: Any) -> Save:
        def save(step: int) -> Callable[[], object]:
            manager.save(step)
            return manager.maybe_wait_for_saving

        return save

    ways = {
        "`async_mode=disabled`": made(CheckpointManager, "stock", async_mode="disabled"),
        "`async_mode=async`": made(CheckpointManager, "async", async_mode="async"),
        "sidesave": made(SidesaveCheckpointManager, "ours"),
    }
    measure({name: way(manager) for name, manager in ways.items()})
    for manager in ways.values():
        manager.close()
    torch.distributed.destroy_process_group()


FRAMEWORKS = {
    each.__name__: each for each in (dcp, lightning, transformers, accelerate, torchtitan)
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument(
        "--megabytes", type=int, default=120, help="size of the model and its AdamW (default 120)"
    )
    parser.add_argument("--rounds", type=int, default=8, help="measured rounds (default 8)")
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="where to write (default: the current folder)"
    )
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    task = Task(chosen.megabytes)

    def measure(ways: dict[str, Save]) -> None:
        called: dict[str, list[float]] = {name: [] for name in ways}
        durable: dict[str, list[float]] = {name: [] for name in ways}
        for step in range(1, UNCOUNTED + chosen.rounds + 1):
            names = [*ways]
            for name in names[step % len(names) :] + names[: step % len(names)]:
                task.train()
                began = time.perf_counter()
                wait = ways[name](step)
                called[name].append(time.perf_counter() - began)
                wait()
                durable[name].append(time.perf_counter() - began)
        first = next(iter(ways))
        for name in ways:
            stall, until, ratio = (
                statistics.median(times[UNCOUNTED:])
                for times in (
                    called[name],
                    durable[name],
                    [own / other for own, other in zip(called[name], called[first], strict=True)],
                )
            )
            print(
                f"| {chosen.framework} | {name} | {1e3 * stall:.0f} | {ratio:.2f} | {until:.2f} |"
            )

    with tempfile.TemporaryDirectory(prefix="sidesave-bench-", dir=chosen.dir) as folder:
        FRAMEWORKS[chosen.framework](task, Path(folder).resolve(), measure)


if __name__ == "__main__":
    main()
