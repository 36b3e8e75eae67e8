"""Loading: what was saved comes back, into fresh values or live objects, and what does not fit touches nothing."""

import collections
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import assume, given
from hypothesis import strategies as st
from loads import (
    Extra,
    Loader,
    Trunk,
    Wrapped,
    assert_damaged,
    assert_equal,
    assert_refused,
    flip_bit,
    live,
    save,
    values,
    with_manifest,
)
from states import bits, difference, noise
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

import sidesave
from sidesave import Checkpointer
from sidesave.client.loading import apply
from sidesave.client.loading import load as loader
from sidesave.client.loading.flat import FlatMap, LiveMap
from sidesave.client.loading.rename import Renamed, Renaming, refuse_two_in_one_place
from sidesave.client.loading.tensors import TensorLoad
from sidesave.client.messages import Names
from sidesave.client.reading.checkpoint_reader import open_checkpoint
from sidesave.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FormatVersionError,
    IntegrityError,
    InvalidArgumentError,
    StateMismatchError,
)
from sidesave.stager.state.treespec import TensorRef


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ``live(3)``."""
    run = tmp_path_factory.mktemp("run")
    with Checkpointer(run) as checkpointer:
        return Path(checkpointer.save(7, live(3), blocking=True).committed.result())


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """A copy of it to be damaged."""
    return shutil.copytree(original, tmp_path / original.name)


# Fresh -----------------------------------------------------------------------------------------------------------


def test_a_fresh_load_gives_state_dicts_in_the_place_of_objects(original: Path):
    assert difference(values(live(3)), sidesave.load(original)) == ""


def test_fresh_tensors_are_independent_of_the_checkpoint_and_of_each_other(original: Path):
    first, second = sidesave.load(original), sidesave.load(original)
    for tensor in first["model"].values():
        tensor.zero_()
    assert difference(values(live(3)), second) == ""
    assert difference(second, sidesave.load(original)) == ""


@pytest.mark.parametrize("as_path", [str, Path, lambda path: os.path.relpath(path)])
def test_paths_of_all_kinds_are_taken(original: Path, as_path: Callable[[Path], Any]):
    assert sidesave.load(as_path(original), include="epoch") == {"epoch": 3}


def test_tied_weights_come_back_tied_and_across_items(tmp_path: Path):
    embedding = nn.Embedding(5, 3)
    head = nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    state = {"model": nn.ModuleList([embedding, head]), "ema": {"copy": embedding.weight}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        loaded = checkpointer.load()
        assert loaded["model"]["0.weight"].data_ptr() == loaded["model"]["1.weight"].data_ptr()
        assert loaded["ema"]["copy"].data_ptr() == loaded["model"]["0.weight"].data_ptr()
        alone = checkpointer.load(include="ema")  # whose bytes lie in the other item's file
    assert difference({"ema": {"copy": embedding.weight}}, alone) == ""


# Into live objects -----------------------------------------------------------------------------------------------


def test_everything_live_takes_its_state_in_place(original: Path):
    target, expected = live(1), values(live(3))
    before = dict(target), dict(target["nested"])
    addresses = [parameter.data_ptr() for parameter in target["model"].parameters()]
    assert sidesave.load(original, into=target) is target
    assert difference(expected, values(target)) == ""
    for name in ("model", "optimizer", "scheduler", "loader", "bare", "nested"):
        assert target[name] is before[0][name], name
    for name in ("ema", "complex", "heads", "loaders", 1):
        assert target["nested"][name] is before[1][name], name
    assert [parameter.data_ptr() for parameter in target["model"].parameters()] == addresses
    assert all(parameter.requires_grad for parameter in target["model"].parameters())


def test_training_goes_on_as_if_it_had_never_stopped(original: Path):
    reference, resumed = live(3), live(1)
    sidesave.load(original, into=resumed)
    for state in (reference, resumed):
        torch.manual_seed(11)
        for _ in range(3):
            state["optimizer"].zero_grad()
            state["model"](torch.randn(4, 8)).square().mean().backward()
            state["optimizer"].step()
            state["scheduler"].step()
    assert difference(values(reference), values(resumed)) == ""


def test_a_new_optimizer_without_state_takes_all_of_it(original: Path):
    target = live(1)
    target["optimizer"].state.clear()
    sidesave.load(original, into={"optimizer": target["optimizer"]})
    assert difference(values(live(3)["optimizer"]), values(target["optimizer"])) == ""


def test_only_the_named_items_are_loaded(original: Path):
    target, untouched = live(1), values(live(1))
    into = {"model": target["model"]}
    sidesave.load(original, into=into)
    assert into.keys() == {"model"}
    assert difference(values(live(3)["model"]), values(target["model"])) == ""
    del target["model"], untouched["model"]
    assert difference(untouched, values(target)) == ""


def test_a_lazy_module_takes_the_shapes_of_the_checkpoint(original: Path):
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(8))
    sidesave.load(original, into={"model": model})
    assert difference(values(live(3)["model"]), values(model)) == ""


def test_sparse_tensors_are_loaded_in_place(tmp_path: Path):
    def sparse(*rows: int) -> torch.Tensor:
        return torch.sparse_coo_tensor(
            torch.tensor([rows]), torch.arange(1.0, 1 + len(rows)), (5,), check_invariants=True
        ).coalesce()

    class Graph(nn.Module):
        def __init__(self, adjacency: torch.Tensor) -> None:
            super().__init__()
            self.adjacency = nn.Buffer(adjacency)

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"graph": Graph(sparse(0, 2, 3)), "bare": sparse(1)}, blocking=True)
        target: dict[str, Any] = {"graph": Graph(sparse(4)), "bare": sparse(0, 1, 2, 3)}
        checkpointer.load(into=target)
        assert difference(sparse(0, 2, 3), target["graph"].adjacency) == ""
        assert difference(sparse(1), target["bare"]) == ""
        wrong = torch.zeros(4).to_sparse()
        with pytest.raises(StateMismatchError, match=r"bare: shape \[5\] in the checkpoint, \[4\] in the target"):
            checkpointer.load(into={"bare": wrong})


# Parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("include", "exclude", "names"),
    [
        ("model", None, {"model.*"}),
        ("model.*", None, {"model.*"}),
        (["model.0", "epoch"], None, {"model.0.weight", "model.0.bias", "epoch"}),
        ("*.weight", "model.2.*", {"model.0.weight", "model.1.weight", "nested.heads.*.weight"}),
        (None, ["model", "optimizer", "scheduler", "nested"], {"loader.position", "epoch", "bare"}),
        ("nested.heads.1", None, {"nested.heads.1.weight", "nested.heads.1.bias"}),
        ("nested.1", None, {"nested.1"}),
    ],
)
def test_patterns_choose_what_is_loaded(original: Path, include: Any, exclude: Any, names: set[str]):
    import fnmatch

    def leaves(value: Any, fqn: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            for key, item in value.items():
                yield from leaves(item, f"{fqn}.{key}" if fqn else str(key))
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                yield from leaves(item, f"{fqn}.{index}")
        else:
            yield fqn, value

    everything = dict(leaves(sidesave.load(original), ""))
    expected = [value for fqn, value in everything.items() if any(fnmatch.fnmatchcase(fqn, name) for name in names)]
    found = [value for _, value in leaves(sidesave.load(original, include=include, exclude=exclude), "")]
    assert len(expected) == len(found)
    assert difference(expected, found) == ""


def test_what_is_left_out_leaves_nothing_behind(tmp_path: Path):
    state = {"a": {"x": 1, "empty": {}, "none": []}, "b": {}, "c": [], "d": {"e": {"f": []}}, "g": ((), 2)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, blocking=True)
        assert checkpointer.load() == state
        assert checkpointer.load(include="a") == {"a": state["a"]}
        assert checkpointer.load(include=["b", "g.1"]) == {"b": {}, "g": (2,)}
        assert checkpointer.load(exclude=["a", "b", "d", "g"]) == {"c": []}


def test_what_makes_sense_only_whole_is_loaded_whole(tmp_path: Path):
    state = {"x": {"set": {1, (2, 3)}, "sparse": torch.eye(3).to_sparse(), "keys": {(1, "a"): 2}}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, blocking=True)
        assert checkpointer.load(include="*.set") == {"x": {"set": {1, (2, 3)}}}
        assert difference({"x": {"sparse": state["x"]["sparse"]}}, checkpointer.load(include="*.sparse")) == ""
        assert checkpointer.load(include="x.keys") == {"x": {"keys": {(1, "a"): 2}}}


def test_a_part_is_loaded_into_live_objects_and_the_rest_stays(original: Path):
    target = live(1)
    expected = values(target["model"]) | {
        name: tensor for name, tensor in values(live(3)["model"]).items() if name.startswith("0.")
    }
    sidesave.load(original, into={"model": target["model"]}, include="model.0.*")
    assert difference(expected, values(target["model"])) == ""


def test_only_what_is_asked_for_is_read(original: Path, checkpoint: Path):
    """A damaged tensor is no obstacle to another one's reader, far away in the file or in another file."""
    flip_bit(checkpoint / "optimizer.rank-00000.safetensors", -1)
    expected = sidesave.load(original, include="model")
    assert difference(expected, sidesave.load(checkpoint, include="model")) == ""


# What does not fit -----------------------------------------------------------------------------------------------


def test_shapes_that_differ_are_named_and_nothing_is_touched(original: Path):
    message = assert_refused(
        original,
        live(1, width=9),
        "model.0.weight: shape [8, 8] in the checkpoint, [9, 9] in the target",
        "model.0.bias: shape [8] in the checkpoint, [9] in the target",
        "model.1.running_mean: shape",
        "model.2.weight: shape",
        "optimizer.state.0.exp_avg: shape [8, 8]",
        "and 10 more",
    )
    assert "nested" not in message


def test_names_that_differ_are_all_named_and_nothing_is_touched(original: Path):
    target = live(1)
    target["model"] = nn.Sequential(target["model"][0], nn.Identity(), nn.Identity(), nn.Linear(8, 8))
    del target["nested"]["ema"]
    target["nested"]["emb"] = torch.zeros(3, 3)
    assert_refused(
        original,
        target,
        "model.3.weight: missing in the checkpoint",
        "model.3.bias: missing in the checkpoint",
        "model.1.running_var: unexpected",
        "model.2.weight: unexpected",
        "nested.emb: missing in the checkpoint (near: nested.ema)",
        "nested.ema: unexpected",
    )


def test_items_that_were_never_saved_are_refused_with_what_is_near(original: Path):
    target = {"modle": nn.Linear(8, 8), **live(1)}
    assert_refused(original, target, "modle: missing in the checkpoint (near: model)")


def test_dtypes_that_differ_are_named_and_nothing_is_touched(original: Path):
    target = live(1)
    target["model"].half()
    target["nested"]["complex"] = torch.zeros(3, dtype=torch.complex64)
    assert_refused(
        original,
        target,
        "model.0.weight: torch.float32 in the checkpoint, torch.float16 in the target; pass dtype= to cast",
        "nested.complex: torch.complex128 in the checkpoint, torch.complex64 in the target",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda target: target.update(bare=nn.Linear(2, 2)), "bare: the checkpoint holds a "),
        (
            lambda target: target.update(model=torch.zeros(2)),
            "model: the checkpoint holds a OrderedDict, the target",
        ),
        (lambda target: target.update(epoch={"one": torch.zeros(1)}), "epoch: the checkpoint holds a int here"),
        (lambda target: target.update(model=torch.optim.SGD([torch.zeros(1)])), "model: the checkpoint holds no optim"),
        (lambda target: target["nested"]["heads"].pop(), "nested.heads: the checkpoint does not hold 1 items here"),
        (
            lambda target: target.update(optimizer=torch.optim.AdamW(target["model"].parameters())),
            "optimizer: parameter groups of [2, 4] in the checkpoint, [6] in the target",
        ),
    ],
)
def test_targets_of_another_kind_are_refused_and_nothing_is_touched(
    original: Path, change: Callable[[dict[str, Any]], object], message: str
):
    target = live(1)
    change(target)
    assert_refused(original, target, message)


def test_targets_without_memory_are_refused(original: Path):
    with torch.device("meta"):
        model = live(0)["model"]
    with pytest.raises(StateMismatchError, match=r"model\.0\.weight: the target is a meta tensor .* to_empty\(\)"):
        sidesave.load(original, into={"model": model})


def test_a_mismatch_of_thousands_is_told_in_a_few_lines(tmp_path: Path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": [torch.zeros(2) for _ in range(3000)]}, blocking=True)
    message = assert_refused(tmp_path / "step-00000001", {"x": [torch.zeros(3) for _ in range(3000)]}, "x.0: shape")
    assert len(message.splitlines()) < 30
    assert "and 2990 more" in message


def test_not_strict_loads_what_both_have(original: Path):
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Identity(), nn.Linear(8, 8))
    kept = model[3].weight.detach().clone()
    into: dict[str, Any] = {"model": model, "never saved": Loader(5), "epoch": 0}
    sidesave.load(original, into=into, strict=False)
    assert difference(live(3)["model"][0].weight.detach(), model[0].weight.detach()) == ""
    assert difference(kept, model[3].weight.detach()) == ""
    assert (into["epoch"], into["never saved"].position) == (3, 5)


def test_not_strict_still_refuses_shapes_that_differ(original: Path):
    assert_refused(original, {"model": live(1, width=9)["model"]}, "model.0.weight: shape", strict=False)


def test_a_target_that_is_no_dict_is_refused(original: Path):
    with pytest.raises(InvalidArgumentError, match="into must be a dict"):
        sidesave.load(original, into=nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("map_location", "told"),
    [
        ("cuda:99", "map_location='cuda:99' is no device here: "),
        (torch.device("cuda", 99), "is no device here: "),
        ("gpu", "map_location='gpu' is no device here: "),
        (nn.Linear(9, 9), "map_location must be one device, not Linear"),
        (lambda storage, where: storage, "a checkpoint does not say which devices its tensors were on"),
        ({"cuda:1": "cuda:0"}, "a checkpoint does not say which devices its tensors were on"),
    ],
    ids=["no such number", "no such number of a device", "no device", "a module", "a function", "a dict"],
)
def test_a_device_that_is_not_there_or_is_no_device_is_refused(original: Path, map_location: Any, told: str):
    with pytest.raises(InvalidArgumentError) as caught:
        sidesave.load(original, map_location=map_location)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("call", [sidesave.load, sidesave.verify, sidesave.history, sidesave.find])
@pytest.mark.parametrize("path", ["", "gs://b/run/step-00000001", Path("gs://b/run"), "s3://b", None], ids=repr)
def test_a_path_that_is_none_or_a_url_is_refused(call: Callable[[Any], object], path: Any):
    with pytest.raises(InvalidArgumentError, match=r"a path must be|only local and mounted directories"):
        call(path)


# Other names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rename",
    [
        {"model.module": "model"},
        {"model.module.": "model."},
        lambda fqn: fqn.replace(".module.", ".", 1),
    ],
)
def test_the_prefix_of_a_wrapper_is_taken_away_and_a_plain_model_takes_it(tmp_path: Path, rename: Any):
    source, target = Trunk(1), Trunk(2)
    path = save(tmp_path, {"model": Wrapped(source), "epoch": 3})
    assert_refused(path, {"model": target}, 'rename={"model.module": "model"}', "none of the 9 names fits")
    into: dict[str, Any] = {"model": target, "epoch": 0}
    assert sidesave.load(path, into=into, rename=rename) is into
    assert_equal(source, target)
    assert into["epoch"] == 3
    fresh = sidesave.load(path, rename=rename)
    assert difference({"model": values(source), "epoch": 3}, fresh) == ""


def test_the_prefix_of_a_wrapper_is_put_in_front(tmp_path: Path):
    source, target = Trunk(1), Trunk(2)
    path = save(tmp_path, {"model": source})
    assert_refused(path, {"model": Wrapped(target)}, 'rename={"model": "model.module"}')
    sidesave.load(path, into={"model": Wrapped(target)}, rename={"model": "model.module"})
    assert_equal(source, target)


def test_what_torch_compile_puts_into_names_is_taken_out(tmp_path: Path):
    source, target = Trunk(1), Trunk(2)
    source.backbone = torch.compile(source.backbone)  # pyright: ignore[reportAttributeAccessIssue]
    path = save(tmp_path, {"model": torch.compile(source)})
    assert any("_orig_mod" in name for name in sidesave.load(path)["model"])
    sidesave.load(path, into={"model": target}, rename=lambda fqn: fqn.replace("_orig_mod.", ""))
    expected = collections.OrderedDict(
        (name.replace("_orig_mod.", ""), tensor) for name, tensor in values(source).items()
    )
    assert difference(expected, values(target)) == ""
    sidesave.load(path, into={"model": torch.compile(Trunk(3))}, strict=False)


def test_an_item_becomes_another_and_its_parts_too_and_the_rest_is_left_out(tmp_path: Path):
    source, teacher, head = Trunk(1), Trunk(2), nn.Linear(4, 2)
    path = save(tmp_path, {"model": source, "optimizer": torch.optim.SGD(source.parameters()), "epoch": 3})
    sidesave.load(path, into={"teacher": teacher}, rename={"model": "teacher"})
    assert_equal(source, teacher)
    sidesave.load(path, into={"classifier": head}, rename={"model.head": "classifier", "model": None})
    assert_equal(source.head, head)
    split = sidesave.load(path, rename={"model.backbone": "trunk", "model.head": "heads.first", "optimizer": None})
    assert split.keys() == {"trunk", "heads", "epoch"}
    assert difference(values(source.backbone), split["trunk"]) == ""
    assert difference(
        {f"first.{name}": tensor for name, tensor in source.head.state_dict().items()},
        {f"{name}": tensor for name, tensor in split["heads"].items()},
    ) == ("")


def test_an_optimizer_and_an_object_of_the_users_keep_their_structure_under_another_name(original: Path):
    target, expected = live(1), values(live(3))
    into = {"a": {"opt": target["optimizer"]}, "b": target["scheduler"], "c": [target["loader"]]}
    rename = {"optimizer": "a.opt", "scheduler": "b", "loader": "c.0"}
    sidesave.load(original, into=into, rename=rename)
    for name in ("optimizer", "scheduler", "loader"):
        assert difference(expected[name], values(target[name])) == "", name
    fresh = sidesave.load(original, rename={"optimizer": "a.opt", "nested": "deep.down", "model": None})
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
    rename = {"nets.0.module": "nets.0", "nets.1.module": "nets.1", "extra.module": "extra", "plain.old": "plain.new"}
    sidesave.load(path, into=into, rename=rename)
    for index in range(2):
        assert_equal(state["nets"][index].module, into["nets"][index])
    assert difference(state["extra"].module.note, into["extra"].note) == ""
    assert into["plain"] == {"new": state["plain"]["old"], "list": [1, {"x": 2}]}
    assert sidesave.load(path, rename={"plain.old": "plain.new", "nets": None, "extra": None})["plain"] == into["plain"]
    assert sidesave.load(path, include="plain.list", rename={"plain": "other"}) == {"other": {"list": [1, {"x": 2}]}}


@pytest.mark.parametrize("name", ["model", "nested.heads"])
def test_renaming_nothing_changes_nothing(original: Path, name: str):
    expected = sidesave.load(original)
    assert difference(expected, sidesave.load(original, rename={name: name})) == ""
    assert difference(expected, sidesave.load(original, rename=lambda fqn: fqn)) == ""
    target = live(1)
    sidesave.load(original, into=target, rename=lambda fqn: fqn)
    assert difference(values(live(3)), values(target)) == ""


def test_structures_of_all_kinds_survive_a_new_name(tmp_path: Path):
    import collections

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
    assert found["y"]["z"]["tied"].data_ptr() == found["y"]["z"]["again"].data_ptr(), "tied as before"


def test_include_and_exclude_know_the_names_in_the_checkpoint(original: Path):
    teacher = live(1)["model"]
    before = values(teacher)
    into = {"teacher": teacher}
    sidesave.load(original, into=into, include="model.0", rename={"model": "teacher"})
    changed = {name for name, tensor in values(teacher).items() if not torch.equal(tensor, before[name])}
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
NESTS = st.recursive(st.integers(), lambda below: st.dictionaries(KEYS, below, min_size=1, max_size=4), max_leaves=12)
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
        found = FlatMap({places[path]: saved.leaves[path] for path in places}, renamed.finished()).nest()
    except InvalidArgumentError:
        names = [name for name, _ in expected]
        within = any(one != other and str(one).startswith(f"{other}.") for one in names for other in names)
        assert within or len(set(names)) < len(names), "nothing was in the way"
        return
    assert sorted(flat(found) if found else (), key=str) == sorted(expected, key=str)


def test_pickled_keys_and_members_come_back(tmp_path: Path):
    state = {"x": {range(2): torch.ones(2), ("a", range(3)): {range(4), 5}, range(5): range(6)}}
    with Checkpointer(tmp_path, allow_pickle=True) as checkpointer:
        checkpointer.save(1, state, blocking=True)
        for rename in (None, {"x": "x"}):
            assert difference(state, sidesave.load(tmp_path / "step-00000001", rename=rename, allow_pickle=True)) == ""
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
def test_two_things_with_one_name_are_refused_by_both_their_names(original: Path, rename: Any, names: list[str]):
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
    [3, "model", {1: "x"}, {"x": 2}, {"": "x"}, {"model.0.weight": ""}, lambda fqn: 7, lambda fqn: "", ["model"]],
)
def test_what_is_no_renaming_is_refused(original: Path, rename: Any):
    with pytest.raises(InvalidArgumentError, match="rename"):
        sidesave.load(original, rename=rename)


def test_what_a_renaming_raises_is_raised(original: Path):
    def broken(fqn: str) -> str:
        raise KeyError(fqn)

    with pytest.raises(KeyError):
        sidesave.load(original, rename=broken)


# Another model ---------------------------------------------------------------------------------------------------


def test_weights_only_are_a_start(original: Path):
    target = live(1)
    target["ema"] = nn.Linear(3, 3)  # which the checkpoint does not know
    before = values(target)
    sidesave.load(original, into=target, include="model")
    assert difference(values(live(3)["model"]), values(target["model"])) == ""
    del target["model"], before["model"]
    assert difference(before, values(target)) == ""


def test_of_what_is_chosen_all_must_fit(original: Path):
    larger = nn.Sequential(*live(1)["model"], nn.Linear(8, 8))
    smaller = live(1)["model"][:2]
    assert_refused(original, {"model": larger}, "model.3.weight: missing", include="model")
    assert_refused(original, {"model": smaller}, "model.2.weight: unexpected", include="model")
    assert_refused(original, {"model": larger}, "model.3.weight: missing", exclude="optimizer")
    sidesave.load(original, into={"model": larger}, exclude=["model.3"])
    assert difference(values(live(3)["model"]), values(larger[:3])) == ""
    assert_refused(original, {"modle": live(1)["model"]}, "'modle'", "'model'", include="model")


def test_not_strict_tells_what_was_missing_and_unexpected_and_reads_no_more(
    original: Path, caplog: pytest.LogCaptureFixture
):
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.Identity(), nn.Linear(8, 8))
    table: dict[str, Any] = {"ema": torch.zeros(3, 3), "mine": 1}
    with caplog.at_level(logging.WARNING):
        loaded = loader.read(original, into={"model": model, "nested": table, "odd": 0}, strict=False)
        everything = loader.read(original, into={"model": live(1)["model"], "nested": live(1)["nested"]})
    assert set(loaded.missing) == {"model.3.weight", "model.3.bias", "odd"}
    assert "it has nothing for nested.mine, which stay as they are" in caplog.text
    assert {"model.2.weight", "nested.heads", "nested.complex"} < set(loaded.unexpected)
    assert "model.3.weight" in caplog.text and "model.2.weight" in caplog.text
    assert loaded.nbytes_read <= everything.nbytes_read
    assert (everything.missing, everything.unexpected) == ((), ())
    loaded.apply()
    assert table.keys() == {"ema", "mine", "loaders", "history", "array"}, "plain data beside live objects is taken"
    assert "nested.loaders, nested.history, nested.array, which the state does not have, are added" in caplog.text
    assert difference(live(3)["nested"]["ema"], table["ema"]) == ""


def test_another_model_is_said_to_be_one(tmp_path: Path):
    path = save(tmp_path, {"model": {f"encoder.{n}.weight": torch.zeros(2) for n in range(148)}})
    other = {f"blocks.{n}.attention": torch.ones(2) for n in range(50)}
    assert_refused(path, {"model": other}, "none of the 50 names fits", "148 others", "another model")
    some = {**other, "encoder.7.weight": torch.ones(2)}
    assert_refused(path, {"model": some}, "only 1 of the 51 names fit")


def test_ten_of_each_kind_are_named_and_the_rest_counted(tmp_path: Path):
    saved = {"a": [torch.zeros(2)] * 1, **{f"m{n:03}": torch.zeros(2) for n in range(40)}}
    saved |= {f"shape{n:03}": torch.zeros(n, 2) for n in range(40)}
    path = save(tmp_path, {"x": saved})
    target = {"a": [torch.zeros(2)], **{f"n{n:03}": torch.zeros(2) for n in range(30)}}
    target |= {f"shape{n:03}": torch.zeros(n, 3) for n in range(40)}
    message = assert_refused(path, {"x": target}, "and 20 more are missing", "and 30 more are unexpected")
    assert "and 30 more do not fit" in message
    assert "x.shape007: shape [7, 2] in the checkpoint, [7, 3] in the target" in message
    assert len(message.splitlines()) < 40
    assert "x.n000: missing in the checkpoint (near: " in message


def test_names_that_are_near_are_found_among_a_hundred_thousand():
    parts = ("attn.wq.weight", "attn.wk.weight", "mlp.up.weight", "mlp.down.weight", "norm.weight")
    names = [f"model.layers.{n}.{part}" for n in range(20_000) for part in parts]
    known = Names(names)
    assert "model.layers.777.attn.wq.weight" in known.near("model.layers.777.atn.wq.weight")
    assert "model.layers.777.attn.wq.weight" in known.near("model.module.layers.777.attn.wq.weight")
    assert known.near("something else entirely") == []
    assert known.near("x" * 100_000) == []
    assert known.hint("model.layers.19999.norm.weigth").startswith(" (near: model.layers.19999.norm.weight")


# Plain data ------------------------------------------------------------------------------------------------------


def test_plain_data_is_replaced_as_it_was_saved_in_the_containers_that_are_there(tmp_path: Path):
    saved: dict[str, Any] = {
        "hist": {"1": 0.5},
        "log": [{"loss": 1.0}, {"loss": 0.5}],
        "ordered": collections.OrderedDict(b=1, a=[2]),
        "default": collections.defaultdict(list, {"k": [1]}),
        "counter": collections.Counter("aab"),
        "queue": collections.deque([1, 2], maxlen=3),
        "tuple": ([1], "new"),
        "other kind": {"a": 1},
    }
    into: dict[str, Any] = {
        "hist": {},
        "log": [{"loss": 9.0, "old": 1}],
        "ordered": collections.OrderedDict(old=1, a=[]),
        "default": collections.defaultdict(list, {"old": [2]}),
        "counter": collections.Counter("zz"),
        "queue": collections.deque([7], maxlen=3),
        "tuple": ([], "old"),
        "other kind": [1, 2],
    }
    before, entry, inner = dict(into), into["log"][0], into["ordered"]["a"]
    for strict in (True, False):
        sidesave.load(save(tmp_path / str(strict), saved), into=into, strict=strict)
        assert difference(saved, into) == ""
    assert {name for name in into if into[name] is before[name]} == into.keys() - {"tuple", "other kind"}
    assert into["log"][0] is entry and into["ordered"]["a"] is inner


def test_two_names_of_one_list_become_two_where_two_were_saved(tmp_path: Path):
    path = save(tmp_path, {"x": [[1], [2], [3]]})
    into = {"x": [[0]] * 3}
    assert sidesave.load(path, into=into) == {"x": [[1], [2], [3]]}


def test_plain_data_is_put_back_when_something_behind_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = save(tmp_path, {"loader": Loader(3), "a": {"n": [1, 2]}, "t": (Loader(1), 5), "z": [1]})
    into: dict[str, Any] = {"loader": Loader(9), "a": {"n": [7]}, "t": (Loader(2), 4), "z": []}
    before, inner, last = values(into), into["a"]["n"], into["z"]
    refill = apply._refill

    def interrupted(target: Any, items: Any) -> None:
        if target is last and items:
            raise KeyboardInterrupt
        refill(target, items)

    monkeypatch.setattr(apply, "_refill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sidesave.load(path, into=into)
    assert difference(before, values(into)) == ""
    assert into["a"]["n"] is inner


@pytest.mark.parametrize("target", [None, {}])
def test_no_tensors_take_the_place_of_nothing(original: Path, target: Any):
    for name in ("model", "optimizer", "bare"):
        assert_refused(original, {name: target}, f"{name}: the checkpoint holds tensors here, and the target is")


def test_beside_live_objects_only_these_must_match(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = save(tmp_path, {"x": {"w": torch.ones(2), "epoch": 3, "notes": {"a": 1}}})
    into: dict[str, Any] = {"x": {"w": torch.zeros(2), "epoch": 0, "mine": 7}}
    sidesave.load(path, into=into)
    assert difference({"w": torch.ones(2), "epoch": 3, "mine": 7, "notes": {"a": 1}}, into["x"]) == ""
    assert (
        "has nothing for x.mine, which stay" in caplog.text and "x.notes, which the state does not have" in caplog.text
    )
    assert_refused(path, {"x": {"v": torch.zeros(2)}}, "x.v: missing", "x.w: unexpected")


def test_of_plain_data_what_is_excluded_stays(tmp_path: Path):
    path = save(tmp_path, {"cfg": {"lr": 0.1, "sizes": {"a": 1, "b": 2}, "gone": 3}})
    into: dict[str, Any] = {"cfg": {"lr": 0.5, "sizes": {"a": 8, "b": 9}, "new": 1}}
    sidesave.load(path, into=into, exclude=["cfg.lr", "cfg.sizes.b", "cfg.gone", "cfg.new"])
    assert into == {"cfg": {"lr": 0.5, "sizes": {"a": 1, "b": 9}, "new": 1}}


def test_what_is_not_used_is_told_by_name(original: Path, caplog: pytest.LogCaptureFixture):
    sidesave.load(original, into={"model": live(1)["model"], "epoch": 0})
    assert "nobody has asked for optimizer, scheduler, loader, bare, nested, which it has too" in caplog.text
    caplog.clear()
    target = {"model": live(1)["model"], "optimizer": live(1)["optimizer"]}
    sidesave.load(original, into=target, include="model")
    assert [record.message for record in caplog.records] == [
        f"loading {original}: it has nothing for optimizer, which stay as they are"
    ]
    caplog.clear()
    sidesave.load(original, into=live(1))
    assert not caplog.records
    both = [sidesave.Source(original, include="model")] * 2
    sidesave.load_sources(both, into={"model": live(1)["model"]})
    assert f"nothing of {original} is used: later sources have all" in caplog.text


# Objects that raise ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["first", "last", "nested"])
def test_an_object_that_raises_leaves_all_others_as_they_were(original: Path, where: str):
    target = live(1)
    stubborn = Loader(9, stubborn=True)
    if where == "nested":
        target["nested"]["loaders"] = (target["nested"]["loaders"][0], stubborn)
    else:
        target["loader"] = stubborn
        order = sorted(target, key=lambda name: (name == "loader") == (where == "last"))
        target = {name: target[name] for name in order}
    before = values(target)
    with pytest.raises(RuntimeError, match="does not want to"):
        sidesave.load(original, into=target)
    assert difference(before, values(target)) == ""


def test_a_module_that_raises_leaves_objects_and_optimizers_as_they_were(original: Path):
    class Stubborn(nn.Linear):
        def load_state_dict(self, *args: Any, **options: Any) -> Any:
            raise RuntimeError("this module does not want to")

    target = live(1)
    target["nested"]["heads"][1] = Stubborn(2, 3)
    before = values(target)
    with pytest.raises(RuntimeError, match="does not want to"):
        sidesave.load(original, into=target)
    for name in ("optimizer", "scheduler", "loader", "epoch"):
        assert difference(before[name], values(target)[name]) == "", name


# Dtype and device ------------------------------------------------------------------------------------------------


def test_floating_point_tensors_are_cast_and_others_are_not(original: Path):
    fresh = sidesave.load(original, dtype=torch.bfloat16)
    expected = values(live(3))
    assert difference(expected["model"]["0.weight"].bfloat16(), fresh["model"]["0.weight"]) == ""
    for at in (
        ("model", "1.num_batches_tracked"),
        ("nested", "complex"),
        ("nested", "array"),
        ("scheduler", "_step_count"),
    ):
        assert difference(expected[at[0]][at[1]], fresh[at[0]][at[1]]) == "", at


def test_a_cast_load_fits_a_target_of_that_dtype(original: Path):
    target = live(1)["model"].half()
    sidesave.load(original, into={"model": target}, dtype=torch.float16)
    assert difference(live(3)["model"][2].weight.detach().half(), target[2].weight.detach()) == ""


def test_step_counts_are_not_cast(tmp_path: Path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    for state in optimizer.state.values():
        state["step"].fill_(1001)  # which bfloat16 does not know
    path = save(tmp_path, {"model": model, "optimizer": optimizer})
    fresh = sidesave.load(path, dtype=torch.bfloat16)["optimizer"]["state"][0]
    assert (fresh["step"].item(), fresh["exp_avg"].dtype) == (1001, torch.bfloat16)
    target = nn.Linear(2, 2).bfloat16()
    other = torch.optim.AdamW(target.parameters())
    sidesave.load(path, into={"model": target, "optimizer": other}, dtype=torch.bfloat16)
    assert [state["step"].item() for state in other.state.values()] == [1001, 1001]


def test_a_cast_to_what_is_no_floating_point_is_refused(original: Path):
    with pytest.raises(InvalidArgumentError, match=r"torch\.int32"):
        sidesave.load(original, dtype=torch.int32)


def test_fresh_tensors_go_to_the_device_asked_for_and_arrays_stay(original: Path):
    loaded = sidesave.load(original, map_location="meta", include=["model", "nested.array", "epoch"])
    assert {tensor.device.type for tensor in loaded["model"].values()} == {"meta"}
    assert {name: tensor.shape for name, tensor in loaded["model"].items()} == {
        name: tensor.shape for name, tensor in live(3)["model"].state_dict().items()
    }
    assert difference(np.full(3, 3), loaded["nested"]["array"]) == ""


# Damage ----------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_found_with_file_block_and_name_and_nothing_is_applied(tmp_path: Path):
    large = torch.randn(300_000)  # 1.2 MB: five blocks of its own, after one of the header
    with Checkpointer(tmp_path) as checkpointer:
        info = checkpointer.save(1, {"x": {"small": torch.ones(5), "large": large}}, blocking=True).committed.result()
    name = "x.rank-00000.safetensors"
    path = Path(info) / name
    flip_bit(path, 8 + int.from_bytes(path.read_bytes()[:8], "little") + 600_000)
    target = {"x": {"small": torch.zeros(5), "large": torch.zeros(300_000)}}
    with pytest.raises(IntegrityError, match=rf"/{name}: block 3 \(bytes .*\) does not .*; it holds x\.large$"):
        sidesave.load(info, into=target)
    assert not any(tensor.any() for tensor in target["x"].values())
    [fault] = sidesave.verify(info).faults
    assert (fault.file, fault.fqns) == (name, ("x.large",))
    assert difference({"x": {"small": torch.ones(5)}}, sidesave.load(info, include="x.small")) == ""
    assert not torch.equal(sidesave.load(info, verify=False)["x"]["large"], large)


FILES = [
    "manifest.json",
    "rank-00000.json",
    "objects.rank-00000.msgpack",
    "model.rank-00000.safetensors",
    "model.rank-00000.xxh3",
    "tensors.rank-00000.safetensors",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("at", [0, 1, 100, -1])
def test_a_flipped_bit_anywhere_is_found_and_nothing_is_applied(checkpoint: Path, name: str, at: int):
    path = checkpoint / name
    flip_bit(path, min(at, path.stat().st_size - 1))
    assert_damaged(checkpoint, name.replace(".", r"\."))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cut", [lambda size: 0, lambda size: size // 2, lambda size: size - 1])
def test_a_short_file_is_found_and_nothing_is_applied(checkpoint: Path, name: str, cut: Callable[[int], int]):
    os.truncate(checkpoint / name, cut((checkpoint / name).stat().st_size))
    assert_damaged(checkpoint, name.replace(".", r"\."))


@pytest.mark.parametrize("name", FILES[1:])
def test_a_missing_file_is_found_and_nothing_is_applied(checkpoint: Path, name: str):
    (checkpoint / name).unlink()
    assert_damaged(checkpoint, name.replace(".", r"\."))


def test_bytes_appended_to_a_file_are_found(checkpoint: Path):
    with (checkpoint / "model.rank-00000.safetensors").open("ab") as file:
        file.write(b"x")
    assert_damaged(checkpoint, r"model\.rank-00000\.safetensors")


def test_files_of_two_checkpoints_do_not_mix(tmp_path: Path):
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": {"w": torch.full((100,), float(step))}}, blocking=True)
    for suffix in ("safetensors", "xxh3"):
        name = f"x.rank-00000.{suffix}"
        shutil.copy(tmp_path / "step-00000001" / name, tmp_path / "step-00000002" / name)
    with pytest.raises(IntegrityError, match=r"x\.rank-00000\.xxh3"):
        sidesave.load(tmp_path / "step-00000002")


def test_a_directory_without_a_checkpoint_is_said_to_have_none(tmp_path: Path, original: Path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere", original / "manifest.json"):
        with pytest.raises(CheckpointNotFoundError):
            sidesave.load(path)


def test_of_a_run_directory_the_newest_is_loaded_and_what_find_lists_too(tmp_path: Path):
    with Checkpointer(tmp_path) as checkpointer:
        for step in (2, 5):
            checkpointer.save(step, {"step": step}, blocking=True)
    assert sidesave.load(tmp_path) == sidesave.load(str(tmp_path), into={"step": 0}) == {"step": 5}
    assert [sidesave.load(info)["step"] for info in sidesave.find(tmp_path)] == [2, 5]
    (tmp_path / "step-00000005" / "manifest.json").write_bytes(b"{}")
    with pytest.raises(IntegrityError):
        sidesave.load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32])
@pytest.mark.parametrize("stored", [torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, dtype=torch.float64)])
def test_a_skeleton_that_takes_a_tensor_for_what_it_is_not_is_damaged(
    tmp_path: Path, stored: torch.Tensor, dtype: torch.dtype
):
    with sidesave.Checkpointer(tmp_path) as ckpt:
        path = ckpt.save(1, {"x": stored}, blocking=True).committed.result().path
    with open_checkpoint(path) as reader, pytest.raises(IntegrityError, match="x is stored as"):
        TensorLoad(TensorRef("x", dtype)).look_up(reader, None)


def test_a_newer_format_is_refused_as_such(checkpoint: Path):
    with_manifest(checkpoint, lambda body: None)
    sidesave.load(checkpoint)  # or it would prove nothing
    with_manifest(checkpoint, lambda body: body.update(version=2))
    target = live(1)
    before = values(target)
    with pytest.raises(FormatVersionError, match="format version 2; this sidesave reads version 1"):
        sidesave.load(checkpoint, into=target)
    assert difference(before, values(target)) == ""


# Which checkpoint ------------------------------------------------------------------------------------------------


def state_of(step: int) -> dict[str, Any]:
    return {"x": {"w": torch.full((300,), float(step))}, "step": step}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with steps 10, 20 and 30."""
    with Checkpointer(tmp_path) as checkpointer:
        for step in (10, 20, 30):
            checkpointer.save(step, state_of(step))
    return tmp_path


def test_the_newest_or_the_step_asked_for_is_loaded(run: Path):
    with Checkpointer(run) as checkpointer:
        assert checkpointer.load()["step"] == 30
        assert checkpointer.load(20)["step"] == 20
        assert checkpointer.load(step=10)["step"] == 10
        with pytest.raises(CheckpointNotFoundError, match=r"no step 15; there are \[10, 20, 30\]"):
            checkpointer.load(15)


def test_fallback_takes_the_newest_older_one_that_verifies(run: Path, caplog: pytest.LogCaptureFixture):
    flip_bit(run / "step-00000030" / "x.rank-00000.safetensors", -1)
    (run / "step-00000020" / "x.rank-00000.xxh3").unlink()
    with Checkpointer(run) as checkpointer:
        weight = torch.zeros(300)
        for step in (None, 20):
            with pytest.raises(IntegrityError):
                checkpointer.load(step, into={"x": {"w": weight}})
        assert not weight.any()
        with caplog.at_level(logging.WARNING):
            checkpointer.load(into={"x": {"w": weight}}, fallback=True)
        assert (weight == 10).all()
        passed_over = [record.message for record in caplog.records if "does not verify" in record.message]
        assert [message[:7] for message in passed_over] == ["step 30", "step 20"]
        info = checkpointer.save(15, state_of(15), blocking=True).committed.result()
        assert info.parent is not None
        assert info.parent[0] == 10


def test_fallback_raises_when_nothing_verifies(run: Path):
    for step in (10, 20, 30):
        flip_bit(run / f"step-000000{step}" / "x.rank-00000.safetensors", -1)
    with Checkpointer(run) as checkpointer, pytest.raises(IntegrityError, match="step-00000010"):
        checkpointer.load(fallback=True)


def test_fallback_does_not_go_forward(run: Path):
    flip_bit(run / "step-00000010" / "x.rank-00000.safetensors", -1)
    with Checkpointer(run) as checkpointer, pytest.raises(IntegrityError):
        checkpointer.load(10, fallback=True)


def test_fallback_is_for_damage_and_not_for_a_state_that_does_not_fit(run: Path):
    with Checkpointer(run) as checkpointer, pytest.raises(StateMismatchError):
        checkpointer.load(into={"x": {"w": torch.zeros(7)}}, fallback=True)


def test_a_step_with_a_damaged_manifest_is_damaged_and_not_missing(run: Path):
    flip_bit(run / "step-00000020" / "manifest.json", -3)
    with Checkpointer(run) as checkpointer:
        with pytest.raises(IntegrityError, match=r"step-00000020/manifest\.json"):
            checkpointer.load(20)
        assert checkpointer.load(20, fallback=True)["step"] == 10
        assert checkpointer.steps() == [10, 30]


def test_a_run_directory_with_a_newer_format_is_refused_as_such(run: Path):
    with_manifest(run / "step-00000030", lambda body: body.update(version=2))
    with pytest.raises(FormatVersionError), Checkpointer(run) as checkpointer:
        checkpointer.load()


# Lineage ---------------------------------------------------------------------------------------------------------


def test_a_checkpoint_names_the_one_it_was_resumed_from(run: Path):
    with Checkpointer(run) as first:
        assert first.load()["step"] == 30
        info = first.save(40, state_of(40), blocking=True).committed.result()
    assert info.parent is not None
    assert info.parent[0] == 30
    assert info.parent[1] != info.session
    with Checkpointer(run) as second:
        second.load(20)
        info = second.save(25, state_of(25), blocking=True).committed.result()
    assert info.parent is not None
    assert info.parent[0] == 20


def test_after_going_back_the_newest_is_what_was_saved_last(run: Path):
    with Checkpointer(run) as checkpointer:
        checkpointer.load(10)
        checkpointer.save(15, state_of(15), blocking=True)
        assert checkpointer.latest_step() == 15
        assert checkpointer.steps() == [10, 15, 20, 30]
        assert checkpointer.load()["step"] == 15
    with Checkpointer(run) as checkpointer:
        assert checkpointer.load()["step"] == 15


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_superseded_step_can_be_saved_again_and_an_ancestor_cannot(run: Path, restarts: bool, own: bool):
    """``own``: the steps gone back over are of the same session. ``restarts``: a new one goes on from where it went."""
    checkpointer = Checkpointer(run)
    try:
        if own:
            for step in (40, 50, 60):
                checkpointer.save(step, state_of(step))
            checkpointer.wait()
        steps = (40, 50, 60) if own else (10, 20, 30)
        checkpointer.load(steps[0])
        checkpointer.save(steps[0] + 5, state_of(1), blocking=True)
        if restarts:
            checkpointer.close()
            checkpointer = Checkpointer(run)
        for taken in (steps[0], steps[0] + 5):
            with pytest.raises(CheckpointExistsError, match=f"step {taken}"):
                checkpointer.save(taken, state_of(taken))
        info = checkpointer.save(steps[1], state_of(99), blocking=True).committed.result()
        assert sidesave.load(info)["step"] == 99
        with pytest.raises(CheckpointExistsError):
            checkpointer.save(steps[1], state_of(1))
        assert checkpointer.latest_step() == steps[1]
        assert checkpointer.load(steps[2])["step"] == steps[2], "abandoned, and still there"
    finally:
        checkpointer.close()


def test_an_existing_step_is_replaced_only_on_request(run: Path):
    with Checkpointer(run) as checkpointer:
        with pytest.raises(CheckpointExistsError) as caught:
            checkpointer.save(30, state_of(31))
        assert caught.value.filename == str(run / "step-00000030")
        assert checkpointer.load(30)["step"] == 30
        checkpointer.save(30, state_of(31), overwrite=True, blocking=True)
        assert checkpointer.load(30)["step"] == 31
        checkpointer.save(20, state_of(21), overwrite=True, blocking=True)
        assert (checkpointer.latest_step(), checkpointer.steps()) == (20, [10, 20, 30])
    assert sorted(path.name for path in run.iterdir() if "step" in path.name) == [
        "step-00000010",
        "step-00000020",
        "step-00000030",
    ]


def test_a_step_that_is_on_its_way_is_taken(run: Path):
    with Checkpointer(run) as checkpointer:
        checkpointer.save(40, {"x": torch.ones(1 << 20)})
        with pytest.raises(CheckpointExistsError, match="step 40 is already saved or being saved"):
            checkpointer.save(40, state_of(40))


# Stock readers ---------------------------------------------------------------------------------------------------


def test_stock_dcp_loads_a_checkpoint_directory(tmp_path: Path):
    torch.manual_seed(0)
    state: dict[str, Any] = {
        "model": {"weight": torch.randn(300, 400), "bias": torch.randn(300), "half": noise(torch.bfloat16, 7, 3)},
        "optimizer": {"step": torch.tensor(12.0), "count": torch.tensor(5), "flag": torch.tensor(True)},
        "bare": torch.arange(5),
        "empty": torch.empty(0, 3),
    }
    with Checkpointer(tmp_path) as checkpointer:
        path = checkpointer.save(1, state, blocking=True).committed.result().path
    flat = {f"{item}.{name}": tensor for item in ("model", "optimizer") for name, tensor in state[item].items()}
    flat |= {"bare": state["bare"]}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in flat.items()}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
    assert difference(flat, loaded) == ""

    one = {"model.weight": torch.zeros(300, 400)}
    dcp.load(one, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
    assert torch.equal(one["model.weight"], flat["model.weight"])


def test_stock_safetensors_opens_every_tensor_file(original: Path):
    expected = {
        "model": {f"model.{name}" for name in live(3)["model"].state_dict()},
        "optimizer": {f"optimizer.state.{n}.{key}" for n in range(6) for key in ("step", "exp_avg", "exp_avg_sq")},
        "tensors": {"bare"},
    }
    files = {path.name.partition(".")[0]: path for path in original.glob("*.safetensors")}
    assert files.keys() == {*expected, "nested"}
    for name, fqns in expected.items():
        assert safetensors.torch.load_file(files[name]).keys() == fqns
    loaded = safetensors.torch.load_file(files["model"])
    assert all(bits(loaded[f"model.{name}"]) == bits(tensor) for name, tensor in live(3)["model"].state_dict().items())
    assert bits(safetensors.torch.load_file(files["nested"])["nested.ema"]) == bits(live(3)["nested"]["ema"])
