"""From a gradient to its sum over all ranks."""
