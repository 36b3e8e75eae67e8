"""Bytes in shared memory to a durable checkpoint. Never imports torch."""
