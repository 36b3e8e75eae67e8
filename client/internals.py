"""Access to the internals of a checkpointer for the rest of sidesave; importing this does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidesave.client.checkpointer import Checkpointer
    from sidesave.client.saving.saver import Saver


def saver_of(checkpointer: Checkpointer) -> Saver:
    """The saver of a checkpointer, which also leads to the session that it runs on."""
    return checkpointer._saver  # pyright: ignore[reportPrivateUsage] - the one way to it
