"""Training loops that a search for the pace of writes is told of."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sidesave.client.internals import saver_of
from sidesave.client.saving.pace import SAVES, PaceSearch

if TYPE_CHECKING:
    import sidesave
    from sidesave.client.saving.pace import Pacer

STEP_S = 0.1
FULL_S = 0.5
NBYTES = 1 << 30
STEPS = 200


class Loop:
    """A training loop that saves every ``STEPS`` steps, to a disk that takes ``FULL_S`` for ``NBYTES``.

    ``cost`` says how many seconds a save costs the steps in all, by how many times ``FULL_S`` it is written in.
    """

    def __init__(self, cost: Callable[[float], float], clock: int = 1, now: float = 0.0) -> None:
        self.cost = cost
        self.search = PaceSearch()
        self.clock = clock
        self.now = now
        self.factors: list[int] = []
        """By how much each write was slowed."""

    def step(self, seconds: float = STEP_S) -> None:
        self.now += seconds
        self.search.stepped(self.clock, self.now)

    def save(self, *, waited: bool = False, steps: int = STEPS) -> None:
        called = self.now
        self.now += 0.05
        self.search.began(1, called, NBYTES)
        self.search.called(called, self.now)
        if waited:
            self.search.lift()
        write_s = NBYTES / self.search.pace if self.search.pace else FULL_S
        factor = write_s / FULL_S
        self.factors.append(round(factor))
        slowed_s = STEP_S / (1 - min(0.9, self.cost(factor) / write_s))
        end = called + write_s
        for _ in range(steps):
            beside = self.now < end
            if beside and self.now + slowed_s >= end:
                self.search.ended(1, end)
            self.step(slowed_s if beside else STEP_S)

    def run(self, saves: int) -> list[int]:
        self.factors = []
        for _ in range(saves):
            self.save()
        return self.factors


def slowed(checkpointer: sidesave.Checkpointer, optimizer: object = None) -> Pacer:
    """Have ``checkpointer`` write as slowly as it ever does, as if a day of such steps had shown that this pays."""
    pacer = saver_of(checkpointer).session.pacer
    loop = Loop(lambda factor: 0.4 / factor, id(optimizer), time.monotonic() - 86_400)
    loop.run(1 + 2 * SAVES)
    for seconds in (1.0, 10.0, 100.0):  # a pace lapses after some of these
        for _ in range(64):
            loop.step(seconds)
    pacer.search = loop.search
    return pacer
