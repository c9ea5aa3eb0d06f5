"""Loaders: who reads, decodes and crops the pictures of a batch."""
