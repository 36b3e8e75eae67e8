"""Builds the simulated GPU into the virtual environment that runs this:
``python tests/simulated_gpu/build.py``.

The environment has the CUDA build of torch and the CUDA headers, without the libraries of NVIDIA.
Only what has changed is compiled; nothing is written into the checkout.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import stubs

HERE = Path(__file__).resolve().parent
SITE = Path(sysconfig.get_path("purelib"))
TORCH = SITE / "torch"
NVIDIA = SITE / "nvidia"
BUILD = Path(sys.prefix) / "simulated_gpu"
"""Objects and libraries; tests/simulated_gpu/__init__.py looks for the kernels here."""

CUDART = NVIDIA / "cu13/lib/libcudart.so.13"
"""Where torch looks for the CUDA runtime."""

COMPILER = os.environ.get("CXX", "g++")
INCLUDE = NVIDIA / "cu13/include"
COMMON = ["-fPIC", "-Wall", "-isystem", str(INCLUDE)]
RUNTIME = ["-std=c++17", "-O2", "-g1", *COMMON]
KERNELS = [
    *("-std=c++20", "-O1", *COMMON),
    *(
        "-isystem",
        str(TORCH / "include"),
        "-isystem",
        str(TORCH / "include/torch/csrc/api/include"),
    ),
]


def digest(*parts: object) -> str:
    hashed = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else str(part).encode()
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.hexdigest()


def unless_done(target: Path, inputs: str, arguments: Iterable[object]) -> bool:
    """Runs a command that makes a file, unless it was made of the same; whether it ran."""
    stamp = target.with_name(target.name + ".stamp")
    command = [str(each) for each in arguments]
    inputs = digest(inputs, *command)
    if target.exists() and stamp.exists() and stamp.read_text() == inputs:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(command, check=True)
    stamp.write_text(inputs)
    return True


def compiled(directory: str, flags: list[str], pool: ThreadPoolExecutor) -> list[Path]:
    """The objects of a directory's sources."""
    headers = digest(*sorted(HERE.glob("*/*.h")), version("torch"), version("nvidia-cuda-runtime"))

    def compile_one(source: Path) -> Path:
        target = BUILD / directory / f"{source.stem}.o"
        command = [COMPILER, *flags, "-c", source, "-o", target]
        if unless_done(target, digest(headers, source), command):
            print(f"sidesave: compiled {source.relative_to(HERE)}", file=sys.stderr)
        return target

    return list(pool.map(compile_one, sorted((HERE / directory).glob("*.cpp"))))


def build() -> None:
    jobs = len(os.sched_getaffinity(0))
    exports = HERE / "runtime/exports.map"
    runtime, kernels = BUILD / "libcudart.so.13", BUILD / "libsimgpu_kernels.so"
    with ThreadPoolExecutor(jobs) as pool:
        objects = compiled("runtime", RUNTIME, pool)
        link = [f"-Wl,-soname,{CUDART.name}", f"-Wl,--version-script={exports}", "-lpthread"]
        unless_done(
            runtime,
            digest(exports, *objects),
            [COMPILER, "-shared", "-o", runtime, *objects, *link],
        )
        objects = compiled("kernels", KERNELS, pool)
        link = [
            f"-L{TORCH / 'lib'}",
            *("-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda"),
            runtime,
        ]
        link += ["-Wl,--allow-shlib-undefined"]
        unless_done(
            kernels, digest(*objects), [COMPILER, "-shared", "-o", kernels, *objects, *link]
        )
        stamp, inputs = BUILD / "stubs.stamp", digest(HERE / "stubs.py", version("torch"))
        if not stamp.exists() or stamp.read_text() != inputs:
            libraries = stubs.wanted(TORCH / "lib")
            list(pool.map(lambda soname: stubs.make(soname, libraries[soname], NVIDIA), libraries))
            stamp.write_text(inputs)
            print(f"sidesave: made {len(libraries)} stub libraries", file=sys.stderr)
    if not CUDART.exists() or CUDART.read_bytes() != runtime.read_bytes():
        CUDART.parent.mkdir(parents=True, exist_ok=True)
        CUDART.unlink(missing_ok=True)  # a process may be using it
        shutil.copy2(runtime, CUDART)


if __name__ == "__main__":
    if not (TORCH / "lib/libtorch_cuda.so").exists():
        sys.exit(f"{TORCH} is not the CUDA build of torch")
    build()
