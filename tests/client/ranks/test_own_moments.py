"""Optimizers that have state for other parameters on each rank: each rank gets back what it had,
and nothing more.
"""

from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from states import difference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import StateDictType
from trainers import DEADLINE_S, save

import sidesave
from sidesave.errors import UnsupportedValueError


def _experts(rank: int, folder: Path) -> None:
    """On each rank another expert has had something to do."""

    def made(seed: int) -> tuple[nn.ModuleList, torch.optim.AdamW]:
        torch.manual_seed(seed)
        model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = made(0)
    model[rank](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with sidesave.Checkpointer(f"{folder}/run") as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer}).committed.result(DEADLINE_S)
        again, other = made(1)
        checkpointer.load(into={"model": again, "optimizer": other})
        fresh = checkpointer.load()
    assert [*other.state_dict()["state"]] == [2 * rank, 2 * rank + 1]
    assert difference(optimizer.state_dict(), other.state_dict()) == ""
    assert difference(dict(model.state_dict()), dict(again.state_dict())) == ""
    assert [*fresh["optimizer"]["state"]] == [2 * rank, 2 * rank + 1]


def test_a_parameter_without_a_gradient_gets_no_moments_of_another_rank(tmp_path: Path):
    forks.spawn_group(_experts, tmp_path)


def _stages(rank: int, folder: Path) -> None:
    """Two stages of a pipeline; of the first only one layer has had something to do."""
    model = nn.ModuleDict({f"{rank}{part}": nn.Linear(4, 4, bias=False) for part in "ab"})
    optimizer = torch.optim.AdamW(model.parameters())
    for layer in [*model.values()][: 1 + rank]:
        layer(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    save(f"{folder}/run", {"model": model, "optimizer": optimizer})


def test_a_parameter_gets_no_moments_of_one_that_has_its_number_in_another_stage(tmp_path: Path):
    forks.spawn_group(_stages, tmp_path)
    model = nn.ModuleDict({f"0{part}": nn.Linear(4, 4, bias=False) for part in "ab"})
    optimizer = torch.optim.AdamW(model.parameters())
    sidesave.load(tmp_path / "run", into={"model": model, "optimizer": optimizer}, strict=False)
    assert [*optimizer.state_dict()["state"]] == [0]


def _fsdp1(rank: int, folder: Path, use_orig_params: bool, kind: StateDictType) -> None:
    """Small layers lie on one rank whole; of another both have a part."""
    mesh = init_device_mesh("cpu", (2,))

    def made(seed: int) -> tuple[FSDP1, torch.optim.AdamW]:
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 3)
        )
        wrapped = FSDP1(
            model, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
        FSDP1.set_state_dict_type(wrapped, kind)
        return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.01)

    def train(model: FSDP1, optimizer: torch.optim.AdamW, steps: int) -> list[float]:
        losses: list[float] = []
        for _ in range(steps):
            loss = model(torch.linspace(0, 1 + rank, 12).reshape(2, 6)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        return losses

    model, optimizer = made(0)
    train(model, optimizer, 2)
    with sidesave.Checkpointer(f"{folder}/run") as checkpointer:
        checkpointer.save(1, {"model": model, "optimizer": optimizer}).committed.result(DEADLINE_S)
        again, other = made(1)
        checkpointer.load(into={"model": again, "optimizer": other})
    states: Any = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert states[0]
    assert difference(*states) == ""
    assert train(model, optimizer, 3) == train(again, other, 3), (
        "it goes on as if nothing had happened"
    )


def _without_mesh(rank: int, folder: Path) -> None:
    model = FSDP1(nn.Linear(6, 5), device_id=torch.device("cpu"))
    FSDP1.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    told = "ShardedTensor is not a plain tensor; with device_mesh="
    with (
        sidesave.Checkpointer(f"{folder}/run") as checkpointer,
        pytest.raises(UnsupportedValueError, match=told),
    ):
        checkpointer.save(1, {"model": model})


def test_fsdp1_without_a_mesh_is_told_what_it_needs(tmp_path: Path):
    forks.spawn_group(_without_mesh, tmp_path)


@pytest.mark.drawn
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize(
    "kind", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT], ids=str
)
def test_fsdp1_goes_on_bit_for_bit(tmp_path: Path, use_orig_params: bool, kind: StateDictType):
    forks.spawn_group(_fsdp1, tmp_path, use_orig_params, kind)
