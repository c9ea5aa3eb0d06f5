"""From a config to the objects of a run: the only room that knows all others."""
