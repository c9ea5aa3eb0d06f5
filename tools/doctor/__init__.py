"""`bigbatch doctor`: find what limits a run on this machine, and measure the gain of each known speedup."""
