"""The state of an optimizer goes to the parameters it is of, whatever their order and groups; or it
is told.
"""

import copy
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import campaigns
import forks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from states import difference
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from trainers import DEADLINE_S
from trainers import save as save_in_session

import sidesave
from sidesave.client.reading.stored import FlatMap
from sidesave.errors import StateMismatchError
from sidesave.stager import sharding
from sidesave.stager.state.tensor_nodes import TensorRef
from sidesave.stager.state.tree import flatten
from sidesave.stager.state.treespec import TreeSpec

Make = Callable[[Any], torch.optim.Optimizer]
Pair = tuple[nn.Module, torch.optim.Optimizer]
Save = Callable[[dict[str, Any]], Path]

MAKERS: dict[str, Make] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "AMSGrad": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "a rate as a tensor": lambda parameters: torch.optim.AdamW(
        parameters, lr=torch.tensor(0.1), foreach=False
    ),
}


class Layers(nn.ModuleDict):
    """Of a kind that FSDP2 can divide."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through all of them."""
        for layer in self.values():
            x = layer(x)
        return x


def net(*names: str) -> nn.ModuleDict:
    """Layers of one shape: nothing but their names tells them apart."""
    return Layers({name: nn.Linear(3, 3) for name in names})


def train(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Give each parameter a state of its own."""
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    for optimizer in optimizers:
        optimizer.step()


def trained(
    *names: str, make: Make = torch.optim.AdamW
) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    """Layers of these names and their optimizer, after a step."""
    model = net(*names)
    optimizer = make(model.parameters())
    train(model, optimizer)
    return model, optimizer


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer keeps, by the names of the parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: dict(state)
        for parameter, state in sorted(optimizer.state.items(), key=lambda item: names[id(item[0])])
    }


def assert_same_states(one: Pair, other: Pair) -> None:
    """Two optimizers keep the same states for parameters of the same names in their models."""
    assert difference(states_of(*one), states_of(*other)) == ""


@pytest.fixture
def save(tmp_path: Path) -> Iterator[Save]:
    """Saves a state, and gives its checkpoint."""
    steps = itertools.count()
    with sidesave.Checkpointer(tmp_path / "run") as checkpointer:

        def save(state: dict[str, Any]) -> Path:
            return Path(checkpointer.save(next(steps), state).committed.result(DEADLINE_S).path)

        yield save


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """All that has been logged as a warning."""
    return lambda: "\n".join(
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    )


# Order and groups ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKERS)
def test_states_go_to_their_parameters_in_any_order_and_in_any_groups(
    kind: str, save: Save, warnings: Callable[[], str]
):
    make = MAKERS[kind]
    model, optimizer = trained(*"abcd", make=make)
    path = save({"optimizer": optimizer, "model": model})
    expected, options = states_of(model, optimizer), optimizer.state_dict()["param_groups"][0]
    dealer = random.Random(kind)
    for count in (1, 2, 5):
        target = net(*"abcd")
        parameters = list(target.parameters())
        dealer.shuffle(parameters)
        groups = [{"params": parameters[at::count]} for at in range(count)]
        other = make(groups)
        for group in other.param_groups:
            group["weight_decay"] = 0.7
        sidesave.load(path, into={"model": target, "optimizer": other})
        assert difference(expected, states_of(target, other)) == ""
        assert [len(group["params"]) for group in other.param_groups] == [
            len(group["params"]) for group in groups
        ]
        for group in other.param_groups:
            assert difference({**options, "params": 0}, {**group, "params": 0}) == ""
        train(target, other)  # it is whole
    assert warnings() == ""


@settings(max_examples=campaigns.examples(30))
@given(
    st.permutations("abc"),
    st.permutations("abc"),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
)
def test_any_order_goes_into_any_other_as_if_it_had_been_made_so(
    tmp_path_factory: pytest.TempPathFactory,
    saved: list[str],
    wanted: list[str],
    some: int,
    others: int,
    own: bool,
):
    def made(order: list[str], count: int) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = net(*"abc")
        parameters = {
            name: dict(model.named_parameters())[name]
            for key in order
            for name in (f"{key}.weight", f"{key}.bias")
        }
        named: list[Any] = list(parameters.items()) if own else list(parameters.values())
        return model, torch.optim.AdamW(
            [{"params": named[at::count]} for at in range(count)], lr=0.1
        )

    model, optimizer = made(saved, some)
    train(model, optimizer)
    state: dict[str, Any] = (
        {"optimizer": optimizer} if own else {"optimizer": optimizer, "model": model}
    )
    path = save_in_session(tmp_path_factory.mktemp("run"), state)
    target, other = made(wanted, others)
    sidesave.load(path, into={"optimizer": other} if own else {"optimizer": other, "model": target})
    assert_same_states((model, optimizer), (target, other))
    straight_model, straight = made(wanted, others)
    straight_model.load_state_dict(
        model.state_dict() if own is False else straight_model.state_dict()
    )
    train(straight_model, straight)
    assert difference(states_of(straight_model, straight), states_of(target, other)) == ""


def test_what_is_saved_is_what_torch_makes_of_it(save: Save):
    model, optimizer = trained(*"ab")
    path = save({"model": model, "optimizer": optimizer})
    assert difference(optimizer.state_dict(), sidesave.load(path)["optimizer"]) == ""
    assert (
        difference(
            optimizer.state_dict()["state"][1],
            sidesave.load(path, include="optimizer.state.1")["optimizer"]["state"][1],
        )
        == ""
    )


def test_groups_that_become_one_take_what_is_the_same_in_them(save: Save):
    model = net("a", "b")
    groups = [
        {"params": model["a"].parameters(), "lr": 0.5},
        {"params": model["b"].parameters(), "lr": 0.25},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.125)
    train(model, optimizer)
    path = save({"model": model, "optimizer": optimizer})
    target = net("a", "b")
    other = torch.optim.AdamW(target.parameters(), lr=0.1)
    into: dict[str, Any] = {"model": target, "optimizer": other}
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(
        StateMismatchError,
        match=r"optimizer\.param_groups\.0\.lr: its parameters were in groups 0, 1",
    ):
        sidesave.load(path, into=into)
    assert difference(before, other.state_dict()) == "", "nothing was touched"
    sidesave.load(path, into=into, exclude="optimizer.param_groups.*.lr")
    assert (other.param_groups[0]["lr"], other.param_groups[0]["weight_decay"]) == (0.1, 0.125)
    assert_same_states((model, optimizer), (target, other))


def test_a_rate_that_is_a_tensor_is_one_of_each_group(save: Save):
    model = net("a", "b")
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    train(model, optimizer)
    path = save({"model": model, "optimizer": optimizer})
    target = net("a", "b")
    groups = [{"params": target[name].parameters(), "lr": torch.tensor(0.1)} for name in "ba"]
    other = torch.optim.AdamW(groups)
    sidesave.load(path, into={"model": target, "optimizer": other})
    first, second = (group["lr"] for group in other.param_groups)
    assert (float(first), float(second)) == (0.5, 0.5)
    first.fill_(0.25)
    assert float(second) == 0.5
    shared = torch.tensor(0.1)
    groups = [{"params": target[name].parameters(), "lr": shared} for name in "ba"]
    other = torch.optim.AdamW(groups)
    sidesave.load(path, into={"model": target, "optimizer": other})
    first, second = (group["lr"] for group in other.param_groups)
    assert first is second


# Other parameters ---------------------------------------------------------------------------------


def test_a_model_that_has_grown_keeps_its_moments(save: Save, warnings: Callable[[], str]):
    model = net("b", "c")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    train(model, optimizer)
    path = save({"model": model, "optimizer": optimizer})
    target = net("a", "b", "c")
    groups = [{"params": list(target[name].parameters())} for name in "abc"]
    other = torch.optim.AdamW(groups, lr=0.1)
    train(target, other)
    own = states_of(target, other)
    into: dict[str, Any] = {"model": target, "optimizer": other}
    with pytest.raises(
        StateMismatchError, match=r"optimizer\[model\.a\.weight\]: missing in the checkpoint"
    ):
        sidesave.load(path, into=into)
    assert difference(own, states_of(target, other)) == "", "nothing was touched"
    sidesave.load(path, into=into, strict=False)
    expected = states_of(model, optimizer)
    expected = {name: expected.get(name, own[name]) for name in own}
    assert difference(expected, states_of(target, other)) == ""
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.5, 0.5]
    assert "optimizer[model.a.weight]" in warnings()
    train(target, other)


def test_a_model_that_has_shrunk_leaves_what_it_has_not(save: Save, warnings: Callable[[], str]):
    model = net("a", "b", "c")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    train(model, optimizer)
    path = save({"model": model, "optimizer": optimizer})
    target = net("a", "c")
    other = torch.optim.AdamW(target.parameters(), lr=0.1)
    into: dict[str, Any] = {"model": target, "optimizer": other}
    with pytest.raises(StateMismatchError, match=r"optimizer\[model\.b\.bias\]: unexpected"):
        sidesave.load(path, into=into)
    choices: list[dict[str, Any]] = [
        {"strict": False},
        {"exclude": "model.b"},
        {"rename": {"model.b": None}},
    ]
    for options in choices:
        fresh, before = torch.optim.AdamW(target.parameters(), lr=0.1), warnings()
        sidesave.load(path, into={"model": target, "optimizer": fresh}, **options)
        told = warnings().removeprefix(before)
        assert ("optimizer[model.b.weight]" in told) == ("strict" in options), (
            "else it is asked for"
        )
        kept = {
            name: state
            for name, state in states_of(model, optimizer).items()
            if not name.startswith("b")
        }
        assert difference(kept, states_of(target, fresh)) == ""


def test_of_several_sources_the_last_one_that_has_the_optimizer_counts_alone(save: Save):
    pairs = trained("b"), trained("a", "b")
    target = net("a", "b")
    other = torch.optim.AdamW(target.parameters())
    sources = [
        sidesave.Source(save({"model": model, "optimizer": optimizer}))
        for model, optimizer in pairs
    ]
    sidesave.load_sources(sources, {"model": target, "optimizer": other})
    assert difference(states_of(*pairs[1]), states_of(target, other)) == ""


def test_names_follow_what_renames_the_model_and_what_wraps_it(save: Save):
    model, optimizer = trained(*"ab")
    path = save({"model": model, "optimizer": optimizer})
    expected = list(states_of(model, optimizer).values())

    def target(*names: str) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        made = net(*names)
        return made, torch.optim.AdamW(reversed(list(made.parameters())))

    renamed, other = target("x", "y")
    sidesave.load(
        path,
        into={"net": renamed, "opt": other},
        rename={"model.a": "net.x", "model.b": "net.y", "optimizer": "opt"},
    )
    assert difference(expected, list(states_of(renamed, other).values())) == ""
    inner, other = target("a", "b")
    wrapped: Any = nn.Module()
    wrapped.module = inner
    sidesave.load(
        path, into={"model": wrapped, "optimizer": other}, rename={"model": "model.module"}
    )
    assert difference(expected, list(states_of(inner, other).values())) == ""
    inner, other = target("a", "b")
    wrapped = nn.Module()
    wrapped._orig_mod = inner
    path = save({"model": model, "optimizer": optimizer})
    sidesave.load(path, into={"model": wrapped, "optimizer": other}, include="optimizer")
    assert difference(expected, list(states_of(inner, other).values())) == ""


def test_tied_weights_have_any_of_their_names(save: Save):
    def tied(*names: str) -> nn.ModuleDict:
        made = net("a", "b", "z")
        made["z"].weight = made["b"].weight
        return nn.ModuleDict({name: made[name] for name in names})

    model = tied("a", "b", "z")
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    path = save({"model": model, "optimizer": optimizer})
    target = tied("z", "b", "a")  # torch calls it z.weight here
    other = torch.optim.AdamW(target.parameters())
    sidesave.load(path, into={"model": target, "optimizer": other})
    states = [states_of(model, optimizer)["b.weight"], states_of(target, other)["z.weight"]]
    assert difference(*states) == ""
    assert len(other.state) == 5


# What has no names --------------------------------------------------------------------------------


def test_what_goes_by_position_is_told_where_shapes_leave_a_doubt(
    save: Save, warnings: Callable[[], str]
):
    model, optimizer = trained(*"ab")
    expected = states_of(model, optimizer)
    for saved, takes in (
        ({"optimizer": optimizer}, ("optimizer",)),
        ({"optimizer": optimizer.state_dict(), "model": model}, ("optimizer", "model")),
        ({"optimizer": optimizer, "model": model}, ("optimizer",)),
    ):
        target = net("a", "b")
        other = torch.optim.AdamW(target.parameters())
        into: dict[str, Any] = {"optimizer": other, "model": target}
        before = warnings()
        sidesave.load(save(saved), into={name: into[name] for name in takes})
        assert difference(expected, states_of(target, other)) == ""
        assert "the state of optimizer goes by position, not by name" in warnings().removeprefix(
            before
        )
    alone = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(alone.parameters())
    train(alone, optimizer)
    before = warnings()
    sidesave.load(
        save({"optimizer": optimizer}),
        into={"optimizer": torch.optim.AdamW(nn.Linear(3, 2).parameters())},
    )
    assert warnings() == before, "shapes tell"


def test_the_tensors_of_a_state_dict_name_parameters_too(save: Save, warnings: Callable[[], str]):
    model, optimizer = trained(*"ab")
    path = save({"model": dict(model.state_dict()), "optimizer": optimizer})
    target = net("a", "b")
    other = torch.optim.AdamW(reversed(list(target.parameters())))
    sidesave.load(path, into={"model": dict(target.state_dict()), "optimizer": other})
    assert_same_states((model, optimizer), (target, other))
    assert warnings() == ""


def test_one_state_for_all_parameters_goes_to_the_same_ones_only(save: Save):
    def lbfgs(model: nn.Module, *, turned: bool) -> torch.optim.LBFGS:
        parameters = list(model.parameters())
        return torch.optim.LBFGS(parameters[::-1] if turned else parameters)

    model = net("a", "b")
    optimizer = lbfgs(model, turned=False)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    path = save({"model": model, "optimizer": optimizer})
    target = net("a", "b")
    other = lbfgs(target, turned=False)
    sidesave.load(path, into={"model": target, "optimizer": other})
    assert_same_states((model, optimizer), (target, other))
    with pytest.raises(StateMismatchError, match="LBFGS keeps one state for all its parameters"):
        sidesave.load(path, into={"model": target, "optimizer": lbfgs(target, turned=True)})


class Counting(torch.optim.SGD):
    """Keeps something beside the states of its parameters."""

    def step(self, closure: Any = None) -> Any:
        kept: dict[Any, Any] = cast("Any", self.state)
        kept["steps"] = kept.get("steps", 0) + 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "kind": "counting"}


def test_what_is_of_no_parameter_stays_as_it_is(save: Save):
    model = net("a", "b")
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    train(model, optimizer)
    path = save({"model": model, "optimizer": optimizer})
    target = net("a", "b")
    other = Counting(reversed(list(target.parameters())), lr=0.1, momentum=0.9)
    sidesave.load(path, into={"model": target, "optimizer": other})
    assert other.state.pop("steps") == optimizer.state.pop("steps") == 2  # pyright: ignore[reportArgumentType]
    assert_same_states((model, optimizer), (target, other))


def test_several_optimizers_have_each_their_parameters(save: Save, warnings: Callable[[], str]):
    model = net(*"abcd")
    some = torch.optim.AdamW([*model["a"].parameters(), *model["b"].parameters()])
    others = torch.optim.SGD(
        [*model["c"].parameters(), *model["d"].parameters()], lr=0.1, momentum=0.9
    )
    train(model, some, others)
    path = save({"optimizers": [some, others], "model": model})
    target = net(*"abcd")
    one = torch.optim.AdamW([*target["b"].parameters(), *target["a"].parameters()])
    two = torch.optim.SGD(
        [*target["d"].parameters(), *target["c"].parameters()], lr=0.1, momentum=0.9
    )
    sidesave.load(path, into={"optimizers": [one, two], "model": target})
    for before, after in ((some, one), (others, two)):
        assert difference(states_of(model, before), states_of(target, after)) == ""
    assert warnings() == ""


def test_frozen_parameters_and_those_not_stepped_yet_have_no_state_and_need_none(save: Save):
    model = net(*"abc")
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model["b"].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    path = save({"model": model, "optimizer": optimizer})
    target = net(*"abc")
    other = torch.optim.AdamW(reversed(list(target.parameters())))
    sidesave.load(path, into={"model": target, "optimizer": other})
    assert set(states_of(target, other)) == {"b.weight", "b.bias"}
    assert_same_states((model, optimizer), (target, other))


# Many ranks ---------------------------------------------------------------------------------------


def divided(rank: int, folder: Path) -> None:
    """FSDP2 over two ranks, of whose last layer one has nothing, goes into another order of the
    same.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))

    def made(*, turned: bool) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Layers({**net(*"abc"), "last": nn.Linear(3, 1, bias=False)})
        fully_shard(model, mesh=mesh)
        parameters = list(model.parameters())
        return model, torch.optim.AdamW(parameters[::-1] if turned else parameters, foreach=False)

    model, optimizer = made(turned=False)
    train(model, optimizer)
    with sidesave.Checkpointer(f"{folder}/run") as checkpointer:
        path = checkpointer.save(1, {"model": model, "optimizer": optimizer}).committed.result(
            DEADLINE_S
        )
        target, other = made(turned=True)
        sidesave.load(path, into={"model": target, "optimizer": other})

    def local(states: dict[str, Any]) -> dict[str, Any]:
        return {
            name: {key: getattr(value, "_local_tensor", value) for key, value in state.items()}
            for name, state in states.items()
        }

    assert difference(local(states_of(model, optimizer)), local(states_of(target, other))) == ""


def test_shards_go_to_their_parameters(tmp_path: Path):
    forks.spawn_group(divided, tmp_path)


class Sharded(torch.optim.Optimizer):
    """It keeps DTensors in nests, of other shapes and with other placements than their
    parameters.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        last = torch.zeros(1)
        for parameter in self.param_groups[0]["params"]:
            old = self.state[parameter].get("past", [parameter])[0]
            last = old
            self.state[parameter] = {
                "flat": old + parameter,
                "past": [old + parameter, (old * 2,)],
                "by name": {
                    "sum": old.sum(-1),
                    "whole": old.redistribute(placements=[Replicate()]),
                },
                "rows": old.sum(-1),
                "plain": torch.ones(2),
            }
        cast("Any", self.state)["all"] = {"norm": [last.sum(-1)]}


def nested(rank: int, folder: Path) -> None:
    """FSDP2 over two ranks, with an optimizer that keeps more than one DTensor of its parameter's
    shape.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    meshes = (
        init_device_mesh("cpu", (2,)),
        init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b")),
    )

    def made(number: int = 0) -> dict[str, Any]:
        torch.manual_seed(0)
        model: nn.Module = nn.Linear(3, 5, bias=False)
        fully_shard(model, mesh=meshes[number])
        return {"model": model, "optimizer": Sharded(model.parameters())}

    def leaves(state: dict[str, Any]) -> dict[Any, Any]:
        flat = FlatMap.of(state["optimizer"].state_dict()["state"]).leaves
        return {
            path: (value.placements, value.shape, value.to_local())
            if isinstance(value, DTensor)
            else value
            for path, value in flat.items()
        }

    state = made()
    state["optimizer"].step()
    with sidesave.Checkpointer(f"{folder}/run") as checkpointer:

        def save(step: int) -> str:
            return checkpointer.save(step, state).committed.result(DEADLINE_S).path

        path = save(1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharding, "placements_of_states", lambda *_, **__: {})
            older = save(2)
        for target in (made(), made()):
            sidesave.load(path, into=target)
            assert difference(leaves(state), leaves(target)) == ""
            sidesave.load(path, into=target)  # now that it has all of it
            assert difference(leaves(state), leaves(target)) == ""
            target["optimizer"].step()

        sidesave.load(older, into=(target := made()))  # which does not say how what was placed
        have = target["optimizer"].state[target["model"].weight]
        wanted = state["optimizer"].state[state["model"].weight]
        for one, other in (
            (have["past"][0], wanted["past"][0]),
            (have["past"][1][0], wanted["past"][1][0]),
        ):
            assert one.placements == other.placements
            assert torch.equal(one.to_local(), other.to_local())

        hybrid = made(1)
        with pytest.raises(
            StateMismatchError, match=r"all\.norm\.0: it was placed as S0 on a mesh of 1 dimension"
        ):
            sidesave.load(path, into=hybrid)
        del state["optimizer"].state["all"]
        sidesave.load(save(3), into=hybrid)
        have = hybrid["optimizer"].state[hybrid["model"].weight]
        assert have["past"][0].placements == hybrid["model"].weight.placements
        assert torch.equal(have["past"][0].full_tensor(), wanted["past"][0].full_tensor())
        assert have["by name"]["whole"].placements == (Replicate(), Replicate())
        assert torch.equal(
            have["by name"]["whole"].to_local(), wanted["by name"]["whole"].to_local()
        )

        model, other = made()["model"], nn.ParameterDict()
        other["a"], other["b"] = model.weight, nn.Parameter(model.weight.detach())
        before = model.weight.to_local().clone()
        apart = checkpointer.save(4, {"x": {"a": model.weight, "b": model.weight * 2}})
        shares = apart.committed.result(DEADLINE_S).path
        with pytest.raises(StateMismatchError, match=r"x\.a and x\.b are one tensor"):
            sidesave.load(shares, into={"x": other})
        assert torch.equal(before, model.weight.to_local())
    refs: list[TensorRef] = []
    fully_shard(ordinary := net("a", "b"), mesh=meshes[0])
    train(ordinary, adam := torch.optim.AdamW(ordinary.parameters()))
    TreeSpec(flatten({"optimizer": adam}, ranks=(0, 1)).objects, "").build(refs.append)
    assert refs and not any(ref.placed for ref in refs), (
        "an ordinary checkpoint has another format than before"
    )


@pytest.mark.slow
def test_what_an_optimizer_keeps_sharded_comes_back_with_its_placements(tmp_path: Path):
    forks.spawn_group(nested, tmp_path)


@pytest.mark.gpu
def test_steps_that_a_graph_counts_go_to_their_parameters_on_the_device(save: Save):
    def made(*, turned: bool) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        model = net("a", "b").cuda()
        parameters = list(model.parameters())
        rate = torch.tensor(0.1, device="cuda")
        return model, torch.optim.AdamW(
            parameters[::-1] if turned else parameters, lr=rate, capturable=True
        )

    model, optimizer = made(turned=False)
    train(model, optimizer)
    path = save({"model": model, "optimizer": optimizer})
    target, other = made(turned=True)
    sidesave.load(path, into={"model": target, "optimizer": other})
    assert_same_states((model, optimizer), (target, other))
    train(target, other)
