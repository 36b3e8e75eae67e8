"""The training process's side: the classes and functions that users call."""
