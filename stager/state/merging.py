"""Merging and comparing the treespecs of several ranks, node by node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from sidesave.stager.data_parallel import DIVIDED
from sidesave.stager.state.tags import MAPPINGS, MAX_DEPTH, Tag, pack

_Items = dict[Any, tuple[Any, Any]]
"""Key node and node of each item, by an identifier of the key."""


@dataclass(frozen=True, slots=True)
class Partial:
    """A node that only some of several treespecs have; it is taken from the one of ``rank``."""

    node: Any
    where: str
    rank: int


class Merger:
    """Merges or compares two treespecs' nodes; see ``TreeSpec.add``, ``TreeSpec.differences``."""

    def __init__(
        self,
        is_shared: Callable[[str], bool],
        theirs: Callable[[Any], Partial],
        *,
        optimizers: bool = True,
    ) -> None:
        """Create a merger.

        ``is_shared`` says whether the tensor of an FQN is shared, ``theirs`` marks a node. If
        ``optimizers`` is false, optimizers in both stay as in the first, except states divided
        among ranks.
        """
        self._is_shared = is_shared
        self._theirs = theirs
        self._optimizers = optimizers

    def items(
        self, ours: _Items, theirs: _Items, mark: Callable[[Any], Partial], depth: int
    ) -> _Items:
        """All items of two dicts; ``mark`` marks the items that only the first has."""
        merged = {
            name: (
                key,
                self._node(node, theirs[name][1], mark, depth) if name in theirs else mark(node),
            )
            for name, (key, node) in ours.items()
        }
        added = {
            name: (key, self._theirs(node))
            for name, (key, node) in theirs.items()
            if name not in ours
        }
        return merged | added

    def _node(self, first: Any, second: Any, mark: Callable[[Any], Partial], depth: int) -> Any:
        """The first node; if both are dicts, with the items that only the second has."""
        if isinstance(first, Partial):
            where, rank = first.where, first.rank
            merged = self._node(first.node, second, lambda node: Partial(node, where, rank), depth)
            return Partial(merged, where, rank)
        ours, theirs = _items_of(first), _items_of(second)
        if ours is None or theirs is None or depth > MAX_DEPTH or not self._holds_shared(second):
            return first
        if ours.keys() >= {"state", "param_groups"}:
            # Numbers stand for parameters, whose names precede the body; pipeline stages have
            # different ones.
            is_one = self._optimizers or DIVIDED in ours
            if not is_one or first[:-1] != second[:-1]:
                return first
        pairs = list(self.items(ours, theirs, mark, depth + 1).values())
        tag, *about, _ = cast("list[Any]", first)
        if tag == Tag.DICT and all(isinstance(key, str) for key, _ in pairs):
            return [tag, dict(pairs)]
        return [Tag.ITEMS if tag == Tag.DICT else tag, *about, pairs]

    def differences(
        self, first: Any, second: Any, fqn: str, depth: int
    ) -> Iterator[tuple[str, bool]]:
        """Yield differences of two nodes, down to the leaves of dicts and of equally long lists."""
        if depth > MAX_DEPTH + 5:
            raise ValueError(f"{fqn} is nested too deep")
        if pack(first) == pack(second):
            return
        ours, theirs = _items_of(first), _items_of(second)
        if ours is not None and theirs is not None:
            for name, (key, node) in {**theirs, **ours}.items():
                below = f"{fqn}.{key}" if fqn else str(key)
                if name in ours and name in theirs:
                    yield from self.differences(node, theirs[name][1], below, depth + 1)
                elif not self._holds_shared(node):
                    yield below, _is_number(node)
        elif _is_sequence(first) and _is_sequence(second) and len(first) == len(second):
            for index, (one, other) in enumerate(zip(first[1:], second[1:], strict=True)):
                yield from self.differences(one, other, f"{fqn}.{index}", depth + 1)
        else:
            yield fqn, _is_number(first) and _is_number(second)

    def _holds_shared(self, node: Any) -> bool:
        if isinstance(node, dict):  # the parts of a sparse tensor
            return any(map(self._holds_shared, cast("dict[str, Any]", node).values()))
        items = _items_of(node)
        if items is not None:
            return any(self._holds_shared(item) for _, item in items.values())
        tag, *parts = cast("list[Any]", node) if isinstance(node, list) and node else [None]
        if tag == Tag.TENSOR and parts:
            return self._is_shared(str(parts[0]))
        return any(map(self._holds_shared, parts))


def _is_sequence(node: Any) -> bool:
    return (
        isinstance(node, list)
        and len(cast("list[Any]", node)) > 1
        and node[0] in (Tag.LIST, Tag.TUPLE)
    )


def _is_number(node: Any) -> bool:
    if isinstance(node, list):
        tag, *parts = cast("list[Any]", node) or [None]
        if tag == Tag.ENUM:
            return _is_number(parts[-1])
        return tag in (Tag.INT, Tag.COMPLEX) or (
            tag == Tag.NUMPY_SCALAR and parts[0][1:2] in tuple("biufc")
        )
    return isinstance(node, (bool, int, float))


def _items_of(node: Any) -> _Items | None:
    """The items of a dict's node; None for any other node."""
    parts = cast("list[Any]", node) if isinstance(node, list) else []
    if len(parts) < 2 or parts[0] not in MAPPINGS:
        return None
    body = parts[-1]
    pairs: Any = cast("dict[Any, Any]", body).items() if isinstance(body, dict) else body
    return {key if isinstance(key, str) else pack(key): (key, item) for key, item in pairs}
