"""Input: from an image on disk to a batch on the device, and its rate."""
