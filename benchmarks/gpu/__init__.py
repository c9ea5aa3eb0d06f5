"""One GPU: speed, limits of memory and kernels, and peers; small if there is no GPU."""
