"""Training loops of all kinds under a ``CheckpointManager``: what is resumed goes on bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from managers import Manage
from torch import nn

import sidesave

Loop = tuple[dict[str, Any], Callable[[], object]]
"""A state and what trains it by one step."""


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1))


def plain_loop() -> Loop:
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        schedule.step()

    return {"model": model, "optimizer": optimizer, "schedule": schedule}, step


def gradient_accumulation() -> Loop:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(3):
            (model(torch.randn(4, 8)).square().mean() / 3).backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


def amp_scaler() -> Loop:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(4, 8)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return {"model": model, "optimizer": optimizer, "scaler": scaler}, step


def ema_copy() -> Loop:
    model = _net()
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        ema.update_parameters(model)

    return {"model": model, "ema": ema, "optimizer": optimizer}, step


def several_models_and_optimizers() -> Loop:
    generator, critic = nn.Linear(3, 8), _net()
    ours, theirs = torch.optim.Adam(generator.parameters()), torch.optim.SGD(critic.parameters(), lr=0.01)
    replay: list[float] = []
    progress: dict[str, Any] = {"replay": replay, "rounds": 0}

    def step() -> None:
        theirs.zero_grad()
        (critic(generator(torch.randn(4, 3)).detach()).mean() - critic(torch.randn(4, 8)).mean()).backward()
        theirs.step()
        ours.zero_grad()
        loss = -critic(generator(torch.randn(4, 3))).mean()
        loss.backward()
        ours.step()
        progress["replay"] = [*progress["replay"][-3:], loss.item()]
        progress["rounds"] += 1

    models = {"generator": generator, "critic": critic}
    return {"models": models, "optimizers": [ours, theirs], "progress": progress}, step


def compiled() -> Loop:
    model: Any = torch.compile(_net(), backend="aot_eager")  # which needs no compiler
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


def activation_checkpointing() -> Loop:
    from torch.utils.checkpoint import checkpoint

    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        hidden: Any = checkpoint(model[:3], torch.randn(4, 8), use_reentrant=False)
        model[3](hidden).square().mean().backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


def leaves(value: Any) -> list[Any]:
    """Everything in a state that a step may change, in a form that compares bit for bit."""
    if isinstance(value, torch.Tensor):
        return [value.dtype, value.tolist()]
    if hasattr(value, "state_dict"):
        return leaves(value.state_dict())
    if isinstance(value, dict):
        return [[key, leaves(item)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [leaves(item) for item in value]
    return [value]


@pytest.mark.drawn
@pytest.mark.parametrize(
    "loop",
    [
        plain_loop,
        gradient_accumulation,
        amp_scaler,
        ema_copy,
        several_models_and_optimizers,
        compiled,
        activation_checkpointing,
    ],
)
def test_training_of_many_kinds_resumes_bit_for_bit(manage: Manage, loop: Callable[[], Loop]):
    torch.manual_seed(1)
    state, train = loop()
    manager = manage(state, save=[sidesave.EverySteps(3, offset=2)], random_state=True)
    for step in range(6):
        train()
        if step < 3:
            manager.step(step)
    expected = leaves(state)
    torch.manual_seed(2)
    state, train = loop()
    manager = manage(state, random_state=True)
    first = manager.restore()
    assert first == 3
    for _ in range(first, 6):
        train()
    assert leaves(state) == expected
