"""What ranks have saved and told, and what is left when they have closed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rank_trainers import Answer, Ranks, Stored, leftovers, stored
from stores import strays
from trainers import Traces, wait_until

import sidesave
from sidesave.client.runs.finding import catalog_of

Start = Callable[..., Ranks]
Place = Path | str
"""A run directory, or the URL of one."""


def visible(run: Place) -> list[int]:
    """The steps that there are, in the order of their commits."""
    return [info.step for info in catalog_of(str(run)).all()]


def read(run: Place, step: int) -> Stored:
    if isinstance(run, Path):
        return stored(run / f"step-{step:08d}")
    with tempfile.TemporaryDirectory() as folder:
        return stored(sidesave.fetch(f"{run}/step-{step:08d}", folder).path)


def left(run: Place) -> list[str]:
    """What is there besides checkpoints and what every run has."""
    return strays(run) if isinstance(run, str) else leftovers(run)


def is_clean(run: Place) -> None:
    """Of what was given up nothing is left but the reason, once rank 0 has tidied up."""
    if isinstance(run, str):  # where what a late rank has sent goes with the reason
        wait_until(
            lambda: {key.rpartition("/")[2] for key in strays(run)} <= {"abort.json", ".directory"}
        )
        return
    wait_until(lambda: all(name.endswith(".aborted") for name in leftovers(run)))
    wait_until(lambda: {path.name for path in run.glob(".step-*.aborted/*")} <= {"abort.json"})


def finish(ranks: Iterable[Any], run: Place, traces: Traces) -> None:
    """All ranks close, and leave nothing behind."""
    ranks = list(ranks)
    for rank in ranks:
        rank.tell("close")
    for rank in ranks:
        rank.answer().get()
    assert not (found := left(run)), found
    traces.check()


def errors(answers: Iterable[Answer]) -> list[str | None]:
    return [answer.error for answer in answers]
