"""`bigbatch sweep`: the same experiment on many numbers of ranks, batches and settings."""
