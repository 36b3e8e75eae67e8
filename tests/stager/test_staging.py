"""What training may do beside a save: whatever changes after the call, the checkpoint holds what
was there at the call.

Where a copy runs beside training (``overlap=True`` on the CPU), it is held at its start until the
test has done its worst, so that no test depends on who is quicker.
"""

import contextlib
import itertools
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import forks
import pytest
import torch
from sessions import arenas_nbytes
from states import (
    assert_holds,
    assert_torn,
    difference,
    frozen,
    held,
    scramble,
    swap_back,
    swap_in,
    waits_at_the_guard,
)
from torch import nn
from trainers import wait_until

import sidesave
from sidesave import Checkpointer, FailureOptions, StagingOptions
from sidesave.errors import (
    HostMemoryError,
    InvalidArgumentError,
    TornSnapshotError,
    UnsupportedValueError,
    WriteStalledError,
)
from sidesave.stager.copy.copier import StagingCopy
from sidesave.stager.copy.fingerprint import SAMPLES, of_host_tensor
from sidesave.stager.copy.memcopy import MemoryCopier, Pieces
from sidesave.stager.copy.pool import SlotPool
from sidesave.stager.memory import host_memory
from sidesave.stager.memory.arena import Arena
from sidesave.stager.plan import Job
from sidesave.stager.signal_safe import Worker

MIB = 1 << 20


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpointer]:
    """One that overlaps; for tests that leave no failed save behind and take their steps from
    ``steps``.
    """
    with Checkpointer(
        tmp_path_factory.mktemp("run"), staging=StagingOptions(overlap=True)
    ) as checkpointer:
        yield checkpointer


steps = itertools.count(1)


@pytest.fixture
def overlapping(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(tmp_path, staging=StagingOptions(overlap=True)) as checkpointer:
        yield checkpointer


def network(width: int = 64, layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def backward(model: nn.Module, width: int = 64) -> None:
    model.zero_grad()
    model(torch.randn(4, width)).square().mean().backward()


def trained(
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, width: int = 64, **options: Any
) -> dict[str, Any]:
    """A model and its optimizer after one step, so that there is state."""
    model = network(width)
    optimizer = make(model.parameters(), lr=0.1, **options)
    backward(model, width)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@contextlib.contextmanager
def copied_late(checkpointer: Checkpointer, state: dict[str, Any]) -> Iterator[sidesave.SaveHandle]:
    """Save a state whose copy waits for the end of the block; the checkpoint holds what was there
    before.
    """
    expected = frozen(state)
    with held(checkpointer):
        handle = checkpointer.save(next(steps), state)
        yield handle
    assert_holds(handle, expected)


# Optimizers ---------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "AdamW, foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW, one by one, amsgrad": (torch.optim.AdamW, {"foreach": False, "amsgrad": True}),
    "AdamW, fused: its step counts are CPU scalars": (torch.optim.AdamW, {"fused": True}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "RMSprop, centered": (torch.optim.RMSprop, {"centered": True}),
}


@pytest.mark.drawn
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_steps_right_after_a_save_changes_nothing_of_it(
    shared: Checkpointer, name: str
):
    make, options = OPTIMIZERS[name]
    state = trained(make, **options)
    saves: list[tuple[sidesave.SaveHandle, dict[str, Any]]] = []
    for _ in range(4):
        expected = frozen(state)
        backward(state["model"])
        saves.append((shared.save(next(steps), state), expected))
        state["optimizer"].step()
    for handle, expected in saves:
        assert_holds(handle, expected)


def test_a_step_waits_for_the_copy_and_the_copy_is_what_was_there(shared: Checkpointer):
    state = trained()
    backward(state["model"])
    expected = frozen(state)
    with held(shared) as go_on:
        handle = shared.save(next(steps), state)
        stepping = threading.Thread(target=state["optimizer"].step)
        stepping.start()
        wait_until(lambda: waits_at_the_guard(stepping), "the step at the guard")
        assert difference(expected, frozen(state)) == "", "nothing has changed yet"
        go_on.set()
        stepping.join(300)
    assert difference(expected, frozen(state)) != "", "the step has been taken"
    assert_holds(handle, expected)


def test_forward_and_backward_do_not_wait(shared: Checkpointer):
    state = trained()
    with copied_late(shared, state) as handle:
        backward(state["model"])
        assert not handle.staged.done()


def test_optimizers_that_step_in_backward_wait_as_well(shared: Checkpointer):
    model = network()
    optimizers = {
        parameter: torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        for parameter in model.parameters()
    }
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda which: optimizers[which].step())  # pyright: ignore
    state: dict[str, Any] = {
        "model": model,
        **{f"optimizer {n}": o for n, o in enumerate(optimizers.values())},
    }
    backward(model)
    for _ in range(3):
        expected = frozen(state)
        handle = shared.save(next(steps), state)
        backward(model)
        assert_holds(handle, expected)


def test_an_optimizer_outside_the_state_is_known_once_it_has_stepped(overlapping: Checkpointer):
    state = trained()
    with held(overlapping):
        handle = overlapping.save(1, {"weights": state["model"]})
        assert not handle.staged.done(), "owned, hence copied beside training"
        scramble(state["model"].parameters())
    assert_torn(overlapping, handle, r"weights\.0\.weight, weights\.0\.bias, ")


class _OwnStep(torch.optim.SGD):
    """As Schedule-Free does it: parameters are swapped for evaluation, and nobody is told."""

    evaluating = False

    def step(self, closure: Any = None) -> None:
        return super().step(closure)

    def swap(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                buffer = self.state[parameter]["momentum_buffer"]
                parameter.data.lerp_(buffer, 0.5 if self.evaluating else -1.0)
        self.evaluating = not self.evaluating

    def eval(self) -> None:
        if not self.evaluating:
            self.swap()

    def train(self) -> None:
        if self.evaluating:
            self.swap()


def test_an_optimizer_with_a_step_of_its_own_is_copied_at_the_call(shared: Checkpointer):
    state = trained(_OwnStep, momentum=0.9)
    with copied_late(shared, state):
        scramble(state["model"].parameters())


@pytest.mark.parametrize("overlap", [True, None])
def test_weights_swapped_for_evaluation_are_saved_as_they_were(
    tmp_path: Path, overlap: bool | None
):
    state = trained(_OwnStep, momentum=0.9)
    with Checkpointer(tmp_path, staging=StagingOptions(overlap=overlap)) as checkpointer:
        for step in range(3):
            state["optimizer"].eval()
            expected = frozen(state)
            handle = checkpointer.save(step, state)
            state["optimizer"].train()
            backward(state["model"])
            state["optimizer"].step()
            assert_holds(handle, expected)


def test_the_guard_comes_before_every_other_hook(tmp_path: Path):
    """Another global hook, there before any checkpointer was, writes parameters before the step."""
    code = """
import sys, threading, torch, sidesave
from torch.optim.optimizer import register_optimizer_step_pre_hook
def writes(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.zero_()
register_optimizer_step_pre_hook(writes)
weight = torch.nn.Parameter(torch.ones(1 << 20))
optimizer = torch.optim.SGD([weight], lr=0.1)
weight.grad = torch.ones_like(weight)
with sidesave.Checkpointer(sys.argv[1], staging=sidesave.StagingOptions(overlap=True)) as checkpointer:
    for step in range(5):
        weight.data.fill_(step + 1)
        handle = checkpointer.save(step, {"weight": weight, "optimizer": optimizer})
        optimizer.step()
        assert (checkpointer.load(handle.committed.result().step)["weight"] == step + 1).all()
"""  # noqa: E501
    forks.run([sys.executable, "-c", code, str(tmp_path)]).check_returncode()


def test_a_compiled_training_step_is_not_compiled_again_by_saves(shared: Checkpointer):
    from torch._dynamo.utils import counters

    state = trained(torch.optim.SGD)

    @torch.compile(backend="eager")
    def train(inputs: torch.Tensor) -> None:
        state["optimizer"].zero_grad()
        state["model"](inputs).square().mean().backward()
        state["optimizer"].step()

    torch._dynamo.reset()
    counters.clear()
    for _ in range(2):
        train(torch.randn(4, 64))
    frames = dict(counters["frames"])
    for _ in range(6):
        expected = frozen(state)
        handle = shared.save(next(steps), state)
        train(torch.randn(4, 64))
        assert_holds(handle, expected)
    assert frames["total"] > 0
    assert counters["frames"] == frames, "compiled again"
    torch._dynamo.reset()


# What no optimizer changes ------------------------------------------------------------------------


class _Queue(nn.Module):
    """As MoCo: a queue of keys, written in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(64, 64)
        self.queue = nn.Buffer(torch.randn(64, 256))
        self.position = nn.Buffer(torch.zeros(1, dtype=torch.long))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        keys = self.encoder(inputs)
        with torch.no_grad():
            at = int(self.position)
            self.queue[:, at : at + len(keys)] = keys.T
            self.position[0] = (at + len(keys)) % 256
        return keys


class _Codebook(nn.Module):
    """As VQ-VAE with moving averages: the codebook is a buffer, or a parameter of no optimizer,
    written in forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(64, 64)
        self.codes = nn.Parameter(torch.randn(128, 64), requires_grad=False)
        self.size = nn.Buffer(torch.zeros(128))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        encoded = self.encoder(inputs)
        nearest = torch.cdist(encoded, self.codes).argmin(1)
        self.size.data.mul_(0.9)[nearest] += 0.1
        self.codes.data[nearest] = self.codes.data[nearest].lerp(encoded.detach(), 0.1)
        return encoded


class _Renormalized(nn.Module):
    """An embedding that rewrites the rows it looks up, although its weight is the optimizer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64, max_norm=0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.embedding(torch.arange(len(inputs)) + 10)


@pytest.mark.parametrize("make", [_Queue, _Codebook, _Renormalized, lambda: nn.BatchNorm1d(64)])
def test_what_forward_changes_is_saved_as_it_was_at_the_call(
    shared: Checkpointer, make: Callable[[], nn.Module]
):
    model = make()
    optimizer = torch.optim.SGD(
        [one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9
    )
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    backward(model)
    optimizer.step()
    for parameter in model.parameters():
        parameter.data.mul_(3)  # so that there is something to renormalize
    expected = frozen(state)
    with held(shared):
        handle = shared.save(next(steps), state)
        backward(model)
        assert difference(expected["model"], frozen(state)["model"]) != "", (
            "or it would prove nothing"
        )
    assert_holds(handle, expected)


def test_an_update_without_an_optimizer_is_saved_as_it_was_at_the_call(shared: Checkpointer):
    """As functional training does it: parameters in a dict, updated in place by a formula."""
    parameters = {name: tensor.detach().clone() for name, tensor in network().named_parameters()}
    state: dict[str, Any] = {"parameters": parameters, "step": torch.tensor(0)}
    for _ in range(3):
        with copied_late(shared, state):
            torch._foreach_mul_(list(parameters.values()), 0.5)
            state["step"].add_(1)


def test_an_averaged_model_is_saved_as_it_was_at_the_call(shared: Checkpointer):
    state = trained()
    state["average"] = torch.optim.swa_utils.AveragedModel(state["model"])
    with copied_late(shared, state):
        state["average"].update_parameters(network())
        scramble(state["average"].buffers())


def test_memory_that_other_processes_share_is_copied_at_the_call(shared: Checkpointer):
    state = trained()
    state["model"].share_memory()
    with copied_late(shared, state):
        scramble(state["model"].parameters())


def test_views_into_larger_memory_are_copied_at_the_call(shared: Checkpointer):
    """As parameters into a flat buffer, which its owner may free."""
    flat = torch.randn(64 * 64 + 100)
    weight = nn.Parameter(flat[: 64 * 64].view(64, 64))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    expected = frozen({"weight": weight})
    with held(shared):
        handle = shared.save(next(steps), {"weight": weight, "optimizer": optimizer})
        flat.untyped_storage().resize_(0)
    assert (
        difference(expected["weight"], sidesave.load(handle.committed.result(300))["weight"]) == ""
    )


# What changes owned tensors all the same ----------------------------------------------------------


def test_averages_swapped_in_for_a_save_are_what_it_holds(tmp_path: Path):
    state = trained()
    average = network()
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(3):
            before = swap_in(state["model"], average)
            expected = frozen(state)
            handle = checkpointer.save(step, state)
            swap_back(state["model"], before)
            backward(state["model"])
            state["optimizer"].step()
            assert_holds(handle, expected)


def test_averages_swapped_back_under_a_copy_tear_it_and_the_next_one_is_copied_at_the_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    state = trained()
    average = network()
    with Checkpointer(tmp_path, staging=StagingOptions(overlap=True)) as checkpointer:
        with held(checkpointer):
            before = swap_in(state["model"], average)
            handle = checkpointer.save(1, state)
            swap_back(state["model"], before)
        assert_torn(checkpointer, handle, r"model\.0\.weight, model\.0\.bias, .*guard\(\)")
        assert checkpointer.steps() == []
        assert [
            record.levelno for record in caplog.records if "changed while" in record.message
        ] == [logging.WARNING]

        for step in (1, 2):  # the name of the torn one is free
            with held(checkpointer):
                before = swap_in(state["model"], average)
                expected = frozen(state)
                handle = checkpointer.save(step, state)
                swap_back(state["model"], before)
            assert_holds(handle, expected)
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2]


class _Averaged:
    """Weights, a copy of them, and the averages that are swapped in for a while."""

    def __init__(self) -> None:
        self.weights = [nn.Parameter(torch.randn(256, 1024)) for _ in range(8)]
        large = nn.Parameter(torch.zeros(8 << 20))  # is copied last and leaves time to swap back
        model = nn.ParameterList([*self.weights, large])
        self.state: dict[str, Any] = {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        }
        self._before = [weight.detach().clone() for weight in self.weights]
        self._averages = [torch.randn(256, 1024) for _ in self.weights]

    def swap_in(self) -> None:
        self._set(self._averages)

    def swap_back(self) -> None:
        self._set(self._before)

    def _set(self, tensors: list[torch.Tensor]) -> None:
        for weight, tensor in reversed(list(zip(self.weights, tensors, strict=True))):
            weight.data.copy_(tensor)


def test_averages_swapped_in_for_a_copy_and_back_behind_it_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What was there at the call is there again when the copy is over, and still it is torn."""
    averaged = _Averaged()
    look = StagingCopy._has_changed

    def swap_back_and_look(copy: StagingCopy, job: Job, before: bytes, version: int) -> bool:
        averaged.swap_back()
        return look(copy, job, before, version)

    with Checkpointer(tmp_path, staging=StagingOptions(overlap=True)) as checkpointer:
        monkeypatch.setattr(StagingCopy, "_has_changed", swap_back_and_look)
        with held(checkpointer):
            handle = checkpointer.save(1, averaged.state)
            averaged.swap_in()
        assert_torn(checkpointer, handle, "model")


def test_averages_swapped_in_and_back_while_a_copy_runs_are_noticed(tmp_path: Path):
    """Whoever comes first. Where both are at one tensor at a time only all its bytes tell."""
    averaged = _Averaged()
    expected = frozen(averaged.state)
    for attempt in range(3):
        with Checkpointer(
            tmp_path / str(attempt), staging=StagingOptions(overlap=True, validate=True)
        ) as checkpointer:
            with held(checkpointer) as go_on:
                handle = checkpointer.save(1, averaged.state)
                averaged.swap_in()
                go_on.set()
                averaged.swap_back()
            if handle.committed.exception(300) is None:
                assert_holds(handle, expected)
            else:
                assert_torn(checkpointer, handle, "model")


@pytest.mark.parametrize("numel", [1, 2, 31, 62, 63, 64, 100, 4097])
def test_the_elements_looked_at_reach_from_the_first_to_the_last(numel: int):
    tensor = torch.zeros(numel)
    before = of_host_tensor(tensor, validate=False)
    assert min(numel, SAMPLES) <= len(before) // 4 < 2 * SAMPLES
    for at in {0, numel - 1 - numel // 33}:
        tensor[at:] = 1
        assert of_host_tensor(tensor, validate=False) != before
        tensor[:] = 0


def test_a_tensor_whose_data_is_replaced_under_a_copy_is_saved_as_it_was(shared: Checkpointer):
    state = trained()
    with copied_late(shared, state):
        for parameter in state["model"].parameters():
            parameter.data = torch.zeros(7)
        torch.randn(64, 64).sum()  # takes the memory, were it free


def test_a_tensor_whose_memory_is_freed_under_a_copy_tears_it_and_crashes_nothing(tmp_path: Path):
    code = """
import sys, threading, torch, sidesave
weight = torch.nn.Parameter(torch.ones(1 << 20))
optimizer = torch.optim.SGD([weight], lr=0.1)
staging, failures = sidesave.StagingOptions(overlap=True), sidesave.FailureOptions(tolerated=5)
with sidesave.Checkpointer(sys.argv[1], staging=staging, failures=failures) as checkpointer:
    go_on = threading.Event()
    checkpointer.session.copier._starter.submit(go_on.wait)
    handle = checkpointer.save(1, {"weight": weight, "optimizer": optimizer})
    weight.untyped_storage().resize_(0)
    go_on.set()
    print(type(handle.committed.exception()).__name__)
"""
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    done = forks.run(command)
    assert (done.returncode, done.stdout) == (0, "TornSnapshotError\n"), done.stderr


def _one_weight() -> dict[str, Any]:
    weight = nn.Parameter(torch.zeros(1 << 20))
    return {"weight": weight, "optimizer": torch.optim.SGD([weight], lr=0.1)}


def test_one_changed_element_is_found_with_validate(tmp_path: Path):
    state = _one_weight()
    with Checkpointer(
        tmp_path, staging=StagingOptions(overlap=True, validate=True)
    ) as checkpointer:
        with held(checkpointer):
            handle = checkpointer.save(1, state)
            state["weight"].data[12345] = 1.0
        assert_torn(checkpointer, handle, "weight")


def test_validate_finds_nothing_where_nothing_changed(tmp_path: Path):
    state = trained()
    with Checkpointer(
        tmp_path, staging=StagingOptions(overlap=True, validate=True)
    ) as checkpointer:
        for step in range(3):
            expected = frozen(state)
            backward(state["model"])
            handle = checkpointer.save(step, state)
            state["optimizer"].step()
            assert_holds(handle, expected)


def test_one_changed_element_is_found_without_validate_where_torch_counts_the_change(
    overlapping: Checkpointer,
):
    state = _one_weight()
    with held(overlapping):
        handle = overlapping.save(1, state)
        with torch.no_grad():
            state["weight"][12345] = 1.0
    assert_torn(overlapping, handle, "weight")


@pytest.mark.parametrize("action", ["always", "error"])
def test_a_failed_save_is_only_warned_of_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, action: Literal["always", "error"]
):
    state = _one_weight()
    text = "the save of step 1 failed: changed while being copied: weight"
    with Checkpointer(
        tmp_path, staging=StagingOptions(overlap=True), failures=FailureOptions(tolerated=5)
    ) as checkpointer:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            with held(checkpointer):
                handle = checkpointer.save(1, state)
                scramble([state["weight"]])
            assert isinstance(handle.committed.exception(300), TornSnapshotError)
            if action == "always":
                wait_until(lambda: any(text in str(one.message) for one in caught), "the warning")
            else:  # which must not end the thread that it comes from
                wait_until(
                    lambda: any(record.message.startswith(text) for record in caplog.records),
                    "the log",
                )
        checkpointer.wait()
        expected = frozen(state)
        assert_holds(checkpointer.save(1, state), expected)


# guard() ------------------------------------------------------------------------------------------


def test_guard_holds_a_hand_written_update_back_until_the_copy_is_done(shared: Checkpointer):
    state = trained()
    expected = frozen(state)

    def update() -> None:
        with shared.guard():
            scramble(state["model"].parameters())

    with held(shared) as go_on:
        handle = shared.save(next(steps), state)
        updating = threading.Thread(target=update)
        updating.start()
        wait_until(lambda: waits_at_the_guard(updating), "the update at the guard")
        assert difference(expected, frozen(state)) == ""
        go_on.set()
        updating.join(300)
    assert_holds(handle, expected)


def test_a_save_inside_a_guard_is_copied_at_the_call(shared: Checkpointer):
    state = trained()
    with held(shared):
        with shared.guard(), shared.guard():
            pass
        with shared.guard():
            with shared.guard():
                scramble(state["model"].parameters())
            expected = frozen(state)
            handle = shared.save(next(steps), state)
            assert handle.staged.done()
            scramble(state["model"].parameters())
    assert_holds(handle, expected)


def test_a_guard_is_this_threads_alone(shared: Checkpointer):
    state = trained()
    handles: list[sidesave.SaveHandle] = []
    with held(shared), shared.guard():
        saving = threading.Thread(target=lambda: handles.append(shared.save(next(steps), state)))
        saving.start()
        saving.join(300)
        assert not handles[0].staged.done(), "copied beside training"
    handles[0].committed.result(300)


# By default ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [StagingOptions(), StagingOptions(overlap=False)])
def test_by_default_everything_on_the_cpu_is_copied_at_the_call(
    tmp_path: Path, options: StagingOptions
):
    state: dict[str, Any] = {
        **trained(),
        "queue": torch.randn(1000),
        "sparse": torch.eye(5).to_sparse(),
        "strided": torch.eye(9)[::2],
    }
    expected = frozen(state)
    with Checkpointer(tmp_path, staging=options) as checkpointer:
        handle = checkpointer.save(1, state)
        assert handle.staged.done()
        scramble([*state["model"].parameters(), state["queue"], state["sparse"]._values()])
        state["strided"].zero_()
        backward(state["model"])
        state["optimizer"].step()
        assert_holds(handle, expected)


def test_a_save_that_is_refused_does_not_wait_for_the_copies_before_it(shared: Checkpointer):
    state = trained()
    with copied_late(shared, state) as handle:
        with pytest.raises(UnsupportedValueError):
            shared.save(next(steps), state | {"unsupported": object()})
        assert not handle.staged.done()


def test_a_blocking_save_is_committed_when_it_returns(shared: Checkpointer):
    state = trained()
    handle = shared.save(next(steps), state, blocking=True)
    assert handle.committed.done()
    assert_holds(handle, frozen(state))


def test_a_large_state_that_is_written_while_it_is_copied_is_what_was_there(tmp_path: Path):
    torch.manual_seed(0)
    state: dict[str, Any] = {
        "a": {"large": torch.randn(10 * MIB), "strided": torch.randn(2000, 1000).t()},
        "b": {
            "large": torch.randn(8 * MIB),
            "small": [torch.randn(number) for number in range(100)],
        },
    }
    with Checkpointer(tmp_path) as checkpointer:
        for step in range(3):
            expected = frozen(state)
            handle = checkpointer.save(step, state)
            assert handle.staged.done()
            for tensor in (
                state["a"]["large"],
                state["a"]["strided"],
                state["b"]["large"],
                *state["b"]["small"],
            ):
                tensor.add_(1)
            assert_holds(handle, expected)
            assert sidesave.verify(handle.committed.result()).ok


@pytest.mark.parametrize("helpers", [0, 3])
def test_a_copy_by_all_cores_never_says_it_is_further_than_it_is(helpers: int):
    """The writer goes by what it is told: bytes below the mark are final."""
    marks: list[int] = []

    class Checked(Arena):
        def advance(self, nbytes: int) -> None:
            done = nbytes - (image.data_ptr() - self.address)
            before = marks[-1] if marks else 0
            assert torch.equal(image[before:done], expected[before:done])
            marks.append(done)
            super().advance(nbytes)

    sources = [
        torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        for nbytes in (30 * MIB, 5, 0, 9 * MIB + 1, 40 * MIB)
    ]
    expected = torch.cat(sources)
    arena = Checked.create(0, expected.nbytes)
    image = torch.frombuffer(arena.view(arena.data_offset, expected.nbytes), dtype=torch.uint8)
    targets = image.split([source.nbytes for source in sources])
    copier = MemoryCopier()
    copier._helpers = [Worker("helper") for _ in range(helpers)]
    regions = [
        (target.data_ptr(), source.data_ptr(), source.nbytes)
        for target, source in zip(targets, sources, strict=True)
    ]
    copier.copy(Pieces(regions), arena)
    copier.close()
    assert torch.equal(image, expected)
    assert marks == sorted(set(marks))
    if not helpers:  # others may still be at the first piece when all the rest is done
        assert len(marks) == 19


@pytest.mark.parametrize("overlap", [True, pytest.param(None, marks=pytest.mark.slow)])
def test_three_thousand_tensors_are_saved_as_they_were(tmp_path: Path, overlap: bool | None):
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(number % 37 + 1) for number in range(3000)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with Checkpointer(tmp_path, staging=StagingOptions(overlap=overlap)) as checkpointer:
        for step in range(2):
            for parameter in model:
                parameter.grad = torch.ones_like(parameter)
            expected = frozen(state)
            handle = checkpointer.save(step, state)
            optimizer.step()
            assert_holds(handle, expected)


def test_saves_in_a_row_keep_apart_what_each_of_them_saw(tmp_path: Path):
    counter = torch.zeros(1 << 18)
    with Checkpointer(tmp_path, staging=StagingOptions(slots=2)) as checkpointer:
        for step in range(12):
            counter.fill_(step)
            checkpointer.save(step, {"counter": counter})
        checkpointer.wait()
        for step in range(12):
            assert (checkpointer.load(step)["counter"] == step).all()


# Staging memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, None])
def test_a_state_of_another_size_gets_another_arena_and_the_old_one_goes(
    tmp_path: Path, overlap: bool | None
):
    elsewhere = len(arenas_nbytes())
    with Checkpointer(tmp_path, staging=StagingOptions(slots=1, overlap=overlap)) as checkpointer:
        for step, count in enumerate([1 << 20, 3 << 20, 5, 2 << 20]):
            state = {"weights": torch.full((count,), float(step)), "step": step}
            handle = checkpointer.save(step, state)
            assert_holds(handle, state)
            assert len(arenas_nbytes()) == elsewhere + 1
            nbytes = checkpointer.session.pool.nbytes
            assert nbytes in arenas_nbytes()
            assert count * 4 < nbytes < 2 * count * 4 + 2 * MIB
            daemon = checkpointer.daemon_pid or 0
            wait_until(
                lambda: arenas_nbytes(daemon) == [nbytes],  # noqa: B023
                "the daemon lets go of the old arena",
            )
        for step in range(4):
            assert (checkpointer.load(step)["weights"] == step).all()


def test_a_state_of_another_shape_and_equal_size_is_saved_in_the_same_arena(tmp_path: Path):
    with Checkpointer(tmp_path, staging=StagingOptions(slots=1)) as checkpointer:
        states = [
            {"a": torch.randn(1000, 300), "b": torch.arange(5)},
            {"a": torch.randn(300, 1000), "b": torch.arange(5)},
            {"b": torch.randn(300_000).double(), "c": torch.ones((), dtype=torch.bool)},
        ]
        before: list[int] = []
        for step, state in enumerate(states * 2):
            assert_holds(checkpointer.save(step, state), state)
            before = before or arenas_nbytes()
        assert len(arenas_nbytes()) == len(before)


def test_a_prepared_checkpointer_allocates_nothing_at_the_first_save(tmp_path: Path):
    state = trained()
    with Checkpointer(tmp_path) as checkpointer:
        before = len(arenas_nbytes())
        checkpointer.prepare(state).result(300)
        prepared = arenas_nbytes()
        assert len(prepared) == before + 1
        for step in range(4):
            checkpointer.save(step, state, blocking=True)
        assert arenas_nbytes() == prepared
        checkpointer.prepare(state, slots=2).result(300)
        prepared = arenas_nbytes()
        assert len(prepared) == before + 2
        for step in range(4, 8):
            checkpointer.save(step, state)
        assert arenas_nbytes() == prepared
        for wrong in (0, 3, True, "1"):
            with pytest.raises(InvalidArgumentError, match="slots must be an int from 1 to 2"):
                checkpointer.prepare(state, slots=wrong)  # type: ignore[arg-type]


def test_a_state_beyond_the_memory_left_is_refused_and_a_smaller_one_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        host_memory, "_mem_available", lambda: 8 * MIB + host_memory._RESERVE_NBYTES
    )
    with Checkpointer(tmp_path) as checkpointer:
        before = arenas_nbytes()
        with pytest.raises(HostMemoryError, match=r"16 MiB .*; save less, or give the job more"):
            checkpointer.save(1, {"weights": torch.ones(4 * MIB)})
        assert arenas_nbytes() == before
        state = {"weights": torch.ones(MIB)}
        assert_holds(checkpointer.save(1, state), state)
        checkpointer.wait()
        with pytest.raises(HostMemoryError):
            checkpointer.save(2, {"weights": torch.ones(4 * MIB)})
        assert_holds(checkpointer.save(2, state), state)
        assert checkpointer.steps() == [1, 2]


def test_a_save_waits_for_a_slot_while_bytes_move():
    pool = SlotPool(1, lambda number, arena: None, lambda number: None)
    pool.acquire("first", 0.0)
    looks = itertools.count()

    def progress() -> int:
        count = next(looks)
        if count == 3:
            pool.release("first")
        return count

    assert pool.acquire("second", 0.01, progress).owner == "second"
    with pytest.raises(WriteStalledError, match=r"no byte has moved for 0\.01 s"):
        pool.acquire("third", 0.01, lambda: 7)


def test_closing_gives_all_staging_memory_back(tmp_path: Path):
    before = arenas_nbytes()
    with Checkpointer(tmp_path, staging=StagingOptions(overlap=True)) as checkpointer:
        for step in range(3):
            checkpointer.save(step, trained())
        assert len(arenas_nbytes()) > len(before)
    assert arenas_nbytes() == before


def test_staged_copies_grow_no_autograd_graph(shared: Checkpointer):
    state = trained()
    state["no leaf"] = state["model"][0].weight * 2
    shared.save(next(steps), state).committed.result(300)
    targets = [target.view for slot in shared.session.pool._slots for target in slot.targets]
    assert targets
    assert not any(view.requires_grad or view.grad_fn for view in targets)
