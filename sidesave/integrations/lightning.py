"""A ``CheckpointIO`` for Lightning, with which its trainers save through sidesave.

See docs/integrations/lightning.md.
"""

from sidesave.client.integrations.lightning import (
    SidesaveCheckpointIO,
    SidesaveModelParallelStrategy,
)

__all__ = ["SidesaveCheckpointIO", "SidesaveModelParallelStrategy"]
