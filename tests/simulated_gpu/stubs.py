"""Stub libraries for all that the CUDA build of torch links, but for libcudart.

They are made from the undefined symbols of torch's own libraries, so that none of NVIDIA's
(gigabytes) is needed. What is called in one of them fails, and tells its name with
SIMULATED_GPU_VERBOSE.
"""

import re
import subprocess
from collections import defaultdict
from pathlib import Path

# Whose symbols without a version are, by how they begin; the first that fits.
PREFIXES = {
    "cusparseLt": "libcusparseLt.so.0",
    "cuFile": "libcufile.so.0",
    "nccl": "libnccl.so.2",
    "nvshmem": "libnvshmem_host.so.3",
    "cusparse": "libcusparse.so.12",
    "cublasLt": "libcublasLt.so.13",
    "cublas": "libcublas.so.13",
    "cufft": "libcufft.so.12",
    "curand": "libcurand.so.10",
    "cudnn": "libcudnn.so.9",
    "cupti": "libcupti.so.13",
    "nvrtc": "libnvrtc.so.13",
    "cu": "libcuda.so.1",
}
LINKED_WITHOUT_A_SYMBOL = ("libcusolver.so.12",)
# Opened by torch for expandable segments, which ask it for NVLink. It has less than
# torch.cuda.device_count() asks for, so that this goes on to count the devices by the runtime.
LOADED = {
    "libnvidia-ml.so.1": (
        "nvmlInit_v2",
        "nvmlDeviceGetHandleByPciBusId_v2",
        "nvmlDeviceGetNvLinkRemoteDeviceType",
        "nvmlDeviceGetNvLinkRemotePciInfo_v2",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlSystemGetCudaDriverVersion_v2",
        "nvmlDeviceGetGpuFabricInfoV",
    )
}
# Below `nvidia`, where torch looks for them; the others are in `cu13`.
DIRECTORIES = {
    "libcudnn.so.9": "cudnn",
    "libnccl.so.2": "nccl",
    "libcusparseLt.so.0": "cusparselt",
    "libnvshmem_host.so.3": "nvshmem",
}
# Functions that torch takes at their word.
BODIES = {
    "ncclGetVersion": "{ if (a) *(int*)a = 22907; return 0; }",
    "nvmlInit_v2": "{ return 0; }",
    "nvmlDeviceGetHandleByPciBusId_v2": "{ *(void**)b = NULL; return 0; }",
    "nvmlDeviceGetComputeRunningProcesses": "{ *(unsigned*)b = 0; return 0; }",
    "cuptiGetVersion": "{ *(unsigned*)a = 130000; return 0; }",
    "cuDevicePrimaryCtxGetState": """{
  const char* (*opened_by)(int) = dlsym(dlopen("libcudart.so.13", RTLD_LAZY | RTLD_NOLOAD), "simgpu_context");
  *(unsigned*)b = 0;
  *(int*)c = opened_by((int)(long)a) != NULL;
  return 0;
}""",  # noqa: E501
}
PREAMBLE = """\
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
static int refuse(const char* name) {
  if (getenv("SIMULATED_GPU_VERBOSE")) fprintf(stderr, "simulated GPU: %s is a stub\\n", name);
  return 1;
}
"""


def wanted(torch_libraries: Path) -> dict[str, dict[str, str]]:
    """Of each library that is to be made: its symbols, and their versions or ''."""
    libraries: dict[str, dict[str, str]] = {
        soname: {} for soname in (*PREFIXES.values(), *LINKED_WITHOUT_A_SYMBOL)
    }
    libraries |= {soname: dict.fromkeys(symbols, "") for soname, symbols in LOADED.items()}
    for path in sorted(torch_libraries.glob("lib*.so")):
        listing = subprocess.run(
            ["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True
        )
        for line in listing.stdout.splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            soname, version = _library_of(symbol, version.lstrip("@"))
            if soname:
                libraries.setdefault(soname, {})[symbol] = version
    return libraries


def _library_of(symbol: str, version: str) -> tuple[str | None, str]:
    if version == "NVSHMEM":
        return "libnvshmem_host.so.3", version
    if version.startswith("lib"):  # NVIDIA names the versions after the libraries
        return (None if version == "libcudart.so.13" else version), version
    if version or not re.match(r"(cu[A-Z]|cu[a-z]+[A-Z]|nccl|nvshmem|nvrtc)", symbol):
        return None, version
    return next(
        (soname for prefix, soname in PREFIXES.items() if symbol.startswith(prefix)), None
    ), version


def _function(symbol: str) -> str:
    body = BODIES.get(symbol, f'{{ return refuse("{symbol}"); }}')
    return f"long {symbol}(void* a, void* b, void* c) {body}\n"


def make(soname: str, symbols: dict[str, str], nvidia: Path) -> Path:
    """Compiles one library into the place where torch looks for it."""
    library = nvidia / DIRECTORIES.get(soname, "cu13") / "lib" / soname
    library.parent.mkdir(parents=True, exist_ok=True)
    source, script = library.with_suffix(".c"), library.with_suffix(".map")
    source.write_text(PREAMBLE + "".join(map(_function, sorted(symbols))))
    versions: dict[str, list[str]] = defaultdict(list)
    for symbol, version in sorted(symbols.items()):
        versions[version].append(symbol)
    named = [(version, names) for version, names in versions.items() if version]
    script.write_text(
        "".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in named)
    )
    flags = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{soname}"]
    if named:
        flags.append(f"-Wl,--version-script={script}")
    subprocess.run(["g++", "-x", "c", *flags, "-o", library, source], check=True)
    source.unlink()
    script.unlink()
    return library
