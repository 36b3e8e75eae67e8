"""What a run goes on with: its own newest checkpoint, or, as a new run, parts of those of others.

Of several ranks all read the same checkpoints, or none is given anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sidesave.client.checkpointer import Checkpointer
from sidesave.client.loading.load import Loaded
from sidesave.client.loading.sources import Source, read_sources
from sidesave.client.options import LoadOptions
from sidesave.client.runs.info import CheckpointInfo
from sidesave.client.training import metadata
from sidesave.errors import StateMismatchError


def load_bank(
    checkpointer: Checkpointer, into: dict[str, Any], sources: Sequence[Source], options: LoadOptions
) -> None:
    """Give the items ``into`` what other runs have saved; one that no source has stays as it is. Blocking.

    To be called by all ranks; raises what one of them raises on all of them.
    """
    world, paths = checkpointer.session.world, [""]
    pickled = options.get("allow_pickle")
    with world.agreeing("finds no source"):
        if world.rank == 0:
            paths = [source.locate() for source in sources]
    if world.size > 1:
        paths = world.gather("sources", paths if world.rank == 0 else None)[0]
    with world.agreeing("cannot read the sources"):
        found = [dataclasses.replace(source, path=path, step=None) for source, path in zip(sources, paths, strict=True)]
        loaded = read_sources(
            found,
            into,
            strict=False,
            verify=options.get("verify", True),
            allow_pickle=checkpointer.session.allow_pickle if pickled is None else pickled,
            rank=world.rank,
            size=world.size,
        )
        if options.get("strict", True):
            _refuse_half(loaded, into)
    with world.agreeing("cannot give its objects what it has read of the sources"):
        loaded.apply()


def _refuse_half(loaded: Loaded, items: Collection[str]) -> None:
    """An item of the state may begin as it was made, and not with a part of what it needs."""
    begun = tuple(f"{name}." for name in items if loaded.has(name))
    half = [fqn for fqn in loaded.missing if fqn.startswith(begun)]
    if half:
        more = f" and {len(half) - 5} more" if len(half) > 5 else ""
        raise StateMismatchError(
            f"the sources lack {', '.join(half[:5])}{more}, and have the rest; nothing was loaded. Add a source "
            "that has it, exclude the item from all, or pass strict=False"
        )


@dataclass(frozen=True, slots=True)
class Resumed:
    """The checkpoint of its own that a run has gone on with."""

    step: int
    is_seed: bool
    is_ephemeral: bool


def what_was_loaded(checkpointer: Checkpointer) -> Resumed:
    """What kind of checkpoint ``checkpointer`` has just loaded; the same on all ranks, which all have to ask."""
    parent = checkpointer.session.lineage.parent
    assert parent is not None
    world = checkpointer.session.world
    seen: list[bool] | None = None
    with world.agreeing("cannot read what it has loaded"):
        if world.rank == 0:
            info = loaded_checkpoint(checkpointer)
            seen = [metadata.is_seed(info), metadata.is_ephemeral(info)]
    is_seed, is_ephemeral = world.gather("what was loaded", seen)[0] if world.size > 1 else (seen or [])
    return Resumed(parent[0], is_seed, is_ephemeral)


def loaded_checkpoint(checkpointer: Checkpointer) -> CheckpointInfo:
    """The checkpoint that ``checkpointer`` has loaded last, as it stands there now.

    Raises:
        CheckpointNotFoundError: It has been deleted, or replaced by another save of its step.
    """
    parent = checkpointer.session.lineage.parent
    assert parent is not None
    return checkpointer.session.run.read(*parent)
