"""From an image on disk to a batch on the device, and what limits it."""
