"""The cost of saves, for people and for monitoring."""
