"""What large batches need: LARS beside its peers, and each measure of the recipe left out once."""
