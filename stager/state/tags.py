"""The nodes of a treespec: how deep they nest, which of them stand for themselves, and the tags of all others."""

from __future__ import annotations

import enum
import itertools
import secrets
from typing import Any, Final, cast

import msgpack
import torch

MAX_DEPTH: Final = 100
PRIMITIVES: Final = frozenset({type(None), bool, float, str, bytes})
"""What stands for itself whatever its value; an int does within 64 bits."""
PLAIN: Final = PRIMITIVES | {int}


class Tag(enum.IntEnum):
    """First element of a treespec node; the numbers are part of the format."""

    TENSOR = 0  # fqn [, logical dtype where the stored one is a carrier]
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
    NUMPY_SCALAR = 15  # dtype, bytes; or "" and a .npy file where neither bytes nor dtype say it all
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


FACTORIES: Final[dict[Any, str]] = {None: "", list: "list", dict: "dict", set: "set", int: "int", float: "float"}
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
"""What msgpack writes for the extension, which nothing else in a state can be: it differs in each process."""


class Packed:
    """A node that does not change any more: it is packed once, and stands for itself in other nodes."""

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
    return b"".join((first, *itertools.chain.from_iterable(zip(map(bytes, known), rest, strict=True))))
