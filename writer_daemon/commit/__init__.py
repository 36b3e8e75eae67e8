"""Commits checkpoints, recovers them at start, and coordinates ranks."""
