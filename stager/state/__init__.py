"""Flattening a state into tensors by name, and all else."""
