"""A ``CheckpointIO`` for Lightning, by which its trainers save with sidesave. See docs/integrations/lightning.md."""

from sidesave.client.integrations.lightning import SidesaveCheckpointIO, SidesaveModelParallelStrategy

__all__ = ["SidesaveCheckpointIO", "SidesaveModelParallelStrategy"]
