"""Torch dtypes and their names in safetensors, with a carrier for those that the format does not know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

NAMES: Final[dict[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What stock readers open."""

DTYPES: Final[dict[str, torch.dtype]] = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True, slots=True)
class Carrier:
    """How a dtype travels that safetensors has no name for: bitcast to ``dtype``, with a last dimension of 2 or not."""

    dtype: torch.dtype
    pair: bool


def _carriers() -> dict[torch.dtype, Carrier]:
    carriers = {
        torch.complex128: Carrier(torch.float64, pair=True),
        torch.complex32: Carrier(torch.float16, pair=True),
    }
    for name in ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"):
        if hasattr(torch, name):
            carriers[getattr(torch, name)] = Carrier(torch.uint8, pair=False)
    return carriers


CARRIERS: Final = _carriers()


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype | None:
    """The inverse of :func:`dtype_name`; None for what is no dtype."""
    dtype = vars(torch).get(name)  # getattr() would import a module of that name
    return dtype if isinstance(dtype, torch.dtype) else None
