"""Many trainings by one engine: a sweep of cases and values, a search, and what they came to."""
