"""`bigbatch sweep`: the same experiment on many numbers of ranks, batches and settings."""

SOME_FAILED = 3
"""Exit code where some points failed."""
