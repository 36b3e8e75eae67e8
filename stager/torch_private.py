"""The private names of torch that we use, all in one place, as another version of torch may change them."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

foreach_copy: Final = torch._foreach_copy_
foreach_norm: Final = torch._foreach_norm
disable_dynamo: Final = torch._disable_dynamo
spin: Final = cast("Callable[[int], None]", torch.cuda._sleep)
"""A kernel on the current stream that takes so many cycles."""
set_grad_enabled: Final = torch._C._set_grad_enabled
"""In one instruction, where an interrupt can keep ``no_grad`` from ending."""


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
    """Tells whether others have the classes, dtypes, devices, shapes, strides and flags that these have now."""
    if _TensorGuards is None:
        known = _looks(tensors)
        return lambda others: _looks(others) == known
    sizes, strides = ([list(getattr(tensor, name)()) for tensor in tensors] for name in ("size", "stride"))
    guard = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return lambda others: guard.check(*others)


_TensorGuards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_TensorGuards = getattr(_TensorGuards, "TensorGuards", None)


def _looks(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [
        (type(each), each.dtype, each.device, each.layout, each.shape, each.stride(), each.is_conj(), each.is_neg())
        for each in tensors
    ]


def view_of_memory(tensor: torch.Tensor, begin: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """``count`` elements of a contiguous tensor of a device, from byte ``begin`` on; it keeps no memory alive."""
    nbytes = count * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr() + begin, tensor.device, nbytes)
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, (count,), (1,))


def children(module: nn.Module) -> list[nn.Module]:
    """The modules right below one, without the checks and the copies of torch's own way to them."""
    return [child for child in module._modules.values() if child is not None]


def storage_id(storage: torch.UntypedStorage) -> int:
    """The identity of a storage, which an empty one has too."""
    return storage._cdata


class StorageReference:
    """A storage that is known again, and not kept: while this is there no other gets its identity."""

    __slots__ = ("_reference",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        """Refer to it."""
        self._reference = StorageWeakRef(storage)

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether this refers to ``storage``."""
        return cast("int", self._reference.cdata) == storage._cdata


def version_of(tensor: torch.Tensor) -> int | None:
    """How many of torch's own operations have changed a tensor; None for one of inference mode, which does not tell."""
    return None if tensor.is_inference() else tensor._version
