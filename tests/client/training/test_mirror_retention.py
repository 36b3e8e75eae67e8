"""What stays in a run directory, and what in its mirror."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mirrors import committed_in
from trainers import DEADLINE_S, a_state, await_end, daemon, pidfd_of, same, wait_until

import sidesave
from sidesave import CheckpointManager, KeepLatest
from sidesave.client.internals import saver_of
from sidesave.errors import InvalidArgumentError, NoSpaceError


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
        (away / "mirror").mkdir(parents=True)
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


Waiting = Callable[..., contextlib.AbstractContextManager[CheckpointManager]]


@pytest.fixture
def waiting(mount: Callable[..., Path], tmp_path: Path) -> Waiting:
    """A manager of a run on 8 MiB of tmpfs, of which three checkpoints of 2 MiB wait for a mirror that is away."""
    run = mount("-t", "tmpfs", "-o", "size=8m", "none") / "run"
    (tmp_path / "away").touch()
    with sidesave.Checkpointer(run) as ckpt:
        ckpt.save(0, a_state(0, 0.01), blocking=True)

    @contextlib.contextmanager
    def make(**rules: Any) -> Iterator[CheckpointManager]:
        mirror = tmp_path / "away" / "mirror"
        policies: dict[str, Any] = {"keep": KeepLatest(1), "mirror_keep": KeepLatest(9), "mirror": mirror, **rules}
        with CheckpointManager(run, a_state(0, 2), **policies) as manager:
            for step in (1, 2, 3):
                manager.save(step).committed.result(DEADLINE_S)
            wait_until(lambda: sorted(committed_in(str(run))) == [0, 1, 2, 3])
            with pidfd_of(daemon(manager._checkpointer)) as pidfd:
                yield manager
                manager.close()
                await_end(pidfd)  # which has a file of the mounted file system open until all is mirrored

    return make


def come_back(away: Path) -> Path:
    """The mirror's file system is mounted."""
    away.unlink()
    (away / "mirror").mkdir(parents=True)
    return away / "mirror"


def test_a_save_that_finds_no_room_fails_rather_than_drop_what_waits(waiting: Waiting, tmp_path: Path):
    with waiting() as manager:
        with pytest.raises(NoSpaceError):
            manager.save(4).committed.result(DEADLINE_S)
        place = come_back(tmp_path / "away")
        wait_until(lambda: sorted(committed_in(str(place))) == [0, 1, 2, 3])
        wait_until(lambda: sorted(committed_in(manager._checkpointer.directory)) == [3])  # which makes the room
        manager.save(5).mirrored.result(DEADLINE_S)


def test_a_save_that_finds_no_room_drops_the_oldest_that_waits_and_no_more(waiting: Waiting, tmp_path: Path):
    with waiting(mirror_backlog="drop") as manager:
        run = Path(manager._checkpointer.directory)
        wait_until(lambda: saver_of(manager._checkpointer).session.droppable == (0, 1, 2))
        manager.save(4).committed.result(DEADLINE_S)
        wait_until(lambda: sorted(committed_in(str(run))) == [2, 3, 4])  # the first one was not room enough
        manager.save(5).committed.result(DEADLINE_S)
        place = come_back(tmp_path / "away")
        wait_until(lambda: sorted(committed_in(str(place))) == [3, 4, 5])
        again = manager._checkpointer.save(1, a_state(1))  # a step that was dropped can be saved again
        again.mirrored.result(DEADLINE_S)


@pytest.mark.parametrize("backlog", [0, 5, "oldest", True, None])
def test_an_odd_backlog_is_refused(run: Path, backlog: Any):
    with pytest.raises(InvalidArgumentError, match="mirror_backlog must be 'fail' or 'drop'"):
        CheckpointManager(run, a_state(0), mirror_backlog=backlog)


@pytest.mark.parametrize("rules", [{"mirror_keep": KeepLatest(1)}, {"mirror_backlog": "drop"}, {"mirror_bandwidth": 1}])
def test_rules_for_a_mirror_need_one(run: Path, rules: dict[str, Any]):
    with pytest.raises(InvalidArgumentError, match="mirror="):
        CheckpointManager(run, a_state(0), **rules)


@pytest.mark.parametrize("bandwidth", [0, -1, 1.5, True, "fast"])
def test_an_odd_bandwidth_is_refused(run: Path, tmp_path: Path, bandwidth: Any):
    with pytest.raises(InvalidArgumentError, match="mirror_bandwidth must be an int"):
        sidesave.Checkpointer(run, mirror=tmp_path / "mirror", mirror_bandwidth=bandwidth)
