"""What the model of training on CUDA devices knows: states, clones of them, and saves that are made
to fail.
"""

import contextlib
import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gpu
import pytest
import torch
from hypothesis import settings
from hypothesis.errors import Flaky, FlakyStrategyDefinition
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test
from states import difference, like
from torch import nn

import sidesave
from sidesave import SaveHandle
from sidesave.errors import StagingError, TornSnapshotError
from sidesave.stager import ownership
from sidesave.stager.copy import device_copy, fingerprint

DEVICES = ["cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"]
WIDTH = 24  # a weight of 2,304 bytes


def raced(line: str) -> tuple[int, int]:
    """Address and length of the memory that a report of a race tells of."""
    found = re.search(r"0x([0-9a-f]+)\+(\d+)$", line)
    assert found, line
    return int(found[1], 16), int(found[2])


def snapshot(value: Any) -> Any:
    """Clones of all tensors, in stream order; what a checkpoint of the value must hold."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (nn.Module, torch.optim.Optimizer)):
        value = value.state_dict()
    if isinstance(value, dict):
        return like(value, ((key, snapshot(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return type(value)(snapshot(item) for item in value)
    return copy.deepcopy(value)


@dataclass
class Saved:
    """A save that was called, and what the model expects of it."""

    step: int
    handle: SaveHandle
    expected: dict[str, Any]
    may_be_torn: bool = False
    may_fail: bool = False


class Failure(Exception):
    """What a test has happen in the middle of a save."""


@dataclass
class Part:
    """A model on one device, and who trains it."""

    device: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step_graph: torch.cuda.CUDAGraph | None = None
    graphable: bool = False


def make_optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    match kind:
        case "fused":
            return torch.optim.AdamW(parameters, lr=0.01, fused=True)
        case "foreach":
            return torch.optim.AdamW(parameters, lr=0.01, foreach=True)
        case "capturable":
            return torch.optim.AdamW(parameters, lr=0.01, capturable=True, foreach=True)
        case _:
            return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def make_model(width: int = WIDTH) -> nn.Module:
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 7), nn.Linear(7, 3))
    model.register_buffer("seen", torch.zeros(5))
    return model


def gradients(part: Part) -> None:
    for parameter in part.model.parameters():
        assert parameter.grad is not None
        torch.add(parameter.grad, parameter.detach(), alpha=0.5, out=parameter.grad)


def make_part(device: str, kind: str) -> Part:
    model = make_model().to(device)
    part = Part(
        device, model, make_optimizer(kind, model.parameters()), graphable=kind == "capturable"
    )
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with torch.cuda.device(device):
        gradients(part)
        part.optimizer.step()
    return part


def special_tensors() -> dict[str, Any]:
    """All that is no optimizer's: of many kinds, strides and lengths, on both devices."""
    bytes_of = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 255, (8192,), dtype=torch.uint8, generator=bytes_of).to(DEVICES[0])
    return {
        "odd": raw[:1021].clone(),
        "float8": raw[:777].clone().view(torch.float8_e4m3fn),
        "half": torch.arange(333, dtype=torch.float16, device=DEVICES[0]),
        "conjugate": torch.randn(31, 5, dtype=torch.complex64, device=DEVICES[0]).conj(),
        "negated": torch._neg_view(torch.arange(45.0, device=DEVICES[0])),
        "transposed": torch.arange(35 * 64.0, device=DEVICES[0]).view(35, 64).t(),
        "scalar": torch.tensor(3.5, device=DEVICES[1]),
        "empty": torch.empty(0, 3, device=DEVICES[0]),
        "large": torch.arange(5000, device=DEVICES[0]),
        "elsewhere": torch.arange(900, dtype=torch.int16, device=DEVICES[1]),
        "many": [
            torch.full((1 + number % 13,), number, device=DEVICES[number % 2])
            for number in range(24)
        ],
        "on the host": torch.arange(200.0),
        "plain": {"epoch": 0},
    }


# The oracle ---------------------------------------------------------------------------------------


def assert_as_expected(saved: Saved) -> None:
    error = saved.handle.committed.exception(60)
    if error is None:
        wrong = difference(
            gpu.on_host(saved.expected), sidesave.load(saved.handle.committed.result())
        )
        assert not wrong, f"step {saved.step} is committed, with wrong bytes: {wrong}"
    elif not (saved.may_fail and isinstance(error, StagingError) and "Failure here" in str(error)):
        assert saved.may_be_torn and isinstance(error, TornSnapshotError), (
            f"step {saved.step}: {error!r}"
        )
        names = str(error).removeprefix("changed while being copied: ").split(". Wrap")[0]
        for name in re.split(", (?!whose)", names.split(" and ")[0]):
            assert name.startswith("model0"), str(error)


def is_race_on(line: str, ranges: list[tuple[int, int]]) -> bool:
    """Whether a violation is a race on one of these ranges of memory: addresses and lengths."""
    if not line.startswith("RACE"):
        return False
    address, nbytes = raced(line)
    return any(begin < address + nbytes and address < begin + size for begin, size in ranges)


def run_machine(machine: type[RuleBasedStateMachine], how: settings, *, may_vary: bool) -> None:
    """Run a state machine as a test.

    With ``may_vary`` hypothesis may find that a rule has drawn something else than before, as the
    device was at another point: then the example ends there. A check that fails is told, also where
    its example is another one when repeated.
    """
    test: Any = get_state_machine_test(machine, settings=how)
    run = test.hypothesis.inner_test
    failed: list[Exception] = []

    def run_until_it_varies(data: Any) -> None:
        try:
            run(data)
        except FlakyStrategyDefinition:
            data.conjecture_data.mark_overrun()
        except Exception as error:
            failed.append(error)
            raise

    if may_vary:
        test.hypothesis.inner_test = run_until_it_varies
    try:
        test()
    except Flaky:
        if failed:
            raise failed[0] from None
        raise


@contextlib.contextmanager
def failing(what: str, skip: int) -> Iterator[list[str]]:
    """One of the things that a save does fails, once, at a later time than the first if ``skip``
    says so.
    """
    holder, name = {
        "pack": (device_copy, "pack"),
        "copy": (device_copy._DevicePart, "copy_out"),
        "pending": (ownership, "add_pending"),
        "witness": (fingerprint, "_norms"),
    }[what]
    happened: list[str] = []
    left = 0 if what == "pending" else skip
    original = getattr(holder, name)

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == -1:
            if what == "pack":  # a kernel is on its way into the scratch
                original(*args, **kwargs)
            happened.append(what)
            raise Failure("Failure here")
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder, name, fails)
        yield happened
