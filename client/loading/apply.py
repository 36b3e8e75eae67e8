"""Giving live objects the state that was loaded for them, all of it or, where an object raises, as little as can be."""

from __future__ import annotations

import copy
import enum
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from sidesave.client.loading.plan import DICTS, SEQUENCES, is_live, unwrap
from sidesave.client.loading.sharded import Local, spread_all
from sidesave.client.messages import few
from sidesave.errors import StateMismatchError
from sidesave.stager.state.annotations import PerRank, Replicated

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Gift:
    """A value for ``holder[key]``, which is ``target`` now."""

    holder: Any
    key: Any
    target: Any
    value: Any
    fqn: str

    def order(self) -> int:
        """Objects of the user's first, for what may raise; then what was checked; plain values cannot fail."""
        if isinstance(self.target, torch.optim.Optimizer):
            return 1
        if isinstance(self.target, (nn.Module, torch.Tensor)):
            return 2
        return 0 if is_live(self.target) else 3


def give(into: dict[str, Any], state: Mapping[str, Any], *, strict: bool) -> None:
    """Give every item of ``into`` its state. User code may raise: then what was given before is put back as it was.

    Not so the values of modules and tensors: a copy of them may not fit. They come last, and have been checked.
    """
    undo: list[tuple[Any, Any]] = []
    gifts = [gift for name in into if name in state for gift in _gifts(into, name, state[name], name)]
    try:
        for gift in sorted(gifts, key=_Gift.order):
            _give(gift, undo, strict=strict)
    except BaseException:
        for target, before in reversed(undo):
            try:
                target.load_state_dict(before)
            except Exception:
                logger.exception("a %s could not be put back as it was", type(target).__qualname__)
        raise


def _gifts(holder: Any, key: Any, value: Any, fqn: str) -> Iterator[_Gift]:
    """What goes where below ``holder[key]``: dicts, and sequences of live objects, take theirs item by item."""
    target = unwrap(holder[key])
    if type(target) in DICTS:
        items = cast("dict[Any, Any]", target)
        for name, item in value.items():
            if name in items:
                yield from _gifts(items, name, item, f"{fqn}.{name}")
    elif type(target) in SEQUENCES and is_live(target):
        parts = target if _keeps(target) else _Tuple(target)
        for index, item in enumerate(value):
            yield from _gifts(parts, index, item, f"{fqn}.{index}")
        if parts is not target:  # another one with the same objects in it: the plain values of this one cannot change
            yield _Gift(holder, key, None, parts, fqn)
    else:
        yield _Gift(holder, key, target, value, fqn)


def _keeps(target: Any) -> bool:
    """Whether a target stays the object that it is."""
    target = unwrap(target)
    return all(map(_keeps, cast("tuple[Any, ...]", target))) if type(target) is tuple else is_live(target)


class _Tuple(list[Any]):
    """A tuple in the making."""


def refuse_two_for_one(into: dict[str, Any], state: Mapping[str, Any]) -> None:
    """Raise ``StateMismatchError`` where one live tensor, under two names, would be given two different values."""
    first: dict[int, tuple[str, torch.Tensor, Any]] = {}
    odd: list[str] = []
    for name in into:
        for fqn, target, value in _tensors(into[name], state[name], name) if name in state else ():
            known, _, other = first.setdefault(id(target), (fqn, target, value))
            if other is not value and not _same_bits(other, value):
                odd.append(f"{known} and {fqn} are one tensor in the target, and two with other values")
    if odd:
        raise StateMismatchError(
            "the checkpoint does not fit, and nothing was loaded:\n  "
            + "\n  ".join(few(odd, lambda line: f"{line} in the checkpoint; exclude one", "are one"))
        )


def _tensors(target: Any, value: Any, fqn: str) -> Iterator[tuple[str, torch.Tensor, Any]]:
    target = unwrap(target)
    if isinstance(target, torch.Tensor):
        yield fqn, target, value
    elif isinstance(target, nn.Module):
        for key, tensor in target.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor) and key in value:
                yield f"{fqn}.{key}", tensor, value[key]
    elif type(target) in DICTS:
        for key, item in cast("dict[Any, Any]", target).items():
            if key in value:
                yield from _tensors(item, value[key], f"{fqn}.{key}")
    elif type(target) in SEQUENCES and is_live(target):
        for index, (item, found) in enumerate(zip(target, value, strict=True)):
            yield from _tensors(item, found, f"{fqn}.{index}")


def _same_bits(first: Any, second: Any) -> bool:
    one, other = (value.tensor if isinstance(value, Local) else value for value in (first, second))
    if not isinstance(one, torch.Tensor) or one.layout is not torch.strided:
        return True
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _give(gift: _Gift, undo: list[tuple[Any, Any]], *, strict: bool) -> None:
    target = gift.target
    if isinstance(target, (nn.Module, torch.Tensor)) or isinstance(gift.value, Local):
        grad = torch.is_grad_enabled()
        try:  # an interrupt can keep `no_grad` from ending
            torch._C._set_grad_enabled(False)
            _fill(target, gift.value, strict=strict)
        finally:
            torch._C._set_grad_enabled(grad)
    elif isinstance(target, torch.optim.Optimizer):
        before = target.state_dict()
        undo.append((target, before))  # it will hold other tensors and leave these as they are
        state = _beside_those_of(target, spread_all(gift.value), gift.fqn)
        target.load_state_dict(state)
        if type(target).load_state_dict is torch.optim.Optimizer.load_state_dict:
            _put_back_dtypes(target, state)
    elif is_live(target):
        before = target.state_dict()
        undo.append((target, copy.deepcopy(before)))
        if isinstance(target, torch.optim.lr_scheduler.LRScheduler) and before.keys() != gift.value.keys():
            odd = ", ".join(sorted(before.keys() ^ gift.value.keys()))
            logger.warning("%s: the checkpoint's schedule is of another kind than this one: %s differ", gift.fqn, odd)
        target.load_state_dict(spread_all(gift.value))
    else:
        value = tuple(gift.value) if type(gift.value) is _Tuple else spread_all(gift.value)
        value = type(target)(value) if isinstance(target, enum.Enum) else value
        held = gift.holder[gift.key]
        gift.holder[gift.key] = type(held)(value) if isinstance(held, (PerRank, Replicated)) else value


def _put_back_dtypes(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Give states that torch has cast to the dtype of their parameter the values and the dtype they were saved with.

    Not the count of steps: torch makes it what its kernels need, and a count is a count in any dtype.
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


def _fill(target: Any, value: Any, *, strict: bool) -> None:
    if isinstance(target, nn.Module):
        target.load_state_dict(spread_all(value), strict=strict)
    elif isinstance(value, Local):
        value.give()
    else:
        target.copy_(value)


def _beside_those_of(optimizer: torch.optim.Optimizer, state: dict[str, Any], fqn: str) -> dict[str, Any]:
    """The state with what torch would lose of parameter groups.

    Tensors in them, such as a learning rate, come to the devices of those that they replace: torch moves the state, not
    these, and in a captured graph a rate in host memory is a constant. Options that the checkpoint does not have, as
    those that a newer torch has added, stay as they are.
    """
    saved_groups = cast("list[dict[str, Any]] | None", state.get("param_groups"))
    if type(saved_groups) is not list or len(saved_groups) != len(optimizer.param_groups):
        return state  # not torch's form, or not this optimizer's, which it says itself
    groups: list[dict[str, Any]] = []
    kept: list[str] = []
    for at, (current, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        alone = {key: value for key, value in current.items() if key not in saved}
        kept += [f"{fqn}.param_groups.{at}.{key}" for key in alone if key != "param_names"]
        groups.append(alone | {key: _on_device_of(current.get(key), value) for key, value in saved.items()})
    if kept:
        told = ", ".join(few(kept, str, "stay"))
        logger.warning("the checkpoint does not have %s: what the optimizer has there stays", told)
    return {**state, "param_groups": groups}


def _on_device_of(current: Any, value: Any) -> Any:
    if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.to(current.device)
    if isinstance(current, tuple) and isinstance(value, tuple):  # betas
        live, saved = cast("tuple[Any, ...]", current), cast("tuple[Any, ...]", value)
        if type(live) is type(saved) is tuple and len(live) == len(saved):
            return tuple(_on_device_of(*pair) for pair in zip(live, saved, strict=True))
        return saved
    return value
