"""What a run directory holds."""
