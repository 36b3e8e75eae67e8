"""A state taken apart: tensors by name, and all else."""
