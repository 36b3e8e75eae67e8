"""Turns bytes in shared memory into a durable checkpoint. Never imports torch."""
