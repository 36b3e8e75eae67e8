"""Tensors out of files, and nothing about what they are for."""
