"""From pictures on disk to batches: order and draws are pure functions, loaders only carry them out."""
