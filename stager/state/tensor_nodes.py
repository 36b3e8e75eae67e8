"""Nodes of tensors in a treespec: references, and tensors made of inner tensors, both ways.

Sparse, jagged, quantized tensors and wrapper subclasses are made of inner tensors: a node has them
by name, and all else that the whole needs.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch

from sidesave.errors import UnsupportedValueError
from sidesave.stager import torch_private
from sidesave.stager.dtypes import (
    CARRIERS,
    PACKED,
    QUANTIZED,
    dtype_from_name,
    dtype_name,
    named_dtype,
)
from sidesave.stager.state.subclasses import FlattenedTensor, RetypedTensor
from sidesave.stager.state.tags import FORMATS, MAX_DEPTH, SPARSE_PARTS, Tag, pack

_LAYOUTS_BY_NAME: Final = {str(layout).removeprefix("torch."): layout for layout in SPARSE_PARTS}
_PLACEMENTS: Final = re.compile(r"(R|S\d{1,3}(/\d{1,9})?)( (R|S\d{1,3}(/\d{1,9})?)){0,31}")


@dataclass(frozen=True, slots=True)
class CompositeSpec:
    """Description of a tensor made of inner tensors, before those are read.

    Attributes:
        kind: ``"sparse"``, ``"nested"``, ``"quantized"``, or the name of the class.
        shape: Its shape; () for a nested one.
        dtype: Its dtype; None for that of its values.
        about: Everything else that a target must have in common, encoded.
        is_class: Whether ``kind`` is a class that puts the inner tensors together.
        is_renamed: Whether ``kind`` is a class that changes nothing but the tensor's type.
        encoded: The whole description, to distinguish it from others.
        context: Builds the context that the class needs; raises if the class may not be used.
    """

    kind: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    about: bytes = b""
    is_class: bool = False
    is_renamed: bool = False
    encoded: bytes = field(default=b"", compare=False)
    context: Callable[[], object] | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls, tag: Tag, about: list[Any], names: list[str], context: Callable[[], object]
    ) -> CompositeSpec:
        """The description in a node, of inner tensors ``names``; ``context`` builds its context."""
        every = pack(about)
        if tag is Tag.SPARSE:
            return cls("sparse", _sizes(about[1]), encoded=every)
        if tag is Tag.NESTED:
            return cls("nested", about=pack([about, names]), encoded=every)
        if tag is Tag.QUANTIZED:
            dtype, shape, parameters = about
            axis = pack(parameters if len(parameters) == 1 else [])
            return cls("quantized", _sizes(shape), named_dtype(dtype), axis, encoded=every)
        kind, dtype, shape, strides, encoded = about
        return cls(
            str(kind),
            _sizes(shape),
            named_dtype(dtype),
            pack([strides, encoded, names]),
            is_class=True,
            encoded=every,
            context=context,
        )


# not frozen, which makes it slower to make, and there is one for each tensor
@dataclass(slots=True, unsafe_hash=True)
class TensorRef:
    """A reference to a tensor in a treespec: the FQN of its bytes, its dtype if stored in another.

    ``whole`` describes a tensor that is made of several; the FQN is then that of its values, or of
    the first of them. If it becomes a NumPy ``array``, it must stay in host memory with its dtype.
    ``rank`` is the rank whose treespec names it. A column of a ``table`` of rows has a part on each
    rank. ``order`` has its dimensions from the outermost in memory to the innermost if it was not
    contiguous. ``placed`` is set for a ``DTensor`` in an optimizer's state: whether it is placed as
    its parameter is, and its placements.
    """

    fqn: str
    dtype: torch.dtype | None
    whole: CompositeSpec | None = None
    array: bool = False
    rank: int = 0
    table: str = ""
    placed: tuple[bool, str] | None = None
    order: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        rank: int,
        fqn: Any,
        carried: str = "",
        layout: str | list[int] = "",
        *,
        array: bool = False,
        placed: tuple[bool, str] | None = None,
    ) -> TensorRef:
        """The reference of a node of ``rank``'s treespec; ``ValueError`` if it is malformed."""
        dtype = dtype_from_name(carried)
        if carried and dtype not in CARRIERS:
            raise ValueError(f"{carried!r} is not a carried dtype")
        return cls(str(fqn), dtype, None, array, rank, order=_order(layout), placed=placed)

    @classmethod
    def placed_of(cls, rank: int, as_parameter: Any, placements: str, node: list[Any]) -> TensorRef:
        """The reference of a node with placements; ``ValueError`` if it is malformed."""
        is_sound = type(as_parameter) is bool and node[0] == Tag.TENSOR
        if not is_sound or not _PLACEMENTS.fullmatch(placements):
            raise ValueError(f"no placements of a tensor: {placements!r:.80}")
        return cls.of(rank, *node[1:], placed=(as_parameter, placements))


def _order(layout: str | list[int]) -> tuple[int, ...] | None:
    """The order of dimensions in memory, from torch's name or a list; None for the usual one."""
    if isinstance(layout, str):
        return FORMATS[layout] if layout else None
    if not all(type(dim) is int for dim in layout) or sorted(layout) != [*range(len(layout))]:
        raise ValueError(f"{layout} is no order of dimensions")
    return tuple(layout)


# Taking apart -------------------------------------------------------------------------------------


def memory_format(tensor: torch.Tensor) -> str | list[int]:
    """Return torch's name for a non-contiguous tensor's memory format, or its dimensions' order.

    The order begins with the outermost dimension. "" if the elements are not packed.
    """
    shape, strides = tensor.shape, tensor.stride()
    for name, dims in FORMATS.items():
        if len(dims) == len(shape) and _is_packed(shape, strides, dims):
            return name
    order = sorted(range(len(shape)), key=lambda dim: -strides[dim])
    return order if _is_packed(shape, strides, order) else ""


def _is_packed(shape: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    """Whether elements have no gaps between them.

    Computed without a view: torch makes none of a tensor whose memory is freed.
    """
    packed = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != packed:
            return False
        packed *= shape[dim]
    return True


def inner_parts(value: Any, fqn: str) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The node, up to its last element, of a sparse or quantized tensor, and its inner tensors."""
    if value.layout is torch.strided:
        parameters, parts = quantized_parts(value, fqn)
        return [Tag.QUANTIZED, dtype_name(value.dtype), list(value.shape), parameters], parts
    names = SPARSE_PARTS.get(value.layout)
    if names is None or value.is_meta:
        raise UnsupportedValueError(
            f"{fqn}: tensors of layout {value.layout} on {value.device} cannot be saved"
        )
    value = value.detach()
    coalesced = value.is_coalesced() if value.layout is torch.sparse_coo else None
    layout = str(value.layout).removeprefix("torch.")
    parts = {name.strip("_"): getattr(value, name)() for name in names}
    return [Tag.SPARSE, layout, list(value.shape), coalesced], parts


def quantized_bytes(value: torch.Tensor) -> torch.Tensor:
    """The memory of one of torch's quantized tensors, as integers; flat if values share a byte."""
    shape, strides = value.shape, value.stride()
    if value.dtype in PACKED:
        shape, strides = (-(-value.numel() // PACKED[value.dtype]),), (1,)
    raw = torch.empty(0, dtype=QUANTIZED[value.dtype], device=value.device)
    return raw.set_(value.untyped_storage(), value.storage_offset(), shape, strides)


def quantized_parts(value: Any, fqn: str) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """A quantized tensor's parameters (scale and zero point, or channel axis), and its parts."""
    try:
        per_channel = "per_channel" in str(value.qscheme())
    except RuntimeError as error:
        raise UnsupportedValueError(
            f"{fqn}: a tensor of {value.dtype} without scales; quantize it first"
        ) from error
    parts = {"values": quantized_bytes(value)}
    if not per_channel:
        return [value.q_scale(), value.q_zero_point()], parts
    parts |= {
        "scales": value.q_per_channel_scales(),
        "zero_points": value.q_per_channel_zero_points(),
    }
    return [value.q_per_channel_axis()], parts


# Putting together ---------------------------------------------------------------------------------


def part_names(tag: Tag, about: list[Any], nodes: dict[str, Any]) -> list[str]:
    """The names of the inner tensors in a node, in the order that putting together needs."""
    if tag is Tag.SPARSE:
        return [name.strip("_") for name in SPARSE_PARTS[_LAYOUTS_BY_NAME[about[0]]]]
    return [*map(str, nodes)]


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or all that one needs to be put together."""
    return isinstance(value, (torch.Tensor, FlattenedTensor, RetypedTensor))


def put_together(tag: Tag, about: list[Any], parts: dict[str, Any], spec: CompositeSpec) -> Any:
    """The tensor of a node, whose inner tensors are ``parts``; not yet made if it has a class."""
    if tag is Tag.SPARSE:
        layout, shape, coalesced = about
        return _sparse(_LAYOUTS_BY_NAME[layout], shape, coalesced, parts)
    if tag is Tag.NESTED:
        return _jagged(about[0], parts)
    if tag is Tag.QUANTIZED:
        dtype, shape, parameters = about
        return _quantized(named_dtype(dtype), shape, parameters, parts)
    assert spec.context is not None
    return FlattenedTensor(spec.kind, spec.shape, _sizes(about[3]), spec.context, parts)


def _quantized(
    dtype: torch.dtype, shape: list[int], parameters: list[Any], parts: Mapping[str, Any]
) -> torch.Tensor:
    """The inverse of :func:`quantized_parts`."""
    values = parts["values"]
    if len(parameters) == 1:
        axis, scale, zero_point = parameters[0], parts["scales"], parts["zero_points"]
        if (
            not 0 <= axis < len(shape)
            or scale.shape != (shape[axis],)
            or zero_point.shape != scale.shape
        ):
            raise ValueError(f"no scales of axis {axis} of a tensor of shape {shape}")
    else:
        axis, (scale, zero_point) = None, parameters
    count = math.prod(shape)
    expected = [-(-count // PACKED[dtype])] if dtype in PACKED else shape
    if min(shape, default=0) < 0 or values.dtype != QUANTIZED[dtype] or [*values.shape] != expected:
        raise ValueError(
            f"no {dtype} of shape {shape} has values of {values.dtype} {[*values.shape]}"
        )
    tensor = torch_private.empty_quantized(dtype, shape, scale, zero_point, axis)
    quantized_bytes(tensor).copy_(values)
    return tensor


def _jagged(ragged: int, parts: Mapping[str, Any]) -> torch.Tensor:
    """A jagged nested tensor of its values, offsets and lengths; checked, as kernels trust them."""
    values, offsets, lengths = parts["values"], parts["offsets"], parts.get("lengths")
    ends = offsets[1:] if lengths is None else offsets[:-1] + lengths
    is_sound = (
        0 < ragged <= values.dim()
        and offsets.dim() == 1
        and len(offsets) > 0
        and offsets.dtype in (torch.int64, torch.int32)
        and (
            lengths is None or (lengths.dtype == offsets.dtype and len(lengths) == len(offsets) - 1)
        )
        and bool(
            (offsets >= 0).all()
            and (ends >= offsets[:-1]).all()
            and (ends <= values.shape[ragged - 1]).all()
        )
    )
    if not is_sound:
        raise ValueError("offsets and lengths of a nested tensor do not fit its values")
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=ragged)


def _sparse(
    layout: torch.layout,
    shape: list[int],
    coalesced: bool | None,
    parts: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """A sparse tensor of its indices and values, which are checked."""
    if layout is torch.sparse_coo:
        make = functools.partial(torch.sparse_coo_tensor, is_coalesced=coalesced)
    else:
        make = functools.partial(torch.sparse_compressed_tensor, layout=layout)
    *indices, values = parts.values()
    return cast("Any", make)(*indices, values, shape, device=values.device, check_invariants=True)


def _sizes(values: Any) -> tuple[int, ...]:
    """Sizes or strides of a tensor, which are checked."""
    if any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r:.80} are no sizes")
    return tuple(values)


def first_name(node: Any) -> str:
    """The FQN of the values (else of the first part) of a tensor made of others, by its node."""
    for _ in range(MAX_DEPTH):
        if node[0] == Tag.TENSOR:
            return str(node[1])
        node = node[-1]
        if isinstance(node, dict):
            parts = cast("dict[str, Any]", node)
            node = parts.get("values", next(iter(parts.values())))
    raise ValueError("it has no tensors")
