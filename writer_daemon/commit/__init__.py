"""What makes a checkpoint one: its commit, its recovery, and the coordination of ranks."""
