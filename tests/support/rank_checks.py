"""What ranks have saved and told, and what is left when they have closed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rank_trainers import Answer, Ranks, Stored, leftovers, stored
from trainers import Traces, wait_until

from sidesave.client.runs import catalog

Start = Callable[..., Ranks]


def visible(run: Path) -> list[int]:
    """The steps that there are, in the order of their commits."""
    return [info.step for info in catalog.scan(str(run))]


def read(run: Path, step: int) -> Stored:
    return stored(run / f"step-{step:08d}")


def is_clean(run: Path) -> None:
    """Of what was given up nothing is left but the reason, once rank 0 has tidied up."""
    wait_until(lambda: all(name.endswith(".aborted") for name in leftovers(run)))
    wait_until(lambda: {path.name for path in run.glob(".step-*.aborted/*")} <= {"abort.json"})


def finish(ranks: Iterable[Any], run: Path, traces: Traces) -> None:
    """All ranks close, and leave nothing behind."""
    ranks = list(ranks)
    for rank in ranks:
        rank.tell("close")
    for rank in ranks:
        rank.answer().get()
    assert leftovers(run) == []
    traces.check()


def errors(answers: Iterable[Answer]) -> list[str | None]:
    return [answer.error for answer in answers]
