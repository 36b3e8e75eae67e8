"""From written to committed on real directories, whatever a dead daemon has left there."""

import dataclasses
import errno
import itertools
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import campaigns
import pytest
from campaigns import Share
from sessions import (
    AFTER,
    BEFORE,
    DAMAGES,
    FILES,
    NEW,
    OLD,
    Death,
    Session,
    a_state,
    check,
    check_alone,
    entries,
    leave,
    recovered,
    replacing,
    same,
    staged,
    vouched,
)

from sidesave.client.loading import load as loader
from sidesave.client.runs.finding import catalog_of
from sidesave.errors import (
    CheckpointExistsError,
    FormatVersionError,
    IntegrityError,
    ProtocolError,
    WriteError,
)
from sidesave.writer_daemon.commit import commit
from sidesave.writer_daemon.commit.manifest_builder import assemble
from sidesave.writer_daemon.commit.recovery import Recovery, plan_recovery
from sidesave.writer_daemon.format.manifest import RankRecord
from sidesave.writer_daemon.format.names import hidden_directory

pytestmark = pytest.mark.usefixtures("end_all")


# Committing ---------------------------------------------------------------------------------------


def test_committed_step_is_complete_readable_and_alone(session: Session, root: Path):
    content = session.save(100, a_state(1))
    check_alone(root, 100, a_state(1))
    assert entries(root / "step-00000100") == FILES
    assert (content.step, content.session, content.parent) == (100, NEW, (1, OLD))
    [info] = catalog_of(str(root)).all()
    assert (info.step, info.session, info.sequence, info.nbytes) == (100, NEW, 1, content.nbytes)


def test_nothing_of_a_save_is_visible_before_its_commit(session: Session, root: Path):
    session.put(100, a_state(1))
    assert catalog_of(str(root)).all() == []
    assert entries(root) == [f".step-00000100.{NEW}.partial"]
    assert stat.S_IMODE((root / entries(root)[0]).stat().st_mode) == 0o700


def test_committing_twice_does_no_harm(session: Session, root: Path):
    save = session.put(100, a_state(1))
    first = session.commit(save)
    before = {path.name: path.stat().st_ino for path in (root / "step-00000100").iterdir()}
    session.attempt += "-again"
    assert session.commit(save) == first
    assert {path.name: path.stat().st_ino for path in (root / "step-00000100").iterdir()} == before
    check(root, 100, a_state(1))


def test_commit_without_a_record_is_refused(session: Session, root: Path):
    save = session.stage(100, a_state(1))
    with pytest.raises(IntegrityError, match="the rank's record is missing"):
        session.commit(save)
    session.write(save)
    (root / f".step-00000100.{NEW}.partial/rank-00000.json").unlink()
    with pytest.raises(IntegrityError, match="the rank's record is missing"):
        session.commit(save)
    assert catalog_of(str(root)).all() == []


def test_commit_of_another_saves_record_is_refused(session: Session, root: Path):
    save = session.put(100, a_state(1), sequence=5)
    with pytest.raises(IntegrityError, match="another save"):
        session.commit(dataclasses.replace(save, sequence=6))
    assert catalog_of(str(root)).all() == []


def test_existing_step_is_refused_and_stays(session: Session, root: Path):
    session.save(100, a_state(1))
    save = session.put(100, a_state(2), sequence=2)
    with pytest.raises(CheckpointExistsError, match="overwrite=True") as caught:
        session.commit(save)
    assert caught.value.filename == f"{root}/step-00000100"
    commit.reclaim(session.storage, save)
    check_alone(root, 100, a_state(1))


def test_existing_step_is_replaced_on_request(session: Session, root: Path):
    session.save(100, a_state(1))
    session.save(100, a_state(2), sequence=2, replace=True)
    check_alone(root, 100, a_state(2))


def test_save_that_comes_late_does_not_replace_a_later_one(session: Session, root: Path):
    late = session.put(100, a_state(1), sequence=1, replace=True)
    (root / f".step-00000100.{NEW}.partial").rename(root / "aside")
    session.save(100, a_state(2), sequence=2, replace=True)
    (root / "aside").rename(root / f".step-00000100.{NEW}.partial")
    with pytest.raises(CheckpointExistsError, match="a later save"):
        session.commit(late)
    check(root, 100, a_state(2))


def test_directory_of_that_name_that_is_no_checkpoint_is_not_taken_for_one(
    session: Session, root: Path
):
    (root / "step-00000100").mkdir()
    (root / "step-00000100/notes.txt").write_text("mine")
    save = session.put(100, a_state(1))
    with pytest.raises(CheckpointExistsError):
        session.commit(save)
    assert (root / "step-00000100/notes.txt").read_text() == "mine"


def test_lost_lease_commits_nothing(session: Session, root: Path):
    save = session.put(100, a_state(1))
    (root / f".sidesave.lease/{session.lease.epoch}").unlink()
    with pytest.raises(WriteError, match="lease") as caught:
        session.commit(save)
    assert caught.value.errno == errno.ESTALE
    assert catalog_of(str(root)).all() == []


def test_memory_that_was_handed_to_a_later_save_is_not_published(session: Session, root: Path):
    save = session.stage(100, a_state(1))
    session.stage(200, a_state(2), sequence=2)
    with pytest.raises(ProtocolError, match="generation"):
        session.write(save)
    commit.reclaim(session.storage, save)
    assert entries(root) == []


def test_failed_save_of_a_step_is_out_of_the_way_of_the_next(session: Session, root: Path):
    session.put(100, a_state(1))  # and its commit never came
    session.save(100, a_state(2), sequence=2)
    check_alone(root, 100, a_state(2))


def test_files_of_the_state_that_are_no_tensor_file_are_refused(session: Session, root: Path):
    save = session.stage(100, a_state(1))
    shifted = dataclasses.replace(save.files[0], offset=save.files[0].offset + 4096)
    with pytest.raises(ProtocolError, match="no tensor file"):
        session.write(dataclasses.replace(save, files=(shifted,)))
    beyond = dataclasses.replace(save.files[0], offset=1 << 40)
    with pytest.raises(ProtocolError, match="no tensor file"):
        session.write(dataclasses.replace(save, files=(beyond,)))


# Leftovers ----------------------------------------------------------------------------------------


def test_complete_leftover_is_committed(root: Path):
    leave(root, 100, a_state(1))
    assert recovered(root) == Recovery(committed=("step-00000100",), removed=())
    check_alone(root, 100, a_state(1))


def test_leftover_whose_daemon_died_after_the_manifest_is_committed(root: Path):
    partial = leave(root, 100, a_state(1))
    dead = Session(root, OLD)
    record = RankRecord.from_bytes((partial / "rank-00000.json").read_bytes(), "rank-00000.json")
    content = assemble([record], partial.name)
    commit.publish_manifest(dead.storage, partial.name, content, dead.attempt)
    dead.end()
    assert recovered(root).committed == ("step-00000100",)
    check_alone(root, 100, a_state(1))


def test_temporary_files_of_a_killed_attempt_do_not_get_into_the_checkpoint(root: Path):
    partial = leave(root, 100, a_state(1))
    (partial / ".model.rank-00000.safetensors.7-77").write_bytes(b"half")
    (partial / ".manifest.json.7-77").write_bytes(b"")
    assert recovered(root).committed == ("step-00000100",)
    check(root, 100, a_state(1))  # which reports files that the manifest does not list


@pytest.mark.parametrize(
    "file", ["model.rank-00000.safetensors", "optimizer.rank-00000.xxh3", "rank-00000.json"]
)
def test_leftover_without_one_of_its_files_is_removed(root: Path, file: str):
    partial = leave(root, 100, a_state(1))
    (partial / file).unlink()
    assert recovered(root) == Recovery(committed=(), removed=(partial.name,))
    assert entries(root) == []


def test_leftover_of_ranks_that_disagree_is_removed_and_keeps_nobody_from_starting(root: Path):
    partial = leave(root, 100, a_state(1))
    path = partial / "rank-00000.json"
    record = RankRecord.from_bytes(path.read_bytes(), path.name)
    forged = dataclasses.replace(
        record, part=dataclasses.replace(record.part, cells=record.part.cells ^ 1)
    )
    path.write_bytes(forged.to_bytes())
    assert recovered(root) == Recovery(committed=(), removed=(partial.name,))
    assert entries(root) == []


@pytest.mark.drawn
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "file",
    [name for name in FILES if name not in ("manifest.json", "optimizer.rank-00000.xxh3")],
)
def test_damaged_leftover_is_removed(root: Path, file: str, damage: str):
    partial = leave(root, 100, a_state(1))
    (partial / file).write_bytes(DAMAGES[damage]((partial / file).read_bytes()))
    assert recovered(root) == Recovery(committed=(), removed=(partial.name,))
    assert entries(root) == []


def test_damaged_manifest_in_a_leftover_is_made_anew_from_its_records(root: Path):
    partial = leave(root, 100, a_state(1))
    (partial / "manifest.json").write_bytes(b'{"xxh3_128":"')
    assert recovered(root).committed == ("step-00000100",)
    check(root, 100, a_state(1))


@pytest.mark.drawn
@pytest.mark.parametrize(
    "field",
    [
        {"rank": 1},
        {"world_size": 2},
        {"world_size": 10**9},
        {"step": 101},
        {"session": NEW},
        {"torch_version": "\udcff"},
        {"created_s": 1e999},
        {"objects": {"name": "../../outside", "nbytes": 4, "xxh3_128": "0" * 32}},
        {"objects": {"name": "objects.rank-00000.msgpack", "nbytes": 10**30, "xxh3_128": "0" * 32}},
        {"sequence": 10**30},
        {"parent": []},
    ],
    ids=str,
)
def test_leftover_with_a_record_that_lies_is_removed_and_stops_nobody(
    root: Path, field: dict[str, Any]
):
    partial = leave(root, 100, a_state(1))
    body = json.loads((partial / "rank-00000.json").read_text())
    del body["xxh3_128"]
    (partial / "rank-00000.json").write_bytes(vouched(json.dumps(body | field).encode()))
    session = Session(root)
    assert session.recover() == Recovery(committed=(), removed=(partial.name,))
    session.save(100, a_state(2))
    session.end()
    check(root, 100, a_state(2))


def test_leftover_of_a_newer_format_is_left_alone(root: Path):
    partial = leave(root, 100, a_state(1))
    body = json.loads((partial / "rank-00000.json").read_text())
    del body["xxh3_128"]
    (partial / "rank-00000.json").write_bytes(vouched(json.dumps(body | {"version": 2}).encode()))
    session = Session(root)
    with pytest.raises(FormatVersionError, match="upgrade"):
        session.recover()
    session.end()
    assert entries(root) == [partial.name.replace("partial", f"salvage-{session.lease.epoch}")]


@pytest.mark.parametrize("state", ["partial", "aborted", "trash", "replaced"])
@pytest.mark.parametrize("what", ["file", "link", "folder"])
def test_odd_thing_with_the_name_of_a_leftover_is_removed(root: Path, what: str, state: str):
    (root / "step-00000100").mkdir()
    outside = root.with_name("outside")
    outside.mkdir()
    (outside / "rank-00000.json").write_text("{}")
    odd = root / hidden_directory(100, OLD, state)
    if what == "file":
        odd.write_text("x")
    elif what == "link":
        odd.symlink_to(outside)
    else:
        (odd / "folder/manifest.json").mkdir(parents=True)
        (odd / "rank-00000.json").mkdir()
        (odd / "link").symlink_to(outside)
    assert recovered(root) == Recovery(committed=(), removed=(odd.name,))
    assert entries(root) == ["step-00000100"]
    assert (outside / "rank-00000.json").read_text() == "{}"


def test_what_is_not_ours_is_left_alone(root: Path):
    strangers = [
        ".step-100.partial",
        ".step-00000100.xyz.partial",
        f".step-00000100.{OLD}.kept",
        "notes",
        "step-5",
    ]
    for name in strangers:
        (root / name).mkdir()
    assert recovered(root) == Recovery(committed=(), removed=())
    assert entries(root) == sorted(strangers)


def test_aborted_leftover_is_removed(root: Path):
    partial = leave(root, 100, a_state(1))
    partial.rename(root / hidden_directory(100, OLD, "aborted"))
    recovered(root)
    assert entries(root) == []


def test_replacement_that_was_complete_is_rolled_forward(root: Path):
    with Session(root, OLD) as first:
        first.save(100, a_state(1))
    leave(root, 100, a_state(2), sequence=2, replace=True)
    (root / "step-00000100").rename(root / hidden_directory(100, OLD, "replaced"))
    [info] = catalog_of(str(root)).all()
    assert info.path.endswith(".replaced"), "readers find the old one while the step has no name"
    assert recovered(root).committed == ("step-00000100",)
    check_alone(root, 100, a_state(2))


def test_replacement_that_was_damaged_is_rolled_back(root: Path):
    with Session(root, OLD) as first:
        first.save(100, a_state(1))
    partial = leave(root, 100, a_state(2), sequence=2, replace=True)
    (partial / "model.rank-00000.xxh3").unlink()
    (root / "step-00000100").rename(root / hidden_directory(100, OLD, "replaced"))
    assert recovered(root) == Recovery(committed=("step-00000100",), removed=(partial.name,))
    check_alone(root, 100, a_state(1))


def test_replaced_step_is_removed_once_the_new_one_is_there(root: Path):
    first = Session(root, OLD)
    first.save(100, a_state(1))
    shutil.copytree(root / "step-00000100", root / hidden_directory(100, OLD, "replaced"))
    first.end()
    assert recovered(root).removed == (f".step-00000100.{OLD}.replaced",)
    check(root, 100, a_state(1))


def test_a_deleted_step_does_not_come_back_as_what_it_had_replaced(session: Session, root: Path):
    session.save(100, a_state(1))
    session.save(200, a_state(2), sequence=2)
    shutil.copytree(root / "step-00000100", root / hidden_directory(100, OLD, "replaced"))
    assert session.delete(100, 2) is not None
    assert [info.step for info in catalog_of(str(root)).all()] == [200]
    assert session.recover().committed == ()
    assert entries(root) == ["step-00000200"]


def test_leftover_that_was_superseded_does_not_replace_its_successor(root: Path):
    leave(root, 100, a_state(1), sequence=1)
    kept = root / f".step-00000100.{OLD}.partial"
    kept.rename(root / "aside")
    session = Session(root)
    session.save(100, a_state(2), sequence=2)
    (root / "aside").rename(kept)
    assert session.recover() == Recovery(committed=(), removed=(kept.name,))
    session.end()
    check(root, 100, a_state(2))


def test_leftovers_of_several_steps_are_each_judged_alone(root: Path):
    leave(root, 100, a_state(1), sequence=1)
    damaged = leave(root, 200, a_state(2), sequence=2)
    (damaged / "rank-00000.json").unlink()
    leave(root, 300, a_state(3), sequence=3)
    assert recovered(root) == Recovery(("step-00000100", "step-00000300"), (damaged.name,))
    assert [info.step for info in catalog_of(str(root)).all()] == [100, 300]
    check(root, 300, a_state(3))


def test_a_plan_foresees_the_recovery_and_changes_nothing(root: Path):
    """Two saves of one step, the later one stays; a damaged save; a step to restore; a deleted
    one.
    """
    for name, sequence in ((OLD, 1), (NEW, 2)):
        with Session(root, name) as dead:
            dead.put(100, a_state(sequence), sequence=sequence)
    damaged = leave(root, 200, a_state(2), sequence=3)
    (damaged / "model.rank-00000.xxh3").unlink()
    for step, state in ((300, "replaced"), (400, "trash")):
        (root / hidden_directory(step, OLD, state)).mkdir()
    before = entries(root)
    session = Session(root, "c" * 16)
    plan = plan_recovery(session.storage, session.name, session.storage.list_directory(""))
    assert entries(root) == before
    recovery = session.recover()
    assert plan.expected() == recovery
    assert recovery.removed[0] == damaged.name
    assert entries(root) == ["step-00000100", "step-00000300"]
    session.end()
    check(root, 100, a_state(2))


def test_a_commit_that_fails_loses_no_save_and_brings_back_what_it_was_to_replace(
    root: Path, monkeypatch: pytest.MonkeyPatch
):
    with Session(root, OLD) as first:
        first.save(100, a_state(1))
    for name, sequence in ((OLD, 3), (NEW, 2)):
        with Session(root, name) as dead:
            dead.put(100, a_state(sequence), sequence=sequence, replace=True)
    (root / "step-00000100").rename(root / hidden_directory(100, OLD, "replaced"))
    session = Session(root, "c" * 16)

    def refuse(*arguments: object) -> None:
        raise WriteError(errno.ENOSPC, "full", "here")

    with monkeypatch.context() as patch:
        patch.setattr(session.storage, "publish_bytes", refuse)
        refused = session.recover()
    assert refused.committed == ("step-00000100",)
    assert refused.removed == ()
    assert len(refused.left) == 2
    check(root, 100, a_state(1))
    session.end()
    following = Session(root, "d" * 16)
    assert following.recover().left == ()
    following.end()
    check_alone(root, 100, a_state(3))


def test_finished_leftover_is_open_to_the_readers_that_the_umask_allows(root: Path):
    before = os.umask(0o027)
    try:
        leave(root, 100, a_state(1))
        recovered(root)
    finally:
        os.umask(before)
    assert stat.S_IMODE((root / "step-00000100").stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in (root / "step-00000100").iterdir()} == {
        0o640
    }


def test_reclaim_removes_all_traces_and_may_be_repeated(session: Session, root: Path):
    save = session.put(100, a_state(1))
    for _ in range(2):
        commit.reclaim(session.storage, save)
        assert entries(root) == []
    (root / hidden_directory(100, NEW, "aborted")).mkdir()
    session.put(100, a_state(1))
    commit.reclaim(session.storage, save)
    assert entries(root) == []


# Death at any instruction -------------------------------------------------------------------------


def dies(session: Session, last: int, daemon: Callable[[], object]) -> bool:
    """Run ``daemon`` so that it dies before its ``last``-th operation on storage; whether it
    survived.
    """
    session.mortal(last)
    try:
        daemon()
    except Death:
        return False
    else:
        return True
    finally:
        session.end()


def deaths(daemon: Callable[[int], bool], points: Iterable[int] | None = None) -> int:
    """Call ``daemon`` with 0, 1, 2 and so on as its last operation until it survives; which
    operation that was.
    """
    return next(last for last in points or itertools.count() if daemon(last))


@replacing
def test_daemon_dead_before_any_operation_successor_commits_the_save(
    tmp_path: Path, replacing: bool
):
    def save_once(last: int) -> bool:
        session, save = staged(root := tmp_path / f"{last}", Session, replacing=replacing)
        survived = dies(session, last, lambda: (session.write(save), session.commit(save)))
        seen = catalog_of(str(root)).all()
        assert len(seen) == (1 if replacing else seen != []), (
            "the old one or the new one, at every moment"
        )
        for info in seen:
            assert same(loader.load(info.path), BEFORE if info.sequence == 1 else AFTER)

        session.respawn()
        session.recover()
        session.resume(save)
        check_alone(root, 100, AFTER)
        session.end()
        shutil.rmtree(root)
        return survived

    assert deaths(save_once, campaigns.sample(itertools.count())) > 25


@replacing
def test_both_dead_before_any_operation_next_start_finds_one_whole_checkpoint(
    tmp_path: Path, replacing: bool
):
    """No memory is left: what was promised durable is committed, and of the rest nothing
    remains.
    """
    written: list[int] = []

    def save_once(last: int) -> bool:
        dead, save = staged(
            root := tmp_path / f"{last}", lambda root: Session(root, OLD), replacing=replacing
        )

        def daemon() -> None:
            dead.write(save)
            written.append(last)
            dead.commit(save)

        survived = dies(dead, last, daemon)
        recovered(root)
        if last in written:
            check(root, 100, AFTER)
        elif replacing:
            check(root, 100, AFTER if catalog_of(str(root)).all()[0].sequence == 2 else BEFORE)
        assert entries(root) in (
            [["step-00000100"]] if replacing or last in written else [[], ["step-00000100"]]
        )
        shutil.rmtree(root)
        return survived

    assert deaths(save_once, campaigns.sample(itertools.count())) > 25
    assert len(written) > (1 if campaigns.quick else 5)


@pytest.mark.slow
def test_daemon_dead_in_the_middle_of_a_recovery_next_one_finishes_it(tmp_path: Path, share: Share):
    def save_once(last: int) -> bool:
        session, save = staged(root := tmp_path / f"{last}", Session, replacing=True)
        survived = dies(session, last, lambda: (session.write(save), session.commit(save)))
        shutil.copytree(root, tmp_path / "before", symlinks=True)

        def recover_once(last_of_recovery: int) -> bool:
            shutil.rmtree(root)
            shutil.copytree(tmp_path / "before", root, symlinks=True)
            session.respawn()
            recovered = dies(session, last_of_recovery, session.recover)
            assert len(catalog_of(str(root)).all()) == 1
            session.respawn()
            session.recover()
            session.resume(save)
            check_alone(root, 100, AFTER)
            session.end()
            return recovered

        deaths(recover_once)
        shutil.rmtree(tmp_path / "before")
        shutil.rmtree(root)
        return survived

    for last in share.numbers():
        if save_once(last):
            share.is_past(last)
