"""Find the microbatches that fit a device's memory, and a remedy if a run does not fit."""
