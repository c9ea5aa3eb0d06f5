"""The critical batch of a run, from its gradient noise scale."""
