"""Nodes of tensors of other classes than ``torch.Tensor``, such as wrappers and ``DTensor``.

The tensors that such a tensor is made of go to a :class:`TensorCollector`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from sidesave.errors import UnsupportedValueError
from sidesave.stager import sharding, torch_private
from sidesave.stager.dtypes import dtype_name
from sidesave.stager.sharding import is_dtensor
from sidesave.stager.state.subclasses import is_cut_like_inner, kind_name, why_not_renamed
from sidesave.stager.state.tags import Tag
from sidesave.stager.state.tensor_collector import NoValuesYet, TensorCollector


@dataclass(frozen=True, slots=True)
class SubclassEncoder:
    """Makes the nodes.

    Attributes:
        tensors: Collects the plain tensors.
        context: Encodes what a tensor's class says of it besides its inner tensors; the FQN is for
            messages.
    """

    tensors: TensorCollector
    context: Callable[[Any, str], Any]

    def node(self, value: torch.Tensor, fqn: str, origin: torch.Tensor | None = None) -> Any:
        """The node of a tensor not of class ``torch.Tensor``; ``origin`` is the outermost one."""
        if nn.parameter.is_lazy(value):
            raise NoValuesYet(f"{fqn}: a lazy parameter has no values; run a forward pass first")
        if is_dtensor(value):
            return self._dtensor(value, fqn)
        origin = value if origin is None else origin
        if value.layout is torch.jagged:
            ragged, parts = torch_private.jagged_parts(value)
            self.tensors.identify(value, fqn)
            return [Tag.NESTED, ragged, self._inner(parts, fqn, origin)]
        if torch_private.is_wrapper(value):
            result = torch_private.arrived(value)
            if result is not value:
                return self.tensors.tensor(result, fqn)
            about, parts = self._wrapper(value, value, fqn)
            nodes = self._inner(parts, fqn, origin)
            self.tensors.identify(value, fqn)
            return [*about, nodes]
        if isinstance(value, (nn.Parameter, nn.Buffer)):
            plain = value.detach()
            if type(plain) is torch.Tensor:
                return self.tensors.tensor(plain, fqn, origin=origin)
        if reason := why_not_renamed(value):
            raise UnsupportedValueError(f"{fqn}: {reason}")
        node = self.tensors.tensor(torch_private.plain(value), fqn, origin=origin)
        return [Tag.RENAMED, kind_name(type(value)), node]

    def _inner(
        self, parts: Mapping[str, torch.Tensor], fqn: str, origin: torch.Tensor
    ) -> dict[str, Any]:
        """The nodes of the tensors that a tensor is made of."""
        return {
            name: self.tensors.tensor(part, f"{fqn}.{name}", origin=origin)
            if type(part) is torch.Tensor
            else self.node(part, f"{fqn}.{name}", origin)
            for name, part in parts.items()
        }

    def _wrapper(
        self, value: torch.Tensor, local: torch.Tensor, fqn: str
    ) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """The node of a wrapper, up to its last element, and its inner tensors.

        ``local`` is the wrapper itself, or this rank's part of it if it is a ``DTensor``.
        """
        parts, about = torch_private.wrapper_parts(local)
        if not parts or local.layout is not torch.strided:
            raise UnsupportedValueError(
                f"{fqn}: a {type(local).__qualname__} of layout {local.layout} without values"
            )
        kind, dtype = kind_name(type(local)), dtype_name(value.dtype)
        shape, strides = list(value.shape), list(value.stride())
        return [Tag.SUBCLASS, kind, dtype, shape, strides, self.context(about, fqn)], parts

    def _dtensor(self, value: torch.Tensor, fqn: str) -> Any:
        tensors, grid = self.tensors, None
        local = torch_private.arrived(cast("Any", value).to_local())
        if tensors.ranks is None and local.shape != value.shape:
            raise UnsupportedValueError(
                f"{fqn}: it is divided among ranks, and this process saves alone; let all ranks "
                "save together"
            )
        if torch_private.is_wrapper(local):
            tensors.identify(value, fqn)
            if tensors.is_alone:
                return self.node(local, fqn, value)
            return self._shards(value, local, fqn)
        if not tensors.is_alone:
            tensors.share_name(fqn)
            grid = sharding.describe(value, fqn)
        node = tensors.tensor(local, fqn, grid=grid, origin=value)
        tensors.identify(value, str(node[1]))
        placed = tensors.placement_of(value)
        return [Tag.PLACED, *placed, node] if placed and node[0] == Tag.TENSOR else node

    def _shards(self, value: torch.Tensor, local: torch.Tensor, fqn: str) -> Any:
        """The node of a ``DTensor`` with inner tensors sharded as it is, each with its own grid."""
        if not is_cut_like_inner(local):
            raise UnsupportedValueError(
                f"{fqn}: each rank's part of it is a {type(local).__qualname__}, which cannot be "
                "cut in other ways; save what it belongs to in sidesave.PerRank, which the same "
                "number of ranks can load"
            )
        self.tensors.share_name(fqn)
        about, parts = self._wrapper(value, local, fqn)
        grid, nodes = sharding.describe(value, fqn), dict[str, Any]()
        for name, part in parts.items():
            is_cut = part.shape == local.shape
            nodes[name] = self.tensors.tensor(
                part,
                f"{fqn}.{name}",
                grid=grid if is_cut else None,
                origin=value if is_cut else part,
            )
        return [*about, nodes]
