"""What a user says of an item of the state when several ranks save together: one for all, or each its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Replicated:
    """All ranks hold this alike: tensors in it are written once, by some of them, and every rank gets it back.

    It is believed, and not compared. For the plain state dict of a model that all ranks hold whole, for instance.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class PerRank:
    """Each rank holds its own: all of it is written by every rank, and comes back to the same rank.

    A rank that had none gets what rank 0 had. For modules and optimizers whose plain tensors differ between ranks.
    """

    value: Any
