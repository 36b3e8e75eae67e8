"""Training on CUDA devices as a state machine: what a program may do around its saves, and what
must come of them.
"""

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, ClassVar, cast

import gates
import gpu
import pytest
import torch
from gpu_model import (
    DEVICES,
    WIDTH,
    Failure,
    Part,
    Saved,
    assert_as_expected,
    failing,
    gradients,
    is_race_on,
    make_part,
    snapshot,
    special_tensors,
)
from hypothesis import strategies as st
from hypothesis.errors import FlakyStrategyDefinition
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch import nn

import sidesave
from sidesave import Checkpointer, FailureOptions, StagingOptions
from sidesave.errors import UnsupportedValueError
from sidesave.stager import ownership, plan
from sidesave.stager.copy import device_copy, fingerprint, packing
from sidesave.stager.memory import pinning

SCHEDULES = ["early", "late", "random"]
# for the last there is no memory
HALVES = [(1024,), (1024, 4096, 16384), (512,), (1 << 20,), (1 << 50,)]


class Training(RuleBasedStateMachine):
    """One process that trains and saves; each run of it is an example."""

    root: ClassVar[Path]

    @initialize(
        overlap=st.sampled_from([None, None, None, True, False]),
        validate=st.booleans(),
        slots=st.integers(1, 3),
        halves=st.sampled_from(HALVES),
        chunk=st.sampled_from([1000, 4096, 1 << 20]),
        small=st.sampled_from([128, 2048]),
        piece=st.sampled_from([8192, 16384, 1 << 30]),
        kinds=st.tuples(
            *[st.sampled_from(["capturable", "capturable", "fused", "foreach", "sgd"])] * 2
        ),
    )
    def start(
        self,
        overlap: bool | None,
        validate: bool,
        slots: int,
        halves: tuple[int, ...],
        chunk: int,
        small: int,
        piece: int,
        kinds: tuple[str, str],
    ) -> None:
        self.stack = contextlib.ExitStack()
        self.patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        self.patch.setattr(packing, "HALF_NBYTES", halves)
        self.patch.setattr(device_copy, "CHUNK_NBYTES", chunk)
        self.patch.setattr(plan, "SMALL_NBYTES", small)
        self.patch.setattr(pinning, "PIECE_NBYTES", piece)
        self.patch.setattr(fingerprint, "SPAN_NBYTES", 512)
        self.patch.setattr(gates, "LIMIT_S", 30.0)
        self.norms = threading.Lock()
        take_after = fingerprint.DeviceFingerprint.take_after

        def take_after_alone(witnesses: fingerprint.DeviceFingerprint) -> None:
            with self.norms:
                take_after(witnesses)

        self.patch.setattr(fingerprint.DeviceFingerprint, "take_after", take_after_alone)
        self.simulator = gpu.simulator()
        self.set_schedule(None, 0)
        for device in DEVICES:  # an example may have been given up in the middle
            torch.cuda.synchronize(device)
        if self.simulator is not None:
            self.simulator.violations()
        self.folder = Path(tempfile.mkdtemp(dir=self.root))
        self.before = threading.active_count()
        self.allocated = [gpu.allocated(device) for device in DEVICES]
        self.checkpointer = Checkpointer(
            self.folder,
            staging=StagingOptions(overlap=overlap, validate=validate, slots=slots),
            failures=FailureOptions(tolerated=1000),
        )
        self.slots = slots
        self.saves: list[Saved] = []
        self.gates: list[gates.Gate] = []
        self.opened: list[gates.Gate] = []
        self.foreign: list[tuple[int, int]] = []  # memory that was written behind the guard's back
        self.forward: torch.cuda.CUDAGraph | None = None
        self.step = 0
        self.kills = 0
        torch.manual_seed(0)
        self.parts = [make_part(device, kind) for device, kind in zip(DEVICES, kinds, strict=True)]
        self.average = snapshot(self.parts[0].model)
        self.beside = nn.Linear(9, 9)
        self.beside_optimizer = torch.optim.SGD(self.beside.parameters(), lr=0.1, momentum=0.9)
        self.other = special_tensors()
        self.inputs = torch.ones(4, WIDTH, device=DEVICES[0])
        self.outputs = torch.zeros(4, 3, device=DEVICES[0])
        self.extra: dict[str, torch.Tensor] = {}
        self.stream = torch.cuda.Stream(DEVICES[0])
        self.alone = torch.zeros(900, dtype=torch.uint8, device=DEVICES[0])
        self.alone_stream = torch.cuda.Stream(DEVICES[0])
        self.alone_stream.wait_stream(torch.cuda.current_stream(DEVICES[0]))
        if len(halves) > 1:  # scratch grows, and what it was is free for others
            self.save_what_a_stream_has_for_itself()
            self.checkpointer.wait(60)
            [lane] = self.checkpointer.session.copier._lanes._lanes.values()
            self.gates.append(gates.Gate(cast("torch.cuda.Stream", lane.stream)))
            self.save_what_a_stream_has_for_itself()
            self.save_here()
            with torch.cuda.stream(self.alone_stream):
                for _ in range(4):
                    torch.empty(1000, dtype=torch.uint8, device=DEVICES[0]).fill_(0xEE)
        self.begun()

    def begun(self) -> None:
        """What else there is to be made ready."""

    def kept(self) -> int:
        return sum(
            max(0, gpu.allocated(device) - b)
            for device, b in zip(DEVICES, self.allocated, strict=True)
        )

    def set_schedule(self, name: str | None, number: int) -> None:
        """None is that of the environment."""
        if self.simulator is not None:
            told, _, seed = os.environ["SIMULATED_GPU"].partition(":")
            self.simulator.schedule(name or told, number or int(seed or 0))

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for number, part in enumerate(self.parts):
            state |= {f"model{number}": part.model, f"optimizer{number}": part.optimizer}
        state |= {"beside": self.beside, "beside optimizer": self.beside_optimizer}
        return state | {"other": self.other, "outputs": self.outputs, "extra": dict(self.extra)}

    # Saves ----------------------------------------------------------------------------------------

    def pending(self) -> list[Saved]:
        return [saved for saved in self.saves if not saved.handle.staged.done()]

    def busy(self) -> bool:
        return sum(not saved.handle.written.done() for saved in self.saves) >= self.slots

    def may_block(self) -> None:
        """What comes next may wait on the host for what is held."""
        while self.gates:
            self.open(self.gates.pop())

    def open(self, gate: gates.Gate) -> None:
        gate.open()
        self.opened.append(gate)

    def save_here(self, *, blocking: bool = False, may_be_torn: bool = False) -> None:
        if blocking or self.busy():
            self.may_block()
        state = self.state()
        expected = snapshot(state)
        self.step += 1
        handle = self.checkpointer.save(self.step, state, blocking=blocking)
        self.saves.append(Saved(self.step, handle, expected, may_be_torn))

    @rule()
    def save_what_a_stream_has_for_itself(self) -> None:
        """Nothing orders it with what is done on other streams."""
        if self.busy():
            self.may_block()
        self.step += 1
        with torch.cuda.stream(self.alone_stream):
            self.alone.add_(1)
            state = {"alone": self.alone}
            expected = snapshot(state)
            self.saves.append(Saved(self.step, self.checkpointer.save(self.step, state), expected))
            self.alone.add_(1)

    @rule(blocking=st.integers(0, 3))
    def save(self, blocking: int) -> None:
        self.save_here(blocking=not blocking)

    @rule()
    def save_in_a_thread(self) -> None:
        gpu.Call(self.save_here).result()

    @rule(then=st.booleans())
    def save_on_another_stream(self, then: bool) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(DEVICES[0]))
        with torch.cuda.stream(self.stream):
            self.save_here()
        if then:  # else only what the optimizers own changes before the next rule
            for part in self.parts:
                self.take_step(part)
        torch.cuda.current_stream(DEVICES[0]).wait_stream(self.stream)

    @rule(nbytes=st.sampled_from([64, 1021, 2304, 6000]), again=st.booleans())
    def save_what_another_stream_allocated_and_drop_it(self, nbytes: int, again: bool) -> None:
        current = torch.cuda.current_stream(DEVICES[0])
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            self.extra["transient"] = torch.full((nbytes,), 5, dtype=torch.uint8, device=DEVICES[0])
        current.wait_stream(self.stream)
        self.save_here()
        del self.extra["transient"]
        if again:
            with torch.cuda.stream(self.stream):
                torch.full((nbytes,), 99, dtype=torch.uint8, device=DEVICES[0])

    @rule()
    def prepare(self) -> None:
        self.may_block()
        self.checkpointer.prepare(self.state()).result(60)

    # Training -------------------------------------------------------------------------------------

    def take_step(self, part: Part) -> None:
        with torch.cuda.device(part.device):
            gradients(part)
            part.optimizer.step()
            part.model.get_buffer("seen").add_(1)

    @rule(which=st.sampled_from([[0], [1], [0, 1]]))
    def train(self, which: list[int]) -> None:
        for number in which:
            self.take_step(self.parts[number])
        for parameter in self.beside.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.beside_optimizer.step()

    @rule()
    def train_on_another_stream(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(DEVICES[0]))
        with torch.cuda.stream(self.stream):
            self.take_step(self.parts[0])
        torch.cuda.current_stream(DEVICES[0]).wait_stream(self.stream)

    @rule(which=st.integers(0, 1))
    def update_by_hand(self, which: int) -> None:
        with self.checkpointer.guard():
            for parameter in self.parts[which].model.parameters():
                parameter.data.mul_(0.5)

    @rule(
        names=st.lists(
            st.sampled_from(["odd", "float8", "half", "conjugate", "large", "elsewhere", "many"])
        )
    )
    def change_what_nobody_owns(self, names: list[str]) -> None:
        for name in names:
            tensors = self.other[name] if name == "many" else [self.other[name]]
            for tensor in tensors:
                tensor.view(torch.uint8).bitwise_not_() if name == "float8" else tensor.add_(1)
        self.other["plain"]["epoch"] += 1
        self.other["on the host"].add_(1)
        self.inputs.add_(1)

    @rule(fresh=st.booleans())
    def give_a_parameter_new_memory(self, fresh: bool) -> None:
        self.parts[0].step_graph = self.forward = None  # they write to the memory that it had
        for parameter in self.parts[0].model.parameters():
            parameter.data = torch.rand_like(parameter) if fresh else parameter.data.clone()
        self.overwrite_freed_memory(2304)

    @rule(guarded=st.booleans())
    def free_memory_and_take_it_again(self, guarded: bool) -> None:
        """As FSDP does; of what an optimizer owns only under the guard."""
        self.parts[0].step_graph = self.forward = None
        tensor = self.parts[0].model.get_parameter("0.weight") if guarded else self.other["large"]
        kept = tensor.detach().clone()
        nbytes = tensor.untyped_storage().nbytes()
        with self.checkpointer.guard() if guarded else contextlib.nullcontext():
            tensor.untyped_storage().resize_(0)
            self.overwrite_freed_memory(nbytes)
            tensor.untyped_storage().resize_(nbytes)
            tensor.data.copy_(kept)

    @rule(back=st.booleans())
    def free_memory_behind_the_guards_back(self, back: bool) -> None:
        """What is under way may be torn by it; what has not been enqueued yet must not read where
        nothing is.

        Not in the microseconds between a look at the memory and the launch of its norm: nothing can
        help there.
        """
        self.parts[0].step_graph = self.forward = None
        weight = self.parts[0].model.get_parameter("0.weight")
        kept, nbytes = weight.detach().clone(), weight.untyped_storage().nbytes()
        if not self.norms.acquire(timeout=1.0):  # the launch waits for what is held
            return
        self.write_behind_the_guards_back()
        try:
            weight.untyped_storage().resize_(0)
            if not back:
                self.overwrite_freed_memory(nbytes)
            weight.untyped_storage().resize_(nbytes)
            weight.data.copy_(kept)
        finally:
            self.norms.release()
        self.write_behind_the_guards_back()

    def write_behind_the_guards_back(self) -> None:
        for saved in self.pending():
            saved.may_be_torn = True
        for parameter in self.parts[0].model.parameters():
            self.foreign.append((parameter.data_ptr(), parameter.nbytes))

    @rule(nbytes=st.sampled_from([512, 2304, 4096, 40000]))
    def overwrite_freed_memory(self, nbytes: int) -> None:
        for device in DEVICES:
            for _ in range(3):
                torch.empty(nbytes, dtype=torch.uint8, device=device).fill_(0xEE)

    @rule(count=st.integers(0, 40))
    def change_the_structure(self, count: int) -> None:
        """Each has a plan of its own, and some need larger memory."""
        self.extra = {
            f"extra {n}": torch.full((7 * n,), float(n), device=DEVICES[n % 2])
            for n in range(count)
        }

    # Weights that are swapped ---------------------------------------------------------------------

    def swap(self, new: dict[str, Any]) -> None:
        for name, parameter in self.parts[0].model.named_parameters():
            parameter.data.copy_(new[name])

    @rule(guard=st.sampled_from(["around all", "around each"]))
    def save_the_average_under_the_guard(self, guard: str) -> None:
        each = self.checkpointer.guard if guard == "around each" else contextlib.nullcontext
        before = snapshot(self.parts[0].model)
        with self.checkpointer.guard() if guard == "around all" else contextlib.nullcontext():
            with each():
                self.swap(self.average)
            self.save_here()
            with each():
                self.swap(before)

    @rule(again=st.booleans())
    def save_the_average_behind_the_guards_back(self, again: bool) -> None:
        before = snapshot(self.parts[0].model)
        self.write_behind_the_guards_back()
        self.swap(self.average)
        self.save_here(may_be_torn=True)
        self.swap(before)
        if again:
            self.swap(self.average)
            self.swap(before)

    # Time and the world ---------------------------------------------------------------------------

    @rule(name=st.sampled_from(SCHEDULES), number=st.integers(1, 99))
    def change_the_schedule(self, name: str, number: int) -> None:
        self.set_schedule(name, number)

    @rule(which=st.sampled_from(["side 0", "side 1", "compute", "another"]))
    def hold(self, which: str) -> None:
        lanes = list(self.checkpointer.session.copier._lanes._lanes.values())
        # looking for scratch where there is no memory waits for the device
        if len(lanes) < len({*DEVICES}):
            return
        if which.startswith("side"):
            for lane in lanes[int(which[-1]) :][:1]:
                self.gates.append(gates.Gate(cast("torch.cuda.Stream", lane.stream)))
        else:
            self.gates.append(
                gates.Gate(
                    self.stream if which == "another" else torch.cuda.current_stream(DEVICES[0])
                )
            )

    # No preconditions: what depends on other threads would have hypothesis draw other rules when it
    # tries again.

    @rule(which=st.integers(0, 9))
    def release_one(self, which: int) -> None:
        if self.gates:
            self.open(self.gates.pop(which % len(self.gates)))

    @rule(device=st.sampled_from(DEVICES))
    def wait_for_the_device(self, device: str) -> None:
        self.may_block()
        torch.cuda.synchronize(device)

    @rule()
    def wait_for_saves(self) -> None:
        self.may_block()
        self.checkpointer.wait(60)

    @rule()
    def kill_the_daemon(self) -> None:
        pid = self.checkpointer.daemon_pid
        if pid is not None and self.kills < 1:
            self.kills += 1
            os.kill(pid, signal.SIGKILL)

    # Saves that fail ------------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(["value", "pack", "copy", "pending", "witness"]),
        skip=st.integers(0, 3),
        then=st.sampled_from([None, 0, 40]),
    )
    def save_that_fails(self, what: str, skip: int, then: int | None) -> None:
        state = self.state()
        if what == "value":
            with pytest.raises(UnsupportedValueError):
                self.checkpointer.save(self.step + 1, state | {"unsupported": object()})
            return
        # one that has begun to copy waits for what it has begun, and for what was before it
        self.may_block()
        expected = snapshot(state)
        self.step += 1
        handle = None
        before = self.pending()
        with failing(what, skip) as happened:
            with contextlib.suppress(Failure):
                handle = self.checkpointer.save(self.step, state)
            if handle is not None:
                self.may_block()
                handle.staged.exception(60)
        if handle is not None:
            self.saves.append(Saved(self.step, handle, expected))
        # it may have been the turn of an earlier one
        for saved in [*before, *self.saves[-1:]] if happened else []:
            saved.may_fail = True
        if then is not None:
            self.change_the_structure(then)
            self.save_here()

    # The end --------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "stack"):
            return
        failing = not isinstance(sys.exc_info()[1], (type(None), FlakyStrategyDefinition))
        with self.stack:
            self.stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.stack.callback(self.set_schedule, None, 0)
            self.stack.callback(self.may_block)
            try:
                if not failing:
                    self.end()
            finally:
                self.may_block()
                with contextlib.suppress(sidesave.SidesaveError):
                    self.checkpointer.close(60)
            if not failing:
                self.check_what_is_left()

    def end(self) -> None:
        self.may_block()
        self.train([0, 1])
        self.save_here()  # whatever has happened
        self.checkpointer.wait(60)
        for device in DEVICES:
            torch.cuda.synchronize(device)
        for saved in self.saves:
            assert_as_expected(saved)
        assert not self.saves[-1].handle.committed.exception()
        assert not any(gate.gave_up for gate in self.opened), (
            "something waited on the host for what was held"
        )
        self.check_violations()

    def check_violations(self) -> None:
        if self.simulator is not None:
            found = self.simulator.violations()
            wrong = [line for line in found if not is_race_on(line, self.foreign)]
            assert not wrong, f"{len(wrong)} of {len(found)} violations:\n" + "\n".join(wrong[:8])

    def check_what_is_left(self) -> None:
        assert not ownership._pending
        names = [
            thread.name for thread in threading.enumerate() if thread.name.startswith("sidesave")
        ]
        assert not names, names
        files = [os.path.realpath(fd) for fd in Path("/proc/self/fd").glob("*")]
        assert not [file for file in files if "memfd:sidesave" in file]
        for name in (
            "parts",
            "saves",
            "average",
            "other",
            "inputs",
            "outputs",
            "extra",
            "forward",
            "alone",
        ):
            delattr(self, name)
        del self.checkpointer
        if self.kept():
            gc.collect()
            for device in DEVICES:
                torch.cuda.synchronize(device)
            assert not self.kept(), f"{self.kept()} bytes of device memory are still held"
