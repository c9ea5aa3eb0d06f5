"""Checkpoints: saving, loading, resuming, and the facts that they keep."""
