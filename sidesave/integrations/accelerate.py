"""The state of an ``accelerate.Accelerator``. See docs/integrations/accelerate.md."""

from sidesave.client.integrations.accelerate import SidesaveState

__all__ = ["SidesaveState"]
