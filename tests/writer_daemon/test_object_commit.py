"""From written to committed in object stores, whoever was there before."""

import contextvars
import dataclasses
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from object_sessions import KINDS, begin, content, edit, new_place, open_run
from sessions import (
    DAMAGES,
    FILES,
    NEW,
    OLD,
    Session,
    State,
    a_state,
    check,
    check_alone,
    entries,
    recovered,
    same,
)

from sidesave.client.loading import load as loader
from sidesave.client.runs.finding import catalog_of
from sidesave.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DirectoryInUseError,
    IntegrityError,
    InvalidArgumentError,
    WriteError,
)
from sidesave.writer_daemon.commit import commit
from sidesave.writer_daemon.commit.recovery import Recovery
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.lease.record import LeaseRecord
from sidesave.writer_daemon.storage.object_run import ObjectRun

_numbers = itertools.count()
_TENSORS = "model.rank-00000.safetensors"


def leave(root: str, step: int, state: State, *, sequence: int = 1, replace: bool = False) -> str:
    """What a session that died after its record has left; where it lies."""
    with begin(root, OLD) as dead:
        dead.put(step, state, sequence=sequence, replace=replace)
    return f"step-{step:08d}.{OLD}"


@pytest.fixture(params=KINDS)
def new_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a run in each kind of store."""
    with new_place(request.param, tmp_path) as url:
        yield url


@pytest.fixture
def root(new_store: str, end_all: None) -> str:
    """The URL of such a run; sessions and leases in it end before the store does."""
    return new_store


# Committing ---------------------------------------------------------------------------------------


def test_committed_step_is_complete_readable_and_alone(root: str):
    session = begin(root)
    found = session.save(100, a_state(1))
    check_alone(root, 100, a_state(1))
    assert sorted(session.storage.list_directory("step-00000100")) == FILES
    [info] = catalog_of(root).all()
    assert (info.step, info.session, info.sequence, info.nbytes) == (100, NEW, 1, found.nbytes)
    assert info.path == f"{root}/step-00000100"


def test_nothing_of_a_save_is_visible_before_its_commit(root: str):
    session = begin(root)
    session.put(100, a_state(1))
    assert catalog_of(root).all() == []
    assert entries(root) == [f".step-00000100.{NEW}.partial"]


def test_committing_twice_does_no_harm(root: str):
    session = begin(root)
    save = session.put(100, a_state(1))
    first = session.commit(save)
    before = open_run(root).bucket.list_all("")
    session.attempt += "-again"
    assert session.commit(save) == first
    assert open_run(root).bucket.list_all("") == before
    check(root, 100, a_state(1))


def test_commit_without_a_record_is_refused(root: str):
    session = begin(root)
    save = session.stage(100, a_state(1))
    with pytest.raises(IntegrityError, match="the rank's record is missing"):
        session.commit(save)
    assert catalog_of(root).all() == []


def test_existing_step_is_refused_and_stays(root: str):
    session = begin(root)
    session.save(100, a_state(1))
    save = session.put(100, a_state(2), sequence=2)
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        session.commit(save)
    commit.reclaim(session.storage, save)
    check_alone(root, 100, a_state(1))


def test_existing_step_is_replaced_on_request_and_is_never_missing(root: str):
    session = begin(root)
    session.save(100, a_state(1))
    save = session.put(100, a_state(2), sequence=2, replace=True)
    log = open_run(root).log
    seen: list[bool] = []
    for number in itertools.count(log.look().number + 1):
        if number == log.look().number + 1:
            session.commit(save)
        entry = log._read_entry(number)
        if entry is None:
            break
        seen.append(entry.changes.get("step-00000100", "") is not None)
    assert seen
    assert all(seen), "no entry takes the name away"
    check_alone(root, 100, a_state(2))


def test_save_that_comes_late_does_not_replace_a_later_one(root: str):
    session = begin(root)
    session.save(100, a_state(2), sequence=2)
    late = session.put(100, a_state(1), sequence=1, replace=True)
    with pytest.raises(CheckpointExistsError, match="a later save"):
        session.commit(late)
    check(root, 100, a_state(2))


def test_failed_save_of_a_step_is_out_of_the_way_of_the_next(root: str):
    session = begin(root)
    session.put(100, a_state(1))  # and its commit never came
    session.save(100, a_state(2), sequence=2)
    check_alone(root, 100, a_state(2))


def test_reclaim_removes_all_traces_and_may_be_repeated(root: str):
    session = begin(root)
    save = session.put(100, a_state(1))
    for _ in range(2):
        commit.reclaim(session.storage, save)
        assert entries(root) == []
    bucket = open_run(root).bucket
    assert [key for key in bucket.list_all("") if key.startswith("step-")] == []
    session.save(100, a_state(2), sequence=2)
    check(root, 100, a_state(2))


def test_deleted_step_is_readable_until_it_is_removed_and_its_name_is_free(root: str):
    session = begin(root)
    session.save(100, a_state(1))
    session.save(200, a_state(2), sequence=2)
    prefix = f"step-00000100.{NEW}"
    trash = session.delete(100, 1)
    assert trash is not None
    assert [info.step for info in catalog_of(root).all()] == [200]
    with pytest.raises(CheckpointNotFoundError):
        loader.load(f"{root}/step-00000100")
    assert same(loader.load(f"{root}/{prefix}"), a_state(1)), "who knows where it lies can go on"
    session.storage.remove_tree(trash)
    assert entries(root) == ["step-00000200"]
    session.save(100, a_state(3), sequence=3)
    check(root, 100, a_state(3))
    with pytest.raises(InvalidArgumentError, match="newest"):
        session.delete(100, 3)
    with pytest.raises(CheckpointNotFoundError):
        session.delete(300, 3)


# Leftovers ----------------------------------------------------------------------------------------


def test_complete_leftover_is_committed(root: str):
    leave(root, 100, a_state(1))
    assert recovered(root, open_run=open_run) == Recovery(committed=("step-00000100",), removed=())
    check_alone(root, 100, a_state(1))


@pytest.mark.drawn
@pytest.mark.parametrize("file", [_TENSORS, "optimizer.rank-00000.xxh3", "rank-00000.json"])
@pytest.mark.parametrize("damage", [None, *list(DAMAGES)[1:]])
def test_leftover_that_is_not_whole_is_removed(root: str, file: str, damage: str | None):
    prefix = leave(root, 100, a_state(1))
    edit(
        root,
        f"{prefix}/{file}",
        DAMAGES[damage](content(root, f"{prefix}/{file}")) if damage else None,
    )
    assert recovered(root, open_run=open_run) == Recovery(
        committed=(), removed=(f".{prefix}.partial",)
    )
    assert entries(root) == []
    assert open_run(root).bucket.list_all(prefix) == []


def test_damaged_manifest_in_a_leftover_is_made_anew_from_its_records(root: str):
    prefix = leave(root, 100, a_state(1))
    edit(root, f"{prefix}/manifest.json", b'{"xxh3_128":"')
    assert recovered(root, open_run=open_run).committed == ("step-00000100",)
    check(root, 100, a_state(1))


def test_replacement_that_was_complete_is_rolled_forward(root: str):
    with begin(root, OLD) as first:
        first.save(100, a_state(1))
        first.put(100, a_state(2), sequence=2, replace=True)
    assert recovered(root, open_run=open_run).committed == ("step-00000100",)
    check_alone(root, 100, a_state(2))


def test_leftovers_of_several_steps_are_each_judged_alone(root: str):
    dead = begin(root, OLD)
    for step in (100, 200, 300):
        dead.put(step, a_state(step), sequence=step)
    dead.end()
    edit(root, f"step-00000200.{OLD}/rank-00000.json", None)
    session = Session(root, open_run=open_run)
    damaged = f".step-00000200.{OLD}.partial"
    assert session.recover() == Recovery(("step-00000100", "step-00000300"), (damaged,))
    assert [info.step for info in catalog_of(root).all()] == [100, 300]
    check(root, 300, a_state(300))


def copy_by_hand(root: str) -> None:
    """A run that has been on a disk: its steps lie under their names, and there is no log yet."""
    elsewhere = f"memory://commits-{next(_numbers)}/run"
    other = begin(elsewhere, OLD)
    other.save(100, a_state(1))
    other.save(200, a_state(2), sequence=2)
    for key in other.storage.bucket.list_all(""):  # pyright: ignore[reportAttributeAccessIssue]
        prefix, _, name = key.partition("/")
        if prefix.startswith("step-") and not name.startswith("."):
            edit(root, f"{prefix.partition('.')[0]}/{name}", content(elsewhere, key))


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_removal_that_was_interrupted_is_ended_by_the_next_session(root: str, *, by_hand: bool):
    if by_hand:
        copy_by_hand(root)
    session = begin(root)
    if not by_hand:
        session.save(100, a_state(1))
        session.save(200, a_state(2), sequence=2)
    trash = session.delete(100, 2)
    assert trash is not None
    run = session.storage
    assert isinstance(run, ObjectRun)

    def remove(keys: Sequence[str]) -> None:
        raise WriteError(errno.EIO, "the process ends here", root)

    run.bucket.remove = remove
    with pytest.raises(WriteError, match="ends here"):
        run.remove_tree(trash)
    session.end()
    session = begin(root)  # a daemon of the same session
    assert [
        key for key in open_run(root).bucket.list_all("") if key.startswith("step-00000100")
    ] == []
    check(root, 200, a_state(2))


def test_steps_that_were_copied_by_hand_are_those_of_the_run(root: str):
    copy_by_hand(root)
    assert [info.step for info in catalog_of(root).all()] == [100, 200]
    session = begin(root)
    assert [info.step for info in catalog_of(root).all()] == [100, 200]
    session.save(300, a_state(3), sequence=3)
    session.save(200, a_state(4), sequence=4, replace=True)
    trash = session.delete(100, 4)
    assert trash is not None
    session.storage.remove_tree(trash)
    for step, seed in ((200, 4), (300, 3)):
        check(root, step, a_state(seed))
    session.end()
    session = begin(root, OLD)
    assert sorted(info.step for info in catalog_of(root).all()) == [200, 300]
    session.save(100, a_state(5), sequence=5)
    check(root, 100, a_state(5))


# Who has been away --------------------------------------------------------------------------------


@pytest.mark.drawn
@pytest.mark.parametrize("operation", ["commit", "reclaim", "remove", "delete", "save"])
def test_who_was_overtaken_commits_deletes_and_removes_nothing(root: str, operation: str):
    """Its lease says nothing here: it was read before the other one came."""
    first = begin(root, OLD)
    first.save(50, a_state(5), sequence=1)
    first.save(100, a_state(1), sequence=2)
    save = first.put(200, a_state(2), sequence=3)
    first.lease.release()
    first.lease.check = first.writer._check_lease = lambda *, ask=False: None
    second = begin(root)
    assert [info.step for info in catalog_of(root).all()] == [50, 100, 200], (
        "the other one has finished it"
    )
    operations: dict[str, Callable[[], object]] = {
        "commit": lambda: first.commit(save),
        "reclaim": lambda: first.storage.rename_directory(
            f".step-00000200.{OLD}.partial", ".aborted"
        ),
        "remove": lambda: first.storage.remove_tree(f".step-00000200.{OLD}.partial"),
        "delete": lambda: first.delete(50, 2),
        "save": lambda: first.save(300, a_state(3), sequence=4),
    }
    with pytest.raises(
        WriteError, match=r"passed to another session|has taken the lease"
    ) as caught:
        operations[operation]()
    assert caught.value.errno == errno.ESTALE
    commit.reclaim(first.storage, save)  # as the daemon does then
    first.storage.remove_tree(f".step-00000200.{OLD}.partial")
    for step, seed in ((50, 5), (100, 1), (200, 2)):
        check(root, step, a_state(seed))
    second.save(300, a_state(4), sequence=4)
    check(root, 300, a_state(4))
    assert [info.step for info in catalog_of(root).all()] == [50, 100, 200, 300]


@pytest.mark.drawn
@pytest.mark.parametrize("judged", ["dropped", "settled", "own"])
def test_uploads_that_come_late_never_become_a_checkpoint(root: str, judged: str):
    """A save is given up, and its files appear all the same, whole, with a record."""
    elsewhere = f"memory://commits-{next(_numbers)}/run"
    prefix = leave(elsewhere, 100, a_state(1))
    late = {key: content(elsewhere, key) for key in open_run(elsewhere).bucket.list_all(prefix)}
    dead = begin(root, OLD)
    save = dead.stage(100, a_state(1))
    if judged != "settled":
        dead.storage.make_directory(f".{prefix}.partial", 0o700)
    if judged == "own":
        commit.reclaim(dead.storage, save)
    else:
        dead.end()
        begin(root).end()
    for key, data in late.items():
        edit(root, key, data)
    if judged == "own":
        assert entries(root) == []
        dead.save(100, a_state(2), sequence=2)
        check(root, 100, a_state(2))
        dead.end()
    session = begin(root)
    assert entries(root) == (["step-00000100"] if judged == "own" else [])
    session.end()
    session = begin(root, "a" * 16)
    assert entries(root) == (["step-00000100"] if judged == "own" else [])


def test_what_comes_late_is_swept_with_the_leftovers_of_its_session(root: str):
    prefix = leave(root, 100, a_state(1))
    edit(root, f"{prefix}/rank-00000.json", None)
    dead = Session(root, open_run=open_run)
    dead.storage.take_over(NEW)
    dead.storage.rename_directory(f".{prefix}.partial", f".step-00000100.{OLD}.salvage-1")
    dead.storage.remove_tree(f".step-00000100.{OLD}.salvage-1")
    edit(root, f"{prefix}/late", b"1")
    dead.end()
    begin(root)
    assert open_run(root).bucket.list_all(prefix) == []


def test_what_comes_after_its_session_was_judged_is_swept_by_a_later_one(root: str):
    prefix = leave(root, 100, a_state(1))
    whole = {key: content(root, key) for key in open_run(root).bucket.list_all(prefix)}
    for key in whole:
        edit(root, key, None)
    begin(root).end()
    for number in range(2):  # it is remembered over several sessions
        begin(root, f"{number:016x}").end()
    for key, data in whole.items():
        edit(root, key, data)
    session = begin(root, "a" * 16)
    assert open_run(root).bucket.list_all(prefix) == []
    session.save(100, a_state(2))
    check(root, 100, a_state(2))


# Two jobs on one prefix ---------------------------------------------------------------------------


def test_a_run_that_a_live_session_has_is_refused(root: str):
    session = begin(root, OLD)
    with pytest.raises(DirectoryInUseError, match=OLD):
        Session(root, open_run=open_run)
    session.save(100, a_state(1))
    check(root, 100, a_state(1))


def test_of_many_that_start_at_once_one_has_the_run(root: str):
    """Each has a host of its own, so that only the lease's counter could tell."""
    barrier, had, errors = threading.Barrier(6), list[Lease](), list[BaseException]()
    context = contextvars.copy_context()

    def start(number: int) -> None:
        run = open_run(root)
        holder = dataclasses.replace(
            LeaseRecord.current(f"{number:016x}", os.getpid()), host=f"host-{number}"
        )
        barrier.wait()
        try:
            had.append(Lease(run, holder, 0.0, lambda: False))
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    starting = [
        threading.Thread(target=context.copy().run, args=(start, number)) for number in range(6)
    ]
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join()
    assert len(had) == 1
    assert all(isinstance(error, DirectoryInUseError) for error in errors)
    had[0].check()
