"""Graphs beside saves: captured in the thread that saves or in another, and replayed while copies
are under way.
"""

import threading
import time
from collections.abc import Callable

import gpu
import pytest
import torch
from gpu_model import DEVICES, Saved, snapshot
from gpu_training import Training
from hypothesis import strategies as st
from hypothesis.stateful import rule

from sidesave.errors import StagingError


def wait_a_moment_until(condition: Callable[[], bool]) -> None:
    """A moment, because it need not come; the two threads then meet at another time."""
    deadline = time.monotonic() + 0.1
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.0005)


class TrainingWithGraphs(Training):
    """All of it."""

    def begun(self) -> None:
        if self.parts[0].graphable:
            self.capture_a_step()

    @rule(replayed=st.sampled_from(["", "step", "forward"]))
    def save_twice(self, replayed: str) -> None:
        self.save_here()
        if replayed:
            self.replay([replayed], elsewhere=False)
        self.save_here()

    def capture(
        self, function: Callable[[], object], stream: torch.cuda.Stream
    ) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(DEVICES[0]))
        with torch.cuda.stream(stream):
            gpu.make_cublas_handle(DEVICES[0])
            graph.capture_begin()
            try:
                function()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(DEVICES[0]).wait_stream(stream)
        return graph

    @rule()
    def capture_a_step(self) -> None:
        if not self.parts[0].graphable or self.parts[0].step_graph is not None:
            return
        self.may_block()
        self.parts[0].step_graph = self.capture(lambda: self.take_step(self.parts[0]), self.stream)

    def run_forward(self) -> None:
        with torch.no_grad():
            self.outputs.copy_(self.parts[0].model(self.inputs))

    @rule(save_inside=st.booleans())
    def capture_a_forward(self, save_inside: bool) -> None:
        self.may_block()

        def forward() -> None:
            self.run_forward()
            if save_inside:
                with pytest.raises(StagingError, match="during a CUDA graph capture"):
                    self.checkpointer.save(10**6, self.state())
                self.run_forward()

        self.forward = self.capture(forward, self.stream)

    @rule()
    def save_while_another_thread_captures(self) -> None:
        self.may_block()
        self.save_here()
        begun, stream, saving = (
            threading.Event(),
            torch.cuda.Stream(DEVICES[0]),
            threading.current_thread(),
        )
        captured: list[torch.cuda.CUDAGraph] = []

        def forward() -> None:
            begun.set()
            wait_a_moment_until(lambda: gpu.is_inside(saving, "await_end"))
            self.run_forward()

        def capture() -> None:
            try:
                captured.append(self.capture(forward, stream))
            finally:
                begun.set()

        state = self.state()
        expected = snapshot(state)
        capturing = gpu.Call(capture)
        assert begun.wait(60)
        self.step += 1
        self.saves.append(Saved(self.step, self.checkpointer.save(self.step, state), expected))
        capturing.result()
        [self.forward] = captured

    @rule()
    def capture_while_another_thread_saves(self) -> None:
        self.may_block()
        state = self.state()
        expected = snapshot(state)
        self.step += 1
        saving = gpu.Call(lambda: self.checkpointer.save(self.step, state))
        wait_a_moment_until(lambda: gpu.is_inside(saving, "copy", "fit"))

        def forward() -> None:
            wait_a_moment_until(lambda: not saving.is_alive())
            self.run_forward()

        self.forward = self.capture(forward, self.stream)
        self.saves.append(Saved(self.step, saving.result(), expected))

    @rule(
        names=st.lists(st.sampled_from(["step", "forward"]), min_size=1, max_size=3),
        elsewhere=st.booleans(),
    )
    def replay(self, names: list[str], elsewhere: bool) -> None:
        current = torch.cuda.current_stream(DEVICES[0])
        stream = self.stream if elsewhere else current
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for name in names:
                graph = self.parts[0].step_graph if name == "step" else self.forward
                if graph is not None:
                    graph.replay()
        current.wait_stream(stream)
