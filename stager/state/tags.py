"""Nodes of a treespec: their tags, maximum depth, and the values that are encoded as themselves."""

from __future__ import annotations

import collections
import enum
import itertools
import secrets
from collections.abc import Iterable
from typing import Any, Final, cast

import msgpack
import torch

from sidesave.stager.torch_private import with_metadata

MAX_DEPTH: Final = 100
PRIMITIVES: Final = frozenset({type(None), bool, float, str, bytes})
"""Types encoded as themselves whatever the value; an int is, too, within 64 bits."""
PLAIN: Final = PRIMITIVES | {int}


class Tag(enum.IntEnum):
    """First element of a treespec node; the numbers are part of the format."""

    TENSOR = 0  # fqn [, logical dtype where the stored one is a carrier, else "" [, memory format]]
    DICT = 1  # {str: node}
    ITEMS = 2  # [[key node, node], ...]: a dict with other keys
    LIST = 3
    TUPLE = 4
    INT = 5  # hexadecimal text: beyond 64 bits
    COMPLEX = 6  # real, imaginary
    SET = 7
    FROZENSET = 8
    ORDERED_DICT = 9  # like ITEMS
    COUNTER = 10  # like ITEMS
    DEFAULT_DICT = 11  # name of the factory, then like ITEMS
    DEQUE = 12  # maxlen, items
    BYTEARRAY = 13
    BYTES_IO = 14  # content, position
    # dtype, bytes; or "" and a .npy file where neither bytes nor dtype say it all
    NUMPY_SCALAR = 15
    NUMPY_ARRAY = 16  # tensor node
    NUMPY_FILE = 17  # an array that torch has no dtype for, as a .npy file
    SIZE = 18
    DTYPE = 19
    DEVICE = 20
    DATETIME = 21  # ISO text, fold, zone
    DATE = 22
    TIME = 23  # ISO text, fold, zone
    TIMEDELTA = 24  # days, seconds, microseconds
    PATH = 25
    PURE_PATH = 26
    SPARSE = 27  # layout, shape, coalesced, {part: tensor node}
    PICKLE = 28
    MODULE = 29  # metadata (the version of each submodule), then like DICT or ITEMS
    ENUM = 30  # module:qualname of the class, name of the member, node of its value
    OPTIMIZER = 31  # [[FQN of each parameter] of each group], then like DICT or ITEMS
    TABLE = 32  # {name of a column: node}
    ROWS = 33  # FQN of a table, name of a column or of its ids
    # module:qualname, dtype, shape, strides, context, {name of an inner tensor: node}
    SUBCLASS = 35
    RENAMED = 36  # module:qualname, node of the tensor
    NESTED = 37  # ragged dimension, {part: tensor node}
    QUANTIZED = 38  # dtype, shape, [scale, zero point] or [axis], {part: tensor node}
    OBJECT = 39  # in a context: module:qualname, name of a member of an enum or {field: node}
    # whether placed as its parameter, placements, tensor node: a DTensor in an optimizer's state
    PLACED = 40


MAPPINGS: Final = (
    *(Tag.DICT, Tag.ITEMS, Tag.ORDERED_DICT, Tag.COUNTER, Tag.DEFAULT_DICT),
    *(Tag.MODULE, Tag.OPTIMIZER),
)
"""Nodes of dicts: the last element has the items."""
FORMATS: Final = {"channels_last": (0, 2, 3, 1), "channels_last_3d": (0, 2, 3, 4, 1)}
"""The memory formats that torch names: their dimensions, from outermost to innermost in memory."""
FACTORIES: Final[dict[Any, str]] = {
    None: "",
    list: "list",
    dict: "dict",
    set: "set",
    int: "int",
    float: "float",
}
SPARSE_PARTS: Final[dict[torch.layout, tuple[str, ...]]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


_EXTENSION: Final = 80
_NONCE: Final = secrets.token_bytes(16)
_MARK: Final = b"\xd8" + bytes([_EXTENSION]) + _NONCE
"""The msgpack extension's start; random in each process, so no other value of a state equals it."""


class Packed:
    """A node that does not change any more: packed once, and then inserted into other nodes."""

    __slots__ = ("_bytes", "_node")

    def __init__(self, node: Any) -> None:
        """Keep ``node`` until it is packed."""
        self._node, self._bytes = node, b""

    def __bytes__(self) -> bytes:
        """The node as msgpack."""
        if not self._bytes:
            self._bytes = pack(self._node)
            self._node = None
        return self._bytes


def pack(node: Any) -> bytes:
    """A node as msgpack."""
    known: list[Packed] = []

    def stand_in(value: Any) -> Any:
        if type(value) is not Packed:
            raise TypeError(f"no node: {type(value).__qualname__}")
        known.append(value)
        return msgpack.ExtType(_EXTENSION, _NONCE)

    packed = cast("bytes", msgpack.packb(node, default=stand_in, unicode_errors="surrogatepass"))
    if not known:
        return packed
    first, *rest = packed.split(_MARK)
    return b"".join(
        (first, *itertools.chain.from_iterable(zip(map(bytes, known), rest, strict=True)))
    )


def container_like(like: Any, keys: Iterable[Any], values: Iterable[Any]) -> Any:
    """A container of the kind of ``like`` with these items; the keys of a sequence are not used."""
    if isinstance(like, collections.deque):
        return collections.deque(values, cast("collections.deque[Any]", like).maxlen)
    if isinstance(like, (list, tuple)):
        return type(cast("list[Any]", like))(values)
    items = dict(zip(keys, values, strict=True))
    if isinstance(like, collections.defaultdict):
        return collections.defaultdict(cast("Any", like).default_factory, items)
    metadata = getattr(like, "_metadata", None)
    return type(like)(items) if metadata is None else with_metadata(items, metadata)


def _has_plain_key(pair: Any) -> bool:
    items = cast("list[Any]", pair if isinstance(pair, list) else [])
    return len(items) == 2 and type(items[0]) in PLAIN


def is_plain_node(node: Any, depth: int) -> bool:
    """Whether a node is plain data, including everything in it; false for a malformed one."""
    if not isinstance(node, list):
        return type(node) in PLAIN
    if depth > MAX_DEPTH + 5:
        return False
    items: Any
    match cast("list[Any]", node):
        case [Tag.LIST | Tag.TUPLE, *items] | [Tag.DEQUE, _, *items]:
            pass
        case [Tag.DICT, body] if isinstance(body, dict):
            items = cast("dict[Any, Any]", body).values()
        case [Tag.ITEMS | Tag.ORDERED_DICT | Tag.COUNTER, pairs] | [Tag.DEFAULT_DICT, _, pairs]:
            both = cast("list[Any]", pairs if isinstance(pairs, list) else [None])
            if not all(map(_has_plain_key, both)):
                return False
            items = [pair[1] for pair in both]
        case _:
            return False
    return PLAIN.issuperset(map(type, items)) or all(
        is_plain_node(item, depth + 1) for item in items
    )
