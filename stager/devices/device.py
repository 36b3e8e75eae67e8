"""The interface that a kind of device implements so that its tensors are copied during training.

It covers what ``torch.Stream`` and ``torch.accelerator`` lack a generic form for. It has one
implementation for each kind: :mod:`sidesave.stager.devices.cuda` for CUDA and ROCm. Tensors of a
kind without a runtime (:func:`sidesave.stager.devices.kinds.runtime_of` returns None) are copied
while ``save()`` blocks.
"""

from __future__ import annotations

import abc
import threading
import weakref
from contextlib import AbstractContextManager

import torch

from sidesave.stager.signal_safe import Monitor

_of_thread = threading.local()
_exclusions: weakref.WeakSet[Monitor] = weakref.WeakSet()


def exclusion() -> Monitor:
    """Return the calling thread's lock.

    Graph captures of other threads wait while this thread holds it.
    """
    if not hasattr(_of_thread, "exclusion"):
        _of_thread.exclusion = Monitor()
        _exclusions.add(_of_thread.exclusion)
    return _of_thread.exclusion


def exclusions() -> list[Monitor]:
    """Return the exclusion locks of the other threads."""
    own = exclusion()
    return [each for each in list(_exclusions) if each is not own]


class DeviceRuntime(abc.ABC):
    """One kind of device.

    Any thread may call its methods, but not while a graph is being captured.
    """

    @abc.abstractmethod
    def on(
        self, device: torch.device, stream: torch.Stream | None = None
    ) -> AbstractContextManager[object]:
        """Make a device and optionally a stream current in this thread, and restore both on exit.

        Touches no other device, not even the default device of a thread.
        """

    @abc.abstractmethod
    def new_stream(self, device: torch.device) -> torch.Stream:
        """Create a side stream."""

    @abc.abstractmethod
    def current_stream(self, device: torch.device) -> torch.Stream:
        """Return the calling thread's current stream."""

    @abc.abstractmethod
    def new_event(self) -> torch.Event:
        """Create an event; a host thread that waits for it sleeps."""

    @abc.abstractmethod
    def let_others_copy(self, device: torch.device) -> None:
        """Let copies of other streams run before the next copy on the device's current stream."""

    @abc.abstractmethod
    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory for every device of this kind.

        Raises ``RuntimeError`` if that is refused.
        """

    @abc.abstractmethod
    def unregister(self, address: int) -> None:
        """Undo :meth:`register`; a failure is logged."""

    def pci_address(self, device: torch.device) -> str:
        """Return the device's PCI address as ``/sys`` names it; empty if unknown."""
        return ""

    @abc.abstractmethod
    def watch_graphs(self) -> None:
        """Track captures from now on.

        Each replay that may change parameters waits for copies.
        """

    @abc.abstractmethod
    def await_captures(self, what: str) -> None:
        """Wait until no graph is being captured.

        Call it under :func:`exclusion`, which delays new captures.

        Raises:
            StagingError: The calling thread itself is capturing, or another thread's capture takes
                too long. The message names ``what``, the caller's operation.
        """
