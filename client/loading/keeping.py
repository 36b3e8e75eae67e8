"""What stays of a target that takes its state whole, where only a part of that is loaded.

An optimizer or a scheduler is given one state, and what is not in it is lost. So what patterns leave out of it, such as
a learning rate, is put there as the object has it now; so it is with plain data. Nothing is read, nothing live touched.
"""

from __future__ import annotations

import copy
import enum
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import torch

from sidesave.client.loading.flat import SEQUENCES, FlatMap, Path, Slot, fqn_of, prefixes


class Keep(enum.Enum):
    """Stands in a flat map for what is to be as the target has it."""

    CURRENT = 0


KEEP_CURRENT: Final = Keep.CURRENT
_STRUCTURE: Final = re.compile(r"\.param_groups\.\d+\.params(\.\d+)?")
"""Which parameters the state of an optimizer is of: no state without it."""


def is_structure(slot: Slot, path: Path) -> bool:
    """Whether a state makes no sense without the leaf at ``path``, which is not the target's to keep."""
    below = "." + fqn_of(path[len(slot.path) :])
    return isinstance(slot.target, torch.optim.Optimizer) and _STRUCTURE.fullmatch(below) is not None


def keep_current(slot: Slot, saved: FlatMap, leaves_out: Callable[[str], bool]) -> tuple[FlatMap, list[str]]:
    """What a target is given, and what stands in the way of it.

    Args:
        slot: The target.
        saved: What the checkpoint has for it, with ``KEEP_CURRENT`` for what is not loaded.
        leaves_out: Tells so of names of the target: what only the target has stays too, if it is.
    """
    current, numbers = slot.state(), dict[int, int]()
    if isinstance(slot.target, torch.optim.Optimizer):
        here, there = _numbers(current.nest(slot.path)), _numbers(saved.nest(slot.path))
        if not there or [*map(len, here)] != [*map(len, there)]:
            return FlatMap(
                {at: leaf for at, leaf in saved.leaves.items() if leaf is not KEEP_CURRENT}, saved.containers
            ), []
        numbers = dict(zip(itertools.chain(*here), itertools.chain(*there), strict=True))
        current = _renumbered(current, (*slot.path, "state"), numbers)
    chosen = {node for path, leaf in saved.leaves.items() if leaf is not KEEP_CURRENT for node in prefixes(path)}
    known, below = saved.nodes(), _by_node(current)
    found = FlatMap({}, dict(saved.containers))
    problems: list[str] = []
    state = (*slot.path, "state")
    for path, leaf in saved.leaves.items():
        if leaf is not KEEP_CURRENT:
            found.leaves[path] = leaf
            continue
        top = next(node for node in prefixes(path) if node not in chosen)
        if top in below:
            for at in below[top]:
                found.leaves[at] = _own(current.leaves[at])
            found.containers |= {at: like for at, like in current.containers.items() if at[: len(top)] == top}
        elif type(saved.containers.get(top[:-1])) in SEQUENCES:
            problems.append(f"{fqn_of(top)}: it is left out, and the target has nothing there that could stay")
        elif top[: len(state)] == state and len(top) > len(state) + 1 and top[len(state)] in numbers.values():
            all_of = fqn_of(top[: len(state) + 1])
            problems.append(
                f"{fqn_of(top)}: it is left out, and the optimizer has none that could stay; leave out all of {all_of}"
            )
    for path, leaf in current.leaves.items():
        new = next((node for node in prefixes(path) if node not in known and len(node) > len(slot.path)), None)
        if new is None or new[:-1] in saved.leaves or path in found.leaves:
            continue
        if type(saved.containers.get(new[:-1])) not in SEQUENCES and leaves_out(fqn_of(path)):
            found.leaves[path] = _own(leaf)
            found.containers |= {
                node: current.containers[node] for node in prefixes(path[:-1]) if len(node) >= len(new)
            }
    return found, list(dict.fromkeys(problems))


def _by_node(flat: FlatMap) -> dict[Path, list[Path]]:
    """The leaves at and below each node."""
    found: dict[Path, list[Path]] = {}
    for path in flat.leaves:
        for node in prefixes(path):
            found.setdefault(node, []).append(path)
    return found


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
    """The numbers of the parameters in each group of an optimizer's state; none, where it is no such state."""
    groups = cast("dict[str, Any]", state).get("param_groups") if isinstance(state, dict) else None
    parts = cast("list[Any]", groups) if isinstance(groups, list) else []
    found = [cast("dict[str, Any]", group).get("params") if isinstance(group, dict) else None for group in parts]
    is_sound = all(type(each) is list and all(type(number) is int for number in each) for each in found)
    return cast("list[list[int]]", found) if is_sound else []


def _own(leaf: Any) -> Any:
    """A leaf that may be changed without the target being touched."""
    return leaf if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)
