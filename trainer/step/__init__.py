"""The training step: from a batch to new weights."""
