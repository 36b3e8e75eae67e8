"""Parts of a checkpoint: what stays of an optimizer that is loaded, and patterns and names that
speak of nothing.
"""

import copy
import logging
import re
import shutil
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from loads import assert_refused, flip_bit, sharded, values
from states import difference
from torch import nn
from trainers import save
from worlds import cut, write_world

import sidesave
from sidesave import Checkpointer, Source, load_sources
from sidesave.client.loading.keeping import KEEP_CURRENT, keep_current
from sidesave.client.loading.load import LoadRequest
from sidesave.client.reading.filters import selector
from sidesave.client.reading.stored import FlatMap, fqn_of
from sidesave.client.targets.live_map import LiveMap
from sidesave.errors import IntegrityError, InvalidArgumentError, StateMismatchError
from sidesave.writer_daemon.format.layout import Layout

LR = "optimizer.param_groups.*.lr"
ADAMW: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def adamw(model: nn.Sequential, **options: Any) -> torch.optim.Optimizer:
    """With a group for each of the two layers."""
    return torch.optim.AdamW(
        [{"params": [*layer.parameters()]} for layer in model], **{**ADAMW, **options}
    )


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 3,
    then: Callable[[], Any] = int,
) -> None:
    torch.manual_seed(5)
    device = next(model.parameters()).device
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4).to(device)).square().mean().backward()
        optimizer.step()
        then()


def trained(seed: int = 1, **options: Any) -> dict[str, Any]:
    model = net(seed)
    optimizer = adamw(model, **options)
    train(model, optimizer)
    return {"model": model, "optimizer": optimizer}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ``trained()``."""
    return save(tmp_path_factory.mktemp("run"), trained())


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def states_of(optimizer: torch.optim.Optimizer) -> Any:
    return values(optimizer.state_dict()["state"])


# Hyperparameters ----------------------------------------------------------------------------------


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (torch.optim.AdamW, {"lr": 0.02}),
        (torch.optim.AdamW, {"lr": 0.02, "foreach": True}),
        (torch.optim.AdamW, {"lr": 0.02, "fused": True}),
        (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.5, "betas": (0.5, 0.6)}),
        (torch.optim.Adam, {"lr": torch.tensor(0.02)}),
        (torch.optim.SGD, {"lr": 0.02, "momentum": 0.3}),
        (torch.optim.Adagrad, {"lr": 0.02}),
        (torch.optim.RMSprop, {"lr": 0.02, "alpha": 0.5}),
        pytest.param(
            torch.optim.AdamW,
            {"lr": torch.tensor(0.02), "capturable": True},
            marks=pytest.mark.gpu,
            id="capturable",
        ),
    ],
)
@pytest.mark.parametrize("is_new", [True, False])
def test_training_goes_on_with_the_moments_saved_and_the_new_hyperparameters(
    tmp_path: Path,
    make: Callable[..., torch.optim.Optimizer],
    changed: dict[str, Any],
    is_new: bool,
):
    device = "cuda" if "capturable" in changed else "cpu"
    modes = {key: changed[key] for key in ("foreach", "fused", "capturable") if key in changed}
    if isinstance(changed["lr"], torch.Tensor):
        changed = {**changed, "lr": changed["lr"].to(device)}
    momentum = {"momentum": 0.9} if make is torch.optim.SGD else {}
    model = net(1).to(device)
    optimizer = make(model.parameters(), **{"lr": 0.1, **momentum, **modes})
    train(model, optimizer)
    path = save(tmp_path, {"model": model, "optimizer": optimizer})

    expected: dict[str, Any] = copy.deepcopy({"model": model, "optimizer": optimizer})
    for group in expected["optimizer"].param_groups:
        group.update(changed)

    other = net(2).to(device)
    into: dict[str, Any] = {"model": other, "optimizer": make(other.parameters(), **changed)}
    if not is_new:
        train(other, into["optimizer"], steps=1)
    sidesave.load(path, into=into, exclude=[f"optimizer.param_groups.*.{key}" for key in changed])

    assert difference(options_of(expected["optimizer"]), options_of(into["optimizer"])) == ""
    for one in (expected, into):
        train(one["model"], one["optimizer"])
    assert difference(values(expected), values(into)) == ""


def test_a_schedule_that_is_kept_goes_on_from_the_step_that_was_saved(tmp_path: Path):
    def scheduled(seed: int, lr: float) -> dict[str, Any]:
        model = net(seed)
        optimizer = adamw(model, lr=lr)
        return {
            "model": model,
            "optimizer": optimizer,
            "lr": torch.optim.lr_scheduler.LambdaLR(optimizer, decay),
        }

    def decay(step: int) -> float:
        return 0.5**step

    source = scheduled(1, 0.1)
    train(source["model"], source["optimizer"], 3, source["lr"].step)
    path = save(tmp_path, source)
    into = scheduled(2, 0.8)
    sidesave.load(
        path,
        into=into,
        exclude=[LR, "optimizer.param_groups.*.initial_lr", "lr.base_lrs", "lr._last_lr"],
    )
    assert into["lr"].last_epoch == 3
    assert [(group["lr"], group["initial_lr"]) for group in into["optimizer"].param_groups] == [
        (0.8, 0.8)
    ] * 2
    into["lr"].step()
    assert [group["lr"] for group in into["optimizer"].param_groups] == [0.8 * decay(4)] * 2
    train(into["model"], into["optimizer"], 2, into["lr"].step)
    assert into["lr"].get_last_lr() == [0.8 * decay(6)] * 2


def test_what_is_left_out_of_one_group_or_of_one_tuple_stays_alone(path: Path):
    def options(*exclude: str) -> list[dict[str, Any]]:
        into = {"optimizer": adamw(net(2), lr=0.5, betas=(0.1, 0.2), weight_decay=0.7)}
        sidesave.load(path, into=into, exclude=exclude)
        assert difference(states_of(trained()["optimizer"]), states_of(into["optimizer"])) == ""
        return options_of(into["optimizer"])

    first, second = options("optimizer.param_groups.1.lr")
    assert (first["lr"], second["lr"], second["weight_decay"]) == (0.1, 0.5, 0.1)
    for group in options("optimizer.param_groups.*.betas"):
        assert (group["lr"], group["betas"]) == (0.1, (0.1, 0.2))
    for group in options("*.betas.0"):
        assert (group["lr"], group["betas"]) == (0.1, (0.1, 0.999))
    first, second = options("optimizer.param_groups.0")
    assert (first["lr"], first["betas"], first["weight_decay"]) == (0.5, (0.1, 0.2), 0.7)
    assert (second["lr"], second["betas"], second["weight_decay"]) == (0.1, (0.9, 0.999), 0.1)


@pytest.mark.parametrize(
    "options", [{"include": "optimizer.state"}, {"exclude": ["optimizer.param_groups", "model"]}]
)
def test_the_state_alone_is_loaded_and_all_hyperparameters_stay(
    path: Path, options: dict[str, Any]
):
    optimizer = adamw(net(2), lr=0.5, betas=(0.1, 0.2))
    optimizer.param_groups[0]["lr_scale"] = 3  # which the checkpoint does not know
    before = copy.deepcopy(options_of(optimizer))
    sidesave.load(path, into={"optimizer": optimizer}, **options)
    assert difference(before, options_of(optimizer)) == ""
    assert difference(states_of(trained()["optimizer"]), states_of(optimizer)) == ""


def test_what_is_left_out_stays_though_the_checkpoint_has_nothing_like_it(path: Path):
    into = trained(2, lr=0.5)
    into["lr"] = torch.optim.lr_scheduler.StepLR(into["optimizer"], 1)
    sidesave.load(path, into=into, exclude=["optimizer.param_groups.*.initial_lr", "lr"])
    assert [(group["lr"], group["initial_lr"]) for group in into["optimizer"].param_groups] == [
        (0.1, 0.5)
    ] * 2


def test_a_hyperparameter_that_neither_has_any_more_does_no_harm(tmp_path: Path):
    source = trained()
    torch.optim.lr_scheduler.StepLR(source["optimizer"], 1)
    path = save(tmp_path, source)
    into = {"optimizer": adamw(net(2), lr=0.5)}
    sidesave.load(path, into=into, exclude="*.initial_lr")
    assert all("initial_lr" not in group for group in into["optimizer"].param_groups)
    sidesave.load(path, into=into)
    assert all(group["initial_lr"] == 0.1 for group in into["optimizer"].param_groups)


@pytest.mark.parametrize("is_new", [True, False])
def test_hyperparameters_alone_are_loaded_and_the_state_stays(path: Path, is_new: bool):
    model = net(2)
    optimizer = adamw(model, lr=0.5)
    if not is_new:
        train(model, optimizer)
    before = states_of(optimizer)
    sidesave.load(path, into={"optimizer": optimizer}, include=LR)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    sidesave.load(path, into={"optimizer": optimizer}, exclude=["optimizer.state", "model"])
    assert difference(options_of(trained()["optimizer"]), options_of(optimizer)) == ""
    assert difference(before, states_of(optimizer)) == ""
    train(model, optimizer)


def test_a_part_of_the_moments_stays_where_there_is_one_and_is_refused_where_not(path: Path):
    pattern = "optimizer.state.*.exp_avg"
    into = {"optimizer": trained(2)["optimizer"]}
    expected = states_of(trained()["optimizer"])
    for number, state in states_of(into["optimizer"]).items():
        expected[number]["exp_avg"] = state["exp_avg"]
    sidesave.load(path, into=into, exclude=pattern)
    assert difference(expected, states_of(into["optimizer"])) == ""
    new: dict[str, Any] = {"optimizer": adamw(net(2))}
    told = "optimizer.state.0.exp_avg: it is left out, and the optimizer has none that could stay"
    assert_refused(path, new, told, "leave out all of optimizer.state.0", exclude=pattern)
    sidesave.load(path, into=new, exclude="optimizer.state.0")
    assert [*states_of(new["optimizer"])] == [1, 2, 3]


def test_groups_of_other_sizes_are_told_as_ever(path: Path):
    optimizer = torch.optim.AdamW(net(2).parameters())
    for options in (
        {},
        {"exclude": LR},
        {"include": "optimizer.state"},
        {"exclude": "optimizer.state.*.exp_avg"},
    ):
        told = "optimizer: parameter groups of [2, 2] in the checkpoint, [4] in the target"
        assert_refused(path, {"optimizer": optimizer}, told, **options)


def test_optimizers_in_dicts_and_lists_keep_theirs_each(tmp_path: Path):
    def several(seed: int, lr: float) -> dict[str, Any]:
        made = [trained(seed + at, lr=lr + at)["optimizer"] for at in range(3)]
        return {"opts": {"gan": made[:2], "other": made[2]}}

    path = save(tmp_path, several(1, 0.1))
    into, expected = several(5, 0.5), several(1, 0.1)
    sidesave.load(path, into=into, exclude=["opts.gan.*.lr", "opts.other.param_groups.0.lr"])
    found = [*into["opts"]["gan"], into["opts"]["other"]]
    assert [[group["lr"] for group in one.param_groups] for one in found] == [
        [0.5] * 2,
        [1.5] * 2,
        [2.5, 2.1],
    ]
    for one, other in zip(
        [*expected["opts"]["gan"], expected["opts"]["other"]], found, strict=True
    ):
        assert difference(states_of(one), states_of(other)) == ""


@pytest.mark.parametrize(
    ("rename", "exclude"),
    [
        ({"optimizer": "opt.main"}, LR),
        (lambda fqn: fqn.replace("optimizer", "opt.main"), LR),
        (
            {
                "optimizer": "opt.main",
                "optimizer.param_groups.0.lr": None,
                "optimizer.param_groups.1.lr": None,
            },
            None,
        ),
        (lambda fqn: None if fqn.endswith(".lr") else fqn.replace("optimizer", "opt.main"), None),
    ],
)
def test_an_optimizer_under_another_name_keeps_what_is_left_out(
    path: Path, rename: Any, exclude: str | None
):
    into = {"opt": {"main": adamw(net(2), lr=0.5, weight_decay=0.7)}}
    sidesave.load(path, into=into, include="optimizer", rename=rename, exclude=exclude)
    assert [(group["lr"], group["weight_decay"]) for group in options_of(into["opt"]["main"])] == [
        (0.5, 0.1)
    ] * 2
    assert difference(states_of(trained()["optimizer"]), states_of(into["opt"]["main"])) == ""


def test_of_two_optimizers_the_one_that_is_left_out_leaves_nothing_in_the_other(tmp_path: Path):
    path = save(tmp_path, {"a": trained(1)["optimizer"], "b": trained(2, lr=0.3)["optimizer"]})
    into = {"a": adamw(net(3), lr=0.5)}
    sidesave.load(path, into=into, exclude=["a", "b.param_groups.*.lr"], rename={"b": "a"})
    assert [group["lr"] for group in into["a"].param_groups] == [0.5] * 2
    assert difference(states_of(trained(2, lr=0.3)["optimizer"]), states_of(into["a"])) == ""


def test_an_object_that_raises_leaves_the_optimizer_as_it_was(path: Path):
    class Stubborn(nn.Linear):
        def load_state_dict(self, *args: Any, **options: Any) -> Any:
            raise RuntimeError("this module does not want to")

    into = trained(2, lr=0.5)
    into["model"] = nn.Sequential(Stubborn(4, 4), nn.Linear(4, 2))
    into["model"].load_state_dict = into["model"][0].load_state_dict
    before = values(into)
    with pytest.raises(StateMismatchError, match=r"model: .* does not want to"):
        sidesave.load(path, into=into, exclude=[LR, "optimizer.state.*.exp_avg"])
    assert difference(before, values(into)) == ""


def test_no_more_is_read_than_what_is_loaded(path: Path, tmp_path: Path):
    broken = shutil.copytree(path, tmp_path / path.name)
    flip_bit(broken / "optimizer.rank-00000.safetensors", -1)
    into: dict[str, Any] = {"optimizer": trained(2, lr=0.5)["optimizer"]}
    before = states_of(into["optimizer"])
    sidesave.load(broken, into=into, exclude=["optimizer.state", "model"])
    assert difference(before, states_of(into["optimizer"])) == ""
    with pytest.raises(IntegrityError):
        sidesave.load(broken, into=into, exclude=LR)


def test_a_fresh_load_leaves_out_what_it_is_told_to(path: Path):
    found = sidesave.load(path, exclude=[LR, "*.betas", "model"])["optimizer"]
    assert "lr" not in found["param_groups"][0] and "betas" not in found["param_groups"][0]
    assert found["param_groups"][0]["params"] == [0, 1]


def test_a_source_and_a_manager_keep_it_too(path: Path, tmp_path: Path):
    into = trained(2, lr=0.5)
    load_sources([Source(path, exclude=LR)], into)
    assert [group["lr"] for group in into["optimizer"].param_groups] == [0.5] * 2
    assert difference(states_of(trained()["optimizer"]), states_of(into["optimizer"])) == ""
    for expected in (0.3, 0.7):
        state = trained(2, lr=expected)
        with sidesave.CheckpointManager(
            tmp_path / "run", state, save=[sidesave.EverySteps(1)]
        ) as manager:
            first = manager.restore(exclude=LR) if expected == 0.7 else manager.restore()
            assert [group["lr"] for group in state["optimizer"].param_groups] == [expected] * 2
            train(state["model"], state["optimizer"], 1)
            manager.step(first, {})
    assert first == 1


# Objects of the user's ----------------------------------------------------------------------------


class Thing:
    """Takes its state whole, whatever that is."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def flat(value: Any, fqn: str) -> dict[str, Any]:
    """The leaves of a nest by name; what is empty is one."""
    if not isinstance(value, (dict, list, tuple)) or not value:
        return {fqn: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found: dict[str, Any] = {}
    for key, item in items:
        found |= flat(item, f"{fqn}.{key}")
    return found


def numbered(shape: Any, first: int) -> Any:
    """A nest of this shape with numbers for leaves, counted from ``first``."""
    count = iter(range(first, first + 1000))

    def make(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: make(item) for key, item in value.items()}
        return type(value)(map(make, value)) if isinstance(value, (list, tuple)) else next(count)

    return make(shape)


SHAPES = st.recursive(
    st.none(),
    lambda below: (
        st.dictionaries(st.sampled_from(["a", "b", "lr", 0]), below, min_size=1, max_size=3)
        | st.lists(below, min_size=1, max_size=3)
        | st.lists(below, min_size=1, max_size=3).map(tuple)
    ),
    max_leaves=10,
)
PATTERNS = st.lists(
    st.sampled_from(["x", "a", "b", "lr", "0", "1", "*"]), min_size=1, max_size=4
).map(".".join)


@given(
    SHAPES, st.lists(PATTERNS, max_size=2), st.lists(PATTERNS, min_size=1, max_size=2) | st.none()
)
def test_of_any_object_what_is_chosen_is_as_saved_and_the_rest_as_it_was(
    shape: Any, exclude: list[str], include: list[str] | None
):
    saved, here = FlatMap.of(numbered(shape, 1), ("x",)), flat(numbered(shape, 2001), "x")
    chosen = selector(include, exclude)
    into = {"x": Thing(numbered(shape, 2001))}
    names = {path: fqn_of(path) for path in saved.leaves}
    if any(map(chosen, names.values())) and saved.containers:
        leaves = {
            path: leaf if chosen(names[path]) else KEEP_CURRENT
            for path, leaf in saved.leaves.items()
        }
        slot = LiveMap(into).slots["x",]
        found, problems = keep_current(
            slot, FlatMap(leaves, saved.containers), lambda name: not chosen(name)
        )
        assert problems == []
        expected = {
            name: saved.leaves[path] if chosen(name) else here[name] for path, name in names.items()
        }
        assert flat(found.nest(("x",)), "x") == expected
        assert type(found.nest(("x",))) is type(numbered(shape, 1))
    assert into["x"].state == numbered(shape, 2001), "nothing live was touched"


def test_an_object_keeps_what_is_left_out_of_its_lists_and_dicts(tmp_path: Path):
    saved: dict[str, Any] = {
        "epoch": 3,
        "order": [5, 6, 7],
        "table": {"a": 1, "b": (2, 3)},
        "gone": 9,
    }
    here = {"epoch": 1, "order": [1, 2], "table": {"a": -1, "b": (-2, -3), "new": 4}}
    path = save(tmp_path, {"x": Thing(saved)})

    def load(**options: Any) -> Any:
        into = {"x": Thing(copy.deepcopy(here))}
        sidesave.load(path, into=into, **options)
        return into["x"].state

    assert load() == saved
    assert load(exclude="x.order") == {**saved, "order": [1, 2]}
    assert load(exclude="x.order.1") == {**saved, "order": [5, 2, 7]}
    assert load(exclude="x.table.b.0") == {**saved, "table": {"a": 1, "b": (-2, 3)}}
    assert load(exclude="x.table") == {**saved, "table": here["table"]}
    assert load(exclude=["x.gone", "x.table.new"]) == {
        **{k: saved[k] for k in here},
        "table": {**saved["table"], "new": 4},
    }
    assert load(include="x.epoch") == {**here, "epoch": 3}
    target = {"x": Thing(copy.deepcopy(here))}
    told = "x.order.2: it is left out, and the target has nothing there that could stay"
    assert_refused(path, target, told, exclude="x.order.2")


def test_a_pickled_value_that_is_left_out_is_not_unpickled(tmp_path: Path):
    with Checkpointer(tmp_path, allow_pickle=True) as checkpointer:
        state = {"x": Thing({"a": 1, "odd": range(3), "odder": {range(4)}})}
        path = Path(checkpointer.save(1, state, blocking=True).committed.result())
    into = {"x": Thing({"a": 0, "odd": "mine", "odder": "mine too"})}
    with pytest.raises(
        sidesave.errors.UnsupportedValueError, match=r"x\.odd was pickled; pass allow_pickle=True"
    ):
        sidesave.load(path, into=into, exclude="x.odder")
    sidesave.load(path, into=into, exclude="x.odd*")
    assert into["x"].state == {"a": 1, "odd": "mine", "odder": "mine too"}
    sidesave.load(path, into=into, exclude="x.odder", allow_pickle=True)
    assert into["x"].state == {"a": 1, "odd": range(3), "odder": "mine too"}


def test_an_object_of_which_nothing_is_chosen_is_not_asked(path: Path):
    class Silent(Thing):
        def state_dict(self) -> Any:
            raise RuntimeError("not now")

    into = {"model": net(2), "silent": Silent(1)}
    sidesave.load(path, into=into, include="model")
    assert into["silent"].state == 1


# Words that speak of nothing ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"include": "modle"}, "include: nothing in the checkpoint is called 'modle' (near: model"),
        (
            {"include": ["model", "optimiser.state"]},
            "called 'optimiser.state' (near: optimizer.state",
        ),
        ({"exclude": "optimizer.param_group.*.lr"}, "(near: optimizer.param_groups.*.lr"),
        (
            {"exclude": ["optimizer", "model.7"]},
            "exclude: nothing in the checkpoint is called 'model.7'",
        ),
        (
            {"exclude": "*.learning_rate"},
            "exclude: nothing in the checkpoint is called '*.learning_rate'",
        ),
        ({"exclude": "xyz"}, "'xyz'; it has 'model', 'optimizer'"),
        (
            {"include": "model.", "exclude": "opt"},
            "exclude: nothing in the checkpoint is called 'opt'",
        ),
    ],
)
def test_words_that_speak_of_nothing_are_told_with_what_is_near(
    path: Path, options: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
):
    message = assert_refused(path, trained(2), told, **options)
    assert str(path) in message
    with pytest.raises(StateMismatchError):
        sidesave.load(path, **options)
    with pytest.raises(StateMismatchError):
        load_sources([Source(path, **options)], trained(2))
    with caplog.at_level(logging.WARNING):
        sidesave.load(path, strict=False, **options)
    assert told in caplog.text


def test_all_such_words_are_told_at_once_and_ten_of_them_in_full(path: Path):
    message = assert_refused(
        path,
        trained(2),
        "'modle' (near",
        "'optimizzer' (near",
        include="modle",
        exclude="optimizzer",
    )
    assert message.count("nothing in the checkpoint is called") == 2
    exclude = [f"nothing{n}" for n in range(30)]
    message = assert_refused(
        path, trained(2), "'nothing9'", "and 20 more match nothing", exclude=exclude
    )
    assert "nothing10" not in message


@pytest.mark.parametrize(("old", "near"), [("model.module", ""), ("modle", " (near: model")])
def test_an_old_name_that_is_not_there_is_told_and_the_target_tells_whether_it_matters(
    path: Path, old: str, near: str, caplog: pytest.LogCaptureFixture
):
    told = f"rename: nothing in the checkpoint is called '{old}'{near}"
    with pytest.raises(StateMismatchError, match=re.escape(told)):
        sidesave.load(path, rename={old: "net"})
    target = trained(2)
    with caplog.at_level(logging.WARNING):
        # as a run does whose later checkpoints are renamed
        sidesave.load(path, into=target, rename={old: "net"})
    assert (
        told in caplog.text
        and difference(values(trained()["model"]), values(target["model"])) == ""
    )
    renamed = {"net": target["model"]}
    assert_refused(path, renamed, "net: missing in the checkpoint", rename={old: "net"})


def test_a_source_may_be_forgiven_words_that_speak_of_nothing(
    path: Path, caplog: pytest.LogCaptureFixture
):
    load_sources([Source(path, exclude="modle", strict=False)], trained(2))
    assert "'modle'" in caplog.text


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: [x], lambda x: {0: x}, lambda x: {"a": x}, lambda x: {"a.b": x}]
)
def test_two_sources_cannot_each_give_a_part_of_an_optimizer(
    tmp_path: Path, wrap: Callable[[Any], Any]
):
    def state(seed: int) -> dict[str, Any]:
        found = trained(seed)
        return {"model": found["model"], "o": wrap(found["optimizer"])}

    path = save(tmp_path / "run", state(1))
    target = state(2)
    before = values(target)
    with pytest.raises(StateMismatchError, match=r"has a part of o.*, which takes its state whole"):
        load_sources([Source(path), Source(path, exclude="o*.lr")], target)
    assert difference(before, values(target)) == ""
    load_sources([Source(path, exclude="o"), Source(path, exclude=["model", "o*.lr"])], target)


def test_items_of_a_list_of_live_objects_are_not_given_to_others(tmp_path: Path):
    def optimizers(*rates: float) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(net(1).parameters(), lr=rate) for rate in rates]

    path = save(tmp_path / "run", {"o": optimizers(0.5, 0.25, 0.125)})
    for count in (2, 3):
        target = {"o": optimizers(*[1.0] * count)}
        with pytest.raises(
            StateMismatchError, match="o: of a list in into= no single item can be left out"
        ):
            sidesave.load(path, into=target, exclude="o.0")
        assert {each.param_groups[0]["lr"] for each in target["o"]} == {1.0}
    sidesave.load(path, into=target, exclude="o.*.param_groups.*.lr")
    path = save(tmp_path / "nested", {"o": [optimizers(0.5), optimizers(0.25, 0.125)]})
    nested = {"o": [optimizers(1.0), optimizers(1.0, 1.0)]}
    for exclude, told in (("o.0", "o: of a list"), ("o.1.0", r"o\.1: of a list")):
        with pytest.raises(StateMismatchError, match=told):
            sidesave.load(path, into=nested, exclude=exclude)


def test_what_only_an_object_has_stays_when_it_is_left_out(tmp_path: Path):
    class Facts:
        def __init__(self, **facts: int) -> None:
            self.facts = facts

        def state_dict(self) -> dict[str, int]:
            return dict(self.facts)

        def load_state_dict(self, facts: dict[str, int]) -> None:
            self.facts = dict(facts)

    path = save(tmp_path / "run", {"s": Facts(a=1, b=2)})
    for exclude, expected in (
        ("s.c", {"a": 1, "b": 2, "c": 30}),
        (["s.c", "s.b"], {"a": 1, "b": 20, "c": 30}),
    ):
        target = Facts(a=10, b=20, c=30)
        sidesave.load(path, into={"s": target}, exclude=exclude)
        assert target.facts == expected


def test_words_may_speak_of_what_is_not_loaded(path: Path):
    target = {"model": net(2)}
    sidesave.load(
        path, into=target, exclude="optimizer.param_groups.*.lr", rename={"optimizer": "opt"}
    )
    sidesave.load(path, into=target, include=["model", "model.0.weight", "optimizer"])
    sidesave.load(
        path, into=target, rename={"model": "model", "model.0": "model.0", "optimizer.state": None}
    )
    assert difference(values(trained()["model"]), values(target["model"])) == ""
    sidesave.load(path, into=target, rename=lambda fqn: fqn)


def test_what_is_new_in_the_target_may_be_left_out(path: Path):
    target: dict[str, Any] = {
        "model": nn.Sequential(*net(2), nn.Linear(2, 2)),
        "ema": {"decay": 0.9},
        "steps": [1, 2],
    }
    target["head"] = trained(3)["optimizer"]
    head = ["head.param_groups.0.lr", "head.state.*.step"]
    sidesave.load(path, into=target, exclude=["model.2", "ema.*", "steps", "head", *head])
    assert difference(values(trained()["model"]), values(target["model"][:2])) == ""
    assert_refused(path, target, "'model.3'", exclude=["model.3", "ema", "steps", "head"])
    renamed = {"m": target["model"]}
    sidesave.load(path, into=renamed, exclude="model.2", rename={"model": "m"})
    assert_refused(path, renamed, "'m.2'", exclude="m.2", rename={"model": "m"})


def test_a_word_that_is_no_text_is_refused(path: Path):
    options: dict[str, Any]
    for options in ({"include": 3}, {"exclude": [None]}, {"include": ["model", b"model"]}):
        with pytest.raises(InvalidArgumentError, match=next(iter(options))):
            sidesave.load(path, **options)
        with pytest.raises(InvalidArgumentError):
            Source(path, **options)


def test_each_source_is_asked_for_itself(path: Path):
    good, bad = Source(path), Source(path, exclude="modle")
    target = trained(2)
    before = values(target)
    for sources in ([good, bad], [bad, good]):
        with pytest.raises(StateMismatchError, match="'modle'"):
            load_sources(sources, target)
        with pytest.raises(StateMismatchError, match="'modle'"):
            load_sources(sources, target, strict=False)
    assert difference(before, values(target)) == ""


def test_a_word_that_speaks_of_nothing_is_no_reason_for_an_older_checkpoint(tmp_path: Path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": {"old": 1}}, blocking=True)
        checkpointer.save(2, {"x": {"new": 1}}, blocking=True)
        with pytest.raises(StateMismatchError, match=r"'x\.old'"):
            checkpointer.load(exclude="x.old", fallback=True)


def test_words_speak_of_what_any_rank_has_saved(tmp_path: Path):
    def state(rank: int) -> dict[str, Any]:
        return {
            "model": {"w": torch.ones(4)},
            "data": {f"of rank {rank}": rank},
            "log": {"n": 1} if rank == 2 else {},
        }

    path = write_world(
        tmp_path, [state(rank) for rank in range(4)], lambda fqn, tensor: cut(tensor.shape, 4)
    )
    for rank in range(5):
        into = {"model": {"w": torch.zeros(4)}}
        for number in range(4):
            LoadRequest(into=into, exclude=[f"data.of rank {number}", "log.n"], rank=rank).read(
                path
            ).apply()
        assert into["model"]["w"].sum() == 4
        with pytest.raises(StateMismatchError, match=r"called 'data\.of rank 4'"):
            LoadRequest(into=into, exclude="data.of rank 4", rank=rank).read(path)
        with pytest.raises(StateMismatchError, match=r"called 'log\.m'"):
            LoadRequest(include=["model", "log.m"], rank=rank).read(path)
    # of no use to rank 0, which looks for names there
    (path / "objects.rank-00003.msgpack").unlink()
    with pytest.raises(StateMismatchError, match=r"called 'data\.of rank 4'"):
        LoadRequest(exclude="data.of rank 4", rank=0).read(path)
    assert LoadRequest(exclude="data.of rank 4", rank=0, strict=False).read(path).apply()[
        "data"
    ] == {"of rank 0": 0}


def share(rank: int, world: int, folder: Path) -> None:
    """A rank of two, each with its half of the parameters and of their moments."""
    mesh = dist.init_device_mesh("cpu", (world,))

    def stepped(value: float, lr: float) -> dict[str, Any]:
        model = sharded(1, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    def moments(state: dict[str, Any], key: str) -> list[float]:
        return [
            one[key].full_tensor().flatten()[-1].item() for one in state["optimizer"].state.values()
        ]

    source, into = stepped(1.0, 0.1), stepped(2.0, 0.5)
    expected = moments(source, "exp_avg"), moments(into, "exp_avg_sq")
    assert expected != (moments(into, "exp_avg"), moments(source, "exp_avg_sq"))
    with Checkpointer(f"{folder}/run") as checkpointer:
        checkpointer.save(1, source, blocking=True)
        with pytest.raises(StateMismatchError, match="param_group"):
            checkpointer.load(into=into, exclude="optimizer.param_group.*.lr" if rank else LR)
        checkpointer.load(into=into, exclude=[LR, "optimizer.state.*.exp_avg_sq"])
    assert (moments(into, "exp_avg"), moments(into, "exp_avg_sq")) == expected
    assert [group["lr"] for group in into["optimizer"].param_groups] == [0.5]
    for parameter in into["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    into["optimizer"].step()


def test_ranks_keep_their_parts_and_one_that_is_told_nonsense_stops_all(tmp_path: Path):
    forks.spawn_group(share, 2, tmp_path)


def test_of_other_stages_of_a_pipeline_nothing_has_to_stay(tmp_path: Path):
    def stage(rank: int) -> dict[str, Any]:
        moments = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
        options = torch.optim.AdamW([torch.ones(2)], lr=0.1).defaults
        return {
            "optimizer": {"state": {rank: moments}, "param_groups": [{**options, "params": [rank]}]}
        }

    path = write_world(
        tmp_path,
        [stage(rank) for rank in range(2)],
        lambda fqn, tensor: Layout(
            (int(fqn.split(".")[2]),), tuple((0, extent) for extent in tensor.shape)
        ),
        alike=str,
    )
    for rank in range(2):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([parameter], lr=0.5)
        parameter.grad = torch.ones(2)
        optimizer.step()
        options: dict[str, Any] = {"exclude": [LR, "optimizer.state.*.exp_avg"], "rank": rank}
        LoadRequest(into={"optimizer": optimizer}, **options).read(path).apply()
        state = optimizer.state[parameter]
        assert (state["step"], optimizer.param_groups[0]["lr"], len(optimizer.state)) == (3, 0.5, 1)
        assert (
            difference(
                [torch.full((2,), 0.1), torch.ones(2)], [state["exp_avg"], state["exp_avg_sq"]]
            )
            == ""
        )
        with pytest.raises(StateMismatchError) as caught:
            LoadRequest(into={"optimizer": torch.optim.AdamW([parameter])}, **options).read(path)
        assert f"optimizer.state.{rank}.exp_avg: it is left out" in str(caught.value)
        assert f"optimizer.state.{1 - rank}" not in str(caught.value)


# What is chosen must fit --------------------------------------------------------------------------


def test_a_name_that_differs_in_what_is_chosen_is_told(path: Path):
    model = nn.Sequential(net(2)[0], nn.Linear(4, 2))
    model.register_buffer("scale", torch.ones(1))
    for options in ({"include": "model"}, {"exclude": "optimizer"}, {"exclude": ["model.0", LR]}):
        assert_refused(path, {"model": model}, "model.scale: missing in the checkpoint", **options)
    sidesave.load(path, into={"model": model}, include="model.1")
    misnamed: dict[str, Any] = {
        "model": {f"{name}x": tensor for name, tensor in net(2).state_dict().items()}
    }
    assert_refused(
        path, misnamed, "model.0.weightx: missing", "model.1.bias: unexpected", include="model"
    )
    found = assert_refused(
        path, misnamed, "model.0.biasx: missing", include="model", exclude="model.*.weight*"
    )
    assert "weight" not in found
    wrong: dict[str, Any] = {"model": nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))}
    assert_refused(path, wrong, "model.0.weight: shape [4, 4]", include="model.0")
    typo: dict[str, Any] = {**trained(2), "optimiser": adamw(net(3))}
    assert_refused(path, typo, "optimiser: missing in the checkpoint (near: optimizer", exclude=LR)


def test_a_pattern_stands_for_all_below_what_it_matches():
    for pattern in ("a", "a.b", "a.*", "*.b", "a.b.c", "*.c", "?.b", "a.*.c"):
        assert selector(pattern, None)("a.b.c") and not selector(None, pattern)("a.b.c"), pattern
    for pattern in ("b", "a.c", "a.b.c.d", "ab", "?.c", "a.b.", "", "a.[b"):
        assert not selector(pattern, None)("a.b.c"), pattern
    assert selector("a.[b", None)("a.[b.c"), "a name may have any letters"
    assert fnmatchcase("a.b.c", "a*") and selector("a*", None)("a.b.c")
