"""Which kinds of devices have a runtime, by the name that torch gives them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Iterable
from typing import Final

import torch

from sidesave.stager.devices.cuda import CudaRuntime
from sidesave.stager.devices.device import DeviceRuntime, exclusion

logger = logging.getLogger(__name__)

_RUNTIMES: Final[dict[str, DeviceRuntime]] = {"cuda": CudaRuntime()}
_reported_kinds: Final[set[str]] = set()


def runtime_of(device: torch.device) -> DeviceRuntime | None:
    """The runtime of a device's kind; None for host memory and for kinds that have none."""
    return _RUNTIMES.get(device.type)


def first_with_runtime(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The first device among those of ``tensors`` from which copies run beside training."""
    elsewhere = (tensor.device for tensor in tensors if not tensor.is_cpu)  # the cheapest question first
    return next((device for device in elsewhere if device.type in _RUNTIMES), None)


def pci_address(device: torch.device | None) -> str:
    """See :meth:`DeviceRuntime.pci_address`; empty for host memory, and for kinds without a runtime."""
    runtime = None if device is None else runtime_of(device)
    return "" if device is None or runtime is None else runtime.pci_address(device)


def watch_graphs() -> None:
    """Have every runtime know of graphs, from now on; touches no device."""
    for runtime in _RUNTIMES.values():
        runtime.watch_graphs()


@contextlib.contextmanager
def no_capture(what: str) -> Generator[None]:
    """Keep graphs of all devices from being captured inside: running captures are waited for, new ones wait."""
    with exclusion():
        await_captures(what)
        yield


def await_captures(what: str) -> None:
    """See :meth:`DeviceRuntime.await_captures`."""
    for runtime in _RUNTIMES.values():
        runtime.await_captures(what)


def tell_synchronous(kind: str) -> None:
    """Log, once for each kind, that its tensors are copied within the call."""
    if kind not in _reported_kinds:
        _reported_kinds.add(kind)
        logger.warning("tensors on %s are copied one by one while save() blocks: no copies beside training there", kind)
