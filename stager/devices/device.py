"""The seam: what a kind of device must offer so that its tensors are copied beside training.

Streams are torch's own (``torch.Stream``, ``torch.accelerator``); what torch has no generic form of stands here, and is
implemented once for each kind: :mod:`sidesave.stager.devices.cuda` for CUDA and, under the same names, ROCm. Tensors of
a kind without a runtime (:func:`sidesave.stager.devices.kinds.runtime_of` says None) are copied while ``save()``
blocks.
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
    """The calling thread's lock: it holds it while graph captures have to wait, and a capture waits by taking it."""
    if not hasattr(_of_thread, "exclusion"):
        _of_thread.exclusion = Monitor()
        _exclusions.add(_of_thread.exclusion)
    return _of_thread.exclusion


def exclusions() -> list[Monitor]:
    """The exclusion locks of the other threads."""
    own = exclusion()
    return [each for each in list(_exclusions) if each is not own]


class DeviceRuntime(abc.ABC):
    """One kind of device. Everything may be called from any thread, and none of it while a graph is captured."""

    @abc.abstractmethod
    def on(self, device: torch.device, stream: torch.Stream | None = None) -> AbstractContextManager[object]:
        """Make a device, and a stream of it, current in this thread; afterwards both are what they were.

        It touches no other device: not even the default one of a thread that never chose another.
        """

    @abc.abstractmethod
    def new_stream(self, device: torch.device) -> torch.Stream:
        """A stream beside the one that computes."""

    @abc.abstractmethod
    def current_stream(self, device: torch.device) -> torch.Stream:
        """The stream that the calling thread computes on."""

    @abc.abstractmethod
    def new_event(self) -> torch.Event:
        """An event; a host thread that waits for it sleeps."""

    @abc.abstractmethod
    def let_others_copy(self, device: torch.device) -> None:
        """Between two copies on the device's current stream: have copies of other streams come before the second."""

    @abc.abstractmethod
    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory for every device of this kind; ``RuntimeError`` with the reason if that is refused."""

    @abc.abstractmethod
    def unregister(self, address: int) -> None:
        """Undo :meth:`register`; what cannot be undone is logged."""

    def pci_address(self, device: torch.device) -> str:
        """The device's place on the host's PCI bus, as ``/sys`` names it; empty where it is unknown."""
        return ""

    @abc.abstractmethod
    def watch_graphs(self) -> None:
        """From now on know of every capture, and let every replay that may change parameters wait for copies."""

    @abc.abstractmethod
    def await_captures(self, what: str) -> None:
        """Under this thread's :func:`exclusion`, which keeps new ones out: wait until no graph is being captured.

        Raises:
            StagingError: The calling thread itself is capturing, or another one was for too long; names ``what``.
        """
