"""Random changes of images: stateless draws, and the augmentations of a batch that use them."""
