"""Readers beside a run: what they hold or load is not deleted under them, and they see each new
checkpoint.

As a script this module is such a reader: ``python test_watching.py NAME ARGUMENTS`` runs the
function of that name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import campaigns
import pytest
from manager_trainer import ManagedTrainer
from object_server import serving
from trainers import (
    DEADLINE_S,
    Orders,
    Traces,
    Trainer,
    a_state,
    entries,
    same,
    say,
    wait_to_go_on,
    wait_until,
)

import sidesave
from sidesave.client.runs.finding import catalog_of
from sidesave.client.runs.pins import PINS
from sidesave.client.runs.watch import _Look
from sidesave.errors import (
    CheckpointNotFoundError,
    IntegrityError,
    InvalidArgumentError,
    NoSpaceError,
    WriteError,
)
from sidesave.writer_daemon.storage import PosixStorage

NOBODY = 65534


class Reader(Trainer):
    """A process that runs a function of this module."""

    script = __file__


@pytest.fixture(autouse=True)
def locks(tmp_path: Path) -> None:
    with contextlib.closing(PosixStorage(str(tmp_path))) as storage:
        if storage.is_shared("nothing") is None:
            pytest.skip("the temporary directory is on a network file system")


def commit(ckpt: sidesave.Checkpointer, *steps: int, mib: float = 1) -> None:
    for step in steps:
        ckpt.save(step, a_state(step, mib)).committed.result(DEADLINE_S)


def directory(run: Path, step: int) -> Path:
    return run / f"step-{step:08d}"


def trash(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob(".*.trash"))


def wait_for_steps(run: Path, *steps: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while [info.step for info in catalog_of(str(run)).all()] != list(steps):
        assert time.monotonic() < deadline, f"{entries(run)}, and not {steps}"
        time.sleep(0.005)


def manage_one(traces: Traces, run: Path, **options: Any) -> ManagedTrainer:
    """A paced trainer that saves each step and keeps the newest."""
    return ManagedTrainer(traces, run, save="[EverySteps(1)]", keep="[KeepLatest(1)]", **options)


def train(trainer: ManagedTrainer, *steps: int) -> None:
    """Let it save these steps, one after the other."""
    for step in steps:
        trainer.go_on()
        trainer.hear(f"saved {step}")


# Readers, in processes of their own ---------------------------------------------------------------


def hold(path: str, user: str = "0") -> None:
    """Holds a checkpoint until told to let it go, and loads it before."""
    import sidesave

    if int(user):
        with sidesave.hold(path):
            sidesave.load(path)  # modules are imported while they may be read
        os.setgroups([])
        os.setgid(int(user))
        os.setuid(int(user))
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: /proc/self would be root's now
    with sidesave.hold(path) as info:
        say("held", info.step)
        wait_to_go_on()
        state = sidesave.load(info)
        say("loaded", *sorted(state))
    say("released")
    wait_to_go_on()


def load_slowly(path: str, step: str) -> None:
    """Loads a checkpoint and stops when it has opened it, before it has read a tensor."""
    import sidesave

    waited = False

    def gate(name: str) -> str:
        nonlocal waited
        if not waited:
            waited = True
            say("reading")
            wait_to_go_on()
        return name

    say("loaded", same(sidesave.load(path, rename=gate), a_state(int(step), 8)))


def verify_slowly(path: str) -> None:
    import sidesave

    waited = False

    def gate(nbytes: int) -> None:
        nonlocal waited
        if not waited:
            waited = True
            say("reading")
            wait_to_go_on()

    say("verified", sidesave.verify(path, on_bytes=gate).ok)


def evaluate(run: str, last: str) -> None:
    """Loads all that it comes to of a run whose checkpoints go as new ones come."""
    import sidesave

    say("ready")
    seen = -1
    for info in sidesave.watch(run, timeout_s=DEADLINE_S, poll_s=0.001):
        assert info.step > seen
        try:
            with sidesave.hold(info.path) as held:
                assert held.step == info.step
                state = sidesave.load(held)
                assert Path(held.path).is_dir()
                assert sidesave.verify(held).ok
        except CheckpointNotFoundError as error:
            say("missed", info.step, error)
        else:
            assert state["model"], info
            say("evaluated", info.step)
        seen = info.step
        if seen == int(last):
            break


# What is read stays -------------------------------------------------------------------------------


def test_a_held_checkpoint_stays_until_it_is_released_and_goes_with_the_commit_after(
    traces: Traces, run: Path
):
    with manage_one(traces, run) as trainer:
        train(trainer, 0)
        with Reader(traces, "hold", directory(run, 0)) as reader:
            assert reader.expect("held") == ["0"]
            train(trainer, 1, 2)
            wait_for_steps(run, 0, 2)  # retention has come to both
            train(trainer, 3)
            wait_for_steps(run, 0, 3)
            reader.go_on()
            assert reader.expect("loaded")
            reader.expect("released")
            assert directory(run, 0).is_dir()
            train(trainer, 4)
            wait_for_steps(run, 4)


def test_a_reader_that_is_killed_holds_nothing(traces: Traces, run: Path):
    with manage_one(traces, run) as trainer:
        train(trainer, 0)
        with Reader(traces, "hold", directory(run, 0)) as reader:
            reader.expect("held")
            train(trainer, 1, 2)
            wait_for_steps(run, 0, 2)
            reader.kill()
        train(trainer, 3)
        wait_for_steps(run, 3)


def test_many_readers_hold_one_checkpoint(traces: Traces, run: Path):
    with manage_one(traces, run) as trainer:
        train(trainer, 0)
        with (
            Reader(traces, "hold", directory(run, 0)) as one,
            Reader(traces, "hold", directory(run, 0)) as other,
        ):
            one.expect("held")
            other.expect("held")
            one.go_on()
            one.expect("released")
            train(trainer, 1, 2)
            wait_for_steps(run, 0, 2)
            other.go_on()
            other.expect("released")
        train(trainer, 3)
        wait_for_steps(run, 3)


def test_retention_spares_what_any_process_loads(traces: Traces, run: Path):
    with sidesave.CheckpointManager(
        run, a_state(0, 8), save=[sidesave.EverySteps(1)], keep=[sidesave.KeepLatest(1)]
    ) as manager:
        manager.save(0, blocking=True)
        with Reader(traces, "load_slowly", directory(run, 0), 0) as reader:
            reader.expect("reading")
            for step in (1, 2):
                manager.save(step, blocking=True)
            wait_for_steps(run, 0, 2)
            reader.go_on()
            assert reader.expect("loaded") == ["True"]
        manager.save(3, blocking=True)
        wait_for_steps(run, 3)


@pytest.mark.parametrize("what", ["load_slowly", "verify_slowly"])
def test_a_checkpoint_is_read_to_its_end_though_it_is_deleted_and_the_trainer_leaves(
    traces: Traces, run: Path, what: str
):
    with contextlib.ExitStack() as stack:
        with sidesave.Checkpointer(run) as ckpt:
            commit(ckpt, 1, 2, mib=8)
            arguments = [directory(run, 1), 1] if what == "load_slowly" else [directory(run, 1)]
            reader = stack.enter_context(Reader(traces, what, *arguments))
            reader.expect("reading")
            ckpt.delete(1).result(DEADLINE_S)
            assert ckpt.steps() == [2]
        assert len(trash(run)) == 1
        # nor does the recovery of the next session take it away
        with sidesave.Checkpointer(run) as ckpt:
            assert len(trash(run)) == 1
            assert ckpt.removed == ()
        reader.go_on()
        assert reader.expect("loaded" if what == "load_slowly" else "verified") == ["True"]
        assert reader.end() == 0, reader.complaints()
    with sidesave.Checkpointer(run):
        assert entries(run) == ["step-00000002"]


def test_what_was_still_read_when_a_session_began_goes_before_it_ends(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1, 2, 3)
        with sidesave.hold(directory(run, 1)):
            ckpt.delete(1).result(DEADLINE_S)
            ckpt.close()
            with sidesave.Checkpointer(run) as ckpt:
                assert len(trash(run)) == 1
                ckpt.delete(2).result(DEADLINE_S)
            wait_until(lambda: len(trash(run)) == 1)
            assert "00000001" in trash(run)[0]
        with sidesave.Checkpointer(run) as ckpt:
            commit(ckpt, 4)
            with sidesave.hold(directory(run, 3)):
                ckpt.delete(3).result(DEADLINE_S)
    wait_until(lambda: entries(run) == ["step-00000004"])


def test_what_a_step_was_is_read_while_its_number_is_deleted_and_replaced_again(
    traces: Traces, run: Path
):
    with contextlib.ExitStack() as stack:
        readers: list[Reader] = []
        with sidesave.Checkpointer(run) as ckpt:
            for _ in range(2):
                commit(ckpt, 1, mib=8)
                readers.append(
                    stack.enter_context(Reader(traces, "load_slowly", directory(run, 1), 1))
                )
                readers[-1].expect("reading")
                commit(ckpt, 2)
                ckpt.delete(1).result(DEADLINE_S)
                commit(ckpt, 1)
                ckpt.save(1, a_state(1), overwrite=True).committed.result(DEADLINE_S)
                commit(ckpt, 3 + len(readers))
                ckpt.delete(1).result(DEADLINE_S)
                ckpt.delete(2).result(DEADLINE_S)
        wait_until(lambda: len(trash(run)) == 2)
        for reader in readers:
            reader.go_on()
            assert reader.expect("loaded") == ["True"]
    with sidesave.Checkpointer(run):
        assert entries(run) == ["step-00000004", "step-00000005"]


@pytest.mark.root
def test_a_full_disk_takes_back_nothing_that_is_read_and_the_save_fails(
    run: Path, mount: Callable[..., Path]
):
    place = mount("-t", "tmpfs", "-o", "size=20m", "none") / "run"
    with sidesave.Checkpointer(place, failures=sidesave.FailureOptions(tolerated=5)) as ckpt:
        commit(ckpt, 1, 2, mib=8)
        with sidesave.hold(directory(place, 1)):
            ckpt.delete(1).result(DEADLINE_S)
            assert isinstance(
                ckpt.save(3, a_state(3, 8)).committed.exception(DEADLINE_S), NoSpaceError
            )
            assert len(trash(place)) == 1
        commit(ckpt, 3, mib=8)
        assert trash(place) == []


@contextlib.contextmanager
def deleting_the_first_of_two(
    run: Path, orders: Orders, order: str
) -> Iterator[sidesave.CheckpointManager]:
    """A manager that deletes step 0, whose daemon is about to rename it as it obeys an order."""
    keep = [sidesave.KeepLatest(1)]
    with sidesave.CheckpointManager(
        run, a_state(1), save=[sidesave.EverySteps(1)], keep=keep
    ) as manager:
        manager.save(0, blocking=True)
        manager.pin(0)
        manager.save(1, blocking=True)
        retention = manager._background.retention
        assert retention is not None
        with retention.reading(None):
            pass  # it has looked at both while the first one was pinned
        manager.unpin(0)
        orders.give(order, starting_at="os.rename")
        retention._events.put(True)
        orders.obeyed()
        yield manager


def test_what_is_being_deleted_cannot_be_held_any_more_and_still_be_loaded(
    orders: Orders, run: Path
):
    with deleting_the_first_of_two(run, orders, "hold"):
        with (
            pytest.raises(CheckpointNotFoundError, match="is being deleted"),
            sidesave.hold(directory(run, 0)),
        ):
            pass
        assert same(sidesave.load(directory(run, 0)), a_state(1))
        orders.release()
        wait_for_steps(run, 1)
        with (
            pytest.raises(CheckpointNotFoundError, match="nothing at this path"),
            sidesave.hold(directory(run, 0)),
        ):
            pass
    assert entries(run) == [PINS.name, "step-00000001"]


def test_what_is_being_deleted_is_not_pinned(orders: Orders, run: Path):
    with deleting_the_first_of_two(run, orders, "hold") as manager, ThreadPoolExecutor() as threads:
        pinning = threads.submit(manager.pin, 0)
        wait_until(lambda: manager.pinned == {0})
        orders.release()
        assert isinstance(pinning.exception(DEADLINE_S), CheckpointNotFoundError)
        assert manager.pinned == set()


def test_what_could_not_be_deleted_can_be_held_again(
    orders: Orders, run: Path, caplog: pytest.LogCaptureFixture
):
    with deleting_the_first_of_two(run, orders, "EIO") as manager:
        manager.pin(0)  # waits for the deletion
        assert manager.pinned == {0}
        assert "cannot" in caplog.text
        with sidesave.hold(directory(run, 0)) as info:
            assert info.step == 0


def test_a_forked_child_neither_ends_nor_prolongs_a_hold(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)
    with contextlib.closing(PosixStorage(str(run))) as storage:
        is_held = lambda: storage.is_shared("step-00000001/manifest.json")  # noqa: E731
        ours, theirs = os.pipe()
        held = sidesave.hold(directory(run, 1))
        held.__enter__()
        child = os.fork()
        if child == 0:
            held.__exit__(None, None, None)
            os._exit(0)
        os.waitpid(child, 0)
        assert is_held()
        child = os.fork()
        if child == 0:
            os.close(theirs)
            os.read(ours, 1)  # until the test has ended
            os._exit(0)
        try:
            held.__exit__(None, None, None)
            assert not is_held()
        finally:
            os.close(theirs)
            os.waitpid(child, 0)
            os.close(ours)


# Who may hold -------------------------------------------------------------------------------------


@pytest.mark.root
def test_who_may_only_read_holds_as_well(traces: Traces):
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(_public_directory()) / "run"
        stack.callback(traces.await_ends)
        trainer = stack.enter_context(manage_one(traces, run))
        train(trainer, 0)
        reader = stack.enter_context(Reader(traces, "hold", directory(run, 0), NOBODY))
        assert reader.expect("held") == ["0"]
        train(trainer, 1, 2)
        wait_for_steps(run, 0, 2)
        reader.go_on()
        assert reader.expect("loaded")
        reader.expect("released")
        train(trainer, 3)
        wait_for_steps(run, 3)


@contextlib.contextmanager
def _public_directory() -> Iterator[Path]:
    path = Path(f"/tmp/sidesave-test-{os.getpid()}")  # pytest's are nobody else's
    path.mkdir(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.mark.root
def test_a_read_only_mount_is_read_and_held(run: Path, mount: Callable[..., Path]):
    with sidesave.CheckpointManager(
        run, a_state(1), save=[sidesave.EverySteps(1)], keep=[sidesave.KeepLatest(1)]
    ) as manager:
        manager.save(0, blocking=True)
        point = mount("-o", "bind,ro", run)
        assert os.statvfs(point).f_flag & os.ST_RDONLY
        assert sidesave.verify(directory(point, 0)).ok
        with sidesave.hold(directory(point, 0)) as info:
            for step in (1, 2):
                manager.save(step, blocking=True)
            wait_for_steps(run, 0, 2)
            assert same(sidesave.load(info), a_state(1))
        manager.save(3, blocking=True)
        wait_for_steps(point, 3)


def test_where_there_are_no_locks_everything_is_read_and_holding_is_logged(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)
    monkeypatch.setattr("fcntl.flock", refuse)
    assert same(sidesave.load(directory(run, 1)), a_state(1))
    assert sidesave.verify(directory(run, 1)).ok
    with sidesave.hold(directory(run, 1)) as info:
        assert info.step == 1
    assert "is not held" in caplog.text


def test_only_a_checkpoint_can_be_held(run: Path, tmp_path: Path):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)
    before = len(list(Path("/proc/self/fd").iterdir()))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    shutil.copytree(directory(run, 1), tmp_path / "damaged")
    (tmp_path / "damaged/manifest.json").write_text("{}")
    shutil.copytree(directory(run, 1), tmp_path / "odd")
    (tmp_path / "odd/manifest.json").unlink()
    os.mkfifo(tmp_path / "odd/manifest.json")
    refused: list[tuple[str | Path, type[Exception]]] = [
        (tmp_path / "nothing", CheckpointNotFoundError),
        (tmp_path / "no/thing", CheckpointNotFoundError),
        (tmp_path / "empty", CheckpointNotFoundError),
        (tmp_path / "file", CheckpointNotFoundError),
        ("/", CheckpointNotFoundError),
        (run, InvalidArgumentError),
        ("s3://bucket/run/step-00000001", InvalidArgumentError),
        (tmp_path / "damaged", IntegrityError),
        (tmp_path / "odd", IntegrityError),
    ]
    for path, error in refused:
        with pytest.raises(error), sidesave.hold(path):
            pass
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_step_that_was_saved_again_is_held_as_it_is_now(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)
        [old] = sidesave.find(run)
        ckpt.save(1, a_state(7), overwrite=True).committed.result(DEADLINE_S)
        with sidesave.hold(old) as info:
            assert info.sequence > old.sequence
            assert same(sidesave.load(info), a_state(7))


# Watching -----------------------------------------------------------------------------------------


def test_the_newest_that_was_not_given_is_given_each_time(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1, 2, mib=0.1)
        watching = sidesave.watch(run, timeout_s=0)
        newest = next(watching)
        assert newest == sidesave.latest(run)
        assert newest.step == 2
        commit(ckpt, 3, 4, 5, mib=0.1)
        assert next(watching).step == 5
        ckpt.load(2)
        commit(ckpt, 3, mib=0.1)  # the branch of 5 is given up
        assert next(watching).step == 3
        assert next(watching, None) is None
        assert next(watching, None) is None, "an iterator that has ended stays so"


def test_watching_goes_on_where_an_earlier_process_has_ended(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1, mib=0.1)
        [info] = sidesave.watch(run, timeout_s=0)
        assert list(sidesave.watch(run, after=info, timeout_s=0)) == []
        commit(ckpt, 2, mib=0.1)
        assert [each.step for each in sidesave.watch(run, after=info, timeout_s=0)] == [2]


def test_a_run_is_waited_for_and_each_of_its_commits(run: Path):
    watching = sidesave.watch(run, timeout_s=DEADLINE_S, poll_s=0.001)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, watching)
        with sidesave.Checkpointer(run) as ckpt:
            commit(ckpt, 1, mib=0.1)
            assert waiting.result(DEADLINE_S).step == 1
            waiting = pool.submit(next, watching)
            commit(ckpt, 2, mib=0.1)
            first = waiting.result(DEADLINE_S)
            assert first.step == 2
            waiting = pool.submit(next, watching)
            ckpt.save(2, a_state(9, 0.1), overwrite=True)
            again = waiting.result(DEADLINE_S)
            assert again.step == 2
            assert again.sequence > first.sequence


def test_nothing_is_given_before_its_commit(orders: Orders, run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1)
        watching = sidesave.watch(run, poll_s=0.001, timeout_s=DEADLINE_S)
        assert next(watching).step == 1
        orders.give("hold", starting_at="os.rename")
        ckpt.save(2, a_state(2))
        orders.obeyed()  # all is there but the name
        assert [info.step for info in sidesave.watch(run, timeout_s=0)] == [1]
        orders.release()
        assert next(watching).step == 2


def test_a_run_that_has_begun_anew_is_followed(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1, 2, 3, mib=0.1)
    watching = sidesave.watch(run, timeout_s=DEADLINE_S, poll_s=0.001)
    assert next(watching).step == 3
    shutil.rmtree(run)
    with ThreadPoolExecutor(1) as pool, sidesave.Checkpointer(run) as ckpt:
        waiting = pool.submit(next, watching)
        commit(ckpt, 7, mib=0.1)
        assert waiting.result(DEADLINE_S).step == 7


def test_what_is_older_than_the_last_one_given_is_not_given_when_that_is_gone(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1, 2, mib=0.1)
    watching = sidesave.watch(run, timeout_s=0)
    assert next(watching).step == 2
    shutil.rmtree(directory(run, 2))
    assert next(watching, None) is None


def test_a_directory_that_cannot_be_listed_is_an_error(run: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: str | int) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    run.mkdir()
    watching = sidesave.watch(run, timeout_s=DEADLINE_S)
    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(WriteError, match="cannot list"):
        next(watching)


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_run_in_a_store_is_watched(kind: str, tmp_path: Path):
    """A step that is saved again is new, as its files lie elsewhere; nothing is read while nothing
    changes.
    """
    (tmp_path / "buckets" / "bucket").mkdir(parents=True)
    with serving(tmp_path / "buckets") as server:
        url, options = (
            ("s3://bucket/run", server.options)
            if kind == "s3"
            else (f"file://{tmp_path}/run", None)
        )
        watching = sidesave.watch(url, timeout_s=DEADLINE_S, poll_s=0.01, storage_options=options)
        with sidesave.Checkpointer(url, storage_options=options) as ckpt:
            for step, overwrite in ((1, False), (2, False), (2, True)):
                ckpt.save(step, a_state(step, 0.1), overwrite=overwrite, blocking=True)
                info = next(watching)
                assert (info.step, info.path) == (step, f"{url}/step-{step:08d}")
            if kind == "s3":
                with contextlib.closing(_Look(url, options)) as look:
                    look.newest()
                    server.requests.clear()
                    look.newest()
                    assert (server.count("LIST"), server.count("GET")) == (2, 1), (
                        "docs/remote.md says so"
                    )
        server.requests.clear()
        assert (
            list(
                sidesave.watch(url, after=info, timeout_s=0.3, poll_s=0.01, storage_options=options)
            )
            == []
        )
        manifests = [
            request for request in server.requests if request.key.endswith("manifest.json")
        ]
        assert sum("/step-" in request.key for request in manifests) == (
            2 if kind == "s3" else 0
        ), "each once"


def test_a_step_that_is_copied_to_a_store_by_hand_is_new_when_it_is_whole(tmp_path: Path):
    with sidesave.Checkpointer(tmp_path / "run") as ckpt:
        commit(ckpt, 1, mib=0.1)
    (tmp_path / "store" / "step-00000001").mkdir(parents=True)
    files = sorted(
        (tmp_path / "run" / "step-00000001").iterdir(),
        key=lambda path: path.name == "manifest.json",
    )
    look = _Look(f"file://{tmp_path}/store", None)
    for path in files:
        assert look.newest() is None
        shutil.copy(path, tmp_path / "store" / "step-00000001" / path.name)
    assert look.newest() is not None


def test_wrong_arguments_of_watch_are_refused_at_once(run: Path):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 1, mib=0.1)
    wrong: list[dict[str, Any]] = [
        {"timeout_s": -1},
        {"timeout_s": "1"},
        {"timeout_s": float("nan")},
        {"poll_s": 0},
        {"poll_s": "1"},
    ]
    for bad in wrong:
        with pytest.raises(InvalidArgumentError, match="_s must be"):
            sidesave.watch(run, **bad)
    for place in ("http://host/run", directory(run, 1)):
        with pytest.raises(InvalidArgumentError):
            sidesave.watch(place)


def test_an_evaluator_loads_whatever_it_comes_to_of_a_run_that_keeps_one(traces: Traces, run: Path):
    last = campaigns.examples(40)
    with (
        Reader(traces, "evaluate", run, last) as one,
        Reader(traces, "evaluate", run, last) as other,
        manage_one(traces, run, total=last + 1) as trainer,
    ):
        for reader in (one, other):
            reader.expect("ready")
        train(trainer, 0)
        for reader in (one, other):
            assert reader.expect("evaluated") == ["0"]
        train(trainer, *range(1, last + 1))
        for reader in (one, other):
            for _ in reader.lines():
                pass
            assert reader.end() == 0, reader.complaints()
            assert reader.heard[-1] == f"evaluated {last}"
        trainer.hear("closed")
    assert [name for name in entries(run) if name.startswith("step-")][-1] == f"step-{last:08d}"


def test_the_readers_are_light(tmp_path: Path):
    code = (
        "import sys, sidesave; sidesave.hold, sidesave.watch; print(*({'torch', 'numpy'} & "
        "sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.stdout.split() == [], done.stderr


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    globals()[sys.argv[1]](*sys.argv[2:])


@pytest.mark.root
def test_what_an_earlier_session_has_left_to_a_reader_makes_room_when_a_save_needs_it(
    mount: Callable[..., Path],
):
    run = mount("-t", "tmpfs", "-o", "size=48m", "none") / "run"
    state = a_state(1, 16)
    with contextlib.ExitStack() as reading:
        with sidesave.Checkpointer(run) as earlier:
            for step in (0, 1):
                earlier.save(step, state, blocking=True)
            reading.enter_context(sidesave.hold(directory(run, 0)))
            earlier.delete(0).result(DEADLINE_S)
        with sidesave.Checkpointer(run) as later:  # which deletes nothing itself
            assert len(trash(run)) == 1
            reading.close()
            later.save(2, state, blocking=True)
            assert later.steps() == [1, 2]
    assert entries(run) == ["step-00000001", "step-00000002"]
