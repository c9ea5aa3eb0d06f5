"""Compare the simulator with published rows, the paper and the emulated cluster."""
