"""Loading under other names: wrappers, items that become others, and two things with one name."""

import collections
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from loads import Extra, Trunk, Wrapped, assert_equal, assert_refused, flip_bit, live, values
from states import difference
from torch import nn
from trainers import save

import sidesave
from sidesave import Checkpointer
from sidesave.client.loading.load_filter import Renamed, Renaming, refuse_two_in_one_place
from sidesave.client.reading.stored import FlatMap
from sidesave.client.targets.live_map import LiveMap
from sidesave.errors import IntegrityError, InvalidArgumentError, StateMismatchError


@pytest.mark.parametrize(
    "rename",
    [
        {"model.inner": "model"},
        {"model.inner.": "model."},
        lambda fqn: fqn.replace(".inner.", ".", 1),
    ],
)
def test_the_prefix_of_a_module_around_it_is_taken_away_and_a_plain_model_takes_it(
    tmp_path: Path, rename: Any
):
    source, target = Trunk(1), Trunk(2)
    path = save(tmp_path, {"model": nn.ModuleDict({"inner": source}), "epoch": 3})
    assert_refused(
        path, {"model": target}, 'rename={"model.inner": "model"}', "none of the 9 names fits"
    )
    into: dict[str, Any] = {"model": target, "epoch": 0}
    assert sidesave.load(path, into=into, rename=rename) is into
    assert_equal(source, target)
    assert into["epoch"] == 3
    fresh = sidesave.load(path, rename=rename)
    assert difference({"model": values(source), "epoch": 3}, fresh) == ""


def test_the_prefix_of_a_module_around_it_is_put_in_front(tmp_path: Path):
    source, target = Trunk(1), Trunk(2)
    path = save(tmp_path, {"model": source})
    assert_refused(path, {"model": Wrapped(target)}, 'rename={"model": "model.module"}')
    sidesave.load(path, into={"model": Wrapped(target)}, rename={"model": "model.module"})
    assert_equal(source, target)


def test_an_item_becomes_another_and_its_parts_too_and_the_rest_is_left_out(tmp_path: Path):
    source, teacher, head = Trunk(1), Trunk(2), nn.Linear(4, 2)
    path = save(
        tmp_path, {"model": source, "optimizer": torch.optim.SGD(source.parameters()), "epoch": 3}
    )
    sidesave.load(path, into={"teacher": teacher}, rename={"model": "teacher"})
    assert_equal(source, teacher)
    sidesave.load(
        path, into={"classifier": head}, rename={"model.head": "classifier", "model": None}
    )
    assert_equal(source.head, head)
    split = sidesave.load(
        path, rename={"model.backbone": "trunk", "model.head": "heads.first", "optimizer": None}
    )
    assert split.keys() == {"trunk", "heads", "epoch"}
    assert difference(values(source.backbone), split["trunk"]) == ""
    assert difference(
        {f"first.{name}": tensor for name, tensor in source.head.state_dict().items()},
        {f"{name}": tensor for name, tensor in split["heads"].items()},
    ) == ("")


def test_an_optimizer_and_an_object_of_the_users_keep_their_structure_under_another_name(
    original: Path,
):
    target, expected = live(1), values(live(3))
    into = {"a": {"opt": target["optimizer"]}, "b": target["scheduler"], "c": [target["loader"]]}
    rename = {"optimizer": "a.opt", "scheduler": "b", "loader": "c.0"}
    sidesave.load(original, into=into, rename=rename)
    for name in ("optimizer", "scheduler", "loader"):
        assert difference(expected[name], values(target[name])) == "", name
    fresh = sidesave.load(
        original, rename={"optimizer": "a.opt", "nested": "deep.down", "model": None}
    )
    assert difference(expected["optimizer"], fresh["a"]["opt"]) == ""
    assert difference(values(live(3))["nested"], fresh["deep"]["down"]) == ""
    assert difference(values(live(3))["scheduler"], fresh["scheduler"]) == ""
    assert "model" not in fresh


def test_names_change_within_lists_dicts_and_extra_states(tmp_path: Path):
    state: dict[str, Any] = {
        "nets": [Wrapped(nn.Linear(2, 2)), Wrapped(nn.Linear(2, 3))],
        "extra": Wrapped(Extra({"a": {"b": torch.ones(2)}, 1: "one"})),
        "plain": {"old": {1: "int", (2, 3): {4, 5}}, "list": [1, {"x": 2}]},
    }
    path = save(tmp_path, state)
    into: dict[str, Any] = {
        "nets": [nn.Linear(2, 2), nn.Linear(2, 3)],
        "extra": Extra({}),
        "plain": {"new": {1: "", (2, 3): set()}, "list": [0, {"x": 0}]},
    }
    rename = {
        "nets.0.module": "nets.0",
        "nets.1.module": "nets.1",
        "extra.module": "extra",
        "plain.old": "plain.new",
    }
    sidesave.load(path, into=into, rename=rename)
    for index in range(2):
        assert_equal(state["nets"][index].module, into["nets"][index])
    assert difference(state["extra"].module.note, into["extra"].note) == ""
    assert into["plain"] == {"new": state["plain"]["old"], "list": [1, {"x": 2}]}
    assert (
        sidesave.load(path, rename={"plain.old": "plain.new", "nets": None, "extra": None})["plain"]
        == into["plain"]
    )
    assert sidesave.load(path, include="plain.list", rename={"plain": "other"}) == {
        "other": {"list": [1, {"x": 2}]}
    }


@pytest.mark.parametrize("name", ["model", "nested.heads"])
def test_renaming_nothing_changes_nothing(original: Path, name: str):
    expected = sidesave.load(original)
    assert difference(expected, sidesave.load(original, rename={name: name})) == ""
    assert difference(expected, sidesave.load(original, rename=lambda fqn: fqn)) == ""
    target = live(1)
    sidesave.load(original, into=target, rename=lambda fqn: fqn)
    assert difference(values(live(3)), values(target)) == ""


def test_structures_of_all_kinds_survive_a_new_name(tmp_path: Path):

    state = {
        "x": {
            "tied": torch.arange(3.0),
            "ordered": collections.OrderedDict([("b", 1), ("a", torch.zeros(2))]),
            "counter": collections.Counter({"a": 3}),
            "default": collections.defaultdict(list, {"k": [1, 2]}),
            "queue": collections.deque([1, torch.ones(1)], maxlen=5),
            "tuple": (1, (2, torch.ones(2))),
            "size": torch.Size([2, 3]),
            "sparse": torch.eye(3).to_sparse(),
            "array": np.arange(4),
            "odd": {(1, 2): {"t": torch.ones(1)}},
            "empty": [{}, [], ()],
        }
    }
    state["x"]["again"] = state["x"]["tied"]
    path = save(tmp_path, state)
    found = sidesave.load(path, rename={"x": "y.z"})
    assert difference(sidesave.load(path)["x"], found["y"]["z"]) == ""
    assert found["y"]["z"]["queue"].maxlen == 5
    assert found["y"]["z"]["default"].default_factory is list
    assert found["y"]["z"]["tied"].data_ptr() == found["y"]["z"]["again"].data_ptr(), (
        "tied as before"
    )


def test_include_and_exclude_know_the_names_in_the_checkpoint(original: Path):
    teacher = live(1)["model"]
    before = values(teacher)
    into = {"teacher": teacher}
    sidesave.load(original, into=into, include="model.0", rename={"model": "teacher"})
    changed = {
        name for name, tensor in values(teacher).items() if not torch.equal(tensor, before[name])
    }
    assert changed == {"0.weight", "0.bias"}
    with pytest.raises(StateMismatchError, match="nothing of it is chosen for 'teacher'"):
        sidesave.load(original, into=into, include="epoch", rename={"model": "teacher"})
    with pytest.raises(StateMismatchError, match="nothing in the checkpoint is called 'teacher'"):
        sidesave.load(original, into=into, include="teacher", rename={"model": "teacher"})
    sidesave.load(original, into=into, exclude="model.1", rename={"model": "teacher"})
    assert difference(values(live(3)["model"][2]), values(teacher[2])) == ""


def test_of_what_is_renamed_no_more_is_read_than_needed(original: Path, checkpoint: Path):
    for name in ("optimizer", "nested", "tensors"):
        (checkpoint / f"{name}.rank-00000.safetensors").write_bytes(b"")
    target = live(1)["model"]
    with pytest.raises(IntegrityError):
        sidesave.load(checkpoint, rename={"model": "teacher"})
    for name in ("optimizer", "nested", "tensors"):
        shutil.copy(original / f"{name}.rank-00000.safetensors", checkpoint)
        flip_bit(checkpoint / f"{name}.rank-00000.safetensors", -1)
    sidesave.load(checkpoint, into={"teacher": target}, rename={"model": "teacher"})
    assert difference(values(live(3)["model"]), values(target)) == ""


def flat(value: Any, fqn: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flat(item, f"{fqn}.{key}" if fqn else str(key))
    else:
        yield fqn, value


KEYS = st.sampled_from(["a", "b", "a.b", "b.a.c", "0", 0, 1])
NESTS = st.recursive(
    st.integers(), lambda below: st.dictionaries(KEYS, below, min_size=1, max_size=4), max_leaves=12
)
NAMES = st.lists(st.sampled_from(["a", "b", "c", "0"]), min_size=1, max_size=3).map(".".join)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "c"]), NESTS, min_size=1, max_size=3),
    st.dictionaries(NAMES, NAMES | st.none(), max_size=3),
    st.booleans(),
)
def test_a_renamed_nest_has_all_the_new_names_and_no_other(
    nest: dict[str, Any], rename: dict[str, str | None], shape: bool
):
    renaming = Renaming(rename)
    saved = FlatMap.of(nest)
    named = {path: ".".join(map(str, path)) for path in saved.leaves}
    assume(len(set(named.values())) == len(named))
    names = {path: new for path, fqn in named.items() if (new := renaming(fqn)) is not None}
    expected = [(name, saved.leaves[path]) for path, name in names.items()]
    renamed = Renamed(saved, set(), LiveMap(nest) if shape else None)
    places = {path: renamed.place(path, name) for path, name in names.items()}
    try:
        refuse_two_in_one_place(names, places)
        found = FlatMap(
            {places[path]: saved.leaves[path] for path in places}, renamed.finished()
        ).nest()
    except InvalidArgumentError:
        names = [name for name, _ in expected]
        within = any(
            one != other and str(one).startswith(f"{other}.") for one in names for other in names
        )
        assert within or len(set(names)) < len(names), "nothing was in the way"
        return
    assert sorted(flat(found) if found else (), key=str) == sorted(expected, key=str)


def test_pickled_keys_and_members_come_back(tmp_path: Path):
    state = {"x": {range(2): torch.ones(2), ("a", range(3)): {range(4), 5}, range(5): range(6)}}
    with Checkpointer(tmp_path, allow_pickle=True) as checkpointer:
        checkpointer.save(1, state, blocking=True)
        for rename in (None, {"x": "x"}):
            assert (
                difference(
                    state,
                    sidesave.load(tmp_path / "step-00000001", rename=rename, allow_pickle=True),
                )
                == ""
            )
        with pytest.raises(sidesave.errors.UnsupportedValueError):
            sidesave.load(tmp_path / "step-00000001")


@pytest.mark.parametrize(
    ("rename", "names"),
    [
        ({"bare": "epoch"}, ["bare", "epoch"]),
        ({"model.0.weight": "model.2.weight"}, ["model.0.weight", "model.2.weight"]),
        ({"epoch": "bare.x"}, ["epoch", "bare"]),
        (lambda fqn: "same", ["model.0.weight", "model.0.bias"]),
    ],
)
def test_two_things_with_one_name_are_refused_by_both_their_names(
    original: Path, rename: Any, names: list[str]
):
    with pytest.raises(InvalidArgumentError) as caught:
        sidesave.load(original, rename=rename)
    for name in names:
        assert name in str(caught.value)
    if "bare" not in names:
        target: dict[str, Any] = {"model": live(1)["model"], "same": 1}
        before = values(target)
        with pytest.raises(InvalidArgumentError):
            sidesave.load(original, into=target, rename=rename, strict=False)
        assert difference(before, values(target)) == ""


@pytest.mark.parametrize(
    "rename",
    [
        3,
        "model",
        {1: "x"},
        {"x": 2},
        {"": "x"},
        {"model.0.weight": ""},
        lambda fqn: 7,
        lambda fqn: "",
        ["model"],
    ],
)
def test_what_is_no_renaming_is_refused(original: Path, rename: Any):
    with pytest.raises(InvalidArgumentError, match="rename"):
        sidesave.load(original, rename=rename)


def test_what_a_renaming_raises_is_raised(original: Path):
    def broken(fqn: str) -> str:
        raise KeyError(fqn)

    with pytest.raises(KeyError):
        sidesave.load(original, rename=broken)
