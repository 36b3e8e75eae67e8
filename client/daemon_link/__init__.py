"""The writer daemon of this process: its start, its connection, what it was asked for."""
