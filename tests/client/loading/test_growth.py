"""Loading takes time that grows with the number of tensors, and not faster: lines of code are
counted, not seconds.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from trainers import save

import sidesave

SMALL, LARGE = 60, 240
"""Modules of one parameter each."""


def state_of(count: int, *, one_each: bool) -> dict[str, Any]:
    model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(count))
    groups = [[each] for each in model.parameters()] if one_each else [list(model.parameters())]
    optimizers = [torch.optim.AdamW(group, foreach=False) for group in groups]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    return {"model": model, "optimizers": optimizers}


def lines_of(work: Callable[[], object]) -> int:
    """The lines that Python runs, each as often as a loop comes to it."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.fixture(
    scope="module", params=[False, True], ids=["one optimizer", "one optimizer a parameter"]
)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Path, dict[str, Any]]]:
    """States of both sizes, and their checkpoints."""
    pairs: list[tuple[Path, dict[str, Any]]] = []
    for count in (SMALL, LARGE):
        path, state = tmp_path_factory.mktemp("run"), state_of(count, one_each=request.param)
        save(path, state)
        sidesave.load(path, into=state)  # imports what it needs
        pairs.append((path, state))
    return pairs


LOADS: dict[str, Callable[[Path, dict[str, Any]], object]] = {
    "fresh": lambda path, state: sidesave.load(path),
    "into live objects": lambda path, state: sidesave.load(path, into=state),
    "without some state": lambda path, state: sidesave.load(
        path, into=state, exclude="optimizers.*.state"
    ),
    "without options": lambda path, state: sidesave.load(
        path, into=state, exclude="optimizers.*.param_groups.*.lr"
    ),
    "what is missing": lambda path, state: sidesave.load(
        path,
        into={**state, "other": {str(at): nn.Linear(1, 1) for at in range(len(state["model"]))}},
        strict=False,
    ),
}


@pytest.mark.parametrize("how", LOADS)
def test_a_load_of_four_times_as_many_tensors_takes_four_times_the_work(
    saved: list[tuple[Path, dict[str, Any]]], how: str
) -> None:
    small, large = (
        lines_of(lambda path=path, state=state: LOADS[how](path, state)) for path, state in saved
    )
    assert large < 4.2 * small
