"""Objects with ``load_state_dict``: optimizers, and all others.

A schedule may have another one, or a module, as an attribute, and take all attributes from its
state. The save has replaced such live objects by their states, which must not replace them in the
target: they stay, and take theirs in place.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

import torch
from torch import nn

from sidesave.client.messages import few
from sidesave.client.reading.stored import DICTS, SEQUENCES, FlatMap, fqn_of
from sidesave.client.targets import tensor_memory
from sidesave.client.targets.live_map import Undo, is_live, is_stateful
from sidesave.client.targets.nests import aligned, with_tensors
from sidesave.stager import data_parallel, torch_private
from sidesave.stager.data_parallel import is_divided
from sidesave.stager.state.tags import container_like
from sidesave.stager.state.treespec import Path

logger = logging.getLogger(__name__)

_LOAD_STATE_DICT: Final = torch.optim.Optimizer.load_state_dict
"""Torch's own function, unless another package has replaced it."""
_STATE_DICT: Final = torch.optim.Optimizer.state_dict


def live_parts(state: Any) -> dict[Path, Any]:
    """The live objects in the state of an object, by path. A save replaces them by their states."""
    return {
        path: leaf
        for path, leaf in FlatMap.of(state).leaves.items()
        if isinstance(leaf, nn.Module) or is_stateful(leaf)
    }


def plain_state(state: Any) -> Any:
    """The state of an object, with the states of live objects in their places."""
    if not (parts := live_parts(state)):
        return state
    flat = FlatMap.of(state)
    flat.leaves.update({path: plain_state(part.state_dict()) for path, part in parts.items()})
    return flat.nest()


def give_object(target: Any, now: Any, value: Any, undo: Undo) -> None:
    """Replace the state ``now`` of an object; live objects in it stay, and take theirs in place."""
    parts, before = live_parts(now), copy.deepcopy(plain_state(now))

    def load(state: Any, undo: Undo) -> None:
        target.load_state_dict(state)
        give_parts(parts, state, target.state_dict, target.load_state_dict, undo)

    undo.append(lambda: load(before, []))
    load(value, undo)


def give_parts(
    parts: Mapping[Path, Any],
    state: Any,
    read: Callable[[], Any],
    load: Callable[[Any], object],
    undo: Undo,
) -> None:
    """Put back the live ``parts`` that were in the state of an object, which has taken ``state``.

    Those that it has replaced by their states take them in place, and the object takes its state
    once more, with them in it. ``read`` and ``load`` are the object's methods for its state.
    """
    now, saved = FlatMap.of(read() if parts else None), FlatMap.of(state if parts else None)
    lost = [
        path
        for path in parts
        if path in now.containers or (path in now.leaves and not is_live(now.leaves[path]))
    ]
    for path in lost:
        _give_part(parts[path], path, saved.nest(path), undo)
        leaves = {at: leaf for at, leaf in saved.leaves.items() if at[: len(path)] != path}
        saved = FlatMap({**leaves, path: parts[path]}, saved.containers)
    if lost:
        load(saved.nest())


def _give_part(part: Any, path: Path, state: Any, undo: Undo) -> None:
    """Give a live object in the state of another one its own state."""
    if isinstance(part, nn.Module):
        for key, held in part.state_dict().items():
            if isinstance(held, torch.Tensor) and key in state and state[key].dtype != held.dtype:
                raise TypeError(
                    f"{key} is {state[key].dtype} in the checkpoint, {held.dtype} in the target"
                )
        undo.append(held_module(part))
        torch_private.load_module(part, state, strict=True)
    elif isinstance(part, torch.optim.Optimizer):
        load_optimizer(part, state, undo, path)
    else:
        give_object(part, part.state_dict(), state, undo)


def held_module(module: nn.Module) -> Callable[[], object]:
    """Copy a module's tensors to host memory and note its attributes; return what restores them."""
    modules = [*module.modules()]
    put_back = tensor_memory.held([*module.parameters(), *module.buffers()])
    held = [(vars(each), dict(vars(each))) for each in modules]
    parts: list[tuple[dict[str, Any], dict[str, Any]]]
    parts = [(part, {**part}) for own, _ in held for part in own.values() if type(part) is dict]
    extra: list[tuple[nn.Module, dict[Path, Any], Any]] = []
    for each in modules:
        if type(each).get_extra_state is not nn.Module.get_extra_state:
            state = each.get_extra_state()
            extra.append((each, live_parts(state), copy.deepcopy(plain_state(state))))

    def undo() -> None:
        for each, live_ones, state in extra:
            each.set_extra_state(state)
            give_parts(live_ones, state, each.get_extra_state, each.set_extra_state, [])
        for now, before in (*held, *parts):
            now.clear()
            now.update(before)
        put_back()

    return undo


# Optimizers ---------------------------------------------------------------------------------------


def has_saved_keys(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the live state has the keys of ``state_dict()``; a user's optimizer may differ."""
    is_torchs = type(optimizer).state_dict is _STATE_DICT and "state_dict" not in vars(optimizer)
    return (is_torchs and not torch_private.state_dict_hooks(optimizer)) or is_divided(optimizer)


def is_of_torchs_form(saved: Any) -> bool:
    """Whether saved state has groups of numbered parameters, and a dict of states by number."""
    body = cast("dict[str, Any]", saved if isinstance(saved, dict) else {})
    groups, states = cast("Any", body.get("param_groups")), cast("Any", body.get("state"))
    if not isinstance(groups, list) or not isinstance(states, dict):
        return False
    groups, states = cast("list[Any]", groups), cast("dict[Any, Any]", states)
    return all(map(_is_group, groups)) and all(
        isinstance(states.get(number, {}), dict) for group in groups for number in group["params"]
    )


def _is_group(group: Any) -> bool:
    numbers = cast("dict[str, Any]", group).get("params") if isinstance(group, dict) else None
    return isinstance(numbers, list) and all(
        type(number) is int for number in cast("list[Any]", numbers)
    )


def load_optimizer(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], undo: Undo, path: Path
) -> None:
    """Give an optimizer, at ``path``, its state in the saved dtypes, without torch's own cast."""
    state = _with_groups_of(optimizer, state, path)
    own = vars(optimizer)
    if type(optimizer).load_state_dict is _LOAD_STATE_DICT and "load_state_dict" not in own:
        # torch replaces the state, and leaves the tensors of the old one as they are
        held = dict(own)
        undo.append(lambda: (own.clear(), own.update(held)))
        if not torch_private.optimizer_load_hooks(optimizer):
            _give_state(optimizer, state)
            return
    elif data_parallel.is_divided(optimizer):
        part = data_parallel.state_dict_of(optimizer)
        undo.append(
            lambda: (
                data_parallel.load_state_dict_into(optimizer, part),
                _undo_casts(optimizer, part),
            )
        )
    else:
        undo.append(_held_optimizer(optimizer))
    now: Any = None
    if not has_saved_keys(optimizer):
        with contextlib.suppress(Exception):  # it may have none before its first step
            now = optimizer.state_dict()
    state = aligned(state)
    if live_parts(now):
        give_object(optimizer, now, state, undo)
    else:
        data_parallel.load_state_dict_into(optimizer, state)
    _undo_casts(optimizer, state)


def _with_groups_of(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], path: Path
) -> dict[str, Any]:
    """The state, with those parts of parameter groups that torch would lose.

    Tensors in groups, such as a learning rate, move to the devices of those they replace. Torch
    does not move them, and a captured graph takes a rate in host memory for a constant. Groups
    share one tensor if the live ones do. Options that the checkpoint lacks, such as those a newer
    torch has added, stay as they are.
    """
    saved_groups = cast("list[dict[str, Any]] | None", state.get("param_groups"))
    if type(saved_groups) is not list or len(saved_groups) != len(optimizer.param_groups):
        return state  # not torch's form, or another optimizer's: load_state_dict says so
    groups: list[dict[str, Any]] = []
    given: dict[int, Any] = {}
    kept: list[str] = []
    for at, (current, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        alone = {key: value for key, value in current.items() if key not in saved}
        kept += [fqn_of((*path, "param_groups", at, key)) for key in alone if key != "param_names"]
        groups.append(
            alone
            | {key: _on_device_of(current.get(key), value, given) for key, value in saved.items()}
        )
    if kept:
        names = ", ".join(few(kept, str, "stay"))
        logger.warning("the checkpoint does not have %s: the optimizer keeps its values", names)
    return {**state, "param_groups": groups}


def _on_device_of(current: Any, value: Any, given: dict[int, Any]) -> Any:
    """Move an option to the device of the one it replaces.

    ``given`` maps saved tensors to the live ones that they replaced.
    """
    if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
        is_for_another = given.setdefault(id(value), current) is not current
        return value.to(current.device, copy=is_for_another)
    if isinstance(current, tuple) and isinstance(value, tuple):  # betas
        live, saved = cast("tuple[Any, ...]", current), cast("tuple[Any, ...]", value)
        if type(live) is type(saved) is tuple and len(live) == len(saved):
            return tuple(_on_device_of(*pair, given) for pair in zip(live, saved, strict=True))
        return saved
    return value


def _held_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Record all that a user's ``load_state_dict`` may change; return a function to restore it."""
    own = vars(optimizer)
    if not own.keys() >= {"state", "param_groups"}:  # it wraps another optimizer
        state = copy.deepcopy(optimizer.state_dict())
        return lambda: (optimizer.load_state_dict(state), _undo_casts(optimizer, state))
    before, groups = dict(own), [(group, dict(group)) for group in optimizer.param_groups]
    states = FlatMap.of(dict(optimizer.state))
    put_back = tensor_memory.held(
        leaf for leaf in states.leaves.values() if isinstance(leaf, torch.Tensor)
    )

    def undo() -> None:
        for now, then in ((own, before), *groups, (before["state"], states.nest())):
            now.clear()
            now.update(then)
        put_back()

    return undo


def _give_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Do what torch's ``load_state_dict`` does, but without casts to the parameters' dtypes."""
    groups: list[dict[str, Any]] = []
    owners: dict[Any, tuple[torch.Tensor, bool]] = {}
    for saved, live in zip(state["param_groups"], optimizer.param_groups, strict=True):
        groups.append({**saved, "params": live["params"]})
        counts_there = bool(saved.get("fused") or saved.get("capturable"))
        for number, parameter in zip(saved["params"], live["params"], strict=True):
            owners[number] = parameter, counts_there
    values: dict[Any, Any] = collections.defaultdict(dict)
    moved: dict[Any, torch.Tensor] = {}
    for number, value in state["state"].items():
        if number in owners:
            parameter, counts_there = owners[number]
            values[parameter] = _on_device(
                value, parameter.device, moved, counts_there=counts_there
            )
        else:
            values[number] = value
    optimizer.__setstate__({"state": values, "param_groups": groups})


def _on_device(
    value: Any,
    device: torch.device,
    moved: dict[Any, torch.Tensor],
    *,
    counts_there: bool,
    is_step: bool = False,
) -> Any:
    """Move a state to the device of its parameter, in containers of the same kinds.

    Each tensor is ``moved`` there once. A step count stays in host memory unless the optimizer's
    kernels count there (fused or capturable), in float32.
    """
    if isinstance(value, torch.Tensor):
        if is_step and not counts_there:
            return value
        if (key := (id(value), device, is_step)) not in moved:
            moved[key] = (
                value.to(device, torch.float32)
                if is_step
                else tensor_memory.aligned(value.to(device))
            )
        return moved[key]
    if type(value) in DICTS:
        result = copy.copy(value)
        for name, item in cast("dict[Any, Any]", value).items():
            result[name] = _on_device(
                item, device, moved, counts_there=counts_there, is_step=name == "step"
            )
        return result
    if type(value) in SEQUENCES:
        items = [_on_device(item, device, moved, counts_there=counts_there) for item in value]
        return container_like(value, (), items)
    return value


def _undo_casts(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Put back tensors that ``load_state_dict`` cast to the parameter's dtype, as torch's does."""
    if not is_of_torchs_form(saved):
        return
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = data_parallel.states_of(optimizer)
    now: Any = None if has_saved_keys(optimizer) else optimizer.state_dict()
    by_saved_keys: dict[Any, Any] = now["state"] if is_of_torchs_form(now) else {}
    for number, parameter in zip(numbers, parameters, strict=False):
        if parameter in states and number in saved["state"]:
            held = states[parameter], by_saved_keys.get(number)
            if casts := {
                at: one
                for each in held
                for at, one in _casts(each, saved["state"][number], parameter.dtype)
            }:
                states[parameter] = with_tensors(
                    states[parameter], lambda each: casts.get(id(each), each)
                )


def _casts(
    now: Any, saved: Any, dtype: torch.dtype, key: Any = None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the ``id`` of each tensor that is one of ``saved`` cast to ``dtype``, and the original.

    The step count stays as the optimizer has made it: a count is a count in any dtype.
    """
    if isinstance(now, torch.Tensor):
        may_be_cast = (
            isinstance(saved, torch.Tensor) and key != "step" and now.dtype == dtype != saved.dtype
        )
        if (
            may_be_cast
            and now.shape == saved.shape
            and tensor_memory.same_bits(now, saved.to(now.device, dtype))
        ):
            yield id(now), saved.to(now.device)
    elif type(now) in DICTS and type(saved) in DICTS:
        for name in now.keys() & saved.keys():
            yield from _casts(now[name], saved[name], dtype, name)
    elif type(now) in SEQUENCES and type(saved) in SEQUENCES:
        for pair in zip(now, saved, strict=False):
            yield from _casts(*pair, dtype)
