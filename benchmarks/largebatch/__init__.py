"""Methods for large batches: LARS beside its peers, and ablations of the recipe."""
