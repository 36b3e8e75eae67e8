"""The catalog of a place: what it lists, what it reads again, and what it never believes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sessions import OLD, Session, a_state

from sidesave.errors import IntegrityError, WriteError
from sidesave.writer_daemon.checkpoints.catalog import Catalog, refuse_unknown_newest
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo, in_commit_order
from sidesave.writer_daemon.format.manifest import MANIFEST
from sidesave.writer_daemon.format.rollback import ROLLBACK_FILE, Rollbacks
from sidesave.writer_daemon.storage import PosixStorage, urls
from sidesave.writer_daemon.storage.object_run import ObjectRun

pytestmark = pytest.mark.usefixtures("end_all")


@pytest.fixture(params=["directory", "file"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    if request.param == "directory":
        session = Session(tmp_path, OLD)
    else:
        session = Session(f"file://{tmp_path}/run", OLD, open_run=lambda root: ObjectRun(root, {}))  # type: ignore[arg-type]
        session.recover()
    yield session
    session.close()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The manifests that are read."""
    paths: list[str] = []
    for kind in (PosixStorage, ObjectRun.__mro__[1]):
        original = kind.read

        def read(
            self: object, path: str, max_nbytes: int, original: object = original
        ) -> bytes | None:
            if path.endswith(MANIFEST):
                paths.append(path.partition("/")[0])
            return original(self, path, max_nbytes)  # type: ignore[operator]

        monkeypatch.setattr(kind, "read", read)
    return paths


def steps(catalog: Catalog) -> list[int]:
    return [info.step for info in catalog.all()]


def test_only_what_is_new_is_read_again(session: Session, reads: list[str]):
    catalog = Catalog(str(session.root))
    for sequence in (1, 2):
        session.save(sequence, a_state(1), sequence=sequence)
    assert steps(catalog) == [1, 2]
    reads.clear()
    assert steps(catalog) == [1, 2]
    assert reads == []
    session.save(3, a_state(1), sequence=3)
    reads.clear()
    assert steps(catalog) == [1, 2, 3]
    assert reads == ["step-00000003"]


def test_a_caller_may_change_the_list_it_was_given(session: Session):
    session.save(1, a_state(1))
    catalog = Catalog(str(session.root))
    for _ in range(3):
        checkpoints = catalog.all()
        assert [info.step for info in checkpoints] == [1]
        checkpoints.clear()


def test_a_step_that_was_saved_again_is_read_again(session: Session):
    catalog = Catalog(str(session.root))
    session.save(1, a_state(1), sequence=1)
    session.save(2, a_state(1), sequence=2)
    assert steps(catalog) == [1, 2]
    session.save(1, a_state(1), sequence=3, replace=True)
    assert [(info.step, info.sequence) for info in catalog.all()] == [(2, 2), (1, 3)]


def test_a_manifest_that_could_not_be_read_is_read_again_though_its_directory_is_the_same(
    tmp_path: Path,
):
    session = Session(tmp_path, OLD)
    session.save(1, a_state(1))
    catalog, manifest = Catalog(str(tmp_path)), tmp_path / "step-00000001" / MANIFEST
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-1])
    assert steps(catalog) == []
    view = catalog.look()
    assert [each.step for each in view.left_out] == [1]
    with pytest.raises(IntegrityError, match="fallback=True"):
        refuse_unknown_newest(view.checkpoints, view.left_out)
    manifest.write_bytes(whole)
    assert steps(catalog) == [1]
    session.close()


def test_what_was_removed_or_copied_by_hand_is_noticed(tmp_path: Path):
    session = Session(tmp_path, OLD)
    session.save(1, a_state(1), sequence=1)
    session.save(2, a_state(1), sequence=2)
    catalog = Catalog(str(tmp_path))
    assert steps(catalog) == [1, 2]
    (tmp_path / "step-00000002").rename(tmp_path / "elsewhere")
    assert steps(catalog) == [1]
    (tmp_path / "elsewhere").rename(tmp_path / "step-00000002")
    (tmp_path / "step-00000001" / MANIFEST).unlink()
    assert steps(catalog) == [2]
    session.close()


def test_going_back_is_noticed_though_nothing_is_read_again(session: Session):
    catalog = Catalog(str(session.root))
    for sequence in (1, 2):
        session.save(sequence, a_state(1), sequence=sequence)
    assert steps(catalog) == [1, 2]
    ROLLBACK_FILE.write(session.storage, Rollbacks().going_back(1, 2))
    assert [(info.step, info.given_up) for info in catalog.all()] == [(2, True), (1, False)]
    assert steps(Catalog(str(session.root))) == [2, 1]


def test_what_storage_does_not_give_is_an_error_for_who_needs_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    session = Session(tmp_path, OLD)
    session.save(1, a_state(1))

    def fail(storage: PosixStorage, path: str, max_nbytes: int) -> bytes | None:
        raise WriteError(5, "cannot read", path)

    monkeypatch.setattr(PosixStorage, "read", fail)
    with urls.using(None):
        assert Catalog(str(tmp_path)).all(rollbacks=Rollbacks()) == []
        with pytest.raises(WriteError, match="cannot read"):
            Catalog(str(tmp_path)).all(rollbacks=Rollbacks(), complete=True)
    session.close()


def test_equal_sequences_are_ordered_by_time_and_then_by_session():
    def info(step: int, session: str, created_s: float) -> CheckpointInfo:
        return CheckpointInfo(step, "", 0, session, 7, None, created_s)

    infos = [info(1, "b", 2.0), info(2, "a", 2.0), info(3, "c", 1.0)]
    for rotation in range(3):
        assert [each.step for each in in_commit_order(infos[rotation:] + infos[:rotation])] == [
            3,
            2,
            1,
        ]
