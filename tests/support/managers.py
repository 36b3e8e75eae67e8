"""A ``CheckpointManager`` at a time for tests, and what is said of the run that it belongs to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainers import Orders

import sidesave
from sidesave.client.internals import saver_of
from sidesave.client.runs import catalog

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

    yield manage
    for manager in made:
        manager.close()


def release_when_waited_for(checkpointer: sidesave.Checkpointer, orders: Orders) -> None:
    """Let a save that is held go on once somebody waits for all that is under way."""
    saves = saver_of(checkpointer).session.saves
    hurry = saves.hurry

    def release() -> None:
        saves.hurry = hurry
        orders.release()

    saves.hurry = release


def steps(run: Path) -> list[int]:
    """The steps that there are, in the order of their commits."""
    return [info.step for info in catalog.scan(str(run))]


def damage(run: Path, step: int) -> None:
    """Change a bit of a checkpoint's plain data."""
    file = run / f"step-{step:08d}" / "objects.rank-00000.msgpack"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
