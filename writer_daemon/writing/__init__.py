"""Staged bytes into durable files."""
