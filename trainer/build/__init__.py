"""Build the objects of a run from its config: the only room that imports all others."""
