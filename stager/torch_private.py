"""All uses of torch's private names, which another version of torch may change."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

import torch
import torch.utils.data.dataloader
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

foreach_copy: Final = torch._foreach_copy_
foreach_norm: Final = torch._foreach_norm
disable_dynamo: Final = torch._disable_dynamo
neg_view: Final = torch._neg_view
spin: Final = cast("Callable[[int], None]", torch.cuda._sleep)
"""Launch a kernel on the current stream that takes the given number of cycles."""
LoaderIterator: Final[Any] = torch.utils.data.dataloader._BaseDataLoaderIter
set_grad_enabled: Final = torch._C._set_grad_enabled
"""Set grad mode in one instruction; an interrupt can leave ``no_grad`` on."""


def with_metadata(state: dict[str, Any], metadata: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A module's state as torch makes it: ``load_state_dict`` reads class versions in metadata."""
    if not isinstance(cast("object", metadata), dict) or not all(
        type(each) is dict for each in metadata.values()
    ):
        raise ValueError("a module's metadata must be a map of maps")
    result: Any = OrderedDict(state)
    result._metadata = OrderedDict(metadata)
    return result


is_wrapper: Final = cast("Callable[[object], bool]", is_traceable_wrapper_subclass)
"""Whether a tensor consists of inner ones (``__tensor_flatten__``); true for jagged, DTensors."""


KINDS: Final = frozenset({torch.Tensor, nn.Parameter})
"""Classes of ordinary tensors."""


def is_ordinary(value: Any) -> bool:
    """Whether a value is a tensor that its address, shape and strides describe."""
    return type(value) in KINDS and value.layout is torch.strided and not value.is_nested


def wrapper_parts(wrapper: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Return a wrapper's inner tensors by name, and its context."""
    names, context = wrapper.__tensor_flatten__()
    return {name: getattr(wrapper, name) for name in names}, context


def is_renamed(kind: type) -> bool:
    """Whether a tensor subclass dispatches no operations, so that only its class is different."""
    return getattr(kind, "__torch_dispatch__", None) is torch._C._disabled_torch_dispatch_impl


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a subclass as a ``torch.Tensor`` of the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach().as_subclass(torch.Tensor)


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for an asynchronous collective and return its result; return others unchanged."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    kind: Any = getattr(module, "AsyncCollectiveTensor", None)
    return (
        cast("Any", tensor).trigger_wait()
        if kind is not None and isinstance(tensor, kind)
        else tensor
    )


def jagged_parts(tensor: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """Return a jagged nested tensor's ragged dimension and inner tensors, without copies."""
    parts = {"values": tensor._values, "offsets": tensor._offsets, "lengths": tensor._lengths}
    return tensor._ragged_idx, {name: part for name, part in parts.items() if part is not None}


def copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor's bits to one of the same dtype; torch's copy makes bytes of bools 0 or 1."""
    if source.dtype is torch.bool:
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source)


def empty_quantized(
    dtype: torch.dtype,
    shape: Sequence[int],
    scale: float | torch.Tensor,
    zero_point: Any,
    axis: int | None,
) -> torch.Tensor:
    """Return an uninitialized quantized tensor; ``axis`` is None if one scale serves all of it."""
    make: Any = torch._empty_affine_quantized
    if axis is None:
        return make(shape, scale=scale, zero_point=zero_point, dtype=dtype)
    make = torch._empty_per_channel_affine_quantized
    return make(shape, scales=scale, zero_points=zero_point, axis=axis, dtype=dtype)


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
    """Return a check that tensors have these classes, dtypes, devices, shapes, strides, flags."""
    if _TensorGuards is None:
        properties = _properties(tensors)
        return lambda others: _properties(others) == properties
    sizes, strides = (
        [list(getattr(tensor, name)()) for tensor in tensors] for name in ("size", "stride")
    )
    guard = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return lambda others: guard.check(*others)


_TensorGuards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_TensorGuards = getattr(_TensorGuards, "TensorGuards", None)


def _properties(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [
        (
            type(each),
            each.dtype,
            each.device,
            each.layout,
            each.shape,
            each.stride(),
            each.is_conj(),
            each.is_neg(),
        )
        for each in tensors
    ]


def view_of_memory(
    tensor: torch.Tensor, begin: int, count: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``count`` elements of a device's contiguous tensor from byte ``begin`` on.

    The result keeps no memory alive.
    """
    nbytes = count * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(
        tensor.data_ptr() + begin, tensor.device, nbytes
    )
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(storage, 0, (count,), (1,))


def all_modules(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield modules and all below them, each once; in a tenth of the time of ``Module.modules``."""
    left, by_id = [*modules], dict[int, nn.Module]()
    while left:
        module = left.pop()
        if id(module) not in by_id:
            by_id[id(module)] = module
            yield module
            left += [child for child in module._modules.values() if child is not None]


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return the identity of a storage, which also an empty one has."""
    return storage._cdata


class StorageReference:
    """A weak reference to a storage; no other storage gets the same identity while it exists."""

    __slots__ = ("_reference",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        """Refer to ``storage``."""
        self._reference = StorageWeakRef(storage)

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Whether this refers to ``storage``."""
        return cast("int", self._reference.cdata) == storage._cdata


def version_of(tensor: torch.Tensor) -> int | None:
    """Return torch's version counter of a tensor; None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


def optimizer_load_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that run before and after ``load_state_dict`` of an optimizer."""
    own: Any = vars(optimizer)
    names = "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"
    hooks: list[Callable[..., Any]] = [
        hook for name in names for hook in own.get(name, {}).values()
    ]
    return hooks


def state_dict_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks that run behind ``state_dict`` of an optimizer, and may change it."""
    own: Any = vars(optimizer)
    return [*own.get("_optimizer_state_dict_post_hooks", {}).values()]


def load_code(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the methods and hooks ``load_state_dict`` calls for a module, without submodules."""
    own: Any = module
    hooks = own._load_state_dict_pre_hooks.values(), own._load_state_dict_post_hooks.values()
    return [
        own.load_state_dict,
        own._load_from_state_dict,
        own.set_extra_state,
        *hooks[0],
        *hooks[1],
    ]


_LOAD_STATE_DICT: Final = nn.Module.load_state_dict
"""Torch's own, unless another package has replaced it."""
_IS_TORCHS: Final = _LOAD_STATE_DICT.__code__.co_filename == nn.modules.module.__file__


def load_module(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> Any:
    """Do what a module's ``load_state_dict`` does, in time that grows with the number of keys only.

    Torch compares all keys of a module with the name of each child. Here a module's keys are split
    among its children at once. A module that has another ``load_state_dict`` than torch's takes its
    own way.
    """
    is_torchs = _IS_TORCHS and type(module).load_state_dict is _LOAD_STATE_DICT
    if not is_torchs or "load_state_dict" in vars(module):
        return module.load_state_dict(state, strict=strict)
    metadata = getattr(state, "_metadata", None)
    keys: Any = OrderedDict(state)
    if metadata is not None:
        keys._metadata = metadata
    missing, unexpected = list[str](), list[str]()
    incompatible: Any = nn.modules.module._IncompatibleKeys(missing, unexpected)
    errors: list[str] = []
    left: list[tuple[Any, str, Any, str]] = [(module, "", keys, "")]
    while left:
        each, name, own, prefix = left.pop()
        if name:  # a child, looked up only now: hooks of those before it may have replaced it
            each = each._modules.get(name)
            if each is None:
                continue
        if own is None:  # all below it has been loaded
            for hook in each._load_state_dict_post_hooks.values():
                if hook(each, incompatible) is not None:
                    raise AssertionError(
                        f"the hook {hook!r} must change incompatible keys in place, and return None"
                    )
            continue
        about: Any = {} if metadata is None else metadata.get(prefix[:-1], {})
        each._load_from_state_dict(own, prefix, about, True, missing, unexpected, errors)
        # Only now, as the module and its hooks may have renamed keys.
        left += ((each, "", None, prefix), *reversed(_children_with_keys(each, own, prefix)))
    if strict:
        for kind, names in (("Unexpected", unexpected), ("Missing", missing)):
            if names:
                listed = ", ".join(f'"{name}"' for name in names)
                errors.insert(0, f"{kind} key(s) in state_dict: {listed}. ")
    if errors:
        text = "\n\t".join(errors)
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}:\n\t{text}")
    return incompatible


def _children_with_keys(
    module: Any, keys: dict[str, Any], prefix: str
) -> list[tuple[Any, str, dict[str, Any], str]]:
    """The children of a module by name, each with its part of the ``keys`` and their prefix."""
    children = [name for name, child in module._modules.items() if child is not None]
    start = len(prefix)
    split: dict[str, dict[str, Any]] = {}
    for key, value in keys.items() if children else ():
        if (end := key.find(".", start)) >= 0 and key.startswith(prefix):
            split.setdefault(key[start:end], {})[key] = value
    for name in (name for name in children if "." in name):
        split[name] = {
            key: value for key, value in keys.items() if key.startswith(f"{prefix}{name}.")
        }
    return [(module, name, split.get(name, {}), f"{prefix}{name}.") for name in children]
