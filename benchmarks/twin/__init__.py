"""The simulator held against published rows, the paper and the emulated cluster."""
