"""Nested state to a flat map of tensors plus a treespec (:mod:`sidesave.stager.state.treespec`).

Tensors are collected as they are, without a copy (:mod:`sidesave.stager.state.tensor_collector`).
"""

from __future__ import annotations

import collections
import enum
import logging
import pathlib
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, Protocol, cast, runtime_checkable

import torch
from torch import nn

from sidesave.errors import IntegrityError, InvalidArgumentError, UnsupportedValueError, brief
from sidesave.stager import data_parallel, torch_private
from sidesave.stager.state.annotations import ANNOTATIONS
from sidesave.stager.state.flat_state import TENSORS, FlatState, container_name
from sidesave.stager.state.recall import Recall
from sidesave.stager.state.subclass_nodes import SubclassEncoder
from sidesave.stager.state.subclasses import kind_name, object_parts
from sidesave.stager.state.tags import FACTORIES, MAX_DEPTH, PLAIN, PRIMITIVES, Tag, pack
from sidesave.stager.state.tensor_collector import NoValuesYet, TensorCollector
from sidesave.stager.state.tensor_nodes import TensorRef
from sidesave.stager.state.treespec import rebuilt
from sidesave.stager.state.values import (
    ENCODERS,
    cure,
    is_numpy_array,
    is_numpy_scalar,
    npy_file,
    numpy_scalar_node,
    torch_array,
)
from sidesave.stager.tables import may_be_meant_as_table
from sidesave.stager.wrappers import unwrapped_state

logger = logging.getLogger(__name__)

_DEEP: Final = 20
"""Containers nested deeper than this, which few states have, are checked for cycles."""
_MANY: Final = 16
"""A dict of at least this many tensors alone is remembered: comparing is faster than encoding."""
_LEAST: Final = -(1 << 63)
_MOST: Final = (1 << 64) - 1
_SHOWN: Final = 20
_MAX_NAME: Final = 160
_reported_enums: Final = set[type]()
"""Enums already logged as saved by value."""
_ENUM_VALUES: Final = PLAIN | {tuple}
"""Types whose value identifies a member of an enum."""


@runtime_checkable
class Stateful(Protocol):
    """An object that gives and takes its state: a scheduler, data loader, sampler or scaler."""

    def state_dict(self) -> dict[str, Any]:
        """The state as a nest of savable values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take such a nest back."""
        ...


def flatten(
    state: Mapping[str, Any],
    *,
    allow_pickle: bool = False,
    ranks: tuple[int, ...] | None = None,
    recall: Recall | None = None,
    meta: bool = False,
) -> FlatState:
    """Flatten a state without copying tensors; ``ranks`` save together (None for one alone).

    Parts that ``recall`` remembers are reused. ``meta`` allows tensors without values.

    Raises:
        InvalidArgumentError: The state is no mapping with string keys.
        UnsupportedValueError: Values that cannot be saved, or have the FQN of another; the message
            names all of them.
    """
    flattener = _Flattener(allow_pickle, ranks, recall)
    flattener.tensors.takes_meta = meta
    treespec: dict[str, Any] = {}

    def encode() -> None:
        for key, value in _items_of(state):
            treespec[key] = flattener.item(key, value)

    _without_grad(encode)
    _refuse(flattener.tensors.refused)
    flat = flattener.tensors.finish()
    flat.objects = pack(treespec)
    return flat


def check(
    state: Mapping[str, Any], *, allow_pickle: bool = False, ranks: tuple[int, ...] | None = None
) -> None:
    """Raise before training the errors :func:`flatten` would raise later, except for unready parts.

    Tensors without values may get some, objects whose ``state_dict`` fails may become ready, and a
    ``FullyShardedDataParallel`` module is skipped, as it would gather its parameters.
    """
    flattener = _Flattener(allow_pickle, ranks)

    def encode() -> None:
        for key, value in _items_of(state):
            if isinstance(value, nn.Module) and data_parallel.gathers_state(value):
                continue
            try:
                flattener.item(key, value)
            except Exception as error:  # noqa: BLE001 - of the object's own state_dict; a save will raise it
                logger.debug("%s has no state yet: %r", key, error)

    _without_grad(encode)
    _refuse(flattener.tensors.refused, NoValuesYet)


def _without_grad(encode: Callable[[], None]) -> None:
    grad = torch.is_grad_enabled()
    try:
        torch_private.set_grad_enabled(False)
        encode()
    finally:
        torch_private.set_grad_enabled(grad)


def _items_of(state: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    if not isinstance(cast("object", state), Mapping):
        raise InvalidArgumentError(
            f"state must be a dict of named items, not {type(state).__name__}"
        )
    for key in state:
        if not isinstance(cast("object", key), str) or not key:
            raise InvalidArgumentError(f"state keys must be non-empty strings, not {brief(key)}")
    return state.items()


class _Endless(UnsupportedValueError):
    """The nesting below this point is infinite."""


def _refuse(refused: list[UnsupportedValueError], but: type[Exception] | tuple[()] = ()) -> None:
    """Raise one error that lists all; empties the list, as the errors' tracebacks refer to it."""
    errors = [error for error in refused if not isinstance(error, but)]
    refused.clear()
    if not errors:
        return
    lines = [str(error) for error in errors[:_SHOWN]]
    if len(errors) > 1:
        more = [f"... and {len(errors) - _SHOWN} more"] if len(errors) > _SHOWN else []
        lines = [f"{len(errors)} values of the state cannot be saved:", *lines, *more]
    raise UnsupportedValueError("\n  ".join(lines)) from errors[0].__cause__


class _Flattener:
    def __init__(
        self, allow_pickle: bool, ranks: tuple[int, ...] | None, recall: Recall | None = None
    ) -> None:
        self.tensors = TensorCollector(ranks, recall)
        self._tensor = self.tensors.tensor
        self._allow_pickle = allow_pickle
        self._is_context = False
        self._above: dict[int, str] = {}  # where something deep is within: containers by id

    def item(self, key: str, value: Any) -> Any:
        """The node of a top-level item; errors of unsupported values go to ``tensors.refused``."""
        self.tensors.container = TENSORS if isinstance(value, torch.Tensor) else container_name(key)
        try:
            return self.encode(value, key, 0)
        except _Endless as error:
            self.tensors.refused.append(error)
            return None

    def encode(self, value: Any, fqn: str, depth: int) -> Any:
        kind = value.__class__
        try:
            if kind is torch.Tensor or kind is nn.Parameter:
                return self._tensor(value, fqn)
            if kind in PRIMITIVES:
                return value
            if kind is int:
                return value if _LEAST <= value <= _MOST else [Tag.INT, hex(value)]
            if depth > _DEEP:
                return self._deep(value, fqn, depth)
            handler = _HANDLERS.get(kind)
            if handler is not None:
                return handler(self, value, fqn, depth)
            return self._encode_by_ancestry(value, fqn, depth)
        except _Endless:
            raise
        except UnsupportedValueError as error:
            self.tensors.refused.append(error)
            return None

    def _deep(self, value: Any, fqn: str, depth: int) -> Any:
        """Encode like :meth:`encode`, and check for cycles; shallower values skip this check."""
        first = self._above.get(id(value))
        if first is not None:
            turn = fqn[len(first) :]
            while first.endswith(turn):
                first = first.removesuffix(turn)
            raise _Endless(
                f"{brief_name(first)}: it contains itself, as {brief_name(first + turn)}"
            )
        if depth > MAX_DEPTH:
            raise _Endless(f"{brief_name(fqn)}: nested deeper than {MAX_DEPTH} levels")
        self._above[id(value)] = fqn
        try:
            handler = _HANDLERS.get(value.__class__, _Flattener._encode_by_ancestry)
            return handler(self, value, fqn, depth)
        finally:
            del self._above[id(value)]

    def _encode_by_ancestry(self, value: Any, fqn: str, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            return SubclassEncoder(self.tensors, self._context).node(value, fqn)
        if self._is_context and (parts := object_parts(value)) is not None:
            if isinstance(parts, dict):
                parts = {
                    name: self.encode(part, f"{fqn}.{name}", depth + 1)
                    for name, part in parts.items()
                }
            return [Tag.OBJECT, kind_name(cast("Any", type(value))), parts]
        if may_be_meant_as_table(value):
            return self.tensors.table(value, fqn)
        if isinstance(value, nn.Module):
            with self.tensors.module(value, fqn, depth) as encoding:
                if encoding.node is None:
                    encoding.node = self._module(value, fqn, depth)
            return encoding.node
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(value, fqn, depth)
        if isinstance(value, ANNOTATIONS):
            with self.tensors.annotated(value, fqn) as encoding:
                encoding.node = self.encode(value.value, fqn, depth)
            return encoding.node
        if isinstance(value, enum.Enum):
            node = self.encode(value.value, fqn, depth + 1)
            if type(value.value) not in _ENUM_VALUES:
                _tell_enum(value, fqn)
                return node
            return [Tag.ENUM, kind_name(type(value)), value.name or "", node]
        if isinstance(value, pathlib.PosixPath):
            return [Tag.PATH, str(value)]
        if is_numpy_scalar(value):
            return numpy_scalar_node(value, fqn)
        if is_numpy_array(value):
            array, tensor = torch_array(value)
            if tensor is None:
                return [Tag.NUMPY_FILE, npy_file(array, fqn)]
            return [Tag.NUMPY_ARRAY, self._tensor(tensor, fqn)]
        if isinstance(value, Stateful) and not isinstance(value, type):
            self.tensors.meet_stateful(fqn)
            return self.encode(value.state_dict(), fqn, depth + 1)
        if self._allow_pickle:
            self.tensors.flat.pickled = True
            try:
                return [Tag.PICKLE, pickle.dumps(value, protocol=5)]
            except Exception as error:
                raise UnsupportedValueError(
                    f"{fqn}: a {type(value).__qualname__} cannot be pickled: {error}"
                ) from error
        raise UnsupportedValueError(
            f"{fqn}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved; "
            f"{cure(value)}"
        )

    def _context(self, value: Any, fqn: str) -> Any:
        """The node of a tensor class's context: all that it needs besides inner tensors."""
        flattener = _Flattener(self._allow_pickle, None)
        flattener._is_context = True
        node = flattener.encode(value, f"{fqn}.<context>", 0)
        _refuse(flattener.tensors.refused)
        flat = flattener.tensors.flat
        if flat.containers or flat.tables:
            raise UnsupportedValueError(
                f"{fqn}: tensors in the context of a tensor's class cannot be saved"
            )
        self.tensors.flat.pickled |= flat.pickled
        return node

    # Containers -----------------------------------------------------------------------------------

    def dict(self, value: dict[Any, Any], fqn: str, depth: int) -> Any:
        encode, prefix, below = self.encode, fqn + ".", depth + 1
        if all(type(key) is str for key in value):
            return [
                Tag.DICT,
                {key: encode(item, prefix + key, below) for key, item in value.items()},
            ]
        return [Tag.ITEMS, self.items(value, fqn, depth)]

    def table(self, value: dict[Any, Any], fqn: str, depth: int) -> Any:
        """The node of a plain dict of no object; a dict of tensors is remembered by its FQN."""
        if len(value) < _MANY or not torch_private.KINDS.issuperset(map(type, value.values())):
            return self.dict(value, fqn, depth)
        with self.tensors.remembered(None, {fqn: value}, fqn, depth) as encoding:
            if encoding.node is None:
                encoding.node = self.dict(value, fqn, depth)
        return encoding.node

    def _optimizer(self, optimizer: torch.optim.Optimizer, fqn: str, depth: int) -> Any:
        # Outside of a process group no state is divided among ranks.
        is_alone = not self.tensors.in_process_group
        state = optimizer.state_dict() if is_alone else data_parallel.state_dict_of(optimizer, fqn)
        with self.tensors.optimizer(
            optimizer, state, fqn, is_numbered=_is_numbered(state, optimizer)
        ) as encoding:
            encoding.node = self._optimizer_state(optimizer, state, fqn, depth)
        return encoding.node

    def _optimizer_state(
        self, source: torch.optim.Optimizer, state: Any, fqn: str, depth: int
    ) -> Any:
        is_usual = state.__class__ is dict and {str}.issuperset(map(type, state))
        if not is_usual or state.get("state").__class__ is not dict:
            return self.dict(state, fqn, depth)
        nodes: dict[str, Any] = {}
        for key, item in state.items():
            if key != "state":
                nodes[key] = self.encode(item, f"{fqn}.{key}", depth + 1)
                continue
            with self.tensors.remembered(source, item, f"{fqn}.state", depth + 1) as encoding:
                if encoding.node is None:
                    encoding.node = self.encode(item, f"{fqn}.state", depth + 1)
            nodes[key] = encoding.node
        return [Tag.DICT, nodes]

    def _module(self, module: nn.Module, fqn: str, depth: int) -> Any:
        state, metadata = unwrapped_state(module, fqn)
        tag, body = self.dict(state, fqn, depth)
        if metadata is None:
            return [tag, body]
        about = {key: dict(each) for key, each in metadata.items()}
        return [Tag.MODULE, self.encode(about, f"{fqn}.<metadata>", depth + 1), body]

    def items(self, value: dict[Any, Any], fqn: str, depth: int) -> list[Any]:
        keys = self.hashed(value, fqn, depth + 1)
        items = [self.encode(item, f"{fqn}.{key}", depth + 1) for key, item in value.items()]
        return [[key, item] for key, item in zip(keys, items, strict=True)]

    def hashed(self, values: Collection[Any], fqn: str, depth: int) -> list[Any]:
        """Encode keys of a dict or members of a set; each must come back hashable and distinct.

        Modules become dicts, and enums their values, which another key may be.
        """
        with self.tensors.in_full():
            nodes = [self.encode(value, f"{fqn}.<key>", depth) for value in values]
        for value in values:
            if isinstance(value, enum.Enum):
                _tell_enum(value, fqn)
        if PLAIN.issuperset(map(type, values)):
            return nodes
        known: dict[Any, Any] = {}
        for value, node in zip(values, nodes, strict=True):
            try:
                other = known.setdefault(rebuilt(node, _no_tensor), value)
            except (IntegrityError, TypeError) as error:
                kind = (
                    "a tensor"
                    if isinstance(value, torch.Tensor)
                    else f"a {type(value).__qualname__}"
                )
                raise UnsupportedValueError(
                    f"{fqn}: {kind} cannot be a key, nor in a set: it would come back as what "
                    "cannot be one"
                ) from error
            if other is not value:
                raise UnsupportedValueError(
                    f"{fqn}: {other!r:.80} and {value!r:.80} would come back as one, for enums are "
                    "saved by value"
                )
        return nodes

    def sequence(self, value: Any, fqn: str, depth: int) -> list[Any]:
        kinds = set(map(type, value))
        if PRIMITIVES.issuperset(kinds) or (
            kinds == {int} and _LEAST <= min(value) and max(value) <= _MOST
        ):
            return list(value)
        return [self.encode(item, f"{fqn}.{index}", depth + 1) for index, item in enumerate(value)]


def _is_numbered(state: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a state has torch's optimizer form: numbers stand for each group's parameters."""
    groups = cast("dict[str, Any]", state).get("param_groups") if type(state) is dict else None
    return type(groups) is list and [_count(group) for group in cast("list[Any]", groups)] == [
        len(group["params"]) for group in optimizer.param_groups
    ]


def _count(group: Any) -> int | None:
    numbers = cast("dict[str, Any]", group).get("params") if type(group) is dict else None
    return len(cast("list[Any]", numbers)) if type(numbers) is list else None


def brief_name(fqn: str) -> str:
    """An FQN for messages: a long one is shortened to both ends."""
    return fqn if len(fqn) <= _MAX_NAME else f"{fqn[: _MAX_NAME // 2]}...{fqn[-_MAX_NAME // 2 :]}"


def _no_tensor(ref: TensorRef) -> Any:
    raise TypeError("a tensor is identified by its place, not its value")


def _tell_enum(value: enum.Enum, fqn: str) -> None:
    """Log once per class that an enum, as a key or with a compound value, is saved as its value."""
    if value != value.value and type(value) not in _reported_enums:
        _reported_enums.add(type(value))
        logger.warning(
            "%s: %r is saved as %r, and so are others of its kind", fqn, value, value.value
        )


def _default_dict(flattener: _Flattener, value: Any, fqn: str, depth: int) -> Any:
    if value.default_factory not in FACTORIES:
        factory = brief(value.default_factory)
        raise UnsupportedValueError(
            f"{fqn}: a defaultdict with factory {factory}; turn it into a dict"
        )
    return [Tag.DEFAULT_DICT, FACTORIES[value.default_factory], flattener.items(value, fqn, depth)]


_Handler = Callable[[_Flattener, Any, str, int], Any]


def _of_value(node: Callable[[Any, str], Any]) -> _Handler:
    return lambda flattener, value, fqn, depth: node(value, fqn)


_HANDLERS: Final[dict[type, _Handler]] = {
    dict: lambda f, v, q, d: f.table(v, q, d),
    list: lambda f, v, q, d: [Tag.LIST, *f.sequence(v, q, d)],
    tuple: lambda f, v, q, d: [Tag.TUPLE, *f.sequence(v, q, d)],
    set: lambda f, v, q, d: [Tag.SET, *f.hashed(sorted(v, key=repr), q, d + 1)],
    frozenset: lambda f, v, q, d: [Tag.FROZENSET, *f.hashed(sorted(v, key=repr), q, d + 1)],
    collections.OrderedDict: lambda f, v, q, d: [Tag.ORDERED_DICT, f.items(v, q, d)],
    collections.Counter: lambda f, v, q, d: [Tag.COUNTER, f.items(v, q, d)],
    collections.defaultdict: _default_dict,
    collections.deque: lambda f, v, q, d: [Tag.DEQUE, v.maxlen, *f.sequence(v, q, d)],
    **{kind: _of_value(node) for kind, node in ENCODERS.items()},
}
