"""Loaders: who reads, decodes and crops the images of a batch."""
