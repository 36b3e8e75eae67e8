"""Values of a state that are neither tensors nor containers: their nodes, and back.

NumPy scalars and arrays that torch has no dtype for become ``.npy`` files; NumPy is imported only
for them.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime
import io
import math
import pathlib
import struct
import sys
import zoneinfo
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from sidesave.errors import UnsupportedValueError
from sidesave.stager.dtypes import dtype_name, named_dtype
from sidesave.stager.state.tags import Tag

_LOADER: Final = (
    "its position cannot be read: use torchdata's StatefulDataLoader instead, or leave it out"
)
_CURES: Final = (
    ("torch.utils.data", "DataLoader", _LOADER),
    ("torch", "Generator", "save x.get_state(), and restore it with x.set_state()"),
    ("random", "Random", "save x.getstate(), and restore it with x.setstate()"),
    ("numpy.random", "Generator", "save x.bit_generator.state, and restore it by assignment"),
    ("numpy.random", "RandomState", "save x.get_state(), and restore it with x.set_state()"),
    ("argparse", "Namespace", "save vars(x)"),
    ("types", "SimpleNamespace", "save vars(x)"),
)
"""Module, name and advice for common types; by name, so that this module does not import them."""
_MAX_HEADER_NBYTES: Final = 10_000
"""NumPy's own limit on the headers that it evaluates, in bytes."""


# Encoding -----------------------------------------------------------------------------------------


def _zoned_node(tag: Tag, value: Any, fqn: str) -> list[Any]:
    """The node of a time: a ZoneInfo by its key; the ISO text has a fixed offset."""
    zone = value.tzinfo
    if zone is None or isinstance(zone, datetime.timezone):
        return [tag, value.isoformat(), value.fold, None]
    if isinstance(zone, zoneinfo.ZoneInfo) and zone.key:
        return [tag, value.replace(tzinfo=None).isoformat(), value.fold, zone.key]
    raise UnsupportedValueError(
        f"{fqn}: a time zone of type {type(zone).__qualname__} cannot be saved"
    )


ENCODERS: Final[dict[type, Callable[[Any, str], list[Any]]]] = {
    complex: lambda value, fqn: [Tag.COMPLEX, value.real, value.imag],
    bytearray: lambda value, fqn: [Tag.BYTEARRAY, bytes(value)],
    io.BytesIO: lambda value, fqn: [Tag.BYTES_IO, value.getvalue(), value.tell()],
    torch.Size: lambda value, fqn: [Tag.SIZE, *value],
    torch.dtype: lambda value, fqn: [Tag.DTYPE, dtype_name(value)],
    torch.device: lambda value, fqn: [Tag.DEVICE, str(value)],
    datetime.datetime: lambda value, fqn: _zoned_node(Tag.DATETIME, value, fqn),
    datetime.date: lambda value, fqn: [Tag.DATE, value.isoformat()],
    datetime.time: lambda value, fqn: _zoned_node(Tag.TIME, value, fqn),
    datetime.timedelta: lambda value, fqn: [
        Tag.TIMEDELTA,
        value.days,
        value.seconds,
        value.microseconds,
    ],
    pathlib.PurePosixPath: lambda value, fqn: [Tag.PURE_PATH, str(value)],
}
"""Functions that make a value's node, by its exact class; the FQN is for messages."""


def is_numpy_scalar(value: Any) -> bool:
    """Whether a value is a NumPy scalar that holds no Python objects."""
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and isinstance(value, numpy.generic)
        and not isinstance(value, numpy.record)
        and not value.dtype.hasobject
    )


def numpy_scalar_node(value: Any, fqn: str) -> list[Any]:
    """The node of a NumPy scalar."""
    if value.dtype.fields or not value.dtype.itemsize:
        return [Tag.NUMPY_SCALAR, "", npy_file(value, fqn)]
    _check_name(value.dtype, fqn)
    return [Tag.NUMPY_SCALAR, value.dtype.str, value.tobytes()]


def is_numpy_array(value: Any) -> bool:
    """Whether a value is a plain NumPy array that holds no Python objects."""
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and type(value) in (numpy.ndarray, numpy.memmap)
        and not value.dtype.hasobject
    )


def torch_array(value: Any) -> tuple[Any, torch.Tensor | None]:
    """A NumPy array, copied if not contiguous and writable; as a tensor if torch has its dtype."""
    import numpy as np

    # ascontiguousarray makes 0-dim arrays 1-dim
    array = np.ascontiguousarray(value).reshape(value.shape)
    if not array.flags.writeable:
        array = array.copy()
    try:
        return array, torch.from_numpy(array)
    except (TypeError, ValueError):  # no such dtype; foreign byte order
        return array, None


def _check_name(dtype: Any, fqn: str) -> None:
    """Raise ``UnsupportedValueError`` for dtypes NumPy saves as untyped bytes (``ml_dtypes``)."""
    import numpy as np

    if np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(dtype)) != dtype:
        raise UnsupportedValueError(
            f"{fqn}: NumPy cannot save the dtype {dtype}; convert it to a torch tensor"
        )


def npy_file(value: Any, fqn: str) -> bytes:
    """Return a value as a ``.npy`` file."""
    import numpy as np

    _check_name(value.dtype, fqn)
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(value), allow_pickle=False)
    return file.getvalue()


def cure(value: object) -> str:
    """Return advice on how to save the content of a value that cannot be saved."""
    for module, name, advice in _CURES:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(value, kind):
            return advice
    if isinstance(value, type) or callable(value):
        return "it is code: leave it out, and create it again"
    if dataclasses.is_dataclass(value):
        return "save dataclasses.asdict(x)"
    if hasattr(value, "_asdict") and hasattr(value, "_fields"):
        return "save x._asdict()"
    if isinstance(value, Mapping):
        return "save dict(x)"
    if isinstance(value, Iterator):
        return "its position cannot be read: leave it out"
    data = (
        "its plain data, such as vars(x)" if getattr(value, "__dict__", None) else "its plain data"
    )
    return f"give it state_dict() and load_state_dict(), save {data}, or pass allow_pickle=True"


# Decoding -----------------------------------------------------------------------------------------


def _read_npy(data: bytes) -> Any:
    """Return a ``.npy`` file's array; raises ``ValueError`` if its header and length disagree.

    The header is checked first, because NumPy allocates the size that it states.
    """
    import numpy as np

    stream = io.BytesIO(data)
    major, _ = np.lib.format.read_magic(stream)
    (length,) = (
        struct.unpack("<H", stream.read(2)) if major == 1 else struct.unpack("<I", stream.read(4))
    )
    if length > _MAX_HEADER_NBYTES:
        raise ValueError(
            f"a .npy header of {length} bytes exceeds the limit of {_MAX_HEADER_NBYTES}"
        )
    header = ast.literal_eval(stream.read(length).decode("latin-1" if major < 3 else "utf-8"))
    nbytes = math.prod(header["shape"]) * np.lib.format.descr_to_dtype(header["descr"]).itemsize
    if nbytes != len(data) - stream.tell():
        raise ValueError(f"a .npy file of {len(data)} bytes for an array of {nbytes}")
    stream.seek(0)
    return np.lib.format.read_array(stream, allow_pickle=False)


def _numpy_scalar(dtype: Any, content: bytes) -> Any:
    """Return a scalar from its dtype's name and bytes; without a dtype, from a ``.npy`` file."""
    import numpy as np

    if not dtype:
        return _read_npy(content)[()]
    if not isinstance(dtype, str) or np.dtype(dtype).itemsize != len(content):
        raise ValueError(f"no NumPy scalar of {dtype!r:.80} has {len(content)} bytes")
    value = np.frombuffer(content, dtype=np.dtype(dtype))[0]
    # an element of an array ends before its zeros, a scalar does not
    if isinstance(value, np.bytes_):
        return np.bytes_(bytes(content))
    if isinstance(value, np.str_):
        return np.str_(bytes(content).decode("utf-32", "surrogatepass"))
    return value


def value_of(tag: Tag, rest: list[Any], build: Callable[[Any], Any]) -> Any:
    """The value of a node for neither tensor nor container; ``build`` makes the items of a set."""
    match tag:
        case Tag.INT:
            return int(rest[0], 16)
        case Tag.COMPLEX:
            return complex(*rest)
        case Tag.SET:
            return {build(item) for item in rest}
        case Tag.FROZENSET:
            return frozenset(build(item) for item in rest)
        case Tag.BYTEARRAY:
            # which a number, a request for that many zeros, is not
            return bytearray(memoryview(rest[0]))
        case Tag.BYTES_IO:
            stream = io.BytesIO(rest[0])
            stream.seek(rest[1])
            return stream
        case Tag.NUMPY_SCALAR:
            return _numpy_scalar(*rest)
        case Tag.NUMPY_FILE:
            return _read_npy(rest[0])
        case Tag.DTYPE:
            return named_dtype(rest[0])
        case Tag.SIZE:
            return torch.Size(rest)
        case Tag.DEVICE:
            # a number would be a device of the accelerator that is here
            return torch.device(str(rest[0]))
        case Tag.DATETIME:
            return _zoned(datetime.datetime.fromisoformat(rest[0]), rest[1], rest[2])
        case Tag.TIME:
            return _zoned(datetime.time.fromisoformat(rest[0]), rest[1], rest[2])
        case Tag.DATE:
            return datetime.date.fromisoformat(rest[0])
        case Tag.TIMEDELTA:
            return datetime.timedelta(*rest)
        case Tag.PATH:
            return pathlib.Path(rest[0])
        case Tag.PURE_PATH:
            return pathlib.PurePosixPath(rest[0])
        case _:
            raise ValueError(f"no leaf has tag {tag}")


def _zoned(value: Any, fold: int, zone: str | None) -> Any:
    return value.replace(
        fold=fold, tzinfo=value.tzinfo if zone is None else zoneinfo.ZoneInfo(zone)
    )
