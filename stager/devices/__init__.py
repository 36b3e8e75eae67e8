"""What a kind of device must offer, and the kinds there are."""
