"""Deletion in batches: what goes, what stays and why, and when the bytes go."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sessions import NEW, Session, a_state

from sidesave.errors import CheckpointNotFoundError, InvalidArgumentError, WriteError
from sidesave.writer_daemon.checkpoints import deletion
from sidesave.writer_daemon.checkpoints.catalog import Catalog
from sidesave.writer_daemon.checkpoints.deletion import Trash, delete_steps
from sidesave.writer_daemon.format.manifest import MANIFEST

pytestmark = pytest.mark.usefixtures("end_all")


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    session = Session(tmp_path, NEW)
    for step in range(1, 6):
        session.save(step, a_state(step), sequence=step)
    yield session
    session.close()


def steps(session: Session) -> list[int]:
    return [info.step for info in Catalog(str(session.root)).all()]


def test_what_may_go_goes_and_each_step_that_stays_has_its_reason(session: Session):
    result = delete_steps(session.storage, session.lease, [1, 5, 9, 2], 5)
    assert len(result.trash) == 2
    assert steps(session) == [3, 4, 5]
    assert {step: type(error) for step, error in result.failures.items()} == {
        5: InvalidArgumentError,
        9: CheckpointNotFoundError,
    }


def test_a_step_that_was_saved_again_after_the_deletion_was_asked_for_stays(session: Session):
    result = delete_steps(session.storage, session.lease, [1, 4], 3)
    assert (len(result.trash), result.failures) == (1, {})
    assert steps(session) == [2, 3, 4, 5]


def test_the_whole_of_a_run_never_goes(session: Session):
    result = delete_steps(session.storage, session.lease, [1, 2, 3, 4, 5], 5)
    assert steps(session) == [5]
    assert [*result.failures] == [5]


def test_a_damaged_step_may_go_and_a_batch_is_synced_once(
    session: Session, monkeypatch: pytest.MonkeyPatch
):
    manifest = Path(session.root) / "step-00000003" / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-1])
    syncs: list[str] = []
    sync = session.storage.sync_directory
    monkeypatch.setattr(
        session.storage, "sync_directory", lambda name: (syncs.append(name), sync(name))
    )
    assert delete_steps(session.storage, session.lease, [1, 2, 3], 5).failures == {}
    assert steps(session) == [4, 5]
    assert syncs == [""]


def test_the_last_checkpoint_that_can_be_read_stays_though_later_ones_are_listed(session: Session):
    catalog = Catalog(session.storage.root, storage=session.storage)
    assert delete_steps(session.storage, session.lease, [1], 5, catalog=catalog).failures == {}
    for step in (4, 5):
        manifest = Path(session.root) / f"step-{step:08d}" / MANIFEST
        manifest.write_bytes(manifest.read_bytes()[:-2] + b"xx")  # the directory does not change
    failures = delete_steps(session.storage, session.lease, [2, 3], 5, catalog=catalog).failures
    assert {step: type(error) for step, error in failures.items()} == {3: InvalidArgumentError}
    assert steps(session) == [3]


def test_a_step_that_is_committed_again_between_the_renames_of_a_batch_stays(
    session: Session, monkeypatch: pytest.MonkeyPatch
):
    rename = session.storage.rename_directory

    def rename_and_save(name: str, target: str) -> None:
        rename(name, target)
        monkeypatch.undo()
        session.save(3, a_state(9), sequence=6, replace=True)

    monkeypatch.setattr(session.storage, "rename_directory", rename_and_save)
    assert delete_steps(session.storage, session.lease, [1, 2, 3, 4], 5).failures == {}
    assert steps(session) == [5, 3]


def test_a_removal_that_fails_is_tried_again(session: Session, monkeypatch: pytest.MonkeyPatch):
    trash = Trash(session.storage)
    trash.add(delete_steps(session.storage, session.lease, [1], 5).trash)

    def refuse(name: str) -> None:
        raise WriteError(5, "refused", name)

    with monkeypatch.context() as patched:
        patched.setattr(session.storage, "remove_tree", refuse)
        assert not trash.empty(everything=True)
    assert trash.error is not None and len(trash) == 1
    assert trash.empty(everything=True) and not len(trash)


def test_a_lease_that_is_lost_in_the_middle_of_a_batch_spares_the_rest(
    session: Session, monkeypatch: pytest.MonkeyPatch
):
    rename = session.storage.rename_directory

    def rename_and_lose(source: str, target: str) -> None:
        rename(source, target)
        monkeypatch.setattr(session.lease, "check", fail)

    def fail(*, ask: bool = False) -> None:
        raise WriteError(116, "another session has taken the lease", str(session.root))

    monkeypatch.setattr(session.storage, "rename_directory", rename_and_lose)
    result = delete_steps(session.storage, session.lease, [1, 2, 3], 5)
    assert [*result.failures] == [2, 3]
    assert steps(session) == [2, 3, 4, 5]


def test_the_bytes_go_in_slices(session: Session, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deletion, "GRACE_S", 0.0)
    trash = Trash(session.storage)
    trash.add(delete_steps(session.storage, session.lease, [1, 2, 3], 5).trash)
    for left in (2, 1, 0):
        assert trash.empty(within_s=0.0)
        assert len(trash) == left
    assert not trash.empty(everything=True)


def test_the_bytes_stay_for_the_grace_unless_all_has_to_go_and_are_not_adopted_twice(
    session: Session,
):
    trash = Trash(session.storage)
    trash.add(delete_steps(session.storage, session.lease, [1, 2], 5).trash)
    trash.adopt()
    assert len(trash) == 2
    assert not trash.empty()
    assert len(trash) == 2
    assert trash.empty(everything=True)
    assert len(trash) == 0
