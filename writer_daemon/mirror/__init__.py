"""A second place for committed checkpoints: copied there one after the other, under that place's own lease."""
