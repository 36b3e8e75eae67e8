"""Loading: what was saved comes back, into fresh values or live objects, and what does not fit
touches nothing.
"""

import collections
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from loads import Loader, assert_refused, flip_bit, live, values
from states import bits, difference, noise
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from trainers import save

import sidesave
from sidesave import Checkpointer
from sidesave.client.loading.load import LoadRequest
from sidesave.client.messages import Names
from sidesave.client.targets import assign, tensor_memory
from sidesave.errors import InvalidArgumentError, StateMismatchError

# Fresh --------------------------------------------------------------------------------------------


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


# Into live objects --------------------------------------------------------------------------------


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
        with pytest.raises(
            StateMismatchError, match=r"bare: shape \[5\] in the checkpoint, \[4\] in the target"
        ):
            checkpointer.load(into={"bare": wrong})


# Parts --------------------------------------------------------------------------------------------


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
def test_patterns_choose_what_is_loaded(
    original: Path, include: Any, exclude: Any, names: set[str]
):
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
    expected = [
        value
        for fqn, value in everything.items()
        if any(fnmatch.fnmatchcase(fqn, name) for name in names)
    ]
    found = [
        value for _, value in leaves(sidesave.load(original, include=include, exclude=exclude), "")
    ]
    assert len(expected) == len(found)
    assert difference(expected, found) == ""


def test_what_is_left_out_leaves_nothing_behind(tmp_path: Path):
    state = {
        "a": {"x": 1, "empty": {}, "none": []},
        "b": {},
        "c": [],
        "d": {"e": {"f": []}},
        "g": ((), 2),
    }
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
        assert (
            difference(
                {"x": {"sparse": state["x"]["sparse"]}}, checkpointer.load(include="*.sparse")
            )
            == ""
        )
        assert checkpointer.load(include="x.keys") == {"x": {"keys": {(1, "a"): 2}}}


def test_a_part_is_loaded_into_live_objects_and_the_rest_stays(original: Path):
    target = live(1)
    expected = values(target["model"]) | {
        name: tensor for name, tensor in values(live(3)["model"]).items() if name.startswith("0.")
    }
    sidesave.load(original, into={"model": target["model"]}, include="model.0.*")
    assert difference(expected, values(target["model"])) == ""


def test_only_what_is_asked_for_is_read(original: Path, checkpoint: Path):
    """A damaged tensor is no obstacle to another one's reader, far away in the file or in another
    file.
    """
    flip_bit(checkpoint / "optimizer.rank-00000.safetensors", -1)
    expected = sidesave.load(original, include="model")
    assert difference(expected, sidesave.load(checkpoint, include="model")) == ""


# What does not fit --------------------------------------------------------------------------------


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
    target["model"] = nn.Sequential(
        target["model"][0], nn.Identity(), nn.Identity(), nn.Linear(8, 8)
    )
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
        (
            "model.0.weight: torch.float32 in the checkpoint, torch.float16 in the target; pass "
            "dtype= to cast"
        ),
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
        (
            lambda target: target.update(epoch={"one": torch.zeros(1)}),
            "epoch: the checkpoint holds a int here",
        ),
        (
            lambda target: target.update(model=torch.optim.SGD([torch.zeros(1)])),
            "model: the checkpoint holds no optim",
        ),
        (
            lambda target: target["nested"]["heads"].pop(),
            "nested.heads: the checkpoint does not hold 1 items here",
        ),
        (
            lambda target: target.update(optimizer=torch.optim.AdamW(target["model"].parameters())),
            (
                "optimizer.param_groups.0.lr: its parameters were in groups 0, 1, where it is not "
                "the same"
            ),
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
    with pytest.raises(
        StateMismatchError, match=r"model\.0\.weight: the target is a meta tensor .* to_empty\(\)"
    ):
        sidesave.load(original, into={"model": model})


def test_a_mismatch_of_thousands_is_told_in_a_few_lines(tmp_path: Path):
    save(tmp_path, {"x": [torch.zeros(2) for _ in range(3000)]})
    message = assert_refused(
        tmp_path / "step-00000001", {"x": [torch.zeros(3) for _ in range(3000)]}, "x.0: shape"
    )
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
    assert_refused(
        original, {"model": live(1, width=9)["model"]}, "model.0.weight: shape", strict=False
    )


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
        (
            lambda storage, where: storage,
            "a checkpoint does not say which devices its tensors were on",
        ),
        ({"cuda:1": "cuda:0"}, "a checkpoint does not say which devices its tensors were on"),
    ],
    ids=[
        "no such number",
        "no such number of a device",
        "no device",
        "a module",
        "a function",
        "a dict",
    ],
)
def test_a_device_that_is_not_there_or_is_no_device_is_refused(
    original: Path, map_location: Any, told: str
):
    with pytest.raises(InvalidArgumentError) as caught:
        sidesave.load(original, map_location=map_location)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("call", [sidesave.load, sidesave.verify, sidesave.history, sidesave.find])
@pytest.mark.parametrize("path", ["", None, 7], ids=repr)
def test_a_path_that_is_none_is_refused(call: Callable[[Any], object], path: Any):
    with pytest.raises(InvalidArgumentError, match="a path must be"):
        call(path)


# Another model ------------------------------------------------------------------------------------


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
        loaded = LoadRequest(into={"model": model, "nested": table, "odd": 0}, strict=False).read(
            original
        )
        everything = LoadRequest(
            into={"model": live(1)["model"], "nested": live(1)["nested"]}
        ).read(original)
    assert set(loaded.missing) == {"model.3.weight", "model.3.bias", "odd"}
    assert "no saved state for nested.mine; left unchanged" in caplog.text
    assert {"model.2.weight", "nested.heads", "nested.complex"} < set(loaded.unexpected)
    assert "model.3.weight" in caplog.text and "model.2.weight" in caplog.text
    assert loaded.nbytes_read <= everything.nbytes_read
    assert (everything.missing, everything.unexpected) == ((), ())
    loaded.apply()
    assert table.keys() == {"ema", "mine", "loaders", "history", "array"}, (
        "plain data beside live objects is taken"
    )
    assert (
        "nested.loaders, nested.history, nested.array, which the state does not have, are added"
        in caplog.text
    )
    assert difference(live(3)["nested"]["ema"], table["ema"]) == ""


def test_another_model_is_said_to_be_one(tmp_path: Path):
    path = save(tmp_path, {"model": {f"encoder.{n}.weight": torch.zeros(2) for n in range(148)}})
    other = {f"blocks.{n}.attention": torch.ones(2) for n in range(50)}
    assert_refused(
        path, {"model": other}, "none of the 50 names fits", "148 others", "another model"
    )
    some = {**other, "encoder.7.weight": torch.ones(2)}
    assert_refused(path, {"model": some}, "only 1 of the 51 names fit")


def test_ten_of_each_kind_are_named_and_the_rest_counted(tmp_path: Path):
    saved = {"a": [torch.zeros(2)] * 1, **{f"m{n:03}": torch.zeros(2) for n in range(40)}}
    saved |= {f"shape{n:03}": torch.zeros(n, 2) for n in range(40)}
    path = save(tmp_path, {"x": saved})
    target = {"a": [torch.zeros(2)], **{f"n{n:03}": torch.zeros(2) for n in range(30)}}
    target |= {f"shape{n:03}": torch.zeros(n, 3) for n in range(40)}
    message = assert_refused(
        path, {"x": target}, "and 20 more are missing", "and 30 more are unexpected"
    )
    assert "and 30 more do not fit" in message
    assert "x.shape007: shape [7, 2] in the checkpoint, [7, 3] in the target" in message
    assert len(message.splitlines()) < 40
    assert "x.n000: missing in the checkpoint (near: " in message


def test_names_that_are_near_are_found_among_a_hundred_thousand():
    parts = ("attn.wq.weight", "attn.wk.weight", "mlp.up.weight", "mlp.down.weight", "norm.weight")
    names = [f"model.layers.{n}.{part}" for n in range(20_000) for part in parts]
    known = Names(names)
    assert "model.layers.777.attn.wq.weight" in known.closest_matches(
        "model.layers.777.atn.wq.weight"
    )
    assert "model.layers.777.attn.wq.weight" in known.closest_matches(
        "model.module.layers.777.attn.wq.weight"
    )
    assert known.closest_matches("something else entirely") == []
    assert known.closest_matches("x" * 100_000) == []
    assert known.hint("model.layers.19999.norm.weigth").startswith(
        " (near: model.layers.19999.norm.weight"
    )


# Plain data ---------------------------------------------------------------------------------------


def test_assign_is_replaced_as_it_was_saved_in_the_containers_that_are_there(tmp_path: Path):
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
    assert {name for name in into if into[name] is before[name]} == into.keys() - {
        "tuple",
        "other kind",
    }
    assert into["log"][0] is entry and into["ordered"]["a"] is inner


def test_two_names_of_one_list_become_two_where_two_were_saved(tmp_path: Path):
    path = save(tmp_path, {"x": [[1], [2], [3]]})
    into = {"x": [[0]] * 3}
    assert sidesave.load(path, into=into) == {"x": [[1], [2], [3]]}


def test_assign_is_put_back_when_something_behind_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = save(tmp_path, {"loader": Loader(3), "a": {"n": [1, 2]}, "t": (Loader(1), 5), "z": [1]})
    into: dict[str, Any] = {"loader": Loader(9), "a": {"n": [7]}, "t": (Loader(2), 4), "z": []}
    before, inner, last = values(into), into["a"]["n"], into["z"]
    refill = assign._refill

    def interrupted(target: Any, items: Any) -> None:
        if target is last and items:
            raise KeyboardInterrupt
        refill(target, items)

    monkeypatch.setattr(assign, "_refill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sidesave.load(path, into=into)
    assert difference(before, values(into)) == ""
    assert into["a"]["n"] is inner


@pytest.mark.parametrize("target", [None, {}])
def test_no_tensors_take_the_place_of_nothing(original: Path, target: Any):
    for name in ("model", "optimizer", "bare"):
        assert_refused(
            original,
            {name: target},
            f"{name}: the checkpoint holds tensors here, and the target is",
        )


def test_beside_live_objects_only_these_must_match(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = save(tmp_path, {"x": {"w": torch.ones(2), "epoch": 3, "notes": {"a": 1}}})
    into: dict[str, Any] = {"x": {"w": torch.zeros(2), "epoch": 0, "mine": 7}}
    sidesave.load(path, into=into)
    assert (
        difference({"w": torch.ones(2), "epoch": 3, "mine": 7, "notes": {"a": 1}}, into["x"]) == ""
    )
    assert (
        "no saved state for x.mine; left" in caplog.text
        and "x.notes, which the state does not have" in caplog.text
    )
    assert_refused(path, {"x": {"v": torch.zeros(2)}}, "x.v: missing", "x.w: unexpected")


def test_of_assign_what_is_excluded_stays(tmp_path: Path):
    path = save(tmp_path, {"cfg": {"lr": 0.1, "sizes": {"a": 1, "b": 2}, "gone": 3}})
    into: dict[str, Any] = {"cfg": {"lr": 0.5, "sizes": {"a": 8, "b": 9}, "new": 1}}
    sidesave.load(path, into=into, exclude=["cfg.lr", "cfg.sizes.b", "cfg.gone", "cfg.new"])
    assert into == {"cfg": {"lr": 0.5, "sizes": {"a": 1, "b": 9}, "new": 1}}


@pytest.mark.parametrize("how", ["fresh", "in place", "chosen", "renamed", "beside live objects"])
def test_assign_of_any_form_comes_back_however_it_is_loaded(how: str, tmp_path: Path):
    def data() -> dict[str, Any]:
        return {
            "ints": [*range(50), -(1 << 63), (1 << 64) - 1],
            "beyond": [1 << 64, 1, -(1 << 70)],
            "mixed": [1, 0.5, "a", None, True, b"b"],
            "nested": [[1, 2], (3, [4, {"five": 5}])],
            "by number": {1: [1], None: 2, "3": {}, 2.5: ()},
            "counts": collections.Counter(a=3),
            "ordered": collections.OrderedDict(z=1, a=2),
            "last": collections.deque([1, 2, 3], maxlen=3),
            "array": [np.arange(3), {"within": [1, 2]}],
        }

    path = save(tmp_path, {"x": {"w": torch.ones(2), "data": data()}})
    if how == "fresh":
        found = sidesave.load(path)["x"]["data"]
    elif how == "chosen":
        found = sidesave.load(path, include="x.data")["x"]["data"]
    elif how == "renamed":
        found = sidesave.load(path, rename={"x.data": "y.data"})["y"]["data"]
    else:
        into: dict[str, Any] = {
            "x": {"w": torch.zeros(2), "data": data() if how == "in place" else None}
        }
        found = sidesave.load(path, into=into)["x"]["data"]
    assert difference(data(), found) == ""
    assert found["last"].maxlen == 3


def test_names_within_assign_are_told_as_near_ones(original: Path, tmp_path: Path):
    path = save(tmp_path, {"m": nn.Linear(2, 2), "config": {"warmup_steps": 3}})
    assert_refused(path, {"config": {"warmup_step": torch.ones(1)}}, "config.warmup_steps")


def test_what_is_not_used_is_told_by_name(original: Path, caplog: pytest.LogCaptureFixture):
    sidesave.load(original, into={"model": live(1)["model"], "epoch": 0})
    assert "not loaded (not in into=): optimizer, scheduler, loader, bare, nested" in caplog.text
    caplog.clear()
    target = {"model": live(1)["model"], "optimizer": live(1)["optimizer"]}
    sidesave.load(original, into=target, include="model")
    assert [record.message for record in caplog.records] == [
        f"loading {original}: no saved state for optimizer; left unchanged"
    ]
    caplog.clear()
    sidesave.load(original, into=live(1))
    assert not caplog.records
    both = [sidesave.Source(original, include="model")] * 2
    sidesave.load_sources(both, into={"model": live(1)["model"]})
    assert f"nothing of {original} is used: later sources override all" in caplog.text


# Objects that raise -------------------------------------------------------------------------------


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
    with pytest.raises(
        StateMismatchError, match=r"loader.*: this Loader raised RuntimeError .* does not want"
    ) as raised:
        sidesave.load(original, into=target)
    assert type(raised.value.__cause__) is RuntimeError
    assert difference(before, values(target)) == ""


class Refuses(nn.Linear):
    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        super().load_state_dict(*args, **options)
        self.weight.data = torch.zeros(3, 2)
        self.extra = "new"
        raise ValueError("not today")


class RefusesBelow(nn.Linear):
    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        self.bias = nn.Parameter(torch.zeros(3))
        raise ValueError("not today")


class RefusesExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"note": getattr(self, "note", "old")}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]
        if self.note == "from the checkpoint":
            raise ValueError("not today")


def refuses_in_a_hook(*sizes: Any) -> nn.Module:
    def raise_it(*args: Any) -> None:
        raise ValueError("not today")

    module = nn.Linear(*sizes)
    module.register_buffer("sparse", torch.randn(2, 2).to_sparse())
    module.register_load_state_dict_post_hook(raise_it)
    return module


@pytest.mark.parametrize("kind", [Refuses, RefusesBelow, RefusesExtraState, refuses_in_a_hook])
def test_a_module_that_raises_leaves_everything_as_it_was_itself_too(tmp_path: Path, kind: Any):
    def made(seed: int) -> tuple[dict[str, Any], Any]:
        state = live(seed)
        odd = kind(2, 3)
        state["nested"]["heads"][1] = (
            odd if kind is Refuses else nn.Sequential(nn.BatchNorm1d(2), odd)
        )
        return state, odd

    (saved, other), (target, odd) = made(3), made(1)
    other.note = "from the checkpoint"
    path = save(tmp_path, saved)
    before, parameters, attributes = values(target), (odd.weight, odd.bias), dict(vars(odd))
    expected = r"nested\.heads\.1: .*ValueError.*not today; nothing was loaded"
    with pytest.raises(StateMismatchError, match=expected) as raised:
        sidesave.load(path, into=target)
    assert type(raised.value.__cause__) is ValueError
    assert difference(before, values(target)) == ""
    assert odd.weight is parameters[0] and odd.bias is parameters[1]
    assert vars(odd).keys() == attributes.keys()


def test_a_module_that_host_memory_has_no_room_for_is_loaded_and_cannot_be_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(tensor_memory, "available_nbytes", lambda: 0)
    path = save(tmp_path, {"odd": RefusesExtraState(2, 3)})
    odd = RefusesExtraState(2, 3)
    sidesave.load(path, into={"odd": odd})
    assert difference(sidesave.load(path)["odd"]["weight"], odd.weight.detach()) == ""
    with pytest.raises(
        StateMismatchError, match=r"odd: .*not today; not put back: targets that the log names"
    ):
        sidesave.load(
            path, into={"odd": refuses_in_a_hook(2, 3)}, exclude=["odd._extra_state", "odd.sparse"]
        )
    assert "0 MiB of tensors were not backed up: only 0 MiB of host memory were left" in caplog.text


class RefusingOptimizer(torch.optim.AdamW):
    def load_state_dict(self, state_dict: Any) -> None:
        for state in self.state.values():
            state["exp_avg"].zero_()
            state["new"] = 1
        super().load_state_dict(state_dict)
        self.param_groups[0]["lr"] = 7
        raise ValueError("not today")


class RefusingLate(torch.optim.AdamW):
    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        raise ValueError("not today")


def refuses_in_an_optimizer_hook(parameters: Any) -> torch.optim.Optimizer:
    def raise_it(*args: Any) -> None:
        raise ValueError("not today")

    optimizer = torch.optim.AdamW(parameters)
    optimizer.register_load_state_dict_post_hook(raise_it)
    return optimizer


@pytest.mark.parametrize("kind", [RefusingOptimizer, RefusingLate, refuses_in_an_optimizer_hook])
def test_an_optimizer_that_raises_leaves_everything_as_it_was_itself_too(tmp_path: Path, kind: Any):
    def made(seed: int) -> dict[str, Any]:
        state = live(seed)
        parameter = nn.Parameter(torch.full((2, 2), float(seed)))
        state["odd"] = kind([parameter])
        parameter.grad = torch.ones(2, 2)
        state["odd"].step()
        return state

    path, target = save(tmp_path, made(3)), made(1)
    before = values(target)
    with pytest.raises(
        StateMismatchError, match=r"odd: .*ValueError.*not today; nothing was loaded"
    ) as raised:
        sidesave.load(path, into=target)
    assert type(raised.value.__cause__) is ValueError
    assert difference(before, values(target)) == ""


class Workers(torch.utils.data.DataLoader[Any]):
    """It has a state, which starts its workers."""

    def __init__(self, position: int) -> None:
        super().__init__([0])  # pyright: ignore[reportArgumentType]
        self.position, self.asked = position, 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_a_data_loader_is_not_asked_for_its_state_and_comes_after_all_that_may_raise(
    tmp_path: Path,
):
    path = save(tmp_path, {"loader": Workers(3), "odd": Loader(3), "net": nn.Linear(2, 2)})
    loader = Workers(1)
    with pytest.raises(StateMismatchError, match="odd: this Loader"):
        sidesave.load(path, into={"loader": loader, "odd": Loader(1, stubborn=True)})
    assert (loader.position, loader.asked) == (1, 0)
    sidesave.load(path, into={"loader": loader, "odd": Loader(1)})
    assert (loader.position, loader.asked) == (3, 0)


def inference(shape: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(shape)


def csr(*values: float) -> torch.Tensor:
    return torch.diag(torch.tensor(values)).to_sparse_csr()


UNWRITABLE: dict[str, tuple[Any, Any]] = {
    "is expanded": (torch.arange(3.0).expand(4, 3), torch.zeros(3).expand(4, 3)),
    "is an inference tensor": (torch.ones(2), inference((2,))),
    r"values of shape \[2\] in the checkpoint, \[1\] in the target": (csr(1, 2), csr(0, 3)),
    "a sparse_coo tensor in the checkpoint, a strided one": (
        torch.eye(2).to_sparse(),
        torch.eye(2),
    ),
    "a strided tensor in the checkpoint, a sparse_csr one": (
        torch.eye(2),
        torch.eye(2).to_sparse_csr(),
    ),
    "without memory": (torch.zeros(2), torch._efficientzerotensor((2,))),
}


@pytest.mark.parametrize("why", UNWRITABLE)
@pytest.mark.parametrize("wrap", ["tensor", "buffer"])
def test_a_target_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, why: str, wrap: str
):
    def wrapped(tensor: torch.Tensor) -> Any:
        module = nn.Module()
        module.register_buffer("odd", tensor)
        return module if wrap == "buffer" else {"odd": tensor}

    saved, target = UNWRITABLE[why]
    path = save(tmp_path, {"x": wrapped(saved), "bare": torch.ones(2)})
    flip_bit(next(path.glob("x*.safetensors")), -1)  # it would be found
    bare = torch.zeros(2)
    with pytest.raises(StateMismatchError, match=rf"x\.odd: .*{why}"):
        sidesave.load(path, into={"bare": bare, "x": wrapped(target)})
    assert torch.equal(bare, torch.zeros(2))


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_target_in_a_file_that_is_mapped_read_only_is_refused(tmp_path: Path):
    path = save(tmp_path, {"x": torch.ones(4)})
    np.zeros(4, np.float32).tofile(tmp_path / "file")
    for mode in ("r", "c", "r+"):
        target = torch.from_numpy(np.memmap(tmp_path / "file", np.float32, mode, shape=(4,)))
        if mode == "r":
            assert_refused(
                path, {"x": target}, "x: the target is in memory that is mapped read-only"
            )
        else:
            sidesave.load(path, into={"x": target})
            assert torch.equal(target, torch.ones(4))


def test_compressed_sparse_tensors_of_one_pattern_are_filled_in_place(tmp_path: Path):
    path = save(tmp_path, {"x": csr(1, 0, 2)})
    target = csr(0, 3, 4)
    sidesave.load(path, into={"x": target})
    assert difference(csr(1, 0, 2), target) == ""


def test_views_of_leaves_and_tensors_of_inference_mode_are_filled_in_it(tmp_path: Path):
    path = save(tmp_path, {"row": torch.ones(3), "first": torch.full((3,), 2.0)})
    leaf = torch.zeros(2, 3, requires_grad=True)
    sidesave.load(path, into={"row": leaf[1], "first": leaf.unbind()[0]})
    assert torch.equal(leaf, torch.tensor([[2.0] * 3, [1.0] * 3]))
    with torch.inference_mode():
        target = torch.zeros(3)
        sidesave.load(path, into={"row": target}, include="row")
        assert torch.equal(target, torch.ones(3))


# Dtype and device ---------------------------------------------------------------------------------


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


class Scaled(nn.Linear):
    """It has a parameter and a buffer of no dimension, and tensors in its extra state."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = nn.Parameter(torch.tensor(1.0001))
        self.register_buffer("seen", torch.tensor(1001.0))
        self.extra = torch.tensor([1001.0])

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


def counted() -> tuple[Scaled, torch.optim.Optimizer]:
    """A module and an optimizer with moments that bfloat16 does not know."""
    torch.manual_seed(0)
    model = Scaled()
    optimizer = torch.optim.NAdam(model.parameters())
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    for state in optimizer.state.values():
        state["step"].fill_(1001)
    return model, optimizer


def test_parameters_and_buffers_are_cast_and_states_counters_and_scalars_are_not(tmp_path: Path):
    model, optimizer = counted()
    flat = {f"state.w.{key}": value for key, value in next(iter(optimizer.state.values())).items()}
    kept = {
        "optimizer": optimizer,
        "its state": optimizer.state_dict(),
        "flat": {**flat, "param_groups.w.lr": torch.tensor([0.001])},
        "progress": {"tokens": torch.tensor(70_000.0)},
        "step": torch.tensor(1001.0),
        "array": np.full(3, 0.1),
    }
    plain = {
        key: value for key, value in model.state_dict().items() if value.__class__ is torch.Tensor
    }
    cast = {
        "plain": {"weight": plain["weight"]},
        "ema": Averages(plain["weight"]),
        "bare": torch.ones(3) / 3,
    }
    path = save(tmp_path, {"model": model, **kept, **cast})
    fresh, exact = sidesave.load(path, dtype=torch.float16), sidesave.load(path)
    for name in kept:
        assert difference(exact[name], fresh[name]) == "", name
    for name in cast:
        assert difference(halved(exact[name]), fresh[name]) == "", name
    assert difference(exact["model"].pop("_extra_state"), fresh["model"].pop("_extra_state")) == ""
    assert difference(halved(exact["model"]), fresh["model"]) == ""


class Averages:
    def __init__(self, average: torch.Tensor) -> None:
        self.average = average

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "decay": torch.tensor(0.9999)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


def halved(value: Any) -> Any:
    """Floating-point tensors of some dimension in float16; of a module's state those of none as
    well.
    """
    if isinstance(value, dict):
        is_module = hasattr(value, "_metadata")
        halves = {key: each.half() if is_module else halved(each) for key, each in value.items()}
        return collections.OrderedDict(halves) if is_module else halves
    return value.half() if value.ndim else value


def test_live_objects_keep_their_states_and_scalars_where_a_module_is_cast(tmp_path: Path):
    model, optimizer = counted()
    saved = {
        "model": model,
        "optimizer": optimizer,
        "step": torch.tensor(1001.0),
        "mean": torch.ones(2) / 3,
    }
    path = save(tmp_path, saved)
    target = Scaled().bfloat16()
    other = torch.optim.NAdam(target.parameters())
    into = {"model": target, "optimizer": other, "step": torch.tensor(0.0), "mean": torch.zeros(2)}
    half = torch.zeros(2, dtype=torch.bfloat16)
    for sources in (False, True):
        if sources:
            sidesave.load_sources(sidesave.Source(path, dtype=torch.bfloat16), into)
        else:
            sidesave.load(path, into=into, dtype=torch.bfloat16)
        assert difference(optimizer.state_dict()["state"], other.state_dict()["state"]) == ""
        assert (
            difference((torch.tensor(1001.0), torch.ones(2) / 3), (into["step"], into["mean"]))
            == ""
        )
        assert difference(model.scale.detach().bfloat16(), target.scale.detach()) == ""
        assert difference(model.extra, target.extra) == ""
    sidesave.load(path, into={"mean": half}, dtype=torch.bfloat16, include="mean")
    assert difference((torch.ones(2) / 3).bfloat16(), half) == ""


def test_a_cast_to_what_is_no_floating_point_is_refused(original: Path):
    with pytest.raises(InvalidArgumentError, match=r"torch\.int32"):
        sidesave.load(original, dtype=torch.int32)


def test_fresh_tensors_go_to_the_device_asked_for_and_arrays_stay(original: Path):
    loaded = sidesave.load(
        original, map_location="meta", include=["model", "nested.array", "epoch"]
    )
    assert {tensor.device.type for tensor in loaded["model"].values()} == {"meta"}
    assert {name: tensor.shape for name, tensor in loaded["model"].items()} == {
        name: tensor.shape for name, tensor in live(3)["model"].state_dict().items()
    }
    assert difference(np.full(3, 3), loaded["nested"]["array"]) == ""


# Stock readers ------------------------------------------------------------------------------------


def test_stock_dcp_loads_a_checkpoint_directory(tmp_path: Path):
    torch.manual_seed(0)
    state: dict[str, Any] = {
        "model": {
            "weight": torch.randn(300, 400),
            "bias": torch.randn(300),
            "half": noise(torch.bfloat16, 7, 3),
        },
        "optimizer": {
            "step": torch.tensor(12.0),
            "count": torch.tensor(5),
            "flag": torch.tensor(True),
        },
        "bare": torch.arange(5),
        "empty": torch.empty(0, 3),
    }
    path = save(tmp_path, state)
    flat = {
        f"{item}.{name}": tensor
        for item in ("model", "optimizer")
        for name, tensor in state[item].items()
    }
    flat |= {"bare": state["bare"]}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in flat.items()}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert difference(flat, loaded) == ""

    one = {"model.weight": torch.zeros(300, 400)}
    dcp.load(one, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert torch.equal(one["model.weight"], flat["model.weight"])


def test_stock_safetensors_opens_every_tensor_file(original: Path):
    expected = {
        "model": {f"model.{name}" for name in live(3)["model"].state_dict()},
        "optimizer": {
            f"optimizer.state.{n}.{key}"
            for n in range(6)
            for key in ("step", "exp_avg", "exp_avg_sq")
        },
        "tensors": {"bare"},
    }
    files = {path.name.partition(".")[0]: path for path in original.glob("*.safetensors")}
    assert files.keys() == {*expected, "nested"}
    for name, fqns in expected.items():
        assert safetensors.torch.load_file(files[name]).keys() == fqns
    loaded = safetensors.torch.load_file(files["model"])
    assert all(
        bits(loaded[f"model.{name}"]) == bits(tensor)
        for name, tensor in live(3)["model"].state_dict().items()
    )
    assert bits(safetensors.torch.load_file(files["nested"])["nested.ema"]) == bits(
        live(3)["nested"]["ema"]
    )
