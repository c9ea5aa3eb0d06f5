"""Trainings that are disturbed on purpose, and what is kept of the promises: `make faults`."""
