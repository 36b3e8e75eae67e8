"""Tensors that only an optimizer changes, and the guard that keeps it off them during a copy.

A copy may run beside training only for tensors that nothing but an optimizer's ``step`` writes:
swapping EMA weights in through ``p.data.copy_`` moves no version counter and fires no hook. So a
tensor counts as owned when a known optimizer holds it as parameter or state, and that optimizer's
``step`` is torch's own. All else is captured at the call.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sidesave.stager import torch_private


class StepWatcher(Protocol):
    """Is notified of each optimizer step of this process while it is referenced elsewhere."""

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step; must not block."""
        ...


class Guarded(Protocol):
    """A copy under way, as the guard sees it."""

    def close_guard(self) -> None:
        """Return once memory may be changed: on the host, or in device stream order; idempotent."""
        ...

    def join(self) -> None:
        """Return once nothing of the copy is left to do, on the host. Idempotent."""
        ...


_lock = threading.Lock()
_pending: list[Guarded] = []
_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_watchers: weakref.WeakSet[StepWatcher] = weakref.WeakSet()
_installed = False
_on_guard: list[Callable[[], None]] = []
_holds = threading.local()
_guards = itertools.count(1)
_guards_entered = 0


def install() -> None:
    """Put the guard in front of every optimizer's ``step`` in this process; once is enough.

    It goes first among the global hooks: another hook that changes a parameter must find the copy
    done.
    """
    global _installed
    with _lock:
        if _installed:
            return
        handle = register_optimizer_step_pre_hook(cast("Any", _before_step))
        hooks = cast("Any", sys.modules[Optimizer.__module__])._global_optimizer_pre_hooks
        hooks.move_to_end(handle.id, last=False)
        _installed = True


# Undecorated, the hook recompiled 20 frames in 14 steps. This form, which torch.optim uses too,
# imports the compiler (a second) not here but when it is first called.
@torch_private.disable_dynamo
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _seen.add(optimizer)
    for watcher in list(_watchers):
        watcher.stepped(optimizer)
    close_guards()


def watch_steps(watcher: StepWatcher) -> None:
    """Notify ``watcher`` of every later step of an optimizer that :func:`install` guards."""
    _watchers.add(watcher)


def when_guarded(call: Callable[[], None]) -> None:
    """Call ``call`` whenever guards are closed, that is, before parameters change."""
    _on_guard.append(call)


def close_guards() -> None:
    """Wait, on the host or in stream order, for every copy that reads tensors of this process."""
    for call in _on_guard:
        call()
    with _lock:
        pending = list(_pending)
    for copy in pending:
        copy.close_guard()


def finish_pending() -> None:
    """Wait on the host until no copy is under way."""
    with _lock:
        pending = list(_pending)
    for copy in pending:
        copy.join()


def add_pending(copy: Guarded) -> None:
    """A copy has begun to read memory that an optimizer may change."""
    with _lock:
        _pending.append(copy)


def remove_pending(copy: Guarded) -> None:
    """The copy is over."""
    with _lock, contextlib.suppress(ValueError):
        _pending.remove(copy)


@contextlib.contextmanager
def guard() -> Generator[None]:
    """Wait for running copies, and protect updates written by hand inside the block.

    Saves inside the block copy before they return. After it, nothing in ``Frozen`` counts as
    unchanged.
    """
    global _guards_entered
    close_guards()
    _guards_entered = next(_guards)
    _holds.depth = getattr(_holds, "depth", 0) + 1
    try:
        yield
    finally:
        _holds.depth -= 1


def in_guard() -> bool:
    """Whether this thread is inside :func:`guard`."""
    return getattr(_holds, "depth", 0) > 0


def guards_entered() -> int:
    """A number that differs after each :func:`guard` of this process."""
    return _guards_entered


def buffer_storages(modules: Iterable[nn.Module], least_nbytes: int) -> set[int]:
    """The identities of the storages of all buffers of ``least_nbytes`` or more."""
    buffers = (
        each
        for module in torch_private.all_modules(modules)
        for each in module.__dict__.get("_buffers", {}).values()
    )
    return {storage for buffer in buffers for storage in _storages([buffer], least_nbytes)}


def storages_written(optimizer: Optimizer, among: frozenset[int]) -> dict[torch.Tensor, list[int]]:
    """For each parameter, the storages of ``among`` that its step writes, state included."""
    written: dict[torch.Tensor, list[int]] = {}
    for parameter in itertools.chain.from_iterable(
        group["params"] for group in optimizer.param_groups
    ):
        state: Any = optimizer.state.get(parameter)
        tensors = [
            parameter,
            *(cast("dict[str, Any]", state).values() if isinstance(state, dict) else ()),
        ]
        storages = [each for each in _storages(tensors) if each in among]
        if storages:
            written[parameter] = storages
    return written


def _storages(values: Iterable[Any], least_nbytes: int = 0) -> list[int]:
    return [
        torch_private.storage_id(each.untyped_storage())
        for each in map(_local, values)
        if each is not None and each.nbytes >= least_nbytes
    ]


def owned_memory(
    optimizers: Iterable[Optimizer], modules: Iterable[nn.Module] = (), *, least_nbytes: int = 0
) -> dict[int, int]:
    """Memory that only ``optimizers`` and those seen stepping change: addresses and byte counts.

    Of tensors of ``least_nbytes`` and more. Weights that ``modules`` themselves write in forward
    are not in it: embeddings with ``max_norm``.
    """
    owned: dict[int, int] = {}
    for optimizer in {*optimizers, *list(_seen)}:
        if not is_torchs_own(optimizer):
            continue
        for tensor in _large(optimizer, least_nbytes):
            nbytes = tensor.nbytes
            if nbytes >= least_nbytes and tensor.is_contiguous():
                address = tensor.data_ptr()
                if nbytes > owned.get(address, 0):
                    owned[address] = nbytes
    if owned:
        for module in torch_private.all_modules(modules):
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
                owned.pop(module.weight.data_ptr(), None)
    owned.pop(0, None)
    return owned


_known_large: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[int], list[int]]] = (
    weakref.WeakKeyDictionary()
)
"""Per optimizer: a limit in bytes, its tensors' ids, and the positions of those that reach it."""


def _large(optimizer: Optimizer, least_nbytes: int) -> list[torch.Tensor]:
    """An optimizer's tensors of ``least_nbytes`` or more (a DTensor's local part), from a cache.

    They are in the order of parameters and state. Tensors that have grown since the last look are
    missing.
    """
    held: list[Any] = [
        *itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    ]
    held += itertools.chain.from_iterable(
        map(operator.methodcaller("values"), optimizer.state.values())
    )
    ids = list(map(id, held))
    known = _known_large.get(optimizer)
    if known is None or known[:2] != (least_nbytes, ids):
        large = [
            number for number, each in enumerate(held) if _is_large(_local(each), least_nbytes)
        ]
        known = _known_large[optimizer] = least_nbytes, ids, large
    tensors = [_local(held[number]) for number in known[2]]
    return [tensor for tensor in tensors if tensor is not None]


def _is_large(tensor: torch.Tensor | None, least_nbytes: int) -> bool:
    return tensor is not None and tensor.nbytes >= least_nbytes


def is_owned(tensor: torch.Tensor, owned: Mapping[int, int]) -> bool:
    """Whether all of a contiguous tensor is memory of :func:`owned_memory`.

    The address alone is not enough: a flat buffer begins where the first of its parameters does.
    """
    return tensor.nbytes <= owned.get(tensor.data_ptr(), -1)


def _local(held: Any) -> torch.Tensor | None:
    """A plain tensor or that of a DTensor; else None: sparse and nested have no single address."""
    is_whole = type(held) in torch_private.KINDS
    tensor: Any = held if is_whole else getattr(held, "_local_tensor", None)
    return tensor if torch_private.is_ordinary(tensor) else None


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether ``step`` is ``torch.optim``'s: subclasses may override ``__init__``, not the update.

    Such a step writes nothing but parameters and state, and both follow from parameters and
    gradients alone.
    """
    return getattr(type(optimizer).step, "__module__", "").startswith("torch.optim.")


def is_resizable(tensor: torch.Tensor) -> bool:
    """Whether FSDP may free the tensor's storage under a reader (it unshards by ``resize_``)."""
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
