"""Find what fits into a device's memory, and a remedy if a run does not."""
