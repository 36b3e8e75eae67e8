"""Checkpoints for other programs, and compared with each other."""
