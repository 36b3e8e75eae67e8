"""Encrypted runs: their keys, trainers of them, and what must be nowhere on storage."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import rank_trainers
import trainers
from rank_trainers import Actor, Rank
from trainers import DEADLINE_S, a_state, follow_orders, same, say, wait_to_go_on

KEY = bytes(range(32))
OTHER = bytes(range(1, 33))


def encryption(key: bytes = KEY) -> Any:
    import sidesave

    return sidesave.Encryption(key=key)


def check(run: str | os.PathLike[str], *steps: int, key: bytes = KEY) -> None:
    """These steps of ``a_state`` are all there is: whole without a key, and bit-exact with it."""
    import sidesave

    found = {info.step: info.path for info in sidesave.find(run)}
    assert sorted(found) == sorted(steps)
    for step, path in found.items():
        report = sidesave.verify(path)
        assert report.ok, report.faults
        assert same(sidesave.load(path, encryption=encryption(key)), a_state(step)), (
            f"step {step} holds another state"
        )


def windows(data: bytes) -> set[bytes]:
    """All that is 16 bytes long in it, at every fourth byte."""
    return {data[at : at + 16] for at in range(0, len(data) - 15, 4)}


def refuse_any(folder: Path, secrets: set[bytes]) -> int:
    """No file below holds any of these, each of 16 bytes, at any place; how many bytes were looked
    at.
    """
    looked = 0
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes() + os.fsencode(path.name)
            looked += len(data)
            odd = {data[at : at + 16] for at in range(len(data) - 15)} & secrets
            assert not odd, f"{path} tells of what is encrypted"
    return looked


class EncryptedTrainer(trainers.Trainer):
    """One of the functions below, in a process."""

    script: ClassVar[str] = __file__


def save_staged(run: str) -> None:
    """Saves a step, and, when told to, one more, of which it says when it is staged."""
    import sidesave

    follow_orders("trainer")
    ckpt = sidesave.Checkpointer(run, encryption=encryption())
    ckpt.save(0, a_state(0)).committed.result(DEADLINE_S)
    say("ready", ckpt.daemon_pid)
    wait_to_go_on()
    ckpt.save(1, a_state(1)).staged.result(DEADLINE_S)
    say("staged")
    wait_to_go_on()


class EncryptedRank(Rank):
    """A rank that is told its key."""

    script = __file__


class EncryptedActor(Actor):
    """What such a rank can be told to do."""

    def open(self, run: str, *, keys: list[str | None], **options: Any) -> dict[str, Any]:
        """Make a checkpointer, with the key of this rank."""
        key = keys[self.rank % len(keys)]
        given = None if key is None else encryption(bytes.fromhex(key))
        return super().open(run, encryption=given, **options)


if __name__ == "__main__":
    if sys.argv[1] in globals():
        globals()[sys.argv[1]](*sys.argv[2:])
    else:
        rank_trainers.obey(EncryptedActor, *sys.argv[1:])
