"""Which checkpoint is meant: whatever loads, verifies or exports takes the same paths, and says the
same of others.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from managers import Manage, damage
from node_trainers import NodeRank
from rank_trainers import Ranks
from trainers import Orders, Traces

import sidesave
from sidesave import Source
from sidesave.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    IntegrityError,
    InvalidArgumentError,
    SidesaveError,
)
from sidesave.writer_daemon.checkpoints.replacement import RetryIfReplaced

Load = Callable[[Any], float]
"""What ``x`` is in the checkpoint that something means."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 10, 20 and 30, and 15 after going back: that one is the latest."""
    run = tmp_path_factory.mktemp("which") / "run"
    with sidesave.Checkpointer(run) as checkpointer:
        for step in (10, 20, 30, 15):
            if step == 15:
                checkpointer.load(10)
            checkpointer.save(step, {"x": torch.tensor([float(step)])}, blocking=True)
    return run


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy of it to be changed."""
    return shutil.copytree(original, tmp_path / "run")


def by_load(path: Any) -> float:
    return sidesave.load(path)["x"].item()


def by_verify(path: Any) -> float:
    report = sidesave.verify(path)
    assert report.ok
    return sidesave.load(report.path)["x"].item()


def by_source(path: Any) -> float:
    into = {"x": torch.zeros(1)}
    sidesave.load_sources(Source(path), into)
    return into["x"].item()


def by_export(path: Any) -> float:
    report = sidesave.export(path, Path(path).parent / "weights", item="x")
    shutil.rmtree(report.path)
    return sidesave.load(path)["x"].item()


def by_checkpointer(path: Any) -> float:
    with sidesave.Checkpointer(run_of(path)) as checkpointer:
        return checkpointer.load(path)["x"].item()


def by_manager(path: Any) -> float:
    state = {"x": torch.zeros(1)}
    with sidesave.CheckpointManager(run_of(path), state) as manager:
        assert manager.restore(path, fallback=False) == int(state["x"].item()) + 1
    return state["x"].item()


def run_of(path: Any) -> Path:
    place = Path(path).resolve()
    return place.parent if place.name.startswith("step-") else place


def outcome(load: Load, path: Any) -> str | float:
    try:
        return load(path)
    except SidesaveError as error:
        return f"{type(error).__name__}: {error}"


EVERYWHERE = [by_load, by_verify, by_source, by_checkpointer, by_manager]


@pytest.mark.parametrize("load", EVERYWHERE)
def test_a_run_a_step_and_what_describes_it_are_taken_everywhere(run: Path, load: Load):
    (run / "best").symlink_to("step-00000030")  # first: to load 20 is to go back to it
    info = next(info for info in sidesave.find(run) if info.step == 20)
    assert [load(run), load(str(run)), load(run / "best"), load(info)] == [15, 15, 30, 20]
    assert load(run / "step-00000010") == 10


def test_weights_of_a_run_are_those_of_its_newest(tmp_path: Path):
    with sidesave.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"model": {"w": torch.full((1,), float(step))}}, blocking=True)
    sidesave.export(tmp_path / "run", tmp_path / "weights")
    into = {"model": {"w": torch.zeros(1)}}
    sidesave.load_sources(Source(tmp_path / "weights", item="model"), into)
    assert into["model"]["w"].item() == 2


@pytest.mark.parametrize("load", EVERYWHERE)
def test_what_is_not_there_is_said_alike(original: Path, tmp_path: Path, load: Load):
    run = shutil.copytree(original, tmp_path / "run")
    assert outcome(load, run / "step-00000011") == outcome(by_load, run / "step-00000011")
    with pytest.raises(
        CheckpointNotFoundError, match=r"there is no step 11; there are \[10, 15, 20, 30\]"
    ):
        load(run / "step-00000011")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint"):
        load(tmp_path / "empty")


def test_what_is_no_path_is_refused_alike(run: Path):
    with (
        sidesave.Checkpointer(run) as checkpointer,
        sidesave.CheckpointManager(run.parent / "new", {}) as manager,
    ):
        for load in (sidesave.load, sidesave.verify, by_source, checkpointer.load, manager.restore):
            with pytest.raises(InvalidArgumentError, match=r"ftp://bucket"):
                load("ftp://bucket")
            with pytest.raises(CheckpointNotFoundError, match="there is nothing at this path"):
                load(run.parent / "nowhere")


def test_a_step_without_a_manifest_is_no_checkpoint_and_verify_says_what_it_lacks(run: Path):
    path = run / "step-00000020"
    (path / "manifest.json").unlink()
    assert [fault.file for fault in sidesave.verify(path).faults] == ["manifest.json"]
    for load in (by_load, by_source, by_checkpointer, by_manager):
        with pytest.raises(CheckpointNotFoundError, match="manifest"):
            load(path)


@pytest.mark.parametrize("load", EVERYWHERE)
def test_a_damaged_newest_is_not_passed_over_unnoticed_and_others_are_there(run: Path, load: Load):
    (run / "step-00000040").mkdir()
    shutil.copy(run / "step-00000030" / "manifest.json", run / "step-00000040")
    manifest = run / "step-00000030" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="step-00000030"):
        load(run)
    assert load(run / "step-00000020") == 20


@pytest.mark.parametrize("load", EVERYWHERE)
def test_a_run_of_which_nothing_can_be_read_is_no_empty_one(run: Path, load: Load):
    for manifest in run.glob("step-*/manifest.json"):
        manifest.write_bytes(manifest.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match="step-000000"):
        load(run)


def test_of_many_steps_the_last_are_named(tmp_path: Path):
    run = tmp_path / "run"
    with sidesave.Checkpointer(run) as checkpointer:
        for step in range(22):
            checkpointer.save(step, {"x": step}, blocking=True)
        with pytest.raises(
            CheckpointNotFoundError,
            match=r"there is no step 99; the last of 22 are \[2, 3, .*, 21\]",
        ):
            checkpointer.load(99)


def test_a_step_whose_directory_is_that_of_another_is_not_there(run: Path):
    (run / "step-00000020").rename(run / "step-00000021")
    with pytest.raises(CheckpointNotFoundError, match=r"no step 21; there are \[10, 15, 30\]"):
        Source(run, 21).locate()


def test_where_the_newest_is_deleted_in_this_moment_the_next_newest_is_loaded(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    last = run / "step-00000015"  # without it the latest is 10, to which the run had gone back
    shutil.move(last, run / "later")
    enter = RetryIfReplaced.__enter__

    def overtaken(attempts: RetryIfReplaced) -> list[str]:
        # it has been located, and is read next
        if attempts._locate is not None and not last.exists():
            shutil.move(run / "later", last)
            shutil.rmtree(run / "step-00000010")
        return enter(attempts)

    monkeypatch.setattr(RetryIfReplaced, "__enter__", overtaken)
    assert by_load(run) == 15
    assert not (run / "step-00000010").exists()


# A checkpointer loads what is of its run ----------------------------------------------------------


def test_a_step_that_is_meant_by_its_path_is_gone_back_to_like_any(run: Path):
    with sidesave.Checkpointer(run) as checkpointer:
        checkpointer.load(run / "step-00000020")
        assert checkpointer.latest_step() == 20
        info = checkpointer.save(25, {"x": torch.zeros(1)}, blocking=True).committed.result()
        assert info.parent is not None and info.parent[0] == 20
    newest = sidesave.latest(run)
    assert newest is not None and newest.step == 25


def test_a_run_that_is_meant_by_its_path_gives_nothing_up(run: Path):
    before = sidesave.find(run)
    link = run.parent / "link"
    link.symlink_to(run)
    with sidesave.Checkpointer(run) as checkpointer:
        assert checkpointer.load(link)["x"].item() == 15
    assert [info.given_up for info in sidesave.find(run)] == [info.given_up for info in before]


def test_a_checkpoint_of_another_run_is_refused_and_becomes_nobodys_parent(
    run: Path, original: Path
):
    moved = shutil.copytree(run / "step-00000010", run.parent / "moved")
    target = {"x": torch.zeros(1)}
    with sidesave.Checkpointer(run) as checkpointer:
        for other in (original, original / "step-00000010", sidesave.latest(original), moved):
            with pytest.raises(
                InvalidArgumentError, match=r"no checkpoint of this run.*sidesave\.load\(path"
            ):
                checkpointer.load(other, into=target)  # pyright: ignore[reportArgumentType]
        with pytest.raises(InvalidArgumentError, match="step must be"):
            checkpointer.load(1.5)  # pyright: ignore[reportArgumentType]
        info = checkpointer.save(40, {"x": torch.zeros(1)}, blocking=True).committed.result()
    assert info.parent is not None and info.parent[0] == 15, "the latest of its own"
    assert not target["x"].any()


def test_damage_of_what_a_path_means_is_got_over_by_fallback(run: Path):
    damage(run, 30)
    with sidesave.Checkpointer(run) as checkpointer:
        with pytest.raises(IntegrityError):
            checkpointer.load(run / "step-00000030")
        assert checkpointer.load(run / "step-00000030", fallback=True)["x"].item() == 20


def test_of_two_checkpoints_of_a_step_the_one_is_loaded_whose_path_is_given(
    tmp_path: Path, orders: Orders
):
    run, other = tmp_path / "run", tmp_path / "other"
    with sidesave.Checkpointer(
        run, failures=sidesave.FailureOptions(fallback_directory=other)
    ) as checkpointer:
        checkpointer.save(1, {"x": 1}, blocking=True)
        orders.give("EROFS")
        first = checkpointer.save(2, {"x": 2}, blocking=True).committed.result()
        assert first.path == str(other / "step-00000002")
    with sidesave.Checkpointer(
        run, failures=sidesave.FailureOptions(fallback_directory=other)
    ) as checkpointer:
        checkpointer.load(1)
        second = checkpointer.save(2, {"x": 3}, blocking=True).committed.result()
        assert second.path == str(run / "step-00000002")
        loaded = [checkpointer.load(which)["x"] for which in (2, first, second, run, other)]
    assert loaded == [3, 2, 3, 3, 2]


# A manager ----------------------------------------------------------------------------------------


def test_a_manager_restores_and_goes_back_to_what_it_is_given(manage: Manage, run: Path):
    state = {"x": torch.zeros(1)}
    manager = manage(state)
    infos = {info.step: info for info in manager.checkpoints()}
    assert (manager.restore(infos[30]), state["x"].item()) == (31, 30)
    assert (manager.rollback(run / "step-00000020"), state["x"].item()) == (21, 20)
    assert manager.latest is not None and manager.latest.step == 20
    assert manager.restore(run) == 21


def test_sources_that_are_not_read_are_told_of_and_are_no_warning(
    manage: Manage, original: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "sidesave")
    manager = manage({"x": torch.zeros(1)}, random_state=False)
    assert manager.restore(sources=Source(original / "step-00000010")) == 16
    [record] = [record for record in caplog.records if "sources" in record.message]
    assert (record.levelname, record.message) == (
        "INFO",
        "this run has a checkpoint of its own, step 15: the sources are not read",
    )
    caplog.clear()
    manager.restore()
    assert "sources" not in caplog.text


def test_a_run_that_is_named_and_has_nothing_is_an_error_unlike_one_that_is_not_named(
    tmp_path: Path,
):
    with sidesave.CheckpointManager(tmp_path / "run", {"x": 1}) as manager:
        assert manager.restore() == 0
        with pytest.raises(CheckpointNotFoundError, match="nothing has been committed yet"):
            manager.restore(tmp_path / "run")


# Several ranks ------------------------------------------------------------------------------------


@pytest.fixture
def start(traces: Traces, tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    start = functools.partial(Ranks, folder=tmp_path / "groups", traces=traces, kind=NodeRank)
    with contextlib.ExitStack() as jobs:
        yield lambda count, **options: jobs.enter_context(start(count, **options))


def told(ranks: Ranks, *paths: object) -> list[str]:
    """What comes of it when each rank loads what is its own of ``paths``."""
    for rank, path in zip(ranks, paths, strict=True):
        rank.tell(
            "outcome",
            "load",
            None if path is None else path if isinstance(path, int) else str(path),
        )
    return [answer.get() for answer in ranks.answers()]


@pytest.mark.parametrize("group", [True, False], ids=["process group", "no process group"])
def test_ranks_load_one_checkpoint_by_its_path_or_all_of_them_are_told_why_not(
    start: Callable[..., Ranks], tmp_path: Path, original: Path, traces: Traces, group: bool
):
    run, link = tmp_path / "run", tmp_path / "link"
    link.symlink_to(run)
    ranks = start(2, group=group).begin("fragile", run)
    for step in (1, 2, 3):
        ranks.do("put", "step", step)
        ranks.save(step)
    first, second = (run / f"step-{step:08d}" for step in (1, 2))
    assert told(ranks, run, link) == ["done: 3"] * 2
    for paths, error in (
        ((first, second), "InvalidArgumentError"),
        ((run, second), "InvalidArgumentError"),
        ((first, 1), "InvalidArgumentError"),
        ((run, None), "InvalidArgumentError"),
        ((None, tmp_path / "nowhere"), "InvalidArgumentError"),
        ((run, original), "InvalidArgumentError"),
        ((original, original), "InvalidArgumentError"),
        ((tmp_path / "nowhere", run), "CheckpointNotFoundError"),
        ((run / "step-00000009",) * 2, "CheckpointNotFoundError"),
    ):
        answers = told(ranks, *paths)
        assert [answer.partition(":")[0] for answer in answers] == [error] * 2, (paths, answers)
    assert told(ranks, second, link / "step-00000002") == ["done: 2"] * 2
    assert ranks.do("steps") == [[[1, 2, 3], 2]] * 2
    ranks.do("close")
    traces.check()


def test_each_rank_of_a_node_names_the_directory_of_its_node(
    start: Callable[..., Ranks], tmp_path: Path, traces: Traces
):
    nodes = [tmp_path / f"node-{node}" / "run" for node in range(2)]
    ranks = start(4)
    ranks.do("build", "over_nodes")
    ranks.open(str(nodes[0]).replace("node-0", "node-{node}"), node_local=True)
    for step in (1, 2):
        ranks.do("put", "step", step)
        ranks.save(step)
    assert told(ranks, *[nodes[rank // 2] for rank in range(4)]) == ["done: 2"] * 4
    wrong = told(ranks, *[nodes[0]] * 4)
    assert [answer.partition(":")[0] for answer in wrong] == ["InvalidArgumentError"] * 4
    assert (
        told(ranks, *[nodes[rank // 2] / "step-00000001" for rank in range(4)]) == ["done: 1"] * 4
    )
    shutil.rmtree(nodes[1] / "step-00000002")
    missing = told(ranks, *[nodes[rank // 2] / "step-00000002" for rank in range(4)])
    assert {answer.partition(":")[0] for answer in missing} == {"CheckpointNotFoundError"}
    assert all("of which every node has its part" in answer for answer in missing)
    ranks.do("close")
    traces.check()
