"""Plans which leaves of one or several checkpoints a live state receives; collects mismatches."""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from sidesave.client.loading import optimizer_fitting
from sidesave.client.loading.fitting import (
    Mismatches,
    PrefixMismatch,
    column_problem,
    conflicts,
    follow,
    is_left_out,
    is_tensor,
    may_be_missing,
    plain_problem,
    table_problems,
    tensor_problem,
)
from sidesave.client.loading.selection import Selection
from sidesave.client.loading.tensors import EnumLoad, TensorLoad, note_classes
from sidesave.client.reading.stored import (
    DICTS,
    SEQUENCES,
    FlatMap,
    Pickled,
    fqn_of,
    prefixes,
    unpickled,
)
from sidesave.client.targets import tensor_memory
from sidesave.client.targets.assign import Assignment
from sidesave.client.targets.live_map import OBJECTS, WHOLE, Kind, LiveMap, Slot
from sidesave.client.targets.shards import Local, may_be_spread
from sidesave.errors import StateMismatchError
from sidesave.stager.state.subclasses import kind_name
from sidesave.stager.state.treespec import Path, with_metadata


class LoadPlan:
    """The assignment of checkpoints' leaves to a live state.

    Attributes:
        live: The state.
        given: The leaves for each slot that receives some.
        containers: The checkpoint's containers of these leaves.
        new: Slots for plain data that only a checkpoint has, in dicts of live objects.
        mismatches: The differences.
    """

    def __init__(self, live: LiveMap, *, casts: bool = False) -> None:
        """With ``casts``, a tensor may have another floating-point dtype than its target."""
        self.live = live
        self._casts = casts
        self.given: dict[Path, dict[Path, Any]] = {}
        self.containers: dict[Path, Any] = {}
        self.new: dict[Path, Slot] = {}
        self.mismatches = Mismatches()
        self._nodes = dict.fromkeys((*live.containers, *live.slots))  # each after its parents
        self._clashes: dict[Path, Any] = {}
        self._partial: set[str] = set()
        self._whole: set[Path] = set()
        self._items: dict[Path, set[Any]] = {}
        self._there: set[Path] = set()
        self._slots_below: dict[Path, list[Slot]] = {}

    def take(self, selection: Selection, *, tie: bool = False) -> Mismatches:
        """Take the leaves that have a place, over those of earlier checkpoints; return the others.

        With ``tie``, all names that share a tensor of a module are given what one of them is given.
        """
        slots = self.live.slots
        both = sorted(slots[path].fqn for path in selection.incomplete & self._whole)
        if both:
            raise StateMismatchError(
                f"{selection.where} has a part of {both[0]}, which takes its state whole and has "
                "one of an earlier source; nothing was loaded. Take it from one of them: exclude "
                "it from the other"
            )
        self._whole |= selection.given
        self._partial.update(selection.partial)
        self._take_containers(selection.flat.containers)
        given, others = dict[Path, dict[Path, Any]](), dict[Path, dict[Path, Any]]()
        items: dict[Path, set[Any]] = {}
        parents = dict[Path, set[Any] | None]()  # the items of those that are sequences
        self._there.update(selection.flat.leaves)
        for path, leaf in selection.flat.leaves.items():
            parent = path[:-1]
            if parent not in parents:
                parents[parent] = self._take_parents(parent, items)
            if (listed := parents[parent]) is not None:
                listed.add(path[-1])
            slot = self.live.slot(path)
            if slot is not None:
                given.setdefault(slot.path, {})[path] = leaf
            elif path in self._nodes:
                self._clashes[path] = leaf
            else:
                node = next(node for node in prefixes(path) if node not in self._nodes)
                others.setdefault(node, {})[path] = leaf
        self._items |= items
        if tie:
            self._tie(given)
        unplaced = self._unplaced(others, given)
        self._refuse_two_tables(selection, given)
        for path, leaves in given.items():
            if not _is_empty(leaves.get(path)):
                unplaced.placed.add(slots[path].fqn)
            earlier = self.given.get(path) if slots[path].kind is Kind.PLAIN else None
            if earlier is not None and selection.kept:  # plain data, partly selected by a pattern
                parts = [FlatMap.of(leaf, at) for at, leaf in earlier.items()]
                earlier = {at: leaf for part in parts for at, leaf in part.leaves.items()}
                for part in parts:
                    self.containers = part.containers | self.containers
                leaves = earlier | {
                    at: leaf for at, leaf in leaves.items() if at not in selection.kept
                }
            self.given[path] = leaves
        unplaced.unexpected += selection.mismatches.unexpected
        replaced = tuple(
            f"{slots[path].fqn}[" for path in selection.given
        )  # optimizers that an earlier source had, too
        for names, more in (
            (self.mismatches.missing, selection.mismatches.missing),
            (self.mismatches.kept, selection.mismatches.kept),
        ):
            names[:] = [*(name for name in names if not name.startswith(replaced)), *more]
        return unplaced

    def _take_parents(self, parent: Path, items: dict[Path, set[Any]]) -> set[Any] | None:
        """Note the containers of a leaf as given, and the items of sequences.

        Returns the items of its parent, if that is a sequence.
        """
        for end in range(1, len(parent) + 1):
            node = parent[:end]
            self._there.add(node)
            self._clashes.pop(node, None)
            if type(self.live.containers.get(node)) in SEQUENCES:
                items.setdefault(node, set()).update(parent[end : end + 1])
        return items.get(parent)

    def _refuse_two_tables(self, selection: Selection, given: Iterable[Path]) -> None:
        """Raise if an earlier source gave other table columns: two sources' rows do not mix."""
        columns: dict[Path, tuple[set[Path], set[Path]]] = {}
        for number, paths in enumerate((self.given, given)):
            for path in paths:
                if path[:-1] in self.live.tables:
                    columns.setdefault(path[:-1], (set(), set()))[number].add(path)
        for table, (before, now) in columns.items():
            if before and now and before != now:
                raise StateMismatchError(
                    f"{selection.where} has other columns of the table {fqn_of(table)} than an "
                    "earlier source; nothing was loaded. Take it from one of them: exclude it from "
                    "the other"
                )

    def has(self, name: str) -> bool:
        """Whether an item is given anything."""
        leaves = (leaves.get(path) for path, leaves in self.given.items() if path[0] == name)
        return not all(map(_is_empty, leaves))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is given."""
        return not self.given and not self._clashes

    def _take_containers(self, containers: Mapping[Path, Any]) -> None:
        for path, like in containers.items():
            metadata = getattr(self.containers.get(path), "_metadata", None)
            if metadata is not None and getattr(like, "_metadata", None) is not None:
                like = with_metadata({}, {**metadata, **like._metadata})
            self.containers[path] = like

    def _unplaced(
        self, others: Mapping[Path, dict[Path, Any]], given: Iterable[Path]
    ) -> Mismatches:
        """The leaves without a place.

        Plain data next to live objects is added, and values of only some ranks need no place.
        """
        unplaced = Mismatches()
        by_parent: dict[Path, list[Path]] = {}
        for node, leaves in others.items():
            parent = self.live.containers.get(node[:-1])
            fqn = fqn_of(node)
            if type(parent) in SEQUENCES:
                continue  # of another length, which _is_broken reports
            if fqn in self._partial:
                continue
            if not isinstance(parent, nn.Module) and not any(map(is_tensor, leaves.values())):
                self.new[node] = Slot(node, fqn, None)
                self.given[node] = leaves
                unplaced.placed.add(fqn)
                continue
            unplaced.unexpected.append(fqn)
            by_parent.setdefault(node[:-1], []).append(node)
        nodes = {node for path in given for node in prefixes(path)} if by_parent else set[Path]()
        own_children: dict[Path, list[Path]] = {}
        for node in self._nodes if by_parent else ():
            own_children.setdefault(node[:-1], []).append(node)
        for parent, odd in by_parent.items():
            wanted = own_children.get(parent, [])
            fit = sum(node in nodes for node in wanted)
            if 10 * fit < len(wanted) > 1:
                keys = [[str(node[-1]) for node in each] for each in (wanted, odd)]
                unplaced.prefixes.append(PrefixMismatch(fqn_of(parent), keys[0], fit, keys[1]))
        return unplaced

    # What does not fit ----------------------------------------------------------------------------

    def compare(self, leaves_out: Callable[[str], bool]) -> None:
        """Note all that differs, and shard tensors as their targets are."""
        for path, leaf in self._clashes.items():
            if type(self.live.containers[path]) not in SEQUENCES and not _is_empty(leaf):
                self.mismatches.different.append(
                    f"{fqn_of(path)}: the checkpoint holds a {type(leaf).__name__} here, not a set "
                    "of named values"
                )
        broken = {path for path in self.live.containers if self._is_broken(path)}
        present = self._there.union(self.given)
        gone = set[Path]()
        for node in self._nodes:
            if (gone or broken) and (node[:-1] in gone or node[:-1] in broken or node in broken):
                gone.add(node)
            elif node not in present:
                gone.add(node)
                if node[:-1] not in self._clashes or _is_empty(self._clashes[node[:-1]]):
                    self._miss(node, leaves_out)
        if self.mismatches.missing:
            absent = set(self.mismatches.absent)
            names = (fqn_of(node) for node in self._nodes if len(node) > 1)
            self.mismatches.placed = {fqn for fqn in names if fqn not in absent}
        for path in list(self.given):
            slot = self.live.slots.get(path)
            if slot is not None and path not in gone:
                self._compare(slot, self.given[path])
        if self.live.tables:
            self.mismatches.different += table_problems(self.given, self.live.tables)
        targets = [(slot.fqn, slot.target) for path, slot in self._tensors() if path in self.given]
        self.mismatches.different += [
            f"{name}: the target is in memory that is mapped read-only; clone it"
            for name in tensor_memory.read_only(targets)
        ]

    def _is_broken(self, path: Path) -> bool:
        """Note and return whether a live sequence receives other items, or more or fewer."""
        around, items = self.live.containers[path], self._items.get(path, set())
        if type(around) not in SEQUENCES or path not in self._there:
            return False
        broken = type(self.containers.get(path)) not in SEQUENCES or items != {*range(len(around))}
        if broken:
            self.mismatches.different.append(
                f"{fqn_of(path)}: the checkpoint does not hold {len(around)} items here, as the "
                "target does"
            )
        return broken

    def _miss(self, node: Path, leaves_out: Callable[[str], bool]) -> None:
        fqn = fqn_of(node)
        slots = self.live.slots
        if node not in slots and not self._slots_below:
            for at, slot in slots.items():
                for parent in prefixes(at[:-1]):
                    self._slots_below.setdefault(parent, []).append(slot)
        below = [slots[node]] if node in slots else self._slots_below.get(node, [])
        wanted = [slot for slot in below if not is_left_out(slot, leaves_out)]
        if below and not wanted:
            self.mismatches.absent.append(fqn)
        elif (len(node) > 1 and all(slot.kind is Kind.PLAIN for slot in below)) or may_be_missing(
            below
        ):
            self.mismatches.kept.append(fqn)
        else:
            self.mismatches.missing.append(fqn)

    def _compare(self, slot: Slot, leaves: dict[Path, Any]) -> None:
        problem = ""
        if slot.kind in WHOLE and any(
            isinstance(leaf, TensorLoad) and leaf.parts for leaf in leaves.values()
        ):
            note_classes(leaves, slot.state().leaves)
        match slot.kind:
            case Kind.TENSOR:
                saved = leaves.get(slot.path, self.containers.get(slot.path))
                problem = tensor_problem(slot, saved, casts=self._casts)
            case Kind.EXTRA | Kind.OBJECT:
                if may_be_spread():
                    self.mismatches.different += follow(slot, leaves)
            case Kind.LOADER:  # may start its workers when it is asked for its state
                pass
            case Kind.COLUMN:
                problem = column_problem(slot.target, leaves.get(slot.path))
            case Kind.OPTIMIZER:
                problems, numbers, elsewhere = optimizer_fitting.compare(slot, self.nest(slot.path))
                self.mismatches.different += problems
                if numbers and (elsewhere or self._partial):
                    self._leave_to_others(slot, leaves, frozenset(numbers), elsewhere)
            case _:
                problem = plain_problem(slot, leaves, self.containers)
        if problem:
            self.mismatches.different.append(f"{slot.fqn}: {problem}")

    def _leave_to_others(
        self, slot: Slot, leaves: dict[Path, Any], numbers: frozenset[int], elsewhere: set[int]
    ) -> None:
        """Drop the state of parameters held by another pipeline stage, or another rank of DDP."""
        state = (*slot.path, "state")
        for path in list(leaves):
            number = path[: len(state) + 1]
            if number[:-1] != state:
                continue
            is_of_another_stage = number[-1] not in numbers and fqn_of(number) in self._partial
            if is_of_another_stage or number[-1] in elsewhere:
                del leaves[path]

    # What is given --------------------------------------------------------------------------------

    def leaves(self) -> list[Any]:
        """All leaves that are assigned, in the order of the live state."""
        return [leaf for leaves in self.given.values() for leaf in leaves.values()]

    def flat(self, *paths: Path) -> FlatMap:
        """The leaves assigned to the slots at ``paths``."""
        return FlatMap(
            {at: leaf for path in paths for at, leaf in self.given[path].items()}, self.containers
        )

    def nest(self, path: Path) -> Any:
        """What the slot at ``path`` is given, as a nest."""
        return self.flat(path).nest(path)

    def _members(self) -> dict[Any, Any]:
        """Enum members, for classes with a member in the target."""
        members: dict[Any, Any] = {}
        for path, leaves in self.given.items():
            loads = {at: leaf for at, leaf in leaves.items() if isinstance(leaf, EnumLoad)}
            if not loads or path not in self.live.slots:
                continue
            current = self.live.slots[path].state().leaves.items()
            own_kinds = {at: type(leaf) for at, leaf in current if isinstance(leaf, enum.Enum)}
            kinds = {kind_name(kind): kind for kind in own_kinds.values()}
            for load in loads.values():
                kind = kinds.get(load.kind) or own_kinds.get(path)
                # whatever the class raises for a value that it has no longer
                with contextlib.suppress(Exception):
                    members.update({load: load.member(kind)} if kind is not None else {})
        return members

    def fill(
        self, values: dict[Any, Any]
    ) -> tuple[list[tuple[str, torch.Tensor, torch.Tensor]], list[str]]:
        """Replace placeholders by their values; adds enum members to these.

        Returns live tensors with their names and their new values, and descriptions of objects with
        several names that would receive different states.
        """
        values.update(self._members())
        for leaves in self.given.values():
            for path, leaf in leaves.items():
                leaves[path] = filled(leaf, values)
        new: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for path, slot in self._tensors():
            if path in self.given:
                value = self.given[path][path]
                local = value.tensor if isinstance(value, Local) else value
                new.append((slot.fqn, slot.target, local))
        slots = map(self.live.slots.get, self.given)
        objects = [slot for slot in slots if slot is not None and slot.kind in OBJECTS]
        are_shared = len({id(slot.target) for slot in objects}) < len(objects)
        return new, conflicts(objects, self.nest) if are_shared else []

    def lacking(self) -> list[str]:
        """Names of plain data in the target that receives nothing, once placeholders are replaced.

        A list is one value, unless there are dicts in it.
        """
        names: dict[str, None] = {}
        for slot in self.live.slots.values():
            if slot.kind is Kind.PLAIN:
                given, state = slot.path in self.given, slot.state()
                there = FlatMap.of(self.nest(slot.path), slot.path).nodes() if given else {}
                dicts = {
                    node
                    for at, each in state.containers.items()
                    if type(each) in DICTS
                    for node in prefixes(at)
                }
                for at, leaf in state.leaves.items():
                    nodes = prefixes(at)[len(slot.path) - 1 :]
                    value = next((node for node in nodes if node not in dicts), at)
                    # else it is empty
                    if value not in there and type(leaf) not in (*DICTS, *SEQUENCES):
                        names[fqn_of(value)] = None
        return [*names]

    def _tie(self, given: dict[Path, dict[Path, Any]]) -> None:
        known = {
            id(slot.target): path
            for path, slot in self._tensors()
            if slot.owner is not None and path in given
        }
        for path, slot in self._tensors():
            other = known.get(id(slot.target)) if slot.owner is not None else None
            if other is not None and path not in given and other[:-1] == path[:-1]:
                given[path] = dict(zip([path], given[other].values(), strict=True))

    def _tensors(self) -> Iterable[tuple[Path, Slot]]:
        return (
            (path, slot)
            for path, slot in self.live.slots.items()
            if isinstance(slot.target, torch.Tensor)
        )

    def assignments(self) -> list[Assignment]:
        """What each target is given, once placeholders are replaced."""
        places: dict[Path, tuple[Any, Kind, list[Path]]] = {}
        for path, slot in itertools.chain(self.live.slots.items(), self.new.items()):
            if path not in self.given:
                continue
            if slot.owner is None:
                places[path] = slot.target, slot.kind, [path]
            else:
                kind = Kind.TABLE if slot.kind is Kind.COLUMN else Kind.MODULE
                places.setdefault(path[:-1], (slot.owner, kind, []))[-1].append(path)
        return [
            Assignment(path, target, kind, self.flat(*parts))
            for path, (target, kind, parts) in places.items()
        ]


def filled(leaf: Any, values: Mapping[Any, Any]) -> Any:
    """The value of a placeholder; anything else as it is."""
    if isinstance(leaf, (TensorLoad, Pickled, EnumLoad)):
        return values.get(leaf, leaf.value) if isinstance(leaf, EnumLoad) else values[leaf]
    return unpickled(leaf) if type(leaf) in (set, frozenset) else leaf


def _is_empty(leaf: Any) -> bool:
    """Whether a leaf is an empty dict."""
    return isinstance(leaf, dict) and not leaf
