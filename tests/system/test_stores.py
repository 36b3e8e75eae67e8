"""Runs in an object store through deaths: of the daemon at any moment, of the trainer, of both, and late awakenings."""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import campaigns
import pytest
from elsewhere import OrdersElsewhere
from hostile_bytes import SEED
from store_trainers import StoreTrainer
from stores import strays
from trainers import (
    DEADLINE_S,
    Orders,
    Traces,
    Trainer,
    a_state,
    await_end,
    check,
    commit,
    daemon,
    end,
    kill_with_a_save_staged,
    pidfd_of,
    same,
    size_of,
    wait_until,
)

import sidesave
from sidesave import Checkpointer
from sidesave.client.daemon_link import connection

KILLS, MANY_KILLS = 30, 200
SMALL = 0.2


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/run"


@pytest.fixture
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MAX_BACKOFF_S", 0.05)


# The daemon ---------------------------------------------------------------------------------------------------------


def kill_at_random(url: str, kills: int) -> None:
    """Save step after step, killing the daemon within so many of them, each at a moment drawn by chance."""
    chance = random.Random(SEED)
    longest_s, killed = 0.0, 0
    learning = 3
    with Checkpointer(url) as ckpt:
        for step in range(1, learning + kills + 1):
            wait_until(lambda killed=killed: ckpt.daemon_pid not in (None, killed))
            pid = daemon(ckpt)
            began = time.monotonic()
            handle = ckpt.save(step, a_state(step, SMALL))
            if step > learning:  # of the first ones it is learnt how long a save takes
                time.sleep(chance.random() * longest_s)
                end(pid)
                killed = pid
            assert handle.committed.result(DEADLINE_S).step == step
            if step <= learning:
                longest_s = max(longest_s, time.monotonic() - began)
    check(url, *range(1, learning + kills + 1), mib=SMALL)
    assert strays(url) == []


@pytest.mark.usefixtures("quick_restarts", "seed")
def test_no_save_is_lost_by_the_death_of_a_daemon_at_any_moment(url: str) -> None:
    kill_at_random(url, KILLS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("quick_restarts", "seed")
def test_no_save_is_lost_by_the_deaths_of_two_hundred_daemons(url: str) -> None:
    kill_at_random(url, MANY_KILLS)


# The trainer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["got SAVE", "sends WRITTEN", "sends COMMITTED"])
def test_what_a_dead_trainer_had_staged_is_committed_by_its_daemon(
    url: str, traces: Traces, orders: Orders, moment: str
) -> None:
    pid = kill_with_a_save_staged(traces, url, orders, starting_at=moment, every_step=True)
    with pidfd_of(pid) as pidfd:
        os.kill(pid, signal.SIGCONT)
        await_end(pidfd)
    check(url, 5)
    assert strays(url) == []
    traces.check()


@pytest.mark.parametrize("moment", ["got SAVE", "sends WRITTEN", "sends COMMITTED"])
def test_what_both_have_left_is_finished_or_removed_by_the_next_session(
    url: str, traces: Traces, orders: Orders, moment: str
) -> None:
    pid = kill_with_a_save_staged(traces, url, orders, starting_at=moment, every_step=True)
    end(pid)
    with Checkpointer(url) as ckpt:
        saved = moment != "got SAVE"
        assert ckpt.recovered == (("step-00000005",) if moment == "sends WRITTEN" else ())
        assert ckpt.latest_step() == (5 if saved else None)
        commit(ckpt, 6)
    check(url, *([5] if saved else []), 6)
    assert strays(url) == []
    traces.check()


@pytest.mark.usefixtures("seed")
def test_nothing_that_was_committed_is_lost_where_both_are_killed_at_any_moment(url: str, traces: Traces) -> None:
    chance = random.Random(SEED)
    committed: set[int] = set()
    first = 1
    for _ in range(campaigns.length(12)):
        with Trainer(traces, "keep_saving", url, first, 6, 0) as trainer:
            [pid] = trainer.expect("ready")
            trainer.go_on()
            until = chance.randrange(1, 12)  # of what it says
            for count, _line in enumerate(trainer.lines(), 1):
                if count == until:
                    break
            killed = [trainer.kill, lambda pid=int(pid): end(pid)]
            chance.shuffle(killed)
            for kill in killed:
                with contextlib.suppress(ProcessLookupError):  # a daemon whose trainer was first may be through
                    kill()
            committed |= {int(line.split(" ")[1]) for line in trainer.heard if line.startswith("committed ")}
        with Checkpointer(url) as ckpt:
            first = (ckpt.latest_step() or 0) + 1
        found = {info.step: info for info in sidesave.find(url)}
        assert committed <= found.keys()
        for step, info in found.items():
            assert sidesave.verify(info).ok
            assert same(sidesave.load(info), a_state(step, size_of(step)))
        assert strays(url) == []
    traces.check()


# Two jobs -----------------------------------------------------------------------------------------------------------


def test_a_second_job_is_told_who_has_the_run_and_gets_it_afterwards(url: str, traces: Traces) -> None:
    with Trainer(traces, "compete", url) as first, Trainer(traces, "compete", url) as second:
        first.go_on()
        _, pid = first.expect("won")
        second.expect("started")
        second.go_on()
        assert f"daemon {pid} on" in " ".join(second.expect("refused"))
        first.go_on()
        first.expect("closed")
        second.go_on()
        assert second.expect("won")[0] == "2"
        second.go_on()
        second.expect("closed")
    check(url, 1, 2)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[OrdersElsewhere]:
    orders = OrdersElsewhere(tmp_path / "elsewhere")
    yield orders
    orders.close()


@pytest.mark.parametrize("moment", ["got SAVE", "sends WRITTEN"])
def test_a_job_that_was_away_commits_nothing_when_it_wakes_and_is_told_so(
    url: str, traces: Traces, elsewhere: OrdersElsewhere, moment: str
) -> None:
    with StoreTrainer(traces, "save_beside_others", url, umask=-1, **elsewhere.environment) as stale:
        [pid] = stale.expect("ready")
        elsewhere.give("stop", starting_at=moment, every_step=True)
        stale.go_on()
        stale.expect("staged")
        assert elsewhere.obeyed()[0] == int(pid)
        stale.signal(signal.SIGSTOP)  # the machine stands still, and so does its trainer
        with Checkpointer(url) as ckpt:
            assert ckpt.latest_step() == (1 if moment == "got SAVE" else 5)
            if moment != "got SAVE":
                assert ckpt.recovered == ("step-00000005",)
            ckpt.save(5, a_state(55), overwrite=True, blocking=True)
            os.kill(int(pid), signal.SIGCONT)
            stale.signal(signal.SIGCONT)
            stale.expect("trained")
            told = [line.split(" ", 2) for line in stale.heard if line.startswith(("committed", "failed"))]
            assert [(word, step) for word, step, *_ in told] == [("failed", "5"), ("failed", "6")]
            for *_, text in told:
                name, message = json.loads(text)
                assert name == "WriteError", message
                assert "passed to" in message
            commit(ckpt, 7)
            assert same(ckpt.load(5), a_state(55))
        stale.go_on()
        stale.end()
    assert [info.step for info in sidesave.find(url)][-1] == 5, "the run has gone back there"
    assert all(sidesave.verify(info).ok for info in sidesave.find(url))
    assert sorted(info.step for info in sidesave.find(url)) == [1, 5, 7]
    assert strays(url) == []
    traces.check()
