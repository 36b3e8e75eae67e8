"""The treespec of a state: the nest, with FQNs for tensors and other values encoded, as msgpack.

Values that msgpack knows (None, bool, 64-bit int, float, str, bytes) stand for themselves; every
other node is a list whose first element is a :class:`~sidesave.stager.state.tags.Tag`. Nothing in
it is pickle unless the checkpoint's writer allowed it, and decoding runs no code.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import msgpack
import torch

from sidesave.errors import IntegrityError, UnsupportedValueError
from sidesave.stager.state.merging import Merger, Partial
from sidesave.stager.state.subclasses import RetypedTensor, object_of
from sidesave.stager.state.tags import (
    FACTORIES,
    MAPPINGS,
    MAX_DEPTH,
    PLAIN,
    Tag,
    container_like,
    is_plain_node,
)
from sidesave.stager.state.tensor_nodes import (
    CompositeSpec,
    TensorRef,
    first_name,
    is_tensor,
    part_names,
    put_together,
)
from sidesave.stager.state.values import value_of
from sidesave.stager.tables import IDS
from sidesave.stager.torch_private import with_metadata

_FACTORIES_BY_NAME: Final = {name: factory for factory, name in FACTORIES.items()}
_MAX_DEPTH: Final = MAX_DEPTH + 5

Path = tuple[Any, ...]
"""The keys to a node; list items have numbers. A module's state is one dict of dotted keys."""


@dataclass(slots=True)
class Leaves:
    """The leaves of a treespec, before they are built.

    Attributes:
        leaves: By path, in the order of the nest: an :class:`Unbuilt`, a value that is encoded as
            itself, an empty container, or plain data that stays whole.
        containers: By path, an example of the kind of each other container; a dict has its keys.
        parameters: The FQNs of the parameters in each group of each optimizer, by the path of the
            optimizer.
        partial: FQNs of items that only some of the ranks merged into the treespec had.
    """

    leaves: dict[Path, Any] = field(default_factory=dict[Path, Any])
    containers: dict[Path, Any] = field(default_factory=dict[Path, Any])
    parameters: dict[Path, list[list[str]]] = field(default_factory=dict[Path, list[list[str]]])
    partial: set[str] = field(default_factory=set[str])

    def names(self) -> dict[Path, str]:
        """The FQN of each leaf."""
        return {
            path: leaf.fqn if type(leaf) is Unbuilt else ".".join(map(str, path))
            for path, leaf in self.leaves.items()
        }


class TreeSpec:
    """A decoded treespec: plain data, and references where tensors go."""

    def __init__(self, data: bytes, where: str, rank: int = 0) -> None:
        """Decode ``data``, ``rank``'s objects file ``where``; ``IntegrityError`` if malformed."""
        self._where = where
        self._rank = rank
        try:
            body = cast(
                "Any",
                msgpack.unpackb(
                    data,
                    raw=False,
                    use_list=True,
                    strict_map_key=True,
                    unicode_errors="surrogatepass",
                ),
            )
        except Exception as error:
            raise IntegrityError(f"{where}: not a treespec: {error}") from error
        if not isinstance(body, dict) or not all(
            isinstance(key, str) for key in cast("dict[Any, Any]", body)
        ):
            raise IntegrityError(f"{where}: a treespec must be a map of names")
        self._body = cast("dict[str, Any]", body)

    def keys(self) -> list[str]:
        """The top-level names."""
        return list(self._body)

    def add(self, other: TreeSpec, is_shared: Callable[[str], bool], *, optimizers: bool) -> None:
        """Add items that only ``other`` has, also those of dicts in both that hold shared tensors.

        A dict without any belongs to its rank, and must not be mixed with that of another.

        Args:
            other: The treespec of another rank.
            is_shared: Whether the tensor of an FQN belongs to all ranks.
            optimizers: Whether this goes for the states of optimizers too, which belong to the
                parameters of their rank: one may have had no gradient there, or no elements
                (FSDP1), and has no state then.

        Raises:
            IntegrityError: ``other`` is malformed.
        """

        def partial(one: TreeSpec) -> Callable[[Any], Partial]:
            return lambda node: (
                node if isinstance(node, Partial) else Partial(node, one._where, one._rank)
            )

        try:
            ours, theirs = (
                {key: (key, node) for key, node in one._body.items()} for one in (self, other)
            )
            merged = Merger(is_shared, partial(other), optimizers=optimizers).items(
                ours, theirs, partial(self), 0
            )
            self._body = dict(merged.values())
        except Exception as error:
            raise IntegrityError(f"{other._where}: not a treespec: {error}") from error

    def differences(
        self, other: TreeSpec, is_shared: Callable[[str], bool]
    ) -> list[tuple[str, bool]]:
        """FQNs of values that two ranks saved differently, and whether each is a number.

        Ignores tensors' bytes. An item that only one of them has counts if it belongs to that rank
        alone: a shared tensor (``is_shared(fqn)``) or a container of one does not count.
        ``IntegrityError`` if one of them is malformed.
        """
        merger = Merger(is_shared, lambda node: Partial(node, other._where, other._rank))
        try:
            return list(merger.differences([Tag.DICT, self._body], [Tag.DICT, other._body], "", 0))
        except Exception as error:
            raise IntegrityError(
                f"{self._where}, {other._where}: not treespecs of one state: {error}"
            ) from error

    def leaves(
        self,
        *,
        unpickle: Callable[[bytes], Any] | None = None,
        apart: Mapping[Path, bool] | None = None,
    ) -> Leaves:
        """Return all leaves by path, in one walk.

        Args:
            unpickle: Returns the value of the pickled bytes in a key.
            apart: The containers to take apart even if all in them is plain data, which otherwise
                is one leaf; if true, this also applies to the containers in them. None is all
                containers.

        Raises:
            IntegrityError: A container is malformed.
            UnsupportedValueError: A key is pickled and there is no ``unpickle``.
        """
        leaves = Leaves()
        builder = _Builder(self._where, self._rank, _no_tensor, unpickle)
        for key, node in self._body.items():
            builder.walk(node, (key,), key, 0, apart, leaves)
        return leaves

    def build(
        self, tensor: Callable[[TensorRef], Any], *, unpickle: Callable[[bytes], Any] | None = None
    ) -> dict[str, Any]:
        """Build the nest.

        Args:
            tensor: Returns the value for a reference.
            unpickle: Returns the value of pickled bytes; ``pickle.loads`` runs code that the
                checkpoint chooses.

        Raises:
            IntegrityError: A node is malformed.
            UnsupportedValueError: A value is pickled and there is no ``unpickle``.
        """
        builder = _Builder(self._where, self._rank, tensor, unpickle)
        return {key: builder.build(node, key, 0) for key, node in self._body.items()}


def _no_tensor(ref: TensorRef) -> Any:
    raise ValueError("a tensor is no key")


def rebuilt(node: Any, tensor: Callable[[TensorRef], Any]) -> Any:
    """The value of a single node; a pickled value is replaced by an object that equals no other."""
    return _Builder("", 0, tensor, lambda data: object()).build(node, "", 0)


@dataclass(slots=True, eq=False)
class Unbuilt:
    """A leaf of a treespec whose value is built only on request."""

    fqn: str
    _where: str
    _rank: int
    _node: list[Any]
    _depth: int

    @property
    def plain_tensor(self) -> TensorRef | None:
        """The reference, if this is a tensor with nothing recorded but its FQN; else None."""
        node = self._node
        return TensorRef(node[1], None, rank=self._rank) if _is_plain_tensor(node) else None

    @property
    def member(self) -> tuple[str, str] | None:
        """The class (``module:qualname``) and name of an enum member; it is built as its value."""
        return (str(self._node[1]), str(self._node[2])) if self._node[0] == Tag.ENUM else None

    @property
    def layout(self) -> str:
        """The layout of a tensor, without ``torch.``."""
        return str(self._node[1]) if self._node[0] == Tag.SPARSE else "strided"

    @property
    def is_ids(self) -> bool:
        """Whether it is the ids of a table, without which its columns have no meaning."""
        return self._node[0] == Tag.ROWS and self._node[-1] == IDS

    def build(
        self, tensor: Callable[[TensorRef], Any], unpickle: Callable[[bytes], Any] | None = None
    ) -> Any:
        """Its value; arguments and errors are those of :meth:`TreeSpec.build`."""
        builder = _Builder(self._where, self._rank, tensor, unpickle)
        return builder.build(self._node, self.fqn, self._depth)


def _is_plain_tensor(node: list[Any]) -> bool:
    return node[0] == Tag.TENSOR and len(node) == 2 and type(node[1]) is str


_CONTAINERS: Final = frozenset((*MAPPINGS, Tag.LIST, Tag.TUPLE, Tag.DEQUE, Tag.TABLE))
_WITH_MAPS: Final = (Tag.OPTIMIZER, Tag.MODULE)
"""Their items may be a map in place of pairs."""


class _Builder:
    def __init__(
        self,
        where: str,
        rank: int,
        tensor: Callable[[TensorRef], Any],
        unpickle: Callable[[bytes], Any] | None,
    ) -> None:
        self._where = where
        self._rank = rank
        self._tensor = tensor
        self._unpickle = unpickle

    def build(self, node: Any, fqn: str, depth: int) -> Any:
        """The value of a node."""
        if type(node) is Partial:
            return self._of(node).build(node.node, fqn, depth)
        try:
            tag = self._tag_of(node, fqn, depth)
            if tag is None:
                return node
            if tag not in _CONTAINERS:
                return self._leaf(tag, node[1:], fqn, depth)
            like, keys, nodes, _ = self._items(tag, node[1:], fqn, depth)
            if depth < _MAX_DEPTH and PLAIN.issuperset(map(type, nodes)):
                return container_like(like, keys, nodes)
            each = zip(keys, nodes, strict=True)
            return container_like(
                like, keys, [self.build(item, f"{fqn}.{key!s}", depth + 1) for key, item in each]
            )
        except (IntegrityError, UnsupportedValueError):
            raise
        except Exception as error:
            raise IntegrityError(f"{self._where}: {fqn} is malformed: {error}") from error

    def walk(
        self,
        node: Any,
        path: Path,
        fqn: str,
        depth: int,
        apart: Mapping[Path, bool] | None,
        into: Leaves,
    ) -> None:
        """Put the leaves of a node, and its containers, into ``into``."""
        if type(node) is Partial:
            into.partial.add(fqn)
            self._of(node).walk(node.node, path, fqn, depth, apart, into)
            return
        try:
            tag = self._tag_of(node, fqn, depth)
            if tag is None or tag not in _CONTAINERS:
                into.leaves[path] = (
                    node if tag is None else Unbuilt(fqn, self._where, self._rank, node, depth)
                )
                return
            like, keys, nodes, parameters = self._items(tag, node[1:], fqn, depth)
            if parameters is not None:
                into.parameters[path] = parameters
            if not nodes or (
                apart is not None and path not in apart and is_plain_node(node, depth)
            ):
                into.leaves[path] = self.build(node, fqn, depth)
                return
            into.containers[path] = like
            below = None if apart is not None and apart.get(path) else apart
            if isinstance(like, dict):
                # of two equal keys the last one counts
                pairs = dict(zip(keys, nodes, strict=True)).items()
                like.update(dict.fromkeys(keys))
            else:
                pairs = zip(keys, nodes, strict=True)
            for key, item in pairs:
                at, name = (*path, key), f"{fqn}.{key!s}"
                # as most are
                if depth < _MAX_DEPTH and type(item) is list and item and item[0] == Tag.TENSOR:
                    into.leaves[at] = Unbuilt(
                        name, self._where, self._rank, cast("list[Any]", item), depth + 1
                    )
                else:
                    self.walk(item, at, name, depth + 1, below, into)
        except (IntegrityError, UnsupportedValueError):
            raise
        except Exception as error:
            raise IntegrityError(f"{self._where}: {fqn} is malformed: {error}") from error

    def _of(self, part: Partial) -> _Builder:
        return _Builder(part.where, part.rank, self._tensor, self._unpickle)

    def _tag_of(self, node: Any, fqn: str, depth: int) -> Tag | None:
        """The tag of a node; None if it is encoded as itself."""
        if depth > _MAX_DEPTH:
            raise IntegrityError(f"{self._where}: {fqn} is nested too deep")
        if isinstance(node, list):
            return Tag(cast("list[Any]", node)[0])
        if type(node) not in PLAIN:
            raise IntegrityError(f"{self._where}: {fqn} is malformed")
        return None

    def _items(
        self, tag: Tag, rest: list[Any], fqn: str, depth: int
    ) -> tuple[Any, Collection[Any], Collection[Any], list[list[str]] | None]:
        """An empty container of a node's kind, its keys, items, and an optimizer's parameters."""
        like: Any = {}
        parameters: list[list[str]] | None = None
        match tag:
            case Tag.LIST | Tag.TUPLE | Tag.DEQUE:
                if tag is Tag.DEQUE:
                    return collections.deque[Any]((), rest[0]), range(len(rest) - 1), rest[1:], None
                return [] if tag is Tag.LIST else (), range(len(rest)), rest, None
            case Tag.DICT | Tag.TABLE:
                body = cast("dict[str, Any]", rest[0])
                return like, [*map(str, body)], body.values(), None
            case Tag.ORDERED_DICT:
                like = collections.OrderedDict[Any, Any]()
            case Tag.COUNTER:
                like = collections.Counter[Any]()
            case Tag.DEFAULT_DICT:
                like = collections.defaultdict[Any, Any](_FACTORIES_BY_NAME[rest[0]])
            case Tag.OPTIMIZER:
                parameters = [list(map(str, group)) for group in rest[0]]
            case Tag.MODULE:
                like = with_metadata({}, self.build(rest[0], fqn, depth + 1))
            case _:
                pass
        body = rest[-1]
        pairs: Any = (
            cast("dict[Any, Any]", body).items()
            if tag in _WITH_MAPS and isinstance(body, dict)
            else body
        )
        stand = PLAIN if depth < _MAX_DEPTH else frozenset[type]()
        keys: list[Any] = []
        nodes: list[Any] = []
        for key, item in pairs:
            keys.append(key if type(key) in stand else self.build(key, f"{fqn}.<key>", depth + 1))
            nodes.append(item)
        return like, keys, nodes, parameters

    def _leaf(self, tag: Tag, rest: list[Any], fqn: str, depth: int) -> Any:
        match tag:
            case Tag.TENSOR:
                return self._tensor(TensorRef.of(self._rank, *rest))
            case Tag.PLACED:
                return self._tensor(TensorRef.placed_of(self._rank, *rest))
            case Tag.ROWS:
                table, column = map(str, rest)
                return self._tensor(
                    TensorRef(f"{table}.{column}", None, rank=self._rank, table=table)
                )
            case Tag.SPARSE | Tag.NESTED | Tag.QUANTIZED | Tag.SUBCLASS:
                return self._composite(tag, rest, fqn, depth)
            case Tag.RENAMED:
                kind, value = str(rest[0]), self.build(rest[1], fqn, depth + 1)
                if is_tensor(value):
                    return RetypedTensor(kind, value)
                spec = CompositeSpec(kind, is_renamed=True)
                return self._tensor(TensorRef(first_name(rest[1]), None, spec, rank=self._rank))
            case Tag.OBJECT:
                kind, fields = str(rest[0]), rest[1]
                if isinstance(fields, dict):
                    parts = cast("dict[str, Any]", fields).items()
                    fields = {
                        name: self.build(node, f"{fqn}.{name}", depth + 1) for name, node in parts
                    }
                return object_of(kind, fields)
            case Tag.NUMPY_ARRAY:
                value = self._tensor(TensorRef.of(self._rank, *rest[0][1:], array=True))
                return value.numpy() if isinstance(value, torch.Tensor) else value
            case Tag.ENUM:
                return self.build(rest[2], fqn, depth + 1)
            case Tag.PICKLE:
                if self._unpickle is None:
                    raise UnsupportedValueError(
                        f"{self._where}: {fqn} was pickled; pass allow_pickle=True if you trust "
                        "who wrote it"
                    )
                return self._unpickle(rest[0])
            case _:
                return value_of(tag, rest, lambda node: self.build(node, fqn, depth + 1))

    def _composite(self, tag: Tag, rest: list[Any], fqn: str, depth: int) -> Any:
        """A tensor made of inner tensors, or a description of it for callers without tensors."""
        *about, nodes = rest
        parts = {
            name: self.build(nodes[name], f"{fqn}.{name}", depth + 1)
            for name in part_names(tag, about, nodes)
        }
        spec = CompositeSpec.of(
            tag, about, list(parts), lambda: self.build(about[-1], f"{fqn}.<context>", depth + 1)
        )
        if parts and all(map(is_tensor, parts.values())):
            return put_together(tag, about, parts, spec)
        return self._tensor(TensorRef(first_name([tag, nodes]), None, spec, rank=self._rank))
