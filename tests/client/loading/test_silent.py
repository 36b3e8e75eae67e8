"""Nothing wrong is saved or restored without a word: what is dropped, cast or matched by position
is told.
"""

import collections
import enum
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import campaigns
import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file
from states import difference, noise
from torch import nn
from trainers import save

import sidesave
from sidesave import Checkpointer
from sidesave.client.training.rng_state import RandomState
from sidesave.errors import IntegrityError, InvalidArgumentError, StateMismatchError

ONE_TENSOR = r"model\.0\.weight and model\.1\.weight are one tensor in the target"


def linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


# Tensors ------------------------------------------------------------------------------------------


def test_a_fresh_load_keeps_the_order_of_dimensions_in_memory(tmp_path: Path):
    def last(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        memory_format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        return noise(torch.int64, *shape).to(dtype).contiguous(memory_format=memory_format)

    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    images = {
        "plain": last(2, 3, 4, 5),
        "volume": last(2, 3, 4, 5, 6),
        "carried": last(2, 3, 4, 5, dtype=torch.float8_e4m3fnuz),
        "complex": last(2, 3, 4, 5, dtype=torch.complex128),
        "bool": last(2, 3, 4, 5, dtype=torch.uint8).view(torch.bool),
        "usual": noise(torch.float32, 2, 3, 4, 5),
        "no name for it": noise(torch.float32, 2, 3, 4, 5).transpose(0, 3),
        "complex matrix": noise(torch.complex64, 3, 4).t(),
        "not packed": noise(torch.float32, 2, 6)[:, ::2],
    }
    path = save(tmp_path, {"images": images, "model": model, "optimizer": optimizer})
    fresh = sidesave.load(path)
    assert difference(images, fresh["images"]) == ""
    strides = {name: fresh["images"][name].stride() for name in images}
    assert strides.pop("not packed") == (3, 1)
    assert strides == {name: images[name].stride() for name in strides}
    live = torch.optim.Adam(model.parameters())
    sidesave.load(path, into={"model": model, "optimizer": live})
    assert (
        live.state[model.weight]["exp_avg"].stride()
        == optimizer.state[model.weight]["exp_avg"].stride()
    )
    files = {
        key: value
        for each in Path(path).glob("*.safetensors")
        for key, value in load_file(each).items()
    }
    assert difference(images["plain"], files["images.plain"]) == "", (
        "stock readers get the same values"
    )
    in_place = {name: torch.zeros_like(image) for name, image in images.items()}
    sidesave.load(path, into={"images": in_place})
    assert difference(images, in_place) == ""


def test_the_bytes_of_bool_tensors_are_kept_whatever_they_are(tmp_path: Path):
    odd = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    model = nn.Module()
    model.register_buffer("mask", odd.clone().view(torch.bool))
    state = {
        "mask": odd.view(torch.bool),
        "turned": odd.view(torch.bool).transpose(0, 2),
        "model": model,
    }
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    optimizer.state[optimizer.param_groups[0]["params"][0]]["seen"] = odd.view(torch.bool)
    with Checkpointer(tmp_path / "run") as checkpointer:
        path = (
            checkpointer.save(1, state | {"optimizer": optimizer}, blocking=True)
            .committed.result()
            .path
        )
        second = checkpointer.save(
            2, state | {"frozen": sidesave.Frozen(state["turned"])}, blocking=True
        )
    live = nn.Module()
    live.register_buffer("mask", torch.zeros(2, 3, 4, dtype=torch.bool))
    target = {
        "mask": torch.zeros(2, 3, 4, dtype=torch.bool),
        "turned": torch.zeros(4, 3, 2, dtype=torch.bool),
    }
    sidesave.load(path, into=target | {"model": live}, exclude="optimizer")
    fresh, again = sidesave.load(path), sidesave.load(second.committed.result().path)
    every = [target["mask"], live.get_buffer("mask"), fresh["mask"], fresh["model"]["mask"]]
    every += [fresh["optimizer"]["state"][0]["seen"], again["mask"]]
    assert all(torch.equal(each.view(torch.uint8), odd) for each in every)
    for each in (target["turned"], fresh["turned"], again["frozen"]):
        assert torch.equal(each.view(torch.uint8), odd.transpose(0, 2))
    sidesave.export(path, tmp_path / "export", item="model")
    exported = load_file(tmp_path / "export" / "model.safetensors")["mask"]
    assert torch.equal(exported.view(torch.uint8), odd)


# Modules ------------------------------------------------------------------------------------------


class Versioned(nn.Module):
    """Its weights were transposed when version 2 came."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0).reshape(2, 2))

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        if local_metadata.get("version") is None or local_metadata["version"] < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].T.clone()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def versioned() -> Any:
    return nn.Sequential(nn.ReLU(), nn.Sequential(Versioned()))


def test_a_module_is_told_the_version_of_its_own_state(tmp_path: Path):
    path = save(tmp_path, {"model": versioned()})
    expected = versioned().state_dict()
    live = versioned()
    sidesave.load(path, into={"model": live})
    assert difference(expected, live.state_dict()) == ""
    live.load_state_dict(sidesave.load(path)["model"])
    assert difference(expected, live.state_dict()) == ""
    live.load_state_dict(sidesave.load(path, include="model.1")["model"])
    assert difference(expected, live.state_dict()) == ""
    sidesave.load_sources([sidesave.Source(path), sidesave.Source(path)], into={"model": live})
    assert difference(expected, live.state_dict()) == ""


def test_a_renamed_module_is_told_the_version_of_its_state(tmp_path: Path):
    path = save(tmp_path, {"model": nn.ModuleDict({"module": versioned()})})
    targets: list[Any] = [{"model": versioned()}, {"net": {"inner": versioned()}}]
    for target in targets:
        sidesave.load(
            path,
            into=target,
            rename={"model.module": "model" if "model" in target else "net.inner"},
        )
        live = target["model"] if "model" in target else target["net"]["inner"]
        assert difference(versioned().state_dict(), live.state_dict()) == ""
    wrapped: Any = nn.ModuleDict({"module": versioned()})
    plain = save(tmp_path / "plain", {"model": versioned()})
    sidesave.load(plain, into={"model": wrapped}, rename={"model": "model.module"})
    assert difference(versioned().state_dict(), wrapped["module"].state_dict()) == ""


def test_an_old_state_is_migrated(tmp_path: Path):
    old = versioned()
    old[1][0]._version = 1
    live = versioned()
    sidesave.load(save(tmp_path, {"model": old}), into={"model": live})
    assert torch.equal(live[1][0].weight, old[1][0].weight.T)


def test_two_values_for_one_live_tensor_are_refused_and_equal_ones_taken(tmp_path: Path):
    untied: Any = nn.ModuleList([linear(1), linear(2)])
    path = save(tmp_path, {"model": untied})
    tied: Any = nn.ModuleList([linear(3), linear(3)])
    tied[1].weight = tied[0].weight
    before = tied[0].weight.clone()
    for strict in (True, False):
        with pytest.raises(StateMismatchError, match=ONE_TENSOR):
            sidesave.load(path, into={"model": tied}, strict=strict)
        with pytest.raises(StateMismatchError, match=ONE_TENSOR):
            sidesave.load_sources([sidesave.Source(path)], into={"model": tied}, strict=strict)
    assert torch.equal(tied[0].weight, before)
    sidesave.load(path, into={"model": tied}, exclude="model.1.weight")
    assert torch.equal(tied[0].weight, untied[0].weight)
    equal = save(tmp_path / "equal", {"model": nn.ModuleList([linear(1), linear(1)])})
    sidesave.load(equal, into={"model": tied})


def with_view(view: Any) -> dict[str, torch.Tensor]:
    """A tensor, and what ``view`` makes of it."""
    tensor = torch.randn(3, 3, dtype=torch.complex64)
    return {"a": tensor, "b": view(tensor)}


def with_weight(tie: Any) -> nn.ModuleDict:
    module = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    tie(module["a"], module["b"])
    return module


SHARED: dict[str, Any] = {
    "data": lambda: with_weight(lambda a, b: setattr(b.weight, "data", a.weight.data)),
    "a parameter of it": lambda: with_weight(
        lambda a, b: setattr(b, "weight", nn.Parameter(a.weight.detach()))
    ),
    "transposed": lambda: with_weight(lambda a, b: setattr(b.weight, "data", a.weight.data.t())),
    "views of a leaf": lambda: with_weight(lambda a, b: a.register_buffer("rows", b.weight[1:])),
    "slices": lambda: with_view(lambda tensor: tensor[1:]),
    "columns": lambda: with_view(lambda tensor: tensor[:, 1:]),
    "other dtype": lambda: with_view(lambda tensor: tensor.view(torch.float32)[:, :3]),
    "conjugated": lambda: with_view(lambda tensor: tensor.conj()),
    "negated": lambda: with_view(lambda tensor: tensor.conj().imag),
    "sparse": lambda: dict.fromkeys("ab", (torch.randn(3, 3) * torch.eye(3)).to_sparse()),
    "flat": lambda: (lambda flat: {"a": flat, "b": flat[:4].view(2, 2), "c": flat[4:]})(
        torch.randn(9)
    ),
    "itself": lambda: {"a": torch.randn(9).unfold(0, 3, 1), "b": torch.randn(2)},
}


def tensors_of(state: Any) -> dict[str, torch.Tensor]:
    return state.state_dict() if isinstance(state, nn.Module) else state


@pytest.mark.parametrize("name", SHARED)
def test_targets_that_share_memory_take_what_it_can_hold_and_nothing_else(
    tmp_path: Path, name: str
):
    make = SHARED[name]
    torch.manual_seed(1)
    fits, target = make(), make()
    odd = {
        key: torch.randn_like(value.clone().to_dense()) for key, value in tensors_of(make()).items()
    }
    odd = {key: value.to_sparse() if name == "sparse" else value for key, value in odd.items()}
    fitting, not_fitting = save(tmp_path / "fits", {"x": fits}), save(tmp_path / "odd", {"x": odd})
    sidesave.load(fitting, into={"x": target})
    held = {key: value.clone() for key, value in tensors_of(target).items()}
    assert difference({key: value.clone() for key, value in tensors_of(fits).items()}, held) == ""
    with pytest.raises(StateMismatchError, match=r"x\.[ab].*(x\.[ab]|itself)"):
        sidesave.load(not_fitting, into={"x": target})
    assert difference(held, {key: value.clone() for key, value in tensors_of(target).items()}) == ""


def test_targets_next_to_each_other_in_memory_take_any_values(tmp_path: Path):
    saved = {
        "left": torch.randn(3, 2),
        "right": torch.randn(3, 2),
        "odd": torch.randn(3),
        "even": torch.randn(3),
    }
    path = save(tmp_path, {"x": saved})
    wide, row = torch.zeros(3, 4), torch.zeros(6)
    target = {"left": wide[:, :2], "right": wide[:, 2:], "odd": row[1::2], "even": row[::2]}
    sidesave.load(path, into={"x": target})
    assert difference(saved, {key: value.clone() for key, value in target.items()}) == ""


def test_a_lazy_module_is_not_cast_in_silence(tmp_path: Path):
    path = save(tmp_path, {"model": nn.Linear(3, 2).double()})
    with pytest.raises(
        StateMismatchError, match=r"model\.weight: torch\.float64 in the checkpoint, torch\.float32"
    ):
        sidesave.load(path, into={"model": nn.LazyLinear(2)})


# Containers of live objects -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model, tensor: collections.OrderedDict(model=model, tensor=tensor),
        lambda model, tensor: collections.defaultdict(list, model=model, tensor=tensor),
        lambda model, tensor: collections.deque([model, tensor]),
        lambda model, tensor: collections.deque([model, tensor], maxlen=2),
        lambda model, tensor: (model, (tensor, "same")),
    ],
)
def test_live_objects_are_filled_in_containers_of_every_kind(tmp_path: Path, wrap: Any):
    path = save(tmp_path, {"x": wrap(linear(1), torch.ones(3))})
    model, tensor = linear(2), torch.zeros(3)
    target = {"x": wrap(model, tensor)}
    sidesave.load(path, into=target)
    assert difference(linear(1).state_dict(), model.state_dict()) == ""
    assert torch.equal(tensor, torch.ones(3))
    assert type(target["x"]) is type(wrap(model, tensor))


def test_plain_values_beside_live_objects_in_a_tuple_are_replaced(tmp_path: Path):
    path = save(
        tmp_path,
        {
            "x": ((torch.ones(1), 7), [torch.ones(1), "new"]),
            "y": sidesave.PerRank((torch.ones(1), 9)),
        },
    )
    tensors = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    target: Any = {
        "x": ((tensors[0], 0), [tensors[1], "old"]),
        "y": sidesave.PerRank((tensors[2], 0)),
    }
    sidesave.load(path, into=target)
    assert target["x"][0][1] == 7
    assert target["x"][1][1] == "new"
    assert target["y"].value[1] == 9
    assert target["x"][0][0] is tensors[0]
    assert all(bool(tensor) for tensor in tensors)


class Bag(dict[str, Any]):
    """A dict of the user's own."""


class Pair(NamedTuple):
    model: nn.Linear
    step: int


@pytest.mark.parametrize("make", [lambda model: Bag(model=model), lambda model: Pair(model, 3)])
def test_a_container_that_cannot_be_filled_is_refused(tmp_path: Path, make: Any):
    path = save(tmp_path, {"x": {"model": linear(1)}})
    with pytest.raises(StateMismatchError, match=r"x: a (Bag|Pair) is not filled"):
        sidesave.load(path, into={"x": make(linear(2))})


def test_a_container_that_was_pickled_is_replaced_unless_there_are_live_objects_in_it(
    tmp_path: Path,
):
    with Checkpointer(tmp_path, allow_pickle=True) as checkpointer:
        checkpointer.save(1, {"x": Bag(rate=1)})
        checkpointer.wait()
        target: dict[str, Any] = {"x": Bag(rate=2)}
        assert checkpointer.load(into=target)["x"] == Bag(rate=1)
        with pytest.raises(StateMismatchError, match="x: a Bag is not filled"):
            checkpointer.load(into={"x": Bag(model=linear(1))})


class Phase(enum.Enum):
    WARM = "warm"
    MAIN = "main"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Options(enum.Flag):
    A = 1
    B = 2


def test_members_of_enums_come_back_where_the_target_holds_some_of_their_class(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    saved: dict[str, Any] = {
        "plan": [Phase.MAIN, Phase.WARM, {"at": Phase.MAIN}],
        "level": Level.HIGH,
        "both": Options.A | Options.B,
        "object": sidesave.PerRank({"w": torch.ones(1), "phase": Phase.MAIN}),
    }
    path = save(tmp_path, saved)
    target: dict[str, Any] = {
        "plan": [Phase.WARM],
        "level": Level.LOW,
        "both": Options.A,
        "object": {"w": torch.zeros(1), "phase": Phase.WARM},
    }
    sidesave.load(path, into=target)
    assert difference({**saved, "object": saved["object"].value}, target) == ""
    assert not caplog.records
    fresh = sidesave.load(path)
    assert fresh["plan"] == ["main", "warm", {"at": "main"}] and type(fresh["level"]) is int
    assert f"plan.0 was {__name__}:Phase.MAIN" in caplog.text
    assert sidesave.load(path, into={"plan": []})["plan"] == ["main", "warm", {"at": "main"}]


def test_a_member_whose_value_has_changed_is_known_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = save(tmp_path, {"phase": Phase.MAIN})
    changed: Any = enum.Enum("Phase", {"WARM": 1, "MAIN": 2}, module=__name__, qualname="Phase")
    assert sidesave.load(path, into={"phase": changed.WARM})["phase"] is changed.MAIN


def test_an_enum_comes_back_where_one_is_and_the_log_says_which_keys_are_saved_by_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = save(tmp_path, {"phase": Phase.MAIN, "other": 3, "keys": {Phase.MAIN: 1}})
    assert "keys: <Phase.MAIN: 'main'> is saved as 'main'" in caplog.text
    target: dict[str, Any] = {"phase": Phase.WARM}
    sidesave.load(path, into=target)
    assert target["phase"] is Phase.MAIN
    with pytest.raises(
        StateMismatchError, match="other: the checkpoint holds 3, which is no Phase"
    ):
        sidesave.load(path, into={"other": Phase.WARM})


def test_an_array_is_not_taken_for_a_tensor(tmp_path: Path):
    path = save(tmp_path, {"x": np.ones(2, "f4"), "y": torch.ones(2)})
    target = {"x": torch.zeros(2), "y": torch.zeros(2)}
    with pytest.raises(
        StateMismatchError, match="x: the checkpoint holds a NumPy array, the target is a tensor"
    ):
        sidesave.load(path, into=target)
    assert not target["y"].any()


def test_items_of_a_list_do_not_move_up(tmp_path: Path):
    path = save(tmp_path, {"x": [1, 2, 3]})
    target = {"x": [7, 8, 9]}
    with pytest.raises(
        StateMismatchError, match="x: of a list in into= no single item can be left out"
    ):
        sidesave.load(path, into=target, exclude="x.0")
    assert target == {"x": [7, 8, 9]}


# Optimizers ---------------------------------------------------------------------------------------


def named(order: str) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    model = nn.ModuleDict({name: linear(1) for name in order})
    optimizer = torch.optim.Adam(model.named_parameters())
    torch.stack(
        [(at + 1) * model[name](torch.ones(3)).sum() for at, name in enumerate(sorted(order))]
    ).sum().backward()
    optimizer.step()
    return model, optimizer


def test_states_of_named_parameters_go_to_no_other(tmp_path: Path):
    path = save(tmp_path, {"optimizer": named("ab")[1]})
    sidesave.load(path, into={"optimizer": named("ab")[1]})
    renamed = named("cd")[1]
    before = renamed.state_dict()
    with pytest.raises(
        StateMismatchError, match=r"optimizer.param_groups.0: .*a.weight where c.weight is here"
    ):
        sidesave.load(path, into={"optimizer": renamed})
    assert difference(before, renamed.state_dict()) == ""
    sidesave.load(path, into={"optimizer": renamed}, exclude="optimizer.param_groups.0.param_names")
    assert renamed.param_groups[0]["param_names"][0] == "c.weight"


class Precise(torch.optim.Optimizer):
    """Keeps its state in float32, whatever its parameters are in."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["mean"] = torch.full(parameter.shape, 1.0001)


def test_states_that_torch_casts_come_back_as_they_were_saved(tmp_path: Path):
    optimizer = Precise([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))])
    optimizer.step()
    path = save(tmp_path, {"optimizer": optimizer})
    for dtype in (torch.bfloat16, torch.float32):
        other = Precise([nn.Parameter(torch.ones(2, dtype=dtype))])
        sidesave.load(path, into={"optimizer": other})
        assert difference(optimizer.state_dict(), other.state_dict()) == ""


class Factored(torch.optim.Optimizer):
    """It keeps float32 factors, int64 codes and text in containers of its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        third, codes = torch.full((2, 2), 1 / 3), torch.tensor([2**24 + 1, 300])
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {
                "factors": [third.clone(), (third * 2, {"q": third * 3, "step": torch.tensor(7)})],
                "codes": collections.OrderedDict(codes=codes, nan=torch.tensor([float("nan")])),
                "recent": collections.deque([third * 4], maxlen=3),
                "kind": "factored",
            }


class WithItsOwnLoad(Factored):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({**state_dict, "state": {**state_dict["state"]}})


class WithAHook(Factored):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.register_load_state_dict_pre_hook(lambda optimizer, state: state)


def kinds_of(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: kinds_of(value) for key, value in state.items()}
    return (
        [kinds_of(value) for value in state]
        if isinstance(state, (list, tuple, collections.deque))
        else type(state)
    )


@pytest.mark.parametrize("kind", [Factored, WithItsOwnLoad, WithAHook])
def test_nested_state_of_an_optimizer_comes_back_as_it_was_saved(tmp_path: Path, kind: Any):
    optimizer = kind([nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))])
    optimizer.step()
    if kind is not Factored:  # torch's own load_state_dict takes neither text nor a deque
        for state in optimizer.state.values():
            del state["kind"], state["recent"]
    path = save(tmp_path, {"optimizer": optimizer})
    for dtype in (torch.bfloat16, torch.float32):
        other = kind([nn.Parameter(torch.ones(2, 2, dtype=dtype))])
        sidesave.load(path, into={"optimizer": other})
        before, after = (next(iter(each.state.values())) for each in (optimizer, other))
        assert kinds_of(before) == kinds_of(after)
        if kind is not Factored:  # torch's own makes plain dicts of all others
            after["codes"] = collections.OrderedDict(after["codes"])
        assert difference(before, after) == ""


def test_a_count_of_steps_gets_the_dtype_that_the_optimizer_needs(tmp_path: Path):
    model, optimizer = named("ab")
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["step"] = state["step"].long()
    path = save(tmp_path, {"optimizer": saved})
    fused = torch.optim.Adam(model.named_parameters(), fused=True)
    sidesave.load(path, into={"optimizer": fused}, exclude="optimizer.param_groups.*.fused")
    assert {(state["step"].dtype, float(state["step"])) for state in fused.state.values()} == {
        (torch.float32, 1.0)
    }
    fused.step()


def test_a_number_that_the_checkpoint_does_not_have_stays_if_it_is_excluded(tmp_path: Path):
    path = save(tmp_path, {"optimizer": torch.optim.SGD(linear(1).parameters(), lr=0.5)})
    optimizer = torch.optim.AdamW(linear(2).parameters(), lr=0.1)
    names = ["betas", "eps"]
    sidesave.load(
        path,
        into={"optimizer": optimizer},
        exclude=[f"optimizer.param_groups.*.{name}" for name in names],
    )
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]) == (
        0.5,
        (0.9, 0.999),
    )


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        (torch.optim.AdamW, lambda parameters: torch.optim.SGD(parameters, momentum=0.9)),
        (torch.optim.SGD, torch.optim.AdamW),
        (torch.optim.Adam, torch.optim.RMSprop),
        (torch.optim.Adagrad, torch.optim.Adadelta),
    ],
)
def test_the_state_of_another_kind_of_optimizer_is_refused(tmp_path: Path, saved: Any, live: Any):
    path = save(tmp_path, {"optimizer": saved(linear(1).parameters())})
    optimizer = live(linear(2).parameters())
    before = optimizer.state_dict()
    with pytest.raises(
        StateMismatchError, match="optimizer: the checkpoint holds the state of another kind"
    ):
        sidesave.load(path, into={"optimizer": optimizer})
    assert difference(before, optimizer.state_dict()) == ""


def test_the_state_of_an_optimizer_that_keeps_other_states_is_refused(tmp_path: Path):
    def stepped(kind: Any) -> torch.optim.Optimizer:
        model = linear(1)
        model(torch.ones(3)).sum().backward()
        optimizer = kind(model.parameters())
        optimizer.step()
        return optimizer

    path = save(tmp_path, {"optimizer": stepped(torch.optim.Adam)})
    with pytest.raises(StateMismatchError, match="it has exp_avg_sq and no exp_inf"):
        sidesave.load(path, into={"optimizer": stepped(torch.optim.Adamax)})


@pytest.mark.parametrize("target", [nn.Linear, lambda: nn.Linear(3, 2), object()])
def test_a_target_that_takes_no_state_is_refused(tmp_path: Path, target: Any):
    path = save(tmp_path, {"model": linear(1)})
    into = {"model": target}
    with pytest.raises(StateMismatchError, match=r"model: the target is .*, which takes no state"):
        sidesave.load(path, into=into)
    assert into == {"model": target}


def test_options_that_the_checkpoint_does_not_have_stay_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = save(tmp_path, {"optimizer": torch.optim.SGD(linear(1).parameters())})
    groups = [{"params": [*linear(1).parameters()], "lr_scale": 0.5}]
    optimizer = torch.optim.SGD(groups)
    sidesave.load(path, into={"optimizer": optimizer})
    assert "does not have optimizer.param_groups.0.lr_scale" in caplog.text
    assert optimizer.param_groups[0]["lr_scale"] == 0.5


def test_a_schedule_of_another_kind_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    optimizer = torch.optim.SGD(linear(1).parameters())
    path = save(tmp_path, {"schedule": torch.optim.lr_scheduler.StepLR(optimizer, 3)})
    sidesave.load(path, into={"schedule": torch.optim.lr_scheduler.StepLR(optimizer, 5)})
    assert not caplog.records
    sidesave.load(path, into={"schedule": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)})
    assert (
        "schedule: the checkpoint's schedule is of another kind than this one: T_max, eta_min, "
        "gamma"
    ) in caplog.text


def test_a_learning_rate_on_the_device_is_not_cast(tmp_path: Path):
    optimizer = torch.optim.Adam(linear(1).parameters(), lr=torch.tensor(3e-4))
    path = save(tmp_path, {"optimizer": optimizer})
    loaded = sidesave.load(path, dtype=torch.bfloat16)
    assert torch.equal(loaded["optimizer"]["param_groups"][0]["lr"], torch.tensor(3e-4))


def test_generators_of_another_number_of_devices_are_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    state = RandomState()
    saved = state.state_dict() | {"cuda": [torch.get_rng_state()] * 2}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    state.load_state_dict(saved)
    random.seed(0)
    state.apply()
    assert "the generators of 2 CUDA devices were saved, and 0 are here" in caplog.text


# Checkpoints, and facts about them ----------------------------------------------------------------

RESUME = """
import sidesave, torch
with sidesave.CheckpointManager("run", {"w": torch.ones(3)}, save=1) as manager:
    for step in range(manager.restore(), 9):
        manager.step(step)
for _ in range(2):
    sidesave.latest("run")
"""


def test_warnings_reach_stderr_once_where_logging_is_not_set_up(tmp_path: Path):
    def resume() -> list[str]:
        command = [sys.executable, "-c", RESUME]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
        )
        return done.stderr.splitlines()

    assert resume() == [], "a healthy run has nothing to report"
    run = tmp_path / "run"
    os.truncate(run / "step-00000008" / "tensors.rank-00000.safetensors", 10)
    os.truncate(run / "step-00000003" / "manifest.json", 10)
    leftover = run / ".step-00000020.0123456789abcdef.partial"
    leftover.mkdir()
    (leftover / "rank-00000.json").write_text("{}")
    lines = resume()
    for words in (
        r"step 8 does not verify, so .* an older step is tried: .*/step-00000008/tensors.*10 bytes",
        r"loaded step 7:",
        r"^left out: .*/run/step-00000003/manifest.json: does not match its own digest",
        r"sidesave daemon \d+: ignoring a damaged record: \.step-00000020",
    ):
        assert len([line for line in lines if re.search(words, line)]) == 1, (words, lines)
    assert len([line for line in lines if "step-00000003" in line]) <= 2, (
        f"by the trainer and by the daemon: {lines}"
    )


def test_a_newest_checkpoint_without_its_manifest_is_not_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    save(tmp_path, {"x": 1})
    newest = Path(save(tmp_path, {"x": 2}, step=2))
    (newest / "manifest.json").unlink()
    with (
        pytest.raises(IntegrityError, match=r"step-00000002.*manifest.*load\(fallback=True\)"),
        Checkpointer(tmp_path) as checkpointer,
    ):
        checkpointer.load()
    assert [info.step for info in sidesave.find(tmp_path)] == [1]
    warnings = [record.getMessage() for record in caplog.records]
    assert sum("left out: " in each and "step-00000002" in each for each in warnings) == 1, (
        "a problem that stays is not repeated"
    )
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.load(fallback=True) == {"x": 1}
        shutil.rmtree(newest)
        assert checkpointer.load() == {"x": 1}


@pytest.mark.parametrize("metadata", [{1: 2}, {"a": {1: 2, "1": 3}}, {"a": [({None: 1},)]}])
def test_facts_whose_keys_would_become_others_are_refused(tmp_path: Path, metadata: Any):
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(InvalidArgumentError, match="is a key, and keys are str"),
    ):
        checkpointer.save(1, {"x": 1}, metadata=metadata)


def test_what_a_source_has_no_place_for_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = save(tmp_path, {"model": linear(1)})
    source = sidesave.Source(path, include="model")
    model = nn.Linear(3, 2, bias=False)
    sidesave.load_sources([source], into={"model": model})
    assert [record.levelname for record in caplog.records if "model.bias" in record.message] == [
        "WARNING"
    ]


def test_weights_that_an_index_does_not_list_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    model = linear(1)
    tensors = {"weight": model.weight.detach(), "bias": model.bias.detach(), "scale": torch.ones(1)}
    safetensors.torch.save_file(tensors, tmp_path / "part.safetensors")
    index = '{"weight_map": {"weight": "part.safetensors", "bias": "part.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    sidesave.load_sources([sidesave.Source(tmp_path, item="model")], into={"model": linear(2)})
    assert "does not list, and that is not loaded: scale" in caplog.text


# Everything ---------------------------------------------------------------------------------------

DTYPES = st.sampled_from(
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.complex128,
        torch.complex64,
        torch.int8,
        torch.bool,
    ]
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bits, strides and views, conjugated or negated, empty or not."""
    shape, dtype = draw(st.lists(st.integers(0, 3), max_size=3)), draw(DTYPES)
    count = torch.Size(shape).numel()
    data = draw(st.binary(min_size=2 * dtype.itemsize * count, max_size=2 * dtype.itemsize * count))
    data = bytes(byte & 1 for byte in data) if dtype is torch.bool else data
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    if draw(st.booleans()):
        tensor = flat[::2].reshape(shape) if count else flat.reshape(shape)
    else:
        tensor = flat[:count].reshape(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if dtype.is_complex and draw(st.booleans()):
        tensor = tensor.conj().imag if draw(st.booleans()) else tensor.conj()
    return nn.Parameter(tensor) if tensor.is_floating_point() and draw(st.booleans()) else tensor


KEYS = st.one_of(
    st.text(max_size=2), st.integers(0, 3), st.booleans(), st.none(), st.sampled_from(list(Phase))
)
NESTS = st.recursive(
    st.one_of(
        tensors(),
        tensors().map(
            lambda tensor: (
                tensor.detach().resolve_neg().resolve_conj().numpy()
                if tensor.dtype != torch.bfloat16
                else 0
            )
        ),
        st.floats(),
        st.integers(),
        st.text(max_size=3),
        st.sets(KEYS, max_size=3),
        st.builds(linear, st.integers(0, 9)),
        st.binary(max_size=4).map(np.bytes_),
        st.text(max_size=4).map(np.str_),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(collections.OrderedDict),
    ),
    max_leaves=8,
)


def expected(value: Any) -> Any:
    """What is documented to come back: state dicts of modules, plain tensors of parameters, values
    of enums.
    """
    if isinstance(value, nn.Module):
        return value.state_dict()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
    if isinstance(value, dict):
        return type(value)((expected(key), expected(item)) for key, item in value.items())
    if isinstance(value, (list, tuple, set)):
        return type(value)(map(expected, value))
    return value


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Checkpointer(tmp_path_factory.mktemp("run")) as checkpointer:
        yield checkpointer


@given(st.dictionaries(st.text(min_size=1, max_size=3), NESTS, min_size=1, max_size=3))
@settings(
    max_examples=campaigns.examples(60),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_any_state_comes_back_from_disk_in_type_order_and_bits_or_is_refused(
    shared: Checkpointer, state: dict[str, Any]
):
    try:
        handle = shared.save(1, state, overwrite=True)
    except sidesave.errors.UnsupportedValueError:
        return
    assert difference(expected(state), sidesave.load(handle.committed.result().path)) == ""
