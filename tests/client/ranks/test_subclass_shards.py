"""Sharded tensors of subclasses: any ranks load those that divide as their inner tensors do, the
same ranks others.
"""

from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map
from trainers import DEADLINE_S

import sidesave
from sidesave.errors import UnsupportedValueError


class Carrying(torch.Tensor):
    """Values of its own shape and one number beside them, as weights for a float8 all-gather
    are.
    """

    @staticmethod
    def __new__(cls, values: Any, number: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), dtype=values.dtype
        )

    def __init__(self, values: Any, number: Any) -> None:
        self.inner, self.number = values, number

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner", "number"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["inner"], inner["number"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(
            *tree_map(lambda x: x.inner if isinstance(x, Carrying) else x, args), **(kwargs or {})
        )
        return args[0] if func is torch.ops.aten.copy_.default else cls(result, args[0].number)


class Turned(Carrying):
    """Values that lie in another order than those of the outer tensor."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.slice.Tensor:
            return cls(
                args[0].inner.flip(args[1]).contiguous()[: args[3] - args[2]], args[0].number
            )
        return super().__torch_dispatch__(func, types, args, kwargs)


VALUES = torch.arange(15.0).view(5, 3)


def _sharded(
    rank: int, values: torch.Tensor, number: float, kind: type[Carrying] = Carrying
) -> nn.Module:
    part = kind(values.chunk(2)[rank].clone(), torch.tensor(float(number)))
    mesh = init_device_mesh("cpu", (2,))
    placed = DTensor.from_local(
        part, mesh, [Shard(0)], run_check=False, shape=values.shape, stride=values.stride()
    )
    module = nn.Module()
    module.weight = nn.Parameter(placed, requires_grad=False)
    return module


def _local(module: nn.Module) -> Any:
    weight: Any = module.weight
    return weight.to_local()


def _save_and_load(rank: int, folder: Path) -> None:
    model, other = (_sharded(rank, VALUES * factor, factor) for factor in (1, 0))
    with sidesave.Checkpointer(f"{folder}/run") as checkpointer:
        checkpointer.save(1, {"model": model}).committed.result(DEADLINE_S)
        address = _local(other).inner.data_ptr()
        checkpointer.load(into={"model": other})
        assert _local(other).inner.data_ptr() == address
        assert torch.equal(_local(other).inner, VALUES.chunk(2)[rank]) and _local(other).number == 1
        turned = _sharded(rank, VALUES * 2, rank, Turned)
        with pytest.raises(
            UnsupportedValueError,
            match=r"model\.weight: each rank's part of it is a Turned.*PerRank",
        ):
            checkpointer.save(2, {"model": turned})
        checkpointer.save(3, {"model": sidesave.PerRank(turned)}).committed.result(DEADLINE_S)
        back = _sharded(rank, VALUES * 0, 5, Turned)
        checkpointer.load(into={"model": sidesave.PerRank(back)})
        assert torch.equal(_local(back).inner, _local(turned).inner) and _local(back).number == rank


def test_shards_of_subclasses_come_back_to_any_ranks_or_to_the_same_or_are_refused(tmp_path: Path):
    forks.spawn_group(_save_and_load, tmp_path)
    alone = nn.Module()
    alone.weight = nn.Parameter(Carrying(VALUES * 0, torch.tensor(0.0)), requires_grad=False)
    sidesave.load(tmp_path / "run" / "step-00000001", into={"model": alone})
    weight: Any = alone.weight
    assert torch.equal(weight.inner, VALUES) and weight.number == 1
