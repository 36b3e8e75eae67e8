"""Devices that break, memory that is not there, processes that end: what a save then comes to."""

from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from gpu import assert_holds, run_program, seen
from states import difference, held
from torch import nn

import sidesave
from sidesave import Checkpointer, FailureOptions
from sidesave.errors import UnsupportedValueError
from sidesave.stager.copy import device_copy

pytestmark = gpu.MARKS

needs_simulator = pytest.mark.skipif(
    gpu.simulator() is None, reason="only the simulated GPU breaks on request"
)


# A device that is broken for good: every call on it fails from then on ----------------------------

_BREAKS = """
import os, sys, time, torch
import sidesave
from sidesave.stager.copy import device_copy
from sidesave.stager import ownership
import simulated_gpu

where, folder = sys.argv[1], sys.argv[2]
state = gpu.trained(torch.optim.AdamW, fused=True)
state["buffer"] = torch.arange(1000.0, device="cuda")
checkpointer = sidesave.Checkpointer(folder)
gpu.warm_up(checkpointer, state)
torch.save(gpu.seen(state), folder + "/expected")

def break_device():
    simulated_gpu.break_device(700)

handle = error = None
began = time.monotonic()
if where == "before the call":
    break_device()
elif where == "in the pack":
    pack = device_copy.pack
    device_copy.pack = lambda *arguments: (pack(*arguments), break_device())[0]
elif where == "in the stager thread":
    copy_out = device_copy._DevicePart.copy_out
    device_copy._DevicePart.copy_out = lambda *arguments: (break_device(), copy_out(*arguments))[1]
elif where == "while it is waited for":
    take_after = device_copy.DeviceFingerprint.take_after
    device_copy.DeviceFingerprint.take_after = lambda *arguments: (take_after(*arguments), break_device())[0]
try:
    handle = checkpointer.save(1, state)
    error = handle.committed.exception(60)
except Exception as raised:
    error = raised
assert isinstance(error, (sidesave.SidesaveError, RuntimeError)), error
assert "illegal memory access" in str(error), error
if handle is not None:
    assert isinstance(error, sidesave.errors.StagingError), repr(error)
try:
    checkpointer.close(60)
except sidesave.SidesaveError as error:
    assert "illegal memory access" in str(error)
assert time.monotonic() - began < 30, "something waited for a device that is gone"
print("over", flush=True)
if sys.argv[3] == "mended":  # else torch itself may abort the process when it frees memory on a broken device
    simulated_gpu.break_device(0)
else:
    os._exit(0)
"""  # noqa: E501


@needs_simulator
@pytest.mark.parametrize("end", ["mended", "_exit"])
@pytest.mark.parametrize(
    "where", ["before the call", "in the pack", "in the stager thread", "while it is waited for"]
)
def test_a_device_that_breaks_fails_the_save_and_nothing_waits_for_it(
    tmp_path: Path, where: str, end: str
):
    assert run_program(_BREAKS, where, tmp_path, end) == "over\n"
    expected = torch.load(tmp_path / "expected", weights_only=False)
    assert difference(expected, sidesave.load(tmp_path / "step-00000000")) == ""
    latest = sidesave.latest(tmp_path)
    assert latest is not None and latest.step == 0


# Processes that end -------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["staged", "written"])
def test_a_process_that_is_gone_once_its_save_is_staged_has_saved(tmp_path: Path, when: str):
    code = """
import os, sys, torch
import sidesave
state = gpu.trained(torch.optim.AdamW, fused=True)
state["buffer"] = torch.arange(1000.0, device="cuda")
checkpointer = sidesave.Checkpointer(sys.argv[1])
torch.save(gpu.seen(state), sys.argv[1] + "/expected")
handle = checkpointer.save(1, state)
gpu.backward(state["model"])
state["optimizer"].step()
state["buffer"].fill_(7)
getattr(handle, sys.argv[2]).result(60)
print("saved", flush=True)
os._exit(0)
"""
    assert run_program(code, tmp_path, when) == "saved\n"
    expected = torch.load(tmp_path / "expected", weights_only=False)
    with Checkpointer(tmp_path) as checkpointer:  # what the dead one left is finished
        assert checkpointer.steps() == [1]
        assert difference(expected, sidesave.load(tmp_path / "step-00000001")) == ""


def test_saves_of_memory_in_expandable_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    code = """
import sys, torch
import sidesave
state = gpu.trained(torch.optim.AdamW, fused=True)
state["buffer"] = torch.arange(1000.0, device="cuda")
with sidesave.Checkpointer(sys.argv[1]) as checkpointer:
    for step in range(6):
        expected = gpu.seen(state)
        handle = checkpointer.save(step, state)
        state["buffer"].fill_(step)
        state["buffer"].untyped_storage().resize_(0)
        junk = torch.full((2000 * step,), 9.0, device="cuda")
        state["buffer"].untyped_storage().resize_(4000)
        gpu.backward(state["model"])
        state["optimizer"].step()
        state["buffer"].fill_(1)
        if step == 3:
            torch.cuda.empty_cache()
        gpu.assert_holds(handle, expected)
print("saved")
"""
    assert run_program(code, tmp_path) == "saved\n"


# Memory -------------------------------------------------------------------------------------------


def test_memory_that_was_resized_to_nothing_is_refused(checkpointer: Checkpointer):
    """Reading it would be an illegal access, after which nothing works on the device any more."""
    state = {"kept": torch.ones(10, device="cuda"), "gone": torch.ones(100_000, device="cuda")}
    parameter = nn.Parameter(torch.ones(100_000, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    state["gone"].untyped_storage().resize_(0)
    with pytest.raises(UnsupportedValueError, match="gone has no memory"):
        checkpointer.save(1, state)
    parameter.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedValueError, match="parameter has no memory"):
        checkpointer.save(1, {"parameter": parameter, "optimizer": optimizer})
    del state["gone"]
    assert_holds(checkpointer.save(1, state), seen(state))


def test_a_flat_buffer_is_not_owned_because_a_parameter_begins_where_it_does(
    checkpointer: Checkpointer,
):
    buffer = torch.zeros(400_000, device="cuda")
    parameter = nn.Parameter(buffer[:100_000])
    state = {"buffer": buffer, "optimizer": torch.optim.SGD([parameter], lr=0.1)}
    for step in range(4):
        expected = seen(state)
        handle = checkpointer.save(step, state)
        buffer[200_000:].add_(1)
        assert_holds(handle, expected)


def test_a_part_of_what_an_optimizer_owns_is_owned_as_well(checkpointer: Checkpointer):
    parameter = nn.Parameter(torch.zeros(400_000, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    state = {"part": parameter.detach()[:100_000]}
    optimizer.step()
    gpu.warm_up(checkpointer, state)
    expected = seen(state)
    with gpu.hold_copies_back(checkpointer):
        handle = checkpointer.save(1, state)
        optimizer.step()
        assert not handle.staged.done()
    assert_holds(handle, expected)


@pytest.mark.filterwarnings("ignore:the save of step 1 failed")
@pytest.mark.parametrize(
    "when", ["before its copy", "behind the look at it", "during its copy", "after its copy"]
)
def test_memory_that_is_freed_by_another_thread_is_told_as_torn(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    parameter = nn.Parameter(torch.zeros(400_000, device="cuda"))
    state = {"parameter": parameter, "optimizer": torch.optim.SGD([parameter], lr=0.1)}
    copy_out, view = device_copy._DevicePart.copy_out, device_copy._view

    def view_and_free(source: torch.Tensor, begin: int, nbytes: int) -> torch.Tensor:
        looked_at = view(source, begin, nbytes)
        source.untyped_storage().resize_(0)
        return looked_at

    def copy_out_and_free(part: Any, source: torch.Tensor, offset: int) -> None:
        storage = source.untyped_storage()
        try:
            storage.resize_(0 if when in ("before its copy", "during its copy") else 1_600_000)
            copy_out(part, source, offset)
        finally:
            storage.resize_(1_600_000 if when == "during its copy" else 0)

    with Checkpointer(tmp_path, failures=FailureOptions(tolerated=5)) as checkpointer:
        gpu.warm_up(checkpointer, state)
        with monkeypatch.context() as patch:
            patch.setattr(device_copy._DevicePart, "copy_out", copy_out_and_free)
            if when == "behind the look at it":
                patch.setattr(device_copy, "_view", view_and_free)
            error = checkpointer.save(1, state).committed.exception(60)
        assert isinstance(error, sidesave.errors.TornSnapshotError)
        assert "parameter, whose memory was freed" in str(error)


@pytest.mark.filterwarnings("ignore:the save of step 1 failed")
def test_the_error_of_a_failed_save_holds_no_device_memory(tmp_path: Path):
    with Checkpointer(tmp_path, failures=FailureOptions(tolerated=5)) as checkpointer:
        parameter = nn.Parameter(torch.zeros(400_000, device="cuda"))
        state: dict[str, Any] = {
            "parameter": parameter,
            "optimizer": torch.optim.SGD([parameter], lr=0.1),
        }
        gpu.warm_up(checkpointer, state)
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated()
        with held(checkpointer):
            handle = checkpointer.save(1, state)
            state["other"] = torch.zeros(400_000, device="cuda")
            parameter.untyped_storage().resize_(0)
        error = handle.committed.exception(60)
        assert isinstance(error, sidesave.errors.TornSnapshotError)
        parameter.data = state.pop("other")
        assert torch.cuda.memory_allocated() == allocated
        parameter.untyped_storage().resize_(0)
        del state, parameter
        assert torch.cuda.memory_allocated() < allocated
