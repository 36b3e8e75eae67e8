"""The lease of a run directory, whose holder may write to it."""
