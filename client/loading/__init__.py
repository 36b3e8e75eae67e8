"""A checkpoint into live objects."""
