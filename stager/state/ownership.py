"""Which tensors only an optimizer changes, and the guard that keeps it from changing them under a copy.

A copy may run beside training only for tensors that nothing but an optimizer's ``step`` writes: swapping EMA weights in
through ``p.data.copy_`` moves no version counter and fires no hook. So a tensor counts as owned when a known optimizer
holds it as parameter or state, and that optimizer's ``step`` is torch's own. All else is captured at the call.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Final, Protocol, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sidesave.stager import torch_private


class StepWatcher(Protocol):
    """Is notified of each optimizer step of this process, for as long as somebody refers to it."""

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step; must not block."""
        ...


class Guarded(Protocol):
    """A copy under way, as the guard sees it."""

    def close_guard(self) -> None:
        """Return once the memory may be changed: on the host, or in stream order on a device. Idempotent."""
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


def install() -> None:
    """Put the guard in front of every optimizer's ``step`` in this process; once is enough.

    It goes first among the global hooks: another hook that changes a parameter must find the copy done.
    """
    global _installed
    with _lock:
        if _installed:
            return
        handle = register_optimizer_step_pre_hook(cast("Any", _before_step))
        hooks = cast("Any", sys.modules[Optimizer.__module__])._global_optimizer_pre_hooks
        hooks.move_to_end(handle.id, last=False)
        _installed = True


# Undecorated, the hook recompiled 20 frames in 14 steps. This form, which torch.optim uses too, imports the compiler (a
# second) not here but when it is first called.
@torch_private.disable_dynamo
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _seen.add(optimizer)
    for watcher in list(_watchers):
        watcher.stepped(optimizer)
    close_guards()


def watch_steps(watcher: StepWatcher) -> None:
    """Have ``watcher`` told of every step from now on that :func:`install` has put the guard in front of."""
    _watchers.add(watcher)


def when_guarded(call: Callable[[], None]) -> None:
    """Have ``call`` called whenever guards are closed, that is before parameters change."""
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
    """Protects hand-written updates: copies under way are waited for, saves inside the block copy at the call."""
    close_guards()
    _holds.depth = getattr(_holds, "depth", 0) + 1
    try:
        yield
    finally:
        _holds.depth -= 1


def in_guard() -> bool:
    """Whether this thread is inside :func:`guard`."""
    return getattr(_holds, "depth", 0) > 0


def owned_memory(
    optimizers: Iterable[Optimizer], modules: Iterable[nn.Module] = (), *, least_nbytes: int = 0
) -> dict[int, int]:
    """Memory that only ``optimizers``, and those seen stepping, change: addresses, and bytes from there on.

    Of tensors of ``least_nbytes`` and more. Weights that ``modules`` themselves write in forward are not in it:
    embeddings with ``max_norm``.
    """
    owned: dict[int, int] = {}
    for optimizer in {*optimizers, *list(_seen)}:
        if not _is_torchs_own(optimizer):
            continue
        for tensor in _large(optimizer, least_nbytes):
            nbytes = tensor.nbytes
            if nbytes >= least_nbytes and tensor.is_contiguous():
                address = tensor.data_ptr()
                if nbytes > owned.get(address, 0):
                    owned[address] = nbytes
    if owned:
        for module in _all_modules(modules):
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
                owned.pop(module.weight.data_ptr(), None)
    owned.pop(0, None)
    return owned


_known_large: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[int], list[int]]] = weakref.WeakKeyDictionary()
"""By optimizer: from how many bytes on, the ids of all that it holds, and which of these were so large."""


def _large(optimizer: Optimizer, least_nbytes: int) -> list[torch.Tensor]:
    """What an optimizer holds of so many bytes, of a DTensor the local part; without what has grown since it was seen.

    It is in the order of parameters and state.
    """
    held: list[Any] = [*itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)]
    held += itertools.chain.from_iterable(map(operator.methodcaller("values"), optimizer.state.values()))
    ids = list(map(id, held))
    known = _known_large.get(optimizer)
    if known is None or known[:2] != (least_nbytes, ids):
        large = [number for number, each in enumerate(held) if _is_large(_local(each), least_nbytes)]
        known = _known_large[optimizer] = least_nbytes, ids, large
    tensors = [_local(held[number]) for number in known[2]]
    return [tensor for tensor in tensors if type(tensor) in _KINDS]


def _is_large(tensor: Any, least_nbytes: int) -> bool:
    return type(tensor) in _KINDS and tensor.nbytes >= least_nbytes


def _all_modules(modules: Iterable[nn.Module]) -> Iterable[nn.Module]:
    """Modules and all below them; in a tenth of the time that ``modules()`` takes for the names and the order."""
    left, by_id = [*modules], dict[int, nn.Module]()
    while left:
        module = left.pop()
        if id(module) not in by_id:
            by_id[id(module)] = module
            left += torch_private.children(module)
    return by_id.values()


def is_owned(tensor: torch.Tensor, owned: Mapping[int, int]) -> bool:
    """Whether all of a contiguous tensor is memory of :func:`owned_memory`.

    The address alone is not enough: a flat buffer begins where the first of its parameters does.
    """
    return tensor.nbytes <= owned.get(tensor.data_ptr(), -1)


_KINDS: Final = (torch.Tensor, nn.Parameter)


def _local(held: Any) -> Any:
    """The local part of a DTensor; a plain tensor itself."""
    if type(held) in _KINDS:
        return held
    return getattr(held, "_local_tensor", None) if isinstance(held, torch.Tensor) else None


def _is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether ``step`` is one of ``torch.optim``: a subclass may override ``__init__`` but not the update."""
    return getattr(type(optimizer).step, "__module__", "").startswith("torch.optim.")


def is_resizable(tensor: torch.Tensor) -> bool:
    """Whether FSDP may free the tensor's storage under a reader (it unshards by ``resize_``)."""
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
