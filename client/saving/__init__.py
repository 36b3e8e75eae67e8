"""One save, from the call to its commit."""
