"""Whether a checkpoint fits live objects, and which part of each tensor they take. Nothing is read, nothing touched."""

from __future__ import annotations

import collections
import enum
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import nn

from sidesave.client.loading.mismatch import Mismatches, Strangers
from sidesave.client.loading.sharded import Shard, may_be_spread
from sidesave.client.reading.checkpoint_reader import Reader, Wanted
from sidesave.errors import IntegrityError, UnsupportedValueError
from sidesave.stager.state.annotations import PerRank, Replicated
from sidesave.stager.state.dtypes import CARRIERS
from sidesave.stager.state.tensor_collector import is_dtensor
from sidesave.stager.state.tree import Stateful, check
from sidesave.stager.state.treespec import TensorRef

DICTS: Final = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)
SEQUENCES: Final = (list, tuple, collections.deque)
_PRECISE: Final = re.compile(r"\.step\Z|\.param_groups\.\d+\.")
_LIKE_PARAMETERS: Final = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")
"""States of an optimizer that have the shape of their parameter."""


@dataclass(slots=True, eq=False)
class Expected:
    """A tensor that will be loaded, known by its entry only; whole, unless its target takes a shard.

    ``is_buffer`` where its target is a buffer of a module.
    """

    ref: TensorRef
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    cast_to: torch.dtype | None = None
    shard: Shard | None = None
    is_buffer: bool = False

    def look_up(self, reader: Reader, cast_to: torch.dtype | None) -> None:
        """Take over what the manifest or a record says of the tensor, once it has been cast; raises like the reader."""
        self.name = reader.name_of(self.ref)
        stored = reader.entry(self.name)
        self.dtype, self.shape = stored.dtype, stored.shape
        if self.ref.dtype is not None:
            carrier = CARRIERS[self.ref.dtype]
            if stored.dtype != carrier.dtype or (carrier.pair and stored.shape[-1:] != (2,)):
                text = f"{self.name} is stored as {stored.dtype}{stored.shape}, which is no {self.ref.dtype}"
                raise IntegrityError(f"{reader.path}: {text}")
            self.shape = stored.shape[:-1] if carrier.pair else stored.shape
            self.dtype = self.ref.dtype
        if self.ref.sparse_shape is not None:
            self.shape = self.ref.sparse_shape
        # An optimizer's steps and rates: a cast would lose count, or train at another rate.
        precise = not self.shape and _PRECISE.search(self.ref.fqn) is not None
        if cast_to is not None and self.dtype.is_floating_point and not precise:
            self.dtype = self.cast_to = cast_to

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


class Pickled:
    """Stands for a pickled value while only names and shapes matter."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        """Of ``data``, which is not looked into."""
        self.data = data

    def __repr__(self) -> str:
        """What a name has in its place where it is a key."""
        return "<pickled>"


def unwrap(target: Any) -> Any:
    """What ``Replicated`` or ``PerRank`` say something of; anything else as it is."""
    return unwrap(target.value) if isinstance(target, (Replicated, PerRank)) else target


def is_live(target: Any) -> bool:
    """Whether a target takes its state in place; plain data is replaced."""
    target = unwrap(target)
    if type(target) in DICTS:
        return any(map(is_live, cast("dict[Any, Any]", target).values()))
    if type(target) in SEQUENCES:
        return any(map(is_live, target))
    if isinstance(target, (nn.Module, torch.optim.Optimizer, torch.Tensor)):
        return True
    return isinstance(target, Stateful) and not isinstance(target, type)


class Fitting:
    """One comparison of live objects with what there is for them.

    Attributes:
        mismatches: Where they differ.
        surplus: What has no place here, in its dict and under its key, though it is no mistake: it is of other ranks,
            such as another stage of a pipeline, or nobody minds.
    """

    def __init__(
        self, partial: Collection[str], *, strict: bool, required: Callable[[str], bool] | None = None
    ) -> None:
        """Of what is ``partial``, a target need not have all; of the rest it must, if ``strict``.

        ``required`` tells of names of the target whether the checkpoint has to have them; None is all.
        """
        self.mismatches = Mismatches()
        self.surplus: list[tuple[dict[Any, Any], Any]] = []
        self._pinned = False  # inside PerRank, where a DTensor's local part was saved as a tensor of the rank's own
        self._partial = partial
        self._strict = strict
        self._required = required
        self._problems = self.mismatches.different

    def compare(self, into: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        """Compare, and note in ``expected`` what its targets take only a shard of."""
        for name, target in into.items():
            if name in expected:
                self._any(target, expected[name], name)
            else:
                self._miss(name, target)

    def _miss(self, fqn: str, target: Any) -> bool:
        required = self._is_required(fqn, target)
        if required:
            self.mismatches.missing.append(fqn)
        else:
            self.mismatches.absent += 1
        return required

    def _is_required(self, fqn: str, target: Any) -> bool:
        """Whether the checkpoint has to have something of a target."""
        required, target = self._required, unwrap(target)
        if required is None:
            return True
        if isinstance(target, nn.Module):
            return any(required(f"{fqn}.{key}") for key in target.state_dict(keep_vars=True))
        if type(target) in DICTS and target:
            return any(self._is_required(f"{fqn}.{key}", item) for key, item in cast("dict[Any, Any]", target).items())
        if type(cast("object", target)) in SEQUENCES and target:
            items = cast("list[Any]", target)
            return any(self._is_required(f"{fqn}.{index}", item) for index, item in enumerate(items))
        return required(fqn) or (is_live(target) and required(f"{fqn}.*"))

    def _any(self, target: Any, saved: Any, fqn: str) -> None:
        if isinstance(target, (Replicated, PerRank)):
            before, self._pinned = self._pinned, self._pinned or isinstance(target, PerRank)
            self._any(target.value, saved, fqn)
            self._pinned = before
        elif isinstance(target, nn.Module):
            self._keys(target.state_dict(keep_vars=True), saved, fqn, is_module=True)
        elif isinstance(target, torch.optim.Optimizer):
            self._optimizer(target, saved, fqn)
        elif isinstance(target, torch.Tensor):
            self._tensor(target, saved, fqn)
        elif type(target) in DICTS:
            self._keys(cast("dict[Any, Any]", target), saved, fqn)
        elif type(target) in SEQUENCES and is_live(target):
            self._items(cast("Sequence[Any]", target), saved, fqn)
        elif isinstance(target, Stateful) and not isinstance(target, type):
            if may_be_spread():
                self._follow(target.state_dict(), saved, fqn)
        elif isinstance(target, enum.Enum):
            try:
                type(target)(saved)
            except Exception:  # noqa: BLE001 - whatever the user's class says to a value that is none of its own
                self._problems.append(f"{fqn}: the checkpoint holds {saved!r:.80}, which is no {type(target).__name__}")
        elif isinstance(target, (Mapping, list, tuple)):
            self._refuse_kind(cast("Any", target), saved, fqn)
        elif not isinstance(saved, Pickled):
            self._plain(target, saved, fqn)

    def _plain(self, target: Any, saved: Any, fqn: str) -> None:
        """What is replaced must be something that could have been saved: a class or a function is there by mistake."""
        try:
            check({"target": target})
        except UnsupportedValueError:
            kind = f"the class {target.__name__}" if isinstance(target, type) else f"a {type(target).__qualname__}"
            self._problems.append(
                f"{fqn}: the target is {kind}, which takes no state; put a live object or plain data in its place"
            )

    def _refuse_kind(self, target: Any, saved: Any, fqn: str) -> None:
        """A container of a class of the user's: only what was pickled whole can take its place."""
        kind = cast("type[Any]", type(target))
        if kind in (*SEQUENCES, torch.Size):
            return
        items: list[Any] = list(cast("Mapping[Any, Any]", target).values() if issubclass(kind, Mapping) else target)
        if isinstance(saved, (Mapping, *SEQUENCES)) or any(map(is_live, items)):
            self._problems.append(
                f"{fqn}: a {kind.__name__} is not filled; put a dict or a list of its items in its place"
            )

    def _items(self, target: Sequence[Any], saved: Any, fqn: str) -> None:
        if type(saved) not in SEQUENCES or len(cast("Sequence[Any]", saved)) != len(target):
            self._problems.append(f"{fqn}: the checkpoint does not hold {len(target)} items here, as the target does")
            return
        for index, (item, found) in enumerate(zip(target, cast("Sequence[Any]", saved), strict=True)):
            self._any(item, found, f"{fqn}.{index}")

    def _keys(self, target: Mapping[Any, Any], saved: Any, fqn: str, *, is_module: bool = False) -> None:
        if not isinstance(saved, Mapping):
            self._problems.append(
                f"{fqn}: the checkpoint holds a {type(saved).__name__} here, not a set of named values"
            )
            return
        body = cast("dict[Any, Any]", saved)
        wanted = [key for key, value in target.items() if key in body or self._miss(f"{fqn}.{key}", value)]
        found = sum(key in body for key in wanted)
        self.mismatches.placed.append((fqn, wanted))
        others: list[str] = []
        for key in body:
            if key in target:
                continue
            elsewhere = f"{fqn}.{key}" in self._partial
            if elsewhere or not self._strict:
                self.surplus.append((body, key))
            if not elsewhere:
                others.append(str(key))
        self.mismatches.unexpected += [f"{fqn}.{key}" for key in others]
        if others and 10 * found < len(wanted) > 1:
            self.mismatches.strangers.append(Strangers(fqn, [str(key) for key in wanted], found, others))
        for key, value in target.items():
            if key not in body:
                continue
            if is_module and isinstance(body[key], Expected):
                body[key].is_buffer = not isinstance(value, nn.Parameter)
            if is_module and key.endswith("_extra_state"):  # of the module's own making, and for it to judge
                self._follow(value, body[key], f"{fqn}.{key}")
            else:
                self._any(value, body[key], f"{fqn}.{key}")

    def _tensor(self, target: torch.Tensor, saved: Any, fqn: str) -> None:
        if isinstance(saved, torch.Tensor):  # of the user's making, for another number of ranks
            saved = Expected(TensorRef(fqn, None), shape=tuple(saved.shape), dtype=saved.dtype)
        lazy = nn.parameter.is_lazy(target)  # takes any shape
        if target.is_meta and not lazy:
            problem = "the target is a meta tensor and cannot hold values; materialize it with to_empty()"
        elif not isinstance(saved, Expected) or saved.ref.array:
            kind = "NumPy array" if isinstance(saved, Expected) else type(saved).__name__
            problem = f"the checkpoint holds a {kind}, the target is a tensor"
        elif not lazy and self._shape(target) != saved.shape:
            problem = f"shape {list(saved.shape)} in the checkpoint, {list(self._shape(target))} in the target"
        elif target.dtype != saved.dtype:
            problem = f"{saved.dtype} in the checkpoint, {target.dtype} in the target; pass dtype= to cast"
        else:
            if not lazy:
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
        if not isinstance(groups, list) or states is None:
            self._problems.append(f"{fqn}: the checkpoint holds no optimizer state here")
            return
        groups = cast("list[Any]", groups)
        if not all(_is_group(group) for group in groups):
            self._problems.append(f"{fqn}: the checkpoint holds malformed optimizer state here")
            return
        sizes = [len(group["params"]) for group in groups]
        here = [len(group["params"]) for group in target.param_groups]
        if sizes != here:
            self._problems.append(f"{fqn}: parameter groups of {sizes} in the checkpoint, {here} in the target")
            return
        if not isinstance(states, dict) or not all(
            isinstance(one, dict) for one in cast("dict[Any, Any]", states).values()
        ):
            self._problems.append(f"{fqn}: the checkpoint holds malformed optimizer state here")
            return
        states = cast("dict[Any, Any]", states)
        self._options(target, groups, fqn)
        self._parameter_names(target, groups, fqn)
        parameters = [parameter for group in target.param_groups for parameter in group["params"]]
        ids = [number for group in groups for number in group["params"]]
        self.surplus += [
            (states, number) for number in states.keys() - set(ids) if f"{fqn}.state.{number}" in self._partial
        ]
        for number, parameter in zip(ids, parameters, strict=True):
            current, saved = target.state.get(parameter, {}), states.get(number, {})
            lacking, other = current.keys() - saved.keys(), saved.keys() - current.keys()
            if lacking and other and current:
                told = f"it has {', '.join(sorted(map(str, other)))} and no {', '.join(sorted(map(str, lacking)))}"
                self._problems.append(f"{fqn}.state.{number}: the state of another kind of optimizer: {told}")
                return
            for key, value in saved.items():
                if isinstance(value, Expected):
                    self._state(parameter, key, current.get(key), value, f"{fqn}.state.{number}.{key}")

    def _options(self, target: torch.optim.Optimizer, groups: list[dict[str, Any]], fqn: str) -> None:
        """Numbers that every step takes from a group: one that the checkpoint lacks is of another kind of optimizer.

        What newer versions of torch have added are switches.
        """
        numbers = [key for key, value in target.defaults.items() if _is_number(value)]
        lacking = [key for key in numbers if any(key not in group for group in groups)]
        if lacking:
            self._problems.append(
                f"{fqn}: the checkpoint holds the state of another kind of optimizer than {type(target).__name__}: it "
                f"has no {', '.join(lacking)}; to keep what the optimizer has, "
                f"exclude {fqn}.param_groups.*.{lacking[0]}"
            )

    def _parameter_names(self, target: torch.optim.Optimizer, groups: list[dict[str, Any]], fqn: str) -> None:
        """States go by position: where both sides know the names of their parameters, these must be the same."""
        for at, (group, saved) in enumerate(zip(target.param_groups, groups, strict=True)):
            names: Any = group.get("param_names"), saved.get("param_names")
            if not all(isinstance(each, list) for each in names) or names[0] == names[1]:
                continue
            odd = [f"{there} where {here} is here" for here, there in zip(*names, strict=False) if here != there]
            told = f"{', '.join(odd[:5])}{', ...' if len(odd) > 5 else ''}"
            self._problems.append(
                f"{fqn}.param_groups.{at}: the checkpoint has the states of other parameters, or in another order: "
                f"{told}; if only names have changed, exclude {fqn}.param_groups.{at}.param_names"
            )

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


def names_of(target: Any, fqn: str) -> Iterator[str]:
    """The names of all that a target has."""
    target = unwrap(target)
    if isinstance(target, torch.optim.Optimizer):
        for at, group in enumerate(target.param_groups):
            yield from (f"{fqn}.param_groups.{at}.{key}" for key in group)
        states = (target.state.get(parameter, {}) for group in target.param_groups for parameter in group["params"])
        yield from (f"{fqn}.state.{number}.{key}" for number, state in enumerate(states) for key in state)
    elif isinstance(target, nn.Module):
        yield from (f"{fqn}.{key}" for key in target.state_dict(keep_vars=True))
    elif isinstance(target, Stateful) and not isinstance(target, type):
        yield from names_of(target.state_dict(), fqn)
    elif isinstance(target, Mapping) and target:
        for key, item in cast("Mapping[Any, Any]", target).items():
            yield from names_of(item, f"{fqn}.{key}")
    elif type(cast("object", target)) in SEQUENCES and target:
        for index, item in enumerate(cast("Sequence[Any]", target)):
            yield from names_of(item, f"{fqn}.{index}")
    else:
        yield fqn


def _is_number(value: Any) -> bool:
    """Whether an option of an optimizer is a number, or several, and no switch."""
    if isinstance(value, tuple) and value:
        return all(map(_is_number, cast("tuple[Any, ...]", value)))
    return isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool)


def _is_group(group: Any) -> bool:
    numbers = cast("dict[str, Any]", group).get("params") if isinstance(group, dict) else None
    return isinstance(numbers, list) and all(type(number) is int for number in cast("list[Any]", numbers))
