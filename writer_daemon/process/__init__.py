"""The daemon: its loop, its state machine and its threads."""
