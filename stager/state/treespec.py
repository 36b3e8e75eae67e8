"""The treespec of a state: the nest with every tensor replaced by its FQN and everything else by itself, as msgpack.

Values that msgpack knows (None, bool, 64-bit int, float, str, bytes) stand for themselves; every other node is a list
whose first element is a :class:`~sidesave.stager.state.tags.Tag`. Nothing in it is pickle unless the checkpoint's
writer allowed it, and decoding runs no code.
"""

from __future__ import annotations

import ast
import collections
import datetime
import enum
import io
import math
import pathlib
import struct
import zoneinfo
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, cast

import msgpack
import torch

from sidesave.errors import IntegrityError, UnsupportedValueError
from sidesave.stager.state.dtypes import CARRIERS, dtype_from_name
from sidesave.stager.state.merging import Merger, Partial
from sidesave.stager.state.tags import FACTORIES, MAX_DEPTH, PLAIN, SPARSE_PARTS, Tag
from sidesave.stager.tables import IDS

_FACTORIES_BY_NAME: Final = {name: factory for factory, name in FACTORIES.items()}
_LAYOUTS_BY_NAME: Final = {str(layout).removeprefix("torch."): layout for layout in SPARSE_PARTS}
_MAX_DEPTH: Final = MAX_DEPTH + 5
_MAX_NPY_HEADER_NBYTES: Final = 10_000
"""The limit that NumPy sets to what it evaluates."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as the treespec names it: the FQN that holds its bytes, and its dtype where that is carried.

    For the values of a sparse tensor, ``sparse_shape`` is the shape of the whole. What becomes a NumPy ``array`` has to
    stay in host memory, of the dtype it has. ``rank`` is the one whose treespec names it. Of a column of a ``table`` of
    rows there is a part on each rank.
    """

    fqn: str
    dtype: torch.dtype | None
    sparse_shape: tuple[int, ...] | None = None
    array: bool = False
    rank: int = 0
    table: str = ""


def _everything(fqn: str) -> bool:
    return True


class TreeSpec:
    """A decoded treespec: plain data, and references where tensors go."""

    def __init__(self, data: bytes, where: str, rank: int = 0) -> None:
        """Decode ``data``, the objects file ``where`` of ``rank``; ``IntegrityError`` when it is malformed."""
        self._where = where
        self._rank = rank
        try:
            body = cast(
                "Any",
                msgpack.unpackb(data, raw=False, use_list=True, strict_map_key=True, unicode_errors="surrogatepass"),
            )
        except Exception as error:
            raise IntegrityError(f"{where}: not a treespec: {error}") from error
        if not isinstance(body, dict) or not all(isinstance(key, str) for key in cast("dict[Any, Any]", body)):
            raise IntegrityError(f"{where}: a treespec must be a map of names")
        self._body = cast("dict[str, Any]", body)

    def keys(self) -> list[str]:
        """The top-level names."""
        return list(self._body)

    def add(self, other: TreeSpec, is_shared: Callable[[str], bool], *, optimizers: bool) -> None:
        """Add what only ``other`` has: items, and keys of dicts that both have and that hold shared tensors.

        A dict without any belongs to its rank, and must not be mixed with that of another.

        Args:
            other: The treespec of another rank.
            is_shared: Tells by its FQN whether a tensor belongs to all ranks.
            optimizers: Whether this goes for the states of optimizers too, which belong to the parameters of their
                rank: one may have had no gradient there, or no elements (FSDP1), and has no state then.

        Raises:
            IntegrityError: ``other`` is malformed.
        """

        def partial(one: TreeSpec) -> Callable[[Any], Partial]:
            return lambda node: node if isinstance(node, Partial) else Partial(node, one._where, one._rank)

        try:
            ours, theirs = ({key: (key, node) for key, node in one._body.items()} for one in (self, other))
            merged = Merger(is_shared, partial(other), optimizers=optimizers).items(ours, theirs, partial(self), 0)
            self._body = dict(merged.values())
        except Exception as error:
            raise IntegrityError(f"{other._where}: not a treespec: {error}") from error

    def differences(self, other: TreeSpec, is_shared: Callable[[str], bool]) -> list[tuple[str, bool]]:
        """The FQNs of what two ranks saved differently, and whether it is a number; bytes of tensors are not compared.

        What only one of them has counts where it is of its rank alone: a shared tensor, as ``is_shared`` tells by the
        FQN, or anything that holds one, does not. ``IntegrityError`` if one of them is malformed.
        """
        merger = Merger(is_shared, lambda node: Partial(node, other._where, other._rank))
        try:
            return list(merger.differences([Tag.DICT, self._body], [Tag.DICT, other._body], "", 0))
        except Exception as error:
            raise IntegrityError(f"{self._where}, {other._where}: not treespecs of one state: {error}") from error

    def unbuilt(
        self, *, unpickle: Callable[[bytes], Any] | None = None, partial: set[str] | None = None
    ) -> tuple[dict[str, Any], dict[str, list[list[str]]]]:
        """The nest again, with an :class:`Unbuilt` in the place of every leaf that does not stand for itself.

        Keys are built, for which ``unpickle`` is needed where they were pickled. See :meth:`build` for all else. Also
        returns, by the FQNs of optimizers, those of the parameters in each of their groups, where they are known.
        """
        partial = set[str]() if partial is None else partial
        builder = _Builder(self._where, self._rank, _no_tensor, _everything, unpickle, partial, holds=True)
        return builder.mapping(self._body, ""), builder.parameters

    def build(
        self,
        tensor: Callable[[TensorRef], Any],
        *,
        only: Callable[[str], bool] = _everything,
        unpickle: Callable[[bytes], Any] | None = None,
        partial: set[str] | None = None,
    ) -> dict[str, Any]:
        """The nest again.

        Args:
            tensor: Gives the value that stands for a reference.
            only: Leaves of which this is false are left out, and so are items of a dict that lose all they had.
            unpickle: Gives the value that stands for a pickled one; ``pickle.loads`` runs code that the checkpoint
                chooses.
            partial: Takes the FQNs of what not all of the ranks had whose treespecs have been put together here.

        Raises:
            IntegrityError: A node is malformed.
            UnsupportedValueError: A value is pickled and there is no ``unpickle``.
        """
        partial = set[str]() if partial is None else partial
        return _Builder(self._where, self._rank, tensor, only, unpickle, partial).mapping(self._body, "")


def _no_tensor(ref: TensorRef) -> Any:
    raise ValueError("a tensor is no key")


def rebuilt(node: Any, tensor: Callable[[TensorRef], Any]) -> Any:
    """The value of a single node; in the place of one that was pickled an object that equals no other."""
    return _Builder("", 0, tensor, _everything, lambda data: object(), set()).build(node, "", 0)


def with_metadata(state: dict[str, Any], metadata: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A module's state as torch makes it: its metadata tells ``load_state_dict`` which version of a class it is of."""
    if not isinstance(cast("object", metadata), dict) or not all(type(each) is dict for each in metadata.values()):
        raise ValueError("a module's metadata must be a map of maps")
    result: Any = collections.OrderedDict(state)
    result._metadata = collections.OrderedDict(metadata)
    return result


@dataclass(frozen=True, slots=True, eq=False)
class Unbuilt:
    """A leaf of a treespec whose value is made only when it is wanted."""

    fqn: str
    _where: str
    _rank: int
    _node: list[Any]
    _depth: int

    @property
    def member(self) -> tuple[str, str] | None:
        """Of a member of an enum the class, as ``module:qualname``, and its name; its value is what is built."""
        return (str(self._node[1]), str(self._node[2])) if self._node[0] == Tag.ENUM else None

    @property
    def is_ids(self) -> bool:
        """Whether it is the ids of a table, without which its columns say nothing."""
        return self._node[0] == Tag.ROWS and self._node[-1] == IDS

    def build(self, tensor: Callable[[TensorRef], Any], unpickle: Callable[[bytes], Any] | None = None) -> Any:
        """Its value; arguments and errors are those of :meth:`TreeSpec.build`."""
        builder = _Builder(self._where, self._rank, tensor, _everything, unpickle, set())
        return builder.build(self._node, self.fqn, self._depth)


class _Missing(enum.Enum):
    LEFT_OUT = 0


_OUT: Final = _Missing.LEFT_OUT
_DICTS: Final = {Tag.DICT, Tag.ITEMS, Tag.ORDERED_DICT, Tag.COUNTER, Tag.DEFAULT_DICT, Tag.OPTIMIZER, Tag.MODULE}
_CONTAINERS: Final = frozenset(_DICTS | {Tag.LIST, Tag.TUPLE, Tag.DEQUE, Tag.TABLE})


class _Builder:
    def __init__(
        self,
        where: str,
        rank: int,
        tensor: Callable[[TensorRef], Any],
        only: Callable[[str], bool],
        unpickle: Callable[[bytes], Any] | None,
        partial: set[str],
        *,
        holds: bool = False,
    ) -> None:
        self._where = where
        self._rank = rank
        self._tensor = tensor
        self._only = only
        self._unpickle = unpickle
        self._partial = partial
        self.parameters: dict[str, list[list[str]]] = {}
        # Builds what only makes sense whole: a dict's keys, a set, the parts of a sparse tensor.
        self._whole: _Builder = (
            self if only is _everything and not holds else _Builder(where, rank, tensor, _everything, unpickle, partial)
        )
        self._holds = holds

    def mapping(self, body: dict[str, Any], prefix: str) -> dict[str, Any]:
        built = {key: self.build(node, prefix + key, 0) for key, node in body.items()}
        return {key: value for key, value in built.items() if value is not _OUT}

    def build(self, node: Any, fqn: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise IntegrityError(f"{self._where}: {fqn} is nested too deep")
        if not isinstance(node, list):
            if isinstance(node, Partial):
                self._partial.add(fqn)
                other = _Builder(
                    node.where, node.rank, self._tensor, self._only, self._unpickle, self._partial, holds=self._holds
                )
                other.parameters = self.parameters
                return other.build(node.node, fqn, depth)
            if type(node) not in PLAIN:
                raise IntegrityError(f"{self._where}: {fqn} is malformed")
            return node if self._only(fqn) else _OUT
        try:
            body = cast("list[Any]", node)
            tag = Tag(body[0])
            if tag in _CONTAINERS:
                return self._container(tag, body[1:], fqn, depth)
            if self._holds:
                return Unbuilt(fqn, self._where, self._rank, body, depth)
            return self._whole._leaf(tag, body[1:], fqn, depth) if self._only(fqn) else _OUT
        except (IntegrityError, UnsupportedValueError):
            raise
        except Exception as error:
            raise IntegrityError(f"{self._where}: {fqn} is malformed: {error}") from error

    def _container(self, tag: Tag, rest: list[Any], fqn: str, depth: int) -> Any:
        match tag:
            case Tag.DICT | Tag.TABLE:
                body = cast("dict[str, Any]", rest[0])
                if self._stand_for_themselves(body.values(), depth):
                    return dict(zip(map(str, body), body.values(), strict=True))
                items = body.items()
                built = {str(key): self.build(item, f"{fqn}.{key}", depth + 1) for key, item in items}
                return self._kept(built, fqn)
            case Tag.ITEMS:
                return self._items(rest[0], fqn, depth)
            case Tag.ORDERED_DICT:
                kept = self._items(rest[0], fqn, depth)
                return kept if kept is _OUT else collections.OrderedDict(kept)
            case Tag.COUNTER:
                kept = self._items(rest[0], fqn, depth)
                return kept if kept is _OUT else collections.Counter[Any](kept)
            case Tag.DEFAULT_DICT:
                kept = self._items(rest[1], fqn, depth)
                return kept if kept is _OUT else collections.defaultdict(_FACTORIES_BY_NAME[rest[0]], kept)
            case Tag.OPTIMIZER:
                names, body = rest
                self.parameters[fqn] = [list(map(str, group)) for group in names]
                pairs: Any = cast("dict[Any, Any]", body).items() if isinstance(body, dict) else body
                return self._items(pairs, fqn, depth)
            case Tag.MODULE:
                metadata, body = rest
                pairs: Any = cast("dict[Any, Any]", body).items() if isinstance(body, dict) else body
                kept = self._items(pairs, fqn, depth)
                return kept if kept is _OUT else with_metadata(kept, self._whole.build(metadata, fqn, depth + 1))
            case _:  # a sequence
                maxlen = rest.pop(0) if tag is Tag.DEQUE else None
                if self._stand_for_themselves(rest, depth):
                    items = kept = rest
                else:
                    items = [self.build(item, f"{fqn}.{index}", depth + 1) for index, item in enumerate(rest)]
                    kept = [item for item in items if item is not _OUT]
                if not kept and (items or not self._only(fqn)):
                    return _OUT
                return kept if tag is Tag.LIST else tuple(kept) if tag is Tag.TUPLE else collections.deque(kept, maxlen)

    def _stand_for_themselves(self, nodes: Collection[Any], depth: int) -> bool:
        """Whether a container of nothing but plain values is kept as it is, and none of them needs a look."""
        return self._only is _everything and depth < _MAX_DEPTH and PLAIN.issuperset(map(type, nodes))

    def _kept(self, built: dict[Any, Any], fqn: str) -> Any:
        kept = {key: value for key, value in built.items() if value is not _OUT}
        return kept if kept or (not built and self._only(fqn)) else _OUT

    def _items(self, pairs: list[Any], fqn: str, depth: int) -> Any:
        built: dict[Any, Any] = {}
        if depth < _MAX_DEPTH and self._only is _everything:
            stand = PLAIN
        else:
            stand = frozenset[type]()
        for key_node, item in pairs:
            key = key_node if type(key_node) in stand else self._whole.build(key_node, f"{fqn}.<key>", depth + 1)
            built[key] = item if type(item) in stand else self.build(item, f"{fqn}.{key}", depth + 1)
        return self._kept(built, fqn)

    def _leaf(self, tag: Tag, rest: list[Any], fqn: str, depth: int) -> Any:
        match tag:
            case Tag.TENSOR:
                return self._tensor(self._reference(*rest))
            case Tag.ROWS:
                table, column = map(str, rest)
                return self._tensor(TensorRef(f"{table}.{column}", None, rank=self._rank, table=table))
            case Tag.SPARSE:
                return self._sparse(rest, fqn, depth)
            case Tag.NUMPY_ARRAY:
                value = self._tensor(self._reference(*rest[0][1:], array=True))
                return value.numpy() if isinstance(value, torch.Tensor) else value
            case Tag.NUMPY_FILE:
                return _from_npy(rest[0])
            case Tag.NUMPY_SCALAR:
                import numpy as np

                dtype, content = rest
                if not dtype:
                    return _from_npy(content)[()]
                if not isinstance(dtype, str) or np.dtype(dtype).itemsize != len(content):
                    raise ValueError(f"no NumPy scalar of {dtype!r:.80} has {len(content)} bytes")
                scalar = np.frombuffer(content, dtype=np.dtype(dtype))[0]
                if isinstance(scalar, np.bytes_):  # an element of an array ends before its zeros, a scalar does not
                    return np.bytes_(bytes(content))
                if isinstance(scalar, np.str_):
                    return np.str_(bytes(content).decode("utf-32", "surrogatepass"))
                return scalar
            case Tag.ENUM:
                return self.build(rest[2], fqn, depth + 1)
            case Tag.PICKLE:
                if self._unpickle is None:
                    raise UnsupportedValueError(
                        f"{self._where}: {fqn} was pickled; pass allow_pickle=True if you trust who wrote it"
                    )
                return self._unpickle(rest[0])
            case _:
                return self._plain(tag, rest, fqn, depth)

    def _plain(self, tag: Tag, rest: list[Any], fqn: str, depth: int) -> Any:
        match tag:
            case Tag.INT:
                return int(rest[0], 16)
            case Tag.COMPLEX:
                return complex(*rest)
            case Tag.SET:
                return {self.build(item, fqn, depth + 1) for item in rest}
            case Tag.FROZENSET:
                return frozenset(self.build(item, fqn, depth + 1) for item in rest)
            case Tag.BYTEARRAY:
                return bytearray(memoryview(rest[0]))  # which a number, a request for that many zeros, is not
            case Tag.BYTES_IO:
                stream = io.BytesIO(rest[0])
                stream.seek(rest[1])
                return stream
            case Tag.SIZE:
                return torch.Size(rest)
            case Tag.DTYPE:
                dtype = dtype_from_name(rest[0])
                if dtype is None:
                    raise ValueError(f"this torch has no dtype {rest[0]!r}")
                return dtype
            case Tag.DEVICE:
                return torch.device(str(rest[0]))  # a number would be a device of the accelerator that is here
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

    def _reference(
        self, fqn: Any, carried: str = "", *, sparse_shape: tuple[int, ...] | None = None, array: bool = False
    ) -> TensorRef:
        dtype = dtype_from_name(carried)
        if carried and dtype not in CARRIERS:
            raise ValueError(f"{carried!r} is not a carried dtype")
        return TensorRef(str(fqn), dtype, sparse_shape, array, self._rank)

    def _sparse(self, rest: list[Any], fqn: str, depth: int) -> Any:
        layout, shape, coalesced, nodes = rest
        layout = _LAYOUTS_BY_NAME[layout]
        parts = [self.build(nodes[part.strip("_")], fqn, depth + 1) for part in SPARSE_PARTS[layout]]
        if not all(isinstance(part, torch.Tensor) for part in parts):
            # For a caller without any.
            return self._tensor(self._reference(*nodes["values"][1:], sparse_shape=tuple(shape)))
        if layout is torch.sparse_coo:
            make = cast("Any", torch.sparse_coo_tensor)
            return make(*parts, shape, is_coalesced=coalesced, check_invariants=True)
        make = cast("Any", torch.sparse_compressed_tensor)
        return make(*parts, shape, layout=layout, check_invariants=True)


def _from_npy(data: bytes) -> Any:
    """The array of a .npy file. NumPy takes memory for what a header announces, so that is compared with ``data``."""
    import numpy as np

    stream = io.BytesIO(data)
    major, _ = np.lib.format.read_magic(stream)
    (length,) = struct.unpack("<H", stream.read(2)) if major == 1 else struct.unpack("<I", stream.read(4))
    if length > _MAX_NPY_HEADER_NBYTES:
        raise ValueError(f"a .npy header of {length} bytes")
    header = ast.literal_eval(stream.read(length).decode("latin-1" if major < 3 else "utf-8"))
    nbytes = math.prod(header["shape"]) * np.lib.format.descr_to_dtype(header["descr"]).itemsize
    if nbytes != len(data) - stream.tell():
        raise ValueError(f"a .npy file of {len(data)} bytes for an array of {nbytes}")
    stream.seek(0)
    return np.lib.format.read_array(stream, allow_pickle=False)


def _zoned(value: Any, fold: int, zone: str | None) -> Any:
    return value.replace(fold=fold, tzinfo=value.tzinfo if zone is None else zoneinfo.ZoneInfo(zone))
