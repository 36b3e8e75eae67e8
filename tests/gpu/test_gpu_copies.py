"""What the copies of a save leave to other work: short copies come in between the chunks."""

from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from gpu import MIB, run_program, side_streams, wait_until_enqueued, warm_up
from torch import nn

from sidesave import Checkpointer, StagingOptions
from sidesave.stager.copy.fingerprint import DeviceFingerprint
from sidesave.stager.devices.cuda import CudaRuntime

pytestmark = gpu.MARKS


def _owned(nbytes: int, count: int = 1) -> dict[str, Any]:
    """Tensors of an optimizer's, each of which is copied by itself."""
    parameters = [nn.Parameter(torch.zeros(nbytes // 4, device="cuda")) for _ in range(count)]
    return {
        "parameters": nn.ParameterList(parameters),
        "optimizer": torch.optim.SGD(parameters, lr=0.1),
    }


def _captured(nbytes: int) -> dict[str, Any]:
    return {"buffer": torch.zeros(nbytes, dtype=torch.uint8, device="cuda")}


@gpu.needs_counts
@pytest.mark.parametrize(
    ("state", "half_nbytes", "in_a_row"),
    [
        pytest.param(
            lambda: _owned(7 * MIB // 2), 4 * MIB, [1, 1, 1, 1], id="one tensor beside training"
        ),
        pytest.param(
            lambda: _owned(300 << 10, 11), 4 * MIB, [3, 3, 3, 2], id="several beside training"
        ),
        pytest.param(lambda: _owned(300 << 10, 3), 4 * MIB, [3], id="no more than a chunk"),
        pytest.param(lambda: _captured(7 * MIB // 2), 4 * MIB, [1, 1, 1, 1], id="captured"),
        pytest.param(
            lambda: _captured(7 * MIB // 2),
            1 << 45,
            [1, 1, 1, 1],
            id="captured, no memory for scratch",
        ),
    ],
)
def test_a_kernel_is_between_the_copies_of_one_chunk_and_the_next(
    checkpointer: Checkpointer,
    monkeypatch: pytest.MonkeyPatch,
    state: Any,
    half_nbytes: int,
    in_a_row: list[int],
):
    gpu.replace_everywhere(monkeypatch, "CHUNK_NBYTES", MIB)
    gpu.replace_everywhere(monkeypatch, "HALF_NBYTES", (half_nbytes,))
    simulator = gpu.simulator()
    saved = state()
    warm_up(checkpointer, saved)
    let_others_copy, counts = CudaRuntime.let_others_copy, list[dict[str, int]]()

    def noting(runtime: CudaRuntime, device: torch.device) -> None:
        counts.append(simulator.counts())
        let_others_copy(runtime, device)

    monkeypatch.setattr(CudaRuntime, "let_others_copy", noting)
    simulator.counts()
    checkpointer.save(1, saved).staged.result(60)
    counts.append(simulator.counts())
    assert [found.get("copy device->pinned", 0) for found in counts] == in_a_row
    assert [found.get("spin kernel", 0) for found in counts] == [0] + [1] * (len(in_a_row) - 1)


@gpu.needs_two_devices
def test_the_kernels_between_copies_open_no_context_on_the_current_device(tmp_path: Path):
    code = """
import sys, torch
import sidesave
from sidesave.stager.copy import device_copy, packing

packing.HALF_NBYTES, device_copy.CHUNK_NBYTES = (1 << 45,), 1 << 20  # copied by the calling thread
state = {"buffer": torch.zeros(3 << 20, dtype=torch.uint8, device="cuda:1")}
with sidesave.Checkpointer(sys.argv[1]) as checkpointer:
    gpu.assert_holds(checkpointer.save(1, state), gpu.seen(state))
assert gpu.contexts() == {1}, gpu.contexts()
print("saved")
"""
    assert run_program(code, tmp_path) == "saved\n"


@gpu.needs_a_real_device
def test_a_scalar_is_read_while_half_a_gigabyte_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Once would do; this process may be kept from a core until the copy is over. Behind all chunks
    it is always.
    """
    state, scalar, stream = _owned(512 * MIB), torch.ones((), device="cuda"), torch.cuda.Stream()
    copied = torch.cuda.Event()
    take_after = DeviceFingerprint.take_after

    def noting(witnesses: DeviceFingerprint) -> None:
        copied.record()
        take_after(witnesses)

    monkeypatch.setattr(DeviceFingerprint, "take_after", noting)
    with Checkpointer(tmp_path, staging=StagingOptions(slots=1)) as checkpointer:
        warm_up(checkpointer, state)
        [side] = side_streams(checkpointer)
        for step in range(1, 11):
            checkpointer.save(step, state)
            wait_until_enqueued()
            with torch.cuda.stream(stream):
                scalar.item()
            if not copied.query():
                break
            side.synchronize()
            checkpointer.wait(60)
        else:
            pytest.fail("each of ten reads has waited for the whole copy")
