"""Torch's data parallelism: tensors equal on several ranks, and state divided among ranks.

``DistributedDataParallel`` keeps parameters equal as long as all steps use reduced gradients.
``ZeroRedundancyOptimizer`` keeps the state of each parameter on one rank. No function communicates.
"""

from __future__ import annotations

import itertools
import sys
import types
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Final, cast

import torch
from torch import nn
from torch.optim import Optimizer

from sidesave.errors import UnsupportedValueError

DIVIDED: Final = "divided_among_ranks"
"""Key next to ``state`` and ``param_groups``: the optimizer's state was divided among ranks."""
_HOOKS: Final = "torch.distributed.algorithms.ddp_comm_hooks"
_HOOKS_THAT_DO_NOT_REDUCE: Final = ("post_localSGD_hook", "debugging_hooks")

_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_apart: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules trained with gradients of this rank only, so that ranks may differ."""


# DistributedDataParallel --------------------------------------------------------------------------


def is_data_parallel(module: nn.Module) -> bool:
    """Whether a module is a ``DistributedDataParallel``; does not import that class."""
    parallel = sys.modules.get("torch.nn.parallel")
    return parallel is not None and isinstance(module, parallel.DistributedDataParallel)


def held_alike(module: nn.Module, ranks: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Return the ranks of tensors a ``DistributedDataParallel`` keeps equal, by ``id(tensor)``.

    These are its parameters on all ranks of its group, and its buffers, if it broadcasts them, on
    the group's first rank. Tensors in ``parameters_to_ignore``, under any of their names, are left
    out. The result is empty if ranks may differ: model averaging, steps under ``no_sync``, or a
    communication hook that is not known to reduce.
    """
    if not is_data_parallel(module):
        return {}
    replicas = cast("Any", module)
    _watched.add(module)
    hooks: list[tuple[Any, Any]] = getattr(replicas, "_comm_hooks", [])
    if (
        module in _apart
        or not replicas.require_backward_grad_sync
        or not all(_reduces(hook) for hook, _ in hooks)
    ):
        return {}
    group = tuple(torch.distributed.get_process_group_ranks(replicas.process_group))
    broadcasts = replicas.broadcast_buffers and not hasattr(replicas, "buffer_hook")
    parameters = list(replicas.module.named_parameters(remove_duplicate=False))
    buffers = list(replicas.module.named_buffers(remove_duplicate=False)) if broadcasts else []
    first = tuple(rank for rank in group if rank in ranks)[:1]
    holders_by_id = {id(tensor): group for _, tensor in parameters} | {
        id(tensor): first for _, tensor in buffers
    }
    ignored = {
        id(tensor)
        for name, tensor in (*parameters, *buffers)
        if name in replicas.parameters_to_ignore
    }
    return {each: holders for each, holders in holders_by_id.items() if each not in ignored}


def has_joined(module: nn.Module) -> bool:
    """Whether a module is trained under ``join()``: ranks may differ in their number of steps."""
    return is_data_parallel(module) and bool(cast("Any", module)._join_config.enable)


def _reduces(hook: Any) -> bool:
    """Whether a DDP hook, and each it wraps, is torch's and reduces gradients over all ranks."""
    package, _, name = str(getattr(hook, "__module__", "")).rpartition(".")
    if package != _HOOKS or name in _HOOKS_THAT_DO_NOT_REDUCE:
        return False
    within = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
    return all(_reduces(each) for each in within if isinstance(each, types.FunctionType))


class Holders:
    """The ranks that hold each tensor alike, as far as torch's data parallelism determines it."""

    def __init__(self, ranks: tuple[int, ...] | None) -> None:
        """Start empty; ``ranks`` save together, or are None if this process saves alone."""
        self._ranks = ranks
        self._by_id: dict[int, tuple[int, ...]] = {}
        # ids of parameters for which ranks may have taken more or fewer steps
        self._uneven: set[int] = set()

    def __bool__(self) -> bool:
        """Whether the holders of any tensor are known."""
        return bool(self._by_id)

    def of(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        """Return the ranks that hold a tensor; None if unknown."""
        return self._by_id.get(id(tensor))

    def add_module(self, module: nn.Module) -> None:
        """Note who holds the tensors of a module."""
        if self._ranks is not None:
            self._by_id.update(held_alike(module, self._ranks))
            if has_joined(module):
                self._uneven.update(map(id, module.parameters()))

    def add_optimizer(self, optimizer: Optimizer, fqn: str, *, is_torchs_own: bool) -> None:
        """Note the ranks that hold an optimizer's states: for torch's own, the parameter's holders.

        Raises ``UnsupportedValueError`` if part of its state is on ranks that do not take part in
        the save.
        """
        group = dividing_ranks(optimizer)
        if len(group) > 1 and not {*group} <= {*(self._ranks or ())}:
            raise UnsupportedValueError(
                f"{fqn}: its state is divided among ranks {list(group[:8])}, and some of these do "
                "not save along; let all of them save together, or save what its state_dict() "
                "returns after consolidate_state_dict()"
            )
        if self._ranks is not None and is_torchs_own:
            self._by_id.update(self._ranks_of_states(optimizer))
        elif group and group == self._ranks:
            this = (torch.distributed.get_rank(),)
            self._by_id.update((id(value), this) for value in _direct(states_of(optimizer)))

    def _ranks_of_states(self, optimizer: Optimizer) -> dict[int, tuple[int, ...]]:
        """The ranks that hold each state of ``DistributedDataParallel`` parameters, by id.

        The state follows from parameters and reduced gradients, which are the same on these ranks.
        """
        return {
            id(value): self._by_id[id(parameter)]
            for parameter, state in optimizer.state.items()
            if id(parameter) in self._by_id and id(parameter) not in self._uneven
            for value in state.values()
            if isinstance(value, torch.Tensor)
        }


def _direct(states: Mapping[Any, Any]) -> Iterator[torch.Tensor]:
    """The tensors of an optimizer's state that are not nested."""
    for state in states.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


class LocalSteps:
    """Watches for optimizer steps whose gradients ``DistributedDataParallel`` has not reduced."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Mark modules this step changes on this rank only (last forward under ``no_sync``)."""
        for module in list(_watched):
            if cast("Any", module).require_forward_param_sync or module in _apart:
                continue
            own = {
                id(parameter) for group in optimizer.param_groups for parameter in group["params"]
            }
            if any(id(parameter) in own for parameter in module.parameters()):
                _apart.add(module)


# FullyShardedDataParallel -------------------------------------------------------------------------


def gathers_state(module: nn.Module) -> bool:
    """Whether getting a module's state is a collective operation."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(
        isinstance(each, fsdp.FullyShardedDataParallel) for each in module.modules()
    )


# ZeroRedundancyOptimizer --------------------------------------------------------------------------


def is_divided(optimizer: Optimizer) -> bool:
    """Whether an optimizer is a ``ZeroRedundancyOptimizer``; does not import that class."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def dividing_ranks(optimizer: Optimizer) -> tuple[int, ...]:
    """Return the ranks that divide a ``ZeroRedundancyOptimizer``'s state; empty for others."""
    if not is_divided(optimizer):
        return ()
    return tuple(torch.distributed.get_process_group_ranks(cast("Any", optimizer).process_group))


def states_of(optimizer: Optimizer) -> MutableMapping[Any, Any]:
    """Return the state by parameter, for the parameters whose state this rank holds."""
    if not is_divided(optimizer):
        return optimizer.state
    # created at the first steps with overlap_with_ddp=True
    local = getattr(optimizer, "optim", None)
    return {} if local is None else local.state


def held_elsewhere(optimizer: Optimizer) -> set[int]:
    """Return the indices of the parameters whose state other ranks hold."""
    if not is_divided(optimizer) or not hasattr(optimizer, "optim"):
        return set()
    divided = cast("Any", optimizer)
    parameters = enumerate(divided._index_to_param)
    return {
        number
        for number, parameter in parameters
        if divided._param_to_rank[parameter] != divided.rank
    }


def state_dict_of(optimizer: Optimizer, fqn: str = "optimizer") -> dict[str, Any]:
    """Return an optimizer's state dict; for ``ZeroRedundancyOptimizer``, only this rank's part.

    The other parts are not gathered. Raises ``UnsupportedValueError`` if a
    ``ZeroRedundancyOptimizer`` is not initialized yet.
    """
    if not is_divided(optimizer):
        return optimizer.state_dict()
    try:
        cast("Any", optimizer)._check_overlap_initialized()
    except RuntimeError as error:
        raise UnsupportedValueError(
            f"{fqn}: a ZeroRedundancyOptimizer with overlap_with_ddp=True has no state before its "
            f"first steps: {error}"
        ) from error
    parameters = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    states = {numbers[id(parameter)]: state for parameter, state in states_of(optimizer).items()}
    return {**Optimizer.state_dict(optimizer), "state": states, DIVIDED: True}


def load_state_dict_into(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state; a ``ZeroRedundancyOptimizer`` keeps only this rank's part."""
    if not is_divided(optimizer):
        optimizer.load_state_dict(state)
        return
    cast("Any", optimizer).optim.state.clear()
    # torch changes the dict passed to it
    optimizer.load_state_dict({**state, "state": dict(state["state"])})
    optimizer.state.clear()  # an unused second copy
