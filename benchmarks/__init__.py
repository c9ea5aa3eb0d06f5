"""Measurements and their commands; run from the root of a checkout, such as `python -m benchmarks.comm.run --list`."""
