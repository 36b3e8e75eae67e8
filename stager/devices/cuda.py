"""CUDA's contexts, events, page-locked memory and graphs; ROCm uses the same names in torch.

No function touches a device, or opens a context on it, unless it is called for that device.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final, cast

import torch

from sidesave.errors import StagingError
from sidesave.stager import ownership, torch_private
from sidesave.stager.devices.device import DeviceRuntime, exclusions
from sidesave.stager.signal_safe import Monitor

logger = logging.getLogger(__name__)

CAPTURE_TIMEOUT_S: Final = 300.0
"""Seconds that a save or pinning waits for another thread's graph capture, and vice versa."""
_PORTABLE: Final = 1
_LAST_ERROR: Final = {"libcudart": "cudaGetLastError", "libamdhip64": "hipGetLastError"}


class CudaRuntime(DeviceRuntime):
    """CUDA, or ROCm, through ``torch.cuda``."""

    def __init__(self) -> None:
        """Create the runtime without touching a device."""
        self._captures = _Captures()

    @contextlib.contextmanager
    def on(self, device: torch.device, stream: torch.Stream | None = None) -> Generator[None]:
        """See the base class. torch's own contexts do not initialize a default device."""
        with torch.cuda.device(device):
            if stream is None:
                yield
            else:
                with torch.cuda.stream(cast("torch.cuda.Stream", stream)):
                    yield

    def new_stream(self, device: torch.device) -> torch.Stream:
        """See the base class."""
        return torch.cuda.Stream(device)

    def current_stream(self, device: torch.device) -> torch.Stream:
        """See the base class."""
        return torch.cuda.current_stream(device)

    def new_event(self) -> torch.Event:
        """See the base class. A thread that waits for torch's generic event spins."""
        return torch.cuda.Event(blocking=True)

    def let_others_copy(self, device: torch.device) -> None:
        """See the base class.

        The copy engine serves one stream until that stream has a kernel to run. This kernel reads
        and writes nothing, so it needs no ordering with other work.
        """
        with torch.cuda.device(device):
            torch_private.spin(0)

    def register(self, address: int, nbytes: int) -> None:
        """See the base class. The process must already use the calling thread's current device."""
        code = int(_runtime().cudaHostRegister(address, nbytes, _PORTABLE))
        if code:
            _clear_last_error()
            raise RuntimeError(f"cudaHostRegister failed with error {code}")

    def unregister(self, address: int) -> None:
        """See the base class."""
        code = int(_runtime().cudaHostUnregister(address))
        if code:
            logger.warning("cudaHostUnregister failed with error %d", code)
            _clear_last_error()

    def pci_address(self, device: torch.device) -> str:
        """See the base class. Opens no context."""
        try:
            properties = cast("Any", torch.cuda.get_device_properties(device))
            domain, bus = properties.pci_domain_id, properties.pci_bus_id
            return f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
        except (AttributeError, RuntimeError):  # an older torch, or a device that does not respond
            return ""

    def watch_graphs(self) -> None:
        """See the base class."""
        self._captures.watch()

    def await_captures(self, what: str) -> None:
        """See the base class."""
        self._captures.await_end(what)


def _runtime() -> Any:
    return cast("Any", torch.cuda.cudart())


def _clear_last_error() -> None:
    """Clear the runtime's last error.

    Otherwise torch would raise it at its next unrelated call.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        for library, function in _LAST_ERROR.items():
            if f"/{library}" in path:
                getattr(ctypes.CDLL(path), function)()
                return


class _Captures:
    """Tracks graph captures in progress, and the graphs whose replay changes no parameters.

    During a capture no thread may make calls that a save needs (pinning, waiting on the host), so
    captures and saves wait for each other. A replay runs no Python, so it first waits for copies,
    in stream order, unless the graph is known to contain no optimizer step and no ``guard()``.
    """

    def __init__(self) -> None:
        self._changed = Monitor()
        self._open: dict[int, int] = {}  # id of a graph that is being captured -> thread
        self._harmless: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped: set[int] = set()  # graphs being captured during which a guard closed
        self._watching = False

    def watch(self) -> None:
        with self._changed:
            if self._watching:
                return
            self._watching = True
        graph: Any = torch.cuda.CUDAGraph
        replay, begin, end = graph.replay, graph.capture_begin, graph.capture_end

        def guarded_replay(this: Any) -> None:
            if this not in self._harmless:
                ownership.close_guards()
            replay(this)

        def guarded_begin(this: Any, *args: Any, **kwargs: Any) -> None:
            self._enter(this)
            try:
                begin(this, *args, **kwargs)
            except BaseException:  # no capture has begun
                self._leave(this)
                raise

        def guarded_end(this: Any) -> None:
            try:
                end(this)
            finally:
                if not self._leave(this):
                    self._harmless.add(this)

        graph.replay, graph.capture_begin, graph.capture_end = (
            guarded_replay,
            guarded_begin,
            guarded_end,
        )
        ownership.when_guarded(self._mark)

    def _enter(self, graph: Any) -> None:
        """Register a capture once running ``save()`` calls have returned; finish their copies."""
        deadline = time.monotonic() + CAPTURE_TIMEOUT_S
        while not self._opened(graph, anyhow=time.monotonic() > deadline):
            for other in exclusions():
                if other.acquire(True, max(0.0, deadline - time.monotonic())):
                    other.release()
        ownership.finish_pending()

    def _opened(self, graph: Any, *, anyhow: bool) -> bool:
        """Register a capture and return True.

        Returns False if another thread excludes captures now.
        """
        with self._changed:
            for other in exclusions():
                if other.acquire(False):
                    other.release()
                elif anyhow:
                    logger.error(
                        "save() did not return within %g s; a graph capture starts anyway",
                        CAPTURE_TIMEOUT_S,
                    )
                else:
                    return False
            self._open[id(graph)] = threading.get_ident()
            self._harmless.discard(graph)
            return True

    def _leave(self, graph: Any) -> bool:
        """Unregister a capture; return whether its graph may change parameters."""
        with self._changed:
            self._open.pop(id(graph), None)
            stepped = id(graph) in self._stepped
            self._stepped.discard(id(graph))
            self._changed.notify_all()
        return stepped

    def _mark(self) -> None:
        """Mark all graphs in capture as changing parameters.

        A step may run in an autograd thread.
        """
        if self._open:
            with self._changed:
                self._stepped.update(self._open)

    def await_end(self, what: str) -> None:
        with self._changed:
            if threading.get_ident() in self._open.values():
                raise StagingError(
                    f"{what} was called during a CUDA graph capture; call it before or after"
                )
        if not self._changed.wait_for(lambda: not self._open, CAPTURE_TIMEOUT_S):
            raise StagingError(
                f"{what} waited {CAPTURE_TIMEOUT_S:g} s for another thread's CUDA graph capture"
            )
