"""CUDA graphs and saves: a replayed step waits for the copies, a capture survives every call that
is made beside it.
"""

import contextlib
import itertools
import threading
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from gpu import (
    Call,
    assert_holds,
    copied_late,
    finish_compute,
    hold_copies_back,
    is_inside,
    run_program,
    seen,
    trained,
    wait_until_enqueued,
    warm_up,
    warmed_up,
)
from states import difference, held
from trainers import wait_until

import sidesave
from sidesave import Checkpointer
from sidesave.errors import StagingError
from sidesave.stager.memory import host_memory
from sidesave.stager.memory.arena import Arena

pytestmark = gpu.MARKS


def _warmed_step(state: dict[str, Any], inputs: torch.Tensor) -> Any:
    """A whole training step that may be captured, warmed up as torch's documentation says."""

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
    return step


def captured(function: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def captured_step(state: dict[str, Any]) -> torch.cuda.CUDAGraph:
    return captured(_warmed_step(state, torch.randn(4, 512, device="cuda")))


def test_a_replayed_optimizer_step_waits_for_the_copy_in_stream_order(checkpointer: Checkpointer):
    state = warmed_up(checkpointer, torch.optim.AdamW, capturable=True)
    graph = captured_step(state)
    for step in range(1, 4):
        expected = seen(state)
        with hold_copies_back(checkpointer):
            handle = checkpointer.save(step, state)
            graph.replay()
            graph.replay()
            replayed = torch.cuda.Event()
            replayed.record()
            assert not handle.staged.done(), "replay() has waited on the host"
            assert not replayed.query(), "or it has not waited at all"
        assert_holds(handle, expected)
        assert difference(expected, seen(state)) != "", "the graph has trained"


def test_a_replay_without_an_optimizer_step_waits_for_no_copy(checkpointer: Checkpointer):
    state = warmed_up(checkpointer, torch.optim.AdamW, capturable=True)
    inputs = torch.randn(4, 512, device="cuda")
    with torch.no_grad():
        state["model"](inputs)
        outputs: list[torch.Tensor] = []
        graph = captured(lambda: outputs.append(state["model"](inputs)))
    with copied_late(checkpointer, state) as handle:
        wait_until_enqueued()
        graph.replay()
        finish_compute()
        assert not handle.staged.done()
    with torch.no_grad():
        assert torch.equal(outputs[0], state["model"](inputs))


def test_a_graph_that_is_captured_anew_with_a_step_waits(checkpointer: Checkpointer):
    state = warmed_up(checkpointer, torch.optim.AdamW, capturable=True)
    inputs = torch.randn(4, 512, device="cuda")
    step = _warmed_step(state, inputs)
    graph = captured(lambda: state["model"](inputs))
    graph.reset()
    with torch.cuda.graph(graph):
        step()
    expected = seen(state)
    with hold_copies_back(checkpointer):
        handle = checkpointer.save(1, state)
        graph.replay()
    assert_holds(handle, expected)
    assert difference(expected, seen(state)) != ""


def test_a_graph_from_before_the_first_checkpointer_waits_for_copies_too(tmp_path: Path):
    """Nobody has seen whether it holds an optimizer step."""
    code = """
import sys, torch
from states import difference
from test_gpu_graphs import captured_step
from sidesave import Checkpointer

state = gpu.trained(torch.optim.AdamW, capturable=True)
graph = captured_step(state)
with Checkpointer(sys.argv[1]) as checkpointer:
    gpu.warm_up(checkpointer, state)
    for step in range(1, 4):
        expected = gpu.seen(state)
        with gpu.hold_copies_back(checkpointer):
            handle = checkpointer.save(step, state)
            graph.replay()
            assert not handle.staged.done()
        gpu.assert_holds(handle, expected)
        assert difference(expected, gpu.seen(state)) != ""
"""
    run_program(code, tmp_path)


class _Counter:
    """Work to capture whose result tells how often it has been replayed."""

    def __init__(self) -> None:
        self.value = torch.zeros(1000, device="cuda")
        self.value.add_(0)

    def replays_well(self, graph: torch.cuda.CUDAGraph) -> bool:
        torch.cuda.synchronize()
        before = self.value.clone()
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        return torch.equal(self.value, before + 4)


# What would break a capture, and with it all of CUDA in that process: in programs of their own ----


def _run_here(function: str, *arguments: object) -> None:
    run_program(
        f"import sys, test_gpu_graphs\ntest_gpu_graphs.{function}(*sys.argv[1:])\n", *arguments
    )


def test_a_save_inside_a_capture_is_refused_and_the_capture_goes_on(tmp_path: Path):
    _run_here("saves_inside_a_capture", tmp_path)


def saves_inside_a_capture(run: str) -> None:
    state = trained(torch.optim.AdamW, capturable=True)
    counter = _Counter()
    with Checkpointer(run) as checkpointer:
        for _ in ("the first save, which pins memory", "a later one"):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                counter.value.add_(1)
                for blocking in (False, True):
                    with pytest.raises(StagingError, match="during a CUDA graph capture"):
                        checkpointer.save(100, state, blocking=blocking)
                counter.value.add_(1)
            assert counter.replays_well(graph)
            for _ in range(2):
                step = len(checkpointer.steps())
                assert_holds(checkpointer.save(step, state), seen(state))


@pytest.mark.parametrize("call", ["save", "blocking save", "prepare"])
def test_a_call_in_another_thread_leaves_an_open_capture_alone(tmp_path: Path, call: str):
    """It waits for the end of the capture, or is refused."""
    _run_here("calls_beside_a_capture", tmp_path, call)


def calls_beside_a_capture(run: str, call: str) -> None:
    state = trained(torch.optim.AdamW, capturable=True)
    counter = _Counter()
    expected = seen(state)
    steps = itertools.count()
    with Checkpointer(run) as checkpointer:

        def other() -> sidesave.SaveHandle | None:
            if call == "prepare":
                return checkpointer.prepare(state).result(60)
            return checkpointer.save(next(steps), state, blocking=call == "blocking save")

        for _ in ("the first call, which pins memory", "a later one"):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                counter.value.add_(1)
                calling = Call(other)
                calling.goes_as_far_as_it_gets()
                counter.value.add_(1)
            assert counter.replays_well(graph)
            with contextlib.suppress(StagingError):
                handle = calling.result()
                if handle is not None:
                    assert_holds(handle, expected)
            assert_holds(checkpointer.save(next(steps), state), expected)


def test_memory_is_pinned_and_given_back_outside_of_captures(tmp_path: Path):
    """Pinning by ``prepare()``, giving a slot back and ``close()`` wait for the end of a capture
    in another thread.
    """
    _run_here("pins_beside_a_capture", tmp_path)


def pins_beside_a_capture(run: str) -> None:
    state = trained(torch.optim.AdamW, capturable=True)
    counter = _Counter()
    expected = seen(state)
    populating, go_on = threading.Event(), threading.Event()
    populate = host_memory.populate

    def slowly(arena: Arena, node: int | None = None) -> None:
        populating.set()
        go_on.wait(60)
        populate(arena, node)

    host_memory.populate = slowly
    checkpointer = Checkpointer(run)
    preparing = checkpointer.prepare(state)
    assert populating.wait(60)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.value.add_(1)
        go_on.set()
        pinning = Call(lambda: preparing.result(60))
        pinning.goes_as_far_as_it_gets()
        counter.value.add_(1)
    pinning.result()
    assert counter.replays_well(graph)
    assert_holds(checkpointer.save(1, state), expected)
    checkpointer.prepare(state, slots=2).result(60)
    pool = checkpointer.session.pool
    host_memory.available_nbytes = lambda: 0
    pool._slots[1].last_use = -100, 0.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.value.add_(1)
        giving_back = Call(lambda: pool._give_back(pool._slots[1:]))
        giving_back.goes_as_far_as_it_gets()
        counter.value.add_(1)
    giving_back.result()
    assert counter.replays_well(graph)
    assert not pool._slots[1].nbytes
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.value.add_(1)
        closing = Call(checkpointer.close)
        closing.goes_as_far_as_it_gets()
        counter.value.add_(1)
    closing.result()
    assert counter.replays_well(graph)


def test_a_capture_that_begins_during_the_call_of_another_thread_waits_for_its_end(tmp_path: Path):
    _run_here("captures_during_a_call", tmp_path)


def captures_during_a_call(run: str) -> None:
    calling, go_on = threading.Event(), threading.Event()
    counter = _Counter()

    class Slow:
        def state_dict(self) -> dict[str, Any]:
            calling.set()
            go_on.wait(60)
            return {"value": torch.ones(1000, device="cuda")}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    with Checkpointer(run) as checkpointer:
        go_on.set()
        checkpointer.save(0, {"slow": Slow()}, blocking=True)
        calling.clear()
        go_on.clear()
        saving = Call(lambda: checkpointer.save(1, {"slow": Slow()}))
        assert calling.wait(60)

        def capture() -> torch.cuda.CUDAGraph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                counter.value.add_(1)
                go_on.set()
                saving.goes_as_far_as_it_gets()
                if saving.value is not None:
                    # its copies are waited for while the capture is open
                    saving.value.staged.exception(60)
                counter.value.add_(1)
            return graph

        capturing = Call(capture)
        wait_until(
            lambda: go_on.is_set() or is_inside(capturing, "_enter"),
            "the capture, or its wait for the save",
        )
        capturing.goes_as_far_as_it_gets()
        go_on.set()
        assert_holds(saving.result(), {"slow": {"value": torch.ones(1000)}})
        assert counter.replays_well(capturing.result())


def test_a_capture_that_begins_while_a_save_is_pending_waits_for_it(tmp_path: Path):
    """The copies would be enqueued, and waited for, while the capture is open."""
    _run_here("captures_under_a_pending_save", tmp_path)


def captures_under_a_pending_save(run: str) -> None:
    state = trained(torch.optim.AdamW, capturable=True)
    with Checkpointer(run) as checkpointer:
        warm_up(checkpointer, state)
        step = _warmed_step(state, torch.randn(4, 512, device="cuda"))
        expected = seen(state)
        with held(checkpointer):
            handle = checkpointer.save(1, state)

            def capture() -> torch.cuda.CUDAGraph:
                gpu.make_cublas_handle()
                return captured(step)

            capturing = Call(capture)
            wait_until(lambda: is_inside(capturing), "the capture waits for the save")
        graph = capturing.result()
        assert_holds(handle, expected)
        expected = seen(state)
        with hold_copies_back(checkpointer):
            handle = checkpointer.save(2, state)
            graph.replay()
        assert_holds(handle, expected)
        assert difference(expected, seen(state)) != ""
