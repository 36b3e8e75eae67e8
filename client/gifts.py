"""Giving live objects the state that was loaded for them, all of it or, where an object raises, as little as can be."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from sidesave.client.fitting import is_live, unwrap
from sidesave.client.shards import Local, spread_all

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Gift:
    """A value for ``holder[key]``, which is ``target`` now."""

    holder: Any
    key: Any
    target: Any
    value: Any

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
    gifts = [gift for name in into if name in state for gift in _gifts(into, name, state[name])]
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


def _gifts(holder: Any, key: Any, value: Any) -> Iterator[_Gift]:
    """What goes where below ``holder[key]``: dicts, and sequences of live objects, take theirs item by item."""
    target = unwrap(holder[key])
    if type(target) is dict:
        items = cast("dict[Any, Any]", target)
        for name, item in value.items():
            if name in items:
                yield from _gifts(items, name, item)
    elif type(target) in (list, tuple) and is_live(target):
        for index, item in enumerate(value):
            yield from _gifts(target, index, item)
    elif is_live(target):
        yield _Gift(holder, key, target, value)
    elif type(holder) is not tuple:
        yield _Gift(holder, key, target, value if holder[key] is target else type(holder[key])(value))


def _give(gift: _Gift, undo: list[tuple[Any, Any]], *, strict: bool) -> None:
    target = gift.target
    if isinstance(target, nn.Module):
        with torch.no_grad():
            target.load_state_dict(spread_all(gift.value), strict=strict)
    elif isinstance(gift.value, Local):
        with torch.no_grad():
            gift.value.give()
    elif isinstance(target, torch.Tensor):
        with torch.no_grad():
            target.copy_(gift.value)
    elif isinstance(target, torch.optim.Optimizer):
        undo.append((target, target.state_dict()))  # it will hold other tensors and leave these as they are
        target.load_state_dict(spread_all(gift.value))
    elif is_live(target):
        undo.append((target, copy.deepcopy(target.state_dict())))
        target.load_state_dict(spread_all(gift.value))
    else:
        gift.holder[gift.key] = spread_all(gift.value)
