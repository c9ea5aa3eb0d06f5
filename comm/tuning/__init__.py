"""Measuring a cluster, and choosing algorithm and fusion plan for it."""
