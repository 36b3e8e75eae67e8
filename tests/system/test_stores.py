"""Runs in an object store: deaths of trainer and daemon at any moment, two jobs, and one that wakes
up late.
"""

import json
import os
import signal

import campaigns
import pytest
from campaigns import Share
from elsewhere import OrdersElsewhere
from store_trainers import StoreTrainer
from stores import kill_both_again_and_again, strays
from trainers import (
    Traces,
    Trainer,
    a_state,
    check,
    commit,
    same,
)

import sidesave
from sidesave import Checkpointer

# Deaths -------------------------------------------------------------------------------------------


def test_nothing_that_was_committed_is_lost_where_both_are_killed_at_any_moment(
    url: str, traces: Traces, share: Share
) -> None:
    kill_both_again_and_again(url, traces, share.chance, share.rounds(4 if campaigns.quick else 12))


# Two jobs -----------------------------------------------------------------------------------------


def test_a_second_job_is_told_who_has_the_run_and_gets_it_afterwards(
    url: str, traces: Traces
) -> None:
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


@pytest.mark.parametrize("moment", ["got SAVE", "sends WRITTEN"])
def test_a_job_that_was_away_commits_nothing_when_it_wakes_and_is_told_so(
    url: str, traces: Traces, elsewhere: OrdersElsewhere, moment: str
) -> None:
    with StoreTrainer(
        traces, "save_beside_others", url, umask=-1, **elsewhere.environment
    ) as stale:
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
            told = [
                line.split(" ", 2)
                for line in stale.heard
                if line.startswith(("committed", "failed"))
            ]
            assert [(word, step) for word, step, *_ in told] == [("failed", "5"), ("failed", "6")]
            for *_, text in told:
                name, message = json.loads(text)
                assert name == "WriteError", message
                assert "passed to" in message or "taken" in message
            commit(ckpt, 7)
            assert same(ckpt.load(5), a_state(55))
        stale.go_on()
        stale.end()
    assert [info.step for info in sidesave.find(url)][-1] == 5, "the run has gone back there"
    assert all(sidesave.verify(info).ok for info in sidesave.find(url))
    assert sorted(info.step for info in sidesave.find(url)) == [1, 5, 7]
    assert strays(url) == []
    traces.check()
