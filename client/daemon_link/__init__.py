"""The writer daemon of this process: its start, its connection, and its open requests."""
