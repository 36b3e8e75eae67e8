"""Daemons that were left behind without the lease, on a file system where nobody can kill them, and
that go on.
"""

import dataclasses
import errno
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from campaigns import Share
from network_storage import ELSEWHERE, PERIOD_S, NetworkStorage
from sessions import (
    AFTER,
    BEFORE,
    NEW,
    OLD,
    MortalStorage,
    Session,
    entries,
    replacing,
    same,
    staged,
)
from trainers import (
    DEADLINE_S,
    ROOT,
    SUPPORT,
    Orders,
    Traces,
    await_end,
    check,
    kill_with_a_save_staged,
    pidfd_of,
)

import sidesave
from sidesave.client.loading import load as loader
from sidesave.client.reading.verify import verify
from sidesave.client.runs.finding import catalog_of
from sidesave.errors import SidesaveError, WriteError
from sidesave.writer_daemon.checkpoints.info import CheckpointInfo
from sidesave.writer_daemon.commit import commit
from sidesave.writer_daemon.commit.recovery import Recovery
from sidesave.writer_daemon.format.names import LEASE_DIRECTORY
from sidesave.writer_daemon.lease.lease import Lease
from sidesave.writer_daemon.lease.record import LeaseRecord

pytestmark = pytest.mark.usefixtures("end_all")

LAST = "e" * 16
SEEDS = itertools.count()


class PausingStorage(MortalStorage):
    """Before its ``at``-th operation, reading ones included, something else happens."""

    def __init__(self, root: Path, at: int, action: Callable[[], object]) -> None:
        super().__init__(root, 0)
        self.count = 0
        self._at = at
        self._action = action

    def live(self) -> None:
        self.count += 1
        if self.count - 1 == self._at:
            self._action()

    def list_directory(self, name: str) -> list[str]:
        self.live()
        return super().list_directory(name)

    def read(self, path: str, max_nbytes: int) -> bytes | None:
        self.live()
        return super().read(path, max_nbytes)


class RemoteSession(Session):
    """A session whose daemon is on another host and whose trainer has ended."""

    def _take_lease(self) -> Lease:
        self._lease_storage = NetworkStorage(str(self.root), seed=next(SEEDS))
        holder = LeaseRecord.current(self.name, os.getpid())
        holder = dataclasses.replace(holder, boot_id=ELSEWHERE, trainer_gone=True)
        return Lease(self._lease_storage, holder, 0.0, lambda: True, PERIOD_S)

    def pause(self, at: int, action: Callable[[], object]) -> None:
        self.writer.close()
        self.storage.close()
        self.storage = PausingStorage(Path(self.root), at, action)
        self.writer = self._writer()


def visible(root: Path) -> dict[int, int]:
    """The committed steps, each whole, with their sequences."""
    found = {info.step: info for info in catalog_of(str(root)).all()}
    for info in found.values():
        report = verify(info.path)
        assert report.ok, report.faults
        if info.step == 100:
            assert same(loader.load(info.path), BEFORE if info.sequence == 1 else AFTER)
    return {step: info.sequence for step, info in found.items()}


def next_start(root: Path) -> dict[int, int]:
    """What there is after one more start, and nothing else is."""
    session = RemoteSession(root, LAST)
    result = session.recover()
    assert result.left == ()
    session.end()
    found = visible(root)
    assert entries(root) == [f"step-{step:08d}" for step in sorted(found)]
    return found


@replacing
@pytest.mark.slow
def test_daemon_left_behind_at_any_operation_changes_nothing_any_more(
    tmp_path: Path, share: Share, replacing: bool
):
    def left_behind(at: int) -> bool:
        zombie, save = staged(
            root := tmp_path / f"{at}", lambda root: RemoteSession(root, OLD), replacing=replacing
        )
        successors: list[tuple[Session, dict[int, int], bool]] = []
        written = False

        def take_over() -> None:
            successor = RemoteSession(root, NEW)
            assert successor.recover().left == ()
            successors.append((successor, visible(root), written))

        zombie.pause(at, take_over)
        try:
            zombie.write(save)
            written = True
            zombie.commit(save)
        except SidesaveError:
            commit.reclaim(zombie.storage, save)
        if not successors:
            zombie.end()
            return True
        [(successor, seen, was_written)] = successors
        assert visible(root) == seen, "what the new session found is what there is"
        if was_written:
            assert seen == {100: 2}, "a save that was written is committed"

        late = zombie.stage(300, BEFORE, sequence=3)
        with pytest.raises(WriteError, match="the lease") as caught:
            zombie.write(late)
        assert caught.value.errno == errno.ESTALE  # and it dies before it can reclaim anything
        assert 300 not in visible(root)
        successor.save(200, AFTER, sequence=3)
        assert visible(root) == seen | {200: 3}
        successor.end()
        zombie.end()
        assert next_start(root) == seen | {200: 3}
        shutil.rmtree(root)
        return False

    for at in share.numbers():
        if left_behind(at):
            assert at > 30
            share.is_past(at)


@replacing
@pytest.mark.slow
def test_commit_that_was_checked_before_the_takeover_and_ends_in_the_midst_of_it(
    tmp_path: Path, replacing: bool
):
    """The one rename that is under way when the lease passes on happens before the recovery, or not
    at all.
    """

    def overtake(at: int) -> bool:
        zombie, save = staged(
            root := tmp_path / f"{at}", lambda root: RemoteSession(root, OLD), replacing=replacing
        )
        checked, go_on = threading.Event(), threading.Event()

        class Checked(PausingStorage):
            def rename_directory(self, source: str, target: str) -> None:
                if not checked.is_set():  # the first one after the check
                    checked.set()
                    assert go_on.wait(DEADLINE_S)
                super().rename_directory(source, target)

        zombie.write(save)
        zombie.storage.close()
        zombie.storage = Checked(root, -1, lambda: None)
        outcomes: list[CheckpointInfo | SidesaveError] = []

        def finish() -> None:
            try:
                outcomes.append(zombie.commit(save))
            except SidesaveError as error:
                outcomes.append(error)
                commit.reclaim(zombie.storage, save)

        thread = threading.Thread(target=finish)
        thread.start()
        assert checked.wait(DEADLINE_S)
        went_on = False

        def let_go_on() -> None:
            nonlocal went_on
            went_on = True
            go_on.set()
            thread.join(DEADLINE_S)

        successor = RemoteSession(root, NEW)
        successor.storage.close()
        successor.storage = PausingStorage(root, at, let_go_on)
        result: Recovery = successor.recover()
        within = went_on
        if not went_on:
            let_go_on()
        [outcome] = outcomes
        assert isinstance(outcome, CheckpointInfo) == (within and at < 3), (
            "only before the recovery has taken it away"
        )
        assert visible(root) in ([{100: 2}] if not result.left else [{100: 1}])
        successor.end()
        zombie.end()
        assert next_start(root) == {100: 2}, "it was written, so it is committed"
        shutil.rmtree(root)
        return not within

    at = 0
    while not overtake(at):
        at += 1
    assert at > 15


def test_daemon_left_behind_before_its_commit_learns_that_the_next_session_has_done_it(
    tmp_path: Path,
):
    zombie = RemoteSession(tmp_path, OLD)
    save = zombie.put(100, AFTER, sequence=2)
    successor = RemoteSession(tmp_path, NEW)
    assert successor.recover() == Recovery(committed=("step-00000100",), removed=())
    assert (zombie.commit(save).session, zombie.commit(save).sequence) == (OLD, 2)
    zombie.end()
    successor.lease.check()
    successor.end()
    assert next_start(tmp_path) == {100: 2}


# Real daemons -------------------------------------------------------------------------------------

_EXEC = """
import os, signal, sys
import sidesave
import trainers

if sys.argv[2] == "first":
    pid = sidesave.Checkpointer(sys.argv[1]).daemon_pid
    os.kill(pid, signal.SIGSTOP)
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[3], sys.argv[1], "second"])
with sidesave.Checkpointer(sys.argv[1], daemon=sidesave.DaemonOptions(takeover_timeout_s=1.0)) as ckpt:
    ckpt.save(1, trainers.a_state(1, 0.1))
"""  # noqa: E501


@pytest.mark.slow
def test_trainer_that_execs_itself_is_let_in_though_its_old_daemon_was_stopped(
    tmp_path: Path, traces: Traces
):
    environment = {**os.environ, "TMPDIR": traces.folder, "PYTHONPATH": f"{ROOT}:{SUPPORT}"}
    command = [sys.executable, "-c", _EXEC, tmp_path / "run", "first", _EXEC]
    subprocess.run(command, env=environment, check=True, timeout=DEADLINE_S)
    check(tmp_path / "run", 1, mib=0.1)
    traces.check()


def test_daemon_of_a_dead_trainer_that_is_asked_to_leave_does_so_in_the_midst_of_a_save(
    tmp_path: Path, orders: Orders, traces: Traces
):
    run = tmp_path / "run"
    pid = kill_with_a_save_staged(traces, run, orders, "hold", after=4)
    with pidfd_of(pid) as pidfd:
        (run / LEASE_DIRECTORY / "1.takeover").write_text('{"within_s": 0.0}')
        await_end(pidfd)
    record = LeaseRecord.from_bytes((run / LEASE_DIRECTORY / "1").read_bytes())
    assert record is not None
    assert (record.pid, record.trainer_gone, record.released) == (pid, True, True)
    assert len(list(run.glob(".step-00000005.*.partial"))) == 1, "what it had begun"
    with sidesave.Checkpointer(run) as ckpt:
        assert ckpt.latest_step() is None
        assert list(run.glob(".step-*")) == []
    traces.check()
