"""A GPU that is not there: a CUDA runtime of the host under the CUDA build of torch. README.md
tells how it works.

What is found is told once: `violations` and `counts` give what happened since they were called
before.
"""

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

import torch

_KERNELS = Path(sys.prefix) / "simulated_gpu/libsimgpu_kernels.so"
_BUFFER_NBYTES = 4 << 20


@cache
def _runtime() -> ctypes.CDLL | None:
    """The CUDA runtime of this process, if it is the simulated one."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/libcudart.so" in line:
            library = ctypes.CDLL(line.split(maxsplit=5)[-1])
            if not hasattr(library, "simgpu_schedule"):
                return None
            library.simgpu_schedule.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
            library.simgpu_context.restype = ctypes.c_char_p
            return library
    return None


def _required() -> ctypes.CDLL:
    runtime = _runtime()
    if runtime is None:
        raise RuntimeError(
            "this process does not run on the simulated GPU (see tests/simulated_gpu/README.md)"
        )
    return runtime


def active() -> bool:
    """Whether this process's CUDA runtime is the simulated one."""
    return _runtime() is not None


@cache
def install() -> int:
    """Puts CPU kernels in the place of the CUDA kernels of aten; returns of how many.

    With SIMULATED_GPU_KERNELS=noop torch's own stay, and their launches are counted and do nothing.
    """
    _required()
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    if os.environ.get("SIMULATED_GPU_KERNELS") == "noop":
        return 0
    return ctypes.CDLL(str(_KERNELS)).simgpu_install_kernels()


def schedule(name: str, seed: int = 0) -> None:
    """From now on what is enqueued runs "early", "late" or at "random" moments."""
    if not _required().simgpu_schedule(name.encode(), seed):
        raise ValueError(f"no such schedule: {name!r}")


def violations() -> list[str]:
    """The broken rules that were found."""
    return _lines("simgpu_take_violations")


def counts() -> dict[str, int]:
    """How often each operation was enqueued, and what else is counted."""
    pairs = (line.split(" ", 1) for line in _lines("simgpu_take_counts"))
    return {name: int(count) for count, name in pairs}


def contexts() -> dict[int, str]:
    """The devices that this process has a context on, and the call that opened it."""
    opened = {
        device: _required().simgpu_context(device) for device in range(torch.cuda.device_count())
    }
    return {device: call.decode() for device, call in opened.items() if call is not None}


def break_device(code: int) -> None:
    """From now on every call that needs a device fails with this code, as after an illegal access
    (700).

    What is queued is abandoned. 0 mends the device, for the next test.
    """
    _required().simgpu_break_device(code)


def _lines(take: str) -> list[str]:
    buffer = ctypes.create_string_buffer(_BUFFER_NBYTES)
    size = _required()[take](buffer, _BUFFER_NBYTES)
    return buffer.raw[:size].decode(errors="replace").splitlines()
