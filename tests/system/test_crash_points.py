"""SIGKILL of the daemon, the trainer and both: at every step of a start, of a recovery, of an end,
and at random.

`test_kills` kills the daemon at every step of a save, for each kind of state in each place.

Every time: no acknowledged save is lost, nothing that is visible is damaged, and after the next
start nothing else is left. A save is acknowledged when a trainer has heard that it is committed;
while only trainers die, when it is staged.
"""

import contextlib
import functools
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import campaigns
import pytest
from campaigns import Share
from kill_places import STEPS_OF_A_SAVE, without_path
from trainers import (
    DEADLINE_S,
    Orders,
    Traces,
    Trainer,
    a_state,
    entries,
    same,
    size_of,
    staging_memory,
)

import sidesave
from sidesave.client.runs.finding import catalog_of

_BUSY = pytest.mark.timeout(1200)
"""Hundreds of processes are started: that takes its time on a machine that does other things as
well.
"""
_PATIENCE = 9
"""After this many kills that came later than what a campaign is about it has gone through all of
it.
"""


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Says what a campaign has done, for the reader of the log."""

    def tell(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}")

    return tell


class Ledger:
    """Which saves of a run directory were acknowledged, and that they are there."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._verified: set[int] = set()
        self._dropped = 0
        self.acknowledged: set[int] = set()

    def __len__(self) -> int:
        """How many saves have been acknowledged, those that were dropped included."""
        return len(self.acknowledged) + self._dropped

    def hear(self, trainer: Trainer, *, daemon_lives: bool) -> None:
        """Note what a trainer has said before it died."""
        for line in trainer.lines():
            assert not line.startswith("lost"), (
                f"{line}, though only processes died: {trainer.complaints()}"
            )
        words = ("committed", "staged") if daemon_lives else ("committed",)
        said = [line.split(" ") for line in trainer.heard]
        self.acknowledged |= {int(arguments[0]) for word, *arguments in said if word in words}

    def check(self) -> None:
        """All that was acknowledged is there, and nothing that is not whole, bit for bit."""
        found = {info.step: info.path for info in catalog_of(os.fspath(self._run)).all()}
        assert entries(self._run) == [f"step-{step:08d}" for step in sorted(found)]
        assert self.acknowledged <= found.keys(), (
            f"lost: {sorted(self.acknowledged - found.keys())}"
        )
        for step in found.keys() - self._verified:
            report = sidesave.verify(found[step])
            assert report.ok, report.faults
            assert same(sidesave.load(found[step]), a_state(step, size_of(step))), (
                f"step {step} holds another state"
            )
            self._verified.add(step)

    def drop_old(self) -> None:
        """Remove all but the newest of what has been checked."""
        for step in sorted(self._verified)[:-20]:
            shutil.rmtree(self._run / f"step-{step:08d}")
            self._dropped += step in self.acknowledged
            self._verified.discard(step)
            self.acknowledged.discard(step)

    def start(self, *, again: bool = False) -> None:
        """Start once more, as the next run would; that cleans up and changes nothing else. Check
        all ``again``.
        """
        if again:
            self._verified.clear()
        with sidesave.Checkpointer(self._run) as ckpt:
            assert self.acknowledged <= set(ckpt.steps())
            self.check()
        self.check()


def commit(ckpt: sidesave.Checkpointer, step: int) -> None:
    ckpt.save(step, a_state(step, size_of(step))).committed.result(DEADLINE_S)


def check_is_clean(traces: Traces) -> None:
    """No process, no socket directory and no shared memory is left."""
    traces.check()
    assert staging_memory() == []


# Named steps: the daemon --------------------------------------------------------------------------


@pytest.mark.slow
@_BUSY
@pytest.mark.usefixtures("started_daemons")
def test_daemon_killed_at_every_step_of_its_start_and_recovery(
    run: Path,
    orders: Orders,
    traces: Traces,
    share: Share,
    tmp_path: Path,
    tell: Callable[[str], None],
):
    crashed = _crashed_run(tmp_path / "crashed", orders)
    killed_at: list[str] = []
    for after in share.numbers(patience=_PATIENCE):
        shutil.copytree(crashed, run)
        ledger = Ledger(run)
        orders.give("kill", starting_at="got BOOT", after=after, every_step=True)
        with sidesave.Checkpointer(run) as ckpt:
            if not orders.was_obeyed():
                share.is_past(after)
            assert ckpt.steps() == [1, 2, 4], "what was whole is finished, and nothing else is"
            commit(ckpt, 5)
            killed_at.append(without_path(orders.obeyed()[1]))
        ledger.acknowledged = {1, 2, 4, 5}
        ledger.check()
        traces.check()
        shutil.rmtree(run)
    steps = {
        "got BOOT",
        "sends HELLO",
        "sent HELLO",
        "open",
        "os.rename",
        "os.link",
        "os.rmdir",
        "sends READY",
    }
    assert steps | {"sent READY", "got ATTACH", "got SAVE"} <= set(killed_at) or not campaigns.WHOLE
    assert len(killed_at) > 30 or not campaigns.WHOLE
    tell(
        f"{len(killed_at)} kills of the daemon, at every step of its start and recovery; nothing "
        "lost"
    )


def _crashed_run(root: Path, orders: Orders) -> Path:
    """A run directory as a crash leaves it: step 1 is there, 2 whole, 3 begun, 4 in the midst of
    being replaced.

    Copied while the daemon is stopped, each at a step of its own.
    """
    living, crashed = root / "living", root / "run"

    def stopped(step: int, starting_at: str, after: int = 0) -> set[str]:
        """Copy what there is of a step when its save has come that far; of what kind that is."""
        orders.give("stop", starting_at=starting_at, after=after, every_step=True)
        handle = ckpt.save(step, a_state(step, size_of(step)), overwrite=step == 4)
        pid, _ = orders.obeyed()
        parts = [*living.glob(f".step-{step:08d}.*"), *living.glob(f"step-{step:08d}")]
        for path in parts:
            shutil.copytree(path, crashed / path.name)
        os.kill(pid, signal.SIGCONT)
        handle.committed.result(DEADLINE_S)
        return {path.suffix for path in parts}

    with sidesave.Checkpointer(living) as ckpt:
        commit(ckpt, 1)
        shutil.copytree(living, crashed)
        assert stopped(2, "sends WRITTEN") == {".partial"}
        assert stopped(3, "os.mkdir", after=9) == {".partial"}
        for after in range(1, 20):
            ckpt.save(4, a_state(104), overwrite=True).committed.result(DEADLINE_S)
            if stopped(4, "os.rename", after) == {".partial", ".replaced"}:
                return crashed
            for path in (*crashed.glob(".step-00000004.*"), *crashed.glob("step-00000004")):
                shutil.rmtree(path)
    raise AssertionError("the old step 4 was never out of the way with the new one still to come")


@pytest.mark.slow
@_BUSY
def test_daemon_killed_at_every_step_of_its_end(
    run: Path, orders: Orders, traces: Traces, share: Share
):
    ledger = Ledger(run)
    killed_at: list[str] = []
    for count in share.numbers():
        orders.give("kill", starting_at="got DRAIN", after=count, every_step=True)
        ckpt = sidesave.Checkpointer(run)
        handles = [
            ckpt.save(step, a_state(step, size_of(step))) for step in (2 * count, 2 * count + 1)
        ]
        ckpt.close()
        ledger.acknowledged |= {handle.committed.result(0).step for handle in handles}
        ledger.check()
        traces.check()
        if orders.was_obeyed():
            killed_at.append(orders.obeyed()[1])
        else:
            share.is_past(count)
    assert killed_at[:1] == ["got DRAIN"] or not campaigns.WHOLE


# Named steps: the trainer -------------------------------------------------------------------------

_STEPS_OF_A_TRAINER = {
    *(
        "tempfile.mkdtemp",
        "os.mkdir",
        "subprocess.Popen",
        "sends BOOT",
        "sent BOOT",
        "got HELLO",
        "got READY",
    ),
    *(
        "sends ATTACH",
        "sent ATTACH",
        "stages",
        "staged",
        "sends SAVE",
        "sent SAVE",
        "got PROGRESS",
        "got WRITTEN",
    ),
    *("got COMMITTED", "sends DRAIN", "sent DRAIN"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("started_daemons")
def test_trainer_killed_at_a_step_no_staged_save_is_lost(run: Path, orders: Orders, traces: Traces):
    ledger = Ledger(run)
    for count, step in enumerate(sorted(_STEPS_OF_A_TRAINER)):
        orders.give("kill", to="trainer", starting_at=step, every_step=True)
        with Trainer(traces, "keep_saving", run, 2 * count, 2, count % 2) as trainer:
            trainer.go_on()
            ledger.hear(trainer, daemon_lives=True)
        assert orders.obeyed()[1].startswith(step)
        traces.await_ends()
        if run.exists():
            ledger.check()
    assert len(ledger.acknowledged) >= 4, (
        "those that are killed while they close have said so; the others race"
    )
    ledger.start()
    check_is_clean(traces)


@pytest.mark.slow
@_BUSY
@pytest.mark.parametrize("follow", [0, 1], ids=["writing after staging", "writing while staging"])
@pytest.mark.usefixtures("started_daemons")
def test_trainer_killed_at_every_step_no_staged_save_is_lost(
    run: Path,
    orders: Orders,
    traces: Traces,
    share: Share,
    follow: int,
    tell: Callable[[str], None],
):
    ledger = Ledger(run)
    killed_at: list[str] = []
    for number, after in enumerate(share.numbers()):
        orders.give("kill", to="trainer", starting_at="", after=after, every_step=True)
        with Trainer(traces, "keep_saving", run, 2 * number, 2, follow) as trainer:
            trainer.go_on()
            ledger.hear(trainer, daemon_lives=True)
        traces.await_ends()
        if run.exists():
            ledger.check()
        ledger.start()
        check_is_clean(traces)
        if not orders.was_obeyed():
            assert trainer.heard[-1] == "closed"
            share.is_past(after)
            continue
        killed_at.append(without_path(orders.obeyed()[1]))
    steps = {"subprocess.Popen", "sends BOOT", "sent BOOT", "got HELLO", "got READY"}
    assert set(killed_at) >= steps or not campaigns.WHOLE
    assert len(killed_at) >= 25 or not campaigns.WHOLE, (
        "the order of the rest depends on how its threads take turns"
    )
    tell(
        f"{len(killed_at)} kills of the trainer, one a step; {len(ledger)} saves acknowledged, "
        "none lost"
    )


@pytest.mark.usefixtures("started_daemons")
def test_socket_directory_of_a_dead_trainer_goes_with_the_next_start_and_that_of_a_living_one_stays(
    run: Path, orders: Orders, traces: Traces
):
    def there() -> set[str]:
        return {path.name for path in Path(traces.folder).iterdir()}

    orders.give("kill", to="trainer", starting_at="subprocess.Popen", every_step=True)
    with Trainer(traces, "keep_saving", run, 1, 1, 0) as dead:
        dead.end()
    orders.obeyed()
    left = there()
    assert left, "nothing can remove it when its trainer dies here"
    orders.give("stop", to="trainer", starting_at="subprocess.Popen", every_step=True)
    with Trainer(traces, "keep_saving", run, 1, 1, 0) as stopped:
        orders.obeyed()
        theirs = there()
        assert len(theirs) == 1
        assert not theirs & left
        with sidesave.Checkpointer(f"{run}-other"):
            assert there() == theirs
        os.kill(stopped.pid, signal.SIGCONT)
        stopped.go_on()
        stopped.expect("closed")
    traces.check()


# Named steps: both --------------------------------------------------------------------------------


@pytest.mark.slow
@_BUSY
@pytest.mark.usefixtures("started_daemons")
def test_both_killed_at_every_step_of_the_daemon_no_committed_save_is_lost(
    run: Path, orders: Orders, traces: Traces, share: Share, tell: Callable[[str], None]
):
    ledger = Ledger(run)
    killed_at: list[str] = []
    for number, after in enumerate(share.numbers()):
        orders.give("stop", starting_at="got BOOT", after=after, every_step=True)
        with Trainer(traces, "keep_saving", run, 2 * number, 2, 0) as trainer:
            trainer.go_on()
            for _ in trainer.lines(until_readable=orders.reports):
                pass
            if orders.was_obeyed():
                pid, step = orders.obeyed()
                killed_at.append(without_path(step))
                for victim in (trainer.pid, pid) if len(killed_at) % 2 else (pid, trainer.pid):
                    os.kill(victim, signal.SIGKILL)
            ledger.hear(trainer, daemon_lives=False)
            trainer.end()
        traces.await_ends()
        if trainer.heard[-1:] == ["closed"]:
            share.is_past(after)
        ledger.start()
        check_is_clean(traces)
    steps = {*STEPS_OF_A_SAVE, "got BOOT", "sends HELLO", "sends READY", "got DRAIN"}
    assert set(killed_at) >= steps or not campaigns.WHOLE
    assert len(killed_at) > 60 or not campaigns.WHOLE
    ledger.start()
    check_is_clean(traces)
    tell(
        f"{len(killed_at)} kills of both, one a step of the daemon; {len(ledger)} saves "
        "acknowledged, none lost"
    )


# Random instants ----------------------------------------------------------------------------------


@pytest.mark.slow(minutes=2)
@_BUSY
@pytest.mark.usefixtures("orders", "started_daemons")
def test_kills_at_random_instants_lose_no_acknowledged_save(
    run: Path, traces: Traces, share: Share, seed: int, tell: Callable[[str], None]
):
    chance = random.Random(seed)
    kills: Counter[str] = Counter()
    ledger = Ledger(run)
    _kill_daemons(ledger, run, chance, kills, share.rounds(280, part=0.5))
    traces.check()
    _kill_trainers(ledger, run, chance, kills, share.rounds(230, part=0.5), traces)
    ledger.start(again=True)
    check_is_clean(traces)
    assert kills.total() >= 500 or not campaigns.WHOLE
    tell(
        f"{kills.total()} kills at random instants: {kills['daemon']} of the daemon, "
        f"{kills['trainer']} of the trainer, {kills['both']} of both; {len(ledger):,} saves "
        f"acknowledged, none lost; seed {seed}"
    )


def _kill_daemons(
    ledger: Ledger, run: Path, chance: random.Random, kills: Counter[str], points: Iterable[int]
) -> None:
    """Kill the daemons of one trainer, this process, while it saves without a pause."""
    rounds = 0  # of saves, all of them committed
    saved = threading.Condition()
    killed: set[int] = set()

    def after(some: int) -> bool:
        return rounds > some

    def go_round() -> None:
        for _ in points:
            for _ in range(chance.randint(1, 3)):
                time.sleep(chance.uniform(0, chance.choice([0.01, 0.15])))
                pid = ckpt.daemon_pid
                if pid is not None and pid not in killed:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        killed.add(pid)
            with (
                saved
            ):  # the saves that have seen these: one that has seen more than MAX_DEATHS is given up
                assert saved.wait_for(functools.partial(after, rounds), DEADLINE_S)

    with sidesave.Checkpointer(run) as ckpt:
        killer = threading.Thread(target=go_round)
        killer.start()
        step = 0
        while killer.is_alive():
            handles = [
                ckpt.save(step + count, a_state(step + count, size_of(step + count)))
                for count in range(3)
            ]
            for handle in handles:
                ledger.acknowledged.add(handle.committed.result(DEADLINE_S).step)
            step += len(handles)
            with saved:
                rounds += 1
                saved.notify()
        killer.join()
    kills["daemon"] += len(killed)
    ledger.check()
    ledger.drop_old()


def _kill_trainers(
    ledger: Ledger,
    run: Path,
    chance: random.Random,
    kills: Counter[str],
    points: Iterable[int],
    traces: Traces,
) -> None:
    """Kill trainers, some while they start and some together with their daemon, in either order."""
    first = max(ledger.acknowledged)
    for count in points:
        first += 1000
        victims = chance.choice(["trainer", "trainer", "daemon and trainer", "trainer and daemon"])
        with Trainer(traces, "keep_saving", run, first, 1000, count % 2) as trainer:
            if chance.random() < 0.25:
                trainer.go_on()
                time.sleep(chance.uniform(0, 0.4))
            else:
                trainer.expect("ready")
                ledger.check()  # after a start that followed a kill
                ledger.drop_old()
                trainer.go_on()
                time.sleep(chance.uniform(0, 0.08))
            if victims == "daemon and trainer":
                _kill_others(trainer, traces)
                time.sleep(chance.choice([0, chance.uniform(0, 0.03)]))
            trainer.signal(signal.SIGKILL)  # without waiting for its end
            if victims == "trainer and daemon":
                time.sleep(chance.choice([0, chance.uniform(0, 0.03)]))
                _kill_others(trainer, traces)
            ledger.hear(trainer, daemon_lives=victims == "trainer")
        traces.await_ends()
        kills["trainer" if victims == "trainer" else "both"] += 1


def _kill_others(trainer: Trainer, traces: Traces) -> None:
    for pid in traces.processes().keys() - {trainer.pid}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
