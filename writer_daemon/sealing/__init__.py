"""Encryption at rest: the cipher, and the keys of a run and of a checkpoint."""
