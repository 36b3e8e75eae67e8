"""The lease of a run directory: who may write to it."""
