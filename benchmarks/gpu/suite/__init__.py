"""The cases of benchmarks.gpu, and their shared parts."""
