"""Observers of a run: what looks at its steps and reports without changing them, loaded if its key is set."""
