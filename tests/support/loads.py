"""Live states to load into, checkpoints of them, and what a load that is refused must have left
alone.
"""

import collections
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from states import difference
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import sidesave
from sidesave.errors import IntegrityError, StateMismatchError
from sidesave.writer_daemon.format.tensor_file import digest


class Loader:
    """A data loader of the user's; stubborn ones cannot be loaded."""

    def __init__(self, position: int = 0, *, stubborn: bool = False) -> None:
        self.position = position
        self.stubborn = stubborn

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.stubborn:
            raise RuntimeError("this loader does not want to")
        self.position = state["position"]


def live(seed: int, *, width: int = 8) -> dict[str, Any]:
    """Live objects of every kind, after a few steps of training."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))
    optimizer = torch.optim.AdamW(
        [{"params": [*model[0].parameters()], "lr": 0.1}, {"params": [*model[1:].parameters()]}],
        lr=0.01 * seed,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    for _ in range(seed):
        optimizer.zero_grad()
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": Loader(position=100 * seed),
        "epoch": seed,
        "bare": torch.randn(5),
        "nested": {
            "ema": torch.randn(3, 3),
            "complex": torch.randn(3, dtype=torch.complex128),
            "heads": [nn.Linear(2, 2), nn.Linear(2, 3)],
            "loaders": (Loader(seed), Loader(seed + 1)),
            "history": [{"loss": float(seed)}] * seed,
            "array": np.full(3, seed),
            1: torch.randn(2),
        },
    }


def values(state: Any) -> Any:
    """Everything a live state holds, copied: to compare bit by bit before and after."""
    if isinstance(state, dict):
        return {key: values(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(values(value) for value in state)
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, nn.Module):
        return collections.OrderedDict(values(dict(state.state_dict())))
    if hasattr(state, "state_dict"):
        return values(state.state_dict())
    return state.copy() if isinstance(state, np.ndarray) else state


def assert_refused(path: Path, target: dict[str, Any], *names: str, **options: Any) -> str:
    """That nothing is touched, and that everything that does not fit is named."""
    before, objects = values(target), dict(target)
    with pytest.raises(StateMismatchError) as caught:
        sidesave.load(path, into=target, **options)
    message = str(caught.value)
    for name in names:
        assert name in message
    assert difference(before, values(target)) == "", "something has been touched"
    assert all(target[key] is value for key, value in objects.items())
    return message


class Trunk(nn.Module):
    """A backbone and a head, as a wrapper has them or not."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)


class Wrapped(nn.Module):
    """A module of the user's that names its child as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Extra(nn.Linear):
    """A module with a state that is no tensor."""

    def __init__(self, note: dict[Any, Any]) -> None:
        super().__init__(2, 2)
        self.note = note

    def get_extra_state(self) -> dict[Any, Any]:
        return self.note

    def set_extra_state(self, state: dict[Any, Any]) -> None:
        self.note = state


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    assert difference(values(one), values(other)) == ""


def flip_bit(path: Path, at: int | None = None) -> None:
    """Change one bit of the byte ``at``, by default of the one in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 0x10
    path.write_bytes(data)


def assert_damaged(path: Path, message: str, **options: Any) -> None:
    """That it is noticed, and that nothing has been applied by then."""
    target = live(1)
    before = values(target)
    with pytest.raises(IntegrityError, match=message):
        sidesave.load(path, into=target, **options)
    assert difference(before, values(target)) == ""
    with pytest.raises(IntegrityError, match=message):
        sidesave.load(path, **options)
    assert not sidesave.verify(path).ok


def with_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrites a manifest with a digest that is right again."""
    manifest = path / "manifest.json"
    body = json.loads(manifest.read_bytes())
    del body["xxh3_128"]
    change(body)
    rest = json.dumps(body, separators=(",", ":")).encode()[1:]
    manifest.write_bytes(b'{"xxh3_128":"' + digest(rest).hex().encode() + b'",' + rest)


def sharded(seed: int, mesh: Any, dtype: torch.dtype = torch.float32) -> Any:
    model = Trunk(seed).to(dtype)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(spread))
    return model
