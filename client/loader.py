"""Loading: a checkpoint as a fresh nest, or into live objects. All of it is checked before anything live is touched."""

from __future__ import annotations

import copy
import difflib
import fnmatch
import logging
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from sidesave.client import catalog
from sidesave.client.handle import path_text
from sidesave.client.reader import CheckpointReader, open_checkpoint
from sidesave.errors import InvalidArgumentError, StateMismatchError
from sidesave.stager.skeleton import TensorRef
from sidesave.stager.tree import Stateful
from sidesave.writer_daemon import integrity
from sidesave.writer_daemon.integrity import Fault
from sidesave.writer_daemon.storage import PosixStorage

logger = logging.getLogger(__name__)


def load(
    path: str | os.PathLike[str],
    *,
    into: dict[str, Any] | None = None,
    map_location: str | torch.device | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    verify: bool = True,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Load the checkpoint in ``path``; needs no daemon, and blocks at the speed of the medium.

    Args:
        path: A ``step-XXXXXXXX`` directory.
        into: Live objects by the names they were saved under: modules and optimizers and everything else with
            ``load_state_dict`` take their state, tensors are filled in place, plain values are replaced in this dict.
            Without it a fresh nest is returned, state dicts in the place of objects.
        map_location: Device for fresh tensors; None is the CPU.
        include: Patterns (``"model.layers.*"``) of the FQNs to load; None is all.
        exclude: Patterns of FQNs to leave out.
        strict: With ``into``, raise when an item's keys are not exactly those saved; else load what both have.
        dtype: Cast floating-point tensors to this.
        verify: Compare everything read with its digests.
        allow_pickle: Unpickle values that were pickled, which runs code that the checkpoint chooses.

    Returns:
        The nest, or ``into`` itself.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        IntegrityError: A file is missing, short, or does not match its digest; nothing live has been touched.
        StateMismatchError: Items, keys, shapes or dtypes differ; all of them are named, and nothing has been touched.
        FormatVersionError: It was written in a newer format.
        UnsupportedValueError: It holds pickled values and ``allow_pickle`` is false.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise InvalidArgumentError(f"dtype casts floating-point tensors, so it cannot be {dtype}")

    def read(place: str) -> dict[str, Any]:
        selected = _selector(include, exclude)
        with open_checkpoint(place) as reader:
            if into is not None:
                if type(into) is not dict:
                    raise InvalidArgumentError(f"into must be a dict of named items, not {type(into).__name__}")
                selected = _within(into, reader, selected, strict=strict)
            wanted: dict[str, None] = {}
            skeleton = reader.skeletons[0]
            known = _leave_pickled if allow_pickle else None  # nothing is unpickled before all has been checked
            skeleton.build(lambda ref: wanted.setdefault(ref.fqn), only=selected, unpickle=known)
            expected = {} if into is None else skeleton.build(_describe(reader, dtype), only=selected, unpickle=known)
            if into is not None:
                _check(into, expected, strict=strict and include is None and exclude is None)
            stored = reader.read(wanted, verify=verify)

            made: dict[tuple[str, bool], torch.Tensor] = {}

            def tensor(ref: TensorRef) -> torch.Tensor:
                key = (ref.fqn, ref.array)
                if key not in made:  # tied weights come back tied
                    made[key] = _finish(stored[ref.fqn], ref, map_location if into is None else None, dtype)
                return made[key]

            state = skeleton.build(tensor, only=selected, unpickle=pickle.loads if allow_pickle else None)
        if into is None:
            return state
        _apply(into, state, strict=strict and include is None and exclude is None)
        return into

    return catalog.read_settled(os.path.realpath(path_text(path)), read)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What :func:`verify` found.

    Attributes:
        path: The checkpoint.
        nbytes: Bytes compared with digests.
        faults: Everything that is wrong, one line each when printed.
    """

    path: str
    nbytes: int
    faults: tuple[Fault, ...]

    @property
    def ok(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.faults


def verify(path: str | os.PathLike[str], *, on_bytes: Callable[[int], None] | None = None) -> VerifyReport:
    """Compare every byte of a checkpoint with its digests, read from the medium; blocking, loads nothing.

    Args:
        path: A ``step-XXXXXXXX`` directory.
        on_bytes: Called with the number of bytes compared since its last call.

    Raises:
        WriteError: The directory cannot be opened at all.
    """

    def check(place: str) -> VerifyReport:
        checked = 0

        def count(nbytes: int) -> None:
            nonlocal checked
            checked += nbytes
            if on_bytes is not None:
                on_bytes(nbytes)

        storage = PosixStorage(os.path.dirname(place))
        try:
            faults = tuple(integrity.check_checkpoint(storage, os.path.basename(place), count))
        finally:
            storage.close()
        return VerifyReport(place, checked, faults)

    return catalog.read_settled(os.path.realpath(path_text(path)), check, is_whole=lambda report: report.ok)


# What to load ----------------------------------------------------------------------------------------------------


def _selector(include: str | Sequence[str] | None, exclude: str | Sequence[str] | None) -> Callable[[str], bool]:
    wanted = [include] if isinstance(include, str) else include
    unwanted = [exclude] if isinstance(exclude, str) else exclude or ()

    def selected(fqn: str) -> bool:
        return (wanted is None or _matches(fqn, wanted)) and not _matches(fqn, unwanted)

    return selected


def _matches(fqn: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(fqn, pattern) or fqn.startswith(pattern + ".") for pattern in patterns)


def _within(
    into: Mapping[str, Any], reader: CheckpointReader, selected: Callable[[str], bool], *, strict: bool
) -> Callable[[str], bool]:
    """Narrow a selection to the items of ``into``; an item that was never saved is an error."""
    saved = reader.skeletons[0].keys()
    unknown = [name for name in into if name not in saved]
    if unknown and strict:
        raise StateMismatchError(
            "\n".join(f"the checkpoint has no item {name!r}{_nearest(name, saved)}" for name in unknown)
        )
    prefixes = tuple(name + "." for name in into)
    return lambda fqn: (fqn in into or fqn.startswith(prefixes)) and selected(fqn)


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=3)
    return f" (near: {', '.join(near)})" if near else ""


def _finish(
    tensor: torch.Tensor, ref: TensorRef, device: str | torch.device | None, dtype: torch.dtype | None
) -> torch.Tensor:
    if ref.dtype is not None:
        if ref.dtype.is_complex:
            tensor = torch.view_as_complex(tensor)
        else:
            tensor = tensor.view(ref.dtype)
    if ref.array:
        return tensor
    if device is not None:
        tensor = tensor.to(device)
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _leave_pickled(data: bytes) -> None:
    """Stands for a pickled value while only names and shapes matter."""


# Checking before touching ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Expected:
    """A tensor that will be loaded, known by its header only."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _describe(reader: CheckpointReader, cast_to: torch.dtype | None) -> Callable[[TensorRef], _Expected]:
    from sidesave.stager.dtypes import CARRIERS, DTYPES

    def describe(ref: TensorRef) -> _Expected:
        entry = reader.entry(ref.fqn)
        dtype, shape = DTYPES[entry.dtype], entry.shape
        if ref.dtype is not None:
            shape = shape[:-1] if CARRIERS[ref.dtype].pair else shape
            dtype = ref.dtype
        if ref.sparse_shape is not None:
            shape = ref.sparse_shape
        return _Expected(shape, cast_to if cast_to is not None and dtype.is_floating_point else dtype)

    return describe


def _check(into: Mapping[str, Any], expected: Mapping[str, Any], *, strict: bool) -> None:
    problems: list[str] = []
    for name, target in into.items():
        if name in expected:
            _compare(target, expected[name], name, strict, problems)
        elif strict:
            problems.append(f"{name}: nothing of it is in the checkpoint")
    if problems:
        shown = problems[:20] + ([f"... and {len(problems) - 20} more"] if len(problems) > 20 else [])
        raise StateMismatchError("the checkpoint does not fit, and nothing was loaded:\n  " + "\n  ".join(shown))


def _compare(target: Any, saved: Any, fqn: str, strict: bool, problems: list[str]) -> None:
    if isinstance(target, nn.Module):
        _compare_keys(target.state_dict(keep_vars=True), saved, fqn, strict, problems)
    elif isinstance(target, torch.optim.Optimizer):
        _compare_optimizer(target, saved, fqn, problems)
    elif isinstance(target, torch.Tensor):
        _compare_tensor(target, saved, fqn, problems)
    elif isinstance(target, dict) and not isinstance(target, Stateful):
        _compare_keys(cast("dict[Any, Any]", target), saved, fqn, strict, problems)
    elif isinstance(target, (list, tuple)) and _is_live(target):
        items = cast("Sequence[Any]", target)
        if not isinstance(saved, (list, tuple)) or len(cast("Sequence[Any]", saved)) != len(items):
            problems.append(f"{fqn}: the checkpoint does not hold {len(items)} items here, as the target does")
            return
        for index, (item, found) in enumerate(zip(items, cast("Sequence[Any]", saved), strict=True)):
            _compare(item, found, f"{fqn}.{index}", strict, problems)


def _is_live(target: Any) -> bool:
    """Whether a target takes its state in place; plain data is replaced."""
    if type(target) is dict:
        return any(map(_is_live, cast("dict[Any, Any]", target).values()))
    if type(target) in (list, tuple):
        return any(map(_is_live, target))
    if isinstance(target, (nn.Module, torch.optim.Optimizer, torch.Tensor)):
        return True
    return isinstance(target, Stateful) and not isinstance(target, type)


def _compare_keys(target: Mapping[Any, Any], saved: Any, fqn: str, strict: bool, problems: list[str]) -> None:
    if not isinstance(saved, Mapping):
        problems.append(f"{fqn}: the checkpoint holds a {type(saved).__name__} here, not a set of named values")
        return
    body = cast("Mapping[Any, Any]", saved)
    missing = [key for key in target if key not in body]
    unexpected = [key for key in body if key not in target]
    if strict:
        problems += [
            f"{fqn}.{key}: missing in the checkpoint{_nearest(str(key), map(str, unexpected))}" for key in missing
        ]
        problems += [f"{fqn}.{key}: unexpected, the target has no such key" for key in unexpected]
    for key, value in target.items():
        if key in body:
            _compare(value, body[key], f"{fqn}.{key}", strict, problems)


def _compare_tensor(target: torch.Tensor, saved: Any, fqn: str, problems: list[str]) -> None:
    if nn.parameter.is_lazy(target):
        return  # takes any shape
    if target.is_meta:
        problems.append(f"{fqn}: the target is a meta tensor and cannot hold values; materialize it with to_empty()")
    elif not isinstance(saved, _Expected):
        problems.append(f"{fqn}: the checkpoint holds a {type(saved).__name__}, the target is a tensor")
    elif tuple(target.shape) != saved.shape:
        problems.append(f"{fqn}: shape {list(saved.shape)} in the checkpoint, {list(target.shape)} in the target")
    elif target.dtype != saved.dtype:
        problems.append(f"{fqn}: {saved.dtype} in the checkpoint, {target.dtype} in the target; pass dtype= to cast")


def _compare_optimizer(target: torch.optim.Optimizer, saved: Any, fqn: str, problems: list[str]) -> None:
    body = cast("dict[str, Any]", saved if isinstance(saved, dict) else {})
    groups, states = body.get("param_groups"), body.get("state")
    if not isinstance(groups, list) or not isinstance(states, dict):
        problems.append(f"{fqn}: the checkpoint holds no optimizer state here")
        return
    groups, states = cast("list[Any]", groups), cast("dict[Any, Any]", states)
    if not all(_is_group(group) for group in groups) or not all(isinstance(one, dict) for one in states.values()):
        problems.append(f"{fqn}: the checkpoint holds malformed optimizer state here")
        return
    sizes = [len(group["params"]) for group in groups]
    here = [len(group["params"]) for group in target.param_groups]
    if sizes != here:
        problems.append(f"{fqn}: parameter groups of {sizes} in the checkpoint, {here} in the target")
        return
    parameters = [parameter for group in target.param_groups for parameter in group["params"]]
    ids = [number for group in groups for number in group["params"]]
    for number, parameter in zip(ids, parameters, strict=True):
        current = target.state.get(parameter, {})
        for key, value in states.get(number, {}).items():
            have = current.get(key)
            where = f"{fqn}.state.{number}.{key}"
            if isinstance(have, torch.Tensor) and isinstance(value, _Expected) and tuple(have.shape) != value.shape:
                problems.append(
                    f"{where}: shape {list(value.shape)} in the checkpoint, {list(have.shape)} in the target"
                )
            elif (
                isinstance(value, _Expected)
                and key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")
                and value.shape != tuple(parameter.shape)
            ):
                problems.append(
                    f"{where}: shape {list(value.shape)} in the checkpoint, its parameter has {list(parameter.shape)}"
                )


def _is_group(group: Any) -> bool:
    numbers = cast("dict[str, Any]", group).get("params") if isinstance(group, dict) else None
    return isinstance(numbers, list) and all(type(number) is int for number in cast("list[Any]", numbers))


# Applying --------------------------------------------------------------------------------------------------------


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
        return 0 if _is_live(self.target) else 3


def _apply(into: dict[str, Any], state: Mapping[str, Any], *, strict: bool) -> None:
    """Give every item its state. User code may still raise: then what was given before is put back as it was.

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
    target = holder[key]
    if type(target) is dict:
        items = cast("dict[Any, Any]", target)
        for name, item in value.items():
            if name in items:
                yield from _gifts(items, name, item)
            else:
                yield _Gift(items, name, None, item)
    elif type(target) in (list, tuple) and _is_live(target):
        for index, item in enumerate(value):
            yield from _gifts(target, index, item)
    elif type(holder) is not tuple or _is_live(target):
        yield _Gift(holder, key, target, value)


def _give(gift: _Gift, undo: list[tuple[Any, Any]], *, strict: bool) -> None:
    target = gift.target
    if isinstance(target, nn.Module):
        with torch.no_grad():
            target.load_state_dict(gift.value, strict=strict)
    elif isinstance(target, torch.Tensor):
        with torch.no_grad():
            target.copy_(gift.value)
    elif isinstance(target, torch.optim.Optimizer):
        undo.append((target, target.state_dict()))  # it will hold other tensors and leave these as they are
        target.load_state_dict(gift.value)
    elif _is_live(target):
        undo.append((target, copy.deepcopy(target.state_dict())))
        target.load_state_dict(gift.value)
    else:
        gift.holder[gift.key] = gift.value
