"""Optimizers whose ``state_dict`` is not torch's: other keys, other containers, copies."""

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from states import difference
from torch import nn
from torch.distributed.tensor import DTensor
from trainers import save

import sidesave
from sidesave.errors import StateMismatchError
from sidesave.stager import sharding


def wrapped(saved: dict[str, Any]) -> dict[str, Any]:
    """Give each state a container of its own."""
    return saved | {"state": {key: {"w": dict(state)} for key, state in saved["state"].items()}}


def unwrapped(saved: dict[str, Any]) -> dict[str, Any]:
    return saved | {"state": {key: state["w"] for key, state in saved["state"].items()}}


FORMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "copies": (copy.deepcopy, lambda saved: saved),
    "wrapped": (wrapped, unwrapped),
    "all in one": (lambda saved: {"inner": saved}, lambda saved: saved["inner"]),
    "groups, and states elsewhere": (
        lambda saved: {"param_groups": saved["param_groups"], "moments": saved["state"]},
        lambda saved: {"param_groups": saved["param_groups"], "state": saved["moments"]},
    ),
    "groups by name": (
        lambda saved: {"param_groups": {"all": saved["param_groups"]}, "state": saved["state"]},
        lambda saved: {"param_groups": saved["param_groups"]["all"], "state": saved["state"]},
    ),
    "no state": (
        lambda saved: {
            "param_groups": saved["param_groups"],
            "state": None,
            "moments": saved["state"],
        },
        lambda saved: {"param_groups": saved["param_groups"], "state": saved["moments"]},
    ),
    "states in a list": (
        lambda saved: saved | {"state": [[key, value] for key, value in saved["state"].items()]},
        lambda saved: saved | {"state": dict(saved["state"])},
    ),
}


def own(form: str) -> type[torch.optim.AdamW]:
    """Make an optimizer that saves in this form."""
    save, load = FORMS[form]

    class Own(torch.optim.AdamW):
        def state_dict(self) -> dict[str, Any]:
            return save(super().state_dict())

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(load(state_dict))

    return Own


def trained(
    form: str, dtype: torch.dtype, *, by_class: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer after a step, which saves in this form by its class or by hooks."""
    save, load = FORMS[form]

    model = nn.Linear(3, 3).to(dtype)
    optimizer = (own(form) if by_class else torch.optim.AdamW)(model.parameters())
    model(torch.ones(2, 3, dtype=dtype)).sum().backward()
    optimizer.step()
    if dtype is torch.bfloat16:
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].float() / 3
    if not by_class:
        optimizer.register_state_dict_post_hook(lambda _, saved: save(saved))
        optimizer.register_load_state_dict_pre_hook(lambda _, saved: load(saved))
    return model, optimizer


def state_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [dict(state) for state in optimizer.state.values()]


@pytest.mark.parametrize("form", FORMS)
def test_an_optimizer_gets_back_what_it_saved_in_a_form_of_its_own(form: str, tmp_path: Path):
    model, optimizer = trained(form, torch.float32, by_class=True)
    save(tmp_path / "run", {"model": model, "optimizer": optimizer})
    other, live = trained(form, torch.float32, by_class=True)
    sidesave.load(tmp_path / "run", into={"model": other, "optimizer": live})
    assert difference(state_of(optimizer), state_of(live)) == ""


def sharded(rank: int, folder: Path) -> None:
    """FSDP2 over two ranks, with each form; and checkpoints that do not say how they were
    divided.
    """
    from torch.distributed.fsdp import fully_shard

    def made(form: str, steps: int) -> dict[str, Any]:
        torch.manual_seed(0)
        fully_shard(model := nn.Linear(3, 4))
        optimizer = own(form)(model.parameters())
        for number in range(steps):
            model(torch.full((2, 3), float(number + 1))).sum().backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    def leaves(state: dict[str, Any]) -> list[Any]:
        return [
            {
                key: (one.placements, one.to_local()) if isinstance(one, DTensor) else one
                for key, one in each.items()
            }
            for each in state_of(state["optimizer"])
        ]

    with sidesave.Checkpointer(f"{folder}/run") as checkpointer:
        for number, form in enumerate(FORMS):
            state = made(form, 1)
            paths = [checkpointer.save(2 * number, state).committed.result(60).path]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sharding, "placements_of_states", lambda *_: {})
                paths.append(
                    checkpointer.save(2 * number + 1, made(form, 1)).committed.result(60).path
                )
            for path in paths:
                sidesave.load(path, into=(used := made(form, 2)))
                assert difference(leaves(state), leaves(used)) == "", form
            sidesave.load(paths[0], into=(fresh := made(form, 0)))
            assert difference(leaves(state), leaves(fresh)) == "", form
            fresh = made(form, 0)
            with contextlib.ExitStack() as refused:
                if form not in ("copies", "wrapped"):  # which say by number whose state it is
                    refused.enter_context(
                        pytest.raises(StateMismatchError, match="does not say how to divide it")
                    )
                sidesave.load(paths[1], into=fresh)
                assert difference(leaves(state), leaves(fresh)) == "", form


@pytest.mark.slow
def test_sharded_state_in_a_form_of_its_own_comes_back_sharded_or_is_refused(tmp_path: Path):
    forks.spawn_group(sharded, tmp_path)


def test_a_row_for_another_number_of_parameters_rows_is_refused(tmp_path: Path):
    class ByRow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["row"] = torch.ones(self.shape(parameter.shape[0]))

        shape: Callable[[int], tuple[int, ...]]

    for shape in (lambda count: (count,), lambda count: (count, 1)):
        ByRow.shape = staticmethod(shape)
        (one := ByRow([nn.Parameter(torch.ones(1, 3))])).step()
        (four := ByRow([nn.Parameter(torch.ones(4, 3))])).step()
        for number, (saved, target) in enumerate(((one, four), (four, one))):
            with sidesave.Checkpointer(tmp_path / f"run-{len(shape(1))}-{number}") as checkpointer:
                checkpointer.save(1, {"optimizer": saved}, blocking=True)
                with pytest.raises(StateMismatchError, match=r"state\.0\.row: shape"):
                    checkpointer.load(into={"optimizer": target})


@pytest.mark.parametrize(
    ("form", "by_class"), [("copies", True), ("wrapped", True), ("wrapped", False)]
)
def test_state_in_another_dtype_than_its_parameter_keeps_it(
    form: str, by_class: bool, tmp_path: Path
):
    model, optimizer = trained(form, torch.bfloat16, by_class=by_class)
    save(tmp_path / "run", {"model": model, "optimizer": optimizer})
    other, live = trained(form, torch.bfloat16, by_class=by_class)
    sidesave.load(tmp_path / "run", into={"model": other, "optimizer": live})
    assert [state["exp_avg"].dtype for state in state_of(live)] == [torch.float32] * 2
    assert difference(state_of(optimizer), state_of(live)) == ""


def test_ties_and_the_order_of_dimensions_are_the_same_at_each_save(tmp_path: Path):
    weight = torch.arange(12.0).reshape(3, 4).t()
    model = nn.Module()
    model.register_buffer("weight", weight)
    with sidesave.Checkpointer(tmp_path / "run") as checkpointer:
        for step in range(3):
            checkpointer.save(step, {"model": model, "average": {"weight": weight}}, blocking=True)
            found = sidesave.load(tmp_path / "run")
            assert found["model"]["weight"] is found["average"]["weight"], step
            assert found["model"]["weight"].stride() == (1, 4), step
            assert torch.equal(found["model"]["weight"], weight)


def test_a_complex_tensor_behind_eight_bytes_is_loaded(tmp_path: Path):
    """Torch copies complex128 by 16 bytes at a time, and a process that does so at other addresses
    dies.
    """
    state = {
        "first": torch.ones(1, dtype=torch.float64),
        "complex": torch.randn(7, 5, dtype=torch.complex128),
    }
    save(tmp_path / "run", {"a": state})
    fresh = sidesave.load(tmp_path / "run")["a"]
    assert torch.equal(fresh["complex"].clone(), state["complex"])
    live = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    sidesave.load(tmp_path / "run", into={"a": live})
    assert difference(state, live) == ""
