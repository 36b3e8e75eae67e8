"""What wraps a module adds nothing to names: a job that wraps and one that does not load each other's checkpoints."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loads import Trunk, assert_equal, save, values
from safetensors.torch import save_file
from states import difference
from torch import nn

import sidesave
from sidesave import Checkpointer
from sidesave.errors import StateMismatchError, UnsupportedValueError
from sidesave.stager.state.tree import flatten

distributed = torch.distributed


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def ddp(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def compiled(module: nn.Module) -> Any:
    return torch.compile(module)


def compiled_below(module: Any) -> Any:
    module.backbone = torch.compile(module.backbone)
    return module


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile()
    return module


WRAPPERS: dict[str, Any] = {
    "DDP": ddp,
    "DataParallel": nn.DataParallel,
    "compile": compiled,
    "DDP(compile)": lambda module: ddp(compiled(module)),
    "compile(DDP)": lambda module: compiled(ddp(module)),
    "a compiled child": compiled_below,
    "DDP, and a compiled child": lambda module: ddp(compiled_below(module)),
    "compiled in place": compiled_in_place,
}


def stepped(*models: Any) -> torch.optim.AdamW:
    """An optimizer that has made a step."""
    optimizer = torch.optim.AdamW([each for model in models for each in model.parameters()])
    for model in models:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5 + parameter.numel())
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapped_module_and_a_plain_one_load_each_other(wrap: str, tmp_path: Path):
    for name, (before, after) in {"out": (WRAPPERS[wrap], lambda m: m), "in": (lambda m: m, WRAPPERS[wrap])}.items():
        source, target = Trunk(1), Trunk(2)
        expected = values(copy.deepcopy(source))
        model = before(source)
        saved = stepped(model)
        expected = values(model)
        path = save(tmp_path / name, {"model": model, "optimizer": saved})
        assert [*sidesave.load(path)["model"]] == [*values(Trunk(3))]
        wrapped = after(target)
        optimizer = torch.optim.AdamW(wrapped.parameters())
        sidesave.load(path, into={"optimizer": optimizer, "model": wrapped})
        assert [*map(torch.equal, expected.values(), values(wrapped).values())] == [True] * len(expected)
        assert difference(saved.state_dict()["state"], optimizer.state_dict()["state"]) == ""


@pytest.mark.parametrize("wrap", ["DDP", "DDP(compile)"])
def test_an_optimizer_of_wrapped_names_goes_to_plain_ones(wrap: str, tmp_path: Path):
    model: Any = WRAPPERS[wrap](Trunk(1))
    target = Trunk(2)
    before = torch.optim.AdamW(model.named_parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before.step()
    path = save(tmp_path, {"model": model, "optimizer": before})
    after = torch.optim.AdamW(target.named_parameters())
    sidesave.load(path, into={"model": target, "optimizer": after})
    assert difference(before.state_dict()["state"], after.state_dict()["state"]) == ""
    assert after.param_groups[0]["param_names"] == [name for name, _ in target.named_parameters()]


class Module(nn.Module):
    """With a child of the name that DDP gives what it wraps."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.module = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)


def test_a_users_own_child_called_module_keeps_its_name(tmp_path: Path):
    source, target = Module(1), Module(2)
    path = save(tmp_path, {"model": ddp(source)})
    assert [*sidesave.load(path)["model"]][:2] == ["module.weight", "module.bias"]
    sidesave.load(path, into={"model": target})
    assert_equal(source, target)


def test_versions_of_modules_are_those_of_what_is_wrapped(tmp_path: Path):
    path = save(tmp_path, {"model": ddp(Module(1))})
    metadata = sidesave.load(path)["model"]._metadata
    assert metadata["norm"] == {"version": 2}
    target = ddp(Module(2))
    given: dict[str, Any] = {}
    target.register_load_state_dict_pre_hook(lambda module, state, *_: given.update(state._metadata))
    sidesave.load(path, into={"model": target})
    assert given["module.norm"] == {"version": 2}


def test_a_prefix_that_a_hook_has_taken_off_is_not_taken_off_again(tmp_path: Path):
    model = ddp(Module(1))
    without = {name.removeprefix("module."): name for name in model.state_dict()}

    def strip(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        for short, name in without.items():
            state[short] = state.pop(name)

    model._register_state_dict_hook(strip)
    assert [*sidesave.load(save(tmp_path, {"model": model}))["model"]] == [*model.state_dict()]


def test_two_names_that_fall_together_are_refused_by_both():
    model = ddp(nn.Linear(2, 3))
    model.register_buffer("weight", torch.zeros(1))
    with pytest.raises(UnsupportedValueError, match=r"model: (module\.)?weight and (module\.)?weight are both weight"):
        flatten({"model": model})


def test_a_loading_target_whose_names_fall_together_is_refused(tmp_path: Path):
    path = save(tmp_path, {"model": nn.Linear(2, 3)})
    model = ddp(nn.Linear(2, 3))
    model.register_buffer("weight", torch.zeros(1))
    with pytest.raises(UnsupportedValueError, match="are both weight"):
        sidesave.load(path, into={"model": model})


def test_a_checkpoint_with_the_prefix_still_loads_into_what_has_it(tmp_path: Path):
    source: Any = ddp(compiled(Trunk(1)))
    path = save(tmp_path, {"model": source.state_dict()})  # the names that earlier versions saved
    target = ddp(compiled(Trunk(2)))
    sidesave.load(path, into={"model": target})
    assert difference(values(source), values(target)) == ""
    with pytest.raises(StateMismatchError, match=r'rename=\{"model\.module\._orig_mod": "model"\}'):
        sidesave.load(path, into={"model": Trunk(3)})
    plain = Trunk(4)
    sidesave.load(path, into={"model": plain}, rename={"model.module._orig_mod": "model"})
    assert [*map(torch.equal, values(source).values(), values(plain).values())] == [True] * len(values(plain))


def test_foreign_weights_with_a_prefix_fit(tmp_path: Path):
    source, target = nn.Linear(2, 3), nn.Linear(2, 3)
    save_file(
        {f"module._orig_mod.{name}": each for name, each in source.state_dict().items()}, tmp_path / "a.safetensors"
    )
    sidesave.load_sources([sidesave.Source(tmp_path / "a.safetensors", item="model")], into={"model": target})
    assert_equal(source, target)


def test_foreign_names_that_fall_together_stay(tmp_path: Path):
    tensors = {"module.weight": torch.ones(3, 2), "_orig_mod.weight": torch.zeros(3, 2), "bias": torch.ones(3)}
    save_file(tensors, tmp_path / "a.safetensors")
    source = sidesave.Source(tmp_path / "a.safetensors", item="model")
    with pytest.raises(StateMismatchError, match=r"_orig_mod\.weight: unexpected.*\n.*module\.weight: unexpected"):
        sidesave.load_sources([source], into={"model": nn.Linear(2, 3)})


def test_what_is_remembered_is_right_when_a_module_is_wrapped_between_saves(tmp_path: Path):
    source: Any = Trunk(1)
    names = [*values(source)]
    with Checkpointer(tmp_path) as ckpt:
        for step, model in enumerate([source, source, wrapped := ddp(source), wrapped, source]):
            with torch.no_grad():
                next(source.parameters()).fill_(step)
            ckpt.save(step, {"model": model}, blocking=True)
        source.backbone = torch.compile(source.backbone)
        for step in (5, 6):
            ckpt.save(step, {"model": wrapped}, blocking=True)
        for step in range(7):
            loaded = sidesave.load(tmp_path / f"step-{step:08d}")["model"]
            assert [*loaded] == names
            assert next(iter(loaded.values())).unique().tolist() == [min(step, 4)]
