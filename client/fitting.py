"""Whether a checkpoint fits live objects, and which part of each tensor they take. Nothing is read, nothing touched."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import nn

from sidesave.client.reader import CheckpointReader, Wanted
from sidesave.client.shards import Shard, may_be_spread
from sidesave.errors import StateMismatchError, UnsupportedValueError
from sidesave.stager.dtypes import CARRIERS
from sidesave.stager.marks import PerRank, Replicated
from sidesave.stager.skeleton import TensorRef
from sidesave.stager.tree import Stateful, is_dtensor

_LIKE_PARAMETERS: Final = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")
"""States of an optimizer that have the shape of their parameter."""


@dataclass(slots=True, eq=False)
class Expected:
    """A tensor that will be loaded, known by its entry only; whole, unless its target takes a shard."""

    ref: TensorRef
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: Shard | None = None

    @classmethod
    def of(cls, ref: TensorRef, reader: CheckpointReader, cast_to: torch.dtype | None) -> Expected:
        """What the skeleton of ``reader`` refers to, once it has been cast."""
        name = reader.name_of(ref)
        stored = reader.entry(name)
        dtype, shape = stored.dtype, stored.shape
        if ref.dtype is not None:
            shape = shape[:-1] if CARRIERS[ref.dtype].pair else shape
            dtype = ref.dtype
        if ref.sparse_shape is not None:
            shape = ref.sparse_shape
        return cls(ref, name, shape, cast_to if cast_to is not None and dtype.is_floating_point else dtype)

    @property
    def wanted(self) -> Wanted | None:
        """What has to be read for it; None for nothing."""
        if self.shard is None:
            return self.name, None
        if self.shard.box is None:
            return None
        offsets, shape = self.shard.box
        if self.ref.dtype is not None and CARRIERS[self.ref.dtype].pair:
            offsets, shape = (*offsets, 0), (*shape, 2)
        return self.name, (offsets, shape)


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint at names that are like one that is not there."""
    near = difflib.get_close_matches(name, list(names), n=3)
    return f" (near: {', '.join(near)})" if near else ""


def unwrap(target: Any) -> Any:
    """What ``Replicated`` or ``PerRank`` say something of; anything else as it is."""
    return unwrap(target.value) if isinstance(target, (Replicated, PerRank)) else target


def is_live(target: Any) -> bool:
    """Whether a target takes its state in place; plain data is replaced."""
    target = unwrap(target)
    if type(target) is dict:
        return any(map(is_live, cast("dict[Any, Any]", target).values()))
    if type(target) in (list, tuple):
        return any(map(is_live, target))
    if isinstance(target, (nn.Module, torch.optim.Optimizer, torch.Tensor)):
        return True
    return isinstance(target, Stateful) and not isinstance(target, type)


class Fitting:
    """One comparison of live objects with what there is for them.

    Attributes:
        surplus: FQNs of what is of other ranks only, such as another stage of a pipeline, and has no place here.
    """

    def __init__(self, partial: set[str], *, strict: bool) -> None:
        """Of what is ``partial``, a target need not have all; of the rest it must, if ``strict``."""
        self.surplus: set[str] = set()
        self._pinned = False  # inside PerRank, where a DTensor's local part was saved as a tensor of the rank's own
        self._partial = partial
        self._strict = strict
        self._problems: list[str] = []

    def compare(self, into: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        """Compare, and note in ``expected`` what its targets take only a shard of.

        Raises ``StateMismatchError``, which names all that does not fit.
        """
        for name, target in into.items():
            if name in expected:
                self._any(target, expected[name], name)
            elif self._strict:
                self._problems.append(f"{name}: nothing of it is in the checkpoint")
        if self._problems:
            shown, more = self._problems[:20], len(self._problems) - 20
            shown += [f"... and {more} more"] if more > 0 else []
            raise StateMismatchError("the checkpoint does not fit, and nothing was loaded:\n  " + "\n  ".join(shown))

    def _any(self, target: Any, saved: Any, fqn: str) -> None:
        if isinstance(target, (Replicated, PerRank)):
            before, self._pinned = self._pinned, self._pinned or isinstance(target, PerRank)
            self._any(target.value, saved, fqn)
            self._pinned = before
        elif isinstance(target, nn.Module):
            self._keys(target.state_dict(keep_vars=True), saved, fqn)
        elif isinstance(target, torch.optim.Optimizer):
            self._optimizer(target, saved, fqn)
        elif isinstance(target, torch.Tensor):
            self._tensor(target, saved, fqn)
        elif isinstance(target, dict) and not isinstance(target, Stateful):
            self._keys(cast("dict[Any, Any]", target), saved, fqn)
        elif isinstance(target, (list, tuple)) and is_live(target):
            self._items(cast("Sequence[Any]", target), saved, fqn)
        elif isinstance(target, Stateful) and not isinstance(target, type) and may_be_spread():
            self._follow(target.state_dict(), saved, fqn)

    def _items(self, target: Sequence[Any], saved: Any, fqn: str) -> None:
        if not isinstance(saved, (list, tuple)) or len(cast("Sequence[Any]", saved)) != len(target):
            self._problems.append(f"{fqn}: the checkpoint does not hold {len(target)} items here, as the target does")
            return
        for index, (item, found) in enumerate(zip(target, cast("Sequence[Any]", saved), strict=True)):
            self._any(item, found, f"{fqn}.{index}")

    def _keys(self, target: Mapping[Any, Any], saved: Any, fqn: str) -> None:
        if not isinstance(saved, Mapping):
            self._problems.append(
                f"{fqn}: the checkpoint holds a {type(saved).__name__} here, not a set of named values"
            )
            return
        body = cast("Mapping[Any, Any]", saved)
        missing = [key for key in target if key not in body]
        unexpected = [key for key in body if key not in target]
        elsewhere = {f"{fqn}.{key}" for key in unexpected if f"{fqn}.{key}" in self._partial}
        self.surplus |= elsewhere
        if self._strict:
            self._problems += [
                f"{fqn}.{key}: missing in the checkpoint{nearest(str(key), map(str, unexpected))}" for key in missing
            ]
            self._problems += [
                f"{fqn}.{key}: unexpected, the target has no such key"
                for key in unexpected
                if f"{fqn}.{key}" not in elsewhere
            ]
        for key, value in target.items():
            if key in body:
                self._any(value, body[key], f"{fqn}.{key}")

    def _tensor(self, target: torch.Tensor, saved: Any, fqn: str) -> None:
        if nn.parameter.is_lazy(target):
            return  # takes any shape
        if target.is_meta:
            problem = "the target is a meta tensor and cannot hold values; materialize it with to_empty()"
        elif not isinstance(saved, Expected):
            problem = f"the checkpoint holds a {type(saved).__name__}, the target is a tensor"
        elif self._shape(target) != saved.shape:
            problem = f"shape {list(saved.shape)} in the checkpoint, {list(self._shape(target))} in the target"
        elif target.dtype != saved.dtype:
            problem = f"{saved.dtype} in the checkpoint, {target.dtype} in the target; pass dtype= to cast"
        else:
            self._spread(saved, target, fqn)
            return
        self._problems.append(f"{fqn}: {problem}")

    def _shape(self, target: torch.Tensor) -> tuple[int, ...]:
        """What is saved of a tensor has this shape."""
        alone = self._pinned and is_dtensor(target)
        return tuple(cast("Any", target).to_local().shape if alone else target.shape)

    def _spread(self, saved: Expected, like: torch.Tensor, fqn: str) -> None:
        """Have a tensor come in the shards that ``like`` has, if it has any."""
        if is_dtensor(like):
            try:
                saved.shard = Shard.alone(like) if self._pinned else Shard.of(like, fqn)
            except UnsupportedValueError as error:
                self._problems.append(str(error))

    def _follow(self, current: Any, saved: Any, fqn: str) -> None:
        """The state that an object of the user's has now says what is spread of the one it will take; nothing else."""
        if isinstance(saved, Expected):
            if is_dtensor(current) and self._shape(current) == saved.shape:
                self._spread(saved, current, fqn)
        elif isinstance(saved, Mapping) and isinstance(current, Mapping):
            for key, value in cast("Mapping[Any, Any]", current).items():
                self._follow(value, cast("Mapping[Any, Any]", saved).get(key), f"{fqn}.{key}")
        elif isinstance(saved, (list, tuple)) and isinstance(current, (list, tuple)):
            for index, pair in enumerate(zip(cast("list[Any]", current), cast("list[Any]", saved), strict=False)):
                self._follow(*pair, f"{fqn}.{index}")

    def _optimizer(self, target: torch.optim.Optimizer, saved: Any, fqn: str) -> None:
        body = cast("dict[str, Any]", saved if isinstance(saved, dict) else {})
        groups, states = body.get("param_groups"), body.get("state")
        if not isinstance(groups, list) or not isinstance(states, dict):
            self._problems.append(f"{fqn}: the checkpoint holds no optimizer state here")
            return
        groups, states = cast("list[Any]", groups), cast("dict[Any, Any]", states)
        if not all(_is_group(group) for group in groups) or not all(isinstance(one, dict) for one in states.values()):
            self._problems.append(f"{fqn}: the checkpoint holds malformed optimizer state here")
            return
        sizes = [len(group["params"]) for group in groups]
        here = [len(group["params"]) for group in target.param_groups]
        if sizes != here:
            self._problems.append(f"{fqn}: parameter groups of {sizes} in the checkpoint, {here} in the target")
            return
        parameters = [parameter for group in target.param_groups for parameter in group["params"]]
        ids = [number for group in groups for number in group["params"]]
        self.surplus |= {f"{fqn}.state.{number}" for number in states.keys() - set(ids)} & self._partial
        for number, parameter in zip(ids, parameters, strict=True):
            current = target.state.get(parameter, {})
            for key, value in states.get(number, {}).items():
                if isinstance(value, Expected):
                    self._state(parameter, key, current.get(key), value, f"{fqn}.state.{number}.{key}")

    def _state(self, parameter: torch.Tensor, key: Any, have: Any, saved: Expected, fqn: str) -> None:
        if isinstance(have, torch.Tensor):
            if self._shape(have) != saved.shape:
                self._problems.append(
                    f"{fqn}: shape {list(saved.shape)} in the checkpoint, {list(self._shape(have))} in the target"
                )
            else:
                self._spread(saved, have, fqn)
        elif (
            tuple(parameter.shape) == saved.shape and key != "step"
        ):  # a new optimizer's, to be spread as its parameter
            self._spread(saved, parameter, fqn)
        elif key in _LIKE_PARAMETERS:
            self._problems.append(
                f"{fqn}: shape {list(saved.shape)} in the checkpoint, its parameter has {list(self._shape(parameter))}"
            )


def _is_group(group: Any) -> bool:
    numbers = cast("dict[str, Any]", group).get("params") if isinstance(group, dict) else None
    return isinstance(numbers, list) and all(type(number) is int for number in cast("list[Any]", numbers))
