"""Saves of CUDA tensors: the compute stream waits, the CPU does not, and no bit is of a later moment.

Where a test needs a copy to be under way, it keeps the side stream busy first: what the copy reads is then read well
after everything that the test enqueues next.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_staging import assert_torn, frozen, scramble, swap_back, swap_in, wait_until, waits_at_the_guard
from test_staging import held as stager_held
from test_tree import TENSORS, difference
from torch import nn

import sidesave
from sidesave import Checkpointer
from sidesave.stager import ownership
from sidesave.stager.cuda import SCRATCH_NBYTES
from sidesave.stager.pinning import PIECE_NBYTES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*(ComplexHalf|beta state|prototype stage|deprecated):UserWarning"),
]

MIB = 1 << 20
THIRD_OF_A_SECOND = 600_000_000
"""Cycles, at about 1.8 GHz."""


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path) as made:
        yield made


def network(device: str = "cuda", width: int = 512) -> nn.Sequential:
    """Tensors below and above the threshold from which they are copied one by one (256 KiB): 1 MiB and 2 KiB."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device)


def backward(model: nn.Module, width: int = 512) -> None:
    model.zero_grad(set_to_none=False)
    device = next(model.parameters()).device
    model(torch.randn(4, width, device=device)).square().mean().backward()


def trained(
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, device: str = "cuda", **options: Any
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
        return {key: on_host(item) for key, item in value.items()}
    return type(value)(map(on_host, value)) if isinstance(value, (list, tuple)) else value


def seen(state: dict[str, Any]) -> dict[str, Any]:
    return on_host(frozen(state))


def assert_holds(handle: sidesave.SaveHandle, expected: dict[str, Any]) -> None:
    assert difference(expected, sidesave.load(handle.committed.result(60))) == ""


def hold_copies_back(checkpointer: Checkpointer, cycles: int = THIRD_OF_A_SECOND) -> None:
    """Keeps the side streams busy; there are none before the first save of CUDA tensors."""
    lanes = checkpointer._copier._lanes._lanes
    assert lanes
    for lane in lanes.values():
        with torch.cuda.device(lane.device), torch.cuda.stream(lane.stream):
            torch.cuda._sleep(cycles)


def warm_up(checkpointer: Checkpointer, state: dict[str, Any]) -> None:
    """Has memory populated and pinned, and streams and scratch made, for all slots."""
    checkpointer.prepare(state).result(60)
    checkpointer.save(0, state, blocking=True)
    torch.cuda.synchronize()


# Optimizers ------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW, foreach: its step counts are in host memory": (torch.optim.AdamW, {"foreach": True}),
    "AdamW, capturable, amsgrad": (torch.optim.AdamW, {"capturable": True, "amsgrad": True}),
    "AdamW, one by one": (torch.optim.AdamW, {"foreach": False}),
    "SGD with momentum, fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_beside_a_save_and_changes_nothing_of_it(checkpointer: Checkpointer, name: str):
    make, options = OPTIMIZERS[name]
    state = trained(make, **options)
    warm_up(checkpointer, state)
    for step in range(1, 5):
        expected = seen(state)
        hold_copies_back(checkpointer)
        handle = checkpointer.save(step, state)
        for _ in range(3):
            backward(state["model"])
            state["optimizer"].step()
        assert not handle.staged.done(), "neither save() nor step() has waited for the copy"
        assert_holds(handle, expected)
        assert difference(expected, seen(state)) != ""


def test_saves_one_after_the_other_share_the_scratch_and_keep_apart_what_they_saw(checkpointer: Checkpointer):
    state = trained(torch.optim.AdamW, fused=True)
    state["buffer"] = torch.zeros(1000, device="cuda")  # packed, for nobody owns it
    warm_up(checkpointer, state)
    saves: list[tuple[sidesave.SaveHandle, dict[str, Any]]] = []
    for step in range(1, 9):
        backward(state["model"])
        state["optimizer"].step()
        state["buffer"].fill_(step)
        expected = seen(state)
        saves.append((checkpointer.save(step, state), expected))
    for handle, expected in saves:
        assert_holds(handle, expected)


def test_a_step_waits_on_the_host_until_the_copies_are_enqueued(checkpointer: Checkpointer):
    """To wait for an event that is not recorded yet would be to wait for nothing."""
    state = trained(torch.optim.AdamW, fused=True)
    warm_up(checkpointer, state)
    backward(state["model"])
    expected = seen(state)
    with stager_held(checkpointer) as go_on:
        handle = checkpointer.save(1, state)
        stepping = threading.Thread(target=state["optimizer"].step)
        stepping.start()
        wait_until(lambda: waits_at_the_guard(stepping), "the step at the guard")
        hold_copies_back(checkpointer)
        go_on.set()
        stepping.join(60)
    assert_holds(handle, expected)


def test_a_step_on_another_stream_waits_as_well(checkpointer: Checkpointer):
    state = trained(torch.optim.AdamW, fused=True)
    warm_up(checkpointer, state)
    stream = torch.cuda.Stream()
    for step in range(1, 4):
        expected = seen(state)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            hold_copies_back(checkpointer)
            handle = checkpointer.save(step, state)
            backward(state["model"])
            state["optimizer"].step()
        assert_holds(handle, expected)
        torch.cuda.current_stream().wait_stream(stream)


def test_a_save_sees_what_was_enqueued_before_it_and_nothing_after(checkpointer: Checkpointer):
    """The compute stream is far behind the host when ``save()`` is called, and stays so."""
    state = trained(torch.optim.AdamW, fused=True)
    state["counter"] = torch.zeros(10, device="cuda")
    warm_up(checkpointer, state)
    torch.cuda._sleep(THIRD_OF_A_SECOND)
    state["counter"].add_(1)
    backward(state["model"])
    state["optimizer"].step()
    handle = checkpointer.save(1, state)
    expected = frozen(state)  # enqueued behind the save: to be compared with what it captured
    state["counter"].add_(1)
    backward(state["model"])
    state["optimizer"].step()
    assert_holds(handle, on_host(expected))


def test_three_thousand_tensors_behind_a_busy_stream_make_nobody_wait(checkpointer: Checkpointer):
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(number % 97 + 1, device="cuda") for number in range(3000)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    warm_up(checkpointer, state)
    expected = seen(state)
    torch.cuda._sleep(10 * THIRD_OF_A_SECOND)
    behind = torch.cuda.Event()
    behind.record()
    handle = checkpointer.save(1, state)
    assert not behind.query(), "save() has waited for the stream"
    optimizer.step()
    assert not behind.query(), "step() has waited for the stream"
    assert_holds(handle, expected)


# What no optimizer changes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1000, 10 * MIB, SCRATCH_NBYTES + 10 * MIB])
def test_what_nobody_owns_is_saved_as_it_was_at_the_call(checkpointer: Checkpointer, nbytes: int):
    """Small and large ones fit into the scratch, and there is one that does not."""
    state = {"buffer": torch.zeros(nbytes, dtype=torch.uint8, device="cuda"), "other": torch.ones(100, device="cuda")}
    warm_up(checkpointer, state)
    for step in range(1, 4):
        state["buffer"].fill_(step)
        expected = seen(state)
        hold_copies_back(checkpointer)
        handle = checkpointer.save(step, state)
        state["buffer"].fill_(99)
        state["other"].mul_(2)
        assert_holds(handle, expected)


def test_averages_swapped_back_under_a_copy_tear_it_and_the_next_one_is_copied_at_the_call(checkpointer: Checkpointer):
    state = trained(torch.optim.AdamW, fused=True)
    average = network()
    for parameter in average.parameters():
        parameter.data.normal_()
    warm_up(checkpointer, state)
    before = swap_in(state["model"], average)
    hold_copies_back(checkpointer)
    handle = checkpointer.save(1, state)
    swap_back(state["model"], before)
    assert_torn(checkpointer, handle, r"model\.")
    for step in (1, 2):
        before = swap_in(state["model"], average)
        expected = seen(state)
        hold_copies_back(checkpointer)
        handle = checkpointer.save(step, state)
        swap_back(state["model"], before)
        assert_holds(handle, expected)


def test_guard_holds_a_hand_written_update_back(checkpointer: Checkpointer):
    state = trained(torch.optim.AdamW, fused=True)
    warm_up(checkpointer, state)
    expected = seen(state)
    hold_copies_back(checkpointer)
    handle = checkpointer.save(1, state)
    with checkpointer.guard():
        for parameter in state["model"].parameters():
            parameter.data.zero_()
    assert not handle.staged.done(), "in stream order, not on the host"
    assert_holds(handle, expected)


def test_tensors_whose_data_is_replaced_under_a_copy_are_saved_as_they_were(checkpointer: Checkpointer):
    state = trained(torch.optim.SGD, momentum=0.9)
    warm_up(checkpointer, state)
    expected = seen(state)
    with stager_held(checkpointer):
        handle = checkpointer.save(1, state)
        for parameter in state["model"].parameters():
            parameter.data = torch.empty(0, device="cuda")
        fill = [torch.full((512, 512), 7.0, device="cuda") for _ in range(50)]  # takes the memory, were it free
    assert_holds(handle, expected)
    del fill


def test_tensors_whose_memory_is_freed_while_it_is_copied_are_saved_as_they_were(checkpointer: Checkpointer):
    state = trained(torch.optim.SGD, momentum=0.9)
    warm_up(checkpointer, state)
    expected = seen(state)
    hold_copies_back(checkpointer)
    handle = checkpointer.save(1, state)
    ownership.close_guards()  # returns once all copies are enqueued
    for parameter in state["model"].parameters():
        parameter.untyped_storage().resize_(0)
    fill = [torch.full((512, 512), 7.0, device="cuda") for _ in range(50)]
    assert_holds(handle, expected)
    del fill


def test_tensors_whose_memory_is_freed_before_it_is_copied_tear_the_save_and_break_nothing(checkpointer: Checkpointer):
    state = trained(torch.optim.SGD, momentum=0.9)
    warm_up(checkpointer, state)
    with stager_held(checkpointer):
        handle = checkpointer.save(1, state)
        for parameter in state["model"].parameters():
            parameter.untyped_storage().resize_(0)
    assert_torn(checkpointer, handle, r"model\.0\.weight")
    torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").sum().item() == 3
    state = trained(torch.optim.SGD, momentum=0.9)
    assert_holds(checkpointer.save(1, state), seen(state))


# Kinds of tensors ------------------------------------------------------------------------------------------------


def _kinds() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A tensor on the device, and what must come back in host memory."""
    # Not those with a conjugate or negative bit: resolving them on the device may give another nan than on the host.
    kinds = {
        name: (tensor.detach().cuda(), tensor)
        for name, tensor in TENSORS.items()
        if tensor.layout is not torch.strided or not (tensor.is_conj() or tensor.is_neg())
    }
    for size, rows in (("small", 30), ("large", 2000), ("beyond the scratch", 6000)):
        base = torch.randn(rows, 2000, dtype=torch.complex64, generator=torch.Generator().manual_seed(rows))
        floats = torch.view_as_real(base)
        for name, view in {
            "conjugate": lambda one: one.conj(),
            "conjugate, transposed": lambda one: one.mH,
            "negated": lambda one: one.conj().imag,
            "transposed": lambda one: one.t(),
            "every other": lambda one: one[::2, ::2],
        }.items():
            kinds[f"{size}, {name}"] = (view(base.cuda()), view(base).resolve_conj().resolve_neg().contiguous())
        kinds[f"{size}, real and imaginary parts"] = (floats.cuda().permute(2, 0, 1), floats.permute(2, 0, 1))
    return kinds


@pytest.mark.parametrize("validate", [False, True])
def test_a_tensor_of_any_kind_comes_back_bit_for_bit(tmp_path: Path, validate: bool):
    kinds = _kinds()
    state = {"x": {name: tensor for name, (tensor, _) in kinds.items()}}
    with Checkpointer(tmp_path, validate=validate) as checkpointer:
        handles = [checkpointer.save(step, state) for step in range(2)]
        for handle in handles:
            loaded = sidesave.load(handle.committed.result(100))["x"]
            wrong = {name: difference(expected, loaded[name]) for name, (_, expected) in kinds.items()}
            assert {name: what for name, what in wrong.items() if what} == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_owned_tensors_with_nan_and_infinity_are_not_taken_for_torn(checkpointer: Checkpointer, dtype: torch.dtype):
    weight = nn.Parameter(torch.full((1 << 20,), float("inf"), dtype=dtype, device="cuda"))
    other = nn.Parameter(torch.full((1 << 20,), float("nan"), dtype=dtype, device="cuda"))
    state: dict[str, Any] = {"a": weight, "b": other, "optimizer": torch.optim.SGD([weight, other], lr=0.1)}
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
    expected = seen(state)
    hold_copies_back(checkpointer)
    handle = checkpointer.save(1, state)
    scramble(state["offloaded"].values())
    assert_holds(handle, expected)


@pytest.mark.slow
def test_a_tensor_across_the_border_of_two_pinned_pieces_comes_back(tmp_path: Path):
    count = PIECE_NBYTES // 4 + MIB
    weight = nn.Parameter(torch.randint(-(1 << 20), 1 << 20, (count,), device="cuda").float())
    unowned = torch.randint(0, 256, (PIECE_NBYTES // 2,), dtype=torch.uint8, device="cuda")
    state = {"weight": weight, "optimizer": torch.optim.SGD([weight], lr=0.1), "unowned": unowned}
    with Checkpointer(tmp_path, slots=1) as checkpointer:
        handle = checkpointer.save(1, state)
        loaded = sidesave.load(handle.committed.result(100), map_location="cuda")
    assert torch.equal(loaded["weight"], weight)
    assert torch.equal(loaded["unowned"], unowned)


# Graphs ----------------------------------------------------------------------------------------------------------


def captured_step(state: dict[str, Any], inputs: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph of a whole training step, made as torch's documentation says."""

    def step() -> None:
        state["optimizer"].zero_grad(set_to_none=True)
        state["model"](inputs).square().mean().backward()
        state["optimizer"].step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_a_replayed_optimizer_step_waits_for_the_copy(checkpointer: Checkpointer):
    state = trained(torch.optim.AdamW, capturable=True)
    warm_up(checkpointer, state)
    graph = captured_step(state, torch.randn(4, 512, device="cuda"))
    for step in range(1, 5):
        expected = seen(state)
        hold_copies_back(checkpointer)
        handle = checkpointer.save(step, state)
        graph.replay()
        graph.replay()
        assert not handle.staged.done(), "replay() has waited on the host"
        assert_holds(handle, expected)
        assert difference(expected, seen(state)) != "", "the graph has trained"


def test_a_graph_is_captured_while_a_save_is_pending(checkpointer: Checkpointer):
    state = trained(torch.optim.AdamW, capturable=True)
    warm_up(checkpointer, state)
    expected = seen(state)
    hold_copies_back(checkpointer)
    handle = checkpointer.save(1, state)
    graph = captured_step(state, torch.randn(4, 512, device="cuda"))
    assert_holds(handle, expected)
    expected = seen(state)
    handle = checkpointer.save(2, state)
    graph.replay()
    assert_holds(handle, expected)


# Memory and devices ----------------------------------------------------------------------------------------------


def test_twenty_saves_take_no_more_device_memory_than_one_and_the_daemon_takes_none(checkpointer: Checkpointer):
    state = trained(torch.optim.AdamW, fused=True)
    warm_up(checkpointer, state)
    for step in range(1, 4):
        checkpointer.save(step, state).committed.result(60)
    torch.cuda.synchronize()
    allocated, (free, _) = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()
    for step in range(4, 24):
        backward(state["model"])
        state["optimizer"].step()
        checkpointer.save(step, state).committed.result(60)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    assert free - torch.cuda.mem_get_info()[0] < 32 * MIB, "a context takes hundreds"
    daemon = Path(f"/proc/{checkpointer.daemon_pid}")
    assert "libcuda" not in (daemon / "maps").read_text()
    assert not [link for fd in (daemon / "fd").iterdir() if "nvidia" in (link := str(fd.readlink()))]


def test_closing_unregisters_the_memory_and_leaves_no_error_behind(tmp_path: Path):
    state = trained()
    for number in range(5):
        with Checkpointer(tmp_path / str(number)) as checkpointer:
            checkpointer.save(1, state)
            assert any(slot.pinned is not None for slot in checkpointer._pool._slots)
    torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_memory_that_cannot_be_pinned_is_used_unpinned_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    state = trained(torch.optim.AdamW, fused=True)
    runtime: Any = torch.cuda.cudart()
    with Checkpointer(tmp_path, slots=1) as checkpointer:
        # The same structure in host memory: an arena of the right size that is not pinned yet. With its first page
        # registered by somebody else it cannot be.
        checkpointer.save(0, on_host(frozen(state)), blocking=True)
        [slot] = checkpointer._pool._slots
        assert slot.arena is not None
        arena = slot.arena
        assert int(runtime.cudaHostRegister(arena.address, 4096, 0)) == 0
        try:
            for step in (1, 2):
                expected = seen(state)
                with caplog.at_level(logging.WARNING):
                    handle = checkpointer.save(step, state)
                backward(state["model"])
                state["optimizer"].step()
                assert_holds(handle, expected)
            assert slot.arena is arena
            assert slot.pinned is None
            assert any("cannot be pinned" in record.message for record in caplog.records)
            torch.cuda.synchronize()
            assert torch.ones(3, device="cuda").sum().item() == 3, "the error has been taken from the runtime"
        finally:
            runtime.cudaHostUnregister(arena.address)


def test_without_device_memory_for_scratch_tensors_are_copied_directly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    state = trained(torch.optim.AdamW, fused=True)
    state["buffer"] = torch.zeros(1000, device="cuda")
    backward(state["model"])
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 48 * MIB) / total)
    try:
        with Checkpointer(tmp_path) as checkpointer:
            for step in range(3):
                expected = seen(state)
                handle = checkpointer.save(step, state)
                state["optimizer"].step()
                state["buffer"].add_(1)
                assert_holds(handle, expected)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any("no device memory" in record.message for record in caplog.records)


def test_tensors_of_two_devices_are_saved_together(checkpointer: Checkpointer):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    parts = {device: trained(torch.optim.AdamW, device=device, fused=True) for device in ("cuda:0", "cuda:1")}
    state = {f"{name} {device}": value for device, part in parts.items() for name, value in part.items()}
    warm_up(checkpointer, state)
    for step in range(1, 4):
        expected = seen(state)
        hold_copies_back(checkpointer)
        handle = checkpointer.save(step, state)
        for device, part in parts.items():
            with torch.cuda.device(device):
                backward(part["model"])
                part["optimizer"].step()
        assert_holds(handle, expected)
    assert torch.cuda.current_device() == 0


# Loading ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_loaded_onto_the_device_and_into_what_lives_there(checkpointer: Checkpointer):
    state = trained(torch.optim.AdamW, fused=True)
    expected = seen(state)
    checkpointer.save(1, state, blocking=True)
    fresh = checkpointer.load(map_location="cuda")
    assert {tensor.device.type for tensor in fresh["model"].values()} == {"cuda"}
    assert difference(expected, on_host(fresh)) == ""
    scramble(state["model"].parameters())
    state["optimizer"].state.clear()
    checkpointer.load(into=state)
    assert difference(expected, seen(state)) == ""
    assert all(parameter.is_cuda for parameter in state["model"].parameters())
    backward(state["model"])
    state["optimizer"].step()
