"""What fits into the memory of a device, and what to do where it does not."""
