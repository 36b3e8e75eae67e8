"""Committed checkpoints: what is known of one, and how it is read."""
