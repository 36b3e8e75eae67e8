"""A ``CheckpointManager`` at a time for tests, and what is said of the run that it belongs to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainers import Orders

import sidesave
from sidesave.client.runs.finding import catalog_of

Manage = Callable[..., sidesave.CheckpointManager]


@contextlib.contextmanager
def managers_of(run: str | os.PathLike[str]) -> Iterator[Manage]:
    """Makes managers of one run, one after the other, and closes the last one."""
    made: list[sidesave.CheckpointManager] = []

    def manage(state: dict[str, Any] | None = None, **options: Any) -> sidesave.CheckpointManager:
        for manager in made:
            manager.close()
        made[:] = [sidesave.CheckpointManager(run, {"x": 0} if state is None else state, **options)]
        return made[0]

    try:
        yield manage
    finally:
        for manager in made:
            manager.close()


def release_when_waited_for(checkpointer: sidesave.Checkpointer, orders: Orders) -> None:
    """Let a save that is held go on once a call waits for the saves that it has found under way."""
    changed: Any = checkpointer.session.saves._changed

    def wait_for(*args: Any) -> object:
        del changed.wait_for
        orders.release()
        return changed.wait_for(*args)

    changed.wait_for = wait_for


def steps(run: Path) -> list[int]:
    """The steps that there are, in the order of their commits."""
    return [info.step for info in catalog_of(str(run)).all()]


def damage(run: Path, step: int) -> None:
    """Change a bit of a checkpoint's plain data."""
    file = run / f"step-{step:08d}" / "objects.rank-00000.msgpack"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
