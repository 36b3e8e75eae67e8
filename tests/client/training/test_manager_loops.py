"""Training loops of all kinds under a ``CheckpointManager``: what is resumed goes on bit for
bit.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from managers import Manage
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

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
    ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        ema.update_parameters(model)

    return {"model": model, "ema": ema, "optimizer": optimizer}, step


def several_models_and_optimizers() -> Loop:
    generator, critic = nn.Linear(3, 8), _net()
    ours, theirs = (
        torch.optim.Adam(generator.parameters()),
        torch.optim.SGD(critic.parameters(), lr=0.01),
    )
    replay: list[float] = []
    progress: dict[str, Any] = {"replay": replay, "rounds": 0}

    def step() -> None:
        theirs.zero_grad()
        (
            critic(generator(torch.randn(4, 3)).detach()).mean() - critic(torch.randn(4, 8)).mean()
        ).backward()
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
    manager = manage(state, save=[sidesave.EverySteps(3, offset=2)])
    for step in range(6):
        train()
        if step < 3:
            manager.step(step)
    expected = leaves(state)
    torch.manual_seed(2)
    state, train = loop()
    manager = manage(state)
    first = manager.restore()
    assert first == 3
    for _ in range(first, 6):
        train()
    assert leaves(state) == expected


# Data loaders, which draw from the generator when they begin an epoch -----------------------------

BATCHES, STEPS = 4, 11


class Items(Dataset[float]):
    """Twelve numbers, to which workers add random ones."""

    def __len__(self) -> int:
        return 3 * BATCHES

    def __getitem__(self, index: int) -> float:
        return index if get_worker_info() is None else index + torch.rand(()).item()


def train_on(
    loader: Any, first: int, manager: sidesave.CheckpointManager | None = None
) -> Iterator[tuple[int, list[float], float]]:
    """The steps from ``first`` on: number, batch and a random number of each. What was trained on
    is skipped.
    """
    evaluation = DataLoader(Items(), 3)
    for epoch in itertools.count(first // BATCHES):
        for step, batch in enumerate(loader, epoch * BATCHES):
            if step == STEPS:
                return
            if step >= first:
                yield step, batch.tolist(), torch.rand(()).item()
                if step % 3 == 1:
                    assert len([*evaluation]) == BATCHES
                if manager is not None:
                    manager.step(step)


@pytest.mark.parametrize("saved", [1, 3, 6])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"shuffle": True, "num_workers": 2},
        {"shuffle": True, "num_workers": 2, "persistent_workers": True},
        {"sampler": torch.utils.data.WeightedRandomSampler([0.1, *[0.5] * 11], 12)},
    ],
    ids=["in order", "shuffled", "by workers", "by workers that stay", "weighted"],
)
def test_random_numbers_go_on_though_a_data_loader_draws_its_seeds_after_the_restore(
    manage: Manage, options: dict[str, Any], saved: int
):
    torch.manual_seed(1)
    manager = manage(save=[sidesave.AtSteps([saved])])
    expected = [*train_on(DataLoader(Items(), 3, **options), 0, manager)][saved + 1 :]
    torch.manual_seed(2)
    manager = manage()
    resumed = [*train_on(DataLoader(Items(), 3, **options), manager.restore())]
    if "persistent_workers" in options and saved >= 3:  # these workers go on from the epoch before
        whole = [
            [(step, [*map(int, batch)], drawn) for step, batch, drawn in steps]
            for steps in (expected, resumed)
        ]
        expected, resumed = whole
    assert resumed == expected


@pytest.mark.parametrize("saved", [1, 3, 6])
@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_go_on_with_a_data_loader_that_has_a_state(
    manage: Manage, workers: int, saved: int
):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def start(seed: int, **options: Any) -> tuple[Any, sidesave.CheckpointManager]:
        torch.manual_seed(seed)
        loader = stateful.StatefulDataLoader(
            [*range(12)], batch_size=3, shuffle=True, num_workers=workers
        )
        return loader, manage({"loader": loader}, **options)

    def train(loader: Any, first: int, manager: sidesave.CheckpointManager) -> list[Any]:
        steps = (
            (batch.tolist(), torch.rand(()).item()) for _ in itertools.count() for batch in loader
        )
        done: list[Any] = []
        for step, each in zip(range(first, STEPS), steps, strict=False):
            done.append(each)
            manager.step(step)
        return done

    loader, manager = start(1, save=[sidesave.AtSteps([saved])])
    expected = train(loader, 0, manager)[saved + 1 :]
    loader, manager = start(2)
    assert train(loader, manager.restore(), manager) == expected


def test_a_data_loader_that_is_not_begun_again_is_warned_of(
    manage: Manage, caplog: pytest.LogCaptureFixture
):
    manager = manage(save=[sidesave.AtSteps([1])])
    assert len([*train_on(DataLoader(Items(), 3), 0, manager)]) == STEPS
    manager = manage()
    assert manager.restore() == 2
    iter(DataLoader(Items(), 2))
    assert "epoch" not in caplog.text
    manager.save(2)
    assert "random numbers may differ" in caplog.text
    assert "a DataLoader of 4 batches of a Items" in caplog.text
    caplog.clear()
    manager.save(3)
    assert caplog.text == ""


def test_a_checkpoint_without_random_numbers_is_restored_with_a_warning(
    manage: Manage, caplog: pytest.LogCaptureFixture
):
    manage({"x": 1}, random_state=False).save(1, blocking=True)
    state = {"x": 2}
    before = random.getstate()
    assert manage(state).restore() == 2
    assert state == {"x": 1}
    assert random.getstate() == before
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "no saved state for random_state" in record.getMessage()


def test_random_numbers_are_saved_by_default(manage: Manage, run: Path):
    manage({"x": 1}).save(1, blocking=True)
    assert {*sidesave.load(run)} == {"x", "random_state"}
