"""What is not trained has a file of its own, which steps share; whoever reads a checkpoint finds it
as ever.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from commands import as_json, output
from loads import flip_bit
from safetensors import safe_open
from states import difference
from torch import nn
from torch.distributed import checkpoint as dcp
from trainers import DEADLINE_S

import sidesave
from sidesave import Frozen, PerRank, Replicated
from sidesave.errors import IntegrityError
from sidesave.writer_daemon.writing.frozen import EVERY

BASE = "model@frozen.rank-00000.safetensors"


class Adapted(nn.Module):
    """A layer that stays as it is, and what is trained beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300)).requires_grad_(False)
        self.down, self.up = nn.Linear(300, 4, bias=False), nn.Linear(4, 300, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def made(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Adapted()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


def train(state: dict[str, Any]) -> None:
    model: Any = state["model"]
    model(torch.rand(5, 300)).square().sum().backward()
    state["optimizer"].step()


def taken(state: dict[str, Any]) -> dict[str, Any]:
    """What it holds, as plain data that stays."""
    return {
        "model": {name: tensor.clone() for name, tensor in state["model"].state_dict().items()},
        "optimizer": {**state["optimizer"].state_dict()},
    }


def saved(run: Path, state: dict[str, Any], *steps: int, **options: Any) -> list[dict[str, Any]]:
    """Train and save; what each step was to hold."""
    truths: list[dict[str, Any]] = []
    with sidesave.Checkpointer(run, **options) as ckpt:
        for step in steps:
            train(state)
            truths.append(
                {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}
            )
            ckpt.save(step, state).committed.result(DEADLINE_S)
    return truths


def links(run: Path, step: int, name: str = BASE) -> int:
    return (run / f"step-{step:08d}" / name).stat().st_nlink


def check(run: Path | str, step: int, truth: dict[str, Any]) -> None:
    path = f"{run}/step-{step:08d}"
    assert sidesave.verify(path).ok
    into = made(seed=9)
    sidesave.load(path, into=into)
    assert difference(truth, dict(into["model"].state_dict())) == ""


def test_what_has_not_changed_is_linked_into_the_next_step_and_not_written_again(run: Path):
    state = made()
    truths = saved(run, state, 1, 2, 3)
    for step, truth in zip((1, 2, 3), truths, strict=True):
        check(run, step, truth)
        assert links(run, step) == 3
    with safe_open(run / "step-00000003" / BASE, "pt") as tensors:
        names = {f"model.base.{name}" for name, _ in state["model"].base.named_parameters()}
        assert {*tensors.keys()} == names, "buffers change without a gradient"
    shutil.rmtree(run / "step-00000001")
    check(run, 3, truths[2])


def test_a_tensor_that_is_trained_again_or_no_longer_is_found_by_its_name(run: Path):
    state = made()
    base = state["model"].base
    truths: list[dict[str, Any]] = []
    with sidesave.Checkpointer(run) as ckpt:
        for step, trains in enumerate((False, False, True, True, False, False)):
            base[0].weight.requires_grad_(trains).grad = None
            train(state)
            truths.append(
                {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}
            )
            ckpt.save(step, state).committed.result(DEADLINE_S)
        for step, truth in enumerate(truths):
            into = made(seed=9)
            ckpt.load(step, into=into)
            assert difference(truth, dict(into["model"].state_dict())) == ""
    assert [links(run, step) for step in range(6)] == [2] * 6


def test_a_checkpoint_shows_the_items_of_the_state_and_no_other(run: Path, tmp_path: Path):
    state = made()
    truth = saved(run, state, 1, 2)[-1]
    path = run / "step-00000002"
    assert [*sidesave.load(path)] == ["model", "optimizer"]
    part = sidesave.load(path, include="model.base.*")
    assert {f"model.{name}" for name in truth if name.startswith("base.")} == {
        f"model.{name}" for name in part["model"]
    }
    shown = as_json("show", path)
    assert {*shown["items"]} == {"model", "optimizer"}
    assert "@frozen" not in output("show", path)
    report = sidesave.export(path, tmp_path / "export", item="model")
    with safe_open(next(Path(report.path).parent.glob("**/*.safetensors")), "pt") as tensors:
        assert {*tensors.keys()} == {*truth}
    differing = output("diff", run / "step-00000001", path)
    assert "model.up.weight" in differing
    assert "@frozen" not in differing
    wanted = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in truth.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(str(path)))
    assert difference({f"model.{name}": tensor for name, tensor in truth.items()}, wanted) == ""


def test_ls_counts_shared_bytes_once(run: Path):
    saved(run, made(), 1, 2, 3)
    nbytes = (run / "step-00000002" / BASE).stat().st_size
    listed = as_json("ls", run)["checkpoints"]
    assert [row["shared_nbytes"] for row in listed] == [0, nbytes, nbytes]
    assert "of its own" in output("ls", run)
    shutil.rmtree(run / "step-00000001")
    assert [row["shared_nbytes"] for row in as_json("ls", run)["checkpoints"]] == [0, nbytes]


@pytest.mark.drawn
@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: Frozen(x),
        lambda x: {"deep": [Frozen(x)]},
        lambda x: PerRank(Frozen(x)),
        lambda x: Frozen(Replicated(x)),
    ],
    ids=["alone", "within", "of a rank", "of all ranks"],
)
@pytest.mark.parametrize("kind", ["module", "dict", "tensor"])
def test_what_is_declared_frozen_is_shared_and_comes_back_as_what_it_is(
    run: Path, wrap: Any, kind: str
):
    model = nn.Linear(300, 300)

    def item(model: nn.Module) -> Any:
        return {"module": model, "dict": model.state_dict(), "tensor": model.weight}[kind]

    with sidesave.Checkpointer(run) as ckpt:
        for step in range(4):
            ckpt.save(step, {"x": wrap(item(model)), "step": step}).committed.result(DEADLINE_S)
        other = nn.Linear(300, 300)
        into = {"x": wrap(item(other)), "step": 9}
        ckpt.load(into=into)
    assert links(run, 3, "x@frozen.rank-00000.safetensors") == 4
    assert torch.equal(model.weight, other.weight)
    assert into["step"] == 3


@pytest.mark.parametrize("place", ["file", "directory"])
def test_mirrors_and_copies_are_whole(run: Path, tmp_path: Path, place: str):
    mirror = f"file://{tmp_path}/mirror" if place == "file" else f"{tmp_path}/mirror"
    (tmp_path / "beside").touch()
    truths = saved(run, made(), 1, 2, 3, mirror=mirror)
    output("mirror", run)
    target = f"file://{tmp_path}/copy" if place == "file" else f"{tmp_path}/copy"
    output("copy", run, target)
    for where in (mirror, target):
        for step, truth in zip((1, 2, 3), truths, strict=True):
            check(where, step, truth)
    if place == "file":
        fetched = sidesave.fetch(f"{target}/step-00000002", tmp_path / "fetched")
        check(tmp_path / "fetched", fetched.step, truths[1])
    output("rm", run, 2)
    check(run, 1, truths[0])
    check(run, 3, truths[2])
    assert links(run, 3) == 2


def test_a_damaged_inode_is_not_in_every_checkpoint(run: Path):
    state = made()
    truth = saved(run, state, 0)[0]
    saved(run, state, 1, 2)
    flip_bit(run / "step-00000002" / BASE, 200_000)
    for step in (1, 2):
        assert not sidesave.verify(run / f"step-{step:08d}").ok
        output("verify", run / f"step-{step:08d}", status=1)
        with pytest.raises(IntegrityError, match="model@frozen"):
            sidesave.load(run / f"step-{step:08d}")
    with sidesave.Checkpointer(run) as ckpt:
        found = ckpt.load(fallback=True)
        assert difference(truth, dict(found["model"])) == ""
        for step in range(10, 10 + EVERY):
            ckpt.save(step, state).committed.result(DEADLINE_S)
        flip_bit(run / "step-00000010" / BASE, 200_000)
        ckpt.save(100, state).committed.result(DEADLINE_S)
    assert [links(run, step) for step in (0, 2, 10, 100)] == [1, 2, EVERY, 1]
    assert sidesave.verify(run / "step-00000100").ok


def test_only_what_is_kept_takes_room(run: Path):
    state = made()
    with sidesave.CheckpointManager(run, state, save=1, keep=sidesave.KeepLatest(1)) as manager:
        for step in range(4):
            train(state)
            manager.step(step)
    [last] = run.glob("step-*")
    assert (last / BASE).stat().st_nlink == 1
    assert sidesave.verify(last).ok


def two_ranks(rank: int, folder: Path) -> None:
    """Shards, what is compared and alike, what is compared and not, and what is each rank's own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def state(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        sharded = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        sharded[0].requires_grad_(False)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
        alike, apart = (
            nn.Linear(40, 40).requires_grad_(False),
            nn.Linear(30, 30).requires_grad_(False),
        )
        apart.weight.data.add_(rank)
        own = torch.full((5,), rank + seed)
        return {
            "sharded": sharded,
            "alike": alike,
            "apart": apart,
            "own": PerRank(Frozen({"x": own})),
            "step": seed,
        }

    saved = state(0)
    with sidesave.Checkpointer(f"{folder}/run") as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {**saved, "step": step}).committed.result(DEADLINE_S)
        target = state(7)
        checkpointer.load(into=target)

    def local(item: nn.Module) -> dict[str, torch.Tensor]:
        return {
            name: getattr(each, "to_local", lambda each=each: each)()
            for name, each in item.state_dict().items()
        }

    for name in ("sharded", "alike", "apart"):
        assert difference(local(saved[name]), local(target[name])) == "", name
    assert torch.equal(target["own"].value.value["x"], torch.full((5,), rank))


def test_each_rank_links_its_own_files(tmp_path: Path):
    forks.spawn_group(two_ranks, tmp_path)
    last = tmp_path / "run" / "step-00000003"
    assert sidesave.verify(last).ok
    shared = {path.name: path.stat().st_nlink for path in last.glob("*@frozen*.safetensors")}
    # where one differs each rank writes all that was compared
    whole = {f"{x}@frozen@more" for x in ("alike", "apart")}
    names = {f"{x}@frozen" for x in ("sharded", "alike", "apart", "own")}
    assert {name.partition(".")[0] for name in shared} == names | whole
    assert {*shared.values()} == {3}
    assert [*sidesave.load(last)] == ["sharded", "alike", "apart", "own", "step"]
