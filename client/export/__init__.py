"""Exports checkpoints for other programs, and compares them."""
