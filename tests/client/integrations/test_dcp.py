"""The calls of torch.distributed.checkpoint: a script changes its import, and saves with
sidesave.
"""

import inspect
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import dcp_trainers
import forks
import guides
import pytest
import torch
import torch.distributed.checkpoint as stock
from dcp_trainers import an_app, tensors
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from trainers import Orders

import sidesave
import sidesave.integrations.dcp as dcp
from sidesave.client.reading.checkpoint_reader import CheckpointReader
from sidesave.errors import (
    CheckpointNotFoundError,
    InvalidArgumentError,
    StateMismatchError,
    WriteError,
)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    dcp.close()


def same(one: Any, other: Any) -> bool:
    return all(map(torch.equal, tensors(one), tensors(other)))


@pytest.mark.parametrize("call", ["save", "async_save", "load"])
def test_whatever_torch_is_called_with_can_be_passed(call: str):
    own, torchs = (inspect.signature(getattr(module, call)).parameters for module in (dcp, stock))
    assert torchs.keys() <= own.keys()
    assert all(own[name].kind is torchs[name].kind for name in torchs)


def test_an_app_state_comes_back(run: Path):
    app, other = an_app(1, steps=2), an_app(2, steps=1)
    saved = dcp.async_save(
        {"app": app, "step": 3, "x": torch.arange(4.0)}, checkpoint_id=run / "epoch-3"
    )
    assert isinstance(saved, Future)
    assert saved.result().step == 3
    assert (run / "epoch-3").readlink() == Path("step-00000003")
    state: dict[str, Any] = {"app": other, "step": 0, "x": torch.zeros(4)}
    x = state["x"]
    dcp.load(state, checkpoint_id=run / "epoch-3")
    assert same(app, other)
    assert state["x"] is x
    assert x.tolist() == [0, 1, 2, 3]
    assert state["step"] == 3
    assert other.optimizer.param_groups[0]["lr"] == app.optimizer.param_groups[0]["lr"]


def test_modules_and_optimizers_are_loaded_as_they_are(run: Path):
    app, other = an_app(1, steps=2), an_app(2)
    dcp.save({"model": app.model, "optimizer": app.optimizer}, checkpoint_id=run / "1")
    dcp.load({"model": other.model, "optimizer": other.optimizer}, checkpoint_id=run / "1")
    assert same(app, other)


def test_staging_is_told_apart_where_that_is_asked_for(run: Path):
    stager = DefaultStager(StagingOptions(False, False, True, False))
    try:
        answer: Any = dcp.async_save({"x": 1}, checkpoint_id=run / "a1", async_stager=stager)
    finally:
        stager.close()
    assert isinstance(answer, dcp.AsyncSaveResponse)
    assert answer.staging_completion.result() is None
    info: Any = answer.upload_completion.result()
    assert info.step == 1


def test_a_checkpoint_of_torchs_is_loaded_in_the_middle_of_a_run(run: Path):
    app, other = an_app(1, steps=1), an_app(2, steps=1)
    stock.save({"app": app}, checkpoint_id=run / "at-1")
    dcp.load({"app": other}, checkpoint_id=run / "at-1")
    assert same(app, other)
    dcp.save({"app": app}, checkpoint_id=run / "at-2")
    with pytest.raises(InvalidArgumentError, match="a checkpoint of torch's is there"):
        dcp.save({"app": app}, checkpoint_id=run / "at-1")
    assert (run / "at-1" / ".metadata").exists()


def test_torchs_own_load_reads_what_was_saved(run: Path):
    app, other = an_app(1, steps=2), an_app(2, steps=1)
    numbers = torch.complex(torch.arange(6.0), -torch.arange(6.0)).reshape(2, 3)
    plain = {"list": [1, {"deep": torch.ones(2)}], "text": "a", "none": None}
    dcp.save({"app": app, "z": numbers, "plain": plain}, checkpoint_id=run / "4")
    state: dict[str, Any] = {
        "app": other,
        "z": torch.zeros_like(numbers),
        "plain": {"list": [0, {"deep": torch.zeros(2)}], "text": "", "none": 1},
    }
    stock.load(state, storage_reader=dcp.SidesaveReader(run / "4"))
    assert same(app, other)
    assert other.optimizer.param_groups[0]["lr"] == app.optimizer.param_groups[0]["lr"]
    assert torch.equal(state["z"], numbers)
    assert str(state["plain"]) == str(plain)


def test_what_the_target_lacks_is_left_alone_and_what_the_checkpoint_lacks_is_told(run: Path):
    saved = {
        "model": {"a": torch.ones(2), "b": torch.ones(2)},
        "progress": {"step": 1, "seen": [1]},
        "identity": nn.Identity(),
    }
    dcp.save(saved, checkpoint_id=run / "1")
    stock.save(saved, checkpoint_id=run.with_name("stock"), no_dist=True)
    part = {"model": {"a": torch.zeros(2)}}
    dcp.load(part, checkpoint_id=run / "1")
    assert part["model"]["a"].tolist() == [1, 1]
    zeros = torch.zeros(2)
    for state, lacking in (
        ({"model": {"a": zeros, "c": zeros}}, "model.c"),
        ({"other": 1, "model": {"a": zeros}}, "other"),
        # plain values, which nobody has saved
        ({"model": {"a": zeros, "rate": 0.1}}, "model.rate"),
        ({"model": {"a": zeros}, "progress": {"step": 0, "seen": [1, 2], "lr": 1}}, "progress.lr"),
    ):
        with pytest.raises(StateMismatchError, match=f"it does not have {lacking}$"):
            dcp.load(state, checkpoint_id=run / "1")
        with pytest.raises(CheckpointException):  # as torch does, of its own checkpoint
            stock.load(state, checkpoint_id=run.with_name("stock"), no_dist=True)
        assert zeros.tolist() == [0, 0]
    none: Any = {
        "model": {"a": zeros, "none": [], "nothing": {}},
        "identity": nn.Identity(),
    }  # there is nothing to lack
    dcp.load(none, checkpoint_id=run / "1")
    assert zeros.tolist() == [1, 1]


@pytest.mark.parametrize("call", ["save", "async_save"])
def test_what_has_no_meaning_is_refused_by_name(call: str, run: Path):
    save = getattr(dcp, call)
    for name, value in {
        "storage_writer": stock.FileSystemWriter(run / "w"),
        "planner": stock.DefaultSavePlanner(),
    }.items():
        with pytest.raises(InvalidArgumentError, match=f"{name}=.* has no meaning for sidesave: "):
            save({"x": 1}, checkpoint_id=run / "1", **{name: value})
    with pytest.raises(InvalidArgumentError, match="there is no step at its end"):
        save({"x": 1}, checkpoint_id=run / "last")
    with pytest.raises(InvalidArgumentError, match="checkpoint_id is missing"):
        save({"x": 1})
    with pytest.raises(InvalidArgumentError, match="a name has letters"):
        save({"x": 1}, checkpoint_id=run / "a b-1")
    assert not sidesave.find(run)


def test_a_loading_argument_that_has_no_meaning_is_refused_by_name(run: Path):
    dcp.save({"x": 1}, checkpoint_id=run / "1")
    with pytest.raises(InvalidArgumentError, match=r"storage_reader=.* has no meaning"):
        dcp.load({"x": 0}, storage_reader=stock.FileSystemReader(run / "1"))
    with pytest.raises(InvalidArgumentError, match=r"planner=.* has no meaning"):
        dcp.load({"x": 0}, checkpoint_id=run / "1", planner=stock.DefaultLoadPlanner())
    with pytest.raises(CheckpointNotFoundError):
        dcp.load({"x": 0}, checkpoint_id=run / "2")


def test_another_name_for_a_step_is_refused_and_the_same_is_replaced(run: Path):
    dcp.save({"x": 1}, checkpoint_id=run / "a-1")
    dcp.close()
    with pytest.raises(InvalidArgumentError, match="step 1 of this run is a-1"):
        dcp.save({"x": 2}, checkpoint_id=run / "b-01")
    dcp.save({"x": 3}, checkpoint_id=run / "a-1")
    state = {"x": 0}
    dcp.load(state, checkpoint_id=run / "a-1")
    assert state["x"] == 3


def test_a_link_that_a_killed_process_left_out_is_no_loss(run: Path):
    dcp.save({"x": 5}, checkpoint_id=run / "a-5")
    dcp.close()
    (run / "a-5").unlink()
    state = {"x": 0}
    dcp.load(state, checkpoint_id=run / "a-5")
    assert state["x"] == 5
    with pytest.raises(CheckpointNotFoundError):
        dcp.load(state, checkpoint_id=run / "b-5")
    dcp.open_run(run)
    assert (run / "a-5").readlink() == Path("step-00000005")


def test_a_run_has_one_checkpointer_with_the_options_it_was_opened_with(run: Path):
    ckpt = dcp.open_run(run, staging=sidesave.StagingOptions(slots=1))
    pid = ckpt.daemon_pid
    for step in range(3):
        dcp.async_save({"x": step}, checkpoint_id=run / str(step))
    ckpt.wait()
    assert ckpt.daemon_pid == pid
    assert ckpt.steps() == [0, 1, 2]
    with pytest.raises(InvalidArgumentError, match="is open"):
        dcp.open_run(run)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        with pytest.raises(InvalidArgumentError, match="is open with other ranks"):
            dcp.async_save(
                {"x": 1}, checkpoint_id=run / "3", process_group=torch.distributed.group.WORLD
            )
    finally:
        torch.distributed.destroy_process_group()


def test_a_failure_that_nobody_read_is_raised_by_the_next_save(run: Path):
    ckpt = dcp.open_run(run)
    away = run.rename(run.with_name("away"))
    dcp.async_save({"x": torch.ones(3)}, checkpoint_id=run / "1")
    with pytest.raises(WriteError):
        ckpt.wait()
    away.rename(run)


def test_shards_are_read_in_every_way(tmp_path: Path):
    forks.spawn(dcp_trainers.divided, str(tmp_path))
    expected = torch.load(tmp_path / "expected")
    for load in ("ours", "reader"):  # by one process
        app = an_app(3, steps=1)
        if load == "ours":
            dcp.load({"app": app}, checkpoint_id=tmp_path / "run" / "at-7")
        else:
            stock.load({"app": app}, storage_reader=dcp.SidesaveReader(tmp_path / "run" / "at-7"))
        assert all(map(torch.equal, expected, tensors(app)))


def test_what_all_ranks_hold_alike_is_on_the_disk_once(tmp_path: Path):
    forks.spawn(dcp_trainers.replicated, str(tmp_path))
    with CheckpointReader(str(tmp_path / "run" / "at-1")) as reader:
        names = reader.names()
    assert [name for name in names if "@rank" in name] == ["own@rank-00001"]
    assert len([name for name in names if name.endswith(".0.weight")]) == 1


def begin(folder: Path, *arguments: Any, size: int = 2) -> list[Any]:
    folder.mkdir()
    call = (
        f"import dcp_trainers; dcp_trainers.run_job(%d, {str(folder)!r}, *{arguments!r}, "
        f"size={size})"
    )
    return [forks.popen([sys.executable, "-c", call % rank]) for rank in range(size)]


def start(folder: Path, *arguments: Any, died: bool = False, size: int = 2) -> None:
    ranks = begin(folder, *arguments, size=size)
    assert [each.wait(280) for each in ranks] == [-signal.SIGKILL if died else 0] * size


def losses(run: Path, size: int = 2) -> list[dict[str, str]]:
    """Of each rank, the loss of each step, the last time that it was taken."""
    lines = [Path(f"{run}.losses-{rank}").read_text().splitlines() for rank in range(size)]
    return [dict(line.split() for line in each) for each in lines]  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_job_killed_within_a_save_goes_on_as_one_that_saves_with_torch(kind: str, tmp_path: Path):
    (tmp_path / "ours").mkdir()
    for api in ("ours", "stock"):
        run = tmp_path / f"{api}.run"
        start(tmp_path / f"{api}1", str(run), api, kind, 6, 3, died=True)
        if api == "ours":
            assert {link.name for link in run.glob("at_*")} <= {"at_0", "at_1", "at_2", "at_3"}
            for link in run.glob("at_*"):
                assert sidesave.verify(link).ok
        start(tmp_path / f"{api}2", str(run), api, kind, 6, -1, died=False)
    start(tmp_path / "straight", str(tmp_path / "straight.run"), "ours", kind, 6, -1, died=False)
    expected = losses(tmp_path / "straight.run")
    assert [*expected[0]] == [str(step) for step in range(6)]
    assert losses(tmp_path / "ours.run") == losses(tmp_path / "stock.run") == expected
    assert {link.name for link in (tmp_path / "ours.run").glob("at_*")} == {
        f"at_{step}" for step in range(6)
    }


@pytest.mark.slow
def test_a_trainer_that_is_killed_with_its_daemon_within_a_write_goes_on_from_the_commit(
    orders: Orders, tmp_path: Path
):
    run = tmp_path / "run"
    start(tmp_path / "1", str(run), "ours", "", 3, -1, size=1)
    orders.give("stop", starting_at="got SAVE", every_step=True, after=6)
    (trainer,) = begin(tmp_path / "2", str(run), "ours", "", 6, -1, size=1)
    try:
        daemon, _ = orders.obeyed()
    finally:
        trainer.kill()
        trainer.wait()
    os.kill(daemon, signal.SIGKILL)
    (partial,) = run.glob(".step-00000003.*.partial")
    assert [*partial.iterdir()]
    assert {link.name for link in run.glob("at_*")} == {"at_0", "at_1", "at_2"}
    assert [info.step for info in sidesave.find(run) if sidesave.verify(info).ok] == [0, 1, 2]
    start(tmp_path / "3", str(run), "ours", "", 6, -1, size=1)
    start(tmp_path / "straight", str(tmp_path / "straight.run"), "ours", "", 6, -1, size=1)
    assert losses(run, 1) == losses(tmp_path / "straight.run", 1)
    steps = [line.split()[0] for line in Path(f"{run}.losses-0").read_text().splitlines()]
    assert steps == ["0", "1", "2", *steps[3:-3], "3", "4", "5"]  # from the commit of step 2
    assert steps[3] == "3"
    assert not [*run.glob(".step-*")]
    assert all(sidesave.verify(each).ok for each in run.glob("at_*"))


@pytest.mark.slow
def test_the_script_of_the_guide_can_be_killed_and_goes_on(tmp_path: Path):
    guides.kill_and_run_again("dcp", tmp_path)
