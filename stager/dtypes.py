"""Torch dtypes and their safetensors names, with a carrier for those that the format lacks."""

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
"""The dtypes that the safetensors library can open."""

DTYPES: Final[dict[str, torch.dtype]] = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True, slots=True)
class Carrier:
    """Carrier of a dtype safetensors lacks: bitcast to ``dtype``, last dimension 2 if ``pair``."""

    dtype: torch.dtype
    pair: bool


def _carriers() -> dict[torch.dtype, Carrier]:
    carriers = {
        torch.complex128: Carrier(torch.float64, pair=True),
        torch.complex32: Carrier(torch.float16, pair=True),
    }
    bitcast = ["float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"]
    bitcast += [f"{kind}{bits}" for kind in ("uint", "int") for bits in range(1, 8)]
    bitcast += ["bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"]
    for dtype in (getattr(torch, name, None) for name in bitcast):
        if dtype is not None:
            carriers[dtype] = Carrier(
                torch.uint8 if dtype.itemsize == 1 else torch.uint16, pair=False
            )
    return carriers


CARRIERS: Final = _carriers()
QUANTIZED: Final[dict[torch.dtype, torch.dtype]] = {
    torch.qint8: torch.int8,
    torch.quint8: torch.uint8,
    torch.qint32: torch.int32,
    torch.quint4x2: torch.uint8,
    torch.quint2x4: torch.uint8,
}
"""Torch's quantized dtypes and those of their bytes; the last two pack several values in a byte."""
PACKED: Final = {torch.quint4x2: 2, torch.quint2x4: 4}
"""The number of values per byte of these dtypes."""


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype | None:
    """The inverse of :func:`dtype_name`; None if ``name`` is not a dtype."""
    dtype = vars(torch).get(name)  # getattr() would import a module of that name
    return dtype if isinstance(dtype, torch.dtype) else None


def named_dtype(name: str) -> torch.dtype:
    """The dtype of that name; ``ValueError`` if this torch has none."""
    dtype = dtype_from_name(name)
    if dtype is None:
        raise ValueError(f"this torch has no dtype {name!r}")
    return dtype
