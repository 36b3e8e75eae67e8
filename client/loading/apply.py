"""Assigns the loaded state to live objects. Where one raises, those before it are restored as far as possible."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from sidesave.client.loading.flat import DICTS, FlatMap, LiveMap, Path, fqn_of, is_stateful, unwrap
from sidesave.client.loading.plan import LoadPlan
from sidesave.client.loading.tensors import Local
from sidesave.client.messages import few
from sidesave.stager import torch_private
from sidesave.stager.state.annotations import ANNOTATIONS
from sidesave.stager.state.tags import PLAIN
from sidesave.stager.tables import IDS, RowTable, chunk_rows, is_table

logger = logging.getLogger(__name__)

_Undo = list[Callable[[], object]]


@dataclasses.dataclass(frozen=True, slots=True)
class Assignment:
    """A target (module, tensor, object with ``load_state_dict``, or plain data) and what it is given."""

    path: Path
    target: Any
    flat: FlatMap

    @property
    def value(self) -> Any:
        """The nest of ``flat``; ``DTensor`` values are made from this rank's shards only now."""
        leaves = {at: leaf.spread() if isinstance(leaf, Local) else leaf for at, leaf in self.flat.leaves.items()}
        return FlatMap(leaves, self.flat.containers).nest(self.path)

    def order(self) -> int:
        """The user's objects first, which may raise, tables last; then what has been checked; then plain values."""
        if isinstance(self.target, torch.optim.Optimizer):
            return 1
        if is_table(self.target):
            return 2
        if isinstance(self.target, (nn.Module, torch.Tensor)):
            return 3
        return 0 if is_stateful(self.target) else 4


def assign(plan: LoadPlan, *, strict: bool) -> None:
    """Give every target its state. Where user code raises, the targets before it are restored.

    Modules and tensors are not, since a copy of them may not fit in memory. They come after all that may raise, and
    have been checked. Nor are tables, which come before these: one whose ``insert`` raises has a part of its rows.
    """
    undo: _Undo = []
    taken: set[int] = set()
    try:
        for each in sorted(_assignments(plan), key=Assignment.order):
            _assign(plan.live, each, undo, taken, strict=strict)
    except BaseException:  # of the user's code, or an interrupt
        for put_back in reversed(undo):
            try:
                put_back()
            except Exception:  # the user's code again: the rest is put back all the same
                logger.exception("something could not be put back as it was")
        raise


def _assignments(plan: LoadPlan) -> list[Assignment]:
    modules: dict[Path, list[Path]] = {}
    assignments: list[Assignment] = []
    for path in [*(path for path in plan.live.slots if path in plan.given), *plan.new]:
        slot = plan.live.slots.get(path) or plan.new[path]
        if slot.module is None:
            assignments.append(Assignment(path, slot.target, plan.flat(path)))
        else:
            modules.setdefault(path[:-1], []).append(path)
    return assignments + [
        Assignment(path, plan.live.containers[path], plan.flat(*all_of)) for path, all_of in modules.items()
    ]


def _assign(live: LiveMap, each: Assignment, undo: _Undo, taken: set[int], *, strict: bool) -> None:
    target = each.target
    if is_table(target) or isinstance(target, (nn.Module, torch.Tensor)):
        grad = torch.is_grad_enabled()
        try:  # an interrupt can keep `no_grad` from ending
            torch_private.set_grad_enabled(False)
            _fill(live, each, strict=strict)
        finally:
            torch_private.set_grad_enabled(grad)
    elif isinstance(target, torch.optim.Optimizer):
        before = target.state_dict()  # it will hold other tensors and leave these as they are
        undo.append(lambda: target.load_state_dict(before))
        state = _with_groups_of(target, each.value, fqn_of(each.path))
        target.load_state_dict(state)
        if type(target).load_state_dict is torch.optim.Optimizer.load_state_dict:
            _put_back_dtypes(target, state)
    elif is_stateful(target):
        now, value = target.state_dict(), each.value
        before = copy.deepcopy(now)
        undo.append(lambda: target.load_state_dict(before))
        if isinstance(target, torch.optim.lr_scheduler.LRScheduler) and now.keys() != value.keys():
            odd, fqn = ", ".join(sorted(now.keys() ^ value.keys())), fqn_of(each.path)
            logger.warning("%s: the checkpoint's schedule is of another kind than this one: %s differ", fqn, odd)
        target.load_state_dict(value)
    else:
        value = type(target)(each.value) if isinstance(target, enum.Enum) else each.value
        _put(live.into, each.path, _in_place(target, value, undo, taken), undo)


def _fill(live: LiveMap, each: Assignment, *, strict: bool) -> None:
    if is_table(each.target):
        _insert(each.target, {str(path[-1]): value for path, value in each.flat.leaves.items()})
        return
    if isinstance(each.target, nn.Module):
        wrapped = live.wrapped.get(each.path)
        each.target.load_state_dict(wrapped.state(each.value) if wrapped else each.value, strict=strict)
        return
    value = each.flat.leaves[each.path]
    if isinstance(value, Local):
        value.give()
    else:
        each.target.copy_(value)


def _insert(table: RowTable, columns: dict[str, torch.Tensor]) -> None:
    """Replace the rows of a table, chunk by chunk."""
    ids = columns.pop(IDS)
    count = chunk_rows(table.columns().values())
    table.clear()
    for begin in range(0, len(ids), count):
        some = slice(begin, begin + count)
        table.insert(ids[some], {name: values[some] for name, values in columns.items()})


# Plain data --------------------------------------------------------------------------------------------------------


def _in_place(target: Any, value: Any, undo: _Undo, taken: set[int]) -> Any:
    """Put a value into the existing container if that is of the same kind, for others may refer to it.

    A container that has already taken another value is not used again: it was saved as two.
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
    taken.add(id(target))
    before: Any = list(target) if kind in (list, collections.deque) else dict(target)
    if kind in DICTS:
        items = {key: _in_place(target.get(key), item, undo, taken) for key, item in value.items()}
        undo.append(lambda: _refill(target, before))
        _refill(target, items)
    else:
        parts = [
            _in_place(before[at] if at < len(before) else None, item, undo, taken) for at, item in enumerate(value)
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


def _put(into: dict[str, Any], path: Path, value: Any, undo: _Undo) -> None:
    """Put a value into a state. A tuple is replaced by a new one with the same other items."""
    holder: Any = into
    for key in path[:-1]:
        holder = unwrap(holder[key])
    key: Any = path[-1]
    if type(holder) is tuple:
        items = cast("tuple[Any, ...]", holder)
        _put(into, path[:-1], (*items[:key], value, *items[key + 1 :]), undo)
        return
    if type(holder) in DICTS and key not in holder:
        undo.append(lambda: cast("object", holder.pop(key)))
        holder[key] = value
        return
    held: Any = holder[key]
    if unwrap(held) is not value:
        undo.append(lambda: holder.__setitem__(key, held))
        holder[key] = _rewrapped(held, value)


def _rewrapped(held: Any, value: Any) -> Any:
    """A value in the annotations of the one before."""
    if isinstance(held, ANNOTATIONS):
        return dataclasses.replace(held, value=_rewrapped(held.value, value))
    return value


# Optimizers --------------------------------------------------------------------------------------------------------


def _put_back_dtypes(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Undo torch's cast of optimizer states to the dtype of their parameter.

    The step count stays as torch's kernels need it: a count is a count in any dtype.
    """
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        state = optimizer.state.get(parameter, {})
        for key, value in saved["state"].get(number, {}).items():
            now = state.get(key)
            both = isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)
            if both and key != "step" and value.dtype != now.dtype:
                state[key] = value.to(now.device)


def _with_groups_of(optimizer: torch.optim.Optimizer, state: dict[str, Any], fqn: str) -> dict[str, Any]:
    """The state with what torch would lose from parameter groups.

    Tensors in groups, such as a learning rate, move to the devices of those they replace. Torch does not move them, and
    a captured graph takes a rate in host memory for a constant. Groups share one tensor if the live ones do. Options
    that the checkpoint lacks, such as those a newer torch has added, stay as they are.
    """
    saved_groups = cast("list[dict[str, Any]] | None", state.get("param_groups"))
    if type(saved_groups) is not list or len(saved_groups) != len(optimizer.param_groups):
        return state  # not torch's form, or another optimizer's: load_state_dict says so
    groups: list[dict[str, Any]] = []
    given: dict[int, Any] = {}
    kept: list[str] = []
    for at, (current, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        alone = {key: value for key, value in current.items() if key not in saved}
        kept += [f"{fqn}.param_groups.{at}.{key}" for key in alone if key != "param_names"]
        groups.append(alone | {key: _on_device_of(current.get(key), value, given) for key, value in saved.items()})
    if kept:
        names = ", ".join(few(kept, str, "stay"))
        logger.warning("the checkpoint does not have %s: what the optimizer has there stays", names)
    return {**state, "param_groups": groups}


def _on_device_of(current: Any, value: Any, given: dict[int, Any]) -> Any:
    """An option on the device of the one it replaces; ``given`` maps saved tensors to the live ones they replaced."""
    if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
        is_for_another = given.setdefault(id(value), current) is not current
        return value.to(current.device, copy=is_for_another)
    if isinstance(current, tuple) and isinstance(value, tuple):  # betas
        live, saved = cast("tuple[Any, ...]", current), cast("tuple[Any, ...]", value)
        if type(live) is type(saved) is tuple and len(live) == len(saved):
            return tuple(_on_device_of(*pair, given) for pair in zip(live, saved, strict=True))
        return saved
    return value
