"""Completes the state of a target that takes it as a whole, if a partial load leaves parts out.

An optimizer or a scheduler receives one state, and loses everything that is not in it. So parts
that patterns leave out, such as a learning rate, are filled in from its current state, as in plain
data. No live object is changed.
"""

from __future__ import annotations

import copy
import enum
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, cast

import torch

from sidesave.client.reading.stored import SEQUENCES, FlatMap, fqn_of, prefixes
from sidesave.client.targets.live_map import Kind, Slot
from sidesave.stager.state.treespec import Path


class Keep(enum.Enum):
    """Marks values in a flat map that the target keeps."""

    CURRENT = 0


KEEP_CURRENT: Final = Keep.CURRENT
_STRUCTURE: Final = re.compile(r"\.param_groups\.\d+\.params(\.\d+)?")
"""Names the parameters of an optimizer's state, which is meaningless without them."""


def is_structure(slot: Slot, path: Path) -> bool:
    """Whether a state needs its leaf at ``path``, so that a target cannot keep its own leaf."""
    below = "." + fqn_of(path[len(slot.path) :])
    return slot.kind is Kind.OPTIMIZER and _STRUCTURE.fullmatch(below) is not None


def keep_current(
    slot: Slot, saved: FlatMap, leaves_out: Callable[[str], bool]
) -> tuple[FlatMap, list[str]]:
    """The complete state for a target, and the problems that prevent it.

    Args:
        slot: The target.
        saved: What the checkpoint has for it, with ``KEEP_CURRENT`` for what is not loaded.
        leaves_out: Whether patterns leave out a name of the target, so that the target keeps its
            own values there.
    """
    current, numbers = slot.state(), dict[int, int]()
    if slot.kind is Kind.OPTIMIZER:
        own, stored = _numbers(current.nest(slot.path)), _numbers(saved.nest(slot.path))
        if not stored or [*map(len, own)] != [*map(len, stored)]:
            return FlatMap(
                {at: leaf for at, leaf in saved.leaves.items() if leaf is not KEEP_CURRENT},
                saved.containers,
            ), []
        numbers = dict(zip(itertools.chain(*own), itertools.chain(*stored), strict=True))
        current = _renumbered(current, (*slot.path, "state"), numbers)
    chosen = {
        node
        for path, leaf in saved.leaves.items()
        if leaf is not KEEP_CURRENT
        for node in prefixes(path)
    }
    known, below, containers = saved.nodes(), _by_node(current.leaves), _by_node(current.containers)
    stored_numbers, done = {*numbers.values()}, set[Path]()
    given = FlatMap({}, dict(saved.containers))
    problems: list[str] = []
    state = (*slot.path, "state")
    for path, leaf in saved.leaves.items():
        if leaf is not KEEP_CURRENT:
            given.leaves[path] = leaf
            continue
        top = next(node for node in prefixes(path) if node not in chosen)
        if top in done:
            continue
        done.add(top)
        if top in below:
            for at in below[top]:
                given.leaves[at] = _own(current.leaves[at])
            given.containers.update({at: current.containers[at] for at in containers.get(top, ())})
        elif type(saved.containers.get(top[:-1])) in SEQUENCES:
            problems.append(
                f"{fqn_of(top)}: it is left out, and the target has nothing there that could stay"
            )
        elif (
            top[: len(state)] == state
            and len(top) > len(state) + 1
            and top[len(state)] in stored_numbers
        ):
            all_of = fqn_of(top[: len(state) + 1])
            problems.append(
                f"{fqn_of(top)}: it is left out, and the optimizer has none that could stay; leave "
                f"out all of {all_of}"
            )
    for path, leaf in current.leaves.items():
        new = next(
            (node for node in prefixes(path) if node not in known and len(node) > len(slot.path)),
            None,
        )
        if new is None or new[:-1] in saved.leaves or path in given.leaves:
            continue
        if type(saved.containers.get(new[:-1])) not in SEQUENCES and leaves_out(fqn_of(path)):
            given.leaves[path] = _own(leaf)
            given.containers.update(
                {
                    node: current.containers[node]
                    for node in prefixes(path[:-1])
                    if len(node) >= len(new)
                }
            )
    return given, list(dict.fromkeys(problems))


def _by_node(paths: Iterable[Path]) -> dict[Path, list[Path]]:
    """The paths at and below each node."""
    by_node: dict[Path, list[Path]] = {}
    for path in paths:
        for node in prefixes(path):
            by_node.setdefault(node, []).append(path)
    return by_node


def _renumbered(flat: FlatMap, state: Path, numbers: Mapping[int, int]) -> FlatMap:
    """An optimizer's state with the numbers that its parameters have in the checkpoint."""

    def moved(path: Path) -> Path:
        at = len(state)
        if path[:at] != state or len(path) == at:
            return path
        return (*state, numbers.get(path[at], path[at]), *path[at + 1 :])

    return FlatMap(
        {moved(path): leaf for path, leaf in flat.leaves.items()},
        {moved(path): like for path, like in flat.containers.items()},
    )


def _numbers(state: Any) -> list[list[int]]:
    """The parameter numbers in each group of an optimizer's state; empty if it is no such state."""
    groups = cast("dict[str, Any]", state).get("param_groups") if isinstance(state, dict) else None
    parts = cast("list[Any]", groups) if isinstance(groups, list) else []
    numbers = [
        cast("dict[str, Any]", group).get("params") if isinstance(group, dict) else None
        for group in parts
    ]
    is_sound = all(
        type(each) is list and all(type(number) is int for number in each) for each in numbers
    )
    return cast("list[list[int]]", numbers) if is_sound else []


def _own(leaf: Any) -> Any:
    """A leaf that may change without changing the target."""
    return leaf if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)
