"""The daemon's work on storage off the straight path: lost leases, failed retries, two directories,
late deletions.
"""

import dataclasses
import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from job_messages import an_info
from sessions import NEW, OLD, Session, a_state
from trainers import DEADLINE_S, entries

import sidesave
from sidesave.client.runs.finding import read_info
from sidesave.client.saving.lineage import lineage
from sidesave.errors import (
    IntegrityError,
    InvalidArgumentError,
    SidesaveError,
    StagingError,
    WriteError,
)
from sidesave.writer_daemon import protocol
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.format.rollback import Rollbacks
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.lease.record import LeaseRecord
from sidesave.writer_daemon.log import HistoryLog
from sidesave.writer_daemon.process import jobs, worker
from sidesave.writer_daemon.process.directories import Directories, LeasedDirectory
from sidesave.writer_daemon.process.worker import StorageWorker
from sidesave.writer_daemon.protocol import Delete
from sidesave.writer_daemon.save_record import SaveRecord
from sidesave.writer_daemon.storage import OutputFile, PosixStorage
from sidesave.writer_daemon.writing.writer import Writer

pytestmark = pytest.mark.usefixtures("end_all")

LATE = 1 << 40
"""A place in the order of commits behind every save of a test."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "FIRST_BACKOFF_S", 0.01)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    (tmp_path / "other").mkdir()
    return tmp_path / "other"


class Failing(PosixStorage):
    """Storage that fails so many times at the sync of the run directory, or at reading a record."""

    fail_sync = 0
    fail_read = 0

    def sync_directory(self, name: str) -> None:
        if name == "" and self.fail_sync:
            self.fail_sync -= 1
            raise WriteError(errno.EIO, "cannot sync", self.root)
        super().sync_directory(name)

    def read(self, path: str, max_nbytes: int) -> bytes | None:
        if "rank-" in path and self.fail_read:
            self.fail_read -= 1
            raise WriteError(errno.EIO, "cannot read", path)
        return super().read(path, max_nbytes)


class Busy(PosixStorage):
    """Storage that makes one small file slowly, and meanwhile fails to make another of the same
    save.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.begun, self.made = threading.Event(), threading.Event()

    def create(self, path: str, nbytes: int, final: str | None = None) -> OutputFile:
        if ".objects." in path:
            self.begun.wait(DEADLINE_S)
            self.begun.clear()
            raise WriteError(errno.EIO, "cannot create", path)
        if ".model." in path and ".xxh3." in path:
            self.made.clear()
            self.begun.set()
            time.sleep(0.2)  # long enough for a removal that does not wait for this one
            file = super().create(path, nbytes)
            self.made.set()
            return file
        return super().create(path, nbytes)


def a_worker(
    session: Session, fallback: Path | None = None
) -> tuple[StorageWorker, list[jobs.Event]]:
    """A worker over a session's run directory, and what it posts."""
    events: list[jobs.Event] = []

    def place(storage: PosixStorage, lease: Lease) -> LeasedDirectory:
        return LeasedDirectory(
            storage, lease, Writer(storage, "1-1", threading.Event(), lease.check), "1-1"
        )

    def open_fallback() -> LeasedDirectory:
        storage = PosixStorage(str(fallback))
        return place(
            storage, Lease(storage, LeaseRecord.current(NEW, os.getpid()), 0.0, lambda: True)
        )

    primary = LeasedDirectory(session.storage, session.lease, session._writer(), "1-1")
    directories = Directories(primary, str(fallback or ""), open_fallback)
    return StorageWorker(1, directories, 2, lambda save: None, events.append), events


def a_deletion(step: int, sequence: int = LATE) -> Delete:
    return Delete(attempt=1, save_id=9, steps=(step,), sequence=sequence, retry=False)


def error_of(event: jobs.Event) -> str | None:
    assert isinstance(event, (jobs.WriteEnded, jobs.CommitEnded, jobs.DeleteEnded))
    errors = [event.error] if event.error is not None else []
    if isinstance(event, jobs.DeleteEnded):
        errors += event.failures
    return errors[0].error if errors else None


def damage(directory: Path) -> None:
    manifest = directory / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-5])


# Writing and committing ---------------------------------------------------------------------------


def test_a_daemon_that_has_lost_its_lease_commits_nothing_in_the_fallback_either(
    run: Path, other: Path
):
    session = Session(run)
    work, events = a_worker(session, other)
    epoch = session.lease.epoch + 1
    successor = dataclasses.replace(
        LeaseRecord.current(OLD, os.getpid()), token="x" * 16, epoch=epoch
    )
    (run / ".sidesave.lease" / str(epoch)).write_bytes(successor.to_bytes())
    work.write(session.stage(1, a_state(1)), session._slot.arena)
    assert error_of(events[-1]) == "WriteError"
    assert entries(other) == []


def test_a_sync_that_failed_after_the_rename_is_not_tried_again(run: Path):
    storage = Failing(str(run))
    session = Session(run, storage=storage)
    save = session.put(1, a_state(1))
    session.commit(save)  # an earlier daemon died after the rename
    work, events = a_worker(session)
    storage.fail_sync = 1
    work.commit(save)
    assert error_of(events[-1]) == "CommitUnknownError"


def test_adopting_what_an_earlier_daemon_wrote_is_tried_again(run: Path):
    storage = Failing(str(run))
    session = Session(run, storage=storage)
    save = session.put(1, a_state(1))
    work, events = a_worker(session)
    storage.fail_read = 1
    work.write(dataclasses.replace(save, retry=True), None)
    assert error_of(events[-1]) is None


def test_a_failed_save_is_removed_only_when_nothing_writes_into_it_any_more(run: Path):
    storage = Busy(str(run))
    session = Session(run, storage=storage)
    work, events = a_worker(session)
    work.write(session.stage(1, a_state(1)), session._slot.arena)
    assert error_of(events[-1]) == "WriteError"
    assert storage.made.is_set(), "its file was made, and is gone all the same"
    assert list(run.glob(".step-*")) == []


def test_a_commit_that_stalls_is_unknown_and_not_failed(tmp_path: Path):
    save = dataclasses.replace(Session(tmp_path).stage(1, a_state(1)), save_id=1)
    machine = jobs.Jobs(1)
    machine.handle(jobs.Submitted(save))
    machine.handle(jobs.WriteEnded(1, 1, 1.0))
    stalled = protocol.failure(1, 1, WriteError(errno.ETIMEDOUT, "stalled", "/x"))
    [told] = [
        action.message
        for action in machine.handle(jobs.Stalled(stalled))
        if isinstance(action, jobs.Send)
    ]
    assert isinstance(told, protocol.Failed)
    assert told.error == "CommitUnknownError"
    assert machine.handle(jobs.CommitEnded(1, "step-00000001", an_info(save))) == []


def test_a_tensor_without_its_memory_is_refused(tmp_path: Path):
    freed = torch.zeros(100_000)
    freed.untyped_storage().resize_(0)
    with sidesave.Checkpointer(tmp_path) as ckpt:
        with pytest.raises(sidesave.errors.UnsupportedValueError, match="memory"):
            ckpt.save(1, {"freed": freed})
        ckpt.save(2, a_state(2)).committed.result(DEADLINE_S)


# Two directories ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["s3://bucket/x", "a\udc80"])
def test_a_fallback_directory_is_checked_before_anything_is_done(tmp_path: Path, name: str):
    with pytest.raises(InvalidArgumentError):
        sidesave.Checkpointer(
            tmp_path / "run",
            failures=sidesave.FailureOptions(
                fallback_directory=name if "://" in name else tmp_path / name
            ),
        )
    assert not (tmp_path / "run").exists()


def test_a_damaged_newest_checkpoint_in_the_fallback_is_not_passed_over_in_silence(
    run: Path, other: Path
):
    with_one, with_two = Session(run, OLD), Session(other, OLD)
    with_one.save(1, a_state(1), sequence=1)
    with_two.save(2, a_state(2), sequence=2)
    with_one.end()
    with_two.end()
    damage(other / "step-00000002")
    with sidesave.Checkpointer(
        run, failures=sidesave.FailureOptions(fallback_directory=other)
    ) as ckpt:
        for step in (None, 2):
            with pytest.raises(IntegrityError):
                ckpt.load(step)
        ckpt.load(2, fallback=True)


def test_a_step_in_both_directories_whose_newer_one_is_damaged_is_not_taken_from_the_other(
    run: Path, other: Path
):
    with_newer, with_older = Session(run, OLD), Session(other, OLD)
    with_newer.save(1, a_state(1), sequence=1)
    with_newer.save(2, a_state(1), sequence=3)
    with_older.save(2, a_state(2), sequence=2)
    with_newer.end()
    with_older.end()
    damage(run / "step-00000002")
    with (
        sidesave.Checkpointer(
            run, failures=sidesave.FailureOptions(fallback_directory=other)
        ) as ckpt,
        pytest.raises(IntegrityError),
    ):
        ckpt.load(2)


def test_a_leftover_in_the_fallback_never_becomes_the_newest_in_the_middle_of_a_run(
    run: Path, other: Path
):
    with Session(run, OLD) as dead:
        dead.save(1, a_state(1), sequence=1)
    with Session(other, OLD) as killed:
        killed.put(2, a_state(2), sequence=20)  # and killed before its commit there
    with sidesave.Checkpointer(
        run, failures=sidesave.FailureOptions(fallback_directory=other)
    ) as ckpt:
        for step in (10, 11):
            ckpt.save(step, a_state(step)).committed.result(DEADLINE_S)
        # the first need of the fallback directory, which is then recovered
        ckpt.delete(10).result(DEADLINE_S)
        assert ckpt.steps() == [1, 2, 11]
        assert ckpt.latest_step() == 11


def test_history_knows_a_save_that_ended_in_the_fallback(run: Path, other: Path):
    with_one, with_two = Session(run, OLD), Session(other, OLD)
    with_one.save(1, a_state(1), sequence=1)
    with_two.save(2, a_state(2), sequence=2)
    with_one.end()
    with_two.end()
    begun = SaveRecord(step=2, session=OLD, outcome="saving", save_id=2, sequence=2, called_s=1.0)
    HistoryLog(PosixStorage(str(run))).append(begun)
    with sidesave.Checkpointer(
        run, failures=sidesave.FailureOptions(fallback_directory=other)
    ) as ckpt:
        assert ckpt.history()[-1].outcome == "committed"


# Deletion -----------------------------------------------------------------------------------------


def test_a_deletion_does_not_claim_what_it_cannot_see(run: Path, other: Path):
    session, elsewhere = Session(run), Session(other)
    session.save(1, a_state(1), sequence=1)
    session.save(2, a_state(2), sequence=2)
    elsewhere.save(9, a_state(3), sequence=4)
    work, events = a_worker(session, other)
    (other / ".sidesave.lease").rename(other / "aside")
    (other / ".sidesave.lease").write_text("no directory")
    work.delete(a_deletion(9))
    assert error_of(events[-1]) not in (None, "CheckpointNotFoundError"), "it is there"


def test_a_repeated_deletion_spares_the_save_that_came_after_it(run: Path):
    session = Session(run)
    session.save(5, a_state(5), sequence=1)
    session.save(6, a_state(6), sequence=2)
    work, events = a_worker(session)
    request = a_deletion(5, sequence=2)
    work.delete(request)  # DELETED is lost with the daemon
    save = session.put(5, a_state(7), sequence=3)
    session.commit(save)
    session.save(7, a_state(8), sequence=4)
    work.delete(dataclasses.replace(request, retry=True))  # its successor is asked again
    assert error_of(events[-1]) is None
    assert read_info(str(run / "step-00000005")).sequence == 3


def test_a_deletion_comes_after_a_save_that_is_still_being_copied(tmp_path: Path):
    model = torch.nn.Linear(4000, 4000)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with sidesave.Checkpointer(tmp_path, staging=sidesave.StagingOptions(overlap=True)) as ckpt:
        ckpt.save(1, state).committed.result(DEADLINE_S)
        ckpt.save(2, state)
        ckpt.delete(1).result(DEADLINE_S)
    assert entries(tmp_path) == ["step-00000002"]


def test_what_is_asked_for_in_the_moment_of_the_end_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ckpt = sidesave.Checkpointer(tmp_path)
    ckpt.save(1, a_state(1)).committed.result(DEADLINE_S)
    monkeypatch.setattr(ckpt.session, "check_open", lambda: None)  # it had passed before close()
    ckpt.close()
    with pytest.raises(SidesaveError):
        ckpt.delete(1).result(DEADLINE_S)


def test_ancestors_of_a_session_whose_checkpoints_are_all_deleted_stay_protected():
    def info(
        step: int, session: str, sequence: int, parent: tuple[int, str] | None
    ) -> CheckpointInfo:
        return CheckpointInfo(step, "", 0, session, sequence, parent, 0.0)

    # step 3 of B is deleted
    found = [info(1, "A", 1, None), info(2, "A", 2, None), info(5, "C", 4, (3, "B"))]
    assert lineage(found, found[-1], Rollbacks()) == {1, 2, 5}


# Callbacks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["wait", "close", "save"])
def test_waiting_in_a_callback_is_refused_instead_of_waiting_for_itself(tmp_path: Path, what: str):
    over, raised = threading.Event(), list[BaseException]()
    with sidesave.Checkpointer(tmp_path) as ckpt:
        uses = {
            "wait": ckpt.wait,
            "close": ckpt.close,
            "save": lambda: ckpt.save(2, a_state(2), blocking=True),
        }

        def callback(_: object) -> None:
            try:
                uses[what]()
            except StagingError as error:
                raised.append(error)
            over.set()

        ckpt.save(1, a_state(1)).committed.add_done_callback(callback)
        assert over.wait(DEADLINE_S)
        assert "callback" in str(raised)
        ckpt.save(3, a_state(3)).committed.result(DEADLINE_S)
