"""Assigns the loaded state to live objects, and puts all back as they were if one raises."""

from __future__ import annotations

import collections
import dataclasses
import enum
import logging
import operator
from collections.abc import Iterable
from typing import Any, Final, cast

import torch
from torch import nn

from sidesave.client.messages import few
from sidesave.client.reading.stored import DICTS, FlatMap, fqn_of
from sidesave.client.targets import tensor_memory
from sidesave.client.targets.live_map import Kind, LiveMap, Undo
from sidesave.client.targets.nests import aligned
from sidesave.client.targets.objects import (
    give_object,
    give_parts,
    held_module,
    live_parts,
    load_optimizer,
)
from sidesave.client.targets.shards import Local
from sidesave.errors import StateMismatchError
from sidesave.stager import torch_private
from sidesave.stager.state.annotations import ANNOTATIONS
from sidesave.stager.state.tags import PLAIN
from sidesave.stager.state.treespec import Path
from sidesave.stager.tables import IDS, RowTable, chunk_rows

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Assignment:
    """The leaves for one target: module, tensor, object with ``load_state_dict`` or plain data."""

    path: Path
    target: Any
    kind: Kind
    flat: FlatMap

    @property
    def fqn(self) -> str:
        """The dotted name of the target."""
        return fqn_of(self.path)

    @property
    def value(self) -> Any:
        """Build the nest of ``flat``; this makes ``DTensor`` values from this rank's shards."""
        leaves = {
            at: leaf.spread() if isinstance(leaf, Local) else leaf
            for at, leaf in self.flat.leaves.items()
        }
        return FlatMap(leaves, self.flat.containers).nest(self.path)

    def order(self) -> int:
        """Order: user code, which may raise (irreversible changes last), then checked targets."""
        if self.kind is Kind.MODULE and _runs_own_code(self.target):
            return _OWN_MODULE
        return _ORDER[self.kind]


_OWN_MODULE: Final = 2
_ORDER: Final = {
    Kind.OBJECT: 0,
    Kind.OPTIMIZER: 1,
    Kind.TABLE: 3,
    Kind.LOADER: 4,
    Kind.MODULE: 5,
    Kind.TENSOR: 5,
    Kind.PLAIN: 6,
}
_NOT_PUT_BACK: Final = frozenset({Kind.TABLE, Kind.LOADER, Kind.MODULE, Kind.TENSOR})


def assign(live: LiveMap, given: Iterable[Assignment], *, strict: bool) -> None:
    """Assign its state to every target.

    If one raises, those that run code of users are put back, and ``StateMismatchError`` names it.
    Exceptions are tables and data loaders, which come last among them: a table whose ``insert``
    raises has some of its rows, and a loader may start its workers when asked for its state. Stock
    modules and tensors come after all of these, and have been checked, so that nothing raises; they
    are not copied, as a copy may not fit in memory.
    """
    undo: Undo = []
    changed: list[Assignment] = []
    unclear = False
    taken: set[int] = set()
    each = None
    try:
        for order, each in sorted(
            ((one.order(), one) for one in given), key=operator.itemgetter(0)
        ):
            if order == _OWN_MODULE:
                undo.append(held_module(each.target))
            elif each.kind in _NOT_PUT_BACK:
                changed.append(each)
            _assign(live, each, order, undo, taken, strict=strict)
    except BaseException as error:  # of the user's code, or an interrupt
        for put_back in reversed(undo):
            try:
                put_back()
            except Exception:  # the user's code again: the rest is put back all the same
                logger.exception("a target could not be put back as it was")
                unclear = True
        if each is None or not isinstance(error, Exception):
            raise
        names = [
            *(one.fqn for one in changed),
            *(["targets that the log names"] if unclear else []),
        ]
        rest = (
            f"not put back: {', '.join(few(names, str, 'are such'))}"
            if names
            else "nothing was loaded"
        )
        problem = (
            f"this {type(each.target).__name__} raised {type(error).__name__} when it was given "
            "its state"
        )
        raise StateMismatchError(f"{each.fqn}: {problem}: {error}; {rest}") from error


def _assign(
    live: LiveMap, each: Assignment, order: int, undo: Undo, taken: set[int], *, strict: bool
) -> None:
    target = each.target
    value: Any = None if each.kind is Kind.TENSOR else each.value
    if each.kind in (Kind.OBJECT, Kind.LOADER):  # their code may keep the tensors
        value = aligned(value)
    elif order == _OWN_MODULE:
        value.update(
            {key: aligned(item) for key, item in value.items() if str(key).endswith("_extra_state")}
        )
    match each.kind:
        case Kind.OPTIMIZER:
            load_optimizer(target, value, undo, each.path)
        case Kind.LOADER:
            target.load_state_dict(value)
        case Kind.OBJECT:
            now = target.state_dict()
            is_schedule = isinstance(target, torch.optim.lr_scheduler.LRScheduler)
            if is_schedule and isinstance(value, dict) and value.keys() != now.keys():
                odd = ", ".join(sorted(now.keys() ^ cast("dict[str, Any]", value).keys()))
                logger.warning(
                    "%s: the checkpoint's schedule is of another kind than this one: %s differ",
                    each.fqn,
                    odd,
                )
            give_object(target, now, value, undo)
        case Kind.PLAIN:
            value = type(target)(value) if isinstance(target, enum.Enum) else value
            _put(live, each.path, target, _in_place(target, value, undo, taken), undo)
        case _:
            grad = torch.is_grad_enabled()
            try:  # an interrupt can keep `no_grad` from ending
                torch_private.set_grad_enabled(False)
                _fill(live, each, value, undo, strict=strict)
            finally:
                torch_private.set_grad_enabled(grad)


def _fill(live: LiveMap, each: Assignment, value: Any, undo: Undo, *, strict: bool) -> None:
    match each.kind:
        case Kind.TABLE:
            _insert(each.target, value)
        case Kind.MODULE:
            _write_what_torch_would_change(live, each.flat.leaves, value)
            wrapped = live.wrapped.get(each.path)
            state = wrapped.state(value) if wrapped else value
            parts = {
                key: (module, live_parts(module.get_extra_state()))
                for name, module in each.target.named_modules()
                if (key := f"{name}._extra_state".lstrip(".")) in state
            }
            torch_private.load_module(each.target, state, strict=strict)
            for key, (module, live_ones) in parts.items():
                give_parts(
                    live_ones, state[key], module.get_extra_state, module.set_extra_state, undo
                )
        case _:
            held = each.flat.leaves[each.path]
            if isinstance(held, Local):
                held.give()
            else:
                tensor_memory.write(each.target, held)


def _insert(table: RowTable, columns: dict[str, torch.Tensor]) -> None:
    """Replace the rows of a table, chunk by chunk."""
    ids = columns.pop(IDS)
    count = chunk_rows(table.columns().values())
    table.clear()
    for begin in range(0, len(ids), count):
        some = slice(begin, begin + count)
        table.insert(ids[some], {name: values[some] for name, values in columns.items()})


def _runs_own_code(module: nn.Module) -> bool:
    """Whether loading a module runs code that is not torch's own, and so may raise unexpectedly.

    Quantized modules (``torch.ao``) count as such.
    """
    return any(
        not (name + ".").startswith("torch.") or name.startswith("torch.ao.")
        for each in module.modules()
        for name in map(_module_of, torch_private.load_code(each))
    )


def _module_of(code: Any) -> str:
    """The name of the module that defines a function, a method, a partial or a hook of torch's."""
    for inner in ("hook", "func"):
        code = getattr(code, inner, code)
    return getattr(code, "__module__", None) or ""


def _write_what_torch_would_change(
    live: LiveMap, leaves: dict[Path, Any], state: dict[str, Any]
) -> None:
    """Write the tensors of a module that torch would copy differently, bit for bit.

    In ``state`` the live tensors take their places: torch copies them onto themselves.
    """
    for path, value in leaves.items():
        # within extra state there are no slots
        target = live.slots[path].target if path in live.slots else None
        if isinstance(target, torch.Tensor):
            local = value.shard.like.to_local() if isinstance(value, Local) else target
            if not tensor_memory.is_written_by_torch(local):
                tensor_memory.write(local, value.tensor if isinstance(value, Local) else value)
                state[path[-1]] = target


# Plain data ---------------------------------------------------------------------------------------


def _in_place(target: Any, value: Any, undo: Undo, taken: set[int]) -> Any:
    """Put a value into the existing container if the kind is the same; others may refer to it.

    A container that has already received another value is not used again: it was saved as two.
    """
    kind = cast("type[Any]", type(target))
    if (
        type(value) in PLAIN
        or kind is not type(value)
        or kind not in (*DICTS, list, collections.deque)
        or id(target) in taken
    ):
        return value
    if kind is collections.deque and target.maxlen != value.maxlen:
        return value
    if kind is collections.defaultdict and target.default_factory is not value.default_factory:
        return value
    taken.add(id(target))
    before: Any = list(target) if kind in (list, collections.deque) else dict(target)
    if kind in DICTS:
        items = {key: _in_place(target.get(key), item, undo, taken) for key, item in value.items()}
        undo.append(lambda: _refill(target, before))
        _refill(target, items)
    else:
        parts = [
            _in_place(before[at] if at < len(before) else None, item, undo, taken)
            for at, item in enumerate(value)
        ]
        undo.append(lambda: _refill(target, before))
        _refill(target, parts)
    return target


def _refill(target: Any, items: Any) -> None:
    target.clear()
    if isinstance(items, dict):
        for key, item in cast("dict[Any, Any]", items).items():
            target[key] = item
    else:
        target.extend(items)


def _put(live: LiveMap, path: Path, target: Any, value: Any, undo: Undo) -> None:
    """Put a value in place of ``target`` in a state. A tuple is replaced, its other items kept."""
    holder: Any = live.containers.get(path[:-1], live.into)
    key: Any = path[-1]
    if type(holder) is tuple:
        items = cast("tuple[Any, ...]", holder)
        live.containers[path[:-1]] = changed = (*items[:key], value, *items[key + 1 :])
        _put(live, path[:-1], holder, changed, undo)
        return
    if type(holder) in DICTS and key not in holder:
        undo.append(lambda: cast("object", holder.pop(key)))
        holder[key] = value
        return
    if value is not target:
        held: Any = holder[key]
        undo.append(lambda: holder.__setitem__(key, held))
        holder[key] = _rewrapped(held, value)


def _rewrapped(held: Any, value: Any) -> Any:
    """A value in the annotations of the one before."""
    if isinstance(held, ANNOTATIONS):
        return dataclasses.replace(held, value=_rewrapped(held.value, value))
    return value
