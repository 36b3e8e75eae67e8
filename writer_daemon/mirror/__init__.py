"""The mirror: copies committed checkpoints one by one to a second place, under its own lease."""
