"""The way from a checkpointer to what it is made of, for the rest of sidesave; needs no torch to be imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidesave.client.checkpointer import Checkpointer
    from sidesave.client.saving.saver import Saver


def saver_of(checkpointer: Checkpointer) -> Saver:
    """What a checkpointer saves with, and through it the session that it runs on."""
    return checkpointer._saver  # pyright: ignore[reportPrivateUsage] - the one way to it
