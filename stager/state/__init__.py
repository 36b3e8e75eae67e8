"""Flattening a state into named tensors and plain data."""
