"""``sidesave rm``: checkpoints deleted by hand, on a disk and in an object store."""

import time
from pathlib import Path

import pytest
from commands import output
from trainers import Orders, Traces, check, commit, end, kill_with_a_save_staged, save_steps

import sidesave
from sidesave.client.cli import changes
from sidesave.client.runs.pins import PINS, Pins
from sidesave.writer_daemon.checkpoints import deletion
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.storage.posix import PosixStorage


@pytest.fixture(params=["directory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(deletion, "GRACE_S", 0.1)
    return str(tmp_path / "run") if request.param == "directory" else f"file://{tmp_path}/run"


def steps_in(place: str) -> list[int]:
    return [info.step for info in sidesave.find(place)]


def files_of(place: str, step: int) -> list[Path]:
    root = Path(place.removeprefix("file://"))
    return [
        path
        for path in root.rglob("*")
        if path.is_file() and f"step-{step:08d}" in str(path.relative_to(root))
    ]


def test_steps_are_deleted_with_their_bytes_and_the_run_goes_on(place: str):
    save_steps(place, 1, 2, 3)
    told = output("rm", place, 1, 2, 2)
    assert told.count(": deleted") == 2
    assert steps_in(place) == [3]
    assert files_of(place, 1) == files_of(place, 2) == []
    save_steps(place, 4)
    check(place, 3, 4)


def test_none_is_deleted_where_one_of_them_may_not_be(place: str):
    save_steps(place, 1, 2, 3)
    Pins(place).change(2, pinned=True)
    assert "pinned: 2" in output("rm", place, 1, 2, status=2)
    assert "no step 7" in output("rm", place, 1, 7, status=2)
    assert "newest checkpoint" in output("rm", place, 1, 3, status=2)
    assert steps_in(place) == [1, 2, 3]
    Pins(place).change(2, pinned=False)
    assert "deleted" in output("rm", place, 1, 2)


def test_pins_that_cannot_be_read_keep_everything(place: str):
    save_steps(place, 1, 2)
    (Path(place.removeprefix("file://")) / PINS.name).write_text("[1, ")
    assert "pinned steps are unknown" in output("rm", place, 1, status=1)
    assert steps_in(place) == [1, 2]


def test_the_steps_of_a_live_run_are_its_own(place: str):
    with sidesave.Checkpointer(place) as ckpt:
        for step in (1, 2):
            commit(ckpt, step)
        told = output("rm", place, 1, status=1)
        assert "is using it" in told
        assert str(ckpt.daemon_pid) in told
        commit(ckpt, 3)
    assert steps_in(place) == [1, 2, 3]


def test_what_was_left_is_finished_before_and_is_the_latest_then(
    place: str, traces: Traces, orders: Orders
):
    save_steps(place, 1)
    end(
        kill_with_a_save_staged(traces, place, orders, starting_at="sends WRITTEN", every_step=True)
    )
    assert steps_in(place) == [1]
    assert "newest checkpoint" in output("rm", place, 5, status=2), (
        "the leftover is whole, and so a checkpoint"
    )
    output("rm", place, 1)
    assert steps_in(place) == [5]


def test_a_checkpoint_that_is_being_read_stays(tmp_path: Path):
    save_steps(str(tmp_path), 1, 2)
    with sidesave.hold(tmp_path / "step-00000001"):
        assert "the checkpoint is being read" in output("rm", tmp_path, 1, status=1)
    assert steps_in(str(tmp_path)) == [1, 2]


def test_where_no_locks_tell_readers_have_time_unless_a_job_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A job that begins meanwhile need not wait: it asks for the run, and removes the bytes
    itself.
    """
    place = f"file://{tmp_path}/run"
    save_steps(place, 1, 2)
    leases: list[Lease] = []
    tell_trainer_gone = Lease.tell_trainer_gone

    def sleep(seconds: float) -> None:
        assert files_of(place, 1), "removed while somebody may read it"
        leases[0].end_by = time.monotonic()  # as the thread that renews the lease says of a request

    def tell(lease: Lease) -> None:
        tell_trainer_gone(lease)
        leases.append(lease)

    with monkeypatch.context() as patch:
        patch.setattr(Lease, "tell_trainer_gone", tell)
        patch.setattr(changes, "_sleep", sleep)
        assert "the bytes are removed in 30 s" in output("rm", place, 1)
    assert leases
    assert files_of(place, 1)
    save_steps(place, 3)
    assert steps_in(place) == [2, 3]


def test_locks_spare_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deletion, "GRACE_S", 3600.0)
    save_steps(str(tmp_path), 1, 2)
    if PosixStorage(str(tmp_path)).is_shared("step-00000001/manifest.json") is None:
        pytest.skip("there are no locks here")
    output("rm", tmp_path, 1)
    assert files_of(str(tmp_path), 1) == []
