"""Real training on a device with saves wherever they fall: nothing of it changes, and each save is
of its moment.

No step waits for the host: losses are read when all is over, so that copies run beside whatever the
schedule of the device allows. What a save must hold is cloned on the compute stream right before
the call.
"""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import on_host
from gpu_transformer import Transformer, batch, loss_of, repeatable
from states import difference, frozen, swap_back, swap_in
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from trainers import SUPPORT

import sidesave
from sidesave import Checkpointer, StagingOptions
from sidesave.stager import ownership

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings(
        "ignore:.*(lr_scheduler.step|AccumulateGrad|deprecated):UserWarning"
    ),
]

STEPS, SAVES = 8, 9


@pytest.fixture(autouse=True)
def repeatable_test() -> Iterator[None]:
    with repeatable():
        yield


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one run trains."""

    options: dict[str, Any]
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    autocast: torch.dtype | None = None
    scaled: bool = False
    micro_batches: int = 1
    scheduled: bool = False
    averaged: bool = False
    captured: bool = False


def on_device(value: float) -> Tensor:
    return torch.tensor(value, device="cuda")


RECIPES = {
    "AdamW, fused": Recipe(options={"fused": True}),
    "AdamW, foreach, amsgrad": Recipe(options={"foreach": True, "amsgrad": True}),
    "AdamW, one by one": Recipe(options={"foreach": False}),
    "SGD with momentum, fused": Recipe(
        make=torch.optim.SGD, options={"momentum": 0.9, "fused": True}
    ),
    "bfloat16, three micro batches": Recipe(
        options={"fused": True}, autocast=torch.bfloat16, micro_batches=3
    ),
    "float16, loss scaled, foreach": Recipe(
        options={"foreach": True}, autocast=torch.float16, scaled=True
    ),
    "scheduled rate, a tensor on the device": Recipe(
        options={"foreach": True, "capturable": True, "lr": on_device}, scheduled=True
    ),
    "averaged weights, evaluated": Recipe(options={"fused": True}, averaged=True),
    "all of it": Recipe(
        options={"fused": True},
        autocast=torch.float16,
        scaled=True,
        micro_batches=2,
        scheduled=True,
        averaged=True,
    ),
    "a graph of the whole step": Recipe(options={"capturable": True}, captured=True),
    "a graph, averaged weights, a rate on the device": Recipe(
        options={"capturable": True, "foreach": True, "lr": on_device},
        captured=True,
        scheduled=True,
        averaged=True,
    ),
}


class Run:
    """A model in training. ``step`` stops wherever a save may fall and tells the name of the
    place.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        torch.manual_seed(0)
        self.model = Transformer().to("cuda")
        options = dict(recipe.options)
        rate = options.pop("lr", float)(1e-2)
        self.optimizer = recipe.make(self.model.parameters(), lr=rate, **options)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        # So large that the first steps overflow, and so quick to grow that later ones do as well.
        self.scaler = torch.amp.GradScaler(
            "cuda", enabled=recipe.scaled, init_scale=2.0**19, growth_interval=3
        )
        if recipe.scaled:
            self.state["scaler"] = self.scaler
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1 / (1 + step)
        )
        if recipe.scheduled:
            self.state["schedule"] = self.schedule
        if recipe.averaged:
            self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
            self.state["average"] = self.average
        self.losses: list[Tensor] = []
        self.graph: torch.cuda.CUDAGraph | None = None

    def _forward_and_backward(self, tokens: Tensor) -> Tensor:
        dtype = self.recipe.autocast
        with nullcontext() if dtype is None else torch.autocast("cuda", dtype):
            loss = loss_of(self.model, tokens) / self.recipe.micro_batches
        self.scaler.scale(loss).backward()
        return loss.detach()

    def _captured_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.static_loss = self._forward_and_backward(self.static_tokens)
        self.optimizer.step()

    def capture(self) -> None:
        """As torch's documentation has it; what the steps before the capture have trained is undone
        in place.
        """
        before = [tensor.clone() for tensor in self._tensors()]
        self.static_tokens = batch(0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._captured_step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._captured_step()
        with ownership.guard():
            for number, tensor in enumerate(self._tensors()):
                tensor.copy_(before[number]) if number < len(before) else tensor.zero_()

    def _tensors(self) -> list[Tensor]:
        """Those of the model, then those of the optimizer, which has none before its first step."""
        states = (value for state in self.optimizer.state.values() for value in state.values())
        return [*(tensor.detach() for tensor in self.model.state_dict().values()), *states]

    def step(self, number: int) -> Generator[str]:
        if self.recipe.captured and self.graph is None:
            self.capture()
        yield "begun"
        if self.graph is not None:
            self.static_tokens.copy_(batch(number), non_blocking=True)
            self.graph.replay()
            self.losses.append(self.static_loss.clone())
        else:
            self.optimizer.zero_grad(set_to_none=False)
            parts = []
            for part in range(self.recipe.micro_batches):
                parts.append(self._forward_and_backward(batch(100 * part + number)))
                yield f"micro batch {part}"
            self.losses.append(torch.stack(parts).sum())
            self.scaler.step(self.optimizer)
            yield "stepped"
            self.scaler.update()
        yield "updated"
        self.schedule.step() if self.recipe.scheduled else None
        if self.recipe.averaged:
            yield "scheduled"
            self.average.update_parameters(self.model)
            yield "averaged"
            if number % 3 == 2:
                yield from self._evaluate(number)
        yield "ended"

    def _evaluate(self, number: int) -> Generator[str]:
        with ownership.guard():
            before = swap_in(self.model, self.average)
        yield "swapped in"
        with torch.no_grad():
            self.losses.append(loss_of(self.model.eval(), batch(1000 + number)))
        self.model.train()
        with ownership.guard():
            swap_back(self.model, before)


@dataclass
class Saves:
    """Saves at places that a seed has drawn, and what each must hold."""

    checkpointer: Checkpointer
    places: dict[tuple[int, str], int]
    taken: list[tuple[sidesave.SaveHandle, dict[str, Any], str]] = field(default_factory=list)

    def visit(self, run: Run, step: int, place: str) -> None:
        if (number := self.places.get((step, place))) is None:
            return
        expected = frozen(run.state)
        self.taken.append(
            (self.checkpointer.save(number, run.state), expected, f"step {step}, {place}")
        )

    def check(self) -> None:
        wrong: dict[str, str] = {}
        for handle, expected, where in self.taken:
            loaded = sidesave.load(handle.committed.result(60))
            if found := difference(on_host(expected), loaded):
                wrong[where] = found
        assert wrong == {}
        assert len(self.taken) == len(self.places)


def train(run: Run, first: int = 0, saves: Saves | None = None) -> list[str]:
    for step in range(first, STEPS):
        for place in run.step(step):
            if saves is not None:
                saves.visit(run, step, place)
    return [float(loss.item()).hex() for loss in run.losses]


@functools.cache
def alone(name: str) -> tuple[list[tuple[int, str]], list[str]]:
    """The places of a run without saves, and its losses."""
    run, places = Run(RECIPES[name]), []
    for step in range(STEPS):
        places += [(step, place) for place in run.step(step)]
    return places, [float(loss.item()).hex() for loss in run.losses]


def drawn(name: str) -> dict[tuple[int, str], int]:
    """Saves of many places, some next to each other, and two that a run can go on from."""
    places, _ = alone(name)
    chance = random.Random(name)
    chosen = dict.fromkeys(chance.sample(places, SAVES - 4))
    start = chance.randrange(len(places) - 3)
    chosen |= dict.fromkeys(places[start : start + 3])
    chosen |= {(chance.randint(2, 4), "ended"): None, (chance.randint(5, 6), "ended"): None}
    return {place: number for number, place in enumerate(places) if place in chosen}


@pytest.mark.parametrize("name", RECIPES)
def test_training_is_the_same_with_saves_and_each_save_is_of_its_moment(tmp_path: Path, name: str):
    places, losses = alone(name)
    run = Run(RECIPES[name])
    with Checkpointer(tmp_path, staging=StagingOptions(slots=3)) as checkpointer:
        saves = Saves(checkpointer, drawn(name))
        assert train(run, 0, saves) == losses
        saves.check()

    resumable = [number for (_, place), number in saves.places.items() if place == "ended"]
    assert len(resumable) >= 2
    for number in resumable[:2]:
        fresh = Run(RECIPES[name])
        sidesave.load(tmp_path / f"step-{number:08d}", into=fresh.state)
        rest = train(fresh, places[number][0] + 1)
        assert rest == losses[len(losses) - len(rest) :], f"resumed from {places[number]}"


# Several ranks ------------------------------------------------------------------------------------


@pytest.mark.timeout(300)  # two processes, each of which does the work of a GPU as well
def test_shards_are_saved_as_they_are_at_the_call_beside_gathering_and_scattering(tmp_path: Path):
    """Two processes with a device each, or one between them; gloo carries what is on it."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    script = SUPPORT / "gpu_ranks.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=280)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(
        output[-4000:] for output in outputs
    )
