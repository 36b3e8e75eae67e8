"""The ranks of a session, and how they agree."""
