"""Many training runs by one engine: sweeps, searches, and reports of their results."""
