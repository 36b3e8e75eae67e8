"""The two halves of the scratch: who packs into them when, on which stream, and what a failed save
leaves behind.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gates
import gpu
import pytest
import torch
from gpu import (
    MIB,
    Call,
    assert_holds,
    finish_compute,
    hold_compute_back,
    hold_copies_back,
    seen,
    side_streams,
    trained,
    wait_until_enqueued,
    warm_up,
    warmed_up,
)
from states import held

import sidesave
from sidesave import Checkpointer, FailureOptions, StagingOptions
from sidesave.stager.copy import device_copy

pytestmark = gpu.MARKS


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    """One with more slots than the scratch has halves, so that saves meet in the scratch and
    nowhere else.
    """
    with Checkpointer(
        tmp_path, staging=StagingOptions(slots=4), failures=FailureOptions(tolerated=5)
    ) as made:
        yield made


def _filled(step: int, count: int = 1000) -> dict[str, Any]:
    return {"buffer": torch.full((count,), float(step))}


def _save(checkpointer: Checkpointer, state: dict[str, Any], step: int) -> sidesave.SaveHandle:
    state["buffer"].fill_(step)
    return checkpointer.save(step, state)


@pytest.fixture
def state(checkpointer: Checkpointer) -> dict[str, Any]:
    """A state of one tensor that nobody owns, and all is made that its saves need."""
    made = {"buffer": torch.zeros(1000, device="cuda")}
    warm_up(checkpointer, made)
    for step in (101, 102):  # each half has been used
        _save(checkpointer, made, step).committed.result(60)
    return made


def test_a_half_is_packed_again_behind_the_copies_out_of_it(
    checkpointer: Checkpointer, state: dict[str, Any]
):
    with hold_copies_back(checkpointer):
        handles = [_save(checkpointer, state, step) for step in range(1, 5)]
        wait_until_enqueued()
    for step, handle in enumerate(handles, start=1):
        assert_holds(handle, _filled(step))


def test_a_half_takes_what_lies_otherwise_than_before(checkpointer: Checkpointer):
    """As many tensors of the same dtypes, in other places or with other strides: views that were
    kept do not fit.
    """
    shapes = [(3, 4), (4, 3), (2, 7), (1, 40)]
    states: list[dict[str, Any]] = []
    for turn in range(4):
        order = shapes[turn:] + shapes[:turn]
        state: dict[str, Any] = {
            f"w{n}": torch.randn(shape, device="cuda") for n, shape in enumerate(order)
        }
        state |= {
            f"h{n}": torch.randn(shape, device="cuda").bfloat16() for n, shape in enumerate(order)
        }
        states.append(state)
    _save_in_turn(checkpointer, [states[step // 2 % 4] for step in range(16)])


def test_a_half_that_has_grown_takes_what_lies_as_before(checkpointer: Checkpointer):
    """The views that were kept are of the memory that it had."""
    small = {"w": torch.randn(100, device="cuda")}
    # its place is behind the others
    large = {**small, "large": torch.ones(5 * MIB, dtype=torch.uint8, device="cuda")}
    _save_in_turn(checkpointer, [small] * 4 + [large] * 4)


def _save_in_turn(checkpointer: Checkpointer, states: list[dict[str, Any]]) -> None:
    handles = [checkpointer.save(step, state) for step, state in enumerate(states)]
    for handle, state in zip(handles, states, strict=True):
        assert_holds(handle, {name: tensor.cpu() for name, tensor in state.items()})


def test_a_save_waits_on_the_host_while_no_copy_out_of_either_half_is_enqueued(
    checkpointer: Checkpointer, state: dict[str, Any]
):
    with held(checkpointer):
        handles = [_save(checkpointer, state, step) for step in (1, 2)]
        third = Call(lambda: _save(checkpointer, state, 3))
        third.goes_as_far_as_it_gets()
        assert third.is_alive()
    for step, handle in enumerate([*handles, third.result()], start=1):
        assert_holds(handle, _filled(step))


def test_saves_on_several_streams_pack_one_after_the_other(
    checkpointer: Checkpointer, state: dict[str, Any]
):
    """The first stream is far behind; the second one has its own tensor, and may not pack before
    it.
    """
    other = torch.cuda.Stream()
    elsewhere = {"buffer": torch.zeros(1000, device="cuda")}
    torch.cuda.synchronize()
    with hold_compute_back():
        handles = [_save(checkpointer, state, step) for step in (1, 2)]
        with torch.cuda.stream(other):
            handles.append(_save(checkpointer, elsewhere, 3))
    for step, handle in enumerate(handles, start=1):
        assert_holds(handle, _filled(step))


def test_scratch_that_is_replaced_by_a_larger_one_is_read_to_the_end(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
):
    gpu.replace_everywhere(monkeypatch, "HALF_NBYTES", (8192, MIB // 2))
    large = {"buffer": torch.zeros(100_000, device="cuda")}
    small = {"buffer": torch.zeros(1000, device="cuda")}
    other = torch.cuda.Stream()
    checkpointer.prepare(large).result(60)  # the small one fits into its slots
    for step in (101, 102):
        _save(checkpointer, small, step).committed.result(60)
    with hold_copies_back(checkpointer):
        handles = [_save(checkpointer, small, step) for step in (1, 2)]
        wait_until_enqueued()
        # which waits for the copies, as the one that the old memory is from does not
        with torch.cuda.stream(other):
            # each takes memory of its own
            handles += [_save(checkpointer, large, step) for step in (3, 4)]
        # takes the old memory, were it free
        fill = [torch.full((8192 // 4,), 7.0, device="cuda") for _ in range(64)]
    for step, handle in enumerate(handles, start=1):
        assert_holds(handle, _filled(step, 1000 if step < 3 else 100_000))
    del fill


# Saves that fail ----------------------------------------------------------------------------------


class _Refusal(Exception):
    pass


@pytest.mark.filterwarnings("ignore:the save of step 1 failed")
def test_a_copy_out_that_fails_leaves_its_half_in_order(
    checkpointer: Checkpointer, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """The pack of the failed save has not run when another stream gets that half."""
    other = torch.cuda.Stream()
    elsewhere = {"buffer": torch.zeros(1000, device="cuda")}
    torch.cuda.synchronize()

    def fails(*_: object) -> None:
        monkeypatch.undo()
        raise _Refusal

    with hold_compute_back():
        monkeypatch.setattr(device_copy._DevicePart, "copy_out", fails)
        with held(checkpointer):
            first = _save(checkpointer, state, 1)
        with torch.cuda.stream(other):
            handles = [_save(checkpointer, elsewhere, step) for step in (2, 3)]
    assert isinstance(first.committed.exception(60), sidesave.errors.StagingError)
    for step, handle in enumerate(handles, start=2):
        assert_holds(handle, _filled(step))


@pytest.mark.parametrize("where", ["pack", "submit"])
def test_calls_that_fail_after_a_pack_give_its_half_back(
    checkpointer: Checkpointer, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch, where: str
):
    target = device_copy if where == "pack" else checkpointer.session.copier._starter

    def fails(*_: object) -> None:
        monkeypatch.undo()
        raise _Refusal

    for step in range(1, 4):
        monkeypatch.setattr(target, where, fails)
        with pytest.raises(_Refusal):
            _save(checkpointer, state, step)
    assert_holds(Call(lambda: _save(checkpointer, state, 4)).result(20), _filled(4))


@pytest.mark.parametrize("copies_held", [False, True])
@pytest.mark.parametrize("where", ["pack", "submit"])
def test_a_call_that_fails_after_a_pack_leaves_its_half_in_order(
    checkpointer: Checkpointer,
    state: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    copies_held: bool,
):
    other = torch.cuda.Stream()
    elsewhere = {"buffer": torch.zeros(1000, device="cuda")}
    torch.cuda.synchronize()
    original = device_copy.pack if where == "pack" else checkpointer.session.copier._starter.submit

    def fails(*arguments: Any) -> None:
        monkeypatch.undo()
        if where == "pack":
            original(*arguments)
        raise _Refusal

    target = device_copy if where == "pack" else checkpointer.session.copier._starter
    compute = torch.cuda.current_stream()
    sides = side_streams(checkpointer) if copies_held else []
    with gates.Gate(compute) as computing, contextlib.ExitStack() as stack:
        computing.wait_until_reached()  # before the others, for it is opened before them
        copies = stack.enter_context(gates.held(sides))
        monkeypatch.setattr(target, where, fails)

        def save_first() -> None:
            with torch.cuda.stream(compute):
                _save(checkpointer, state, 1)

        first = Call(save_first)
        first.goes_as_far_as_it_gets()

        def save_others() -> list[sidesave.SaveHandle]:
            with torch.cuda.stream(other):
                return [_save(checkpointer, elsewhere, step) for step in (2, 3, 4)]

        others = Call(save_others)
        others.goes_as_far_as_it_gets()
        computing.open()
        compute.synchronize()
        copies.open()
    with pytest.raises(_Refusal):
        first.result()
    for step, handle in enumerate(others.result(), start=2):
        assert_holds(handle, _filled(step))


@pytest.mark.parametrize("handed_over", [False, True])
def test_a_call_that_fails_gives_its_slot_back_when_nothing_is_copied_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handed_over: bool
):
    """What was packed is on its way out, or would be soon; the slot's memory is then replaced by a
    larger one.
    """
    small = {"buffer": torch.zeros(1000, device="cuda")}
    large = {"buffer": torch.zeros(10 * MIB, device="cuda")}
    with Checkpointer(tmp_path, staging=StagingOptions(slots=1)) as one:
        warm_up(one, small)
        with gates.held(side_streams(one)), held(one) as go_on:
            if handed_over:
                monkeypatch.setattr(
                    device_copy, "DeviceFingerprint", _fails_once(monkeypatch, go_on.set)
                )
            else:
                monkeypatch.setattr(
                    device_copy, "DeviceFingerprint", _fails_once(monkeypatch, lambda: None)
                )
            first = Call(lambda: _save(one, small, 1))
            first.goes_as_far_as_it_gets()
            second = Call(lambda: _save(one, large, 2))
            second.goes_as_far_as_it_gets()
        with pytest.raises(_Refusal):
            first.result()
        assert_holds(second.result(), _filled(2, 10 * MIB))


def test_a_call_that_fails_without_scratch_gives_its_slot_back_when_nothing_is_copied_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its copies are on the compute stream, which is far behind."""
    gpu.replace_everywhere(monkeypatch, "HALF_NBYTES", (1 << 45,))
    small = {"buffer": torch.zeros(1000, device="cuda")}
    large = {"buffer": torch.zeros(10 * MIB, device="cuda")}
    compute = torch.cuda.current_stream()

    def save(state: dict[str, Any], step: int) -> sidesave.SaveHandle:
        with torch.cuda.stream(compute):
            return _save(one, state, step)

    with (
        Checkpointer(tmp_path, staging=StagingOptions(slots=1)) as one,
        monkeypatch.context() as patch,
    ):
        warm_up(one, small)
        with hold_compute_back():
            patch.setattr(device_copy, "DeviceFingerprint", _fails_once(patch, lambda: None))
            first = Call(lambda: save(small, 1))
            first.goes_as_far_as_it_gets()
            second = Call(lambda: save(large, 2))
            second.goes_as_far_as_it_gets()
        with pytest.raises(_Refusal):
            first.result()
        assert_holds(second.result(), _filled(2, 10 * MIB))


def test_a_call_that_is_interrupted_when_its_copies_are_handed_over_waits_for_them(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
):
    state = warmed_up(checkpointer, torch.optim.SGD, momentum=0.9)
    starter = checkpointer.session.copier._starter
    submit = starter.submit

    def interrupted(run: Any) -> None:
        submit(run)
        if getattr(run, "__name__", "") == "start":
            monkeypatch.undo()
            raise KeyboardInterrupt

    with held(checkpointer):
        monkeypatch.setattr(starter, "submit", interrupted)
        first = Call(lambda: checkpointer.save(1, state))
        first.goes_as_far_as_it_gets()
        assert first.is_alive(), "the stager thread would copy into a slot that is given back"
    with pytest.raises(KeyboardInterrupt):
        first.result()
    for step in range(2, 7):
        expected = seen(state)
        handle = checkpointer.save(step, state)
        for parameter in state["model"].parameters():
            parameter.grad = torch.ones_like(parameter)
        state["optimizer"].step()
        assert_holds(handle, expected)


def _fails_once(monkeypatch: pytest.MonkeyPatch, first: Any) -> Any:
    def fails(*_: object, **__: object) -> None:
        monkeypatch.undo()
        first()
        raise _Refusal

    return fails


@pytest.mark.filterwarnings("ignore:the save of step 1 failed")
def test_a_torn_save_gives_its_slot_back_when_nothing_is_copied_into_it(tmp_path: Path):
    state = trained(torch.optim.SGD, momentum=0.9)
    large = {"buffer": torch.zeros(10 * MIB, device="cuda")}
    with Checkpointer(
        tmp_path, staging=StagingOptions(slots=1), failures=FailureOptions(tolerated=5)
    ) as one:
        warm_up(one, state)
        with gates.held(side_streams(one)):
            with held(one):
                first = one.save(1, state)
                [*_, last] = state["model"].parameters()
                state["model"][3].weight.untyped_storage().resize_(0)
                del last
            second = Call(lambda: _save(one, large, 2))
            second.goes_as_far_as_it_gets()
        assert isinstance(first.committed.exception(60), sidesave.errors.TornSnapshotError)
        assert_holds(second.result(), _filled(2, 10 * MIB))


def test_what_is_captured_makes_no_step_wait_for_its_way_out(checkpointer: Checkpointer):
    """Its bytes are in the scratch: only copies of what is not captured hold a step back."""
    weight = torch.nn.Parameter(torch.zeros(1000, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    state = {"weight": weight, "optimizer": optimizer}
    warm_up(checkpointer, state)
    expected = seen(state)
    with hold_copies_back(checkpointer):
        handle = checkpointer.save(1, state)
        optimizer.step()
        finish_compute()
        assert not handle.staged.done()
    assert_holds(handle, expected)
