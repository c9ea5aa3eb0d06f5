"""From an image on disk to a batch: decoding, reading, starting, and what of it a training waits for."""
