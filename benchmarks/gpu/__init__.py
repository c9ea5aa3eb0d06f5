"""One GPU: speed, the limits of memory and of kernels, and peers; small where there is none."""
