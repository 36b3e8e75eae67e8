"""The interface of a kind of device, and its implementations."""
