"""States to save, what they must come back as, and how a copy of them is held until a test has done
its worst.
"""

import collections
import contextlib
import copy
import datetime
import io
import sys
import threading
import warnings
import zoneinfo
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sidesave
from sidesave import Checkpointer
from sidesave.errors import TornSnapshotError
from sidesave.stager import ownership
from sidesave.stager.dtypes import CARRIERS, NAMES

# What comes back ----------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> bytes:
    """The values of a dense tensor as bytes, whatever its strides."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def _pairs(a: Iterable[Any], b: Iterable[Any], at: str) -> str:
    return next(
        filter(
            None,
            (difference(x, y, f"{at}[{n}]") for n, (x, y) in enumerate(zip(a, b, strict=True))),
        ),
        "",
    )


def assert_holds(handle: sidesave.SaveHandle, expected: dict[str, Any]) -> None:
    assert difference(expected, sidesave.load(handle.committed.result(300))) == ""


def difference(a: Any, b: Any, at: str = "") -> str:
    """Where ``b`` is not ``a`` in type, bits, order, or what else the type has; "" when nowhere."""
    if type(a) is nn.Parameter:
        a = a.detach()
    if type(a) is not type(b):
        return f"{at}: {type(a)} became {type(b)}"
    match a:
        case torch.Tensor():
            if (a.dtype, a.shape, a.layout, a.device) != (b.dtype, b.shape, b.layout, b.device):
                return f"{at}: {a.dtype} {a.shape} {a.layout} became {b.dtype} {b.shape} {b.layout}"
            if a.layout is not torch.strided:
                if a.layout is torch.sparse_coo and a.is_coalesced() != b.is_coalesced():
                    return f"{at}: coalesced or not"
                return _pairs(_parts(a), _parts(b), at)
            return "" if bits(a) == bits(b) else f"{at}: other bits"
        case np.ndarray() | np.generic():
            same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
            return "" if same else f"{at}: {a!r} became {b!r}"
        case dict():
            if len(a) != len(b):
                return f"{at}: {len(a)} keys became {len(b)}"
            if (
                isinstance(a, collections.defaultdict)
                and a.default_factory is not b.default_factory
            ):
                return f"{at}: other factory"
            return _pairs(a, b, at) or _pairs(a.values(), b.values(), at)
        case set() | frozenset():
            gone = [x for x in a if all(difference(x, y) for y in b)]
            return "" if len(a) == len(b) and not gone else f"{at}: {a!r} became {b!r}"
        case list() | tuple() | collections.deque():
            if len(a) != len(b) or getattr(a, "maxlen", None) != getattr(b, "maxlen", None):
                return f"{at}: {a!r} became {b!r}"
            return _pairs(a, b, at)
        case io.BytesIO():
            return (
                ""
                if (a.getvalue(), a.tell()) == (b.getvalue(), b.tell())
                else f"{at}: other stream"
            )
        case datetime.datetime() | datetime.time():
            same = (
                a.replace(tzinfo=None) == b.replace(tzinfo=None)
                and a.fold == b.fold
                and _zone(a) == _zone(b)
            )
            return "" if same else f"{at}: {a!r} became {b!r}"
        case float() | complex():
            return _pairs([repr(a)], [repr(b)], at)  # nan is nan, and -0.0 is not 0.0
        case _:
            return "" if a == b else f"{at}: {a!r} became {b!r}"


def _zone(value: datetime.datetime | datetime.time) -> Any:
    zone = value.tzinfo
    return zone.key if isinstance(zone, zoneinfo.ZoneInfo) else zone and zone.utcoffset(None)


# Tensors of every kind ----------------------------------------------------------------------------


def noise(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bit patterns at all, nan payloads included."""
    count = int(np.prod(shape)) * dtype.itemsize
    generator = torch.Generator().manual_seed(count + dtype.itemsize)
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def _sparse(layout: torch.layout, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    dense = torch.zeros(4, 6, dtype=dtype)
    dense[0, 1], dense[2, 2:4], dense[3, 5] = 1, 2, 3
    if layout in (torch.sparse_bsr, torch.sparse_bsc):
        return dense.to_sparse(layout=layout, blocksize=(2, 3))
    return dense.to_sparse(layout=layout)


def _tensors() -> dict[str, torch.Tensor]:
    floats = noise(torch.float32, 6, 8)
    return {
        **{str(dtype): noise(dtype, 3, 4) for dtype in (*NAMES, *CARRIERS)},
        **{f"0-dim {dtype}": noise(dtype, 1)[0] for dtype in (*NAMES, *CARRIERS)},
        "empty": torch.empty(0),
        "empty with dimensions": torch.empty(3, 0, 2, dtype=torch.complex128),
        "transposed": floats.t(),
        "slice": floats[1:4, 2:7],
        "every other": floats[::2, ::3],
        "expanded": torch.tensor([1.5]).expand(5, 3),
        "channels last": noise(torch.float32, 2, 3, 4, 5).to(memory_format=torch.channels_last),
        "overlapping windows": torch.arange(8.0).unfold(0, 4, 1),
        "conjugate complex64": noise(torch.complex64, 3, 2).conj(),
        "conjugate complex128": noise(torch.complex128, 3, 2).conj(),
        "conjugate complex128, transposed": noise(torch.complex128, 3, 2).mH,
        "imaginary part of a conjugate, a negated view": noise(torch.complex64, 3, 2).conj().imag,
        "negated view": torch._neg_view(torch.arange(5.0)),
        "requires grad": torch.arange(3.0, requires_grad=True),
        "no leaf": torch.arange(3.0, requires_grad=True) * 2,
        "parameter": nn.Parameter(torch.arange(4.0)),
        "COO": _sparse(torch.sparse_coo),
        "COO, not coalesced": torch.sparse_coo_tensor(
            torch.tensor([[0, 0, 2]]), [1.0, 2.0, 3.0], (4,)
        ),
        "COO, hybrid": torch.sparse_coo_tensor(
            torch.tensor([[0, 2]]), torch.arange(6.0).view(2, 3), (4, 3)
        ),
        "COO without a value": torch.sparse_coo_tensor(torch.empty(2, 0), torch.empty(0), (4, 3)),
        "COO, complex128": _sparse(torch.sparse_coo, torch.complex128),
        "CSR": _sparse(torch.sparse_csr),
        "CSC": _sparse(torch.sparse_csc, torch.float64),
        "BSR": _sparse(torch.sparse_bsr),
        "BSC": _sparse(torch.sparse_bsc, torch.int16),
    }


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch: complex32 is experimental, sparse layouts are beta
    TENSORS = _tensors()


# Training states ----------------------------------------------------------------------------------


def like(value: dict[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dict of the kind of ``value``: that of a module is ordered."""
    return (
        collections.OrderedDict(pairs)
        if isinstance(value, collections.OrderedDict)
        else dict(pairs)
    )


def frozen(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint of ``state`` must hold, copied now."""

    def freeze(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return collections.OrderedDict(
                (key, each.detach().clone()) for key, each in value.state_dict().items()
            )
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        if isinstance(value, dict):
            return like(value, ((key, freeze(item)) for key, item in value.items()))
        return copy.deepcopy(value.state_dict() if hasattr(value, "state_dict") else value)

    return {key: freeze(value) for key, value in state.items()}


def scramble(tensors: Any) -> None:
    """Changes memory in the way that nothing notices: no version counter, no hook."""
    for tensor in tensors:
        tensor.data.view(torch.uint8 if tensor.dim() else tensor.dtype).random_()


def swap_in(model: nn.Module, average: nn.Module) -> list[torch.Tensor]:
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter, averaged in zip(model.parameters(), average.parameters(), strict=True):
        parameter.data.copy_(averaged.data)
    return before


def swap_back(model: nn.Module, before: list[torch.Tensor]) -> None:
    for parameter, tensor in reversed(list(zip(model.parameters(), before, strict=True))):
        parameter.data.copy_(tensor)


# Copies that are held -----------------------------------------------------------------------------


@contextlib.contextmanager
def held(checkpointer: Checkpointer) -> Iterator[threading.Event]:
    """Copies of saves that begin inside wait at their start: until the block ends, or the event is
    set.
    """
    go_on = threading.Event()

    def wait() -> None:
        go_on.wait(300)

    checkpointer.session.copier._starter.submit(wait)
    try:
        yield go_on
    finally:
        go_on.set()


def waits_at_the_guard(thread: threading.Thread) -> bool:
    """Whether a thread is inside the guard, as its stack says."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code is ownership.close_guards.__code__:
            return True
        frame = frame.f_back
    return False


def assert_torn(checkpointer: Checkpointer, handle: sidesave.SaveHandle, names: str) -> None:
    for future in (handle.staged, handle.written, handle.committed):
        with pytest.raises(TornSnapshotError, match=f"changed while being copied: {names}"):
            future.result(300)
    checkpointer.wait()
