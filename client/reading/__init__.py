"""Reads tensors from files."""
