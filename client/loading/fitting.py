"""Compares the values of a checkpoint with their targets, and describes the differences briefly."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from sidesave.client.loading.tensors import (
    EnumLoad,
    Shard,
    TensorLoad,
    composite_problem,
)
from sidesave.client.messages import SHOWN, Names, few
from sidesave.client.reading.stored import (
    DICTS,
    SEQUENCES,
    FlatMap,
    Pickled,
    children,
    fqn_of,
)
from sidesave.client.targets import tensor_memory
from sidesave.client.targets.live_map import ORDINARY, Kind, Slot, is_live
from sidesave.client.targets.shards import Local
from sidesave.errors import UnsupportedValueError
from sidesave.stager.sharding import is_dtensor
from sidesave.stager.state.tags import SPARSE_PARTS
from sidesave.stager.state.tensor_nodes import TensorRef
from sidesave.stager.state.tree import check
from sidesave.stager.state.treespec import Path
from sidesave.stager.tables import IDS, Column


@dataclass(frozen=True, slots=True)
class PrefixMismatch:
    """A target for which the checkpoint has state, but under almost none of the target's names.

    Attributes:
        fqn: The target.
        wanted: Names in the target, without ``fqn`` in front.
        fitting: How many of them the checkpoint has.
        others: Names that only the checkpoint has.
    """

    fqn: str
    wanted: Collection[str]
    fitting: int
    others: Collection[str]

    def text(self, *, renamed: bool) -> str:
        """Describe the mismatch, and a remedy if one is known."""
        count = len(self.wanted)
        fits = (
            f"only {self.fitting} of the {count} names fit"
            if self.fitting
            else f"none of the {count} names fits"
        )
        prefix = _prefix(self.wanted, self.others)
        if prefix and not renamed:
            return (
                f'{self.fqn}: {fits}; pass rename={{"{self.fqn}.{prefix}": "{self.fqn}"}}, and '
                f"they do"
            )
        prefix = _prefix(self.others, self.wanted)
        if prefix and not renamed:
            return (
                f'{self.fqn}: {fits}; pass rename={{"{self.fqn}": "{self.fqn}.{prefix}"}}, and '
                f"they do"
            )
        return (
            f"{self.fqn}: {fits}, and the checkpoint has {len(self.others)} others; is it of "
            "another model?"
        )


def _prefix(short: Collection[str], long: Collection[str]) -> str:
    """The prefix with which most of the ``short`` names are among the ``long`` ones."""
    first = next(iter(short), "")
    known = set(long)
    for name in long:
        if name.endswith("." + first):
            prefix = name[: -len(first)]
            if sum(prefix + other in known for other in short) > 0.9 * len(short):
                return prefix[:-1]
    return ""


@dataclass(slots=True)
class Mismatches:
    """All differences.

    Attributes:
        missing: Required names that only the target has.
        unexpected: Names that only the checkpoint has.
        different: Messages about shapes, dtypes and kinds that differ.
        prefixes: Targets of whose names the checkpoint has almost none.
        kept: Plain data that only the target has, in dicts of live objects.
        absent: Names that only the target has and that were not selected.
        placed: All names of the target, none of which is a misspelling of another.
    """

    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    different: list[str] = field(default_factory=list[str])
    prefixes: list[PrefixMismatch] = field(default_factory=list[PrefixMismatch])
    kept: list[str] = field(default_factory=list[str])
    absent: list[str] = field(default_factory=list[str])
    placed: set[str] = field(default_factory=set[str])

    def text(self, saved: Callable[[], Iterable[str]], *, renamed: bool, strict: bool) -> str:
        """Describe all differences, at most ten lines of each kind, each name with similar ones.

        Args:
            saved: Gives the names in the checkpoint.
            renamed: Whether they have been renamed.
            strict: Whether missing and unexpected names matter.
        """
        lines: list[str] = []
        if strict:
            lines += [one.text(renamed=renamed) for one in self.prefixes[:SHOWN]]
        lines += few(self.different, lambda line: line, "do not fit")
        if self.missing and strict:
            unused = Names(self.unexpected)
            others = Names(name for name in saved() if name not in self.placed)
            lines += few(
                self.missing,
                lambda name: (
                    f"{name}: missing in the checkpoint{unused.hint(name) or others.hint(name)}"
                ),
                "are missing",
            )
        if self.unexpected and strict:
            free = Names(self.missing)
            lines += few(
                self.unexpected,
                lambda name: f"{name}: unexpected, the target has no such key{free.hint(name)}",
                "are unexpected",
            )
        return "\n  ".join(lines)

    def summary(self) -> str:
        """Some of the missing and unexpected names, in one line."""
        parts = [
            (
                f"{len(names)} {kind} "
                f"({', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''})"
            )
            for names, kind in ((self.missing, "missing"), (self.unexpected, "unexpected"))
            if names
        ]
        return " and ".join(parts)


# One target ---------------------------------------------------------------------------------------


def tensor_problem(slot: Slot, saved: Any, *, casts: bool) -> str:
    """The problem with the value for a tensor; shards it as its target is.

    With ``casts`` the dtypes may differ, if both are floating-point ones.
    """
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
    is_sharded = type(target) not in ORDINARY and is_dtensor(target)
    local = cast("Any", target).to_local() if is_sharded else target
    if saved.ref.whole is not None or tensor_memory.is_composite(local):
        like = local if slot.alone else target
        problem = (
            ""
            if saved.ref.whole and saved.ref.whole.kind == "sparse"
            else composite_problem(saved, like)
        )
        if problem:
            return problem
        saved.like = local
        if saved.ref.whole and saved.ref.whole.kind == "nested":
            return ""
    saved.is_buffer = slot.owner is not None and not isinstance(target, nn.Parameter)
    if not lazy and (shape := tuple((local if slot.alone else target).shape)) != saved.shape:
        return f"shape {list(saved.shape)} in the checkpoint, {list(shape)} in the target"
    if target.dtype != saved.dtype and not (casts and _are_floating(target.dtype, saved.dtype)):
        return f"{saved.dtype} in the checkpoint, {target.dtype} in the target; pass dtype= to cast"
    if lazy:
        return ""
    return _unwritable(local, saved) or (spread(saved, target, slot) if is_sharded else "")


def _unwritable(local: torch.Tensor, saved: TensorLoad) -> str:
    """The reason why a tensor, or this rank's shard, cannot be filled in place; empty if it can."""
    problem = tensor_memory.unwritable(local)
    if problem:
        return f"the target is {problem}"
    layout = str(local.layout).removeprefix("torch.")
    if saved.leaf is not None and layout != saved.leaf.layout:
        return f"a {saved.leaf.layout} tensor in the checkpoint, a {layout} one in the target"
    if local.layout not in (torch.strided, torch.sparse_coo):
        sizes = [tuple(getattr(local, part)().shape) for part in SPARSE_PARTS[local.layout]]
        if [part.shape for part in saved.parts] != sizes:
            have = f"{list(sizes[-1])} in the target, which cannot change them in place"
            return f"values of shape {list(saved.parts[-1].shape)} in the checkpoint, {have}"
    return ""


def column_problem(column: Column, saved: Any) -> str:
    """The problem with the value for a column of a table."""
    if not isinstance(saved, TensorLoad) or not saved.ref.table:
        return (
            f"the checkpoint holds a {type(saved).__name__} here, the target is a table of rows by "
            "id"
        )
    if (saved.dtype, saved.shape) != (column.dtype, column.shape):
        here = f"{column.dtype} {list(column.shape)} in the target"
        return f"rows of {saved.dtype} {list(saved.shape)} in the checkpoint, {here}"
    return ""


def _are_floating(*dtypes: torch.dtype) -> bool:
    return all(dtype.is_floating_point for dtype in dtypes)


def shape_of(target: torch.Tensor, slot: Slot) -> tuple[int, ...]:
    """The saved shape of a live tensor."""
    alone = slot.alone and is_dtensor(target)
    return tuple(cast("Any", target).to_local().shape if alone else target.shape)


def spread(saved: TensorLoad, like: torch.Tensor, slot: Slot) -> str:
    """Shard a tensor as ``like`` is, if it is sharded; returns the problem."""
    if is_dtensor(like):
        if saved.parts and saved.like is None and not slot.alone:
            return (
                "a tensor made of inner tensors can be divided among ranks only in sidesave.PerRank"
            )
        try:
            saved.shard = Shard.alone(like) if slot.alone else Shard.of(like, saved.ref.fqn)
            for part in saved.parts if not slot.alone else ():
                part.shard = saved.shard if part.shape == saved.shape else None
        except UnsupportedValueError as error:
            return str(error).removeprefix(f"{saved.ref.fqn}: ")
    return ""


def plain_problem(slot: Slot, leaves: Mapping[Path, Any], containers: Mapping[Path, Any]) -> str:
    """The problem with the value for plain data."""
    target, saved = slot.target, leaves.get(slot.path, containers.get(slot.path))
    kind = cast("type[Any]", type(target))
    if isinstance(target, enum.Enum):
        try:
            saved.member(kind) if isinstance(saved, EnumLoad) else kind(saved)
        except Exception:  # noqa: BLE001 - the user's class may raise anything
            value = saved.value if isinstance(saved, EnumLoad) else saved
            return f"the checkpoint holds {value!r:.80}, which is no {kind.__name__}"
    elif (target is None or (type(target) in DICTS and not target)) and any(
        map(is_tensor, leaves.values())
    ):
        return (
            f"the checkpoint holds tensors here, and the target is {target!r}; put the object "
            "there that takes them"
        )
    elif isinstance(target, (Mapping, list, tuple)):
        if kind in (*SEQUENCES, torch.Size, *DICTS):
            return ""
        items = cast("list[Any]", [*target.values()] if isinstance(target, Mapping) else target)
        if children(saved) or type(saved) in DICTS or any(map(is_live, items)):
            return (
                f"a {kind.__name__} is not filled; put a dict or a list of its items in its place"
            )
    elif not isinstance(saved, Pickled):
        try:
            # what is replaced must be something that could have been saved: a class is there by
            # mistake
            check({"target": target})
        except UnsupportedValueError:
            what = (
                f"the class {target.__name__}"
                if isinstance(target, type)
                else f"a {kind.__qualname__}"
            )
            return (
                f"the target is {what}, which takes no state; put a live object or plain data in "
                "its place"
            )
    return ""


def is_left_out(slot: Slot, leaves_out: Callable[[str], bool]) -> bool:
    """Whether the checkpoint may lack a slot."""
    if slot.kind is Kind.PLAIN:
        return all(leaves_out(fqn_of(path)) for path in slot.state().leaves)
    return leaves_out(slot.fqn) and (slot.owner is not None or leaves_out(f"{slot.fqn}.*"))


def may_be_missing(slots: Sequence[Slot]) -> bool:
    """Whether targets declare that a checkpoint may lack them."""
    return bool(slots) and all(
        getattr(slot.target, "may_be_missing", False) is True for slot in slots
    )


def is_tensor(leaf: Any) -> bool:
    """Whether a leaf is, or becomes, a tensor."""
    return isinstance(leaf, torch.Tensor) or (isinstance(leaf, TensorLoad) and not leaf.ref.array)


def table_problems(given: Mapping[Path, Mapping[Path, Any]], tables: Collection[Path]) -> list[str]:
    """The tables that would get columns without ids, or of tables with unrelated rows."""
    origins: dict[Path, set[str]] = {}
    for path, leaves in given.items():
        if path[:-1] in tables:
            loads = [leaf for leaf in leaves.values() if isinstance(leaf, TensorLoad)]
            origins.setdefault(path[:-1], set()).update(load.ref.table for load in loads)
    problems: list[str] = []
    for path, names in origins.items():
        if len(names) > 1:
            problems.append(
                f"{fqn_of(path)}: the table would get columns of {', '.join(sorted(names))}"
            )
        elif (*path, IDS) not in given:
            problems.append(f"{fqn_of(path)}: the table would get columns without their ids")
    return problems


def follow(slot: Slot, leaves: Mapping[Path, Any]) -> list[str]:
    """Shard the state of a user's object as its current state is; nothing else is compared.

    Returns the problems.
    """
    if not any(isinstance(leaf, TensorLoad) for leaf in leaves.values()):
        return []
    problems: list[str] = []
    current = slot.state().leaves
    for path, leaf in leaves.items():
        like: Any = current.get(path)
        if (
            isinstance(leaf, TensorLoad)
            and is_dtensor(like)
            and shape_of(like, slot) == leaf.shape
            and (problem := spread(leaf, like, slot))
        ):
            problems.append(f"{fqn_of(path)}: {problem}")
    return problems


def conflicts(objects: Iterable[Slot], nest: Callable[[Path], Any]) -> list[str]:
    """Describe each object with several names that would receive different states.

    ``nest`` gives the state for a path.
    """
    names: dict[int, list[Slot]] = {}
    for slot in objects:
        names.setdefault(id(slot.target), []).append(slot)
    lines: list[str] = []
    for first, *others in names.values():
        states = [FlatMap.of(nest(one.path)).leaves for one in (first, *others) if others]
        lines += [
            f"{first.fqn} and {other.fqn} are one object in the target, but have different states"
            for other, state in zip(others, states[1:], strict=True)
            if not _is_same(states[0], state)
        ]
    return lines


def _is_same(some: dict[Path, Any], others: dict[Path, Any]) -> bool:
    """Whether two states are the same, bit for bit."""

    def same(one: Any, other: Any) -> bool:
        one, other = (each.tensor if isinstance(each, Local) else each for each in (one, other))
        if one is other or type(one) is not type(other):
            return one is other
        if isinstance(one, torch.Tensor):
            return tensor_memory.same_bits(one, other)
        if hasattr(one, "tobytes"):  # NumPy's
            return (one.dtype, one.shape, one.tobytes()) == (
                other.dtype,
                other.shape,
                other.tobytes(),
            )
        return repr(one) == repr(other)  # equal for nan

    return some.keys() == others.keys() and all(same(leaf, others[at]) for at, leaf in some.items())
