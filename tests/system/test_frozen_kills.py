"""SIGKILL at every step of saves that link what has not changed: no acknowledged save is lost, none is damaged."""

import os
import signal
from pathlib import Path

import campaigns
import pytest
import torch
from frozen_trainer import BASE, FrozenTrainer, a_state, commit
from trainers import DEADLINE_S, Orders, Traces, entries

import sidesave


def check(run: Path, steps: range) -> None:
    assert entries(run) == [f"step-{step:08d}" for step in steps]
    for step in steps:
        path = run / f"step-{step:08d}"
        assert sidesave.verify(path).ok
        loaded = sidesave.load(path)
        assert torch.equal(loaded["model"]["base"]["w"], BASE)
        assert (loaded["step"], loaded["model"]["adapter"][0].item()) == (step, step + 0.5)


def is_linked(run: Path, step: int) -> bool:
    return (run / f"step-{step:08d}" / "model@frozen.rank-00000.safetensors").stat().st_nlink > 1


@pytest.mark.parametrize("after", [0, 1, 2])
def test_daemon_killed_at_a_link_the_save_commits_and_the_next_ones_link_again(
    run: Path, orders: Orders, traces: Traces, after: int
):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 0)
        orders.give("kill", starting_at="os.link", after=after, every_step=True)
        for step in (1, 2, 3):
            commit(ckpt, step)
        orders.obeyed()
    check(run, range(4))
    assert is_linked(run, 3)
    traces.check()


@pytest.mark.drawn
@pytest.mark.parametrize("code", ["EXDEV", "EPERM", "EMLINK", "EIO", "ENOSPC"])
def test_a_link_that_fails_costs_no_save(run: Path, orders: Orders, traces: Traces, code: str):
    with sidesave.Checkpointer(run) as ckpt:
        commit(ckpt, 0)
        orders.give(code, starting_at="os.link")
        handle = ckpt.save(1, a_state(1))
        failure = handle.committed.exception(DEADLINE_S)
        orders.obeyed()
        assert (failure is None) == (code != "ENOSPC")
        if failure is not None:
            commit(ckpt, 1)
        commit(ckpt, 2)
    check(run, range(3))
    assert is_linked(run, 2)
    traces.check()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_daemon_killed_at_every_step_of_a_save_that_links_every_save_commits(
    run: Path, orders: Orders, traces: Traces, capsys: pytest.CaptureFixture[str]
):
    killed_at: list[str] = []
    step = late = 0
    with sidesave.Checkpointer(run) as ckpt:
        for after in campaigns.numbers():
            commit(ckpt, step)  # by a daemon that links the next
            orders.give("kill", starting_at="got SAVE", after=after, every_step=True)
            for is_second in (False, True):  # the last step of a save may come after its commit is known
                late += is_second and not orders.was_obeyed()
                step += 1
                commit(ckpt, step)
            killed_at.append(orders.obeyed()[1])
            step += 1
            if late > 8 // campaigns.STRIDE:
                break
    assert any(each.startswith("os.link") for each in killed_at)
    check(run, range(step))
    traces.check()
    with capsys.disabled():
        print(f"\n{len(killed_at)} kills of the daemon at every step of a save that links; {step} saves, none lost")


@pytest.mark.usefixtures("started_daemons")
def test_trainer_killed_with_a_save_staged_that_copied_only_what_is_not_frozen_it_commits(
    run: Path, orders: Orders, traces: Traces
):
    with FrozenTrainer(traces, "save_frozen", run, 3) as trainer:
        [pid] = trainer.expect("ready")
        orders.give("stop", starting_at="got SAVE", every_step=True)
        trainer.go_on()
        trainer.expect("staged")
        orders.obeyed()
        trainer.kill()
    os.kill(int(pid), signal.SIGCONT)
    traces.await_ends()
    with sidesave.Checkpointer(run):
        pass
    check(run, range(4))
