"""The kinds of devices that have a runtime, by torch's name for them."""

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
    """Return the runtime of a device's kind; None for the CPU and for kinds without one."""
    return _RUNTIMES.get(device.type)


def first_with_runtime(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """Return the first device of ``tensors`` that has a runtime.

    Copies of its tensors can overlap training.
    """
    # ``is_cpu`` is the cheapest test.
    devices = (tensor.device for tensor in tensors if not tensor.is_cpu)
    return next((device for device in devices if device.type in _RUNTIMES), None)


def pci_address(device: torch.device | None) -> str:
    """See :meth:`DeviceRuntime.pci_address`; empty for the CPU and for kinds without a runtime."""
    runtime = None if device is None else runtime_of(device)
    return "" if device is None or runtime is None else runtime.pci_address(device)


def watch_graphs() -> None:
    """Have every runtime track graph captures from now on; touches no device."""
    for runtime in _RUNTIMES.values():
        runtime.watch_graphs()


@contextlib.contextmanager
def no_capture(what: str) -> Generator[None]:
    """Exclude graph captures on all devices inside: wait for running ones and delay new ones."""
    with exclusion():
        await_captures(what)
        yield


def await_captures(what: str) -> None:
    """See :meth:`DeviceRuntime.await_captures`."""
    for runtime in _RUNTIMES.values():
        runtime.await_captures(what)


def warn_synchronous(kind: str) -> None:
    """Warn, once for each kind of device, that ``save()`` blocks while its tensors are copied."""
    if kind not in _reported_kinds:
        _reported_kinds.add(kind)
        logger.warning(
            "tensors on %s are copied one by one while save() blocks; their copies do not overlap",
            kind,
        )
