"""Sums over all ranks: short functions over a transport and its groups of ranks."""
