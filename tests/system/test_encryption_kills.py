"""Encrypted saves whose trainer or daemon is killed: what needs the key, what does not, and that
nothing leaks.

`test_kills` kills the daemon at every step of them.
"""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
from encrypted import KEY, EncryptedTrainer, check, encryption, refuse_any, windows
from trainers import Orders, Traces, a_state, end

import sidesave
from sidesave.errors import KeyMissingError

pytest.importorskip("cryptography", reason="needs cryptography: pip install 'sidesave[encryption]'")


@pytest.mark.usefixtures("started_daemons")
@pytest.mark.parametrize("daemon_dies", [False, True], ids=["trainer", "both"])
def test_a_staged_save_is_finished_without_the_trainer_and_lost_with_both(
    run: Path, orders: Orders, traces: Traces, daemon_dies: bool
):
    """Its key is in the memory of both alone. What had not been acknowledged is lost with that, and
    nothing else.
    """
    with EncryptedTrainer(traces, "save_staged", run) as trainer:
        pid = trainer.stage(orders, starting_at="got SAVE", every_step=True)
        trainer.kill()
    if daemon_dies:
        end(pid)
    else:
        os.kill(pid, signal.SIGCONT)
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
        pid = trainer.stage(orders, starting_at=starting_at, every_step=True)
        trainer.kill()
    end(pid)
    traces.await_ends()
    assert "step-00000001: finished" in output("recover", run)
    check(run, 0, 1)


@pytest.mark.usefixtures("started_daemons")
def test_the_daemon_leaves_no_core_dump(run: Path):
    """Its limit is 1: too little for a file, and a program that is piped cores gets none of it
    either.
    """

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
