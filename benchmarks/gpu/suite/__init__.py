"""The cases of benchmarks.gpu, and what they share."""
