"""What stays in a run directory, and what in its mirror."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from mirrors import committed_in
from trainers import DEADLINE_S, a_state, same, wait_until

import sidesave
from sidesave import CheckpointManager, KeepLatest
from sidesave.errors import CheckpointNotFoundError, InvalidArgumentError


@pytest.fixture(params=["directory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "mirror") if request.param == "directory" else f"file://{tmp_path}/mirror"


def test_two_lists_say_what_stays_where(run: Path, place: str):
    with CheckpointManager(run, a_state(0), save=1, keep=KeepLatest(1), mirror_keep=KeepLatest(3), mirror=place) as m:
        for step in range(1, 7):
            m.save(step).mirrored.result(DEADLINE_S)  # each is there before the next makes it one of the past
        wait_until(lambda: sorted(committed_in(place)) == [4, 5, 6])
        wait_until(lambda: sorted(committed_in(str(run))) == [6])


def test_what_is_to_be_mirrored_stays_until_it_is(run: Path, tmp_path: Path):
    with sidesave.Checkpointer(run) as ckpt:
        ckpt.save(0, a_state(0), blocking=True)
    away = tmp_path / "away"
    away.touch()  # a file where a directory is to be: the mirror cannot be opened
    keep, remote = KeepLatest(1), KeepLatest(3)
    with CheckpointManager(run, a_state(0), keep=keep, mirror_keep=remote, mirror=away / "mirror") as manager:
        handles = [manager.save(step) for step in range(1, 6)]
        handles[-1].committed.result(DEADLINE_S)
        wait_until(lambda: sorted(committed_in(str(run))) == [3, 4, 5])  # neither list wants the others
        away.unlink()
        for handle in handles[-3:]:
            handle.mirrored.result(DEADLINE_S)
        wait_until(lambda: sorted(committed_in(str(run))) == [5])
    assert sorted(committed_in(str(away / "mirror"))) == [3, 4, 5]


def test_an_odd_list_is_refused(run: Path):
    with pytest.raises(InvalidArgumentError, match="keep takes policies"):
        CheckpointManager(run, a_state(0), mirror_keep=3)  # pyright: ignore[reportArgumentType]


def test_a_pinned_step_stays_in_both_places(run: Path, place: str):
    with CheckpointManager(run, a_state(0), keep=KeepLatest(1), mirror_keep=KeepLatest(1), mirror=place) as manager:
        manager.save(1).mirrored.result(DEADLINE_S)
        manager.pin(1)
        for step in (2, 3):
            manager.save(step).mirrored.result(DEADLINE_S)
        wait_until(lambda: sorted(committed_in(place)) == [1, 3])
        wait_until(lambda: sorted(committed_in(str(run))) == [1, 3])


def test_a_manager_whose_disk_is_gone_resumes_from_the_mirror(run: Path, place: str):
    state = a_state(1)
    with CheckpointManager(run, state, mirror=place, random_state=True) as manager:
        manager.restore()
        manager.save(7).mirrored.result(DEADLINE_S)
    shutil.rmtree(run)
    again = a_state(2)
    with CheckpointManager(run, again, mirror=place, random_state=True) as manager:
        assert manager.restore() == 8
        assert same(again, a_state(1))
        manager.save(8).mirrored.result(DEADLINE_S)
    assert sorted(committed_in(place)) == [7, 8]


def test_of_what_waits_for_the_mirror_the_oldest_goes_where_it_is_too_much(run: Path, tmp_path: Path):
    with sidesave.Checkpointer(run) as ckpt:
        ckpt.save(0, a_state(0), blocking=True)
    away = tmp_path / "away"
    away.touch()
    rules = {"keep": KeepLatest(1), "mirror_keep": KeepLatest(9), "mirror_backlog": 2, "mirror": away / "mirror"}
    with CheckpointManager(run, a_state(0), **rules) as manager:  # pyright: ignore[reportArgumentType]
        handles = [manager.save(step) for step in range(1, 6)]
        handles[-1].committed.result(DEADLINE_S)
        wait_until(lambda: sorted(committed_in(str(run))) == [3, 4, 5])
        away.unlink()
        for handle in handles[-3:]:
            handle.mirrored.result(DEADLINE_S)
        with pytest.raises(CheckpointNotFoundError, match="before it was copied"):
            handles[0].mirrored.result(DEADLINE_S)


@pytest.mark.parametrize("backlog", [0, -1, 1.5, True])
def test_an_odd_backlog_is_refused(run: Path, backlog: int):
    with pytest.raises(InvalidArgumentError, match="mirror_backlog takes an int"):
        CheckpointManager(run, a_state(0), mirror_backlog=backlog)


@pytest.mark.parametrize("rules", [{"mirror_keep": KeepLatest(1)}, {"mirror_backlog": 1}, {"mirror_bandwidth": 1}])
def test_rules_for_a_mirror_need_one(run: Path, rules: dict[str, Any]):
    with pytest.raises(InvalidArgumentError, match="mirror="):
        CheckpointManager(run, a_state(0), **rules)


@pytest.mark.parametrize("bandwidth", [0, -1, 1.5, True, "fast"])
def test_an_odd_bandwidth_is_refused(run: Path, tmp_path: Path, bandwidth: Any):
    with pytest.raises(InvalidArgumentError, match="mirror_bandwidth must be an int"):
        sidesave.Checkpointer(run, mirror=tmp_path / "mirror", mirror_bandwidth=bandwidth)
