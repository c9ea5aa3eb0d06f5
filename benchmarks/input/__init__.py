"""From an image on disk to a batch: decoding, reading, starting, and the wait of training for it."""
