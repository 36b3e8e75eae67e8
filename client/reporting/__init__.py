"""What saves cost, for people and for monitoring."""
