"""A checkpoint manager for torchtitan: its trainer saves with sidesave.

See docs/integrations/torchtitan.md.
"""

from sidesave.client.integrations.torchtitan import SidesaveCheckpointManager

__all__ = ["SidesaveCheckpointManager"]
