"""What stays in a run directory, and what in its mirror."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mirrors import committed_in
from trainers import DEADLINE_S, a_state, await_end, daemon, pidfd_of, same, save_steps, wait_until

import sidesave
from sidesave import CheckpointManager, KeepLatest, MirrorOptions
from sidesave.client.runs.pins import PINS
from sidesave.errors import InvalidArgumentError, NoSpaceError


def test_two_lists_say_what_stays_where(run: Path, place: str):
    with CheckpointManager(
        run, a_state(0), save=1, keep=KeepLatest(1), mirror_keep=KeepLatest(3), mirror=place
    ) as m:
        for step in range(1, 7):
            # each is there before the next makes it one of the past
            m.save(step).mirrored.result(DEADLINE_S)
        wait_until(lambda: sorted(committed_in(place)) == [4, 5, 6])
        wait_until(lambda: sorted(committed_in(str(run))) == [6])


def test_what_is_to_be_mirrored_stays_until_it_is(run: Path, tmp_path: Path):
    save_steps(run, 0)
    away = tmp_path / "away"
    away.touch()  # a file where a directory is to be: the mirror cannot be opened
    keep, remote = KeepLatest(1), KeepLatest(3)
    with CheckpointManager(
        run, a_state(0), keep=keep, mirror_keep=remote, mirror=away / "mirror"
    ) as manager:
        handles = [manager.save(step) for step in range(1, 6)]
        handles[-1].committed.result(DEADLINE_S)
        # neither list wants the others
        wait_until(lambda: sorted(committed_in(str(run))) == [3, 4, 5])
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
    with CheckpointManager(
        run, a_state(0), keep=KeepLatest(1), mirror_keep=KeepLatest(1), mirror=place
    ) as manager:
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
    """A manager of a run on 8 MiB of tmpfs, of which three checkpoints of 2 MiB wait for a mirror
    that is away.
    """
    run = mount("-t", "tmpfs", "-o", "size=8m", "none") / "run"
    (tmp_path / "away").touch()
    save_steps(run, 0, mib=0.01)

    @contextlib.contextmanager
    def make(**rules: Any) -> Iterator[CheckpointManager]:
        place = MirrorOptions(place=tmp_path / "away" / "mirror", **rules)
        policies: dict[str, Any] = {"keep": KeepLatest(1), "mirror_keep": KeepLatest(9)}
        with CheckpointManager(run, a_state(0, 2), mirror=place, **policies) as manager:
            for step in (1, 2, 3):
                manager.save(step).committed.result(DEADLINE_S)
            wait_until(lambda: sorted(committed_in(str(run))) == [0, 1, 2, 3])
            with pidfd_of(daemon(manager._checkpointer)) as pidfd:
                yield manager
                manager.close()
                # which has a file of the mounted file system open until all is mirrored
                await_end(pidfd)

    return make


def come_back(away: Path) -> Path:
    """The mirror's file system is mounted."""
    away.unlink()
    (away / "mirror").mkdir(parents=True)
    return away / "mirror"


def test_a_save_that_finds_no_room_fails_rather_than_drop_what_waits(
    waiting: Waiting, tmp_path: Path
):
    with waiting() as manager:
        with pytest.raises(NoSpaceError):
            manager.save(4).committed.result(DEADLINE_S)
        place = come_back(tmp_path / "away")
        wait_until(lambda: sorted(committed_in(str(place))) == [0, 1, 2, 3])
        # which makes the room
        wait_until(lambda: sorted(committed_in(manager._checkpointer.directory)) == [3])
        manager.save(5).mirrored.result(DEADLINE_S)


def test_a_save_that_finds_no_room_drops_the_oldest_that_waits_and_no_more(
    waiting: Waiting, tmp_path: Path
):
    with waiting(backlog="drop") as manager:
        run = Path(manager._checkpointer.directory)
        wait_until(lambda: manager._checkpointer.session.droppable == (0, 1, 2))
        manager.save(4).committed.result(DEADLINE_S)
        # the first one was not room enough
        wait_until(lambda: sorted(committed_in(str(run))) == [2, 3, 4])
        manager.save(5).committed.result(DEADLINE_S)
        place = come_back(tmp_path / "away")
        wait_until(lambda: sorted(committed_in(str(place))) == [3, 4, 5])
        # a step that was dropped can be saved again
        again = manager._checkpointer.save(1, a_state(1))
        again.mirrored.result(DEADLINE_S)


def test_a_save_that_finds_no_room_does_not_drop_a_step_that_was_pinned(
    waiting: Waiting, tmp_path: Path
):
    with waiting(backlog="drop") as manager:
        wait_until(lambda: manager._checkpointer.session.droppable == (0, 1, 2))
        manager.pin(0)
        assert manager._checkpointer.session.droppable == (1, 2)
        manager.save(4).committed.result(DEADLINE_S)
        assert 0 in committed_in(manager._checkpointer.directory)
        come_back(tmp_path / "away")


def test_a_save_drops_nothing_while_it_is_not_known_what_is_pinned(
    waiting: Waiting, tmp_path: Path
):
    with waiting(backlog="drop") as manager:
        pins, retention = (
            Path(manager._checkpointer.directory) / PINS.name,
            manager._background.retention,
        )
        wait_until(lambda: manager._checkpointer.session.droppable == (0, 1, 2))
        pins.write_text("[1, ")
        assert retention is not None
        retention._events.put(True)
        wait_until(lambda: manager._checkpointer.session.droppable == ())
        pins.unlink()
        retention._events.put(True)
        wait_until(lambda: manager._checkpointer.session.droppable == (0, 1, 2))
        come_back(tmp_path / "away")


@pytest.mark.parametrize("backlog", [0, 5, "oldest", True, None])
def test_an_odd_backlog_is_refused(run: Path, tmp_path: Path, backlog: Any):
    with pytest.raises(
        InvalidArgumentError, match=r"MirrorOptions\.backlog must be 'fail' or 'drop'"
    ):
        CheckpointManager(
            run, a_state(0), mirror=MirrorOptions(place=tmp_path / "mirror", backlog=backlog)
        )


def test_policies_for_a_mirror_need_one(run: Path):
    with pytest.raises(InvalidArgumentError, match="mirror="):
        CheckpointManager(run, a_state(0), mirror_keep=KeepLatest(1))


def test_dropping_unmirrored_checkpoints_needs_a_manager(run: Path, tmp_path: Path):
    with pytest.raises(InvalidArgumentError, match="CheckpointManager"):
        sidesave.Checkpointer(run, mirror=MirrorOptions(place=tmp_path / "mirror", backlog="drop"))
    assert not run.exists()


@pytest.mark.parametrize("bandwidth", [0, -1, 1.5, True, "fast"])
def test_an_odd_bandwidth_is_refused(run: Path, tmp_path: Path, bandwidth: Any):
    with pytest.raises(InvalidArgumentError, match=r"MirrorOptions\.bandwidth must be an int"):
        sidesave.Checkpointer(
            run, mirror=sidesave.MirrorOptions(place=tmp_path / "mirror", bandwidth=bandwidth)
        )
