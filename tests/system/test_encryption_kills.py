"""SIGKILL at every step of encrypted saves: no acknowledged save is lost, none is stored under another one's key."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import campaigns
import pytest
from encrypted import KEY, EncryptedTrainer, check, encryption, refuse_any, windows
from frozen_trainer import BASE
from frozen_trainer import a_state as a_frozen_state
from trainers import DEADLINE_S, Orders, Traces, a_state, commit, end, entries

import sidesave
from sidesave.errors import KeyMissingError

pytest.importorskip("cryptography", reason="needs cryptography: pip install 'sidesave[encryption]'")


@pytest.mark.drawn
@pytest.mark.parametrize("step", ["got SAVE", "os.mkdir", "open", "os.link", "os.rename", "sends WRITTEN"])
def test_daemon_killed_at_a_step_of_an_encrypted_save_the_save_commits(
    run: Path, orders: Orders, traces: Traces, step: str
):
    with sidesave.Checkpointer(run, encryption=encryption()) as ckpt:
        commit(ckpt, 0)
        orders.give("kill", starting_at=step, every_step=True)
        for number in (1, 2):
            commit(ckpt, number)
        assert orders.obeyed()[1].startswith(step)
    check(run, 0, 1, 2)
    traces.check()


@pytest.mark.parametrize("after", [1, 3, 4, 5])
@pytest.mark.parametrize("what", ["kill", "EIO"])
def test_a_save_that_is_tried_again_after_it_has_linked_commits(
    run: Path, orders: Orders, traces: Traces, what: str, after: int
):
    with sidesave.Checkpointer(run, encryption=encryption()) as ckpt:
        for step in range(3):
            if step == 1:
                orders.give(what, starting_at="os.link", after=after, every_step=what == "kill")
            ckpt.save(step, a_frozen_state(step)).committed.result(DEADLINE_S)
        orders.obeyed()
    for step in range(3):
        path = run / f"step-{step:08d}"
        assert sidesave.verify(path).ok
        assert sidesave.load(path, encryption=encryption())["model"]["base"]["w"].equal(BASE)
    traces.check()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_daemon_killed_at_every_step_of_encrypted_saves_that_link_every_save_commits(
    run: Path, orders: Orders, traces: Traces, capsys: pytest.CaptureFixture[str]
):
    killed_at: list[str] = []
    step = late = 0
    with sidesave.Checkpointer(run, encryption=encryption()) as ckpt:

        def save() -> None:
            ckpt.save(step, a_frozen_state(step)).committed.result(DEADLINE_S)

        for after in campaigns.numbers():
            save()  # by a daemon that links the next
            orders.give("kill", starting_at="got SAVE", after=after, every_step=True)
            for is_second in (False, True):  # the last step of a save may come after its commit is known
                late += is_second and not orders.was_obeyed()
                step += 1
                save()
            killed_at.append(orders.obeyed()[1])
            step += 1
            if late > 8 // campaigns.STRIDE:
                break
    assert any(each.startswith("os.link") for each in killed_at)
    assert entries(run) == [f"step-{each:08d}" for each in range(step)]
    for each in range(step):
        path = run / f"step-{each:08d}"
        assert sidesave.verify(path).ok
        state = sidesave.load(path, encryption=encryption())
        assert state["step"] == each and state["model"]["base"]["w"].equal(BASE)
    traces.check()
    with capsys.disabled():
        print(f"\n{len(killed_at)} kills of the daemon at every step of an encrypted save; {step} saves, none lost")


@pytest.mark.usefixtures("started_daemons")
@pytest.mark.parametrize("daemon_dies", [False, True], ids=["trainer", "both"])
def test_a_staged_save_is_finished_without_the_trainer_and_lost_with_both(
    run: Path, orders: Orders, traces: Traces, daemon_dies: bool
):
    """Its key is in the memory of both alone. What had not been acknowledged is lost with that, and nothing else."""
    with EncryptedTrainer(traces, "save_staged", run) as trainer:
        [pid] = trainer.expect("ready")
        orders.give("stop", starting_at="got SAVE", every_step=True)
        trainer.go_on()
        trainer.expect("staged")
        orders.obeyed()
        trainer.kill()
    if daemon_dies:
        end(int(pid))
    else:
        os.kill(int(pid), signal.SIGCONT)
    traces.await_ends()
    with pytest.raises(KeyMissingError):
        sidesave.Checkpointer(run)
    with sidesave.Checkpointer(run, encryption=encryption()) as ckpt:
        assert ckpt.latest_step() == (0 if daemon_dies else 1)
    check(run, *([0] if daemon_dies else [0, 1]))
    refuse_any(run, windows(KEY) | windows(a_state(1)["model"]["w"].numpy().tobytes()))


@pytest.mark.parametrize("starting_at", ["sends WRITTEN", "os.rename"])
def test_what_was_written_and_not_committed_is_recovered_without_a_key(
    run: Path, orders: Orders, traces: Traces, starting_at: str
):
    from commands import output

    with EncryptedTrainer(traces, "save_staged", run) as trainer:
        [pid] = trainer.expect("ready")
        orders.give("stop", starting_at=starting_at, every_step=True)
        trainer.go_on()
        trainer.expect("staged")
        orders.obeyed()
        trainer.kill()
    end(int(pid))
    traces.await_ends()
    assert "step-00000001: finished" in output("recover", run)
    check(run, 0, 1)


@pytest.mark.drawn
@pytest.mark.parametrize("code", ["ENOSPC", "EIO", "EDQUOT", "EROFS"])
@pytest.mark.parametrize("starting_at", ["os.mkdir", "open", "os.link"])
def test_storage_that_refuses_fails_one_save_or_none_and_the_next_one_commits(
    run: Path, orders: Orders, traces: Traces, code: str, starting_at: str
):
    with sidesave.Checkpointer(run, encryption=encryption()) as ckpt:
        commit(ckpt, 0)
        orders.give(code, starting_at=starting_at, after=1)
        failure = ckpt.save(1, a_state(1)).committed.exception(DEADLINE_S)
        orders.obeyed()
        assert failure is None or isinstance(failure, (sidesave.errors.WriteError, sidesave.errors.IntegrityError))
        commit(ckpt, 2)
        steps = [0, 2] if failure is not None else [0, 1, 2]
    check(run, *steps)
    traces.check()


@pytest.mark.usefixtures("started_daemons")
def test_the_daemon_leaves_no_core_dump(run: Path):
    """Its limit is 1: too little for a file, and a program that is piped cores gets none of it either."""

    def limit(pid: int | None) -> list[str]:
        lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
        return next(line for line in lines if line.startswith("Max core file size")).split()[4:6]

    before = _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if hard == 0:
        pytest.skip("nobody leaves core dumps here")
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        with sidesave.Checkpointer(run, encryption=encryption()) as ckpt:
            assert limit(ckpt.daemon_pid) == ["1", "1"]
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
