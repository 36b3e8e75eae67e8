"""Loading: what was saved comes back, into fresh values or live objects, and what does not fit touches nothing."""

import json
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
from test_tree import bits, difference, noise
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

import sidesave
from sidesave import (
    Checkpointer,
    CheckpointExistsError,
    CheckpointNotFoundError,
    FormatVersionError,
    IntegrityError,
    InvalidArgumentError,
    StateMismatchError,
)
from sidesave.writer_daemon.tensor_file import (
    digest,
)


class Loader:
    """A data loader of the user's; stubborn ones cannot be loaded."""

    def __init__(self, position: int = 0, *, stubborn: bool = False) -> None:
        self.position = position
        self.stubborn = stubborn

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.stubborn:
            raise RuntimeError("this loader does not want to")
        self.position = state["position"]


def live(seed: int, *, width: int = 8) -> dict[str, Any]:
    """Live objects of every kind, after a few steps of training."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width))
    optimizer = torch.optim.AdamW(
        [{"params": [*model[0].parameters()], "lr": 0.1}, {"params": [*model[1:].parameters()]}], lr=0.01 * seed
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    for _ in range(seed):
        optimizer.zero_grad()
        model(torch.randn(4, width)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": Loader(position=100 * seed),
        "epoch": seed,
        "bare": torch.randn(5),
        "nested": {
            "ema": torch.randn(3, 3),
            "complex": torch.randn(3, dtype=torch.complex128),
            "heads": [nn.Linear(2, 2), nn.Linear(2, 3)],
            "loaders": (Loader(seed), Loader(seed + 1)),
            "history": [{"loss": float(seed)}] * seed,
            "array": np.full(3, seed),
            1: torch.randn(2),
        },
    }


def values(state: Any) -> Any:
    """Everything a live state holds, copied: to compare bit by bit before and after."""
    if isinstance(state, dict):
        return {key: values(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(values(value) for value in state)
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, nn.Module):
        return values(dict(state.state_dict()))
    if hasattr(state, "state_dict"):
        return values(state.state_dict())
    return state.copy() if isinstance(state, np.ndarray) else state


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
        ("nothing", None, set()),
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


def assert_refused(path: Path, target: dict[str, Any], *names: str, **options: Any) -> str:
    """That nothing is touched, and that everything that does not fit is named."""
    before, objects = values(target), dict(target)
    with pytest.raises(StateMismatchError) as caught:
        sidesave.load(path, into=target, **options)
    message = str(caught.value)
    for name in names:
        assert name in message
    assert difference(before, values(target)) == "", "something has been touched"
    assert all(target[key] is value for key, value in objects.items())
    return message


def test_shapes_that_differ_are_all_named_and_nothing_is_touched(original: Path):
    message = assert_refused(
        original,
        live(1, width=9),
        "model.0.weight: shape [8, 8] in the checkpoint, [9, 9] in the target",
        "model.0.bias: shape [8] in the checkpoint, [9] in the target",
        "model.1.running_mean: shape",
        "model.2.weight: shape",
        "optimizer.state.0.exp_avg: shape [8, 8]",
        "optimizer.state.5.exp_avg_sq: shape",
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
        "nested.emb: missing in the checkpoint (near: ema)",
        "nested.ema: unexpected",
    )


def test_items_that_were_never_saved_are_refused_with_what_is_near(original: Path):
    target = {"modle": nn.Linear(8, 8), **live(1)}
    assert_refused(original, target, "the checkpoint has no item 'modle' (near: model)")


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
        (lambda target: target.update(model=torch.zeros(2)), "model: the checkpoint holds a dict, the target is a"),
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
    assert "and 2980 more" in message


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


def flip_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def assert_damaged(path: Path, message: str, **options: Any) -> None:
    """That it is noticed, and that nothing has been applied by then."""
    target = live(1)
    before = values(target)
    with pytest.raises(IntegrityError, match=message):
        sidesave.load(path, into=target, **options)
    assert difference(before, values(target)) == ""
    with pytest.raises(IntegrityError, match=message):
        sidesave.load(path, **options)
    assert not sidesave.verify(path).ok


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
    with pytest.raises(InvalidArgumentError, match=r"run directory.*step-00000007"):
        sidesave.load(original.parent)


def with_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrites a manifest with a digest that is right again."""
    manifest = path / "manifest.json"
    body = json.loads(manifest.read_bytes())
    del body["xxh3_128"]
    change(body)
    rest = json.dumps(body, separators=(",", ":")).encode()[1:]
    manifest.write_bytes(b'{"xxh3_128":"' + digest(rest).hex().encode() + b'",' + rest)


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
