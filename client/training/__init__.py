"""The manager: when to save, what to keep, what to go on with."""
