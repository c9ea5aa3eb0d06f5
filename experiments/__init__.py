"""Many trainings by one engine: sweeps, searches, and reports of their results."""
