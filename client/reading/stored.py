"""The contents of a checkpoint: tensors by name, leaves by path, and the interface of readers."""

from __future__ import annotations

import collections
import math
import pickle
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, cast

import torch

from sidesave.stager.state.tags import PLAIN, container_like
from sidesave.stager.state.tensor_nodes import TensorRef
from sidesave.stager.state.treespec import Path, TreeSpec, Unbuilt
from sidesave.writer_daemon.format.layout import ELSEWHERE, Box, Layout

Wanted = tuple[str, Box | None]
"""A tensor by its name, and a box of it; None is all of it."""

OWN: Final = re.compile(r"(.+)@rank-(\d{5,})", re.DOTALL)
"""The name of a tensor that belongs to one rank alone: its FQN, and the rank."""


def own_name(fqn: str, rank: int) -> str:
    """The name of a tensor that belongs to one rank alone."""
    return f"{fqn}@rank-{rank:05d}"


def without_rank(name: str) -> str:
    """The FQN in a tensor's name, which may have a rank at the end."""
    match = OWN.fullmatch(name)
    return match[1] if match else name


class StoredTensor(NamedTuple):
    """A tensor as it is stored: its key in files, and the ranks that hold its cells.

    A dtype that safetensors lacks is stored as another one, complex numbers with a last dimension
    of 2: see :mod:`sidesave.stager.dtypes`.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Layout

    @property
    def is_in_one_place(self) -> bool:
        """Whether it has bytes, and all of them are in one cell that this node has."""
        layout = self.layout
        return layout.cuts is None and layout.owners[0] != ELSEWHERE and 0 not in self.shape

    @property
    def nbytes(self) -> int:
        """Bytes of all its cells."""
        return math.prod(self.shape) * self.dtype.itemsize


class Reader(Protocol):
    """The reader interface; :class:`~.checkpoint_reader.CheckpointReader` documents its methods."""

    path: str
    rank: int
    treespec: TreeSpec
    nbytes_read: int

    @property
    def resized(self) -> bool:
        """Whether another number of ranks loads it than saved it."""
        ...

    @property
    def has_differing(self) -> bool:
        """Whether there can be tensors that differ between ranks."""
        ...

    def differing(self, fqn: str) -> tuple[int, ...]:
        """The ranks that saved a tensor, if it differs between them and none is this rank."""
        ...

    def name_of(self, ref: TensorRef) -> str:
        """The name of a tensor that :attr:`treespec` refers to."""
        ...

    def entry(self, name: str) -> StoredTensor:
        """Stored dtype, global shape and size of a tensor."""
        ...

    def read_boxes(
        self, wanted: Iterable[Wanted], *, verify: bool = True
    ) -> dict[Wanted, torch.Tensor]:
        """Read boxes of tensors into fresh host memory."""
        ...


# Leaves by path -----------------------------------------------------------------------------------

DICTS: Final = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
SEQUENCES: Final = (list, tuple, collections.deque)


def fqn_of(path: Path) -> str:
    """The dotted name of a path."""
    return ".".join(map(str, path))


def prefixes(path: Path) -> list[Path]:
    """The nodes that lead to a path, outermost first, the path itself last."""
    return [path[:end] for end in range(1, len(path) + 1)]


def children(node: Any) -> Iterable[tuple[Any, Any]]:
    """Keys and values of a container; nothing for a leaf."""
    if type(node) in DICTS:
        return cast("dict[Any, Any]", node).items()
    return enumerate(cast("list[Any]", node)) if type(node) in SEQUENCES else ()


def is_plain(node: Any) -> bool:
    """Whether a value is plain data, including everything in it."""
    if type(node) in DICTS:
        items = cast("dict[Any, Any]", node)
        return PLAIN.issuperset(map(type, items)) and is_plain([*items.values()])
    if type(node) not in SEQUENCES:
        return type(node) in PLAIN
    items = cast("list[Any]", node)
    return PLAIN.issuperset(map(type, items)) or all(map(is_plain, items))


@dataclass(slots=True)
class FlatMap:
    """A nest, flattened.

    Attributes:
        leaves: By path, in the order of the nest: values that are no container, empty containers,
            and plain data that stays whole.
        containers: By path, an example of the kind of each non-empty container.
    """

    leaves: dict[Path, Any] = field(default_factory=dict[Path, Any])
    containers: dict[Path, Any] = field(default_factory=dict[Path, Any])

    @classmethod
    def of(cls, nest: Any, path: Path = ()) -> FlatMap:
        """Flatten ``nest``, which is at ``path``."""
        flat = cls()
        flat._add(nest, path)
        return flat

    def _add(self, node: Any, path: Path) -> None:
        below = children(node)
        if not below or not node:
            self.leaves[path] = node
            return
        self.containers[path] = node
        for key, item in below:
            self._add(item, (*path, key))

    def parts(self, paths: Iterable[Path]) -> dict[Path, FlatMap]:
        """The parts at and below several paths, in one pass; no path may be below another."""
        parts = {path: FlatMap() for path in paths}
        nodes: dict[Path, FlatMap | None] = {(): None, **parts}

        def part_of(node: Path) -> FlatMap | None:
            if node not in nodes:
                nodes[node] = part_of(node[:-1])
            return nodes[node]

        for path, leaf in self.leaves.items() if parts else ():
            part = nodes[path] if path in nodes else part_of(path[:-1])
            if part is not None:
                part.leaves[path] = leaf
        for path, like in self.containers.items() if parts else ():
            part = part_of(path)
            if part is not None:
                part.containers[path] = like
        return parts

    def replace(self, part: FlatMap, replacement: FlatMap) -> None:
        """Put another part in the place of one of :meth:`parts`."""
        for path in part.leaves:
            del self.leaves[path]
        self.leaves.update(replacement.leaves)
        self.containers.update(replacement.containers)

    def nodes(self) -> dict[Path, None]:
        """The paths of all leaves and of their containers."""
        return {node: None for path in self.leaves for node in prefixes(path)}

    def nest(self, path: Path = ()) -> Any:
        """The nest at ``path``, in new containers. A sequence with missing items closes up."""
        if path in self.leaves:
            return self.leaves[path]
        root: dict[Any, Any] = _Items()
        nodes: dict[Path, dict[Any, Any]] = {path: root}

        def node_at(at: Path) -> dict[Any, Any]:
            if at not in nodes:
                nodes[at] = node_at(at[:-1])[at[-1]] = _Items()
            return nodes[at]

        for at, leaf in self.leaves.items():
            if at[: len(path)] == path:
                node_at(at[:-1])[at[-1]] = leaf
                if at in nodes:  # a later source has a leaf in the place of a container
                    nodes = {node: items for node, items in nodes.items() if node[: len(at)] != at}
        return self._made(root, path)

    def _made(self, items: dict[Any, Any], path: Path) -> Any:
        made: dict[Any, Any] = {}
        for key, item in items.items():
            value = self._made(item, (*path, key)) if type(item) is _Items else item
            made[key if type(key) in (str, int) else unpickled(key)] = value
        like: Any = self.containers.get(path)
        # a new name may be none
        if type(like) in SEQUENCES and all(type(index) is int for index in made):
            made = {index: made[index] for index in sorted(made)}
        elif type(like) not in DICTS:
            return made
        return container_like(like, made.keys(), made.values())


class _Items(dict[Any, Any]):
    """A container in the making."""


def built(
    treespec: TreeSpec,
    tensor: Callable[[TensorRef], Any],
    unpickle: Callable[[bytes], Any] | None,
    selected: Callable[[str], bool],
) -> Any:
    """The nest of leaves with ``selected`` FQNs; other arguments are as in ``TreeSpec.build``."""
    every = treespec.leaves(unpickle=unpickle)
    names = every.names()
    leaves = {path: leaf for path, leaf in every.leaves.items() if selected(names[path])}
    for path, leaf in leaves.items():
        if type(leaf) is Unbuilt:
            leaves[path] = leaf.build(tensor, unpickle)
    return FlatMap(leaves, every.containers).nest()


class Pickled:
    """Stands for a pickled value while only names and shapes matter."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __repr__(self) -> str:
        return "<pickled>"


def unpickled(value: Any) -> Any:
    """A key or a set with its pickled values unpickled."""
    if type(value) is Pickled:
        return pickle.loads(value.data)
    if type(value) in (tuple, set, frozenset):
        parts = cast("tuple[Any, ...]", value)
        return type(parts)(map(unpickled, parts))
    return value
