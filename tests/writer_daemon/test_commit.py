"""From written to committed on real directories, whatever a dead daemon has left there."""

import dataclasses
import errno
import itertools
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import campaigns
import pytest
from sessions import NEW, OLD, Death, Session, a_state, check, entries, leave, same, vouched

from sidesave.client.loading import load as loader
from sidesave.client.runs import catalog
from sidesave.errors import CheckpointExistsError, FormatVersionError, IntegrityError, ProtocolError, WriteError
from sidesave.writer_daemon.commit import commit
from sidesave.writer_daemon.commit.commit import Recovery
from sidesave.writer_daemon.commit.manifest_builder import assemble
from sidesave.writer_daemon.format import manifest
from sidesave.writer_daemon.format.manifest import RankRecord

pytestmark = pytest.mark.usefixtures("end_all")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def session(root: Path) -> Iterator[Session]:
    session = Session(root)
    yield session
    session.end()


# Committing ------------------------------------------------------------------------------------------------------


def test_committed_step_is_complete_readable_and_alone(session: Session, root: Path):
    content = session.save(100, a_state(1))
    check(root, 100, a_state(1))
    assert entries(root) == ["step-00000100"]
    assert entries(root / "step-00000100") == [
        "manifest.json",
        "model.rank-00000.safetensors",
        "model.rank-00000.xxh3",
        "objects.rank-00000.msgpack",
        "optimizer.rank-00000.safetensors",
        "optimizer.rank-00000.xxh3",
        "rank-00000.json",
    ]
    assert (content.step, content.session, content.parent) == (100, NEW, (1, OLD))
    [info] = catalog.scan(str(root))
    assert (info.step, info.session, info.sequence, info.nbytes) == (100, NEW, 1, content.nbytes)


def test_nothing_of_a_save_is_visible_before_its_commit(session: Session, root: Path):
    save = session.stage(100, a_state(1))
    session.write(save)
    assert catalog.scan(str(root)) == []
    assert entries(root) == [f".step-00000100.{NEW}.partial"]
    assert stat.S_IMODE((root / entries(root)[0]).stat().st_mode) == 0o700


def test_committing_twice_does_no_harm(session: Session, root: Path):
    save = session.stage(100, a_state(1))
    session.write(save)
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
    assert catalog.scan(str(root)) == []


def test_commit_of_another_saves_record_is_refused(session: Session, root: Path):
    save = session.stage(100, a_state(1), sequence=5)
    session.write(save)
    with pytest.raises(IntegrityError, match="another save"):
        session.commit(dataclasses.replace(save, sequence=6))
    assert catalog.scan(str(root)) == []


def test_existing_step_is_refused_and_stays(session: Session, root: Path):
    session.save(100, a_state(1))
    save = session.stage(100, a_state(2), sequence=2)
    session.write(save)
    with pytest.raises(CheckpointExistsError, match="overwrite=True") as caught:
        session.commit(save)
    assert caught.value.filename == f"{root}/step-00000100"
    commit.reclaim(session.storage, save)
    assert entries(root) == ["step-00000100"]
    check(root, 100, a_state(1))


def test_existing_step_is_replaced_on_request(session: Session, root: Path):
    session.save(100, a_state(1))
    session.save(100, a_state(2), sequence=2, replace=True)
    assert entries(root) == ["step-00000100"]
    check(root, 100, a_state(2))


def test_save_that_comes_late_does_not_replace_a_later_one(session: Session, root: Path):
    late = session.stage(100, a_state(1), sequence=1, replace=True)
    session.write(late)
    (root / f".step-00000100.{NEW}.partial").rename(root / "aside")
    session.save(100, a_state(2), sequence=2, replace=True)
    (root / "aside").rename(root / f".step-00000100.{NEW}.partial")
    with pytest.raises(CheckpointExistsError, match="a later save"):
        session.commit(late)
    check(root, 100, a_state(2))


def test_directory_of_that_name_that_is_no_checkpoint_is_not_taken_for_one(session: Session, root: Path):
    (root / "step-00000100").mkdir()
    (root / "step-00000100/notes.txt").write_text("mine")
    save = session.stage(100, a_state(1))
    session.write(save)
    with pytest.raises(CheckpointExistsError):
        session.commit(save)
    assert (root / "step-00000100/notes.txt").read_text() == "mine"


def test_lost_lease_commits_nothing(session: Session, root: Path):
    save = session.stage(100, a_state(1))
    session.write(save)
    (root / f".sidesave.lease/{session.lease.epoch}").unlink()
    with pytest.raises(WriteError, match="lease") as caught:
        session.commit(save)
    assert caught.value.errno == errno.ESTALE
    assert catalog.scan(str(root)) == []


def test_memory_that_was_handed_to_a_later_save_is_not_published(session: Session, root: Path):
    save = session.stage(100, a_state(1))
    session.stage(200, a_state(2), sequence=2)
    with pytest.raises(ProtocolError, match="generation"):
        session.write(save)
    commit.reclaim(session.storage, save)
    assert entries(root) == []


def test_failed_save_of_a_step_is_out_of_the_way_of_the_next(session: Session, root: Path):
    session.write(session.stage(100, a_state(1)))  # and its commit never came
    session.save(100, a_state(2), sequence=2)
    assert entries(root) == ["step-00000100"]
    check(root, 100, a_state(2))


def test_files_of_the_state_that_are_no_tensor_file_are_refused(session: Session, root: Path):
    save = session.stage(100, a_state(1))
    shifted = dataclasses.replace(save.files[0], offset=save.files[0].offset + 4096)
    with pytest.raises(ProtocolError, match="no tensor file"):
        session.write(dataclasses.replace(save, files=(shifted,)))
    beyond = dataclasses.replace(save.files[0], offset=1 << 40)
    with pytest.raises(ProtocolError, match="no tensor file"):
        session.write(dataclasses.replace(save, files=(beyond,)))


# Leftovers -------------------------------------------------------------------------------------------------------


def test_complete_leftover_is_committed(root: Path):
    leave(root, 100, a_state(1))
    session = Session(root)
    assert session.recover() == Recovery(committed=("step-00000100",), removed=())
    session.end()
    assert entries(root) == ["step-00000100"]
    check(root, 100, a_state(1))


def test_leftover_whose_daemon_died_after_the_manifest_is_committed(root: Path):
    partial = leave(root, 100, a_state(1))
    dead = Session(root, OLD)
    record = RankRecord.from_bytes((partial / "rank-00000.json").read_bytes(), "rank-00000.json")
    content = assemble([record], partial.name)
    commit._publish_manifest(dead.storage, partial.name, content, dead.attempt)
    dead.end()
    session = Session(root)
    assert session.recover().committed == ("step-00000100",)
    session.end()
    assert entries(root) == ["step-00000100"]
    check(root, 100, a_state(1))


def test_temporary_files_of_a_killed_attempt_do_not_get_into_the_checkpoint(root: Path):
    partial = leave(root, 100, a_state(1))
    (partial / ".model.rank-00000.safetensors.7-77").write_bytes(b"half")
    (partial / ".manifest.json.7-77").write_bytes(b"")
    session = Session(root)
    assert session.recover().committed == ("step-00000100",)
    session.end()
    check(root, 100, a_state(1))  # which reports files that the manifest does not list


@pytest.mark.parametrize("file", ["model.rank-00000.safetensors", "optimizer.rank-00000.xxh3", "rank-00000.json"])
def test_leftover_without_one_of_its_files_is_removed(root: Path, file: str):
    partial = leave(root, 100, a_state(1))
    (partial / file).unlink()
    session = Session(root)
    assert session.recover() == Recovery(committed=(), removed=(partial.name,))
    session.end()
    assert entries(root) == []


@pytest.mark.drawn
@pytest.mark.parametrize("damage", ["flip the first bit", "flip the last bit", "cut", "empty", "lengthen"])
@pytest.mark.parametrize(
    "file",
    [
        "model.rank-00000.safetensors",
        "model.rank-00000.xxh3",
        "objects.rank-00000.msgpack",
        "optimizer.rank-00000.safetensors",
        "rank-00000.json",
    ],
)
def test_damaged_leftover_is_removed(root: Path, file: str, damage: str):
    partial = leave(root, 100, a_state(1))
    data = bytearray((partial / file).read_bytes())
    match damage:
        case "flip the first bit":
            data[0] ^= 1
        case "flip the last bit":
            data[-1] ^= 0x80
        case "cut":
            del data[-1]
        case "empty":
            data.clear()
        case _:
            data += b"\0"
    (partial / file).write_bytes(data)
    session = Session(root)
    assert session.recover() == Recovery(committed=(), removed=(partial.name,))
    session.end()
    assert entries(root) == []


def test_damaged_manifest_in_a_leftover_is_made_anew_from_its_records(root: Path):
    partial = leave(root, 100, a_state(1))
    (partial / "manifest.json").write_bytes(b'{"xxh3_128":"')
    session = Session(root)
    assert session.recover().committed == ("step-00000100",)
    session.end()
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
def test_leftover_with_a_record_that_lies_is_removed_and_stops_nobody(root: Path, field: dict[str, Any]):
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
    odd = root / manifest.hidden_directory(100, OLD, state)
    if what == "file":
        odd.write_text("x")
    elif what == "link":
        odd.symlink_to(outside)
    else:
        (odd / "folder/manifest.json").mkdir(parents=True)
        (odd / "rank-00000.json").mkdir()
        (odd / "link").symlink_to(outside)
    session = Session(root)
    assert session.recover() == Recovery(committed=(), removed=(odd.name,))
    session.end()
    assert entries(root) == ["step-00000100"]
    assert (outside / "rank-00000.json").read_text() == "{}"


def test_what_is_not_ours_is_left_alone(root: Path):
    strangers = [".step-100.partial", ".step-00000100.xyz.partial", f".step-00000100.{OLD}.kept", "notes", "step-5"]
    for name in strangers:
        (root / name).mkdir()
    session = Session(root)
    assert session.recover() == Recovery(committed=(), removed=())
    session.end()
    assert entries(root) == sorted(strangers)


def test_aborted_leftover_is_removed(root: Path):
    partial = leave(root, 100, a_state(1))
    partial.rename(root / manifest.hidden_directory(100, OLD, "aborted"))
    session = Session(root)
    session.recover()
    session.end()
    assert entries(root) == []


def test_replacement_that_was_complete_is_rolled_forward(root: Path):
    first = Session(root, OLD)
    first.save(100, a_state(1))
    first.end()
    leave(root, 100, a_state(2), sequence=2, replace=True)
    (root / "step-00000100").rename(root / manifest.hidden_directory(100, OLD, "replaced"))
    [info] = catalog.scan(str(root))
    assert info.path.endswith(".replaced"), "readers find the old one while the step has no name"
    session = Session(root)
    assert session.recover().committed == ("step-00000100",)
    session.end()
    assert entries(root) == ["step-00000100"]
    check(root, 100, a_state(2))


def test_replacement_that_was_damaged_is_rolled_back(root: Path):
    first = Session(root, OLD)
    first.save(100, a_state(1))
    first.end()
    partial = leave(root, 100, a_state(2), sequence=2, replace=True)
    (partial / "model.rank-00000.xxh3").unlink()
    (root / "step-00000100").rename(root / manifest.hidden_directory(100, OLD, "replaced"))
    session = Session(root)
    assert session.recover() == Recovery(committed=("step-00000100",), removed=(partial.name,))
    session.end()
    assert entries(root) == ["step-00000100"]
    check(root, 100, a_state(1))


def test_replaced_step_is_removed_once_the_new_one_is_there(root: Path):
    first = Session(root, OLD)
    first.save(100, a_state(1))
    shutil.copytree(root / "step-00000100", root / manifest.hidden_directory(100, OLD, "replaced"))
    first.end()
    session = Session(root)
    assert session.recover().removed == (f".step-00000100.{OLD}.replaced",)
    session.end()
    check(root, 100, a_state(1))


def test_a_deleted_step_does_not_come_back_as_what_it_had_replaced(session: Session, root: Path):
    session.save(100, a_state(1))
    session.save(200, a_state(2), sequence=2)
    shutil.copytree(root / "step-00000100", root / manifest.hidden_directory(100, OLD, "replaced"))
    assert commit.delete(session.storage, session.lease, 100, 2) is not None
    assert [info.step for info in catalog.scan(str(root))] == [200]
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
    session = Session(root)
    assert session.recover() == Recovery(("step-00000100", "step-00000300"), (damaged.name,))
    session.end()
    assert [info.step for info in catalog.scan(str(root))] == [100, 300]
    check(root, 300, a_state(3))


def test_finished_leftover_is_open_to_the_readers_that_the_umask_allows(root: Path):
    before = os.umask(0o027)
    try:
        leave(root, 100, a_state(1))
        session = Session(root)
        session.recover()
        session.end()
    finally:
        os.umask(before)
    assert stat.S_IMODE((root / "step-00000100").stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in (root / "step-00000100").iterdir()} == {0o640}


def test_reclaim_removes_all_traces_and_may_be_repeated(session: Session, root: Path):
    save = session.stage(100, a_state(1))
    session.write(save)
    for _ in range(2):
        commit.reclaim(session.storage, save)
        assert entries(root) == []
    (root / manifest.hidden_directory(100, NEW, "aborted")).mkdir()
    session.write(session.stage(100, a_state(1)))
    commit.reclaim(session.storage, save)
    assert entries(root) == []


# Death at any instruction ----------------------------------------------------------------------------------------


def dies(session: Session, last: int, daemon: Callable[[], object]) -> bool:
    """Run ``daemon`` so that it dies before its ``last``-th operation on storage; whether it survived."""
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
    """Call ``daemon`` with 0, 1, 2 and so on as its last operation until it survives; which operation that was."""
    return next(last for last in points or itertools.count() if daemon(last))


@pytest.mark.parametrize("replacing", [False, True], ids=["a new step", "an overwritten step"])
def test_daemon_dead_before_any_operation_successor_commits_the_save(tmp_path: Path, replacing: bool):
    old, new = a_state(1), a_state(2)

    def save_once(last: int) -> bool:
        root = tmp_path / f"{last}"
        root.mkdir()
        session = Session(root)
        if replacing:
            session.save(100, old)
        save = session.stage(100, new, sequence=2, replace=replacing)
        survived = dies(session, last, lambda: (session.write(save), session.commit(save)))
        seen = catalog.scan(str(root))
        assert len(seen) == (1 if replacing else seen != []), "the old one or the new one, at every moment"
        for info in seen:
            assert same(loader.load(info.path), old if info.sequence == 1 else new)

        session.respawn()
        session.recover()
        session.resume(save)
        assert entries(root) == ["step-00000100"]
        check(root, 100, new)
        session.end()
        shutil.rmtree(root)
        return survived

    assert deaths(save_once, campaigns.sample(itertools.count())) > 25


@pytest.mark.parametrize("replacing", [False, True], ids=["a new step", "an overwritten step"])
def test_both_dead_before_any_operation_next_start_finds_one_whole_checkpoint(tmp_path: Path, replacing: bool):
    """No memory is left: what was promised durable is committed, and of the rest nothing remains."""
    old, new = a_state(1), a_state(2)
    written: list[int] = []

    def save_once(last: int) -> bool:
        root = tmp_path / f"{last}"
        root.mkdir()
        dead = Session(root, OLD)
        if replacing:
            dead.save(100, old)
        save = dead.stage(100, new, sequence=2, replace=replacing)

        def daemon() -> None:
            dead.write(save)
            written.append(last)
            dead.commit(save)

        survived = dies(dead, last, daemon)
        session = Session(root)
        session.recover()
        session.end()
        if last in written:
            check(root, 100, new)
        elif replacing:
            check(root, 100, new if catalog.scan(str(root))[0].sequence == 2 else old)
        assert entries(root) in ([["step-00000100"]] if replacing or last in written else [[], ["step-00000100"]])
        shutil.rmtree(root)
        return survived

    assert deaths(save_once, campaigns.sample(itertools.count())) > 25
    assert len(written) > (1 if campaigns.quick else 5)


@pytest.mark.slow
def test_daemon_dead_in_the_middle_of_a_recovery_next_one_finishes_it(tmp_path: Path):
    old, new = a_state(1), a_state(2)

    def save_once(last: int) -> bool:
        root = tmp_path / f"{last}"
        root.mkdir()
        session = Session(root)
        session.save(100, old)
        save = session.stage(100, new, sequence=2, replace=True)
        survived = dies(session, last, lambda: (session.write(save), session.commit(save)))
        shutil.copytree(root, tmp_path / "before", symlinks=True)

        def recover_once(last_of_recovery: int) -> bool:
            shutil.rmtree(root)
            shutil.copytree(tmp_path / "before", root, symlinks=True)
            session.respawn()
            recovered = dies(session, last_of_recovery, session.recover)
            assert len(catalog.scan(str(root))) == 1
            session.respawn()
            session.recover()
            session.resume(save)
            check(root, 100, new)
            assert entries(root) == ["step-00000100"]
            session.end()
            return recovered

        deaths(recover_once)
        shutil.rmtree(tmp_path / "before")
        shutil.rmtree(root)
        return survived

    deaths(save_once, campaigns.numbers())
