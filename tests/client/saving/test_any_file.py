"""Any tensor may go to any file: which one it is stands in the manifest, and all readers go by
that.
"""

import warnings
import zlib
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from safetensors import safe_open
from states import difference
from torch import nn
from torch.distributed import checkpoint as dcp
from trainers import DEADLINE_S

import sidesave
from sidesave.client.saving import saver
from sidesave.stager.state.tensor_collector import TensorCollector

FILES = 5


def scatter(patch: pytest.MonkeyPatch) -> None:
    """Have the file of a tensor depend on its FQN alone, and not on the item that it is in."""
    add = TensorCollector._add

    def scattered(self: TensorCollector, fqn: str, tensor: torch.Tensor, *, frozen: bool) -> None:
        container, self.container = self.container, f"part-{zlib.crc32(fqn.encode()) % FILES}"
        try:
            add(self, fqn, tensor, frozen=frozen)
        finally:
            self.container = container

    patch.setattr(TensorCollector, "_add", scattered)


def cut(patch: pytest.MonkeyPatch) -> None:
    """Have the tensors of an item that go to a store lie in several files."""
    patch.setattr(saver, "_FILE_NBYTES", 200)


WAYS = {"scattered": scatter, "cut": cut}


def run_in(folder: Path | str, way: str) -> tuple[str, Path]:
    """Where the run is, and in which directory its files are."""
    return (
        (f"{folder}/run", Path(folder) / "run")
        if way == "scattered"
        else (f"file://{folder}/run", Path(folder))
    )


class Layers(nn.Sequential):
    """Of which the last one is tied to the first, with a buffer whose dtype safetensors does not
    have.
    """

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6))
        self[2].weight = self[0].weight
        self.register_buffer("rank", torch.zeros(3, dtype=torch.complex128))


def made(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, seed + 1.0)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "bare": torch.randn(4), "epoch": seed}


def taken(state: dict[str, Any]) -> dict[str, Any]:
    """What it holds, as plain data."""
    return {
        name: value.state_dict() if hasattr(value, "state_dict") else value
        for name, value in state.items()
    }


@pytest.mark.parametrize("way", WAYS)
def test_stock_readers_and_ours_find_what_is_scattered_over_files(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    WAYS[way](monkeypatch)
    state = made(0)
    run, root = run_in(tmp_path, way)
    with sidesave.Checkpointer(run) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state).committed.result(DEADLINE_S)
    assert sidesave.verify(f"{run}/step-00000002").ok
    path = next(root.glob("**/step-00000002*"))
    if way == "scattered":
        assert len(list(path.glob("part-*.safetensors"))) == FILES
    else:  # weights of 144 bytes each, of which one is tied, and all else of fewer
        names = sorted(file.name for file in path.glob("model*.safetensors"))
        assert names == [f"model.0000{number}-of-00002.rank-00000.safetensors" for number in (1, 2)]
        assert len(list(path.glob("optimizer.*.safetensors"))) > 2
        assert (path / "tensors.rank-00000.safetensors").exists()
    into = made(1)
    sidesave.load(path, into=into)
    assert difference(taken(state), taken(into)) == ""
    assert difference(taken(state), {**taken(state), **sidesave.load(path, include="model")}) == ""
    stored: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            stored |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - it is no dict
    assert torch.equal(stored["model.0.weight"], state["model"][0].weight)
    model = sidesave.export(path, tmp_path / "export", item="model", exclude="model.rank")
    assert model.tied == {"2.weight": "0.weight"}
    wanted = {"model.0.weight": torch.zeros(6, 6), "bare": torch.zeros(4)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(str(path)))
    assert torch.equal(wanted["model.0.weight"], state["model"][0].weight)
    assert torch.equal(wanted["bare"], state["bare"])


def two_ranks(rank: int, folder: Path, way: str) -> None:
    """Plain tensors, of which one differs, shards, and what is of each rank alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with pytest.MonkeyPatch.context() as patch:
        WAYS[way](patch)

        def state(seed: int) -> dict[str, Any]:
            plain = made(seed)
            plain["model"].rank.fill_(rank + seed)
            torch.manual_seed(seed)
            sharded = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
            fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
            return {
                **plain,
                "sharded": sharded,
                "own": sidesave.PerRank({"drawn": torch.full((2,), rank + seed)}),
            }

        saved = state(0)
        with sidesave.Checkpointer(run_in(folder, way)[0]) as checkpointer:
            path = checkpointer.save(1, saved).committed.result(DEADLINE_S)
            target = state(1)
            checkpointer.load(into=target)

    assert sidesave.verify(path).ok
    for name in ("model", "optimizer", "bare", "epoch"):
        assert difference(taken(saved)[name], taken(target)[name]) == "", name
    assert torch.equal(saved["own"].value["drawn"], target["own"].value["drawn"])
    for name, tensor in saved["sharded"].state_dict().items():
        assert torch.equal(tensor.to_local(), target["sharded"].state_dict()[name].to_local())


@pytest.mark.parametrize("way", WAYS)
def test_what_ranks_share_compare_and_have_alone_is_found_in_any_file(way: str, tmp_path: Path):
    forks.spawn_group(two_ranks, tmp_path, way)
    run, root = run_in(tmp_path, way)
    if way == "cut":
        assert {path.name.split(".")[0] for path in root.rglob("*-of-*.safetensors")} > {
            "model",
            "model@more",
        }
    whole = sidesave.load(run)
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).state_dict()
    assert difference(dict(expected), dict(whole["sharded"])) == ""


def test_what_stays_on_a_disk_is_not_cut_and_what_is_mirrored_to_a_store_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cut(monkeypatch)
    for name, mirror, expected in (
        ("alone", None, 1),
        ("mirrored", f"file://{tmp_path}/mirror", 2),
    ):
        with sidesave.Checkpointer(tmp_path / name, mirror=mirror) as checkpointer:
            checkpointer.save(1, made(0), blocking=True)
            checkpointer.wait(DEADLINE_S, mirrored=mirror is not None)
        assert len(list((tmp_path / name / "step-00000001").glob("model*.safetensors"))) == expected
    assert sidesave.verify(f"file://{tmp_path}/mirror/step-00000001").ok
