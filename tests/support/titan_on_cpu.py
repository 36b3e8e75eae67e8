# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Importing this has torchtitan run on the CPU.

When it is imported it asks torch for the accelerator, and takes CUDA where there is none. What it
asks the module of an accelerator for is answered as if there were little to tell.
"""

import types

import torch

_NOTHING = types.SimpleNamespace(total_memory=1 << 30)
_CPU = types.SimpleNamespace(
    set_device=lambda device: None,
    device_count=lambda: 1,
    current_device=lambda: 0,
    synchronize=lambda: None,
    empty_cache=lambda: None,
    reset_peak_memory_stats=lambda: None,
    memory_stats=lambda device: {},
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: _NOTHING,
    Stream=object,
)
_asked = torch._utils._get_available_device_type, torch._utils._get_device_module
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda kind: _CPU
try:
    import torchtitan.tools.utils as utils  # which asks
finally:
    torch._utils._get_available_device_type, torch._utils._get_device_module = _asked

assert utils.device_type == "cpu"
