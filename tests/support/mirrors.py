"""A trainer that saves to a run with a mirror, and what a mirror must hold."""

import contextlib
import os
import sys
from typing import ClassVar

import trainers
from trainers import a_state, check_step, say, wait_to_go_on


class MirrorTrainer(trainers.Trainer):
    """One of the functions below, in a process."""

    script: ClassVar[str] = __file__


def committed_in(place: str) -> dict[int, str]:
    """The steps of a mirror, and where they are."""
    from sidesave.client.runs.finding import catalog_of
    from sidesave.errors import CheckpointNotFoundError

    with contextlib.suppress(CheckpointNotFoundError):
        return {info.step: info.path for info in catalog_of(place).all()}
    return {}


def check_mirror(place: str, *steps: int, mib: float = 1) -> None:
    """These steps are there, and whatever else is there is whole: each was saved from
    ``a_state(step, mib)``.
    """
    check_there(place, {*steps}, mib=mib, others=True)


def check_there(place: str, steps: set[int], *, mib: float = 1, others: bool = False) -> None:
    """These steps are there, each whole; and ``others``, whatever they are."""
    found = committed_in(place)
    assert steps <= found.keys(), (steps, sorted(found))
    for step, path in found.items():
        if step in steps or others:
            check_step(path, step, mib)


def save_and_mirror(
    run: str, place: str, bandwidth: str, first: str, count: str, mib: str = "1"
) -> None:
    """Saves so many steps, tells of each that is mirrored, and waits."""
    import sidesave

    ckpt = sidesave.Checkpointer(
        run, mirror=sidesave.MirrorOptions(place=place, bandwidth=int(bandwidth) or None)
    )
    say("ready", ckpt.daemon_pid)
    for step in range(int(first), int(first) + int(count)):
        handle = ckpt.save(step, a_state(step, float(mib)))
        handle.mirrored.add_done_callback(
            lambda done, step=step: say("mirrored", step) if done.exception() is None else None
        )
        handle.committed.result()
    say("saved")
    wait_to_go_on()
    os._exit(0)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
