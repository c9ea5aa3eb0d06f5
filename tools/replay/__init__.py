"""Compare two runs, and compute a step of one again."""
