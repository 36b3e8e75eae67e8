"""Trainers of ``transformers`` that save with sidesave. See docs/integrations/transformers.md."""

from sidesave.client.integrations.transformers import SidesaveTrainerMixin

__all__ = ["SidesaveTrainerMixin"]
