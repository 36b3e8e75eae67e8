"""Kinds of state for campaigns of kills, and a trainer that saves them:
``python kill_states.py NAME ARGUMENTS``.

A new kind of state that can be saved belongs in ``KINDS``; all campaigns then go through it.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from row_tables import GrowingTable
from table_trainers import a_table, change
from trainers import DEADLINE_S, Trainer, a_state, same, say, size_of, wait_to_go_on

import sidesave
from sidesave import Checkpointer, Encryption, Frozen


class Kind(ABC):
    """A state that is determined by its step; steps are asked for in ascending order."""

    links: ClassVar[bool] = False
    """Whether each save links a file to that of the save before."""

    def options(self) -> dict[str, Any]:
        """Return the options of a checkpointer that saves it and of calls that load it."""
        return {}

    @abstractmethod
    def at(self, step: int) -> dict[str, Any]:
        """Return the state to save at this step."""

    @abstractmethod
    def is_at(self, path: str, step: int, options: dict[str, Any]) -> bool:
        """Return whether the checkpoint at ``path`` holds the state of this step, bit for bit."""


class _Plain(Kind):
    """Tensors and plain data, of several sizes."""

    def at(self, step: int) -> dict[str, Any]:
        return a_state(step, size_of(step))

    def is_at(self, path: str, step: int, options: dict[str, Any]) -> bool:
        return same(sidesave.load(path, **options), self.at(step))


class _WithFrozen(Kind):
    """A large part that never changes, and a small one that does."""

    links = True
    base = torch.arange(100_000.0)

    def at(self, step: int) -> dict[str, Any]:
        return {
            "model": {"base": Frozen({"w": self.base}), "adapter": torch.full((50,), step + 0.5)},
            "step": step,
        }

    def is_at(self, path: str, step: int, options: dict[str, Any]) -> bool:
        loaded = sidesave.load(path, **options)
        model = loaded["model"]
        is_base = torch.equal(model["base"]["w"], self.base)
        return is_base and (loaded["step"], model["adapter"].tolist()) == (step, [step + 0.5] * 50)


class _Encrypted(_WithFrozen):
    """The same under a key; its ciphertext is linked."""

    def options(self) -> dict[str, Any]:
        return {"encryption": Encryption(key=bytes(range(32)))}


class _Table(Kind):
    """A table of rows, of which each step changes a few, adds one and removes one."""

    links = True

    def __init__(self) -> None:
        self._saved, self._expected = _TableAt(), _TableAt()

    def at(self, step: int) -> dict[str, Any]:
        return {"users": self._saved.go_to(step), "step": step}

    def is_at(self, path: str, step: int, options: dict[str, Any]) -> bool:
        table = GrowingTable()
        loaded = sidesave.load(path, into={"users": table, "step": -1}, **options)
        return loaded["step"] == step and table.values() == self._expected.go_to(step).values()


class _TableAt:
    """A table and the step up to which it is trained."""

    def __init__(self) -> None:
        self._step, self._table = 0, a_table()

    def go_to(self, step: int) -> GrowingTable:
        if step < self._step:
            self._step, self._table = 0, a_table()
        for number in range(self._step + 1, step + 1):
            change(self._table, number)
        self._step = step
        return self._table


class _Subclass(Kind):
    """A tensor subclass that is made of several tensors, and a parameter that is tied to another
    one.
    """

    def at(self, step: int) -> dict[str, Any]:
        rows = [torch.full((count, 3), float(step)) for count in (2, 5, 1)]
        weight = torch.nn.Parameter(torch.full((300, 4), step / 3))
        jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
        return {"jagged": jagged, "model": {"weight": weight, "tied": weight}, "step": step}

    def is_at(self, path: str, step: int, options: dict[str, Any]) -> bool:
        loaded, expected = sidesave.load(path, **options), self.at(step)
        if type(loaded["jagged"]) is not type(expected["jagged"]) or loaded["step"] != step:
            return False
        ours, theirs = loaded["jagged"], expected["jagged"]
        is_jagged = torch.equal(ours.values(), theirs.values()) and torch.equal(
            ours.offsets(), theirs.offsets()
        )
        return is_jagged and all(
            torch.equal(each, expected["model"]["tied"]) for each in loaded["model"].values()
        )


KINDS: dict[str, type[Kind]] = {
    "plain": _Plain,
    "frozen": _WithFrozen,
    "table": _Table,
    "encrypted": _Encrypted,
    "subclass": _Subclass,
}


class KillTrainer(Trainer):
    """One of the functions below, in a process."""

    script: ClassVar[str] = __file__


def save_staged(kind: str, url: str, options: str, count: str) -> None:
    """Commit this many steps, then, when told to go on, stage one more."""
    state = KINDS[kind]()
    ckpt = Checkpointer(url, **json.loads(options), **state.options())
    for step in range(int(count)):
        ckpt.save(step, state.at(step)).committed.result(DEADLINE_S)
    say("ready", ckpt.daemon_pid)
    wait_to_go_on()
    ckpt.save(int(count), state.at(int(count))).staged.result(DEADLINE_S)
    say("staged")
    wait_to_go_on()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
