# pyright: reportMissingImports=false
"""Low-bit optimizers and quantised weights of torchao: saved, restored, and trained on as if never
stopped.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainers import save

import sidesave
from sidesave import Checkpointer
from sidesave.errors import StateMismatchError
from sidesave.stager import torch_private

pytest.importorskip("torchao", reason="needs torchao: scripts/test --integrations torchao")

from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    quantize_,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of torchao and torch


def parts(value: Any) -> Iterable[Any]:
    """The class, the context and the plain tensors that a value is made of, copied."""
    yield type(value)
    if torch_private.is_wrapper(value):
        names, context = value.__tensor_flatten__()
        yield repr(context)
        for name in names:
            yield from parts(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value.detach().clone()
    else:
        yield value


def alike(first: Iterable[Any], second: Iterable[Any]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def leaves(nest: Any) -> list[Any]:
    values = nest.values() if isinstance(nest, dict) else nest if isinstance(nest, list) else None
    return (
        [*parts(nest)] if values is None else [leaf for value in values for leaf in leaves(value)]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [AdamW8bit, AdamW4bit, AdamWFp8])
def test_a_low_bit_optimizer_goes_on_as_if_it_had_never_stopped(
    kind: Any, dtype: torch.dtype, tmp_path: Path
):
    def job() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 8)).to(dtype)
        return model, kind(model.parameters(), lr=1e-2)

    def train(model: nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
        for step in steps:
            torch.manual_seed(step)
            model(torch.randn(4, 512, dtype=dtype)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    jobs = [job() for _ in range(3)]
    train(*jobs[0], range(3))
    train(*jobs[2], range(2))  # which has other states, of the same classes
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, dict(zip(("model", "optimizer"), jobs[0], strict=True)), blocking=True)
        for model, optimizer in jobs[1:]:
            checkpointer.load(into={"model": model, "optimizer": optimizer})
    states = [leaves(optimizer.state_dict()) for _, optimizer in jobs]
    assert alike(states[0], states[1]) and alike(states[0], states[2])
    assert alike(states[0], leaves(sidesave.load(tmp_path)["optimizer"]))
    for each in jobs:
        train(*each, range(3, 6))
    models = [leaves(model.state_dict()) for model, _ in jobs]
    assert alike(models[0], models[1]) and alike(models[0], models[2])


CONFIGS = [
    Int8WeightOnlyConfig(),
    Int8DynamicActivationInt8WeightConfig(),
    IntxWeightOnlyConfig(),
    Float8WeightOnlyConfig(),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_quantised_weights_come_back_in_place_and_fresh(config: Any, tmp_path: Path):
    def quantised(seed: int, config: Any = config) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 32)).to(torch.bfloat16)
        quantize_(model, config)
        return model

    saved, live = quantised(0), quantised(1)
    weight, inner = live[0].weight, live[0].weight.qdata
    save(tmp_path, {"model": saved})
    sidesave.load(tmp_path, into={"model": live})
    assert live[0].weight is weight and weight.qdata is inner
    assert alike(leaves(dict(live.state_dict())), leaves(dict(saved.state_dict())))
    assert alike(leaves(dict(sidesave.load(tmp_path)["model"])), leaves(dict(saved.state_dict())))
    inputs = torch.randn(3, 128, dtype=torch.bfloat16)
    assert torch.equal(live(inputs), saved(inputs))
    plain = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 32)).to(torch.bfloat16)
    with pytest.raises(
        StateMismatchError,
        match=r"model\.0\.weight: the checkpoint holds a torchao\..* tensor, the t",
    ):
        sidesave.load(tmp_path, into={"model": plain})


def test_weights_for_a_float8_all_gather_come_back_with_their_optimizer(tmp_path: Path):
    def job(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        model = convert_to_float8_training(
            nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16)), config=config
        )
        return model, torch.optim.AdamW(model.parameters())

    saved, live = job(0), job(1)
    for parameter in saved[0].parameters():
        parameter.grad = torch.ones(parameter.shape)
    saved[1].step()
    save(tmp_path, dict(zip(("model", "optimizer"), saved, strict=True)))
    sidesave.load(tmp_path, into=dict(zip(("model", "optimizer"), live, strict=True)))
    assert torch_private.is_wrapper(live[0][0].weight)
    for one, other in zip(saved, live, strict=True):
        assert alike(leaves(dict(one.state_dict())), leaves(dict(other.state_dict())))
