"""Nests of dicts and sequences with tensors in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sidesave.client.reading.stored import DICTS, SEQUENCES
from sidesave.client.targets import tensor_memory
from sidesave.stager.state.tags import container_like


def aligned(state: Any) -> Any:
    """A state whose tensors are aligned; shared tensors stay shared. Dicts are changed in place."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    return with_tensors(
        state, lambda each: made.setdefault(id(each), (each, tensor_memory.aligned(each)))[1]
    )


def with_tensors(value: Any, replacement: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A state with other tensors in the places of its own; dicts are changed."""
    if isinstance(value, torch.Tensor):
        return replacement(value)
    if type(value) in DICTS:
        for name, item in value.items():
            value[name] = with_tensors(item, replacement)
    elif type(value) in SEQUENCES:
        return container_like(value, (), [with_tensors(item, replacement) for item in value])
    return value
