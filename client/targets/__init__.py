"""The live objects that a checkpoint is loaded into, and how each kind takes its state."""
