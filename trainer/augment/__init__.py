"""Random changes of pictures: stateless draws, and what they do to a batch."""
