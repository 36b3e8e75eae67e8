"""The simulated GPU finds what breaks the rules of CUDA, invents nothing, and computes what the CPU
does.
"""

import ctypes
import mmap
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import simulated_gpu
import torch
from gpu import needs_two_devices
from torch import nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not simulated_gpu.active(), reason="is about the simulated GPU: scripts/test --gpu"
    ),
]

SCHEDULES = ["early", "late", "random"]
INVALID_VALUE, ILLEGAL_ADDRESS, NOT_PERMITTED, CAPTURE_INVALIDATED = 1, 700, 800, 901
NUMEL = 1 << 18
PAGES_NBYTES = 16 * mmap.PAGESIZE


@pytest.fixture(autouse=True)
def _schedule_of_the_process() -> Iterator[None]:
    torch.zeros((), device="cuda")
    torch.cuda.synchronize()
    simulated_gpu.violations()
    yield
    name, _, seed = os.environ.get("SIMULATED_GPU", "early").partition(":")
    simulated_gpu.schedule(name, int(seed or 0))


def cuda(call: str, *arguments: Any) -> int:
    """A call of the runtime behind torch's back; returns its error code."""
    function = simulated_gpu._required()[call]
    return function(
        *(ctypes.c_void_p(each) if isinstance(each, int) else each for each in arguments)
    )


def found() -> set[str]:
    """The kinds of what was found, after everything has run."""
    torch.cuda.synchronize()
    return {line.partition(":")[0] for line in simulated_gpu.violations()}


class Gate:
    """Holds a stream from `close` to `open`, as a host function on a GPU does."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._semaphore = ctypes.create_string_buffer(64)
        self._libc.sem_init(self._semaphore, 0, 0)

    def close(self, stream: torch.cuda.Stream) -> None:
        assert (
            cuda("cudaLaunchHostFunc", stream.cuda_stream, self._libc.sem_wait, self._semaphore)
            == 0
        )

    def open(self) -> None:
        self._libc.sem_post(self._semaphore)


@contextmanager
def held(stream: torch.cuda.Stream) -> Iterator[None]:
    """Nothing that is enqueued inside runs before the end."""
    gate = Gate()
    gate.close(stream)
    try:
        yield
    finally:
        gate.open()
        stream.synchronize()


class Pages:
    """Host memory that is registered piece by piece."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PAGES_NBYTES)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()

    def register(self, begin: int, nbytes: int) -> None:
        assert (
            cuda(
                "cudaHostRegister", self.address + begin, ctypes.c_size_t(nbytes), ctypes.c_uint(0)
            )
            == 0
        )

    def unregister(self, begin: int) -> None:
        assert cuda("cudaHostUnregister", self.address + begin) == 0


# It finds -----------------------------------------------------------------------------------------


def test_a_missing_wait_between_streams_is_found():
    side = torch.cuda.Stream()
    values = torch.zeros(NUMEL, device="cuda")
    torch.cuda.synchronize()
    values.fill_(1)
    with torch.cuda.stream(side):
        values.add(1)
    assert found() == {"RACE"}


def test_a_missing_wait_is_found_when_an_unrelated_event_is_waited_for():
    side = torch.cuda.Stream()
    values = torch.zeros(NUMEL, device="cuda")
    early = torch.cuda.current_stream().record_event()
    values.fill_(1)
    side.wait_event(early)
    with torch.cuda.stream(side):
        values.mul_(2)
    assert found() == {"RACE"}


def test_a_host_buffer_that_two_copies_fill_at_once_is_found():
    side = torch.cuda.Stream()
    values, buffer = torch.zeros(NUMEL, device="cuda"), torch.empty(NUMEL).pin_memory()
    torch.cuda.synchronize()
    buffer.copy_(values, non_blocking=True)
    with torch.cuda.stream(side):
        buffer.copy_(values, non_blocking=True)
    assert found() == {"RACE"}


def test_a_host_buffer_reused_under_a_copy_gives_the_later_bytes_to_the_copy():
    side = torch.cuda.Stream()
    buffer, values = torch.ones(NUMEL).pin_memory(), torch.zeros(NUMEL, device="cuda")
    torch.cuda.synchronize()
    with held(side):
        with torch.cuda.stream(side):
            values.copy_(buffer, non_blocking=True)
        buffer.fill_(2)
    assert values.cpu().eq(2).all()


@pytest.mark.parametrize("outward", [True, False])
def test_a_copy_across_two_registrations_fails_and_is_found(outward: bool):
    pages, values = Pages(), torch.zeros(PAGES_NBYTES, device="cuda", dtype=torch.uint8)
    half = PAGES_NBYTES // 2
    pages.register(0, half)
    pages.register(half, half)
    with pytest.raises(RuntimeError, match="invalid argument"):
        (pages.tensor if outward else values).copy_(
            values if outward else pages.tensor, non_blocking=True
        )
    assert found() == {"PINNED"}
    pages.unregister(0)
    pages.unregister(half)


def test_a_registration_that_ends_under_a_copy_is_found():
    side, pages = torch.cuda.Stream(), Pages()
    values = torch.ones(PAGES_NBYTES, device="cuda", dtype=torch.uint8)
    side.wait_stream(torch.cuda.current_stream())
    pages.register(0, PAGES_NBYTES)
    with held(side):
        with torch.cuda.stream(side):
            pages.tensor.copy_(values, non_blocking=True)
        pages.unregister(0)
    assert found() == {"PINNED"}
    assert pages.tensor.eq(0).all(), "what would crash a process has not been done"


def test_pinned_memory_freed_under_a_copy_is_found():
    side = torch.cuda.Stream()
    values, memory = torch.ones(NUMEL, device="cuda"), ctypes.c_void_p()
    side.wait_stream(torch.cuda.current_stream())
    nbytes = ctypes.c_size_t(values.nbytes)
    assert cuda("cudaHostAlloc", ctypes.byref(memory), nbytes, ctypes.c_uint(0)) == 0
    with held(side):
        cuda(
            "cudaMemcpyAsync", memory, values.data_ptr(), nbytes, ctypes.c_int(2), side.cuda_stream
        )
        assert cuda("cudaFreeHost", memory) == 0
    assert found() == {"PINNED"}


def test_device_memory_is_freed_after_what_uses_it():
    side, memory = torch.cuda.Stream(), ctypes.c_void_p()
    values, gate = torch.zeros(NUMEL, device="cuda"), Gate()
    torch.cuda.synchronize()
    nbytes = ctypes.c_size_t(values.nbytes)
    assert cuda("cudaMalloc", ctypes.byref(memory), nbytes) == 0
    gate.close(side)
    cuda("cudaMemsetAsync", memory, ctypes.c_int(1), nbytes, side.cuda_stream)
    opened = threading.Timer(0.1, gate.open)
    opened.start()
    assert cuda("cudaFree", memory) == 0
    opened.join()
    assert side.query()
    assert found() == set()


def test_a_copy_from_freed_device_memory_fails_and_is_found():
    memory, values = ctypes.c_void_p(), torch.zeros(NUMEL, device="cuda")
    nbytes = ctypes.c_size_t(values.nbytes)
    assert cuda("cudaMalloc", ctypes.byref(memory), nbytes) == 0
    assert cuda("cudaFree", memory) == 0
    assert (
        cuda("cudaMemcpyAsync", values.data_ptr(), memory, nbytes, ctypes.c_int(3), 0)
        == INVALID_VALUE
    )
    assert cuda("cudaGetLastError") == INVALID_VALUE
    assert found() == {"FREED"}


def test_a_tensor_freed_under_a_copy_of_another_stream_is_overwritten_and_found():
    side = torch.cuda.Stream()
    values, copied = torch.ones(NUMEL, device="cuda"), torch.zeros(NUMEL, device="cuda")
    torch.cuda.synchronize()
    with held(side):
        with torch.cuda.stream(side):
            copied.copy_(values)
        address = values.data_ptr()
        del values
        others = torch.full((NUMEL,), 2.0, device="cuda")
        assert others.data_ptr() == address
        torch.cuda.current_stream().synchronize()
    assert copied.cpu().eq(2).all()
    assert found() == {"RACE"}


@pytest.mark.parametrize(
    "call", ["cudaMalloc", "cudaDeviceSynchronize", "cudaEventQuery", "cudaHostRegister"]
)
def test_an_unsafe_call_of_another_thread_breaks_a_capture_and_is_found(call: str):
    stream, memory, event, pages = (
        torch.cuda.Stream(),
        ctypes.c_void_p(),
        torch.cuda.Event(),
        Pages(),
    )
    event.record()
    arguments = {
        "cudaMalloc": (ctypes.byref(memory), ctypes.c_size_t(1)),
        "cudaEventQuery": (event.cuda_event,),
        "cudaHostRegister": (pages.address, ctypes.c_size_t(PAGES_NBYTES), ctypes.c_uint(0)),
    }.get(call, ())
    assert _captured(stream, lambda: cuda(call, *arguments)) == CAPTURE_INVALIDATED
    assert found() == {"CAPTURE"}


def test_a_call_of_a_thread_that_relaxed_its_capture_mode_breaks_nothing():
    def call() -> None:
        mode, memory = ctypes.c_int(2), ctypes.c_void_p()
        cuda("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        assert cuda("cudaMalloc", ctypes.byref(memory), ctypes.c_size_t(1)) == 0
        assert cuda("cudaFree", memory) == 0

    assert _captured(torch.cuda.Stream(), call) == 0
    assert found() == set()


def _captured(stream: torch.cuda.Stream, call: Callable[[], object]) -> int:
    """The error of a capture while which another thread calls."""
    graph = ctypes.c_void_p()
    assert cuda("cudaStreamBeginCapture", stream.cuda_stream, ctypes.c_int(0)) == 0
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    error = cuda("cudaStreamEndCapture", stream.cuda_stream, ctypes.byref(graph))
    cuda("cudaGetLastError")
    return error


@pytest.mark.parametrize(
    ("before", "violations"),
    [
        ("pass", {"CAPTURE"}),
        ("values @ values", set()),
        ("in_a_thread(lambda: values @ values)", set()),
    ],
    ids=["none", "here", "in a thread that has ended"],
)
def test_the_first_product_of_a_thread_breaks_a_capture_and_is_found(
    before: str, violations: set[str]
):
    program = f"""
        import contextlib, os, threading

        def in_a_thread(work):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            while os.path.exists(f"/proc/self/task/{{thread.native_id}}"):  # it leaves what it had
                pass

        values = torch.ones(8, 8, device="cuda")
        {before}
        with contextlib.suppress(RuntimeError):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                values @ values
        print({{line.partition(":")[0] for line in simulated_gpu.violations()}})
    """
    assert _in_a_process(program) == str(violations)


@needs_two_devices
def test_a_context_opened_on_another_device_is_told_with_the_call():
    assert _in_a_process("""
        assert simulated_gpu.contexts() == {}
        torch.ones(10, device="cuda").sum().item()
        assert set(simulated_gpu.contexts()) == {0}
        torch.cuda.synchronize(1)
        print(simulated_gpu.contexts()[1])
    """) in ("cudaSetDevice", "cudaDeviceSynchronize")


def test_a_wait_for_an_event_that_was_never_recorded_waits_for_nothing_and_is_counted():
    stream, event = torch.cuda.Stream(), ctypes.c_void_p()
    simulated_gpu.counts()
    assert cuda("cudaEventCreateWithFlags", ctypes.byref(event), ctypes.c_uint(2)) == 0
    assert cuda("cudaStreamWaitEvent", stream.cuda_stream, event, ctypes.c_uint(0)) == 0
    stream.synchronize()
    assert cuda("cudaEventQuery", event) == 0
    assert simulated_gpu.counts()["WAIT for an event that was never recorded"] == 1


# Host functions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_host_function_holds_its_stream_and_no_other(schedule: str):
    simulated_gpu.schedule(schedule, 7)
    one, other, gate = torch.cuda.Stream(), torch.cuda.Stream(), Gate()
    gate.close(one)
    with torch.cuda.stream(one):
        behind = torch.full((NUMEL,), 3.0, device="cuda")
    with torch.cuda.stream(other):
        beside = torch.full((NUMEL,), 4.0, device="cuda")
        assert beside.sum().item() == 4 * NUMEL
    event = one.record_event()
    assert not any(one.query() or event.query() for _ in range(100))
    waiting = threading.Thread(target=one.synchronize)
    waiting.start()
    with torch.cuda.stream(other):
        assert (beside + 1).sum().item() == 5 * NUMEL
    waiting.join(0.1)
    assert waiting.is_alive()
    gate.open()
    waiting.join(30)
    assert one.query()
    assert event.query()
    assert behind.cpu().eq(3).all()
    assert found() == set()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stream_that_waits_for_a_held_one_is_held_with_it(schedule: str):
    simulated_gpu.schedule(schedule, 7)
    one, other, gate = torch.cuda.Stream(), torch.cuda.Stream(), Gate()
    values = torch.zeros(NUMEL, device="cuda")
    torch.cuda.synchronize()
    gate.close(one)
    with torch.cuda.stream(one):
        values.add_(1)
    other.wait_stream(one)
    with torch.cuda.stream(other):
        values.mul_(5)
    assert not any(other.query() for _ in range(100))
    opened = threading.Timer(0.1, gate.open)
    opened.start()
    other.synchronize()
    assert values.cpu().eq(5).all()
    opened.join()
    assert found() == set()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_host_function_that_waits_keeps_those_of_other_streams_waiting(schedule: str):
    simulated_gpu.schedule(schedule, 7)
    one, other, first, second = torch.cuda.Stream(), torch.cuda.Stream(), Gate(), Gate()
    first.close(one)
    assert not any(one.query() for _ in range(100))  # it has got there
    second.close(other)
    second.open()
    waiting = threading.Thread(target=other.synchronize)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    first.open()
    waiting.join(30)
    assert other.query()
    assert found() == set()


def test_a_host_function_runs_when_its_stream_gets_there_and_may_not_call_cuda():
    stream, gate, seen = torch.cuda.Stream(), Gate(), []
    memory = ctypes.c_void_p()
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
        lambda _: seen.append(cuda("cudaMalloc", ctypes.byref(memory), ctypes.c_size_t(1)))
    )
    gate.close(stream)
    assert cuda("cudaLaunchHostFunc", stream.cuda_stream, call, 0) == 0
    assert not any(stream.query() for _ in range(100))
    assert seen == []
    gate.open()
    stream.synchronize()
    assert seen == [NOT_PERMITTED]
    assert found() == {"HOST FUNCTION"}


# A broken device ----------------------------------------------------------------------------------


def test_a_broken_device_fails_every_call_that_needs_it_until_it_is_mended():
    values, side = torch.zeros(NUMEL, device="cuda"), torch.cuda.Stream()
    event = side.record_event()
    torch.cuda.synchronize()
    device = ctypes.c_int(7)
    simulated_gpu.break_device(ILLEGAL_ADDRESS)
    try:
        for call in (
            lambda: values + 1,
            torch.cuda.synchronize,
            event.query,
            side.synchronize,
            lambda: values.cpu(),
        ):
            for _ in range(2):
                with pytest.raises(RuntimeError, match="an illegal memory access was encountered"):
                    call()
        assert cuda("cudaGetDevice", ctypes.byref(device)) == 0
        assert device.value == 0
    finally:
        simulated_gpu.break_device(0)
    assert cuda("cudaGetLastError") in (0, ILLEGAL_ADDRESS)
    assert (values + 1).sum().item() == NUMEL
    assert found() == set()


def test_a_device_that_breaks_under_a_wait_ends_the_wait():
    stream, gate, errors = torch.cuda.Stream(), Gate(), []
    gate.close(stream)
    waiting = threading.Thread(
        target=lambda: errors.append(cuda("cudaStreamSynchronize", stream.cuda_stream))
    )
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    simulated_gpu.break_device(ILLEGAL_ADDRESS)
    try:
        waiting.join(30)
        assert errors == [ILLEGAL_ADDRESS]
    finally:
        simulated_gpu.break_device(0)
        gate.open()
    stream.synchronize()


# It invents nothing -------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_streams_that_wait_for_each_other_by_events_are_right(schedule: str):
    simulated_gpu.schedule(schedule, 3)
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    values = torch.zeros(NUMEL, device="cuda")
    one.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        with torch.cuda.stream(one):
            values.add_(1)
        other.wait_event(one.record_event())
        with torch.cuda.stream(other):
            values.mul_(2)
        one.wait_event(other.record_event())
    torch.cuda.current_stream().wait_stream(one)
    assert values.sum().item() == NUMEL * (2**11 - 2)
    assert found() == set()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_recorded_for_another_stream_is_not_used_again_before_that_is_done(schedule: str):
    simulated_gpu.schedule(schedule, 3)
    side, copies = torch.cuda.Stream(), []
    for step in range(10):
        values = torch.full((NUMEL,), float(step), device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copies.append(values.clone())
        values.record_stream(side)
        del values
    side.synchronize()
    assert [copy[0].item() for copy in copies] == list(range(10))
    assert found() == set()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_pinned_buffers_used_in_turn_are_right(schedule: str):
    simulated_gpu.schedule(schedule, 3)
    side, read = torch.cuda.Stream(), []
    buffers = [torch.empty(NUMEL).pin_memory() for _ in range(2)]
    copied = [torch.cuda.Event(), torch.cuda.Event()]
    values = torch.zeros(NUMEL, device="cuda")
    for step in range(10):
        copied[step % 2].synchronize()  # at first there is nothing to wait for
        if step >= 2:
            read.append(buffers[step % 2][-1].item())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            buffers[step % 2].copy_(values, non_blocking=True)
            copied[step % 2].record(side)
        torch.cuda.current_stream().wait_stream(side)
        values.add_(1)
    assert read == list(range(8))
    assert found() == set()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_replayed_graph_computes_with_what_is_there_at_the_replay(schedule: str):
    simulated_gpu.schedule(schedule, 3)
    source, graph = torch.ones(NUMEL, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target = source * 2 + 1
    results = []
    for step in range(5):
        source.fill_(step)
        graph.replay()
        results.append(target[5].clone())
    assert [result.item() for result in results] == [1, 3, 5, 7, 9]
    assert found() == set()


def losses(device: str, fused: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 50)
    )
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    generator = torch.Generator().manual_seed(1)
    collected = []
    for _ in range(6):
        tokens = torch.randint(0, 50, (8, 16), generator=generator).to(device, non_blocking=True)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        collected.append(loss.detach())
    return [loss.item() for loss in collected]


@pytest.mark.parametrize("fused", [True, False])
def test_training_has_the_losses_of_the_cpu_under_every_schedule(fused: bool):
    expected = losses("cpu", fused)
    for schedule, seed in (("early", 0), ("late", 0), ("random", 1), ("random", 2)):
        simulated_gpu.schedule(schedule, seed)
        assert losses("cuda", fused) == expected, (schedule, seed)
    assert found() == set()


# Torch's allocator --------------------------------------------------------------------------------


def test_memory_runs_out_and_comes_back():
    free, total = torch.cuda.mem_get_info()
    assert free <= total
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device="cuda")
    torch.empty(1 << 20, device="cuda")
    assert found() == set()


def test_expandable_segments_grow_shrink_and_are_checked():
    assert (
        _in_a_process(
            """
        values = [torch.full((1 << 20,), float(i), device="cuda") for i in range(40)]
        assert [each[7].item() for each in values] == list(range(40))
        segments = torch.cuda.memory_snapshot()
        assert all(each["is_expandable"] for each in segments), segments
        del values[10:30]
        torch.cuda.empty_cache()
        values.append(torch.cat(values))
        assert values[-1][-1].item() == 39
        torch.cuda.synchronize()
        address = values[-1].data_ptr()
        values.clear()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        assert free == total, (free, total)
        assert simulated_gpu.violations() == []
        call = simulated_gpu._required().cudaMemsetAsync
        assert call(ctypes.c_void_p(address), 0, ctypes.c_size_t(8), None) == 1
        print(simulated_gpu.violations())
        """,
            PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        )
        == "['FREED: memset of device memory that is not allocated']"
    )


def test_a_failing_test_is_what_a_violation_makes_unless_it_is_expected(tmp_path: Path):
    (tmp_path / "test_it.py").write_text(
        textwrap.dedent("""
        import pytest, simulated_gpu, torch

        def race():
            values = torch.zeros(1000, device="cuda")
            with torch.cuda.stream(torch.cuda.Stream()):
                values + 1

        def test_found(): race()

        @pytest.mark.expects_violations("RACE")
        def test_expected(): race()

        @pytest.mark.expects_violations("FREED")
        def test_another_was_expected(): race()

        def test_right(): torch.zeros(1000, device="cuda")
        """)
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "simulated_gpu.plugin",
        "-p",
        "no:cacheprovider",
        "test_it.py",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=_environment(), capture_output=True, text=True, timeout=100
    )
    assert "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "RACE: aten::add.Tensor" in done.stdout


def _in_a_process(program: str, **environment: str) -> str:
    """What a program prints in a process of its own."""
    preamble = "import ctypes, torch, simulated_gpu\nsimulated_gpu.install()\n"
    command = [sys.executable, "-c", preamble + textwrap.dedent(program)]
    done = subprocess.run(
        command, env=_environment(**environment), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path} | more
