# pyright: reportMissingImports=false, reportUntypedBaseClass=false
"""Trainers of Lightning, which save by its own means or by sidesave; as a script, a job of them."""

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sidesave.integrations.lightning import SidesaveCheckpointIO, SidesaveModelParallelStrategy


class Net(LightningModule):
    """Writes down the loss of each step; may die with the daemon stopped, after the save of step
    ``kill_at``.
    """

    def __init__(self, width: int = 16, losses: str = "", kill_at: int = -1) -> None:
        super().__init__()
        self.save_hyperparameters("width")
        self.layers = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 4)
        )
        self.losses, self.kill_at = losses, kill_at
        self.stopped: list[int] = []

    def configure_model(self) -> None:
        mesh = getattr(self, "_device_mesh", None)
        if mesh is not None:  # of ModelParallelStrategy
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.layers, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        step = self.global_step
        if step == self.kill_at:
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        # whatever was seen before a kill
        generator = torch.Generator().manual_seed(2 * step + self.global_rank)
        loss = self.layers(torch.randn(4, 8, generator=generator)).square().mean()
        self.log("loss", loss.detach(), sync_dist=True)
        if self.losses:
            with Path(f"{self.losses}-{self.global_rank}").open("a") as file:
                file.write(f"{step} {loss.item()!r}\n")
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        io = self.trainer.strategy.checkpoint_io
        if (
            self.global_step == self.kill_at
            and not self.stopped
            and isinstance(io, SidesaveCheckpointIO)
        ):
            checkpointer = io.checkpointer
            # nothing of these saves is on the disk at the trainer's end
            if checkpointer is not None:
                checkpointer.wait()
                pid = checkpointer.daemon_pid
                assert pid is not None
                os.kill(pid, signal.SIGSTOP)
                self.stopped.append(pid)
                Path(f"{self.losses}-daemon-{self.global_rank}").write_text(str(pid))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.layers.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)]


def data() -> Any:
    return DataLoader(TensorDataset(torch.zeros(40, 1)), batch_size=4)


def a_trainer(
    folder: Path, io: Any, steps: int, strategy: Any = "auto", devices: int = 1, **options: Any
) -> Trainer:
    plugins, callbacks = ([io], [io.callback()]) if io is not None else ([], [])
    last = ModelCheckpoint(
        dirpath=folder,
        monitor="loss",
        save_top_k=2,
        save_last=options.pop("save_last", True),
        every_n_train_steps=2,
        save_on_train_epoch_end=False,
    )
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=steps,
        callbacks=[*callbacks, last],
        plugins=plugins,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def job(folder: str, api: str, kind: str, steps: int, kill_at: int) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(3)
    torch.set_num_threads(1)
    ours = api == "ours"
    io = SidesaveCheckpointIO(folder) if ours else None
    strategy: Any = "ddp" if kind == "ddp" else "auto"
    if kind == "fsdp":
        sharded = SidesaveModelParallelStrategy if ours else ModelParallelStrategy
        strategy = sharded(data_parallel_size=2, tensor_parallel_size=1)
    trainer = a_trainer(
        Path(folder),
        io,
        steps,
        strategy,
        1 if kind == "alone" else 2,
        use_distributed_sampler=False,
    )
    trainer.fit(
        Net(losses=f"{folder}.losses", kill_at=kill_at),
        data(),
        ckpt_path="last",
        weights_only=False,
    )


if __name__ == "__main__":
    job(**json.loads(sys.argv[1]))
