"""Saves of CUDA tensors beside training: the compute stream waits, the CPU does not, and no bit is
of a later moment.

Where a copy must be under way, the stream that it runs on is held: what it reads is then read well
after everything that the test enqueues next. Where the copies must not be enqueued yet, the stager
thread is held.
"""

import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from gpu import (
    MIB,
    Call,
    assert_holds,
    backward,
    copied_late,
    finish_compute,
    hold_compute_back,
    hold_copies_back,
    is_inside,
    network,
    on_host,
    seen,
    trained,
    wait_until_enqueued,
    warm_up,
    warmed_up,
)
from states import assert_torn, difference, frozen, held, swap_back, swap_in
from torch import nn
from trainers import wait_until

import sidesave
from sidesave import Checkpointer, StagingOptions

pytestmark = gpu.MARKS


# Optimizers ---------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW, foreach: its step counts are in host memory": (torch.optim.AdamW, {"foreach": True}),
    "AdamW, capturable, amsgrad": (torch.optim.AdamW, {"capturable": True, "amsgrad": True}),
    "AdamW, one by one": (torch.optim.AdamW, {"foreach": False}),
    "SGD with momentum, fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_beside_a_save_and_changes_nothing_of_it(
    checkpointer: Checkpointer, name: str
):
    make, options = OPTIMIZERS[name]
    state = warmed_up(checkpointer, make, **options)
    for step in range(1, 4):
        expected = seen(state)
        with hold_copies_back(checkpointer):
            handle = checkpointer.save(step, state)
            for _ in range(3):
                backward(state["model"])
                state["optimizer"].step()
            assert not handle.staged.done(), "neither save() nor step() has waited for the copy"
        assert_holds(handle, expected)
        assert difference(expected, seen(state)) != ""


def test_forward_and_backward_wait_for_no_copy(checkpointer: Checkpointer):
    state = warmed_up(checkpointer, torch.optim.AdamW, fused=True)
    with copied_late(checkpointer, state) as handle:
        backward(state["model"])
        finish_compute()
        assert not handle.staged.done()


def test_saves_one_after_the_other_share_the_scratch_and_keep_apart_what_they_saw(
    checkpointer: Checkpointer,
):
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


def test_a_save_behind_one_whose_copies_have_not_run_leaves_its_scratch_alone(
    checkpointer: Checkpointer,
):
    state = {"buffer": torch.zeros(1000, device="cuda")}
    warm_up(checkpointer, state)
    with hold_copies_back(checkpointer):
        handles: list[sidesave.SaveHandle] = []
        for step in (1, 2):
            state["buffer"].fill_(step)
            handles.append(checkpointer.save(step, state))
        state["buffer"].fill_(99)
        assert not any(handle.staged.done() for handle in handles)
    for step, handle in enumerate(handles, start=1):
        assert_holds(handle, {"buffer": torch.full((1000,), float(step))})


def test_a_step_waits_on_the_host_until_the_copies_are_enqueued(checkpointer: Checkpointer):
    """To wait for an event that is not recorded yet would be to wait for nothing."""
    state = warmed_up(checkpointer, torch.optim.AdamW, fused=True)
    backward(state["model"])
    expected = seen(state)
    with hold_copies_back(checkpointer):
        with held(checkpointer):
            handle = checkpointer.save(1, state)
            stepping = Call(state["optimizer"].step)
            wait_until(lambda: is_inside(stepping), "the step at the guard")
        stepping.result()
        assert not handle.staged.done(), "only the host part of the wait is over"
    assert_holds(handle, expected)


def test_a_step_on_another_stream_waits_as_well(checkpointer: Checkpointer):
    state = trained(torch.optim.AdamW, fused=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backward(state["model"])
        state["optimizer"].step()
        warm_up(checkpointer, state)
    for step in range(1, 4):
        expected = seen(state)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), hold_copies_back(checkpointer):
            handle = checkpointer.save(step, state)
            backward(state["model"])
            state["optimizer"].step()
            assert not handle.staged.done()
        assert_holds(handle, expected)
        torch.cuda.current_stream().wait_stream(stream)


def test_a_save_sees_what_was_enqueued_before_it_and_nothing_after(checkpointer: Checkpointer):
    """The compute stream is far behind the host when ``save()`` is called, and stays so."""
    state = trained(torch.optim.AdamW, fused=True)
    state["counter"] = torch.zeros(10, device="cuda")
    warm_up(checkpointer, state)
    with hold_compute_back():
        state["counter"].add_(1)
        backward(state["model"])
        state["optimizer"].step()
        handle = checkpointer.save(1, state)
        expected = frozen(state)  # enqueued behind the save: to be compared with what it captured
        state["counter"].add_(1)
        backward(state["model"])
        state["optimizer"].step()
        assert not handle.staged.done()
    assert_holds(handle, on_host(expected))


def test_a_save_is_staged_while_the_compute_stream_is_held_by_what_came_after_it(
    checkpointer: Checkpointer,
):
    state = warmed_up(checkpointer, torch.optim.AdamW, fused=True)
    expected = seen(state)
    handle = checkpointer.save(1, state)
    with hold_compute_back():
        handle.staged.result(30)
    assert_holds(handle, expected)


def test_three_thousand_tensors_behind_a_busy_stream_make_nobody_wait(checkpointer: Checkpointer):
    torch.manual_seed(0)
    model = nn.ParameterList(
        [torch.randn(number % 97 + 1, device="cuda") for number in range(3000)]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    warm_up(checkpointer, state)
    expected = seen(state)
    with hold_compute_back():
        handle = checkpointer.save(1, state)
        optimizer.step()
        assert not handle.staged.done()
    assert_holds(handle, expected)


# What no optimizer changes ------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1000, 10 * MIB, 30 * MIB])
def test_what_nobody_owns_is_saved_as_it_was_at_the_call(
    checkpointer: Checkpointer, nbytes: int, monkeypatch: pytest.MonkeyPatch
):
    """Small and large ones fit into the scratch, and there is one that does not: that one
    ``save()`` may wait for.
    """
    gpu.replace_everywhere(monkeypatch, "HALF_NBYTES", (MIB, 10 * MIB))
    state = {
        "buffer": torch.zeros(nbytes, dtype=torch.uint8, device="cuda"),
        "other": torch.ones(100, device="cuda"),
    }
    warm_up(checkpointer, state)
    fits = nbytes < 20 * MIB
    for step in range(1, 4):
        state["buffer"].fill_(step)
        expected = seen(state)
        with hold_copies_back(checkpointer) if fits else contextlib.nullcontext():
            handle = checkpointer.save(step, state)
            state["buffer"].fill_(99)
            state["other"].mul_(2)
        assert_holds(handle, expected)


@pytest.mark.parametrize("hold", [hold_compute_back, hold_copies_back], ids=["compute", "copies"])
def test_what_exceeds_the_scratch_leaves_in_stream_order(
    checkpointer: Checkpointer, hold: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    """After what was enqueued before ``save()``, before what is enqueued after; ``save()`` may wait
    for it.
    """
    gpu.replace_everywhere(monkeypatch, "HALF_NBYTES", (MIB,))
    state = {"buffer": torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda")}
    warm_up(checkpointer, state)
    for step in (1, 2):
        with hold(checkpointer) if hold is hold_copies_back else hold():
            state["buffer"].fill_(step)
            saving = Call(lambda: checkpointer.save(step, state))  # noqa: B023
            saving.goes_as_far_as_it_gets()
            if not saving.is_alive():
                state["buffer"].fill_(99)
        handle = saving.result()
        state["buffer"].fill_(99)
        assert_holds(handle, {"buffer": torch.full((3 * MIB,), step, dtype=torch.uint8)})


class _Foreign(torch.optim.SGD):
    """An optimizer with a step of its own, so that nothing is known of when it writes."""

    def step(self, closure: Any = None) -> None:
        return super().step(closure)


def test_more_than_the_scratch_holds_is_saved_as_it_was_at_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It takes several rounds through the scratch; of each kind there is more than one round
    holds.
    """
    gpu.replace_everywhere(monkeypatch, "HALF_NBYTES", (MIB // 2,))
    state = trained(_Foreign, momentum=0.9)
    for number in range(24):
        state[f"small {number}"] = torch.zeros(100_000 + number, device="cuda", dtype=torch.int16)
        state[f"odd {number}"] = torch.zeros(70_001 + 2 * number, device="cuda", dtype=torch.uint8)
    state["float8"] = torch.ones(3 * MIB + 1, device="cuda").to(torch.float8_e4m3fn)
    state["large"] = torch.zeros(2 * MIB + 3, device="cuda", dtype=torch.uint8)
    changing = [tensor for tensor in state.values() if isinstance(tensor, torch.Tensor)]
    with Checkpointer(tmp_path) as checkpointer:
        warm_up(checkpointer, state)
        for step in range(1, 4):
            backward(state["model"])
            for number, tensor in enumerate(changing):
                tensor.view(torch.uint8).fill_((step * 10 + number) % 100)
            expected = seen(state)
            handle = checkpointer.save(step, state)
            state["optimizer"].step()
            for tensor in changing:
                tensor.view(torch.uint8).fill_(0x55)
            assert_holds(handle, expected)


def test_a_tensor_of_another_stream_that_is_dropped_after_the_call_is_saved_as_it_was(
    checkpointer: Checkpointer,
):
    """Its memory may be used again on its own stream before the compute stream gets to the
    capture.
    """
    other = torch.cuda.Stream()
    shape = (1000,)
    warm_up(checkpointer, {"x": torch.zeros(shape, device="cuda")})
    for step in (1, 2):
        with torch.cuda.stream(other):
            state = {"x": torch.full(shape, float(step), device="cuda")}
        other.synchronize()
        with hold_compute_back():
            handle = checkpointer.save(step, state)
            state.clear()
            gc.collect()
            with torch.cuda.stream(other):
                again = [torch.full(shape, 9.0, device="cuda") for _ in range(100)]
            other.synchronize()
        assert_holds(handle, {"x": torch.full(shape, float(step))})
        del again


def _drop_optimizer(state: dict[str, Any], model: nn.Module) -> None:
    state.clear()
    gc.collect()


def _limit_norm(state: dict[str, Any], model: Any) -> None:
    model.max_norm = 1.0  # from now on forward writes the weight


def _step_otherwise(state: dict[str, Any], model: nn.Module) -> None:
    state["optimizer"].__class__ = _Foreign


@pytest.mark.parametrize("disown", [_drop_optimizer, _limit_norm, _step_otherwise])
def test_a_tensor_that_no_optimizer_owns_any_more_is_captured_from_then_on(
    checkpointer: Checkpointer, disown: Callable[..., Any]
):
    model = nn.Embedding(1000, 500, device="cuda")
    held: dict[str, Any] = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    model.weight.grad = torch.ones_like(model.weight)
    for step in range(1, 5):  # each slot is filled again
        held["optimizer"].step()
        checkpointer.save(step, {"model": model}).committed.result(60)
    disown(held, model)
    expected = seen({"model": model})
    with hold_copies_back(checkpointer):
        handle = checkpointer.save(5, {"model": model})
        model.weight.data.zero_()  # nothing guards it
    assert_holds(handle, expected)


def test_tensors_that_lie_elsewhere_at_each_save_and_those_that_do_not_are_saved_as_they_were(
    checkpointer: Checkpointer,
):
    state = trained(torch.optim.AdamW, fused=True)
    kept: list[torch.Tensor] = []
    for step in range(1, 9):
        small = (
            torch.rand(3, 50, device="cuda").t() if step % 2 else torch.rand(50, 3, device="cuda")
        )
        state["loss"], state["small"] = torch.rand((), device="cuda"), small
        state["half"] = torch.rand(1001, device="cuda").bfloat16()
        kept += [state["loss"], state["small"], state["half"]]
        expected = seen(state)
        with hold_compute_back():
            handle = checkpointer.save(step, state)
            for tensor in kept:
                tensor.zero_()
            state["optimizer"].step()
        assert_holds(handle, expected)


# What changes owned tensors all the same ----------------------------------------------------------


def _other_values(average: nn.Module) -> None:
    for parameter in average.parameters():
        parameter.data.normal_()


def _equal_norms(average: nn.Module) -> None:
    for parameter in average.parameters():
        parameter.data.neg_()


def _equal_values_elsewhere(average: nn.Module) -> None:
    for parameter in average.parameters():
        parameter.data.copy_(parameter.data.roll(1, 0))


@pytest.mark.expects_violations("RACE")
@pytest.mark.parametrize("differ", [_other_values, _equal_norms, _equal_values_elsewhere])
@pytest.mark.parametrize("validate", [False, True])
def test_averages_swapped_back_under_a_copy_tear_it_and_the_next_one_is_copied_at_the_call(
    tmp_path: Path, differ: Callable[[nn.Module], None], validate: bool
):
    state = trained(torch.optim.AdamW, fused=True)
    average = network()
    average.load_state_dict(state["model"].state_dict())
    differ(average)
    with Checkpointer(tmp_path, staging=StagingOptions(validate=validate)) as checkpointer:
        warm_up(checkpointer, state)
        before = swap_in(state["model"], average)
        with hold_copies_back(checkpointer):
            handle = checkpointer.save(1, state)
            swap_back(state["model"], before)
            finish_compute()  # hence the copy reads nothing but what has been swapped back
        assert_torn(checkpointer, handle, r"model\.")
        for step in (1, 2):
            before = swap_in(state["model"], average)
            with copied_late(checkpointer, state, step):
                swap_back(state["model"], before)


@pytest.mark.expects_violations("RACE")
@pytest.mark.parametrize(
    ("validate", "value"), [(False, 2.0), (True, -1.0)], ids=["another_norm", "same_norm"]
)
def test_one_changed_element_that_no_window_shows_is_found(
    tmp_path: Path, validate: bool, value: float
):
    weight = nn.Parameter(torch.ones(MIB, device="cuda"))
    state: dict[str, Any] = {"weight": weight, "optimizer": torch.optim.SGD([weight], lr=0.1)}
    with Checkpointer(tmp_path, staging=StagingOptions(validate=validate)) as checkpointer:
        warm_up(checkpointer, state)
        with hold_copies_back(checkpointer):
            handle = checkpointer.save(1, state)
            weight.data[12345] = value
            finish_compute()
        assert_torn(checkpointer, handle, "weight")


def test_guard_holds_a_hand_written_update_back(checkpointer: Checkpointer):
    state = warmed_up(checkpointer, torch.optim.AdamW, fused=True)
    with copied_late(checkpointer, state) as handle:
        with checkpointer.guard():
            for parameter in state["model"].parameters():
                parameter.data.zero_()
        assert not handle.staged.done(), "in stream order, not on the host"


def test_tensors_whose_data_is_replaced_under_a_copy_are_saved_as_they_were(
    checkpointer: Checkpointer,
):
    state = warmed_up(checkpointer, torch.optim.SGD, momentum=0.9)
    with copied_late(checkpointer, state, hold=held):
        for parameter in state["model"].parameters():
            parameter.data = torch.empty(0, device="cuda")
        # takes the memory, were it free
        fill = [torch.full((512, 512), 7.0, device="cuda") for _ in range(50)]
        torch.cuda.current_stream().synchronize()
    del fill


def test_tensors_whose_memory_is_freed_while_it_is_copied_are_saved_as_they_were(
    checkpointer: Checkpointer,
):
    state = warmed_up(checkpointer, torch.optim.SGD, momentum=0.9)
    with copied_late(checkpointer, state):
        wait_until_enqueued()
        for parameter in state["model"].parameters():
            parameter.untyped_storage().resize_(0)
        fill = [torch.full((512, 512), 7.0, device="cuda") for _ in range(50)]
        finish_compute()
    del fill


def test_tensors_whose_memory_is_freed_before_it_is_copied_tear_the_save_and_break_nothing(
    checkpointer: Checkpointer,
):
    state = warmed_up(checkpointer, torch.optim.SGD, momentum=0.9)
    with held(checkpointer):
        handle = checkpointer.save(1, state)
        for parameter in state["model"].parameters():
            parameter.untyped_storage().resize_(0)
    assert_torn(checkpointer, handle, r"model\.0\.weight")
    torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").sum().item() == 3
    state = trained(torch.optim.SGD, momentum=0.9)
    assert_holds(checkpointer.save(1, state), seen(state))
