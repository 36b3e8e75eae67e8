"""This rank's shards of tensors, for targets that are divided among ranks."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch

from sidesave.client.targets import tensor_memory
from sidesave.client.targets.tensor_memory import as_integers
from sidesave.errors import IntegrityError
from sidesave.stager import sharding
from sidesave.writer_daemon.format.layout import Box


def may_be_spread() -> bool:
    """Whether there can be a ``DTensor`` in this process."""
    return "torch.distributed.tensor" in sys.modules and torch.distributed.is_initialized()


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """This rank's box of a tensor sharded as ``like`` is; None if the rank holds nothing of it."""

    like: Any
    box: Box | None

    @classmethod
    def of(cls, like: Any, fqn: str) -> Shard:
        """The shard of a ``DTensor``; ``UnsupportedValueError`` if a rank's part is not a box."""
        if like.device_mesh.get_coordinate() is None:
            return cls(like, None)
        box = sharding.local_box(sharding.describe(like, fqn), torch.distributed.get_rank())
        return cls(like, box if box is not None and math.prod(box[1]) else None)

    @classmethod
    def alone(cls, like: Any) -> Shard:
        """A ``DTensor``'s local tensor in ``PerRank``, which each rank saves as a whole tensor."""
        shape = tuple(like.to_local().shape)
        return cls(like, ((0,) * len(shape), shape))

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """The local tensor of a rank that holds nothing; no box describes its shape."""
        return torch.empty(self.like.to_local().shape, dtype=dtype, device="cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """A local tensor in host memory, its shard, and its dimensions' memory order if unusual."""

    shard: Shard
    tensor: torch.Tensor
    order: tuple[int, ...] | None = None

    def give(self) -> None:
        """Copy it into the live ``DTensor``."""
        if self.shard.box is not None:
            tensor_memory.write(self.shard.like.to_local(), self.tensor)

    def spread(self) -> Any:
        """A ``DTensor`` with it as the local shard; ranks do not communicate."""
        from torch.distributed.tensor import DTensor

        like = self.shard.like
        whole = (
            like
            if self.order is None
            else in_order(torch.empty(like.shape, device="meta"), "", self.order)
        )
        return DTensor.from_local(
            tensor_memory.aligned(self.tensor),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=whole.stride(),
        )


def in_order(tensor: torch.Tensor, fqn: str, order: tuple[int, ...]) -> torch.Tensor:
    """The tensor with its dimensions in this order in memory."""
    if len(order) != tensor.dim():
        raise IntegrityError(
            f"{fqn}: it has {tensor.dim()} dimensions, and an order of {len(order)} in memory"
        )
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return as_integers(tensor).permute(order).contiguous().permute(inverse).view(tensor.dtype)
