"""State to bytes in shared, pinned host memory. Knows no disk and no socket."""
