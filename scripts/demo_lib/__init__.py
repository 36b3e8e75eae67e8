"""The parts of `scripts/demo`: sizes here, then the text, the model, the trainer process, the
driver and the report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]  # One line of a trainer's log.


class DemoError(Exception):
    """A promise was not kept, or the demo could not go on. The message is for the reader of the
    terminal.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How big one demo is: the model, and how long it trains."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    save_every: int


SIZES = {
    # 1.8 million parameters, 22 MB with the state of the optimizer.
    "quick": Size(layers=4, width=192, heads=6, context=64, batch=4, steps=100, save_every=10),
    # 6.2 million parameters, 74 MB.
    "full": Size(layers=5, width=320, heads=8, context=64, batch=10, steps=200, save_every=20),
}
