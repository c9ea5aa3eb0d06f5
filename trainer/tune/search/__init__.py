"""The search from coarse to fine."""
