"""Tensor subclasses: what distinguishes them in a checkpoint, and how they are put together again.

A class that a checkpoint names is never imported. It is used only if a live tensor has it, or if it
is among ``torch.serialization.get_safe_globals()``, where its author or the user allows it to be
built from files.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import torch

from sidesave.errors import UnsupportedValueError
from sidesave.stager import torch_private

_SHOWN: Final = 5


def kind_name(kind: type) -> str:
    """The name of a class in a checkpoint."""
    return f"{kind.__module__}:{kind.__qualname__}"


def safe_class(name: str) -> type | None:
    """The class of that name among torch's safe globals; None if it is not there."""
    entries = cast("list[Any]", torch.serialization.get_safe_globals())
    classes: list[Any] = [
        cast("Any", entry)[0] if isinstance(entry, tuple) else entry for entry in entries
    ]
    return next(
        (
            each
            for each in classes
            if isinstance(each, type) and kind_name(cast("Any", each)) == name
        ),
        None,
    )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FlattenedTensor:
    """Inner tensors, and the arguments that the outer tensor's class needs to put them together."""

    kind: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    context: Callable[[], Any]
    parts: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RetypedTensor:
    """A tensor, or what stands for one, and its class."""

    kind: str
    value: Any


def wrapper_class(name: str, known: Mapping[str, type]) -> Any:
    """The wrapper tensor class of that name; raises ``UnsupportedValueError`` if it is missing."""
    kind = known.get(name) or safe_class(name)
    if kind is None:
        raise UnsupportedValueError(
            f"it is a {name.replace(':', '.')}, and no class that a checkpoint names is imported: "
            "import its module, call torch.serialization.add_safe_globals([it]) if its module does "
            "not, or leave it out with exclude="
        )
    if not issubclass(kind, torch.Tensor) or not hasattr(kind, "__tensor_unflatten__"):
        raise UnsupportedValueError(
            f"it is a {name.replace(':', '.')}, which here is no class of tensors"
        )
    return kind


def made(value: Any, like: Any, known: Mapping[str, type]) -> Any:
    """Put a tensor together; ``like`` is a live one with the same classes and contexts, or None."""
    if isinstance(value, RetypedTensor):
        tensor = made(value.value, like, known)
        kind: Any = known.get(value.kind) or safe_class(value.kind)
        if kind is None or type(tensor) is not torch.Tensor or not issubclass(kind, torch.Tensor):
            return tensor
        return tensor.as_subclass(cast("Any", kind))
    if not isinstance(value, FlattenedTensor):
        return value
    parts = {
        name: made(part, getattr(like, name, None), known) for name, part in value.parts.items()
    }
    if isinstance(like, torch.Tensor) and kind_name(type(like)) == value.kind:
        # Of a DTensor this is the part of this rank, with a shape of its own.
        kind: Any = type(like)
        return kind.__tensor_unflatten__(
            parts, cast("Any", like).__tensor_flatten__()[1], like.shape, like.stride()
        )
    kind = wrapper_class(value.kind, known)
    return kind.__tensor_unflatten__(parts, value.context(), torch.Size(value.shape), value.strides)


def why_not_renamed(value: torch.Tensor) -> str:
    """Why a tensor is not an ordinary one in all but its class, and what to do; "" if it is."""
    kind, lost = type(value), ", ".join(list(value.__dict__)[:_SHOWN])
    if torch_private.is_renamed(kind) and not lost and value.layout is torch.strided:
        return ""
    cure = "save its local part or its dequantized value"
    if kind.__qualname__ == "ShardedTensor":
        cure = (
            "with device_mesh= FullyShardedDataParallel gives a DTensor in its place, which can be "
            "saved"
        )
    elif torch_private.is_renamed(kind) and lost:
        cure = (
            f"its attributes would be lost ({lost}): save x.as_subclass(torch.Tensor), and them "
            "beside it"
        )
    return f"a {kind.__module__}.{kind.__qualname__} is not a plain tensor; {cure}"


def is_cut_like_inner(local: Any) -> bool:
    """Whether a tensor's parts are made of the same parts of its inner tensors and single values.

    The class is asked for a slice in each dimension, as torch asks it to divide a tensor among
    ranks.
    """
    inner, _ = torch_private.wrapper_parts(local)
    divided = {name: part for name, part in inner.items() if part.dim() or not local.dim()}
    if not divided or any(type(part) is not torch.Tensor for part in inner.values()):
        return False
    if any(part.shape != local.shape for part in divided.values()):
        return False
    try:
        for dim in range(local.dim() if local.numel() else 0):
            last = local.shape[dim] - 1
            cut = local.narrow(dim, last, 1)
            for name, part in divided.items():
                of_inner, expected = getattr(cut, name), part.narrow(dim, last, 1)
                looks = [
                    (each.data_ptr(), each.shape, each.stride(), each.dtype)
                    for each in (of_inner, expected)
                ]
                if type(cut) is not type(local) or looks[0] != looks[1]:
                    return False
    except Exception:  # noqa: BLE001 - a class that cannot be cut raises what it likes
        return False
    return True


# Contexts -----------------------------------------------------------------------------------------


def object_parts(value: Any) -> str | dict[str, Any] | None:
    """An enum member's name, the fields of a dataclass or named tuple; None for other values."""
    if isinstance(value, enum.Enum):
        return value.name if value.name in cast("Any", type(value)).__members__ else None
    if tuple in type(value).__mro__ and hasattr(value, "_fields"):
        return value._asdict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = cast("Any", value)
        return {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    return None


def object_of(name: str, parts: object) -> Any:
    """The inverse of :func:`object_parts`, if the class may be used."""
    kind: Any = safe_class(name)
    if kind is None:
        raise UnsupportedValueError(
            f"its context has a {name.replace(':', '.')}, and no class that a checkpoint names is "
            "imported: import its module, and call torch.serialization.add_safe_globals([it]) if "
            "its module does not"
        )
    if isinstance(parts, str) and issubclass(kind, enum.Enum):
        return kind[parts]
    fields = cast("dict[str, Any]", parts) if isinstance(parts, dict) else None
    if fields is not None and tuple in kind.__mro__ and hasattr(kind, "_fields"):
        return kind(**fields)
    if fields is not None and dataclasses.is_dataclass(kind):
        initial = {field.name for field in dataclasses.fields(kind) if field.init}
        made_of: Any = cast("Any", kind)(
            **{name: value for name, value in fields.items() if name in initial}
        )
        for field in fields.keys() - initial:
            object.__setattr__(made_of, field, fields[field])
        return made_of
    raise ValueError(f"no {name} is made of {parts!r:.80}")
