"""Saving and loading in a process whose default device is not the CPU.

The meta device stands for a GPU: what sidesave made there by mistake would have no values.
"""

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from states import TENSORS, difference
from torch.utils import _device

import sidesave
from scripts import rooms


@pytest.fixture
def on_meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


def test_tensors_are_made_on_a_device_that_is_named():
    """Of all functions of torch that would make them on the default device."""
    makers = {each.__name__ for each in _device._device_constructors()}
    assert {"empty", "tensor", "sparse_coo_tensor", "asarray"} <= makers
    unnamed: list[str] = []
    for name, path in rooms.modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=made)):
                    if made in makers and "device" not in {each.arg for each in node.keywords}:
                        unnamed.append(f"{name}:{node.lineno}: torch.{made}")
                case _:
                    pass
    assert not unnamed


@pytest.mark.usefixtures("on_meta")
def test_tensors_of_every_kind_are_saved_and_loaded_where_they_were(tmp_path: Path):
    with sidesave.Checkpointer(tmp_path) as checkpointer:
        path = checkpointer.save(1, {"t": dict(TENSORS)}).committed.result().path
    loaded = sidesave.load(path)["t"]
    wrong = [name for name, value in TENSORS.items() if difference(value.detach(), loaded[name])]
    assert wrong == []
    assert sidesave.verify(path).ok


@pytest.mark.usefixtures("on_meta")
def test_a_manager_resumes_with_its_random_numbers(tmp_path: Path):
    state: dict[str, Any] = {"x": torch.zeros(3, device="cpu")}
    with sidesave.CheckpointManager(tmp_path, state, random_state=True) as manager:
        manager.save(1)
        drawn = random.random(), torch.rand(2, device="cpu")
    with sidesave.CheckpointManager(tmp_path, state, random_state=True) as manager:
        assert manager.restore() == 2
        again = random.random(), torch.rand(2, device="cpu")
    assert not difference(drawn, again)
