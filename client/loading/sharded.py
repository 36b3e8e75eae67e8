"""Shards: this rank's part of a tensor that is spread over a mesh (``DTensor``), loaded without the rest of it."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, cast

import torch

from sidesave.writer_daemon.format.layout import Box


def may_be_spread() -> bool:
    """Whether there can be a ``DTensor`` in this process."""
    return "torch.distributed.tensor" in sys.modules and torch.distributed.is_initialized()


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """This rank's box of a tensor that is spread as ``like`` is; None where the rank holds nothing of it."""

    like: Any
    box: Box | None

    @classmethod
    def of(cls, like: Any, fqn: str) -> Shard:
        """The shard of a ``DTensor``; raises ``UnsupportedValueError`` where a rank's part is no box of it."""
        from sidesave.stager.state import sharding

        if like.device_mesh.get_coordinate() is None:
            return cls(like, None)
        box = sharding.local_box(sharding.describe(like, fqn), torch.distributed.get_rank())
        return cls(like, box if box is not None and math.prod(box[1]) else None)

    @classmethod
    def alone(cls, like: Any) -> Shard:
        """The local tensor of a ``DTensor`` where each rank has saved its own as a tensor of itself."""
        shape = tuple(like.to_local().shape)
        return cls(like, ((0,) * len(shape), shape))

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """The local tensor where it has no elements; its shape is none that a box would have."""
        return torch.empty(self.like.to_local().shape, dtype=dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """A local tensor in host memory, and whose shard it is."""

    shard: Shard
    tensor: torch.Tensor

    def give(self) -> None:
        """Copy it into the tensor that is spread, in place."""
        if self.shard.box is not None:
            self.shard.like.to_local().copy_(self.tensor)

    def spread(self) -> Any:
        """The ``DTensor`` that it is a part of; no rank talks to another."""
        from torch.distributed.tensor import DTensor

        like = self.shard.like
        placements, shape, stride = like.placements, like.shape, like.stride()
        return DTensor.from_local(
            self.tensor, like.device_mesh, placements, run_check=False, shape=shape, stride=stride
        )


def spread_all(value: Any) -> Any:
    """A nest with every :class:`Local` of it spread; dicts and lists are changed in place."""
    if isinstance(value, Local):
        return value.spread()
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value)
        items.update({key: spread_all(item) for key, item in items.items()})
    elif isinstance(value, list):
        parts = cast("list[Any]", value)
        parts[:] = map(spread_all, parts)
    elif type(value) is tuple:
        return tuple(map(spread_all, cast("tuple[Any, ...]", value)))
    return cast("Any", value)
