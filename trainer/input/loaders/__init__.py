"""Loaders: read, decode and crop the images of a batch."""
