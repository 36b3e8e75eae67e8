"""What torch's wrappers add to names is in no checkpoint: it loads into a plain module, and back,
without a rename.
"""

import importlib
import warnings as python_warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loads import Extra, Trunk, Wrapped, assert_equal, assert_refused, values
from states import difference
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.nn.parallel import DataParallel, DistributedDataParallel
from trainers import save

import sidesave
from sidesave import Checkpointer
from sidesave.errors import UnsupportedValueError
from sidesave.stager import wrappers
from sidesave.stager.state import tree
from sidesave.stager.state.recall import Recall
from sidesave.stager.wrappers import WrapperNames


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one, in this process."""
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def with_compiled_child(module: Trunk) -> nn.Module:
    module.backbone = torch.compile(module.backbone)  # pyright: ignore[reportAttributeAccessIssue]
    return module


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile()
    return module


def compiled(module: nn.Module) -> Any:
    return torch.compile(module)


def sharded(module: nn.Module) -> Any:
    with python_warnings.catch_warnings():
        python_warnings.simplefilter("ignore")
        return FSDP1(module, device_id=torch.device("cpu"), use_orig_params=True)


class Around(nn.Module):
    """A module of the user's, which has a wrapped child under a name that wrappers use too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module, self.head = inner, nn.Linear(3, 3)


WRAP: dict[str, Callable[[Any], nn.Module]] = {
    "plain": lambda module: module,
    "DDP": DistributedDataParallel,
    "DataParallel": DataParallel,
    "compiled": compiled,
    "compiled in place": compiled_in_place,
    "DDP of compiled": lambda module: DistributedDataParallel(compiled(module)),
    "compiled DDP": lambda module: compiled(DistributedDataParallel(module)),
    "with a compiled child": with_compiled_child,
    "DDP with a compiled child": lambda module: DistributedDataParallel(
        with_compiled_child(module)
    ),
    "compiled around recomputed": lambda module: compiled(checkpoint_wrapper(module)),
}


def trained(
    wrap: Callable[[Any], nn.Module], seed: int, *, named: bool = False
) -> tuple[Trunk, dict[str, Any]]:
    """A model, and a state of it and its optimizer as a script with a wrapper saves it, after a
    step.
    """
    inner = Trunk(seed)
    parameters = dict(inner.named_parameters())
    model = wrap(inner)
    optimizer = torch.optim.AdamW(
        model.named_parameters() if named else model.parameters(), lr=0.01 * seed
    )
    torch.manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return inner, {"model": model, "optimizer": optimizer}


def moments(state: dict[str, Any]) -> list[Any]:
    return [values(dict(each)) for each in state["optimizer"].state.values()]


def tensors(module: nn.Module) -> list[torch.Tensor]:
    return [values(tensor) for tensor in module.state_dict().values()]


@pytest.mark.drawn
@pytest.mark.parametrize("named", [False, True], ids=["", "named parameters"])
@pytest.mark.parametrize("kind", WRAP)
def test_a_wrapped_model_and_its_optimizer_are_a_plain_ones_and_back(
    tmp_path: Path, kind: str, named: bool
):
    _, source = trained(WRAP[kind], 1, named=named)
    path = save(tmp_path / "wrapped", source)
    assert sidesave.load(path)["model"].keys() == Trunk().state_dict().keys()
    assert [*sidesave.load(path)["model"]._metadata] == [
        name for name, _ in Trunk().named_modules()
    ]
    plain, target = trained(WRAP["plain"], 2, named=named)
    sidesave.load(path, into=target)
    assert difference(tensors(source["model"]), tensors(plain)) == ""
    assert difference(moments(source), moments(target)) == ""
    names = target["optimizer"].param_groups[0].get("param_names")
    assert names == ([name for name, _ in plain.named_parameters()] if named else None)
    plain, source = trained(WRAP["plain"], 3, named=named)
    _, target = trained(WRAP[kind], 4, named=named)
    sidesave.load(save(tmp_path / "plain", source), into=target)
    assert difference(tensors(plain), tensors(target["model"])) == ""
    assert difference(moments(source), moments(target)) == ""
    assert target["optimizer"].param_groups[0]["lr"] == 0.03


def test_a_wrapper_inside_a_module_of_the_users_is_in_no_name(tmp_path: Path):
    """Also where the user calls the child as wrappers do, which is part of the name then."""
    _, source = trained(lambda inner: Around(DistributedDataParallel(inner)), 1)
    path = save(tmp_path / "wrapped", source)
    assert sidesave.load(path)["model"].keys() == Around(Trunk()).state_dict().keys()
    _, target = trained(Around, 2)
    sidesave.load(path, into=target)
    assert difference(tensors(source["model"]), tensors(target["model"])) == ""
    assert difference(moments(source), moments(target)) == ""
    _, again = trained(lambda inner: Around(DistributedDataParallel(inner)), 3)
    sidesave.load(save(tmp_path / "plain", target), into=again)
    assert difference(tensors(source["model"]), tensors(again["model"])) == ""
    assert difference(moments(source), moments(again)) == ""


def old(monkeypatch: pytest.MonkeyPatch, save: Callable[[], Path]) -> Path:
    """A checkpoint of a version that left the wrappers in the names."""
    with monkeypatch.context() as patched:
        patched.setattr(wrappers, "WrapperNames", lambda module: False)
        return save()


@pytest.mark.drawn
@pytest.mark.parametrize("target_kind", ["plain", "DDP", "compiled", "same"])
@pytest.mark.parametrize("kind", ["DDP", "DDP of compiled", "with a compiled child"])
def test_an_old_checkpoint_with_prefixes_still_loads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    target_kind: str,
):
    _, source = trained(WRAP[kind], 1)
    path = old(monkeypatch, lambda: save(tmp_path, source))
    assert sidesave.load(path)["model"].keys() == source["model"].state_dict().keys()
    _, target = trained(WRAP[kind if target_kind == "same" else target_kind], 2)
    sidesave.load(path, into=target)
    assert difference(tensors(source["model"]), tensors(target["model"])) == ""
    assert difference(moments(source), moments(target)) == ""
    is_told = "what wrappers add is dropped from names: model." in caplog.text
    assert is_told == (
        target_kind not in ("same", kind)
    )  # else the very wrappers tell what the names mean


class OwnModule(nn.Module):
    """A model with a child that is called as the child of a wrapper is, and a tensor of the same
    name and shape.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3))
        self.module = nn.Module()
        self.module.weight = nn.Parameter(torch.randn(3))


def test_a_child_of_the_users_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = OwnModule(1)
    names = {"weight", "module.weight"}
    for number, wrap in enumerate((WRAP["plain"], DistributedDataParallel, compiled)):
        path = save(tmp_path / str(number), {"model": wrap(source)})
        assert sidesave.load(path)["model"].keys() == names
        for other in (WRAP["plain"], DistributedDataParallel, compiled):
            target = OwnModule(2)
            sidesave.load(path, into={"model": other(target)})
            assert_equal(source, target)
    path = old(
        monkeypatch, lambda: save(tmp_path / "old", {"model": DistributedDataParallel(source)})
    )
    target = OwnModule(2)
    sidesave.load(
        path, into={"model": DistributedDataParallel(target)}
    )  # which tells what the names mean
    assert_equal(source, target)
    assert_refused(path, {"model": OwnModule(2)}, "model.weight")  # here they could mean either
    path = save(tmp_path / "plain child", {"model": Trunk(1)})
    assert_refused(
        path, {"model": Wrapped(Trunk(2))}, "model.module.head.weight"
    )  # nothing is put in front


def test_patterns_speak_of_the_names_in_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = Trunk(1)
    path = old(
        monkeypatch, lambda: save(tmp_path / "old", {"model": DistributedDataParallel(source)})
    )
    choices: list[dict[str, Any]] = [
        {"exclude": "model.module.head"},
        {"include": "model.module.backbone"},
    ]
    for options in choices:
        target = Trunk(2)
        before = values(target.head)
        sidesave.load(path, into={"model": target}, **options)
        assert_equal(source.backbone, target.backbone)
        assert difference(before, values(target.head)) == ""
    target = Trunk(2)
    rename = {"model.module.backbone": "model.backbone", "model.module.head": "head"}
    sidesave.load(
        path,
        into={"model": nn.ModuleDict({"backbone": target.backbone}), "head": target.head},
        rename=rename,
    )
    assert_equal(source, target)
    target = Trunk(3)
    path = save(tmp_path / "new", {"model": source})
    sidesave.load(
        path, into={"model": DistributedDataParallel(target)}, rename={"model": "model.module"}
    )
    assert_equal(source, target)


def test_state_dicts_and_files_of_others_keep_their_names_and_load_where_these_are_unambiguous(
    tmp_path: Path,
):
    source = Trunk(1)
    state = DistributedDataParallel(source).state_dict()
    path = save(tmp_path, {"model": state})
    assert sidesave.load(path)["model"].keys() == state.keys()
    for wrap in (WRAP["plain"], DistributedDataParallel, compiled):
        target = Trunk(2)
        sidesave.load(path, into={"model": wrap(target)})
        assert_equal(source, target)
    both = save(
        tmp_path / "both",
        {"model": {"module.weight": torch.ones(2, 2), "_orig_mod.weight": torch.zeros(2, 2)}},
    )
    assert_refused(both, {"model": nn.Linear(2, 2, bias=False)}, "model.weight")
    exact = save(
        tmp_path / "exact",
        {"model": {"module.weight": torch.ones(2, 2), "weight": torch.zeros(2, 2)}},
    )
    assert_refused(exact, {"model": nn.Linear(2, 2, bias=False)}, "model.module.weight")
    linear = nn.Linear(2, 2, bias=False)
    sidesave.load(exact, into={"model": linear}, strict=False)
    assert not linear.weight.any()


def test_extra_state_and_the_versions_of_submodules_go_to_their_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Versioned(nn.Linear):
        _version = 7
        seen: Any = None

        def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
            self.seen = arguments[2].get("version")
            super()._load_from_state_dict(*arguments, **options)

    def make(note: Any) -> nn.ModuleDict:
        return nn.ModuleDict({"extra": Extra(note), "versioned": Versioned(2, 2)})

    source: Any = make({"a": {"b": torch.ones(2)}, 1: "one"})
    paths = [save(tmp_path / "new", {"model": compiled(DistributedDataParallel(source))})]
    paths += [
        old(monkeypatch, lambda: save(tmp_path / "old", {"model": DistributedDataParallel(source)}))
    ]
    for path in paths:
        for wrap in (WRAP["plain"], DistributedDataParallel, WRAP["DDP of compiled"]):
            target: Any = make({})
            sidesave.load(path, into={"model": wrap(target)})
            assert difference(source["extra"].note, target["extra"].note) == ""
            assert target["versioned"].seen == 7


def test_what_hooks_and_state_dicts_of_the_users_return_stays(tmp_path: Path):
    source = DistributedDataParallel(OwnModule(1))

    def add(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state["note"] = torch.ones(1)
        state["module.about"] = torch.ones(2)

    source.register_state_dict_post_hook(add)
    assert sidesave.load(save(tmp_path / "hook", {"model": source}))["model"].keys() == {
        "weight", "module.weight", "note", "about"
    }  # fmt: skip

    class Bare(DistributedDataParallel):
        """As many have it: it gives and takes the state of what it wraps."""

        def state_dict(self, *args: Any, **options: Any) -> Any:
            return self.module.state_dict(*args, **options)

        def load_state_dict(self, *args: Any, **options: Any) -> Any:
            return self.module.load_state_dict(*args, **options)

    inner = OwnModule(1)
    path = save(tmp_path / "own", {"model": Bare(inner)})
    assert sidesave.load(path)["model"].keys() == {"weight", "module.weight"}
    for wrap in (WRAP["plain"], Bare, DistributedDataParallel):
        target = OwnModule(2)
        sidesave.load(path, into={"model": wrap(target)})
        assert_equal(inner, target)


class WithOwn(DistributedDataParallel):
    """A wrapper with a buffer that is called as one of what it wraps."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.register_buffer("weight", torch.zeros(2))


def test_two_names_that_are_one_without_the_wrapper_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = WithOwn(nn.Linear(2, 2))
    with Checkpointer(tmp_path / "run") as checkpointer:
        with pytest.raises(UnsupportedValueError, match=r"model\.weight: .*module\.weight"):
            checkpointer.save(1, {"model": model})
        checkpointer.save(2, {"model": model.module}, blocking=True)
    path = old(monkeypatch, lambda: save(tmp_path / "old", {"model": model}))
    target = WithOwn(nn.Linear(2, 2))
    dict(target.named_buffers())["weight"].fill_(3)
    sidesave.load(path, into={"model": target})
    assert_equal(model, target)


def test_what_is_remembered_follows_what_is_wrapped_between_two_saves(tmp_path: Path):
    model, recall = Trunk(1), Recall()
    parallel = DistributedDataParallel(Trunk(2))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    head, backbone = model.head, model.backbone
    for step in range(14):
        if step == 3:
            model.head = compiled(head)
        elif step == 6:
            model.head, model.backbone = head, compiled(DataParallel(backbone))
        elif step == 9:
            model.backbone = backbone
            parallel.module = compiled(parallel.module)
        elif step == 12:
            model.add_module("module", nn.Linear(1, 1))
        state = {"model": model, "parallel": parallel, "optimizer": optimizer}
        flat, expected = (tree.flatten(state, recall=each) for each in (recall, None))
        assert flat.objects == expected.objects
        assert {name: [*each] for name, each in flat.containers.items()} == {
            name: [*each] for name, each in expected.containers.items()
        }
        assert "_orig_mod" not in str(flat.containers)
        assert ("model.module.weight" in flat.containers["model"]) == (step >= 12)


def test_a_model_that_is_wrapped_between_two_saves_of_a_run_keeps_its_names(tmp_path: Path):
    model = Trunk(1)
    with Checkpointer(tmp_path) as checkpointer:
        paths = [
            checkpointer.save(step, {"model": wrap(model)}, blocking=True).committed.result()
            for step, wrap in enumerate(
                (WRAP["plain"], DistributedDataParallel, compiled, WRAP["plain"])
            )
        ]
    for path in paths:
        assert sidesave.load(path)["model"].keys() == model.state_dict().keys()


def test_fsdp_of_the_first_kind_within_others_has_the_names_of_what_it_wraps(tmp_path: Path):
    source, target = Trunk(1), Trunk(2)
    expected = values(source)
    path = save(tmp_path, {"model": compiled(sharded(source))})
    assert difference(dict(expected), dict(sidesave.load(path)["model"])) == ""
    sidesave.load(path, into={"model": target})
    assert difference(expected, values(target)) == ""
    other = sharded(compiled(Trunk(3)))
    sidesave.load(path, into={"model": other})
    assert difference([*expected.values()], tensors(other)) == ""


def test_wrappers_are_looked_for_only_where_they_are_loaded(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    monkeypatch.setattr(importlib, "import_module", asked.append)
    assert not WrapperNames(Wrapped(nn.Linear(1, 1)))
    assert WrapperNames(DataParallel(nn.Linear(1, 1)))
    assert not asked
