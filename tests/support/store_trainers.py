"""Trainers that save to an object store: ``python store_trainers.py NAME ARGUMENTS``."""

from __future__ import annotations

import json
import sys
from typing import ClassVar

from trainers import DEADLINE_S, Trainer, a_state, say, wait_to_go_on


class StoreTrainer(Trainer):
    """A trainer of this module."""

    script: ClassVar[str] = __file__


def save_beside_others(url: str) -> None:
    """Commits step 1, then saves step 5 when told to, and step 6, and says what became of each."""
    import sidesave

    ckpt = sidesave.Checkpointer(url, failures=sidesave.FailureOptions(retries=1))
    ckpt.save(1, a_state(1), blocking=True)
    say("ready", ckpt.daemon_pid)
    wait_to_go_on()
    for step in (5, 6):
        try:
            handle = ckpt.save(step, a_state(step))
            say("staged", step)
            handle.committed.result(DEADLINE_S)
            say("committed", step)
        except sidesave.SidesaveError as error:
            say("failed", step, json.dumps([type(error).__name__, str(error)]))
    say("trained")
    wait_to_go_on()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
