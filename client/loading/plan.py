"""Plans what each leaf of a live state takes from one or several checkpoints, and notes what does not fit."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

from sidesave.client.loading import optimizers
from sidesave.client.loading.flat import (
    DICTS,
    SEQUENCES,
    FlatMap,
    LiveMap,
    Path,
    Slot,
    children,
    fqn_of,
    is_live,
    is_stateful,
    prefixes,
)
from sidesave.client.loading.messages import Mismatches, PrefixMismatch
from sidesave.client.loading.selection import Selection
from sidesave.client.loading.tensors import (
    EnumLoad,
    Local,
    Pickled,
    Shard,
    TensorLoad,
    kind_name,
    may_be_spread,
    unpickled,
)
from sidesave.errors import StateMismatchError, UnsupportedValueError
from sidesave.stager.state.tensor_collector import is_dtensor
from sidesave.stager.state.tree import check
from sidesave.stager.state.treespec import TensorRef, with_metadata
from sidesave.stager.tables import IDS, Column, is_table


class LoadPlan:
    """Which leaves of checkpoints go where in a live state.

    Attributes:
        live: The state.
        given: The leaves for each slot that takes something.
        containers: The checkpoint's containers of these leaves.
        new: Slots for plain data that only a checkpoint has, in dicts of live objects.
        mismatches: What differs.
    """

    def __init__(self, live: LiveMap, *, casts: bool = False) -> None:
        """``casts``: a floating-point tensor may have another floating-point dtype than its target."""
        self.live = live
        self._casts = casts
        self.given: dict[Path, dict[Path, Any]] = {}
        self.containers: dict[Path, Any] = {}
        self.new: dict[Path, Slot] = {}
        self.mismatches = Mismatches()
        self._nodes = live.nodes()
        self._clashes: dict[Path, Any] = {}
        self._partial: set[str] = set()
        self._whole: set[Path] = set()
        self._items: dict[Path, set[Any]] = {}
        self._there: set[Path] = set()

    def take(self, selection: Selection, *, tie: bool = False) -> Mismatches:
        """Take what has a place, over what earlier checkpoints gave. Returns what has no place.

        With ``tie``, all names that share a tensor of a module are given what one of them is given.
        """
        both = sorted(map(fqn_of, selection.incomplete & self._whole))
        if both:
            raise StateMismatchError(
                f"{selection.where} has a part of {both[0]}, which takes its state whole and has one of an earlier "
                "source; nothing was loaded. Take it from one of them: exclude it from the other"
            )
        self._whole |= selection.given
        self._partial.update(selection.partial)
        self._take_containers(selection.flat.containers)
        given, others = dict[Path, dict[Path, Any]](), dict[Path, dict[Path, Any]]()
        items: dict[Path, set[Any]] = {}
        for path, leaf in selection.flat.leaves.items():
            self._there.update(prefixes(path))
            for node in prefixes(path[:-1]):
                self._clashes.pop(node, None)
                if type(self.live.containers.get(node)) in SEQUENCES:
                    items.setdefault(node, set()).add(path[len(node)])
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
                unplaced.placed.add(fqn_of(path))
            earlier = self.given.get(path) if self.live.slots[path].is_plain else None
            if earlier is not None and selection.kept:  # plain data of which a pattern chose a part
                parts = [FlatMap.of(leaf, at) for at, leaf in earlier.items()]
                earlier = {at: leaf for part in parts for at, leaf in part.leaves.items()}
                for part in parts:
                    self.containers = part.containers | self.containers
                leaves = earlier | {at: leaf for at, leaf in leaves.items() if at not in selection.kept}
            self.given[path] = leaves
        unplaced.unexpected += selection.mismatches.unexpected
        replaced = tuple(f"{fqn_of(path)}[" for path in selection.given)  # optimizers that an earlier source had, too
        for names, more in (
            (self.mismatches.missing, selection.mismatches.missing),
            (self.mismatches.kept, selection.mismatches.kept),
        ):
            names[:] = [*(name for name in names if not name.startswith(replaced)), *more]
        return unplaced

    def _refuse_two_tables(self, selection: Selection, given: Iterable[Path]) -> None:
        """Raise where an earlier source has given other columns of a table: rows of two checkpoints do not mix."""
        columns: dict[Path, tuple[set[Path], set[Path]]] = {}
        for number, paths in enumerate((self.given, given)):
            for path in paths:
                if is_table(self.live.containers.get(path[:-1])):
                    columns.setdefault(path[:-1], (set(), set()))[number].add(path)
        for table, (before, now) in columns.items():
            if before and now and before != now:
                raise StateMismatchError(
                    f"{selection.where} has other columns of the table {fqn_of(table)} than an earlier source; nothing "
                    "was loaded. Take it from one of them: exclude it from the other"
                )

    def has(self, name: str) -> bool:
        """Whether an item is given anything."""
        return any(path[0] == name and not _is_empty(leaves.get(path)) for path, leaves in self.given.items())

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

    def _unplaced(self, others: Mapping[Path, dict[Path, Any]], given: Iterable[Path]) -> Mismatches:
        """What has no place. Plain data beside live objects is added; what only some ranks saved needs no place."""
        unplaced = Mismatches()
        by_parent: dict[Path, list[Path]] = {}
        for node, leaves in others.items():
            parent = self.live.containers.get(node[:-1])
            fqn = fqn_of(node)
            if type(parent) in SEQUENCES:
                continue  # of another length, which _is_broken reports
            if fqn in self._partial:
                continue
            if not isinstance(parent, nn.Module) and not any(map(_is_tensor, leaves.values())):
                self.new[node] = Slot(node, None)
                self.given[node] = leaves
                unplaced.placed.add(fqn)
                continue
            unplaced.unexpected.append(fqn)
            by_parent.setdefault(node[:-1], []).append(node)
        nodes = {node for path in given for node in prefixes(path)}
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

    # What does not fit ---------------------------------------------------------------------------------------------

    def compare(self, leaves_out: Callable[[str], bool]) -> None:
        """Note all that differs, and shard tensors as their targets are."""
        for path, leaf in self._clashes.items():
            if type(self.live.containers[path]) not in SEQUENCES and not _is_empty(leaf):
                self.mismatches.different.append(
                    f"{fqn_of(path)}: the checkpoint holds a {type(leaf).__name__} here, not a set of named values"
                )
        broken = {path for path in self.live.containers if self._is_broken(path)}
        present = self._there.union(self.given)
        gone = set[Path]()
        for node in self._nodes:
            if node[:-1] in gone or node[:-1] in broken or node in broken:
                gone.add(node)
            elif node not in present:
                gone.add(node)
                if node[:-1] not in self._clashes or _is_empty(self._clashes[node[:-1]]):
                    self._miss(node, leaves_out)
        absent = set(self.mismatches.absent)
        self.mismatches.placed = {fqn for node in self._nodes if len(node) > 1 and (fqn := fqn_of(node)) not in absent}
        for path in list(self.given):
            slot = self.live.slots.get(path)
            if slot is not None and path not in gone:
                self._compare(slot, self.given[path])
        self._compare_tables()

    def _compare_tables(self) -> None:
        """Note tables that would get columns without ids, or those of several tables, whose rows do not go together."""
        origins: dict[Path, set[str]] = {}
        for path, leaves in self.given.items():
            if is_table(self.live.containers.get(path[:-1])):
                loads = [leaf for leaf in leaves.values() if isinstance(leaf, TensorLoad)]
                origins.setdefault(path[:-1], set()).update(load.ref.table for load in loads)
        for path, tables in origins.items():
            if len(tables) > 1 or (*path, IDS) not in self.given:
                what = f"columns of {', '.join(sorted(tables))}" if len(tables) > 1 else "columns without their ids"
                self.mismatches.different.append(f"{fqn_of(path)}: the table would get {what}")

    def _is_broken(self, path: Path) -> bool:
        """Whether a sequence of live objects is given something else, or another length; notes it."""
        around, items = self.live.containers[path], self._items.get(path, set())
        if type(around) not in SEQUENCES or path not in self._there:
            return False
        broken = type(self.containers.get(path)) not in SEQUENCES or items != {*range(len(around))}
        if broken:
            self.mismatches.different.append(
                f"{fqn_of(path)}: the checkpoint does not hold {len(around)} items here, as the target does"
            )
        return broken

    def _miss(self, node: Path, leaves_out: Callable[[str], bool]) -> None:
        fqn = fqn_of(node)
        slots = self.live.slots
        below = [slots[node]] if node in slots else [slot for at, slot in slots.items() if at[: len(node)] == node]
        wanted = [slot for slot in below if not _is_left_out(slot, leaves_out)]
        if below and not wanted:
            self.mismatches.absent.append(fqn)
        elif len(node) > 1 and all(slot.is_plain for slot in below):
            self.mismatches.kept.append(fqn)
        else:
            self.mismatches.missing.append(fqn)

    def _compare(self, slot: Slot, leaves: dict[Path, Any]) -> None:
        target, problems = slot.target, self.mismatches.different
        if slot.is_extra or (is_stateful(target) and not isinstance(target, torch.optim.Optimizer)):
            if may_be_spread():
                self._follow(slot, leaves)
        elif isinstance(target, torch.Tensor):
            problem = self._tensor(slot, leaves.get(slot.path, self.containers.get(slot.path)))
            if problem:
                problems.append(f"{slot.fqn}: {problem}")
        elif isinstance(target, Column):
            problem = _column(target, leaves.get(slot.path))
            if problem:
                problems.append(f"{slot.fqn}: {problem}")
        elif isinstance(target, torch.optim.Optimizer):
            wrong, numbers = optimizers.compare(slot, self.flat(slot.path).nest(slot.path), _spread, _shape)
            problems += wrong
            state = (*slot.path, "state")
            for path in list(leaves) if numbers else ():
                number = path[: len(state) + 1]
                if number[:-1] == state and number[-1] not in numbers and fqn_of(number) in self._partial:
                    del leaves[path]  # of another stage of a pipeline
        else:
            problem = _plain(slot, leaves, self.containers)
            if problem:
                problems.append(f"{slot.fqn}: {problem}")

    def _follow(self, slot: Slot, leaves: Mapping[Path, Any]) -> None:
        """Shard what a user's object takes as its current state is sharded; nothing else is compared."""
        current = slot.state().leaves
        for path, leaf in leaves.items():
            like: Any = current.get(path)
            if isinstance(leaf, TensorLoad) and is_dtensor(like) and _shape(like, slot) == leaf.shape:
                problem = _spread(leaf, like, slot)
                if problem:
                    self.mismatches.different.append(f"{fqn_of(path)}: {problem}")

    def _tensor(self, slot: Slot, saved: Any) -> str:
        target = slot.target
        if isinstance(saved, torch.Tensor):  # of the user's making, for another number of ranks
            saved = TensorLoad(TensorRef(slot.fqn, None), shape=tuple(saved.shape), dtype=saved.dtype)
        lazy = nn.parameter.is_lazy(target)  # takes any shape
        if target.is_meta and not lazy:
            return "the target is a meta tensor and cannot hold values; materialize it with to_empty()"
        if not isinstance(saved, TensorLoad) or saved.ref.array:
            kind = "NumPy array" if isinstance(saved, TensorLoad) else type(saved).__name__
            return f"the checkpoint holds a {kind}, the target is a tensor"
        if saved.ref.table:
            return "the checkpoint holds rows of a table, the target is a tensor"
        saved.is_buffer = slot.module is not None and not isinstance(target, nn.Parameter)
        if not lazy and _shape(target, slot) != saved.shape:
            return f"shape {list(saved.shape)} in the checkpoint, {list(_shape(target, slot))} in the target"
        if target.dtype != saved.dtype and not (self._casts and _are_floating(target.dtype, saved.dtype)):
            return f"{saved.dtype} in the checkpoint, {target.dtype} in the target; pass dtype= to cast"
        return "" if lazy else _spread(saved, target, slot)

    # What is given -------------------------------------------------------------------------------------------------

    def leaves(self) -> list[Any]:
        """All leaves that are given, in the order of the live state."""
        return [leaf for leaves in self.given.values() for leaf in leaves.values()]

    def flat(self, *paths: Path) -> FlatMap:
        """What the slots at ``paths`` are given."""
        return FlatMap({at: leaf for path in paths for at, leaf in self.given[path].items()}, self.containers)

    def members(self) -> dict[Any, Any]:
        """Enum members, for classes of which the target holds a member."""
        members: dict[Any, Any] = {}
        for path, leaves in self.given.items():
            loads = {at: leaf for at, leaf in leaves.items() if isinstance(leaf, EnumLoad)}
            current = self.live.slots[path].state().leaves if loads and path in self.live.slots else {}
            own_kinds = {at: type(leaf) for at, leaf in current.items() if isinstance(leaf, enum.Enum)}
            kinds = {kind_name(kind): kind for kind in own_kinds.values()}
            for load in loads.values():
                kind = kinds.get(load.kind) or own_kinds.get(path)
                with contextlib.suppress(Exception):  # whatever the class raises for a value that it has no longer
                    members.update({load: load.member(kind)} if kind is not None else {})
        return members

    def fill(self, values: Mapping[Any, Any]) -> None:
        """Replace placeholders by their values."""
        for leaves in self.given.values():
            for path, leaf in leaves.items():
                leaves[path] = filled(leaf, values)

    def lacking(self) -> list[str]:
        """Names of values in the target's plain data that are given nothing, once placeholders are replaced.

        A list is one value, unless there are dicts in it.
        """
        names: dict[str, None] = {}
        for slot in self.live.slots.values():
            if slot.is_plain:
                given, state = slot.path in self.given, slot.state()
                there = FlatMap.of(self.flat(slot.path).nest(slot.path), slot.path).nodes() if given else {}
                dicts = {node for at, each in state.containers.items() if type(each) in DICTS for node in prefixes(at)}
                for at, leaf in state.leaves.items():
                    value = next(
                        (node for node in prefixes(at) if node not in dicts and len(node) >= len(slot.path)), at
                    )
                    if value not in there and type(leaf) not in (*DICTS, *SEQUENCES):  # else it is empty
                        names[fqn_of(value)] = None
        return [*names]

    def _tie(self, given: dict[Path, dict[Path, Any]]) -> None:
        known = {id(slot.target): path for path, slot in self._tensors() if slot.module and path in given}
        for path, slot in self._tensors():
            other = known.get(id(slot.target))
            if slot.module is not None and other is not None and path not in given and other[:-1] == path[:-1]:
                given[path] = dict(zip([path], given[other].values(), strict=True))

    def two_for_one(self) -> list[str]:
        """Live tensors that would be given two different values under two names."""
        first: dict[int, tuple[Slot, Any]] = {}
        odd: list[str] = []
        for path, slot in self._tensors():
            if path in self.given:
                value = self.given[path][path]
                known, other = first.setdefault(id(slot.target), (slot, value))
                if other is not value and not _same_bits(other, value):
                    odd.append(f"{known.fqn} and {slot.fqn} are one tensor in the target, and two with other values")
        return odd

    def _tensors(self) -> Iterable[tuple[Path, Slot]]:
        return ((path, slot) for path, slot in self.live.slots.items() if isinstance(slot.target, torch.Tensor))


def _column(column: Column, saved: Any) -> str:
    """The problem with what is given to a column of a table."""
    if not isinstance(saved, TensorLoad) or not saved.ref.table:
        return f"the checkpoint holds a {type(saved).__name__} here, the target is a table of rows by id"
    if (saved.dtype, saved.shape) != (column.dtype, column.shape):
        here = f"{column.dtype} {list(column.shape)} in the target"
        return f"rows of {saved.dtype} {list(saved.shape)} in the checkpoint, {here}"
    return ""


def filled(leaf: Any, values: Mapping[Any, Any]) -> Any:
    """The value of a placeholder; anything else as it is."""
    if isinstance(leaf, (TensorLoad, Pickled, EnumLoad)):
        return values.get(leaf, leaf.value) if isinstance(leaf, EnumLoad) else values[leaf]
    return unpickled(leaf) if type(leaf) in (set, frozenset) else leaf


def _is_empty(leaf: Any) -> bool:
    return isinstance(leaf, dict) and not leaf


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) or (isinstance(leaf, TensorLoad) and not leaf.ref.array)


def _is_left_out(slot: Slot, leaves_out: Callable[[str], bool]) -> bool:
    """Whether the checkpoint need not have a slot."""
    if slot.is_plain:
        return all(leaves_out(fqn_of(path)) for path in slot.state().leaves)
    return leaves_out(slot.fqn) and (slot.module is not None or leaves_out(f"{slot.fqn}.*"))


def _are_floating(*dtypes: torch.dtype) -> bool:
    return all(dtype.is_floating_point for dtype in dtypes)


def _shape(target: torch.Tensor, slot: Slot) -> tuple[int, ...]:
    """The shape in which a tensor is saved."""
    alone = slot.alone and is_dtensor(target)
    return tuple(cast("Any", target).to_local().shape if alone else target.shape)


def _spread(saved: TensorLoad, like: torch.Tensor, slot: Slot) -> str:
    """Shard a tensor as ``like`` is, if it is sharded; returns the problem."""
    if is_dtensor(like):
        try:
            saved.shard = Shard.alone(like) if slot.alone else Shard.of(like, saved.ref.fqn)
        except UnsupportedValueError as error:
            return str(error).removeprefix(f"{saved.ref.fqn}: ")
    return ""


def _plain(slot: Slot, leaves: Mapping[Path, Any], containers: Mapping[Path, Any]) -> str:
    """The problem with what is given to plain data."""
    target, saved = slot.target, leaves.get(slot.path, containers.get(slot.path))
    kind = cast("type[Any]", type(target))
    if isinstance(target, enum.Enum):
        try:
            saved.member(kind) if isinstance(saved, EnumLoad) else kind(saved)
        except Exception:  # noqa: BLE001 - whatever the user's class says to a value that is none of its own
            value = saved.value if isinstance(saved, EnumLoad) else saved
            return f"the checkpoint holds {value!r:.80}, which is no {kind.__name__}"
    elif (target is None or _is_empty(target)) and any(map(_is_tensor, leaves.values())):
        return f"the checkpoint holds tensors here, and the target is {target!r}; put the object there that takes them"
    elif isinstance(target, (Mapping, list, tuple)):
        if kind in (*SEQUENCES, torch.Size, *DICTS):
            return ""
        items = cast("list[Any]", [*target.values()] if isinstance(target, Mapping) else target)
        if children(saved) or _is_empty(saved) or any(map(is_live, items)):
            return f"a {kind.__name__} is not filled; put a dict or a list of its items in its place"
    elif not isinstance(saved, Pickled):
        try:  # what is replaced must be something that could have been saved: a class is there by mistake
            check({"target": target})
        except UnsupportedValueError:
            what = f"the class {target.__name__}" if isinstance(target, type) else f"a {kind.__qualname__}"
            return f"the target is {what}, which takes no state; put a live object or plain data in its place"
    return ""


def _same_bits(first: Any, second: Any) -> bool:
    one, other = (value.tensor if isinstance(value, Local) else value for value in (first, second))
    if not isinstance(one, torch.Tensor) or one.layout is not torch.strided:
        return True
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))
