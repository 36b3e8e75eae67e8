"""Every kind of CUDA tensor comes back bit for bit, and however they lie it takes few launches."""

from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from gpu import MIB, assert_holds, backward, copied_late, seen, trained, warm_up
from states import TENSORS, difference, scramble
from torch import nn

import sidesave
from sidesave import Checkpointer, StagingOptions
from sidesave.stager.devices import kinds
from sidesave.stager.memory.pinning import PIECE_NBYTES

pytestmark = gpu.MARKS


def _kinds() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A tensor on the device, and what must come back in host memory."""
    # Not those with a conjugate or negative bit: resolving them on the device may give another nan
    # than on the host.
    kinds = {
        name: (tensor.detach().cuda(), tensor)
        for name, tensor in TENSORS.items()
        if tensor.layout is not torch.strided or not (tensor.is_conj() or tensor.is_neg())
    }
    for size, rows in (("small", 30), ("large", 2000), ("beyond the scratch", 6000)):
        base = torch.randn(
            rows, 2000, dtype=torch.complex64, generator=torch.Generator().manual_seed(rows)
        )
        floats = torch.view_as_real(base)
        for name, view in {
            "conjugate": lambda one: one.conj(),
            "conjugate, transposed": lambda one: one.mH,
            "negated": lambda one: one.conj().imag,
            "transposed": lambda one: one.t(),
            "every other": lambda one: one[::2, ::2],
        }.items():
            kinds[f"{size}, {name}"] = (
                view(base.cuda()),
                view(base).resolve_conj().resolve_neg().contiguous(),
            )
        kinds[f"{size}, real and imaginary parts"] = (
            floats.cuda().permute(2, 0, 1),
            floats.permute(2, 0, 1),
        )
    return kinds


@pytest.mark.parametrize("validate", [False, True])
def test_a_tensor_of_any_kind_comes_back_bit_for_bit(tmp_path: Path, validate: bool):
    kinds = _kinds()
    state = {"x": {name: tensor for name, (tensor, _) in kinds.items()}}
    with Checkpointer(tmp_path, staging=StagingOptions(validate=validate)) as checkpointer:
        handles = [checkpointer.save(step, state) for step in range(2)]
        for handle in handles:
            loaded = sidesave.load(handle.committed.result(100))["x"]
            wrong = {
                name: difference(expected, loaded[name]) for name, (_, expected) in kinds.items()
            }
            assert {name: what for name, what in wrong.items() if what} == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_owned_tensors_with_nan_and_infinity_are_not_taken_for_torn(
    checkpointer: Checkpointer, dtype: torch.dtype
):
    weight = nn.Parameter(torch.full((1 << 20,), float("inf"), dtype=dtype, device="cuda"))
    other = nn.Parameter(torch.full((1 << 20,), float("nan"), dtype=dtype, device="cuda"))
    state: dict[str, Any] = {
        "a": weight,
        "b": other,
        "optimizer": torch.optim.SGD([weight, other], lr=0.1),
    }
    for step in range(2):
        assert_holds(checkpointer.save(step, state), seen(state))


def test_tensors_of_host_and_device_are_saved_together(checkpointer: Checkpointer):
    """As an optimizer that keeps its state in host memory."""
    weight = nn.Parameter(torch.randn(1 << 20, device="cuda"))
    state: dict[str, Any] = {
        "weight": weight,
        "optimizer": torch.optim.SGD([weight], lr=0.1),
        "offloaded": {"moment": torch.randn(1 << 20), "pinned": torch.randn(1 << 20).pin_memory()},
    }
    warm_up(checkpointer, state)
    with copied_late(checkpointer, state) as handle:
        scramble(state["offloaded"].values())
        assert not handle.staged.done()


@pytest.mark.slow
def test_a_tensor_across_the_border_of_two_pinned_pieces_comes_back(tmp_path: Path):
    count = PIECE_NBYTES // 4 + MIB
    weight = nn.Parameter(torch.randint(-(1 << 20), 1 << 20, (count,), device="cuda").float())
    unowned = torch.randint(0, 256, (PIECE_NBYTES // 2,), dtype=torch.uint8, device="cuda")
    state = {"weight": weight, "optimizer": torch.optim.SGD([weight], lr=0.1), "unowned": unowned}
    with Checkpointer(tmp_path, staging=StagingOptions(slots=1)) as checkpointer:
        handle = checkpointer.save(1, state)
        loaded = sidesave.load(handle.committed.result(100), map_location="cuda")
    assert torch.equal(loaded["weight"], weight)
    assert torch.equal(loaded["unowned"], unowned)


def _bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("chunk_nbytes", [MIB, 300_001])
def test_tensors_across_many_borders_of_pieces_and_chunks_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_nbytes: int
):
    gpu.replace_everywhere(monkeypatch, "PIECE_NBYTES", 2 * MIB)
    gpu.replace_everywhere(monkeypatch, "CHUNK_NBYTES", chunk_nbytes)
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(1_234_567, device="cuda"))
    half = nn.Parameter(torch.randn(2_345_679, device="cuda").half())
    state: dict[str, Any] = {
        "weight": weight,
        "half": half,
        "optimizer": torch.optim.SGD([weight, half], lr=0.1),
        "one byte more": _bytes(4 * MIB + 1),
        "many": {str(number): _bytes(100_003 + 2 * number) for number in range(70)},
        "one byte less": _bytes(2 * MIB - 1),
    }
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(3):
            assert_holds(checkpointer.save(step, state), seen(state))


def test_runs_of_odd_length_before_wider_elements_come_back(checkpointer: Checkpointer):
    """Containers follow each other in the scratch, and the next one wants its elements aligned."""
    wide = (
        torch.complex128,
        torch.float64,
        torch.complex64,
        torch.int64,
        torch.float32,
        torch.bfloat16,
        torch.bool,
    )
    state: dict[str, Any] = {}
    for number, dtype in enumerate(wide):
        state[f"{2 * number:02} bytes"] = {
            str(count): _bytes(count) for count in (1, 3, 5, 7 + number)
        }
        mixed = {
            str(one): torch.randn(number + 1, 3, device="cuda").to(one) for one in wide[number:]
        }
        state[f"{2 * number + 1:02} {dtype}"] = {**mixed, "bytes": _bytes(2 * number + 1)}
    for step in range(2):
        assert_holds(checkpointer.save(step, state), seen(state))


@gpu.needs_counts
def test_one_transposed_tensor_among_a_thousand_costs_no_launch_for_each(
    checkpointer: Checkpointer,
):
    state = {str(number): torch.randn(8, 5, device="cuda") for number in range(1000)}
    state["transposed"] = torch.randn(5, 8, device="cuda").t()
    warm_up(checkpointer, state)
    expected = seen(state)
    torch.cuda.synchronize()
    gpu.simulator().counts()
    checkpointer.save(1, state).staged.result(60)
    counts = gpu.simulator().counts()
    work = {
        name: n
        for name, n in counts.items()
        if not name.startswith(("HOST SYNC", "WAIT", "event", "wait"))
    }
    assert sum(work.values()) <= 16, work
    assert_holds(checkpointer.save(2, state), expected)


def test_a_kind_of_device_without_a_runtime_is_copied_at_the_call_and_said_so_once(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(kinds, "_RUNTIMES", {})
    monkeypatch.setattr(kinds, "_reported_kinds", set())
    state = trained(torch.optim.AdamW, fused=True)
    state["transposed"] = torch.randn(30, 50, device="cuda").t()
    for step in range(3):
        expected = seen(state)
        handle = checkpointer.save(step, state)
        assert handle.staged.done()
        scramble(state["model"].parameters())
        assert_holds(handle, expected)
    assert (
        len(
            [
                record
                for record in caplog.records
                if "one by one while save() blocks" in record.message
            ]
        )
        == 1
    )


def test_a_checkpoint_is_loaded_onto_the_device_and_into_what_lives_there(
    checkpointer: Checkpointer,
):
    state = trained(torch.optim.AdamW, fused=True)
    expected = seen(state)
    checkpointer.save(1, state, blocking=True)
    fresh = checkpointer.load(map_location="cuda")
    assert {tensor.device.type for tensor in fresh["model"].values()} == {"cuda"}
    assert difference(expected, gpu.on_host(fresh)) == ""
    scramble(state["model"].parameters())
    state["optimizer"].state.clear()
    checkpointer.load(into=state)
    assert difference(expected, seen(state)) == ""
    assert all(parameter.is_cuda for parameter in state["model"].parameters())
    backward(state["model"])
    state["optimizer"].step()
