"""One file per launcher."""
