"""Nested state to a flat map of tensors plus a treespec (:mod:`sidesave.stager.state.treespec`).

Tensors are collected as they are, without a copy (:mod:`sidesave.stager.state.tensor_collector`).
"""

from __future__ import annotations

import collections
import datetime
import enum
import functools
import io
import logging
import pathlib
import pickle
import sys
import zoneinfo
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, Protocol, cast, runtime_checkable

import torch
from torch import nn

from sidesave.errors import IntegrityError, InvalidArgumentError, UnsupportedValueError, brief
from sidesave.stager import torch_private
from sidesave.stager.state.annotations import ANNOTATIONS
from sidesave.stager.state.cures import cure
from sidesave.stager.state.dtypes import dtype_name
from sidesave.stager.state.flat_state import FROZEN, TENSORS, FlatState, container_name
from sidesave.stager.state.recall import KINDS, Recall
from sidesave.stager.state.tags import FACTORIES, MAX_DEPTH, PLAIN, PRIMITIVES, Packed, Tag, pack
from sidesave.stager.state.tensor_collector import NoValuesYet, TensorCollector
from sidesave.stager.state.treespec import TensorRef, rebuilt
from sidesave.stager.tables import may_be_meant_as_table
from sidesave.stager.wrappers import WrapperNames, two_of_one_name

logger = logging.getLogger(__name__)

_DEEP: Final = 20
"""Nested deeper than this, which hardly any state is, containers are watched for cycles."""
_MANY: Final = 16
"""A dict of so many tensors and nothing else is remembered: to compare it takes less time than to take it apart."""
_LEAST: Final = -(1 << 63)
_MOST: Final = (1 << 64) - 1
_SHOWN: Final = 20
_MAX_NAME: Final = 160
_reported_enums: Final = set[type]()
"""Enums of which the log has it that they are saved by value."""
_ENUM_VALUES: Final = PLAIN | {tuple}
"""Of these a member can be told from its value."""


@runtime_checkable
class Stateful(Protocol):
    """Anything that gives and takes its state: schedulers, data loaders, samplers, scalers."""

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
) -> FlatState:
    """Flatten a state, without copying a tensor. ``ranks`` are those that save together, None for one alone.

    Parts that ``recall`` remembers from an earlier call with the same ranks are not flattened again.

    Raises:
        InvalidArgumentError: The state is no mapping with string keys.
        UnsupportedValueError: Values that cannot be saved, or have the FQN of another; the message names all of them.
    """
    flattener = _Flattener(allow_pickle, ranks, recall)
    treespec: dict[str, Any] = {}

    def encode() -> None:
        for key, value in _items_of(state):
            treespec[key] = flattener.item(key, value)

    _without_grad(encode)
    _refuse(flattener.refused)
    flat = flattener.flat
    flat.containers = dict(sorted(flat.containers.items(), key=lambda item: item[0].endswith(FROZEN)))
    if recall is not None:
        flat.origin = recall.mark(flattener.tensors.again, flattener.tensors.origins)
    flattener.name_parameters()
    flat.objects = pack(treespec)
    flat.shared_digest = flattener.tensors.shared_digest
    return flat


def check(state: Mapping[str, Any], *, allow_pickle: bool = False, ranks: tuple[int, ...] | None = None) -> None:
    """Raise what :func:`flatten` will raise once training is under way; before that some things are not ready.

    Tensors without values may get some, objects that cannot tell their state yet may do so later, and a module of
    ``FullyShardedDataParallel`` would gather its parameters.
    """
    flattener = _Flattener(allow_pickle, ranks)

    def encode() -> None:
        for key, value in _items_of(state):
            if isinstance(value, nn.Module) and _gathers(value):
                continue
            try:
                flattener.item(key, value)
            except Exception as error:  # noqa: BLE001 - of the object's own state_dict; a save will raise it
                logger.debug("%s does not tell its state yet: %r", key, error)

    _without_grad(encode)
    _refuse(flattener.refused, NoValuesYet)


def _without_grad(encode: Callable[[], None]) -> None:
    grad = torch.is_grad_enabled()
    try:
        torch_private.set_grad_enabled(False)
        encode()
    finally:
        torch_private.set_grad_enabled(grad)


def _items_of(state: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    if not isinstance(cast("object", state), Mapping):
        raise InvalidArgumentError(f"state must be a dict of named items, not {type(state).__name__}")
    for key in state:
        if not isinstance(cast("object", key), str) or not key:
            raise InvalidArgumentError(f"state keys must be non-empty strings, not {brief(key)}")
    return state.items()


class _Endless(UnsupportedValueError):
    """The nesting below this point has no end."""


def _refuse(refused: list[UnsupportedValueError], but: type[Exception] | tuple[()] = ()) -> None:
    """Raise one error that lists all of them; the list is emptied, as who has it is in their tracebacks."""
    errors = [error for error in refused if not isinstance(error, but)]
    refused.clear()
    if not errors:
        return
    lines = [str(error) for error in errors[:_SHOWN]]
    if len(errors) > 1:
        more = [f"... and {len(errors) - _SHOWN} more"] if len(errors) > _SHOWN else []
        lines = [f"{len(errors)} values of the state cannot be saved:", *lines, *more]
    raise UnsupportedValueError("\n  ".join(lines)) from errors[0].__cause__


def _is_dict(value: Any) -> bool:
    return type(value) is dict


class _Flattener:
    def __init__(self, allow_pickle: bool, ranks: tuple[int, ...] | None, recall: Recall | None = None) -> None:
        self._recall = recall
        self.flat = FlatState()
        self.tensors = TensorCollector(self.flat, ranks, () if recall is None else recall.sequence)
        self._tensor = self.tensors.tensor
        self._allow_pickle = allow_pickle
        self.refused: list[UnsupportedValueError] = []
        self._above: dict[int, str] = {}  # where something deep is within: containers by id
        self._optimizers: list[tuple[torch.optim.Optimizer, list[Any]]] = []

    def item(self, key: str, value: Any) -> Any:
        """The node of an item at the top; what cannot be saved of it is in ``refused``."""
        self.tensors.container = TENSORS if isinstance(value, torch.Tensor) else container_name(key)
        try:
            return self.encode(value, key, 0)
        except _Endless as error:
            self.refused.append(error)
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
            self.refused.append(error)
            return None

    def _deep(self, value: Any, fqn: str, depth: int) -> Any:
        """As :meth:`encode`, with an eye on cycles: what is not nested so deep is in none, and pays nothing."""
        first = self._above.get(id(value))
        if first is not None:
            turn = fqn[len(first) :]
            while first.endswith(turn):
                first = first.removesuffix(turn)
            raise _Endless(f"{brief_name(first)}: it contains itself, as {brief_name(first + turn)}")
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
            return self.tensors.subclass(value, fqn)
        if may_be_meant_as_table(value):
            return self.tensors.table(value, fqn)
        if isinstance(value, nn.Module):
            self.tensors.meet_module(value)
            encode = functools.partial(self._module, value, fqn, depth)
            return self.tensors.shared(lambda: self._remembered(value, value, fqn, depth, encode), fqn)
        if isinstance(value, torch.optim.Optimizer):
            self.tensors.meet_optimizer(value)
            state = value.state_dict()
            node = self.tensors.shared(lambda: self._optimizer(value, state, fqn, depth), fqn)
            if _is_by_position(state, value):
                self._optimizers.append((value, node))
            return node
        if isinstance(value, ANNOTATIONS):
            return self.tensors.annotated(value, lambda: self.encode(value.value, fqn, depth), fqn)
        if isinstance(value, enum.Enum):
            kind, node = type(value), self.encode(value.value, fqn, depth + 1)
            if type(value.value) not in _ENUM_VALUES:
                _tell_enum(value, fqn)
                return node
            return [Tag.ENUM, f"{kind.__module__}:{kind.__qualname__}", value.name or "", node]
        if isinstance(value, pathlib.PosixPath):
            return [Tag.PATH, str(value)]
        numpy = sys.modules.get("numpy")
        if numpy is not None and _is_numpy_scalar(value):
            if value.dtype.fields or not value.dtype.itemsize:
                return [Tag.NUMPY_SCALAR, "", _to_npy(value, fqn)]
            _check_name(value.dtype, fqn)
            return [Tag.NUMPY_SCALAR, value.dtype.str, value.tobytes()]
        if numpy is not None and type(value) in (numpy.ndarray, numpy.memmap) and not value.dtype.hasobject:
            return self._array(value, fqn)
        if isinstance(value, Stateful) and not isinstance(value, type):
            self.tensors.meet_stateful(fqn)
            return self.encode(value.state_dict(), fqn, depth + 1)
        if self._allow_pickle:
            self.flat.pickled = True
            try:
                return [Tag.PICKLE, pickle.dumps(value, protocol=5)]
            except Exception as error:
                raise UnsupportedValueError(
                    f"{fqn}: a {type(value).__qualname__} cannot be pickled: {error}"
                ) from error
        raise UnsupportedValueError(
            f"{fqn}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved; {cure(value)}"
        )

    def name_parameters(self) -> None:
        """Add to the state of each optimizer which parameters it is of, if all of them are in the state.

        Without their names it could only go back to as many parameters in the same order.
        """
        recall = self._recall
        for optimizer, node in self._optimizers:
            known = None if recall is None else recall.names(optimizer)
            if known is None:
                groups: list[Any] = [group["params"] for group in optimizer.param_groups]
                names = [self.tensors.fqns_of(group) for group in groups]
                every = [name for group in names for name in group]
                if None in every or len({*every}) != len(every):
                    continue
                known = Packed(names)
                if recall is not None and all(map(self.tensors.has_again, groups)):
                    recall.note_names(optimizer, known)
            node[:] = [Tag.OPTIMIZER, known, node[1]]

    # Containers ------------------------------------------------------------------------------------------------

    def dict(self, value: dict[Any, Any], fqn: str, depth: int) -> Any:
        encode, prefix, below = self.encode, fqn + ".", depth + 1
        if all(type(key) is str for key in value):
            return [Tag.DICT, {key: encode(item, prefix + key, below) for key, item in value.items()}]
        return [Tag.ITEMS, self.items(value, fqn, depth)]

    def table(self, value: dict[Any, Any], fqn: str, depth: int) -> Any:
        """The node of a plain dict, which is no object's: one of tensors is known by where it is in the state."""
        if len(value) < _MANY or not KINDS.issuperset(map(type, value.values())):
            return self.dict(value, fqn, depth)
        return self._remembered(None, {fqn: value}, fqn, depth, functools.partial(self.dict, value, fqn, depth))

    def _remembered(self, source: Any, what: Any, fqn: str, depth: int, encode: Callable[[], Any]) -> Any:
        """The node of what belongs to an object, or to a place; the remembered one where nothing has changed."""
        place = self.tensors.place
        if self._recall is None or place is None:
            return encode()
        place = (fqn, depth, *place)
        known = self._recall.again(source, what, place)
        if known is not None and self.tensors.take_again(*known):
            return known[0].node
        refused = len(self.refused)
        node, taken = self.tensors.observe(encode)
        if len(self.refused) == refused:
            self._recall.note(source, what, place, taken)
        return node

    def _optimizer(self, source: torch.optim.Optimizer, state: Any, fqn: str, depth: int) -> Any:
        if not (_is_dict(state) and _is_dict(state.get("state")) and {str}.issuperset(map(type, state))):
            return self.dict(state, fqn, depth)

        def encode(key: str, item: Any) -> Any:
            return self.encode(item, f"{fqn}.{key}", depth + 1)

        def encode_item(key: str, item: Any) -> Any:
            if key != "state":
                return encode(key, item)
            return self._remembered(source, item, f"{fqn}.state", depth + 1, functools.partial(encode, key, item))

        return [Tag.DICT, {key: encode_item(key, item) for key, item in state.items()}]

    def _module(self, module: nn.Module, fqn: str, depth: int) -> Any:
        state = module.state_dict(keep_vars=True)
        metadata = getattr(state, "_metadata", None)
        if wrappers := WrapperNames(module):
            names = wrappers.keys(state)
            if two := two_of_one_name(names):
                name = f"{fqn}.{names[two[0]]}"
                raise UnsupportedValueError(f"{name}: without wrappers {two[0]} and {two[1]} are one name; rename one")
            state = {names[key]: value for key, value in state.items()}
            metadata = metadata and {wrappers.module(key): each for key, each in metadata.items()}
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
        """Encode keys of a dict, or members of a set; each has to come back hashable, and distinct from the rest.

        Modules become dicts, and enums their values, which another key may be.
        """
        recall, self._recall = self._recall, None  # whose nodes cannot be looked into
        try:
            nodes = [self.encode(value, f"{fqn}.<key>", depth) for value in values]
        finally:
            self._recall = recall
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
                kind = "a tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__qualname__}"
                raise UnsupportedValueError(
                    f"{fqn}: {kind} cannot be a key, nor in a set: it would come back as what cannot be one"
                ) from error
            if other is not value:
                raise UnsupportedValueError(
                    f"{fqn}: {other!r:.80} and {value!r:.80} would come back as one, for enums are saved by value"
                )
        return nodes

    def sequence(self, value: Any, fqn: str, depth: int) -> list[Any]:
        kinds = set(map(type, value))
        if PRIMITIVES.issuperset(kinds) or (kinds == {int} and _LEAST <= min(value) and max(value) <= _MOST):
            return list(value)
        return [self.encode(item, f"{fqn}.{index}", depth + 1) for index, item in enumerate(value)]

    def _array(self, value: Any, fqn: str) -> Any:
        import numpy as np

        array = np.ascontiguousarray(value).reshape(value.shape)  # ascontiguousarray makes 0-dim arrays 1-dim
        if not array.flags.writeable:
            array = array.copy()
        try:
            return [Tag.NUMPY_ARRAY, self._tensor(torch.from_numpy(array), fqn)]
        except (TypeError, ValueError):  # no such dtype; foreign byte order
            return [Tag.NUMPY_FILE, _to_npy(array, fqn)]


def _is_by_position(state: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a state has the form of torch's own, where numbers stand for the parameters of each group."""
    groups = cast("dict[str, Any]", state).get("param_groups") if type(state) is dict else None
    return type(groups) is list and [_count(group) for group in cast("list[Any]", groups)] == [
        len(group["params"]) for group in optimizer.param_groups
    ]


def _count(group: Any) -> int | None:
    numbers = cast("dict[str, Any]", group).get("params") if type(group) is dict else None
    return len(cast("list[Any]", numbers)) if type(numbers) is list else None


def _gathers(module: nn.Module) -> bool:
    """Whether asking a module for its state is an operation of all ranks."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(each, fsdp.FullyShardedDataParallel) for each in module.modules())


def brief_name(fqn: str) -> str:
    """An FQN as messages show it: of a long one both ends."""
    return fqn if len(fqn) <= _MAX_NAME else f"{fqn[: _MAX_NAME // 2]}...{fqn[-_MAX_NAME // 2 :]}"


def _no_tensor(ref: TensorRef) -> Any:
    raise TypeError("a tensor is told from others by where it is")


def _is_numpy_scalar(value: Any) -> bool:
    import numpy as np

    return isinstance(value, np.generic) and not isinstance(value, np.record) and not value.dtype.hasobject


def _check_name(dtype: Any, fqn: str) -> None:
    """NumPy writes what it has no name for, such as the dtypes of ``ml_dtypes``, as so many bytes of anything."""
    import numpy as np

    if np.lib.format.descr_to_dtype(np.lib.format.dtype_to_descr(dtype)) != dtype:
        raise UnsupportedValueError(f"{fqn}: NumPy cannot save the dtype {dtype}; turn it into a torch tensor")


def _to_npy(value: Any, fqn: str) -> bytes:
    import numpy as np

    _check_name(value.dtype, fqn)
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(value), allow_pickle=False)
    return file.getvalue()


def _tell_enum(value: enum.Enum, fqn: str) -> None:
    """Log, once for each class, that an enum used as a key, or with a value of many parts, is saved as that value."""
    if value != value.value and type(value) not in _reported_enums:
        _reported_enums.add(type(value))
        logger.warning("%s: %r is saved as %r, and so are others of its kind", fqn, value, value.value)


def _zone(value: datetime.datetime | datetime.time, fqn: str) -> str | None:
    if value.tzinfo is None or isinstance(value.tzinfo, datetime.timezone):
        return None  # the ISO text carries a fixed offset
    if isinstance(value.tzinfo, zoneinfo.ZoneInfo) and value.tzinfo.key:
        return value.tzinfo.key
    raise UnsupportedValueError(f"{fqn}: a time zone of type {type(value.tzinfo).__qualname__} cannot be saved")


def _naive_iso(value: datetime.datetime | datetime.time, fqn: str) -> list[Any]:
    zone = _zone(value, fqn)
    text = value.isoformat() if zone is None else value.replace(tzinfo=None).isoformat()
    return [text, value.fold, zone]


def _default_dict(flattener: _Flattener, value: Any, fqn: str, depth: int) -> Any:
    if value.default_factory not in FACTORIES:
        factory = brief(value.default_factory)
        raise UnsupportedValueError(f"{fqn}: a defaultdict with factory {factory}; turn it into a dict")
    return [Tag.DEFAULT_DICT, FACTORIES[value.default_factory], flattener.items(value, fqn, depth)]


_Handler = Callable[[_Flattener, Any, str, int], Any]

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
    complex: lambda f, v, q, d: [Tag.COMPLEX, v.real, v.imag],
    bytearray: lambda f, v, q, d: [Tag.BYTEARRAY, bytes(v)],
    io.BytesIO: lambda f, v, q, d: [Tag.BYTES_IO, v.getvalue(), v.tell()],
    torch.Size: lambda f, v, q, d: [Tag.SIZE, *v],
    torch.dtype: lambda f, v, q, d: [Tag.DTYPE, dtype_name(v)],
    torch.device: lambda f, v, q, d: [Tag.DEVICE, str(v)],
    datetime.datetime: lambda f, v, q, d: [Tag.DATETIME, *_naive_iso(v, q)],
    datetime.date: lambda f, v, q, d: [Tag.DATE, v.isoformat()],
    datetime.time: lambda f, v, q, d: [Tag.TIME, *_naive_iso(v, q)],
    datetime.timedelta: lambda f, v, q, d: [Tag.TIMEDELTA, v.days, v.seconds, v.microseconds],
    pathlib.PurePosixPath: lambda f, v, q, d: [Tag.PURE_PATH, str(v)],
}
