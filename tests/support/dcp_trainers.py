"""Trainers that save by the calls of torch.distributed.checkpoint: those of torch, or of
sidesave.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import sidesave.integrations.dcp as ours
from sidesave.errors import CheckpointNotFoundError


class AppState(Stateful):
    """As torch's tutorial has it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def an_app(seed: int, kind: str = "", steps: int = 0) -> Any:
    """A model and its optimizer; of ``kind`` ``ddp`` or ``fsdp``."""
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(
            model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        )
    app = AppState(model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1)))
    for step in range(steps):
        train(app, step)
    return app


def train(app: AppState, step: int) -> float:
    """One step; returns the loss."""
    generator = torch.Generator().manual_seed(step)
    loss = app.model(torch.randn(5, 4, generator=generator)).square().mean()
    loss.backward()
    app.optimizer.step()
    app.optimizer.zero_grad()
    return loss.item()


def whole(tensor: Any) -> torch.Tensor:
    """All of a tensor that may be divided."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def tensors(app: AppState) -> list[torch.Tensor]:
    """The parameters and moments."""
    moments = [app.optimizer.state[each]["exp_avg"] for each in app.model.parameters()]
    return [*map(whole, app.model.parameters()), *map(whole, moments)]


def join(rank: int, folder: str, size: int = 2) -> None:
    """Make the process group; ``folder`` is fresh."""
    store = torch.distributed.FileStore(f"{folder}/store", size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)


def newest(run: Path) -> Path | None:
    """The checkpoint to go on from."""
    found = [
        each for each in run.glob("at_*") if each.is_symlink() or (each / ".metadata").exists()
    ]
    return max(found, key=lambda each: int(each.name[3:]), default=None)


def run_job(
    rank: int, meeting: str, run: str, api: str, kind: str, until: int, kill_at: int, size: int = 2
) -> None:
    """Train to step ``until``, saving each step, and go on from what is there; die within the save
    of ``kill_at``.
    """
    dcp: Any = ours if api == "ours" else stock
    join(rank, meeting, size)
    app = an_app(1, kind)
    begin = 0
    # torch saves in a thread, beside what training exchanges
    group: Any = torch.distributed.new_group(backend="gloo")
    if api == "ours":
        ours.open_run(run, process_group=group)
    torch.distributed.barrier()
    last = newest(Path(run))
    torch.distributed.barrier()
    if last is not None:
        state = {"app": app, "step": 0}
        dcp.load(state, checkpoint_id=str(last), process_group=group)
        begin = state["step"] + 1
    saved = None
    for step in range(begin, until):
        with Path(f"{run}.losses-{rank}").open("a") as file:
            file.write(f"{step} {train(app, step)!r}\n")
        if saved is not None:
            saved.result()
        saved = dcp.async_save(
            {"app": app, "step": step}, checkpoint_id=f"{run}/at_{step}", process_group=group
        )
        if step == kill_at:
            try:
                torch.distributed.barrier()
            finally:  # also where the other rank is dead already
                os.kill(os.getpid(), signal.SIGKILL)
    if saved is not None:
        saved.result()
    torch.distributed.barrier()
    if api == "ours":
        ours.close()
    torch.distributed.destroy_process_group()


def divided(rank: int, folder: str) -> None:
    """Two ranks save a divided model and read it in each way."""
    join(rank, folder)
    app = an_app(1, "fsdp", steps=2)
    path = f"{folder}/run/at-7"
    saved: Any = ours.async_save({"app": app, "rank": rank, "step": 7}, checkpoint_id=path)
    saved.result()
    torch.distributed.barrier()
    expected = tensors(app)
    for loader in ("ours", "reader"):
        other = an_app(2, "fsdp", steps=1)
        state = {"app": other, "step": 0}
        if loader == "ours":
            ours.load(state, checkpoint_id=path)
        else:
            stock.load(state, storage_reader=ours.SidesaveReader(path))
        assert all(map(torch.equal, expected, tensors(other))), loader
        assert other.optimizer.param_groups[0]["lr"] == app.optimizer.param_groups[0]["lr"]
        assert state["step"] == 7
    if rank == 0:
        torch.save(expected, f"{folder}/expected")
    unchanged = tensors(app)
    with pytest.raises(CheckpointNotFoundError):  # on both: one of them cannot find it
        ours.load(
            {"app": an_app(3, "fsdp")}, checkpoint_id=path if rank == 0 else f"{folder}/none-1"
        )
    assert all(map(torch.equal, unchanged, tensors(app)))
    ours.close()
    torch.distributed.destroy_process_group()


def replicated(rank: int, folder: str) -> None:
    """Two ranks with the same state; it is on disk once."""
    join(rank, folder)
    app = an_app(1, "ddp", steps=1)
    ours.save(
        {"app": app, "own": torch.full((3,), float(rank))}, checkpoint_id=f"{folder}/run/at-1"
    )
    own = {"own": torch.zeros(3)}
    ours.load(own, checkpoint_id=f"{folder}/run/at-1")
    assert own["own"].tolist() == [rank] * 3
    ours.close()
    torch.distributed.destroy_process_group()
