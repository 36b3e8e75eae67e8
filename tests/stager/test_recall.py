"""What a state gives when it is taken apart again is what it gives when it is taken apart for the
first time.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import campaigns
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import nn

from sidesave.errors import UnsupportedValueError
from sidesave.stager import torch_private
from sidesave.stager.state import tree
from sidesave.stager.state.annotations import Frozen, PerRank, Replicated
from sidesave.stager.state.flat_state import FlatState
from sidesave.stager.state.recall import Recall
from sidesave.stager.state.tags import MAX_DEPTH, Packed, pack
from sidesave.stager.state.tensor_collector import TensorCollector

ONE = torch.ones(1)


class Net(nn.Module):
    """Layers with and without a bias, a norm with buffers, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(
            [nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Sequential(nn.ReLU())]
        )
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.ones(3), persistent=False)


class OwnStateDict(nn.Linear):
    """A layer whose state dict is its own."""

    def get_extra_state(self) -> Any:
        return {"extra": 1}

    def set_extra_state(self, state: Any) -> None: ...


def told(flat: FlatState) -> list[Any]:
    """All of a flat state but which objects it is made of, with where its tensors are."""
    return [
        {
            name: {fqn: _place(tensor) for fqn, tensor in tensors.items()}
            for name, tensors in flat.containers.items()
        },
        [list(tensors) for tensors in flat.containers.values()],
        flat.objects,
        flat.pickled,
        flat.optimizers,
        flat.modules,
        flat.grids,
        list(flat.undeclared),
        list(flat.containers),
        flat.frozen,
        flat.per_rank,
        flat.shared_digest,
    ]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    # another shape than the moments, or no moments
    with contextlib.suppress(RuntimeError, KeyError):
        optimizer.step()


def table() -> dict[Any, Any]:
    """As averaged weights are kept."""
    return {f"p{number}": torch.full((2,), number) for number in range(20)}


class Training(RuleBasedStateMachine):
    """Whatever happens to a state between saves."""

    def __init__(self) -> None:
        super().__init__()
        self.recalls = {None: Recall(), (0, 1): Recall()}
        self.origins: dict[Any, tuple[object, Any]] = {}
        self.model = Net()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters())
        self.shadow = table()
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "step": 0,
            "shadow": self.shadow,
        }
        self.handles: list[Any] = []

    @invariant()
    def is_what_it_is_when_taken_apart_anew(self) -> None:
        for ranks, recall in self.recalls.items():
            for _ in range(2):
                fresh = again = None
                try:
                    fresh = told(tree.flatten(self.state, ranks=ranks))
                except UnsupportedValueError as error:
                    fresh = str(error)
                try:
                    flat = tree.flatten(self.state, ranks=ranks, recall=recall)
                    again = told(flat)
                    self.has_one_origin_only_if_it_is_the_same(ranks, flat)
                except UnsupportedValueError as error:
                    again = str(error)
                assert again == fresh

    def has_one_origin_only_if_it_is_the_same(self, ranks: Any, flat: FlatState) -> None:
        every = [
            (name, *item) for name, tensors in flat.containers.items() for item in tensors.items()
        ]
        about = [
            (name, fqn, fqn in flat.fresh or (id(tensor), _place(tensor)))
            for name, fqn, tensor in every
        ]
        origin, before = self.origins.get(ranks, (None, None))
        assert flat.origin is not origin or about == before
        assert all(flat.fresh[fqn] is tensor for _, fqn, tensor in every if fqn in flat.fresh)
        self.origins[ranks] = flat.origin, about

    @rule()
    def train(self) -> None:
        step(self.model, self.optimizer)
        self.state["step"] += 1

    @rule(
        place=st.sampled_from(["embed.weight", "layers.0.bias", "layers.1.weight"]),
        way=st.integers(0, 7),
    )
    def change_a_parameter(self, place: str, way: int) -> None:
        owner, _, name = place.rpartition(".")
        module = self.model.get_submodule(owner)
        parameter = getattr(module, name)
        if not isinstance(parameter, torch.Tensor):
            return
        match way:
            case 0:
                parameter.data = parameter.data.clone()
            case 1:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
            case 2:
                parameter.data = (
                    parameter.data.t() if parameter.dim() == 2 else parameter.data.flip(0)
                )
            case 3:
                parameter.data = parameter.data.double()
            case 4:
                parameter.requires_grad_(not parameter.requires_grad)
            case 5:
                setattr(module, name, None)
            case 6:
                parameter.data = parameter.data[:1]
            case _:
                with torch.no_grad():
                    parameter.fill_(2)

    @rule(way=st.integers(0, 9))
    def change_the_model(self, way: int) -> None:
        norm: Any = self.model.norm
        match way:
            case 0:
                self.model.add_module(f"more{len(list(self.model.children()))}", nn.Linear(2, 2))
            case 1:
                norm.register_buffer(
                    f"b{len(norm._buffers)}",
                    torch.zeros(2),
                    persistent=bool(len(norm._buffers) % 2),
                )
            case 2:
                self.model._non_persistent_buffers_set.symmetric_difference_update({"cache"})
            case 3:
                self.handles.append(
                    self.model.layers[0].register_state_dict_pre_hook(lambda *_: None)
                )
            case 4:
                self.handles.append(norm._register_state_dict_hook(_add_to_it))
            case 5:
                for handle in self.handles:
                    handle.remove()
                self.handles.clear()
            case 6:
                self.model.layers[1] = OwnStateDict(4, 4)
            case 7:
                self.model.layers.append(self.model.layers[0])
            case 8:
                norm.state_dict = lambda *_, destination, prefix, **__: destination.update(
                    {prefix + "own": ONE}
                )
            case _:
                self.model.cache = torch.ones(3)

    @rule(way=st.integers(0, 7))
    def change_the_optimizer(self, way: int) -> None:
        state, groups = self.optimizer.state, self.optimizer.param_groups
        match way:
            case 0:
                groups[0]["lr"] *= 0.5
            case 1:
                groups[0]["lr"] = torch.tensor(0.5)
            case 2:
                with contextlib.suppress(ValueError, KeyError):
                    self.optimizer.load_state_dict(self.optimizer.state_dict())
            case 3:
                self.optimizer = self.state["optimizer"] = torch.optim.SGD(
                    self.model.parameters(), lr=0.1, momentum=0.9
                )
            case 4:
                self.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
            case 5 if state:
                next(iter(state.values()))["more"] = 1.5
            case 6 if state:
                next(iter(state.values()))["tensor"] = torch.ones(2)
            case 7 if state:
                state.pop(next(iter(state)))
            case _:
                pass

    @rule(way=st.integers(0, 11), number=st.integers(0, 19))
    def change_a_table(self, way: int, number: int) -> None:
        shadow: dict[Any, Any] = self.shadow
        key = f"p{number}"
        match way:
            case 0:
                shadow[key] = torch.ones(2)
            case 1:
                shadow[key] = shadow.pop(key, torch.ones(1))
            case 2 if isinstance(shadow.get(key), torch.Tensor):
                shadow[key].data = torch.ones(2, dtype=torch.float64)
            case 3 if isinstance(shadow.get(key), torch.Tensor):
                shadow[key].data = torch.zeros(3, 2).t()
            case 4:
                shadow[key] = shadow.get("p0", torch.ones(1))
            case 5 if self.model.embed.weight is not None:
                shadow[key] = self.model.embed.weight
            case 6:
                shadow[key] = 1.5
            case 7:
                shadow[number] = torch.ones(1)
            case 8:
                shadow[key] = torch.ones(0)
            case 9:
                shadow[key] = torch.ones(2, dtype=torch.complex64).conj()
            case 10:
                self.state["shadow"] = {**shadow} if number % 2 else Replicated({**shadow})
            case _:
                self.shadow.clear()
                self.shadow.update(table())
                self.state["shadow"] = self.shadow

    @rule(number=st.integers(0, 20), trains=st.booleans())
    def freeze(self, number: int, trains: bool) -> None:
        parameters = [*self.model.parameters()]
        if parameters and parameters[number % len(parameters)].is_floating_point():
            parameters[number % len(parameters)].requires_grad_(trains)

    @rule(
        item=st.sampled_from(["model", "optimizer", "shadow"]),
        wrapper=st.sampled_from([None, Replicated, PerRank, Frozen]),
    )
    def wrap(self, item: str, wrapper: Any) -> None:
        whole = {"model": self.model, "optimizer": self.optimizer, "shadow": self.shadow}[item]
        self.state[item] = whole if wrapper is None else wrapper(whole)

    @rule(key=st.sampled_from(["a", "z", "model.x", "step"]), way=st.integers(0, 6))
    def change_the_rest(self, key: str, way: int) -> None:
        weight: Any = self.model.embed.weight
        if weight is None:
            return
        match way:
            case 0:
                self.state[key] = torch.ones(3)
            case 1:
                self.state[key] = weight
            case 2:
                self.state[key] = {"deep": [weight.detach(), 1, {"x": weight[:1]}]}
            case 3:
                self.state = {key: self.state.get(key, 1), **self.state}
            case 4:
                self.state[key] = self.model.layers[0]
            case 5:
                self.state.pop("model", None)
            case _:
                self.state["model"] = self.model
        self.state.setdefault("step", 0)
        if not isinstance(self.state["step"], int):
            self.state["step"] = 0


def _add_to_it(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[prefix + "hooked"] = ONE


class TrainingWithoutGuards(Training):
    """The same with a torch that has no guards in C++."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(torch_private, "_TensorGuards", None)

    def teardown(self) -> None:
        self.patches.undo()


TestTraining = Training.TestCase
TestTrainingWithoutGuards = pytest.mark.slow(TrainingWithoutGuards.TestCase)
TestTraining.settings = TestTrainingWithoutGuards.settings = settings(
    max_examples=campaigns.examples(100), stateful_step_count=25
)


# What is remembered, and for how long -------------------------------------------------------------


def trained() -> dict[str, Any]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that are taken apart from now on."""
    names: list[str] = []
    tensor = TensorCollector.tensor

    def noted(collector: TensorCollector, value: torch.Tensor, fqn: str) -> Any:
        names.append(fqn)
        return tensor(collector, value, fqn)

    monkeypatch.setattr(TensorCollector, "tensor", noted)
    return names


def test_what_has_not_changed_is_not_taken_apart_again(monkeypatch: pytest.MonkeyPatch):
    names, recall, state = encoded(monkeypatch), Recall(), trained()
    tree.flatten(state, recall=recall)
    assert "model.norm.running_mean" in names
    assert any(name.endswith("exp_avg") for name in names)
    names.clear()
    step(state["model"], state["optimizer"])
    tree.flatten({**state, "rng": torch.zeros(3)}, recall=recall)
    assert names == ["rng"]


def test_a_state_that_has_not_changed_has_the_origin_of_the_one_before():
    recall, state = Recall(), {**trained(), "shadow": table(), "loss": torch.ones(1)}
    model: Any = state["model"]
    tree.flatten(state, recall=recall)
    origin = tree.flatten(state, recall=recall).origin
    assert origin is not None
    assert tree.flatten({**state, "loss": torch.zeros(1)}, recall=recall).origin is origin
    model.embed.weight.data = torch.ones(5, 4)
    assert tree.flatten(state, recall=recall).origin is not origin


@pytest.mark.parametrize("change", ["modules", "parameters"])
def test_an_optimizer_has_the_names_that_its_parameters_have_now(change: str):
    model: Any = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    # without a state, which would change with them
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recall, state = Recall(), {"model": model, "optimizer": optimizer}
    for _ in range(3):
        tree.flatten(state, recall=recall)
    if change == "modules":
        model[0], model[1] = model[1], model[0]
    else:
        optimizer.param_groups[0]["params"].reverse()
    for _ in range(3):
        assert tree.flatten(state, recall=recall).objects == tree.flatten(state).objects


NODES = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(max_size=3) | st.binary(max_size=20),
    lambda nodes: (
        st.lists(nodes, max_size=4) | st.dictionaries(st.text(max_size=3), nodes, max_size=4)
    ),
    max_leaves=30,
)


@given(NODES, st.randoms(use_true_random=False))
def test_a_node_that_is_packed_by_itself_stands_in_others_as_if_it_were_not(node: Any, random: Any):
    def with_some_packed(part: Any) -> Any:
        if isinstance(part, dict):
            part = {key: with_some_packed(value) for key, value in part.items()}
        elif isinstance(part, list):
            part = [with_some_packed(value) for value in part]
        return Packed(part) if random.random() < 0.3 else part

    mixed = with_some_packed(node)
    assert pack(mixed) == pack(node) == pack(mixed)


def test_a_dict_of_tensors_is_not_taken_apart_again(monkeypatch: pytest.MonkeyPatch):
    names, recall, shadow = encoded(monkeypatch), Recall(), table()
    tree.flatten({"ema": {"shadow": shadow}}, recall=recall)
    assert len(names) == len(shadow)
    names.clear()
    for again in ({"ema": {"shadow": shadow}}, {"ema": {"shadow": {**shadow}}}):
        shadow["p1"].add_(1)
        saved = tree.flatten(again, recall=recall).containers["ema"]
        assert [*saved.values()] == [*shadow.values()] and names == []
    shadow["p1"] = torch.zeros(2)
    assert (
        tree.flatten({"ema": {"shadow": shadow}}, recall=recall).containers["ema"]["ema.shadow.p1"]
        is shadow["p1"]
    )


def test_dicts_of_tensors_that_are_called_otherwise_at_each_save_are_not_all_remembered(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("sidesave.stager.state.recall._MAX_TABLES", 3)
    recall, shadow = Recall(), table()
    for number in range(5):
        told_again = told(tree.flatten({f"epoch {number}": shadow}, recall=recall))
        assert told_again == told(tree.flatten({f"epoch {number}": shadow}))
    assert len(recall._tables) == 3


def test_what_changes_at_each_save_is_given_up_on(monkeypatch: pytest.MonkeyPatch):
    names, recall, state = encoded(monkeypatch), Recall(), trained()
    for _ in range(5):
        tree.flatten(state, recall=recall)
        state["model"].head = nn.Linear(2, 2)
    state["model"].head = nn.Linear(2, 2)
    tree.flatten(state, recall=recall)
    names.clear()
    tree.flatten(state, recall=recall)
    assert "model.norm.running_mean" in names
    assert not any(name.endswith("exp_avg") for name in names)


def test_nothing_is_kept_alive():
    recall, state, shadow = Recall(), trained(), table()
    tree.flatten({**state, "shadow": shadow}, recall=recall)
    tree.flatten({**state, "shadow": shadow}, recall=recall)
    gone = [
        weakref.ref(each)
        for each in (*state.values(), *state["model"].parameters(), *shadow.values())
    ]
    gone += [weakref.ref(row["exp_avg"]) for row in state["optimizer"].state.values()]
    state.clear()
    shadow.clear()
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)
    assert not recall._memories


def test_a_method_that_is_patched_in_a_class_is_called(monkeypatch: pytest.MonkeyPatch):
    recall, state = Recall(), trained()
    tree.flatten(state, recall=recall)

    def state_dict(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        return {"patched": ONE}

    for owner in (Net, nn.Module):
        with monkeypatch.context() as patched:
            patched.setattr(owner, "state_dict", state_dict)
            for _ in range(2):
                assert [*tree.flatten(state, recall=recall).containers["model"]] == [
                    "model.patched"
                ]
        assert len(tree.flatten(state, recall=recall).containers["model"]) > 1


def test_a_module_that_is_replaced_and_kept_elsewhere_is_not_saved_in_the_place_of_the_new_one():
    recall, state = Recall(), trained()
    tree.flatten(state, recall=recall)
    kept = state["model"].layers[1]
    new = state["model"].layers[1] = nn.Linear(4, 4, bias=False)
    saved = tree.flatten(state, recall=recall).containers["model"]["model.layers.1.weight"]
    assert saved.data_ptr() == new.weight.data_ptr() != kept.weight.data_ptr()


@pytest.mark.parametrize("kind", [torch.complex64, torch.bfloat16, torch.int32])
def test_a_parameter_whose_data_has_another_dtype_is_saved_with_that(kind: torch.dtype):
    recall, state = Recall(), trained()
    weight = state["model"].layers[0].weight
    weight.requires_grad_(False)
    tree.flatten(state, recall=recall)
    weight.data = weight.data.to(kind)
    saved = tree.flatten(state, recall=recall)
    assert (
        saved.containers["model@frozen"]["model.layers.0.weight"].dtype
        == tree.flatten(state).containers["model@frozen"]["model.layers.0.weight"].dtype
    )


EYE = torch.eye(3)
ODD: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": EYE.to_sparse,
    "compressed": EYE.to_sparse_csr,
    "meta": lambda: torch.empty(3, device="meta"),
    "empty": lambda: torch.empty(0),
    "quantized": lambda: torch.quantize_per_tensor(EYE, 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([EYE, EYE]),
    "jagged": lambda: torch.nested.nested_tensor([EYE, EYE], layout=torch.jagged),
    "mkldnn": EYE.to_mkldnn,
    "conjugate": lambda: EYE.to(torch.complex64).conj(),
    "expanded": lambda: EYE.t().expand(2, 3, 3),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
def test_tensors_of_every_kind_are_taken_as_without_a_memory(kind: str):
    value, recall, state = ODD[kind](), Recall(), trained()
    state["model"].register_buffer("odd", value)
    next(iter(state["optimizer"].state.values()))["odd"] = value

    def outcome(memory: Recall | None) -> Any:
        try:
            flat = tree.flatten(state, recall=memory)
        except UnsupportedValueError as error:
            return str(error)
        return [flat.objects, [[*tensors] for tensors in flat.containers.values()]]

    for _ in range(3):
        assert outcome(recall) == outcome(None)


class Unfinished(nn.Module):
    """A module that has never been made one."""

    def __init__(self) -> None: ...


UNUSUAL: dict[str, Callable[[nn.Module], Any]] = {
    "scripted": torch.jit.script,
    "traced": lambda module: torch.jit.trace(module, torch.randn(2, 3)),
    "compiled": torch.compile,
    "in parallel": nn.DataParallel,
    "beside a scripted one": lambda module: nn.ModuleList([module, torch.jit.script(module)]),
    "unfinished": lambda _: Unfinished(),
    "beside an unfinished one": lambda module: nn.ModuleList([module, Unfinished()]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNUSUAL)
def test_modules_of_every_kind_are_taken_as_without_a_memory(kind: str):
    model, recall = (
        UNUSUAL[kind](nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()),
        Recall(),
    )

    def outcome(memory: Recall | None) -> Any:
        try:
            flat = tree.flatten({"model": model}, recall=memory)
        except AttributeError as error:
            return str(error)
        return [flat.objects, [[*tensors] for tensors in flat.containers.values()]]

    for _ in range(3):
        assert outcome(recall) == outcome(None)


def test_a_module_that_has_lost_what_it_is_made_of_raises_what_it_would(
    monkeypatch: pytest.MonkeyPatch,
):
    recall, state = Recall(), trained()
    tree.flatten(state, recall=recall)
    monkeypatch.delitem(state["model"].norm.__dict__, "_buffers")
    with pytest.raises(AttributeError, match="_buffers"):
        tree.flatten(state, recall=recall)


class Pretending(nn.Linear):
    """A module that says that it is of another class."""

    __class__ = property(lambda self: nn.Linear)  # type: ignore[assignment]


class NoModule:
    """What only has a ``state_dict``, without a ``__dict__``."""

    __slots__ = ()

    def state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[prefix + "x"] = 1


class Versioned(nn.Linear):
    """A layer whose version is its instances'."""

    version = 1
    _version = property(lambda self: self.version)  # type: ignore[assignment]


class Shifty(nn.Linear):
    """A layer that looks up its own attributes."""

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__("__dict__")
        return (
            (lambda **_: {"x": ONE})
            if name == "state_dict" and own.get("on")
            else super().__getattribute__(name)
        )


class Backwards(dict[str, Any]):
    """A dict that goes through its items from behind."""

    def items(self) -> Any:
        return reversed(list(super().items()))


def _registered(child: Any) -> nn.Module:
    module = nn.Module()
    module._modules["child"] = child
    return module


def told_of(state: Any, recall: Recall | None, ranks: tuple[int, ...] | None = None) -> Any:
    try:
        return told(tree.flatten(state, recall=recall, ranks=ranks))
    except Exception as error:  # noqa: BLE001 - to be compared
        return repr(error)


def test_modules_that_are_hardly_any_are_taken_as_without_a_memory():
    layer = nn.Linear(3, 3)
    makers: list[Any] = [
        weakref.proxy(layer),
        _registered(weakref.proxy(layer)),
        Pretending(2, 2),
        _registered(NoModule()),
    ]
    for model in makers:
        recall = Recall()
        for _ in range(3):
            assert told_of({"model": model}, recall) == told_of({"model": model}, None)


def _turn_on(layer: Any) -> None:
    layer.on = True


def _change_version(layer: Any) -> None:
    layer.version = 2


def _turn_parameters_round(layer: Any) -> None:
    layer._parameters = Backwards(layer._parameters)


@pytest.mark.parametrize(
    ("kind", "change"),
    [(Shifty, _turn_on), (Versioned, _change_version), (nn.Linear, _turn_parameters_round)],
)
def test_a_change_that_is_hard_to_see_is_seen(kind: type[nn.Module], change: Callable[[Any], None]):
    layer, recall = kind(2, 2), Recall()
    for _ in range(2):
        assert told_of({"layer": layer}, recall) == told_of({"layer": layer}, None)
    change(layer)
    assert told_of({"layer": layer}, recall) == told_of({"layer": layer}, None)


class Keyed(torch.optim.AdamW):
    """An optimizer whose state has keys of another type at times."""

    key: Callable[[Any], Any] = staticmethod(lambda key: key)

    def state_dict(self) -> Any:
        state = super().state_dict()
        return {**state, "state": {self.key(key): row for key, row in state["state"].items()}}


def test_keys_of_an_optimizer_that_are_equal_and_of_another_type_are_saved_as_what_they_are():
    model, recall = nn.Linear(3, 3), Recall()
    optimizer = Keyed(model.parameters())
    step(model, optimizer)
    for key in (int, int, float, bool, int, str):
        optimizer.key = key
        assert told_of({"optimizer": optimizer}, recall) == told_of({"optimizer": optimizer}, None)


@pytest.mark.parametrize("ranks", [None, (0, 1)])
def test_ties_to_what_ranks_share_are_taken_as_without_a_memory(ranks: tuple[int, ...] | None):
    layer = nn.Linear(3, 3)
    outer = nn.Sequential(layer)
    states: list[dict[str, Any]] = [
        {"model": Replicated(layer), "weight": layer.weight},
        {"model": Replicated(layer), "outer": Replicated(outer)},
        {"both": Replicated({"model": layer, "weight": layer.weight})},
        {"model": layer, "weight": Replicated(layer.weight), "own": PerRank(outer)},
        {"own": PerRank(layer), "outer": outer},
    ]
    for state in states:
        recall = Recall()
        for _ in range(3):
            assert told_of(state, recall, ranks) == told_of(state, None, ranks)


def test_tensors_that_were_saved_can_be_swapped():
    recall, state = Recall(), trained()
    tree.flatten(state, recall=recall)
    weight = state["model"].layers[0].weight
    torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros(7)))
    assert told_of(state, recall) == told_of(state, None)
    assert weight.shape == (7,)


def test_a_module_that_lies_too_deep_is_refused_though_it_was_known_elsewhere():
    layer, recall = nn.Linear(3, 3), Recall()
    deep: Any = layer
    for _ in range(MAX_DEPTH):
        deep = {"x": deep}
    for state in ({"a": {".".join("x" * MAX_DEPTH): layer}}, {"a": deep}):
        assert told_of(state, recall) == told_of(state, None)


class Unhashable(nn.Linear):
    """A layer that is equal to every other."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable)


def test_modules_that_are_equal_are_not_taken_for_each_other():
    recall = Recall()
    for _ in range(3):
        model = Unhashable(2, 2)
        for _ in range(2):
            saved = tree.flatten({"model": model}, recall=recall).containers["model"][
                "model.weight"
            ]
            assert saved.data_ptr() == model.weight.data_ptr()
