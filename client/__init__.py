"""In the training process: what a user calls."""
