"""A trainer of a state of which the largest part is frozen."""

import sys
from typing import Any, ClassVar

import torch
import trainers
from trainers import DEADLINE_S, follow_orders, say, wait_to_go_on

import sidesave
from sidesave import Frozen

BASE = torch.arange(100_000.0)


class FrozenTrainer(trainers.Trainer):
    """One of the functions below, in a process."""

    script: ClassVar[str] = __file__


def a_state(step: int) -> dict[str, Any]:
    return {"model": {"base": Frozen({"w": BASE}), "adapter": torch.full((50,), step + 0.5)}, "step": step}


def commit(ckpt: sidesave.Checkpointer, step: int) -> None:
    ckpt.save(step, a_state(step)).committed.result(DEADLINE_S)


def save_frozen(run: str, count: str) -> None:
    """Saves so many steps, and, when told to, one more, of which it says when it is staged."""
    follow_orders("trainer")
    ckpt = sidesave.Checkpointer(run)
    for step in range(int(count)):
        commit(ckpt, step)
    say("ready", ckpt.daemon_pid)
    wait_to_go_on()
    ckpt.save(int(count), a_state(int(count))).staged.result(DEADLINE_S)
    say("staged")
    wait_to_go_on()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
