"""Kernels of prototypes that need more than a page, or that several prototypes call."""
