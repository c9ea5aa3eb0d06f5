"""This host and its GPU: cores, memory, energy."""
