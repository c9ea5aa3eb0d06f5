"""Faults on purpose: short trainings that are disturbed at a drawn moment, and what became of the promises."""
