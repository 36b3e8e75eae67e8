"""What tests of CUDA tensors share: states on a device, side streams that are held, and programs of
their own.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import gates
import pytest
import torch
from states import assert_holds, frozen, like
from torch import nn
from trainers import wait_until

import sidesave
from sidesave import Checkpointer
from sidesave.stager import ownership

MARKS = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings(
        "ignore:.*(ComplexHalf|beta state|prototype stage|deprecated):UserWarning"
    ),
]
MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]


# The simulator ------------------------------------------------------------------------------------


def simulator() -> Any:
    """The module of the simulated GPU, or None on a real one."""
    try:
        simulated = importlib.import_module("simulated_gpu")
    except ImportError:
        return None
    return simulated if simulated.active() else None


needs_counts = pytest.mark.skipif(
    simulator() is None, reason="counts launches, which the simulated GPU does"
)
needs_a_real_device = pytest.mark.skipif(
    simulator() is not None, reason="is about times, which nothing simulates"
)
needs_two_devices = pytest.mark.skipif(
    "torch.cuda.device_count() < 2", reason="needs two CUDA devices"
)


def contexts() -> set[int]:
    """The devices that this process has a context on, which takes hundreds of MiB there."""
    simulated = simulator()
    if simulated is not None:
        return set(simulated.contexts())
    has_context = cast("Any", torch._C)._cuda_hasPrimaryContext
    return {device for device in range(torch.cuda.device_count()) if has_context(device)}


_PROLOGUE = f"""
import sys
sys.path[:0] = {[str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("", "support", "gpu"))]}
import gpu
gpu.begin()
"""


def begin() -> None:
    """The beginning of a program of its own: has a simulated GPU where the tests have one, and
    tells what it found.
    """
    simulated = simulator()
    if simulated is None:
        return
    simulated.install()
    pid = os.getpid()

    def end() -> None:
        # a forked child has no CUDA, and perhaps a lock that nobody holds any more
        if os.getpid() != pid:
            return
        found = simulated.violations()
        if found:
            print(*found[:10], sep="\n", file=sys.stderr, flush=True)
            os._exit(86)

    atexit.register(end)  # the first to be registered is the last to be called


def run_program(code: str, *arguments: object) -> str:
    """Run ``code`` in a fresh interpreter, with this module as ``gpu``; returns what it printed."""
    command = [sys.executable, "-W", "ignore", "-c", _PROLOGUE + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-4000:]}"
    return done.stdout


def make_cublas_handle(device: str = "cuda") -> None:
    """For what this thread will capture: its first product makes one, which would break the
    capture.
    """
    matrix = torch.ones(8, 8, device=device)
    torch.mm(matrix, matrix)


def allocated(device: str = "cuda") -> int:
    """Bytes that torch has given out in this process, without cuBLAS's workspaces, one a stream
    that has multiplied.
    """
    cast("Any", torch._C)._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated(device)


# States -------------------------------------------------------------------------------------------


def network(device: str = "cuda", width: int = 512) -> nn.Sequential:
    """Tensors below and above the threshold from which they are copied one by one (256 KiB): 1 MiB
    and 2 KiB.
    """
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device)


def backward(model: nn.Module, width: int = 512) -> None:
    model.zero_grad(set_to_none=False)
    device = next(model.parameters()).device
    model(torch.randn(4, width, device=device)).square().mean().backward()


def trained(
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    device: str = "cuda",
    **options: Any,
) -> dict[str, Any]:
    model = network(device)
    optimizer = make(model.parameters(), lr=0.1, **options)
    backward(model)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def on_host(value: Any) -> Any:
    """The same nest with its tensors in host memory, as a load gives it."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return like(value, ((key, on_host(item)) for key, item in value.items()))
    return type(value)(map(on_host, value)) if isinstance(value, (list, tuple)) else value


def seen(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint of ``state`` must hold; waits for the compute stream."""
    return on_host(frozen(state))


def warm_up(checkpointer: Checkpointer, state: dict[str, Any]) -> None:
    """Has memory populated and pinned, and streams and scratch made, for all slots."""
    checkpointer.prepare(state, slots=checkpointer.session.options.staging.slots).result(60)
    checkpointer.save(0, state, blocking=True)
    torch.cuda.synchronize()


def warmed_up(
    checkpointer: Checkpointer,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> dict[str, Any]:
    """Such a state, for which the checkpointer is warmed up."""
    state = trained(make, **options)
    warm_up(checkpointer, state)
    return state


# Streams that are held ----------------------------------------------------------------------------


def side_streams(checkpointer: Checkpointer) -> list[torch.cuda.Stream]:
    """Those that copies run on; there are none before the first save of CUDA tensors."""
    streams = [
        cast("torch.cuda.Stream", lane.stream)
        for lane in checkpointer.session.copier._lanes._lanes.values()
    ]
    assert streams
    return streams


@contextlib.contextmanager
def hold_copies_back(checkpointer: Checkpointer) -> Iterator[gates.Gates]:
    """No copy that is enqueued from now on runs before the block ends, or what it gives is
    opened.
    """
    with gates.held(side_streams(checkpointer)) as held:
        yield held


@contextlib.contextmanager
def hold_compute_back() -> Iterator[gates.Gates]:
    """The current stream is far behind the host: what is enqueued from now on runs after the
    block.
    """
    with gates.held([torch.cuda.current_stream()]) as held:
        yield held


@contextlib.contextmanager
def copied_late(
    checkpointer: Checkpointer,
    state: dict[str, Any],
    step: int = 1,
    hold: Callable[[Checkpointer], contextlib.AbstractContextManager[Any]] = hold_copies_back,
) -> Iterator[sidesave.SaveHandle]:
    """Save a state whose copies wait for the end of the block; the checkpoint holds what was there
    before.
    """
    expected = seen(state)
    with hold(checkpointer):
        handle = checkpointer.save(step, state)
        yield handle
    assert_holds(handle, expected)


def finish_compute() -> None:
    """Wait for the current stream, and so that a held one would fail the test soon."""
    reached = torch.cuda.Event()
    reached.record()
    wait_until(
        reached.query, "the end of the compute stream: it waits for what is held", timeout_s=15
    )
    torch.cuda.current_stream().synchronize()


def wait_until_enqueued() -> None:
    """Return once the copies of all saves are enqueued; no stream that anybody uses is made to wait
    for them.
    """
    with torch.cuda.stream(torch.cuda.Stream()):
        ownership.close_guards()


# Threads ------------------------------------------------------------------------------------------


def is_inside(thread: threading.Thread, *names: str) -> bool:
    """Whether a thread is in a function of the stager (of one of these names), as its stack
    says.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if "/stager/" in frame.f_code.co_filename and (not names or frame.f_code.co_name in names):
            return True
        frame = frame.f_back
    return False


class Call(threading.Thread):
    """A call in a thread of its own, and what came of it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self.value: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.value = self._function()
        except BaseException as error:  # noqa: BLE001 - handed over to who asks for the result
            self.error = error

    def result(self, timeout_s: float = 60.0) -> Any:
        self.join(timeout_s)
        assert not self.is_alive(), "the call has not returned"
        if self.error is not None:
            raise self.error
        return self.value

    def goes_as_far_as_it_gets(self) -> None:
        """Return when it is over, or stands still; the longer it is given the more a test finds."""
        self.join(1.0)


# Internals ----------------------------------------------------------------------------------------


def replace_everywhere(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    """Replaces a constant or class of the stager in every module of it that has taken it in by
    name.
    """
    modules = [module for key, module in sys.modules.items() if key.startswith("sidesave.stager.")]
    holders = [module for module in modules if name in vars(module)]
    assert holders, f"nothing in the stager is called {name}"
    for module in holders:
        monkeypatch.setattr(module, name, value)
