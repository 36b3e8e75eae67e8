"""Scratch, pinned memory, devices and processes: who may write where, and what is left behind."""

import contextlib
import ctypes
import gc
import logging
import threading
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
    hold_compute_back,
    hold_copies_back,
    on_host,
    run_program,
    seen,
    trained,
    warm_up,
    warmed_up,
)
from machines import needs_two_cores, two_nodes
from states import difference, frozen, held
from torch import nn
from trainers import stopped, wait_until

import sidesave
from sidesave import Checkpointer, FailureOptions, StagingOptions
from sidesave.errors import TornSnapshotError
from sidesave.stager import ownership
from sidesave.stager.copy import fingerprint, pool
from sidesave.stager.copy.memcopy import MemoryCopier
from sidesave.stager.devices.kinds import pci_address
from sidesave.stager.memory import host_memory, numa

pytestmark = gpu.MARKS


# Scratch ------------------------------------------------------------------------------------------


class _Stop:
    """A place where a thread stops until it is told to go on."""

    def __init__(self) -> None:
        self._reached, self._go_on = threading.Event(), threading.Event()

    def stop(self) -> None:
        self._reached.set()
        self._go_on.wait(60)

    def wait(self) -> None:
        assert self._reached.wait(60)

    def go_on(self) -> None:
        self._go_on.set()


def _filled(step: int) -> dict[str, Any]:
    return {"buffer": torch.full((1000,), float(step))}


@pytest.mark.parametrize(
    "fails_in", [(MemoryCopier, "copy"), (ownership, "add_pending")], ids=["first half", "last"]
)
def test_a_save_that_fails_half_way_does_not_give_away_the_scratch_of_the_one_before(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch, fails_in: tuple[Any, str]
):
    """The copies of the one before are not enqueued yet: nothing but the host knows that they will
    read it.
    """
    state = {"buffer": torch.zeros(1000, device="cuda")}
    warm_up(checkpointer, state)
    whole = getattr(*fails_in)

    def fails(*args: object) -> None:
        raise MemoryError("no memory for the rest of it")

    with held(checkpointer) as go_on:
        state["buffer"].fill_(1)
        first = checkpointer.save(1, state)
        state["buffer"].fill_(2)
        monkeypatch.setattr(*fails_in, fails)
        second = Call(lambda: checkpointer.save(2, state))
        second.goes_as_far_as_it_gets()
        if second.is_alive():  # it waits, before it fails, until the scratch is free
            go_on.set()
        with pytest.raises(MemoryError, match="the rest of it"):
            second.result()
        monkeypatch.setattr(*fails_in, whole)
        state["buffer"].fill_(3)
        third = Call(lambda: checkpointer.save(3, state))
        third.goes_as_far_as_it_gets()
    assert_holds(first, _filled(1))
    assert_holds(third.result(), _filled(3))
    for step in range(4, 7):
        state["buffer"].fill_(step)
        assert_holds(checkpointer.save(step, state), _filled(step))


@pytest.mark.filterwarnings("ignore:the save of step 1 failed")
def test_a_torn_save_does_not_give_away_the_scratch_of_the_one_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The second one packs while the first is being found torn; of the two after it one may not
    pack over it.
    """
    weight = nn.Parameter(torch.zeros(MIB, device="cuda"))
    buffer = torch.zeros(1000, device="cuda")
    state = {"buffer": buffer}
    torn: dict[str, Any] = {
        "buffer": buffer,
        "weight": weight,
        "optimizer": torch.optim.SGD([weight], lr=0.1),
    }
    with contextlib.ExitStack() as stack:
        checkpointer = stack.enter_context(
            Checkpointer(
                tmp_path, staging=StagingOptions(slots=4), failures=FailureOptions(tolerated=5)
            )
        )
        warm_up(checkpointer, torn)
        finding = _Stop()
        stack.callback(finding.go_on)

        class SlowlyTorn(TornSnapshotError):
            def __init__(self, *args: object) -> None:
                finding.stop()
                super().__init__(*args)

        gpu.replace_everywhere(monkeypatch, "TornSnapshotError", SlowlyTorn)
        with held(checkpointer):
            first = checkpointer.save(1, torn)
            weight.untyped_storage().resize_(0)
        finding.wait()
        with held(checkpointer) as go_on:  # from the end of the first save on
            buffer.fill_(2)
            saving = Call(lambda: checkpointer.save(2, state))
            saving.goes_as_far_as_it_gets()
            finding.go_on()
            assert isinstance(first.staged.exception(60), TornSnapshotError)
            if (
                saving.is_alive()
            ):  # it waits for what the stager thread does after the end of the first save
                go_on.set()
            second = saving.result()
            buffer.fill_(3)
            third = Call(lambda: checkpointer.save(3, state))
            third.goes_as_far_as_it_gets()
            third.result()
            buffer.fill_(4)
            fourth = Call(lambda: checkpointer.save(4, state))
            # To the half that is free when the copies of the second are enqueued.
            fourth.goes_as_far_as_it_gets()
        assert_holds(second, _filled(2))
        assert_holds(third.result(), _filled(3))
        assert_holds(fourth.result(), _filled(4))


def test_without_device_memory_for_scratch_tensors_are_copied_directly(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    gpu.replace_everywhere(monkeypatch, "HALF_NBYTES", (1 << 45,))
    state = trained(torch.optim.AdamW, fused=True)
    state["buffer"] = torch.zeros(1000, device="cuda")
    state["transposed"] = torch.randn(300, 500, device="cuda").t()
    warm_up(checkpointer, state)
    for step in range(1, 4):
        expected = seen(state)
        with hold_compute_back():
            handle = checkpointer.save(step, state)
            state["optimizer"].step()
            state["buffer"].add_(1)
        assert_holds(handle, expected)
    assert len([record for record in caplog.records if "no device memory" in record.message]) == 1


def test_without_device_memory_for_a_fingerprint_the_compute_stream_waits_for_the_copies(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
):
    state = warmed_up(checkpointer, torch.optim.AdamW, fused=True)
    expected = seen(state)

    def no_memory(*_: object) -> None:
        monkeypatch.undo()
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(fingerprint, "_norms", no_memory)
    handle = checkpointer.save(1, state)
    for parameter in state["model"].parameters():
        parameter.data.zero_()  # nothing guards it: only the stream's order does
    assert_holds(handle, expected)


def test_without_device_memory_for_a_fingerprint_what_is_dropped_after_the_call_is_saved_as_it_was(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
):
    """Its memory may be used again on its own stream before the compute stream gets to the
    copies.
    """

    def state_of(value: float) -> dict[str, Any]:
        model = nn.ParameterList([torch.full((MIB,), value, device="cuda")])
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    other = torch.cuda.Stream()
    warm_up(checkpointer, state_of(0.0))  # no save has read the memory of the other one
    with torch.cuda.stream(other):
        state = state_of(1.0)
    other.synchronize()
    expected = seen(state)

    def no_memory(*_: object) -> None:
        monkeypatch.undo()
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(fingerprint, "_norms", no_memory)
    with hold_compute_back():
        handle = checkpointer.save(1, state)
        state.clear()
        gc.collect()
        with torch.cuda.stream(other):
            again = [torch.full((MIB,), 9.0, device="cuda") for _ in range(4)]
        other.synchronize()
    assert_holds(handle, expected)
    del again


def test_twenty_saves_take_no_more_device_memory_than_one_and_the_daemon_takes_none(
    checkpointer: Checkpointer,
):
    state = warmed_up(checkpointer, torch.optim.AdamW, fused=True)
    for step in range(1, 4):
        checkpointer.save(step, state).committed.result(60)
    torch.cuda.synchronize()
    gc.collect()
    allocated = gpu.allocated()
    for step in range(4, 24):
        backward(state["model"])
        state["optimizer"].step()
        checkpointer.save(step, state).committed.result(60)
    torch.cuda.synchronize()
    assert gpu.allocated() <= allocated
    daemon = Path(f"/proc/{checkpointer.daemon_pid}")
    assert "libcuda" not in (daemon / "maps").read_text()
    assert not [
        link for fd in (daemon / "fd").iterdir() if "nvidia" in (link := str(fd.readlink()))
    ]


# Pinned memory ------------------------------------------------------------------------------------


def test_closing_unregisters_the_memory_and_leaves_no_error_behind(tmp_path: Path):
    state = trained()
    for number in range(5):
        with Checkpointer(tmp_path / str(number)) as checkpointer:
            checkpointer.save(1, state)
            assert any(slot.pinned is not None for slot in checkpointer.session.pool._slots)
    torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").sum().item() == 3


def _last_error() -> int:
    """What the runtime has kept of the calling thread's last failure; it stays there."""
    paths = [
        line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()
    ]
    [library] = {path for path in paths if "/libcudart" in path}
    return int(ctypes.CDLL(library).cudaPeekAtLastError())


@needs_two_cores
def test_staging_memory_is_made_on_the_node_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    address = pci_address(torch.device("cuda:0"))
    assert address
    with Checkpointer(tmp_path / "run", staging=StagingOptions(slots=1)) as checkpointer:
        [slot] = checkpointer.session.pool._slots
        for node, width in ((1, 512), (0, 2048)):  # a larger one needs other memory
            monkeypatch.setattr(numa, "SYS", two_nodes(tmp_path / f"sys{node}", {address: node}))
            checkpointer.prepare({"model": gpu.network(width=width)}).result(100)
            assert slot.arena is not None and slot.arena.node == node


def test_memory_that_cannot_be_pinned_is_used_unpinned_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    state = trained(torch.optim.AdamW, fused=True)
    runtime: Any = torch.cuda.cudart()
    with Checkpointer(tmp_path, staging=StagingOptions(slots=1)) as checkpointer:
        # The same structure in host memory: an arena of the right size that is not pinned yet. With
        # its first page registered by somebody else it cannot be.
        checkpointer.save(0, on_host(frozen(state)), blocking=True)
        [slot] = checkpointer.session.pool._slots
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
            assert torch.ones(3, device="cuda").sum().item() == 3
            # Each thread has its own last error, which torch would raise from an unrelated call.
            assert checkpointer.session.books.call(_last_error) == _last_error() == 0
        finally:
            runtime.cudaHostUnregister(arena.address)


def test_memory_that_cannot_be_pinned_is_not_tried_again_at_every_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    attempts: list[int] = []

    class Refused:
        def __init__(self, device: torch.device, address: int, nbytes: int) -> None:
            attempts.append(nbytes)
            raise RuntimeError("the limit of locked memory")

    gpu.replace_everywhere(monkeypatch, "PinnedRange", Refused)
    state = trained(torch.optim.AdamW, fused=True)
    with (
        Checkpointer(tmp_path, staging=StagingOptions(slots=2)) as checkpointer,
        caplog.at_level(logging.WARNING),
    ):
        for step in range(6):
            assert_holds(checkpointer.save(step, state), seen(state))
    assert 1 <= len(attempts) <= 2, "once for each slot at most"
    assert len([record for record in caplog.records if "cannot be pinned" in record.message]) == 1


def test_another_slot_is_pinned_too_and_given_back_only_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    state = trained(torch.optim.AdamW, fused=True)
    expected = seen(state)
    with Checkpointer(tmp_path) as checkpointer:
        slots = checkpointer.session.pool._slots

        def pinned() -> int:
            return sum(slot.pinned is not None for slot in slots)

        checkpointer.save(0, state, blocking=True)
        assert pinned() == 1
        with stopped(checkpointer.daemon_pid or 0):
            handles = [checkpointer.save(step, state) for step in (1, 2)]
            assert pinned() == 2
        for handle in handles:
            assert_holds(handle, expected)
        checkpointer.session.pool._give_back(slots)
        assert pinned() == 2
        monkeypatch.setattr(pool, "_IDLE_SAVES", 1)
        monkeypatch.setattr(host_memory, "available_nbytes", lambda: 0)
        assert_holds(checkpointer.save(3, state, blocking=True), expected)
        wait_until(lambda: pinned() == 1, "a slot is given back")


# Devices ------------------------------------------------------------------------------------------


@gpu.needs_two_devices
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize(
    "devices", [["cuda:0"], ["cuda:1"], ["cuda:0", "cuda:1"]], ids=" and ".join
)
def test_tensors_of_several_devices_are_saved_and_the_current_one_stays(
    checkpointer: Checkpointer, devices: list[str], current: int
):
    with torch.cuda.device(current):
        parts = {
            device: trained(torch.optim.AdamW, device=device, fused=True) for device in devices
        }
        state = {
            f"{name} {device}": value
            for device, part in parts.items()
            for name, value in part.items()
        }
        checkpointer.prepare(state).result(60)
        assert torch.cuda.current_device() == current
        for step, blocking in enumerate([True, False, False, True]):
            expected = seen(state)
            with contextlib.nullcontext() if blocking else hold_copies_back(checkpointer):
                handle = checkpointer.save(step, state, blocking=blocking)
                assert torch.cuda.current_device() == current
                for device, part in parts.items():
                    with torch.cuda.device(device):
                        backward(part["model"])
                        part["optimizer"].step()
                assert torch.cuda.current_device() == current
                assert blocking or not handle.staged.done()
            assert_holds(handle, expected)
        checkpointer.close()
        assert torch.cuda.current_device() == current


@pytest.mark.any_schedule
@gpu.needs_two_devices
@pytest.mark.parametrize("blocking", [False, True])
def test_a_rank_on_one_device_opens_no_context_on_another(tmp_path: Path, blocking: bool):
    code = """
import gc, sys, threading, torch
import sidesave
blocking = sys.argv[2] == "True"

def call(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()

def save(step):
    checkpointer.save(step, state, blocking=blocking).committed.result(60)

torch.cuda.set_device(1)
state = gpu.trained(torch.optim.AdamW, device="cuda", fused=True)
torch.cuda.synchronize()
assert gpu.contexts() == {1}, gpu.contexts()
for close in ("here", "in a thread", "when collected", "at the end"):
    checkpointer = sidesave.Checkpointer(sys.argv[1])
    checkpointer.prepare(state).result(60)
    assert gpu.contexts() == {1}, "prepare"
    steps = len(checkpointer.steps())
    for step in range(steps, steps + 3):
        save(step)
        gpu.backward(state["model"])
        state["optimizer"].step()
        assert gpu.contexts() == {1}, "save"
    call(lambda: save(steps + 3))
    assert gpu.contexts() == {1}, "save in a thread"
    if close == "here":
        checkpointer.close()
    elif close == "in a thread":
        call(checkpointer.close)
    elif close == "when collected":
        checkpointer = None
        gc.collect()
    assert gpu.contexts() == {1}, f"close {close}"
print("saved")
"""
    assert run_program(code, tmp_path, blocking) == "saved\n"


@gpu.needs_two_devices
def test_memory_of_one_device_is_given_back_in_any_thread_without_a_context_on_another(
    tmp_path: Path,
):
    code = """
import threading, torch
from sidesave.stager.memory.arena import PAGE, Arena
from sidesave.stager.memory.pinning import PinnedRange
torch.ones(1, device="cuda:1")
assert gpu.contexts() == {1}, gpu.contexts()
arena = Arena.create(PAGE, 1 << 20)
pinned = PinnedRange(torch.device("cuda:1"), arena.address, arena.nbytes)
assert gpu.contexts() == {1}, "pinned"
closing = threading.Thread(target=pinned.close)
closing.start()
closing.join()
assert gpu.contexts() == {1}, "closed"
arena.close()
print("closed")
"""
    assert run_program(code) == "closed\n"


# Processes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_a_fork_under_a_pending_save_disturbs_nothing(tmp_path: Path, end: str):
    code = f"""
import os, sys, torch
import sidesave
os.environ["TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT"] = "0"  # else a child waits 10 s for threads that it has not
state = gpu.trained(torch.optim.AdamW, fused=True)
with sidesave.Checkpointer(sys.argv[1]) as checkpointer:
    gpu.warm_up(checkpointer, state)
    expected = gpu.seen(state)
    with gpu.hold_copies_back(checkpointer):
        handle = checkpointer.save(1, state)
        child = os.fork()
        if not child:
            try:
                checkpointer.save(2, state)
            except sidesave.errors.ClosedError:
                {end}
            os._exit(3)
        assert os.waitpid(child, 0)[1] == 0
        state["optimizer"].step()
        assert not handle.staged.done()
    gpu.assert_holds(handle, expected)
    gpu.assert_holds(checkpointer.save(2, state), gpu.seen(state))
print("saved")
"""  # noqa: E501
    assert run_program(code, tmp_path) == "saved\n"


@pytest.mark.parametrize("first", [True, False], ids=["first save", "later save"])
def test_an_interpreter_that_ends_with_a_save_pending_commits_it(tmp_path: Path, first: bool):
    code = """
import sys, threading, torch
import sidesave
state = gpu.trained(torch.optim.AdamW, fused=True)
checkpointer = sidesave.Checkpointer(sys.argv[1])
if sys.argv[2] != "True":
    gpu.warm_up(checkpointer, state)
torch.save(gpu.seen(state), sys.argv[3])
ending = threading.Event()
checkpointer.session.copier._starter.submit(lambda: ending.wait(60))  # nothing is enqueued before the end
handle = checkpointer.save(1, state)
assert not handle.staged.done()
threading._register_atexit(ending.set)
"""  # noqa: E501
    run_program(code, tmp_path / "run", first, tmp_path / "expected")
    expected = torch.load(tmp_path / "expected", weights_only=False)
    info = sidesave.latest(tmp_path / "run")
    assert info is not None
    assert info.step == 1
    assert difference(expected, sidesave.load(info)) == ""
