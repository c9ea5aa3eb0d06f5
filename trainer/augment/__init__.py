"""Random changes of images: stateless draws, and what they do to a batch."""
